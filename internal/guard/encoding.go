// This file writes records down and reads them: each struct has one list of its fields
// that serves both ways, so that what is written is what is read.
//
// The form is that of Protocol Buffers' wire, behind a byte that says which lists it
// follows, and a checksum: a record that lost its end must not be taken for one that has
// no more to tell. Fields come in the order of their numbers and only if they are not zero; what
// this version does not know is passed over. A number that was used is never used for
// anything else.

package guard

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// recordFormat begins every header and body.
	recordFormat = 1
	// contentAt is where their fields begin, behind it and the checksum.
	contentAt = 1 + crc32.Size
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fields lists those of a header that the key does not say (see decodeHeader).
func (h *header) fields(c *coder) {
	text(c, 1, &h.CallerUID)
	text(c, 2, &h.State)
	texts(c, 3, &h.Scope)
	text(c, 4, &h.Lineage)
	pointer(c, 5, &h.Amount, money)
	text(c, 6, &h.Recipient)
	c.hash(7, &h.Fingerprint)
	c.hash(8, &h.IdentityHash)
	c.hash(9, &h.AmountHash)
	c.hash(10, &h.RecipientHash)
	integer(c, 11, &h.Hold)
	text(c, 12, &h.ProviderReference)
	c.yes(13, &h.RefundOwed)
	c.yes(14, &h.Disputed)
	c.time(15, &h.Created)
	c.time(16, &h.Changed)
}

func (b *body) fields(c *coder) {
	one(c, 1, &b.Policy, (*Policy).fields)
	integer(c, 2, &b.Generation)
	text(c, 3, &b.ProviderKey)
	list(c, 4, &b.Attempts, (*attempt).fields)
	integer(c, 5, &b.BudgetFrom)
	pointer(c, 6, &b.Current, (*hold).fields)
	list(c, 7, &b.Ended, (*hold).fields)
	list(c, 8, &b.Passed, (*passed).fields)
	pointer(c, 9, &b.Response, (*Response).fields)
	c.time(10, &b.RetryAt)
	c.time(11, &b.ReleasedAt)
	c.time(12, &b.SettledAt)
	text(c, 13, &b.SettledAs)
	integer(c, 14, &b.Winner)
	c.yes(15, &b.MarkedPaid)
	c.yes(16, &b.MarkedFailed)
	c.yes(17, &b.Expired)
	text(c, 18, &b.Memory)
	c.yes(19, &b.Imported)
	c.yes(20, &b.PaidByHand)
	pointer(c, 30, &b.Checks, (*checks).fields)
	c.bytes(34, &b.Kept)
	text(c, 35, &b.NotKept)
	c.time(36, &b.ResumeAt)
	text(c, 37, &b.ResumesOver)
	integer(c, 40, &b.PaidAttempts)
	list(c, 41, &b.Charges, (*charge).fields)
	integer(c, 42, &b.SpendPass)
	pointer(c, 50, &b.Registration, (*Registration).fields)
	integer(c, 60, &b.RulePass)
	integer(c, 61, &b.KeyWindow)
}

func (p *Policy) fields(c *coder) {
	text(c, 1, &p.Budget)
	integer(c, 2, &p.Window)
	c.yes(3, &p.HoldExactMatch)
	c.yes(4, &p.IgnoreLineage)
	integer(c, 5, &p.TTL)
	integer(c, 6, &p.Timeout)
	integer(c, 7, &p.SettleAfter)
	integer(c, 8, &p.MaxHeld)
	integer(c, 9, &p.MaxHeldPerCaller)
	pointer(c, 10, &p.Retry, (*RetryBudget).fields)
	pointer(c, 20, &p.Check, (*CheckPolicy).fields)
	integer(c, 21, &p.Lookalike)
	pointer(c, 22, &p.Resume, (*ResumePolicy).fields)
	integer(c, 30, &p.MaxInFlight)
	integer(c, 31, &p.MaxInFlightPerScope)
	p.Rate.fields(c, 32, 33)
	p.RatePerCaller.fields(c, 34, 35)
	c.yes(50, &p.RegisteredOnly)
	integer(c, 60, &p.RenewFor)
	integer(c, 70, &p.HoldFor)
	integer(c, 71, &p.MaxRegisteredPerCaller)
}

func (g *Registration) fields(c *coder) {
	c.time(1, &g.At)
	text(c, 2, &g.Quote)
	c.time(3, &g.ValidUntil)
	text(c, 4, &g.Face)
	c.bytes(5, &g.Shown)
	c.yes(6, &g.Bound)
}

