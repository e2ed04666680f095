// How a gateway goes while others stay: whoever calls meanwhile notices nothing. And how it
// shows another certificate while it is called.

package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/metrics/metricstest"
	"github.com/holdfast-dev/holdfast/test/provider"
)

// service sends new connections to one of several gateways, as a Service does, and knows how
// many there are.
type service struct {
	to   atomic.Pointer[string]
	mu   sync.Mutex
	open map[string]int
}

// oneOf is a connection that is counted until it is closed.
type oneOf struct {
	net.Conn
	once  sync.Once
	close func()
}

func (c *oneOf) Close() error {
	c.once.Do(c.close)
	return c.Conn.Close()
}

func (s *service) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	// It counts from when it is known where it leads, so that none is overlooked.
	s.mu.Lock()
	address := *s.to.Load()
	s.open[address]++
	s.mu.Unlock()
	ended := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open[address]--
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		ended()
		return nil, err
	}
	return &oneOf{Conn: conn, close: ended}, nil
}

func (s *service) connections(address string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[address]
}

// overTLS has a rig serve with a certificate for 127.0.0.1.
func overTLS(t *testing.T, certFile, keyFile string, address *string) setting {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	*address = listener.Addr().String()
	return func(o *Options) {
		_ = o.Listener.Close() // nobody knows of it
		o.InsecureHTTP, o.CertFile, o.KeyFile, o.Listener = false, certFile, keyFile, listener
	}
}

// payment is a call that no client sends again by itself.
func payment(t *testing.T, caller, id, order, fault string) *http.Request {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, "https://127.0.0.1/v1/namespaces/"+namespace+"/tools/charge", strings.NewReader(refundOf(order, "1")))
	if err != nil {
		t.Error(err)
		return nil
	}
	req.GetBody = nil
	req.Header.Set("Authorization", "Bearer "+caller)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", id)
	if fault != "" {
		req.Header.Set(provider.HeaderFault, fault)
	}
	return req
}

// sendableAgain has a client send the payment again by itself where it may: what it knows that nobody has looked at. Over
// HTTP/2 that is what crosses the GOAWAY (RFC 9113, section 6.8).
func sendableAgain(req *http.Request, order string) {
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(refundOf(order, "1"))), nil }
}

// succession is two gateways over TLS with the same records and upstream, and the Service before them, which leads
// to the old one first.
type succession struct {
	r          *rig // of the old one
	behind     *service
	old, young string // their addresses
	roots      *x509.CertPool
}

func newSuccession(t *testing.T) *succession {
	t.Helper()
	certFile, keyFile, roots := certificate(t, t.TempDir())
	s := &succession{behind: &service{open: map[string]int{}}, roots: roots}
	s.r = setUp(t, overTLS(t, certFile, keyFile, &s.old))
	next := setUp(t, overTLS(t, certFile, keyFile, &s.young))
	next.engines.Put(namespace, "payments", s.r.engine)
	next.upstream = s.r.upstream
	for _, r := range []*rig{s.r, next} {
		r.tool("charge", "/charges", timeout(time.Minute)) // until a hundred are connected
	}
	s.behind.to.Store(&s.old)
	return s
}

func TestAGatewayThatLeavesLosesNoCall(t *testing.T) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(protocol, func(t *testing.T) { leaves(t, protocol) })
	}
}

func leaves(t *testing.T, protocol string) {
	const agents = 100
	two := newSuccession(t)
	r, behind := two.r, two.behind

	var calls, fromOld, kept atomic.Int64
	end := make(chan struct{})
	var all sync.WaitGroup
	finish := sync.OnceFunc(func() {
		close(end)
		r.p.Release(nil)
		all.Wait()
	})
	defer finish()
	for i := range agents {
		all.Go(func() {
			transport := &http.Transport{DialContext: behind.dial, TLSClientConfig: &tls.Config{RootCAs: two.roots}, ForceAttemptHTTP2: protocol == "HTTP/2.0"}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport}
			caller, fault := fmt.Sprintf("agent-%d", i), "hold"
			for n := 0; ; n++ {
				select {
				case <-end:
					return
				default:
				}
				leaving := r.g.leaving.Load()
				order := fmt.Sprintf("%d-%d", i, n)
				req := payment(t, caller, fmt.Sprintf("k-%d", n), order, fault)
				if protocol == "HTTP/2.0" {
					sendableAgain(req, order)
				}
				resp, err := client.Do(req)
				if err != nil && protocol == "HTTP/2.0" {
					// What crosses the GOAWAY is the caller's to send again, too, if its client has written
					// to the connection before it has read that (see crosses). Had anybody looked
					// at it, this would be a replay.
					resp, err = client.Do(payment(t, caller, fmt.Sprintf("k-%d", n), order, fault))
				}
				if err != nil {
					t.Errorf("agent %d, call %d: %v", i, n, err)
					return
				}
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusCreated || resp.Header.Get(headerVerdict) != string(guard.Allow) || resp.Proto != protocol {
					t.Errorf("agent %d, call %d: %s over %s", i, n, resp.Status, resp.Proto)
					return
				}
				if leaving && protocol == "HTTP/1.1" && behind.to.Load() == &two.old {
					fromOld.Add(1)
					if !resp.Close {
						kept.Add(1)
					}
				}
				fault = ""
				calls.Add(1)
			}
		})
	}
	eventually(t, "100 calls are in flight", func() bool { return len(r.p.Held()) == agents })

	if err := r.g.Ready(nil); err != nil {
		t.Errorf("before it leaves: %v", err)
	}
	r.g.Leave()
	if err := r.g.Ready(nil); err == nil {
		t.Error("a gateway that leaves says that it is ready")
	}
	r.p.Release(nil)
	// Nobody has been told yet, and everybody comes here.
	eventually(t, "it serves on", func() bool { return calls.Load() > 3*agents })
	if protocol == "HTTP/1.1" && (fromOld.Load() == 0 || kept.Load() > 0) {
		t.Errorf("of %d answers after it was told to leave, %d keep their connections", fromOld.Load(), kept.Load())
	}
	behind.to.Store(&two.young)
	eventually(t, "all of them have gone elsewhere", func() bool { return behind.connections(two.old) == 0 })
	at := calls.Load()
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	eventually(t, "they call on", func() bool { return calls.Load() > at+agents })
	finish()
	l, err := r.p.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if int64(l.Count) != calls.Load() {
		t.Errorf("%d calls were answered and %d paid", calls.Load(), l.Count)
	}
}

