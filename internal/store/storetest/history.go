package storetest

// Random histories, compared with the model at every step. A history is drawn from
// its seed, which is printed; HOLDFAST_STORE_SEED runs one again.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	histories    = 6
	historySteps = 2_500
)

func runHistory(t *testing.T, open func(t *testing.T) Harness) {
	if text := os.Getenv("HOLDFAST_STORE_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("HOLDFAST_STORE_SEED: %v", err)
		}
		history(newFixture(t, open(t)), seed)
		return
	}
	for range histories {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			history(newFixture(t, open(t)), seed)
		})
	}
}

// historian draws the steps of one history.
type historian struct {
	*fixture
	*rand.Rand
	model *model
	conns [2]store.Store
	// recent are requests that may be repeated.
	recent     []store.Reserve
	watermarks []store.Watermark
	// log is the end of what was done, for the failure's message.
	log      []string
	outcomes map[string]int
}

func history(f *fixture, seed uint64) {
	f.Logf("HOLDFAST_STORE_SEED=%d", seed)
	h := &historian{
		fixture: f, Rand: rand.New(rand.NewPCG(seed, seed)), model: newModel(identity),
		conns: f.connections(), outcomes: map[string]int{},
	}
	for i := range historySteps {
		if err := h.step(); err != nil {
			f.Fatalf("step %d: %v\nseed %d, the last steps:\n%s", i, err, seed, strings.Join(h.log, "\n"))
		}
	}
	if err := h.everything(); err != nil {
		f.Fatalf("at the end: %v", err)
	}
	if f.h.Check != nil {
		f.h.Check(f)
	}
	// A history in which something never happens proves less than it says.
	for _, what := range []string{string(store.Written), string(store.Mismatch), string(store.Blocked), string(store.OverLimit), "lost reply"} {
		if h.outcomes[what] < historySteps/200 {
			f.Errorf("%q came up %d times only: %v", what, h.outcomes[what], h.outcomes)
		}
	}
}

func (h *historian) note(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
	if len(h.log) > 40 {
		h.log = h.log[1:]
	}
}

func pick[T any](h *historian, from []T) T { return from[h.IntN(len(from))] }

func (h *historian) conn() store.Store { return h.conns[h.IntN(2)] }

func (h *historian) chance(percent int) bool { return h.IntN(100) < percent }

func (h *historian) key() string { return fmt.Sprint("key ", h.IntN(12)) }

func (h *historian) step() error {
	switch n := h.IntN(1000); {
	case n < 300:
		return h.do(h.reserve(), h.chance(8))
	case n < 600:
		return h.do(h.update(), h.chance(8))
	case n < 660:
		r := h.update()
		r.Record, r.Marks, r.KeepMarks, r.RenewMarks, r.Until, r.Meters = nil, nil, false, false, time.Time{}, nil
		if r.Expected == 0 {
			r.Expected = 1
		}
		return h.do(r, false)
	case n < 740 && len(h.recent) > 0:
		return h.do(pick(h, h.recent), false)
	case n < 750:
		r := h.reserve()
		r.Epoch = "epoch-2"
		return h.do(r, false)
	case n < 820:
		return h.get(h.key())
	case n < 870:
		return h.list(store.List{What: store.ListDue, Before: h.now().Add(time.Duration(h.IntN(4000)-1000) * time.Millisecond), Limit: h.IntN(5)})
	case n < 910:
		return h.list(store.List{What: store.ListHeld, Limit: h.IntN(5)})
	case n < 950:
		return h.meter(fmt.Sprint("meter ", h.IntN(3)))
	case n < 990:
		if h.fixture.h.Advance != nil {
			by := time.Duration(h.IntN(500_000)) * time.Microsecond
			h.note("advance %s", by)
			h.fixture.h.Advance(by)
		}
		return nil
	case n < 994:
		h.note("restart")
		h.restart()
		h.conns = h.connections()
		return nil
	default:
		return h.everything()
	}
}

// update draws a write, as a Reserve without probes.
func (h *historian) update() store.Reserve {
	var r store.Reserve
	r.Write = h.write(h.key(), 0)
	if have := h.model.get(r.Key); have != nil && !h.chance(8) {
		r.Expected = have.Version
	} else if h.chance(8) {
		r.Expected = h.Uint64N(h.model.version + 2)
	}
	r.Record.Body = []byte(fmt.Sprint("body ", h.Int()))
	if h.chance(20) {
		r.Record.Body, r.Record.Header = nil, nil
	}
	r.Record.Held, r.Record.Unsettled = h.chance(30), h.chance(40)
	if h.chance(50) {
		r.Record.Due = h.now().Add(time.Duration(h.IntN(3_000_000)) * time.Microsecond)
	}
	switch n := h.IntN(100); {
	case n < 30:
		r.KeepMarks = true
	case n < 50:
		r.RenewMarks, r.Until = true, h.until()
	default:
		for range h.IntN(4) {
			r.Marks = append(r.Marks, store.Mark{String: h.mark(), Tag: h.tag(), Until: h.until()})
		}
	}
	for _, meter := range h.Perm(3)[:h.IntN(3)] {
		e := store.MeterEntry{Meter: fmt.Sprint("meter ", meter), Amount: pick(h, []string{"", "0", "0.1", "0.3", "2", "1.999999999999999999999"})}
		if h.chance(60) {
			e.Limit = pick(h, []string{"0.1", "1", "3.999999999999999999998", "5"})
		}
		r.Meters = append(r.Meters, e)
	}
	return r
}

