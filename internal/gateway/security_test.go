package gateway

// What must get its clear answer, and must send and leak nothing.

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// raw is an upstream that answers each connection with these bytes and closes it.
func raw(t *testing.T, answer string) (url string, accepted *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	accepted = &atomic.Int64{}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			if req, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				_, _ = io.Copy(io.Discard, req.Body)
			}
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}
	}()
	return "http://" + l.Addr().String(), accepted
}

// slow is an upstream that says when it was asked and answers when it is told to.
func slow(t *testing.T) (url string, asked <-chan struct{}, answer chan<- struct{}) {
	t.Helper()
	in, out := make(chan struct{}, 8), make(chan struct{}, 8)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		in <- struct{}{}
		<-out
		w.WriteHeader(http.StatusOK)
	}))
	t.Cleanup(s.Close)
	return s.URL, in, out
}

// apiServer answers both reviews.
type apiServer struct {
	tokens map[string][]string // token: audiences
	away   atomic.Bool
}

type tokenReviews struct{ *apiServer }

func (s tokenReviews) Create(_ context.Context, r *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	if s.away.Load() {
		return nil, errors.New("connection refused")
	}
	if audiences, ok := s.tokens[r.Spec.Token]; ok {
		r.Status = authenticationv1.TokenReviewStatus{
			Authenticated: true, Audiences: audiences,
			User: authenticationv1.UserInfo{Username: "system:serviceaccount:support:agent", UID: "u1"},
		}
	}
	return r, nil
}

type accessReviews struct{ *apiServer }

func (s accessReviews) Create(_ context.Context, r *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	if s.away.Load() {
		return nil, errors.New("connection refused")
	}
	r.Status.Allowed = r.Spec.ResourceAttributes.Name == "charge" && r.Spec.ResourceAttributes.Namespace == namespace
	return r, nil
}

