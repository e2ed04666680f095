package redis_test

// What a process keeps in the store of itself: a server that was emptied, a failover
// to a replica that lagged behind, copies of a write that come late, and processes
// that are gone.

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// forgotten asserts that every question is answered so.
func forgotten(t *testing.T, st *redis.Store, doing string) {
	t.Helper()
	for name, ask := range asks(st) {
		if err := ask(background); !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("%s: %s: %v", doing, name, err)
		}
	}
}

func TestEmptied(t *testing.T) {
	s := newServer(t)
	for name := range asks(s.open(t)) {
		st := s.used(t)
		idle := s.open(t)
		if _, err := idle.Standing(background); err != nil {
			t.Fatal(err)
		}
		s.do(t, "FLUSHALL")
		if err := asks(st)[name](background); !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("%s of an emptied store: %v", name, err)
		}
		forgotten(t, st, name+" of an emptied store")
		if have, err := idle.Standing(background); err != nil || have.Identity != (store.Identity{}) {
			t.Errorf("who has written nothing sees %+v, %v", have, err)
		}
		if _, err := idle.Update(background, plain("k", 0)); !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("Update of who has written nothing: %v", err)
		}
		// It is of no more use when the store has an identity again, nor after a restart.
		if _, err := idle.Initialise(background, costID); err != nil {
			t.Fatal(err)
		}
		s.kill(t)
		s.start(t)
		forgotten(t, st, "after a restart")
		s.do(t, "FLUSHALL")
	}
}

// TestLaggingReplica: a write was answered that the replica had not got when it became
// the primary.
func TestLaggingReplica(t *testing.T) {
	for name := range asks(nil) {
		t.Run(name, func(t *testing.T) {
			old, next := newServer(t, "--repl-diskless-sync-delay", "0"), newServer(t)
			c := newCutter(t, old)
			through := func(o *redis.Options) { o.Addresses = []string{"unix:" + c.Addr().String()} }
			st, lucky := old.used(t, through), old.open(t, through)
			if r, err := lucky.Update(background, plain("of the lucky one", 0)); err != nil || r.Outcome != store.Written {
				t.Fatalf("%+v, %v", r, err)
			}
			port := freePort(t)
			old.do(t, "CONFIG", "SET", "port", port)
			next.do(t, "REPLICAOF", "127.0.0.1", port)
			upstream, downstream := old.client(t), next.client(t)
			next.eventually(t, "replicated", func() error {
				n, err := downstream.Do(background, downstream.B().Arbitrary("EXISTS", "{test}r"+redis.Hash("of the lucky one")).Build()).AsInt64()
				if err == nil && n == 0 {
					err = errors.New("not there")
				}
				return err
			})
			// The replica is cut off, and knows no more.
			old.do(t, "CONFIG", "SET", "port", "0")
			old.do(t, "CLIENT", "KILL", "TYPE", "replica")
			old.eventually(t, "the replica is cut off", func() error {
				info, err := upstream.Do(background, upstream.B().Arbitrary("INFO", "replication").Build()).ToString()
				if err == nil && !strings.Contains(info, "connected_slaves:0") {
					err = errors.New("it follows")
				}
				return err
			})
			if r, err := st.Update(background, plain("lost", 0)); err != nil || r.Outcome != store.Written {
				t.Fatalf("%+v, %v", r, err)
			}
			old.kill(t)
			next.do(t, "REPLICAOF", "NO", "ONE")
			c.leadTo(next)
			next.eventually(t, "the new primary answers", func() error {
				err := asks(st)[name](background)
				if errors.Is(err, store.ErrUnavailable) {
					return err
				}
				if !errors.Is(err, store.ErrMemoryLost) {
					t.Errorf("%s: %v", name, err)
				}
				return nil
			})
			forgotten(t, st, "at the new primary")
			// The old one comes back with all that was written: that helps no more.
			old.start(t)
			c.leadTo(old)
			next.do(t, "CLIENT", "KILL", "TYPE", "normal")
			forgotten(t, st, "at the old primary")
			c.leadTo(next)
			old.do(t, "CLIENT", "KILL", "TYPE", "normal")
			next.eventually(t, "who has lost nothing is told", func() error {
				_, err := lucky.Update(background, plain("k", 0))
				if !errors.Is(err, store.ErrMemoryLost) {
					return fmt.Errorf("Update: %w", err)
				}
				return nil
			})
		})
	}
}

// holder passes connections on, and holds back what comes from the client on those
// that are open when it is told to.
type holder struct {
	net.Listener
	mu   sync.Mutex
	open map[*held]bool
}