func (b *RetryBudget) fields(c *coder) {
	integer(c, 1, &b.Attempts)
	integer(c, 2, &b.Initial)
	integer(c, 3, &b.Max)
	integer(c, 4, &b.Factor)
}

func (r *Rate) fields(c *coder, every, burst protowire.Number) {
	integer(c, every, &r.Every)
	integer(c, burst, &r.Burst)
}

func (g *charge) fields(c *coder) {
	text(c, 1, &g.Budget)
	text(c, 2, &g.Name)
	text(c, 3, &g.Currency)
	text(c, 4, &g.Per)
	integer(c, 5, &g.Window)
	integer(c, 6, &g.Payments)
	c.time(7, &g.Until)
	integer(c, 8, &g.From)
}

func (a *attempt) fields(c *coder) {
	integer(c, 1, &a.Number)
	integer(c, 2, &a.Generation)
	text(c, 3, &a.Nonce)
	text(c, 4, &a.Outcome)
	c.time(5, &a.Started)
	c.time(6, &a.LeaseEnd)
	integer(c, 7, &a.Lease)
	integer(c, 8, &a.Grace)
	integer(c, 9, &a.SettleAfter)
	c.time(10, &a.Ended)
	c.yes(11, &a.Excused)
	c.yes(12, &a.Denied)
	c.yes(13, &a.Counted)
	c.yes(14, &a.Accepted)
	c.yes(15, &a.Lost)
	c.yes(16, &a.Late)
	c.yes(17, &a.SentLate)
	c.time(18, &a.LateUntil)
	text(c, 19, &a.Reference)
	pointer(c, 20, &a.Response, (*Response).fields)
	integer(c, 21, &a.Status)
	text(c, 22, &a.Detail)
	c.yes(23, &a.Resumed)
	c.time(24, &a.Wall)
	text(c, 60, &a.Claim)
	integer(c, 61, &a.Renewals)
}

func (h *hold) fields(c *coder) {
	integer(c, 1, &h.Number)
	text(c, 2, &h.Nonce)
	texts(c, 3, &h.Reasons)
	list(c, 4, &h.Matches, (*Match).fields)
	integer(c, 5, &h.MatchCount)
	text(c, 6, &h.Watermark)
	c.yes(7, &h.Lineage)
	c.time(8, &h.At)
	c.yes(9, &h.Waiting)
	c.time(10, &h.WaitingUntil)
	text(c, 11, &h.Cause)
	text(c, 12, &h.End)
	text(c, 13, &h.Decision)
	text(c, 14, &h.By)
	text(c, 15, &h.Words)
	text(c, 16, &h.Effect)
	c.time(17, &h.EndedAt)
	c.yes(20, &h.Lookalike)
}

func (m *Match) fields(c *coder) {
	text(c, 1, &m.Caller)
	text(c, 2, &m.CallerUID)
	text(c, 3, &m.Tool)
	text(c, 4, &m.IntentID)
	text(c, 5, &m.Relation)
	pointer(c, 6, &m.Amount, money)
	text(c, 7, &m.State)
	c.time(8, &m.At)
}

func (p *passed) fields(c *coder) {
	text(c, 1, &p.Watermark)
	c.yes(2, &p.Lineage)
	text(c, 3, &p.Budget)
	c.yes(4, &p.Lookalike)
}

func (r *Response) fields(c *coder) {
	integer(c, 1, &r.Status)
	c.lines(2, &r.Header)
	c.bytes(3, &r.Body)
	integer(c, 4, &r.Size)
	c.hash(5, &r.Digest)
	c.yes(6, &r.Truncated)
}

func money(m *intent.Money, c *coder) {
	text(c, 1, &m.Value)
	text(c, 2, &m.Currency)
}

// line is one header of an answer.
type line struct {
	name   string
	values []string
}

func (l *line) fields(c *coder) {
	text(c, 1, &l.name)
	texts(c, 2, &l.values)
}

func (h *header) pack() []byte {
	c := coder{out: make([]byte, contentAt, 384)}
	h.fields(&c)
	return seal(c.out)
}

func (b *body) pack() []byte {
	size := 128 + 128*len(b.Attempts)
	size += len(b.Kept)
	if b.Response != nil {
		size += 256 + len(b.Response.Body)
	}
	c := coder{out: make([]byte, contentAt, size)}
	b.fields(&c)
	return seal(c.out)
}

