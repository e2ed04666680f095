// This file is how an attempt whose outcome is unknown is decided without a person: the
// tool's own status check asks the provider, and its answers come here.
//
// What must hold: "it was paid" is believed at once, whenever it comes. "Nothing moved"
// is believed only where the tool's owner has said that a payment is final within
// settleAfter; only of questions that were asked after that time was over, by the store's
// clock and by what this process has watched itself; and only twice for the same attempt,
// with nothing else in between, a grace apart by both clocks. What was asked before an
// attempt says nothing of it. Every step is a compare-and-set under the attempt's number
// and nonce, so that several gateways may ask at the same time.
//
// Of what a lost memory may hide, the provider is asked by the key that a first attempt
// has: a payment that it finds is believed, and that there is none is not.
//
// A person who rejects an intent, or marks it as failed, while an attempt is unknown may
// be wrong: it is asked about for one more deadline. Then only a payment counts, which is a
// refund owed, and word that it is still being made.

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// maxCheckHistory is how many answers of checks a record remembers.
const maxCheckHistory = 16

// CheckPolicy says how the provider is asked about an attempt whose outcome is unknown.
// It never changes once it is part of a Policy.
type CheckPolicy struct {
	// Upstream names where attempts go: elsewhere nobody knows of them, so nobody else is asked.
	Upstream string
	// Timeout is how long one question may take.
	Timeout time.Duration
	// The wait before the first check is Initial, and Factor times longer after each, up to Max.
	Initial, Max time.Duration
	Factor       int
	// Deadline is how long is asked after the time at which the payment would be visible.
	Deadline time.Duration
	// Unbounded: a payment that was accepted may be final only after settleAfter, so that
	// it is never known that nothing moved.
	Unbounded bool
}

// wait is that before the next check, after so many.
func (p *CheckPolicy) wait(made int) time.Duration {
	return backoff(p.Initial, p.Max, p.Factor, made)
}

// checks are those of one attempt: number and nonce are their fence.
type checks struct {
	Attempt int
	Nonce   string
	Made    int
	// Next is when the provider is to be asked again; zero: no more.
	Next  time.Time
	Until time.Time
	// FailedAt is when it was first said that nothing moved, with nothing else since;
	// FailedNonce is of the write that says so, and FailedBy names what was asked.
	FailedAt    time.Time
	FailedNonce string
	FailedBy    string
	// Late: the provider called it pending when it should have been final.
	Late    bool
	Answers []checkAnswer // the newest
}

type checkAnswer struct {
	At      time.Time
	Outcome Outcome
	Status  int
	Detail  string
}

func (c *checks) fields(d *coder) {
	integer(d, 1, &c.Attempt)
	text(d, 2, &c.Nonce)
	integer(d, 3, &c.Made)
	d.time(4, &c.Next)
	d.time(5, &c.Until)
	d.time(6, &c.FailedAt)
	text(d, 7, &c.FailedNonce)
	text(d, 8, &c.FailedBy)
	d.yes(9, &c.Late)
	list(d, 10, &c.Answers, (*checkAnswer).fields)
}

func (a *checkAnswer) fields(c *coder) {
	c.time(1, &a.At)
	text(c, 2, &a.Outcome)
	integer(c, 3, &a.Status)
	text(c, 4, &a.Detail)
}

func (p *CheckPolicy) fields(c *coder) {
	text(c, 1, &p.Upstream)
	integer(c, 2, &p.Timeout)
	integer(c, 3, &p.Initial)
	integer(c, 4, &p.Max)
	integer(c, 5, &p.Factor)
	integer(c, 6, &p.Deadline)
	c.yes(7, &p.Unbounded)
}

func (c *checks) clone() *checks {
	if c == nil {
		return nil
	}
	d := *c
	d.Answers = slices.Clone(c.Answers)
	return &d
}

// fenced says that the checks are of this attempt.
func (c *checks) fenced(a *attempt) bool {
	return c != nil && c.Attempt == a.Number && c.Nonce == a.Nonce
}

// checked is the attempt that a check asks about: the newest of this generation whose
// outcome is unknown. nil: there is none.
func (r *record) checked() *attempt {
	var newest *attempt
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Generation != r.Generation || !a.unknown() || a.Denied && !r.closedByHand() {
			continue
		}
		newest = a
	}
	return newest
}

