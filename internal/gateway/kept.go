// This file keeps the connections of mutating attempts from one attempt to the next.
// What must hold: a connection carries one attempt at a time, and only attempts of one
// tool to one place; when it is kept, nothing of the attempt before is on its way in
// either direction; and whether that is still so is looked at right before the first
// byte of the next request, when nothing was sent and another one can be dialled.

package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

const (
	// keptFor is how long a connection may lie idle. It is shorter than any upstream
	// that is worth its name waits, so that one is hardly ever met while it closes.
	keptFor = time.Second
	// keptAge is how old a connection may become: a name that leads elsewhere now, a
	// certificate that is no longer good, are noticed after that time at the latest.
	keptAge = 10 * time.Second
	// keptEach and keptMost are how many may lie idle, for one tool and for all. A tool has
	// no more than it had attempts at once a second ago.
	keptEach, keptMost = 64, 512
)

// destination is for whom a connection is, and to where.
type destination struct {
	namespace, tool, scheme, hostport string
	roots                             *x509.CertPool
}

// connection is one to an upstream, dialled for an attempt.
type connection struct {
	*fence
	// stream is the fence, or TLS over it.
	stream  net.Conn
	to      netip.AddrPort
	dialled time.Time
	idle    time.Time
	// ends closes the connection at the end of the attempt that it carries.
	ends *time.Timer
	// one is what is read of what nobody asked for.
	one [1]byte
}

// closeAt has the connection closed, under whoever reads or writes it, when ctx ends, which has a
// deadline and ends by nothing else. A timer of its own costs each attempt far less than
// context.AfterFunc. Once it cannot be stopped any more the connection is never kept.
func (c *connection) closeAt(ctx context.Context) {
	at, _ := ctx.Deadline()
	left := time.Until(at)
	if c.ends == nil {
		c.ends = time.AfterFunc(left, func() { _ = c.Close() })
		return
	}
	c.ends.Reset(left)
}

// over says that more time has gone by, on either clock: the monotonic one stands while
// a machine sleeps.
func over(since, now time.Time, most time.Duration) bool {
	wall := now.Round(0).Sub(since.Round(0))
	return now.Sub(since) >= most || wall >= most || wall < 0
}

// dismiss lets the kernel close a connection on which nothing is on its way in good order.
func (c *connection) dismiss() {
	_ = c.finish() // then it is reset, and nobody waits for it
	_ = c.Close()
}

// connect dials for an attempt, up to where its request can be written.
func (s *sender) connect(ctx context.Context, to destination, serverName string, end deadline) (*connection, error) {
	tcp, err := s.addresses.dialOnce(ctx, to.hostport)
	if err != nil {
		return nil, err
	}
	f, err := newFence(tcp, end)
	if err != nil {
		return nil, err
	}
	c := &connection{fence: f, stream: f, dialled: time.Now()}
	if addr, ok := tcp.RemoteAddr().(*net.TCPAddr); ok {
		c.to = addr.AddrPort()
	}
	if to.scheme != "https" {
		return c, nil
	}
	if err := f.bound(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	config := s.tls.Clone()
	config.ServerName = serverName
	config.NextProtos = []string{"http/1.1"}
	f.records = &records{}
	secured := tls.Client(f, config)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = f.Close() // it may be closed already
		return nil, fmt.Errorf("TLS handshake: %w", err)
	}
	c.stream = secured
	return c, nil
}

// reuse gives a kept connection, if there is one that may be used now. Where it leads
// is judged as if it were dialled.
func (s *sender) reuse(ctx context.Context, to destination, end deadline) *connection {
	c := s.kept.take(to, time.Now())
	if c == nil {
		return nil
	}
	good := false
	defer func() {
		if !good {
			c.dismiss()
		}
	}()
	if s.addresses.judge(ctx, c.to) != nil {
		return nil // what is dialled now says why
	}
	c.again(end)
	good = true
	return c
}

