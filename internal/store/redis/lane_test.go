package redis_test

// Steps that travel together.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// TestSecondQuestion: a second question goes once it is full, and a third one waits.
func TestSecondQuestion(t *testing.T) {
	for _, row := range []struct {
		questions, taken, waiting int
		goes                      bool
	}{
		{0, 0, 1, true},
		{1, 0, 40, false}, {1, 1, 1, false}, {1, 1, 31, false}, {1, 1, 32, true}, {1, 1, 40, true},
		{2, 1, 40, false}, {2, 2, 40, false}, {3, 1, 40, false},
	} {
		if goes := redis.Goes(row.questions, row.taken, row.waiting); goes != row.goes {
			t.Errorf("%+v: %t", row, goes)
		}
	}
}

// TestTogether: each of many steps that come at once has its own outcome, whatever becomes
// of the others.
func TestTogether(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	client := s.client(t)
	spoilt := st.Prefix() + "r" + redis.Hash("k7")
	if err := client.Do(background, client.B().Lpush().Key(spoilt).Element("x").Build()).Error(); err != nil {
		t.Fatal(err)
	}
	const writers = 60
	before := s.calls(t)
	s.signal(t, syscall.SIGSTOP)
	results, errs := make([]store.Result, writers), make([]error, writers)
	var group sync.WaitGroup
	for i := range writers {
		group.Go(func() {
			switch i % 10 {
			case 3: // taken by "present"
				results[i], errs[i] = st.Reserve(background, store.Reserve{
					Write: plain(fmt.Sprint("k", i), 0), Probes: []store.Probe{{String: "mark of present"}},
				})
			case 4: // no such version
				results[i], errs[i] = st.Update(background, plain("present", 99))
			case 5: // no room
				w := plain(fmt.Sprint("k", i), 0)
				w.Meters = []store.MeterEntry{{Meter: "small", Amount: "2", Limit: "1"}}
				results[i], errs[i] = st.Update(background, w)
			case 6: // nobody gave this watermark
				_, errs[i] = st.Reserve(background, store.Reserve{Write: plain(fmt.Sprint("k", i), 0), PassedOver: []store.Watermark{"1000000"}})
			default:
				results[i], errs[i] = st.Update(background, plain(fmt.Sprint("k", i), 0))
			}
		})
	}
	s.signal(t, syscall.SIGCONT)
	group.Wait()
	versions := map[uint64]bool{}
	for i := range writers {
		r, err := results[i], errs[i]
		switch {
		case i == 7:
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "another program") {
				t.Errorf("%d: %+v, %v, of a key of another type", i, r, err)
			}
			continue
		case i%10 == 6:
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%d: %v, of a watermark from nowhere", i, err)
			}
			continue
		case err != nil:
			t.Errorf("%d: %v", i, err)
			continue
		}
		want := store.Written
		switch i % 10 {
		case 3:
			want = store.Blocked
			if r.HitCount != 1 || r.Hits[0].Record.Key != "present" {
				t.Errorf("%d hits %+v", i, r.Hits)
			}
		case 4:
			want = store.Mismatch
			if r.Record == nil || r.Record.Key != "present" {
				t.Errorf("%d meets %+v", i, r.Record)
			}
		case 5:
			want = store.OverLimit
			if r.Meter != "small" {
				t.Errorf("%d: the meter %q is full", i, r.Meter)
			}
		default:
			if versions[r.Version] {
				t.Errorf("%d: version %d was given twice", i, r.Version)
			}
			versions[r.Version] = true
		}
		if r.Outcome != want {
			t.Errorf("%d: %v, want %v", i, r.Outcome, want)
		}
	}
	if n := s.calls(t) - before; n > writers/2 {
		t.Errorf("%d steps took %d scripts", writers, n)
	}
	if err := client.Do(background, client.B().Del().Key(spoilt).Build()).Error(); err != nil {
		t.Fatal(err)
	}
	// Reads, too, of what was written and what was not.
	for i := range writers {
		group.Go(func() {
			record, _, err := st.Get(background, fmt.Sprint("k", i))
			written := i != 7 && (i%10 < 3 || i%10 > 6)
			if err != nil || (record != nil) != written {
				t.Errorf("k%d: %+v, %v", i, record, err)
			} else if written && (string(record.Body) != "body" || record.Key != fmt.Sprint("k", i) || record.Version != results[i].Version) {
				t.Errorf("k%d: %+v", i, record)
			}
		})
	}
	group.Wait()
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

// TestOneReadOfMany: what is wrong with one record is not told to those who read others.
func TestOneReadOfMany(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	s.do(t, "LPUSH", st.Prefix()+"r"+redis.Hash("spoilt"), "x")
	s.signal(t, syscall.SIGSTOP)
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			if i == 10 {
				if _, _, err := st.Get(background, "spoilt"); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "another program") {
					t.Errorf("a key of another type: %v", err)
				}
			} else if r, _, err := st.Get(background, "present"); err != nil || r == nil || string(r.Body) != "body" {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	s.signal(t, syscall.SIGCONT)
	group.Wait()
}

