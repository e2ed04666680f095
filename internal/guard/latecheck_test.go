// This file is about status checks of what a person has closed.

package guard

import (
	"testing"
	"time"
)

// closed sends a call, has its outcome unknown, waits until its checks are over, and has a
// person close it.
func (s *story) closed(c Call, d Decision) {
	s.t.Helper()
	s.loseChecked(c)
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	for !s.record(c.Key).nextCheck().IsZero() {
		s.answerCheck(c, unclear())
	}
	s.take(c, d)
}

func TestWhatAPersonClosedIsCheckedOnceMore(t *testing.T) {
	for d, state := range map[Decision]State{Reject: Rejected, MarkFailed: Failed} {
		t.Run(string(d), func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.closed(c, d)
			id := s.hold(c).HoldID
			before := len(s.record(c.Key).Checks.Answers)
			for range 3 { // whatever it says, it stays closed
				for _, res := range []CheckResult{unclear(), notFound(), notFound(), notFound()} {
					s.answerCheck(c, res)
					s.inState(c, state)
				}
			}
			if r := s.record(c.Key); !r.anyUnknownEvenDenied() || r.Disputed || len(r.Checks.Answers) != min(before+12, maxCheckHistory) {
				t.Fatalf("what was said is not just noted: %+v", r.Checks)
			}
			s.answerCheck(c, found("re_1"))
			r := s.inState(c, Succeeded)
			if !r.RefundOwed || !r.nextCheck().IsZero() {
				t.Fatalf("a refund is owed: %v, the next check is at %s", r.RefundOwed, r.nextCheck())
			}
			if v, err := s.Hold(s.ctx, id); err != nil || v.Refund == nil || v.Refund.String() != "49.99 USD; provider reference re_1" {
				t.Fatalf("%+v, %v", v.Refund, err)
			}
			s.want(s.admit(c), Replay, "")
			s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
		})
	}
}

// anyUnknownEvenDenied: an attempt's outcome is unknown, whatever a person has said.
func (r *record) anyUnknownEvenDenied() bool {
	for i := range r.Attempts {
		if r.Attempts[i].unknown() {
			return true
		}
	}
	return false
}

func TestChecksOfWhatIsClosedEnd(t *testing.T) {
	for _, d := range []Decision{Reject, MarkFailed} {
		t.Run(string(d), func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.closed(c, d)
			closedAt, made := s.time.store(), 0
			for !s.record(c.Key).nextCheck().IsZero() {
				s.answerCheck(c, notFound())
				if made++; made > 1000 {
					t.Fatal("they do not end")
				}
			}
			if took := s.time.store().Sub(closedAt); took > 10*time.Minute || made < 10 {
				t.Fatalf("%d checks in %s; they end after 10 minutes", made, took)
			}
			// Then it ages as any other.
			r := s.record(c.Key)
			if due := r.due(s.Engine.o); !due.Equal(r.ages()) {
				t.Fatalf("it is due at %s, and ages at %s", due, r.ages())
			}
			s.pass(r.ages().Sub(s.time.store()))
			s.sweep()
			s.inState(c, Tombstone)
		})
	}
	t.Run("what was never sent, and what is known, is asked about by nobody", func(t *testing.T) {
		s := tell(t)
		s.settle(s.sendUnder(s.call("intent-1", "order/9"), checkedPolicy()), paid("re_1"))
		c := s.call("intent-2", "order/9")
		s.wantHeld(s.admitUnder(c, checkedPolicy()), ScopeOverlap)
		s.take(c, Reject)
		if r := s.inState(c, Rejected); r.Checks != nil {
			t.Fatalf("%+v", r.Checks)
		}
	})
	t.Run("a check that is due does not end the TTL", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.closed(c, Reject)
		s.pass(s.record(c.Key).nextCheck().Sub(s.time.store()))
		for range 3 {
			s.sweep()
			s.inState(c, Rejected)
		}
	})
}

// The provider says that it is still processing what a person has marked as failed.
func TestPendingContradictsMarkFailed(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.closed(c, MarkFailed)
	// Nothing stands in the way of another one by the person's word.
	s.settle(s.sendUnder(s.call("other", "order/9"), checkedPolicy()), declined())
	s.answerCheck(c, stillPending())
	if r := s.inState(c, Failed); !r.Disputed || !r.mayHaveMoved() {
		t.Fatalf("disputed: %v, may have moved: %v", r.Disputed, r.mayHaveMoved())
	}
	s.wantHeld(s.admit(s.call("intent-2", "order/9")), ScopeOverlap)
	s.want(s.admit(c), Deny, ReasonMarkedFailed)
	s.answerCheck(c, found("re_1"))
	if r := s.inState(c, Succeeded); !r.RefundOwed {
		t.Fatal("no refund is owed")
	}
}
