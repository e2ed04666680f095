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

// settlement is what an attempt came to, as it is sent.
type settlement struct {
	Attempt           int         `json:"attempt"`
	Fence             string      `json:"fence"`
	Outcome           string      `json:"outcome"`
	Result            *wireResult `json:"result,omitempty"`
	ProviderReference string      `json:"provider_reference,omitempty"`
	Detail            string      `json:"detail,omitempty"`
	RetryAfter        int64       `json:"retry_after,omitempty"`
	SentLate          bool        `json:"sent_late,omitempty"`
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
	for {
		switch e.Step {
		case stepBegun:
			// The process that ran it is gone.
			e.Settlement = c.lookUp(ctx, e)
			e.Step = stepFinished
			if err := c.outbox.put(e); err != nil {
				return Result{}, err
			}
		case stepFinished:
			res, over, err := c.settle(ctx, e)
			if over || err != nil {
				return res, err
			}
		case stepWritten:
			a, res, err := c.claim(ctx, e)
			if a == nil {
				return res, err
			}
			if err := c.run(ctx, e, a, run); err != nil {
				return Result{}, err
			}
		}
	}
}

// lookUp says what became of an attempt whose process is gone.
func (c *Client) lookUp(ctx context.Context, e *entry) *settlement {
	if c.o.LookUp != nil {
		if res, err := c.o.LookUp(ctx, e.begun()); err == nil {
			return e.settlement(res, nil)
		}
	}
	return e.unknown("the process ended while it ran")
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
	return s
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
func (c *Client) claim(ctx context.Context, e *entry) (*Attempt, Result, error) {
	var p pauses
	for {
		asked := time.Now()
		h := e.Intent.headers()
		h.Set(headerClaim, e.Token)
		a, err := c.send(ctx, callTimeout, http.MethodPost, c.intentURL(&e.Intent, actClaim), h, e.Intent.Body)
		switch {
		case err != nil:
			if err := p.again(ctx, 0, err); err != nil {
				return nil, Result{}, err
			}
		case a.status == http.StatusCreated && a.verdict() == verdictAllow:
			at, err := e.claimed(a, asked)
			if err != nil {
				return nil, Result{}, err
			}
			return at, Result{}, nil
		case a.verdict() == verdictReplay:
			res, err := ended(a)
			return nil, res, errors.Join(err, c.outbox.remove(e.key))
		case a.verdict() == verdictDeny && a.refusal().Reason == reasonClaimUsed:
			// The claim whose answer was lost came to its end without having run.
			if err := c.anew(e); err != nil {
				return nil, Result{}, err
			}
		case p.passing(a):
			if err := p.again(ctx, a.retryAfter(), a.refusal()); err != nil {
				return nil, Result{}, err
			}
		default:
			return nil, Result{}, c.refused(e, a)
		}
	}
}

const reasonClaimUsed = "claim_used"

// ended is the result of an intent that is at its end.
func ended(a *answer) (Result, error) {
	res := a.result()
	if a.status >= 400 {
		return Result{}, &FailedError{Result: res}
	}
	return res, nil
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
	e.Step, e.Token, e.Settlement = stepWritten, newToken(), nil
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
func (c *Client) settle(ctx context.Context, e *entry) (res Result, over bool, err error) {
	// The caller may be gone; what has happened is told all the same.
	telling, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.o.SettleFor)
	defer cancel()
	s := e.Settlement
	paid := s.Outcome == succeeded
	mine := s.Result.result()
	mine.ProviderReference = s.ProviderReference
	var p pauses
	for {
		a, err := c.act(telling, e, actSettle, actionTimeout, s)
		if err == nil && a.status == http.StatusOK {
			return c.settled(ctx, e, a, mine)
		}
		if err == nil && s.Result != nil && (a.status == http.StatusBadRequest || a.status == http.StatusRequestEntityTooLarge) {
			// What it came to counts, and not how much of it can be kept.
			s.Result, s.Detail = nil, "its result could not be kept"
			if err := c.outbox.put(e); err != nil {
				return Result{}, true, &UnsettledError{Paid: paid, Result: mine, Err: err}
			}
			continue
		}
		asked := time.Duration(0)
		if err == nil {
			if err, asked = a.refusal(), a.retryAfter(); !p.passing(a) {
				return Result{}, true, &UnsettledError{Paid: paid, Result: mine, Err: err}
			}
		}
		if err := p.again(telling, asked, err); err != nil {
			return Result{}, true, &UnsettledError{Paid: paid, Result: mine, Err: err}
		}
	}
}

// settled goes on from where the intent is now.
func (c *Client) settled(ctx context.Context, e *entry, a *answer, mine Result) (res Result, over bool, err error) {
	var doc struct {
		State      string `json:"state"`
		RetryAfter int64  `json:"retry_after"`
	}
	if err := json.Unmarshal(a.body, &doc); err != nil {
		return Result{}, true, &UnsettledError{Paid: e.Settlement.Outcome == succeeded, Result: mine, Err: err}
	}
	outcome := e.Settlement.Outcome
	if outcome == succeeded {
		return mine, true, c.outbox.remove(e.key)
	}
	if err := c.anew(e); err != nil {
		return Result{}, true, err
	}
	if outcome == retryable && doc.State == "Retryable" {
		// The next attempt is another claim of the same intent.
		var p pauses
		cause := fmt.Errorf("attempt %d moved nothing", e.Attempt)
		return Result{}, false, p.again(ctx, time.Duration(doc.RetryAfter)*time.Second, cause)
	}
	return Result{}, false, nil // the next claim is told what it has come to
}

// Call makes the payment of a tool that Holdfast itself calls, under the same promise:
// the intent is in the outbox before it is sent, and is sent again under its ID until it
// is answered. The errors are those of Do.
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
		a, err := c.send(ctx, callTimeout, method, to, in.headers(), in.Body)
		if err != nil {
			if err := p.again(ctx, 0, err); err != nil {
				return Result{}, err
			}
			continue
		}
		switch v := a.verdict(); {
		case v == verdictReplay, v == verdictAllow && a.retryAfter() == 0:
			res, err := ended(a)
			return res, errors.Join(err, c.outbox.remove(e.key))
		case v == verdictAllow, p.passing(a): // it moved nothing, and may be sent again
			if err := p.again(ctx, a.retryAfter(), a.refusal()); err != nil {
				return Result{}, err
			}
		default:
			return Result{}, c.refused(e, a)
		}
	}
}
