package postgres_test

// Who waits for whom, and that nobody waits in a circle.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

var identity = store.Identity{Epoch: "epoch-1", KeyDomain: "domain-1"}

func initialise(t testing.TB, s store.Store) {
	t.Helper()
	if _, err := s.Initialise(context.Background(), identity); err != nil {
		t.Fatal(err)
	}
}

func ancestors(path string) []string {
	var found []string
	for i, c := range path {
		if c == '/' {
			found = append(found, path[:i])
		}
	}
	return found
}

// reserve is a step into flight for these paths, with marks and probes as the guard
// makes them: a path marks itself and, differently, its ancestors; it probes itself,
// its ancestors and what lies under it.
func reserve(key string, paths ...string) store.Reserve {
	r := store.Reserve{Write: store.Write{
		Epoch: identity.Epoch, Key: key, Nonce: "first of " + key,
		Record: &store.Record{Unsettled: true, Header: []byte("header of " + key), Body: []byte("body")},
	}}
	marks, probes := map[string]bool{}, map[string]bool{}
	for _, p := range paths {
		marks["is "+p], probes["is "+p], probes["under "+p] = true, true, true
		for _, a := range ancestors(p) {
			marks["under "+a], probes["is "+a] = true, true
		}
	}
	for m := range marks {
		r.Marks = append(r.Marks, store.Mark{String: m})
	}
	for p := range probes {
		r.Probes = append(r.Probes, store.Probe{String: p})
	}
	return r
}

// answer is what a call in another goroutine came to.
type answer struct {
	result store.Result
	err    error
}

func inBackground(s store.Store, r store.Reserve) chan answer {
	done := make(chan answer, 1)
	go func() {
		result, err := s.Reserve(context.Background(), r)
		done <- answer{result, err}
	}()
	return done
}

func await(t testing.TB, done chan answer, want store.Outcome) store.Result {
	t.Helper()
	select {
	case a := <-done:
		if a.err != nil || a.result.Outcome != want {
			t.Fatalf("%+v, %v; want %s", a.result, a.err, want)
		}
		return a.result
	case <-time.After(patience):
		t.Fatalf("no answer; want %s", want)
	}
	panic("unreachable")
}

// waiting asserts that so many sessions come to wait for a lock of this kind.
func waiting(t testing.TB, c *pgx.Conn, kind string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d wait for %s", n, kind), func() error {
		have := ask[int](t, c, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = $1 AND application_name = 'holdfast'", kind)
		if have != n {
			return fmt.Errorf("%d wait", have)
		}
		return nil
	})
}

