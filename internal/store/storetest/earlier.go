package storetest

// What another version has written. Each store has a copy, in a file that is never made
// anew, of what WriteEarlier left in it once, and has FindEarlier look through it: a layout
// that changes without saying so would no longer find what was paid. A new format has a
// file of its own beside the others.

import (
	"bytes"
	"compress/gzip"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	earlierEpoch = "epoch-1"
	// crowd is how many records have one mark in common: more than few.
	crowd = 70
)

// earlierEnd is when marks end that do, long after any test.
var earlierEnd = time.Date(2200, 1, 2, 3, 4, 5, 678_000_000, time.UTC)

// earlierRecords are what is there in the end, by their order; the keys of the crowd follow.
func earlierRecords() []store.Write {
	record := func(n int) *store.Record {
		r := &store.Record{Header: fmt.Appendf(nil, "header %d \x00\xff", n), Body: bytes.Repeat([]byte{byte(n), 0, 255, '{'}, 100)}
		if n%2 == 0 {
			r.Due = earlierEnd.Add(time.Duration(n) * time.Second)
		}
		r.Held, r.Unsettled = n%3 == 0, n%5 == 0
		return r
	}
	all := []store.Write{
		{Key: "plain", Record: record(1), Marks: []store.Mark{{String: "a"}, {String: "b"}}},
		{Key: "with tags \x00\xff", Record: record(2), Marks: []store.Mark{{String: "b", Tag: "x"}, {String: "c", Tag: "x"}, {String: "c", Tag: "y"}}},
		{Key: "ends", Record: record(3), Marks: []store.Mark{{String: "d", Until: earlierEnd}, {String: "e", Tag: "x", Until: earlierEnd}}},
		{Key: "ends of their own", Record: record(4), Marks: []store.Mark{{String: "d", Until: earlierEnd.Add(time.Millisecond)}, {String: "f"}, {String: "e", Tag: "y", Until: earlierEnd}}},
		{Key: "metered", Record: record(5), Meters: []store.MeterEntry{{Meter: "m", Amount: "10.25"}, {Meter: "n \x00", Amount: "0.0000000001"}}},
		{Key: "metered as well", Record: record(6), Marks: []store.Mark{{String: "g"}}, Meters: []store.MeterEntry{{Meter: "m", Amount: "1" + strings.Repeat("0", 30)}}},
		{Key: strings.Repeat("long ", 200), Record: &store.Record{}, Marks: []store.Mark{{String: strings.Repeat("long ", 200), Tag: strings.Repeat("long ", 200)}}},
	}
	for i := range crowd {
		w := store.Write{Key: fmt.Sprint("of the crowd ", i), Record: record(i), Marks: []store.Mark{{String: "crowd", Until: earlierEnd}, {String: fmt.Sprint("crowd ", i)}}}
		w.Marks[0].Tag = []string{"x", "", "y"}[i%3]
		all = append(all, w)
	}
	return all
}

var writeEarlier = flag.Bool("write-earlier", false, "make the copies that are missing of what a store has written")

