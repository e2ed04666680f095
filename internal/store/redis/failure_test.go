package redis_test

// What can befall the server, and the way to it. In each case: a bounded wait, an
// error that says where to look, nothing half written, and the same store goes on
// once the cause is gone.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
	"github.com/holdfast-dev/holdfast/internal/store/storetest"
)

var background = context.Background()

// used opens a store and gives it its identity and a record.
func (s *server) used(t testing.TB, change ...func(*redis.Options)) *redis.Store {
	t.Helper()
	st := s.open(t, change...)
	if _, err := st.Initialise(background, costID); err != nil {
		t.Fatal(err)
	}
	if r, err := st.Update(background, plain("present", 0)); err != nil || r.Outcome != store.Written {
		t.Fatalf("%+v, %v", r, err)
	}
	return st
}

var nonces atomic.Int64

// plain is a write that touches every kind of key.
func plain(key string, expected uint64) store.Write {
	return store.Write{
		Epoch: costID.Epoch, Key: key, Expected: expected, Nonce: fmt.Sprint("nonce ", nonces.Add(1)),
		Record: &store.Record{Header: []byte("header"), Body: []byte("body"), Held: true, Due: time.Unix(2e9, 0)},
		Marks:  []store.Mark{{String: "mark of " + key}, {String: "mark", Tag: "tag"}},
		Meters: []store.MeterEntry{{Meter: "meter", Amount: "1"}},
	}
}

// asks are all methods of the contract.
func asks(st *redis.Store) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Standing":   func(ctx context.Context) error { _, err := st.Standing(ctx); return err },
		"Initialise": func(ctx context.Context) error { _, err := st.Initialise(ctx, costID); return err },
		"Disown":     func(ctx context.Context) error { return st.Disown(ctx, "of nobody", "next") },
		"Reserve": func(ctx context.Context) error {
			_, err := st.Reserve(ctx, store.Reserve{Write: plain("new", 0), Probes: []store.Probe{{String: "p"}}})
			return err
		},
		"Update": func(ctx context.Context) error { _, err := st.Update(ctx, plain("new", 0)); return err },
		"Get":    func(ctx context.Context) error { _, _, err := st.Get(ctx, "present"); return err },
		"List": func(ctx context.Context) error {
			_, err := st.List(ctx, store.List{What: store.ListHeld})
			return err
		},
		"Meter": func(ctx context.Context) error { _, err := st.Meter(ctx, "meter"); return err },
	}
}

// refuses asserts that the methods are unavailable and say why.
func refuses(t *testing.T, st *redis.Store, want string, methods ...string) {
	t.Helper()
	all := asks(st)
	if methods == nil {
		for name := range all {
			methods = append(methods, name)
		}
	}
	for _, name := range methods {
		start := time.Now()
		err := all[name](background)
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("%s took %s", name, took)
		}
	}
}

// works waits until everything is answered again, and looks for damage.
func (s *server) works(t *testing.T, st *redis.Store) {
	t.Helper()
	for name, ask := range asks(st) {
		s.eventually(t, name, func() error { return ask(background) })
	}
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

func TestDown(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	s.kill(t)
	refuses(t, st, "at unix:"+s.socket())
	s.start(t)
	s.works(t, st)
	// One that is opened while the server is down works when it is up.
	s.kill(t)
	early := s.open(t)
	refuses(t, early, "no such file")
	s.start(t)
	s.works(t, early)
}

func TestBlackHole(t *testing.T) {
	const timeout = 400 * time.Millisecond
	s := newServer(t)
	short := func(o *redis.Options) { o.Timeout = timeout }
	st := s.used(t, short)
	s.signal(t, syscall.SIGSTOP)
	late := s.open(t, short)
	// More than the client's queues hold.
	for _, st := range []*redis.Store{st, late} {
		var group sync.WaitGroup
		for i := range 6_000 {
			group.Go(func() {
				ctx, limit := background, timeout
				if i%2 == 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(background, timeout/4)
					defer cancel()
					limit = timeout / 4
				}
				start := time.Now()
				_, err := st.Update(ctx, plain(fmt.Sprint("k", i), 0))
				// The machine is slow with 6,000 at once.
				if took := time.Since(start); took > limit+patience {
					t.Errorf("waited %s, %s are allowed", took, limit)
				}
				if !errors.Is(err, store.ErrUnavailable) {
					t.Errorf("Update: %v", err)
				}
			})
		}
		group.Wait()
		start := time.Now()
		_, _, err := st.Get(background, "present")
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "read a record") || time.Since(start) > timeout+patience {
			t.Errorf("Get after %s: %v", time.Since(start), err)
		}
	}
	s.signal(t, syscall.SIGCONT)
	s.works(t, st)
	s.works(t, late)
}