// startChecks has the provider asked about what is unknown. A hold that stands anew for the
// same attempt goes on where the last one was.
func (r *record) startChecks(now time.Time) {
	p, a := r.Policy.Check, r.checked()
	switch {
	case p == nil || a == nil:
		r.Checks = nil
		return
	case r.Checks.fenced(a):
		return
	}
	until := now
	if at, _ := r.waitOver(); at.After(now) {
		until = at
	}
	r.Checks = &checks{Attempt: a.Number, Nonce: a.Nonce, Until: until.Add(p.Deadline), Next: now.Add(p.wait(0))}
}

// lost: of the attempts of this generation, some may have been forgotten by the store.
func (r *record) lost() bool {
	return slices.ContainsFunc(r.Attempts, func(a attempt) bool { return a.Lost && a.unknown() && a.Generation == r.Generation })
}

// closedByHand says that a person has closed the intent, and nobody has said that it was paid.
func (r *record) closedByHand() bool {
	return r.State == Rejected || r.State == Failed && r.MarkedFailed
}

// checkOnceMore has the provider asked after a person's decision, however long it was
// asked before. What it has said so far stays on the record.
func (r *record) checkOnceMore(now time.Time) {
	before := r.Checks
	r.Checks = nil
	r.startChecks(now)
	if r.Checks != nil && before.fenced(r.checked()) {
		r.Checks.Answers, r.Checks.Late = before.Answers, before.Late
	}
}

// mayBeChecked says that the record is in a state in which a check can tell something.
func (r *record) mayBeChecked() bool {
	// What may be sent again is asked about only after that.
	if r.Checks == nil || r.Policy.Check == nil || !r.ResumeAt.IsZero() {
		return false
	}
	return r.State == Pending || r.State == Held && r.Current.has(OutcomeUnknown) || r.closedByHand()
}

// nextCheck is when the provider is to be asked; zero: never.
func (r *record) nextCheck() time.Time {
	if !r.mayBeChecked() {
		return time.Time{}
	}
	return r.Checks.Next
}

// checkDue says that the provider is to be asked now: also where the store's clock was set
// back since that time was written.
func (r *record) checkDue(now time.Time) bool {
	at := r.nextCheck()
	return !at.IsZero() && over(at, r.Policy.Check.Timeout+r.Policy.Check.Max, now)
}

// doubt forgets that it was said that nothing moved.
func (r *record) doubt() {
	if r.Checks != nil {
		r.Checks.FailedAt, r.Checks.FailedNonce, r.Checks.FailedBy = time.Time{}, "", ""
	}
}

// watchedCheck names what a judge watches since a check said that nothing moved.
func (r *record) watchedCheck() string {
	if r.Checks == nil || r.Checks.FailedNonce == "" {
		return ""
	}
	return "/" + r.Checks.FailedNonce
}

// visible says that a payment of the attempts that are unknown would be visible by now, or
// never will be: the store's clock says so, and somebody has watched for as long.
func (e *Engine) visible(r *record, now time.Time) bool {
	if e.o.mutation == checksAtOnce {
		return true
	}
	if r.State == Held {
		return !r.Current.Waiting
	}
	if r.Checks.FailedNonce != "" {
		return true // it was when that was written
	}
	at, watch := r.waitOver()
	return over(at, watch, now) && e.hasWatched(r, watch)
}

// Check is one question to the provider, about one attempt.
type Check struct {
	Key
	Attempt int
	// ProviderKey is the key that was sent.
	ProviderKey string
	// ProviderReference is the provider's own name of the payment, if the upstream's answer named one.
	ProviderReference string
	Scope             intent.Scope
	Lineage           intent.Path
	Amount            *intent.Money
	Recipient         string
	// Upstream is where the attempt went: nobody else is to be asked.
	Upstream string
	Timeout  time.Duration

	nonce string
	// visible: when the question was asked, a payment would have been visible.
	visible bool
	// first is the earlier answer that this one may confirm, by its write.
	first string
}

// CheckResult is what came of a check.
type CheckResult struct {
	// Outcome is Succeeded, Failed (nothing moved, and nothing will), Pending or Unknown.
	Outcome Outcome
	// Response is what agents get as a replay (Succeeded).
	Response          *Response
	ProviderReference string
	Status            int
	// By names what was asked: two answers are equal only if the same was.
	By     string
	Detail string
}

