package redis

// Reserve and Update: a request put into words for the script, and its answer read.

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// Initialise gives the store this identity if it has none.
func (s *Store) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	if err := id.Validate(); err != nil {
		return store.Identity{}, err
	}
	const doing = "set the identity"
	a, err := s.run(ctx, doing, s.scripts.initialise, false,
		[]string{s.keys.meta, s.keys.due, s.keys.held, s.keys.sums, s.keys.marks}, []string{"", "", id.Epoch, id.KeyDomain}, id.Epoch)
	if err != nil {
		return store.Identity{}, err
	}
	return s.identity(doing, a)
}

// Disown gives the store another epoch if it carries this one.
func (s *Store) Disown(ctx context.Context, epoch, next string) error {
	if err := store.ValidateDisown(epoch, next); err != nil {
		return err
	}
	_, err := s.run(ctx, "disown the store", s.scripts.disown, false, []string{s.keys.meta}, []string{"", "", epoch, next}, epoch, next)
	return err
}

// Reserve writes the record only if the version is as expected, no probe hits and
// no meter overflows.
func (s *Store) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	if err := r.Validate(); err != nil {
		return store.Result{}, err
	}
	covered, err := covered(r.PassedOver)
	if err != nil {
		return store.Result{}, err
	}
	return s.write(ctx, "reserve", r.Write, r.Probes, covered)
}

// Update writes or deletes the record if the version is as expected and no meter overflows.
func (s *Store) Update(ctx context.Context, w store.Write) (store.Result, error) {
	if err := w.Validate(); err != nil {
		return store.Result{}, err
	}
	return s.write(ctx, "update", w, nil, 0)
}

// covered is the highest stamp that the watermarks pass over.
func covered(watermarks []store.Watermark) (uint64, error) {
	var highest uint64
	for _, w := range watermarks {
		n, err := strconv.ParseUint(string(w), 10, 64)
		// No sequence comes to what the script could not count exactly.
		if err != nil || n >= mostVersions {
			return 0, fmt.Errorf("%w: %q is not a watermark of this store", store.ErrInvalid, w)
		}
		highest = max(highest, n)
	}
	return highest, nil
}

func (s *Store) write(ctx context.Context, doing string, w store.Write, probes []store.Probe, covered uint64) (store.Result, error) {
	id := hash(w.Key)
	args, err := arguments(id, w, probes, covered)
	if err != nil {
		return store.Result{}, err
	}
	o, err := s.link().writes.ask(ctx, doing, &step{id: id, epoch: w.Epoch, args: args})
	if err != nil {
		return store.Result{}, err
	}
	return s.result(doing, o, w, probes, covered)
}

// What becomes of a record's marks, as in lua/write.lua.
const (
	modeRemove  = 0
	modeKeep    = 1
	modeReplace = 2
	modeRenew   = 3
)