// stuck is a Reserve that has all its locks of strings and goes no further until it
// is let go: another session has the row of a meter of its own.
func stuck(t testing.TB, s *postgres.Store, server *server, schema, key string, paths ...string) (done chan answer, letGo func()) {
	t.Helper()
	meter := "meter of " + key
	seed := reserve("seed of " + key)
	seed.Meters = []store.MeterEntry{{Meter: meter, Amount: "1"}}
	await(t, inBackground(s, seed), store.Written)
	c := server.admin(t, "postgres")
	tx, err := c.Begin(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(context.Background(), fmt.Sprintf("SELECT FROM %s.meter WHERE name = $1 FOR UPDATE", schema), []byte(meter)); err != nil {
		t.Fatal(err)
	}
	r := reserve(key, paths...)
	r.Meters = []store.MeterEntry{{Meter: meter, Amount: "1"}}
	done = inBackground(s, r)
	waiting(t, server.admin(t, "postgres"), "transactionid", 1)
	return done, func() {
		t.Helper()
		if err := tx.Rollback(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

// Those that do not overlap pass one that stands still; those that do wait for it.
func TestWhoWaits(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema, Timeout: patience})
	initialise(t, s)
	c := server.admin(t, "postgres")

	done, letGo := stuck(t, s, server, schema, "first", "customer/c1/order/9", "lineage/1/call-1")
	for i, paths := range [][]string{
		{"customer/c1/order/8"},
		{"customer/c1/order/10", "customer/c1/order/11", "lineage/1/call-2"},
		{"customer/c1/order/9x"},
		{"customer/c2"},
		{"customer/c1/orders"},
		{"customer/c1/order/8/item/1"},
	} {
		r := reserve(fmt.Sprint("disjoint ", i), paths...)
		if i == 5 {
			// Under order 8, which was paid.
			await(t, inBackground(s, r), store.Blocked)
			continue
		}
		await(t, inBackground(s, r), store.Written)
	}
	// An Update waits for nobody's marks.
	u := reserve("updated", "customer/c1/order/9")
	result, err := s.Update(context.Background(), u.Write)
	if err != nil || result.Outcome != store.Written {
		t.Fatalf("%+v, %v", result, err)
	}
	u.Write = store.Write{Epoch: identity.Epoch, Key: "updated", Nonce: "gone", Expected: result.Version}
	if result, err = s.Update(context.Background(), u.Write); err != nil || result.Outcome != store.Written {
		t.Fatalf("%+v, %v", result, err)
	}

	overlapping := [][]string{
		{"customer/c1/order/9"},
		{"customer/c1/order"},
		{"customer/c1"},
		{"customer/c1/order/9/item/1"},
		{"customer/c3", "lineage/1"},
	}
	var waiters []chan answer
	for i, paths := range overlapping {
		waiters = append(waiters, inBackground(s, reserve(fmt.Sprint("overlapping ", i), paths...)))
		waiting(t, c, "advisory", i+1)
	}
	// The same key waits as well.
	waiters = append(waiters, inBackground(s, reserve("first", "customer/c4")))
	waiting(t, c, "advisory", len(waiters))
	letGo()
	first := await(t, done, store.Written)
	for i, w := range waiters[:len(overlapping)] {
		result := await(t, w, store.Blocked)
		var keys []string
		for _, h := range result.Hits {
			keys = append(keys, h.Record.Key)
		}
		if !slices.Contains(keys, "first") {
			t.Errorf("%q was told of %q", overlapping[i], keys)
		}
	}
	last := <-waiters[len(overlapping)]
	if last.err != nil || last.result.Version != first.Version {
		t.Errorf("the same write at the same time: %+v, %v", last.result, last.err)
	}
	noLocksLeft(t, server)
}

// Two that only mark a string pass each other, and two that only probe it.
func TestMarkersAndProbers(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second store.Reserve
		waits         bool
	}{
		{"mark and mark", marker("a"), marker("b"), false},
		{"probe and probe", prober("a"), prober("b"), false},
		{"mark, then probe", marker("a"), prober("b"), true},
		{"probe, then mark", prober("a"), marker("b"), true},
		{"both, then mark", both("a"), marker("b"), true},
		{"both, then probe", both("a"), prober("b"), true},
		{"mark, then both", marker("a"), both("b"), true},
		{"probe, then both", prober("a"), both("b"), true},
		{"both, then both", both("a"), both("b"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, schema := sharedServer(t), newSchema()
			s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema, Timeout: patience})
			initialise(t, s)
			admin := server.admin(t, "postgres")
			tx, err := admin.Begin(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			seed := reserve("seed")
			seed.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
			await(t, inBackground(s, seed), store.Written)
			if _, err := tx.Exec(context.Background(), fmt.Sprintf("SELECT FROM %s.meter FOR UPDATE", schema)); err != nil {
				t.Fatal(err)
			}
			c.first.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
			first := inBackground(s, c.first)
			watch := server.admin(t, "postgres")
			waiting(t, watch, "transactionid", 1)
			second := inBackground(s, c.second)
			if c.waits {
				waiting(t, watch, "advisory", 1)
			} else {
				await(t, second, store.Written)
			}
			if err := tx.Rollback(context.Background()); err != nil {
				t.Fatal(err)
			}
			await(t, first, store.Written)
			if c.waits {
				want := store.Written
				if len(c.first.Marks) > 0 && len(c.second.Probes) > 0 {
					want = store.Blocked
				}
				await(t, second, want)
			}
		})
	}
}

func marker(key string) store.Reserve {
	r := reserve(key)
	r.Marks = []store.Mark{{String: "s"}}
	return r
}

