package redis_test

// The conformance suite on a real server, with its own clock and with one that stands
// still, alone and as a cluster. Where the clock stands still, few marks are many.

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
	"github.com/holdfast-dev/holdfast/internal/store/storetest"
)

func dialSocket(ctx context.Context, path string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
	return d.DialContext(ctx, "unix", path)
}

// harness opens stores on one server.
func harness(t testing.TB, s *server, open func(t testing.TB) *redis.Store) storetest.Harness {
	connect := func(t testing.TB) store.Store { return open(t) }
	now := open(t)
	files, copies := filepath.Join(s.dir, "appendonlydir"), filepath.Join(s.dir, "copies")
	return storetest.Harness{
		Store:   now,
		Connect: connect,
		Restart: func(t testing.TB) store.Store {
			t.Helper()
			s.kill(t)
			s.start(t)
			now = open(t)
			return now
		},
		Snapshot: func(t testing.TB) {
			t.Helper()
			if err := errors.Join(os.RemoveAll(copies), os.CopyFS(copies, os.DirFS(files))); err != nil {
				t.Fatal(err)
			}
		},
		Rewind: func(t testing.TB) {
			t.Helper()
			s.kill(t)
			if err := errors.Join(os.RemoveAll(files), os.CopyFS(files, os.DirFS(copies))); err != nil {
				t.Fatal(err)
			}
			s.start(t)
		},
		Check: func(t testing.TB) {
			t.Helper()
			if err := now.Check(context.Background()); err != nil {
				t.Errorf("check: %v", err)
			}
		},
	}
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		s := newServer(t)
		return harness(t, s, func(t testing.TB) *redis.Store { return s.open(t) })
	})
}

func TestConformanceStandingClock(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		s := newServer(t)
		open := func(t testing.TB) *redis.Store {
			t.Helper()
			st, err := redis.OpenStanding(s.options())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = st.Close() })
			return st
		}
		now := time.Date(2030, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
		var client valkey.Client
		set := func() {
			value := fmt.Sprintf("%d %d", now.Unix(), now.Nanosecond()/1000)
			key := "{" + s.options().Namespace + "}" + redis.TestClockKey
			// The server may just have been started again.
			s.eventually(t, "set the clock", func() error {
				if client == nil {
					client = s.client(t)
				}
				return client.Do(context.Background(), client.B().Set().Key(key).Value(value).Build()).Error()
			})
		}
		set()
		h := harness(t, s, open)
		h.Advance = func(d time.Duration) {
			now = now.Add(d.Truncate(time.Microsecond))
			set()
		}
		return h
	})
}

// earlierKey is a key of the server's with what makes it anew: the arguments of a command
// behind the key.
type earlierKey struct {
	Key     []byte
	Command string
	Values  [][]byte
}

// Keys that a version of before has written.
func TestKeysOfAnEarlierVersion(t *testing.T) {
	content := storetest.EarlierCopy(t, "testdata/format-1.json.gz", func() []byte {
		s := newServer(t)
		storetest.WriteEarlier(t, s.open(t))
		ask := func(args ...string) *valkey.ValkeyMessage {
			answer := s.do(t, args...)
			return &answer
		}
		keys, err := ask("KEYS", "*").AsStrSlice()
		if err != nil {
			t.Fatal(err)
		}
		var all []earlierKey
		for _, key := range keys {
			k := earlierKey{Key: []byte(key)}
			add := func(values ...string) {
				for _, v := range values {
					k.Values = append(k.Values, []byte(v))
				}
			}
			kind, err := ask("TYPE", key).ToString()
			if err != nil {
				t.Fatal(err)
			}
			switch kind {
			case "string":
				value, err := ask("GET", key).ToString()
				if err != nil {
					t.Fatal(err)
				}
				k.Command = "SET"
				add(value)
			case "hash":
				fields, err := ask("HGETALL", key).AsStrMap()
				if err != nil {
					t.Fatal(err)
				}
				k.Command = "HSET"
				for field, value := range fields {
					add(field, value)
				}
			case "zset":
				members, err := ask("ZRANGE", key, "0", "-1", "WITHSCORES").AsZScores()
				if err != nil {
					t.Fatal(err)
				}
				k.Command = "ZADD"
				for _, m := range members {
					add(strconv.FormatFloat(m.Score, 'f', -1, 64), m.Member)
				}
			default:
				t.Fatalf("%q is a %s", key, kind)
			}
			all = append(all, k)
		}
		text, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		return text
	})
	var all []earlierKey
	if err := json.Unmarshal(content, &all); err != nil {
		t.Fatal(err)
	}
	s := newServer(t)
	for _, k := range all {
		command := []string{k.Command, string(k.Key)}
		for _, v := range k.Values {
			command = append(command, string(v))
		}
		s.do(t, command...)
	}
	st := s.open(t)
	storetest.FindEarlier(t, st)
	if err := st.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