func TestScriptsForgotten(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	for range 3 {
		s.do(t, "SCRIPT", "FLUSH")
		for name, ask := range asks(st) {
			if err := ask(background); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	s.works(t, st)
}

// digest is of all that the server holds.
func (s *server) digest(t testing.TB) string {
	t.Helper()
	m := s.do(t, "DEBUG", "DIGEST")
	d, err := m.ToString()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

var debug = []string{"--enable-debug-command", "yes"}

func TestOutOfMemory(t *testing.T) {
	s := newServer(t, debug...)
	st := s.used(t)
	for range 50 {
		s.do(t, "CONFIG", "SET", "maxmemory", "0")
		if _, err := st.Update(background, plain(fmt.Sprint("k", nonces.Load()), 0)); err != nil {
			t.Fatal(err)
		}
		before := s.digest(t)
		s.do(t, "CONFIG", "SET", "maxmemory", "1")
		refuses(t, st, "raise maxmemory", "Reserve", "Update")
		if s.digest(t) != before {
			t.Fatal("something was written")
		}
	}
	// What is there can be read all the same.
	for _, name := range []string{"Get", "List", "Meter", "Standing"} {
		if err := asks(st)[name](background); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.do(t, "CONFIG", "SET", "maxmemory", "0")
	s.works(t, st)

	// Memory that runs full under writers: each write is whole or not there.
	s.do(t, "CONFIG", "SET", "maxmemory", "6mb")
	var full atomic.Int64
	var group sync.WaitGroup
	for worker := range 8 {
		group.Go(func() {
			for i := 0; full.Load() < 100; i++ {
				w := plain(fmt.Sprintf("%d/%d", worker, i), 0)
				w.Record.Body = make([]byte, 2000)
				switch _, err := st.Update(background, w); {
				case err == nil:
				case errors.Is(err, store.ErrUnavailable) && strings.Contains(err.Error(), "OOM"):
					full.Add(1)
				default:
					t.Errorf("%v", err)
					return
				}
			}
		})
	}
	group.Wait()
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

func TestReplica(t *testing.T) {
	s, primary := newServer(t), newServer(t)
	st := s.used(t)
	port := freePort(t)
	primary.do(t, "CONFIG", "SET", "port", port)
	s.do(t, "REPLICAOF", "127.0.0.1", port)
	refuses(t, st, "is a replica")
	// Its primary goes away.
	primary.kill(t)
	refuses(t, st, "is a replica")
	s.do(t, "REPLICAOF", "NO", "ONE")
	s.do(t, "FLUSHALL")
	_, err := st.Update(background, plain("k", 0))
	if !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("Update of a server that lost everything: %v", err)
	}
	st = s.open(t)
	if _, err := st.Initialise(background, costID); err != nil {
		t.Fatal(err)
	}
	s.works(t, st)
}

func freePort(t testing.TB) string {
	t.Helper()
	free, err := ports.Free(1)
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(free[0])
}

func TestBusy(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	s.do(t, "CONFIG", "SET", "busy-reply-threshold", "50")
	loop := s.client(t)
	ended := make(chan error, 1)
	go func() {
		ended <- loop.Do(background, loop.B().Arbitrary("EVAL", "while true do end", "0").Build()).Error()
	}()
	s.eventually(t, "the server is busy", func() error {
		answer, err := s.plain("GET k")
		if err == nil && !strings.HasPrefix(answer, "-BUSY") {
			err = errors.New(answer)
		}
		return err
	})
	refuses(t, st, "slow log")
	if answer, err := s.plain("SCRIPT KILL"); err != nil || !strings.HasPrefix(answer, "+OK") {
		t.Fatalf("SCRIPT KILL: %q, %v", answer, err)
	}
	if err := <-ended; err == nil {
		t.Error("the endless script ended well")
	}
	s.works(t, st)
}

func TestLoading(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	for i := range 1000 {
		if _, err := st.Update(background, plain(fmt.Sprint("k", i), 0)); err != nil {
			t.Fatal(err)
		}
	}
	s.kill(t)
	// Slow enough that it is seen while it loads; it answers now and then only.
	s.args = append(s.args, "--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024")
	s.slow = true
	s.start(t)
	seen := false
	s.eventually(t, "loaded", func() error {
		_, _, err := st.Get(background, "present")
		if err != nil && strings.Contains(err.Error(), "reading its files") && errors.Is(err, store.ErrUnavailable) {
			seen = true
		}
		return err
	})
	if !seen {
		t.Error("the server was not seen loading")
	}
	s.works(t, st)
}

func TestClients(t *testing.T) {
	s := newServer(t)
	s.do(t, "CONFIG", "SET", "maxclients", "3")
	full := false
	for range 4 {
		c, err := net.Dial("unix", s.socket())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		// One too many is told so, or hung up on before it has asked.
		b := make([]byte, 64)
		n := 0
		if _, err = io.WriteString(c, "PING\r\n"); err == nil {
			n, err = c.Read(b)
		}
		full = full || err != nil || strings.Contains(string(b[:n]), "max number")
	}
	if !full {
		t.Fatal("the server takes a fourth client")
	}
	refuses(t, s.open(t), "maxclients")
}

func TestPassword(t *testing.T) {
	s := newServer(t)
	var password atomic.Pointer[string]
	set := func(p string) { password.Store(&p) }
	set("")
	st := s.used(t, func(o *redis.Options) {
		o.Credentials = func() (string, string, error) { return "", *password.Load(), nil }
	})
	client := s.client(t)
	do := func(args ...string) {
		t.Helper()
		if err := client.Do(background, client.B().Arbitrary(args...).Build()).Error(); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
	}
	cut := func() { do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") }
	do("CONFIG", "SET", "requirepass", "first")
	cut()
	refused := func(want string) {
		t.Helper()
		s.eventually(t, want, func() error {
			_, _, err := st.Get(background, "present")
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("Get: %w", err)
			}
			return nil
		})
	}
	refused("NOAUTH")
	set("wrong")
	refused("WRONGPASS")
	refused("the store's secret")
	if _, _, err := st.Get(background, "present"); strings.Contains(err.Error(), "wrong\"") {
		t.Errorf("the password is in the error: %v", err)
	}
	set("first")
	s.eventually(t, "the right password", func() error { _, _, err := st.Get(background, "present"); return err })
	// It is rotated: connections are made anew with the new one.
	do("CONFIG", "SET", "requirepass", "second")
	set("second")
	cut()
	s.works(t, st)
}

func TestRights(t *testing.T) {
	s := newServer(t, debug...)
	st := s.used(t)
	version := func() uint64 {
		r, _, err := st.Get(background, "present")
		if err != nil {
			t.Fatal(err)
		}
		return r.Version
	}
	limited := s.open(t, func(o *redis.Options) {
		o.Credentials = func() (string, string, error) { return "limited", "pw", nil }
	})
	grant := func(rules ...string) {
		s.do(t, append([]string{"ACL", "SETUSER", "limited", "reset", "on", ">pw", "~" + st.Prefix() + "*", "+@all"}, rules...)...)
	}
	grant()
	if r, err := limited.Update(background, plain("present", version())); err != nil || r.Outcome != store.Written {
		t.Fatalf("with all rights: %+v, %v", r, err)
	}
	for _, right := range []string{"hset", "set", "mset", "zadd", "zrem", "hdel", "del", "hmget", "get", "time", "evalsha"} {
		grant("-"+right, "-eval")
		before := s.digest(t)
		w := plain("present", version())
		w.Marks, w.Meters = nil, []store.MeterEntry{{Meter: "meter"}}
		w.Record = &store.Record{}
		_, err := limited.Update(background, w)
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "give it all commands") {
			t.Errorf("without %s: %v", right, err)
		}
		if s.digest(t) != before {
			t.Errorf("without %s something was written", right)
		}
	}
}

func TestForeign(t *testing.T) {
	meta := "{test}meta"
	for name, c := range map[string]struct {
		spoil   []string
		want    string
		methods []string
	}{
		"another format":        {[]string{"HSET", meta, "format", "2"}, "format 2, not 1", nil},
		"no format":             {[]string{"HDEL", meta, "format"}, "damaged", nil},
		"no sequence":           {[]string{"HSET", meta, "sequence", "many"}, "damaged", nil},
		"a sequence at its end": {[]string{"HSET", meta, "sequence", "70368744177663"}, "damaged", nil},
		"another program's key": {[]string{"SET", meta, "x"}, "another program", nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, debug...)
			st := s.used(t)
			if c.spoil[0] == "SET" {
				s.do(t, "DEL", meta)
			}
			s.do(t, c.spoil...)
			before := s.digest(t)
			refuses(t, st, c.want, c.methods...)
			if s.digest(t) != before {
				t.Error("something was written")
			}
		})
	}
	t.Run("records without an identity", func(t *testing.T) {
		s := newServer(t)
		st := s.used(t)
		s.do(t, "DEL", meta)
		if _, err := st.Update(background, plain("k", 0)); !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("Update: %v", err)
		}
		refuses(t, s.open(t), "no identity", "Initialise")
	})
	t.Run("a record's format", func(t *testing.T) {
		s := newServer(t)
		st := s.used(t)
		client := s.client(t)
		record, err := client.Do(background, client.B().Keys().Pattern("{test}r*").Build()).AsStrSlice()
		if err != nil || len(record) != 1 {
			t.Fatalf("%q, %v", record, err)
		}
		s.do(t, "SETRANGE", record[0], "0", "\x02")
		if _, err := st.Update(background, plain("present", 1)); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "of a record: 2") {
			t.Errorf("Update: %v", err)
		}
		if _, _, err := st.Get(background, "present"); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Get: %v", err)
		}
		if err := st.Check(background); err == nil {
			t.Error("Check finds nothing")
		}
	})
}

