// This file is how a call travels: who calls, whether they may, what the tool is,
// what the call is, what the guard says, one attempt, its settlement, the answer.

package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/keyring"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// admitTimeout bounds an Admit that nobody waits for any more, to within admitSpread.
	admitTimeout, admitSpread = 15 * time.Second, time.Second
	// While another call of the intent is in flight, its record is looked at again
	// after the first of these, then less often up to the second.
	waitFirst, waitMost = 25 * time.Millisecond, 250 * time.Millisecond
	// restTimeout bounds how long the server waits for a body that nobody wants any more.
	restTimeout = time.Second
	// later is what a caller is told to wait when nothing better is known.
	later = 2 * time.Second
)

// ownAgent is what upstreams are told where the caller's own name is not forwarded. Nobody changes it.
var ownAgent = []string{"holdfast"}

var (
	// errGone: the caller has left before anything was reserved; nobody is there to be answered.
	errGone = errors.New("the caller has gone")
	// errPanic: a mistake in this code, caught.
	errPanic = errors.New("panic")
)

// consentError is an upstream in a namespace that has not agreed. Nothing was sent.
type consentError struct{ namespace string }

func (e *consentError) Error() string {
	return "the namespace " + e.namespace + " does not let its Services be upstreams of this tool's namespace"
}

// call is one request of an agent.
type call struct {
	g *Gateway
	w http.ResponseWriter
	r *http.Request
	route
	// action is what is asked of an intent of a local tool; empty: it is called, or polled.
	action action
	caller access.Caller
	// ring seals the request, where the tool has it kept.
	ring *keyring.Ring
	// place is what the call takes of the gateway now; nil: nothing.
	place *slots
	// sent is what was read of a settlement's body. whole: it was read to its end.
	sent  []byte
	whole bool

	// preferred is what the caller prefers. async: the call goes on without its caller.
	// handedOff: another one goes on in its place, and ends for it.
	preferred        preferences
	async, handedOff bool

	// What the headers and the log line say of it.
	verdict guard.Verdict
	reason  string
	intent  string
	hold    string
	// state is the record's, as the verdict has found or left it; empty: it is not known.
	state guard.State
	// attempt is the last one of the intent, 0 if there was none; counted: it is known.
	attempt int
	counted bool
	status  int
	cause   error
	// lines are values of the answer's headers, see line.
	lines [6]string
	lined int

	signals
}

// ServeHTTP answers one request.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	started := time.Now()
	c := &call{g: g, w: w, r: r, signals: signals{came: started}}
	defer func() {
		if !c.handedOff {
			c.end(time.Since(started))
		}
	}()
	if p := c.serve(); p != nil {
		c.notSettled(p)
		c.refuse(p)
	}
}

