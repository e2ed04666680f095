// This file is about the rules of a tool: what is denied and what is held, after whose
// answer and with which other reasons, what a release lets pass, and what a release, or
// nobody, may no longer decide.

package guard

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	denies = "only USD and EUR"
	holds  = "above 500 a person decides"
)

// ruledBy is the policy with rules that always say this.
func ruledBy(p Policy, u Ruling) Policy {
	return p.WithRules(func(*Call) (Ruling, error) { return u, nil })
}

// wantDenied: a rule denies the call, and nothing was written of it.
func (s *story) wantDenied(c Call, p Policy) {
	s.t.Helper()
	before := s.record(c.Key)
	a := s.admitUnder(c, p)
	s.want(a, Deny, ReasonDeniedByRule)
	if a.Rule != denies {
		s.t.Fatalf("the rule says %q", a.Rule)
	}
	switch after := s.record(c.Key); {
	case before == nil && after != nil:
		s.t.Fatalf("a record was written: %s", after.State)
	case before != nil && after.version != before.version:
		s.t.Fatalf("the record was written: %s became %s", before.State, after.State)
	}
}

func TestARuleDeniesOrHoldsWhatWouldBeSent(t *testing.T) {
	s := tell(t)
	free, deny, hold := storyPolicy(), ruledBy(storyPolicy(), Ruling{Deny: denies}), ruledBy(storyPolicy(), Ruling{Hold: holds})
	a := s.call("a", "order/1").with(func(c *Call) { c.Lineage = "sess/1" })
	s.wantDenied(a, deny)
	s.settle(s.sendUnder(a, free), paid("re_1"))
	// What was answered is answered, whatever the rules say now: under its own ID and under another.
	for _, p := range []Policy{deny, hold} {
		s.wantReplay(s.admitUnder(a, p), "a", "re_1")
		s.wantReplay(s.admitUnder(a.under("again"), p), "a", "re_1")
	}
	// A rule that denies comes before whatever would hold, and one that holds after it.
	over := s.call("over", "order/1", "order/2")
	s.wantDenied(over, deny)
	both := s.admitUnder(over, hold)
	s.wantHeld(both, ScopeOverlap, ApprovalRequired)
	if both.Cause != holds || both.MatchCount != 1 {
		t.Fatalf("%d matches, cause %q", both.MatchCount, both.Cause)
	}
	alone := s.admitUnder(s.call("alone", "order/3"), hold)
	s.wantHeld(alone, ApprovalRequired)
	if alone.Cause != holds || alone.MatchCount != 0 {
		t.Fatalf("%d matches, cause %q", alone.MatchCount, alone.Cause)
	}
	// An intent that is tried again is asked again.
	c := s.call("c", "order/4")
	s.settle(s.sendUnder(c, free), unreachable())
	s.pass(time.Minute)
	s.wantDenied(c, deny)
	s.wantHeld(s.admitUnder(c, hold), ApprovalRequired)
	// Rules that cannot be asked let nothing pass, and write nothing.
	later := errors.New("too busy")
	d := s.call("d", "order/5")
	if _, err := s.Admit(s.ctx, d, free.WithRules(func(*Call) (Ruling, error) { return Ruling{}, later })); !errors.Is(err, later) {
		t.Fatalf("%v", err)
	}
	s.inState(d, None)
}

func TestRulesAreAskedOncePerCallAndOnlyBeforeASend(t *testing.T) {
	s := tell(t)
	asked := 0
	p := storyPolicy().WithRules(func(c *Call) (Ruling, error) {
		if asked++; c.IntentID != "a" || c.Recipient != "c1" {
			t.Errorf("asked about %+v", c)
		}
		return Ruling{}, nil
	})
	a := s.call("a", "order/1")
	tk := s.sendUnder(a, p)
	s.want(s.admitUnder(a, p), InFlightNow, ReasonInFlight)
	s.settle(tk, paid("re_1"))
	s.wantReplay(s.admitUnder(a, p), "a", "re_1")
	if asked != 1 {
		t.Fatalf("the rules were asked %d times", asked)
	}
}