// TestLeftBehind: a step whose caller has left is not asked for again with those beside it
// that came too late.
func TestLeftBehind(t *testing.T) {
	s := newServer(t)
	s.used(t)
	h := newHolder(t, s)
	st := s.open(t, h.pair)
	for range 2 {
		if _, err := st.Standing(background); err != nil {
			t.Fatal(err)
		}
	}
	bytes, release := h.hold(1)
	var group, leaving sync.WaitGroup
	var left sync.Map
	for i := range 40 {
		key := fmt.Sprint("k", i)
		if i%4 < 2 {
			group.Go(func() {
				if r, err := st.Update(background, plain(key, 0)); err != nil || r.Outcome != store.Written {
					t.Errorf("%+v, %v", r, err)
				}
			})
			continue
		}
		leaving.Go(func() {
			// In less than this the other connection's answers are there.
			short, cancel := context.WithTimeout(background, 2*time.Second)
			defer cancel()
			if _, err := st.Update(short, plain(key, 0)); err != nil {
				left.Store(key, true)
			}
		})
	}
	s.eventually(t, "some are under way", func() error {
		if bytes() == 0 {
			return errors.New("nothing was sent")
		}
		return nil
	})
	leaving.Wait()
	answered := make(chan error, 2)
	for range 2 {
		group.Go(func() { _, err := st.Standing(background); answered <- err })
	}
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	release()
	group.Wait()
	n := 0
	left.Range(func(key, _ any) bool {
		n++
		if r, _, err := st.Get(background, key.(string)); err != nil || r != nil {
			t.Errorf("%s was written after its caller had left: %+v, %v", key, r, err)
		}
		return true
	})
	if n == 0 {
		t.Error("nobody has left")
	}
	s.works(t, st)
}

// steps gives writes that get into each other's way: of few records, with few strings of marks.
type steps struct {
	random   *rand.Rand
	versions map[string]uint64
	last     store.Reserve
}

func (g *steps) next() store.Reserve {
	n := g.random.IntN
	if g.last.Write.Key != "" && n(10) == 0 {
		return g.last // once more, with its nonce
	}
	key := fmt.Sprint("k", n(6))
	r := store.Reserve{Write: store.Write{Epoch: costID.Epoch, Key: key, Expected: g.versions[key], Nonce: fmt.Sprint("nonce ", nonces.Add(1))}}
	w := &r.Write
	if n(8) == 0 {
		w.Expected++
	}
	updates := n(2) == 0
	for !updates && len(r.Probes) < 2 {
		probe := store.Probe{String: fmt.Sprint("string ", n(12))}
		if n(2) == 0 {
			probe.Except = fmt.Sprint("tag ", n(2))
		}
		r.Probes = append(r.Probes, probe)
	}
	if updates && w.Expected > 0 && n(3) == 0 {
		return r // it is removed
	}
	w.Record = &store.Record{Header: []byte(w.Nonce), Unsettled: n(2) == 0, Held: n(8) == 0}
	if n(6) > 0 {
		w.Record.Body = []byte("body of " + w.Nonce)
	}
	if n(6) > 0 {
		w.Record.Due = time.Unix(2e9+int64(n(3)), 0)
	}
	if n(4) == 0 {
		w.Meters = []store.MeterEntry{{Meter: fmt.Sprint("meter ", n(2)), Amount: fmt.Sprint(n(4)), Limit: "2"}}
	}
	if updates && w.Expected > 0 && n(2) == 0 {
		if w.KeepMarks = n(2) == 0; !w.KeepMarks {
			w.RenewMarks, w.Until = true, time.Unix(3e9, 0)
		}
		return r
	}
	for i := range 12 {
		if n(4) == 0 {
			m := store.Mark{String: fmt.Sprint("string ", i)}
			if n(3) == 0 {
				m.Tag = fmt.Sprint("tag ", n(2))
			}
			if n(8) == 0 {
				m.Until = time.Unix(3e9, 0)
			}
			w.Marks = append(w.Marks, m)
		}
	}
	return r
}

// all is what lies under each key of a namespace, but for what is kept of processes.
func (s *server) all(t *testing.T, st *redis.Store) map[string]string {
	t.Helper()
	// A script tells all kinds as a flat list.
	answer := s.do(t, "EVAL", `
local commands = {string = {'MGET'}, hash = {'HGETALL'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}}
local all = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local command = commands[redis.call('TYPE', key).ok]
  if key == ARGV[1] .. 'meta' then
    command = {'HMGET', 'sequence'}
  end
  all[#all + 1] = {key, redis.call(command[1], key, unpack(command, 2))}
end
return all`, "0", st.Prefix())
	keys, err := answer.ToArray()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, key := range keys {
		of, err := key.ToArray()
		if err != nil {
			t.Fatal(err)
		}
		name, err := of[0].ToString()
		if err != nil {
			t.Fatal(err)
		}
		parts, err := of[1].AsStrSlice()
		if err != nil {
			t.Fatal(err)
		}
		var pairs []string
		for pair := range slices.Chunk(parts, 2) {
			pairs = append(pairs, fmt.Sprintf("%q", pair))
		}
		slices.Sort(pairs) // a hash has no order
		all[strings.TrimPrefix(name, st.Prefix())] = strings.Join(pairs, "\n")
	}
	return all
}