// far is a connection whose client hears nothing more, once it is told so, until it has written
// again: what it sends crosses what was sent to it.
type far struct {
	net.Conn
	cross chan struct{} // closed: from now on
	once  sync.Once
	wrote chan struct{}
}

func (c *far) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	select {
	case <-c.cross:
		<-c.wrote
	default:
	}
	return n, err
}

func (c *far) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	select {
	case <-c.cross:
		c.once.Do(func() { close(c.wrote) })
	default:
	}
	return n, err
}

func (c *far) Close() error {
	c.once.Do(func() { close(c.wrote) })
	return c.Conn.Close()
}

// A connection that was idle until the gateway's end is closed with it. What the caller sends at that moment nobody reads: it
// is told of a connection error, nothing is paid, and under the same ID it pays once elsewhere. A client that may
// send it again does so by itself over HTTP/1.1.
func TestWhatCrossesTheEndOfAnIdleConnection(t *testing.T) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(protocol, func(t *testing.T) { crosses(t, protocol) })
	}
}

func crosses(t *testing.T, protocol string) {
	two := newSuccession(t)
	r, behind := two.r, two.behind

	cross := make(chan struct{})
	paid := func(caller *http.Client, id string, again bool) error {
		req := payment(t, "agent", id, id, "")
		if again {
			sendableAgain(req, id)
		}
		resp, err := caller.Do(req)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusCreated || resp.Header.Get(headerVerdict) != string(guard.Allow) || resp.Proto != protocol {
			t.Errorf("%s: %s over %s", id, resp.Status, resp.Proto)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return errors.Join(err, resp.Body.Close())
	}
	callers := make([]*http.Client, 2)
	for i := range callers {
		transport := &http.Transport{
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := behind.dial(ctx, network, address)
				if err != nil || behind.to.Load() == &two.young {
					return conn, err
				}
				return &far{Conn: conn, cross: cross, wrote: make(chan struct{})}, nil
			},
			TLSClientConfig: &tls.Config{RootCAs: two.roots}, ForceAttemptHTTP2: protocol == "HTTP/2.0",
		}
		defer transport.CloseIdleConnections()
		callers[i] = &http.Client{Transport: transport}
		if err := paid(callers[i], fmt.Sprintf("before-%d", i), false); err != nil {
			t.Fatal(err)
		}
	}
	r.g.Leave()
	behind.to.Store(&two.young)
	close(cross)
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if n := behind.connections(two.old); n != 2 {
		t.Fatalf("the callers know of the end of %d of 2 connections", 2-n)
	}

	if err := paid(callers[0], "crossing", false); err == nil {
		t.Error("a request that nobody has read is answered")
	}
	if l, err := r.p.Ledger(); err != nil || l.Count != 2 {
		t.Errorf("%d payments (%v), want the 2 from before", l.Count, err)
	}
	if err := paid(callers[0], "crossing", false); err != nil {
		t.Errorf("the same again: %v", err)
	}
	// Over HTTP/2 it may hear of the reset before the GOAWAY, and then it leaves that to its caller.
	err := paid(callers[1], "sent again", true)
	if err != nil && protocol == "HTTP/2.0" {
		err = paid(callers[1], "sent again", true)
	}
	if err != nil {
		t.Errorf("a client that may send it again: %v", err)
	}
	if l, err := r.p.Ledger(); err != nil || l.Count != 4 {
		t.Errorf("%d payments (%v), want 4", l.Count, err)
	}
}

