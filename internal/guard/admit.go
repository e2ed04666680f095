// This file is what happens to a call before it may be sent: the same ID's record
// first, then an exact match, then all that stands in its way, in one Reserve.
// Where the store has lost its memory, a first call is only asked about.

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// Ticket is the right to send one attempt.
type Ticket struct {
	Key
	Attempt int
	// ProviderKey is the stable key that the upstream receives.
	ProviderKey string
	// Retry: it is another attempt of an intent of which nothing moved, or one that is given again.
	Retry bool

	clock    Clock
	deadline Reading // of the send
	leaseEnd Reading // by this process's clocks
	nonce    string
	rec      *record
	settling time.Duration // what of the lease is for the settlement
	lenient  bool          // mutation: the deadline is not looked at
}

// InTime says that the send's deadline is not over by either clock. It is asked
// before every write on the connection, and again afterwards.
func (t *Ticket) InTime() bool { return t.lenient || t.clock.Now().before(t.deadline) }

// Left is the time until the send's deadline.
func (t *Ticket) Left() time.Duration { return t.clock.Now().left(t.deadline) }

// Admit says what is to become of a call. ALLOW carries the ticket to send it once.
func (e *Engine) Admit(ctx context.Context, c Call, p Policy) (Answer, error) {
	if err := e.enter(); err != nil {
		return Answer{}, err
	}
	defer e.leave()
	key := c.Key.String()
	var cur *record
	var pass passage
	if e.seen.has(key) {
		began := e.o.Clock.Now()
		r, _, err := e.getAt(ctx, key, began.Boot)
		if err == nil {
			cur = r
		} else if e.o.Clock.Now().left(began.after(e.o.Repeat)) <= 0 {
			return Answer{}, err // it was waited for long enough; else the Reserve asks again
		}
	}
	retryAsked := false
	for range maxTries {
		// The clock that ends the send starts before the Reserve.
		start, now, err := e.started(ctx)
		if err != nil {
			return Answer{}, err
		}
		if cur != nil {
			if cur, err = e.advance(ctx, cur, now); err != nil {
				return Answer{}, err
			}
		}
		if cur != nil {
			if reason, differs := cur.differs(c); differs {
				e.giveBack(&pass)
				return e.conflict(cur, reason), nil
			}
			if cur.claimedBy(&c) {
				e.giveBack(&pass)
				a, other, err := e.reclaim(ctx, cur, start, now)
				if err == nil && other != nil {
					cur = other
					continue
				}
				return a, err
			}
			if cur.State == Tombstone {
				e.giveBack(&pass)
				a, again, err := e.holdCall(ctx, &cur, cur.clone(), p, &hold{Reasons: []Reason{KeyExpired}}, e.remembers(cur), now)
				if again {
					continue
				}
				return a, err
			}
			a, maySend := e.answer(cur, now)
			if !maySend {
				e.giveBack(&pass)
				return a, nil
			}
			if cur.overdue(now) && e.o.mutation != expiredPass {
				a.Verdict, a.Reason = Deny, ReasonExpired
				e.giveBack(&pass)
				return a, nil
			}
			if why := e.releaseTooLate(cur, p, now); why != "" {
				// As the tool is now, the provider knows a key for less than it did.
				e.giveBack(&pass)
				a, again, err := e.holdCall(ctx, &cur, cur.clone(), p, cur.heldForKey(why), true, now)
				if again {
					continue
				}
				return a, err
			}
			if e.unregistered(p, cur) {
				e.giveBack(&pass)
				return e.notRegistered(c.Key, cur), nil
			}
			if cur.hasClaim(c.Claim) {
				e.giveBack(&pass)
				return Answer{Verdict: Deny, Reason: ReasonClaimUsed, Intent: cur.view(e.id.Epoch)}, nil
			}
			if wait, refused := cur.refuseRetry(&c, &retryAsked); refused {
				a.Verdict, a.Reason, a.RetryAfter = Deny, ReasonRetryRatio, max(wait, time.Millisecond)
				e.giveBack(&pass)
				return a, nil
			}
		}
		if p.rated() && !c.Passed && !pass.asked {
			if err := e.askRates(ctx, &pass, c, p, rateKey); err != nil {
				return Answer{}, err
			}
			continue // the send's clock starts after the time that this took
		}
		if err := e.askRules(&pass, &c, p); err != nil {
			e.giveBack(&pass)
			return Answer{}, err
		}
		from := cur
		next := e.begin(cur, c, p, now)
		if err := next.keep(&c, start); err != nil {
			e.giveBack(&pass)
			return Answer{}, err
		}
		// A first call also meets its own never-sent holds.
		probes, kinds := next.probes(from == nil)
		w, err := e.write(pending{from: from, to: next, on: onCall, now: now, nonce: next.last().Nonce})
		if err != nil {
			return Answer{}, err
		}
		w.Key = key
		lost := from == nil && e.forgot(p, now)
		uncounted := next.uncounted()
		pass.unregistered = e.unregistered(p, cur)
		// What is only asked about learns what stands in its way, and is written in no case.
		ruled := e.ruled(&pass, next)
		asks := lost || pass.refused || pass.unregistered || ruled || uncounted != nil || c.Behind && p.limited()
		if asks {
			// It takes no slot, and need not wait for those who do.
			w.Meters = append(slices.DeleteFunc(w.Meters, isSlot), neverWritten)
		}
		req := store.Reserve{Write: w, Probes: e.mutatedProbes(probes, from), PassedOver: next.passedOver()}
		res, err := e.repeat(ctx, start.Boot, start.after(e.o.Repeat), func() (store.Result, error) { return e.st.Reserve(ctx, req) })
		if err != nil {
			if errors.Is(err, store.ErrUnavailable) {
				// It may have landed. Nobody will send under it: say so once the store answers.
				t := e.ticket(next, start).Ticket
				e.o.Later(func() { e.withdraw(t) })
			}
			return Answer{}, err
		}
		if res.Outcome == store.Written {
			next.version = res.Version
			e.done(pending{from: from, to: next, on: onCall}, res.boot)
			a := e.ticket(next, start)
			a.Ticket.Retry = from != nil && from.State == Retryable
			if err := e.doubts(ctx, next, res, asks); err != nil {
				// It stands, and nobody sends under it.
				t := a.Ticket
				e.o.Later(func() { e.withdraw(t) })
				return Answer{}, err
			}
			return a, nil
		}
		if res.Outcome == store.Mismatch {
			if cur, err = decode(res.Record); err != nil {
				return Answer{}, err
			}
			e.see(cur, res.boot)
			if cur != nil && cur.State == InFlight && cur.last().Nonce == next.last().Nonce {
				// This write was made, its reply was lost, and a late result was written over
				// it since: perhaps that it is paid. The lease is this writer's, and nothing
				// is sent under it: by which clock it was reserved is no longer known either.
				e.done(pending{from: from, to: cur, on: onCall}, res.boot)
				t := e.ticket(cur, start).Ticket
				e.o.Later(func() { e.withdraw(t) })
			}
		}
		if err := e.jumped(); err != nil {
			return Answer{}, err // what was said cannot be believed
		}
		switch res.Outcome {
		case store.Mismatch: // look again
		case store.Blocked:
			a, again, err := e.blocked(ctx, &cur, next, p, res.Result, kinds, lost, &pass)
			if !again {
				return a, err
			}
		case store.OverLimit:
			if pass.unregistered {
				return e.notRegistered(c.Key, cur), nil
			}
			if pass.refused {
				return e.rateLimited(c.Key, cur, &pass), nil
			}
			if x := next.overLimit(uncounted, res.Meter); !lost && x == nil && !ruled {
				if a, ok := e.noSlot(c.Key, cur, res.Meter); ok {
					return a, nil
				}
			}
			a, again, err := e.overLimit(ctx, &cur, next, p, uncounted, lost, res.Result, &pass)
			if !again {
				return a, err
			}
		default:
			return Answer{}, fmt.Errorf("%w: a Reserve cannot be %s", ErrInvariant, res.Outcome)
		}
	}
	return Answer{}, ErrContended
}

