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

func updateInBackground(s store.Store, w store.Write) chan answer {
	done := make(chan answer, 1)
	go func() {
		result, err := s.Update(context.Background(), w)
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
	s := open(t, postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience})
	initialise(t, s)
	c := server.admin(t, "postgres")

	// Nobody knows yet that calls under one customer are many: that is learned.
	for _, ancestor := range []string{"customer", "customer/c1", "customer/c1/order", "lineage", "lineage/1"} {
		lane(t, server, schema, "is "+ancestor, laneProbe)
		lane(t, server, schema, "under "+ancestor, laneMark)
	}
	s = open(t, postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience})

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

// Kinds of lanes, and that of a tag.
const (
	laneMark  = "00000000-0000-0000-0000-000000000001"
	laneProbe = "00000000-0000-0000-0000-000000000002"
)

func digestInSQL(text string) string {
	return fmt.Sprintf("encode(substr(sha256('%s'), 1, 16), 'hex')::uuid", text)
}

// lane makes one, or gives it to another kind, as a transaction of the store would.
func lane(t testing.TB, server *server, schema, text, kind string) {
	t.Helper()
	server.exec(t, "postgres", fmt.Sprintf(`WITH changed AS (UPDATE %[1]s.lane SET kind = %[3]s WHERE string = %[2]s RETURNING 1)
			UPDATE %[1]s.meta SET lanes = lanes + 1 WHERE EXISTS (SELECT FROM changed)`, schema, digestInSQL(text), laneKind(kind)),
		fmt.Sprintf("INSERT INTO %s.lane VALUES (%s, %s, 0) ON CONFLICT DO NOTHING", schema, digestInSQL(text), laneKind(kind)))
}

func laneKind(kind string) string {
	if tag, ok := strings.CutPrefix(kind, "tag "); ok {
		return digestInSQL(tag)
	}
	return "'" + kind + "'"
}

// usesOfString are the ways to use a string.
var usesOfString = map[string]func(key, text string) store.Reserve{
	"mark": func(key, text string) store.Reserve {
		r := reserve(key)
		r.Marks = []store.Mark{{String: text}}
		return r
	},
	"probe": func(key, text string) store.Reserve {
		r := reserve(key)
		r.Probes = []store.Probe{{String: text}}
		return r
	},
	"both": func(key, text string) store.Reserve {
		r := reserve(key)
		r.Marks, r.Probes = []store.Mark{{String: text}}, []store.Probe{{String: text}}
		return r
	},
	"except another": func(key, text string) store.Reserve { return tagged(key, text, "t", "u") },
	"two tags": func(key, text string) store.Reserve {
		r := tagged(key, text, "t", "t")
		r.Marks = append(r.Marks, store.Mark{String: text, Tag: "u"})
		return r
	},
	"tag t": func(key, text string) store.Reserve { return tagged(key, text, "t", "t") },
	"tag u": func(key, text string) store.Reserve { return tagged(key, text, "u", "u") },
}

