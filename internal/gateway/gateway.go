// Package gateway is how a call gets in and out: it knows HTTP toward the agent and
// toward the upstream, and asks access who calls, policy what the call is, and the
// guard what may happen to it. It decides nothing about payments itself.
//
// What must hold here: nothing is sent without a ticket of the guard, once for each
// ticket and only in its time; every ticket is settled, whatever happens in between;
// and no success is answered before its settlement is durable.
package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/net/netutil"
	"k8s.io/apimachinery/pkg/util/cache"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/tracing"
)

// Access says who calls, and whether they may. access.Reviewer is one.
type Access interface {
	Authenticate(ctx context.Context, header http.Header) (access.Caller, error)
	Authorize(ctx context.Context, caller access.Caller, namespace, tool string) error
}

// Policies gives a compiled tool: policy.ErrNoTool, or a *policy.NotServedError.
type Policies interface {
	Tool(namespace, name string) (*policy.Tool, error)
}

// PolicySource gives the snapshot of policies that a whole call is judged by.
type PolicySource func() Policies

// Engines gives the guard of an IdempotencyStore. *guard.Engines is one.
type Engines interface {
	Get(namespace, store string) (*guard.Engine, error)
}

// Credentials gives the value of one key of a Secret. An error is logged, and is not shown to callers.
type Credentials interface {
	Get(ctx context.Context, namespace, secret, key string) (string, error)
}

// Consent says whether a namespace lets its Services be upstreams of another namespace's tools.
type Consent interface {
	Allows(ctx context.Context, serviceNamespace, toolNamespace string) (bool, error)
}

// Options of a gateway. Access, Policies and Engines are needed; zero values of the
// others are replaced by the defaults named.
type Options struct {
	Access   Access
	Policies PolicySource
	Engines  Engines
	// Credentials; nil: a tool that needs some is refused.
	Credentials Credentials
	// RequestKeys; nil: a tool with unknownOutcome Resume is refused.
	RequestKeys RequestKeys
	// Consent; nil: no namespace consents.
	Consent   Consent
	Addresses Addresses
	// RootCAs are whom upstreams' certificates are trusted by; nil: the system's.
	RootCAs *x509.CertPool
	Log     logr.Logger
	// Evidence takes the lines of calls that somebody may have to look into: held,
	// contradicted, or sent without a success. It must leave none out; nil: Log does.
	Evidence logr.Logger
	// Metrics count the calls; nil: nobody asks for them.
	Metrics *metrics.Metrics
	// Traces takes the traces of calls; nil: there are none.
	Traces *tracing.Provider

	// Address to listen on, host:port; Listener is used instead, if there is one.
	Address  string
	Listener net.Listener
	// CertFile and KeyFile are read again when they change. Without them InsecureHTTP
	// must say that plain HTTP is meant: it is for development.
	CertFile, KeyFile string
	InsecureHTTP      bool

	// MaxRequestBytes is the longest body of a call; 1 MiB.
	MaxRequestBytes int64
	// MaxAnswerBytes is the longest body of an upstream's answer that is passed on
	// whole, and MaxAnswerMemory what all such bodies may take together beyond what
	// the records keep; 32 MiB and 256 MiB. Of a longer one the caller gets the start.
	MaxAnswerBytes, MaxAnswerMemory int64
	// MaxCalls is how many calls may be in progress; 256. As many again may be sending
	// their bodies, and waiting for another call of their intent. One caller may have a
	// quarter of each. MaxConnections: 4096.
	MaxCalls, MaxConnections int
	// HeaderTimeout and BodyTimeout are for a caller to send, AnswerTimeout to take its
	// answer; 10 s, 30 s and 60 s.
	HeaderTimeout, BodyTimeout, AnswerTimeout time.Duration
	// IdleTimeout is how long a connection stays open between two calls; 30 s.
	IdleTimeout time.Duration
	// Drain is how long calls in progress may take to end at shutdown; 60 s. An attempt
	// that takes longer is held as unknown.
	Drain time.Duration
}