// overLimit is the limit of spend that refused a Reserve; nil: it was another meter.
func (r *record) overLimit(uncounted *SpendExceeded, meter string) *SpendExceeded {
	if uncounted != nil {
		return uncounted
	}
	return r.exceeded(meter)
}

// overLimit answers where a limit of spend, a rule of the tool, or the loss of the memory
// has refused a Reserve. again: the record has changed, look once more.
func (e *Engine) overLimit(ctx context.Context, cur **record, next *record, p Policy, uncounted *SpendExceeded, lost bool, res store.Result, pass *passage) (Answer, bool, error) {
	if pass.ruling.Deny != "" {
		return e.denyRule(*cur, next, pass.ruling), false, nil
	}
	h := &hold{}
	if !lost {
		x := next.overLimit(uncounted, res.Meter)
		switch {
		case x == nil && !e.holdsBy(pass.ruling, next):
			return Answer{}, false, fmt.Errorf("%w: a Reserve cannot be %s by %q", ErrInvariant, res.Outcome, res.Meter)
		case x != nil && !x.Limit.Hold:
			return e.denySpend(ctx, *cur, next, x), false, nil
		}
		e.because(h, pass.ruling, next, x)
	}
	return e.holdCall(ctx, cur, notBegun(*cur, next), p, h, !lost, res.Now)
}

