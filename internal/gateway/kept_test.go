package gateway

// When a connection carries another attempt, and when it must not.

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
)

const plainAnswer = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{\"id\":\"p1\"}"

// heard is a request that an upstream of script was sent.
type heard struct {
	connection int
	body       string
}

// actor is an upstream that does with the nth request what it is told to, and goes on
// with the connection if that says true.
type actor struct {
	url string
	act func(n int, conn net.Conn) bool

	mu     sync.Mutex
	asked  []heard
	closed int // connections that the gateway has ended
}

func newActor(t *testing.T, secure *tls.Config, act func(n int, conn net.Conn) bool) *actor {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &actor{url: "http://" + l.Addr().String(), act: act}
	if secure != nil {
		a.url, l = "https://"+l.Addr().String(), tls.NewListener(l, secure)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for number := 1; ; number++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go a.serve(conn, number)
		}
	}()
	return a
}

func (a *actor) serve(conn net.Conn, number int) {
	defer func() { _ = conn.Close() }()
	in := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			a.mu.Lock()
			a.closed++
			a.mu.Unlock()
			return
		}
		body, _ := io.ReadAll(req.Body)
		a.mu.Lock()
		a.asked = append(a.asked, heard{number, string(body)})
		n := len(a.asked)
		a.mu.Unlock()
		if !a.act(n, conn) {
			return
		}
	}
}

// connections are those over which the requests came, in their order.
func (a *actor) connections() (out []int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range a.asked {
		out = append(out, h.connection)
	}
	return out
}

func (a *actor) ended() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// keeps is said before anything is called: how long connections may lie idle, and how old they may become.
func (r *rig) keeps(idle, age time.Duration) {
	r.g.sender.kept.idleMost, r.g.sender.kept.ageMost = idle, age
}

func (r *rig) idle() int {
	k := r.g.sender.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.count
}

func say(conn net.Conn, text string) { _, _ = io.WriteString(conn, text) }

// over TLS and without, the same must hold.
func overBoth(t *testing.T, test func(t *testing.T, secure *tls.Config, settings ...setting)) {
	t.Run("plain", func(t *testing.T) { test(t, nil) })
	certFile, keyFile, roots := certificate(t, t.TempDir())
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	for name, version := range map[string]uint16{"TLS 1.2": tls.VersionTLS12, "TLS 1.3": tls.VersionTLS13} {
		t.Run(name, func(t *testing.T) {
			test(t, &tls.Config{Certificates: []tls.Certificate{pair}, MaxVersion: version}, func(o *Options) { o.RootCAs = roots })
		})
	}
}

