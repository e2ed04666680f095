// A proxy between a client and a server, that does to the bytes what a network can:
// it drops them, delays them, cuts connections, and loses replies that were sent.

package servers

import (
	"bytes"
	"encoding/hex"
	"net"
	"slices"
	"sync"
	"time"
)

// Action is what happens to a connection on which a marked request was seen.
type Action string

const (
	// LoseReply passes the request on, throws away what comes back, and cuts the
	// connection a moment after: the server did it, and nobody is told.
	LoseReply Action = "LoseReply"
	// HoldReply passes the request on, and keeps what comes back until Release, the end of
	// the connection, too.
	HoldReply Action = "HoldReply"
	// HoldRequest keeps the request until Release. It is then passed on, also if whoever
	// sent it is gone.
	HoldRequest Action = "HoldRequest"
)

// lingering is how long a connection stays after the first of its lost replies: the
// marked request may be behind others.
const lingering = 100 * time.Millisecond

// Proxy passes TCP connections on to a target.
type Proxy struct {
	listener net.Listener

	mu     sync.Mutex
	target string
	delay  time.Duration
	// open is closed while bytes pass.
	open  chan struct{}
	rules []*Rule
	pairs map[*pair]struct{}
	done  bool
}

// Rule is what is to happen at a marked request.
type Rule struct {
	p       *Proxy
	markers [][]byte
	do      Action
	// left is how many more it meets, met how many it has met.
	left, met int
	released  chan struct{}
	// on are the connections on which it met them.
	on []*pair
}

// pair is a connection and its continuation.
type pair struct {
	client, server net.Conn
	closed         chan struct{}
	once           sync.Once
	// Under the proxy's lock.
	lose bool
	hold chan struct{}
	// kept: a request was held. answered: a reply is.
	kept, answered bool
}

func (c *pair) close() {
	c.once.Do(func() {
		close(c.closed)
		for _, conn := range []net.Conn{c.client, c.server} {
			// Reset, as a broken connection is: nothing waits in the kernel.
			if tcp, ok := conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			_ = conn.Close()
		}
	})
}

// NewProxy listens on an address, port 0 for a free one, and passes on to target.
func NewProxy(listen, target string) (*Proxy, error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: l, target: target, open: make(chan struct{}), pairs: map[*pair]struct{}{}}
	close(p.open)
	go p.serve()
	return p, nil
}

// Address is host and port; Port is the port.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Port is the port that it listens on.
func (p *Proxy) Port() int { return p.listener.Addr().(*net.TCPAddr).Port }

// Close ends it and its connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.done = true
	p.mu.Unlock()
	err := p.listener.Close()
	p.Cut()
	return err
}

// BlackHole drops everything from now on: no byte passes, and no connection ends.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
		p.open = make(chan struct{})
	default:
	}
}

// Mend lets bytes pass again, those too that were sent meanwhile: the kernels at both
// ends would have sent them again.
func (p *Proxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
	default:
		close(p.open)
	}
}

// Delay lets every reply come later.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Cut resets all connections. New ones can be made.
func (p *Proxy) Cut() {
	p.mu.Lock()
	all := make([]*pair, 0, len(p.pairs))
	for c := range p.pairs {
		all = append(all, c)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.close()
	}
}

// Lead resets all connections and leads new ones to another target, as an address
// does after a failover.
func (p *Proxy) Lead(target string) {
	p.mu.Lock()
	p.target = target
	p.mu.Unlock()
	p.Cut()
}

// On does something at the next requests that have the marker in them, as text or in
// hexadecimal digits, so many times.
func (p *Proxy) On(marker string, times int, do Action) *Rule {
	r := &Rule{
		p: p, do: do, left: times, released: make(chan struct{}),
		markers: [][]byte{[]byte(marker), []byte(hex.EncodeToString([]byte(marker)))},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, r)
	return r
}

// Met is how many requests it has met.
func (r *Rule) Met() int {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	return r.met
}

// Answered says that a reply is held, so that the server has done what it does.
func (r *Rule) Answered() bool {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	return slices.ContainsFunc(r.on, func(c *pair) bool { return c.answered })
}

// Release lets go what is held, and ends the rule.
func (r *Rule) Release() {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.left = 0
	select {
	case <-r.released:
	default:
		close(r.released)
	}
}

// Drop cuts the connections on which it met a request, and ends the rule: what is held is
// never passed on.
func (r *Rule) Drop() {
	r.p.mu.Lock()
	r.left = 0
	on := r.on
	r.p.mu.Unlock()
	for _, c := range on {
		c.close()
	}
}