// seal writes what comes before the fields.
func seal(b []byte) []byte {
	b[0] = recordFormat
	binary.BigEndian.PutUint32(b[1:], crc32.Checksum(b[contentAt:], castagnoli))
	return b
}

func decodeHeader(r *store.Record) (h header, err error) {
	err = h.decode(r)
	return h, err
}

func (h *header) decode(r *store.Record) error {
	return h.decodeWith(new(coder), r)
}

func (h *header) decodeWith(c *coder, r *store.Record) error {
	if err := unpackWith(c, r.Header, h, (*header).fields); err != nil {
		return fmt.Errorf("%w: header of %q: %w", ErrCorrupt, r.Key, err)
	}
	var parts [4]string
	if !splitPrefixed(r.Key, parts[:]) {
		return fmt.Errorf("%w: key %q", ErrCorrupt, r.Key)
	}
	h.Namespace, h.Tool, h.Caller, h.IntentID = parts[0], parts[1], parts[2], parts[3]
	return nil
}

func decode(r *store.Record) (*record, error) {
	if r == nil {
		return nil, nil
	}
	rec := &record{key: r.Key, version: r.Version}
	var c coder
	if err := rec.header.decodeWith(&c, r); err != nil {
		return nil, err
	}
	if err := unpackWith(&c, r.Body, &rec.body, (*body).fields); err != nil {
		return nil, fmt.Errorf("%w: body of %q: %w", ErrCorrupt, r.Key, err)
	}
	return rec, nil
}

// unpack reads what pack wrote. Bytes that v keeps are those of b.
func unpack[T any](b []byte, v *T, fields func(*T, *coder)) error {
	return unpackWith(new(coder), b, v, fields)
}

// unpackWith is unpack with a coder that was used before.
func unpackWith[T any](c *coder, b []byte, v *T, fields func(*T, *coder)) error {
	switch {
	case len(b) < contentAt:
		return fmt.Errorf("it has %d bytes", len(b))
	case b[0] != recordFormat:
		return fmt.Errorf("its format is %d, and only %d can be read: another version has written it", b[0], recordFormat)
	case binary.BigEndian.Uint32(b[1:]) != crc32.Checksum(b[contentAt:], castagnoli):
		return errors.New("it is not as it was written: its checksum differs")
	}
	*c = coder{reads: true, in: b, text: string(b), at: contentAt, end: len(b)}
	c.message(func() { fields(v, c) })
	return c.err
}

// coder goes through lists of fields, and writes or reads what they name.
type coder struct {
	// out is what was written.
	out []byte

	reads bool
	// in is what is read, and text the same: strings are parts of it.
	in   []byte
	text string
	// The message that is read goes on at at, behind the tag of field num, up to end. num
	// is 0 at its end.
	at, end int
	num     protowire.Number
	kind    protowire.Type
	err     error
}

// fail ends the reading.
func (c *coder) fail(err error) {
	if c.err == nil {
		c.err = fmt.Errorf("at byte %d: %w", c.at, err)
	}
	c.num, c.at = 0, c.end
}

// message reads the message between at and end.
func (c *coder) message(fields func()) {
	c.num = 0
	c.next()
	fields()
	for c.num != 0 {
		c.skip()
	}
}

// next reads a tag.
func (c *coder) next() {
	before := c.num
	if c.num = 0; c.at == c.end {
		return
	}
	num, kind, n := protowire.ConsumeTag(c.in[c.at:c.end])
	switch {
	case n < 0:
		c.fail(protowire.ParseError(n))
	case num < before:
		c.fail(fmt.Errorf("field %d follows %d", num, before))
	default:
		c.at, c.num, c.kind = c.at+n, num, kind
	}
}

// skip passes over a field's value.
func (c *coder) skip() {
	if n := protowire.ConsumeFieldValue(c.num, c.kind, c.in[c.at:c.end]); n < 0 {
		c.fail(protowire.ParseError(n))
	} else {
		c.at += n
		c.next()
	}
}

// comes says whether a field comes now. What lies before it is not known here.
func (c *coder) comes(num protowire.Number, kind protowire.Type) bool {
	for c.num != 0 && c.num < num {
		c.skip()
	}
	if c.num == num && c.kind != kind {
		c.fail(fmt.Errorf("field %d has wire type %d", num, c.kind))
	}
	return c.num == num
}