func TestAConnectionIsUsedAgain(t *testing.T) {
	overBoth(t, func(t *testing.T, secure *tls.Config, settings ...setting) {
		for name, tc := range map[string]struct {
			answer string
			status int
			again  bool
		}{
			"a length":                 {plainAnswer, 201, true},
			"no body":                  {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, true},
			"204":                      {"HTTP/1.1 204 No Content\r\n\r\n", 204, true},
			"204 with a length":        {"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", 204, false},
			"204 in chunks":            {"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", 204, false},
			"chunks":                   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, true},
			"chunks and a trailer":     {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-A: b\r\n\r\n", 200, true},
			"chunks and a length":      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, false},
			"an informational one":     {"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + plainAnswer, 201, true},
			"a failure":                {"HTTP/1.1 422 Unprocessable Content\r\nContent-Length: 2\r\n\r\nno", 422, true},
			"Connection: close":        {strings.Replace(plainAnswer, "\r\n", "\r\nConnection: close\r\n", 1), 201, false},
			"HTTP/1.0":                 {strings.Replace(plainAnswer, "HTTP/1.1", "HTTP/1.0", 1), 201, false},
			"HTTP/1.0, keep-alive":     {strings.Replace(plainAnswer, "HTTP/1.1 201 Created\r\n", "HTTP/1.0 201 Created\r\nConnection: keep-alive\r\n", 1), 201, false},
			"more than its length":     {plainAnswer + "!", 201, false},
			"a second answer":          {plainAnswer + plainAnswer, 201, false},
			"a line break too many":    {plainAnswer + "\r\n", 201, false},
			"a very long second one":   {plainAnswer + strings.Repeat("x", 20<<10), 201, false},
			"a long answer":            {"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + strings.Repeat("x", 200000), 200, true},
			"chunks, and one too many": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n0\r\n\r\n", 200, false},
		} {
			t.Run(name, func(t *testing.T) {
				r := setUp(t, settings...)
				a := newActor(t, secure, func(_ int, conn net.Conn) bool {
					say(conn, tc.answer)
					return true
				})
				r.upstream = a.url
				r.tool("charge", "", nil)
				verdict := guard.Allow
				if tc.status == 422 {
					verdict = guard.Replay
				}
				want := []int{1, 1, 1}
				if !tc.again {
					want = []int{1, 2, 3}
				}
				for i := range 3 {
					got := r.do(ask{id: fmt.Sprint("k", i), body: refundOf(fmt.Sprint(i), "1")})
					if got.err != nil || got.status != tc.status || tc.status != 422 && got.verdict() != string(verdict) {
						t.Fatalf("answer %+v", got)
					}
				}
				if got := a.connections(); !slices.Equal(got, want) {
					t.Errorf("the attempts came over the connections %v, want %v", got, want)
				}
			})
		}
	})
}

// R12: the upstream takes the request and ends a connection that has carried an
// attempt before. It gets exactly one request.
func TestR12OnAUsedConnection(t *testing.T) {
	overBoth(t, func(t *testing.T, secure *tls.Config, settings ...setting) {
		for name, end := range map[string]func(conn net.Conn){
			"closed":        func(net.Conn) {},
			"in the answer": func(conn net.Conn) { say(conn, plainAnswer[:40]) },
			"reset": func(conn net.Conn) {
				if c, ok := conn.(*tls.Conn); ok {
					conn = c.NetConn()
				}
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
			},
		} {
			t.Run(name, func(t *testing.T) {
				r := setUp(t, settings...)
				a := newActor(t, secure, func(n int, conn net.Conn) bool {
					if n == 1 {
						say(conn, plainAnswer)
						return true
					}
					end(conn)
					return false
				})
				r.upstream = a.url
				r.tool("charge", "", nil)
				r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
				r.pay(ask{id: "k2", body: refundOf("2", "1")}, 409, guard.UnknownHold)
				r.pay(ask{id: "k2", body: refundOf("2", "1")}, 409, guard.UnknownHold)
				if got := a.connections(); !slices.Equal(got, []int{1, 1}) {
					t.Errorf("the attempts came over the connections %v, want both over the first and no third", got)
				}
			})
		}
	})
}

// An upstream that ends a connection, or says something unasked, before the next attempt
// is met before anything is sent, and another connection is dialled.
func TestAUsedConnectionIsLookedAtFirst(t *testing.T) {
	overBoth(t, func(t *testing.T, secure *tls.Config, settings ...setting) {
		for name, between := range map[string]func(conn net.Conn) bool{
			"closed":           func(net.Conn) bool { return false },
			"a late answer":    func(conn net.Conn) bool { say(conn, strings.Replace(plainAnswer, "p1", "p9", 1)); return true },
			"a timeout's 408":  func(conn net.Conn) bool { say(conn, "HTTP/1.1 408 Request Timeout\r\n\r\n"); return false },
			"a byte and a pen": func(conn net.Conn) bool { say(conn, "H"); return true },
		} {
			t.Run(name, func(t *testing.T) {
				r := setUp(t, settings...)
				first, done := make(chan struct{}), make(chan struct{})
				a := newActor(t, secure, func(n int, conn net.Conn) bool {
					say(conn, plainAnswer)
					if n > 1 {
						return true
					}
					<-first
					goOn := between(conn)
					if !goOn {
						_ = conn.Close()
					}
					close(done)
					return goOn
				})
				r.upstream = a.url
				r.tool("charge", "", nil)
				r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
				eventually(t, "the connection is kept", func() bool { return r.idle() == 1 })
				c := r.onlyIdle()
				close(first)
				<-done
				eventually(t, "it has come to the gateway's kernel", func() bool {
					quiet := true
					_ = c.raw.Control(func(fd uintptr) { quiet = silent(int(fd)) })
					return !quiet
				})
				got := r.pay(ask{id: "k2", body: refundOf("2", "1")}, 201, guard.Allow)
				if !strings.Contains(got.body, "p1") {
					t.Errorf("the answer that nobody asked for was taken for the attempt's: %s", got.body)
				}
				if got := a.connections(); !slices.Equal(got, []int{1, 2}) {
					t.Errorf("the attempts came over the connections %v, want 1 and 2", got)
				}
				if n := len(r.engineAttempts("k2")); n != 1 {
					t.Errorf("%d attempts of the second payment, want one", n)
				}
			})
		}
	})
}

func (r *rig) onlyIdle() *connection {
	k := r.g.sender.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, list := range k.idle {
		return list[0]
	}
	r.t.Fatal("no connection is kept")
	return nil
}

func (r *rig) engineAttempts(id string) []guard.AttemptView {
	_, doc := r.poll("charge", id, "agent", "")
	return doc.Attempts
}

// Two answers to one request of a used connection: nobody knows which one is its own.
func TestTwoAnswersOnAUsedConnection(t *testing.T) {
	overBoth(t, func(t *testing.T, secure *tls.Config, settings ...setting) {
		r := setUp(t, settings...)
		a := newActor(t, secure, func(n int, conn net.Conn) bool {
			if n > 1 {
				say(conn, "HTTP/1.1 422 Unprocessable Content\r\nContent-Length: 0\r\n\r\n"+plainAnswer)
			} else {
				say(conn, plainAnswer)
			}
			return true
		})
		r.upstream = a.url
		r.tool("charge", "", nil)
		r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
		r.pay(ask{id: "k2", body: refundOf("2", "1")}, 409, guard.UnknownHold)
		if got := a.connections(); !slices.Equal(got, []int{1, 1}) {
			t.Errorf("the attempts came over the connections %v, want both over the first", got)
		}
	})
}

// The deadline closes a used connection like another, and an attempt that ended by it leaves none.
func TestTheDeadlineOnAUsedConnection(t *testing.T) {
	r := setUp(t)
	a := newActor(t, nil, func(n int, conn net.Conn) bool {
		if n != 2 {
			say(conn, plainAnswer)
		}
		return true
	})
	r.upstream = a.url
	r.tool("charge", "", timeout(soon))
	r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
	p := r.pay(ask{id: "k2", body: refundOf("2", "1")}, 409, guard.UnknownHold).problem(t)
	if log := r.logged(); !strings.Contains(log, context.DeadlineExceeded.Error()) {
		t.Errorf("problem %+v; the deadline is not named: %s", p, log)
	}
	eventually(t, "the upstream sees the end", func() bool { return a.ended() == 1 })
	r.pay(ask{id: "k3", body: refundOf("3", "1")}, 201, guard.Allow)
	if got := a.connections(); !slices.Equal(got, []int{1, 1, 2}) {
		t.Errorf("the attempts came over the connections %v, want 1, 1, 2", got)
	}
}

// A clock that passes the deadline after the Reserve stops the write on a used connection,
// and no other one is dialled for it.
func TestLateOnAUsedConnection(t *testing.T) {
	var jump atomic.Bool
	r := setUp(t)
	a := newActor(t, nil, func(_ int, conn net.Conn) bool {
		say(conn, plainAnswer)
		return true
	})
	r.upstream = a.url
	r.tool("charge", "", nil)
	r.g.o.Addresses.Reserved = func() []netip.AddrPort {
		if jump.CompareAndSwap(true, false) {
			r.clock.jump(0, 12*time.Second)
		}
		return nil
	}
	r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
	jump.Store(true)
	if got := r.do(ask{id: "k2", body: refundOf("2", "1")}); got.err != nil || got.status < 400 {
		t.Errorf("answer %+v", got)
	}
	if log := r.logged(); !strings.Contains(log, errLate.Error()) && !strings.Contains(log, context.DeadlineExceeded.Error()) {
		t.Errorf("the write was not refused for being late: %s", log)
	}
	if got := a.connections(); !slices.Equal(got, []int{1}) {
		t.Errorf("requests came over the connections %v, want the first alone", got)
	}
}

// Another tool, or another place of the same tool, uses no connection of before.
func TestAConnectionIsOfOneToolAndPlace(t *testing.T) {
	answer := func(_ int, conn net.Conn) bool {
		say(conn, plainAnswer)
		return true
	}
	r := setUp(t)
	a, b := newActor(t, nil, answer), newActor(t, nil, answer)
	r.upstream = a.url
	r.tool("charge", "", nil)
	r.tool("refund", "", nil)
	r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
	r.pay(ask{tool: "refund", id: "k2", body: refundOf("2", "1")}, 201, guard.Allow)
	r.upstream = b.url
	r.tool("charge", "", nil)
	r.pay(ask{id: "k3", body: refundOf("3", "1")}, 201, guard.Allow)
	r.upstream = strings.Replace(a.url, "127.0.0.1", "localhost", 1)
	r.tool("charge", "", nil)
	r.pay(ask{id: "k4", body: refundOf("4", "1")}, 201, guard.Allow)
	if got := a.connections(); !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("the attempts came over the connections %v, want 1, 2, 3", got)
	}
	if got := b.connections(); !slices.Equal(got, []int{1}) {
		t.Errorf("the other place got requests over %v, want one over its first", got)
	}
}