// serve answers by itself, or gives the problem to answer with.
func (c *call) serve() *problem {
	rt, ok, err := parseRoute(c.r.URL.EscapedPath())
	if rt.poll && c.r.Method == http.MethodPost {
		if of, act, is := cutAction(c.r.URL.EscapedPath()); is {
			rt, ok, err = parseRoute(of)
			rt.poll, c.action = false, act
		}
	}
	if !ok {
		return refusal(http.StatusNotFound, "not-found", "There is nothing here", actFixRequest,
			"A tool is called at /v1/namespaces/NAMESPACE/tools/TOOL, an intent is asked for at …/intents/ID.").hangUp()
	}
	c.route = rt
	if p := c.enter(); p != nil {
		return p
	}
	c.trace()
	if err != nil {
		return c.failure(err, nil)
	}
	// Whoever is not allowed to call never comes here: no one else learns which tools exist.
	tool, err := c.g.o.Policies().Tool(c.namespace, c.tool)
	c.exists(err)
	if err != nil {
		return c.noPolicy(err)
	}
	switch {
	case c.action != "":
		return c.local(tool)
	case c.registers():
		return c.register(tool)
	case c.poll:
		return c.answerPoll(tool)
	case tool.Local:
		return notCalled(tool)
	case !slices.Contains(tool.Upstream.Methods, c.r.Method):
		p := refusal(http.StatusBadRequest, "invalid-request", "The method is not declared", actFixRequest,
			"The tool does not take this method: use %s.", strings.Join(tool.Upstream.Methods, " or "))
		p.Reason = "method_not_declared"
		return p
	case !declared(tool.Upstream, c.suffix):
		p := refusal(http.StatusBadRequest, "invalid-request", "The path is not declared", actFixRequest,
			"The tool does not take this path below its own. Leave it out, or use one that the tool declares.")
		p.Reason = "suffix_not_declared"
		return p
	}
	query, err := parseQuery(c.r.URL.RawQuery)
	if err != nil {
		return c.failure(&intent.InvalidError{Field: "query", Reason: "cannot be read: escape it again"}, tool)
	}
	to, err := upstreamURL(tool.Upstream.URL, c.suffix, query)
	if err != nil {
		return c.failure(err, tool)
	}
	defer c.move(nil)
	body, p := c.receive()
	if p != nil {
		return p
	}
	t := target{namespace: tool.Namespace, tool: tool.Name, method: c.r.Method, url: to, header: forwarded(c.r.Header, tool.Upstream.Forwards), body: body, keep: tool.MaxBodyBytes}
	if agent := t.header["User-Agent"]; len(agent) == 0 || agent[0] == "" {
		t.header["User-Agent"] = ownAgent
	}
	if tool.Mutating {
		c.prefer(t.header)
		return c.mutate(tool, t, query)
	}
	return c.read(tool, t)
}

// enter says who calls and whether they may.
func (c *call) enter() *problem {
	caller, err := c.g.o.Access.Authenticate(c.r.Context(), c.r.Header)
	if err == nil {
		c.caller = caller
		err = c.g.o.Access.Authorize(c.r.Context(), caller, c.namespace, c.tool)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, access.ErrUnauthenticated):
		return refusal(http.StatusUnauthorized, "unauthenticated", "It is not known who calls", actAuthenticate, "%s", sentence(err)).hangUp()
	case errors.Is(err, access.ErrForbidden):
		return refusal(http.StatusForbidden, "forbidden", "The caller may not invoke this tool", actAskAccess, "%s", sentence(err)).hangUp()
	default:
		c.cause = err
		if cause := access.Cause(err); cause != nil {
			c.cause = cause
		}
		return refusal(http.StatusServiceUnavailable, "access-unavailable", "Access cannot be checked", actRetryLater,
			"The API server cannot be asked who calls. Nothing was sent. Send the same request with the same intent ID again later.").deny(later)
	}
}

