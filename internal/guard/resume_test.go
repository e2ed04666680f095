// This file is how an unknown outcome is sent again, and when it is not.

package guard

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

const storyKnown = time.Hour // how long the provider knows a key

func resumedPolicy(changes ...func(*Policy)) Policy {
	p := storyPolicy()
	p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: storyKnown}
	for _, change := range changes {
		change(&p)
	}
	return p
}

// keptAs is the call with a request that is kept.
func (c Call) keptAs(request string) Call {
	c.Keep = func(bound []byte) ([]byte, error) { return append([]byte(request+"|"), bound...), nil }
	return c
}

// loseResumed sends a call of a tool with Resume, and has its outcome unknown.
func (s *story) loseResumed(c Call, changes ...func(*Policy)) *Ticket {
	s.t.Helper()
	t := s.sendUnder(c.keptAs("request of "+c.IntentID), resumedPolicy(changes...))
	s.want(s.settle(t, lost()), UnknownHold, OutcomeUnknown)
	return t
}

// dueResume finds by a sweep what is to be sent again now; nil: nothing is.
func (s *story) dueResume(c Call) *Resumption {
	s.t.Helper()
	s.sweep()
	if !slices.Contains(s.DueResumes(), c.Key) {
		return nil
	}
	m, err := s.NextResume(s.ctx, c.Key)
	if err != nil {
		s.t.Fatal(err)
	}
	return m
}

// resume sends again what was lost.
func (s *story) resume(c Call) *Ticket {
	s.t.Helper()
	m := s.dueResume(c)
	if m == nil {
		s.t.Fatalf("%s is not to be sent again: %+v", c.IntentID, s.record(c.Key).resumesView())
	}
	if want := "request of " + c.IntentID + "|" + string(s.record(c.Key).boundTo()); string(m.Sealed) != want || string(m.Bound) != string(s.record(c.Key).boundTo()) {
		s.t.Fatalf("kept is %q, want %q", m.Sealed, want)
	}
	t, err := s.BeginResume(s.ctx, m, storyKnown)
	if err != nil || t == nil {
		s.t.Fatalf("resume %s: %v, %v; %+v", c.IntentID, t, err, s.record(c.Key).resumesView())
	}
	return t
}

// neverAgain says that nothing is sent again, and that a person is told why.
func (s *story) neverAgain(c Call, why string) {
	s.t.Helper()
	if m := s.dueResume(c); m != nil {
		s.t.Fatalf("%s is to be sent again", c.IntentID)
	}
	r := s.inState(c, Held)
	if !r.ResumeAt.IsZero() || !strings.Contains(r.ResumesOver, why) || !strings.Contains(r.Current.Cause, why) {
		s.t.Fatalf("resumes at %v, over %q, cause %q; want %q", r.ResumeAt, r.ResumesOver, r.Current.Cause, why)
	}
}

// gone is longer than lease and grace.
const gone = storyLease + storyGrace

func TestAnUnknownOutcomeIsSentAgain(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	first := s.loseResumed(c)
	hold := s.hold(c)
	if m := s.dueResume(c); m != nil {
		t.Fatal("it is sent again while the first attempt may still be on its way")
	}
	if v := s.admit(c).Intent.Resumes; v == nil || !v.Next.Equal(s.record(c.Key).Attempts[0].LeaseEnd.Add(storyGrace)) {
		t.Fatalf("it shows %+v", v)
	}
	s.pass(gone)
	again := s.resume(c)
	if again.Attempt != 2 || again.ProviderKey != first.ProviderKey || again.Left() <= 0 || again.Left() > storyLease {
		t.Fatalf("%+v", again)
	}
	r := s.inState(c, InFlight)
	if len(r.Kept) == 0 || !r.Attempts[1].Resumed {
		t.Fatalf("in flight: %+v", r)
	}
	s.want(s.admit(c), InFlightNow, ReasonInFlight)
	if v, err := s.Hold(s.ctx, hold.HoldID); err != nil || v.State != HoldVoid || !strings.Contains(v.Effect, "sent again") {
		t.Fatalf("the hold is %+v, %v", v, err)
	}
	s.settle(again, paid("re_1"))
	r = s.inState(c, Succeeded)
	if len(r.Kept) > 0 || r.ProviderReference != "re_1" || r.Winner != 2 || r.Disputed || r.RefundOwed {
		t.Fatalf("settled: %+v", r)
	}
	a := s.admit(c)
	s.want(a, Replay, "")
	if got := a.Intent.Attempts; got[0].Resumed || !got[1].Resumed || got[0].Outcome != AttemptUnknown {
		t.Fatalf("the history shows %+v", got)
	}
}