func prober(key string) store.Reserve {
	r := reserve(key)
	r.Probes = []store.Probe{{String: "s"}}
	return r
}

func both(key string) store.Reserve {
	r := marker(key)
	r.Probes = []store.Probe{{String: "s"}}
	return r
}

// Ten thousand operations on few strings in any order: no deadlock, no error, no two
// that overlap in flight, and indexes as they should be.
func TestNoDeadlocks(t *testing.T) {
	const workers, operations = 40, 10_000
	server, schema := newServer(t, "fsync=off"), newSchema()
	options := postgres.Options{DSN: server.dsn("postgres"), Schema: schema, MaxConns: workers / 2, Timeout: patience}
	stores := []*postgres.Store{open(t, options), open(t, options)}
	initialise(t, stores[0])
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	var mu sync.Mutex
	flying := map[string][]string{}
	outcomes := map[string]int{}
	var group sync.WaitGroup
	for worker := range workers {
		group.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(worker)))
			s := stores[worker%2]
			path := func() string {
				p := fmt.Sprintf("c%d", random.IntN(3))
				for range random.IntN(4) {
					p += fmt.Sprintf("/%d", random.IntN(3))
				}
				return p
			}
			for i := range operations / workers {
				key := fmt.Sprintf("%d/%d", worker, i)
				var paths []string
				for range random.IntN(3) + 1 {
					paths = append(paths, path())
				}
				r := reserve(key, paths...)
				for _, m := range random.Perm(4)[:random.IntN(4)] {
					r.Meters = append(r.Meters, store.MeterEntry{Meter: fmt.Sprint("m", m), Amount: fmt.Sprintf("0.%d", random.IntN(9)+1), Limit: "4"})
				}
				result, err := s.Reserve(context.Background(), r)
				if err != nil {
					t.Errorf("Reserve: %v", err)
					return
				}
				mu.Lock()
				outcomes[string(result.Outcome)]++
				if result.Outcome == store.Written {
					for other, theirs := range flying {
						if overlap(paths, theirs) {
							t.Errorf("%q %q and %q %q are both in flight", key, paths, other, theirs)
						}
					}
					flying[key] = paths
				}
				mu.Unlock()
				if result.Outcome != store.Written {
					continue
				}
				// It settles: its marks go, or, stamped anew, end.
				mu.Lock()
				delete(flying, key)
				mu.Unlock()
				w := store.Write{Epoch: identity.Epoch, Key: key, Nonce: "second", Expected: result.Version}
				if random.IntN(2) == 0 {
					w.Record = &store.Record{Header: []byte("settled"), Due: time.Unix(2e9, 0)}
					for _, m := range r.Marks {
						w.Marks = append(w.Marks, store.Mark{String: m.String, Until: result.Now})
					}
					for _, m := range random.Perm(4)[:random.IntN(4)] {
						w.Meters = append(w.Meters, store.MeterEntry{Meter: fmt.Sprint("m", m)})
					}
				}
				if result, err := s.Update(context.Background(), w); err != nil || result.Outcome != store.Written {
					t.Errorf("Update: %+v, %v", result, err)
					return
				}
			}
		})
	}
	group.Wait()
	t.Logf("outcomes %v", outcomes)
	for _, o := range []store.Outcome{store.Written, store.Blocked, store.OverLimit} {
		if outcomes[string(o)] < operations/100 {
			t.Errorf("%s came up %d times only", o, outcomes[string(o)])
		}
	}
	if err := stores[0].Check(context.Background()); err != nil {
		t.Error(err)
	}
	c := server.admin(t, "postgres")
	// A session reports its counts when it ends.
	for _, s := range stores {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "sessions end", func() error {
		if n := ask[int](t, c, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'"); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
	if n := ask[int](t, c, "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'"); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

func overlap(a, b []string) bool {
	for _, p := range a {
		for _, q := range b {
			if p == q || strings.HasPrefix(p, q+"/") || strings.HasPrefix(q, p+"/") {
				return true
			}
		}
	}
	return false
}