// arguments are those of a step of lua/write.lua, in memory of their own: they may be sent
// after the caller has left.
func arguments(id string, w store.Write, probes []store.Probe, covered uint64) ([]string, error) {
	mode, due, flags := byte(modeReplace), int64(0), byte(0)
	size := 0 // of header and body
	switch {
	case w.Record == nil:
		mode = modeRemove
	case w.KeepMarks:
		mode = modeKeep
	case w.RenewMarks:
		mode = modeRenew
	}
	if r := w.Record; r != nil {
		due, size = milliseconds(r.Due, false), len(r.Header)+len(r.Body)
		if r.Held {
			flags |= flagHeld
		}
		if r.Unsettled {
			flags |= flagUnsettled
		}
	}
	p := packers.Get().(*packer)
	defer p.free()
	end, ownEnds := p.pack(id, w.Marks)
	if ownEnds {
		flags |= flagOwnEnds
	}
	if w.RenewMarks {
		end = milliseconds(w.Until, true)
	}
	marked := len(p.strings.all)
	p.probe(probes)
	var scratch [128]byte // of most
	n := scratch[:0]
	counts := [...]int{len(p.strings.all), marked, p.plain, len(probes), len(w.Meters)}
	large := max(counts[0], counts[3], counts[4]) >= 255
	n = append(n, mode, flags)
	for _, number := range counts {
		if large {
			number = 255
		}
		n = append(n, byte(number))
	}
	for _, number := range []int64{int64(min(w.Expected, mostVersions)), due, end, int64(covered)} {
		n = append48(n, number)
	}
	n = binary.BigEndian.AppendUint16(n, uint16(len(w.Key)))
	n = append(binary.BigEndian.AppendUint16(n, uint16(len(w.Nonce))), w.Nonce...)
	n = appendScore(n, due)
	if end == 0 {
		n = appendScore(n, endsNever)
	} else {
		n = appendScore(n, end-endsBelow)
	}
	n = binary.BigEndian.AppendUint32(n, uint32(len(p.tags.all)*hashSize))
	if len(p.strings.all) >= 1<<24 || len(p.tags.all) >= 1<<24 {
		return nil, fmt.Errorf("%w: %d strings of probes and marks", store.ErrInvalid, len(p.strings.all))
	}
	var b strings.Builder // whose text is not copied
	b.Grow(len(n) + 4*len(counts) + (len(p.tags.all)+len(p.strings.all))*hashSize + len(p.kinds) + 7*len(probes) + len(p.alone) + len(w.Key) + len(p.kept) + size)
	b.Write(n)
	for i := range p.tags.all {
		b.Write(p.tags.all[i][:])
	}
	if large {
		for _, number := range counts {
			b.Write(binary.BigEndian.AppendUint32(scratch[:0], uint32(number)))
		}
	}
	for i := range p.strings.all {
		b.Write(p.strings.all[i][:])
	}
	for _, kind := range p.kinds {
		b.WriteByte(byte(min(kind, 255)))
	}
	for _, i := range p.which {
		write24(&b, i+1)
	}
	for _, i := range p.tagAt {
		write24(&b, i)
	}
	for _, probe := range probes {
		first := byte('0')
		if probe.First {
			first = '1'
		}
		b.WriteByte(first)
	}
	b.Write(p.alone)
	packed := b.Len()
	b.WriteString(w.Key)
	b.Write(p.kept)
	names := b.Len()
	header := names
	if r := w.Record; r != nil {
		b.Write(r.Header)
		header = b.Len()
		b.Write(r.Body)
	}
	all := b.String()
	args := make([]string, 0, 4+3*len(w.Meters))
	args = append(args, all[packed:names], all[names:header], all[header:], all[:packed])
	for _, m := range w.Meters {
		amount, err := canonical(m.Amount)
		if err != nil {
			return nil, err
		}
		args = append(args, hash(m.Meter), amount, m.Limit)
	}
	return args, nil
}

// appendScore appends a score as it is given to a command, after its length.
func appendScore(b []byte, score int64) []byte {
	at := len(b)
	b = strconv.AppendInt(append(b, 0), score, 10)
	b[at] = byte(len(b) - at - 1)
	return b
}

func write24(b *strings.Builder, n int) {
	b.WriteByte(byte(n >> 16))
	b.WriteByte(byte(n >> 8))
	b.WriteByte(byte(n))
}

