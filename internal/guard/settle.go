// This file is what happens to a result: the join of the attempts, settled by the
// one that holds the lease; and late results, which are evidence and are never dropped.

package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// keepTrying is how long a settlement that could not be written within its lease is still offered to the store.
const keepTrying = time.Hour

// Settle writes what became of an attempt, and says what its caller may be told.
// It does not return before that is durable; once the lease is over the caller is
// told that the outcome is unknown, and the writing goes on.
func (e *Engine) Settle(ctx context.Context, t *Ticket, res Result) (Answer, error) {
	a, err := e.settle(ctx, t, t.rec, res, t.leaseEnd)
	if err != nil {
		// Told now, and not after the next hour: the process may not live to see its end.
		e.evidence(t, res, err)
	}
	if err != nil && errors.Is(err, store.ErrUnavailable) {
		e.o.Later(func() {
			// What is left to do about an error was tried for an hour; the sweep of
			// another process has put the intent on hold by then.
			_, _ = e.settle(context.WithoutCancel(ctx), t, t.rec, res, e.o.Clock.Now().after(keepTrying))
			e.written(t)
		})
		v := t.rec.view(e.id.Epoch)
		return Answer{Verdict: UnknownHold, Reason: OutcomeUnknown, Reasons: []Reason{OutcomeUnknown}, Intent: v}, nil
	}
	e.written(t)
	return a, err
}

// evidence tells of a result that is not on the record.
func (e *Engine) evidence(t *Ticket, res Result, cause error) {
	v := Evidence{
		Key: t.Key, Attempt: t.Attempt, ProviderKey: t.ProviderKey, Outcome: res.Outcome,
		ProviderReference: clip(res.ProviderReference), Detail: clip(res.Detail), Cause: cause,
	}
	if res.Response != nil {
		v.Status = res.Response.Status
	}
	e.o.Evidence(v)
}

// withdraw settles an attempt under whose Reserve nothing was sent: it was given up for
// lost, or made by a clock that cannot be believed.
func (e *Engine) withdraw(t *Ticket) {
	defer e.written(t)
	ctx := context.Background()
	res := Result{Outcome: AttemptRetryable, Detail: "the store did not answer in time, or its clock had jumped, or an earlier attempt's result came meanwhile; nothing was sent"}
	for {
		r, _, err := e.get(ctx, t.rec.key)
		if err == nil {
			if r != nil && r.attemptWith(t.Attempt, t.nonce) != nil {
				// If this is lost too, the sweep holds the intent: the safe side.
				if _, err := e.settle(ctx, t, r, res, t.leaseEnd); err != nil {
					e.evidence(t, res, err)
				}
			}
			return
		}
		if !errors.Is(err, store.ErrUnavailable) || t.clock.Now().left(t.leaseEnd) <= 0 {
			e.evidence(t, res, err)
			return
		}
		e.o.Sleep(ctx, time.Second)
	}
}

// settle offers the result to the store, beginning with the record as it was last seen.
func (e *Engine) settle(ctx context.Context, t *Ticket, cur *record, res Result, until Reading) (Answer, error) {
	res.Detail = clip(res.Detail)
	for range maxTries {
		now, boot, err := e.nowAt(ctx, e.o.Clock.Now().Boot)
		for err != nil && errors.Is(err, store.ErrUnavailable) && e.o.Clock.Now().left(until) > 0 {
			e.o.Sleep(ctx, 100*time.Millisecond)
			now, boot, err = e.nowAt(ctx, e.o.Clock.Now().Boot)
		}
		if err != nil {
			return Answer{}, err
		}
		var p pending
		changed := true
		switch {
		case cur == nil:
			p, changed = e.afterPurge(t, res, now)
		case e.holds(cur, t):
			p = e.settled(cur, t, res, now)
		default:
			if p, changed, err = e.late(cur, t, res, now); err != nil {
				return Answer{}, err
			}
		}
		if !changed {
			return e.told(cur, t, res, now), nil
		}
		p.boot = boot
		wr, r, err := e.updateAt(ctx, p, boot, until)
		if err != nil {
			return Answer{}, err
		}
		if wr.Outcome == store.Written {
			return e.told(p.to, t, res, now), nil
		}
		cur = r
	}
	return Answer{}, ErrContended
}

// holds says that the ticket's attempt is the one in flight: number and nonce are the fence.
func (e *Engine) holds(r *record, t *Ticket) bool {
	if r.State != InFlight {
		return false
	}
	if e.o.mutation == noFence {
		return true
	}
	a := r.last()
	return a.Number == t.Attempt && a.Nonce == t.nonce
}

// learn writes a result into its attempt.
func (a *attempt) learn(res Result, now time.Time) {
	a.Outcome = res.Outcome
	if res.Outcome == AttemptPending {
		// Until somebody looks for its end, accepted is unknown.
		a.Outcome, a.Accepted = AttemptUnknown, true
	}
	a.Ended, a.Detail = now, res.Detail
	if res.LateSend {
		a.SentLate, a.LateUntil = true, now
	}
	if a.Outcome == AttemptSucceeded || a.Accepted || a.SentLate {
		a.Denied = false // a person's word that nothing moved is contradicted
	}
	a.Reference = clip(res.ProviderReference)
	a.Response = nil
	if res.Response != nil {
		a.Status = res.Response.Status
	}
	if a.Outcome == AttemptSucceeded {
		a.Response = res.Response
	}
}

