package bolt

// Reserve and Update: one step of the writer. A step first checks everything and
// then writes; a refused one has written nothing.

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// step is a validated request in a copy of its own: its caller may be gone and
// use its memory again when the writer comes to it.
type step struct {
	epoch    string
	key      string
	expected uint64
	nonce    string

	remove bool
	record facts
	header []byte
	body   []byte
	// marks are as they are kept with the record.
	marks      []byte
	keepMarks  bool
	renewMarks bool
	// until is the end of marks that are renewed.
	until      int64
	meters     []store.MeterEntry
	probes     []store.Probe
	passedOver []store.Watermark
}

func newStep(w store.Write) *step {
	s := &step{
		epoch: w.Epoch, key: w.Key, expected: w.Expected, nonce: w.Nonce,
		remove: w.Record == nil, keepMarks: w.KeepMarks, renewMarks: w.RenewMarks, until: milliseconds(w.Until, true),
		meters: append([]store.MeterEntry(nil), w.Meters...),
	}
	if s.remove {
		return s
	}
	s.record = facts{
		due: milliseconds(w.Record.Due, false), held: w.Record.Held, unsettled: w.Record.Unsettled,
		nonce: w.Nonce, key: w.Key,
	}
	s.header, s.body = clone(w.Record.Header), clone(w.Record.Body)
	s.marks = packMarks(w.Marks)
	return s
}

// packMarks puts marks into the order of the file. Of those that differ in their end
// only, the latest is what probes see.
func packMarks(marks []store.Mark) []byte {
	if len(marks) == 0 {
		return nil
	}
	packed := make([][]byte, len(marks))
	for i, m := range marks {
		b := make([]byte, 0, 2*hashSize+1+endSize)
		packed[i] = appendEnd(appendGroup(b, m.String, m.Tag), milliseconds(m.Until, true))
	}
	slices.SortFunc(packed, bytes.Compare)
	out := make([]byte, 0, len(packed)*(2*hashSize+1+endSize))
	for i, m := range packed {
		group := m[:len(m)-endSize]
		if i+1 < len(packed) && bytes.HasPrefix(packed[i+1], group) {
			continue
		}
		out = append(out, m...)
	}
	return out
}

func (s *step) size() int {
	return len(s.header) + len(s.body)
}

// Initialise gives the store this identity if it has none.
func (s *Store) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	if err := id.Validate(); err != nil {
		return store.Identity{}, err
	}
	a, err := s.submit(ctx, 0, func(t *txn) (answer, error) {
		if have := t.identity(); have != (store.Identity{}) {
			return answer{identity: have}, nil
		}
		if err := t.put(t.meta(), metaEpoch, []byte(id.Epoch)); err != nil {
			return answer{}, err
		}
		return answer{identity: id}, t.put(t.meta(), metaKeyDomain, []byte(id.KeyDomain))
	})
	return a.identity, err
}

// Disown gives the store another epoch if it carries this one.
func (s *Store) Disown(ctx context.Context, epoch, next string) error {
	if err := store.ValidateDisown(epoch, next); err != nil {
		return err
	}
	_, err := s.submit(ctx, 0, func(t *txn) (answer, error) {
		if t.identity().Epoch != epoch {
			return answer{}, nil
		}
		return answer{}, t.put(t.meta(), metaEpoch, []byte(next))
	})
	return err
}

// Reserve writes the record only if the version is as expected, no probe hits and
// no meter overflows.
func (s *Store) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	if err := r.Validate(); err != nil {
		return store.Result{}, err
	}
	st := newStep(r.Write)
	st.probes = append([]store.Probe(nil), r.Probes...)
	st.passedOver = append([]store.Watermark(nil), r.PassedOver...)
	return s.do(ctx, st)
}

// Update writes or deletes the record if the version is as expected and no meter overflows.
func (s *Store) Update(ctx context.Context, w store.Write) (store.Result, error) {
	if err := w.Validate(); err != nil {
		return store.Result{}, err
	}
	return s.do(ctx, newStep(w))
}