// result reads the answer of lua/write.lua to a step.
func (s *Store) result(doing string, o outcome, w store.Write, probes []store.Probe, covered uint64) (store.Result, error) {
	answer := o.parts[0]
	r := reader{answer: o.parts}
	if answer.IsInt64() {
		result := store.Result{Outcome: store.Written, Now: o.now, Version: r.number()}
		if r.err != nil {
			return store.Result{}, s.damaged(doing, r.err.Error())
		}
		return result, nil
	}
	if err := answer.Error(); err != nil {
		return store.Result{}, s.explain(doing, err)
	}
	if r.answer, r.err = answer.ToArray(); r.err != nil {
		return store.Result{}, s.damaged(doing, r.err.Error())
	}
	var result store.Result
	switch kind := r.text(); kind {
	case "watermark":
		return store.Result{}, fmt.Errorf("%w: watermark %d is beyond the store's sequence %d", store.ErrInvalid, covered, r.number())
	case "mismatch":
		result = store.Result{Outcome: store.Mismatch, Now: o.now, Record: r.record(true)}
	case "full":
		result = store.Result{Outcome: store.OverLimit, Now: o.now}
		if i := r.number(); r.err == nil && i < uint64(len(w.Meters)) {
			result.Meter = w.Meters[i].Meter
		}
	case "blocked":
		result = store.Result{Outcome: store.Blocked, Now: o.now, Watermark: store.Watermark(strconv.FormatUint(r.number(), 10)), HitCount: int(r.number())}
		for _, hit := range r.text() {
			result.ProbeHits = append(result.ProbeHits, hit == '1')
		}
		for r.more() {
			record, indexes := r.record(false), r.text()
			if r.err != nil {
				break
			}
			hit := store.Hit{Record: *record}
			for _, f := range strings.Fields(indexes) {
				i, err := strconv.Atoi(f)
				if err != nil || i >= len(probes) {
					return store.Result{}, s.damaged(doing, "probe "+f)
				}
				hit.Probes = append(hit.Probes, i)
			}
			result.Hits = append(result.Hits, hit)
		}
		if len(result.ProbeHits) != len(probes) || len(result.Hits) == 0 {
			return store.Result{}, s.damaged(doing, "a refusal without what was hit")
		}
	default:
		return store.Result{}, s.damaged(doing, fmt.Sprintf("answer %q", kind))
	}
	if r.err != nil {
		return store.Result{}, s.damaged(doing, r.err.Error())
	}
	return result, nil
}

// reader takes an answer element by element and keeps the first error.
type reader struct {
	answer []valkey.ValkeyMessage
	at     int
	err    error
}

func (r *reader) more() bool { return r.err == nil && r.at < len(r.answer) }

// next is the next element, and whether it is a string and not null.
func (r *reader) next() (string, bool) {
	if r.err != nil {
		return "", false
	}
	if r.at >= len(r.answer) {
		r.err = fmt.Errorf("an answer of %d parts only", len(r.answer))
		return "", false
	}
	m := r.answer[r.at]
	r.at++
	if m.IsNil() {
		return "", false
	}
	text, err := m.ToString()
	if err != nil {
		r.err = fmt.Errorf("part %d of the answer: %w", r.at, err)
		return "", false
	}
	return text, true
}

func (r *reader) text() string {
	text, ok := r.next()
	if !ok && r.err == nil {
		r.err = fmt.Errorf("part %d of the answer is missing", r.at)
	}
	return text
}

func (r *reader) number() uint64 {
	if r.err != nil {
		return 0
	}
	if r.at >= len(r.answer) {
		r.err = fmt.Errorf("an answer of %d parts only", len(r.answer))
		return 0
	}
	n, err := r.answer[r.at].AsInt64()
	r.at++
	if err != nil || n < 0 {
		r.err = fmt.Errorf("part %d of the answer is %d: %w", r.at, n, err)
		return 0
	}
	return uint64(n)
}

func (r *reader) time() time.Time {
	return time.UnixMicro(int64(r.number())).UTC()
}

// record is one that may be absent, followed by its body if that is asked for.
func (r *reader) record(body bool) *store.Record {
	value, present := r.next()
	var content string
	if body {
		content, _ = r.next()
	}
	if r.err != nil || !present {
		if !present && !body && r.err == nil {
			r.err = fmt.Errorf("part %d of the answer is no record", r.at)
		}
		return nil
	}
	d, err := decode(value)
	if err != nil {
		r.err = err
		return nil
	}
	if content != "" {
		d.record.Body = []byte(content)
	}
	return &d.record
}