// K09: older than the provider's own window: held, never sent again.
func TestK09TheProviderMayHaveForgottenTheKey(t *testing.T) {
	for name, tc := range map[string]struct {
		pass  time.Duration // after lease and grace
		clock func(*story)
		known time.Duration
	}{
		"the window is over":             {pass: 2 * storyKnown, known: storyKnown},
		"a send would end too late":      {pass: storyKnown - gone - storyWait + time.Second, known: storyKnown},
		"the provider knows it for less": {pass: 0, known: 2 * time.Minute / 2},
		"the store's clock was set back": {pass: storyKnown, clock: func(s *story) { s.time.stepStore(-50 * time.Minute) }, known: storyKnown},
		"the own clock was set back":     {pass: storyKnown, clock: func(s *story) { s.time.stepWall(-50 * time.Minute) }, known: storyKnown},
		"the own clock is ahead":         {pass: 0, clock: func(s *story) { s.time.stepWall(2 * storyKnown) }, known: storyKnown},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.loseResumed(c)
			s.sweep() // somebody watches
			s.pass(gone + tc.pass)
			if tc.clock != nil {
				tc.clock(s)
			}
			if m := s.dueResume(c); m != nil {
				if ticket, err := s.BeginResume(s.ctx, m, tc.known); err != nil || ticket != nil {
					t.Fatalf("%+v, %v", ticket, err)
				}
			}
			s.neverAgain(c, "the provider knows the key for")
			s.want(s.admit(c), UnknownHold, OutcomeUnknown)
		})
	}
}

// The age is that of the first attempt under the key, however often it was sent again.
func TestTheAgeIsThatOfTheFirstAttempt(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c, func(p *Policy) {
		p.Retry = &RetryBudget{Attempts: 50, Initial: time.Second, Max: time.Second, Factor: 1}
	})
	n := 1
	for range 300 {
		s.pass(gone + time.Second)
		m := s.dueResume(c)
		if m == nil {
			break
		}
		ticket, err := s.BeginResume(s.ctx, m, storyKnown)
		if err != nil {
			t.Fatal(err)
		}
		if ticket == nil {
			break
		}
		n++
		s.settle(ticket, lost())
		s.pass(3 * time.Minute)
	}
	first := s.record(c.Key).Attempts[0].Started
	for _, a := range s.record(c.Key).Attempts[1:] {
		if end := a.LeaseEnd.Add(storyGrace + storySettle); !end.Before(first.Add(storyKnown)) {
			t.Errorf("attempt %d could still be paid at %s, when the key is forgotten", a.Number, end.Sub(first))
		}
	}
	if n < 5 {
		t.Errorf("it was sent %d times", n)
	}
	s.neverAgain(c, "the provider knows the key for")
}

// R18: what is refused, or "already used", after an unknown attempt is unknown, never failed.
func TestR18ARefusedResumedAttemptIsUnknown(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c)
	s.pass(gone)
	s.settle(s.resume(c), Result{Outcome: AttemptFailed, Response: &Response{Status: 422}, Detail: "the upstream answered 422"})
	r := s.inState(c, Held)
	if !r.Current.has(OutcomeUnknown) || r.Attempts[1].Outcome != AttemptFailed {
		t.Fatalf("%+v", r)
	}
	s.pass(gone)
	s.neverAgain(c, "attempt 2 was refused")
	s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
}