// EarlierCopy is what the file has. If that is to be made, it is made with what the function gives.
func EarlierCopy(t testing.TB, path string, write func() []byte) []byte {
	t.Helper()
	if *writeEarlier {
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		if _, err := z.Write(write()); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatalf("what was written once stays: %v", err)
		}
		if _, err := f.Write(packed.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // it was read
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// WriteEarlier writes what FindEarlier finds, to a store that was never used.
func WriteEarlier(t testing.TB, s store.Store) {
	t.Helper()
	ctx := context.Background()
	if _, err := s.Initialise(ctx, store.Identity{Epoch: earlierEpoch, KeyDomain: "domain-1"}); err != nil {
		t.Fatal(err)
	}
	update := func(w store.Write) uint64 {
		t.Helper()
		w.Epoch = earlierEpoch
		res, err := s.Update(ctx, w)
		if err != nil || res.Outcome != store.Written {
			t.Fatalf("%q: %s, %v", w.Key, res.Outcome, err)
		}
		return res.Version
	}
	for i, w := range earlierRecords() {
		first := w
		first.Nonce = "first"
		switch i % 4 {
		case 0: // it is what it was from the beginning
			first.Nonce = "last"
			update(first)
			continue
		case 1: // it had other marks
			first.Record = &store.Record{Header: []byte("before"), Unsettled: true}
			first.Marks = []store.Mark{{String: "before"}, {String: "crowd"}}
		case 2: // it had none
			first.Marks = nil
		case 3: // they had no end
			first.Marks = slices.Clone(w.Marks)
			for i := range first.Marks {
				first.Marks[i].Until = time.Time{}
			}
		}
		w.Nonce, w.Expected = "last", update(first)
		if i%4 == 3 && len(w.Marks) > 0 && !slices.ContainsFunc(w.Marks, func(m store.Mark) bool { return !m.Until.Equal(w.Marks[0].Until) }) {
			w.RenewMarks, w.Until, w.Marks = true, w.Marks[0].Until, nil
		}
		update(w)
	}
	gone := store.Write{Key: "gone", Nonce: "first", Record: &store.Record{Held: true, Due: earlierEnd}, Marks: []store.Mark{{String: "gone"}, {String: "crowd"}}, Meters: []store.MeterEntry{{Meter: "m", Amount: "1"}}}
	update(store.Write{Key: "gone", Nonce: "last", Expected: update(gone)})
}

// FindEarlier finds what WriteEarlier has written, and goes on with it.
func FindEarlier(t testing.TB, s store.Store) {
	t.Helper()
	ctx := context.Background()
	all := earlierRecords()
	standing, err := s.Standing(ctx)
	if err != nil || standing.Identity != (store.Identity{Epoch: earlierEpoch, KeyDomain: "domain-1"}) {
		t.Fatalf("it is %+v, %v", standing, err)
	}
	versions := map[string]uint64{}
	var due, held []string
	for _, w := range all {
		r, _, err := s.Get(ctx, w.Key)
		if err != nil || r == nil {
			t.Fatalf("%q: %v, %v", w.Key, r, err)
		}
		versions[w.Key] = r.Version
		want := *w.Record
		want.Key, want.Version, want.Nonce, want.At = w.Key, r.Version, "last", r.At
		if err := sameRecord(&want, r); err != nil {
			t.Errorf("%q: %v", w.Key, err)
		}
		if !w.Record.Due.IsZero() {
			due = append(due, w.Key)
		}
		if w.Record.Held {
			held = append(held, w.Key)
		}
	}
	for list, want := range map[store.List][]string{{What: store.ListDue, Before: earlierEnd.Add(time.Hour)}: due, {What: store.ListHeld}: held} {
		page, err := s.List(ctx, list)
		var have []string
		for _, r := range page.Records {
			have = append(have, r.Key)
		}
		slices.Sort(have)
		slices.Sort(want)
		if err != nil || !slices.Equal(have, want) {
			t.Errorf("%s: %q, %v; want %q", list.What, have, err, want)
		}
	}
	for meter, want := range map[string]string{"m": "1" + strings.Repeat("0", 28) + "10.25", "n \x00": "0.0000000001", "o": "0"} {
		if sum, err := s.Meter(ctx, meter); err != nil || rat(t, sum).Cmp(rat(t, want)) != 0 {
			t.Errorf("the meter %q is at %s, %v; want %s", meter, sum, err, want)
		}
	}

	// Each mark is hit, by a probe that excepts none or another tag, and by no other.
	hits := func(probe store.Probe) (keys []string) {
		for _, w := range all {
			if slices.ContainsFunc(w.Marks, func(m store.Mark) bool {
				return m.String == probe.String && (probe.Except == "" || m.Tag != probe.Except)
			}) {
				keys = append(keys, w.Key)
			}
		}
		return keys
	}
	asked := map[store.Probe]bool{{String: "gone"}: true, {String: "before"}: true, {String: "x"}: true}
	for _, w := range all {
		for _, m := range w.Marks {
			asked[store.Probe{String: m.String}] = true
			for _, tag := range []string{"x", "y", m.Tag} {
				asked[store.Probe{String: m.String, Except: tag}] = true
			}
		}
	}
	n := 0
	for probe := range asked {
		n++
		res, err := s.Reserve(ctx, store.Reserve{
			Write:  store.Write{Epoch: earlierEpoch, Key: fmt.Sprint("probe ", n), Nonce: "probe", Record: &store.Record{}},
			Probes: []store.Probe{probe},
		})
		want := hits(probe)
		switch {
		case err != nil, len(want) == 0 && res.Outcome != store.Written, len(want) > 0 && (res.Outcome != store.Blocked || res.HitCount != len(want)):
			t.Errorf("%+v: %s by %d, %v; want %d", probe, res.Outcome, res.HitCount, err, len(want))
		default:
			for _, h := range res.Hits {
				if !slices.Contains(want, h.Record.Key) || h.Record.Version != versions[h.Record.Key] {
					t.Errorf("%+v hits %q, version %d", probe, h.Record.Key, h.Record.Version)
				}
			}
		}
	}

	// What was written can be changed in every way.
	for i, w := range all {
		next := store.Write{Epoch: earlierEpoch, Key: w.Key, Expected: versions[w.Key], Nonce: "next"}
		switch i % 4 {
		case 0:
			next.Record, next.KeepMarks = &store.Record{}, true
		case 1:
			next.Record, next.RenewMarks, next.Until = &store.Record{}, true, earlierEnd.Add(time.Hour)
		case 2:
			next.Record, next.Marks = &store.Record{}, []store.Mark{{String: "next"}, {String: "crowd", Tag: "x"}}
		}
		if res, err := s.Update(ctx, next); err != nil || res.Outcome != store.Written || next.Record != nil && res.Version <= standing.Sequence {
			t.Errorf("%q: %s as version %d, %v", w.Key, res.Outcome, res.Version, err)
		}
	}
}
