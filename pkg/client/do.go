// This file is what becomes of one intent: an entry of the outbox goes from step to step,
// wherever an earlier process has left it, until it is at its end or a person must decide.

package client

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Func moves the money. It must send with the context that it gets, which ends with the
// attempt's time, and should look at InTime right before it sends. It should give the
// provider the attempt's key.
//
// A nil error means that it was paid. *NothingMoved and *Accepted say what else is known;
// any other error means that nobody knows, and a person must decide.
type Func func(ctx context.Context, a *Attempt) (Result, error)

// settlement is what an attempt came to, as it is sent. The result is the last: of a settlement
// that is refused the beginning may be all that the gateway reads, and logs.
type settlement struct {
	Attempt           int         `json:"attempt"`
	Fence             string      `json:"fence"`
	Outcome           string      `json:"outcome"`
	ProviderReference string      `json:"provider_reference,omitempty"`
	Detail            string      `json:"detail,omitempty"`
	RetryAfter        int64       `json:"retry_after,omitempty"`
	SentLate          bool        `json:"sent_late,omitempty"`
	Result            *wireResult `json:"result,omitempty"`
}

type wireResult struct {
	Status      int    `json:"status"`
	ContentType string `json:"content_type,omitempty"`
	BodyBase64  string `json:"body_base64,omitempty"`
}

const (
	succeeded = "Succeeded"
	failed    = "Failed"
	retryable = "Retryable"
	pending   = "Pending"
	unknown   = "Unknown"
)

// Do makes the payment once: by this run of the function, or by an earlier one whose
// result it returns. It claims an attempt, runs the function, renews the lease while that
// runs, and settles what it came to. Where nothing has moved it tries again, for as long
// as the tool's retry budget and the context allow.
//
// The error is a *FailedError if nothing was paid and nothing will be; a *Refusal if it may
// not be made, or not now (ErrHeld, ErrConflict, ErrDenied, ErrRefused); an *UnsettledError
// if it has run and Holdfast could not be told; or that of the context. Except for the
// first, the same intent may be done again.
func (c *Client) Do(ctx context.Context, in Intent, run Func) (Result, error) {
	if run == nil {
		return Result{}, errors.New("there is no function to run")
	}
	end, err := c.enter(ctx, outboxKey(c.o.Namespace, in.Tool, in.ID))
	if err != nil {
		return Result{}, err
	}
	defer end()
	e, err := c.begin(in, false)
	if err != nil {
		return Result{}, err
	}
	return c.do(ctx, c.unhurried(ctx), e, run)
}

// turn bounds what is spent on one intent. What runs is not bounded by it.
type turn struct {
	// waits ends with the time to wait for anything but the function.
	waits context.Context
	// request is how long a claim or a call may take, settle how long a result is offered.
	request, settle time.Duration
}

// unhurried is the turn of an intent that keeps back no other.
func (c *Client) unhurried(ctx context.Context) turn {
	return turn{waits: ctx, request: callTimeout, settle: c.o.SettleFor}
}

// do is Do for an entry of the outbox.
func (c *Client) do(ctx context.Context, t turn, e *entry, run Func) (Result, error) {
	for {
		if res, over, err := c.bring(ctx, t, e); over || err != nil {
			return res, err
		}
		if e.wait > 0 {
			// The next attempt is another claim of the same intent.
			var p pauses
			if err := p.again(t.waits, e.wait, fmt.Errorf("attempt %d moved nothing", e.Attempt)); err != nil {
				return Result{}, err
			}
			e.wait = 0
		}
		a, res, err := c.claim(ctx, t, e)
		if a == nil {
			return res, err
		}
		if err := c.run(ctx, t, e, a, run); err != nil {
			return Result{}, err
		}
	}
}

// bring has what ran settled, and leaves an entry that may be claimed. over: there is
// nothing more to do.
func (c *Client) bring(ctx context.Context, t turn, e *entry) (res Result, over bool, err error) {
	if e.Step == stepBegun {
		// The process that ran it is gone.
		s, err := c.lookUp(t.waits, e)
		if err != nil {
			return Result{}, true, err
		}
		e.Step, e.Settlement = stepFinished, s
		if err := c.outbox.put(e); err != nil {
			return Result{}, true, err
		}
	}
	if e.Step == stepFinished {
		return c.settle(ctx, t, e)
	}
	return Result{}, false, nil
}