func TestRulesComeAfterRatesAndBeforeSpend(t *testing.T) {
	s := tell(t)
	limited := ratePolicy(time.Hour, 1)
	s.settle(s.sendUnder(s.call("a", "order/1"), limited), paid("re_1"))
	s.want(s.admitUnder(s.call("b", "order/2"), ruledBy(limited, Ruling{Deny: denies})), Deny, ReasonRateLimited)

	spent := spendPolicy(daily("10"))
	s.wantDenied(s.call("c", "order/3"), ruledBy(spent, Ruling{Deny: denies}))
	s.wantExceeded(s.call("d", "order/4"), ruledBy(spent, Ruling{Hold: holds}), "daily")
	// All that holds, holds at once.
	a := s.admitUnder(s.call("e", "order/1", "order/5"), ruledBy(spendPolicy(daily("10").holds()), Ruling{Hold: holds}))
	s.wantHeld(a, ScopeOverlap, BudgetExceeded, ApprovalRequired)
	if !strings.Contains(a.Cause, `"daily"`) || !strings.Contains(a.Cause, holds) {
		t.Fatalf("cause %q", a.Cause)
	}
	// Slots come last: what is held takes none.
	full := slotPolicy(1, 0)
	s.sendUnder(s.call("f", "order/6"), full)
	s.want(s.admitUnder(s.call("g", "order/7"), full), Deny, ReasonTooManyInFlight)
	s.wantHeld(s.admitUnder(s.call("g", "order/7"), ruledBy(full, Ruling{Hold: holds})), ApprovalRequired)
}

func TestAReleaseLetsOnePaymentPassARule(t *testing.T) {
	s := tell(t)
	hold := ruledBy(storyPolicy(), Ruling{Hold: holds})
	a := s.call("a", "order/1")
	s.wantHeld(s.admitUnder(a, hold), ApprovalRequired)
	s.take(a, Release)
	// Nothing moved: the permission was not used.
	s.settle(s.sendUnder(a, hold), unreachable())
	s.pass(time.Minute)
	// It is for this rule alone, and not for what denies.
	s.wantDenied(a, ruledBy(storyPolicy(), Ruling{Deny: denies, Hold: holds}))
	s.settle(s.sendUnder(a, hold), lost())
	s.pass(storyWait)
	s.sweep()
	// It may have moved: to send it again is another payment, which nobody has let pass.
	s.take(a, Release)
	s.wantHeld(s.admitUnder(a, hold), ApprovalRequired)
	s.take(a, Release)
	s.settle(s.sendUnder(a, hold), paid("re_1"))
	// Another hold's release does not let it pass.
	b := s.call("b", "order/1", "order/2")
	s.wantHeld(s.admit(b), ScopeOverlap)
	s.take(b, Release)
	s.wantHeld(s.admitUnder(b, hold), ApprovalRequired)
	s.take(b, Release)
	s.settle(s.sendUnder(b, hold), paid("re_2"))
}

// R34: a hold for approval shows no overlap, so its release covers none.
func TestAReleasedApprovalIsHeldForWhatItNeverShowed(t *testing.T) {
	for _, when := range []string{"paid before the hold was released", "paid after it was released"} {
		t.Run(when, func(t *testing.T) {
			s := tell(t)
			hold := ruledBy(storyPolicy(), Ruling{Hold: holds})
			a := s.call("a", "order/1")
			s.wantHeld(s.admitUnder(a, hold), ApprovalRequired)
			other := s.call("other", "order/1", "order/2").by("system:serviceaccount:support:other")
			if when == "paid before the hold was released" {
				s.pay(other, "re_1")
				s.take(a, Release)
			} else {
				s.take(a, Release)
				s.pay(other, "re_1")
			}
			s.wantHeld(s.admitUnder(a, hold), ScopeOverlap)
			s.take(a, Release)
			// What the releases cover adds up.
			s.settle(s.sendUnder(a, hold), paid("re_2"))
		})
	}
}

