// This file is what an operator sees of a call: its one line in the log, what it adds to
// the metrics, and its trace. Nothing here changes what a call comes to.

package gateway

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/tracing"
)

// signals are what is noted of a call on its way.
type signals struct {
	came time.Time
	// span is nil if there are no traces, or it is not known who calls.
	span trace.Span
	// measured counts for the tool; nil: there is none, or it is not known whether the
	// caller may know of it.
	measured *metrics.Tool
	// guarded: the guard was asked.
	guarded bool
	// met: another call of the intent was in flight.
	met bool
	// reading is the time in which the caller sent its body, sending that of the attempts,
	// and waiting that in which another call had to end.
	reading, sending, waiting time.Duration
	// took is the whole of the call, and fields is memory for its line.
	took   time.Duration
	fields [30]any
	since  time.Time
	// outcome is the last attempt's, of this call.
	outcome guard.Outcome
	reasons []guard.Reason
	// unwritten: it was to settle an attempt and was refused, so that the result is on no
	// record; reference is the provider's own name of the payment, as it was told then.
	unwritten bool
	reference string
	// key is what the provider knows the intent by.
	key string
}

// keyShown is how much of a key is logged: enough to find it, and not the key itself.
const keyShown = 16

// exists notes that there is a tool, by what looking it up came to.
func (c *call) exists(err error) {
	known := err == nil
	if !known {
		var notServed *policy.NotServedError
		known = errors.As(err, &notServed)
	}
	if known {
		c.measured = c.g.o.Metrics.Tool(c.namespace, c.tool)
	}
}

// meets notes that another call of the intent is in flight.
func (c *call) meets() {
	if !c.met {
		c.met = true
		c.measured.Conflict()
	}
}

// waits notes that the call waits from now on, and waited that it does no longer.
func (c *call) waits() {
	if c.since.IsZero() {
		c.since = time.Now()
	}
}

func (c *call) waited() {
	if !c.since.IsZero() {
		c.waiting += time.Since(c.since)
		c.since = time.Time{}
	}
}

// trace begins the call's trace. It is called once it is known who calls: nobody else
// has traces made.
func (c *call) trace() {
	ctx, span := c.g.o.Traces.Call(c.r.Context(), c.r.Header, c.came)
	if span != nil {
		c.span, c.r = span, c.r.WithContext(ctx)
	}
}

// sends begins the span of what is sent upstream, whose headers name it; nil: there are
// no traces.
func (c *call) sends(ctx context.Context, name string, h http.Header) (context.Context, trace.Span) {
	if c.span == nil {
		return ctx, nil
	}
	ctx, span := tracing.Child(ctx, name)
	tracing.Inject(ctx, h)
	return ctx, span
}

// tried notes an attempt and what it came to.
func (c *call) tried(ticket *guard.Ticket, r guard.Result, took time.Duration, span trace.Span) {
	c.outcome, c.key = r.Outcome, ticket.ProviderKey
	c.sending += took
	c.measured.Attempt(string(r.Outcome), took)
	if span == nil {
		return
	}
	span.SetAttributes(attribute.Int("holdfast.attempt", ticket.Attempt), attribute.String("holdfast.outcome", string(r.Outcome)))
	if r.Response != nil {
		span.SetAttributes(attribute.Int("http.response.status_code", r.Response.Status))
	}
	if r.Outcome != guard.AttemptSucceeded {
		tracing.Fail(span, string(r.Outcome))
	}
	span.End()
}

// traced ends the call's trace.
func (c *call) traced() {
	if c.span == nil {
		return
	}
	c.span.SetAttributes(
		attribute.String("holdfast.namespace", c.namespace), attribute.String("holdfast.tool", c.tool),
		attribute.String("holdfast.caller", c.caller.Username), attribute.String("holdfast.intent_id", c.intent),
		attribute.String("holdfast.verdict", string(c.verdict)), attribute.String("holdfast.reason", c.reason),
		attribute.Int("http.response.status_code", c.status),
	)
	if c.status >= http.StatusInternalServerError {
		tracing.Fail(c.span, c.reason)
	}
	c.span.End()
}

