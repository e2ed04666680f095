package redis

// Headers of settled records, which are most of what a server keeps, are deflated:
// memory is what limits a Redis. What is still in flight is about to be written again
// and is not worth it. The dictionary makes headers shorter that look like it, and means
// nothing else; it belongs to the format of a record.

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"strings"
	"sync"

	stateless "github.com/klauspost/compress/flate"
)

// worthwhile is the least length of a header that is deflated.
const worthwhile = 128

// The first byte of a header that is not empty.
const (
	headerPlain    = 0
	headerDeflated = 1
)

// The best is the end of a dictionary, from where it is the fewest bits back.
const dictionary = `"disputed":true"refundOwed":true"hold":1,"state":"Registered""state":"Retryable""state":"Rejected"` +
	`"state":"Released""state":"Failed""state":"InFlight""providerReference":","created":"2026-01-01T00:00:00.000000Z",` +
	`"changed":"2026-01-01T00:00:00.000000Z"}{"namespace":"","tool":"","caller":"system:serviceaccount:","callerUID":"",` +
	`"intentID":"","state":"Succeeded","scope":["/order/"],"lineage":"/call-","amount":{"value":"","currency":"USD"},` +
	`"recipient":"","fingerprint":"sha256:0123456789abcdef","identityHash":"sha256:","amountHash":"sha256:",` +
	`"recipientHash":"sha256:`

// inflaters are used again: one has 44 KiB, which is more than all else of a Get.
var inflaters = sync.Pool{New: func() any { return flate.NewReaderDict(strings.NewReader(""), []byte(dictionary)) }}

// inflate reads deflated text to its end.
func inflate(kept string) ([]byte, error) {
	r := inflaters.Get().(io.Reader)
	defer inflaters.Put(r)
	if err := r.(flate.Resetter).Reset(strings.NewReader(kept), []byte(dictionary)); err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// packHeader is a header as it is kept.
func packHeader(header []byte, settled bool) string {
	if len(header) == 0 {
		return ""
	}
	if settled && len(header) >= worthwhile {
		// The standard library's writer first clears 640 KiB, for a text of less than one.
		var b bytes.Buffer
		b.WriteByte(headerDeflated)
		if err := stateless.StatelessDeflate(&b, header, true, []byte(dictionary)); err == nil && b.Len() <= len(header) {
			return b.String()
		}
	}
	return string([]byte{headerPlain}) + string(header)
}

// unpackHeader is a header as it was given.
func unpackHeader(kept string) ([]byte, error) {
	if kept == "" {
		return nil, nil
	}
	switch rest := kept[1:]; kept[0] {
	case headerPlain:
		return []byte(rest), nil
	case headerDeflated:
		header, err := inflate(rest)
		if err != nil {
			return nil, fmt.Errorf("%w: header of a record: %w", errDamaged, err)
		}
		return header, nil
	default:
		return nil, fmt.Errorf("%w: header of a record begins with %d", errDamaged, kept[0])
	}
}