// R37 and its kin: a release that could not be used is spent, and the hold stands anew and says why.
func TestAReleaseThatCouldNotBeUsedIsSpent(t *testing.T) {
	now := func(p Policy, unusable string) func(*Call) (Policy, string) {
		return func(c *Call) (Policy, string) {
			if c.IntentID != "b" || c.Amount.Value != "50" || c.Recipient != "c1" {
				t.Errorf("asked about %+v", c)
			}
			return p, unusable
		}
	}
	denyAll, full := daily("100"), daily("100").holds()
	for _, tt := range []struct {
		name    string
		now     func(*Call) (Policy, string)
		cause   string // "": it is taken
		reasons []Reason
	}{
		{"the tool cannot be called", now(Policy{}, "the AgentTool is not valid: spec.identity"), "spec.identity", []Reason{ScopeOverlap}},
		{"a rule denies it", now(ruledBy(storyPolicy(), Ruling{Deny: denies}), ""), "a rule of the tool denies it now: " + denies, []Reason{ScopeOverlap}},
		{"a rule would hold it", now(ruledBy(storyPolicy(), Ruling{Hold: holds}), ""), "", nil},
		{"no room in a limit that denies", now(spendPolicy(denyAll), ""), `the limit "daily"`, []Reason{ScopeOverlap}},
		{"no room in a limit that holds", now(spendPolicy(full), ""), `the limit "daily"`, []Reason{ScopeOverlap, BudgetExceeded}},
		{"room to the cent", now(spendPolicy(daily("110")), ""), "", nil},
		{"nothing in the way", now(storyPolicy(), ""), "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			s.settle(s.sendUnder(s.call("a", "order/1").cost("60"), spendPolicy(denyAll)), paid("re_1"))
			b := s.call("b", "order/1", "order/2").cost("50")
			s.wantHeld(s.admit(b), ScopeOverlap)
			before := s.hold(b)
			got := s.resolveWith(before, Resolution{Decision: Release, Now: tt.now})
			if tt.cause == "" {
				if got.State != HoldResolved || s.state(b) != Released {
					t.Fatalf("%s: %s", got.State, got.Effect)
				}
				return
			}
			after := s.hold(b)
			if got.State != HoldVoid || after.Number != before.Number+1 || after.State != HoldHeld || after.MatchCount != before.MatchCount {
				t.Fatalf("%s: %s; the hold is %+v", got.State, got.Effect, after)
			}
			if !strings.Contains(after.Cause, tt.cause) || !strings.Contains(got.Effect, tt.cause) {
				t.Fatalf("cause %q, effect %q", after.Cause, got.Effect)
			}
			s.wantHeld(s.admit(b), tt.reasons...)
			// Once it is as it was, the new hold's release covers what the old one's would have.
			if got := s.resolveWith(after, Resolution{Decision: Release, Now: now(storyPolicy(), "")}); got.State != HoldResolved {
				t.Fatalf("%s: %s", got.State, got.Effect)
			}
			if slices.Contains(tt.reasons, BudgetExceeded) {
				s.settle(s.sendUnder(b, spendPolicy(full)), paid("re_2"))
			} else {
				s.settle(s.send(b), paid("re_2"))
				s.wantHeld(s.admit(s.call("c", "order/2").cost("1")), ScopeOverlap)
			}
		})
	}
	t.Run("rules that cannot be asked", func(t *testing.T) {
		s := tell(t)
		b := s.call("b", "order/2").cost("50")
		s.wantHeld(s.admitUnder(b, ruledBy(storyPolicy(), Ruling{Hold: holds})), ApprovalRequired)
		later := errors.New("too busy")
		p := storyPolicy().WithRules(func(*Call) (Ruling, error) { return Ruling{}, later })
		h := s.hold(b)
		_, err := s.Resolve(s.ctx, Resolution{HoldID: h.HoldID, Decision: Release, Reason: "r", By: "alice", Now: now(p, "")})
		if !errors.Is(err, later) || s.hold(b).Number != h.Number {
			t.Fatalf("%v, and the hold is %d", err, s.hold(b).Number)
		}
	})
	t.Run("other decisions are taken", func(t *testing.T) {
		s := tell(t)
		b := s.call("b", "order/2").cost("50")
		s.wantHeld(s.admitUnder(b, ruledBy(storyPolicy(), Ruling{Hold: holds})), ApprovalRequired)
		if got := s.resolveWith(s.hold(b), Resolution{Decision: Reject, Now: now(Policy{}, "gone")}); got.State != HoldResolved {
			t.Fatalf("%s: %s", got.State, got.Effect)
		}
	})
}