// A check that finds nothing does not take back that the provider has refused the key.
func TestAbsenceAfterARefusalIsNoFailure(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c, func(p *Policy) { p.Check = checkedPolicy().Check })
	if !s.record(c.Key).nextCheck().IsZero() {
		t.Fatal("it is asked about while it may be sent again")
	}
	s.pass(gone)
	s.settle(s.resume(c), Result{Outcome: AttemptFailed, Response: &Response{Status: 422}})
	for range 6 {
		s.answerCheck(c, notFound())
		s.pass(storyWait)
	}
	s.inState(c, Held)
	s.answerCheck(c, found("re_1"))
	s.inState(c, Succeeded)
}

// First it is sent again, then the provider is asked.
func TestFirstResumeThenCheck(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c, func(p *Policy) {
		p.Check = checkedPolicy().Check
		p.Retry = &RetryBudget{Attempts: 2, Initial: time.Second, Max: time.Second, Factor: 1}
	})
	s.pass(gone)
	s.settle(s.resume(c), lost())
	s.answerCheck(c, found("re_1"))
	if r := s.inState(c, Succeeded); r.Winner != 2 {
		t.Fatalf("%+v", r)
	}
}

// The same once the window is over: the checks begin then, with their whole time.
func TestTheChecksBeginWhenNothingIsSentAgain(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c, func(p *Policy) { p.Check = checkedPolicy().Check })
	s.pass(2 * storyKnown)
	s.neverAgain(c, "the provider knows the key")
	if at := s.record(c.Key).nextCheck(); at.Before(s.time.store()) {
		t.Fatalf("the first check is due %s", at)
	}
	s.answerCheck(c, found("re_1"))
	s.inState(c, Succeeded)
}

// R36: the resumed attempt's lease ends, and the first one's late success is on the record.
func TestR36ALateSuccessMeetsAResumedAttempt(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	first := s.loseResumed(c)
	s.pass(gone)
	s.resume(c)
	s.settle(first, paid("re_1"))
	s.inState(c, InFlight)
	s.restart()
	s.sweep()
	s.pass(gone)
	s.sweep()
	r := s.inState(c, Succeeded)
	if r.Winner != 1 || r.RefundOwed || r.Disputed || len(r.Kept) > 0 {
		t.Fatalf("%+v", r)
	}
}

// Both attempts are told paid: by the provider's word it is one payment, unless it names two.
func TestOnePaymentToldByBothAttempts(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second string
		owed          bool
	}{
		"one reference": {"re_1", "re_1", false}, "no reference": {"", "", false}, "one without": {"", "re_2", false}, "two payments": {"re_1", "re_2", true},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			first := s.loseResumed(c)
			s.pass(gone)
			again := s.resume(c)
			s.settle(again, paid(tc.second))
			s.settle(first, paid(tc.first))
			if r := s.inState(c, Succeeded); r.RefundOwed != tc.owed || r.Disputed {
				t.Fatalf("owed %v, disputed %v", r.RefundOwed, r.Disputed)
			}
		})
	}
}

// A process dies with the resumed attempt in its hand: the next one goes on, and the budget counts.
func TestAResumedAttemptIsCounted(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c, func(p *Policy) {
		p.Retry = &RetryBudget{Attempts: 3, Initial: time.Second, Max: time.Second, Factor: 1}
	})
	for range 2 {
		s.pass(gone + time.Second)
		s.resume(c)
		s.restart()
		s.sweep()
		s.pass(gone)
		s.sweep()
		s.inState(c, Held)
	}
	s.pass(gone)
	s.neverAgain(c, "budget")
	if n := len(s.record(c.Key).Attempts); n != 3 {
		t.Fatalf("%d attempts", n)
	}
}

