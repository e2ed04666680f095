package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/test/provider"
)

const namespace = "support"

// clock is the machine's, and can be put forward; so can the store's.
type clock struct {
	mu    sync.Mutex
	boot  time.Duration
	wall  time.Duration
	store time.Duration
}

// pass lets time go by for all.
func (c *clock) pass(d time.Duration) {
	c.jump(d, d)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.store += d
}

func (c *clock) storeTime() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.store)
}

func (c *clock) Now() guard.Reading {
	r := guard.SystemClock{}.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	return guard.Reading{Boot: r.Boot + c.boot, Wall: r.Wall.Add(c.wall)}
}

func (c *clock) jump(boot, wall time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.boot += boot
	c.wall += wall
}

// people takes the caller's name for its token.
type people struct {
	mu        sync.Mutex
	forbidden map[string]bool
	silent    bool            // they cannot be asked what a caller may
	uid       string          // instead of the name's own
	last      context.Context // of the last call
}

func (p *people) Authenticate(ctx context.Context, h http.Header) (access.Caller, error) {
	name, ok := strings.CutPrefix(h.Get("Authorization"), "Bearer ")
	if !ok {
		return access.Caller{}, fmt.Errorf("%w: no token", access.ErrUnauthenticated)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = ctx
	uid := p.uid
	if uid == "" {
		uid = name + "-uid"
	}
	return access.Caller{Username: "system:serviceaccount:" + namespace + ":" + name, UID: uid}, nil
}

// away has nobody say what a caller may.
func (p *people) away(silent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = silent
}

// gone says that the gateway knows that the last caller has left.
func (p *people) gone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last.Err() != nil
}

func (p *people) Authorize(_ context.Context, c access.Caller, namespace, tool string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent {
		return fmt.Errorf("%w: nobody answers", access.ErrUnavailable)
	}
	if p.forbidden[c.Username] {
		return fmt.Errorf("%w: %s may not invoke %s/%s", access.ErrForbidden, c.Username, namespace, tool)
	}
	return nil
}

// slip is a store whose replies can be made to fail, or be followed by something.
type slip struct {
	store.Store
	mu    sync.Mutex
	fail  error
	after func()
	asked int
}

// reserves is how many Reserves there were.
func (s *slip) reserves() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *slip) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	s.mu.Lock()
	fail, after := s.fail, s.after
	s.asked++
	s.mu.Unlock()
	if fail != nil {
		return store.Result{}, fail
	}
	res, err := s.Store.Reserve(ctx, r)
	if after != nil {
		after()
	}
	return res, err
}

// secrets are by "namespace/name/key".
type secrets map[string]string

func (s secrets) Get(_ context.Context, namespace, name, key string) (string, error) {
	v, ok := s[namespace+"/"+name+"/"+key]
	if !ok {
		return "", errors.New("secrets \"" + name + "\" is forbidden: internal detail")
	}
	return v, nil
}

// rig is a gateway over TCP, with a real store, engine and provider.
type rig struct {
	t        *testing.T
	p        *provider.Provider
	upstream string
	url      string
	tools    policy.Current
	engines  *guard.Engines
	engine   *guard.Engine
	store    *slip
	clock    *clock
	people   *people
	secrets  secrets
	g        *Gateway
	stop     func() error

	mu  sync.Mutex
	log []string
}

type setting func(*Options)

func setUp(t *testing.T, settings ...setting) *rig {
	t.Helper()
	r := &rig{t: t, clock: &clock{}, people: &people{forbidden: map[string]bool{}}, secrets: secrets{}, engines: guard.NewEngines()}
	r.p = provider.New(provider.Options{})
	var err error
	if r.upstream, err = r.p.Start(""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.p.Close() })
	st, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true, Clock: r.clock.storeTime})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	id, err := st.Initialise(t.Context(), store.Identity{Epoch: "e1", KeyDomain: "d1"})
	if err != nil {
		t.Fatal(err)
	}
	r.store = &slip{Store: st}
	r.engine = guard.New(r.store, id, guard.Options{Clock: r.clock})
	r.engines.Put(namespace, "payments", r.engine)
	r.tool("charge", "/charges", nil)
	r.tool("refund", "/refunds", nil)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{
		Access: r.people, Policies: func() Policies { return r.tools.Load() }, Engines: r.engines, Credentials: r.secrets,
		Addresses: Addresses{AllowLoopback: true}, InsecureHTTP: true, Listener: listener,
		Log: funcr.New(func(prefix, args string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.log = append(r.log, prefix+" "+args)
		}, funcr.Options{}),
	}
	for _, set := range settings {
		set(&o)
	}
	if r.g, err = New(o); err != nil {
		t.Fatal(err)
	}
	r.keeps(time.Hour, time.Hour)
	r.url = "http://" + listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.g.Start(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("the gateway did not stop well: %v", err)
		}
	})
	return r
}