// TestKeyOfAnotherType: whichever key a step would write is something else, it
// writes nothing at all.
func TestKeyOfAnotherType(t *testing.T) {
	s := newServer(t, debug...)
	client := s.client(t)
	// More marks than one value holds, and as many as it holds.
	const many, most = 72, 64
	fill := func(namespace string) (*redis.Store, store.Write) {
		st := s.used(t, func(o *redis.Options) { o.Namespace = namespace })
		before := plain("present", 1)
		before.Marks = []store.Mark{{String: "many", Tag: "tag"}, {String: "many"}}
		r, err := st.Update(background, before)
		if err != nil || r.Outcome != store.Written {
			t.Fatalf("%+v, %v", r, err)
		}
		for i := range many {
			w := plain(fmt.Sprint("k", i), 0)
			w.Marks = []store.Mark{{String: "many", Tag: "tag"}, {String: "many"}}
			if i < most {
				w.Marks = append(w.Marks, store.Mark{String: "most"})
			}
			if _, err := st.Update(background, w); err != nil {
				t.Fatal(err)
			}
		}
		w := plain("present", r.Version)
		w.Record = &store.Record{Header: []byte("new")}
		w.Marks = []store.Mark{{String: "many"}, {String: "many", Tag: "tag 2"}, {String: "most"}, {String: "new"}}
		return st, w
	}
	// Which keys it touches is seen on another namespace.
	twin, w := fill("twin")
	if r, err := twin.Update(background, w); err != nil || r.Outcome != store.Written {
		t.Fatalf("%+v, %v", r, err)
	}
	names := map[string]bool{}
	st, w := fill("test")
	for _, prefix := range []string{twin.Prefix(), st.Prefix()} {
		all, err := client.Do(background, client.B().Keys().Pattern(prefix+"*").Build()).AsStrSlice()
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range all {
			names[st.Prefix()+strings.TrimPrefix(k, prefix)] = true
		}
	}
	refusals := 0
	for name := range names {
		if strings.HasPrefix(name, st.Prefix()+"r") && !strings.HasSuffix(name, redis.Hash("present")) {
			continue
		}
		if strings.HasPrefix(name, st.Prefix()+"b") {
			// SET and DEL of a body do not mind what it was.
			continue
		}
		kind, err := client.Do(background, client.B().Type().Key(name).Build()).ToString()
		if err != nil {
			t.Fatal(err)
		}
		if kind != "none" {
			s.do(t, "RENAME", name, "aside")
		}
		s.do(t, "LPUSH", name, "x")
		before := s.digest(t)
		w.Nonce = fmt.Sprint("nonce ", nonces.Add(1))
		result, err := st.Update(background, w)
		if !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("%q is a list: %+v, %v", name, result, err)
		}
		refusals++
		if s.digest(t) != before {
			t.Errorf("%q is a list: something was written: %v", name, err)
		}
		s.do(t, "DEL", name)
		if kind != "none" {
			s.do(t, "RENAME", "aside", name)
		}
	}
	// meta, marks, sums, due, held, record, "many" with no tag, with "tag" and with
	// "tag 2", and "most", the marks of which move to one.
	if refusals != 10 {
		t.Errorf("%d keys matter, want 10", refusals)
	}
	if r, err := st.Update(background, w); err != nil || r.Outcome != store.Written {
		t.Errorf("%+v, %v", r, err)
	}
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

