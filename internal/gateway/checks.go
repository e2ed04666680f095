// This file asks the provider what became of attempts whose outcome is unknown, as their
// tools say, and has those sent again that may be (resume.go). The guard says when, and what follows from an answer.
//
// A check only reads: a GET to the tool's own upstream, over the connections that calls of
// ReadOnly tools use, so that addresses are judged, consents asked for and certificates
// trusted in the same way. What cannot be asked is Unknown, and never "nothing moved".

package gateway

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

const (
	// checkTick is how often it is looked for checks that are due.
	checkTick = 500 * time.Millisecond
	// maxChecks is how many are made at the same time.
	maxChecks = 16
	// maxCheckAnswer is how much of an answer is read.
	maxCheckAnswer = 1 << 20
)

// headerAnswerFrom says of a replay that it is not the upstream's answer to the call.
const headerAnswerFrom = "Holdfast-Answer-From"

// fromCheck is its value if a status check has found the payment.
const fromCheck = "status-check"

// Checker makes the checks of all engines that are served, and sends again what may be. It is a Runnable of
// controller-runtime's manager.
type Checker struct {
	g       *Gateway
	engines func() []guard.Served
	*shares
}

// Checker asks for the gateway's tools. engines are all that are served.
func (g *Gateway) Checker(engines func() []guard.Served) *Checker {
	return &Checker{g: g, engines: engines, shares: newShares(maxChecks)}
}

// NeedLeaderElection is false: every gateway asks, and the records' versions keep them apart.
func (c *Checker) NeedLeaderElection() bool { return false }

// Start makes checks until the process ends. One that is being made ends first: its answer
// is worth having.
func (c *Checker) Start(ctx context.Context) error {
	defer c.end()
	tick := time.NewTicker(checkTick)
	defer tick.Stop()
	for {
		c.pass(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// pass takes on all that is due. What finds no place before the process ends the next sweep
// finds, here or elsewhere.
func (c *Checker) pass(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	type id struct {
		engine *guard.Engine
		key    guard.Key
		resume bool
	}
	for _, served := range c.engines() {
		for _, key := range served.Engine.DueResumes() {
			c.add(key.Namespace, job{id{served.Engine, key, true}, true, func() { c.resume(ctx, served, key) }})
		}
		for _, key := range served.Engine.DueChecks() {
			c.add(key.Namespace, job{id{served.Engine, key, false}, false, func() { c.one(ctx, served, key) }})
		}
	}
}

// one makes the check of an intent, if it is still due.
func (c *Checker) one(ctx context.Context, served guard.Served, key guard.Key) {
	check, err := served.Engine.BeginCheck(ctx, key)
	if err != nil || check == nil {
		if err != nil {
			c.g.o.Log.V(1).Info("a status check could not be begun; it is tried again", "tool", key.Namespace+"/"+key.Tool, "intentID", key.IntentID, "cause", err.Error())
		}
		return
	}
	result, cause := c.g.ask(ctx, check)
	if _, err := c.g.o.Policies().Tool(key.Namespace, key.Tool); !errors.Is(err, policy.ErrNoTool) { // which has no series
		c.g.o.Metrics.Tool(key.Namespace, key.Tool).Check(string(result.Outcome))
	}
	fields := []any{
		"tool", key.Namespace + "/" + key.Tool, "caller", key.Caller, "intentID", key.IntentID, "attempt", check.Attempt,
		"outcome", result.Outcome, "status", result.Status, "detail", result.Detail,
	}
	if cause != nil {
		fields = append(fields, "cause", cause.Error())
	}
	c.g.o.Log.Info("status check", fields...)
	if err := served.Engine.EndCheck(ctx, check, result); err != nil {
		c.g.o.Log.Error(err, "the answer of a status check could not be written down; it is asked for again", fields...)
	}
}

// ask makes one check. It always comes to a result; cause is for the log alone.
func (g *Gateway) ask(ctx context.Context, c *guard.Check) (result guard.CheckResult, cause error) {
	defer func() {
		if p := recover(); p != nil {
			g.o.Log.Error(fmt.Errorf("%w: %v", errPanic, p), "a status check panicked", "tool", c.Namespace+"/"+c.Tool, "stack", string(debug.Stack()))
			result, cause = guard.CheckResult{Outcome: guard.AttemptUnknown, Detail: "the check ended by a mistake in the gateway"}, errPanic
		}
	}()
	unknown := func(detail string, err error) (guard.CheckResult, error) {
		return guard.CheckResult{Outcome: guard.AttemptUnknown, Detail: detail}, err
	}
	tool, err := g.o.Policies().Tool(c.Namespace, c.Tool)
	switch {
	case errors.Is(err, policy.ErrNoTool):
		return unknown("not asked: the AgentTool does not exist", nil)
	case err != nil:
		return unknown("not asked: the AgentTool is not served now", err)
	case tool.Check == nil:
		return unknown("not asked: the AgentTool has no statusCheck any more", nil)
	case tool.Check.Upstream != c.Upstream:
		return unknown("not asked: the AgentTool's upstream, credential or key is another one than that of the attempt", nil)
	}
	to, err := tool.Check.URL(c)
	if err != nil {
		return unknown("not asked: "+err.Error(), nil)
	}
	t := target{namespace: tool.Namespace, tool: tool.Name, method: http.MethodGet, url: to, header: http.Header{
		"User-Agent": {"holdfast"}, "Accept": {"application/json"}, "Cache-Control": {"no-cache"},
	}}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	if p, err := g.equip(ctx, tool, &t); p != nil {
		return unknown("not asked: "+p.Title, err)
	}
	req, err := http.NewRequestWithContext(ctx, t.method, to.String(), nil)
	if err != nil {
		return unknown("not asked: the request cannot be made", err)
	}
	req.Header = t.header
	resp, err := g.reader(tool.Namespace).RoundTrip(req) // follows no redirect
	if err != nil {
		return unknown(describe(exchange{err: inTime(ctx, err)}), err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxCheckAnswer+1))
	if err != nil {
		return unknown("the answer, status "+strconv.Itoa(resp.StatusCode)+", was cut short", err)
	}
	if len(body) > maxCheckAnswer {
		return guard.CheckResult{Outcome: guard.AttemptUnknown, Status: resp.StatusCode, Detail: "the answer is too long to be read"}, nil
	}
	return checked(tool, c, policy.Answer{Status: resp.StatusCode, Header: resp.Header, Body: body}), nil
}

// checked turns a provider's answer into what the guard takes.
func checked(tool *policy.Tool, c *guard.Check, a policy.Answer) guard.CheckResult {
	read := tool.Check.Read(c, a)
	r := guard.CheckResult{Outcome: read.Outcome, Status: a.Status, By: tool.Check.By, Detail: read.Why}
	if r.Outcome != guard.AttemptSucceeded {
		return r
	}
	header := endToEnd(a.Header)
	header.Set(headerAnswerFrom, fromCheck)
	kept := a.Body[:min(int64(len(a.Body)), tool.MaxBodyBytes)]
	digest := sha256.Sum256(a.Body)
	r.Response = &guard.Response{
		Status: a.Status, Header: header, Body: kept,
		Size: int64(len(a.Body)), Digest: intent.DigestText(digest), Truncated: len(kept) < len(a.Body),
	}
	if r.ProviderReference = read.Reference; !read.Named {
		r.ProviderReference = reference(&answer{header: a.Header, body: a.Body})
	}
	return r
}
