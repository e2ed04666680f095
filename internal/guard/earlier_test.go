// This file is late word of what was sent under an earlier key of the provider, after a person
// has had the intent sent under another one: no key keeps the two from being paid both.

package guard

import (
	"strings"
	"testing"
)

// anotherKey is an intent that a person has released under another key of the provider, and its
// first attempt.
func anotherKey(s *story, changes ...func(*Policy)) (Call, *Ticket) {
	s.t.Helper()
	c := s.call("intent-1", "order/9")
	first := s.loseResumed(c, changes...)
	s.sweep()
	s.pass(gone)
	if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
		s.t.Fatal(err)
	}
	s.pass(storyWait - gone)
	s.sweep()
	s.pass(storyKnown)
	s.notReleased(c, Resolution{})
	s.take(c, Release)
	if r := s.inState(c, Released); r.Generation != 2 {
		s.t.Fatalf("generation %d", r.Generation)
	}
	return c, first
}

// notReleasedAtAll says that no release is taken while an attempt was accepted.
func notReleasedAtAll(s *story, c Call) {
	s.t.Helper()
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	if v := s.resolve(s.hold(c), Release); v.State != HoldVoid || !strings.Contains(v.Effect, "accepted the earlier attempt (202)") {
		s.t.Fatalf("%s: %q", v.State, v.Effect)
	}
	s.inState(c, Held)
}

func TestLateAcceptedUnderAnEarlierKey(t *testing.T) {
	t.Run("while it is released", func(t *testing.T) {
		s := tell(t)
		c, first := anotherKey(s)
		s.settle(first, accepted())
		s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown)
		notReleasedAtAll(s, c)
		s.take(c, MarkFailed)
	})
	t.Run("while it may be tried again", func(t *testing.T) {
		s := tell(t)
		c, first := anotherKey(s)
		s.settle(s.sendReleased(c), unreachable())
		s.inState(c, Retryable)
		s.settle(first, accepted())
		s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown)
		notReleasedAtAll(s, c)
	})
	for name, res := range map[string]Result{
		"while it is in flight, and nothing was sent": unreachable(),
		"while it is in flight, and it is refused":    {Outcome: AttemptFailed, Response: &Response{Status: 422}},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c, first := anotherKey(s)
			second := s.sendReleased(c)
			s.settle(first, accepted())
			s.settle(second, res)
			s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown)
			notReleasedAtAll(s, c)
		})
	}
	t.Run("while it is to be sent again", func(t *testing.T) {
		s := tell(t)
		c, first := anotherKey(s)
		s.settle(s.sendUnder(c.keptAs("request of intent-1"), resumedPolicy()), lost())
		s.sweep()
		s.pass(gone)
		m := s.dueResume(c)
		if m == nil {
			t.Fatal("it is not to be sent again")
		}
		s.settle(first, accepted())
		if ticket, err := s.BeginResume(s.ctx, m, storyKnown); err != nil || ticket != nil {
			t.Fatalf("%+v, %v", ticket, err)
		}
		s.neverAgain(c, "under an earlier key, may be paid yet")
		s.pass(storyWait)
		s.sweep()
		notReleasedAtAll(s, c)
	})
	t.Run("before its next unknown outcome", func(t *testing.T) {
		s := tell(t)
		c, first := anotherKey(s)
		second := s.sendUnder(c.keptAs("request of intent-1"), resumedPolicy())
		s.settle(first, accepted())
		s.settle(second, lost())
		s.pass(gone)
		s.neverAgain(c, "under an earlier key, may be paid yet")
	})
}

// A status check says nothing of what was sent under an earlier key.
func TestAbsenceUnderOneKeySaysNothingOfAnother(t *testing.T) {
	s := tell(t)
	check := func(p *Policy) { p.Check = checkedPolicy().Check }
	c, first := anotherKey(s, check)
	second := s.sendUnder(c.keptAs("request of intent-1"), resumedPolicy(check))
	s.settle(first, accepted())
	s.settle(second, lost())
	s.sweep()
	s.pass(storyWait)
	for range 4 {
		s.answerCheck(c, notFound())
		s.pass(storyWait)
	}
	s.inState(c, Held)
}

// What was sent late under an earlier key is waited for.
func TestSentLateUnderAnEarlierKey(t *testing.T) {
	s := tell(t)
	c, first := anotherKey(s)
	s.settle(first, Result{Outcome: AttemptUnknown, LateSend: true})
	r := s.inState(c, Held)
	if !r.Current.Waiting || !r.Current.has(OutcomeUnknown) {
		t.Fatalf("%+v", r.Current)
	}
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.settle(s.sendReleased(c), paid("re_2"))
}

// The answer to a check that began before the release comes after it.
func TestACheckOfAnEarlierKeyFindsThatItWasAccepted(t *testing.T) {
	for _, sent := range []bool{false, true} {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		check := func(p *Policy) { p.Check = checkedPolicy().Check }
		s.loseResumed(c, check)
		s.sweep()
		s.pass(gone)
		if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
			t.Fatal(err)
		}
		s.pass(storyWait - gone)
		s.sweep()
		ask, err := s.BeginCheck(s.ctx, c.Key)
		if err != nil || ask == nil {
			t.Fatalf("%+v, %v", ask, err)
		}
		s.pass(storyKnown)
		s.notReleased(c, Resolution{})
		s.take(c, Release)
		var second *Ticket
		if sent {
			second = s.sendUnder(c.keptAs("x"), resumedPolicy(check))
		}
		if err := s.EndCheck(s.ctx, ask, CheckResult{Outcome: AttemptPending}); err != nil {
			t.Fatal(err)
		}
		if sent {
			s.settle(second, unreachable())
		}
		if r := s.inState(c, Held); !r.Attempts[0].Accepted || !r.Current.has(OutcomeUnknown) {
			t.Fatalf("%+v", r.Attempts[0])
		}
		notReleasedAtAll(s, c)
	}
}