// reserve draws a write with probes.
func (h *historian) reserve() store.Reserve {
	r := h.update()
	if r.KeepMarks || r.RenewMarks {
		r.KeepMarks, r.RenewMarks, r.Until = false, false, time.Time{}
		r.Marks = []store.Mark{{String: h.mark()}}
	}
	for range h.IntN(3) + 1 {
		r.Probes = append(r.Probes, store.Probe{String: h.mark(), Except: h.tag(), First: h.chance(20)})
	}
	if len(h.watermarks) > 0 {
		// Mostly late ones, which cover much.
		for range h.IntN(3) {
			late := h.watermarks[max(0, len(h.watermarks)-10):]
			r.PassedOver = append(r.PassedOver, pick(h, [][]store.Watermark{late, late, h.watermarks}[h.IntN(3)]))
		}
	}
	return r
}

func (h *historian) mark() string { return fmt.Sprint("mark ", h.IntN(7)) }

func (h *historian) tag() string { return pick(h, []string{"", "", "x", "y"}) }

// until draws the end of a mark: mostly none.
func (h *historian) until() time.Time {
	if !h.chance(30) {
		return time.Time{}
	}
	return h.now().Add(time.Duration(h.IntN(2_000_000)-200_000) * time.Microsecond)
}

// do makes a write and compares. If the reply is to be lost, the caller leaves
// first, at a random moment, and repeats the write.
func (h *historian) do(r store.Reserve, lose bool) error {
	h.note("%s", describe(r))
	call := func(ctx context.Context) (store.Result, error) {
		if len(r.Probes) > 0 || len(r.PassedOver) > 0 {
			return h.conn().Reserve(ctx, r)
		}
		return h.conn().Update(ctx, r.Write)
	}
	if lose {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(h.IntN(1_500))*time.Microsecond)
		_, err := call(ctx)
		cancel()
		if err != nil && !errors.Is(err, store.ErrUnavailable) {
			return fmt.Errorf("a caller that left: %w", err)
		}
		h.outcomes["lost reply"]++
	}
	ctx, cancel := patient()
	defer cancel()
	have, err := call(ctx)
	h.note("  %s version %d hits %q meter %q watermark %q error %v", have.Outcome, have.Version, hitKeys(have), have.Meter, have.Watermark, err)
	h.outcomes[string(have.Outcome)]++
	if err := h.model.step(r, have, err); err != nil {
		return err
	}
	if lose && have.Outcome == store.Written {
		// The write may be as old as the first try.
		kept := h.mustGet(r.Key)
		if kept.At.After(have.Now) {
			return fmt.Errorf("written at %s, answered at %s", kept.At, have.Now)
		}
		h.model.records[r.Key].At = kept.At
	}
	if have.Outcome == store.Blocked && !slices.Contains(h.watermarks, have.Watermark) {
		h.watermarks = append(h.watermarks, have.Watermark)
	}
	h.recent = append(h.recent, r)
	if len(h.recent) > 6 {
		h.recent = h.recent[1:]
	}
	return h.get(r.Key)
}

func describe(r store.Reserve) string {
	what := fmt.Sprintf("%q expecting %d, %s, marks %+v keep %t renew %t until %s, meters %+v", r.Key, r.Expected, r.Nonce, r.Marks, r.KeepMarks, r.RenewMarks, r.Until, r.Meters)
	if r.Record == nil {
		return "delete " + what
	}
	what += fmt.Sprintf(", due %s held %t unsettled %t", r.Record.Due, r.Record.Held, r.Record.Unsettled)
	if len(r.Probes) > 0 {
		return fmt.Sprintf("reserve %s, probes %+v over %q", what, r.Probes, r.PassedOver)
	}
	return "update " + what
}

func (h *historian) get(key string) error {
	have, _ := h.fixture.get(key)
	if err := sameRecord(h.model.get(key), have); err != nil {
		return fmt.Errorf("get %q: %w", key, err)
	}
	return nil
}

func (h *historian) list(l store.List) error {
	want, have := h.model.list(l), h.fixture.list(l)
	for i := 1; i < len(have) && l.What == store.ListDue; i++ {
		if have[i].Due.Before(have[i-1].Due) {
			return fmt.Errorf("due list: %s after %s", have[i].Due, have[i-1].Due)
		}
	}
	if l.What == store.ListDue {
		// Records that are due at the same time come in any order.
		slices.SortStableFunc(have, func(a, b store.Record) int {
			if a.Due.Equal(b.Due) {
				return strings.Compare(a.Key, b.Key)
			}
			return a.Due.Compare(b.Due)
		})
	}
	if len(want) != len(have) {
		return fmt.Errorf("list %+v: %q, want %q", l, recordKeys(have), recordKeys(want))
	}
	for i := range want {
		if err := sameRecord(&want[i], &have[i]); err != nil {
			return fmt.Errorf("list %+v: %w", l, err)
		}
	}
	return nil
}

func (h *historian) meter(meter string) error {
	if want, have := h.model.meter(meter), h.fixture.meter(meter); want.Cmp(have) != 0 {
		return fmt.Errorf("meter %q is %s, want %s", meter, have.RatString(), want.RatString())
	}
	return nil
}

// everything compares all that can be seen.
func (h *historian) everything() error {
	h.note("compare everything")
	errs := []error{
		h.list(store.List{What: store.ListHeld}),
		h.list(store.List{What: store.ListDue, Before: h.now().Add(time.Hour)}),
	}
	for i := range 12 {
		errs = append(errs, h.get(fmt.Sprint("key ", i)))
	}
	for i := range 3 {
		errs = append(errs, h.meter(fmt.Sprint("meter ", i)))
	}
	return errors.Join(errs...)
}