// end logs and counts the call. took is the whole of it.
func (c *call) end(took time.Duration) {
	c.log(took)
	c.traced()
	verdict := string(c.verdict)
	switch {
	case c.measured == nil:
		c.g.o.Metrics.Refused(verdict, c.reason)
	case c.registers():
		c.measured.Register(verdict)
	case c.poll:
		c.measured.Poll(verdict)
	case c.action == actRenew, c.action == actSettle:
		// They belong to a call that was counted when it was claimed.
	default:
		c.measured.Call(verdict, c.reason)
		// Beside OutcomeUnknown it is about the provider's key, and no answer is gone.
		if c.verdict == guard.UnknownHold && slices.Contains(c.reasons, guard.KeyExpired) && !slices.Contains(c.reasons, guard.OutcomeUnknown) {
			c.measured.Expired()
		}
		if c.guarded {
			c.measured.Guarded(took - c.reading - c.sending - c.waiting)
		}
	}
}

// evidence says that somebody may have to look into this call later: its line must not be
// left out, however many there are.
func (c *call) evidence() bool {
	if c.action == actSettle && (c.cause != nil || c.unwritten) {
		return true // a result that is not on its record
	}
	return !c.poll && (c.verdict == guard.UnknownHold || c.verdict == guard.Conflict || c.outcome != "" && c.outcome != guard.AttemptSucceeded)
}

// These are written as text only if their line is written, and take no memory of their own
// before: most lines of a busy gateway are left out.
type (
	elapsed  time.Duration
	word     string
	toolWord route
	keyWord  string
)

func (e *elapsed) String() string  { return time.Duration(*e).String() }
func (w *word) String() string     { return string(*w) }
func (t *toolWord) String() string { return t.namespace + "/" + t.tool }
func (k *keyWord) String() string  { return string((*k)[:min(len(*k), keyShown)]) }

// log writes the one line of a call. Never bodies, headers or secrets.
func (c *call) log(took time.Duration) {
	to := c.g.o.Log
	if c.evidence() {
		to = c.g.o.Evidence
	}
	c.took = took
	fields := append(c.fields[:0],
		"tool", (*toolWord)(&c.route), "caller", (*word)(&c.caller.Username), "intentID", (*word)(&c.intent), "key", (*keyWord)(&c.key),
		"verdict", (*word)(&c.verdict), "reason", (*word)(&c.reason), "attempt", c.attempt, "status", c.status, "took", (*elapsed)(&c.took))
	if c.outcome != "" {
		fields = append(fields, "outcome", (*word)(&c.outcome), "upstream", (*elapsed)(&c.sending))
	}
	if c.reference != "" {
		fields = append(fields, "providerReference", c.reference)
	}
	if c.async {
		fields = append(fields, "async", true)
	}
	switch {
	case c.registers():
		fields = append(fields, "register", true)
	case c.poll:
		fields = append(fields, "poll", true)
	}
	if c.action != "" {
		fields = append(fields, "action", c.action)
	}
	if c.hold != "" {
		fields = append(fields, "hold", c.hold, "reasons", reasonTexts(c.reasons))
	}
	if id := tracing.ID(c.span, c.r.Header); id != "" {
		fields = append(fields, "traceID", id)
	}
	if c.cause != nil {
		fields = append(fields, "cause", c.cause.Error())
	}
	to.Info("call", fields...)
}

// places are how many calls are where.
func (g *Gateway) places() metrics.Places {
	p := metrics.Places{
		Reading: g.reading.count(), Working: g.working.count(), Waiting: g.waiting.count(), Limit: g.o.MaxCalls, Async: int(g.running.Load()),
		Queued: map[metrics.Name]int{},
	}
	for of, n := range g.queues.lengths() {
		p.Queued[metrics.Name{Namespace: of.namespace, Name: of.tool}] = n
	}
	return p
}