// lookUp says what became of an attempt whose process is gone. Whoever was not given the
// time to ask knows nothing yet, and says so.
func (c *Client) lookUp(ctx context.Context, e *entry) (*settlement, error) {
	if c.o.LookUp != nil {
		res, err := c.o.LookUp(ctx, e.begun())
		if err == nil {
			return e.settlement(res, nil), nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("the process ended while it ran, and what came of it could not be looked up in time: %w", errors.Join(context.Cause(ctx), err))
		}
	}
	return e.unknown("the process ended while it ran"), nil
}

func (e *entry) unknown(detail string) *settlement {
	return &settlement{Attempt: e.Attempt, Fence: e.Fence, Outcome: unknown, Detail: detail}
}

// settlement reads what a function has returned. Whatever is not clear is unknown.
func (e *entry) settlement(res Result, err error) *settlement {
	s := e.unknown("")
	var nothing *NothingMoved
	var accepted *Accepted
	switch {
	case err == nil:
		r := wire(res)
		if r.Status < 200 || r.Status > 299 {
			s.Detail = fmt.Sprintf("the function returned no error, and the status %d", r.Status)
			return s
		}
		s.Outcome, s.Result = succeeded, r
		if s.ProviderReference = res.ProviderReference; !isReference(s.ProviderReference) {
			s.ProviderReference, s.Detail = "", "the provider's reference cannot be written down"
		}
	case errors.As(err, &nothing):
		s.Outcome, s.Detail = failed, nothing.Reason
		if nothing.Again {
			s.Outcome, s.RetryAfter = retryable, int64((max(nothing.After, 0)+time.Second-1)/time.Second)
			s.RetryAfter = min(s.RetryAfter, int64(24*time.Hour/time.Second))
		}
		if nothing.Result != nil {
			if s.Result = wire(*nothing.Result); s.Result.Status < 400 || s.Result.Status > 599 {
				s.Result = nil
			}
		}
	case errors.As(err, &accepted):
		s.Outcome = pending
		if isReference(accepted.Reference) {
			s.ProviderReference = accepted.Reference
		}
	default:
		// Its text may hold what nobody should read.
		s.Detail = fmt.Sprintf("the function returned an error of type %T", err)
	}
	s.Detail = clip(s.Detail)
	return s
}

// maxDetail is how much of a detail is told: more of it would not be kept, and a very long
// one would keep the settlement itself from being taken.
const maxDetail = 512

func clip(s string) string {
	if len(s) > maxDetail {
		return strings.ToValidUTF8(s[:maxDetail], "") + "…"
	}
	return s
}

// result is what the attempt came to, for people and callers.
func (s *settlement) result() Result {
	res := s.Result.result()
	res.ProviderReference = s.ProviderReference
	return res
}