// A release counts an earlier unknown attempt as nothing moved, so that the next may be
// sent. It does not make a later refusal the end of the intent: the upstream may refuse
// just because the earlier attempt was paid.
const (
	causeRefused      = "a later attempt was refused, and how an earlier one ended was never known: it may have been paid"
	causeContradicted = "the upstream had accepted the payment, and a late result says that nothing moved: it may be paid yet"
	causeReopened     = "after an attempt under an earlier key of the provider had been counted as not paid, it became known that it may still be"
	causeForgotten    = "it was not tried again in time, and how an earlier attempt ended was never known: it may have been paid"
)

// settled is the step of the lease's holder: the join.
func (e *Engine) settled(cur *record, t *Ticket, res Result, now time.Time) pending {
	next := cur.clone()
	if e.o.mutation == noFence {
		next.last().learn(res, now)
	} else {
		next.attemptWith(t.Attempt, t.nonce).learn(res, now)
	}
	nonce := e.o.Nonce()
	outcome, winner := next.join()
	if e.o.mutation == noJoin {
		outcome, winner = next.last().Outcome, next.last()
		if outcome.movedNothing() {
			outcome = AttemptFailed
		}
	}
	if a := next.last(); e.o.mutation == resumeDecides && a.Resumed && a.Outcome.movedNothing() {
		outcome = AttemptFailed
	}
	switch outcome {
	case AttemptSucceeded:
		next.joined(winner, now)
	case AttemptUnknown:
		if !next.pend(now) {
			next.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Watermark: e.mutatedFreeze()}, nonce, now)
		}
	default:
		next.nothingMoved(res, now, e.o)
		switch {
		case e.o.mutation == noJoin:
		case next.reopened() != nil:
			next.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: causeReopened}, nonce, now)
		case next.State == Failed && next.releasedUnknown():
			next.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: causeRefused}, nonce, now)
		}
	}
	return pending{from: cur, to: next, on: onSettled, now: now, nonce: nonce, retryAfter: res.RetryAfter}
}

// joined settles the record with the first success that was kept; another one may be a second payment.
func (r *record) joined(winner *attempt, now time.Time) {
	r.succeed(winner, now)
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a != winner && a.Outcome == AttemptSucceeded && (a.Generation == r.Generation || a.Counted) {
			r.secondSuccess(a)
		}
	}
}

// succeed settles the record with the attempt that did it.
func (r *record) succeed(a *attempt, now time.Time) {
	r.State, r.Changed, r.SettledAt = Succeeded, now, now
	r.Response, a.Response = a.Response, nil
	r.ProviderReference, r.Winner = a.Reference, a.Number
	r.RetryAt, r.ReleasedAt = time.Time{}, time.Time{}
}

// nothingMoved: another attempt may follow, or it has failed.
func (r *record) nothingMoved(res Result, now time.Time, o Options) {
	r.Changed, r.Response = now, res.Response
	if left, wait := r.attemptsLeft(o); left && res.Outcome == AttemptRetryable {
		r.State, r.RetryAt = Retryable, now.Add(max(wait, res.RetryAfter))
		return
	}
	r.State, r.SettledAt = Failed, now
}

// late is the effect of a result whose attempt no longer holds the lease. changed: it adds something.
func (e *Engine) late(cur *record, t *Ticket, res Result, now time.Time) (p pending, changed bool, err error) {
	next := cur.clone()
	a := next.attemptWith(t.Attempt, t.nonce)
	if a == nil {
		return p, false, fmt.Errorf("%w: a late result (%s) of attempt %d, which the record does not know", ErrInvariant, res.Outcome, t.Attempt)
	}
	p = pending{from: cur, to: next, on: onLateEvidence, now: now, nonce: e.o.Nonce(), keepMarks: cur.State == InFlight}
	next.Changed = now
	next.doubt()
	before := *a
	if before.Outcome == AttemptSucceeded {
		return p, false, nil // known already
	}
	switch {
	case res.Outcome == AttemptSucceeded:
		p.on = onLateSuccess
		a.learn(res, now)
		a.Late = true
		next.lateSuccess(a, now)
		if next.State == Tombstone {
			p.on = onLateEvidence
		}
	case res.Outcome.movedNothing():
		if before.Outcome.movedNothing() {
			return p, false, nil
		}
		a.learn(res, now)
		a.Late = true
		if next.State == Succeeded && next.MarkedPaid && !next.mayHaveMoved() {
			next.Disputed = true
		}
		p.keepMarks = p.keepMarks || next.State == Tombstone
		if next.State == Pending {
			next.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: causeContradicted}, p.nonce, now)
		}
	default:
		accepted := res.Outcome == AttemptPending && !before.Accepted
		sentLate := res.LateSend && !before.SentLate
		if !accepted && !sentLate {
			return p, false, nil // unknown was known
		}
		a.learn(res, now)
		a.Late = true
		next.reopen(a, before.Excused || before.Outcome.movedNothing(), sentLate, p.nonce, now)
	}
	return p, true, nil
}