// Gateway serves the agents. It is an http.Handler, and a Runnable of controller-runtime's manager.
type Gateway struct {
	o      Options
	sender *sender
	// readOnly are the connections to upstreams of ReadOnly tools, by the tools' namespace:
	// where one may connect to, another may not.
	readOnly sync.Map // string: *http.Transport
	cached   *cache.LRUExpireCache
	// The places for calls that send their bodies, are worked on, and wait.
	reading, working, waiting *slots
	// admitting bounds what is asked of the guard.
	admitting bounds
	ratios    *ratios
	queues    queues
	// background are the calls that go on without their callers, running how many.
	background sync.WaitGroup
	running    atomic.Int64

	// leaving: callers are to go elsewhere, and those that come are still served. draining:
	// nobody comes any more.
	leaving  atomic.Bool
	draining chan struct{}
	drain    sync.Once
	port     atomic.Uint32
}

const (
	// maxHeader bounds a caller's request line and headers.
	maxHeader = 64 << 10
	// The cache of read-only answers: at most 1,024 of 64 KiB each.
	maxCached     = 1024
	maxCachedBody = 64 << 10
)

// New makes a gateway.
func New(o Options) (*Gateway, error) {
	switch {
	case o.Access == nil, o.Policies == nil, o.Engines == nil:
		return nil, errors.New("a gateway needs Access, Policies and Engines")
	case (o.CertFile == "") != (o.KeyFile == ""):
		return nil, errors.New("a certificate and its key come together: give both files")
	case o.CertFile == "" && !o.InsecureHTTP:
		return nil, errors.New("no certificate: give a certificate and key file, or ask for plain HTTP, which is for development only")
	case o.CertFile != "" && o.InsecureHTTP:
		return nil, errors.New("both a certificate and plain HTTP are asked for: leave one out")
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.HeaderTimeout, 10*time.Second)
	def(&o.BodyTimeout, 30*time.Second)
	def(&o.AnswerTimeout, 60*time.Second)
	def(&o.IdleTimeout, 30*time.Second)
	def(&o.Drain, 60*time.Second)
	size := func(n *int64, v int64) {
		if *n == 0 {
			*n = v
		}
	}
	size(&o.MaxRequestBytes, 1<<20)
	size(&o.MaxAnswerBytes, 32<<20)
	size(&o.MaxAnswerMemory, 256<<20)
	if o.MaxCalls == 0 {
		o.MaxCalls = 256
	}
	if o.MaxConnections == 0 {
		o.MaxConnections = 4096
	}
	if o.Log.GetSink() == nil {
		o.Log = logr.Discard()
	}
	if o.Evidence.GetSink() == nil {
		o.Evidence = o.Log
	}
	if o.Metrics == nil {
		o.Metrics = metrics.New(metrics.Options{})
	}
	g := &Gateway{
		o:         o,
		cached:    cache.NewLRUExpireCache(maxCached),
		reading:   newSlots(o.MaxCalls),
		working:   newSlots(o.MaxCalls),
		waiting:   newSlots(o.MaxCalls),
		admitting: bounds{timeout: admitTimeout, spread: admitSpread},
		ratios:    newRatios(),
		draining:  make(chan struct{}),
	}
	g.o.Addresses.consent = o.Consent
	g.o.Addresses.listener = func() uint16 { return uint16(g.port.Load()) }
	config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: o.RootCAs}
	g.sender = &sender{addresses: &g.o.Addresses, tls: config, memory: &memory{}, kept: newKeeper(), maxAnswer: o.MaxAnswerBytes}
	g.sender.memory.give(o.MaxAnswerMemory)
	g.o.Metrics.Gateway(g.places)
	return g, nil
}

// Ready says whether agents reach this gateway: it listens, and is not about to end.
func (g *Gateway) Ready(*http.Request) error {
	select {
	case <-g.draining:
		return errors.New("the gateway is draining")
	default:
	}
	if g.leaving.Load() {
		return errors.New("the gateway is about to drain")
	}
	if g.port.Load() == 0 {
		return errors.New("the gateway does not listen yet")
	}
	return nil
}

