// This file is what a person's decision does. It is taken only while the record is
// held with that number, under the epoch and the nonce of the write that made the
// hold; it is stored in the record when it is taken, and never taken again.

package guard

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// Resolve takes a resolution, once. What became of it is in the view: Resolved, or
// Void where it was stale or could not be taken.
func (e *Engine) Resolve(ctx context.Context, res Resolution) (HoldView, error) {
	r, now, err := e.get(ctx, res.Key.String())
	if err != nil {
		return HoldView{}, err
	}
	for range maxTries {
		if r, err = e.advance(ctx, r, now); err != nil {
			return HoldView{}, err
		}
		if !e.isCurrent(r, res.HoldID) {
			return e.holdOf(r, res.HoldID), nil
		}
		if err := e.jumped(); err != nil && res.Decision == Release && e.cannot(r, res) == "" {
			return HoldView{}, fmt.Errorf("the release is taken later: %w", err)
		}
		why, also, err := e.refusesNow(ctx, r, res, now)
		if err != nil {
			return HoldView{}, err
		}
		p, err := e.take(r, res, why, also, now)
		if err != nil {
			return HoldView{}, err
		}
		wr, other, err := e.update(ctx, p, e.soon())
		if err != nil {
			return HoldView{}, err
		}
		if wr.Outcome == store.Written {
			return e.holdOf(p.to, res.HoldID), nil
		}
		r, now = other, wr.Now
	}
	return HoldView{}, ErrContended
}

// isCurrent says that the record is held by exactly this hold.
func (e *Engine) isCurrent(r *record, id HoldID) bool {
	if r == nil || r.State != Held {
		return false
	}
	if e.o.mutation == noHoldNumber {
		return true
	}
	return r.Hold == id.Number && r.Current.Nonce == id.Nonce && e.id.Epoch == id.Epoch
}

// holdOf says what has become of a hold.
func (e *Engine) holdOf(r *record, id HoldID) HoldView {
	stale := HoldView{HoldID: id, Name: HoldName(id.Key, id.Number), State: HoldVoid}
	if id.Epoch != e.id.Epoch {
		stale.Effect = "It was made under another memory of the store. Nothing was done."
		return stale
	}
	if r == nil {
		stale.Effect = "The store knows no such intent. Nothing was done."
		return stale
	}
	if r.Current != nil && r.Current.Number == id.Number && r.Current.Nonce == id.Nonce {
		return e.withSent(r, r.Current)
	}
	for i := range r.Ended {
		if h := &r.Ended[i]; h.Number == id.Number && h.Nonce == id.Nonce {
			return e.withSent(r, h)
		}
	}
	stale.Effect = "The store knows no such hold. Nothing was done."
	return stale
}

// withSent is a hold with what a person needs beside it: what was sent, under which key, and
// where to go on.
func (e *Engine) withSent(r *record, h *hold) HoldView {
	v := h.view(r, e.id.Epoch)
	for i := range r.Attempts {
		a := &r.Attempts[i]
		key := r.ProviderKey
		if a.Generation != r.Generation {
			key = providerKey(e.id.KeyDomain, r.id(), a.Generation) // an earlier one: a release gave it up
		}
		v.Sent = append(v.Sent, SentView{AttemptView: a.view(), Key: key})
	}
	if r.Hold > h.Number {
		v.Next = HoldName(r.id(), r.Hold)
	}
	return v
}

// cannot says why a decision cannot be taken on the record's hold; "": it can.
func (e *Engine) cannot(r *record, res Resolution) string {
	waiting := r.Current.Waiting && e.o.mutation != noWaiting
	until := r.Current.WaitingUntil.UTC().Format(time.RFC3339)
	switch res.Decision {
	case Release:
		switch {
		case res.ToolGone:
			return "the AgentTool no longer exists, so nothing could be sent; mark or reject the hold"
		case waiting:
			return "the earlier attempt could still become visible until " + until + "; look at the provider's ledger after that"
		case r.neverFinal():
			return "the tool's statusCheck says that a payment which was accepted may become final at any time (finality: Unbounded), and how the earlier attempt ended is not known; MarkPaid or MarkFailed once the provider says it"
		case r.accepted():
			return "the upstream accepted the earlier attempt (202), so it may still be paid; MarkPaid or MarkFailed once the provider says how it ended"
		}
	case Reject:
	case MarkPaid:
		if res.ProviderReference == "" {
			return "MarkPaid needs the provider's reference of the payment"
		}
		if len(res.Result) > MaxResultBytes {
			return fmt.Sprintf("the result has %d bytes, more than %d", len(res.Result), MaxResultBytes)
		}
		if len(res.Result) > 0 && !json.Valid(res.Result) {
			return "the result is not JSON"
		}
	case MarkFailed:
		switch {
		case !r.anyUnknown():
			return "no attempt's outcome is unknown, so there is nothing to mark as failed; reject it instead"
		case waiting && e.o.mutation != earlyMarkFailed:
			return "the earlier attempt could still become visible until " + until + "; look at the provider's ledger after that"
		}
	default:
		return fmt.Sprintf("%q is no decision; use Release, Reject, MarkPaid or MarkFailed", res.Decision)
	}
	return ""
}