func TestTwoProcessesResumeOnce(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c)
	other := s.process()
	for _, e := range []*Engine{s.Engine, other} {
		if err := e.Sweep(s.ctx); err != nil {
			t.Fatal(err)
		}
	}
	s.pass(gone)
	var tickets int
	var due []*Resumption
	for _, e := range []*Engine{s.Engine, other} {
		m, err := e.NextResume(s.ctx, c.Key)
		if err != nil || m == nil {
			t.Fatalf("%+v, %v", m, err)
		}
		due = append(due, m)
	}
	for i, e := range []*Engine{s.Engine, other} {
		ticket, err := e.BeginResume(s.ctx, due[i], storyKnown)
		if err != nil {
			t.Fatal(err)
		}
		if ticket != nil {
			tickets++
		}
	}
	if tickets != 1 {
		t.Fatalf("%d of two may send", tickets)
	}
	if err := other.PutOffResume(s.ctx, due[1]); err != nil {
		t.Fatal(err)
	}
	s.inState(c, InFlight)
}

// A process that has not watched the attempt does not believe the store's clock alone.
func TestAResumeWaitsUntilItWasWatched(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c)
	s.restart()
	s.time.stepStore(20 * time.Minute)
	if m := s.dueResume(c); m != nil {
		t.Fatal("the store's clock alone has let it be sent again")
	}
	s.pass(gone)
	if m := s.dueResume(c); m == nil {
		t.Fatal("it is not due though it was watched")
	}
}

func TestWhatIsNotSentAgain(t *testing.T) {
	t.Run("a request that was not kept", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		c.NotKept = "its request has 70000 bytes"
		s.settle(s.sendUnder(c, resumedPolicy()), lost())
		s.pass(gone)
		s.neverAgain(c, "70000 bytes")
	})
	t.Run("one that was accepted", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.settle(s.sendUnder(c.keptAs("x"), resumedPolicy()), Result{Outcome: AttemptPending, Response: &Response{Status: 202}})
		s.pass(gone)
		s.neverAgain(c, "accepted")
	})
	t.Run("R32: a lost 202, and the resumed one is accepted", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseResumed(c)
		s.pass(gone)
		s.settle(s.resume(c), Result{Outcome: AttemptPending, Response: &Response{Status: 202}})
		s.pass(storyWait)
		s.neverAgain(c, "accepted")
		v := s.resolve(s.hold(c), Release)
		if v.State != HoldVoid {
			t.Fatalf("the release: %+v", v)
		}
	})
	t.Run("one that was sent late", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.settle(s.sendUnder(c.keptAs("x"), resumedPolicy()), Result{Outcome: AttemptUnknown, LateSend: true})
		s.pass(gone)
		s.neverAgain(c, "after its deadline")
	})
	t.Run("what somebody ends", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseResumed(c)
		s.pass(gone)
		if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool has another credential"); err != nil {
			t.Fatal(err)
		}
		s.neverAgain(c, "another credential")
	})
	t.Run("what a person has decided", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseResumed(c)
		s.pass(gone)
		m := s.dueResume(c)
		s.resolve(s.hold(c), Reject)
		if ticket, err := s.BeginResume(s.ctx, m, storyKnown); err != nil || ticket != nil {
			t.Fatalf("%+v, %v", ticket, err)
		}
		if r := s.inState(c, Rejected); len(r.Kept) > 0 {
			t.Fatal("its request is still kept")
		}
	})
	t.Run("what another payment stands in the way of", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.loseResumed(c)
		other := c.under("intent-2")
		s.wantHeld(s.admit(other), ScopeOverlap)
		s.resolve(s.hold(other), Release)
		s.pay(other, "re_2")
		s.pass(gone)
		if ticket, err := s.BeginResume(s.ctx, s.dueResume(c), storyKnown); err != nil || ticket != nil {
			t.Fatalf("%+v, %v", ticket, err)
		}
		s.neverAgain(c, "stands in its way")
	})
	registered := func(s *story, valid time.Duration) Call {
		c := s.call("intent-1", "order/9")
		g := Registration{ValidUntil: s.time.store().Add(valid)}
		if a := s.register(stated(c), g, "", resumedPolicy()); a.Verdict != Allow {
			t.Fatal(a.Verdict)
		}
		s.loseResumed(c)
		return c
	}
	t.Run("what is valid no longer, once it begins", func(t *testing.T) {
		s := tell(t)
		c := registered(s, gone+2*time.Minute)
		s.pass(gone)
		m := s.dueResume(c)
		if m == nil {
			t.Fatal("it is still valid, and is not sent again")
		}
		s.pass(2 * time.Minute)
		if ticket, err := s.BeginResume(s.ctx, m, storyKnown); err != nil || ticket != nil {
			t.Fatalf("%+v, %v", ticket, err)
		}
		s.neverAgain(c, causeNotValid)
	})
	t.Run("what is valid no longer, by the sweep", func(t *testing.T) {
		s := tell(t)
		c := registered(s, gone)
		s.pass(gone)
		s.neverAgain(c, causeNotValid)
	})
	t.Run("after the memory was lost", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.opts.LostAt, s.opts.ForgetLost = s.time.store(), true
		s.restart()
		s.loseResumed(c)
		s.pass(gone)
		s.neverAgain(c, "lost its memory")
	})
}

