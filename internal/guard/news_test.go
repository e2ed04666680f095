// This file is about news that contradicts what was decided: a person's word, a
// waiting that was over, a release, a hit. What may have moved money must go on
// standing in the way.

package guard

import (
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

func TestALateSuccessEndsAPersonsWordThatNothingMoved(t *testing.T) {
	s := tell(t)
	c := s.call("i-1", "order/9")
	tk := s.loseAndWait(c)
	s.take(c, MarkFailed)
	if a := s.settle(tk, paid("re_1")); !a.Intent.RefundOwed {
		t.Error("no refund is owed")
	}
	s.pass(storyTTL + time.Minute)
	s.sweep()
	s.inState(c, Tombstone)
	s.want(s.admit(c), UnknownHold, KeyExpired)
	e := s.admit(s.call("i-3", "order/9").with(func(c *Call) {
		c.Fingerprint = "sha256:three"
		c.Recipient = "other"
		c.Caller = "system:serviceaccount:support:b"
	}))
	s.want(e, UnknownHold, ScopeOverlap)
}

func TestALateAcceptanceEndsAPersonsWordThatNothingMoved(t *testing.T) {
	s := tell(t)
	c := s.call("i-1", "order/9")
	tk := s.loseAndWait(c)
	s.take(c, MarkFailed)
	s.settle(tk, accepted())
	e := s.admit(s.call("i-3", "order/9"))
	s.want(e, UnknownHold, ScopeOverlap)
}

func TestAReleaseCoversNoOtherBudget(t *testing.T) {
	s := tell(t)
	pa, pb := storyPolicy(), storyPolicy()
	pb.Budget = "other"
	x := s.call("x", "order/9").with(func(c *Call) { c.Tool = "charge" })
	s.want(s.settle(s.sendUnder(x, pb), paid("x")), Allow, "") // paid in budget "other"
	y := s.call("y", "order/9").with(func(c *Call) { c.Tool = "t2" })
	s.want(s.settle(s.sendUnder(y, pa), paid("y")), Allow, "") // paid in A
	z := s.call("z", "order/9")
	s.want(s.admitUnder(z, pa), UnknownHold, ScopeOverlap)
	s.take(z, Release)
	s.want(s.admitUnder(z, pb), UnknownHold, ScopeOverlap) // that one it was never shown
}

func TestASuccessUnderAnEarlierKeyStopsTheNextSend(t *testing.T) {
	s := tell(t)
	p := storyPolicy()
	p.TTL = time.Minute
	c := s.call("i-1", "order/9")
	a := s.admitUnder(c, p)
	tk := a.Ticket
	s.settle(tk, lost())
	s.pass(storyWait)
	s.sweep()
	s.take(c, Reject)
	s.pass(2 * time.Minute)
	s.sweep()
	s.inState(c, Tombstone)
	s.want(s.admitUnder(c, p), UnknownHold, KeyExpired)
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	tk2 := s.sendUnder(c, p)
	s.settle(tk, paid("re_1")) // the first attempt's success
	s.settle(tk2, unreachable())
	s.pass(10 * time.Second)
	s.inState(c, Succeeded)
	s.want(s.admitUnder(c, p), Replay, "")
}

func TestALateSendIsWaitedForAnew(t *testing.T) {
	s := tell(t)
	c := s.call("i-1", "order/9")
	tk := s.send(c)
	s.sweep()
	s.pass(storyLease + storyGrace + time.Second)
	s.sweep() // held, waiting
	s.pass(storyWait)
	s.sweep()
	// The sender was paused between look and write; it goes on now, sends, and gets no answer.
	s.settle(tk, Result{Outcome: AttemptUnknown, LateSend: true})
	if v := s.hold(c); v.State != HoldWaiting || v.Number != 2 || v.Cause == "" {
		t.Errorf("the hold is %+v", v)
	}
	// Of the store's clock alone the waiting is over long ago; nobody has watched yet.
	s.pass(storyWait - storyLease - time.Second)
	s.sweep()
	if v := s.hold(c); v.State != HoldWaiting {
		t.Errorf("the hold is %+v", v)
	}
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
}

func TestAnExactMatchThatFailedMeanwhileIsNotInTheWay(t *testing.T) {
	s := tell(t)
	c := s.call("i-1", "order/9").on("s/1")
	tk := s.send(c)
	done := false
	s.net.hook(func(what string) error {
		if what == "Get" && !done {
			done = true
			s.net.hook(nil, nil)
			s.settle(tk, declined())
		}
		return nil
	}, nil)
	a := s.admit(c.under("i-2"))
	s.want(a, Allow, "")
}

func TestAnUnknownThatWasReleasedDoesNotAge(t *testing.T) {
	s := tell(t)
	d := s.call("i-2", "order/10")
	s.loseAndWait(d)
	s.take(d, Release)
	s.wantHeld(s.settle(s.send(d), declined()), OutcomeUnknown)
	s.pass(storyWindow + time.Hour)
	s.sweep()
	s.want(s.admit(d.under("i-3")), UnknownHold, ScopeOverlap)
}

func TestALatePaidTombstoneStandsAlsoWhenItsHoldIsRejected(t *testing.T) {
	s := tell(t)
	// MarkFailed, late success, then a *second* MarkFailed-free path: standing of Held(KeyExpired) after Reject
	c := s.call("i-1", "order/9")
	tk := s.loseAndWait(c)
	s.take(c, MarkFailed)
	s.settle(tk, paid("re_1"))
	s.pass(storyTTL + time.Minute)
	s.sweep()
	s.admit(c)
	s.take(c, Reject)
	s.want(s.admit(s.call("i-3", "order/9").with(func(c *Call) { c.Caller = "system:serviceaccount:support:b" })), UnknownHold, ScopeOverlap)
}

func TestWhatIsReadInAnotherWayCannotBeCompared(t *testing.T) { // R25
	eleven := &intent.Money{Value: "11", Currency: "USD"}
	old := func(c *Call) { c.IdentityHash, c.AmountHash, c.RecipientHash = "old", "amount-1", "recipient-1" }
	for _, row := range []struct {
		name  string
		other func(*Call)
		held  bool
	}{
		{"the scope alone is read in another way", func(c *Call) { old(c); c.IdentityHash = "new" }, true},
		{"and the amount is another", func(c *Call) { old(c); c.IdentityHash = "new"; c.Amount = eleven }, false},
		{"and the recipient is another", func(c *Call) { old(c); c.IdentityHash = "new"; c.Recipient = "b" }, false},
		{"the amount is read in another way", func(c *Call) { old(c); c.IdentityHash, c.AmountHash = "new", "amount-2"; c.Amount = eleven }, true},
		{"it is not read any more", func(c *Call) { old(c); c.IdentityHash, c.AmountHash, c.Amount = "new", "amount-none", nil }, true},
		{"and the recipient is another", func(c *Call) {
			old(c)
			c.IdentityHash, c.AmountHash, c.Recipient = "new", "amount-2", "b"
		}, false},
		{"the recipient is read in another way", func(c *Call) {
			old(c)
			c.IdentityHash, c.RecipientHash, c.Recipient, c.Amount = "new", "recipient-2", "b", eleven
		}, true},
		{"nothing is read in another way", func(c *Call) { old(c); c.Amount = eleven }, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("intent-1", "order/9").with(old), "re_1")
			a := s.admit(s.call("intent-2", "elsewhere/1").with(func(c *Call) { c.Fingerprint = "sha256:other" }).with(row.other))
			if row.held {
				s.wantHeld(a, IdentityChanged)
			} else {
				s.want(a, Allow, "")
			}
		})
	}
}

func TestAnAcceptedPaymentThatAPersonMarkedAsFailedCanBeReleasedOnceItsIDExpired(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.send(c), accepted())
	s.pass(storyWait)
	s.sweep()
	s.take(c, MarkFailed)
	s.pass(storyTTL)
	s.sweep()
	s.wantHeld(s.admit(c), KeyExpired)
	s.take(c, Release)
	s.send(c)
}