// DueChecks gives the intents about which the sweep has found that the provider is to be
// asked now. Each is given once; what is not done the next sweep finds again.
func (e *Engine) DueChecks() []Key {
	return e.dueChecks.take()
}

// noteDue has the record's check made, if it is due.
func (e *Engine) noteDue(r *record, now time.Time) {
	if r != nil && r.checkDue(now) {
		e.dueChecks.add(r.id())
	}
}

// BeginCheck takes on the check of an intent if it is due; nil: it is not. Others leave it
// alone for as long as it may take.
func (e *Engine) BeginCheck(ctx context.Context, k Key) (*Check, error) {
	if err := e.enter(); err != nil {
		return nil, err
	}
	defer e.leave()
	r, now, err := e.get(ctx, k.String())
	if err != nil {
		return nil, err
	}
	for range maxTries {
		if r, err = e.advance(ctx, r, now); err != nil {
			return nil, err
		}
		if err := e.jumped(); err != nil {
			return nil, err
		}
		if r == nil {
			return nil, nil
		}
		if !r.checkDue(now) {
			return nil, nil
		}
		a := r.attemptWith(r.Checks.Attempt, r.Checks.Nonce)
		if a == nil {
			return nil, fmt.Errorf("%w: a check of attempt %d, which the record does not know", ErrInvariant, r.Checks.Attempt)
		}
		next := r.clone()
		p := next.Policy.Check
		// If nobody hears of this one, the next comes when it would have come after it.
		next.Checks.Next = next.afterCheck(now.Add(p.Timeout))
		next.Checks.Made++
		w := pending{from: r, to: next, on: onCheckBegun, now: now, nonce: e.o.Nonce(), keepMarks: true}
		res, other, err := e.update(ctx, w, e.soon())
		if err != nil {
			return nil, err
		}
		if res.Outcome != store.Written {
			r, now = other, res.Now
			continue
		}
		c := &Check{
			Key: k, Attempt: a.Number, ProviderKey: r.ProviderKey, ProviderReference: a.Reference,
			Scope: r.Scope, Lineage: r.Lineage, Amount: r.Amount, Recipient: r.Recipient,
			Upstream: p.Upstream, Timeout: p.Timeout,
			nonce: a.Nonce, visible: e.visible(r, now),
		}
		if at := r.Checks.FailedAt; !at.IsZero() && over(at.Add(e.o.Grace), e.o.Grace, now) && e.hasWatched(r, e.o.Grace) {
			c.first = r.Checks.FailedNonce
		}
		return c, nil
	}
	return nil, ErrContended
}

// afterCheck is when the next check comes after one that ends at that time.
func (r *record) afterCheck(end time.Time) time.Time {
	c, p := r.Checks, r.Policy.Check
	at := end.Add(p.wait(c.Made + 1))
	// The first one that can say that nothing moved should not be late.
	if over, _ := r.waitOver(); over.After(end) && over.Before(at) {
		at = over
	}
	if at.After(c.Until) {
		return time.Time{}
	}
	return at
}

// EndCheck writes down what a check has come to, and does what follows from it.
func (e *Engine) EndCheck(ctx context.Context, c *Check, res CheckResult) error {
	res.Detail, res.ProviderReference = clip(res.Detail), clip(res.ProviderReference)
	switch res.Outcome {
	case AttemptSucceeded, AttemptFailed, AttemptPending, AttemptUnknown:
	default:
		return fmt.Errorf("%w: a check cannot say %q", ErrInvariant, res.Outcome)
	}
	r, now, err := e.get(ctx, c.Key.String())
	if err != nil {
		e.checkLost(c, res, err)
		return err
	}
	for range maxTries {
		if r == nil {
			return nil // it was settled and is long gone
		}
		p, changed, err := e.afterAnswer(r, c, res, now)
		if err != nil || !changed {
			return err
		}
		wr, other, err := e.update(ctx, p, e.soon())
		if err != nil {
			e.checkLost(c, res, err)
			return err
		}
		if wr.Outcome == store.Written {
			return nil
		}
		r, now = other, wr.Now
	}
	return ErrContended
}