func sentence(err error) string {
	s := err.Error()
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

func (c *call) noPolicy(err error) *problem {
	var notServed *policy.NotServedError
	switch {
	case errors.Is(err, policy.ErrNoTool):
		return refusal(http.StatusNotFound, "no-such-tool", "There is no such tool", actFixRequest,
			"There is no AgentTool %q in the namespace %q. Nothing was sent.", c.tool, c.namespace).hangUp()
	case errors.As(err, &notServed) && notServed.Reason == policy.ReasonPending:
		c.cause = err
		return refusal(http.StatusServiceUnavailable, "policy-not-available", "The tool is not served", actRetryLater,
			"The AgentTool %q is not served yet: %s. Nothing was sent. Send the same request again later.", c.tool, notServed.Message).deny(later)
	case errors.As(err, &notServed):
		c.cause = err
		return refusal(http.StatusServiceUnavailable, "policy-not-available", "The tool is not served", actRetryLater,
			"The AgentTool %q is not accepted (%s: %s). Nothing was sent. Its owner must mend it; its status says more.",
			c.tool, notServed.Reason, notServed.Message).deny(10 * time.Second)
	default:
		c.cause = err
		return refusal(http.StatusServiceUnavailable, "policy-not-available", "The tool is not served", actRetryLater,
			"The policy of the AgentTool %q cannot be read now. Nothing was sent. Send the same request again later.", c.tool).deny(later)
	}
}

// receive reads the body, and then takes a place among the calls that are worked on, so that
// whoever sends slowly takes none from those who have sent. The place is given back by move(nil).
func (c *call) receive() ([]byte, *problem) {
	if ok, own := c.move(c.g.reading); !ok {
		return nil, busy(c.g.reading.each, own)
	}
	began := time.Now()
	body, p := c.body()
	c.reading = time.Since(began)
	if p != nil {
		return nil, p
	}
	if ok, own := c.move(c.g.working); !ok {
		return nil, busy(c.g.working.each, own)
	}
	return body, nil
}

// body reads the request's body within its bounds of size and time.
func (c *call) body() ([]byte, *problem) {
	most := c.g.o.MaxRequestBytes
	tooLarge := func() *problem {
		p := refusal(http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large", actFixRequest,
			"The body has more than %d bytes. Nothing was sent. Make it smaller.", most)
		p.close = true
		return p
	}
	if c.r.ContentLength > most {
		return nil, tooLarge()
	}
	if c.r.Body == http.NoBody {
		c.whole = true
		return nil, nil // a deadline now would look, in the middle of the call, as if the caller had gone
	}
	// The server itself takes the deadline back at the body's end.
	conn := http.NewResponseController(c.w)
	if err := conn.SetReadDeadline(time.Now().Add(c.g.o.BodyTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		c.cause = err
		p := refusal(http.StatusRequestTimeout, "request-timeout", "The body cannot be read", actRetryLater,
			"The connection ended before the body was read. Nothing was sent. Send the same request again.")
		p.close = true
		return nil, p
	}
	body, err := readAll(http.MaxBytesReader(c.w, c.r.Body, most), c.r.ContentLength)
	if c.action == actSettle {
		c.sent = body
	}
	if err == nil {
		c.whole = true
		return body, nil
	}
	var over *http.MaxBytesError
	switch {
	case errors.As(err, &over):
		return nil, tooLarge()
	case errors.Is(err, os.ErrDeadlineExceeded):
		p := refusal(http.StatusRequestTimeout, "request-timeout", "The body came too slowly", actRetryLater,
			"The body was not complete after %s. Nothing was sent. Send the same request again.", c.g.o.BodyTimeout)
		p.close = true
		return nil, p
	default:
		p := refusal(http.StatusBadRequest, "invalid-request", "The body cannot be read", actFixRequest,
			"The body ended too early or is badly framed. Nothing was sent. Send the same request again.")
		p.close = true
		return nil, p
	}
}

// readAll is io.ReadAll for what has this length; less than 0: it is not known.
func readAll(r io.Reader, length int64) ([]byte, error) {
	if length < 0 {
		length = 511
	}
	b := make([]byte, 0, length+1) // one more, to see the end
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case err == io.EOF: // and not one that was wrapped: that is an end too early
			return b, nil
		case err != nil:
			return b, err
		case len(b) == cap(b):
			b = append(b, 0)[:len(b)]
		}
	}
}