// doubts says why an attempt must not be sent though its Reserve was written.
func (e *Engine) doubts(ctx context.Context, r *record, res answer, asks bool) error {
	if asks {
		return fmt.Errorf("%w: the store wrote what it was to refuse", ErrInvariant)
	}
	if e.o.mutation == jumpIgnored {
		return nil
	}
	if err := e.jumped(); err != nil {
		return err
	}
	if res.jumped {
		return fmt.Errorf("%w: it has come back since", ErrClockJumped)
	}
	if res.asked == 1 {
		return nil
	}
	// It may have been written the first time, by a clock that nobody has heard.
	sr, now, err := e.st.Get(ctx, r.key)
	if err != nil {
		return err
	}
	if sr == nil || sr.Version != r.version || sr.At.Sub(now).Abs() > jumpLimit {
		return fmt.Errorf("%w: it is not known what it showed when the attempt was reserved", ErrClockJumped)
	}
	return nil
}

// first is the record of an intent that comes for the first time, before its first step.
func (e *Engine) first(c Call, now time.Time) *record {
	next := &record{key: c.Key.String()}
	next.header = header{
		Namespace: c.Namespace, Tool: c.Tool, Caller: c.Caller, CallerUID: c.CallerUID, IntentID: c.IntentID,
		Scope: c.Scope, Lineage: c.Lineage, Amount: c.Amount, Recipient: c.Recipient,
		Fingerprint: c.Fingerprint, IdentityHash: c.IdentityHash, AmountHash: c.AmountHash,
		RecipientHash: c.RecipientHash, Created: now,
	}
	next.Generation = 1
	next.ProviderKey = providerKey(e.id.KeyDomain, c.Key, 1)
	return next
}

// begin is the record as it will be in flight with its next attempt.
func (e *Engine) begin(cur *record, c Call, p Policy, now time.Time) *record {
	var next *record
	if cur == nil {
		next = e.first(c, now)
	} else {
		next = cur.clone()
		next.bind(c)
	}
	if next.Imported {
		// It was made of what a hold had shown. Who may send it is whom it belongs to.
		next.Imported, next.CallerUID = false, c.CallerUID
		next.IdentityHash, next.AmountHash, next.RecipientHash = c.IdentityHash, c.AmountHash, c.RecipientHash
	}
	next.adopt(p)
	next.charge(p)
	next.State, next.Changed, next.Response = InFlight, now, nil
	lease := e.lease(p)
	next.Attempts = append(next.Attempts, attempt{
		Number: len(next.Attempts) + 1, Generation: next.Generation, Nonce: e.o.Nonce(),
		Started: now, LeaseEnd: now.Add(lease), Lease: lease, Grace: e.grace(), SettleAfter: p.SettleAfter, Claim: c.Claim,
	})
	return next
}

