// This file is how status checks decide what is unknown, and when they do not.

package guard

import (
	"strings"
	"testing"
	"time"
)

func checkedPolicy(changes ...func(*CheckPolicy)) Policy {
	p := storyPolicy()
	p.Check = &CheckPolicy{
		Upstream: "upstream-1", Timeout: time.Second, Initial: time.Second, Max: 10 * time.Second, Factor: 2, Deadline: 10 * time.Minute,
	}
	for _, change := range changes {
		change(p.Check)
	}
	return p
}

func unbounded(p *CheckPolicy) { p.Unbounded = true }

// loseChecked sends a call of a tool with status checks, and has its outcome unknown.
func (s *story) loseChecked(c Call, changes ...func(*CheckPolicy)) *Ticket {
	s.t.Helper()
	t := s.sendUnder(c, checkedPolicy(changes...))
	s.want(s.settle(t, lost()), UnknownHold, OutcomeUnknown)
	return t
}

// begin begins the check of a call, which must be due.
func (s *story) beginCheck(c Call) *Check {
	s.t.Helper()
	k, err := s.BeginCheck(s.ctx, c.Key)
	if err != nil || k == nil {
		s.t.Fatalf("a check of %s: %+v, %v", c.IntentID, k, err)
	}
	return k
}

func (s *story) endCheck(k *Check, res CheckResult) {
	s.t.Helper()
	if err := s.EndCheck(s.ctx, k, res); err != nil {
		s.t.Fatalf("the check of %s: %v", k.IntentID, err)
	}
}

// untilCheck lets time pass until the next check is due, and finds it by a sweep.
func (s *story) untilCheck(c Call) {
	s.t.Helper()
	r := s.record(c.Key)
	next := r.nextCheck()
	if next.IsZero() {
		s.t.Fatalf("no check of %s will ever be due; it is %s", c.IntentID, r.State)
	}
	if wait := next.Sub(s.time.store()); wait > 0 {
		s.pass(wait)
	}
	s.sweep()
	for _, k := range s.DueChecks() {
		if k == c.Key {
			return
		}
	}
	s.t.Fatalf("the sweep has not found the check of %s", c.IntentID)
}

// answer makes the next check and gives it this answer.
func (s *story) answerCheck(c Call, res CheckResult) {
	s.t.Helper()
	s.untilCheck(c)
	s.endCheck(s.beginCheck(c), res)
}

func found(reference string) CheckResult {
	return CheckResult{
		Outcome: AttemptSucceeded, ProviderReference: reference, Status: 200, By: "by-1", Detail: "found",
		Response: &Response{Status: 200, Body: []byte(`{"found":"` + reference + `"}`)},
	}
}

func notFound() CheckResult { return CheckResult{Outcome: AttemptFailed, Status: 200, By: "by-1"} }

func stillPending() CheckResult { return CheckResult{Outcome: AttemptPending, Status: 200, By: "by-1"} }

func unclear() CheckResult { return CheckResult{Outcome: AttemptUnknown, Status: 500} }

// P03: the answer was lost, and the check finds the payment.
func TestACheckFindsThePayment(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseChecked(c)
	hold := s.hold(c)
	s.untilCheck(c)
	k := s.beginCheck(c)
	if k.Attempt != 1 || k.ProviderKey == "" || k.Upstream != "upstream-1" || k.Recipient != "c1" || k.Amount.Value != "49.99" {
		t.Fatalf("%+v", k)
	}
	s.endCheck(k, found("re_1")) // also while nobody may release
	r := s.inState(c, Succeeded)
	if r.ProviderReference != "re_1" || r.Winner != 1 {
		t.Fatalf("%+v", r)
	}
	a := s.admit(c)
	s.want(a, Replay, "")
	if string(a.Response.Body) != `{"found":"re_1"}` {
		t.Fatalf("the replay is %s", a.Response.Body)
	}
	v, err := s.Hold(s.ctx, hold.HoldID)
	if err != nil || v.State != HoldVoid || !strings.Contains(v.Effect, "re_1") {
		t.Fatalf("the hold is %+v, %v", v, err)
	}
	if checks := a.Intent.Checks; checks == nil || checks.Made != 1 || len(checks.Answers) != 1 || checks.Answers[0].Outcome != AttemptSucceeded || !checks.Next.IsZero() {
		t.Fatalf("the history shows %+v", a.Intent.Checks)
	}
	s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
}

