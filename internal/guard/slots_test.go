// Stories of slots: how many of a tool, and of one path of a scope, are in flight at
// once. Every story ends with a look at the meters (story.end).

package guard

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

func slotPolicy(inFlight, perScope int) Policy {
	p := storyPolicy()
	p.MaxInFlight, p.MaxInFlightPerScope = inFlight, perScope
	return p
}

// order is a call with a scope of its own.
func (s *story) order(n int) Call {
	s.t.Helper()
	return s.call(fmt.Sprint("i", n), fmt.Sprint("order/", n))
}

func (s *story) slotsTaken() string {
	s.t.Helper()
	sum, err := s.bolt.Meter(s.ctx, slotMeter(s.order(0).Key))
	if err != nil {
		s.t.Fatal(err)
	}
	return sum
}

func TestSlotsAreOfAllProcessesTogether(t *testing.T) {
	s := tell(t)
	p := slotPolicy(2, 0)
	first := s.sendUnder(s.order(1), p)
	s.restart()
	s.sendUnder(s.order(2), p)
	s.restart()
	a := s.admitUnder(s.order(3), p)
	s.want(a, Deny, ReasonTooManyInFlight)
	if a.RetryAfter <= 0 || a.Intent.IntentID != "i3" || a.Intent.Exists {
		t.Fatalf("the refusal says %+v", a)
	}
	s.inState(s.order(3), None) // nothing was recorded
	s.settle(first, paid("p1"))
	s.sendUnder(s.order(3), p)
	s.want(s.admitUnder(s.order(4), p), Deny, ReasonTooManyInFlight)
}

func TestWhoeverLeavesFlightGivesItsSlotBack(t *testing.T) {
	ends := map[string]func(*story, Call, *Ticket){
		"paid":     func(s *story, _ Call, k *Ticket) { s.settle(k, paid("p")) },
		"declined": func(s *story, _ Call, k *Ticket) { s.settle(k, declined()) },
		"nothing sent, to be tried again": func(s *story, _ Call, k *Ticket) {
			s.settle(k, unreachable())
		},
		"unknown":  func(s *story, _ Call, k *Ticket) { s.settle(k, lost()) },
		"accepted": func(s *story, _ Call, k *Ticket) { s.settle(k, accepted()) },
		"the holder died": func(s *story, _ Call, _ *Ticket) {
			s.sweep() // begins to watch
			s.pass(storyLease + storyGrace)
			s.sweep()
		},
		"the holder died, and its call comes again": func(s *story, c Call, _ *Ticket) {
			s.admitUnder(c, slotPolicy(1, 1))
			s.pass(storyLease + storyGrace)
			s.want(s.admitUnder(c, slotPolicy(1, 1)), UnknownHold, OutcomeUnknown)
		},
		"late, while it is still in flight for the store": func(s *story, _ Call, k *Ticket) {
			s.pass(storyLease + time.Second)
			s.settle(k, paid("p"))
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			p := slotPolicy(1, 1)
			c := s.order(1)
			ticket := s.sendUnder(c, p)
			s.want(s.admitUnder(s.order(2), p), Deny, ReasonTooManyInFlight)
			end(s, c, ticket)
			if got := s.slotsTaken(); got != "0" {
				t.Fatalf("%s slots are taken after it", got)
			}
			s.sendUnder(s.order(2), p)
		})
	}
}

func TestALateResultKeepsTheSlotOfTheAttemptInFlight(t *testing.T) {
	s := tell(t)
	p := slotPolicy(1, 0)
	c := s.order(1)
	first := s.sendUnder(c, p)
	s.settle(first, lost())
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.sendUnder(c, p)
	s.settle(first, accepted()) // evidence on a record in flight
	s.inState(c, InFlight)
	if got := s.slotsTaken(); got != "1" {
		t.Fatalf("%s slots are taken", got)
	}
	s.want(s.admitUnder(s.order(2), p), Deny, ReasonTooManyInFlight)
}

func TestALimitIsChangedWhileSlotsAreHeld(t *testing.T) {
	s := tell(t)
	var held []*Ticket
	for n := range 4 {
		held = append(held, s.sendUnder(s.order(n+1), slotPolicy(4, 0)))
	}
	// Lowered: nobody comes in until fewer are in flight than it says.
	s.want(s.admitUnder(s.order(5), slotPolicy(2, 0)), Deny, ReasonTooManyInFlight)
	s.settle(held[0], paid("p1"))
	s.settle(held[1], declined())
	s.want(s.admitUnder(s.order(5), slotPolicy(2, 0)), Deny, ReasonTooManyInFlight)
	s.settle(held[2], paid("p3"))
	fifth := s.sendUnder(s.order(5), slotPolicy(2, 0))
	// Raised.
	sixth := s.sendUnder(s.order(6), slotPolicy(3, 1))
	// Taken out: what is held is given back all the same, and nothing more is counted.
	seventh := s.sendUnder(s.order(7), slotPolicy(0, 0))
	if got := s.slotsTaken(); got != "3" {
		t.Fatalf("%s slots are taken, want 3", got)
	}
	for i, k := range []*Ticket{held[3], fifth, sixth, seventh} {
		s.settle(k, paid(fmt.Sprint("q", i)))
	}
	if got := s.slotsTaken(); got != "0" {
		t.Fatalf("%s slots are taken in the end", got)
	}
	s.sendUnder(s.order(8), slotPolicy(1, 0))
}

