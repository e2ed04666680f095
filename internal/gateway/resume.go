// This file keeps the requests of tools whose unknown outcomes are sent again, and sends
// them again. The guard says when, and what follows.
//
// What must hold: what is sent again is what was sent, byte for byte, to where it was sent,
// under the same key and with the same credential, by a caller that still may and under rules
// that still let it pass. The credential itself is never kept: it
// comes fresh, and a mark in the sealed request tells whether it is the same. Where any of
// that is not so, nothing is sent and a person decides, or the status check does.

package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/keyring"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// maxKept is how long a request may be that is kept.
const maxKept = 64 << 10

// RequestKeys are the keys by which kept requests are sealed.
type RequestKeys interface {
	// Ring gives them as they were a short time ago.
	Ring(ctx context.Context) (*keyring.Ring, error)
	// Reread gives them as they are.
	Reread(ctx context.Context) (*keyring.Ring, error)
}

// keptRequest is a request as it is kept: without its credential and its key.
type keptRequest struct {
	Method string      `json:"method"`
	URL    string      `json:"url"`
	Header http.Header `json:"header"`
	Body   []byte      `json:"body,omitempty"`
}

// requestKeys gives the keys for a call of a tool that needs them.
func (g *Gateway) requestKeys(ctx context.Context, tool *policy.Tool) (*keyring.Ring, *problem, error) {
	err := errors.New("this gateway has no request keys")
	if g.o.RequestKeys != nil {
		var ring *keyring.Ring
		if ring, err = g.o.RequestKeys.Ring(ctx); err == nil {
			return ring, nil, nil
		}
	}
	return nil, refusal(http.StatusServiceUnavailable, "request-keys-not-available", "The keys for kept requests are not available", actRetryLater,
		"The AgentTool %q has unknownOutcome Resume, so its requests are kept encrypted until they are settled, and the keys for that cannot be used now. "+
			"Nothing was sent. An admin must look at it; the tool's status says more. Send the same request with the same intent ID again later.",
		tool.Name).deny(10 * time.Second), err
}

// keeps has the guard keep the request of a call, as it is when an attempt begins.
func (c *call) keeps(wanted *guard.Call, ring *keyring.Ring, tool *policy.Tool, t *target) {
	if size := sizeOf(t); size > maxKept {
		wanted.NotKept = fmt.Sprintf("its request has %d bytes, and one of more than %d is not kept", size, maxKept)
		return
	}
	wanted.Keep = func(bound []byte) ([]byte, error) {
		k := keptRequest{Method: t.method, URL: t.url.String(), Header: withoutWritten(t.header, tool), Body: t.body}
		text, err := json.Marshal(k)
		if err != nil {
			return nil, fmt.Errorf("write the request down: %w", err)
		}
		return ring.Seal(text, credentialOf(t.header, tool), bound)
	}
}

// sizeOf is how long a request is.
func sizeOf(t *target) int {
	size := len(t.url.String()) + len(t.body)
	for name, values := range t.header {
		for _, v := range values {
			size += len(name) + len(v)
		}
	}
	return size
}

// withoutWritten leaves out what the gateway writes anew each time.
func withoutWritten(h http.Header, tool *policy.Tool) http.Header {
	out := make(http.Header, len(h))
	for name, values := range h {
		if slices.Contains(tool.Upstream.RequestHeaders, strings.ToLower(name)) || name == "User-Agent" {
			out[name] = values
		}
	}
	return out
}

// credentialOf is what a request carries of the tool's credential.
func credentialOf(h http.Header, tool *policy.Tool) string {
	if c := tool.Upstream.Credentials; c != nil {
		return h.Get(c.Header)
	}
	return ""
}

// resume sends again what is due of an intent, if it still may be.
func (c *Checker) resume(ctx context.Context, served guard.Served, key guard.Key) {
	g := c.g
	name := key.Namespace + "/" + key.Tool
	m, err := served.Engine.NextResume(ctx, key)
	if err != nil || m == nil {
		if err != nil {
			g.o.Log.V(1).Info("what is to be sent again could not be read; it is tried again", "tool", name, "intentID", key.IntentID, "cause", err.Error())
		}
		return
	}
	fields := []any{"tool", name, "caller", key.Caller, "intentID", key.IntentID, "key", m.ProviderKey[:min(len(m.ProviderKey), keyShown)]}
	tool, t, never, err := g.again(ctx, served, m)
	switch {
	case never != "":
		g.o.Log.Info("not sent again", append(fields, "detail", never)...)
		err = served.Engine.EndResumes(ctx, m, never)
	case err != nil:
		g.o.Log.Info("cannot be sent again now", append(fields, "cause", err.Error())...)
		err = served.Engine.PutOffResume(ctx, m)
	default:
		err = g.resend(ctx, served.Engine, tool, t, m, fields)
	}
	if err != nil {
		g.o.Log.Info("what became of a request that is to be sent again could not be written down; the sweep finds it again", append(fields, "cause", err.Error())...)
	}
}

