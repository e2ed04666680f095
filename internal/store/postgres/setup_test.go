package postgres_test

// What a store is opened with, how its schema comes to be, and what is said of its
// server.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

func TestDSN(t *testing.T) {
	const good = "postgres://app:secret@db.example:5432/app?sslmode=verify-full"
	for _, c := range []struct{ dsn, says string }{
		{good, ""},
		{good + "&connect_timeout=3&target_session_attrs=read-write", ""},
		{good + "&target_session_attrs=primary&channel_binding=require", ""},
		{"host=db.example port=5432 user=app password='a secret' dbname=app sslmode=require", ""},
		{"host=/run/postgresql user=app dbname=app", ""},
		{"host=a.example,b.example port=1,2 user=app dbname=app sslmode=disable", ""},
		{"", "there is no DSN"},
		{"postgres://app:secret@db.example/app", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=prefer", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=allow", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=sometimes", "sslmode"},
		{good + "&options=-csearch_path%3Devil", "parameter options is not allowed"},
		{good + "&search_path=evil", "parameter search_path is not allowed"},
		{good + "&service=other", "parameter service is not allowed"},
		{good + "&servicefile=/etc/passwd", "parameter servicefile is not allowed"},
		{good + "&passfile=/etc/passwd", "parameter passfile is not allowed"},
		{good + "&sslkey=/etc/key", "parameter sslkey is not allowed"},
		{good + "&statement_timeout=0", "parameter statement_timeout is not allowed"},
		{good + "&pool_max_conns=1000", "parameter pool_max_conns is not allowed"},
		{good + "&default_query_exec_mode=simple_protocol", "parameter default_query_exec_mode is not allowed"},
		{good + "&target_session_attrs=read-only", "target_session_attrs=read-only"},
		{good + "&target_session_attrs=prefer-standby", "target_session_attrs=prefer-standby"},
		{"host=db.example user=app dbname=app sslmode=require target_session_attrs='standby'", "target_session_attrs=standby"},
		{"host=db.example user=app password=secret dbname=app sslmode=require port=none", "port"},
		{"postgres://app:sec ret@db.example:x y/app", "escape special characters"},
	} {
		s, err := postgres.Open(postgres.Options{DSN: c.dsn})
		switch {
		case err == nil && c.says == "":
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		case err == nil || c.says == "" || !strings.Contains(err.Error(), c.says):
			t.Errorf("%q: %v; want %q", c.dsn, err, c.says)
		case strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "sec ret"):
			t.Errorf("%q: the error tells the password: %v", c.dsn, err)
		}
	}
	for _, name := range []string{"PGHOST", "PGSERVICE", "PGPASSWORD", "PGOPTIONS"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "evil")
			if _, err := postgres.Open(postgres.Options{DSN: good}); err == nil || !strings.Contains(err.Error(), "unset it") {
				t.Errorf("with %s: %v", name, err)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	const dsn = "host=/run/postgresql user=app dbname=app"
	for _, o := range []postgres.Options{
		{Schema: "Upper"}, {Schema: `x"; DROP SCHEMA public`}, {Schema: "pg_own"}, {Schema: "information_schema"}, {Schema: "1st"}, {Schema: strings.Repeat("x", 64)},
		{MaxConns: -1}, {MaxConns: 20_000}, {Timeout: -1}, {Timeout: time.Millisecond}, {Timeout: 2 * time.Hour},
	} {
		o.DSN = dsn
		if s, err := postgres.Open(o); err == nil {
			t.Errorf("%+v was taken", o)
			_ = s.Close()
		}
	}
}

// Many processes start at once on an empty database.
func TestMigrateTogether(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	const n = 12
	var group sync.WaitGroup
	ids := make([]store.Identity, n)
	for i := range n {
		s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema, MaxConns: 2, Timeout: patience})
		group.Go(func() {
			var err error
			if ids[i], err = s.Initialise(context.Background(), store.Identity{Epoch: fmt.Sprint(i), KeyDomain: "d"}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("%+v and %+v", id, ids[0])
		}
	}
	c := server.admin(t, "postgres")
	if n := ask[int](t, c, fmt.Sprintf("SELECT count(*) FROM %s.goose_db_version WHERE version_id = 1", schema)); n != 1 {
		t.Errorf("the migration was made %d times", n)
	}
	noLocksLeft(t, server)
}

func TestNewerFormat(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	initialise(t, open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema}))
	server.exec(t, "postgres", fmt.Sprintf("INSERT INTO %s.goose_db_version (version_id, is_applied) VALUES (99, true)", schema))
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	if _, err := s.Standing(context.Background()); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "format 99") {
		t.Errorf("Standing: %v", err)
	}
}