type held struct {
	mu sync.Mutex
	// withheld is closed when all goes on; nil: nothing is withheld.
	withheld chan struct{}
	// bytes were withheld.
	bytes atomic.Int64
}

func newHolder(t *testing.T, s *server) *holder {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(s.dir, "holder"))
	if err != nil {
		t.Fatal(err)
	}
	h := &holder{Listener: l, open: map[*held]bool{}}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", s.socket())
			if err != nil {
				_ = in.Close()
				continue
			}
			c := &held{}
			h.mu.Lock()
			h.open[c] = true
			h.mu.Unlock()
			go func() { _, _ = io.Copy(in, out); _ = in.Close() }()
			go func() {
				// What was sent arrives, also when its sender has gone.
				defer func() { _ = out.Close() }()
				b := make([]byte, 64<<10)
				for {
					n, err := in.Read(b)
					c.mu.Lock()
					withheld := c.withheld
					c.mu.Unlock()
					if withheld != nil {
						c.bytes.Add(int64(n))
						<-withheld
					}
					if _, werr := out.Write(b[:n]); err != nil || werr != nil {
						return
					}
				}
			}()
		}
	}()
	return h
}

// pair has a store ask through it, over two connections. Only what is to be given up is given up.
func (h *holder) pair(o *redis.Options) {
	o.Addresses, o.Connections, o.Timeout = []string{"unix:" + h.Addr().String()}, 2, patience
}

// hold withholds what is sent from now on on so many of the connections that are
// open, until release; it counts the bytes.
func (h *holder) hold(n int) (bytes func() int64, release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []*held
	withheld := make(chan struct{})
	for c := range h.open {
		if len(all) == n {
			break
		}
		c.mu.Lock()
		c.withheld = withheld
		c.mu.Unlock()
		all = append(all, c)
	}
	h.open = map[*held]bool{}
	return func() int64 {
			var n int64
			for _, c := range all {
				n += c.bytes.Load()
			}
			return n
		}, func() {
			for _, c := range all {
				c.mu.Lock()
				c.withheld = nil
				c.mu.Unlock()
			}
			close(withheld)
		}
}

