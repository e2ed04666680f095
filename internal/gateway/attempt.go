// This file is one attempt of a mutating call: a connection that it has to itself, one
// request over HTTP/1.1, one answer read to its end. Nothing here ever sends twice:
// there is no redirect, the request is written by one call, and once a byte of it was
// written no other connection is looked for.

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
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
	// framed: the answer says itself where it ends, and the upstream wants to go on.
	// more: something came behind it.
	framed, more bool
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
	kept      *keeper
	// maxAnswer is the longest body that is kept whole.
	maxAnswer int64
}

// target is where an attempt goes, and what it carries.
type target struct {
	// namespace and tool are whose attempt it is.
	namespace, tool string

	method string
	url    *url.URL
	header http.Header
	body   []byte
	// keep is how much of a longer body is kept.
	keep int64
}

// send makes the attempt. It ends at the latest after timeout and at the deadline, and by nothing else.
func (s *sender) send(ctx context.Context, t target, timeout time.Duration, end deadline) (x exchange) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(timeout, end.Left()))
	defer cancel()

	req := &http.Request{Method: t.method, URL: t.url, Host: t.url.Host, Header: t.header}
	if len(t.body) > 0 {
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(t.body)), int64(len(t.body))
	}
	raw := requests.Get().(*bytes.Buffer)
	defer func() {
		if raw.Cap() <= maxHeader { // a long one would stay for good
			raw.Reset()
			requests.Put(raw)
		}
	}()
	if err := req.Write(raw); err != nil {
		return exchange{err: fmt.Errorf("write the request down: %w", err)}
	}

	to := destination{t.namespace, t.tool, t.url.Scheme, hostport(t.url), s.tls.RootCAs}
	if c := s.reuse(ctx, to, end); c != nil {
		x := s.exchange(ctx, c, to, req, raw.Bytes(), t.keep)
		if x.sent || x.late || ctx.Err() != nil || errors.Is(x.err, errLate) {
			return x
		}
		// It was closed, or not to be trusted, before a byte of the request was written.
	}
	c, err := s.connect(ctx, to, t.url.Hostname(), end)
	if err != nil {
		return exchange{err: inTime(ctx, err)}
	}
	return s.exchange(ctx, c, to, req, raw.Bytes(), t.keep)
}

// inTime names the deadline among an error's causes if it is over.
func inTime(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return err
}

// exchange writes the request and reads the answer. Then the connection is kept or closed.
func (s *sender) exchange(ctx context.Context, c *connection, to destination, req *http.Request, raw []byte, keep int64) (x exchange) {
	c.closeAt(ctx)
	good := false
	defer func() {
		open := c.ends.Stop()
		if !open {
			<-ctx.Done() // it is due at the same moment, and whoever asks is to see that it was the deadline
		}
		x.sent, x.late = c.sent.Load(), c.late.Load()
		if good && open && !x.late {
			s.kept.put(to, c)
		} else {
			_ = c.Close() // it may be closed already
		}
		x.err = inTime(ctx, x.err)
	}()
	c.begin()
	if _, err := c.stream.Write(raw); err != nil {
		return exchange{err: fmt.Errorf("send the request: %w", err)}
	}
	x = s.receive(c.stream, req, keep)
	if x.err != nil {
		return x
	}
	more, reusable := c.unasked()
	if more = more || x.more; more && c.used {
		// Which of the answers is this request's is not known.
		x.answer.release()
		return exchange{status: x.status, err: errors.New("the upstream answered more than it was asked")}
	}
	if good = reusable && x.framed && !more; !good {
		x.err = c.finish()
	}
	return x
}

// receive reads the answer to its end.
func (s *sender) receive(conn io.Reader, req *http.Request, keep int64) (x exchange) {
	r := readers.Get().(*answerReader)
	r.limited = io.LimitedReader{R: conn, N: maxAnswerHeader}
	r.record = recorder{from: &r.limited, kept: r.record.kept[:0]}
	limited, record, reader := &r.limited, &r.record, r.buffered
	reader.Reset(record)
	defer func() {
		reader.Reset(nil)
		if r.limited.R = nil; cap(record.kept) > maxRecorded { // a long one would stay for good
			record.kept = nil
		}
		readers.Put(r)
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
		if values := headValues(head, "Connection"); len(values) > 0 {
			resp.Header["Connection"] = values
		}
	}
	framed := framed(resp, record.kept[:len(record.kept)-reader.Buffered()])
	record.done = true
	limited.N = math.MaxInt64
	a, err := s.readBody(resp.Body, keep)
	if err != nil {
		a.release()
		return exchange{status: resp.StatusCode, err: fmt.Errorf("read the answer's body: %w", err)}
	}
	a.status, a.header = resp.StatusCode, resp.Header
	return exchange{answer: a, status: a.status, framed: framed, more: reader.Buffered() > 0}
}

// framed says whether another answer could follow this one on the connection: the
// upstream keeps it open, and there is one way alone to read where the answer ends.
func framed(resp *http.Response, head []byte) bool {
	switch {
	case resp.Close, !resp.ProtoAtLeast(1, 1), resp.StatusCode < 200, resp.Request.Method == http.MethodHead:
		return false
	case resp.StatusCode == http.StatusNoContent, resp.StatusCode == http.StatusNotModified:
		// They have no body (RFC 9112, section 6.3). Whoever gives its length may send one.
		return len(resp.TransferEncoding) == 0 && len(headValues(head, "Content-Length")) == 0
	case len(resp.TransferEncoding) > 0:
		return len(headValues(head, "Content-Length")) == 0
	default:
		return resp.ContentLength >= 0
	}
}

// headValues are those of a header in a head that was read without error.
func headValues(head []byte, header string) []string {
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
		if folded = found && strings.EqualFold(string(name), header); folded {
			out = append(out, string(bytes.TrimSpace(value)))
		}
	}
	return out
}

// These are used again: an answer is short, what reads it is not.
var (
	requests = sync.Pool{New: func() any { return new(bytes.Buffer) }}
	readers  = sync.Pool{New: func() any { return &answerReader{buffered: bufio.NewReader(nil)} }}
	pieces   = sync.Pool{New: func() any { return new([32 << 10]byte) }}
)

// answerReader reads one answer.
type answerReader struct {
	limited  io.LimitedReader
	record   recorder
	buffered *bufio.Reader
}

// maxRecorded is how much memory for an answer's head is used again.
const maxRecorded = 8 << 10

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
	// What is kept whole is hashed at its end, all at once.
	var digest hash.Hash
	buffer := pieces.Get().(*[32 << 10]byte)
	defer pieces.Put(buffer)
	piece := buffer[:]
	for {
		n, err := body.Read(piece)
		a.size += int64(n)
		if a.cut {
			digest.Write(piece[:n])
		} else {
			a.body = append(a.body, piece[:n]...)
			for over := int64(len(a.body)) - keep; over > taken && !a.cut; {
				if int64(len(a.body)) <= s.maxAnswer && s.memory.take(1<<20) {
					taken += 1 << 20
					continue
				}
				a.cut = true
			}
			if a.cut {
				digest = sha256.New()
				digest.Write(a.body)
				a.body = bytes.Clone(a.body[:keep])
				a.release()
			}
		}
		if errors.Is(err, io.EOF) {
			if a.cut {
				a.digest = intent.DigestText([sha256.Size]byte(digest.Sum(nil)))
			} else {
				a.digest = intent.DigestText(sha256.Sum256(a.body))
			}
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