// TestAnswers: what a server may say that is hard to bring about here.
func TestAnswers(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var says atomic.Pointer[string]
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				lines := bufio.NewScanner(c)
				// A request is "*n", then n times its length and itself.
				for lines.Scan() {
					var n int
					if _, err := fmt.Sscanf(lines.Text(), "*%d", &n); err != nil {
						return
					}
					for range 2 * n {
						lines.Scan()
					}
					if _, err := fmt.Fprintf(c, "-%s\r\n", *says.Load()); err != nil {
						return
					}
				}
			}()
		}
	}()
	for answer, want := range map[string]string{
		"LOADING Redis is loading the dataset in memory":                          "reading its files",
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set": "look at the primary",
		"NOREPLICAS Not enough good replicas to write.":                           "min-replicas-to-write",
		"MISCONF Errors writing to the AOF file":                                  "its disk",
		"CLUSTERDOWN Hash slot not served":                                        "does not serve all of its slots",
		"TRYAGAIN Multiple keys request during rehashing of slot":                 "being moved",
		"ERR max number of clients reached":                                       "raise maxclients",
		"ERR Error compiling script (new function): user_script:1":                "Redis 7.0",
		"ERR something else":                                                      "something else",
	} {
		says.Store(&answer)
		st, err := redis.Open(redis.Options{Addresses: []string{"unix:" + l.Addr().String()}, Namespace: "test"})
		if err != nil {
			t.Fatal(err)
		}
		refuses(t, st, want)
		refuses(t, st, strings.TrimPrefix(answer, "ERR "))
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}
}