func TestAResumeThatIsPutOff(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c)
	s.pass(gone)
	if err := s.PutOffResume(s.ctx, s.dueResume(c)); err != nil {
		t.Fatal(err)
	}
	if m := s.dueResume(c); m != nil {
		t.Fatal("it is due at once again")
	}
	s.pass(time.Minute)
	s.settle(s.resume(c), paid("re_1"))
	s.inState(c, Succeeded)
}

// A slot is needed as for any attempt.
func TestAResumedAttemptNeedsASlot(t *testing.T) {
	s := tell(t)
	c, other := s.call("intent-1", "order/9"), s.call("intent-2", "order/10")
	one := func(p *Policy) { p.MaxInFlight = 1 }
	s.loseResumed(c, one)
	s.pass(gone)
	ticket := s.sendUnder(other, resumedPolicy(one))
	if got, err := s.BeginResume(s.ctx, s.dueResume(c), storyKnown); err != nil || got != nil {
		t.Fatalf("%+v, %v", got, err)
	}
	s.inState(c, Held)
	s.settle(ticket, paid("re_2"))
	s.settle(s.resume(c), paid("re_1"))
	s.inState(c, Succeeded)
}

// The reply to its Reserve is lost, or the request: nothing is sent that nobody knows of.
func TestALostReplyToAResumesReserve(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseResumed(c)
	s.pass(gone)
	m := s.dueResume(c)
	s.net.hook(nil, func(what string) error {
		if what == "Reserve" {
			return errStoryLost
		}
		return nil
	})
	if ticket, err := s.BeginResume(s.ctx, m, storyKnown); !errors.Is(err, errStoryLost) || ticket != nil {
		t.Fatalf("%+v, %v", ticket, err)
	}
	s.net.hook(nil, nil)
	s.inState(c, InFlight)
	s.runLater()
	r := s.inState(c, Held)
	if r.Attempts[1].Outcome != AttemptRetryable || r.ResumeAt.IsZero() {
		t.Fatalf("%+v", r)
	}
	s.pass(gone)
	s.settle(s.resume(c), paid("re_1"))
	s.inState(c, Succeeded)
}

// It counts once in a limit, whatever is known of how many attempts.
func TestAResumedAttemptCountsOnce(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	first := s.loseResumed(c)
	r := s.record(c.Key)
	if n := r.payments(0); n != 1 {
		t.Fatalf("lost: %d payments", n)
	}
	s.pass(gone)
	again := s.resume(c)
	if n := s.record(c.Key).payments(0); n != 1 {
		t.Fatalf("in flight again: %d payments", n)
	}
	s.settle(first, paid("re_1"))
	if n := s.record(c.Key).payments(0); n != 1 {
		t.Fatalf("in flight, and known as paid: %d payments", n)
	}
	s.settle(again, lost())
	if n := s.inState(c, Succeeded).payments(0); n != 1 {
		t.Fatalf("paid: %d payments", n)
	}
}

