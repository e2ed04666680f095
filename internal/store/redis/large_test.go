package redis_test

// Groups of marks beyond the size up to which they are looked through, compared
// with bolt: both give the same versions and the same watermarks.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

func TestLargeGroups(t *testing.T) {
	const rounds, steps = 3, 4000
	for range rounds {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { largeGroups(t, seed, steps) })
	}
}

func largeGroups(t *testing.T, seed uint64, steps int) {
	ctx := context.Background()
	random := rand.New(rand.NewPCG(seed, seed))
	chance := func(percent int) bool { return random.IntN(100) < percent }
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

	s := newServer(t)
	client := s.client(t)
	have, err := redis.OpenStanding(s.options())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = have.Close() })
	want, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true, Clock: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = want.Close() })
	setClock := func() {
		value := fmt.Sprintf("%d %d", now.Unix(), now.Nanosecond()/1000)
		if err := client.Do(ctx, client.B().Set().Key(have.Prefix()+redis.TestClockKey).Value(value).Build()).Error(); err != nil {
			t.Fatal(err)
		}
	}
	setClock()
	id := store.Identity{Epoch: "e", KeyDomain: "d"}
	for _, s := range []store.Store{have, want} {
		if _, err := s.Initialise(ctx, id); err != nil {
			t.Fatal(err)
		}
	}

	versions := map[string]uint64{}
	var watermarks []store.Watermark
	// Mark 0 is everybody's, mark 1 half of them have, and so on.
	mark := func() string {
		m := 0
		for m < 5 && chance(50) {
			m++
		}
		return fmt.Sprint("mark ", m)
	}
	step := 0
	// Tags come and go while the marks of a string are many.
	tag := func() string { return []string{"", "", "", "x", fmt.Sprint("y", step/300)}[random.IntN(5)] }
	blocked, large := 0, 0
	for i := range steps {
		step = i
		key := fmt.Sprint("key ", random.IntN(500))
		r := store.Reserve{Write: store.Write{
			Epoch: id.Epoch, Key: key, Expected: versions[key], Nonce: fmt.Sprint("nonce ", i),
			Record: &store.Record{Header: []byte(key), Unsettled: chance(30)},
		}}
		switch n := random.IntN(100); {
		// Records become many and, from the middle on, few again.
		case n < 8 && versions[key] != 0, i > steps/2 && n < 60 && versions[key] != 0:
			r.Record = nil
		case n < 20:
			r.KeepMarks = true
		case n < 35:
			r.RenewMarks = true
			if chance(70) {
				r.Until = now.Add(time.Duration(random.IntN(20_000)-1_000) * time.Millisecond)
			}
		default:
			for range random.IntN(4) + 1 {
				m := store.Mark{String: mark(), Tag: tag()}
				if chance(70) {
					m.Until = now.Add(time.Duration(random.IntN(20_000)-1_000) * time.Millisecond)
				}
				r.Marks = append(r.Marks, m)
			}
			if n >= 60 {
				break
			}
			for range random.IntN(4) + 1 {
				r.Probes = append(r.Probes, store.Probe{String: mark(), Except: tag(), First: chance(15)})
			}
			for len(watermarks) > 0 && chance(40) {
				late := watermarks[max(0, len(watermarks)-1-random.IntN(40)):]
				r.PassedOver = append(r.PassedOver, late[0])
			}
		}
		do := func(s store.Store) store.Result {
			t.Helper()
			var result store.Result
			var err error
			if r.Probes != nil {
				result, err = s.Reserve(ctx, r)
			} else {
				result, err = s.Update(ctx, r.Write)
			}
			if err != nil {
				t.Fatalf("step %d: %T: %+v: %v", i, s, r, err)
			}
			return result
		}
		h, w := do(have), do(want)
		if !reflect.DeepEqual(h, w) {
			t.Fatalf("step %d: %+v\nwith probes %+v over %q\nis answered %+v\nand by bolt %+v", i, r.Write, r.Probes, r.PassedOver, h, w)
		}
		if h.Outcome == store.Blocked {
			blocked++
			if h.HitCount > 2*store.MaxHits {
				large++
			}
			watermarks = append(watermarks, h.Watermark)
		}
		if h.Outcome == store.Written {
			versions[key] = h.Version
		}
		if chance(20) {
			now = now.Add(time.Duration(random.IntN(60)) * time.Millisecond)
			setClock()
		}
		if i%500 == 499 {
			if err := have.Check(ctx); err != nil {
				t.Fatalf("step %d: %v", i, err)
			}
		}
	}
	if blocked < steps/20 || large < steps/100 {
		t.Errorf("%d steps were blocked, %d by many", blocked, large)
	}
	t.Logf("%d steps, %d blocked, %d of them by more than %d records", steps, blocked, large, 2*store.MaxHits)
}

// TestSameRecordsInLargeGroups: records are looked at once, however many groups they share,
// and not asked for in every pair of these.
func TestSameRecordsInLargeGroups(t *testing.T) {
	const records, groups = 300, 8
	s := newServer(t)
	st := s.used(t)
	r := store.Reserve{Write: plain("new", 0), PassedOver: []store.Watermark{"1"}}
	var marks []store.Mark
	for g := range groups {
		text := fmt.Sprint("path ", g)
		marks = append(marks, store.Mark{String: text})
		r.Probes = append(r.Probes, store.Probe{String: text})
	}
	for i := range records {
		w := plain(fmt.Sprint("k", i), 0)
		w.Marks = marks
		if result, err := st.Update(background, w); err != nil || result.Outcome != store.Written {
			t.Fatalf("%+v, %v", result, err)
		}
	}
	looked, asked := s.callsOf(t, "getrange"), s.callsOf(t, "zmscore")
	result, err := st.Reserve(background, r)
	if err != nil || result.Outcome != store.Blocked || result.HitCount != records || len(result.Hits) != store.MaxHits {
		t.Errorf("%d hits, %d told: %v, %v", result.HitCount, len(result.Hits), result.Outcome, err)
	}
	if n := s.callsOf(t, "getrange") - looked; n > records {
		t.Errorf("%d records were looked at %d times", records, n)
	}
	// Two pages of each group: whether their marks are over, and whether the largest group
	// has them; then for the most telling.
	if n := s.callsOf(t, "zmscore") - asked; n > 2*groups+2*groups+2*groups {
		t.Errorf("%d groups were asked %d times", groups, n)
	}
}
