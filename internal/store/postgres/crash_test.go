package postgres_test

// What is left when the server is killed, when a standby takes over, when an
// administrator cuts a wait short, and when a dump is loaded elsewhere.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/storetest"
)

// scribe writes to the store until the context ends or a write fails, and reads its
// own journal.
func scribe(t *testing.T, ctx context.Context, s store.Store, journal *storetest.Journal) (wait func()) {
	t.Helper()
	in, out := io.Pipe()
	var group sync.WaitGroup
	group.Go(func() {
		err := storetest.Scribe(ctx, s, out)
		if !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("the scribe ended with %v", err)
		}
		if err := out.Close(); err != nil {
			t.Error(err)
		}
	})
	group.Go(func() {
		if err := journal.Read(in); err != nil {
			t.Errorf("journal: %v", err)
		}
	})
	return group.Wait
}

func written(t *testing.T, journal *storetest.Journal, n int) {
	t.Helper()
	eventually(t, "the scribe writes", func() error {
		if have := journal.Acknowledged(); have < n {
			return fmt.Errorf("%d writes", have)
		}
		return nil
	})
}

func TestServerKilled(t *testing.T) {
	const rounds = 10
	server := newServer(t, "fsync=on", "synchronous_commit=on")
	s := open(t, postgres.Options{DSN: server.dsn("postgres")})
	journal := storetest.NewJournal()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range rounds {
		wait := scribe(t, context.Background(), s, journal)
		written(t, journal, journal.Acknowledged()+1+random.IntN(400))
		server.kill(t)
		wait()
		server.start(t)
		// The same store goes on, whatever its connections have been through.
		if _, err := s.Standing(context.Background()); err != nil {
			t.Fatal(err)
		}
		journal.Verify(t, s)
		if err := s.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d writes were acknowledged over %d kills", journal.Acknowledged(), rounds)
}

// standby is a server that follows this one.
func (s *server) standby(t *testing.T, name string, settings ...string) *server {
	t.Helper()
	follower := emptyServer(t, settings...)
	t.Cleanup(follower.remove)
	dsn := fmt.Sprintf("%s application_name=%s", s.dsn("postgres"), name)
	follower.run(t, "pg_basebackup", "-D", follower.data(), "-R", "-X", "stream", "-c", "fast", "-d", dsn, "--no-sync")
	follower.start(t)
	return follower
}

func TestStandbyTakesOver(t *testing.T) {
	primary := newServer(t, "fsync=off")
	follower := primary.standby(t, "second", "fsync=off")
	primary.exec(t, "postgres", "ALTER SYSTEM SET synchronous_standby_names = 'second'", "SELECT pg_reload_conf()")
	admin := primary.admin(t, "postgres")
	eventually(t, "the standby is synchronous", func() error {
		if n := ask[int](t, admin, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"); n != 1 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
	// The standby comes first in the DSN: the store has to find the one that is written to.
	s := open(t, postgres.Options{DSN: fmt.Sprintf("host=127.0.0.1,127.0.0.1 port=%d,%d user=holdfast password=first dbname=postgres sslmode=disable target_session_attrs=read-write", follower.port, primary.port)})
	initialise(t, s)

	a := reserve("a", "customer/c1/order/1")
	await(t, inBackground(s, a), store.Written)
	refused := await(t, inBackground(s, reserve("b", "customer/c1/order/1")), store.Blocked)

	journal := storetest.NewJournal()
	wait := scribe(t, context.Background(), s, journal)
	written(t, journal, 300)
	primary.kill(t)
	wait()
	follower.exec(t, "postgres", "SELECT pg_promote()")

	eventually(t, "the store finds the new primary", func() error {
		_, err := s.Update(context.Background(), store.Write{Epoch: identity.Epoch, Key: "probe", Nonce: "n", Record: &store.Record{}})
		return err
	})
	journal.Verify(t, s)
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// What a watermark covered before, it covers now, and nothing that is new.
	c := reserve("c", "customer/c1/order/1")
	await(t, inBackground(s, c), store.Blocked)
	over := reserve("b", "customer/c1/order/1")
	over.PassedOver = []store.Watermark{refused.Watermark}
	await(t, inBackground(s, over), store.Written)
	c.PassedOver = over.PassedOver
	result := await(t, inBackground(s, c), store.Blocked)
	if result.HitCount != 1 || result.Hits[0].Record.Key != "b" {
		t.Errorf("hit %+v", result.Hits)
	}
	c.PassedOver = append(c.PassedOver, result.Watermark)
	await(t, inBackground(s, c), store.Written)
	if era := strings.Split(string(result.Watermark), ".")[0]; strings.HasPrefix(string(refused.Watermark), era+".") {
		t.Errorf("watermarks %q and %q are of one era", refused.Watermark, result.Watermark)
	}
}

// A commit whose wait for its standby was cut short is shown to everybody, and is not
// acknowledged to anybody before it is safe.
func TestWaitForStandbyCutShort(t *testing.T) {
	server := newServer(t, "fsync=off")
	s := open(t, postgres.Options{DSN: server.dsn("postgres")})
	initialise(t, s)
	server.exec(t, "postgres", "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
	admin := server.admin(t, "postgres")
	r := reserve("a", "customer/c1")
	for _, how := range []string{"pg_cancel_backend", "pg_terminate_backend", "pg_cancel_backend"} {
		done := inBackground(s, r)
		var pid int
		eventually(t, "the commit waits for a standby", func() error {
			return admin.QueryRow(context.Background(), "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'holdfast'").Scan(&pid)
		})
		ask[bool](t, admin, "SELECT "+how+"($1)", pid)
		if a := <-done; !errors.Is(a.err, store.ErrUnavailable) {
			t.Fatalf("%s: %+v, %v; it may be lost, and must not be acknowledged", how, a.result, a.err)
		}
	}
	server.exec(t, "postgres", "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
	result := await(t, inBackground(s, r), store.Written)
	if record, _, err := s.Get(context.Background(), "a"); err != nil || record == nil || record.Version != result.Version {
		t.Errorf("there is %+v, %v; written was version %d", record, err, result.Version)
	}
}

// dump is the store's schema as text, with all that is in it.
func (s *server) dump(t testing.TB) []byte {
	t.Helper()
	path := filepath.Join(s.dir, "dump.sql")
	s.run(t, "pg_dump", "-d", s.dsn("postgres"), "-n", "holdfast", "--no-owner", "-f", path)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// load runs a dump.
func (s *server) load(t testing.TB, dump []byte) {
	t.Helper()
	path := filepath.Join(s.dir, "load.sql")
	if err := os.WriteFile(path, dump, 0o644); err != nil {
		t.Fatal(err)
	}
	s.run(t, "psql", "-q", "-v", "ON_ERROR_STOP=1", "-d", s.dsn("postgres"), "-f", path)
}

// A schema that a version of before has made and written to, functions included.
func TestSchemaOfAnEarlierVersion(t *testing.T) {
	dump := storetest.EarlierCopy(t, "testdata/format-1.sql.gz", func() []byte {
		server := newServer(t, "fsync=off")
		storetest.WriteEarlier(t, open(t, postgres.Options{DSN: server.dsn("postgres")}))
		return server.dump(t)
	})
	server := newServer(t, "fsync=off")
	server.load(t, dump)
	s := open(t, postgres.Options{DSN: server.dsn("postgres")})
	storetest.FindEarlier(t, s)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// Transaction numbers start anew where a dump is loaded. A watermark of before must
// not cover what is written there under the same numbers.
func TestDumpLoadedElsewhere(t *testing.T) {
	old, next := newServer(t, "fsync=off"), newServer(t, "fsync=off")
	s := open(t, postgres.Options{DSN: old.dsn("postgres")})
	initialise(t, s)
	// The old server is far ahead.
	old.exec(t, "postgres", "CREATE PROCEDURE spend() LANGUAGE plpgsql AS 'BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END'", "CALL spend()")
	await(t, inBackground(s, reserve("a", "customer/c1")), store.Written)
	refused := await(t, inBackground(s, reserve("b", "customer/c1")), store.Blocked)

	next.load(t, old.dump(t))

	s = open(t, postgres.Options{DSN: next.dsn("postgres")})
	over := reserve("c", "customer/c1")
	over.PassedOver = []store.Watermark{refused.Watermark}
	await(t, inBackground(s, over), store.Written)
	over = reserve("d", "customer/c1")
	over.PassedOver = []store.Watermark{refused.Watermark}
	result := await(t, inBackground(s, over), store.Blocked)
	if result.HitCount != 1 || result.Hits[0].Record.Key != "c" {
		t.Errorf("hit %+v", result.Hits)
	}
	// One of now covers what came with the dump.
	over.PassedOver = []store.Watermark{result.Watermark}
	await(t, inBackground(s, over), store.Written)
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// A watermark that this store has not given yet covers nothing: it is refused.
	for _, w := range []store.Watermark{"9.1:1:", store.Watermark(strings.Split(string(result.Watermark), ".")[0] + ".5000000:5000000:")} {
		r := reserve("e", "customer/c1")
		r.PassedOver = []store.Watermark{w}
		if _, err := s.Reserve(context.Background(), r); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("watermark %q: %v", w, err)
		}
	}
}

// A schema that was dropped is no memory, for whoever has written to it; for others it is a
// new one.
func TestSchemaGone(t *testing.T) {
	for _, first := range []string{"Update", "Get", "Standing"} {
		t.Run(first, func(t *testing.T) {
			server, schema := sharedServer(t), newSchema()
			options := postgres.Options{DSN: server.dsn("postgres"), Schema: schema}
			s, idle := open(t, options), open(t, options)
			initialise(t, s)
			initialise(t, idle)
			w := store.Write{Epoch: identity.Epoch, Key: "k", Nonce: "n", Record: &store.Record{Body: bytes.Repeat([]byte("x"), 1000)}}
			if _, err := s.Update(context.Background(), w); err != nil {
				t.Fatal(err)
			}
			server.exec(t, "postgres", fmt.Sprintf("DROP SCHEMA %s CASCADE", schema))
			ask := map[string]func() error{
				"Update":   func() error { _, err := s.Update(context.Background(), w); return err },
				"Get":      func() error { _, _, err := s.Get(context.Background(), "k"); return err },
				"Standing": func() error { _, err := s.Standing(context.Background()); return err },
			}
			if err := ask[first](); !errors.Is(err, store.ErrMemoryLost) {
				t.Errorf("%s: %v", first, err)
			}
			for name, ask := range ask {
				if err := ask(); !errors.Is(err, store.ErrMemoryLost) {
					t.Errorf("%s after %s: %v", name, first, err)
				}
			}
			if _, err := idle.Update(context.Background(), w); !errors.Is(err, store.ErrMemoryLost) {
				t.Errorf("Update: %v", err)
			}
			if id, err := idle.Standing(context.Background()); err != nil || id.Identity != (store.Identity{}) {
				t.Errorf("Standing: %+v, %v", id, err)
			}
			if _, _, err := idle.Get(context.Background(), "k"); err != nil {
				t.Errorf("Get: %v", err)
			}
			deadline, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if page, err := idle.List(deadline, store.List{What: store.ListHeld}); err != nil || len(page.Records) > 0 {
				t.Errorf("List: %+v, %v", page, err)
			}
		})
	}
}