// resumeTicket is the ticket of an attempt that sends what an earlier one has sent.
func (e *Engine) resumeTicket(r *record, start Reading) *Ticket {
	t := e.ticket(r, start).Ticket
	if e.o.mutation == resumeNewKey {
		t.ProviderKey += " again"
	}
	return t
}

func (e *Engine) ticket(r *record, start Reading) Answer {
	a := r.last()
	t := &Ticket{
		Key: r.id(), Attempt: a.Number, ProviderKey: r.ProviderKey, clock: e.o.Clock,
		deadline: start.after(a.Lease - e.o.Margin), leaseEnd: start.after(a.Lease),
		nonce: a.Nonce, rec: r, settling: e.o.Settlement, lenient: e.o.mutation == noDeadline,
	}
	e.inHand(t)
	return Answer{Verdict: Allow, Intent: r.view(e.id.Epoch), Ticket: t}
}

// differs compares a call with the record of its ID.
func (r *record) differs(c Call) (Reason, bool) {
	// A hold does not show the UID. Whose it is was said with its caller's name.
	if r.CallerUID != c.CallerUID && !(r.Imported && r.CallerUID == "") {
		return ReasonCaller, true
	}
	sameAmount := (r.Amount == nil) == (c.Amount == nil) && (r.Amount == nil || *r.Amount == *c.Amount)
	if !sameAmount || r.Recipient != c.Recipient || !r.Scope.Equal(c.Scope) {
		return ReasonRequest, true
	}
	// Under another identity block fingerprints cannot be compared. Where it is not known
	// which one it was, they must be equal.
	if (r.IdentityHash == c.IdentityHash || r.Imported) && r.Fingerprint != c.Fingerprint && r.Fingerprint != "" {
		return ReasonRequest, true
	}
	if r.unbound() && r.Lineage != "" && r.Lineage != c.Lineage {
		return ReasonRequest, true
	}
	return "", false
}

// conflict tells nothing of the record to a caller that may be another one.
func (e *Engine) conflict(r *record, reason Reason) Answer {
	v := View{Key: r.id(), Exists: true}
	if reason == ReasonRequest {
		v = r.view(e.id.Epoch)
	}
	return Answer{Verdict: Conflict, Reason: reason, Intent: v}
}

// answer is what the record's state says to a call with its ID, and whether the call may try to be sent.
func (e *Engine) answer(r *record, now time.Time) (Answer, bool) {
	a := Answer{Intent: r.view(e.id.Epoch)}
	switch r.State {
	case InFlight:
		a.Verdict, a.Reason = InFlightNow, ReasonInFlight
		a.RetryAfter = min(max(r.last().LeaseEnd.Sub(now), time.Second), e.o.Backoff)
	case Pending:
		a.Verdict, a.Reason, a.RetryAfter = InFlightNow, ReasonPending, e.o.Backoff
		if at := r.nextCheck(); at.After(now) {
			a.RetryAfter = at.Sub(now)
		}
	case Registered:
		a.Verdict = Allow
		return a, true
	case Retryable:
		a.Verdict = Allow
		// A clock that was set back must not make it wait for longer than was meant.
		if now.Before(r.RetryAt) && now.After(r.Changed.Add(-time.Minute)) {
			a.Verdict, a.Reason, a.RetryAfter = InFlightNow, ReasonBackoff, r.RetryAt.Sub(now)
			return a, false
		}
		return a, true
	case Released:
		a.Verdict = Allow
		return a, true
	case Held:
		return e.heldAnswer(r), false
	case Succeeded:
		if r.Imported && r.CallerUID == "" {
			// Whose the answer is cannot be told from a later namesake.
			a.Verdict, a.Reason = Deny, ReasonMarkedPaid
			break
		}
		a.Verdict, a.Response = Replay, r.Response
	case Failed:
		switch {
		case r.MarkedFailed:
			a.Verdict, a.Reason = Deny, ReasonMarkedFailed
		case r.Response == nil && r.Expired:
			a.Verdict, a.Reason = Replay, ReasonExpired
		case r.Response == nil:
			a.Verdict, a.Reason = Replay, ReasonUnreachable
		default:
			a.Verdict, a.Response = Replay, r.Response
		}
	case Rejected:
		a.Verdict, a.Reason = Deny, ReasonRejected
		if r.Expired {
			a.Reason = ReasonExpired
			if r.heldTooLong() {
				a.Reason = ReasonHoldExpired
			}
		}
	case Tombstone:
		a.Verdict, a.Reason, a.Reasons = UnknownHold, KeyExpired, []Reason{KeyExpired}
	}
	return a, false
}

