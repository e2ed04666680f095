package postgres_test

// The conformance suite, on a server's own clock and on one that stands still.

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/storetest"
)

// harness is a store in a schema of the shared server. Its restart kills the server,
// and with it what all connections were told; the pools have to get over it.
func newHarness(t testing.TB, ownClock bool) storetest.Harness {
	t.Helper()
	server, schema := sharedServer(t), newSchema()
	options := postgres.Options{DSN: server.dsn("postgres"), Schema: schema, Timeout: 30 * time.Second}
	now := open(t, options)
	// The first question makes the schema.
	if _, err := now.Standing(context.Background()); err != nil {
		t.Fatal(err)
	}
	h := storetest.Harness{
		Store:   now,
		Connect: func(t testing.TB) store.Store { return open(t, options) },
		Restart: func(t testing.TB) store.Store {
			t.Helper()
			server.kill(t)
			server.start(t)
			now = open(t, options)
			return now
		},
		Check: func(t testing.TB) {
			t.Helper()
			if err := now.Check(context.Background()); err != nil {
				t.Errorf("check: %v", err)
			}
			noLocksLeft(t, server)
		},
	}
	if ownClock {
		return h
	}
	server.exec(t, "postgres",
		fmt.Sprintf("CREATE TABLE %s.stopped_clock AS SELECT 1893553445678901::bigint AS micros", schema),
		fmt.Sprintf("CREATE OR REPLACE FUNCTION %s.clock() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT micros FROM %[1]s.stopped_clock'", schema))
	admin := server.admin(t, "postgres")
	h.Advance = func(d time.Duration) {
		advance := fmt.Sprintf("UPDATE %s.stopped_clock SET micros = micros + $1", schema)
		_, err := admin.Exec(context.Background(), advance, d.Microseconds())
		if err != nil {
			// The server was killed in between.
			admin = server.admin(t, "postgres")
			_, err = admin.Exec(context.Background(), advance, d.Microseconds())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// noLocksLeft asserts that no session holds an advisory lock: nothing runs.
func noLocksLeft(t testing.TB, s *server) {
	t.Helper()
	c := s.admin(t, "postgres")
	eventually(t, "locks are let go", func() error {
		if n := ask[int](t, c, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"); n > 0 {
			return fmt.Errorf("%d advisory locks are held", n)
		}
		return nil
	})
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness { return newHarness(t, false) })
}

func TestConformanceOwnClock(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness { return newHarness(t, true) })
}