// checkLost tells of a payment that was found and could not be written down. The next
// check finds it again.
func (e *Engine) checkLost(c *Check, res CheckResult, cause error) {
	if res.Outcome != AttemptSucceeded || errors.Is(cause, ErrInvariant) {
		return
	}
	e.o.Evidence(Evidence{
		Key: c.Key, Attempt: c.Attempt, ProviderKey: c.ProviderKey, Outcome: res.Outcome,
		ProviderReference: res.ProviderReference, Status: res.Status, Detail: res.Detail, Cause: cause,
	})
}

// afterAnswer is the step that an answer makes; changed: there is one.
func (e *Engine) afterAnswer(cur *record, c *Check, res CheckResult, now time.Time) (p pending, changed bool, err error) {
	next := cur.clone()
	a := next.attemptWith(c.Attempt, c.nonce)
	if a == nil {
		return p, false, fmt.Errorf("%w: a check of attempt %d, which the record does not know", ErrInvariant, c.Attempt)
	}
	p = pending{from: cur, to: next, on: onChecked, now: now, nonce: e.o.Nonce()}
	current := cur.mayBeChecked() && next.Checks.fenced(a)
	if current {
		next.Checks.note(now, res)
	}
	if res.Outcome == AttemptSucceeded {
		return e.foundPaid(cur, next, a, res, p)
	}
	if !current {
		// It was decided meanwhile, or another attempt was made.
		return p, res.Outcome == AttemptPending && next.acceptedAfterAll(a, &p), nil
	}
	next.Checks.Next = next.afterCheck(now)
	p.keepMarks = true
	if cur.closedByHand() {
		next.toldOfClosed(a, res, &p)
		return p, true, nil
	}
	first := cur.Checks.FailedNonce
	if res.Outcome != AttemptFailed || cur.Checks.FailedBy != res.By {
		first = ""
		next.doubt()
	}
	switch res.Outcome {
	case AttemptPending:
		// It is known now that it was accepted: a person may not release it any more.
		a.Accepted = true
		next.Checks.Late = next.Checks.Late || c.visible
	case AttemptFailed:
		e.saidFailed(next, c, res, first, &p)
	}
	return p, true, nil
}

// acceptedAfterAll takes word that an attempt about which nobody asks any more was accepted;
// false: that was known, or does not matter any more.
func (r *record) acceptedAfterAll(a *attempt, p *pending) bool {
	if a.Outcome == AttemptSucceeded || a.Accepted && !a.Denied && a.unknown() {
		return false
	}
	was := a.Excused || a.Denied || a.Outcome.movedNothing()
	p.on, p.keepMarks = onLateEvidence, r.State == InFlight
	r.Changed = p.now
	a.Outcome, a.Accepted, a.Denied, a.Late = AttemptUnknown, true, false, true
	r.doubt()
	r.reopen(a, was, false, p.nonce, p.now)
	return true
}

// toldOfClosed takes what a check says of an intent that a person has closed. Nothing that
// it can say opens it again; and that nothing moved is the person's to say.
func (r *record) toldOfClosed(a *attempt, res CheckResult, p *pending) {
	if res.Outcome != AttemptPending || a.Accepted && !a.Denied {
		return
	}
	a.Accepted = true
	if a.Denied {
		// It may be paid yet: the word that nothing moved does not count any more.
		a.Denied, r.Disputed = false, true
		p.on, p.keepMarks = onLateEvidence, false
	}
}

// foundPaid: the payment was made.
func (e *Engine) foundPaid(cur, next *record, a *attempt, res CheckResult, p pending) (pending, bool, error) {
	if a.Outcome == AttemptSucceeded {
		return p, false, nil
	}
	p.keepMarks = cur.State == InFlight
	reference := res.ProviderReference
	if reference == "" {
		reference = a.Reference
	}
	a.learn(Result{Outcome: AttemptSucceeded, Response: res.Response, ProviderReference: reference, Detail: res.Detail}, p.now)
	next.Changed = p.now
	if cur.State != Held && cur.State != Pending {
		a.Late = true
		p.on = onLateSuccess
		if cur.State == Tombstone && cur.SettledAs == Succeeded {
			p.on = onLateEvidence
		}
	}
	next.lateSuccess(a, p.now)
	if cur.State == Held {
		next.Current.Effect = "The status check found the payment" + named(a.Reference) + ": it was paid. Nothing is left to decide."
	}
	return p, true, nil
}