func (e *Engine) heldAnswer(r *record) Answer {
	h := r.Current
	return Answer{
		Verdict: UnknownHold, Reason: h.Reasons[0], Reasons: h.Reasons, Intent: r.view(e.id.Epoch),
		Hold: HoldName(r.id(), h.Number), Matches: h.Matches, MatchCount: h.MatchCount, Cause: h.Cause,
	}
}

// blocked answers a call whose Reserve was refused. again: the record has changed, look once more.
func (e *Engine) blocked(ctx context.Context, cur **record, next *record, p Policy, res store.Result, kinds []string, lost bool, pass *passage) (Answer, bool, error) {
	obs, reasons, err := next.obstacles(res, kinds)
	if err != nil {
		return Answer{}, false, err
	}
	if !p.HoldExactMatch {
		a, ok, err := e.exactMatch(ctx, obs, res.Now)
		if errors.Is(err, errGone) {
			return Answer{}, true, nil
		}
		if ok || err != nil {
			e.giveBack(pass)
			return a, false, err
		}
		if !slices.ContainsFunc(obs, func(o obstacle) bool { return o.exact && o.State == Tombstone }) {
			// Not the answer's absence holds it, but what stands in the way.
			set := map[Reason]bool{}
			for _, r := range reasons {
				if r == ExactMatch {
					r = ScopeOverlap
				}
				set[r] = true
			}
			reasons = ordered(set)
		}
	}
	if pass.unregistered {
		return e.notRegistered(next.id(), *cur), false, nil
	}
	if pass.refused {
		return e.rateLimited(next.id(), *cur, pass), false, nil
	}
	if pass.ruling.Deny != "" {
		return e.denyRule(*cur, next, pass.ruling), false, nil
	}
	// An agent that loops under new IDs is shown the hold that it has.
	var newest *obstacle
	for i := range obs {
		if obs[i].neverSent && obs[i].State == Held && (newest == nil || obs[i].Changed.After(newest.Changed)) {
			newest = &obs[i]
		}
	}
	if newest != nil {
		r, now, err := e.get(ctx, newest.key)
		if err != nil {
			return Answer{}, false, err
		}
		if r == nil || r.State != Held {
			return Answer{}, true, nil
		}
		if r, err = e.advance(ctx, r, now); err != nil {
			return Answer{}, false, err
		}
		if r == nil || r.State != Held {
			return Answer{}, true, nil
		}
		return e.heldAnswer(r), false, nil
	}
	if len(reasons) == 0 {
		return Answer{}, false, fmt.Errorf("%w: blocked without a reason", ErrInvariant)
	}
	h := &hold{
		Reasons: reasons, Matches: matches(obs), MatchCount: res.HitCount,
		Watermark: res.Watermark, Lineage: !p.IgnoreLineage, Lookalike: p.Lookalike > 0,
	}
	if !lost {
		x, err := e.wouldExceed(ctx, *cur, next)
		switch {
		case err != nil:
			return Answer{}, false, err
		case x != nil && !x.Limit.Hold:
			return e.denySpend(ctx, *cur, next, x), false, nil
		}
		e.because(h, pass.ruling, next, x)
	}
	return e.holdCall(ctx, cur, notBegun(*cur, next), p, h, !lost, res.Now)
}

// notBegun is the record of a call without the attempt that could not begin.
func notBegun(cur, next *record) *record {
	if cur != nil {
		base := cur.clone()
		base.bindAs(next)
		return base
	}
	base := next.clone()
	base.Attempts, base.Kept, base.NotKept = nil, nil, ""
	return base
}

// errGone: what was hit no longer stands in the way.
var errGone = errors.New("no longer in the way")