func TestRepeatsNeedNoSlot(t *testing.T) {
	s := tell(t)
	p := slotPolicy(1, 0)
	done := s.order(1).on("plan/1")
	s.settle(s.sendUnder(done, p), paid("p1"))
	busy := s.order(2)
	s.sendUnder(busy, p)
	s.wantReplay(s.admitUnder(done, p), "i1", "p1")
	s.wantReplay(s.admitUnder(done.under("again"), p), "i1", "p1") // an exact match
	s.want(s.admitUnder(busy, p), InFlightNow, ReasonInFlight)
	s.want(s.admitUnder(done.with(func(c *Call) { c.Fingerprint = "sha256:two" }), p), Conflict, ReasonRequest)
	// What stands in the way comes before slots, too.
	s.wantHeld(s.admitUnder(s.call("i3", "order/1"), p), ScopeOverlap)

	// So it is for a call that others of its process are before.
	behind := func(c *Call) { c.Behind = true }
	free := slotPolicy(9, 0)
	s.wantReplay(s.admitUnder(done.with(behind), free), "i1", "p1")
	s.want(s.admitUnder(s.order(4).with(behind), free), Deny, ReasonTooManyInFlight)
	s.inState(s.order(4), None)
	s.sendUnder(s.order(4), free)
}

func TestSlotsOfAScope(t *testing.T) {
	s := tell(t)
	p := slotPolicy(0, 1)
	first := s.sendUnder(s.call("i1", "order/1", "order/2"), p)
	// The second is for the same and was released by somebody who saw the first in flight.
	second := s.call("i2", "order/2", "order/3")
	s.wantHeld(s.admitUnder(second, p), ScopeOverlap)
	s.take(second, Release)
	a := s.admitUnder(second, p)
	s.want(a, Deny, ReasonScopeInFlight)
	if !a.Intent.Exists {
		t.Fatalf("the refusal does not show the intent: %+v", a.Intent)
	}
	s.inState(second, Released)
	s.sendUnder(s.call("i3", "order/4"), p) // another scope is none of its business
	s.settle(first, declined())
	s.sendUnder(second, p)
}

func TestSlotsAreNeverMoreThanTheLimitInParallel(t *testing.T) {
	s := tell(t)
	const limit, calls = 3, 60
	p := slotPolicy(limit, 1)
	processes := []*Engine{s.process(), s.process(), s.process()}
	var mu sync.Mutex
	inFlight, most, paidCount := 0, 0, 0
	var wg sync.WaitGroup
	for n := range calls {
		c := s.order(n)
		s.keys[c.Key] = true
		wg.Go(func() {
			e := processes[n%len(processes)]
			for {
				a, err := e.Admit(s.ctx, c, p)
				if err != nil {
					t.Error(err)
					return
				}
				if a.Verdict == Deny && a.Reason == ReasonTooManyInFlight {
					continue
				}
				if a.Verdict != Allow {
					t.Errorf("%s: %s %s", c.IntentID, a.Verdict, a.Reason)
					return
				}
				mu.Lock()
				inFlight++
				most = max(most, inFlight)
				mu.Unlock()
				mu.Lock()
				inFlight--
				paidCount++
				mu.Unlock()
				if _, err := e.Settle(s.ctx, a.Ticket, paid(c.IntentID)); err != nil {
					t.Error(err)
				}
				return
			}
		})
	}
	wg.Wait()
	if most > limit || paidCount != calls {
		t.Fatalf("%d were in flight at once (limit %d), %d of %d were paid", most, limit, paidCount, calls)
	}
	if got := s.slotsTaken(); got != "0" {
		t.Fatalf("%s slots are taken in the end", got)
	}
}

func TestKilledHoldersCostNoSlots(t *testing.T) { // L02
	s := tell(t)
	p := slotPolicy(2, 1)
	for round := range 20 {
		a, b := s.order(2*round), s.order(2*round+1)
		s.sendUnder(a, p)
		s.restart() // both holders die
		s.sendUnder(b, p)
		s.restart()
		s.want(s.admitUnder(s.order(1000), p), Deny, ReasonTooManyInFlight)
		s.sweep()
		s.pass(storyLease + storyGrace - time.Millisecond)
		s.sweep()
		s.want(s.admitUnder(s.order(1000), p), Deny, ReasonTooManyInFlight) // not before its lease and grace are over
		s.pass(time.Millisecond)
		s.sweep()
		s.inState(a, Held)
		s.inState(b, Held)
		if got := s.slotsTaken(); got != "0" {
			t.Fatalf("round %d: %s slots are taken", round, got)
		}
	}
}

func TestALostReplyCostsNoSlot(t *testing.T) {
	s := tell(t)
	p := slotPolicy(1, 0)
	s.net.hook(nil, drop("Reserve", 1))
	ticket := s.sendUnder(s.order(1), p) // written once, though it was asked twice
	if got := s.slotsTaken(); got != "1" {
		t.Fatalf("%s slots are taken", got)
	}
	s.net.hook(nil, drop("Update", 1))
	s.settle(ticket, paid("p1"))
	if got := s.slotsTaken(); got != "0" {
		t.Fatalf("%s slots are taken", got)
	}
	// All replies stay away: the attempt that may stand is withdrawn.
	s.net.hook(nil, dropAll)
	_, err := s.Admit(s.ctx, s.order(2), p)
	s.unavailable(err)
	s.keys[s.order(2).Key] = true
	s.net.hook(nil, nil)
	s.runLater()
	if got := s.slotsTaken(); got != "0" {
		t.Fatalf("%s slots are taken", got)
	}
}