// TestLateCopies: a write that is under way when its caller has left, and that arrives
// after it was repeated, or looked for, changes nothing any more, even if nothing else
// stands against it.
func TestLateCopies(t *testing.T) {
	must := func(t *testing.T, r store.Result, err error, want store.Outcome) {
		t.Helper()
		if err != nil || r.Outcome != want {
			t.Fatalf("%+v, %v, want %s", r, err, want)
		}
	}
	marked := func(key string, expected uint64) store.Write {
		w := plain(key, expected)
		w.Marks, w.Meters = []store.Mark{{String: "in the way"}}, nil
		return w
	}
	for name, c := range map[string]struct {
		write store.Reserve
		// Between the write's leaving and its arrival.
		before func(t *testing.T, direct *redis.Store)
		again  func(t *testing.T, st, direct *redis.Store, w store.Reserve)
	}{
		"repeated, written and deleted": {
			store.Reserve{Write: plain("late", 0)}, nil,
			func(t *testing.T, st, direct *redis.Store, w store.Reserve) {
				r, err := st.Reserve(background, w)
				must(t, r, err, store.Written)
				r, err = direct.Update(background, store.Write{Epoch: costID.Epoch, Key: "late", Expected: r.Version, Nonce: "delete"})
				must(t, r, err, store.Written)
			},
		},
		"repeated and blocked by what then goes": {
			store.Reserve{Write: plain("late", 0), Probes: []store.Probe{{String: "in the way"}}},
			func(t *testing.T, direct *redis.Store) {
				r, err := direct.Update(background, marked("first", 0))
				must(t, r, err, store.Written)
			},
			func(t *testing.T, st, direct *redis.Store, w store.Reserve) {
				r, err := st.Reserve(background, w)
				must(t, r, err, store.Blocked)
				r, err = direct.Update(background, store.Write{Epoch: costID.Epoch, Key: "first", Expected: r.Hits[0].Record.Version, Nonce: "delete"})
				must(t, r, err, store.Written)
			},
		},
		"looked for and not found": {
			store.Reserve{Write: plain("late", 0)}, nil,
			func(t *testing.T, st, direct *redis.Store, w store.Reserve) {
				if r, _, err := st.Get(background, "late"); r != nil || err != nil {
					t.Fatalf("%+v, %v", r, err)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			direct := s.used(t)
			if c.before != nil {
				c.before(t, direct)
			}
			h := newHolder(t, s)
			st := s.open(t, func(o *redis.Options) {
				o.Addresses, o.Connections, o.Timeout = []string{"unix:" + h.Addr().String()}, 1, 2*time.Second
			})
			if _, err := st.Standing(background); err != nil {
				t.Fatal(err)
			}
			bytes, release := h.hold(1)
			if r, err := st.Reserve(background, c.write); !errors.Is(err, store.ErrUnavailable) {
				t.Fatalf("%+v, %v", r, err)
			}
			s.eventually(t, "the write is under way", func() error {
				if bytes() == 0 {
					return errors.New("nothing was sent")
				}
				return nil
			})
			s.eventually(t, "another connection", func() error { _, err := st.Standing(background); return err })
			c.again(t, st, direct, c.write)
			before := s.calls(t)
			release()
			s.eventually(t, "the copy has arrived", func() error {
				if n := s.calls(t); n == before {
					return fmt.Errorf("%d calls of scripts", n)
				}
				return nil
			})
			if r, _, err := direct.Get(background, "late"); r != nil || err != nil {
				t.Errorf("the late copy was written: %+v, %v", r, err)
			}
			if err := direct.Check(background); err != nil {
				t.Errorf("check: %v", err)
			}
		})
	}
}

// calls counts the scripts that were called.
func (s *server) calls(t testing.TB) int {
	t.Helper()
	return s.callsOf(t, "evalsha", "eval")
}

func (s *server) callsOf(t testing.TB, names ...string) int {
	t.Helper()
	answer := s.do(t, "INFO", "commandstats")
	info, err := answer.ToString()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for line := range strings.Lines(info) {
		var n int
		for _, name := range names {
			if _, err := fmt.Sscanf(line, "cmdstat_"+name+":calls=%d,", &n); err == nil {
				sum += n
			}
		}
	}
	return sum
}

// TestOvertaken: questions that are under way on another connection when one of the
// same process is given up are asked again, and answered.
func TestOvertaken(t *testing.T) {
	s := newServer(t)
	s.used(t)
	h := newHolder(t, s)
	st := s.open(t, h.pair)
	for range 2 {
		if _, err := st.Standing(background); err != nil {
			t.Fatal(err)
		}
	}
	bytes, release := h.hold(1)
	var group sync.WaitGroup
	for i := range 40 {
		group.Go(func() {
			if r, err := st.Update(background, plain(fmt.Sprint("k", i), 0)); err != nil || r.Outcome != store.Written {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	s.eventually(t, "some are under way", func() error {
		if bytes() == 0 {
			return errors.New("nothing was sent")
		}
		return nil
	})
	late := s.info(t, "errorstat_HOLDFASTLATE")
	// Every other one is on the connection that is held.
	s.eventually(t, "one is given up", func() error {
		short, cancel := context.WithTimeout(background, 300*time.Millisecond)
		defer cancel()
		_, err := st.Update(short, plain(fmt.Sprint("given up ", nonces.Load()), 0))
		if err == nil {
			return errors.New("it was answered")
		}
		if !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
		return nil
	})
	answered := make(chan error, 2)
	for range 2 {
		group.Go(func() { _, err := st.Standing(background); answered <- err })
	}
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	release()
	group.Wait()
	if n := s.info(t, "errorstat_HOLDFASTLATE") - late; n == 0 {
		t.Error("no question was late")
	}
	if have, err := st.Standing(background); err != nil || have.Sequence < 41 {
		t.Errorf("%+v, %v", have, err)
	}
	s.works(t, st)
}

// TestProcessesAreSwept: processes that are gone do not pile up, and one that is there
// is not taken for gone.
func TestProcessesAreSwept(t *testing.T) {
	const day = 24 * time.Hour
	s := newServer(t)
	client := s.client(t)
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	pass := func(d time.Duration) {
		now = now.Add(d)
		if err := client.Do(background, client.B().Set().Key("{test}"+redis.TestClockKey).Value(fmt.Sprintf("%d 0", now.Unix())).Build()).Error(); err != nil {
			t.Fatal(err)
		}
	}
	pass(0)
	open := func() *redis.Store {
		t.Helper()
		st, err := redis.OpenStanding(s.options())
		if err != nil {
			t.Fatal(err)
		}
		st.SetClock(func() time.Time { return now })
		t.Cleanup(func() { _ = st.Close() })
		return st
	}
	write := func(st *redis.Store) {
		t.Helper()
		if r, err := st.Update(background, plain(fmt.Sprint("k", nonces.Load()), 0)); err != nil || r.Outcome != store.Written {
			t.Fatalf("%s: %+v, %v", now, r, err)
		}
	}
	standing := func(st *redis.Store) {
		t.Helper()
		if _, err := st.Standing(background); err != nil {
			t.Fatalf("%s: %v", now, err)
		}
	}
	known := func() int {
		t.Helper()
		names, err := client.Do(background, client.B().Hkeys().Key("{test}meta").Build()).AsStrSlice()
		if err != nil {
			t.Fatal(err)
		}
		return len(names) - len([]string{"format", "epoch", "domain", "sequence", "swept"})
	}
	// The one that looks, one that writes, one that does nothing for long, and many that end.
	looks, writes, idle := open(), open(), open()
	if _, err := looks.Initialise(background, costID); err != nil {
		t.Fatal(err)
	}
	write(writes)
	write(idle)
	for range 10 {
		write(open())
	}
	standing(looks)
	if n := known(); n != 13 {
		t.Fatalf("%d processes are known, want 13", n)
	}
	for range 30 {
		pass(day)
		standing(looks)
		write(writes)
	}
	if n := known(); n != 13 {
		t.Errorf("after 30 days %d processes are known, want 13", n)
	}
	pass(day)
	standing(looks)
	if n := known(); n != 2 {
		t.Errorf("after 31 days %d processes are known, want those two that live", n)
	}
	write(idle)
	write(idle)
	if n := known(); n != 3 {
		t.Errorf("%d processes are known, want three", n)
	}
	// Nobody looks for long, or the clock jumps: all are given their time anew.
	write(open())
	pass(400 * day)
	standing(looks)
	for _, st := range []*redis.Store{looks, writes, idle} {
		write(st)
	}
	if n := known(); n < 4 {
		t.Errorf("%d processes are known, want four at least", n)
	}
	if err := looks.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
	// What they have written since is counted all the same.
	s.do(t, "FLUSHALL")
	pass(0)
	for name, st := range map[string]*redis.Store{"looks": looks, "writes": writes, "idle": idle} {
		if _, err := st.Standing(background); !errors.Is(err, store.ErrMemoryLost) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDial(t *testing.T) {
	s := newServer(t)
	port := freePort(t)
	s.do(t, "CONFIG", "SET", "port", port)
	var dialled atomic.Pointer[string]
	forbidden := errors.New("this address is forbidden")
	var refuse atomic.Bool
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		text := network + " " + address
		dialled.Store(&text)
		if refuse.Load() {
			return nil, forbidden
		}
		var d net.Dialer
		return d.DialContext(ctx, network, address)
	}
	for address, want := range map[string]string{
		"localhost:" + port:  "tcp localhost:" + port,
		"unix:" + s.socket(): "unix " + s.socket(),
	} {
		refuse.Store(false)
		with := func(o *redis.Options) { o.Addresses, o.Dial, o.Connections = []string{address}, dial, 1 }
		if _, err := s.open(t, with).Standing(background); err != nil {
			t.Fatal(err)
		}
		if have := *dialled.Load(); have != want {
			t.Errorf("dialled %q, want %q", have, want)
		}
		refuse.Store(true)
		if _, err := s.open(t, with).Standing(background); !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, forbidden) {
			t.Errorf("an address that is refused: %v", err)
		}
	}
}

// TestTLS: on connections of one's own making too, and with the name of who is dialled.
func TestTLS(t *testing.T) {
	s := newServer(t)
	// For its certificate, of 127.0.0.1 and example.com.
	web := httptest.NewTLSServer(nil)
	defer web.Close()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: web.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", s.socket())
			if err != nil {
				_ = in.Close()
				continue
			}
			go func() { _, _ = io.Copy(out, in); _ = out.Close() }()
			go func() { _, _ = io.Copy(in, out); _ = in.Close() }()
		}
	}()
	trusted := x509.NewCertPool()
	trusted.AddCert(web.Certificate())
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		host   string
		config *tls.Config
		want   string
	}{
		"trusted":                {"127.0.0.1", &tls.Config{RootCAs: trusted}, ""},
		"with a name of its own": {"localhost", &tls.Config{RootCAs: trusted, ServerName: "example.com"}, ""},
		"another name":           {"localhost", &tls.Config{RootCAs: trusted}, "not localhost"},
		"not trusted":            {"127.0.0.1", &tls.Config{}, "unknown authority"},
	} {
		var dialled atomic.Int64
		st := s.open(t, func(o *redis.Options) {
			o.Addresses, o.TLS, o.Connections = []string{c.host + ":" + port}, c.config, 1
			o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				dialled.Add(1)
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}
		})
		_, err := st.Standing(background)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if dialled.Load() == 0 {
			t.Errorf("%s: was dialled past Dial", name)
		}
	}
}