// exactMatch answers with the call that this one repeats under another ID.
func (e *Engine) exactMatch(ctx context.Context, obs []obstacle, now time.Time) (Answer, bool, error) {
	pick := func(state State) *obstacle {
		var best *obstacle
		for i := range obs {
			o := &obs[i]
			if o.exact && o.State == state && (best == nil || o.Changed.After(best.Changed)) {
				best = o
			}
		}
		return best
	}
	for _, state := range []State{Succeeded, InFlight, Pending, Held} {
		o := pick(state)
		if o == nil {
			continue
		}
		r, at, err := e.get(ctx, o.key)
		if err != nil {
			return Answer{}, false, err
		}
		if r, err = e.advance(ctx, r, at); err != nil {
			return Answer{}, false, err
		}
		if r == nil {
			return Answer{}, false, errGone
		}
		if stands, _ := r.standing(); !stands {
			return Answer{}, false, errGone
		}
		o.State = r.State // time may have ended it meanwhile
		switch r.State {
		case Succeeded, InFlight, Pending, Held:
			a, _ := e.answer(r, now)
			return a, true, nil
		}
	}
	return Answer{}, false, nil
}

// holdCall writes the hold of a call that may not be sent. remembered: what is known of
// the intent is all that was ever done.
func (e *Engine) holdCall(ctx context.Context, cur **record, next *record, p Policy, h *hold, remembered bool, now time.Time) (Answer, bool, error) {
	next.adopt(p)
	next.charge(p)
	nonce := e.o.Nonce()
	if !remembered {
		e.presume(next, h, now)
	}
	next.hold(h, nonce, now)
	// What was sent can always be held. A first call after a loss counts as one that was
	// not: to refuse it is as safe as to hold it, since it is not sent either way, and the
	// ordinary calls of a whole window would otherwise become as many holds.
	limited := next.unsent()
	res, r, err := e.update(ctx, pending{from: *cur, to: next, on: onBlocked, now: now, nonce: nonce, limited: limited}, e.soon())
	if err != nil {
		return Answer{}, false, err
	}
	switch res.Outcome {
	case store.Written:
		return e.heldAnswer(next), false, nil
	case store.OverLimit:
		return Answer{
			Verdict: Deny, Reason: ReasonTooManyHolds, RetryAfter: time.Minute,
			Intent: View{Key: next.id()}, Matches: h.Matches, MatchCount: h.MatchCount, Reasons: h.Reasons, Cause: h.Cause,
		}, false, nil
	default:
		*cur = r
		return Answer{}, true, nil
	}
}

// hold puts the record on hold with the next number.
func (r *record) hold(h *hold, nonce string, now time.Time) {
	wasWaiting := r.Current != nil && r.Current.Waiting
	if r.Current != nil {
		if r.Current.End == "" {
			r.Current.End, r.Current.EndedAt = HoldVoid, now
		}
		r.endHold()
	}
	r.Hold++
	h.Number, h.Nonce, h.At = r.Hold, nonce, now
	anew := h.Waiting
	h.Waiting, h.WaitingUntil = false, time.Time{}
	// Whether the waiting is over is not for the store's clock alone to say: the sweep
	// ends it once it has watched for as long. A hold that follows one which had waited
	// does not wait again.
	waited := r.State == Held && !wasWaiting
	if at, _ := r.waitOver(); !at.IsZero() && (anew || !waited) {
		h.Waiting, h.WaitingUntil = true, at
	}
	r.Current = h
	r.State, r.Changed = Held, now
	r.Response, r.RetryAt, r.ReleasedAt = nil, time.Time{}, time.Time{}
	r.SettledAt, r.SettledAs = time.Time{}, ""
	r.MarkedPaid, r.MarkedFailed, r.Expired = false, false, false
	if h.has(OutcomeUnknown) {
		r.startChecks(now)
	}
}

// endHold moves the current hold to the ended ones, without what only an open one needs.
func (r *record) endHold() {
	h := *r.Current
	h.Matches, h.Watermark = nil, ""
	r.Ended = append(r.Ended, h)
	if len(r.Ended) > maxHoldHistory {
		r.Ended = r.Ended[len(r.Ended)-maxHoldHistory:]
	}
	r.Current = nil
}
