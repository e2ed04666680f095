package storetest

// The model: the contract in plain maps and loops, for comparison. It is slow on
// purpose and shares nothing with any store. What only the store can know, its
// time and the versions that it gives, the model takes from the store's answer and
// checks for what must hold of it.

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

type modelMark struct {
	store.Mark
	stamp int
}

type modelRecord struct {
	store.Record
	marks  []modelMark
	meters map[string]*big.Rat
}

// model is what a store with this history must be like.
type model struct {
	identity store.Identity
	records  map[string]*modelRecord
	// writes counts them, and stamps marks.
	writes int
	// version is the highest that was given.
	version uint64
	// watermarks says how many writes each could see.
	watermarks map[store.Watermark]int
}

func newModel(id store.Identity) *model {
	return &model{identity: id, records: map[string]*modelRecord{}, watermarks: map[store.Watermark]int{}}
}

func floorMillis(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC().Truncate(time.Millisecond)
}

func ceilMillis(t time.Time) time.Time {
	if floor := floorMillis(t); !floor.Equal(t) {
		return floor.Add(time.Millisecond)
	}
	return t
}

// step makes a write, Reserve or Update, that the store answered so, and says what
// is wrong with the answer.
func (m *model) step(r store.Reserve, have store.Result, err error) error {
	if r.Epoch != m.identity.Epoch {
		if !errors.Is(err, store.ErrMemoryLost) {
			return fmt.Errorf("another epoch is answered with %v, %w", have, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("refused: %w", err)
	}
	if have.Now.IsZero() {
		return errors.New("no time in the answer")
	}
	want := m.expect(r, have)
	if err := same(want, have); err != nil {
		return err
	}
	if want.Outcome == store.Blocked {
		if have.Watermark == "" {
			return errors.New("blocked without a watermark")
		}
		m.watermarks[have.Watermark] = m.writes
	}
	return nil
}

// expect is the answer as it should be; a write is made.
func (m *model) expect(r store.Reserve, have store.Result) store.Result {
	now := have.Now
	record := m.records[r.Key]
	if record != nil && record.Nonce == r.Nonce {
		return store.Result{Outcome: store.Written, Now: now, Version: record.Version}
	}
	var version uint64
	if record != nil {
		version = record.Version
	}
	if version != r.Expected {
		want := store.Result{Outcome: store.Mismatch, Now: now}
		if record != nil {
			c := record.Record
			want.Record = &c
		}
		return want
	}
	if want := m.hits(r, now); want.HitCount > 0 {
		return want
	}
	for _, e := range r.Meters {
		before, after := new(big.Rat), amount(e.Amount)
		if record != nil && record.meters[e.Meter] != nil {
			before = record.meters[e.Meter]
		}
		sum := m.meter(e.Meter)
		sum.Add(sum.Sub(sum, before), after)
		if e.Limit != "" && after.Cmp(before) > 0 && sum.Cmp(amount(e.Limit)) > 0 {
			return store.Result{Outcome: store.OverLimit, Now: now, Meter: e.Meter}
		}
	}

	m.writes++
	want := store.Result{Outcome: store.Written, Now: now}
	if r.Record == nil {
		delete(m.records, r.Key)
		return want
	}
	if record == nil {
		record = &modelRecord{meters: map[string]*big.Rat{}}
		m.records[r.Key] = record
	}
	// The store chooses the version, above all earlier ones.
	want.Version = max(have.Version, m.version+1)
	m.version = want.Version
	record.Record = store.Record{
		Key: r.Key, Version: want.Version, Nonce: r.Nonce, At: now, Due: floorMillis(r.Record.Due),
		Held: r.Record.Held, Unsettled: r.Record.Unsettled,
		Header: bytes.Clone(r.Record.Header), Body: bytes.Clone(r.Record.Body),
	}
	switch {
	case r.KeepMarks:
	case r.RenewMarks:
		for i := range record.marks {
			record.marks[i].Until, record.marks[i].stamp = r.Until, m.writes
		}
	default:
		record.marks = nil
		for _, mark := range r.Marks {
			record.marks = append(record.marks, modelMark{mark, m.writes})
		}
	}
	for _, e := range r.Meters {
		record.meters[e.Meter] = amount(e.Amount)
	}
	return want
}

// hits is the answer if a probe hits, without its watermark.
func (m *model) hits(r store.Reserve, now time.Time) store.Result {
	covered := 0
	for _, w := range r.PassedOver {
		covered = max(covered, m.watermarks[w])
	}
	want := store.Result{Outcome: store.Blocked, Now: now, ProbeHits: make([]bool, len(r.Probes))}
	first := map[string]bool{}
	for key, record := range m.records {
		if key == r.Key {
			continue
		}
		var probes []int
		for i, probe := range r.Probes {
			for _, mark := range record.marks {
				over := !mark.Until.IsZero() && !now.Before(ceilMillis(mark.Until))
				excepted := probe.Except != "" && mark.Tag == probe.Except
				if mark.String == probe.String && !over && !excepted && mark.stamp > covered {
					probes = append(probes, i)
					want.ProbeHits[i] = true
					first[key] = first[key] || probe.First
					break
				}
			}
		}
		if probes != nil {
			hit := store.Hit{Record: record.Record, Probes: probes}
			hit.Record.Body = nil
			want.Hits = append(want.Hits, hit)
		}
	}
	slices.SortFunc(want.Hits, func(a, b store.Hit) int {
		return cmp.Or(
			before(first[a.Record.Key], first[b.Record.Key]),
			before(a.Record.Unsettled, b.Record.Unsettled),
			cmp.Compare(b.Record.Version, a.Record.Version),
		)
	})
	want.HitCount = len(want.Hits)
	want.Hits = want.Hits[:min(len(want.Hits), store.MaxHits)]
	return want
}

func before(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

func amount(decimal string) *big.Rat {
	r, _ := new(big.Rat).SetString(cmp.Or(decimal, "0"))
	return r
}

func (m *model) meter(meter string) *big.Rat {
	sum := new(big.Rat)
	for _, record := range m.records {
		if a := record.meters[meter]; a != nil {
			sum.Add(sum, a)
		}
	}
	return sum
}

func (m *model) get(key string) *store.Record {
	if record := m.records[key]; record != nil {
		return &record.Record
	}
	return nil
}

// list is all of a list, without bodies: due ones by time and then key.
func (m *model) list(l store.List) []store.Record {
	var found []store.Record
	for _, record := range m.records {
		r := record.Record
		r.Body = nil
		if l.What == store.ListHeld && r.Held || l.What == store.ListDue && !r.Due.IsZero() && !r.Due.After(l.Before) {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b store.Record) int {
		if l.What == store.ListDue {
			return cmp.Or(a.Due.Compare(b.Due), strings.Compare(a.Key, b.Key))
		}
		return strings.Compare(a.Key, b.Key)
	})
	return found
}

// same says in what two answers differ, the watermark apart.
func same(want, have store.Result) error {
	var diffs []string
	diff := func(what string, want, have any) {
		diffs = append(diffs, fmt.Sprintf("%s is %v, want %v", what, have, want))
	}
	if want.Outcome != have.Outcome {
		diff("Outcome", want.Outcome, have.Outcome)
	}
	if want.Version != have.Version {
		diff("Version", want.Version, have.Version)
	}
	if want.HitCount != have.HitCount {
		diff("HitCount", want.HitCount, have.HitCount)
	}
	if !slices.Equal(want.ProbeHits, have.ProbeHits) {
		diff("ProbeHits", want.ProbeHits, have.ProbeHits)
	}
	if want.Meter != have.Meter {
		diff("Meter", want.Meter, have.Meter)
	}
	if want.Outcome != store.Blocked && have.Watermark != "" {
		diff("Watermark", "", have.Watermark)
	}
	if err := sameRecord(want.Record, have.Record); err != nil {
		diffs = append(diffs, err.Error())
	}
	if len(want.Hits) != len(have.Hits) {
		diff("number of Hits", len(want.Hits), len(have.Hits))
	} else {
		for i, w := range want.Hits {
			if err := sameRecord(&w.Record, &have.Hits[i].Record); err != nil {
				diffs = append(diffs, fmt.Sprintf("hit %d: %v", i, err))
			}
			if !slices.Equal(w.Probes, have.Hits[i].Probes) {
				diff(fmt.Sprintf("hit %d: Probes", i), w.Probes, have.Hits[i].Probes)
			}
		}
	}
	if diffs == nil {
		return nil
	}
	return errors.New(strings.Join(diffs, "\n"))
}

func sameRecord(want, have *store.Record) error {
	if want == nil || have == nil {
		if want != have {
			return fmt.Errorf("record is %+v, want %+v", have, want)
		}
		return nil
	}
	if want.Key != have.Key || want.Version != have.Version || want.Nonce != have.Nonce ||
		!want.At.Equal(have.At) || !want.Due.Equal(have.Due) ||
		want.Held != have.Held || want.Unsettled != have.Unsettled ||
		!bytes.Equal(want.Header, have.Header) || !bytes.Equal(want.Body, have.Body) {
		return fmt.Errorf("record is %+v, want %+v", *have, *want)
	}
	return nil
}
