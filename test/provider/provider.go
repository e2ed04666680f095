// Package provider is a payment provider to judge by: a small payment service
// with a ledger of its own. It commits charges and refunds, and can be told to
// fail in the ways in which payment services fail. What the money did is asked
// of its ledger, never of the answers that it gave.
//
// This file holds the provider's settings, its routes and its life.
package provider

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	pathCharges       = "/charges"
	pathRefunds       = "/refunds"
	pathLedger        = "/ledger"
	pathFaults        = "/faults"
	pathRelease       = "/faults/release"
	pathDeduplication = "/deduplication"
	pathVisibility    = "/visibility"

	// Paths beyond these many are counted together, so that a scanner cannot
	// grow the counters without end.
	maxCounted  = 1_000
	pathsBeyond = "other"

	maxReceived     = 1_000
	maxReceivedBody = 4 << 10
)

// Options set a provider up. The zero value is a provider without
// deduplication that shows entries at once.
type Options struct {
	// Window is how long a key deduplicates, from its commit. 0: never.
	Window time.Duration
	// Visibility is how long after its commit an entry appears in
	// GET /charges and GET /refunds. The ledger shows it at once.
	Visibility time.Duration
	// AcceptedDelay is when accepted-202 commits if it names no duration.
	// 0 means 1 s.
	AcceptedDelay time.Duration
	// MaxHang bounds lost-answer, hold and hold-after-commit. 0 means 10 min.
	MaxHang time.Duration
	// MaxBodyBytes bounds a request's body. 0 means 1 MiB.
	MaxBodyBytes int64
	// ReadTimeout bounds the reading of a request, its body included, under
	// Start. 0 means 30 s.
	ReadTimeout time.Duration
	// Now is the clock of commits, windows and visibility. Nil means
	// time.Now. Delays run on real time.
	Now func() time.Time
	// Log takes what no client can be told. Nil discards it.
	Log *slog.Logger
}

// Provider is an http.Handler with a ledger. All its methods may be called
// from several goroutines.
type Provider struct {
	options Options
	ledger  *ledger
	routes  *http.ServeMux

	// ending closes when the provider begins to stop: whoever hangs lets go.
	// stopped closes when it must stop at once: whoever delays lets go, too.
	ending, stopped         chan struct{}
	endingOnce, stoppedOnce sync.Once

	// mu guards all below. It may be held while the ledger's lock is taken,
	// never the other way round.
	mu         sync.Mutex
	window     time.Duration
	visibility time.Duration
	claims     map[string]*claim
	// accepted are payments that were answered with a 202, by key and by id.
	accepted map[string]Entry
	plan     []Fault
	held     []*waiting
	requests map[string]int
	inFlight InFlight
	received []*Received
	server   *http.Server
}

// New makes a provider whose ledger lives in memory.
func New(o Options) *Provider { return build(o, newLedger()) }

// Open makes a provider whose ledger is the file at path: JSON lines, each
// synced before its payment is answered, read again by the next Open. Only one
// provider at a time can have a file open.
func Open(path string, o Options) (*Provider, error) {
	l, err := openLedger(path)
	if err != nil {
		return nil, err
	}
	return build(o, l), nil
}

func build(o Options, l *ledger) *Provider {
	if o.AcceptedDelay == 0 {
		o.AcceptedDelay = time.Second
	}
	if o.MaxHang == 0 {
		o.MaxHang = 10 * time.Minute
	}
	if o.MaxBodyBytes == 0 {
		o.MaxBodyBytes = 1 << 20
	}
	if o.ReadTimeout == 0 {
		o.ReadTimeout = 30 * time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Provider{
		options:    o,
		ledger:     l,
		routes:     http.NewServeMux(),
		ending:     make(chan struct{}),
		stopped:    make(chan struct{}),
		window:     o.Window,
		visibility: o.Visibility,
		claims:     map[string]*claim{},
		accepted:   map[string]Entry{},
		requests:   map[string]int{},
	}
	p.routes.HandleFunc("POST "+pathCharges, p.pay(Charge))
	p.routes.HandleFunc("POST "+pathRefunds, p.pay(Refund))
	p.routes.HandleFunc("GET "+pathCharges, p.lookUp(Charge))
	p.routes.HandleFunc("GET "+pathRefunds, p.lookUp(Refund))
	p.routes.HandleFunc("GET "+pathCharges+"/{name}", p.status(Charge))
	p.routes.HandleFunc("GET "+pathRefunds+"/{name}", p.status(Refund))
	p.control()
	return p
}

// ServeHTTP counts the request, then answers it.
func (p *Provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case pathLedger, pathFaults, pathRelease, pathDeduplication, pathVisibility:
		// Whoever judges is not counted.
	default:
		p.count(r)
	}
	p.routes.ServeHTTP(w, r)
}