// changing are places that become somebody's.
type changing struct{ now atomic.Pointer[places] }

func (c *changing) Of(ctx context.Context, to netip.AddrPort) (bool, []string, error) {
	return (*c.now.Load()).Of(ctx, to)
}

// Where a kept connection leads is judged at each attempt.
func TestAKeptConnectionIsJudgedAgain(t *testing.T) {
	for name, then := range map[string]places{
		"reserved now":           {reserved: true},
		"another namespace's":    {namespaces: []string{"other"}},
		"it cannot be found out": {err: errors.New("no cache")},
	} {
		t.Run(name, func(t *testing.T) {
			where := &changing{}
			where.now.Store(&places{})
			r := setUp(t, func(o *Options) { o.Addresses.Places = where })
			a := newActor(t, nil, func(_ int, conn net.Conn) bool {
				say(conn, plainAnswer)
				return true
			})
			r.upstream = a.url
			r.tool("charge", "", nil)
			r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
			where.now.Store(&then)
			r.pay(ask{id: "k2", body: refundOf("2", "1")}, 502, guard.Deny)
			if got := a.connections(); !slices.Equal(got, []int{1}) {
				t.Errorf("requests came over the connections %v, want the first alone", got)
			}
			eventually(t, "the connection is closed", func() bool { return a.ended() == 1 && r.idle() == 0 })
		})
	}
}