// TestStepsOfOneScript: what steps of one script answer and leave behind is what they would
// one after the other, each by a script of its own.
func TestStepsOfOneScript(t *testing.T) {
	s := newServer(t)
	var stores [2]*redis.Store
	for i, namespace := range []string{"alone", "together"} {
		opts := s.options()
		opts.Namespace = namespace
		st, err := redis.OpenStanding(opts)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = st.Close() })
		s.do(t, "SET", st.Prefix()+redis.TestClockKey, "1700000000 0")
		if _, err := st.Initialise(background, costID); err != nil {
			t.Fatal(err)
		}
		stores[i] = st
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	g := steps{random: rand.New(rand.NewPCG(seed, 0)), versions: map[string]uint64{}}
	outcomes := map[store.Outcome]int{}
	for range 150 {
		var batch []store.Reserve
		var want []store.Result
		for range 1 + g.random.IntN(12) {
			r := g.next()
			var result store.Result
			var err error
			if r.Probes == nil {
				result, err = stores[0].Update(background, r.Write)
			} else {
				result, err = stores[0].Reserve(background, r)
			}
			if err != nil {
				t.Fatal(err)
			}
			if result.Outcome == store.Written {
				g.versions[r.Write.Key], g.last = result.Version, r
			}
			outcomes[result.Outcome]++
			batch, want = append(batch, r), append(want, result)
		}
		results, errs := stores[1].ReserveTogether(batch...)
		for i := range batch {
			if errs[i] != nil || !reflect.DeepEqual(results[i], want[i]) {
				t.Fatalf("step %d of %d: %+v\n%+v, %v, want\n%+v", i, len(batch), batch[i], results[i], errs[i], want[i])
			}
		}
		alone, together := s.all(t, stores[0]), s.all(t, stores[1])
		for name := range alone {
			if together[name] != alone[name] {
				t.Fatalf("%q is\n%q, want\n%q", name, together[name], alone[name])
			}
		}
		if len(alone) != len(together) {
			t.Fatalf("%d keys, want %d", len(together), len(alone))
		}
	}
	for _, outcome := range []store.Outcome{store.Written, store.Mismatch, store.Blocked, store.OverLimit} {
		if outcomes[outcome] == 0 {
			t.Errorf("no step was answered with %v", outcome)
		}
	}
	for _, st := range stores {
		if err := st.Check(background); err != nil {
			t.Errorf("check: %v", err)
		}
	}
}

// TestFirstWriteRefused: where the first of the writes that wait is refused, the steps that
// they are of are told so, none of these is written, and the store goes on.
func TestFirstWriteRefused(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	crowd := ""
	for i := 0; crowd == ""; i++ {
		if name := fmt.Sprint("crowd", i); plainName.MatchString(redis.Hash(name)) {
			crowd = name
		}
	}
	for i := range 66 {
		w := plain(fmt.Sprint("k", i), 0)
		w.Marks = []store.Mark{{String: crowd}, {String: "others"}}
		written(t, st, w)
	}
	// Of the sorted sets of marks one may be written, and the others be read.
	s.do(t, "ACL", "SETUSER", "limited", "on", ">pw", "+@all", "%R~"+st.Prefix()+"*", "~"+st.Prefix()+"[^m]*",
		"~"+st.Prefix()+"meta", "~"+st.Prefix()+"marks", "~"+st.Prefix()+"m"+redis.Hash(crowd))
	limited := s.open(t, func(o *redis.Options) {
		o.Credentials = func() (string, string, error) { return "limited", "pw", nil }
	})
	// The first one is held, and so does not wait.
	first := plain("first", 0)
	first.Marks = []store.Mark{{String: crowd}}
	writes := []store.Write{first}
	for i := range 3 {
		w := plain(fmt.Sprint("new", i), 0)
		w.Record, w.Meters, w.Marks = &store.Record{}, nil, []store.Mark{{String: "others"}}
		writes = append(writes, w)
	}
	before, err := st.Standing(background)
	if err != nil {
		t.Fatal(err)
	}
	results, errs := limited.UpdateTogether(writes...)
	if errs[0] != nil || results[0].Outcome != store.Written {
		t.Errorf("%+v, %v", results[0], errs[0])
	}
	for i, w := range writes[1:] {
		if err := errs[1+i]; !errors.Is(err, store.ErrUnavailable) || strings.Contains(err.Error(), "half") {
			t.Errorf("%s: %+v, %v", w.Key, results[1+i], err)
		}
		if r, _, err := st.Get(background, w.Key); err != nil || r != nil {
			t.Errorf("%s: %+v, %v", w.Key, r, err)
		}
	}
	if after, err := st.Standing(background); err != nil || after.Sequence != before.Sequence+1 {
		t.Errorf("%+v, %v, after %+v", after, err, before)
	}
	for _, w := range writes[1:] {
		written(t, st, w)
	}
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}