// Of a string, those pass each other that are of the kind that has the lane, and no others.
func TestLanes(t *testing.T) {
	hits := func(of, marks store.Reserve) bool {
		for _, p := range of.Probes {
			for _, m := range marks.Marks {
				if p.Except == "" || p.Except != m.Tag {
					return true
				}
			}
		}
		return false
	}
	server := sharedServer(t)
	for has, lanes := range map[string]string{"": "", "mark": laneMark, "probe": laneProbe, "tag t": "tag t", "tag u": "tag u"} {
		schema := newSchema()
		options := postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience}
		s := open(t, options)
		initialise(t, s)
		meter := []store.MeterEntry{{Meter: "m", Amount: "1"}}
		seed := reserve("seed")
		seed.Meters = meter
		await(t, inBackground(s, seed), store.Written)
		if has != "" {
			for one := range usesOfString {
				for other := range usesOfString {
					lane(t, server, schema, one+", "+other, lanes)
				}
			}
		}
		s = open(t, options)
		// The lanes are read on the first connection: a write that is planned before does without.
		if _, err := s.Standing(context.Background()); err != nil {
			t.Fatal(err)
		}
		admin, watch := server.admin(t, "postgres"), server.admin(t, "postgres")
		for one := range usesOfString {
			for other := range usesOfString {
				text := one + ", " + other
				t.Run(fmt.Sprintf("lane %q, %s, then %s", has, one, other), func(t *testing.T) {
					first, second := usesOfString[one]("a "+text, text), usesOfString[other]("b "+text, text)
					tx, err := admin.Begin(context.Background())
					if err != nil {
						t.Fatal(err)
					}
					defer func() { _ = tx.Rollback(context.Background()) }()
					if _, err := tx.Exec(context.Background(), fmt.Sprintf("SELECT FROM %s.meter FOR UPDATE", schema)); err != nil {
						t.Fatal(err)
					}
					first.Meters = meter
					done := inBackground(s, first)
					waiting(t, watch, "transactionid", 1)
					next := inBackground(s, second)
					pass := one == other && one == has
					if pass {
						await(t, next, store.Written)
					} else {
						waiting(t, watch, "advisory", 1)
					}
					if err := tx.Rollback(context.Background()); err != nil {
						t.Fatal(err)
					}
					await(t, done, store.Written)
					if !pass {
						want := store.Written
						if hits(second, first) {
							want = store.Blocked
						}
						await(t, next, want)
					}
				})
			}
		}
	}
}

// tagged marks a string with a tag and probes it except one.
func tagged(key, text, tag, except string) store.Reserve {
	r := reserve(key)
	r.Marks, r.Probes = []store.Mark{{String: text, Tag: tag}}, []store.Probe{{String: text, Except: except}}
	return r
}

// A process that knows of a lane which was given to another kind since waits.
func TestLaneTakenAway(t *testing.T) {
	for _, change := range []string{"given to u", "gone, and made anew for u"} {
		t.Run(change, func(t *testing.T) {
			server, schema := sharedServer(t), newSchema()
			options := postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience}
			initialise(t, open(t, options))
			lane(t, server, schema, "s", "tag t")
			old := open(t, options)
			await(t, inBackground(old, tagged("before", "s", "t", "t")), store.Written)
			if change != "given to u" {
				server.exec(t, "postgres", fmt.Sprintf("UPDATE %s.meta SET lanes = lanes + 1", schema), fmt.Sprintf("DELETE FROM %s.lane", schema))
			}
			lane(t, server, schema, "s", "tag u")
			gone := store.Write{Epoch: identity.Epoch, Key: "before", Nonce: "gone", Record: &store.Record{}}
			record, _, err := old.Get(context.Background(), "before")
			if err != nil {
				t.Fatal(err)
			}
			gone.Expected = record.Version
			if result, err := old.Update(context.Background(), gone); err != nil || result.Outcome != store.Written {
				t.Fatalf("%+v, %v", result, err)
			}

			now := open(t, options)
			seed := reserve("seed")
			seed.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
			await(t, inBackground(now, seed), store.Written)
			admin, watch := server.admin(t, "postgres"), server.admin(t, "postgres")
			tx, err := admin.Begin(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(context.Background(), fmt.Sprintf("SELECT FROM %s.meter FOR UPDATE", schema)); err != nil {
				t.Fatal(err)
			}
			first := tagged("first", "s", "u", "u")
			first.Meters = seed.Meters
			done := inBackground(now, first)
			waiting(t, watch, "transactionid", 1)
			await(t, inBackground(now, tagged("second", "s", "u", "u")), store.Written)
			third := inBackground(old, tagged("third", "s", "t", "t"))
			waiting(t, watch, "advisory", 1)
			if err := tx.Rollback(context.Background()); err != nil {
				t.Fatal(err)
			}
			await(t, done, store.Written)
			await(t, third, store.Blocked)
		})
	}
}

