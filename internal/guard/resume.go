// This file is how an attempt whose outcome is unknown is sent again, without a person:
// the same request under the same key of a provider that deduplicates, so that it is paid
// at most once however often it arrives.
//
// What must hold: only the request that was sent, kept with the record, goes out again, to
// the same upstream with the same credential, and where neither a rule of the tool nor the
// caller's access says no by now (whoever sends it sees to that), only while what was
// registered is valid, and only while lease, grace and settleAfter of the new attempt end within the time for which the
// provider knows the key. That time runs from the first attempt under the key, by the
// store's clock and by the processes' own: whichever says more counts. Each is a Reserve
// and an attempt of the intent's budget. It follows an attempt that has just ended, and never
// a person's decision. It begins once the attempt before it can send
// nothing any more. A definite refusal of a key that may have been paid is no failure: the
// join stays unknown, and nothing is sent any more.

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// ResumePolicy says when an attempt whose outcome is unknown may be sent again. It never
// changes once it is part of a Policy.
type ResumePolicy struct {
	// Upstream names where attempts go and what they carry: nowhere else is anything sent again.
	Upstream string
	// Window is how long the provider knows a key, at the least, from its first request.
	Window time.Duration
}

func (p *ResumePolicy) fields(c *coder) {
	text(c, 1, &p.Upstream)
	integer(c, 2, &p.Window)
}

// Resumption is an attempt that may follow one whose outcome is unknown.
type Resumption struct {
	Key
	// ProviderKey is the key that was sent, and is sent again.
	ProviderKey string
	// CallerUID is the ServiceAccount's UID.
	CallerUID string
	// Upstream is where the attempts went.
	Upstream string
	// SettleAfter is the policy's at the call. Whoever sends it again and knows a longer one now sets that.
	SettleAfter time.Duration
	// Sealed is the request as the call's Keep made it, with what it is bound to.
	Sealed, Bound []byte

	rec *record
}

// boundTo is what a kept request must be bound to: to this record, this key of the
// provider and this fingerprint, so that it cannot be sent as another intent's.
func (r *record) boundTo() []byte {
	return appendPrefixed(nil, "holdfast request 1", r.id().String(), r.ProviderKey, strconv.Itoa(r.Generation), r.Fingerprint)
}

// keep keeps the request of a call whose attempt is about to begin, if it could be sent again.
func (r *record) keep(c *Call, own Reading) error {
	r.Kept, r.NotKept = nil, ""
	// Also where the tool does not say so yet: by the time it does, the key has its age.
	r.last().Wall = own.Wall.Round(0).UTC()
	if r.Policy.Resume == nil {
		return nil
	}
	if c.Keep == nil {
		r.NotKept = c.NotKept
		return nil
	}
	sealed, err := c.Keep(r.boundTo())
	if err != nil {
		return fmt.Errorf("keep the request: %w", err)
	}
	r.Kept = sealed
	return nil
}

// firstUnderKey is the first attempt under the present key of the provider; nil: none.
func (r *record) firstUnderKey() *attempt {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Generation == r.Generation {
			return a
		}
	}
	return nil
}

// neverResumed says why no time makes the record one to be sent again; "": it may be.
func (e *Engine) neverResumed(r *record) string {
	for _, reason := range r.Current.Reasons {
		if reason != OutcomeUnknown {
			return "it is held for more than its unknown outcome"
		}
	}
	first := r.firstUnderKey()
	if first == nil || r.checked() == nil {
		return "what was sent of it is not known"
	}
	if lost := e.o.LostAt; !lost.IsZero() && first.Started.Before(lost.Add(r.window())) {
		return "the store lost its memory, so it is not known since when the provider has had the key"
	}
	if len(r.Kept) == 0 {
		if r.NotKept != "" {
			return r.NotKept
		}
		return "its request was not kept"
	}
	if a := r.reopened(); a != nil {
		return "attempt " + strconv.Itoa(a.Number) + ", under an earlier key, may be paid yet"
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Generation != r.Generation {
			continue
		}
		switch {
		case a.Outcome == AttemptFailed:
			return "attempt " + strconv.Itoa(a.Number) + " was refused, which may be because an earlier one was paid"
		case a.Accepted:
			return "the upstream accepted attempt " + strconv.Itoa(a.Number)
		case a.SentLate:
			return "attempt " + strconv.Itoa(a.Number) + " was sent after its deadline"
		case a.Lost, a.Denied, a.Outcome == AttemptSucceeded:
			return "what is known of attempt " + strconv.Itoa(a.Number) + " contradicts it"
		}
	}
	if left, _ := r.attemptsLeft(e.o); !left {
		return "the attempts of its retry budget are spent"
	}
	return ""
}

