package guard

import (
	"testing"
	"time"
)

// trying is the policy with this retry budget.
func trying(attempts int) Policy {
	p := storyPolicy()
	p.Retry = &RetryBudget{Attempts: attempts, Initial: 200 * time.Millisecond, Factor: 2, Max: time.Second}
	return p
}

func TestTheLongestWait(t *testing.T) {
	b := RetryBudget{Initial: 200 * time.Millisecond, Factor: 2, Max: time.Second}
	for attempts, want := range []time.Duration{1: 200, 2: 400, 3: 800, 4: 1000, 5: 1000, 20: 1000} {
		if got := b.longest(attempts); attempts > 0 && want > 0 && got != want*time.Millisecond {
			t.Errorf("after %d attempts: %v, want %dms", attempts, got, want)
		}
	}
	steady := RetryBudget{Initial: time.Second, Factor: 1, Max: time.Hour}
	if got := steady.longest(20); got != time.Second {
		t.Errorf("with factor 1: %v", got)
	}
	steep := RetryBudget{Initial: 5 * time.Minute, Factor: 10, Max: time.Hour}
	if got := steep.longest(20); got != time.Hour {
		t.Errorf("with factor 10: %v", got)
	}
	for range 1000 {
		if d := random(3); d < 0 || d > 3 {
			t.Fatalf("a random time up to 3 ns: %d", d)
		}
	}
}

func TestABudgetOfAttemptsIsTheRecords(t *testing.T) { // L03
	s := tell(t)
	var asked []time.Duration
	s.opts.Random = func(most time.Duration) time.Duration {
		asked = append(asked, most)
		return most / 2
	}
	s.restart()
	c := s.call("intent-1", "order/9")
	for n := range 3 {
		if n > 0 {
			s.want(s.admitUnder(c, trying(3)), InFlightNow, ReasonBackoff)
			s.pass(time.Second)
		}
		ticket := s.sendUnder(c, trying(3))
		if ticket.Attempt != n+1 || ticket.Retry != (n > 0) {
			t.Fatalf("attempt %d, a retry: %v", ticket.Attempt, ticket.Retry)
		}
		a := s.settle(ticket, unreachable())
		s.want(a, Deny, ReasonUnreachable)
		if want := n < 2; a.Again != want || (a.RetryAfter > 0) != want {
			t.Fatalf("after attempt %d: again %v after %v", n+1, a.Again, a.RetryAfter)
		}
		s.restart() // what is left of the budget is unchanged
	}
	s.inState(c, Failed)
	s.want(s.admitUnder(c, trying(3)), Replay, ReasonUnreachable)
	if len(asked) != 3 || asked[0] != 200*time.Millisecond || asked[1] != 400*time.Millisecond {
		t.Errorf("waits up to %v", asked)
	}
}

func TestTheLastFailureIsReplayed(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, trying(2)), unreachable())
	s.pass(time.Second)
	busy := Result{Outcome: AttemptRetryable, Response: &Response{Status: 429, Body: []byte("slow down")}}
	if a := s.settle(s.sendUnder(c, trying(2)), busy); a.Again || a.Response == nil {
		t.Fatalf("told %+v", a)
	}
	a := s.admitUnder(c, trying(2))
	s.want(a, Replay, "")
	if a.Response == nil || a.Response.Status != 429 || string(a.Response.Body) != "slow down" {
		t.Fatalf("replayed %+v", a.Response)
	}
}

func TestTheUpstreamsWishIsLongerThanTheBackoff(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	a := s.settle(s.sendUnder(c, trying(5)), Result{Outcome: AttemptRetryable, RetryAfter: time.Minute})
	if !a.Again || a.RetryAfter != time.Minute {
		t.Fatalf("told %+v", a)
	}
	s.pass(59 * time.Second)
	s.want(s.admitUnder(c, trying(5)), InFlightNow, ReasonBackoff)
	s.pass(time.Second)
	s.sendUnder(c, trying(5))
}

func TestNothingIsTriedAgainUnlessNothingMovedForSure(t *testing.T) {
	s := tell(t)
	busy := Result{Outcome: AttemptRetryable, Response: &Response{Status: 429}}

	// A release counts the unknown attempt as nothing moved. That is a person's word for one send.
	c := s.call("intent-1", "order/9")
	s.loseAndWait(c)
	s.take(c, Release)
	ticket := s.sendUnder(c, trying(3))
	if ticket.Retry {
		t.Fatal("a released send is no retry")
	}
	a := s.settle(ticket, busy)
	s.want(a, Allow, "")
	if s.inState(c, Retryable); a.Again {
		t.Fatal("an attempt that may have moved money is tried again by itself")
	}

	// A release of an overlap lies on nothing that was sent.
	d := s.call("intent-2", "order/10")
	s.pay(d, "re_1")
	e := s.call("intent-3", "order/10")
	s.wantHeld(s.admitUnder(e, trying(3)), ScopeOverlap)
	s.take(e, Release)
	if a := s.settle(s.sendUnder(e, trying(3)), busy); !a.Again {
		t.Fatalf("told %+v", a)
	}

	// Failed, unknown and pending are no reasons to try again.
	for n, res := range []Result{declined(), lost(), accepted(), paid("re_2")} {
		f := s.call(ids("other-", 4)[n], "order/"+ids("2", 4)[n])
		if a := s.settle(s.sendUnder(f, trying(3)), res); a.Again {
			t.Errorf("%s: tried again", res.Outcome)
		}
	}
}

func TestARetryCanBeRefused(t *testing.T) {
	s := tell(t)
	allowed, asked := false, 0
	bound := func(c *Call) {
		c.MayRetry = func() (time.Duration, bool) { asked++; return 3 * time.Second, allowed }
	}
	c := s.call("intent-1", "order/9").with(bound)
	s.settle(s.sendUnder(c, trying(5)), unreachable())
	s.want(s.admitUnder(c, trying(5)), InFlightNow, ReasonBackoff)
	if asked != 0 {
		t.Fatalf("asked %d times, although no retry was near", asked)
	}
	s.pass(time.Second)
	a := s.admitUnder(c, trying(5))
	s.want(a, Deny, ReasonRetryRatio)
	if a.RetryAfter != 3*time.Second || len(s.inState(c, Retryable).Attempts) != 1 {
		t.Fatalf("told %+v", a)
	}
	allowed = true
	ticket := s.sendUnder(c, trying(5))
	if asked != 2 || ticket.Attempt != 2 {
		t.Fatalf("asked %d times, attempt %d", asked, ticket.Attempt)
	}
	// What is settled needs no leave.
	allowed = false
	s.settle(ticket, paid("re_1"))
	s.wantReplay(s.admitUnder(c, trying(5)), "intent-1", "re_1")
}

func TestARetryIsCheckedLikeAnyStepIntoFlight(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	if a := s.settle(s.sendUnder(c, trying(5)), unreachable()); !a.Again {
		t.Fatalf("told %+v", a)
	}
	s.pay(s.call("intent-2", "order/9"), "re_1") // meanwhile
	s.pass(time.Second)
	s.wantHeld(s.admitUnder(c, trying(5)), ScopeOverlap)
}
