package postgres_test

// The conformance suite, on a server's own clock and on one that stands still.

import (
	"context"
	"errors"
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
	options := postgres.Options{DSN: server.patient(), Schema: schema, Timeout: 30 * time.Second}
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
			eventually(t, "check", func() error {
				err := now.Check(context.Background())
				if !errors.Is(err, store.ErrUnavailable) {
					if err != nil {
						t.Errorf("check: %v", err)
					}
					return nil
				}
				return err
			})
			noLocksLeft(t, server)
		},
	}
	h.Snapshot, h.Rewind = copies(t, server, schema)
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

// copies keeps a copy of the schema's tables, and puts it back while nobody is
// connected: what a restored backup is to those who come again.
func copies(t testing.TB, server *server, schema string) (snapshot, rewind func(testing.TB)) {
	tables := []string{"meta", "record", "mark", "meter", "lane", "beat", "grave"}
	snapshot = func(t testing.TB) {
		t.Helper()
		statements := []string{fmt.Sprintf("DROP SCHEMA IF EXISTS copy_of_%[1]s CASCADE; CREATE SCHEMA copy_of_%[1]s; CREATE TABLE copy_of_%[1]s.version AS SELECT last_value, is_called FROM %[1]s.version", schema)}
		for _, table := range tables {
			statements = append(statements, fmt.Sprintf("CREATE TABLE copy_of_%[1]s.%[2]s AS TABLE %[1]s.%[2]s", schema, table))
		}
		server.exec(t, "postgres", statements...)
	}
	rewind = func(t testing.TB) {
		t.Helper()
		statements := []string{"BEGIN"}
		for _, table := range tables {
			statements = append(statements, fmt.Sprintf("TRUNCATE %[1]s.%[2]s; INSERT INTO %[1]s.%[2]s SELECT * FROM copy_of_%[1]s.%[2]s", schema, table))
		}
		server.exec(t, "postgres", append(statements, fmt.Sprintf("SELECT setval('%[1]s.version', last_value, is_called) FROM copy_of_%[1]s.version", schema), "COMMIT",
			"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'holdfast'")...)
	}
	return snapshot, rewind
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