func named(reference string) string {
	if reference == "" {
		return ""
	}
	return " " + strconv.Quote(reference)
}

// saidFailed: the provider says that nothing moved. first is the earlier answer that said
// the same; "" if none did.
func (e *Engine) saidFailed(next *record, c *Check, res CheckResult, first string, p *pending) {
	if !e.mayFail(next, c, p.now) {
		next.doubt()
		return
	}
	if first == "" || first != c.first {
		if e.o.mutation != oneCheckIsEnough {
			if first == "" {
				next.Checks.FailedAt, next.Checks.FailedNonce, next.Checks.FailedBy = p.now, p.nonce, res.By
			}
			// A little more, for whoever began to watch when this is written.
			if at := p.now.Add(e.o.Grace + e.o.Grace/2); !next.Checks.Next.IsZero() && next.Checks.Next.After(at) {
				next.Checks.Next = at
			}
			return
		}
	}
	p.keepMarks = false
	for i := range next.Attempts {
		if b := &next.Attempts[i]; b.Generation == next.Generation && b.unknown() {
			// All of them were sent under the key that was asked about.
			b.Outcome, b.Excused = AttemptRetryable, false
			b.Detail = "the status check said twice that nothing moved"
		}
	}
	if next.State == Held {
		h := next.Current
		h.End, h.EndedAt = HoldVoid, p.now
		h.Effect = "The status check said twice that nothing moved: nothing is left to decide."
	}
	next.nothingMoved(Result{Outcome: AttemptRetryable}, p.now, e.o)
}

// mayFail says whether this answer can count as "nothing moved" at all.
func (e *Engine) mayFail(r *record, c *Check, now time.Time) bool {
	switch {
	case e.jumped() != nil, r.checked() == nil:
		return false
	case r.lost():
		// What was forgotten may have been sent under another key, by another upstream or
		// under another intent ID: that there is no payment under this one proves nothing.
		return false
	case r.resumedRefused():
		return false // by that word it may have been paid; a person looks
	case r.Policy.Check.Unbounded && e.o.mutation != absenceCounts:
		return false
	case r.Checks.Late && e.o.mutation != absenceCounts:
		return false
	case r.reopened() != nil:
		return false // of what was sent under an earlier key it says nothing
	}
	// As it was when the provider was asked, and still is.
	return c.visible && e.visible(r, now)
}

// note keeps an answer.
func (c *checks) note(now time.Time, res CheckResult) {
	c.Answers = append(c.Answers, checkAnswer{At: now, Outcome: res.Outcome, Status: res.Status, Detail: res.Detail})
	if n := len(c.Answers) - maxCheckHistory; n > 0 {
		c.Answers = c.Answers[n:]
	}
}

// pend has the record wait for the checks: the upstream has accepted the payment, and it is not final.
func (r *record) pend(now time.Time) bool {
	a := r.last()
	if r.Policy.Check == nil || a == nil || !a.Accepted || !a.unknown() {
		return false
	}
	r.startChecks(now)
	if r.Checks == nil {
		return false
	}
	r.State, r.Changed, r.Response = Pending, now, nil
	return true
}

// overdue says why a pending intent is held, once its time is over.
func (c *checks) overdue() string {
	return fmt.Sprintf("the upstream accepted the payment and %d status checks did not find its end in time", c.Made)
}

// CheckView is one answer of a status check as it is shown.
type CheckView struct {
	At      time.Time `json:"at"`
	Outcome Outcome   `json:"outcome"`
	Status  int       `json:"status,omitempty"`
	Detail  string    `json:"detail,omitempty"`
}

// ChecksView is what the status checks of an intent came to.
type ChecksView struct {
	Attempt int `json:"attempt"`
	Made    int `json:"made"`
	// Next is when the provider is asked again; zero: no more.
	Next  time.Time `json:"next,omitzero"`
	Until time.Time `json:"until"`
	// Answers are the newest ones.
	Answers []CheckView `json:"answers,omitempty"`
}

func (r *record) checksView() *ChecksView {
	c := r.Checks
	if c == nil {
		return nil
	}
	v := &ChecksView{Attempt: c.Attempt, Made: c.Made, Next: r.nextCheck(), Until: c.Until}
	for _, a := range c.Answers {
		v.Answers = append(v.Answers, CheckView(a))
	}
	return v
}