// A release covers the limit that it was held for, whatever was spent since.
func TestAReleaseForTheBudgetIsNotRefusedByThatLimit(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100").holds())
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	b := s.call("b", "order/2").cost("50")
	s.wantHeld(s.admitUnder(b, p), BudgetExceeded)
	if got := s.resolveWith(s.hold(b), Resolution{Decision: Release, Now: func(*Call) (Policy, string) { return p, "" }}); got.State != HoldResolved {
		t.Fatalf("%s: %s", got.State, got.Effect)
	}
	s.settle(s.sendUnder(b, p), paid("re_2"))
}

func TestAHoldThatNobodyDecidesExpires(t *testing.T) {
	s := tell(t)
	p := ruledBy(storyPolicy(), Ruling{Hold: holds})
	p.HoldFor = time.Hour
	a := s.call("a", "order/1")
	s.wantHeld(s.admitUnder(a, p), ApprovalRequired)
	h := s.hold(a)
	s.pass(time.Hour - time.Second)
	s.expire(a)
	s.inState(a, Held)
	s.pass(time.Second)
	s.expire(a)
	s.inState(a, Rejected)
	if got := s.hold(a); got.State != HoldResolved || got.Decision != Reject || got.By != "" || got.Effect != "Nobody decided within 1h: rejected, it is never sent." {
		t.Fatalf("%+v", got)
	}
	s.want(s.admitUnder(a, storyPolicy()), Deny, ReasonHoldExpired)
	// A decision that comes too late decides nothing.
	if got := s.resolve(h, Release); got.State != HoldResolved || got.Decision != Reject {
		t.Fatalf("%s by %q: %s", got.Decision, got.By, got.Effect)
	}
	s.inState(a, Rejected)
	// It stands in nobody's way. Whoever does not know that nobody has decided leaves it.
	b := a.under("b")
	s.wantHeld(s.admitUnder(b, p), ApprovalRequired)
	s.pass(time.Hour)
	s.sweep()
	s.wantHeld(s.admitUnder(b, p), ApprovalRequired)
	s.expire(b)
	s.want(s.admitUnder(b, p), Deny, ReasonHoldExpired)
	// A person's word is not the time's.
	c := a.under("c")
	s.wantHeld(s.admitUnder(c, p), ApprovalRequired)
	s.take(c, Reject)
	s.want(s.admitUnder(c, p), Deny, ReasonRejected)
}

// What may have moved is never decided without a person.
func TestAHoldOfWhatMayHaveMovedDoesNotExpire(t *testing.T) {
	s := tell(t)
	p := storyPolicy()
	p.HoldFor = time.Hour
	a := s.call("a", "order/1")
	s.settle(s.sendUnder(a, p), lost())
	s.pass(100 * time.Hour)
	s.expire(a)
	s.inState(a, Held)
	// Nor is it while another hold of it stands: it was released, and met a rule.
	s.take(a, Release)
	s.wantHeld(s.admitUnder(a, ruledBy(p, Ruling{Hold: holds})), ApprovalRequired)
	s.pass(100 * time.Hour)
	s.expire(a)
	s.inState(a, Held)
	// But where it is known that nothing moved it ends, and its budget has the place again.
	b := s.call("b", "order/2")
	s.settle(s.sendUnder(b, p), unreachable())
	s.pass(time.Minute)
	s.wantHeld(s.admitUnder(b, ruledBy(p, Ruling{Hold: holds})), ApprovalRequired)
	s.pass(time.Hour)
	s.expire(b)
	s.inState(b, Rejected)
}