// refusesNow says why a decision is not taken as things are now; "": it is. also is a reason
// that the hold did not have: the hold that takes its place has it, so that a release of
// that one covers it.
//
// A release that could not be used would look to a person as if the payment were under way.
func (e *Engine) refusesNow(ctx context.Context, r *record, res Resolution, now time.Time) (why string, also Reason, err error) {
	if why := e.cannot(r, res); why != "" || res.Decision != Release {
		return why, "", nil
	}
	if r.overdue(now) {
		return causeNotValid + r.Registration.ValidUntil.UTC().Format(time.RFC3339), "", nil
	}
	c := r.call()
	var p Policy
	if res.Now != nil {
		var unusable string
		if p, unusable = res.Now(&c); unusable != "" {
			return unusable, "", nil
		}
	}
	if p.rules != nil {
		u, err := p.rules(&c)
		if err != nil {
			return "", "", err
		}
		if u.Deny != "" {
			return "a rule of the tool denies it now: " + u.Deny, "", nil
		}
	}
	if why := e.releaseTooLate(r, p, now); why != "" && !r.Current.has(KeyExpired) {
		return why, KeyExpired, nil
	}
	if res.Now == nil {
		return "", "", nil
	}
	// What it would count for, as the released call would.
	from := r.clone()
	from.released(r.Current)
	x, err := e.wouldExceed(ctx, from, e.begin(from, c, p, now))
	switch {
	case err != nil || x == nil:
		return "", "", err
	case x.Limit.Hold:
		return x.cause(), BudgetExceeded, nil
	}
	return x.cause(), "", nil
}

// released is what a release of this hold lets the record do.
func (r *record) released(h *hold) {
	r.BudgetFrom = len(r.Attempts)
	r.excuse(false)
	if h.Watermark != "" {
		r.Passed = append(r.Passed, passed{Watermark: h.Watermark, Lineage: h.Lineage, Lookalike: h.Lookalike, Budget: r.Policy.Budget})
	}
	if h.has(BudgetExceeded) {
		r.SpendPass = len(r.Attempts) + 1
	}
	if h.has(ApprovalRequired) {
		r.RulePass = len(r.Attempts) + 1
	}
}

// take is the step that a resolution makes. why says that it is not taken, and also which
// reason the hold gets besides its own.
func (e *Engine) take(cur *record, res Resolution, why string, also Reason, now time.Time) (pending, error) {
	next := cur.clone()
	nonce := e.o.Nonce()
	p := pending{from: cur, to: next, now: now, nonce: nonce}
	h := next.Current
	h.Decision, h.By, h.Words, h.EndedAt = res.Decision, clip(res.By), clip(res.Reason), now
	if why != "" {
		h.End, h.Effect = HoldVoid, "It was not taken: "+why+"."
		anew := h.anew(clip(fmt.Sprintf("%s was not taken: %s", res.Decision, why)))
		if also != "" && !anew.has(also) {
			anew.Reasons = append(slices.Clone(anew.Reasons), also)
		}
		next.hold(anew, nonce, now)
		p.on = onSpent
		return p, nil
	}
	h.End = HoldResolved
	next.Changed = now
	switch res.Decision {
	case Release:
		p.on = onRelease
		h.Effect = "Released: the next identical call is sent, once."
		next.State, next.ReleasedAt = Released, now
		next.released(h)
		if h.has(KeyExpired) {
			next.Generation++
			next.ProviderKey = providerKey(e.id.KeyDomain, next.id(), next.Generation)
		}
	case Reject:
		p.on = onReject
		h.Effect = "Rejected: it is never sent."
		next.State, next.SettledAt = Rejected, now
		next.checkOnceMore(now)
	case MarkPaid:
		p.on = onMarkPaid
		h.Effect = "Marked as paid: agents get the result as a replay."
		next.State, next.SettledAt, next.MarkedPaid, next.PaidByHand = Succeeded, now, true, true
		next.PaidAttempts = len(next.Attempts)
		next.ProviderReference = clip(res.ProviderReference)
		next.Response = markedPaid(res)
	case MarkFailed:
		p.on = onMarkFailed
		h.Effect = "Marked as failed: nothing moved. A new payment needs a new intent."
		next.State, next.SettledAt, next.MarkedFailed = Failed, now, true
		next.excuse(true)
		next.checkOnceMore(now)
	default:
		return p, fmt.Errorf("%w: decision %q", ErrInvariant, res.Decision)
	}
	return p, nil
}

// excuse counts the unknown attempts as nothing moved for the join; denied: for all purposes.
func (r *record) excuse(denied bool) {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.unknown() {
			a.Excused = true
			a.Denied = a.Denied || denied
		}
	}
}

// markedPaid is what agents get: the person's result, or the plain fact.
func markedPaid(res Resolution) *Response {
	body := res.Result
	if len(body) == 0 {
		// Two strings always marshal.
		body, _ = json.Marshal(map[string]string{"status": "paid", "provider_reference": res.ProviderReference})
	}
	return &Response{
		Status: 200, Header: map[string][]string{"Content-Type": {"application/json"}},
		Body: body, Size: int64(len(body)),
	}
}

// Renumber gives a current hold a number above those of objects that exist already
// and belong to another memory or another write.
func (e *Engine) Renumber(ctx context.Context, id HoldID, above int) error {
	r, now, err := e.get(ctx, id.Key.String())
	if err != nil {
		return err
	}
	for range maxTries {
		if r, err = e.advance(ctx, r, now); err != nil {
			return err
		}
		if !e.isCurrent(r, id) || r.Hold > above {
			return nil
		}
		next := r.clone()
		nonce := e.o.Nonce()
		h := *next.Current
		next.Current.End, next.Current.EndedAt = HoldVoid, now
		next.Current.Effect = "An object of this name existed already: the hold has a new number."
		next.Hold = above
		next.hold(h.anew(h.Cause), nonce, now)
		wr, other, err := e.update(ctx, pending{from: r, to: next, on: onRenumbered, now: now, nonce: nonce}, e.soon())
		if err != nil || wr.Outcome == store.Written {
			return err
		}
		r, now = other, wr.Now
	}
	return ErrContended
}