// One connection carries one attempt at a time.
func TestAttemptsAtOnceShareNoConnection(t *testing.T) {
	r := setUp(t)
	r.pay(ask{id: "k0", body: refundOf("0", "1")}, 201, guard.Allow)
	answers := make(chan reply, 4)
	for i := range cap(answers) {
		go func() {
			answers <- r.do(ask{id: fmt.Sprint("h", i), body: refundOf(fmt.Sprint("h", i), "1"), fault: "hold"})
		}()
	}
	eventually(t, "all are under way", func() bool { return len(r.p.Held()) == cap(answers) })
	from := map[string]bool{}
	for _, got := range r.p.Received()[1:] {
		from[got.Remote] = true
	}
	if len(from) != cap(answers) {
		t.Errorf("%d attempts at once came over %d connections", cap(answers), len(from))
	}
	r.p.Release(nil)
	for range cap(answers) {
		if got := <-answers; got.status != 201 {
			t.Errorf("answer %+v", got)
		}
	}
	r.paid(5, 5)
}

// What is idle is closed soon; what is old is not kept; the drain closes all.
func TestKeptConnectionsEnd(t *testing.T) {
	answer := func(_ int, conn net.Conn) bool {
		say(conn, plainAnswer)
		return true
	}
	r := setUp(t)
	r.keeps(keptFor, keptAge)
	a := newActor(t, nil, answer)
	r.upstream = a.url
	r.tool("charge", "", nil)
	started := time.Now()
	r.pay(ask{id: "k1", body: refundOf("1", "1")}, 201, guard.Allow)
	eventually(t, "the idle connection is closed", func() bool { return a.ended() == 1 })
	if took := time.Since(started); took < keptFor || took > 20*keptFor {
		t.Errorf("it was closed after %s", took)
	}
	eventually(t, "no timer is left", func() bool {
		k := r.g.sender.kept
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.sweep == nil && k.count == 0 && len(k.idle) == 0
	})
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 201, guard.Allow)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the drain closes it", func() bool { return a.ended() == 2 })
	if got := a.connections(); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("the attempts came over the connections %v, want 1 and 2", got)
	}
}

