// This file writes the answers: the upstream's, live or replayed, and refusals.

package gateway

import (
	"net/http"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// owns says that an answer speaks of an intent of this caller, and not of an earlier
// ServiceAccount of the same name.
func (c *call) owns(a guard.Answer) bool {
	return a.Intent.Exists && a.Intent.Caller == c.caller.Username && a.Intent.CallerUID == c.caller.UID
}

// note takes over what the guard says for headers and log.
func (c *call) note(a guard.Answer) {
	c.verdict, c.reason, c.reasons, c.hold = a.Verdict, string(a.Reason), a.Reasons, a.Hold
	if a.Intent.Caller == c.caller.Username && (a.Intent.CallerUID == "" || a.Intent.CallerUID == c.caller.UID) {
		c.intent, c.key = a.Intent.IntentID, a.Intent.ProviderKey
		c.state = a.Intent.State
		if a.Reason != guard.ReasonCaller { // of which the guard shows no attempts
			c.count(a.Intent)
		}
	}
}

// count takes over how many attempts an intent of this caller has had.
func (c *call) count(v guard.View) {
	c.counted = true
	if n := len(v.Attempts); n > 0 {
		c.attempt = v.Attempts[n-1].Number
	}
}

// tell answers with what the guard says: a replay, or a problem.
func (c *call) tell(a guard.Answer, tool *policy.Tool) *problem {
	if a.Response != nil && !c.owns(a) {
		// An exact match of a ServiceAccount that had the same name: its answer is not this caller's.
		a = guard.Answer{Verdict: guard.Conflict, Reason: guard.ReasonCaller}
	}
	c.note(a)
	if (a.Verdict == guard.Replay || a.Verdict == guard.Allow) && a.Response != nil {
		c.replay(a.Response, a.Verdict == guard.Replay, a.RetryAfter)
		return nil
	}
	if a.Verdict == guard.InFlightNow && a.Reason == guard.ReasonInFlight {
		a.RetryAfter = tool.InFlight.RetryAfter
	}
	if a.Verdict == guard.InFlightNow && a.RetryAfter <= 0 {
		a.RetryAfter = time.Second
	}
	if a.Verdict == guard.Replay {
		c.w.Header().Set(headerReplayed, "true")
	}
	return fromGuard(a, c.caller)
}

// refuse writes a problem.
func (c *call) refuse(p *problem) {
	c.status = p.Status
	if p.Verdict != "" {
		c.verdict = p.Verdict
	}
	if c.reason == "" {
		c.reason = p.Reason
	}
	if p.Intent == "" {
		p.Intent = c.intent
	}
	if !c.whole && c.r.Body != http.NoBody {
		// After the answer the server reads what is left of the body, so that the caller
		// can read the answer: without a deadline for as long as it may take.
		_ = http.NewResponseController(c.w).SetReadDeadline(time.Now().Add(restTimeout)) // not every ResponseWriter has one
	}
	c.headers()
	c.deadline()
	p.write(c.w)
}

// line sets a header whose name is canonical. The first ones that a call answers with have
// their values in its own memory.
func (c *call) line(h http.Header, name, value string) {
	values := []string(nil)
	if n := c.lined; n < len(c.lines) {
		values = c.lines[n : n+1 : n+1]
		c.lined++
	} else {
		values = make([]string, 1)
	}
	values[0] = value
	h[name] = values
}

// deadline bounds how long the caller may take to take its answer.
func (c *call) deadline() {
	_ = http.NewResponseController(c.w).SetWriteDeadline(time.Now().Add(c.g.o.AnswerTimeout)) // not every ResponseWriter has one
}

// write answers with a status, headers and a body that are the upstream's.
func (c *call) write(status int, header http.Header, body []byte, wait time.Duration) {
	h := c.w.Header()
	for name, values := range header {
		h[name] = values // nobody changes them
	}
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // the upstream named none, and none is guessed
	}
	if wait > 0 {
		h.Set("Retry-After", strconv.Itoa(seconds(wait)))
	}
	c.status = status
	c.headers()
	c.deadline()
	// A status without a body takes no length either.
	if status != http.StatusNoContent && status != http.StatusNotModified && c.r.Method != http.MethodHead {
		c.line(h, "Content-Length", strconv.Itoa(len(body)))
	} else {
		body = nil
	}
	c.w.WriteHeader(status)
	if len(body) > 0 {
		_, _ = c.w.Write(body) // the caller may be gone
	}
}

// truncated marks an answer that is only the start of the upstream's.
func (c *call) truncated(size int64, digest string) {
	h := c.w.Header()
	h.Set(headerTruncated, "true")
	h.Set(headerSize, strconv.FormatInt(size, 10))
	h.Set(headerDigest, digest)
}

// pass answers with what the upstream has just answered; header is what the caller gets of its headers.
func (c *call) pass(a *answer, header http.Header, wait time.Duration) {
	if a.cut {
		c.truncated(a.size, a.digest)
	}
	c.write(a.status, header, a.body, wait)
}

// replay answers with what the record keeps.
func (c *call) replay(stored *guard.Response, again bool, wait time.Duration) {
	if again {
		c.line(c.w.Header(), headerReplayed, "true")
	}
	if stored.Truncated {
		c.truncated(stored.Size, stored.Digest)
	}
	c.write(stored.Status, stored.Header, stored.Body, wait)
}