// A decision that was made in time and comes late, because nobody was there to take it, is taken.
func TestADecisionInTimeIsNotOvertakenByTheExpiry(t *testing.T) {
	for _, d := range []Decision{Release, Reject} {
		s := tell(t)
		p := ruledBy(storyPolicy(), Ruling{Hold: holds})
		p.HoldFor = time.Hour
		a := s.call("a", "order/1")
		s.wantHeld(s.admitUnder(a, p), ApprovalRequired)
		h := s.hold(a)
		if h.Overdue || !h.Until.Equal(s.time.store().Add(time.Hour)) {
			t.Fatalf("%+v", h)
		}
		s.pass(2 * time.Hour) // no controller is running
		s.sweep()
		s.wantHeld(s.admitUnder(a, p), ApprovalRequired)
		if h := s.hold(a); !h.Overdue {
			t.Fatalf("%+v", h)
		}
		got := s.resolve(h, d)
		if got.State != HoldResolved || got.Decision != d || got.By != "alice" {
			t.Fatalf("%s by %q: %s", got.Decision, got.By, got.Effect)
		}
		s.expire(a)
		if d == Release {
			s.settle(s.sendUnder(a, p), paid("re_1"))
			continue
		}
		s.want(s.admitUnder(a, p), Deny, ReasonRejected)
	}
}

// What is registered is asked like what is called, and a release of it is good only as long as it is valid.
func TestRulesAreAskedAtARegistration(t *testing.T) {
	s := tell(t)
	register := func(c Call, p Policy, validUntil time.Time) Answer {
		t.Helper()
		return s.register(c, Registration{ValidUntil: validUntil}, "", p)
	}
	deny, hold := ruledBy(storyPolicy(), Ruling{Deny: denies}), ruledBy(storyPolicy(), Ruling{Hold: holds})
	a := s.call("a", "order/1")
	s.want(register(a, deny, time.Time{}), Deny, ReasonDeniedByRule)
	s.inState(a, None)
	s.wantHeld(register(a, hold, time.Time{}), ApprovalRequired)
	s.take(a, Release)
	s.settle(s.sendUnder(a, hold), paid("re_1"))
	// Registered before there was a rule: the call is asked.
	b := s.call("b", "order/2")
	if got := register(b, storyPolicy(), time.Time{}); got.Verdict != Allow {
		t.Fatalf("%s %s", got.Verdict, got.Reason)
	}
	s.wantDenied(b, deny)
	s.wantHeld(s.admitUnder(b, hold), ApprovalRequired)
	s.take(b, Release)
	// A person let pass what was shown. With a lineage that it did not show it is asked again.
	c := s.call("c", "order/3")
	s.wantHeld(register(c, hold, time.Time{}), ApprovalRequired)
	s.take(c, Release)
	s.wantHeld(s.admitUnder(c.with(func(c *Call) { c.Lineage = "sess/1" }), hold), ApprovalRequired)
	// P06: what is no longer valid is not released, and the hold says so.
	d := s.call("d", "order/4")
	until := s.time.store().Add(time.Hour)
	s.wantHeld(register(d, hold, until), ApprovalRequired)
	before := s.hold(d)
	s.pass(time.Hour)
	after := s.spent(d, before, s.resolve(before, Release))
	if !strings.Contains(after.Cause, causeNotValid) {
		t.Fatalf("cause %q", after.Cause)
	}
	s.take(d, Reject)
}

// expire is whoever knows that nobody has decided about the intent's hold.
func (s *story) expire(c Call) {
	s.t.Helper()
	if _, err := s.Undecided(s.ctx, s.hold(c).HoldID); err != nil {
		s.t.Fatal(err)
	}
}