func TestKeeper(t *testing.T) {
	now := time.Now()
	fresh := func(dialled time.Duration) *connection {
		near, _ := pair(t)
		f, err := newFence(near, &script{time.Second})
		if err != nil {
			t.Fatal(err)
		}
		return &connection{fence: f, stream: f, dialled: now.Add(-dialled)}
	}
	closed := func(c *connection) bool { return c.SetDeadline(time.Time{}) != nil }
	to := destination{namespace: "a", tool: "b", scheme: "http", hostport: "c:1"}
	k := newKeeper()
	t.Cleanup(k.end)

	old := fresh(keptAge)
	if k.put(to, old); !closed(old) || k.count != 0 {
		t.Error("an old connection was kept")
	}
	first, last := fresh(0), fresh(0)
	k.put(to, first)
	k.put(to, last)
	if k.take(destination{namespace: "x", tool: "b", scheme: "http", hostport: "c:1"}, time.Now()) != nil {
		t.Error("another namespace got the connection")
	}
	if k.take(to, time.Now()) != last {
		t.Error("not the last one was taken")
	}
	for name, at := range map[string]time.Time{"later": time.Now().Add(keptFor), "by the wall clock alone": time.Now().Round(0).Add(keptFor), "before": time.Now().Round(0).Add(-time.Hour)} {
		if k.take(to, at) != nil {
			t.Errorf("an idle connection was taken %s", name)
		}
	}
	for range keptEach + 5 {
		k.put(to, fresh(0))
	}
	if k.count != keptEach || len(k.idle[to]) != keptEach {
		t.Errorf("%d connections are kept, want %d", k.count, keptEach)
	}
	k.end()
	if !closed(first) || k.count != 0 {
		t.Error("the end left a connection open")
	}
	after := fresh(0)
	if k.put(to, after); !closed(after) {
		t.Error("a connection was kept after the end")
	}
}

func TestRecords(t *testing.T) {
	text := "\x17\x03\x03\x00\x03abc\x15\x03\x03\x00\x00\x16\x03\x03\x01\x00" + strings.Repeat("x", 256)
	borders := map[int]bool{0: true, 8: true, 13: true, len(text): true}
	for step := 1; step <= len(text); step++ {
		r := &records{}
		for at := 0; at < len(text); {
			n := min(step, len(text)-at)
			r.follow([]byte(text[at : at+n]))
			if at += n; r.whole() != borders[at] {
				t.Fatalf("in steps of %d, at %d: a border is %t", step, at, r.whole())
			}
		}
	}
}

// What TLS has taken from the kernel together with the answer is unasked: a record, or a part of one.
func TestARecordBehindTheAnswerIsUnasked(t *testing.T) {
	t.Run("whole", func(t *testing.T) { recordBehind(t, 0) })
	t.Run("a part", func(t *testing.T) { recordBehind(t, 10) })
}

func recordBehind(t *testing.T, missing int) {
	certFile, keyFile, roots := certificate(t, t.TempDir())
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	r := setUp(t, func(o *Options) { o.RootCAs = roots })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var dialled atomic.Int64
	go func() {
		for {
			tcp, err := l.Accept()
			if err != nil {
				return
			}
			dialled.Add(1)
			go func() {
				defer func() { _ = tcp.Close() }()
				held := &holding{Conn: tcp, missing: missing}
				conn := tls.Server(held, &tls.Config{Certificates: []tls.Certificate{cert}})
				in := bufio.NewReader(conn)
				for {
					req, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					held.cut = true
					say(conn, plainAnswer)
					say(conn, plainAnswer)
					held.flush()
				}
			}()
		}
	}()
	r.upstream = "https://" + l.Addr().String()
	r.tool("charge", "", nil)
	for i := range 2 {
		r.pay(ask{id: fmt.Sprint("k", i), body: refundOf(fmt.Sprint(i), "1")}, 201, guard.Allow)
	}
	if dialled.Load() != 2 {
		t.Errorf("%d connections were dialled, want 2", dialled.Load())
	}
}

// holding sends what it holds at once, but for what is to be missing at its end.
type holding struct {
	net.Conn
	cut     bool
	missing int
	held    []byte
}

func (h *holding) Write(p []byte) (int, error) {
	if !h.cut {
		return h.Conn.Write(p)
	}
	h.held = append(h.held, p...)
	return len(p), nil
}

func (h *holding) flush() { _, _ = h.Conn.Write(h.held[:len(h.held)-h.missing]) }