// underKey is how long ago the first attempt under this key of the provider was begun.
func (e *Engine) underKey(r *record, now time.Time) time.Duration {
	first := r.firstUnderKey()
	if e.o.mutation == resumeAgeOfLast {
		first = r.last()
	}
	byStore := e.noEarlier(now).Sub(first.Started)
	if e.o.mutation == resumeByStore || first.Lost || first.Wall.IsZero() {
		return byStore
	}
	return max(byStore, e.o.Clock.Now().Wall.Sub(first.Wall))
}

// resumeTooLate says why nothing may be sent any more: it is no longer valid, or could not be relied
// upon to be recognised; "": it may.
func (e *Engine) resumeTooLate(r *record, window, settleAfter time.Duration, now time.Time) string {
	if r.overdue(e.noEarlier(now)) && e.o.mutation != expiredPass {
		return causeNotValid + r.Registration.ValidUntil.UTC().Format(time.RFC3339)
	}
	return e.keyTooOld(r, window, e.lease(r.Policy), settleAfter, now)
}

// keyTooOld says why the provider could not be relied upon to recognise what is sent now, under
// its present key and such a lease; "": it could.
func (e *Engine) keyTooOld(r *record, window, lease, settleAfter time.Duration, now time.Time) string {
	need := lease + e.grace() + max(settleAfter, r.Policy.SettleAfter)
	if age := e.underKey(r, now); age >= window-need && e.o.mutation != resumeAnyAge {
		return fmt.Sprintf("the provider knows the key for %s, and %s of that are over: a send now, with the %s that it may take, would come too late",
			window, age.Round(time.Second), need)
	}
	return ""
}

// releaseTooLate says why a person's release does not have what may have been paid sent again
// under its present key: the provider may have forgotten that, and would take it for another
// payment. "": it may be sent, as the policy at the attempt and the present one say; the
// latter may be zero.
//
// Of an attempt that a lost memory may hide it is known only that it is not younger than the
// loss. While it may yet be recognised, no key is safer than the one that it would have had.
func (e *Engine) releaseTooLate(r *record, p Policy, now time.Time) string {
	window := shorter(r.window(), p.window())
	if window == 0 || !r.unknownUnderKey() || e.o.mutation == releaseAnyAge {
		return ""
	}
	if why := e.keyTooOld(r, window, max(e.lease(r.Policy), e.lease(p)), p.SettleAfter, now); why != "" {
		return why + causeForgottenKey
	}
	return ""
}

// causeForgottenKey ends the cause of a hold whose release has another key of the provider.
const causeForgottenKey = ". If the provider's ledger shows that nothing was paid, release this hold: then it is sent under a new key, as another payment"

// unknownUnderKey: an attempt under this key of the provider may have been paid, whether or
// not it was released.
func (r *record) unknownUnderKey() bool {
	return slices.ContainsFunc(r.Attempts, func(a attempt) bool {
		return a.Generation == r.Generation && a.unknown() && !a.Denied
	})
}

// window is how long the provider knows a key, as the policy says; 0: it does not say so.
func (p *Policy) window() time.Duration {
	if p.Resume == nil {
		return 0
	}
	return p.Resume.Window
}

// window is how long the provider knows the record's present key, by the least that was said
// since an attempt under it may have been paid; 0: nobody has said so.
func (r *record) window() time.Duration { return shorter(r.KeyWindow, r.Policy.window()) }