// failure is the problem for an error of the call's own, of the guard or of its store.
func (c *call) failure(err error, tool *policy.Tool) *problem {
	var invalid *intent.InvalidError
	if errors.As(err, &invalid) {
		return refusal(http.StatusBadRequest, "invalid-request", "The request cannot be accepted", actFixRequest,
			"Nothing was sent. %s.", strings.TrimSuffix(sentence(invalid), "."))
	}
	c.cause = err
	storeName := ""
	if tool != nil {
		storeName = tool.Store
	}
	switch {
	case errors.Is(err, policy.ErrBusy):
		return refusal(http.StatusServiceUnavailable, "busy", "The gateway is too busy", actRetryLater,
			"What the call is could not be read in time. Nothing was sent. Send the same request with the same intent ID again.").deny(time.Second)
	case errors.Is(err, store.ErrMemoryLost):
		return refusal(http.StatusServiceUnavailable, "memory-lost", "The store lost its memory", actRetryLater,
			"The IdempotencyStore %q no longer has the memory of what was paid. Nothing was sent, and nothing will be until an admin has "+
				"looked at it and accepted the loss (its status says how). Do not pay in another way.", storeName).deny(time.Minute)
	case errors.Is(err, store.ErrNotDurable):
		return refusal(http.StatusServiceUnavailable, "store-not-durable", "The store could forget", actRetryLater,
			"The IdempotencyStore %q could lose the memory of what was paid (its status says how). Nothing was sent, and nothing will be until an admin has "+
				"mended it or accepted that. Send the same request with the same intent ID again later; do not use a new one.", storeName).deny(time.Minute)
	case errors.Is(err, guard.ErrClockJumped):
		return refusal(http.StatusServiceUnavailable, "clock-jumped", "The store's clock has jumped", actRetryLater,
			"The clock of the IdempotencyStore %q is not where it should be (its status says how). Nothing was sent, and nothing will be until an admin has "+
				"set it right or accepted it. Send the same request with the same intent ID again later; do not use a new one.", storeName).deny(time.Minute)
	case errors.Is(err, guard.ErrCorrupt):
		return refusal(http.StatusServiceUnavailable, "record-unreadable", "The record cannot be read", actStop,
			"What is remembered of this intent in the IdempotencyStore %q cannot be read. Nothing was sent by this call, but the payment may have happened before. "+
				"An admin must look at it. Do not pay in another way.", storeName).deny(time.Minute)
	case errors.Is(err, guard.ErrContended):
		return refusal(http.StatusServiceUnavailable, "contended", "Too many calls of one intent", actRetryLater,
			"Too many calls of this intent arrived at once. This one sent nothing. Send the same request with the same intent ID again.").deny(time.Second)
	default:
		return refusal(http.StatusServiceUnavailable, "store-unavailable", "The store is not available", actRetryLater,
			"The IdempotencyStore %q cannot be asked. This call sent nothing. Send the same request with the same intent ID again; do not use a new one.", storeName).deny(later)
	}
}

// misread adds to the refusal of a call that could not be identified why nothing was found in
// its body, where that is JSON and was not read as such.
func (c *call) misread(p *problem, body []byte) *problem {
	if text := bytes.TrimLeft(body, " \t\r\n"); p.Status != http.StatusBadRequest || len(text) == 0 || text[0] != '{' && text[0] != '[' {
		return p
	}
	kind := c.r.Header.Get("Content-Type")
	media, _, _ := mime.ParseMediaType(kind) // one that is none is refused in words of its own
	switch {
	case kind == "":
		p.Detail += " The body was not looked into, since no Content-Type says what it is; send Content-Type: application/json."
	case media == "application/x-www-form-urlencoded":
		p.Detail += " The body was read as a form; send Content-Type: application/json."
	}
	return p
}

// mutate is the way of a call that moves something.
func (c *call) mutate(tool *policy.Tool, t target, query url.Values) *problem {
	id, err := tool.Identify(policy.CallInput{
		Method: c.r.Method, Suffix: c.suffix, Query: query, Header: c.r.Header, Body: t.body, Agent: c.caller.Username,
	})
	c.intent = id.IntentID
	if err != nil {
		return c.misread(c.failure(err, tool), t.body)
	}
	if tool.Key.Argument != "" {
		// Tried before anything is reserved.
		if _, err := withArgument(t.body, tool.Key.Argument, "-"); err != nil {
			return c.failure(err, tool)
		}
	}
	engine, err := c.g.o.Engines.Get(tool.Namespace, tool.Store)
	if err != nil {
		return c.failure(err, tool)
	}
	wanted := tool.CallOf(id, c.caller.Username, c.caller.UID)
	p := c.equip(tool, &t)
	if p == nil && tool.Resume != nil {
		c.ring, p, c.cause = c.g.requestKeys(c.r.Context(), tool)
	}
	if p != nil {
		// Nothing can be sent, so nothing is reserved. What was paid before is told all the same.
		if a, err := engine.Poll(c.r.Context(), wanted.Key); err == nil && c.owns(a) {
			if a.Verdict == guard.Replay && a.Intent.Fingerprint == id.Fingerprint {
				return c.tell(a, tool)
			}
			c.count(a.Intent)
		}
		return p
	}
	c.guarded = true
	return c.attempts(engine, wanted, tool, t)
}