// Whoever connects is shown the newer certificate, and whoever is connected stays so.
func TestACertificateIsReplacedUnderLoad(t *testing.T) {
	dir := t.TempDir()
	// As a kubelet has it: the files lead through a link that is replaced.
	versions := make([]string, 2)
	pools := make([]*x509.CertPool, 2)
	both := x509.NewCertPool()
	for i := range versions {
		versions[i] = filepath.Join(dir, fmt.Sprint("..", i))
		if err := os.Mkdir(versions[i], 0o700); err != nil {
			t.Fatal(err)
		}
		var file string
		file, _, pools[i] = certificate(t, versions[i])
		text, err := os.ReadFile(file)
		if err != nil || !both.AppendCertsFromPEM(text) {
			t.Fatal(err)
		}
	}
	// The earlier version goes, and that is what is noticed at once.
	link := func(to, name string) {
		t.Helper()
		before, _ := os.Readlink(filepath.Join(dir, name)) // the first time there is none
		next := filepath.Join(dir, "..next")
		if err := os.Symlink(to, next); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if before != "" {
			if err := os.RemoveAll(before); err != nil {
				t.Fatal(err)
			}
		}
	}
	link(versions[0], "..data")
	link("..data/tls.crt", "tls.crt")
	link("..data/tls.key", "tls.key")

	var address string
	m := metrics.New(metrics.Options{})
	r := setUp(t, overTLS(t, filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), &address), func(o *Options) { o.Metrics = m })
	// What is said of its end is said of the one that is shown.
	ends := func(version string) {
		t.Helper()
		pair, err := tls.LoadX509KeyPair(filepath.Join(version, "tls.crt"), filepath.Join(version, "tls.key"))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the end of the certificate that is shown is told", func() bool {
			return metricstest.Read(t, m)["holdfast_certificate_end_timestamp_seconds"] == float64(pair.Leaf.NotAfter.Unix())
		})
	}
	behind := &service{open: map[string]int{}}
	behind.to.Store(&address)
	client := func(roots *x509.CertPool, keep bool) *http.Client {
		return &http.Client{Transport: &http.Transport{DialContext: behind.dial, DisableKeepAlives: !keep, TLSClientConfig: &tls.Config{RootCAs: roots}}}
	}
	var calls atomic.Int64
	var shown sync.Map // the certificates' signatures
	end := make(chan struct{})
	var all sync.WaitGroup
	finish := sync.OnceFunc(func() {
		close(end)
		r.p.Release(nil)
		all.Wait()
	})
	defer finish()
	for i := range 20 {
		all.Go(func() {
			c := client(both, i%2 == 0)
			defer c.CloseIdleConnections()
			for n := 0; ; n++ {
				select {
				case <-end:
					return
				default:
				}
				resp, err := c.Do(payment(t, fmt.Sprintf("agent-%d", i), fmt.Sprintf("k-%d", n), fmt.Sprintf("%d-%d", i, n), ""))
				if err != nil {
					t.Errorf("agent %d, call %d: %v", i, n, err)
					return
				}
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusCreated {
					t.Errorf("agent %d, call %d: %s", i, n, resp.Status)
					return
				}
				shown.Store(string(resp.TLS.PeerCertificates[0].Signature), true)
				calls.Add(1)
			}
		})
	}
	eventually(t, "calls are made", func() bool { return calls.Load() > 50 })
	knows := func(pool *x509.CertPool) bool {
		c := client(pool, false)
		resp, err := c.Do(payment(t, "agent", "k", "shared", ""))
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return true
	}
	ends(versions[0])
	if !knows(pools[0]) || knows(pools[1]) {
		t.Error("it does not show the certificate that it was started with")
	}
	// Half of a pair, or none at all, is not shown: the one before is.
	broken := filepath.Join(dir, "..broken")
	if err := os.Mkdir(broken, 0o700); err != nil {
		t.Fatal(err)
	}
	for file, from := range map[string]string{"tls.crt": versions[0], "tls.key": versions[1]} {
		text, err := os.ReadFile(filepath.Join(from, file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(broken, file), bytes.TrimSpace(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	at := calls.Load()
	link(broken, "..data")
	eventually(t, "they call on", func() bool { return calls.Load() > at+100 })
	if !knows(pools[0]) {
		t.Error("half of a pair was taken")
	}
	link(versions[1], "..data")
	eventually(t, "the new certificate is shown", func() bool { return knows(pools[1]) })
	ends(versions[1])
	if knows(pools[0]) {
		t.Error("the old certificate is shown beside the new one")
	}
	at = calls.Load()
	eventually(t, "they call on", func() bool { return calls.Load() > at+100 })
	finish()
	n := 0
	shown.Range(func(any, any) bool { n++; return true })
	if n != 2 {
		t.Errorf("agents saw %d certificates, want both", n)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}
