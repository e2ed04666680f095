package postgres_test

// What a call costs when much was settled before it.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

// load puts in settled records as calls like callOf leave them, numbered from first,
// whose marks end at this time; with the tag for the string that all of them have.
func load(t testing.TB, server *server, schema string, first, n int, until time.Time, tag string, indexed bool) {
	t.Helper()
	const texts = `ARRAY['is account/' || a || '/order/' || i, 'under account/' || a || '/order', 'under account/' || a, 'under account',
		'is session-' || s || '/' || c, 'under session-' || s, 'exact account/' || a || '/order/' || i, 'payment ' || a || ' 49.99', 'payment ' || a, 'payment'],
		ARRAY['', '', '', '', '', '', '', 'tag 0', 'tag 1', '%s']`
	bound := int64(1<<63 - 1)
	if indexed {
		bound = until.UnixMilli()
	}
	server.exec(t, "postgres", "SET search_path = "+schema, "SET synchronous_commit = off", "SET work_mem = '256MB'", "SET maintenance_work_mem = '1GB'",
		`CREATE OR REPLACE FUNCTION digest_of(text) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT AS
			$$ SELECT CASE WHEN $1 = '' THEN '00000000-0000-0000-0000-000000000000'::uuid ELSE encode(substr(sha256($1::bytea), 1, 16), 'hex')::uuid END $$`,
		fmt.Sprintf(`INSERT INTO record (digest, version, at, due, stamp, until, era, held, unsettled, indexed, key, nonce, header, body, strings, tags)
			SELECT digest_of('loaded/' || i), nextval('version'), clock(), %[3]d, pg_current_xact_id(), %[4]d, (SELECT era FROM meta), false, false, %[5]t,
				('loaded/' || i)::bytea, 'nonce', repeat('h', 600)::bytea, repeat('b', 1210)::bytea, m.strings, m.tags
			FROM (SELECT i, i %% 1000 AS a, 'loaded-' || (i / 4) AS s, i %% 4 AS c FROM generate_series(%[1]d, %[2]d) AS i) AS n,
				LATERAL (SELECT array_agg(digest_of(text) ORDER BY digest_of(text)) AS strings, array_agg(digest_of(tag) ORDER BY digest_of(text)) AS tags
					FROM unnest(%[6]s) AS u (text, tag)) AS m`,
			first, first+n-1, time.Now().Add(48*time.Hour).UnixMilli(), until.UnixMilli(), indexed, fmt.Sprintf(texts, tag)),
		"ALTER TABLE mark DROP CONSTRAINT mark_pkey",
		fmt.Sprintf(`INSERT INTO mark (string, tag, until, record)
			SELECT s.string, s.tag, %[3]d, digest FROM generate_series(%[1]d, %[2]d) AS i
				JOIN record ON digest = digest_of('loaded/' || i), unnest(strings, tags) AS s (string, tag)`, first, first+n-1, bound),
		"ALTER TABLE mark ADD PRIMARY KEY (string, tag, until, record)",
		"DROP FUNCTION digest_of", "VACUUM ANALYZE record", "VACUUM ANALYZE mark")
}