// Leave has callers go elsewhere: the gateway is not ready any more, and each connection ends
// with the answer that it is waiting for. Who comes all the same is served as ever, since it
// takes a while until nobody is sent here. It comes before Start's context ends.
func (g *Gateway) Leave() { g.leaving.Store(true) }

// NeedLeaderElection is false: every replica serves.
func (g *Gateway) NeedLeaderElection() bool { return false }

// Start serves until ctx ends, then lets the calls in progress end and settle.
func (g *Gateway) Start(ctx context.Context) error {
	collectGarbage(ctx)
	listener := g.o.Listener
	if listener == nil {
		var err error
		if listener, err = net.Listen("tcp", g.o.Address); err != nil {
			return fmt.Errorf("listen for agents on %q: %w", g.o.Address, err)
		}
	}
	if addr, ok := listener.Addr().(*net.TCPAddr); ok {
		g.port.Store(uint32(addr.Port))
	}
	listener = netutil.LimitListener(listener, g.o.MaxConnections)
	server := &http.Server{
		Handler:           g,
		ReadHeaderTimeout: g.o.HeaderTimeout,
		IdleTimeout:       g.o.IdleTimeout,
		MaxHeaderBytes:    maxHeader,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 100},
		ErrorLog:          slog.NewLogLogger(logr.ToSlogHandler(g.o.Log.V(1)), slog.LevelInfo),
	}
	serve := func() error { return server.Serve(listener) }
	if g.o.CertFile != "" {
		watcher, err := certwatcher.New(g.o.CertFile, g.o.KeyFile)
		if err != nil {
			return errors.Join(fmt.Errorf("read the gateway's certificate: %w", err), listener.Close())
		}
		server.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: watcher.GetCertificate}
		g.o.Metrics.Certificate(func() time.Time { return endOf(watcher) })
		watching, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		go func() {
			if err := watcher.Start(watching); err != nil {
				g.o.Log.Error(err, "the gateway's certificate is no longer watched")
			}
		}()
		serve = func() error { return server.ServeTLS(listener, "", "") }
	}
	g.o.Log.Info("serving agents", "address", listener.Addr().String(), "tls", g.o.CertFile != "")
	failed := make(chan error, 1)
	go func() { failed <- serve() }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve agents: %w", err)
	case <-ctx.Done():
	}
	g.drain.Do(func() { close(g.draining) })
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.o.Drain)
	defer cancel()
	defer g.sender.kept.end()
	if err := server.Shutdown(end); err != nil {
		return errors.Join(fmt.Errorf("calls were still in progress after %s; their intents will be held: %w", g.o.Drain, err), server.Close())
	}
	if err := g.drained(end); err != nil {
		return fmt.Errorf("calls without their callers were still in progress after %s; their intents will be held: %w", g.o.Drain, err)
	}
	g.readOnly.Range(func(_, t any) bool {
		t.(*http.Transport).CloseIdleConnections()
		return true
	})
	return nil
}

// endOf gives when the certificate ends that is shown.
func endOf(watcher *certwatcher.CertWatcher) time.Time {
	shown, err := watcher.GetCertificate(nil)
	if err != nil || shown == nil || shown.Leaf == nil {
		return time.Time{}
	}
	return shown.Leaf.NotAfter
}

// reader gives the connections of a namespace's ReadOnly tools.
func (g *Gateway) reader(namespace string) *http.Transport {
	if t, ok := g.readOnly.Load(namespace); ok {
		return t.(*http.Transport)
	}
	t, _ := g.readOnly.LoadOrStore(namespace, &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			return g.o.Addresses.dial(dialledFor(ctx, namespace), addr)
		},
		TLSClientConfig:        g.sender.tls.Clone(),
		TLSHandshakeTimeout:    10 * time.Second,
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
		DisableCompression:     true,
		MaxIdleConnsPerHost:    16,
		MaxIdleConns:           256,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: maxAnswerHeader,
	})
	return t.(*http.Transport)
}