func (p *Provider) count(r *http.Request) {
	name := r.Method + " " + r.URL.Path
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.requests[name]; !known && len(p.requests) >= maxCounted {
		name = pathsBeyond
	}
	p.requests[name]++
}

// Received is a payment request as it arrived, whatever became of it.
type Received struct {
	Method string
	Path   string
	Query  string
	Header http.Header
	// Body is at most its first 4 KiB.
	Body []byte
	// Remote is the client's end of the connection: equal for two requests
	// that came over the same one.
	Remote string
	At     time.Time
}

// note keeps a request for Received. Only the newest 1,000 are kept.
func (p *Provider) note(r *http.Request, body []byte) {
	if len(body) > maxReceivedBody {
		body = body[:maxReceivedBody]
	}
	n := &Received{
		Method: r.Method, Path: r.URL.Path, Query: r.URL.RawQuery, Header: r.Header.Clone(),
		Body: append([]byte(nil), body...), Remote: r.RemoteAddr, At: p.options.Now(),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.received) >= maxReceived {
		p.received = p.received[1:]
	}
	p.received = append(p.received, n)
}

// Received lists the newest requests to /charges and /refunds (POST and GET)
// whose body could be read, oldest first.
func (p *Provider) Received() []Received {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Received, len(p.received))
	for i, n := range p.received {
		out[i] = *n
		out[i].Header = n.Header.Clone()
	}
	return out
}

// Start serves on a TCP address, "" for a free port on the loopback, and
// returns the URL. A provider can be started once.
func (p *Provider) Start(listen string) (string, error) {
	if listen == "" {
		listen = "127.0.0.1:0"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil {
		return "", errors.New("the provider is already started")
	}
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return "", fmt.Errorf("listen on %s: %w", listen, err)
	}
	// No WriteTimeout: hanging is part of the service.
	p.server = &http.Server{
		Handler:        p,
		ReadTimeout:    p.options.ReadTimeout,
		IdleTimeout:    2 * time.Minute,
		MaxHeaderBytes: 64 << 10,
		ErrorLog:       slog.NewLogLogger(p.options.Log.Handler(), slog.LevelError),
	}
	server := p.server
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			p.options.Log.Error("the provider stopped serving", "error", err)
		}
	}()
	return "http://" + listener.Addr().String(), nil
}

// Shutdown stops in good order: no new requests; those that hang or are on
// hold are dropped uncommitted or unanswered, as their fault has it; the
// others finish until ctx ends, and are dropped then. Payments accepted with a
// 202 and not yet committed never are.
func (p *Provider) Shutdown(ctx context.Context) error {
	p.endingOnce.Do(func() { close(p.ending) })
	var err error
	if server := p.serving(); server != nil {
		err = server.Shutdown(ctx)
	}
	return errors.Join(err, p.Close())
}

// Close stops at once: requests in progress are dropped, and nothing is
// committed once it has returned. The ledger can still be asked.
func (p *Provider) Close() error {
	p.endingOnce.Do(func() { close(p.ending) })
	p.stoppedOnce.Do(func() { close(p.stopped) })
	var err error
	if server := p.serving(); server != nil {
		err = server.Close()
	}
	return errors.Join(err, p.ledger.close())
}

func (p *Provider) serving() *http.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.server
}
