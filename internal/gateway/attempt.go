// This file is one attempt of a mutating call: its own connection, one request over
// HTTP/1.1, one answer read to its end. Nothing here ever sends twice: there is no
// pool, no redirect and no second dial, and the request is written by one call.

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// maxAnswerHeader is how long an upstream's status line and headers may be together.
const maxAnswerHeader = 128 << 10

// answer is what an upstream answered, read to its end.
type answer struct {
	status int
	header http.Header
	// body is the whole body, or its start if cut.
	body   []byte
	size   int64
	digest string
	// cut: the body is longer than what could be kept.
	cut bool
	// release gives the memory back.
	release func()
}

// exchange is all that is known of an attempt.
type exchange struct {
	// sent: at least one byte of the request went to the kernel. late: one did although
	// the deadline was over when it was looked at again.
	sent, late bool
	// answer is nil if none came, or not whole; then status tells how far it came.
	answer *answer
	status int
	err    error
}

// memory bounds what the bodies of all answers take together.
type memory struct{ left atomic.Int64 }

func (m *memory) take(n int64) bool {
	if m.left.Add(-n) >= 0 {
		return true
	}
	m.left.Add(n)
	return false
}

func (m *memory) give(n int64) { m.left.Add(n) }

// sender sends attempts.
type sender struct {
	addresses *Addresses
	tls       *tls.Config
	memory    *memory
	// maxAnswer is the longest body that is kept whole.
	maxAnswer int64
}

// target is where an attempt goes, and what it carries.
type target struct {
	method string
	url    *url.URL
	header http.Header
	body   []byte
	// keep is how much of a longer body is kept.
	keep int64
}

// send makes the attempt. It ends at the latest after timeout and at the deadline.
func (s *sender) send(ctx context.Context, t target, timeout time.Duration, end deadline) (x exchange) {
	ctx, cancel := context.WithTimeout(ctx, min(timeout, end.Left()))
	defer cancel()

	req := &http.Request{Method: t.method, URL: t.url, Host: t.url.Host, Header: t.header, Close: true}
	if len(t.body) > 0 {
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(t.body)), int64(len(t.body))
	}
	raw := bytes.NewBuffer(make([]byte, 0, 1024+len(t.body)))
	if err := req.Write(raw); err != nil {
		return exchange{err: fmt.Errorf("write the request down: %w", err)}
	}

	tcp, err := s.addresses.dialOnce(ctx, hostport(t.url))
	if err != nil {
		return exchange{err: err}
	}
	f, err := newFence(tcp, end)
	if err != nil {
		return exchange{err: err}
	}
	// At the deadline the connection is closed under whoever reads or writes it.
	stop := context.AfterFunc(ctx, func() { _ = f.Close() })
	defer func() {
		stop()
		_ = f.Close() // it may be closed already
		x.sent, x.late = f.sent.Load(), f.late.Load()
		if x.err != nil && ctx.Err() != nil {
			x.err = fmt.Errorf("%w: %w", context.DeadlineExceeded, x.err)
		}
	}()

	var conn net.Conn = f
	if t.url.Scheme == "https" {
		if err := f.bound(); err != nil {
			return exchange{err: err}
		}
		config := s.tls.Clone()
		config.ServerName = t.url.Hostname()
		config.NextProtos = []string{"http/1.1"}
		secured := tls.Client(f, config)
		if err := secured.HandshakeContext(ctx); err != nil {
			return exchange{err: fmt.Errorf("TLS handshake: %w", err)}
		}
		conn = secured
	}
	if err := f.begin(); err != nil {
		return exchange{err: err}
	}
	if _, err := conn.Write(raw.Bytes()); err != nil {
		return exchange{err: fmt.Errorf("send the request: %w", err)}
	}
	x = s.receive(conn, req, t.keep)
	if x.err == nil {
		x.err = f.finish()
	}
	return x
}

