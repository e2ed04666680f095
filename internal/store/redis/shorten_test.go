package redis

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// A header is read as it was written, however long and whatever it holds, and one like
// those of the guard is kept in much less than half.
func TestHeadersAreReadAsWritten(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, length := range []int{0, 1, 127, 128, 129, 700, 4095, 32766, 32767, 32768, 70_000, 1 << 20} {
		noise, alike := make([]byte, length), make([]byte, length)
		for i := range noise {
			noise[i] = byte(random.Uint32())
			alike[i] = dictionary[(i*7+i/300)%len(dictionary)]
		}
		zeros, text := make([]byte, length), bytes.Repeat([]byte(dictionary), length/len(dictionary)+1)[:length]
		for name, header := range map[string][]byte{"noise": noise, "letters": alike, "zeros": zeros, "text": text} {
			for _, settled := range []bool{false, true} {
				t.Run(fmt.Sprint(name, length, settled), func(t *testing.T) {
					kept := packHeader(header, settled)
					if len(kept) > length+1 {
						t.Errorf("it takes %d bytes", len(kept))
					}
					if got, err := unpackHeader(kept); err != nil || !bytes.Equal(got, header) {
						t.Errorf("%d bytes came back, %v", len(got), err)
					}
				})
			}
		}
	}
	header := []byte(`{"namespace":"support","tool":"refund","caller":"system:serviceaccount:support:agent","callerUID":"f3b1c9de-2d0a-4f4a-8a54-7c39f0a0c5a1",` +
		`"intentID":"k-8123","state":"Succeeded","scope":["account/acct-0412/order/o-99123"],"lineage":"s-44123/call-3","amount":{"value":"12.34","currency":"USD"},` +
		`"created":"2026-11-30T04:50:00.123456Z","changed":"2026-11-30T04:50:00.223456Z"}`)
	if kept := packHeader(header, true); len(kept) > len(header)*45/100 {
		t.Errorf("a header of %d bytes is kept in %d", len(header), len(kept))
	}
	for cut := range 3 {
		kept := packHeader(header, true)
		if _, err := unpackHeader(kept[:len(kept)-1-cut*20]); err == nil {
			t.Error("a header that lacks its end was read")
		}
	}
	if got, err := unpackHeader(packHeader(header, true)); err != nil || !bytes.Equal(got, header) {
		t.Errorf("after damaged ones: %q, %v", got, err)
	}
}
