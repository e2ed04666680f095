package postgres_test

// Servers that have forgotten acknowledged writes, and such that only look like it.

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"testing"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

func put(t testing.TB, s store.Store, key string, expected uint64) uint64 {
	t.Helper()
	w := store.Write{Epoch: identity.Epoch, Key: key, Nonce: fmt.Sprint(key, " after ", expected), Expected: expected, Record: &store.Record{}}
	return write(t, s, w)
}

// write repeats a write that meets a connection whose server, or session, has ended.
func write(t testing.TB, s store.Store, w store.Write) (version uint64) {
	t.Helper()
	eventually(t, "it is written", func() error {
		result, err := s.Update(context.Background(), w)
		if err != nil && !errors.Is(err, store.ErrUnavailable) || err == nil && result.Outcome != store.Written {
			t.Fatalf("%q: %+v, %v", w.Key, result, err)
		}
		version = result.Version
		return err
	})
	return version
}

// questions are all kinds, each asked of a store of its own.
var questions = map[string]func(s store.Store) error{
	"Standing":   func(s store.Store) error { _, err := s.Standing(context.Background()); return err },
	"Initialise": func(s store.Store) error { _, err := s.Initialise(context.Background(), identity); return err },
	"Disown":     func(s store.Store) error { return s.Disown(context.Background(), identity.Epoch, "by the loser") },
	"Reserve": func(s store.Store) error {
		_, err := s.Reserve(context.Background(), reserve("after the loss", "customer/c1"))
		return err
	},
	"Update": func(s store.Store) error {
		w := store.Write{Epoch: identity.Epoch, Key: "after the loss", Nonce: "n", Record: &store.Record{}}
		_, err := s.Update(context.Background(), w)
		return err
	},
	"Get": func(s store.Store) error { _, _, err := s.Get(context.Background(), "k"); return err },
	"List": func(s store.Store) error {
		_, err := s.List(context.Background(), store.List{What: store.ListHeld})
		return err
	},
	"Meter": func(s store.Store) error { _, err := s.Meter(context.Background(), "m"); return err },
}