// shorter is the shorter one of two windows, of which 0 says nothing.
func shorter(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// adopt has the record follow another policy. What the one before has said of the provider's
// memory still binds while an attempt may have been paid: the tool may say something else for a
// while, and the key is older by then.
func (r *record) adopt(p Policy) {
	known := r.window()
	if r.KeyWindow = 0; r.unknownUnderKey() {
		r.KeyWindow = known
	}
	r.Policy = p
}

// forgottenUnused is the step of a record that was released and can no longer be sent under
// its key; nil: it can.
func (e *Engine) forgottenUnused(r *record, now time.Time) *pending {
	if r.State != Released && r.State != Retryable || e.jumped() != nil {
		return nil
	}
	why := e.releaseTooLate(r, Policy{}, now)
	if why == "" {
		return nil
	}
	p := e.stepOf(r, onUnused, now)
	if r.State == Retryable {
		p.on = onDeadline
	}
	p.to.hold(r.heldForKey(why), p.nonce, now)
	return p
}

// heldForKey is the hold of a record that was released, and that the provider may have forgotten since.
func (r *record) heldForKey(why string) *hold {
	reasons := []Reason{OutcomeUnknown, KeyExpired}
	if r.State == Released {
		for _, reason := range r.Current.Reasons {
			if !slices.Contains(reasons, reason) {
				reasons = append(reasons, reason)
			}
		}
	}
	return &hold{Reasons: reasons, Cause: clip("the release was not used in time: " + why)}
}

// keyUntil is when the provider may have forgotten the key under which a released intent
// would be sent again, by the store's clock; zero: never, or it does not matter.
func (r *record) keyUntil(o Options) time.Time {
	window := r.window()
	if window == 0 || !r.unknownUnderKey() || o.mutation == releaseAnyAge {
		return time.Time{}
	}
	need := o.lease(r.Policy) + o.Grace + r.Policy.SettleAfter
	return r.firstUnderKey().Started.Add(window - need)
}

// planResume says when a record that has just been put on hold is sent again, or why it is not.
func (e *Engine) planResume(p pending) {
	r := p.to
	if r.State != Held {
		r.ResumeAt, r.ResumesOver = time.Time{}, ""
		// What a person has decided about is sent by a call alone.
		if r.State.Settled() || r.State == Retryable || r.State == Released && e.o.mutation != resumeReleased {
			r.Kept, r.NotKept = nil, ""
		}
		return
	}
	if r.Policy.Resume == nil || p.from == nil || !r.Current.has(OutcomeUnknown) {
		return
	}
	anew := p.from.State == Held
	if anew && r.ResumeAt.IsZero() {
		return // it is over, or never was
	}
	why := ""
	switch {
	case !e.remembers(p.from):
		why = "the store lost its memory"
	case p.from.State == Released && e.o.mutation != resumeReleased:
		why = "a person has released it since it was sent"
	default:
		why = e.neverResumed(r)
	}
	if why == "" && !anew && p.from.State != InFlight && e.o.mutation != resumeReleased {
		why = "no attempt of it has just ended"
	}
	if why != "" {
		e.resumesOver(r, why, p.now)
		return
	}
	if anew {
		return
	}
	_, wait := r.attemptsLeft(e.o)
	a := r.last()
	r.ResumeAt = p.now.Add(max(wait, p.retryAfter))
	if end := a.LeaseEnd.Add(a.Grace); end.After(r.ResumeAt) {
		r.ResumeAt = end
	}
}

// resumesOver has a person decide, or the status checks first.
func (e *Engine) resumesOver(r *record, why string, now time.Time) {
	waited := !r.ResumeAt.IsZero()
	r.ResumeAt, r.ResumesOver = time.Time{}, clip(why)
	if r.Current.Cause == "" {
		r.Current.Cause = clip("it is not sent again under its key: " + why)
	}
	if waited {
		r.Checks = nil // their times begin now
		r.startChecks(now)
	}
}

// resumeDue says that the record is to be sent again now: nothing of its last attempt can
// be sent any more, by the store's clock and by what this process has watched.
func (e *Engine) resumeDue(r *record, now time.Time) bool {
	if r.State != Held || r.ResumeAt.IsZero() || e.jumped() != nil {
		return false
	}
	a := r.last()
	return over(a.LeaseEnd.Add(a.Grace), a.Lease+a.Grace, now) && e.hasWatched(r, a.Lease+a.Grace) &&
		over(r.ResumeAt, max(r.ResumeAt.Sub(r.Current.At), 0), now)
}

// resumeExpired is the step of a record for which the time to be sent again is over; nil: it is not.
func (e *Engine) resumeExpired(r *record, now time.Time) *pending {
	if r.State != Held || r.ResumeAt.IsZero() || e.jumped() != nil {
		return nil
	}
	why := e.resumeTooLate(r, r.window(), 0, now)
	if why == "" {
		return nil
	}
	p := e.stepOf(r, onResumesOver, now)
	p.keepMarks = true
	e.resumesOver(p.to, why, now)
	return p
}

// DueResumes gives the intents of which the sweep has found that they are to be sent again
// now. Each is given once; what is not done the next sweep finds again.
func (e *Engine) DueResumes() []Key {
	return e.dueResumes.take()
}

// noteResume has the record sent again, if that is due.
func (e *Engine) noteResume(r *record, now time.Time) {
	if r != nil && e.resumeDue(r, now) {
		e.dueResumes.add(r.id())
	}
}

// NextResume gives what is to be sent again of an intent; nil: nothing is now.
func (e *Engine) NextResume(ctx context.Context, k Key) (*Resumption, error) {
	r, now, err := e.get(ctx, k.String())
	if err != nil {
		return nil, err
	}
	if r, err = e.advance(ctx, r, now); err != nil || r == nil || !e.resumeDue(r, now) {
		return nil, err
	}
	return &Resumption{
		Key: k, CallerUID: r.CallerUID, ProviderKey: r.ProviderKey, Upstream: r.Policy.Resume.Upstream, SettleAfter: r.Policy.SettleAfter, Sealed: r.Kept, Bound: r.boundTo(), rec: r,
	}, nil
}

// Forbidden says what a rule of the tool has against sending it again, where present is what
// the tool and its budget say now; "": nothing has. That a person has approved it counts: it
// is the same payment. An error is one that may pass.
func (m *Resumption) Forbidden(present func(*Call) Policy) (why string, err error) {
	c := m.rec.call()
	p := present(&c)
	if p.rules == nil {
		return "", nil
	}
	u, err := p.rules(&c)
	switch {
	case err != nil:
		return "", err
	case u.Deny != "":
		return "a rule of the tool denies it now: " + u.Deny, nil
	case u.Hold != "" && m.rec.RulePass == 0:
		return "a rule of the tool wants a person to decide about it now: " + u.Hold, nil
	}
	return "", nil
}

// BeginResume reserves the next attempt. Its ticket is the right to send it once, and is
// settled like any other; nil: nothing may be sent, now or at all. window is how long the
// provider knows a key by what is known now; what was known at the call may say less.
func (e *Engine) BeginResume(ctx context.Context, m *Resumption, window time.Duration) (*Ticket, error) {
	if err := e.enter(); err != nil {
		return nil, err
	}
	defer e.leave()
	// The clock that ends the send starts before the Reserve.
	start, now, err := e.started(ctx)
	if err != nil {
		return nil, err
	}
	r := m.rec
	if !e.resumeDue(r, now) {
		return nil, nil
	}
	if why := e.resumeTooLate(r, min(window, r.window()), m.SettleAfter, now); why != "" {
		return nil, e.EndResumes(ctx, m, why)
	}
	next := e.resumed(r, m.SettleAfter, now)
	probes, kinds := next.probes(false)
	w, err := e.write(pending{from: r, to: next, on: onResume, now: now, nonce: next.last().Nonce})
	if err != nil {
		return nil, err
	}
	req := store.Reserve{Write: w, Probes: e.mutatedProbes(probes, r), PassedOver: next.passedOver()}
	res, err := e.repeat(ctx, start.Boot, start.after(e.o.Repeat), func() (store.Result, error) { return e.st.Reserve(ctx, req) })
	if err != nil {
		if errors.Is(err, store.ErrUnavailable) {
			// It may have landed. Nobody will send under it: say so once the store answers.
			t := e.ticket(next, start).Ticket
			e.o.Later(func() { e.withdraw(t) })
		}
		return nil, err
	}
	switch res.Outcome {
	case store.Written:
		next.version = res.Version
		e.done(pending{from: r, to: next, on: onResume}, res.boot)
		t := e.resumeTicket(next, start)
		if err := e.doubts(ctx, next, res, false); err != nil {
			e.o.Later(func() { e.withdraw(t) })
			return nil, err
		}
		return t, nil
	case store.Mismatch:
		cur, err := decode(res.Record)
		if err != nil {
			return nil, err
		}
		e.see(cur, res.boot)
		if cur != nil && cur.State == InFlight && cur.last().Nonce == next.last().Nonce {
			// This write was made, its reply was lost, and a late result was written over
			// it since. It is not worth sending under: somebody may know more by now.
			t := e.ticket(cur, start).Ticket
			e.o.Later(func() { e.withdraw(t) })
		}
		return nil, nil
	case store.Blocked:
		_, reasons, err := next.obstacles(res.Result, kinds)
		if err != nil {
			return nil, err
		}
		return nil, e.EndResumes(ctx, m, fmt.Sprintf("another intent stands in its way (%v)", reasons))
	case store.OverLimit:
		if _, ok := e.noSlot(r.id(), r, res.Meter); ok {
			return nil, nil // the next sweep asks again
		}
	}
	return nil, fmt.Errorf("%w: the Reserve of a resumed attempt cannot be %s by %q", ErrInvariant, res.Outcome, res.Meter)
}

// resumed is the record as it will be in flight with the same request again.
func (e *Engine) resumed(cur *record, settleAfter time.Duration, now time.Time) *record {
	next := cur.clone()
	h := next.Current
	h.End, h.EndedAt = HoldVoid, now
	h.Effect = "The same request is sent again under the same key of the provider."
	next.State, next.Changed, next.Response, next.Checks = InFlight, now, nil, nil
	lease := e.lease(next.Policy)
	next.Attempts = append(next.Attempts, attempt{
		Number: len(next.Attempts) + 1, Generation: next.Generation, Nonce: e.o.Nonce(), Resumed: true,
		Started: now, Wall: e.o.Clock.Now().Wall.Round(0).UTC(),
		LeaseEnd: now.Add(lease), Lease: lease, Grace: e.grace(), SettleAfter: max(settleAfter, next.Policy.SettleAfter),
	})
	return next
}

// EndResumes has nothing sent again of an intent: a person decides, or the status checks first.
func (e *Engine) EndResumes(ctx context.Context, m *Resumption, why string) error {
	return e.afterResume(ctx, m, onResumesOver, func(next *record, now time.Time) { e.resumesOver(next, why, now) })
}

// PutOffResume leaves it for later: nobody can send it now. The time in which it may be sent
// does not become longer.
func (e *Engine) PutOffResume(ctx context.Context, m *Resumption) error {
	return e.afterResume(ctx, m, onPutOff, func(next *record, now time.Time) {
		next.ResumeAt = now.Add(max(e.o.Backoff, min(now.Sub(next.Current.At)/2, time.Minute)))
	})
}

// afterResume makes a step of a record that was not sent again. If it has changed meanwhile,
// somebody else has decided.
func (e *Engine) afterResume(ctx context.Context, m *Resumption, on event, change func(*record, time.Time)) error {
	now, err := e.now(ctx, e.o.Clock.Now().Boot)
	if err != nil {
		return err
	}
	next := m.rec.clone()
	change(next, now)
	_, _, err = e.update(ctx, pending{from: m.rec, to: next, on: on, now: now, nonce: e.o.Nonce(), keepMarks: true}, e.soon())
	return err
}

// ResumesView is what becomes of an intent whose outcome is unknown and which may be sent again.
type ResumesView struct {
	// Next is when that is, at the earliest; zero: not at all.
	Next time.Time `json:"next,omitzero"`
	// Over says why it is not.
	Over string `json:"over,omitempty"`
}

func (r *record) resumesView() *ResumesView {
	if r.State != Held || r.ResumeAt.IsZero() && r.ResumesOver == "" {
		return nil
	}
	return &ResumesView{Next: r.ResumeAt, Over: r.ResumesOver}
}

// resumedRefused: an attempt under this key of the provider was refused after another one
// whose outcome is unknown. It may have been refused because that one was paid.
func (r *record) resumedRefused() bool {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Resumed && a.Generation == r.Generation && a.Outcome == AttemptFailed {
			return true
		}
	}
	return false
}

// sameKey: by the provider's word both are one payment, as far as is known: one of them sent
// again what was sent under the same key.
func (a *attempt) sameKey(b *attempt) bool {
	return a.Generation == b.Generation && (a.Resumed || b.Resumed) && (a.Reference == "" || b.Reference == "")
}

// wonUnderKeyOf: the success that settled the record is the same payment as this one.
func (r *record) wonUnderKeyOf(a *attempt) bool {
	return r.Winner > 0 && r.Winner <= len(r.Attempts) && a.sameKey(&r.Attempts[r.Winner-1])
}

// succeededUnder: an attempt under that key of the provider has succeeded.
func (r *record) succeededUnder(generation int) bool {
	return slices.ContainsFunc(r.Attempts, func(a attempt) bool {
		return a.Generation == generation && a.Outcome == AttemptSucceeded
	})
}