// once goes on behind the value of a field that comes once.
func (c *coder) once(num protowire.Number) {
	if c.next(); c.num == num {
		c.fail(fmt.Errorf("field %d comes twice", num))
	}
}

func (c *coder) readVarint() uint64 {
	v, n := protowire.ConsumeVarint(c.in[c.at:c.end])
	if n < 0 {
		c.fail(protowire.ParseError(n))
		return 0
	}
	c.at += n
	return v
}

// span reads a length, and gives where what is so long begins and ends.
func (c *coder) span() (from, to int) {
	n := c.readVarint()
	if n > uint64(c.end-c.at) {
		c.fail(errors.New("it is cut short"))
		return c.at, c.at
	}
	from = c.at
	c.at += int(n)
	return from, c.at
}

func (c *coder) readText() string {
	from, to := c.span()
	return c.text[from:to]
}

func (c *coder) writeText(num protowire.Number, s string) {
	c.out = append(appendVarint(appendTag(c.out, num, protowire.BytesType), uint64(len(s))), s...)
}

// appendVarint is protowire.AppendVarint, which is called for what takes more than a byte alone:
// nearly all that is written takes one, and a record has a hundred of them.
func appendVarint(b []byte, v uint64) []byte {
	if v < 0x80 {
		return append(b, byte(v))
	}
	return protowire.AppendVarint(b, v)
}

func appendTag(b []byte, num protowire.Number, kind protowire.Type) []byte {
	return appendVarint(b, protowire.EncodeTag(num, kind))
}

func text[T ~string](c *coder, num protowire.Number, s *T) {
	if !c.reads {
		if *s != "" {
			c.writeText(num, string(*s))
		}
		return
	}
	if c.comes(num, protowire.BytesType) {
		*s = T(c.readText())
		c.once(num)
	}
}

func texts[S ~[]T, T ~string](c *coder, num protowire.Number, s *S) {
	if !c.reads {
		for _, one := range *s {
			c.writeText(num, string(one))
		}
		return
	}
	for c.comes(num, protowire.BytesType) {
		*s = append(*s, T(c.readText()))
		c.next()
	}
}

func integer[T ~int | ~int64](c *coder, num protowire.Number, n *T) {
	if !c.reads {
		if *n != 0 {
			c.out = appendVarint(appendTag(c.out, num, protowire.VarintType), protowire.EncodeZigZag(int64(*n)))
		}
		return
	}
	if c.comes(num, protowire.VarintType) {
		*n = T(protowire.DecodeZigZag(c.readVarint()))
		c.once(num)
	}
}

func (c *coder) yes(num protowire.Number, b *bool) {
	if !c.reads {
		if *b {
			c.out = appendVarint(appendTag(c.out, num, protowire.VarintType), 1)
		}
		return
	}
	if c.comes(num, protowire.VarintType) {
		*b = protowire.DecodeBool(c.readVarint())
		c.once(num)
	}
}

func (c *coder) bytes(num protowire.Number, b *[]byte) {
	if !c.reads {
		if len(*b) > 0 {
			c.out = append(appendVarint(appendTag(c.out, num, protowire.BytesType), uint64(len(*b))), *b...)
		}
		return
	}
	if c.comes(num, protowire.BytesType) {
		from, to := c.span()
		*b = c.in[from:to:to]
		c.once(num)
	}
}

// time is kept as seconds and nanoseconds, in UTC.
func (c *coder) time(num protowire.Number, t *time.Time) {
	if !c.reads {
		if !t.IsZero() {
			seconds, nanos := protowire.EncodeZigZag(t.Unix()), uint64(t.Nanosecond())
			c.out = appendTag(c.out, num, protowire.BytesType)
			c.out = appendVarint(c.out, uint64(protowire.SizeVarint(seconds)+protowire.SizeVarint(nanos)))
			c.out = appendVarint(appendVarint(c.out, seconds), nanos)
		}
		return
	}
	if !c.comes(num, protowire.BytesType) {
		return
	}
	from, to := c.span()
	seconds, n := protowire.ConsumeVarint(c.in[from:to])
	if n > 0 {
		nanos, m := protowire.ConsumeVarint(c.in[from+n : to])
		if m > 0 && from+n+m == to && nanos < uint64(time.Second) {
			*t = time.Unix(protowire.DecodeZigZag(seconds), int64(nanos)).UTC()
			c.once(num)
			return
		}
	}
	c.fail(errors.New("it is no time"))
}

const hashPrefix = "sha256:"