// By the store's clock alone, which was set back, it would be sent when the provider has forgotten it.
func TestTheOwnClockCountsToo(t *testing.T) {
	for m, sends := range map[mutation]bool{none: false, resumeByStore: true} {
		s := tell(t)
		s.opts.mutation = m
		s.restart()
		c := s.call("intent-1", "order/9")
		s.loseResumed(c)
		s.sweep()
		s.pass(gone + storyKnown)
		s.time.stepStore(-50 * time.Minute)
		if due := s.dueResume(c) != nil; due != sends {
			t.Errorf("%q: it is sent again: %v", m, due)
		}
	}
}

// A person's decision is followed by a call or by nothing: what was kept goes with it.
func TestAReleaseThatNobodyUsedIsNotSentAgain(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	knownForAWeek := func(p *Policy) { p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: 7 * 24 * time.Hour} }
	s.loseResumed(c, knownForAWeek)
	s.sweep()
	s.pass(gone)
	if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
		t.Fatal(err)
	}
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	if r := s.inState(c, Released); len(r.Kept) > 0 {
		t.Fatal("the request is kept though a person has decided")
	}
	s.pass(24*time.Hour + time.Minute)
	s.sweep()
	s.wantHeld(s.admit(c), OutcomeUnknown)
	if r := s.inState(c, Held); !r.ResumeAt.IsZero() || !strings.Contains(r.ResumesOver, "a person has released it") {
		t.Fatalf("sent again at %s; over: %q", r.ResumeAt, r.ResumesOver)
	}
	s.pass(time.Minute)
	s.sweep()
	s.pass(time.Minute)
	if s.dueResume(c) != nil {
		t.Fatal("it is due to be sent again, and nobody has called")
	}
	// The call that a person lets through is kept like any other.
	s.take(c, Release)
	s.settle(s.sendUnder(c.keptAs("request of intent-1"), resumedPolicy(knownForAWeek)), lost())
	if r := s.inState(c, Held); r.ResumeAt.IsZero() {
		t.Fatalf("what a released call has sent is not sent again: %q", r.ResumesOver)
	}
}

// Nor is it sent after it could no longer be sent.
func TestAReleaseThatWasNotUsedInTimeIsNotSentAgain(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	p := resumedPolicy(func(p *Policy) { p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: 7 * 24 * time.Hour} })
	s.register(stated(c), Registration{ValidUntil: s.time.store().Add(10 * time.Minute)}, "", p)
	s.want(s.settle(s.sendUnder(c.keptAs("request of intent-1"), p), lost()), UnknownHold, OutcomeUnknown)
	s.sweep()
	s.pass(gone)
	if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
		t.Fatal(err)
	}
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.pass(time.Hour)
	s.sweep()
	if r := s.inState(c, Held); !strings.HasPrefix(r.Current.Cause, causeNotValid) || !r.ResumeAt.IsZero() {
		t.Fatalf("cause %q, sent again at %s", r.Current.Cause, r.ResumeAt)
	}
	s.pass(time.Minute)
	s.sweep()
	s.pass(time.Minute)
	if s.dueResume(c) != nil {
		t.Fatal("it is due to be sent again after what was registered was valid")
	}
}

// A settleAfter that has become longer counts for what is sent again.
func TestTheLongerSettleAfterCounts(t *testing.T) {
	s := tell(t)
	late := s.call("intent-1", "order/9")
	s.loseResumed(late)
	s.sweep()
	s.pass(gone)
	m := s.dueResume(late)
	m.SettleAfter = storyKnown
	if ticket, err := s.BeginResume(s.ctx, m, storyKnown); err != nil || ticket != nil {
		t.Fatalf("sent again: %v %v", ticket, err)
	}
	s.neverAgain(late, "would come too late")

	c := s.call("intent-2", "order/10")
	s.loseResumed(c)
	s.sweep()
	s.pass(gone)
	m = s.dueResume(c)
	m.SettleAfter += time.Minute
	ticket, err := s.BeginResume(s.ctx, m, storyKnown)
	if err != nil || ticket == nil {
		t.Fatalf("not sent again: %v %v", ticket, err)
	}
	if a := s.record(c.Key).last(); a.SettleAfter != storyPolicy().SettleAfter+time.Minute {
		t.Fatalf("settleAfter %s", a.SettleAfter)
	}
	s.settle(ticket, paid("re_1"))
}