// cutter passes what comes on to the server, and cuts instead of answering when told to.
type cutter struct {
	net.Listener
	target atomic.Pointer[string]
	cut    atomic.Bool
	lost   atomic.Int64
}

func newCutter(t *testing.T, s *server) *cutter {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(s.dir, "cutter"))
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{Listener: l}
	c.leadTo(s)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", *c.target.Load())
			if err != nil {
				_ = in.Close()
				continue
			}
			end := func() { _ = in.Close(); _ = out.Close() }
			go func() { _, _ = io.Copy(out, in); end() }()
			go func() {
				defer end()
				b := make([]byte, 64<<10)
				for {
					n, err := out.Read(b)
					if err != nil {
						return
					}
					if c.cut.Load() {
						c.lost.Add(1)
						return
					}
					if _, err := in.Write(b[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return c
}

func (c *cutter) leadTo(s *server) {
	socket := s.socket()
	c.target.Store(&socket)
}

// TestPrimarySwitched: connections stay with the old primary, which is a replica
// now, until the store gives them up.
func TestPrimarySwitched(t *testing.T) {
	old, next := newServer(t, "--repl-diskless-sync-delay", "0"), newServer(t)
	c := newCutter(t, old)
	st := old.used(t, func(o *redis.Options) {
		o.Addresses, o.Connections = []string{"unix:" + c.Addr().String()}, 1
	})
	port := freePort(t)
	old.do(t, "CONFIG", "SET", "port", port)
	next.do(t, "REPLICAOF", "127.0.0.1", port)
	direct := next.client(t)
	next.eventually(t, "replicated", func() error {
		n, err := direct.Do(background, direct.B().Arbitrary("EXISTS", "{test}meta").Build()).AsInt64()
		if err == nil && n == 0 {
			err = errors.New("nothing there")
		}
		return err
	})
	next.do(t, "REPLICAOF", "NO", "ONE")
	port = freePort(t)
	next.do(t, "CONFIG", "SET", "port", port)
	old.do(t, "REPLICAOF", "127.0.0.1", port)
	refuses(t, st, "is a replica", "Update")
	c.leadTo(next)
	next.works(t, st)
	if r, _, err := next.open(t).Get(background, "new"); err != nil || r == nil {
		t.Errorf("at the new primary there is %+v, %v", r, err)
	}
}

func TestLostReply(t *testing.T) {
	s := newServer(t)
	s.used(t)
	c := newCutter(t, s)
	st := s.open(t, func(o *redis.Options) { o.Addresses = []string{"unix:" + c.Addr().String()} })
	for i := range 20 {
		w := plain(fmt.Sprint("k", i), 0)
		if _, _, err := st.Get(background, w.Key); err != nil {
			s.eventually(t, "connected", func() error { _, _, err := st.Get(background, w.Key); return err })
		}
		c.cut.Store(true)
		_, err := st.Reserve(background, store.Reserve{Write: w})
		c.cut.Store(false)
		if !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("a reply that was lost: %v", err)
		}
		var again store.Result
		s.eventually(t, "repeated", func() error {
			var err error
			again, err = st.Reserve(background, store.Reserve{Write: w})
			return err
		})
		record, _, err := st.Get(background, w.Key)
		if err != nil || record == nil || again.Outcome != store.Written || record.Version != again.Version {
			t.Errorf("repeated: %+v, there is %+v, %v", again, record, err)
		}
	}
	if c.lost.Load() < 20 {
		t.Errorf("%d replies were lost", c.lost.Load())
	}
	sum, err := st.Meter(background, "meter")
	if err != nil || sum != "21" {
		t.Errorf("the meter is %s, want 21: %v", sum, err)
	}
	s.works(t, st)
}

// TestKilled: the server is killed while it writes, with fsync at every write.
func TestKilled(t *testing.T) {
	const rounds = 12
	s := newServer(t, "--appendfsync", "always")
	journal := storetest.NewJournal()
	for round := range rounds {
		before := journal.Acknowledged()
		st := s.open(t)
		in, out := io.Pipe()
		var group sync.WaitGroup
		group.Go(func() {
			if err := journal.Read(in); err != nil {
				t.Error(err)
			}
		})
		var scribeErr error
		group.Go(func() {
			scribeErr = storetest.Scribe(background, st, out)
			_ = out.Close()
		})
		wanted := before + 1 + rand.IntN(400)
		s.eventually(t, "acknowledged", func() error {
			if n := journal.Acknowledged(); n < wanted {
				return fmt.Errorf("%d of %d", n, wanted)
			}
			return nil
		})
		s.kill(t)
		group.Wait()
		if !errors.Is(scribeErr, store.ErrUnavailable) {
			t.Fatalf("round %d: the scribe ended with %v", round, scribeErr)
		}
		s.start(t)
		after := s.open(t)
		if err := after.Check(background); err != nil {
			t.Errorf("check: %v", err)
		}
		journal.Verify(t, after)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	t.Logf("%d acknowledged writes in %d rounds", journal.Acknowledged(), rounds)
}

func TestCluster(t *testing.T) {
	port, bus := freePort(t), freePort(t)
	s := newServer(t, "--port", port, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port", bus,
		"--cluster-announce-ip", "127.0.0.1")
	st := s.open(t, func(o *redis.Options) { o.Addresses = []string{"127.0.0.1:" + port} })
	refuses(t, st, "the slot has no", "Get")
	s.do(t, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
	s.eventually(t, "the cluster is up", func() error { _, err := st.Initialise(background, costID); return err })
	for i := range 60 {
		w := plain(fmt.Sprint("k", i), 0)
		w.Marks = append(w.Marks, store.Mark{String: "many"})
		if r, err := st.Update(background, w); err != nil || r.Outcome != store.Written {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	r, err := st.Reserve(background, store.Reserve{Write: plain("k", 0), Probes: []store.Probe{{String: "many"}, {String: "mark"}}})
	if err != nil || r.Outcome != store.Blocked || r.HitCount != 60 {
		t.Errorf("%+v, %v", r, err)
	}
	d, err := st.Durability(background)
	findings := d.Findings
	if err != nil || len(findings) != 1 || findings[0].Reason != redis.NotSynced {
		t.Errorf("%+v, %v", findings, err)
	}
	if _, err := st.Update(background, plain("present", 0)); err != nil {
		t.Fatal(err)
	}
	s.works(t, st)
}

func TestDurability(t *testing.T) {
	s := newServer(t, "--appendfsync", "always")
	st := s.used(t)
	judged := func() []store.Finding {
		t.Helper()
		d, err := st.Durability(background)
		if err != nil {
			t.Fatal(err)
		}
		return d.Findings
	}
	if f := judged(); len(f) != 0 {
		t.Errorf("nothing is wrong: %+v", f)
	}
	for _, c := range []struct {
		set, mend []string
		want      string
		loses     bool
		text      string
	}{
		{[]string{"maxmemory-policy", "allkeys-lru"}, []string{"maxmemory-policy", "noeviction"}, redis.Evicts, true, "allkeys-lru"},
		{[]string{"appendonly", "no"}, []string{"appendonly", "yes"}, redis.NoAppendOnlyFile, true, "set it to yes"},
		{[]string{"appendfsync", "everysec"}, []string{"appendfsync", "always"}, redis.NotSynced, true, `"everysec"`},
		{[]string{"no-appendfsync-on-rewrite", "yes"}, []string{"no-appendfsync-on-rewrite", "no"}, redis.NotSynced, true, "rewrite"},
		{[]string{"maxmemory", "1mb"}, []string{"maxmemory", "0"}, redis.LowMemory, false, "1048576"},
	} {
		s.do(t, append([]string{"CONFIG", "SET"}, c.set...)...)
		f := judged()
		if len(f) != 1 || f[0].Reason != c.want || f[0].Loses != c.loses || !strings.Contains(f[0].Text, c.text) {
			t.Errorf("%q: %+v", c.set, f)
		}
		s.do(t, append([]string{"CONFIG", "SET"}, c.mend...)...)
		s.eventually(t, "mended", func() error {
			if f := judged(); len(f) != 0 {
				return fmt.Errorf("%+v", f)
			}
			return nil
		})
	}

	replica := newServer(t, "--appendfsync", "always")
	port := freePort(t)
	s.do(t, "CONFIG", "SET", "port", port)
	replica.do(t, "REPLICAOF", "127.0.0.1", port)
	s.eventually(t, "a replica", func() error {
		if f := judged(); len(f) != 1 || f[0].Reason != redis.AsyncReplica || !f[0].Loses {
			return fmt.Errorf("%+v", f)
		}
		return nil
	})
	d, err := replica.open(t).Durability(background)
	f := d.Findings
	if err != nil || len(f) != 1 || f[0].Reason != redis.IsReplica || !strings.Contains(f[0].Text, port) {
		t.Errorf("of the replica: %+v, %v", f, err)
	}
	replica.kill(t)

	s.do(t, "ACL", "SETUSER", "limited", "on", ">pw", "~*", "+@all", "-config")
	limited := s.open(t, func(o *redis.Options) {
		o.Credentials = func() (string, string, error) { return "limited", "pw", nil }
	})
	s.eventually(t, "an unreadable configuration", func() error {
		d, err := limited.Durability(background)
		f := d.Findings
		if err == nil && (len(f) != 1 || f[0].Reason != redis.NotReadable || !f[0].Loses || !strings.Contains(f[0].Text, "CONFIG GET")) {
			err = fmt.Errorf("%+v", f)
		}
		return err
	})
	s.kill(t)
	if _, err := st.Durability(background); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("of a server that is down: %v", err)
	}
}

func TestDecimals(t *testing.T) {
	s := newServer(t)
	client := s.client(t)
	script := valkey.NewLuaScript(redis.DecimalScript())
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, seed))
	digits := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			// Many carries and borrows.
			b[i] = "0123456789990000"[random.IntN(16)]
		}
		return string(b)
	}
	decimal := func() string {
		whole, behind := random.IntN(store.MaxDecimal)+1, 0
		if random.IntN(3) > 0 {
			behind = random.IntN(store.MaxDecimal)
		}
		text := strings.TrimLeft(digits(whole), "0")
		if text == "" {
			text = "0"
		}
		if f := strings.TrimRight(digits(behind), "0"); f != "" {
			text += "." + f
		}
		return text
	}
	rat := func(text string) *big.Rat {
		r, ok := new(big.Rat).SetString(text)
		if !ok {
			t.Fatalf("%q is not a decimal", text)
		}
		return r
	}
	// A limb that is just full, and one that just borrows.
	edges := [][2]string{
		{"99999999999999", "1"}, {"0.99999999999999", "0.00000000000001"}, {"1", "99999999999999"},
		{"100000000000000", "1"}, {"10000000000000000000000000000", "0.1"}, {"9999999999999999999999999999", "1"},
		{"50000000000000", "50000000000000"}, {"0", "0"}, {"1", "0"}, {"9007199254740993", "9007199254740992"},
	}
	below := 0
	for i := range 3000 {
		a, b := decimal(), decimal()
		switch n := random.IntN(6); {
		case i < len(edges):
			a, b = edges[i][0], edges[i][1]
		case n == 0:
			b = a
		case n == 1 && strings.Contains(a, "."):
			b = a + strings.Repeat("0", random.IntN(3))
		}
		answer, err := script.Exec(background, client, []string{"k"}, []string{"{test}", redis.NoProcess, a, b}).AsStrSlice()
		if err != nil {
			t.Fatalf("%s and %s: %v", a, b, err)
		}
		x, y := rat(a), rat(b)
		if sum := rat(answer[0]); sum.Cmp(new(big.Rat).Add(x, y)) != 0 {
			t.Errorf("%s + %s is %s", a, b, answer[0])
		}
		if want := fmt.Sprint(x.Cmp(y)); answer[2] != want {
			t.Errorf("%s compared to %s is %s", a, b, answer[2])
		}
		if x.Cmp(y) < 0 {
			below++
			if answer[1] != "" {
				t.Errorf("%s - %s is %s", a, b, answer[1])
			}
		} else if rest := rat(answer[1]); rest.Cmp(new(big.Rat).Sub(x, y)) != 0 {
			t.Errorf("%s - %s is %s", a, b, answer[1])
		}
		for _, text := range answer[:2] {
			whole, behind, point := strings.Cut(text, ".")
			if len(whole) > 1 && whole[0] == '0' || point && (behind == "" || behind[len(behind)-1] == '0') {
				t.Errorf("%s and %s give %q, which is not the shortest form", a, b, text)
			}
		}
		if t.Failed() {
			return
		}
	}
	if below < 100 {
		t.Errorf("%d differences were below 0", below)
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]redis.Options{
		"no address":      {Namespace: "n"},
		"no port":         {Addresses: []string{"host"}, Namespace: "n"},
		"no socket":       {Addresses: []string{"unix:"}, Namespace: "n"},
		"two sockets":     {Addresses: []string{"unix:/a", "unix:/b"}, Namespace: "n"},
		"no namespace":    {Addresses: []string{"host:1"}},
		"a hash tag":      {Addresses: []string{"host:1"}, Namespace: "a}b"},
		"a pattern":       {Addresses: []string{"host:1"}, Namespace: "a*"},
		"a long one":      {Addresses: []string{"host:1"}, Namespace: strings.Repeat("n", 129)},
		"a socket beside": {Addresses: []string{"host:1", "unix:/a"}, Namespace: "n"},
	} {
		if _, err := redis.Open(o); err == nil {
			t.Errorf("%s: opened", name)
		}
	}
}

// TestNamespaces: stores on one server do not see each other.
func TestNamespaces(t *testing.T) {
	s := newServer(t)
	a := s.used(t)
	b := s.open(t, func(o *redis.Options) { o.Namespace = "test2" })
	if id, err := b.Standing(background); err != nil || id.Identity != (store.Identity{}) {
		t.Errorf("%+v, %v", id, err)
	}
	if _, err := b.Initialise(background, store.Identity{Epoch: "other", KeyDomain: "other"}); err != nil {
		t.Fatal(err)
	}
	if r, _, err := b.Get(background, "present"); r != nil || err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	for _, st := range []*redis.Store{a, b} {
		if err := st.Check(background); err != nil {
			t.Error(err)
		}
	}
}