// again makes the request that is sent again. never says why it is not, and err why it
// cannot be now.
func (g *Gateway) again(ctx context.Context, served guard.Served, m *guard.Resumption) (tool *policy.Tool, t target, never string, err error) {
	tool, err = g.o.Policies().Tool(m.Namespace, m.Tool)
	switch {
	case errors.Is(err, policy.ErrNoTool):
		return nil, t, "the AgentTool does not exist any more", nil
	case err != nil:
		return nil, t, "", err
	case tool.Resume == nil:
		return nil, t, "the AgentTool does not say unknownOutcome Resume any more", nil
	case tool.Resume.Upstream != m.Upstream:
		return nil, t, "the AgentTool's upstream, credential or key is another one than that of the attempt", nil
	case tool.Store != served.Store:
		return nil, t, "the AgentTool has another store", nil
	}
	if never, err := g.mayResend(ctx, tool, m); never != "" || err != nil {
		return nil, t, never, err
	}
	t = target{namespace: tool.Namespace, tool: tool.Name, header: http.Header{}, keep: tool.MaxBodyBytes}
	if p, err := g.equip(ctx, tool, &t); p != nil {
		return nil, t, "", errors.Join(errors.New(p.Title), err)
	}
	credential := credentialOf(t.header, tool)
	text, same, err := g.open(ctx, m, credential)
	switch {
	case errors.Is(err, keyring.ErrNoKey), errors.Is(err, keyring.ErrNotSealed):
		return nil, t, err.Error(), nil
	case err != nil:
		return nil, t, "", err
	case !same:
		return nil, t, "the tool's credential is another one than that of the attempt", nil
	}
	var k keptRequest
	if err := json.Unmarshal(text, &k); err != nil {
		return nil, t, "the kept request cannot be read", nil
	}
	to, err := url.Parse(k.URL)
	if err != nil || to.Scheme != tool.Upstream.URL.Scheme || to.Host != tool.Upstream.URL.Host {
		return nil, t, "the kept request is for another host than the AgentTool's", nil
	}
	if !slices.Contains(tool.Upstream.Methods, k.Method) {
		return nil, t, "the AgentTool does not take the method " + k.Method + " any more", nil
	}
	for name, values := range k.Header {
		if t.header[name] == nil { // the credential is the fresh one
			t.header[name] = values
		}
	}
	t.method, t.url, t.body = k.Method, to, k.Body
	return tool, t, "", nil
}

// mayResend asks what may have changed since the call was let in: the rules of the tool, and
// whether its caller may invoke it. What nobody may send now is not sent because it may have
// been sent before: whether that was paid, a person finds out, or the status check.
func (g *Gateway) mayResend(ctx context.Context, tool *policy.Tool, m *guard.Resumption) (never string, err error) {
	if never, err = m.Forbidden(tool.GuardFor); never != "" || err != nil {
		return never, err
	}
	err = g.o.Access.Authorize(ctx, access.ServiceAccount(m.Caller, m.CallerUID), tool.Namespace, tool.Name)
	if errors.Is(err, access.ErrForbidden) {
		return "its caller may not invoke the tool any more", nil
	}
	return "", err
}

// open opens a kept request. A key that is not known may be a new one.
func (g *Gateway) open(ctx context.Context, m *guard.Resumption, credential string) (text []byte, same bool, err error) {
	if g.o.RequestKeys == nil {
		return nil, false, errors.New("this gateway has no request keys")
	}
	ring, err := g.o.RequestKeys.Ring(ctx)
	if err != nil {
		return nil, false, err
	}
	text, same, err = ring.Open(m.Sealed, credential, m.Bound)
	if !errors.Is(err, keyring.ErrNoKey) {
		return text, same, err
	}
	if ring, err = g.o.RequestKeys.Reread(ctx); err != nil {
		return nil, false, err
	}
	return ring.Open(m.Sealed, credential, m.Bound)
}

// resend makes the attempt.
func (g *Gateway) resend(ctx context.Context, engine *guard.Engine, tool *policy.Tool, t target, m *guard.Resumption, fields []any) error {
	if tool.Retry != nil {
		if _, allowed := g.ratios.retry(tool, time.Now()); !allowed {
			return nil // the next sweep asks again
		}
	}
	m.SettleAfter = max(m.SettleAfter, tool.Guard.SettleAfter)
	ticket, err := engine.BeginResume(ctx, m, tool.Resume.Window)
	if err != nil || ticket == nil {
		return err
	}
	began := time.Now()
	x := g.try(dialledFor(ctx, tool.Namespace), tool, t, ticket)
	if x.answer != nil {
		defer x.answer.release()
	}
	r := result(x, tool, time.Now())
	took := time.Since(began)
	measured := g.o.Metrics.Tool(tool.Namespace, tool.Name)
	measured.Attempt(string(r.Outcome), took)
	measured.Resumed(string(r.Outcome))
	a, err := engine.Settle(ctx, ticket, r)
	if limited(tool) {
		g.queues.freed(nameOf(tool), time.Since(began))
	}
	fields = append(fields, "attempt", ticket.Attempt, "outcome", r.Outcome, "detail", r.Detail, "upstream", elapsed(took), "verdict", a.Verdict, "reason", a.Reason)
	if a.Hold != "" {
		fields = append(fields, "hold", a.Hold)
	}
	if x.err != nil {
		fields = append(fields, "cause", x.err.Error())
	}
	// Somebody may have to look into it, whatever it came to.
	g.o.Evidence.Info("resumed attempt", fields...)
	return err
}
