// Package storetest is the conformance suite of package store. Every
// implementation runs it unchanged:
//
//   - identity.go has a store's first use;
//   - rules.go has one case for each rule of the contract;
//   - losses.go has stores that were set back;
//   - races.go has many writers at once, who must come out as if in some order;
//   - history.go compares random histories, step by step, with the plain model in model.go;
//   - durability.go is for tests that kill whatever holds the store.
//
// It reaches a store through its contract only. What an implementation can check
// of itself, its indexes for instance, it does in Harness.Check.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// patience bounds every wait. No rule is about speed.
const patience = 60 * time.Second

// Harness is one store under test, and what can be done to it from outside. It
// cleans up after itself at the end of its test.
type Harness struct {
	// Store is a connection to a store that was never used.
	Store store.Store
	// Connect opens a further connection to the same store; one that allows a
	// single connection returns the present one.
	Connect func(t testing.TB) store.Store
	// Restart ends the store without warning while nothing is being asked, starts
	// it again on what is durable, and returns a connection to it. Earlier
	// connections are of no more use.
	Restart func(t testing.TB) store.Store
	// Rewind sets the store back to what it was at the last Snapshot, without the
	// knowledge of those who are connected; they find it again where it was. Both are
	// nil of a store that belongs to one process.
	Snapshot, Rewind func(t testing.TB)
	// Advance moves the store's clock forward, which then stands still otherwise;
	// nil if it runs by itself.
	Advance func(time.Duration)
	// Check looks for damage inside the store; nil if there is nothing to look at.
	Check func(t testing.TB)
}

// Run runs the whole suite. Every case has a harness of its own.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	t.Run("First use", func(t *testing.T) { runFirstUse(t, open(t)) })
	t.Run("Rules", func(t *testing.T) { runCases(t, open, rules) })
	t.Run("Lost writes", func(t *testing.T) { runCases(t, open, losses) })
	t.Run("Races", func(t *testing.T) { runCases(t, open, races) })
	t.Run("History", func(t *testing.T) { runHistory(t, open) })
}

// testCase is a sentence about every store, and what shows it.
type testCase struct {
	name string
	run  func(f *fixture)
}

func runCases(t *testing.T, open func(t *testing.T) Harness, cases []testCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, open(t))
			c.run(f)
			if f.h.Check != nil {
				f.h.Check(t)
			}
		})
	}
}

// identity is that of every store under test, unless the case is about it.
var identity = store.Identity{Epoch: "epoch-1", KeyDomain: "domain-1"}

// fixture is a store in use by a test.
type fixture struct {
	testing.TB
	h      Harness
	s      store.Store
	nonces atomic.Int64
}

// newFixture gives the store its identity.
func newFixture(t testing.TB, h Harness) *fixture {
	f := &fixture{TB: t, h: h, s: h.Store}
	ctx, cancel := f.ctx()
	defer cancel()
	if _, err := f.s.Initialise(ctx, identity); err != nil {
		t.Fatalf("initialise: %v", err)
	}
	return f
}

func (f *fixture) ctx() (context.Context, context.CancelFunc) {
	return patient()
}

func patient() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

func (f *fixture) nonce() string {
	return fmt.Sprintf("nonce-%d", f.nonces.Add(1))
}

// write is a plain write of a settled record, to be changed by the case.
func (f *fixture) write(key string, expected uint64) store.Write {
	return store.Write{
		Epoch: identity.Epoch, Key: key, Expected: expected, Nonce: f.nonce(),
		Record: &store.Record{Header: []byte("header of " + key), Body: []byte("body of " + key)},
	}
}

func (f *fixture) reserve(r store.Reserve) store.Result {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	result, err := f.s.Reserve(ctx, r)
	if err != nil {
		f.Fatalf("Reserve %q: %v", r.Key, err)
	}
	return result
}

func (f *fixture) update(w store.Write) store.Result {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	result, err := f.s.Update(ctx, w)
	if err != nil {
		f.Fatalf("Update %q: %v", w.Key, err)
	}
	return result
}

// put writes and must succeed; it returns the version.
func (f *fixture) put(w store.Write) uint64 {
	f.Helper()
	result := f.update(w)
	f.outcome(result, store.Written)
	return result.Version
}

// mark writes a new record with these marks.
func (f *fixture) mark(key string, marks ...store.Mark) uint64 {
	f.Helper()
	w := f.write(key, 0)
	w.Marks = marks
	return f.put(w)
}

