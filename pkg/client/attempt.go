// This file is the running of a function: how long it may run, how the lease is renewed
// meanwhile, and what is made of how it ends.

package client

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// renewPart is which part of its time goes by before a lease is renewed, lookEvery how
// often at least it is looked at the clocks.
const (
	renewPart = 3
	lookEvery = time.Second
)

// Attempt is one run of a function.
type Attempt struct {
	Intent Intent
	// Number counts the attempts of the intent.
	Number int
	// ProviderKey is the intent's stable key at the provider: the same for every attempt.
	// Give it to the provider as its idempotency key, if it takes one.
	ProviderKey string

	mu       sync.Mutex
	began    time.Time // of the time that is running
	deadline time.Time
}

// lasts sets the time, from when it was asked for.
func (a *Attempt) lasts(asked time.Time, d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.began, a.deadline = asked, asked.Add(d)
}

// InTime says that the attempt's time is not over, by the monotonic clock and by the wall
// clock: the first stands still while a machine sleeps.
func (a *Attempt) InTime() bool { return a.left() > 0 }

func (a *Attempt) left() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	return min(a.deadline.Sub(now), a.deadline.Round(0).Sub(now.Round(0)))
}

// untilRenewal is the time until the lease should be renewed.
func (a *Attempt) untilRenewal() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return time.Until(a.began.Add(a.deadline.Sub(a.began) / renewPart))
}

// run runs the function and writes down what it came to. The error is that of the outbox.
func (c *Client) run(ctx context.Context, t turn, e *entry, a *Attempt, f Func) error {
	e.Step = stepBegun
	if err := c.outbox.put(e); err != nil {
		// It has not begun, and nobody will know that it did.
		e.Step, e.Settlement = stepFinished, e.settlement(Result{}, &NothingMoved{Reason: "the outbox could not be written, so it did not run", Again: true})
		_, _, _ = c.settle(ctx, t, e)
		return err
	}
	if !a.InTime() || ctx.Err() != nil {
		c.finish(e, e.settlement(Result{}, &NothingMoved{Reason: "its time, or its caller's, was over before it began", Again: true}))
		return nil
	}
	running, stop := context.WithCancelCause(ctx)
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		c.keep(running, stop, e, a)
	}()
	end := func(s *settlement) {
		s.SentLate = !a.InTime()
		stop(nil)
		<-kept
		c.finish(e, s)
	}
	returned := false
	defer func() {
		if returned {
			return
		}
		// It panicked, or ended its goroutine. How far it had come is not known. The outbox
		// has it, and so has Holdfast, as far as they can be told now.
		end(e.unknown("the function panicked"))
		_, _, _ = c.settle(ctx, t, e)
	}()
	res, err := f(running, a)
	returned = true
	end(e.settlement(res, err))
	return nil
}

// finish writes down what the function came to.
func (c *Client) finish(e *entry, s *settlement) {
	e.Step, e.Settlement = stepFinished, s
	// Where it cannot be written it is told all the same (the entry knows); a crash now makes
	// it unknown.
	_ = c.outbox.put(e)
}

// keep renews the lease until the function ends, and ends the function with the lease.
func (c *Client) keep(ctx context.Context, stop context.CancelCauseFunc, e *entry, a *Attempt) {
	renews := true
	for {
		wait := a.left()
		if wait <= 0 {
			stop(ErrLeaseOver)
			return
		}
		if renews {
			wait = min(wait, max(a.untilRenewal(), 0))
		}
		timer := time.NewTimer(min(wait, lookEvery))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		if left := a.left(); renews && left > 0 && a.untilRenewal() <= 0 {
			over, more := c.renew(ctx, e, a, left)
			if over {
				stop(ErrLeaseOver)
				return
			}
			renews = more
		}
	}
}

// renew asks for more time. over: the lease is lost; more: it may be asked for again.
func (c *Client) renew(ctx context.Context, e *entry, a *Attempt, left time.Duration) (over, more bool) {
	asked := time.Now()
	got, err := c.act(ctx, e, actRenew, min(left, actionTimeout), settlementFence{e.Attempt, e.Fence})
	switch {
	case err != nil, got.status >= 500, got.status == http.StatusUnauthorized, got.status == http.StatusTooManyRequests, got.status == http.StatusRequestTimeout:
		// Not too often, while the time that is left runs out.
		timer := time.NewTimer(min(left/4, time.Second))
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		return false, true
	case got.status == http.StatusOK:
		var again entry
		at, err := again.claimed(got, asked)
		if err != nil || again.Attempt != e.Attempt || again.Fence != e.Fence {
			return false, false
		}
		a.lasts(asked, at.deadline.Sub(asked))
		return false, true
	case got.refusal().Reason == "renewed_enough":
		return false, false // what is left is left
	}
	return true, false
}

type settlementFence struct {
	Attempt int    `json:"attempt"`
	Fence   string `json:"fence"`
}