// equip adds the credential and checks the consent: what can be known to be missing before anything is reserved.
func (c *call) equip(tool *policy.Tool, t *target) *problem {
	p, err := c.g.equip(c.r.Context(), tool, t)
	if p != nil {
		c.cause = err
	}
	return p
}

// equip is a call's and a status check's; err is why, and not for callers.
func (g *Gateway) equip(ctx context.Context, tool *policy.Tool, t *target) (p *problem, err error) {
	if ns := g.o.Addresses.serviceNamespace(tool.Upstream.URL.Hostname()); ns != "" && ns != tool.Namespace {
		allowed, err := false, error(nil)
		if g.o.Consent != nil {
			allowed, err = g.o.Consent.Allows(ctx, ns, tool.Namespace)
		}
		if err != nil || !allowed {
			p := refusal(http.StatusBadGateway, "upstream-unreachable", "The upstream may not be called", actStop,
				"Nothing was sent: %s. Its owner must consent first.", (&consentError{ns}).Error()).deny(0)
			p.Reason = "upstream_not_allowed"
			return p, err
		}
	}
	cred := tool.Upstream.Credentials
	if cred == nil {
		return nil, nil
	}
	value, err := "", errors.New("this gateway reads no Secrets")
	if g.o.Credentials != nil {
		value, err = g.o.Credentials.Get(ctx, tool.Namespace, cred.SecretName, cred.SecretKey)
	}
	// A Secret made from a file often ends with a line break; no header can.
	value = cred.Prefix + strings.TrimRight(value, "\r\n")
	if err == nil && (value == cred.Prefix || !httpguts.ValidHeaderFieldValue(value)) {
		err = errors.New("the value is empty or cannot be a header")
	}
	if err != nil {
		return refusal(http.StatusServiceUnavailable, "credentials-not-available", "The tool's credential is not available", actRetryLater,
			"The key %q of the Secret %q in the namespace %q cannot be used as the tool's credential. Nothing was sent. The tool's owner must look at it: "+
				"the Secret must exist, carry the label that allows this use, and be readable for Holdfast.",
			cred.SecretKey, cred.SecretName, tool.Namespace).deny(10 * time.Second), err
	}
	t.header.Set(cred.Header, value)
	return nil, nil
}

// admit asks the guard, and waits for a call of the same intent that is in flight, if the tool wants it so.
func (c *call) admit(engine *guard.Engine, wanted guard.Call, tool *policy.Tool, until time.Time) (guard.Answer, error) {
	gone := c.r.Context().Done()
	p := tool.GuardFor(&wanted)
	wait := waitFirst
	for {
		if c.r.Context().Err() != nil {
			return guard.Answer{}, errGone
		}
		a, err := c.reserve(engine, wanted, tool, p)
		if err == nil && inFlight(a) {
			c.meets()
		}
		if err != nil || !inFlight(a) || !tool.InFlight.Wait {
			return a, err
		}
		// Who waits leaves the work to others. Too many of one caller do not wait.
		if ok, _ := c.move(c.g.waiting); !ok {
			return a, nil
		}
		c.waits()
		for {
			left := time.Until(until)
			if left <= 0 {
				return a, nil
			}
			timer := time.NewTimer(min(wait, left))
			select {
			case <-timer.C:
			case <-gone:
				timer.Stop()
				return guard.Answer{}, errGone
			case <-c.g.draining:
				timer.Stop()
				return a, nil
			}
			wait = min(wait*2, waitMost)
			// Reading is cheaper than asking for a Reserve again and again.
			now, err := engine.Poll(c.r.Context(), a.Intent.Key)
			if err != nil && c.r.Context().Err() != nil {
				return guard.Answer{}, errGone
			}
			if err != nil {
				return now, err
			}
			if inFlight(now) {
				continue
			}
			if ok, _ := c.move(c.g.working); ok {
				break
			}
		}
	}
}

func inFlight(a guard.Answer) bool {
	return a.Verdict == guard.InFlightNow && a.Reason == guard.ReasonInFlight
}