// lateSuccess: the payment has happened after all.
func (r *record) lateSuccess(a *attempt, now time.Time) {
	switch r.State {
	case InFlight:
		// Kept, and joined at settlement. Whether a success under an earlier key of the
		// provider and this attempt are two payments, a person must look at.
		if a.Generation != r.Generation {
			a.Counted, r.Disputed = true, true
		}
	case Held:
		r.Current.End, r.Current.EndedAt = HoldVoid, now
		r.Current.Effect = "The upstream's answer arrived: it was paid. Nothing is left to decide."
		r.succeed(a, now)
	case Failed, Rejected:
		r.RefundOwed = true
		r.succeed(a, now)
	case Succeeded:
		r.secondSuccess(a)
	case Tombstone:
		if r.SettledAs == Succeeded {
			r.secondSuccess(a)
			return
		}
		r.RefundOwed = true
		r.SettledAs = ""
		r.succeed(a, now)
	default:
		r.succeed(a, now)
	}
}

// secondSuccess: a success meets one that is on the record already.
func (r *record) secondSuccess(a *attempt) {
	a.Response = nil // the first answer stays
	switch {
	case a.Reference != "" && r.ProviderReference != "" && a.Reference != r.ProviderReference:
		r.RefundOwed = true
	case r.MarkedPaid || a.Reference != "" && a.Reference == r.ProviderReference, r.wonUnderKeyOf(a):
		// one payment, told twice
	default:
		r.Disputed = true // it cannot be told whether it is one payment or two
	}
}

// reopened is an attempt under an earlier key of the provider that may move money yet, as became
// known after a release had counted it as nothing moved; nil: there is none. The join leaves it
// out, and no other key keeps the provider from paying it beside what is sent.
func (r *record) reopened() *attempt {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Generation != r.Generation && a.unknown() && !a.Denied && (a.Accepted || !a.Excused) {
			return a
		}
	}
	return nil
}

// reopen: new word that an attempt may move money yet, under whatever key of the provider. was:
// it had been counted as nothing moved, by a person or by status checks.
func (r *record) reopen(a *attempt, was, sentLate bool, nonce string, now time.Time) {
	a.Excused = false
	switch r.State {
	case Held:
		if h := r.Current; sentLate {
			// What was looked at so far was too early: it is waited for anew.
			h.End, h.EndedAt, h.Effect = HoldVoid, now, "The request was sent later than it should have been. The hold stands anew."
			again := h.anew("the request was sent after its deadline, so it may become visible later")
			again.Waiting = true
			r.hold(again, nonce, now)
		}
	case Released, Retryable:
		if was {
			r.hold(&hold{
				Reasons: []Reason{OutcomeUnknown},
				Cause:   "after the earlier attempt had been counted as not paid, it became known that it may still be",
			}, nonce, now)
		}
	case Failed, Tombstone:
		a.Excused = was
		r.Disputed = true
	}
}

// afterPurge: the record is gone. Only a success must not be lost.
func (e *Engine) afterPurge(t *Ticket, res Result, now time.Time) (pending, bool) {
	if res.Outcome != AttemptSucceeded {
		return pending{}, false
	}
	next := t.rec.clone()
	a := next.attemptWith(t.Attempt, t.nonce)
	a.learn(res, now)
	a.Late = true
	next.succeed(a, now)
	return pending{to: next, on: onLateSuccess, now: now, nonce: e.o.Nonce()}, true
}

// told is what the caller of an attempt is told once its result is written.
func (e *Engine) told(r *record, t *Ticket, res Result, now time.Time) Answer {
	if r == nil {
		return Answer{Verdict: UnknownHold, Reason: OutcomeUnknown, Reasons: []Reason{OutcomeUnknown}, Intent: t.rec.view(e.id.Epoch)}
	}
	mine := r.attemptWith(t.Attempt, t.nonce)
	a, _ := e.answer(r, now)
	switch r.State {
	case Succeeded:
		// One answer for one intent: a second success is told the first one's.
		if mine != nil && mine.Number == r.Winner && res.Outcome == AttemptSucceeded && !r.MarkedPaid {
			a.Verdict, a.Response = Allow, res.Response
		}
	case Failed, Retryable:
		if mine == nil || mine.Number != len(r.Attempts) || !res.Outcome.movedNothing() || r.MarkedFailed {
			break
		}
		a.Verdict, a.Reason, a.Response = Allow, "", res.Response
		if res.Response == nil {
			a.Verdict, a.Reason = Deny, ReasonUnreachable
		}
		if r.State == Retryable {
			a.RetryAfter, a.Again = max(r.RetryAt.Sub(now), 0), r.nothingMovedForSure()
		}
	}
	return a
}
