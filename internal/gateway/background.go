// This file is how a call goes on without its caller (Prefer: respond-async, RFC 7240).
//
// What must hold: 202 is answered only after the Reserve is durable, so that the intent
// is in flight, held or settled whatever happens next; what is decided before that is
// answered as always. The call that goes on keeps its place among those that are worked
// on, so there are never more of them, or more of one caller, than of calls whose callers
// wait. One of two answers, the call itself or whoever waits for it, and never both.

package gateway

import (
	"context"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	headerPrefer  = "Prefer"
	headerApplied = "Preference-Applied"

	preferAsync = "respond-async"
	preferWait  = "wait"

	// asyncPatience is how long a call without its caller goes on to make attempts.
	asyncPatience = 10 * time.Minute
	// maxPreferWait bounds what a caller may prefer to wait: nobody waits for days.
	maxPreferWait = 24 * time.Hour
)

// preferences are those of RFC 7240 that count here.
type preferences struct {
	// async: the caller would rather come back than wait.
	async bool
	// wait is how long it waits all the same; waits: it has said so.
	wait  time.Duration
	waits bool
}

// prefers reads what the caller prefers. rest are the preferences that are not for the
// gateway. What cannot be read is left alone, as preferences are: nobody is refused for one.
func prefers(lines []string) (p preferences, rest []string) {
	for _, line := range lines {
		for _, one := range splitQuoted(line, ',') {
			first, _, _ := strings.Cut(one, ";") // a parameter changes nothing here
			name, value, _ := strings.Cut(first, "=")
			switch strings.ToLower(strings.TrimSpace(name)) {
			case preferAsync:
				p.async = true
			case preferWait:
				// Of several the first counts (section 2).
				if n, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 31); err == nil && !p.waits {
					p.wait, p.waits = min(time.Duration(n)*time.Second, maxPreferWait), true
				}
			case "":
			default:
				rest = append(rest, strings.TrimSpace(one))
			}
		}
	}
	return p, rest
}

// splitQuoted splits at a separator that is not within a quoted string.
func splitQuoted(s string, at byte) (parts []string) {
	quoted, from := false, 0
	for i := 0; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++
		case s[i] == '"':
			quoted = !quoted
		case s[i] == at && !quoted:
			parts = append(parts, s[from:i])
			from = i + 1
		}
	}
	return append(parts, s[from:])
}

// prefer takes note of what the caller prefers, and keeps it from the upstream, which
// would otherwise hand off what is handed off here.
func (c *call) prefer(upstream http.Header) {
	lines := c.r.Header[headerPrefer]
	if lines == nil {
		return
	}
	var rest []string
	if c.preferred, rest = prefers(lines); upstream[headerPrefer] == nil {
		return
	}
	delete(upstream, headerPrefer)
	if len(rest) > 0 {
		upstream[headerPrefer] = []string{strings.Join(rest, ", ")}
	}
}

// beforehand is until when a call waits before anything is reserved: who would rather
// come back waits for nobody, unless it has said for how long.
func (c *call) beforehand(until time.Time) time.Time {
	if !c.preferred.async {
		return until
	}
	if own := c.came.Add(c.preferred.wait); own.Before(until) {
		return own
	}
	return until
}

// handOff has the call go on without its caller, now that its attempt is reserved, and
// answers the caller once it has waited for as long as it prefers.
func (c *call) handOff(a guard.Answer, goOn func(*call) *problem) *problem {
	w := &lateWriter{to: c.w, header: http.Header{}}
	b := *c
	b.w, b.r, b.async, b.preferred = w, c.r.WithContext(context.WithoutCancel(c.r.Context())), true, preferences{}
	// The place, the line in the log and the counts are the other's from here on.
	c.place, c.handedOff = nil, true
	c.measured.HandedOff()
	done := make(chan struct{})
	c.g.background.Go(func() {
		defer close(done)
		c.g.running.Add(1)
		defer c.g.running.Add(-1)
		b.goOn(goOn)
	})
	gone := c.r.Context().Done()
	if wait := time.Until(c.came.Add(c.preferred.wait)); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-done:
		case <-timer.C:
		case <-c.g.draining:
		case <-gone:
		}
	}
	if !w.leave() {
		<-done // it is being answered
		return nil
	}
	if c.r.Context().Err() != nil {
		c.abandon()
	}
	c.note(a)
	return c.accept(a)
}

// goOn makes the attempts, and ends the call. A panic in it ends this call alone.
func (c *call) goOn(attempts func(*call) *problem) {
	defer func() {
		if p := recover(); p != nil {
			c.cause = fmt.Errorf("%w: %v", errPanic, p)
			c.g.o.Log.Error(c.cause, "a call panicked after it was handed off", "tool", c.namespace+"/"+c.tool, "stack", string(debug.Stack()))
		}
		_, _ = c.move(nil)
		c.end(time.Since(c.came))
	}()
	if p := attempts(c); p != nil {
		c.refuse(p)
	}
}

// accept answers 202: what is known of the intent, and where to ask for the rest.
func (c *call) accept(a guard.Answer) *problem {
	doc := c.document(a)
	doc.SuggestedAction = actPoll
	doc.Detail = "The payment is being made. It is not done before the state is Succeeded: ask with GET " + doc.Poll + "?wait=30s. " +
		"Do not pay it again, not under another intent ID and not in another way."
	applied := preferAsync
	if c.preferred.waits {
		applied += ", " + preferWait + "=" + strconv.Itoa(int(c.preferred.wait/time.Second))
	}
	return c.show(http.StatusAccepted, doc, http.Header{"Location": {doc.Poll}, headerApplied: {applied}})
}

// drained waits for the calls that go on without their callers.
func (g *Gateway) drained(ctx context.Context) error {
	ended := make(chan struct{})
	go func() {
		g.background.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lateWriter answers the caller if it is still there to be answered by the call itself.
type lateWriter struct {
	to     http.ResponseWriter
	header http.Header

	mu sync.Mutex
	// left: the caller is answered by somebody else. taken: by this one.
	left, taken bool
}

// leave says that the caller is answered by somebody else, unless it is too late for that.
func (w *lateWriter) leave() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left = w.left || !w.taken
	return w.left
}

// take says that the caller is answered here, unless it is too late for that.
func (w *lateWriter) take() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken = w.taken || !w.left
	return w.taken
}

// Header implements http.ResponseWriter.
func (w *lateWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *lateWriter) WriteHeader(status int) {
	if !w.take() {
		return
	}
	to := w.to.Header()
	for name, values := range w.header {
		to[name] = values
	}
	w.to.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *lateWriter) Write(b []byte) (int, error) {
	if !w.take() {
		return len(b), nil
	}
	return w.to.Write(b)
}

// SetWriteDeadline is for http.ResponseController.
func (w *lateWriter) SetWriteDeadline(at time.Time) error {
	if !w.take() {
		return nil
	}
	return http.NewResponseController(w.to).SetWriteDeadline(at)
}