// spend uses the ticket: one attempt, its settlement, the answer. While it is at it the
// caller's leaving changes nothing. If it answers nothing yet, because the call may make
// another attempt, it gives what the guard said.
func (c *call) spend(engine *guard.Engine, tool *policy.Tool, t target, ticket *guard.Ticket) (p *problem, settled guard.Answer, again bool) {
	ctx := dialledFor(context.WithoutCancel(c.r.Context()), tool.Namespace)
	began := time.Now()
	sending, span := c.sends(ctx, "attempt", t.header)
	x := c.g.try(sending, tool, t, ticket)
	if x.answer != nil {
		defer x.answer.release()
	}
	r := result(x, tool, time.Now())
	c.tried(ticket, r, time.Since(began), span)
	if x.err != nil {
		c.cause = x.err
	}
	a, err := engine.Settle(ctx, ticket, r)
	if limited(tool) {
		c.g.queues.freed(nameOf(tool), time.Since(began))
	}
	c.attempt, c.counted = ticket.Attempt, true
	if err != nil {
		// It could not be written down. What is certain is told; of all else nothing is known.
		c.cause = errors.Join(x.err, err)
		return c.tell(guard.Answer{
			Verdict: guard.UnknownHold, Reason: guard.OutcomeUnknown, Reasons: []guard.Reason{guard.OutcomeUnknown},
			Intent: guard.View{Key: ticket.Key, Exists: true},
		}, tool), a, false
	}
	if tool.Retry != nil && a.Again {
		return nil, a, true
	}
	if a.Verdict == guard.Allow && x.answer != nil {
		c.verdict, c.state = guard.Allow, a.Intent.State
		c.pass(x.answer, r.Response.Header, a.RetryAfter)
		return nil, a, false
	}
	return c.tell(a, tool), a, false
}

// try makes the attempt. A panic in it is an outcome like another.
func (g *Gateway) try(ctx context.Context, tool *policy.Tool, t target, ticket *guard.Ticket) (x exchange) {
	defer func() {
		if p := recover(); p != nil {
			g.o.Log.Error(fmt.Errorf("%w: %v", errPanic, p), "an attempt panicked", "tool", tool.Namespace+"/"+tool.Name,
				"attempt", ticket.Attempt, "stack", string(debug.Stack()))
			// How far it came is not known.
			x = exchange{sent: true, err: errPanic}
		}
	}()
	if tool.Key.Header != "" {
		t.header.Set(tool.Key.Header, ticket.ProviderKey)
	}
	if tool.Key.Argument != "" {
		body, err := withArgument(t.body, tool.Key.Argument, ticket.ProviderKey)
		if err != nil {
			return exchange{err: err}
		}
		t.body = body
	}
	return g.sender.send(ctx, t, tool.Upstream.Timeout, ticket)
}

// abandon ends a call whose caller has left. To return without an answer would say
// 200 to whoever is there after all.
func (c *call) abandon() {
	c.cause, c.reason = errGone, "caller_gone"
	panic(http.ErrAbortHandler)
}

// headers sets what is known of the verdict, the intent and its attempts.
func (c *call) headers() {
	h := c.w.Header()
	if c.g.leaving.Load() {
		h.Set("Connection", "close") // over HTTP/2 the server makes a GOAWAY of it
	}
	if c.verdict != "" {
		c.line(h, headerVerdict, string(c.verdict))
	}
	if c.intent == "" {
		return
	}
	c.line(h, headerIntent, headerText(c.intent))
	if c.counted {
		c.line(h, headerAttempt, strconv.Itoa(c.attempt))
	}
	// The status is the upstream's, and says nothing of what the tool's rules have made of it.
	if c.state != "" && (c.verdict == guard.Allow || c.verdict == guard.Replay) {
		c.line(h, headerState, string(c.state))
	}
}

// headerText writes an intent ID into a header: as it is, or escaped as in the poll URL where a header could not carry it.
func headerText(id string) string {
	for i := range len(id) {
		if id[i] < ' ' || id[i] > '~' {
			return url.PathEscape(id)
		}
	}
	return id
}