func jwt(payload string) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{}`)) + "." + part([]byte(payload)) + "." + part([]byte("x"))
}

func TestWhoMayCall(t *testing.T) {
	good, other := jwt(`{"n":1}`), jwt(`{"n":2}`)
	api := &apiServer{tokens: map[string][]string{good: {access.Audience}, other: {"https://kubernetes.default.svc"}}}
	r := setUp(t, func(o *Options) { o.Access = access.New(tokenReviews{api}, accessReviews{api}, nil) })
	for _, tc := range []struct {
		name, tool, token string
		status            int
		reason            string
	}{
		{"malformed token", "charge", "hunter2", 401, "unauthenticated"},
		{"oversized token", "charge", jwt(`{"pad":"` + strings.Repeat("x", 9<<10) + `"}`), 401, "unauthenticated"},
		{"unknown token", "charge", jwt(`{"n":3}`), 401, "unauthenticated"},
		{"token of another audience", "charge", other, 401, "unauthenticated"},
		{"no invoke", "refund", good, 403, "forbidden"},
		{"no invoke, and no such tool", "nonexistent", good, 403, "forbidden"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := r.pay(ask{tool: tc.tool, caller: tc.token, id: "k1", body: refundOf("9", "1")}, tc.status, "")
			if p := got.problem(t); p.Reason != tc.reason {
				t.Errorf("problem %+v", p)
			}
			if strings.Contains(got.body, tc.token) || strings.Contains(r.logged(), tc.token) {
				t.Error("the token was told or logged")
			}
			if (got.header.Get("WWW-Authenticate") != "") != (tc.status == 401) {
				t.Errorf("WWW-Authenticate %q", got.header.Get("WWW-Authenticate"))
			}
		})
	}
	r.paid(0, 0)
	api.away.Store(true)
	if p := r.pay(ask{caller: good, tool: "charge", id: "k1", body: refundOf("9", "1")}, 503, guard.Deny).problem(t); p.Reason != "access_unavailable" || p.RetryAfter < 1 {
		t.Errorf("while the API server is away: %+v", p)
	}
	r.paid(0, 0)
	api.away.Store(false)
	r.pay(ask{caller: good, tool: "charge", id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	r.paid(1, 1)
}

func TestToolsThatAreNotServed(t *testing.T) {
	r := setUp(t)
	r.tools.Refuse(&policy.NotServedError{Namespace: namespace, Tool: "broken", Reason: "Invalid", Message: "spec.identity.scope[0]: 1:5: undeclared reference"})
	p := r.pay(ask{tool: "broken", id: "k1", body: refundOf("9", "1")}, 503, guard.Deny).problem(t)
	if p.Reason != "policy_not_available" || !strings.Contains(p.Detail, "undeclared reference") || p.RetryAfter < 1 {
		t.Errorf("problem %+v", p)
	}
	r.tools.Refuse(&policy.NotServedError{Namespace: namespace, Tool: "new", Reason: policy.ReasonPending, Message: "nobody looked"})
	if p := r.pay(ask{tool: "new", id: "k1", body: refundOf("9", "1")}, 503, guard.Deny).problem(t); p.Reason != "policy_not_available" ||
		!strings.Contains(p.Detail, "not served yet: nobody looked") || p.SuggestedAction != actRetryLater || p.RetryAfter < 1 {
		t.Errorf("problem %+v", p)
	}
	if p := r.pay(ask{tool: "nonexistent", id: "k1", body: refundOf("9", "1")}, 404, "").problem(t); p.Reason != "no_such_tool" {
		t.Errorf("problem %+v", p)
	}
	r.people.forbidden["system:serviceaccount:support:mallory"] = true
	a := r.pay(ask{caller: "mallory", tool: "broken", id: "k1", body: "{}"}, 403, "")
	b := r.pay(ask{caller: "mallory", tool: "nonexistent", id: "k1", body: "{}"}, 403, "")
	if strings.ReplaceAll(a.body, "broken", "X") != strings.ReplaceAll(b.body, "nonexistent", "X") {
		t.Errorf("who may not invoke can tell what exists: %s and %s", a.body, b.body)
	}
	r.paid(0, 0)
}

// endless is a body that counts how much of it was taken.
type endless struct {
	left  int64
	taken atomic.Int64
}

func (e *endless) Read(p []byte) (int, error) {
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), e.left))
	for i := range n {
		p[i] = ' '
	}
	e.left -= int64(n)
	e.taken.Add(int64(n))
	return n, nil
}

func TestHundredMegabytes(t *testing.T) {
	const size = 100 << 20
	for _, length := range []int64{size, -1} {
		t.Run(fmt.Sprint("Content-Length ", length), func(t *testing.T) {
			r := setUp(t)
			body := &endless{left: size}
			req, err := http.NewRequestWithContext(t.Context(), "POST", r.url+"/v1/namespaces/support/tools/charge", body)
			if err != nil {
				t.Fatal(err)
			}
			req.ContentLength = length
			req.Header.Set("Authorization", "Bearer agent")
			req.Header.Set("Idempotency-Key", "k1")
			got := send(&http.Client{Transport: &http.Transport{}}, req)
			// The client may see the connection end before it has read the answer.
			if got.err == nil {
				if p := got.problem(t); got.status != 413 || p.Reason != "body_too_large" {
					t.Errorf("problem %+v", p)
				}
			}
			eventually(t, "the call is refused", func() bool { return strings.Contains(r.logged(), `"status"=413`) })
			if taken := body.taken.Load(); taken > 20<<20 {
				t.Errorf("%d bytes were taken from the client", taken)
			}
			r.paid(0, 0)
		})
	}
}

func TestSlowLoris(t *testing.T) {
	const short = 200 * time.Millisecond
	head := "POST /v1/namespaces/support/tools/charge HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent\r\nIdempotency-Key: k1\r\n"
	for name, tc := range map[string]struct {
		send, want string
		bound      setting
	}{
		"in the header": {head, "", func(o *Options) { o.HeaderTimeout = short }},
		"in the body":   {head + "Content-Length: 100\r\n\r\n{\"acc", "HTTP/1.1 408 ", func(o *Options) { o.BodyTimeout = short }},
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t, tc.bound)
			conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if _, err := io.WriteString(conn, tc.send); err != nil {
				t.Fatal(err)
			}
			if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(conn) // until the gateway closes it
			if err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
				t.Fatalf("the connection stays open: %v", err)
			}
			if !strings.HasPrefix(string(got), tc.want) {
				t.Errorf("answer %q", got)
			}
			r.paid(0, 0)
		})
	}
}

func TestUpstreamAddresses(t *testing.T) {
	for _, tc := range []struct{ url, why string }{
		{"http://169.254.169.254/latest", "a metadata service"},
		{"http://[::ffff:169.254.169.254]/latest", "a metadata service"},
		{"http://169.254.7.7/", "a link-local address"},
		{"http://[fe80::1]/", "a link-local address"},
		{"http://127.0.0.1:1/", "a loopback address"},
		{"http://[::1]:1/", "a loopback address"},
		{"http://localhost:1/", "a loopback address"},
		{"http://0.0.0.0:1/", "an unspecified address"},
		{"http://[64:ff9b::7f00:1]:1/", "a loopback address"},
		{"http://10.96.0.1:443/", "the API server or Holdfast itself"},
	} {
		t.Run(tc.url, func(t *testing.T) {
			r := setUp(t, func(o *Options) {
				o.Addresses = Addresses{Reserved: func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443")} }}
			})
			r.upstream = tc.url
			r.tool("charge", "", nil)
			p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 502, guard.Deny).problem(t)
			if !strings.Contains(p.Detail, tc.why) || !strings.Contains(p.Detail, "nothing was sent") {
				t.Errorf("detail %q, want %q", p.Detail, tc.why)
			}
			r.tool("look", "", readOnly(0))
			if p := r.pay(ask{tool: "look", method: "GET"}, 502, guard.Deny).problem(t); !strings.Contains(p.Detail, tc.why) {
				t.Errorf("read-only detail %q, want %q", p.Detail, tc.why)
			}
		})
	}
}

func TestAddressCheck(t *testing.T) {
	a := &Addresses{}
	dev := &Addresses{AllowLoopback: true, listener: func() uint16 { return 8443 }, Reserved: func() []netip.AddrPort {
		return []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:6443"), netip.MustParseAddrPort("10.0.0.7:0")}
	}}
	for _, tc := range []struct {
		addr    string
		in, dev bool // allowed
	}{
		{"93.184.216.34:443", true, true}, {"10.1.2.3:8080", true, true}, {"[2606:4700::1111]:443", true, true},
		{"127.0.0.1:80", false, true}, {"127.9.9.9:80", false, true}, {"[::1]:80", false, true}, {"[::ffff:127.0.0.1]:80", false, true},
		{"127.0.0.1:6443", false, false}, {"[::ffff:127.0.0.1]:6443", false, false}, {"127.0.0.1:8443", false, false}, {"[::1]:8443", false, false},
		{"10.0.0.7:1", true, false},
		{"0.0.0.0:80", false, false}, {"0.1.2.3:80", false, false}, {"[::]:80", false, false}, {"[::ffff:0.0.0.0]:80", false, false},
		{"169.254.169.254:80", false, false}, {"[::ffff:169.254.169.254]:80", false, false}, {"[64:ff9b::a9fe:a9fe]:80", false, false},
		{"[2002:a9fe:a9fe::1]:80", false, false}, {"[::a9fe:a9fe]:80", false, false}, {"[fd00:ec2::254]:80", false, false}, {"100.100.100.200:80", false, false},
		{"169.254.1.1:80", false, false}, {"[fe80::1%lo]:80", false, false}, {"224.0.0.1:80", false, false}, {"[ff02::1]:80", false, false},
		{"255.255.255.255:80", false, false},
	} {
		to := netip.MustParseAddrPort(tc.addr)
		if err := a.check(to); (err == nil) != tc.in {
			t.Errorf("%s: %v, want allowed %t", tc.addr, err, tc.in)
		}
		if err := dev.check(to); (err == nil) != tc.dev {
			t.Errorf("%s in development: %v, want allowed %t", tc.addr, err, tc.dev)
		}
	}
	// One that is new is known as the gateway's own after a while.
	eventually(t, "none of the gateway's own addresses is allowed", func() bool {
		own, err := net.InterfaceAddrs()
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(own, func(n net.Addr) bool {
			ip, ok := netip.AddrFromSlice(n.(*net.IPNet).IP)
			return ok && a.check(netip.AddrPortFrom(ip, 80)) == nil
		})
	})
}

func TestServiceNames(t *testing.T) {
	a := &Addresses{}
	for host, want := range map[string][2]string{
		"crm.support.svc":                    {"crm.support.svc.cluster.local.", "support"},
		"CRM.Support.SVC":                    {"CRM.Support.SVC.cluster.local.", "support"},
		"crm.support.svc.":                   {"crm.support.svc.cluster.local.", "support"},
		"crm.support.svc.cluster.local":      {"crm.support.svc.cluster.local.", "support"},
		"db-0.crm.support.svc.cluster.local": {"db-0.crm.support.svc.cluster.local.", "support"},
		"10-0-0-1.support.pod.cluster.local": {"10-0-0-1.support.pod.cluster.local.", "support"},
		"crm.support":                        {"crm.support.", ""},
		"api.example.com":                    {"api.example.com.", ""},
		"10.0.0.1":                           {"10.0.0.1", ""},
		"::1":                                {"::1", ""},
	} {
		if got := a.absolute(host); got != want[0] {
			t.Errorf("%s is dialled as %s, want %s", host, got, want[0])
		}
		if got := a.serviceNamespace(host); got != want[1] {
			t.Errorf("%s is in namespace %q, want %q", host, got, want[1])
		}
	}
}

type consents map[[2]string]bool

func (c consents) Allows(_ context.Context, service, tool string) (bool, error) {
	return c[[2]string{service, tool}], nil
}

func TestAnotherNamespacesService(t *testing.T) {
	for name, consent := range map[string]Consent{"nobody can be asked": nil, "not given": consents{{"other", "third"}: true}} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t, func(o *Options) { o.Consent = consent })
			r.upstream = "http://crm.other.svc:8080"
			r.tool("charge", "", nil)
			if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 502, guard.Deny).problem(t); p.Reason != "upstream_not_allowed" || !strings.Contains(p.Detail, "namespace other") {
				t.Errorf("problem %+v", p)
			}
			if got, _ := r.poll("charge", "k1", "agent", ""); got.status != 404 {
				t.Errorf("something was reserved: %s", got.body)
			}
		})
	}
	t.Run("given", func(t *testing.T) {
		r := setUp(t, func(o *Options) { o.Consent = consents{{"other", namespace}: true} })
		r.upstream = "http://crm.other.svc:8080"
		r.tool("charge", "", nil)
		// The name does not exist here, so consent shows by what comes next.
		if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 502, guard.Deny).problem(t); p.Reason != "upstream_unreachable" {
			t.Errorf("problem %+v", p)
		}
	})
}

// places says of every address the same.
type places struct {
	reserved   bool
	namespaces []string
	err        error
}

func (p places) Of(context.Context, netip.AddrPort) (bool, []string, error) {
	return p.reserved, p.namespaces, p.err
}

// Another namespace's consent is asked for the address, whatever the URL calls it.
func TestAnotherNamespacesAddress(t *testing.T) {
	for name, tc := range map[string]struct {
		places  places
		consent Consent
		why     string // "": it is called
	}{
		"nobody's":               {},
		"the tool's own":         {places: places{namespaces: []string{namespace}}},
		"consent":                {places{namespaces: []string{"other"}}, consents{{"other", namespace}: true}, ""},
		"no consent":             {places{namespaces: []string{"other"}}, consents{{"other", "third"}: true}, "in the namespace other"},
		"nobody can be asked":    {places{namespaces: []string{"other"}}, nil, "in the namespace other"},
		"also another's":         {places{namespaces: []string{namespace, "other"}}, nil, "in the namespace other"},
		"the API server":         {places{reserved: true}, consents{}, "the API server or Holdfast itself"},
		"it cannot be found out": {places{err: errors.New("no cache")}, consents{}, "not known"},
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t, func(o *Options) { o.Consent, o.Addresses.Places = tc.consent, tc.places })
			r.tool("look", "/charges", readOnly(0))
			if tc.why == "" {
				r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
				r.pay(ask{tool: "look", method: "GET"}, 200, guard.Allow)
				return
			}
			for _, a := range []ask{{id: "k1", body: refundOf("9", "1")}, {tool: "look", method: "GET"}} {
				if p := r.pay(a, 502, guard.Deny).problem(t); !strings.Contains(p.Detail, tc.why) {
					t.Errorf("detail %q, want %q", p.Detail, tc.why)
				}
			}
			r.paid(0, 0)
			if r.g.reader(namespace) == r.g.reader("third") {
				t.Error("the tools of two namespaces share connections")
			}
		})
	}
}

func TestStoreTroubles(t *testing.T) {
	r := setUp(t)
	for _, tc := range []struct {
		err    error
		reason string
	}{
		{store.ErrMemoryLost, "memory_lost"},
		{fmt.Errorf("wrapped: %w", store.ErrUnavailable), "store_unavailable"},
		{fmt.Errorf("wrapped: %w", store.ErrNotDurable), "store_not_durable"},
		{fmt.Errorf("wrapped: %w", guard.ErrClockJumped), "clock_jumped"},
		{guard.ErrInvariant, "store_unavailable"},
	} {
		r.store.mu.Lock()
		r.store.fail = tc.err
		r.store.mu.Unlock()
		got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 503, guard.Deny)
		if p := got.problem(t); p.Reason != tc.reason || !strings.Contains(p.Detail, `"payments"`) || got.header.Get("Retry-After") == "" {
			t.Errorf("%v: problem %+v", tc.err, p)
		}
	}
	r.engines.Fail(namespace, "payments", fmt.Errorf("the file is gone: %w", store.ErrMemoryLost))
	if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 503, guard.Deny).problem(t); p.Reason != "memory_lost" {
		t.Errorf("problem %+v", p)
	}
	r.paid(0, 0)
}

// The clock stands past the deadline right after the Reserve: the ticket buys nothing.
func TestLateAfterTheReserve(t *testing.T) {
	for name, jump := range map[string][2]time.Duration{"boot": {time.Hour, 0}, "wall": {0, time.Hour}} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t)
			r.store.after = func() { r.clock.jump(jump[0], jump[1]) }
			got := r.do(ask{id: "k1", body: refundOf("9", "1")})
			if got.err != nil || got.status < 400 {
				t.Errorf("answer %+v", got)
			}
			r.paid(0, 0)
		})
	}
}

// The clock stands past the deadline when the connection is there: only the look
// before the write stands between the request and the socket.
func TestLateBeforeTheWrite(t *testing.T) {
	r := setUp(t, func(o *Options) { o.Addresses.Reserved = nil })
	r.g.o.Addresses.Reserved = func() []netip.AddrPort {
		r.clock.jump(0, 12*time.Second) // the deadline is over, the lease nearly
		return nil
	}
	got := r.do(ask{id: "k1", body: refundOf("9", "1")})
	if got.err != nil || got.status < 400 {
		t.Errorf("answer %+v", got)
	}
	r.paid(0, 0)
	if log := r.logged(); !strings.Contains(log, errLate.Error()) {
		t.Errorf("the write was not refused for being late: %s", log)
	}
}

// script is a deadline that answers as written, and with its last word from then on.
type script []time.Duration

func (s *script) Left() time.Duration {
	now := (*s)[0]
	if len(*s) > 1 {
		*s = (*s)[1:]
	}
	return now
}

// pair is a TCP connection and its other end.
func pair(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = conn.Close(), other.Close() })
	return conn.(*net.TCPConn), other.(*net.TCPConn)
}

func TestFence(t *testing.T) {
	for _, tc := range []struct {
		name       string
		left       script
		begun      bool
		n          int
		err        error
		sent, late bool
	}{
		{"in time", script{time.Second}, true, 4, nil, true, false},
		{"late before", script{0}, true, 0, errLate, false, false},
		{"late once the kernel was told", script{time.Second, 0}, true, 0, errLate, false, false},
		{"late after", script{time.Second, time.Second, -1}, true, 4, nil, true, true},
		{"a handshake's byte is no request", script{time.Second}, false, 4, nil, false, false},
		{"a handshake's byte is not late for nothing", script{0}, false, 0, errLate, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			near, far := pair(t)
			f, err := newFence(near, &tc.left)
			if err != nil {
				t.Fatal(err)
			}
			if tc.begun {
				f.begin()
			}
			n, err := f.Write([]byte("body"))
			if n != tc.n || !errors.Is(err, tc.err) || f.sent.Load() != tc.sent || f.late.Load() != tc.late {
				t.Errorf("wrote %d, %v, sent %t, late %t", n, err, f.sent.Load(), f.late.Load())
			}
			if err := f.finish(); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
			got, err := io.ReadAll(far)
			if err != nil || len(got) != tc.n {
				t.Errorf("the other end got %q, %v", got, err)
			}
		})
	}
}

// What waits in the kernel when the deadline comes is never delivered (R29).
func TestNothingIsDeliveredAfterTheDeadline(t *testing.T) {
	near, far := pair(t)
	f, err := newFence(near, &script{time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	f.begin()
	var written int
	done := make(chan error, 1)
	go func() {
		n, err := f.Write(make([]byte, 64<<20)) // more than any buffer holds; nobody reads
		written = n
		done <- err
	}()
	eventually(t, "a part was sent", func() bool { return f.sent.Load() })
	// The deadline: the connection is closed under the writer.
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("the write went on")
	}
	n, err := io.Copy(io.Discard, far)
	if err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the other end read %d bytes and then %v, want a reset", n, err)
	}
	if int(n) >= written {
		t.Errorf("all %d bytes that the kernel had taken were delivered", written)
	}
}

func TestPanicIsUnknownAndSettled(t *testing.T) {
	r := setUp(t)
	r.g.o.Addresses.Reserved = func() []netip.AddrPort { panic("a mistake") }
	p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.UnknownHold).problem(t)
	if p.Reason != string(guard.OutcomeUnknown) || p.Hold == "" {
		t.Errorf("problem %+v", p)
	}
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Held || len(doc.Attempts) != 1 || doc.Attempts[0].Outcome != guard.AttemptUnknown {
		t.Errorf("the attempt is not settled: %+v", doc)
	}
}

func TestOverTLS(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, roots := certificate(t, dir)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	upstream := httptest.NewUnstartedServer(nil)
	upstream.EnableHTTP2 = true
	pairOf, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	upstream.TLS = &tls.Config{Certificates: []tls.Certificate{pairOf}}
	var protocol atomic.Value
	var asked atomic.Int64

	r := setUp(t, func(o *Options) {
		o.InsecureHTTP, o.CertFile, o.KeyFile, o.Listener, o.RootCAs = false, certFile, keyFile, listener, roots
	})
	upstream.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		asked.Add(1)
		protocol.Store(req.Proto)
		r.p.ServeHTTP(w, req)
	})
	upstream.StartTLS()
	t.Cleanup(upstream.Close)
	r.url = "https://" + listener.Addr().String()
	r.upstream = upstream.URL
	r.tool("charge", "/charges", nil)

	h2 := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}}
	// K02: HTTP/2 writes header names in lower case.
	r.pay(ask{client: h2, id: "abc", body: refundOf("9", "1")}, 201, guard.Allow)
	r.pay(ask{client: h2, id: `"abc"`, body: refundOf("9", "1")}, 201, guard.Replay)
	h1 := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	r.pay(ask{client: h1, id: "abc", body: refundOf("9", "1")}, 201, guard.Replay)
	if protocol.Load() != "HTTP/1.1" {
		t.Errorf("the upstream was called over %v", protocol.Load())
	}
	r.paid(1, 1)

	// An upstream whose certificate is not trusted receives nothing: a handshake is no payment.
	r.g.sender.tls.RootCAs = x509.NewCertPool()
	p := r.pay(ask{client: h1, id: "k2", body: refundOf("10", "1")}, 502, guard.Deny).problem(t)
	if !strings.Contains(p.Detail, "certificate is not trusted; nothing was sent") {
		t.Errorf("detail %q", p.Detail)
	}
	if asked.Load() != 1 {
		t.Errorf("the upstream was asked %d times", asked.Load())
	}
	r.paid(1, 1)
}

var certificates atomic.Int64

func certificate(t *testing.T, dir string) (certFile, keyFile string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	// No two end at the same time.
	n := certificates.Add(1)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(n), Subject: pkix.Name{CommonName: "gateway"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour + time.Duration(n)*time.Minute),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for file, content := range map[string][]byte{certFile: certPEM, keyFile: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	roots = x509.NewCertPool()
	roots.AppendCertsFromPEM(certPEM)
	return certFile, keyFile, roots
}

func TestTooManyCallsAtOnce(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 1 })
	first := make(chan reply, 1)
	go func() { first <- r.do(ask{id: "k1", body: refundOf("9", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	if p := r.pay(ask{id: "k2", body: refundOf("10", "1")}, 503, guard.Deny).problem(t); p.Reason != "busy" || p.RetryAfter != 1 {
		t.Errorf("problem %+v", p)
	}
	r.p.Release(nil)
	if got := <-first; got.status != 201 {
		t.Errorf("the first got %+v", got)
	}
	r.paid(1, 1)
}

// Those who may call nothing keep no connection, and nobody keeps one for nothing.
func TestConnectionsAreNotKept(t *testing.T) {
	r := setUp(t, func(o *Options) { o.IdleTimeout = time.Hour })
	r.people.forbidden["system:serviceaccount:support:mallory"] = true
	over := func(path, token string) *http.Response {
		t.Helper()
		c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		auth := ""
		if token != "" {
			auth = "Authorization: Bearer " + token + "\r\n"
		}
		// The body that is announced never comes.
		if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: gateway\r\n%sContent-Length: 2\r\n\r\n", path, auth); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(c)
		answer, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			t.Fatal(err)
		}
		if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
			t.Errorf("%s as %q: after the answer %d the connection should end, got %v", path, token, answer.StatusCode, err)
		}
		return answer
	}
	tools := "/v1/namespaces/" + namespace + "/tools/"
	for _, tc := range []struct {
		path, token string
		status      int
	}{
		{"/", "", 404},
		{tools + "charge", "", 401},
		{tools + "charge", "mallory", 403},
		{tools + "nonexistent", "agent", 404},
	} {
		got := over(tc.path, tc.token)
		_ = got.Body.Close()
		if got.StatusCode != tc.status || !got.Close {
			t.Errorf("%s as %q: status %d, Connection: close is %t; want %d and true", tc.path, tc.token, got.StatusCode, got.Close, tc.status)
		}
	}
	r.paid(0, 0)
}

func TestIdleConnectionsEnd(t *testing.T) {
	r := setUp(t, func(o *Options) { o.IdleTimeout = 100 * time.Millisecond })
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	body := refundOf("1", "1")
	if _, err := fmt.Fprintf(c, "POST /v1/namespaces/%s/tools/charge HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer agent\r\nIdempotency-Key: k1\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", namespace, len(body), body); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	answer, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != 201 || answer.Close {
		t.Errorf("status %d, Connection: close is %t; want 201 and false", answer.StatusCode, answer.Close)
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("an idle connection should end, got %v", err)
	}
	if g, err := New(Options{Access: r.people, Policies: func() Policies { return nil }, Engines: r.engines, InsecureHTTP: true}); err != nil || g.o.IdleTimeout > 30*time.Second {
		t.Errorf("idle connections may stay for %s (%v)", g.o.IdleTimeout, err)
	}
}

// One caller can take its share of the gateway, and no more.
func TestACallersShare(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 8 })
	answers := make(chan reply)
	send := func(a ask) { go func() { answers <- r.do(a) }() }
	send(ask{id: "k1", body: refundOf("1", "1"), fault: "hold"})
	send(ask{id: "k2", body: refundOf("2", "1"), fault: "hold"})
	eventually(t, "two payments are under way", func() bool { return len(r.p.Held()) == 2 })
	p := r.pay(ask{id: "k3", body: refundOf("3", "1")}, 503, guard.Deny).problem(t)
	if p.Reason != "busy" || p.RetryAfter != 1 || !strings.Contains(p.Detail, "2 calls in progress, which is its share") {
		t.Errorf("problem %+v", p)
	}
	r.pay(ask{caller: "other", id: "k1", body: refundOf("4", "1")}, 201, guard.Allow)
	r.p.Release(nil)
	for range 2 {
		if got := <-answers; got.status != 201 {
			t.Errorf("got %+v", got)
		}
	}
	eventually(t, "no place is taken", func() bool { return r.g.working.count()+r.g.reading.count()+r.g.waiting.count() == 0 })
	r.paid(3, 3)
}

// Those who wait for another call of their intent take no place from calls that work.
func TestWaitingTakesNoPlace(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 8 })
	answers := make(chan reply)
	same := ask{id: "k1", body: refundOf("1", "1")}
	go func() { answers <- r.do(ask{id: "k1", body: refundOf("1", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	for n := range 2 {
		go func() { answers <- r.do(same) }()
		eventually(t, "the same call waits", func() bool { return r.g.waiting.count() == n+1 && r.g.working.count() == 1 })
	}
	// One more than its share is not refused: it is told what there is to tell.
	r.pay(same, 409, guard.InFlightNow)
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 201, guard.Allow)
	r.p.Release(nil)
	for range 3 {
		if got := <-answers; got.status != 201 {
			t.Errorf("got %+v", got)
		}
	}
	eventually(t, "no place is taken", func() bool { return r.g.working.count()+r.g.reading.count()+r.g.waiting.count() == 0 })
	r.paid(2, 2)
}

// Who sends its body slowly takes no place from calls that work, and few from those that send.
func TestASlowBodyTakesNoPlace(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 4 })
	body, more := io.Pipe()
	req, err := http.NewRequest(http.MethodPost, r.url+"/v1/namespaces/"+namespace+"/tools/charge", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer agent")
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", "k1")
	slow := make(chan reply, 1)
	go func() { slow <- send(http.DefaultClient, req) }()
	eventually(t, "the body is awaited", func() bool { return r.g.reading.count() == 1 })
	if n := r.g.working.count(); n != 0 {
		t.Errorf("%d calls work, want none", n)
	}
	if p := r.pay(ask{id: "k2", body: refundOf("2", "1")}, 503, guard.Deny).problem(t); p.Reason != "busy" {
		t.Errorf("problem %+v", p)
	}
	r.pay(ask{caller: "other", id: "k3", body: refundOf("3", "1")}, 201, guard.Allow)
	if _, err := more.Write([]byte(refundOf("1", "1"))); err != nil {
		t.Fatal(err)
	}
	if err := more.Close(); err != nil {
		t.Fatal(err)
	}
	if got := <-slow; got.status != 201 {
		t.Errorf("got %+v", got)
	}
	r.paid(2, 2)
}

func TestNewRefusesHalfASetting(t *testing.T) {
	good := Options{Access: &people{}, Policies: func() Policies { return nil }, Engines: guard.NewEngines(), InsecureHTTP: true}
	if _, err := New(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Options){
		"no access":                func(o *Options) { o.Access = nil },
		"no TLS and not asked for": func(o *Options) { o.InsecureHTTP = false },
		"a certificate alone":      func(o *Options) { o.CertFile = "x" },
		"both":                     func(o *Options) { o.CertFile, o.KeyFile = "x", "y" },
	} {
		bad := good
		change(&bad)
		if _, err := New(bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestAnswersThatAreNoHTTP(t *testing.T) {
	for name, bytes := range map[string]string{
		"nonsense":           "hello\r\n\r\n",
		"only informational": strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 9),
		"switching":          "HTTP/1.1 101 Switching Protocols\r\n\r\n",
		"endless headers":    "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-Pad: "+strings.Repeat("x", 1000)+"\r\n", 200) + "\r\n",
		"aborted chunks":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
		"nothing":            "",
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t)
			var accepted *atomic.Int64
			r.upstream, accepted = raw(t, bytes)
			r.tool("charge", "/", nil)
			r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.UnknownHold)
			if accepted.Load() != 1 {
				t.Errorf("%d connections, want 1", accepted.Load())
			}
		})
	}
}