func isReference(s string) bool {
	return len(s) <= 128 && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

func wire(res Result) *wireResult {
	r := &wireResult{Status: res.Status, ContentType: res.ContentType, BodyBase64: base64.StdEncoding.EncodeToString(res.Body)}
	if r.Status == 0 {
		if r.Status = http.StatusOK; len(res.Body) == 0 {
			r.Status = http.StatusNoContent
		}
	}
	return r
}

func (r *wireResult) result() Result {
	if r == nil {
		return Result{}
	}
	body, _ := base64.StdEncoding.DecodeString(r.BodyBase64) // of our own making
	return Result{Status: r.Status, ContentType: r.ContentType, Body: body}
}

// claim asks for an attempt. Without one it gives what to return.
func (c *Client) claim(ctx context.Context, t turn, e *entry) (*Attempt, Result, error) {
	var p pauses
	for {
		asked := time.Now()
		h := e.Intent.headers()
		h.Set(headerClaim, e.Token)
		a, err := c.send(ctx, t.request, http.MethodPost, c.intentURL(&e.Intent, actClaim), h, e.Intent.Body)
		switch {
		case err != nil:
			if err := p.again(t.waits, 0, err); err != nil {
				return nil, Result{}, err
			}
		case a.status == http.StatusCreated && a.verdict() == verdictAllow:
			at, err := e.claimed(a, asked)
			if err != nil {
				return nil, Result{}, err
			}
			return at, Result{}, nil
		case a.verdict() == verdictReplay:
			res, over, err := c.ended(e, a)
			if over || err != nil {
				return nil, res, err
			}
			if err := p.again(t.waits, a.retryAfter(), notEnded(a)); err != nil {
				return nil, Result{}, err
			}
		case a.verdict() == verdictDeny && a.refusal().Reason == reasonClaimUsed:
			// The claim whose answer was lost came to its end without having run.
			if err := c.anew(e); err != nil {
				return nil, Result{}, err
			}
		case p.passing(a):
			if err := p.again(t.waits, a.retryAfter(), a.refusal()); err != nil {
				return nil, Result{}, err
			}
		default:
			return nil, Result{}, c.refused(e, a)
		}
	}
}

const (
	reasonClaimUsed  = "claim_used"
	reasonMarkedPaid = "marked_paid"
)

// ended is the result of an intent that is at its end, by what Holdfast says of its record:
// the status is the tool's, and the tool's rules may read any of them in any way. over: it
// has ended, and has left the outbox.
func (c *Client) ended(e *entry, a *answer) (res Result, over bool, err error) {
	switch a.state() {
	case stateSucceeded:
		return a.result(), true, c.outbox.remove(e.key)
	case stateFailed:
		return Result{}, true, errors.Join(&FailedError{Result: a.result()}, c.outbox.remove(e.key))
	case "":
		// Nothing is taken for an end that is not called one.
		return Result{}, false, fmt.Errorf("the answer (%d, %s) does not say in %s what became of the intent, so it stays in the outbox: "+
			"the tool is ReadOnly, something on the way drops Holdfast's headers, or this Holdfast is older than the client", a.status, a.verdict(), headerState)
	}
	return Result{}, false, nil
}

func notEnded(a *answer) error {
	return fmt.Errorf("it is %s, with the answer %d", a.state(), a.status)
}

// refused is the error of a call that is not made. What cannot be made any more under this
// ID leaves the outbox.
func (c *Client) refused(e *entry, a *answer) error {
	r := a.refusal()
	over := r.Status == http.StatusBadRequest || r.Status == http.StatusRequestEntityTooLarge || r.Verdict == verdictConflict || r.Verdict == verdictDeny
	switch {
	case over:
		return errors.Join(r, c.outbox.remove(e.key))
	case r.Verdict == verdictHold:
		// The next claim is another one: this one may be what is held.
		return errors.Join(r, c.anew(e))
	}
	return r
}

// anew gives the entry back to where nothing runs, with a token of its own.
func (c *Client) anew(e *entry) error {
	e.Step, e.Token, e.Settlement, e.Answered = stepWritten, newToken(), nil, ""
	return c.outbox.put(e)
}

// claimed reads the right to run.
func (e *entry) claimed(a *answer, asked time.Time) (*Attempt, error) {
	var doc struct {
		Attempt     int    `json:"attempt"`
		Fence       string `json:"fence"`
		RunForMS    int64  `json:"run_for_ms"`
		ProviderKey string `json:"provider_key"`
	}
	if err := json.Unmarshal(a.body, &doc); err != nil || doc.Attempt < 1 || doc.Fence == "" {
		return nil, fmt.Errorf("the answer to the claim cannot be read: %w", errors.Join(err, a.refusal()))
	}
	e.Attempt, e.Fence, e.ProviderKey = doc.Attempt, doc.Fence, doc.ProviderKey
	at := &Attempt{Intent: e.Intent, Number: doc.Attempt, ProviderKey: doc.ProviderKey}
	at.lasts(asked, time.Duration(doc.RunForMS)*time.Millisecond)
	return at, nil
}

// settle brings the result. over: there is nothing more to do.
func (c *Client) settle(ctx context.Context, t turn, e *entry) (res Result, over bool, err error) {
	// The caller may be gone; what has happened is told all the same.
	telling, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.settle)
	defer cancel()
	s := e.Settlement
	s.Detail = clip(s.Detail)
	mine := s.result()
	unsettled := func(err error) (Result, bool, error) {
		return Result{}, true, &UnsettledError{Paid: s.Outcome == succeeded, Result: mine, Answered: e.Answered, NotWritten: e.unwritten, Err: err}
	}
	var p pauses
	for {
		asked := time.Duration(0)
		a, err := c.act(telling, e, actSettle, actionTimeout, s)
		if err == nil {
			if doc := a.settled(); doc != nil {
				return c.settled(e, doc, mine)
			}
			r := a.refusal()
			switch {
			case a.status == http.StatusOK: // somebody else's: it may be Holdfast's the next time
			case s.Result != nil && (a.status == http.StatusBadRequest || a.status == http.StatusRequestEntityTooLarge):
				// What it came to counts, and not how much of it can be kept.
				s.Result, s.Detail = nil, clip(strings.TrimSuffix("its result could not be kept: "+s.Detail, ": "))
				if err := c.rewrite(e); err != nil {
					return unsettled(err)
				}
				continue
			case r.never():
				e.Answered = r.Error()
				return unsettled(errors.Join(r, c.rewrite(e)))
			case !p.passing(a):
				return unsettled(r)
			}
			err, asked = r, r.RetryAfter
		}
		if err := p.again(telling, asked, err); err != nil {
			return unsettled(err)
		}
	}
}

