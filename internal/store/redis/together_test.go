package redis_test

// Random steps, many to a script, compared with bolt, which takes the same steps one by one:
// each answer, and all that is there afterwards. Few records, strings, tags and meters, so that
// the steps of a script get into each other's way. HOLDFAST_TOGETHER_SEED runs one again,
// HOLDFAST_TOGETHER_STEPS says how many.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// together is a store and its model, and the random steps for both.
type together struct {
	*rand.Rand
	t      *testing.T
	s      *server
	client valkey.Client
	have   *redis.Store
	want   *bolt.Store
	now    time.Time

	keys, strings int
	// only are the records that steps are of, if not all.
	only []string
	// calm steps take little away: most of them wait for each other.
	calm bool
	// versions are those that the records are thought to have; next is the version that is
	// given next.
	versions   map[string]uint64
	next       uint64
	recent     []store.Reserve
	watermarks []store.Watermark
	nonce      int
	outcomes   map[string]int
}

func newTogether(t *testing.T, seed uint64, few int) *together {
	t.Helper()
	g := &together{
		Rand: rand.New(rand.NewPCG(seed, uint64(few))), t: t, s: newServer(t),
		now:      time.Date(2030, 1, 2, 3, 4, 5, 678_901_000, time.UTC),
		versions: map[string]uint64{}, next: 1, outcomes: map[string]int{},
	}
	g.keys, g.strings, g.calm = few*3/2+3+g.IntN(6), 2+g.IntN(6), g.chance(50)
	g.client = g.s.client(t)
	var err error
	if g.have, err = redis.OpenFailing(g.s.options(), few); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.have.Close() })
	if g.want, err = bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true, Clock: func() time.Time { return g.now }}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.want.Close() })
	g.setClock()
	for _, st := range []store.Store{g.have, g.want} {
		if _, err := st.Initialise(background, costID); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

func (g *together) set(name, value string) {
	g.t.Helper()
	if err := g.client.Do(background, g.client.B().Set().Key(g.have.Prefix()+name).Value(value).Build()).Error(); err != nil {
		g.t.Fatal(err)
	}
}

func (g *together) unset(name string) {
	g.t.Helper()
	if err := g.client.Do(background, g.client.B().Del().Key(g.have.Prefix()+name).Build()).Error(); err != nil {
		g.t.Fatal(err)
	}
}

func (g *together) setClock() {
	g.t.Helper()
	g.set(redis.TestClockKey, fmt.Sprintf("%d %d", g.now.Unix(), g.now.Nanosecond()/1000))
}

func (g *together) chance(percent int) bool { return g.IntN(100) < percent }

// seldom is chance where steps that take something away come from.
func (g *together) seldom(percent int) bool {
	if g.calm {
		percent = (percent + 7) / 8
	}
	return g.chance(percent)
}

func (g *together) key() string {
	if len(g.only) > 0 {
		return g.only[g.IntN(len(g.only))]
	}
	return fmt.Sprint("key ", g.IntN(g.keys))
}

// mark is a string: mark 0 is that of most.
func (g *together) mark() string {
	m := 0
	for m < g.strings-1 && g.chance(55) {
		m++
	}
	return fmt.Sprint("mark ", m)
}

// fresh is a string that only the last steps may have: mostly one of the same script.
func (g *together) fresh() string { return fmt.Sprint("fresh ", (g.nonce-g.IntN(6))/6) }

// common is a string that only has marks without a tag.
const common = "common"

func (g *together) tag() string { return []string{"", "", "x", "y"}[g.IntN(4)] }

// draw is a step, which is thought to be made.
func (g *together) draw() store.Reserve {
	if len(g.recent) > 0 && g.chance(6) {
		return g.recent[g.IntN(len(g.recent))]
	}
	g.nonce++
	key := g.key()
	r := store.Reserve{Write: store.Write{
		Epoch: costID.Epoch, Key: key, Expected: g.versions[key], Nonce: fmt.Sprint("nonce ", g.nonce),
	}}
	if g.chance(5) {
		r.Expected = g.Uint64N(g.next + 1)
	}
	if r.Expected > 0 && g.seldom(12) {
		g.next++
		delete(g.versions, key)
		return r
	}
	w := &r.Write
	w.Record = &store.Record{Unsettled: g.chance(40), Held: g.seldom(12)}
	if g.chance(80) {
		w.Record.Header = []byte(fmt.Sprint("header ", g.nonce))
	}
	if !g.seldom(25) {
		w.Record.Body = []byte(fmt.Sprint("body ", g.nonce))
	}
	if !g.seldom(25) {
		w.Record.Due = g.now.Add(time.Duration(g.IntN(4)) * 500 * time.Millisecond)
	}
	if g.seldom(12) {
		for _, i := range g.Perm(3)[:1+g.IntN(2)] {
			e := store.MeterEntry{Meter: fmt.Sprint("meter ", i), Amount: []string{"", "0", "0.1", "2", "1.9999999999999999999"}[g.IntN(5)]}
			if g.chance(60) {
				e.Limit = []string{"0.1", "3.9", "5"}[g.IntN(3)]
			}
			w.Meters = append(w.Meters, e)
		}
	}
	probes := g.chance(40)
	keeps := !probes && g.chance(55)
	switch {
	case !keeps:
	case g.chance(50):
		w.KeepMarks = r.Expected > 0
	default:
		w.RenewMarks = true
		if g.chance(70) {
			w.Until = g.now.Add(time.Duration(g.IntN(2000)-100) * time.Millisecond)
		}
	}
	keeps = w.KeepMarks || w.RenewMarks
	if !keeps {
		for range g.IntN(6) {
			m := store.Mark{String: g.mark()}
			if g.chance(40) {
				m.Tag = g.tag()
			}
			if g.chance(15) {
				m.Until = g.now.Add(time.Duration(g.IntN(2000)-100) * time.Millisecond)
			}
			w.Marks = append(w.Marks, m)
		}
		if g.IntN(400) == 0 {
			// More than go into one command.
			for i := range 400 {
				w.Marks = append(w.Marks, store.Mark{String: fmt.Sprintf("large %d", i+g.IntN(3))})
			}
		}
		if g.chance(20) {
			// Of nobody else.
			w.Marks = append(w.Marks, store.Mark{String: fmt.Sprint("own ", g.nonce)})
		}
	}
	for probes && (len(r.Probes) == 0 || g.chance(50)) {
		p := store.Probe{String: g.mark(), Except: g.tag(), First: g.chance(20)}
		if g.chance(50) {
			p.String = g.fresh()
		}
		r.Probes = append(r.Probes, p)
	}
	if !keeps && g.chance(30) {
		w.Marks = append(w.Marks, store.Mark{String: g.fresh(), Tag: g.tag()})
	}
	if !keeps && g.chance(30) {
		w.Marks = append(w.Marks, store.Mark{String: common})
	}
	for len(r.Probes) > 0 && len(g.watermarks) > 0 && g.chance(50) {
		late := g.watermarks[max(0, len(g.watermarks)-1-g.IntN(6)):]
		r.PassedOver = append(r.PassedOver, late[0])
	}
	g.versions[key] = g.next
	g.next++
	return r
}

// ask makes a step by the model.
func (g *together) ask(r store.Reserve) store.Result {
	g.t.Helper()
	var result store.Result
	var err error
	if r.Probes != nil {
		result, err = g.want.Reserve(background, r)
	} else {
		result, err = g.want.Update(background, r.Write)
	}
	if err != nil {
		g.t.Fatalf("the model: %+v: %v", r, err)
	}
	standing, err := g.want.Standing(background)
	if err != nil {
		g.t.Fatal(err)
	}
	g.next = standing.Sequence + 1
	switch result.Outcome {
	case store.Mismatch:
		g.versions[r.Key] = 0
		if result.Record != nil {
			g.versions[r.Key] = result.Record.Version
		}
	case store.OverLimit:
		g.versions[r.Key] = r.Expected
	case store.Written:
		g.versions[r.Key] = result.Version
		g.recent = append(g.recent, r)
		g.recent = g.recent[max(0, len(g.recent)-5):]
	case store.Blocked:
		g.versions[r.Key] = r.Expected
		g.watermarks = append(g.watermarks, result.Watermark)
	}
	g.outcomes[string(result.Outcome)]++
	return result
}

func describeAll(batch []store.Reserve, results []store.Result, errs []error) string {
	var b strings.Builder
	for i, r := range batch {
		fmt.Fprintf(&b, "%d: %+v probes %+v over %q record %+v\n   -> %+v %v\n", i, r.Write, r.Probes, r.PassedOver, r.Record, results[i], errs[i])
	}
	return b.String()
}

// same compares all that is there.
func (g *together) same() error {
	var errs []error
	ask := func(what string, of func(st store.Store) (any, error)) {
		h, err := of(g.have)
		w, err2 := of(g.want)
		if err != nil || err2 != nil || !reflect.DeepEqual(h, w) {
			errs = append(errs, fmt.Errorf("%s: %+v, want %+v", what, h, w), err, err2)
		}
	}
	ask("standing", func(st store.Store) (any, error) { return st.Standing(background) })
	for i := range g.keys {
		key := fmt.Sprint("key ", i)
		ask(key, func(st store.Store) (any, error) {
			r, _, err := st.Get(background, key)
			if r != nil {
				g.versions[key] = r.Version
			} else {
				delete(g.versions, key)
			}
			return r, err
		})
	}
	for i := range 3 {
		ask("meter", func(st store.Store) (any, error) { return st.Meter(background, fmt.Sprint("meter ", i)) })
	}
	list := func(l store.List) func(st store.Store) (any, error) {
		return func(st store.Store) (any, error) {
			p, err := st.List(background, l)
			byKey := map[string]store.Record{}
			for _, r := range p.Records {
				byKey[r.Key] = r
			}
			return byKey, err
		}
	}
	ask("held", list(store.List{What: store.ListHeld}))
	ask("due", list(store.List{What: store.ListDue, Before: g.now.Add(time.Hour)}))
	return errors.Join(errs...)
}

func (g *together) check() error {
	ctx, cancel := context.WithTimeout(background, patience)
	defer cancel()
	return g.have.Check(ctx)
}

func togetherSteps(t *testing.T, usual int) (steps int, seed func() uint64) {
	steps = usual
	if text := os.Getenv("HOLDFAST_TOGETHER_STEPS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		steps = n
	}
	return steps, func() uint64 {
		if text := os.Getenv("HOLDFAST_TOGETHER_SEED"); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		return rand.Uint64()
	}
}

// inHistories makes so many steps, in histories of at most so many each, by turns with marks that
// are few up to another number; run says how many it has made.
func inHistories(t *testing.T, steps, most int, run func(g *together, seed uint64, n int) int) {
	steps, seed := togetherSteps(t, steps)
	for _, few := range []int{1, 2, 4, 64} {
		t.Run(fmt.Sprintf("few=%d", few), func(t *testing.T) {
			for done := 0; done < steps/4 && !t.Failed(); {
				seed := seed()
				done += run(newTogether(t, seed, few), seed, min(most, steps/4-done))
			}
		})
	}
}

// TestTogetherAsAlone: steps of one script are answered, and leave the store, as steps that
// are made one by one.
func TestTogetherAsAlone(t *testing.T) {
	inHistories(t, 3000, 2500, func(g *together, seed uint64, n int) int {
		togetherAsAlone(g, seed, n)
		return n
	})
}

func togetherAsAlone(g *together, seed uint64, steps int) {
	t := g.t
	t.Helper()
	for made, batches := 0, 0; made < steps; batches++ {
		var batch []store.Reserve
		var want []store.Result
		for range 1 + g.IntN(32) {
			r := g.draw()
			batch, want = append(batch, r), append(want, g.ask(r))
		}
		made += len(batch)
		results, errs := g.have.ReserveTogether(batch...)
		for i := range batch {
			if errs[i] != nil || !reflect.DeepEqual(results[i], want[i]) {
				t.Fatalf("seed %d, after %d steps: step %d of\n%swant %+v", seed, made, i, describeAll(batch, results, errs), want[i])
			}
		}
		if batches%4 == 0 {
			if err := errors.Join(g.same(), g.check()); err != nil {
				t.Fatalf("seed %d, after %d steps: %v\nthe last were\n%s", seed, made, err, describeAll(batch, results, errs))
			}
		}
		if batches%16 == 15 {
			// What the log says is what was there.
			g.s.kill(t)
			g.s.start(t)
			g.s.eventually(t, "the server is up", func() error {
				_, err := g.have.Standing(background)
				return err
			})
			g.client = g.s.client(t)
			if err := errors.Join(g.same(), g.check()); err != nil {
				t.Fatalf("seed %d, after %d steps, replayed: %v", seed, made, err)
			}
		}
		if g.chance(40) {
			g.now = g.now.Add(time.Duration(g.IntN(400_000)) * time.Microsecond)
			g.setClock()
		}
	}
	t.Logf("seed %d: %v", seed, g.outcomes)
	// A full meter is seldom met.
	often := []store.Outcome{store.Written, store.Mismatch, store.Blocked}
	if steps >= 2000 && !g.calm {
		often = append(often, store.OverLimit)
	}
	for _, outcome := range often {
		if steps > 500 && g.outcomes[string(outcome)] == 0 {
			t.Errorf("no step was answered with %v", outcome)
		}
	}
}

// TestTogetherWithFailures: where a command of a script is refused, each step is whole or not
// at all, as it is answered; or, if some of it had been written, nothing is asked of the store
// any more.
func TestTogetherWithFailures(t *testing.T) {
	inHistories(t, 1200, 1500, togetherWithFailures)
}

func togetherWithFailures(g *together, seed uint64, steps int) int {
	t := g.t
	t.Helper()
	made, refused, scripts := 0, 0, 0
	// Only some end with half a step.
	halves := g.chance(30)
	for made < steps {
		var batch []store.Reserve
		for range 1 + g.IntN(16) {
			batch = append(batch, g.draw())
		}
		made += len(batch)
		fails, mayHalf := g.chance(70), false
		switch {
		case fails && halves && made > steps/4:
			mayHalf = true
			g.set(redis.TestFailKey, fmt.Sprint("write ", 1+g.IntN(3*len(batch))))
		case fails && g.chance(15):
			g.set(redis.TestFailKey, fmt.Sprint("pack ", 1+g.IntN(len(batch))))
		case fails && g.chance(30):
			g.set(redis.TestFailKey, fmt.Sprint("first ", 1+g.IntN(1+len(batch)/2)))
		case fails:
			g.set(redis.TestFailKey, fmt.Sprint("read ", 1+g.IntN(5*len(batch))))
		}
		results, errs := g.have.ReserveTogether(batch...)
		if fails {
			g.unset(redis.TestFailKey)
		}
		half := false
		for i := range batch {
			if errs[i] != nil {
				refused++
				half = half || strings.Contains(errs[i].Error(), "written by half")
				if !errors.Is(errs[i], store.ErrUnavailable) || !strings.Contains(errs[i].Error(), "INJECTED") {
					t.Fatalf("seed %d, after %d steps: step %d of\n%s", seed, made, i, describeAll(batch, results, errs))
				}
			}
		}
		if half && !mayHalf {
			t.Fatalf("seed %d, after %d steps: half of\n%s", seed, made, describeAll(batch, results, errs))
		}
		if half {
			// All is refused from now on.
			for name, ask := range asks(g.have) {
				if err := ask(background); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "written by half") {
					t.Fatalf("seed %d, after %d steps: half a step, and %s is answered with %v\n%s", seed, made, name, err, describeAll(batch, results, errs))
				}
			}
			g.outcomes["half"]++
			return made
		}
		if errors.Join(errs...) != nil {
			scripts++
		}
		for i, r := range batch {
			if errs[i] != nil {
				continue
			}
			if want := g.ask(r); !reflect.DeepEqual(results[i], want) {
				t.Fatalf("seed %d, after %d steps: step %d of\n%swant %+v", seed, made, i, describeAll(batch, results, errs), want)
			}
		}
		if err := errors.Join(g.same(), g.check()); err != nil {
			t.Fatalf("seed %d, after %d steps: %v\nthe last were\n%s", seed, made, err, describeAll(batch, results, errs))
		}
		if g.chance(40) {
			g.now = g.now.Add(time.Duration(g.IntN(400_000)) * time.Microsecond)
			g.setClock()
		}
	}
	t.Logf("seed %d: %d refused in %d scripts, %v", seed, refused, scripts, g.outcomes)
	return made
}