// A writer that has waited for another one of the same record finds the marks where that one
// has put them: it leaves behind no mark that is not its own, and takes away none that is. (Who
// renews marks must have been told of them, so nobody can while they are being written.)
func TestMarksOfTheWriterBefore(t *testing.T) {
	ends := time.Now().Add(time.Hour)
	to := func(marks ...string) func(*store.Write) {
		return func(w *store.Write) {
			for _, m := range marks {
				w.Marks = append(w.Marks, store.Mark{String: m, Tag: "tag", Until: ends})
			}
		}
	}
	keeps := func(w *store.Write) { w.KeepMarks = true }
	renews := func(w *store.Write) { w.RenewMarks, w.Until = true, ends.Add(time.Hour) }
	removes := func(w *store.Write) { w.Record = nil }
	for name, c := range map[string]struct {
		first, second func(*store.Write)
		want          []string
	}{
		"replaced, replaced": {to("b", "c"), to("c", "d"), []string{"c", "d"}},
		"replaced, kept":     {to("b", "c"), keeps, []string{"b", "c"}},
		"replaced, removed":  {to("b", "c"), removes, nil},
		"kept, replaced":     {keeps, to("b", "c"), []string{"b", "c"}},
		"kept, kept":         {keeps, keeps, []string{"a", "b"}},
		"kept, removed":      {keeps, removes, nil},
		"renewed, kept":      {renews, keeps, []string{"a", "b"}},
		"renewed, removed":   {renews, removes, nil},
	} {
		t.Run(name, func(t *testing.T) {
			server, schema := sharedServer(t), newSchema()
			options := postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience}
			s, other := open(t, options), open(t, options)
			initialise(t, s)
			seed := reserve("seed")
			seed.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
			await(t, inBackground(s, seed), store.Written)
			r := reserve("key")
			to("a", "b")(&r.Write)
			written := await(t, inBackground(s, r), store.Written)

			admin, watch := server.admin(t, "postgres"), server.admin(t, "postgres")
			tx, err := admin.Begin(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(context.Background(), fmt.Sprintf("SELECT FROM %s.meter FOR UPDATE", schema)); err != nil {
				t.Fatal(err)
			}
			// The first has the record's lock, and waits for the meter's row. Its version is the next one.
			first := store.Write{Epoch: identity.Epoch, Key: "key", Expected: written.Version, Nonce: "first", Record: &store.Record{}, Meters: seed.Meters}
			c.first(&first)
			before := updateInBackground(s, first)
			waiting(t, watch, "transactionid", 1)
			second := store.Write{Epoch: identity.Epoch, Key: "key", Expected: written.Version + 1, Nonce: "second", Record: &store.Record{}}
			c.second(&second)
			after := updateInBackground(other, second)
			waiting(t, watch, "advisory", 1)
			if err := tx.Rollback(context.Background()); err != nil {
				t.Fatal(err)
			}
			if a := await(t, before, store.Written); a.Version != second.Expected {
				t.Fatalf("the first has version %d, want %d", a.Version, second.Expected)
			}
			await(t, after, store.Written)

			if err := s.Check(context.Background()); err != nil {
				t.Error(err)
			}
			if n := ask[int](t, watch, fmt.Sprintf("SELECT count(*) FROM %s.mark", schema)); n != len(c.want) {
				t.Errorf("%d marks, want %d", n, len(c.want))
			}
			for _, m := range []string{"a", "b", "c", "d"} {
				want := store.Written
				if slices.Contains(c.want, m) {
					want = store.Blocked
				}
				r := reserve("probe of " + m)
				r.Probes = []store.Probe{{String: m}}
				await(t, inBackground(other, r), want)
			}
		})
	}
}