// unasked says whether there is more than the answer that was read, and whether the
// connection is good for another attempt. The answer was read to its end.
func (c *connection) unasked() (more, good bool) {
	c.probing = true
	defer func() { c.probing = false }()
	n, err := c.stream.Read(c.one[:])
	switch {
	case n > 0:
		return true, false
	case !errors.Is(err, os.ErrDeadlineExceeded):
		return false, false // closed, or broken
	case c.records != nil && !c.records.whole():
		return true, false
	}
	return false, c.delivered()
}

// records follows the borders of TLS records in what was read: a part of one that TLS
// has taken from the kernel and not yet made known must not become an answer.
type records struct {
	header [5]byte
	have   int // of the header
	left   int // of the record behind it
}

func (r *records) follow(p []byte) {
	for len(p) > 0 {
		if r.left > 0 {
			n := min(r.left, len(p))
			r.left, p = r.left-n, p[n:]
			continue
		}
		n := copy(r.header[r.have:], p)
		r.have, p = r.have+n, p[n:]
		if r.have == len(r.header) {
			r.have, r.left = 0, int(r.header[3])<<8|int(r.header[4])
		}
	}
}

func (r *records) whole() bool { return r.have == 0 && r.left == 0 }

// keeper keeps the idle connections.
type keeper struct {
	mu     sync.Mutex
	idle   map[destination][]*connection // the one that was used last is the last
	count  int
	sweep  *time.Timer // nil: nothing is kept
	closed bool
	// idleMost and ageMost are keptFor and keptAge; on a machine that is busy, tests do not go by the time.
	idleMost, ageMost time.Duration
}

func newKeeper() *keeper {
	return &keeper{idle: map[destination][]*connection{}, idleMost: keptFor, ageMost: keptAge}
}

// take gives the connection that was used last. The others of a tool that is called
// less than before come to their end.
func (k *keeper) take(to destination, now time.Time) *connection {
	k.mu.Lock()
	defer k.mu.Unlock()
	list := k.idle[to]
	if len(list) == 0 {
		return nil
	}
	c := list[len(list)-1]
	if over(c.idle, now, k.idleMost) || over(c.dialled, now, k.ageMost) {
		return nil // the sweep closes it
	}
	list[len(list)-1] = nil
	k.set(to, list[:len(list)-1])
	k.count--
	return c
}

func (k *keeper) set(to destination, list []*connection) {
	if len(list) == 0 {
		delete(k.idle, to)
		return
	}
	k.idle[to] = list
}

// put keeps a connection, or closes it.
func (k *keeper) put(to destination, c *connection) {
	c.requesting.Store(false)
	c.idle = time.Now()
	if !over(c.dialled, c.idle, k.ageMost) && k.add(to, c) {
		return
	}
	c.dismiss()
}

func (k *keeper) add(to destination, c *connection) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || k.count >= keptMost || len(k.idle[to]) >= keptEach {
		return false
	}
	k.idle[to] = append(k.idle[to], c)
	k.count++
	if k.sweep == nil {
		k.sweep = time.AfterFunc(k.idleMost, k.clean)
	}
	return true
}

// clean closes what has been idle for too long, and comes again while anything is kept.
func (k *keeper) clean() {
	for _, c := range k.expired(time.Now()) {
		c.dismiss()
	}
}

func (k *keeper) expired(now time.Time) (gone []*connection) {
	k.mu.Lock()
	defer k.mu.Unlock()
	next := k.idleMost
	for to, list := range k.idle {
		var left []*connection
		for _, c := range list {
			if k.closed || over(c.idle, now, k.idleMost) || over(c.dialled, now, k.ageMost) {
				gone = append(gone, c)
				continue
			}
			left = append(left, c)
			next = min(next, k.idleMost-now.Sub(c.idle))
		}
		k.set(to, left)
	}
	k.count -= len(gone)
	if k.sweep = nil; k.count > 0 {
		k.sweep = time.AfterFunc(max(next, time.Millisecond), k.clean)
	}
	return gone
}

// end closes what is kept, and keeps nothing more.
func (k *keeper) end() {
	k.mu.Lock()
	k.closed = true
	if k.sweep != nil {
		k.sweep.Stop()
	}
	k.mu.Unlock()
	k.clean()
}
