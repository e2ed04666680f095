package servers

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// echo is a server that answers each line with itself, and keeps what it was told.
type echo struct {
	net.Listener
	mu   sync.Mutex
	told []string
}

func newEcho(t *testing.T) *echo {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	e := &echo{Listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					e.mu.Lock()
					e.told = append(e.told, lines.Text())
					e.mu.Unlock()
					if _, err := fmt.Fprintln(c, lines.Text()); err != nil {
						return
					}
				}
			}()
		}
	}()
	return e
}

func (e *echo) knows(line string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, told := range e.told {
		if told == line {
			return nil
		}
	}
	return fmt.Errorf("it was told %q, not %q", e.told, line)
}

type peer struct {
	net.Conn
	lines *bufio.Reader
}

func dial(t *testing.T, p *Proxy) peer {
	t.Helper()
	c, err := net.Dial("tcp", p.Address())
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return peer{c, bufio.NewReader(c)}
}

func (c peer) say(t *testing.T, line string) {
	t.Helper()
	_, err := fmt.Fprintln(c, line)
	must(t, err)
}

// hears waits for a line, for so long; an error is that none came.
func (c peer) hears(within time.Duration) (string, error) {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	return c.lines.ReadString('\n')
}

func met(r *Rule) error {
	if r.Met() == 0 {
		return errors.New("the request was not seen")
	}
	return nil
}

func TestProxy(t *testing.T) {
	const soon, later = 100 * time.Millisecond, 10 * time.Second
	server := newEcho(t)
	p, err := NewProxy("127.0.0.1:0", server.Addr().String())
	must(t, err)
	defer func() { must(t, p.Close()) }()
	answers := func(c peer, line string) {
		t.Helper()
		c.say(t, line)
		if got, err := c.hears(later); err != nil || got != line+"\n" {
			t.Fatalf("%q is answered %q, %v", line, got, err)
		}
	}
	silent := func(c peer) {
		t.Helper()
		if got, err := c.hears(soon); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("it should be silent, and says %q, %v", got, err)
		}
	}

	c := dial(t, p)
	answers(c, "plain")

	p.BlackHole()
	c.say(t, "dropped")
	silent(c)
	if err := server.knows("dropped"); err == nil {
		t.Fatal("it passed the black hole")
	}
	late := dial(t, p)
	late.say(t, "new")
	silent(late)
	p.Mend()
	if got, err := c.hears(later); err != nil || got != "dropped\n" {
		t.Fatalf("after it was mended: %q, %v", got, err)
	}

	p.Delay(2 * soon)
	began := time.Now()
	answers(c, "slow")
	if took := time.Since(began); took < 2*soon {
		t.Errorf("the delayed reply took %s", took)
	}
	p.Delay(0)

	r := p.On("marked", 1, LoseReply)
	c.say(t, "mar")
	answers(dial(t, p), "other")
	if _, err := c.hears(later); err != nil {
		t.Fatal(err)
	}
	c.say(t, "lost, as it is marked")
	if got, err := c.hears(later); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the reply should be lost and the connection cut: %q, %v", got, err)
	}
	if err := server.knows("lost, as it is marked"); err != nil || r.Met() != 1 {
		t.Fatalf("the request should have passed: %v, met %d", err, r.Met())
	}
	c = dial(t, p)
	answers(c, "marked, but once is enough")

	r = p.On("held", 1, HoldReply)
	if r.Answered() {
		t.Fatal("it is answered before it was asked")
	}
	c.say(t, "held")
	eventually(t, "its reply is there", func() error {
		if !r.Answered() {
			return errors.New("it is not")
		}
		return nil
	})
	silent(c)
	if err := server.knows("held"); err != nil {
		t.Fatal(err)
	}
	answers(dial(t, p), "not this one")
	r.Release()
	if got, err := c.hears(later); err != nil || got != "held\n" {
		t.Fatalf("released: %q, %v", got, err)
	}

	r = p.On("kept", 1, HoldRequest)
	c.say(t, "kept")
	silent(c)
	if err := server.knows("kept"); err == nil {
		t.Fatal("the request passed")
	}
	r.Release()
	if got, err := c.hears(later); err != nil || got != "kept\n" {
		t.Fatalf("released: %q, %v", got, err)
	}

	// What comes behind it on its connection is met, too.
	r, behind := p.On("first", 1, HoldRequest), p.On("second", 1, HoldRequest)
	c.say(t, "first")
	eventually(t, "the first is held", func() error { return met(r) })
	c.say(t, "second")
	eventually(t, "the second is held", func() error { return met(behind) })
	r.Release()
	if got, err := c.hears(later); err != nil || got != "first\n" {
		t.Fatalf("released: %q, %v", got, err)
	}
	silent(c)
	behind.Release()
	if got, err := c.hears(later); err != nil || got != "second\n" {
		t.Fatalf("released: %q, %v", got, err)
	}

	// A request that was held gets there although its sender is gone, unless it is dropped.
	for _, row := range []struct {
		line  string
		end   func(*Rule)
		there bool
	}{{"orphan", (*Rule).Release, true}, {"dropped for good", (*Rule).Drop, false}} {
		gone := dial(t, p)
		r = p.On(row.line, 1, HoldRequest)
		gone.say(t, row.line)
		eventually(t, "the request is held", func() error { return met(r) })
		must(t, gone.Close())
		row.end(r)
		if row.there {
			eventually(t, row.line, func() error { return server.knows(row.line) })
		}
		answers(dial(t, p), "after "+row.line)
		if err := server.knows(row.line); (err == nil) != row.there {
			t.Fatalf("%s: %v", row.line, err)
		}
	}

	// So is the end of a connection, of a server that has nothing to say.
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { must(t, mute.Close()) }()
	go func() {
		if c, err := mute.Accept(); err == nil {
			_, _ = bufio.NewReader(c).ReadString('\n')
			_ = c.Close()
		}
	}()
	toMute, err := NewProxy("127.0.0.1:0", mute.Addr().String())
	must(t, err)
	defer func() { must(t, toMute.Close()) }()
	r = toMute.On("ended", 1, HoldReply)
	m := dial(t, toMute)
	m.say(t, "ended")
	silent(m)
	r.Release()
	if got, err := m.hears(later); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("released, the connection should end: %q, %v", got, err)
	}

	other := newEcho(t)
	p.Lead(other.Addr().String())
	if _, err := c.hears(later); err == nil || errors.Is(err, io.ErrNoProgress) {
		t.Fatal("the connection to the old target is still there")
	}
	answers(dial(t, p), "at the other")
	must(t, other.knows("at the other"))
}

func TestAMarkerInTwoPieces(t *testing.T) {
	p := &Proxy{}
	r := p.On("marker", 5, LoseReply)
	c := &pair{}
	p.meet(c, []byte("mar"), 0)
	p.meet(c, []byte("marker"), 3)
	if r.Met() != 1 {
		t.Errorf("met %d, want 1", r.Met())
	}
	// What was seen is not met again.
	p.meet(c, []byte("marker and more"), 6)
	if r.Met() != 1 {
		t.Errorf("met %d, want 1", r.Met())
	}
	p.meet(c, []byte("6d61726b6572"), 0)
	if r.Met() != 2 {
		t.Errorf("met %d, want 2", r.Met())
	}
}