// reads are the entries of indexes, and the rows of tables without them, that the calls of
// one store read.
func reads(t testing.TB, server *server, options postgres.Options, calls func(store.Store)) int {
	t.Helper()
	c := server.admin(t, "postgres")
	count := func() int {
		return ask[int](t, c, `SELECT coalesce((SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = $1), 0)
			+ coalesce((SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = $1 AND relname NOT IN ('meta', 'goose_db_version')), 0)`, options.Schema)
	}
	// A session hands in what it has counted when it ends.
	ended := func() {
		eventually(t, "sessions end", func() error {
			if n := ask[int](t, c, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'"); n > 0 {
				return fmt.Errorf("%d are there", n)
			}
			return nil
		})
	}
	ended()
	before := count()
	s, err := postgres.Open(options)
	if err != nil {
		t.Fatal(err)
	}
	calls(s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ended()
	return count() - before
}

// However many records mark a string with the tag that a probe excepts, or have ended,
// the probe does not read them.
func TestProbesReadLittle(t *testing.T) {
	const settled = 20_000
	server := newServer(t, "fsync=off")
	options := postgres.Options{DSN: server.dsn("postgres"), Schema: newSchema(), MaxConns: 1}
	s := open(t, options)
	initialise(t, s)
	pair(t, s, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	load(t, server, options.Schema, 0, settled, time.Now().Add(time.Hour), "tag 2", false)
	// Of an identity that was in use until some time ago.
	load(t, server, options.Schema, settled, settled, time.Now().Add(-time.Hour), "tag before", true)

	const calls = 10
	entries := reads(t, server, options, func(s store.Store) {
		for n := range calls {
			pair(t, s, int64(10*settled+n))
		}
	})
	t.Logf("%d entries were read for %d calls", entries, calls)
	if entries > calls*100 {
		t.Errorf("%d entries were read for %d calls", entries, calls)
	}
	s = open(t, options)
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// One that has not ended, in the midst of them.
	server.exec(t, "postgres", fmt.Sprintf(`SET search_path = %s`, options.Schema),
		fmt.Sprintf(`UPDATE mark SET until = until + 7200000 WHERE record = (SELECT digest FROM record WHERE key = 'loaded/%d')`, settled+7),
		fmt.Sprintf(`UPDATE record SET until = until + 7200000 WHERE key = 'loaded/%d'`, settled+7))
	r := callOf(20 * settled)
	result, err := s.Reserve(context.Background(), r)
	if err != nil || result.Outcome != store.Blocked || result.HitCount != 1 || result.Hits[0].Record.Key != fmt.Sprint("loaded/", settled+7) {
		t.Errorf("%+v, %v", result, err)
	}
}

// A session keeps the plan that it made while the tables were seen to be empty, until the
// server looks at them again: a rush that begins after all was removed must do with it.
func TestEmptyTablesGrow(t *testing.T) {
	server := newServer(t, "fsync=off", "autovacuum=off")
	options := postgres.Options{DSN: server.dsn("postgres"), Schema: newSchema(), MaxConns: 1}
	const calls = 300
	entries := reads(t, server, options, func(s store.Store) {
		initialise(t, s)
		server.exec(t, "postgres", "VACUUM ANALYZE")
		for n := range calls {
			pair(t, s, int64(n))
		}
	})
	t.Logf("%d entries were read for %d calls", entries, calls)
	if entries > calls*10 {
		t.Errorf("%d entries were read for %d calls", entries, calls)
	}
}

// plan is a node of one that auto_explain has noted.
type plan struct {
	Node     string `json:"Node Type"`
	Relation string `json:"Relation Name"`
	Index    string `json:"Index Name"`
	Cond     string `json:"Index Cond"`
	Plans    []plan
}

// walks is what the plan reads of tables that grow without a place in an index to begin at.
func (p plan) walks() []string {
	begins := map[string]string{
		"mark_pkey": "(string = ", "lane_pkey": "(string = ", "record_pkey": "(digest = ", "grave_pkey": "(digest = ", "beat_pkey": "(process = ",
		"meter_pkey": "(digest = ", "record_due": "(due ", "record_held": "(substr(key, 1, 1000) ",
	}
	var found []string
	switch begin, known := begins[p.Index]; {
	case strings.HasSuffix(p.Node, "Seq Scan") && begins[p.Relation+"_pkey"] != "",
		p.Index != "" && known && !strings.Contains(p.Cond, begin):
		found = append(found, fmt.Sprintf("%s of %s, %s, by %q", p.Node, p.Relation, p.Index, p.Cond))
	}
	for _, below := range p.Plans {
		found = append(found, below.walks()...)
	}
	return found
}

// Whatever the server thinks of the size of a table, what is looked up in it is looked up
// in an index.
func TestPlansOfSmallTables(t *testing.T) {
	server := newServer(t, "fsync=off", "autovacuum=off", "shared_preload_libraries=auto_explain",
		"auto_explain.log_min_duration=0", "auto_explain.log_nested_statements=on", "auto_explain.log_format=json")
	paid := func(s store.Store) (store.Reserve, store.Write) {
		r := callOf(calls.Add(1))
		return r, settlementOf(r, await(t, inBackground(s, r), store.Written).Version)
	}
	updated := func(s store.Store, w store.Write) store.Write {
		result, err := s.Update(context.Background(), w)
		if err != nil || result.Outcome != store.Written {
			t.Fatalf("%+v, %v", result, err)
		}
		w.Expected, w.Nonce = result.Version, w.Nonce+" and on"
		return w
	}
	for _, before := range []int{0, 1, 5} {
		options := postgres.Options{DSN: server.dsn("postgres"), Schema: newSchema(), MaxConns: 16}
		s := open(t, options)
		initialise(t, s)
		for range before {
			_, w := paid(s)
			updated(s, w)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		server.exec(t, "postgres", "VACUUM ANALYZE")
		s = open(t, options)
		r, w := paid(s)
		w = updated(s, w)
		r.Nonce = "another"
		await(t, inBackground(s, r), store.Mismatch)
		r.Key += " once more"
		await(t, inBackground(s, r), store.Blocked)
		w.Marks = w.Marks[1:]
		w = updated(s, w)
		w.Marks, w.KeepMarks = nil, true
		w.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
		w = updated(s, w)
		w.Record, w.KeepMarks, w.Meters = nil, false, nil
		updated(s, w)
		for _, l := range []store.List{{What: store.ListDue, Before: time.Now()}, {What: store.ListHeld}} {
			if page, err := s.List(context.Background(), l); err != nil || len(page.Records) > 0 {
				t.Fatalf("%d records, %v", len(page.Records), err)
			}
		}
		if _, err := s.Standing(context.Background()); err != nil {
			t.Fatal(err)
		}
		if sum, err := s.Meter(context.Background(), "m"); err != nil || sum != "0" {
			t.Fatal(sum, err)
		}
		postgres.WantLanes(s, true)
		admin := server.admin(t, "postgres")
		eventually(t, "a lane is made", func() error {
			var group sync.WaitGroup
			for range 16 {
				group.Go(func() { pair(t, s, calls.Add(1)) })
			}
			group.Wait()
			if ask[int](t, admin, fmt.Sprintf("SELECT count(*) FROM %s.lane", options.Schema)) == 0 {
				return errors.New("there is none")
			}
			return nil
		})
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.ReadFile(filepath.Join(server.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	// Where each of the lookups is.
	expected := []string{
		"WITH free AS", "WITH RECURSIVE probe", "FROM meta m LEFT JOIN record r", "DELETE FROM mark", "UPDATE mark", "DELETE FROM record", "UPDATE record",
		"r.version >= w.version", "LATERAL (SELECT FROM lane", "ORDER BY r.due", "WHERE r.held", "FROM meter t",
	}
	seen := map[string]bool{}
	for _, text := range strings.Split(string(log), "plan:\n")[1:] {
		var noted struct {
			Query string `json:"Query Text"`
			Plan  plan
		}
		if err := json.NewDecoder(strings.NewReader(text)).Decode(&noted); err != nil {
			t.Fatal(err)
		}
		for _, part := range expected {
			seen[part] = seen[part] || strings.Contains(noted.Query, part)
		}
		// What is said of the schema while it is made, and what a process reads once.
		if strings.Contains(noted.Query, "goose") || strings.Contains(noted.Query, "LEFT JOIN lane") || strings.Contains(noted.Query, "count(*)") && strings.Contains(noted.Query, ".lane") {
			continue
		}
		for _, walk := range noted.Plan.walks() {
			t.Errorf("%s in\n%s", walk, noted.Query)
		}
	}
	for _, part := range expected {
		if !seen[part] {
			t.Errorf("no plan of %q was seen", part)
		}
	}
}

// A write that keeps its marks enters into the index when they end; one that stamps them
// anew takes that out again.
func TestEndsInTheIndex(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	initialise(t, s)
	admin := server.admin(t, "postgres")
	r := callOf(1)
	result := await(t, inBackground(s, r), store.Written)
	w := settlementOf(r, result.Version)
	update := func(n int) {
		t.Helper()
		w.Nonce = fmt.Sprint("step ", n)
		result, err := s.Update(context.Background(), w)
		if err != nil || result.Outcome != store.Written {
			t.Fatalf("%+v, %v", result, err)
		}
		w.Expected = result.Version
		if err := s.Check(context.Background()); err != nil {
			t.Error(err)
		}
	}
	ends := func(want int64) {
		t.Helper()
		if n := ask[int](t, admin, fmt.Sprintf("SELECT count(*) FROM %s.mark WHERE until <> $1", schema), want); n > 0 {
			t.Errorf("%d entries do not end at %d", n, want)
		}
	}
	const never = 1<<63 - 1
	marks, until := w.Marks, w.Marks[0].Until
	update(1)
	ends(never)
	w.Marks, w.KeepMarks = nil, true
	update(2)
	ends((until.UnixNano() + 999_999) / 1_000_000)
	update(3)
	ends((until.UnixNano() + 999_999) / 1_000_000)
	w.Marks, w.KeepMarks = marks, false
	update(4)
	ends(never)
	for i := range w.Marks {
		w.Marks[i].Until = time.Time{}
	}
	update(5)
	w.Marks, w.KeepMarks = nil, true
	update(6)
	ends(never)
	// Each its own end.
	w.Marks, w.KeepMarks = marks, false
	for i := range w.Marks {
		w.Marks[i].Until = until.Add(time.Duration(i) * time.Hour)
	}
	update(7)
	w.Marks, w.KeepMarks = nil, true
	update(8)
	if n := ask[int](t, admin, fmt.Sprintf("SELECT count(DISTINCT until) FROM %s.mark", schema)); n != len(marks) {
		t.Errorf("%d ends in the index, want %d", n, len(marks))
	}
	// Renewed, they all end at once, and the index knows no end.
	w.KeepMarks, w.RenewMarks, w.Until = false, true, until
	update(9)
	ends(never)
	w.Until = time.Time{}
	update(10)
	ends(never)
	w.Until = until
	update(11)
	w.KeepMarks, w.RenewMarks, w.Until = true, false, time.Time{}
	update(12)
	ends((until.UnixNano() + 999_999) / 1_000_000)
	w.KeepMarks, w.Record, w.Nonce = false, nil, "gone"
	result, err := s.Update(context.Background(), w)
	if err != nil || result.Outcome != store.Written {
		t.Fatalf("%+v, %v", result, err)
	}
	if n := ask[int](t, admin, fmt.Sprintf("SELECT count(*) FROM %s.mark", schema)); n != 0 {
		t.Errorf("%d entries of no record", n)
	}
}

// Most calls come to the short functions: they do not need write.
func TestShortFunctions(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	initialise(t, s)
	pair(t, s, calls.Add(1)) // a lane is made by write
	server.exec(t, "postgres", fmt.Sprintf("ALTER FUNCTION %s.write RENAME TO unused", schema))
	r := callOf(calls.Add(1))
	w := settlementOf(r, await(t, inBackground(s, r), store.Written).Version)
	for _, nonce := range []string{"as it is", "another end"} {
		w.Nonce = nonce
		result, err := s.Update(context.Background(), w)
		if err != nil || result.Outcome != store.Written {
			t.Fatalf("%s: %+v, %v", nonce, result, err)
		}
		w.Expected, w.Marks, w.RenewMarks, w.Until = result.Version, nil, true, time.Now().Add(time.Hour)
	}
	if _, err := s.Update(context.Background(), w); err == nil {
		t.Error("the function write is still there")
	}
	// A retry elsewhere is told of the record; one of the same write is told that it was made.
	again := callOf(calls.Load())
	again.Nonce = "another"
	result := await(t, inBackground(s, again), store.Mismatch)
	record, _, err := s.Get(context.Background(), again.Key)
	if err != nil || !reflect.DeepEqual(result.Record, record) || result.Record == nil || result.Now.Before(record.At) {
		t.Errorf("%+v at %s, %v; it is %+v", result.Record, result.Now, err, record)
	}
	// So is one of many that meet, where there is no lane: it makes none.
	postgres.WantLanes(s, true)
	var group sync.WaitGroup
	for n := range 32 {
		group.Go(func() {
			meets := callOf(calls.Load())
			meets.Nonce = fmt.Sprint("another ", n)
			if result, err := s.Reserve(context.Background(), meets); err != nil || result.Outcome != store.Mismatch {
				t.Errorf("%+v, %v", result, err)
			}
		})
	}
	group.Wait()
	for name, change := range map[string]func(*store.Reserve){
		"its own nonce": func(r *store.Reserve) { r.Nonce = record.Nonce },
		"another epoch": func(r *store.Reserve) { r.Epoch = "another" },
		"another key":   func(r *store.Reserve) { r.Key += " beside it" },
	} {
		other := again
		if change(&other); name == "another key" {
			other.Probes = append(other.Probes, store.Probe{String: other.Marks[0].String, First: true})
		}
		if result, err := s.Reserve(context.Background(), other); err == nil {
			t.Errorf("%s: %+v without the function write", name, result)
		}
	}
}

// BenchmarkGrowth is BenchmarkPair with many settled records; the last takes minutes
// to load. There is no checkpoint in between: after one, the first write to each page
// writes the page into the log, which many records spread over many pages.
func BenchmarkGrowth(b *testing.B) {
	for _, settled := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("settled=%d", settled), func(b *testing.B) {
			server := loaded(b, settled)
			s := open(b, postgres.Options{DSN: server.dsn("postgres"), MaxConns: 16})
			var group sync.WaitGroup
			server0, own0 := server.cpu(b)
			b.ResetTimer()
			for worker := range 16 {
				group.Go(func() {
					for n := worker; n < b.N; n += 16 {
						pair(b, s, calls.Add(1))
					}
				})
			}
			group.Wait()
			b.StopTimer()
			server1, own1 := server.cpu(b)
			b.ReportMetric(float64((server1-server0).Microseconds())/float64(b.N), "server-cpu-µs")
			b.ReportMetric(float64((own1-own0).Microseconds())/float64(b.N), "client-cpu-µs")
			report(b, float64(b.N)/b.Elapsed().Seconds(), nil)
		})
	}
}

var loadedServers = map[int]*server{}

func loaded(b *testing.B, settled int) *server {
	if loadedServers[settled] == nil {
		s := emptyServer(b, "fsync=on", "shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=1h")
		s.init(b)
		s.start(b)
		initialise(b, open(b, postgres.Options{DSN: s.dsn("postgres")}))
		pair(b, open(b, postgres.Options{DSN: s.dsn("postgres")}), calls.Add(1))
		load(b, s, "holdfast", 1_000_000_000, settled, time.Now().Add(72*time.Hour), "tag 2", false)
		loadedServers[settled] = s
		servers = append(servers, s)
	}
	return loadedServers[settled]
}
