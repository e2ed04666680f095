// This file is about the connection of a mutating attempt. What must hold: no
// byte reaches the socket unless both clocks are before the send's deadline at
// the moment of that very write; whether any byte of the request was written is
// known for certain; once the deadline is over, or the process is gone, the kernel
// delivers nothing more; and no request is written to a connection that was used
// before and has something to say that nobody asked for.

package gateway

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// errLate is a write that was refused because the send's deadline was over.
var errLate = errors.New("the time for sending is over")

// errStale is a write to a connection used before that the upstream has closed, or over
// which it said something unasked. Nothing of the request was written.
var errStale = errors.New("the connection from an earlier attempt is no longer good")

// deadline is what a guard.Ticket says of time: it is over when nothing is left.
type deadline interface {
	Left() time.Duration
}

// fence is a TCP connection that compares the clocks around every write. It lies
// under TLS, so that it sees what really goes to the socket.
type fence struct {
	*net.TCPConn
	raw syscall.RawConn
	end deadline

	// requesting is set before the request's first byte is written; from then on
	// every byte counts as sent. A TLS handshake before it does not.
	requesting atomic.Bool
	sent       atomic.Bool
	late       atomic.Bool

	// gives is after how many milliseconds the kernel gives up; 0: it was not told.
	gives int64
	// used: it has carried an attempt before.
	used bool
	// probing: a read takes what is there, and does not wait.
	probing bool
	// records are followed if there is TLS; else nil.
	records *records

	// What the kernel is asked again and again, with what it answers.
	reading, writing kernelCall
	waiting          struct {
		ask func(fd uintptr)
		n   int
		err error
	}
}

// kernelCall is a read or a write of the kernel's, made for one connection once.
type kernelCall struct {
	ask func(fd uintptr) (done bool)
	p   []byte
	n   int
	err error
}

// askOn asks for p, by RawConn's Read or Write.
func (k *kernelCall) askOn(wait func(func(uintptr) bool) error, p []byte) (n int, waited, err error) {
	k.p, k.n, k.err = p, 0, nil
	waited = wait(k.ask)
	k.p = nil
	return k.n, waited, k.err
}

// newFence takes over a connection; it closes it if it cannot.
func newFence(conn *net.TCPConn, end deadline) (*fence, error) {
	f := &fence{TCPConn: conn, end: end}
	f.reading.ask, f.writing.ask, f.waiting.ask = f.readOnce, f.writeOnce, f.countWaiting
	var err error
	if f.raw, err = conn.SyscallConn(); err == nil {
		// With linger 0 a close drops what the kernel has not delivered. It also
		// covers the process being killed, so it is set from the beginning.
		err = conn.SetLinger(0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the connection: %w", err), conn.Close())
	}
	return f, nil
}

// bound makes the kernel give up by itself before the time left is over: it may be
// that nobody is there to close the connection, because the process is paused. It gives up
// a little earlier than it must, so that what was set for one attempt is mostly as good for
// the next one on the same connection.
func (f *fence) bound() error {
	var err error
	if ctl := f.raw.Control(func(fd uintptr) { _, err = f.boundTo(int(fd), f.end.Left()) }); ctl != nil {
		return ctl
	}
	return err
}

// boundTo is bound where the time left was just read. told: the kernel had to be told.
func (f *fence) boundTo(fd int, by time.Duration) (told bool, err error) {
	left := max(by.Milliseconds(), 1)
	if f.gives > 0 && f.gives <= left && f.gives >= left-left/8 {
		return false, nil
	}
	gives := max(left-left/16, 1)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(gives)); err != nil {
		return false, err
	}
	f.gives = gives
	return true, nil
}

// begin is called once, before the request's first byte.
func (f *fence) begin() { f.requesting.Store(true) }

// writeNow writes what the kernel takes, if all is as it must be at this moment.
func (f *fence) writeNow(fd int, p []byte) (int, error) {
	first := f.requesting.Load() && !f.sent.Load()
	if first && f.used && !silent(fd) {
		return 0, errStale
	}
	left := f.end.Left()
	if first && left > 0 {
		told, err := f.boundTo(fd, left)
		if err != nil {
			return 0, err
		}
		if told { // which took its time
			left = f.end.Left()
		}
	}
	if left <= 0 {
		return 0, errLate
	}
	n, err := unix.SendmsgN(fd, p, nil, nil, unix.MSG_NOSIGNAL)
	if n > 0 {
		if f.requesting.Load() {
			f.sent.Store(true)
		}
		if f.end.Left() <= 0 {
			f.late.Store(true)
		}
	}
	return n, err
}

// again makes a used connection ready for another attempt.
func (f *fence) again(end deadline) {
	f.end, f.used = end, true
	f.requesting.Store(false)
	f.sent.Store(false)
	f.late.Store(false)
}

// delivered says that the other end has acknowledged all that was written.
func (f *fence) delivered() bool {
	ctl := f.raw.Control(f.waiting.ask)
	return ctl == nil && f.waiting.err == nil && f.waiting.n == 0
}

func (f *fence) countWaiting(fd uintptr) {
	f.waiting.n, f.waiting.err = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ)
}

// silent says that the other end has neither closed nor said anything that is not read.
func silent(fd int) bool {
	var one [1]byte
	for {
		_, _, err := unix.Recvfrom(fd, one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return errors.Is(err, unix.EAGAIN)
		}
	}
}

// Read follows the records, and does not wait if it is only asked what is there.
func (f *fence) Read(p []byte) (n int, err error) {
	if f.probing {
		n, err = f.readNow(p)
	} else {
		n, err = f.TCPConn.Read(p)
	}
	if f.records != nil {
		f.records.follow(p[:n])
	}
	return n, err
}

func (f *fence) readOnce(fd uintptr) bool {
	for {
		if f.reading.n, f.reading.err = unix.Read(int(fd), f.reading.p); !errors.Is(f.reading.err, unix.EINTR) {
			return true
		}
	}
}

// readNow fails with os.ErrDeadlineExceeded if nothing is there.
func (f *fence) readNow(p []byte) (int, error) {
	n, wait, err := f.reading.askOn(f.raw.Read, p)
	switch {
	case wait != nil:
		return 0, wait
	case errors.Is(err, unix.EAGAIN):
		return 0, os.ErrDeadlineExceeded
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// finish lets the kernel close the connection in good order: all that was asked was answered.
func (f *fence) finish() error { return f.SetLinger(-1) }

func (f *fence) writeOnce(fd uintptr) bool {
	f.writing.n, f.writing.err = f.writeNow(int(fd), f.writing.p)
	return !errors.Is(f.writing.err, unix.EAGAIN)
}

// Write gives every piece to the kernel by itself, with a look at the clocks before
// and after. net.Conn's own Write would wait for room and go on without a look.
func (f *fence) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n, wait, err := f.writing.askOn(f.raw.Write, p[written:])
		if wait != nil {
			return written, wait
		}
		if n > 0 {
			written += n
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return written, &net.OpError{Op: "write", Net: "tcp", Addr: f.RemoteAddr(), Err: err}
		}
	}
	return written, nil
}