// receive reads the answer to its end.
func (s *sender) receive(conn io.Reader, req *http.Request, keep int64) (x exchange) {
	limited := &io.LimitedReader{R: conn, N: maxAnswerHeader}
	record := &recorder{from: limited}
	reader := readers.Get().(*bufio.Reader)
	reader.Reset(record)
	defer func() {
		reader.Reset(nil)
		readers.Put(reader)
	}()
	var resp *http.Response
	for range 8 { // 100 and 103 may come before the answer
		var err error
		record.kept = record.kept[len(record.kept)-reader.Buffered():]
		if resp, err = http.ReadResponse(reader, req); err != nil {
			return exchange{err: fmt.Errorf("read the answer: %w", err)}
		}
		if resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			break
		}
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode < 200 {
		return exchange{status: resp.StatusCode, err: fmt.Errorf("the upstream answered with status %d and no final one", resp.StatusCode)}
	}
	// ReadResponse takes a Connection header with "close" away, and with it what else it names.
	if head := record.kept[:len(record.kept)-reader.Buffered()]; resp.Header.Get("Connection") == "" {
		if values := connectionValues(head); len(values) > 0 {
			resp.Header["Connection"] = values
		}
	}
	record.done, record.kept = true, nil
	limited.N = math.MaxInt64
	a, err := s.readBody(resp.Body, keep)
	if err != nil {
		a.release()
		return exchange{status: resp.StatusCode, err: fmt.Errorf("read the answer's body: %w", err)}
	}
	a.status, a.header = resp.StatusCode, resp.Header
	return exchange{answer: a, status: a.status}
}

// connectionValues are those of the Connection header in a head that was read without error.
func connectionValues(head []byte) []string {
	var out []string
	folded := false
	for line := range bytes.Lines(head) {
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') { // the last one goes on (RFC 9112, section 5.2)
			if folded {
				out[len(out)-1] += " " + string(bytes.TrimSpace(line))
			}
			continue
		}
		name, value, found := bytes.Cut(line, []byte(":"))
		if folded = found && bytes.EqualFold(name, []byte("Connection")); folded {
			out = append(out, string(bytes.TrimSpace(value)))
		}
	}
	return out
}

// readers and pieces are used again: an answer is short, what reads it is not.
var (
	readers = sync.Pool{New: func() any { return bufio.NewReader(nil) }}
	pieces  = sync.Pool{New: func() any { return new([32 << 10]byte) }}
)

// recorder keeps what was read through it, until it is done.
type recorder struct {
	from io.Reader
	kept []byte
	done bool
}

func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if !r.done {
		r.kept = append(r.kept, p[:n]...)
	}
	return n, err
}

// readBody reads to the end and keeps the whole, or the start of what is too long.
func (s *sender) readBody(body io.Reader, keep int64) (*answer, error) {
	a := &answer{}
	taken := int64(0)
	a.release = func() {
		s.memory.give(taken)
		taken = 0
	}
	digest := sha256.New()
	buffer := pieces.Get().(*[32 << 10]byte)
	defer pieces.Put(buffer)
	piece := buffer[:]
	for {
		n, err := body.Read(piece)
		digest.Write(piece[:n])
		a.size += int64(n)
		if !a.cut {
			a.body = append(a.body, piece[:n]...)
			for over := int64(len(a.body)) - keep; over > taken && !a.cut; {
				if int64(len(a.body)) <= s.maxAnswer && s.memory.take(1<<20) {
					taken += 1 << 20
					continue
				}
				a.cut = true
			}
			if a.cut {
				a.body = bytes.Clone(a.body[:keep])
				a.release()
			}
		}
		if errors.Is(err, io.EOF) {
			a.digest = "sha256:" + hex.EncodeToString(digest.Sum(nil))
			return a, nil
		}
		if err != nil {
			return a, err
		}
	}
}

func hostport(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "80"
		if u.Scheme == "https" {
			port = "443"
		}
	}
	return net.JoinHostPort(u.Hostname(), port)
}
