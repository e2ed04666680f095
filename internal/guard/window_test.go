// This file is how long a provider knows a key where the tool does not say the same all the
// time: it says so later, for a while not, or waits for longer than it did.

package guard

import (
	"testing"
	"time"
)

// before has the intent tried once before its tool says Resume: it moved nothing. Then it is
// sent, and its outcome is unknown.
func before(s *story) (c Call) {
	s.t.Helper()
	c = s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c.keptAs("request of intent-1"), storyPolicy()), unreachable())
	s.pass(time.Minute)
	s.loseResumed(c)
	s.sweep()
	return c
}

// ageless takes away when the first attempt began by the own clock, as in what earlier versions
// have written.
func ageless(s *story, c Call) {
	s.t.Helper()
	r := s.record(c.Key)
	next := r.clone()
	next.Attempts[0].Wall = time.Time{}
	if _, _, err := s.update(s.ctx, pending{from: r, to: next, on: onPutOff, now: r.Changed, nonce: s.o.Nonce(), keepMarks: true}, s.soon()); err != nil {
		s.t.Fatal(err)
	}
}

// The key has its age from its first attempt, whatever the tool said then.
func TestTheWindowOfAToolThatResumesSinceTheFirstAttempt(t *testing.T) {
	for _, old := range []bool{false, true} {
		s := tell(t)
		c := before(s)
		if old {
			ageless(s, c)
		}
		s.pass(3 * storyKnown)
		s.neverAgain(c, "the provider knows the key for 1h0m0s, and 3h1m0s of that are over")
	}
}

// By the own clock alone it is too old, also where the tool did not say Resume at first.
func TestTheOwnClockCountsFromTheFirstAttempt(t *testing.T) {
	s := tell(t)
	c := before(s)
	s.pass(gone + storyKnown)
	s.time.stepStore(-50 * time.Minute)
	s.neverAgain(c, "the provider knows the key for")
}

// A release after the window says so, and is not taken and held again for ever.
func TestAReleaseOfAToolThatResumesSinceTheFirstAttempt(t *testing.T) {
	for _, old := range []bool{false, true} {
		s := tell(t)
		c := before(s)
		key := s.record(c.Key).ProviderKey
		if old {
			ageless(s, c)
		}
		s.pass(gone)
		if err := s.EndResumes(s.ctx, s.dueResume(c), "the tool's credential is another one"); err != nil {
			t.Fatal(err)
		}
		s.pass(storyWait - gone)
		s.sweep()
		s.pass(3 * storyKnown)
		s.notReleased(c, Resolution{})
		s.take(c, Release)
		if got := s.sendReleased(c).ProviderKey; got == key {
			t.Fatal("sent under the key that the provider may have forgotten")
		}
	}
}

// presently is the tool as it is, for a resolution.
func presently(p Policy) Resolution {
	return Resolution{Now: func(*Call) (Policy, string) { return p, "" }}
}

// What the tool said when it was sent still binds when it has said something else for a while.
func TestTheWindowIsNotForgotten(t *testing.T) {
	held := storyPolicy().WithRules(func(*Call) (Ruling, error) { return Ruling{Hold: "above"}, nil })
	for name, tc := range map[string]struct {
		present Policy
		until   time.Duration
	}{
		"it says the same again":     {resumedPolicy(), 3 * storyKnown},
		"it still says nothing":      {storyPolicy(), 3 * storyKnown},
		"it says a longer one later": {resumedPolicy(func(p *Policy) { p.Resume = &ResumePolicy{Upstream: "upstream-1", Window: 24 * storyKnown} }), 3 * storyKnown},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c, key := releasable(s)
			s.take(c, Release)
			s.wantHeld(s.admitUnder(c, held), ApprovalRequired)
			s.pass(tc.until)
			s.sweep()
			if v := s.resolveWith(s.hold(c), Resolution{Decision: Release, Now: presently(tc.present).Now}); v.State != HoldVoid || !s.record(c.Key).Current.has(KeyExpired) {
				t.Fatalf("%s: %q", v.State, v.Effect)
			}
			s.resolveWith(s.hold(c), Resolution{Decision: Release, Now: presently(tc.present).Now})
			if got := s.sendUnder(c.keptAs("x"), tc.present); got.ProviderKey == key {
				t.Fatal("sent under the key that the provider may have forgotten")
			}
			if r := s.record(c.Key); r.KeyWindow != 0 {
				t.Fatalf("the new key has the window %s of the earlier one", r.KeyWindow)
			}
		})
	}
	t.Run("a released call of it", func(t *testing.T) {
		s := tell(t)
		c, _ := releasable(s)
		s.take(c, Release)
		s.settle(s.sendUnder(c, storyPolicy()), lost())
		s.pass(storyWait)
		s.sweep()
		s.pass(3 * storyKnown)
		s.notReleased(c, presently(storyPolicy()))
	})
}

// A tool that says now that its provider deduplicates has a window for what was sent before.
func TestTheWindowOfWhatWasSentBefore(t *testing.T) {
	sent := func(t *testing.T) (*story, Call) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.want(s.settle(s.sendUnder(c, storyPolicy()), lost()), UnknownHold, OutcomeUnknown)
		s.sweep()
		s.pass(3 * storyKnown)
		s.sweep()
		return s, c
	}
	t.Run("at the release", func(t *testing.T) {
		s, c := sent(t)
		s.notReleased(c, presently(resumedPolicy()))
	})
	t.Run("at the call", func(t *testing.T) {
		s, c := sent(t)
		s.take(c, Release)
		s.wantHeld(s.admitUnder(c.keptAs("x"), resumedPolicy()), OutcomeUnknown, KeyExpired)
		s.wantHeldForKey(c, "the release was not used in time")
	})
	t.Run("never", func(t *testing.T) {
		s, c := sent(t)
		s.take(c, Release)
		s.settle(s.sendUnder(c, storyPolicy()), paid("re_1"))
	})
}

// A released call has the lease of the tool as it is: all of that is within the window.
func TestALongerTimeoutEndsInsideTheWindow(t *testing.T) {
	long := resumedPolicy(func(p *Policy) { p.Timeout = 30 * time.Minute })
	t.Run("at the call", func(t *testing.T) {
		s := tell(t)
		c, _ := releasable(s)
		s.take(c, Release)
		s.pass(storyKnown - storyWait - 10*time.Minute)
		s.wantHeld(s.admitUnder(c.keptAs("x"), long), OutcomeUnknown, KeyExpired)
	})
	t.Run("at the release", func(t *testing.T) {
		s := tell(t)
		c, _ := releasable(s)
		s.pass(storyKnown - storyWait - 10*time.Minute)
		s.notReleased(c, presently(long))
	})
}