// A role that may do nothing else can be given a schema of its own.
func TestRoleWithFewRights(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	server.exec(t, "postgres", fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'first'", schema), fmt.Sprintf("ALTER ROLE %s SET synchronous_commit = off", schema),
		fmt.Sprintf("ALTER ROLE %s SET default_transaction_isolation = 'serializable'", schema))
	s := open(t, postgres.Options{DSN: strings.Replace(server.dsn("postgres"), "user=holdfast", "user="+schema, 1), Schema: schema})
	if _, err := s.Initialise(context.Background(), identity); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "lacks a right") {
		t.Errorf("without a schema: %v", err)
	}
	server.exec(t, "postgres", fmt.Sprintf("CREATE SCHEMA %[1]s AUTHORIZATION %[1]s", schema))
	initialise(t, s)
	await(t, inBackground(s, reserve("a", "customer/c1")), store.Written)
	await(t, inBackground(s, reserve("b", "customer/c1/order/1")), store.Blocked)
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// Neither of the role's settings got through.
	findings, err := s.Durability(context.Background())
	if err != nil || slices.ContainsFunc(findings, func(f store.Finding) bool { return strings.Contains(f.Text, "synchronous_commit") }) {
		t.Errorf("Durability: %v, %v", findings, err)
	}
}

func TestDurability(t *testing.T) {
	findings := func(s *postgres.Store) []string {
		t.Helper()
		found, err := s.Durability(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, f := range found {
			if !f.Loses || f.Reason == "" {
				t.Errorf("%+v loses nothing, or has no reason", f)
			}
			texts = append(texts, f.Text)
		}
		return texts
	}
	is := func(found []string, begins ...string) {
		t.Helper()
		if len(found) != len(begins) {
			t.Errorf("%q, want %q", found, begins)
			return
		}
		for i, f := range found {
			if !strings.HasPrefix(f, begins[i]) {
				t.Errorf("%q, want one that begins with %q", f, begins[i])
			}
		}
	}
	primary := newServer(t)
	s := open(t, postgres.Options{DSN: primary.dsn("postgres")})
	initialise(t, s)
	is(findings(s))
	primary.exec(t, "postgres", "ALTER TABLE holdfast.mark SET UNLOGGED")
	is(findings(s), "not durable after a crash, because they are unlogged: mark;")
	primary.exec(t, "postgres", "ALTER TABLE holdfast.mark SET LOGGED")

	follower := primary.standby(t, "second")
	admin := primary.admin(t, "postgres")
	eventually(t, "the standby follows", func() error {
		if n := ask[int](t, admin, "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"); n != 1 {
			return fmt.Errorf("%d do", n)
		}
		return nil
	})
	is(findings(s), "1 replicas are attached, and synchronous_standby_names is empty")
	if replicated, err := s.Replicated(context.Background()); err != nil || replicated {
		t.Errorf("replicated: %t, %v", replicated, err)
	}
	is(findings(open(t, postgres.Options{DSN: follower.dsn("postgres")})), "the server is a standby")
	primary.exec(t, "postgres", "ALTER SYSTEM SET synchronous_standby_names = 'second'", "SELECT pg_reload_conf()")
	eventually(t, "the standby is synchronous", func() error {
		if found := findings(s); len(found) > 0 {
			return fmt.Errorf("%q", found)
		}
		return nil
	})

	if replicated, err := s.Replicated(context.Background()); err != nil || !replicated {
		t.Errorf("replicated: %t, %v", replicated, err)
	}

	primary.exec(t, "postgres", "ALTER SYSTEM SET full_page_writes = off", "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
	eventually(t, "both are found", func() error {
		if found := findings(s); len(found) != 2 {
			return fmt.Errorf("%q", found)
		}
		return nil
	})
	is(findings(s), "fsync is off", "full_page_writes is off")
}

// Check must see what it is there for.
func TestCheckFinds(t *testing.T) {
	server := sharedServer(t)
	for damage, says := range map[string]string{
		"DELETE FROM mark WHERE ctid = (SELECT min(ctid) FROM mark)":                                                  "is not in the index",
		"INSERT INTO mark VALUES ('00000000-0000-0000-0000-000000000001', '00000000-0000-0000-0000-000000000002', 1)": "is of no record",
		"DELETE FROM record":                                  "is of no record",
		"UPDATE meter SET sum = sum + 1":                      "its entries come to",
		"DELETE FROM meter":                                   "its entries come to",
		"UPDATE record SET version = 1":                       "belongs to 2 records",
		"UPDATE record SET version = 1000000 WHERE key = 'a'": "the sequence is at",
		"UPDATE record SET key = 'c' WHERE key = 'a'":         "is not found under its key",
		"UPDATE record SET untils = '{1}' WHERE key = 'a'":    "ends, era",
		"UPDATE record SET stamp = '9999999' WHERE key = 'a'": "still to come",
		"UPDATE record SET amounts = '{0}' WHERE key = 'a'":   "or one of 0",
		"UPDATE meter SET name = 'n'":                         "is not found under its name",
		"DELETE FROM meta":                                    "rows of meta",
	} {
		t.Run(damage, func(t *testing.T) {
			schema := newSchema()
			s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
			initialise(t, s)
			for _, key := range []string{"a", "b"} {
				r := reserve(key, "order/"+key)
				r.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
				await(t, inBackground(s, r), store.Written)
			}
			if err := s.Check(context.Background()); err != nil {
				t.Fatalf("a store that was not damaged: %v", err)
			}
			server.exec(t, "postgres", "SET search_path = "+schema, damage)
			if err := s.Check(context.Background()); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%v; want one that says %q", err, says)
			}
		})
	}
}