func TestNothingMovedIsBelievedLateAndTwice(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseChecked(c)
	hold := s.hold(c)
	// Before the payment could be visible its absence says nothing, however often.
	for s.time.store().Before(s.record(c.Key).Current.WaitingUntil.Add(-10 * time.Second)) {
		s.answerCheck(c, notFound())
		if r := s.inState(c, Held); !r.Checks.FailedAt.IsZero() {
			t.Fatal("an answer counts that was too early")
		}
	}
	s.pass(storyWait)
	s.answerCheck(c, notFound())
	if r := s.inState(c, Held); r.Checks.FailedAt.IsZero() {
		t.Fatalf("the first answer does not count: %+v", r.Checks)
	}
	first := s.record(c.Key).Checks.FailedAt
	s.answerCheck(c, notFound())
	r := s.inState(c, Retryable)
	if between := s.time.store().Sub(first); between < storyGrace {
		t.Fatalf("%s between the answers", between)
	}
	if a := r.last(); a.Outcome != AttemptRetryable || r.Current.End != HoldVoid {
		t.Fatalf("%+v, the hold is %s", a, r.Current.End)
	}
	if v, err := s.Hold(s.ctx, hold.HoldID); err != nil || v.State != HoldVoid {
		t.Fatalf("%+v, %v", v, err)
	}
	s.pass(time.Minute)
	tk := s.sendUnder(c, checkedPolicy()) // nothing is left to fear
	if tk.Attempt != 2 {
		t.Fatalf("attempt %d", tk.Attempt)
	}
	s.want(s.settle(tk, paid("re_2")), Allow, "")
}

func TestWhatTakesBackThatNothingMoved(t *testing.T) {
	ripe := func(t *testing.T, changes ...func(*CheckPolicy)) (*story, Call) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseChecked(c, changes...)
		s.sweep()
		s.pass(storyWait)
		s.answerCheck(c, notFound())
		if r := s.inState(c, Held); r.Checks.FailedAt.IsZero() != r.Policy.Check.Unbounded {
			t.Fatalf("%+v", r.Checks)
		}
		return s, c
	}
	t.Run("another answer in between", func(t *testing.T) {
		for _, other := range []CheckResult{unclear(), stillPending(), {Outcome: AttemptFailed, By: "by-2"}} {
			s, c := ripe(t)
			s.answerCheck(c, other)
			s.answerCheck(c, notFound())
			s.inState(c, Held)
		}
	})
	t.Run("two questions at the same time", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseChecked(c)
		s.sweep()
		s.pass(storyWait)
		s.untilCheck(c)
		one := s.beginCheck(c)
		s.untilCheck(c)
		two := s.beginCheck(c)
		s.endCheck(one, notFound())
		s.pass(time.Minute)
		s.endCheck(two, notFound()) // it was asked before the first was answered
		s.inState(c, Held)
	})
	t.Run("asked before the time, answered after it", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseChecked(c)
		s.untilCheck(c)
		k := s.beginCheck(c)
		s.pass(storyWait)
		s.sweep()
		s.endCheck(k, notFound())
		if r := s.inState(c, Held); !r.Checks.FailedAt.IsZero() {
			t.Fatal("it counts")
		}
	})
	t.Run("a process that has not watched", func(t *testing.T) {
		s, c := ripe(t)
		s.pass(time.Minute)
		s.restart()
		k := s.beginCheck(c)
		s.endCheck(k, notFound())
		s.inState(c, Held)
		s.answerCheck(c, notFound()) // now it has
		s.inState(c, Retryable)
	})
	t.Run("finality unbounded", func(t *testing.T) {
		s, c := ripe(t, unbounded)
		s.answerCheck(c, notFound())
		s.answerCheck(c, notFound())
		s.inState(c, Held)
		h := s.hold(c)
		v, err := s.Resolve(s.ctx, Resolution{HoldID: h.HoldID, Decision: Release, By: "alice"})
		if err != nil || v.State != HoldVoid || !strings.Contains(v.Effect, "Unbounded") {
			t.Fatalf("a release: %+v, %v", v, err)
		}
		s.take(c, MarkFailed)
	})
	t.Run("pending after the time in which it should have been final", func(t *testing.T) {
		s, c := ripe(t)
		s.answerCheck(c, stillPending())
		for range 3 {
			s.answerCheck(c, notFound())
		}
		s.inState(c, Held)
	})
	t.Run("another attempt", func(t *testing.T) {
		s, c := ripe(t)
		s.untilCheck(c)
		k := s.beginCheck(c)
		s.take(c, Release)
		s.loseChecked(c) // attempt 2
		s.pass(storyWait)
		s.sweep()
		s.endCheck(k, notFound()) // of attempt 1
		s.inState(c, Held)
		s.answerCheck(c, notFound()) // the first one of attempt 2
		s.inState(c, Held)
		s.answerCheck(c, notFound())
		s.inState(c, Retryable)
	})
}

