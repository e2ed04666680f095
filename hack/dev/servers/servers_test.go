// These tests run real servers: what they are about is what a server does when it is
// treated like this.
package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const patience = 30 * time.Second

// memory is a server with one thing to remember.
type memory interface {
	Server
	// put remembers a value, durably; look returns it, "" for none.
	put(ctx context.Context, value string) error
	look(ctx context.Context) (string, error)
}

type redisMemory struct{ *Redis }

func (r redisMemory) put(ctx context.Context, value string) error {
	_, err := r.Do(ctx, "SET", "thing", value)
	return err
}

func (r redisMemory) look(ctx context.Context) (string, error) { return r.Do(ctx, "GET", "thing") }

type postgresMemory struct{ *Postgres }

func (p postgresMemory) put(ctx context.Context, value string) error {
	return p.Exec(ctx, "CREATE TABLE IF NOT EXISTS thing (value text)", "DELETE FROM thing", "INSERT INTO thing VALUES ('"+value+"')")
}

func (p postgresMemory) look(ctx context.Context) (value string, err error) {
	c, err := p.Connect(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, c.Close(ctx)) }()
	err = c.QueryRow(ctx, "SELECT coalesce(max(value), '') FROM thing").Scan(&value)
	if err != nil && strings.Contains(err.Error(), "42P01") { // the table is not there
		return "", nil
	}
	return value, err
}

// directory is one that another user may reach.
func directory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "holdfast-servers-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newServer(t *testing.T, kind string, o Options) memory {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var m memory
	var err error
	if kind == "redis" {
		var r *Redis
		r, err = NewRedis(ctx, o)
		m = redisMemory{r}
	} else {
		var p *Postgres
		p, err = NewPostgres(ctx, o)
		m = postgresMemory{p}
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// has fails the test unless the server remembers this.
func has(t *testing.T, m memory, want string) {
	t.Helper()
	got, err := m.look(t.Context())
	if err != nil || got != want {
		t.Fatalf("it remembers %q (%v), want %q\n%s", got, err, want, m.Log())
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, done func() error) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := done()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func TestAServerAndWhatIsDoneToIt(t *testing.T) {
	for _, kind := range []string{"redis", "postgres"} {
		t.Run(kind, func(t *testing.T) {
			ctx, dir := t.Context(), directory(t)
			m := newServer(t, kind, Options{Dir: filepath.Join(dir, "server")})
			must(t, m.put(ctx, "one"))
			must(t, m.Kill(ctx))
			if _, err := m.look(ctx); err == nil {
				t.Fatal("a killed server answers")
			}
			must(t, m.Start(ctx))
			has(t, m, "one")

			must(t, m.Pause())
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			_, err := m.look(short)
			cancel()
			if err == nil {
				t.Fatal("a server that stands still answers")
			}
			must(t, m.Resume())
			has(t, m, "one")

			copied := filepath.Join(dir, "copy")
			if err := m.Save(copied); err == nil {
				t.Fatal("the data was copied under a server that runs")
			}
			must(t, m.Stop(ctx))
			must(t, m.Save(copied))
			must(t, m.Start(ctx))
			must(t, m.put(ctx, "two"))
			must(t, m.Stop(ctx))
			must(t, m.Restore(copied))
			must(t, m.Start(ctx))
			has(t, m, "one")

			must(t, m.SetPassword(ctx, "another"))
			has(t, m, "one")
			must(t, m.Kill(ctx))
			must(t, m.Start(ctx))
			has(t, m, "one")

			must(t, m.Kill(ctx))
			must(t, m.Wipe())
			must(t, m.Start(ctx))
			has(t, m, "")
		})
	}
}

func TestTheClockOfAServer(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		r := newServer(t, "redis", Options{Dir: filepath.Join(directory(t), "server"), Clock: true}).(redisMemory)
		clockTurns(t, r, func(ctx context.Context) (time.Time, error) {
			text, err := r.Do(ctx, "EVAL", "return redis.call('TIME')[1]", "0")
			if err != nil {
				return time.Time{}, err
			}
			var seconds int64
			_, err = fmt.Sscan(text, &seconds)
			return time.Unix(seconds, 0), err
		})
	})
	t.Run("postgres", func(t *testing.T) {
		p := newServer(t, "postgres", Options{Dir: filepath.Join(directory(t), "server"), Clock: true}).(postgresMemory)
		clockTurns(t, p, func(ctx context.Context) (now time.Time, err error) {
			c, err := p.Connect(ctx)
			if err != nil {
				return now, err
			}
			defer func() { err = errors.Join(err, c.Close(ctx)) }()
			err = c.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now)
			return now, err
		})
	})
}

func clockTurns(t *testing.T, s Server, now func(context.Context) (time.Time, error)) {
	t.Helper()
	for _, ahead := range []time.Duration{0, 20 * time.Minute, -3 * time.Hour, 0} {
		must(t, s.SetClock(ahead))
		got, err := now(t.Context())
		must(t, err)
		if off := time.Until(got) - ahead; off < -5*time.Second || off > 5*time.Second {
			t.Errorf("with the clock %s ahead it is %s off", ahead, off)
		}
	}
}

func TestARedisReplicaThatLags(t *testing.T) {
	ctx, dir := t.Context(), directory(t)
	primary := newServer(t, "redis", Options{Dir: filepath.Join(dir, "one")}).(redisMemory)
	replica := newServer(t, "redis", Options{Dir: filepath.Join(dir, "two")}).(redisMemory)
	must(t, primary.put(ctx, "one"))
	must(t, replica.Follow(ctx, primary.Redis))
	eventually(t, "the replica has what the primary has", func() error {
		got, err := replica.look(ctx)
		if err == nil && got != "one" {
			err = fmt.Errorf("it has %q", got)
		}
		return errors.Join(err, replica.Following(ctx))
	})
	must(t, replica.Pause())
	must(t, primary.put(ctx, "two"))
	must(t, primary.Kill(ctx))
	must(t, replica.Resume())
	must(t, replica.Promote(ctx))
	must(t, replica.put(ctx, "three"))
}

func TestAPostgresStandbyThatLags(t *testing.T) {
	ctx, dir := t.Context(), directory(t)
	primary := newServer(t, "postgres", Options{Dir: filepath.Join(dir, "one")}).(postgresMemory)
	must(t, primary.put(ctx, "one"))
	s, err := primary.Standby(ctx, Options{Dir: filepath.Join(dir, "two")})
	must(t, err)
	standby := postgresMemory{s}
	defer func() { must(t, standby.Remove(context.Background())) }()
	has(t, standby, "one")
	must(t, standby.Pause())
	must(t, primary.put(ctx, "two"))
	must(t, primary.Kill(ctx))
	must(t, standby.Resume())
	must(t, standby.Promote(ctx))
	must(t, standby.put(ctx, "three"))
}
