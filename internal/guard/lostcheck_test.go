// This file is about status checks of what a lost memory may hide.

package guard

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestAFirstCallAfterALossIsAskedAboutByItsKey(t *testing.T) { // S01
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.sendUnder(c, checkedPolicy())
	s.settle(tk, paid("re_1"))
	s.wiped(nil)
	a := s.admitUnder(c, checkedPolicy())
	s.wantHeld(a, OutcomeUnknown)
	if a.Intent.Checks == nil || a.Intent.Checks.Next.IsZero() {
		t.Fatalf("nobody asks: %+v", a.Intent.Checks)
	}
	s.untilCheck(c)
	k := s.beginCheck(c)
	if k.ProviderKey != tk.ProviderKey || k.Upstream != "upstream-1" || k.Recipient != c.Recipient {
		t.Fatalf("%+v, and the key was %s", k, tk.ProviderKey)
	}
	s.endCheck(k, found("re_1"))
	if h := s.hold(c); h.State != HoldVoid || !strings.Contains(h.Effect, "re_1") {
		t.Fatalf("%+v", h)
	}
	again := s.admitUnder(c, checkedPolicy())
	s.want(again, Replay, "")
	if string(again.Response.Body) != `{"found":"re_1"}` || again.Intent.ProviderReference != "re_1" || again.Intent.RefundOwed {
		t.Fatalf("%+v, %s", again.Intent, again.Response.Body)
	}
	s.wantHeld(s.admitUnder(c.under("intent-2"), checkedPolicy()), OutcomeUnknown, ScopeOverlap)
}

// It may have been sent under another ID or key, or by another upstream: no answer that
// there is no payment lets it go.
func TestThatThereIsNoPaymentProvesNothingAfterALoss(t *testing.T) {
	for _, answers := range [][]CheckResult{{notFound()}, {notFound(), unclear()}, {stillPending(), notFound()}} {
		t.Run(fmt.Sprint(answers[0].Outcome, len(answers)), func(t *testing.T) {
			s := tell(t)
			s.settle(s.sendUnder(s.call("before", "order/9"), checkedPolicy()), paid("re_1"))
			s.wiped(nil)
			c := s.call("intent-1", "order/9") // the agent has planned anew
			s.wantHeld(s.admitUnder(c, checkedPolicy()), OutcomeUnknown)
			s.pass(storyWait)
			for n := 0; !s.record(c.Key).nextCheck().IsZero(); n++ {
				s.answerCheck(c, answers[n%len(answers)])
				s.wantHeld(s.admitUnder(c, checkedPolicy()), OutcomeUnknown)
				if n > 500 {
					t.Fatal("the checks do not end")
				}
			}
			if r := s.inState(c, Held); r.Checks.Made < 5 || !r.Checks.FailedAt.IsZero() {
				t.Fatalf("%+v", r.Checks)
			}
		})
	}
}

// What was left of the lost memory, and what only an object shows, are asked about, too.
func TestWhatIsLeftAfterALossIsAskedAbout(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseChecked(c)
	s.pass(storyWait)
	s.sweep()
	for !s.record(c.Key).nextCheck().IsZero() {
		s.answerCheck(c, unclear())
	}
	s.lostMemory(nil)
	s.rehold()
	s.inState(c, Held)
	s.answerCheck(c, notFound())
	s.answerCheck(c, notFound())
	s.inState(c, Held)
	s.answerCheck(c, found("re_1"))
	s.inState(c, Succeeded)
	s.wantReplayed(s.admitUnder(c, checkedPolicy()), `{"found":"re_1"}`)
}

func (s *story) wantReplayed(a Answer, body string) {
	s.t.Helper()
	s.want(a, Replay, "")
	if string(a.Response.Body) != body {
		s.t.Fatalf("replayed %s, want %s", a.Response.Body, body)
	}
}

func TestFirstCallsAtOnceAfterALoss(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, checkedPolicy()), paid("re_1"))
	s.wiped(nil)
	s.keys[c.Key] = true
	answers := make(chan Answer, 8)
	for range cap(answers) {
		go func() {
			a, err := s.Admit(s.ctx, c, checkedPolicy())
			if err != nil {
				t.Error(err)
			}
			answers <- a
		}()
	}
	for range cap(answers) {
		if a := <-answers; a.Verdict != UnknownHold || a.Ticket != nil {
			t.Errorf("%+v", a)
		}
	}
	if r := s.inState(c, Held); r.Hold != 1 || len(r.Attempts) != 1 {
		t.Fatalf("%d holds, %d attempts", r.Hold, len(r.Attempts))
	}
	s.untilCheck(c)
	one := s.beginCheck(c)
	// Another gateway leaves it alone meanwhile.
	if two, err := s.process().BeginCheck(s.ctx, c.Key); err != nil || two != nil {
		t.Fatalf("%+v, %v", two, err)
	}
	s.endCheck(one, found("re_1"))
	s.want(s.admitUnder(c, checkedPolicy()), Replay, "")
}

// A person who lets it go, and then is wrong.
func TestAReleaseAfterALossAndALateCheck(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, checkedPolicy()), paid("re_1"))
	s.wiped(nil)
	s.wantHeld(s.admitUnder(c, checkedPolicy()), OutcomeUnknown)
	s.untilCheck(c)
	k := s.beginCheck(c)
	s.take(c, Release)
	tk := s.sendUnder(c, checkedPolicy())
	s.endCheck(k, found("re_1")) // while the next one is in flight
	s.settle(tk, paid("re_2"))
	if r := s.inState(c, Succeeded); !r.RefundOwed {
		t.Fatalf("two payments, and no refund is owed: %+v", r.Attempts)
	}
	s.pass(time.Minute)
	s.sweep()
}