func TestOneGatewayAsksAtATime(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseChecked(c)
	other := s.process()
	s.untilCheck(c)
	k := s.beginCheck(c)
	if again, err := other.BeginCheck(s.ctx, c.Key); err != nil || again != nil {
		t.Fatalf("the other asks as well: %+v, %v", again, err)
	}
	// The first is killed: the other one asks in its place.
	_ = k
	s.Engine = other
	s.answerCheck(c, found("re_1"))
	s.inState(c, Succeeded)
	// And the first one's answer, which comes after all, changes nothing.
	s.endCheck(k, found("re_1"))
	if r := s.inState(c, Succeeded); r.RefundOwed || r.Disputed {
		t.Fatalf("%+v", r.header)
	}
}

// P02: accepted, pending, then settled: one send.
func TestPendingUntilTheCheckKnows(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.sendUnder(c, checkedPolicy())
	s.want(s.settle(tk, accepted()), InFlightNow, ReasonPending)
	s.inState(c, Pending)
	s.want(s.admitUnder(c, checkedPolicy()), InFlightNow, ReasonPending)
	s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
	s.answerCheck(c, stillPending())
	s.inState(c, Pending)
	s.answerCheck(c, found("re_1"))
	s.inState(c, Succeeded)
	s.want(s.admitUnder(c, checkedPolicy()), Replay, "")
}

func TestPendingThatFails(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, checkedPolicy()), accepted())
	s.answerCheck(c, notFound())
	s.inState(c, Pending)
	s.pass(storyWait)
	s.answerCheck(c, notFound())
	s.inState(c, Pending)
	s.answerCheck(c, notFound())
	s.inState(c, Retryable)
}

func TestPendingPastItsDeadlineIsHeld(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, checkedPolicy()), accepted())
	s.answerCheck(c, stillPending())
	s.pass(storyWait + 10*time.Minute)
	s.sweep()
	r := s.inState(c, Held)
	if !strings.Contains(r.Current.Cause, "status checks") || !r.nextCheck().IsZero() {
		t.Fatalf("cause %q, next check %s", r.Current.Cause, r.nextCheck())
	}
}

func TestWithoutAStatusCheckNobodyIsAsked(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.want(s.settle(s.send(c), accepted()), UnknownHold, OutcomeUnknown)
	s.pass(time.Hour - 1)
	s.sweep()
	if due := s.DueChecks(); len(due) != 0 {
		t.Fatalf("%v", due)
	}
	if k, err := s.BeginCheck(s.ctx, c.Key); k != nil || err != nil {
		t.Fatalf("%+v, %v", k, err)
	}
}

// R18: a later attempt was refused because an earlier one had been paid.
func TestACheckFindsAnEarlierAttempt(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseChecked(c)
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.wantHeld(s.settle(s.sendUnder(c, checkedPolicy()), declined()), OutcomeUnknown)
	s.answerCheck(c, found("re_1"))
	if r := s.inState(c, Succeeded); r.Winner != 1 {
		t.Fatalf("attempt %d", r.Winner)
	}
}

// R22, for checks: a payment that is found after a person's word is a refund owed.
func TestACheckFindsWhatAPersonHadClosed(t *testing.T) {
	for _, d := range []Decision{Reject, MarkFailed} {
		t.Run(string(d), func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.loseChecked(c)
			s.sweep()
			s.pass(storyWait)
			s.untilCheck(c)
			k := s.beginCheck(c)
			id := s.hold(c).HoldID
			s.take(c, d)
			s.endCheck(k, found("re_1"))
			if r := s.inState(c, Succeeded); !r.RefundOwed {
				t.Fatal("no refund is owed")
			}
			v, err := s.Hold(s.ctx, id)
			if err != nil || v.Refund == nil || v.Refund.String() != "49.99 USD; provider reference re_1" {
				t.Fatalf("%+v, %v", v.Refund, err)
			}
		})
	}
	t.Run("MarkPaid under another reference", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseChecked(c)
		s.untilCheck(c)
		k := s.beginCheck(c)
		id := s.hold(c).HoldID
		s.take(c, MarkPaid)
		s.endCheck(k, found("re_other"))
		v, err := s.Hold(s.ctx, id)
		if err != nil || v.Refund == nil || len(v.Refund.References) != 2 {
			t.Fatalf("%+v, %v", v.Refund, err)
		}
	})
}