// releasable is an intent whose outcome is unknown, that is not sent again by itself, and
// that a person may release.
func releasable(s *story, changes ...func(*Policy)) (c Call, key string) {
	s.t.Helper()
	c = s.call("intent-1", "order/9")
	key = s.loseResumed(c, changes...).ProviderKey
	s.sweep()
	s.pass(gone)
	if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
		s.t.Fatal(err)
	}
	s.pass(storyWait - gone)
	s.sweep()
	return c, key
}

// sendReleased sends what a person has released, and says under which key.
func (s *story) sendReleased(c Call) *Ticket {
	s.t.Helper()
	return s.sendUnder(c.keptAs("request of "+c.IntentID), resumedPolicy())
}

// wantHeldForKey says that the intent is held because the provider may have forgotten the key.
func (s *story) wantHeldForKey(c Call, causes ...string) {
	s.t.Helper()
	r := s.inState(c, Held)
	if !r.Current.has(OutcomeUnknown) || !r.Current.has(KeyExpired) {
		s.t.Fatalf("held for %v", r.Current.Reasons)
	}
	for _, cause := range append(causes, "the provider knows the key for", "under a new key") {
		if !strings.Contains(r.Current.Cause, cause) {
			s.t.Fatalf("cause %q, want %q", r.Current.Cause, cause)
		}
	}
}

// notReleased says that a release of the intent is not taken, because of the key.
func (s *story) notReleased(c Call, res Resolution) {
	s.t.Helper()
	before := s.hold(c)
	res.Decision = Release
	if after := s.resolveWith(before, res); after.State != HoldVoid || !strings.Contains(after.Effect, "the provider knows the key for") {
		s.t.Fatalf("%s: %q", after.State, after.Effect)
	}
	if n := s.hold(c).Number; n != before.Number+1 {
		s.t.Fatalf("hold %d follows %d", n, before.Number)
	}
	s.wantHeldForKey(c, "Release was not taken")
}

// While the provider knows the key, a release is sent under it: if the person was wrong, nothing moves twice.
func TestAReleaseInsideTheProvidersWindowKeepsTheKey(t *testing.T) {
	s := tell(t)
	c, key := releasable(s)
	s.take(c, Release)
	ticket := s.sendReleased(c)
	if ticket.ProviderKey != key {
		t.Fatalf("sent under %s, want %s", ticket.ProviderKey, key)
	}
	s.settle(ticket, paid("re_1"))
}

// Once the provider may have forgotten the key, a release is not taken: the hold says so, and
// only a release of the one in its place sends it, under a new key.
func TestAReleaseAfterTheProvidersWindow(t *testing.T) {
	s := tell(t)
	c, key := releasable(s)
	s.pass(storyKnown)
	s.notReleased(c, Resolution{})
	if got := s.hold(c).Reasons; !slices.Equal(got, []Reason{OutcomeUnknown, KeyExpired}) {
		t.Fatalf("reasons %v", got)
	}
	s.want(s.admit(c), UnknownHold, OutcomeUnknown)
	s.pass(3 * time.Hour)
	held := s.hold(c)
	s.take(c, Release)
	s.pass(3 * time.Hour)
	s.sweep()
	s.inState(c, Released)
	ticket := s.sendReleased(c)
	v, err := s.Hold(s.ctx, HoldID{Key: c.Key, Number: held.Number, Epoch: held.Epoch, Nonce: held.Nonce})
	if err != nil || len(v.Sent) != 2 || v.Sent[0].Key != key || v.Sent[1].Key != ticket.ProviderKey || v.Sent[1].Number != 2 || v.Sent[0].Started.IsZero() {
		t.Fatalf("the hold shows that %+v was sent, %v", v.Sent, err)
	}
	if ticket.ProviderKey == key || s.record(c.Key).Generation != 2 {
		t.Fatalf("sent under %s, as before", ticket.ProviderKey)
	}
	s.settle(ticket, paid("re_2"))
	if n := s.inState(c, Succeeded).payments(0); n != 1 {
		t.Fatalf("%d payments", n)
	}
}