// rewrite writes an entry over its like: where that fails, the outbox has what it had.
func (c *Client) rewrite(e *entry) error {
	was := e.unwritten
	err := c.outbox.put(e)
	if err != nil {
		e.unwritten = was
	}
	return err
}

// settledDocument is Holdfast's word that a result is on the record.
type settledDocument struct {
	State      string `json:"state"`
	RetryAfter int64  `json:"retry_after"`
}

// settled reads it; nil: the answer is none. A 200 alone may be a proxy's.
func (a *answer) settled() *settledDocument {
	var doc settledDocument
	if a.status != http.StatusOK || a.verdict() == "" || json.Unmarshal(a.body, &doc) != nil || doc.State == "" {
		return nil
	}
	return &doc
}

// settled goes on from where the intent is now.
func (c *Client) settled(e *entry, doc *settledDocument, mine Result) (res Result, over bool, err error) {
	outcome := e.Settlement.Outcome
	if outcome == succeeded {
		return mine, true, c.outbox.remove(e.key)
	}
	if err := c.anew(e); err != nil {
		return Result{}, true, err
	}
	if outcome == retryable && doc.State == stateRetryable {
		e.wait = max(time.Duration(doc.RetryAfter)*time.Second, pauseFirst)
	}
	return Result{}, false, nil // the next claim is told what it has come to
}

// Call makes the payment of a tool that Holdfast itself calls, under the same promise:
// the intent is in the outbox before it is sent, and is sent again under its ID until
// Holdfast says that it has come to its end. Whether it was paid is read from Holdfast's
// word and not from the status, which is the tool's own. The errors are those of Do.
func (c *Client) Call(ctx context.Context, in Intent) (Result, error) {
	end, err := c.enter(ctx, outboxKey(c.o.Namespace, in.Tool, in.ID))
	if err != nil {
		return Result{}, err
	}
	defer end()
	e, err := c.begin(in, true)
	if err != nil {
		return Result{}, err
	}
	return c.call(ctx, c.unhurried(ctx), e)
}

// call is Call for an entry of the outbox.
func (c *Client) call(ctx context.Context, t turn, e *entry) (Result, error) {
	in := &e.Intent
	method := in.Method
	if method == "" {
		method = http.MethodPost
	}
	to := c.base + in.Tool + in.Suffix
	if len(in.Query) > 0 {
		to += "?" + in.Query.Encode()
	}
	var p pauses
	for {
		a, err := c.send(ctx, t.request, method, to, in.headers(), in.Body)
		if err != nil {
			if err := p.again(t.waits, 0, err); err != nil {
				return Result{}, err
			}
			continue
		}
		switch v := a.verdict(); {
		case v == verdictReplay, v == verdictAllow:
			res, over, err := c.ended(e, a)
			if over || err != nil {
				return res, err
			}
			// It moved nothing and may be sent again, or goes on without this call.
			if err := p.again(t.waits, a.retryAfter(), notEnded(a)); err != nil {
				return Result{}, err
			}
		case p.passing(a):
			if err := p.again(t.waits, a.retryAfter(), a.refusal()); err != nil {
				return Result{}, err
			}
		default:
			return Result{}, c.refused(e, a)
		}
	}
}