// Two processes on few strings in every way that there is, while lanes are made, given to
// other kinds and taken away: there is an order of the writes, that of their versions,
// in which no Reserve was written that a probe of its own should have stopped.
func TestLanesRace(t *testing.T) {
	const workers, each = 32, 150
	server, schema := newServer(t, "fsync=off"), newSchema()
	options := postgres.Options{DSN: server.patient(), Schema: schema, MaxConns: workers, Timeout: patience}
	stores := []*postgres.Store{open(t, options), open(t, options)}
	initialise(t, stores[0])
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	type life struct {
		store.Reserve
		from, to uint64
	}
	var mu sync.Mutex
	var lives []life
	outcomes := map[store.Outcome]int{}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var group, meddler sync.WaitGroup
	taken := 0
	admin := server.admin(t, "postgres")
	meddler.Go(func() {
		random := rand.New(rand.NewPCG(seed, 1<<32))
		for ctx.Err() == nil {
			// As the day's cleaning does, and as a process with many calls of one kind.
			_, err := admin.Exec(context.Background(), fmt.Sprintf("BEGIN; UPDATE %[1]s.meta SET lanes = lanes + 1; DELETE FROM %[1]s.lane WHERE random() < 0.3; COMMIT", schema))
			if err != nil {
				t.Error(err)
			}
			taken++
			for _, s := range stores {
				postgres.WantLanes(s, random.IntN(3) == 0)
			}
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	for worker := range workers {
		group.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(worker)))
			s := stores[worker%2]
			for i := range each {
				r := reserve(fmt.Sprintf("%d/%d", worker, i))
				tag := []string{"t", "t", "t", "t", "t", "t", "u", ""}[random.IntN(8)]
				for _, n := range random.Perm(3)[:1+random.IntN(2)] {
					text := fmt.Sprint("s", n)
					switch random.IntN(12) {
					case 0:
						r.Marks = append(r.Marks, store.Mark{String: text, Tag: tag})
					case 1:
						r.Probes = append(r.Probes, store.Probe{String: text, Except: tag})
					default:
						r.Marks = append(r.Marks, store.Mark{String: text, Tag: tag})
						r.Probes = append(r.Probes, store.Probe{String: text, Except: tag})
					}
				}
				result, err := s.Reserve(context.Background(), r)
				if err != nil {
					t.Errorf("Reserve: %v", err)
					return
				}
				mu.Lock()
				outcomes[result.Outcome]++
				mu.Unlock()
				if result.Outcome != store.Written {
					continue
				}
				w := store.Write{Epoch: identity.Epoch, Key: r.Key, Nonce: "second", Expected: result.Version, Record: &store.Record{}}
				gone, err := s.Update(context.Background(), w)
				if err != nil || gone.Outcome != store.Written {
					t.Errorf("Update: %+v, %v", gone, err)
					return
				}
				mu.Lock()
				lives = append(lives, life{r, result.Version, gone.Version})
				mu.Unlock()
			}
		})
	}
	group.Wait()
	stop()
	meddler.Wait()
	side := 0
	for _, a := range lives {
		for _, b := range lives {
			if a.from >= b.from || b.from >= a.to {
				continue
			}
			side++
			for _, p := range b.Probes {
				for _, m := range a.Marks {
					if p.String == m.String && (p.Except == "" || p.Except != m.Tag) {
						t.Errorf("%q, written with version %d, probes %+v; %q marked it with tag %q at version %d, until %d", b.Key, b.from, p, a.Key, m.Tag, a.from, a.to)
					}
				}
			}
		}
	}
	t.Logf("outcomes %v, %d pairs side by side, lanes were taken away %d times", outcomes, side, taken)
	if outcomes[store.Written] < workers*each/10 || outcomes[store.Blocked] < workers*each/100 || side < 100 || taken < 3 {
		t.Error("too little came up")
	}
	if err := stores[0].Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// Ten thousand operations on few strings in any order: no deadlock, no error, no two
// that overlap in flight, and indexes as they should be.
func TestNoDeadlocks(t *testing.T) {
	const workers, operations = 40, 10_000
	server, schema := newServer(t, "fsync=off"), newSchema()
	options := postgres.Options{DSN: server.patient(), Schema: schema, MaxConns: workers / 2, Timeout: patience}
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