// All else that a person can say of it is taken as ever.
func TestOtherDecisionsAfterTheProvidersWindow(t *testing.T) {
	for d, want := range map[Decision]State{Reject: Rejected, MarkPaid: Succeeded, MarkFailed: Failed} {
		for _, refusedBefore := range []bool{false, true} {
			s := tell(t)
			c, _ := releasable(s)
			s.pass(storyKnown)
			if refusedBefore {
				s.notReleased(c, Resolution{})
			}
			s.take(c, d)
			s.inState(c, want)
		}
	}
}

// A release that was taken in time is not used when the provider may have forgotten the key.
func TestAReleaseIsUsedInsideTheProvidersWindowOrNotAtAll(t *testing.T) {
	left := storyKnown - 2*storyWait
	for name, tc := range map[string]struct {
		until func(s *story, c Call)
		held  func(s *story, c Call)
	}{
		"found by the sweep": {
			until: func(s *story, _ Call) { s.pass(left) },
			held:  func(s *story, _ Call) { s.sweep() },
		},
		"found by the call": {
			until: func(s *story, _ Call) { s.pass(left) },
			held: func(s *story, c Call) {
				s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown, KeyExpired)
			},
		},
		"the own clock alone says so": {
			until: func(s *story, _ Call) { s.time.stepWall(left) },
			held: func(s *story, c Call) {
				s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown, KeyExpired)
			},
		},
		"the provider knows it for less now": {
			until: func(s *story, _ Call) { s.pass(2 * time.Minute) },
			held: func(s *story, c Call) {
				p := resumedPolicy(func(p *Policy) { p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: storyWait + time.Minute} })
				s.wantHeld(s.admitUnder(c.keptAs("x"), p), OutcomeUnknown, KeyExpired)
			},
		},
		"nothing could be sent at first": {
			until: func(s *story, c Call) {
				s.settle(s.sendReleased(c), Result{Outcome: AttemptRetryable, Detail: "connection refused"})
				s.inState(c, Retryable)
				s.pass(left)
			},
			held: func(s *story, _ Call) { s.sweep() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c, _ := releasable(s)
			s.take(c, Release)
			tc.until(s, c)
			tc.held(s, c)
			s.wantHeldForKey(c, "the release was not used in time")
		})
	}
}

// What a tool says of its provider now counts for a release too.
func TestAReleaseAsksForTheProvidersWindowAsItIs(t *testing.T) {
	s := tell(t)
	c, _ := releasable(s)
	now := func(window time.Duration) func(*Call) (Policy, string) {
		return func(*Call) (Policy, string) {
			return resumedPolicy(func(p *Policy) { p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: window} }), ""
		}
	}
	s.notReleased(c, Resolution{Now: now(storyWait)})
}

// What moved nothing for sure is another payment under any key: no window counts.
func TestWhatMovedNothingHasNoWindow(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendReleased(c), Result{Outcome: AttemptRetryable, Detail: "connection refused"})
	s.pass(2 * storyKnown)
	s.sweep()
	s.settle(s.sendReleased(c), paid("re_1"))
}

// What a lost memory may hide is sent under the key that it would have had, while that may be known.
func TestAReleaseAfterALossKeepsTheKey(t *testing.T) {
	for _, late := range []bool{false, true} {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.lostMemory(nil)
		s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown)
		key := s.record(c.Key).ProviderKey
		if late {
			s.pass(storyKnown)
			s.notReleased(c, Resolution{})
			continue
		}
		s.take(c, Release)
		if got := s.sendReleased(c).ProviderKey; got != key {
			t.Fatalf("sent under %s, want %s", got, key)
		}
	}
}