func (s *Store) do(ctx context.Context, st *step) (store.Result, error) {
	a, err := s.submit(ctx, st.size(), func(t *txn) (answer, error) {
		result, err := t.apply(st)
		if err != nil {
			return answer{}, err
		}
		return answer{result: result}, nil
	})
	return a.result, err
}

// apply makes the step. It does not change the step, which may have to be made again.
func (t *txn) apply(s *step) (store.Result, error) {
	if have := t.identity().Epoch; have != s.epoch {
		return store.Result{}, fmt.Errorf("%w: the store has epoch %q, the writer knows %q", store.ErrMemoryLost, have, s.epoch)
	}
	sequence, err := t.sequence()
	if err != nil {
		return store.Result{}, unavailable("read", err)
	}
	covered, err := covered(s.passedOver, sequence)
	if err != nil {
		return store.Result{}, err
	}
	now := t.now()
	id, have, err := t.find(s.key)
	if err != nil {
		return store.Result{}, unavailable("read", err)
	}
	if id != 0 && have.nonce == s.nonce {
		return store.Result{Outcome: store.Written, Now: now, Version: have.version}, nil
	}
	if have.version != s.expected {
		result := store.Result{Outcome: store.Mismatch, Now: now}
		if id != 0 {
			result.Record = t.record(id, have, true)
		}
		return result, nil
	}
	if len(s.probes) > 0 {
		hits, err := t.hits(s.probes, id, covered, now)
		if err != nil {
			return store.Result{}, unavailable("read", err)
		}
		if hits.HitCount > 0 {
			hits.Outcome, hits.Now = store.Blocked, now
			hits.Watermark = store.Watermark(strconv.FormatUint(sequence, 10))
			return hits, nil
		}
	}
	changes, full, err := t.meter(id, s.meters)
	if err != nil {
		return store.Result{}, unavailable("read", err)
	}
	if full != "" {
		return store.Result{Outcome: store.OverLimit, Now: now, Meter: full}, nil
	}

	sequence++
	if err := t.put(t.meta(), metaSequence, number(sequence)); err != nil {
		return store.Result{}, err
	}
	if s.remove {
		return store.Result{Outcome: store.Written, Now: now}, t.erase(id, have)
	}
	if id == 0 {
		id = sequence
		if err := t.put(t.keys(), []byte(s.key), number(id)); err != nil {
			return store.Result{}, err
		}
	}
	if err := t.writeRecord(id, have, s, sequence, now); err != nil {
		return store.Result{}, err
	}
	marks := s.marks
	if s.renewMarks {
		if marks, err = t.renewed(id, s.until); err != nil {
			return store.Result{}, err
		}
	}
	if !s.keepMarks {
		if err := t.writeMarks(id, marks, sequence); err != nil {
			return store.Result{}, err
		}
	}
	if err := t.writeMeters(id, changes); err != nil {
		return store.Result{}, err
	}
	return store.Result{Outcome: store.Written, Now: now, Version: sequence}, nil
}

// covered is the highest stamp that the watermarks pass over. One beyond the
// store's own sequence would cover marks that are still to come.
func covered(watermarks []store.Watermark, sequence uint64) (uint64, error) {
	var highest uint64
	for _, w := range watermarks {
		n, err := strconv.ParseUint(string(w), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%w: %q is not a watermark of this store", store.ErrInvalid, w)
		}
		if n > sequence {
			return 0, fmt.Errorf("%w: watermark %q is beyond the store's sequence %d", store.ErrInvalid, w, sequence)
		}
		highest = max(highest, n)
	}
	return highest, nil
}

func (t *txn) writeRecord(id uint64, have facts, s *step, version uint64, now time.Time) error {
	f := s.record
	f.version, f.at = version, now.UnixMicro()
	if err := t.put(t.facts(), number(id), f.encode()); err != nil {
		return err
	}
	if err := t.putOrRemove(t.headers(), number(id), s.header); err != nil {
		return err
	}
	if err := t.putOrRemove(t.bodies(), number(id), s.body); err != nil {
		return err
	}
	return t.index(id, have, f)
}