// What a text that may be a hash begins with.
const (
	keptHash = 'h' // its bytes follow
	keptText = 't' // it follows as it is
)

// hash is a text that is kept shorter if it is a SHA-256 as this project writes it.
func (c *coder) hash(num protowire.Number, s *string) {
	if !c.reads {
		if *s == "" {
			return
		}
		var sum [sha256.Size]byte
		c.out = appendTag(c.out, num, protowire.BytesType)
		if parseHash(*s, &sum) {
			c.out = append(appendVarint(c.out, 1+sha256.Size), keptHash)
			c.out = append(c.out, sum[:]...)
			return
		}
		c.out = append(appendVarint(c.out, uint64(1+len(*s))), keptText)
		c.out = append(c.out, *s...)
		return
	}
	if !c.comes(num, protowire.BytesType) {
		return
	}
	kept := c.readText()
	switch {
	case len(kept) == 1+sha256.Size && kept[0] == keptHash:
		*s = intent.DigestText([sha256.Size]byte(c.in[c.at-sha256.Size : c.at]))
	case len(kept) > 0 && kept[0] == keptText:
		*s = kept[1:]
	case c.err == nil:
		c.fail(errors.New("it is no hash"))
	}
	c.once(num)
}

// parseHash reads a hash in the one way in which it can be written again.
func parseHash(s string, sum *[sha256.Size]byte) bool {
	digits, ok := strings.CutPrefix(s, hashPrefix)
	if !ok || len(digits) != 2*sha256.Size {
		return false
	}
	wrong := byte(0)
	for i := range sum {
		high, low := digitValues[digits[2*i]], digitValues[digits[2*i+1]]
		wrong |= high | low
		sum[i] = high<<4 | low
	}
	return wrong < 16
}

// digitValues are the values of hexadecimal digits in lower case; more than 15: it is none.
var digitValues = func() (values [256]byte) {
	for b := range values {
		values[b] = 255
	}
	for value, b := range []byte("0123456789abcdef") {
		values[b] = byte(value)
	}
	return values
}()

// one is a struct that is always there.
func one[T any](c *coder, num protowire.Number, v *T, fields func(*T, *coder)) {
	if !c.reads {
		c.write(num, func() { fields(v, c) })
		return
	}
	if c.comes(num, protowire.BytesType) {
		c.read(func() { fields(v, c) })
		c.once(num)
	}
}

// pointer is a struct that may be absent.
func pointer[T any](c *coder, num protowire.Number, v **T, fields func(*T, *coder)) {
	if c.reads && c.comes(num, protowire.BytesType) {
		*v = new(T)
	}
	if *v != nil {
		one(c, num, *v, fields)
	}
}

func list[T any](c *coder, num protowire.Number, v *[]T, fields func(*T, *coder)) {
	if !c.reads {
		for i := range *v {
			c.write(num, func() { fields(&(*v)[i], c) })
		}
		return
	}
	for c.comes(num, protowire.BytesType) {
		var none T
		*v = append(*v, none)
		last := &(*v)[len(*v)-1]
		c.read(func() { fields(last, c) })
		c.next()
	}
}

// lines are an answer's headers, in an order of their own.
func (c *coder) lines(num protowire.Number, v *map[string][]string) {
	if !c.reads {
		var few [16]string
		names := few[:0]
		for name := range *v {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			l := line{name, (*v)[name]}
			c.write(num, func() { l.fields(c) })
		}
		return
	}
	for c.comes(num, protowire.BytesType) {
		var l line
		c.read(func() { l.fields(c) })
		if *v == nil {
			*v = map[string][]string{}
		}
		(*v)[l.name] = l.values
		c.next()
	}
}

// write writes a message, and its length before it.
func (c *coder) write(num protowire.Number, fields func()) {
	c.out = appendTag(c.out, num, protowire.BytesType)
	start := len(c.out)
	fields()
	n := len(c.out) - start
	size := protowire.SizeVarint(uint64(n))
	c.out = append(c.out, make([]byte, size)...)
	copy(c.out[start+size:], c.out[start:start+n])
	appendVarint(c.out[:start], uint64(n))
}

// read reads a message within the one that is being read.
func (c *coder) read(fields func()) {
	num, end := c.num, c.end
	from, to := c.span()
	if c.err != nil {
		return
	}
	c.at, c.end = from, to
	c.message(fields)
	if c.end = end; c.err != nil {
		c.at = end
		return
	}
	c.num = num
}