// probe tries to reserve a new key, which must be blocked or written; what was
// written is deleted again, so that a probe changes nothing but the sequence.
func (f *fixture) probe(passedOver []store.Watermark, probes ...store.Probe) store.Result {
	f.Helper()
	const key = "the prober"
	result := f.reserve(store.Reserve{Write: f.write(key, 0), Probes: probes, PassedOver: passedOver})
	if result.Outcome == store.Written {
		f.remove(key, result.Version)
		return result
	}
	f.outcome(result, store.Blocked)
	return result
}

func (f *fixture) remove(key string, version uint64) {
	f.Helper()
	f.outcome(f.update(store.Write{Epoch: identity.Epoch, Key: key, Expected: version, Nonce: f.nonce()}), store.Written)
}

func (f *fixture) get(key string) (*store.Record, time.Time) {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	r, now, err := f.s.Get(ctx, key)
	if err != nil {
		f.Fatalf("Get %q: %v", key, err)
	}
	return r, now
}

// mustGet is a record that must be there.
func (f *fixture) mustGet(key string) *store.Record {
	f.Helper()
	r, _ := f.get(key)
	if r == nil {
		f.Fatalf("record %q is not there", key)
	}
	return r
}

func (f *fixture) page(l store.List) store.Page {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	page, err := f.s.List(ctx, l)
	if err != nil {
		f.Fatalf("List %+v: %v", l, err)
	}
	return page
}

// list goes through all pages. Each but the last must be full.
func (f *fixture) list(l store.List) []store.Record {
	f.Helper()
	var all []store.Record
	for {
		page := f.page(l)
		all = append(all, page.Records...)
		if page.Cursor == "" {
			return all
		}
		if l.Limit != 0 && len(page.Records) != l.Limit {
			f.Fatalf("List %+v: a page of %d with another one after it", l, len(page.Records))
		}
		l.Cursor = page.Cursor
	}
}

func (f *fixture) meter(meter string) *big.Rat {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	text, err := f.s.Meter(ctx, meter)
	if err != nil {
		f.Fatalf("Meter %q: %v", meter, err)
	}
	return rat(f, text)
}

func rat(t testing.TB, decimal string) *big.Rat {
	t.Helper()
	r, ok := new(big.Rat).SetString(decimal)
	if !ok {
		t.Fatalf("%q is not a decimal", decimal)
	}
	return r
}

// sum asserts what a meter says.
func (f *fixture) sum(meter, want string) {
	f.Helper()
	if have := f.meter(meter); have.Cmp(rat(f, want)) != 0 {
		f.Fatalf("meter %q is %s, want %s", meter, have.RatString(), want)
	}
}

func (f *fixture) outcome(r store.Result, want store.Outcome) {
	f.Helper()
	if r.Outcome != want {
		f.Fatalf("outcome %s, want %s: %+v", r.Outcome, want, r)
	}
}

// now is the store's time.
func (f *fixture) now() time.Time {
	f.Helper()
	_, now := f.get("nobody")
	return now
}

// reach lets the store's clock come to t: moves it, or waits for it.
func (f *fixture) reach(t time.Time) {
	f.Helper()
	deadline := time.Now().Add(patience)
	for now := f.now(); now.Before(t); now = f.now() {
		if f.h.Advance != nil {
			f.h.Advance(t.Sub(now))
			continue
		}
		if time.Now().After(deadline) {
			f.Fatalf("the store's clock does not come to %s, it says %s", t, now)
		}
	}
}

// restart ends the store and goes on with what it comes back as.
func (f *fixture) restart() {
	f.Helper()
	f.s = f.h.Restart(f)
	f.h.Store = f.s
}

// fails asserts an error by its kind.
func (f *fixture) fails(err, want error, doing string) {
	f.Helper()
	if !errors.Is(err, want) {
		f.Errorf("%s: %v, want %v", doing, err, want)
	}
}

func hitKeys(r store.Result) []string {
	var keys []string
	for _, h := range r.Hits {
		keys = append(keys, h.Record.Key)
	}
	return keys
}

func recordKeys(records []store.Record) []string {
	var keys []string
	for _, r := range records {
		keys = append(keys, r.Key)
	}
	return keys
}

// hits asserts which records were hit, in order.
func (f *fixture) hits(r store.Result, want ...string) {
	f.Helper()
	if len(want) == 0 {
		f.outcome(r, store.Written)
		return
	}
	f.outcome(r, store.Blocked)
	if have := hitKeys(r); !slices.Equal(have, want) || r.HitCount != len(want) {
		f.Fatalf("hit %q (count %d), want %q", have, r.HitCount, want)
	}
}