// index moves the record from where it was listed to where it now belongs.
func (t *txn) index(id uint64, before, after facts) error {
	if before.due != after.due {
		if before.due != 0 {
			if err := t.remove(t.due(), dueKey(before.due, id)); err != nil {
				return err
			}
		}
		if after.due != 0 {
			if err := t.put(t.due(), dueKey(after.due, id), nil); err != nil {
				return err
			}
		}
	}
	switch {
	case after.held && !before.held:
		return t.put(t.held(), []byte(after.key), number(id))
	case before.held && !after.held:
		return t.remove(t.held(), []byte(before.key))
	}
	return nil
}

// renewed are the record's marks with another end. No two are of one group, so their
// order stays.
func (t *txn) renewed(id uint64, until int64) ([]byte, error) {
	marks := clone(t.owned().Get(number(id)))
	for rest := marks; len(rest) > 0; {
		m, next, ok := cutMark(rest)
		if !ok {
			return nil, fmt.Errorf("%w: mark of record %d", errDamaged, id)
		}
		appendEnd(m[:len(m)-endSize], until)
		rest = next
	}
	return marks, nil
}

// writeMarks replaces the record's marks and stamps them.
func (t *txn) writeMarks(id uint64, marks []byte, stamp uint64) error {
	old := clone(t.owned().Get(number(id)))
	at := number(stamp)
	for was, will := old, marks; len(was) > 0 || len(will) > 0; {
		var gone, m []byte
		var ok bool
		if len(was) > 0 {
			if gone, _, ok = cutMark(was); !ok {
				return fmt.Errorf("%w: mark of record %d", errDamaged, id)
			}
		}
		if len(will) > 0 {
			if m, _, ok = cutMark(will); !ok {
				return fmt.Errorf("mark of %d bytes", len(will))
			}
		}
		// Both are ascending: the lower is only in one of them.
		if gone != nil && (m == nil || bytes.Compare(gone, m) < 0) {
			was = was[len(gone):]
			if err := t.remove(t.bucketOf(gone), markKey(gone, id)); err != nil {
				return err
			}
			continue
		}
		will = will[len(m):]
		if bytes.Equal(gone, m) {
			was = was[len(m):]
		}
		if err := t.put(t.bucketOf(m), markKey(m, id), at); err != nil {
			return err
		}
	}
	if bytes.Equal(old, marks) {
		return nil
	}
	return t.putOrRemove(t.owned(), number(id), marks)
}

// suffixes copies what follows the prefix in each key that has it: a bucket must
// not be changed under a cursor.
func suffixes(b *bbolt.Bucket, prefix []byte) [][]byte {
	var found [][]byte
	c := b.Cursor()
	for k, _ := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		found = append(found, clone(k[len(prefix):]))
	}
	return found
}

// erase deletes the record and all that it left.
func (t *txn) erase(id uint64, have facts) error {
	if err := t.writeMarks(id, nil, 0); err != nil {
		return err
	}
	var entries []store.MeterEntry
	for _, meter := range suffixes(t.entries(), number(id)) {
		entries = append(entries, store.MeterEntry{Meter: string(meter)})
	}
	changes, _, err := t.meter(id, entries)
	if err != nil {
		return err
	}
	if err := t.writeMeters(id, changes); err != nil {
		return err
	}
	if err := t.index(id, have, facts{}); err != nil {
		return err
	}
	for _, b := range []*bbolt.Bucket{t.headers(), t.bodies()} {
		if err := t.putOrRemove(b, number(id), nil); err != nil {
			return err
		}
	}
	if err := t.remove(t.facts(), number(id)); err != nil {
		return err
	}
	return t.remove(t.keys(), []byte(have.key))
}