// tool serves a Mutating tool of the provider, changed by change.
func (r *rig) tool(name, path string, change func(*v1alpha1.AgentTool)) {
	r.t.Helper()
	tool := &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Generation: 1},
		Spec: v1alpha1.AgentToolSpec{
			Effect: v1alpha1.EffectMutating, IntentBudgetRef: &v1alpha1.BudgetReference{Name: "payments"},
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL: r.upstream + path, Methods: []v1alpha1.HTTPMethod{"POST"},
				Timeout: &metav1.Duration{Duration: 10 * time.Second}, SettleAfter: &metav1.Duration{Duration: 100 * time.Millisecond},
				RequestHeaders: []v1alpha1.RequestHeader{"accept", "content-type", "provider-fault"},
			}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID: []v1alpha1.Expression{`call.header["idempotency-key"]`, `path(call.session, call.index)`},
				Scope:    []v1alpha1.Expression{`path("account", call.body.accountId, "order", call.body.orderId)`},
				Lineage:  `path(call.session, call.index)`,
				Amount:   &v1alpha1.AmountExpressions{Value: "call.body.amount", Currency: `"USD"`, Unit: v1alpha1.UnitMajor},
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"}},
		},
	}
	if change != nil {
		change(tool)
	}
	budget := &v1alpha1.IntentBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "payments"},
		Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: "payments"}},
	}
	if tool.Spec.Effect == v1alpha1.EffectReadOnly {
		budget = nil
	}
	compiled, err := policy.Compile(tool, budget)
	if err != nil {
		r.t.Fatal(err)
	}
	r.tools.Set(compiled)
}

// soon is the timeout of attempts that end by it: a machine that is busy sends the request, and brings it to the
// provider, in less.
const soon = 2 * time.Second

func timeout(d time.Duration) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) { t.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: d} }
}

func readOnly(ttl time.Duration) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.Effect, t.Spec.IntentBudgetRef, t.Spec.Identity, t.Spec.Idempotency = v1alpha1.EffectReadOnly, nil, nil, nil
		t.Spec.Upstream.HTTP.SettleAfter = nil
		t.Spec.Upstream.HTTP.Methods = []v1alpha1.HTTPMethod{"GET"}
		if ttl > 0 {
			t.Spec.Cache = &v1alpha1.ResponseCache{TTL: metav1.Duration{Duration: ttl}}
		}
	}
}

// reply is what a caller got.
type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

func (a reply) verdict() string { return a.header.Get(headerVerdict) }

func (a reply) problem(t *testing.T) problem {
	t.Helper()
	if got := a.header.Get("Content-Type"); got != "application/problem+json" {
		t.Fatalf("status %d, content type %q, want a problem document; body %q", a.status, got, a.body)
	}
	var p problem
	if err := json.Unmarshal([]byte(a.body), &p); err != nil {
		t.Fatal(err)
	}
	if p.Status != a.status || p.Type == "" || p.Title == "" || p.Detail == "" || p.SuggestedAction == "" {
		t.Fatalf("an incomplete problem with status %d: %s", a.status, a.body)
	}
	if string(p.Verdict) != a.verdict() {
		t.Errorf("verdict %q in the body and %q in the header", p.Verdict, a.verdict())
	}
	return p
}

// ask is a call in the making.
type ask struct {
	tool, method, suffix, caller, id, fault, body string
	header                                        map[string]string
	ctx                                           context.Context
	client                                        *http.Client
}

func refundOf(order, amount string) string {
	return fmt.Sprintf(`{"accountId":"a1","orderId":%q,"amount":%s}`, order, amount)
}

func (r *rig) do(a ask) reply {
	if a.tool == "" {
		a.tool = "charge"
	}
	if a.method == "" {
		a.method = "POST"
	}
	if a.caller == "" {
		a.caller = "agent"
	}
	if a.ctx == nil {
		a.ctx = context.Background()
	}
	if a.client == nil {
		a.client = http.DefaultClient
	}
	req, err := http.NewRequestWithContext(a.ctx, a.method, r.url+"/v1/namespaces/"+namespace+"/tools/"+a.tool+a.suffix, strings.NewReader(a.body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Authorization", "Bearer "+a.caller)
	if a.method == "POST" {
		req.Header.Set("Content-Type", "application/json")
	}
	if a.id != "" {
		req.Header.Set("Idempotency-Key", a.id)
	}
	if a.fault != "" {
		req.Header.Set(provider.HeaderFault, a.fault)
	}
	for k, v := range a.header {
		req.Header.Set(k, v)
	}
	return send(a.client, req)
}

func send(client *http.Client, req *http.Request) reply {
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	var body bytes.Buffer
	if _, err := io.Copy(&body, resp.Body); err != nil {
		return reply{err: err}
	}
	return reply{status: resp.StatusCode, header: resp.Header, body: body.String()}
}

// pay sends a charge and wants this status and verdict.
func (r *rig) pay(a ask, status int, verdict guard.Verdict) reply {
	r.t.Helper()
	got := r.do(a)
	if got.err != nil {
		r.t.Fatal(got.err)
	}
	if got.status != status || got.verdict() != string(verdict) {
		r.t.Fatalf("status %d, verdict %q, want %d, %q; body %.600s", got.status, got.verdict(), status, verdict, got.body)
	}
	return got
}

// paid asks the provider's ledger, and how many payment requests arrived.
func (r *rig) paid(entries, requests int) {
	r.t.Helper()
	l, err := r.p.Ledger()
	if err != nil {
		r.t.Fatal(err)
	}
	if l.Count != entries {
		r.t.Errorf("the ledger has %d entries, want %d: %+v", l.Count, entries, l.Entries)
	}
	if got := l.Requests["POST /charges"] + l.Requests["POST /refunds"]; got != requests {
		r.t.Errorf("the provider saw %d requests, want %d: %v", got, requests, l.Requests)
	}
}

// poll asks for an intent.
func (r *rig) poll(tool, id, caller, query string) (reply, intentDocument) {
	r.t.Helper()
	got := r.do(ask{tool: tool, method: "GET", suffix: "/intents/" + id + query, caller: caller})
	if got.err != nil {
		r.t.Fatal(got.err)
	}
	var doc intentDocument
	if got.status == http.StatusOK {
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
			r.t.Fatal(err)
		}
	}
	return got, doc
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not in time: %s", what)
		}
	}
}

func (r *rig) logged() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.log, "\n")
}