// told asserts that each of the losers is told by its first question that is answered, that all that
// have lost nothing are told when they write, and what a newcomer finds.
func told(t *testing.T, options postgres.Options, losers map[string]*postgres.Store, lucky *postgres.Store, version uint64) {
	t.Helper()
	for name, s := range losers {
		var err error
		eventually(t, "the first question is answered", func() error {
			if err = questions[name](s); errors.Is(err, store.ErrUnavailable) {
				return err
			}
			return nil
		})
		if !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("%s as the first question: %v", name, err)
		}
		for next, ask := range questions {
			if err := ask(s); !errors.Is(err, store.ErrMemoryLost) {
				t.Errorf("%s after %s: %v", next, name, err)
			}
		}
	}
	fresh := open(t, options)
	eventually(t, "the store is disowned", func() error {
		have, err := fresh.Standing(context.Background())
		if err == nil && (have.Epoch == identity.Epoch || have.Epoch == "" || have.Epoch == "by the loser") {
			err = fmt.Errorf("epoch %q", have.Epoch)
		}
		return err
	})
	once, err := fresh.Standing(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other one is told", func() error {
		w := store.Write{Epoch: identity.Epoch, Key: "k", Nonce: "next", Expected: version, Record: &store.Record{}}
		if result, err := lucky.Update(context.Background(), w); !errors.Is(err, store.ErrMemoryLost) {
			return fmt.Errorf("%+v, %w", result, err)
		}
		return nil
	})
	if r, _, err := lucky.Get(context.Background(), "k"); err != nil || r == nil || r.Version != version {
		t.Errorf("what it reads is %+v, %v", r, err)
	}
	if r, _, err := fresh.Get(context.Background(), "after the loss"); err != nil || r != nil {
		t.Errorf("a loser has written %+v, %v", r, err)
	}
	// All the losers have found the same loss.
	if again, err := fresh.Standing(context.Background()); err != nil || again.Epoch != once.Epoch {
		t.Errorf("disowned twice: %+v, then %+v, %v", once, again, err)
	}
	if err := fresh.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestOlderCopyOfTheFiles(t *testing.T) {
	server := newServer(t, "fsync=off")
	options := postgres.Options{DSN: server.dsn("postgres"), MaxConns: 4}
	lucky := open(t, options)
	initialise(t, lucky)
	version := put(t, lucky, "k", 0)
	losers := map[string]*postgres.Store{}
	for name := range questions {
		s := open(t, options)
		losers[name] = s
		put(t, s, "before "+name, 0)
		// With a beat, and without.
		if len(losers)%2 == 0 {
			if _, err := s.Standing(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
	server.stop(t)
	older := server.data() + ".older"
	copyFiles(t, server.data(), older)
	server.start(t)
	for name, s := range losers {
		eventually(t, "the server is back", func() error { _, _, err := s.Get(context.Background(), "k"); return err })
		put(t, s, "lost of "+name, 0)
	}
	// Others have come further since than ever before.
	server.kill(t)
	if out, err := exec.Command("rm", "-rf", server.data()).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	copyFiles(t, older, server.data())
	server.start(t)
	for i := range 100 {
		put(t, lucky, fmt.Sprint("since ", i), 0)
	}
	told(t, options, losers, lucky, version)
}

func copyFiles(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestStandbyThatLagged(t *testing.T) {
	primary := newServer(t, "fsync=off")
	follower := primary.standby(t, "second", "fsync=off")
	options := postgres.Options{
		MaxConns: 4,
		DSN:      fmt.Sprintf("host=127.0.0.1,127.0.0.1 port=%d,%d user=holdfast password=first dbname=postgres sslmode=disable", primary.port, follower.port),
	}
	lucky := open(t, options)
	initialise(t, lucky)
	version := put(t, lucky, "k", 0)
	losers := map[string]*postgres.Store{}
	for name := range questions {
		losers[name] = open(t, options)
		put(t, losers[name], "before "+name, 0)
	}
	watch := follower.admin(t, "postgres")
	position := ask[string](t, primary.admin(t, "postgres"), "SELECT pg_current_wal_flush_lsn()::text")
	eventually(t, "the standby follows", func() error {
		if !ask[bool](t, watch, "SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn", position) {
			return errors.New("it has not replayed all")
		}
		return nil
	})
	follower.exec(t, "postgres", "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
	eventually(t, "the standby is cut off", func() error {
		if n := ask[int](t, watch, "SELECT count(*) FROM pg_stat_wal_receiver"); n > 0 {
			return errors.New("it receives")
		}
		return nil
	})
	for name, s := range losers {
		put(t, s, "lost of "+name, 0)
	}
	primary.kill(t)
	follower.exec(t, "postgres", "SELECT pg_promote()")
	told(t, options, losers, lucky, version)
}

// What others have changed or removed meanwhile is no loss, nor is a server that was
// killed, nor a connection.
func TestNothingLost(t *testing.T) {
	server := newServer(t, "fsync=on")
	options := postgres.Options{DSN: server.dsn("postgres"), MaxConns: 4}
	s, other := open(t, options), open(t, options)
	initialise(t, s)
	for round := range 4 {
		for i := range 50 {
			key := fmt.Sprint(round, " ", i)
			version := put(t, s, key, 0)
			var by store.Store = other
			if i%2 == 0 {
				by = s
			}
			if i%3 > 0 {
				version = put(t, by, key, version)
			}
			if i%3 > 1 {
				write(t, by, store.Write{Epoch: identity.Epoch, Key: key, Nonce: "gone", Expected: version})
			}
			if i%4 == 3 && i%3 > 1 {
				put(t, s, key, 0)
			}
		}
		if round%2 == 1 {
			if _, err := s.Standing(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		if round == 0 {
			server.exec(t, "postgres", "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'holdfast'")
		} else {
			server.kill(t)
			server.start(t)
		}
		for name, s := range map[string]*postgres.Store{"one": s, "other": other} {
			eventually(t, "the store goes on", func() error {
				_, _, err := s.Get(context.Background(), "k")
				if errors.Is(err, store.ErrMemoryLost) {
					t.Fatalf("round %d, %s: %v", round, name, err)
				}
				return err
			})
			if have, err := s.Standing(context.Background()); err != nil || have.Identity != identity {
				t.Errorf("round %d, %s: %+v, %v", round, name, have, err)
			}
		}
	}
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
}
