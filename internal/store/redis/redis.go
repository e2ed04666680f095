// Package redis keeps records in a Redis or Valkey server (Redis 7.0 or later), for
// any number of processes at once.
//
// Each primitive is one Lua script, which the server runs alone and whole: that is
// the one order of writes. Of those that come together one script does several, each a
// step of its own (see lane.go). A step checks everything first and then writes, and no
// write can fail once one was made (see lua/prelude.lua and lua/write.lua). What is
// answered is as durable as the server is configured to make it; Durability judges
// that. Nothing is ever sent twice by itself: after an error the writer reads back,
// or repeats the write with its nonce.
//
// This file opens the store and asks the server; layout.go says how records lie there.
package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	defaultTimeout     = 3 * time.Second
	defaultConnections = 1
	keepAlive          = time.Second
	bufferSize         = 64 << 10
	maxNamespace       = 128
)

// Options of a store.
type Options struct {
	// Addresses are host:port of the server, or of some nodes of a cluster, or one
	// path of a Unix socket with "unix:" before it.
	Addresses []string
	// Namespace tells stores on one server apart: letters, digits and "-._/:". It
	// is the hash tag of all keys, so that a cluster keeps them on one node.
	Namespace string
	// Credentials are asked for at every connection, so that they can be rotated;
	// nil: none are sent.
	Credentials func() (username, password string, err error)
	// TLS of the connections; nil: none.
	TLS *tls.Config
	// Timeout bounds a connection attempt and the wait for an answer; 0: 3 s. A
	// caller's context can only make it shorter.
	Timeout time.Duration
	// Connections are used by turns; 0: 1. On each of them requests are pipelined.
	Connections int
	// Dial makes each connection, before TLS, if any: so every address can be judged
	// when it is dialled, also those that a cluster names; nil: as net.Dialer does.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Store is a store.Store in a namespace of a server.
type Store struct {
	opts      Options
	prefix    string
	keys      keys
	scripts   scripts
	processes processes
	links     []*link
	next      atomic.Uint64
	closing   chan struct{}
	close     sync.Once
}

var _ store.Store = (*Store)(nil)

// Open makes a store of these options. It does not connect: the server is reached
// for when the store is asked, and again whenever it was lost.
func Open(opts Options) (*Store, error) {
	return open(opts, newScripts(luaClock, luaMarks))
}

func open(opts Options, scripts scripts) (*Store, error) {
	if len(opts.Addresses) == 0 {
		return nil, errors.New("open store: no address")
	}
	for _, a := range opts.Addresses {
		if path, ok := strings.CutPrefix(a, "unix:"); ok {
			if path == "" || len(opts.Addresses) > 1 {
				return nil, fmt.Errorf("open store: address %q: a socket is one path and the only address", a)
			}
		} else if _, _, err := net.SplitHostPort(a); err != nil {
			return nil, fmt.Errorf("open store: address %q: want host:port or unix:path: %w", a, err)
		}
	}
	if err := validNamespace(opts.Namespace); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if opts.Timeout <= 0 {
		opts.Timeout = defaultTimeout
	}
	if opts.Connections <= 0 {
		opts.Connections = defaultConnections
	}
	if opts.Dial == nil {
		opts.Dial = (&net.Dialer{KeepAlive: keepAlive}).DialContext
	}
	s := &Store{opts: opts, prefix: "{" + opts.Namespace + "}", scripts: scripts, closing: make(chan struct{})}
	s.keys = keys{s.key("meta"), s.key("due"), s.key("held"), s.key("sums"), s.key("marks")}
	s.processes.now = time.Now
	for range opts.Connections {
		l := &link{open: s.connect}
		l.writes = newLane(s, l, doingWrite, s.scripts.write, s.keys.meta, s.keys.due, s.keys.held, s.keys.sums, s.keys.marks)
		l.reads = newLane(s, l, doingRead, s.scripts.get, s.keys.meta)
		s.links = append(s.links, l)
	}
	return s, nil
}

func validNamespace(n string) error {
	if n == "" || len(n) > maxNamespace {
		return fmt.Errorf("namespace of %d characters: want 1 to %d", len(n), maxNamespace)
	}
	for _, c := range n {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.ContainsRune("-._/:", c):
		default:
			return fmt.Errorf("namespace %q: want letters, digits and -._/: only", n)
		}
	}
	return nil
}