func (p *Proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.pass(client)
	}
}

func (p *Proxy) pass(client net.Conn) {
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := net.DialTimeout("tcp", target, startLimit)
	if err != nil {
		_ = client.Close()
		return
	}
	c := &pair{client: client, server: server, closed: make(chan struct{})}
	p.mu.Lock()
	p.pairs[c] = struct{}{}
	done := p.done
	p.mu.Unlock()
	if done {
		c.close()
	}
	var both sync.WaitGroup
	both.Go(func() { p.requests(c) })
	both.Go(func() { p.replies(c) })
	both.Wait()
	c.close()
	p.mu.Lock()
	delete(p.pairs, c)
	p.mu.Unlock()
}

// wait ends when the channel is closed (true) or the connection is (false).
func (c *pair) wait(until <-chan struct{}) bool {
	select {
	case <-until:
		return true
	case <-c.closed:
		return false
	}
}

func (p *Proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}

// piece is what was read at once, and what it waits for; nil: for nothing.
type piece struct {
	bytes []byte
	wait  <-chan struct{}
}

// ahead is how many pieces are read and looked at behind one that is held.
const ahead = 1024

// requests passes on what the client sends. Behind a request that is held more is read, since
// many may share a connection, and each is to be met.
func (p *Proxy) requests(c *pair) {
	pieces := make(chan piece, ahead)
	var writing sync.WaitGroup
	writing.Go(func() {
		for next := range pieces {
			if next.wait != nil && !c.wait(next.wait) {
				return
			}
			if _, err := c.server.Write(next.bytes); err != nil {
				c.close()
				return
			}
		}
		if p.keeps(c) {
			c.finish()
		} else {
			c.close()
		}
	})
	defer writing.Wait()
	defer close(pieces)
	buffer := make([]byte, 64<<10)
	// A marker may come in two pieces.
	var before []byte
	for {
		n, err := c.client.Read(buffer)
		if n > 0 {
			if !c.wait(p.gate()) {
				return
			}
			seen := append(before, buffer[:n]...)
			select {
			case pieces <- piece{bytes.Clone(buffer[:n]), p.meet(c, seen, len(before))}:
			case <-c.closed:
				return
			}
			before = bytes.Clone(seen[max(0, len(seen)-512):])
		}
		if err != nil {
			return
		}
	}
}

// finish ends one direction: the server gets all that was sent, and then the end.
func (c *pair) finish() {
	if tcp, ok := c.server.(*net.TCPConn); !ok || tcp.CloseWrite() != nil {
		c.close()
	}
}

// keeps says whether a request was held on this connection, which gets there whatever
// became of its sender.
func (p *Proxy) keeps(c *pair) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.kept
}

// meet looks for markers that end behind the first old bytes of what was seen. It
// returns what the request waits for, nil for nothing.
func (p *Proxy) meet(c *pair, seen []byte, old int) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	var wait <-chan struct{}
	for _, r := range p.rules {
		for _, marker := range r.markers {
			from := max(0, old-len(marker)+1)
			if r.left == 0 || !bytes.Contains(seen[from:], marker) {
				continue
			}
			r.left--
			r.met++
			r.on = append(r.on, c)
			switch r.do {
			case LoseReply:
				c.lose = true
			case HoldReply:
				c.hold = r.released
			case HoldRequest:
				wait, c.kept = r.released, true
			}
			break
		}
	}
	return wait
}

func (p *Proxy) replies(c *pair) {
	defer c.close()
	piece := make([]byte, 64<<10)
	for {
		n, err := c.server.Read(piece)
		p.mu.Lock()
		delay, open := p.delay, p.open
		lose, hold := c.lose, c.hold
		c.answered = hold != nil
		p.mu.Unlock()
		if hold != nil && !c.wait(hold) {
			return
		}
		if n > 0 {
			if !c.wait(open) {
				return
			}
			if delay > 0 {
				timer := time.NewTimer(delay)
				select {
				case <-timer.C:
				case <-c.closed:
				}
				timer.Stop()
			}
			if lose {
				p.swallow(c)
				return
			}
			if _, err := c.client.Write(piece[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// swallow reads what else comes for a moment, and tells nobody.
func (p *Proxy) swallow(c *pair) {
	if err := c.server.SetReadDeadline(time.Now().Add(lingering)); err != nil {
		return
	}
	piece := make([]byte, 64<<10)
	for {
		if _, err := c.server.Read(piece); err != nil {
			return
		}
	}
}