// connect makes a client and its first connection.
func (s *Store) connect() (valkey.Client, error) {
	opts := valkey.ClientOption{
		InitAddress: s.opts.Addresses,
		TLSConfig:   s.opts.TLS,
		ClientName:  "holdfast",
		DialCtxFn:   s.dial,
		// A connection on which nothing is heard for this long is given up.
		ConnWriteTimeout:    s.opts.Timeout,
		ReadBufferEachConn:  bufferSize,
		WriteBufferEachConn: bufferSize,
		PipelineMultiplex:   -1,
		// A caller that leaves must not take the connection with it, as it would
		// if its deadline were the connection's.
		AlwaysPipelining: true,
		DisableRetry:     true,
		DisableCache:     true,
	}
	if s.opts.Credentials != nil {
		opts.AuthCredentialsFn = func(valkey.AuthCredentialsContext) (valkey.AuthCredentials, error) {
			username, password, err := s.opts.Credentials()
			return valkey.AuthCredentials{Username: username, Password: password}, err
		}
	}
	return valkey.NewClient(opts)
}

// dial makes a connection to a node, and its TLS.
func (s *Store) dial(ctx context.Context, address string, _ *net.Dialer, config *tls.Config) (net.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.opts.Timeout, errSilent)
	defer cancel()
	network := "tcp"
	if path, ok := strings.CutPrefix(s.opts.Addresses[0], "unix:"); ok {
		network, address = "unix", path
	}
	plain, err := s.opts.Dial(ctx, network, address)
	if err != nil || config == nil {
		return plain, err
	}
	if config.ServerName == "" && network == "tcp" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, errors.Join(err, plain.Close())
		}
		config = config.Clone()
		config.ServerName = host
	}
	c := tls.Client(plain, config)
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("TLS with %s: %w", address, err), plain.Close())
	}
	return c, nil
}

// link is a client that is made when it is first asked for. The client mends its
// own connection; one that could not connect at first, or that leads to a replica,
// is made anew.
type link struct {
	open func() (valkey.Client, error)
	// What of this connection waits to be asked together.
	writes, reads *lane

	mu      sync.Mutex
	client  valkey.Client
	attempt *attempt
	closed  bool
}

// attempt is one try to connect, which all who need it wait for.
type attempt struct {
	done   chan struct{}
	client valkey.Client
	err    error
}

func (l *link) get(ctx context.Context) (valkey.Client, error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, errClosed
	}
	if l.client != nil {
		defer l.mu.Unlock()
		return l.client, nil
	}
	if l.attempt == nil {
		l.attempt = &attempt{done: make(chan struct{})}
		go l.connect(l.attempt)
	}
	a := l.attempt
	l.mu.Unlock()
	select {
	case <-a.done:
		return a.client, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *link) connect(a *attempt) {
	a.client, a.err = l.open()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempt = nil
	switch {
	case a.err == nil && l.closed:
		go a.client.Close()
		a.client, a.err = nil, errClosed
	case a.err == nil:
		l.client = a.client
	}
	close(a.done)
}

// drop gives up a client whose connection leads to the wrong server: the address
// may lead to the right one by now, but a connection stays where it is.
func (l *link) drop(client valkey.Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.client == client {
		l.client = nil
		go client.Close()
	}
}

func (l *link) close() {
	l.mu.Lock()
	client := l.client
	l.client, l.closed = nil, true
	l.mu.Unlock()
	if client != nil {
		client.Close()
	}
}

// Close ends the use of the store. It waits for what is being asked, as long as a
// connection may be silent at most.
func (s *Store) Close() error {
	s.close.Do(func() {
		close(s.closing)
		var group sync.WaitGroup
		for _, l := range s.links {
			group.Go(l.close)
		}
		group.Wait()
	})
	return nil
}

var errClosed = errors.New("the store is closed")

// link is the one that is next.
func (s *Store) link() *link { return s.links[s.next.Add(1)%uint64(len(s.links))] }

// refused says why nothing can be asked any more.
func (s *Store) refused(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case <-s.closing:
		return errClosed
	default:
		return nil
	}
}

// ask hands fn a client and waits for it no longer than the caller and the timeout
// allow: the client itself waits for room in its queue and for a connection that
// somebody else has begun to make, whatever its context says.
func (s *Store) ask(ctx context.Context, l *link, doing string, fn func(context.Context, valkey.Client) error) error {
	if err := s.refused(ctx); err != nil {
		return s.unavailable(doing, err)
	}
	bounded, cancel := context.WithTimeoutCause(ctx, s.opts.Timeout, errSilent)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		client, err := l.get(bounded)
		if err == nil {
			err = fn(bounded, client)
			if answer, ok := valkey.IsValkeyErr(err); ok && strings.HasPrefix(answer.Error(), "READONLY") {
				l.drop(client)
			}
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			// The client knows no cause, it says that the time is over.
			if cause := context.Cause(bounded); cause != nil && errors.Is(err, bounded.Err()) {
				err = cause
			}
			return s.explain(doing, err)
		}
		return nil
	case <-bounded.Done():
		return s.explain(doing, context.Cause(bounded))
	}
}
