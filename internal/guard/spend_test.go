// This file is about money: what counts in a limit, from when, until when; what is
// refused, and what a person lets pass.

package guard

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

const spendWindow = 24 * time.Hour

func usd(amount string) intent.Money { return intent.Money{Value: amount, Currency: "USD"} }

// daily is a limit for the whole budget.
func daily(amount string) SpendLimit {
	return SpendLimit{Name: "daily", Amount: usd(amount), Window: spendWindow}
}

func (l SpendLimit) holds() SpendLimit { l.Hold = true; return l }

func spendPolicy(limits ...SpendLimit) Policy { return storyPolicy().WithSpend(limits) }

// cost is the call with another amount.
func (c Call) cost(amount string) Call {
	return c.with(func(c *Call) { *c.Amount = usd(amount) })
}

// spent looks at what counts in daily: used and reserved, and that the limit's own meter is their sum.
func (s *story) wantSpend(used, reserved string) {
	s.t.Helper()
	got, err := s.Spend(s.ctx, "refunds", "daily", "USD")
	if err != nil {
		s.t.Fatal(err)
	}
	if got != (Spent{Used: used, Reserved: reserved}) {
		s.t.Fatalf("used and reserved are %+v, want %s and %s", got, used, reserved)
	}
	sum, err := s.bolt.Meter(s.ctx, spendMeter("refunds", "daily", "USD", ""))
	if err != nil {
		s.t.Fatal(err)
	}
	is, _ := decimal(sum)
	u, _ := decimal(used)
	r, _ := decimal(reserved)
	if _, err := exact.Add(u, u, r); err != nil || is.Cmp(u) != 0 {
		s.t.Fatalf("the limit's meter is %s, and %s are used and %s reserved", sum, used, reserved)
	}
}

// wantExceeded: the call is denied by this limit, and nothing was written of it.
func (s *story) wantExceeded(c Call, p Policy, limit string) *SpendExceeded {
	s.t.Helper()
	before := s.record(c.Key)
	a := s.admitUnder(c, p)
	s.want(a, Deny, ReasonSpendExceeded)
	if a.Spend == nil || a.Spend.Limit.Name != limit {
		s.t.Fatalf("it was denied by %+v, want %s", a.Spend, limit)
	}
	switch after := s.record(c.Key); {
	case before == nil && after != nil:
		s.t.Fatalf("a record was written: %s", after.State)
	case before != nil && after.version != before.version:
		s.t.Fatalf("the record was written: %s became %s", before.State, after.State)
	}
	return a.Spend
}

func TestSpendIsReservedWithTheClaimAndUsedByItsSettlement(t *testing.T) {
	for _, limit := range []SpendLimit{daily("100"), daily("100.00"), daily("100").holds()} {
		s := tell(t)
		p := spendPolicy(limit)
		a, b, c := s.call("a", "order/1").cost("60"), s.call("b", "order/2").cost("40.01"), s.call("c", "order/3").cost("40")
		tk := s.sendUnder(a, p)
		s.wantSpend("0", "60")
		if limit.Hold {
			s.wantHeld(s.admitUnder(b, p), BudgetExceeded)
		} else {
			s.wantExceeded(b, p, "daily")
		}
		s.wantSpend("0", "60")
		s.settle(tk, paid("re_1"))
		s.wantSpend("60", "0")
		// To the cent.
		tk = s.sendUnder(c, p)
		s.wantSpend("60", "40")
		s.settle(tk, paid("re_2"))
		s.wantSpend("100", "0")
		// A replay costs nothing, and is answered though the limit is reached.
		s.wantReplay(s.admitUnder(a, p), "a", "re_1")
		// Nor does a payment of nothing.
		s.settle(s.sendUnder(s.call("free", "order/4").cost("0"), p), paid("re_3"))
		s.wantSpend("100", "0")
	}
}

func TestSpendLeavesTheWindowOnceItIsOver(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100"))
	s.pay(s.call("other", "order/0"), "re_0") // no limit then: it does not count
	early, late, next := s.call("early", "order/1").cost("60"), s.call("late", "order/2").cost("40"), s.call("next", "order/3").cost("60")
	s.settle(s.sendUnder(early, p), paid("re_1"))
	s.pass(time.Hour)
	tk := s.sendUnder(late, p)
	s.pass(2 * time.Second)
	s.settle(tk, paid("re_2"))
	s.pass(spendWindow - time.Hour - 3*time.Second)
	s.sweep()
	s.wantSpend("100", "0")
	s.wantExceeded(next, p, "daily")
	s.pass(time.Second)
	s.sweep()
	s.wantSpend("40", "0")
	if r := s.inState(early, Succeeded); r.Response == nil {
		t.Fatal("its answer is gone with its spend")
	}
	s.wantReplay(s.admitUnder(early, p), "early", "re_1")
	s.settle(s.sendUnder(next, p), paid("re_3"))
	s.wantSpend("100", "0")
	// A tombstone's goes too, and nothing counts twice.
	s.pass(storyTTL)
	s.sweep()
	s.sweep()
	s.wantSpend("0", "0")
	s.inState(early, Tombstone)
}

func TestSpendOfALongerWindowOutlivesTheAnswer(t *testing.T) {
	s := tell(t)
	l := daily("100")
	l.Window = 200 * 24 * time.Hour // longer than the TTL, the overlap window and a tombstone's life together
	p := spendPolicy(l)
	c := s.call("a", "order/1").cost("60")
	s.settle(s.sendUnder(c, p), paid("re_1"))
	for _, d := range []time.Duration{storyTTL, 100 * 24 * time.Hour, 98*24*time.Hour - time.Second} {
		s.pass(d)
		s.sweep()
		s.sweep()
		s.inState(c, Tombstone)
		s.wantSpend("60", "0")
	}
	s.pass(time.Second)
	s.sweep()
	s.sweep()
	s.wantSpend("0", "0")
	s.inState(c, None)
}

func TestSpendReturnsWhenNothingMoved(t *testing.T) {
	p := spendPolicy(daily("100"))
	for name, result := range map[string]Result{"declined": declined(), "unreachable": unreachable()} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), result)
			s.wantSpend("0", "0")
			s.settle(s.sendUnder(s.call("b", "order/2").cost("100"), p), paid("re_1"))
			s.wantSpend("100", "0")
			if name == "unreachable" {
				// Its next attempt asks the limit like any other.
				s.pass(time.Minute)
				s.wantExceeded(s.call("a", "order/1").cost("100"), p, "daily")
				s.pass(spendWindow)
				s.sweep()
				s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_2"))
				s.wantSpend("100", "0")
			}
		})
	}
}

func TestUnknownSpendNeverAges(t *testing.T) { // R17
	p := spendPolicy(daily("100"))
	lose := func(s *story, c Call) {
		s.settle(s.sendUnder(c, p), lost())
		s.pass(30 * 24 * time.Hour)
		s.sweep()
		s.wantSpend("0", "60")
		s.wantExceeded(s.call("next", "order/7").cost("60"), p, "daily")
	}
	cases := map[string]struct {
		decision       Decision
		used, reserved string
		aged           bool // it leaves the window from its decision
	}{
		"rejected":         {Reject, "60", "0", true},
		"marked as paid":   {MarkPaid, "60", "0", true},
		"marked as failed": {MarkFailed, "0", "0", true},
		"released":         {Release, "0", "60", false},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("a", "order/1").cost("60")
			lose(s, c)
			s.take(c, tt.decision)
			s.wantSpend(tt.used, tt.reserved)
			s.pass(spendWindow - time.Second)
			s.sweep()
			if tt.decision != Release { // unused, it is held again by now
				s.wantSpend(tt.used, tt.reserved)
			}
			s.pass(2 * time.Second)
			s.sweep()
			want := tt.reserved
			if tt.aged {
				want = "0"
			}
			s.wantSpend("0", want)
		})
	}
	t.Run("released and sent again", func(t *testing.T) {
		s := tell(t)
		c := s.call("a", "order/1").cost("60")
		lose(s, c)
		s.take(c, Release)
		// The person has seen that the first attempt did not move.
		tk := s.sendUnder(c, p)
		s.wantSpend("0", "60")
		s.settle(tk, paid("re_1"))
		s.wantSpend("60", "0")
	})
	t.Run("released, sent again, and paid twice after all", func(t *testing.T) {
		s := tell(t)
		c := s.call("a", "order/1").cost("60")
		first := s.sendUnder(c, p)
		s.settle(first, lost())
		s.pass(storyWait)
		s.sweep()
		s.take(c, Release)
		s.settle(s.sendUnder(c, p), paid("re_2"))
		s.wantSpend("60", "0")
		// The limit is 100; what has moved has moved.
		s.settle(first, paid("re_1"))
		s.wantSpend("120", "0")
		s.wantExceeded(s.call("next", "order/7").cost("0.01"), p, "daily")
	})
	t.Run("failed, and paid after all", func(t *testing.T) {
		s := tell(t)
		c := s.call("a", "order/1").cost("60")
		first := s.sendUnder(c, p)
		s.settle(first, lost())
		s.pass(storyWait)
		s.sweep()
		s.take(c, MarkFailed)
		s.wantSpend("0", "0")
		s.settle(s.sendUnder(s.call("b", "order/2").cost("100"), p), paid("re_2"))
		s.settle(first, paid("re_1"))
		s.wantSpend("160", "0")
	})
	t.Run("rejected, aged, and paid after all", func(t *testing.T) {
		s := tell(t)
		c := s.call("a", "order/1").cost("60")
		first := s.sendUnder(c, p)
		s.settle(first, lost())
		s.take(c, Reject)
		s.pass(spendWindow + storyWait)
		s.sweep()
		s.wantSpend("0", "0")
		s.settle(first, paid("re_1"))
		s.wantSpend("60", "0")
		s.pass(spendWindow)
		s.sweep()
		s.wantSpend("0", "0")
	})
	t.Run("decided before it could be visible", func(t *testing.T) {
		s := tell(t)
		c := s.call("a", "order/1").cost("60")
		s.settle(s.sendUnder(c, p), lost())
		if h := s.hold(c); h.State != HoldWaiting {
			t.Fatalf("the hold is %s", h.State)
		}
		s.take(c, Reject)
		s.pass(spendWindow + storyWait - 2*time.Second)
		s.sweep()
		s.wantSpend("60", "0")
		s.pass(3 * time.Second)
		s.sweep()
		s.wantSpend("0", "0")
	})
}

func TestTwoPaymentsOfOneIntentCountTwice(t *testing.T) {
	s := tell(t)
	l := daily("100")
	l.Window = 30 * 24 * time.Hour
	p := spendPolicy(l)
	c := s.call("a", "order/1").cost("60")
	s.settle(s.sendUnder(c, p), paid("re_1"))
	s.pass(storyTTL)
	s.sweep()
	s.wantHeld(s.admitUnder(c, p), KeyExpired)
	s.take(c, Release)
	// What the release lets pass is the expired key, and not the limit.
	s.wantExceeded(c, p, "daily")
	s.pass(30 * 24 * time.Hour)
	s.sweep() // the release was not used
	s.take(c, Release)
	s.wantSpend("0", "60")
	roomy := daily("120")
	tk := s.sendUnder(c, spendPolicy(roomy))
	s.wantSpend("0", "120")
	s.settle(tk, lost())
	s.wantSpend("0", "120")
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release) // the second has not moved
	s.wantSpend("0", "60")
	s.settle(s.sendUnder(c, spendPolicy(roomy)), paid("re_2"))
	s.wantSpend("120", "0")
}

func TestAReleaseLetsOnePaymentPassTheLimit(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100").holds())
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	b := s.call("b", "order/2").cost("50")
	a := s.admitUnder(b, p)
	s.wantHeld(a, BudgetExceeded)
	if a.MatchCount != 0 || !strings.Contains(a.Cause, `"daily"`) || !strings.Contains(a.Cause, "100 USD") {
		t.Fatalf("%d matches, cause %q", a.MatchCount, a.Cause)
	}
	s.wantSpend("100", "0")
	// A loop under new names is shown the hold that it has.
	if again := s.admitUnder(b.under("b2"), p); again.Hold != a.Hold {
		t.Fatalf("it made another hold: %q", again.Hold)
	}
	s.take(b, Release)
	s.wantSpend("100", "0")
	// Nothing moved: the permission was not used.
	s.settle(s.sendUnder(b, p), unreachable())
	s.wantSpend("100", "0")
	s.pass(time.Minute)
	s.settle(s.sendUnder(b, p), lost())
	s.wantSpend("100", "50")
	s.pass(storyWait)
	s.sweep()
	s.take(b, Release)
	s.settle(s.sendUnder(b, p), paid("re_2"))
	s.wantSpend("150", "0")
	// It was for that payment alone.
	s.wantHeld(s.admitUnder(s.call("c", "order/3").cost("0.01"), p), BudgetExceeded)
	s.pass(storyTTL)
	s.sweep()
	s.wantHeld(s.admitUnder(b, p), KeyExpired)
	s.take(b, Release)
	s.settle(s.sendUnder(b, p), paid("re_3"))
	s.pass(storyTTL)
	s.sweep()
	small := spendPolicy(daily("10").holds())
	s.wantHeld(s.admitUnder(b, small), KeyExpired)
	s.take(b, Release)
	s.wantHeld(s.admitUnder(b, small), BudgetExceeded)
}

func TestAReleaseOfALimitCoversNoOverlap(t *testing.T) { // R34
	s := tell(t)
	p := spendPolicy(daily("100").holds())
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	b := s.call("b", "order/2").cost("50")
	s.wantHeld(s.admitUnder(b, p), BudgetExceeded)
	s.settle(s.sendUnder(s.call("c", "order/2/item").cost("0"), p), paid("re_2"))
	s.take(b, Release)
	s.wantHeld(s.admitUnder(b, p), ScopeOverlap)
	s.take(b, Release)
	// What was released adds up.
	s.settle(s.sendUnder(b, p), paid("re_3"))
	s.wantSpend("150", "0")
}

func TestAllThatHoldsACallHoldsItAtOnce(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100").holds())
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	b := s.call("b", "order/1").cost("50")
	s.wantHeld(s.admitUnder(b, p), ScopeOverlap, BudgetExceeded)
	s.take(b, Release)
	s.settle(s.sendUnder(b, p), paid("re_2"))
	s.wantSpend("150", "0")
	// A limit that denies comes before what holds.
	c := s.call("c", "order/1").cost("50")
	s.wantExceeded(c, spendPolicy(daily("100")), "daily")
	// And after a repetition, which is no payment.
	d := s.call("d", "order/9").cost("50").on("sess/1")
	s.settle(s.sendUnder(d, storyPolicy()), paid("re_3"))
	s.wantReplay(s.admitUnder(d.under("d2"), spendPolicy(daily("1"))), "d", "re_3")
}

func TestALimitThatDeniesIsNotPassedByARelease(t *testing.T) {
	s := tell(t)
	soft, hard := daily("100").holds(), SpendLimit{Name: "monthly", Amount: usd("120"), Window: 30 * 24 * time.Hour}
	p := spendPolicy(soft, hard)
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	// Whichever comes first in the spec.
	s.wantExceeded(s.call("x", "order/8").cost("50"), p, "monthly")
	b := s.call("b", "order/2").cost("20")
	s.wantHeld(s.admitUnder(b, p), BudgetExceeded)
	s.settle(s.sendUnder(s.call("c", "order/3").cost("1"), spendPolicy(hard)), paid("re_2"))
	s.take(b, Release)
	s.wantExceeded(b, p, "monthly")
	s.inState(b, Released)
}

func TestWhatCannotBeCountedIsRefused(t *testing.T) {
	euro := SpendLimit{Name: "euro", Amount: intent.Money{Value: "100", Currency: "EUR"}, Window: spendWindow}
	unknown := daily("100")
	unknown.Unknown = "it does not yield"
	inEuro := func(c *Call) { c.Amount.Currency = "EUR" }
	free := func(c *Call) { c.Amount = nil }
	cases := []struct {
		name   string
		limits []SpendLimit
		change func(*Call)
		want   string // the limit that refuses; "": none
		held   bool
	}{
		{"another currency", []SpendLimit{daily("100")}, inEuro, "daily", false},
		{"another currency, held", []SpendLimit{daily("100").holds()}, inEuro, "daily", true},
		{"another currency, denied where any limit denies", []SpendLimit{daily("100").holds(), {Name: "b", Amount: usd("1"), Window: time.Hour}}, inEuro, "b", false},
		{"a currency with a limit of its own", []SpendLimit{daily("1"), euro}, inEuro, "", false},
		{"no amount", []SpendLimit{daily("100")}, free, "daily", false},
		{"no amount, held", []SpendLimit{daily("100").holds()}, free, "daily", true},
		{"no value", []SpendLimit{unknown}, func(*Call) {}, "daily", false},
		{"no value, held", []SpendLimit{unknown.holds(), euro}, func(*Call) {}, "daily", true},
		{"no value for a limit in another currency", []SpendLimit{unknown, euro}, inEuro, "", false},
	}
	for _, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			p := spendPolicy(tt.limits...)
			c := s.call("a", "order/1").with(tt.change)
			switch {
			case tt.want == "":
				s.settle(s.sendUnder(c, p), paid("re_1"))
			case tt.held:
				a := s.admitUnder(c, p)
				s.wantHeld(a, BudgetExceeded)
				if !strings.Contains(a.Cause, "cannot be counted") {
					t.Fatalf("the cause is %q", a.Cause)
				}
				s.take(c, Release)
				s.settle(s.sendUnder(c, p), paid("re_1"))
			default:
				if x := s.wantExceeded(c, p, tt.want); x.Uncounted == "" {
					t.Fatalf("it does not say why: %+v", x)
				}
				// A repetition is answered all the same.
				d := s.call("d", "order/2").with(tt.change).on("sess/1")
				s.settle(s.sendUnder(d, storyPolicy()), paid("re_2"))
				s.wantReplay(s.admitUnder(d.under("d2"), p), "d", "re_2")
			}
		})
	}
}

func TestEachValueHasALimitOfItsOwn(t *testing.T) {
	s := tell(t)
	of := func(per string) Policy {
		l := daily("100")
		l.Per, l.Own = per, true
		return spendPolicy(l, SpendLimit{Name: "all", Amount: usd("150"), Window: spendWindow})
	}
	s.settle(s.sendUnder(s.call("a", "order/1").cost("80"), of("alice")), paid("re_1"))
	if x := s.wantExceeded(s.call("b", "order/2").cost("30"), of("alice"), "daily"); x.Left != "20" {
		t.Fatalf("%q is left", x.Left)
	}
	s.settle(s.sendUnder(s.call("c", "order/3").cost("30"), of("bob")), paid("re_2"))
	// What is left of everybody's is nobody's business.
	if x := s.wantExceeded(s.call("d", "order/4").cost("50"), of("bob"), "all"); x.Left != "" {
		t.Fatalf("it tells that %q is left", x.Left)
	}
	got, err := s.Spend(s.ctx, "refunds", "daily", "USD")
	if err != nil || got != (Spent{Used: "110", Reserved: "0"}) {
		t.Fatalf("over all values: %+v, %v", got, err)
	}
}

func TestAPaymentByHandCounts(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100").holds())
	s.settle(s.sendUnder(s.call("a", "order/1").cost("100"), p), paid("re_1"))
	b := s.call("b", "order/2").cost("50")
	s.wantHeld(s.admitUnder(b, p), BudgetExceeded)
	s.take(b, MarkPaid)
	s.wantSpend("150", "0")
	s.pass(storyTTL)
	s.sweep()
	s.sweep()
	s.wantSpend("0", "0")
	s.inState(b, Tombstone)
}

func TestANewLimitCountsFromItsFirstPayment(t *testing.T) {
	s := tell(t)
	c := s.call("a", "order/1").cost("60")
	s.settle(s.send(c), unreachable())
	s.pass(time.Minute)
	p := spendPolicy(daily("100"))
	s.settle(s.sendUnder(c, p), lost())
	s.wantSpend("0", "60")
	// Where the limit is taken away, what counts already goes on to.
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.settle(s.send(c), lost())
	s.wantSpend("0", "60")
	s.take(c, Reject)
	s.wantSpend("60", "0")
}

func TestLimitsHoldForManyAtOnce(t *testing.T) { // L01
	s := tell(t)
	p := spendPolicy(daily("100"))
	other := s.process()
	var wg sync.WaitGroup
	var mu sync.Mutex
	passed, denied := 0, 0
	for i, id := range ids("i", 50) {
		e := s.Engine
		if i%2 == 1 {
			e = other
		}
		wg.Go(func() {
			a, err := e.Admit(s.ctx, s.call(id, "order/"+id).cost("10"), p)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				t.Error(err)
			case a.Verdict == Allow:
				passed++
			case a.Reason == ReasonSpendExceeded:
				denied++
			}
		})
	}
	wg.Wait()
	if passed != 10 || denied != 40 {
		t.Fatalf("%d passed and %d were denied, want 10 and 40", passed, denied)
	}
	s.wantSpend("0", "100")
}

func TestAfterALossWhatIsComparedIsHeldForTheLongestWindow(t *testing.T) {
	s := tell(t)
	l := daily("100")
	l.Window = storyWindow + 24*time.Hour
	p := spendPolicy(l)
	s.wiped(nil)
	s.pass(storyWindow + time.Hour)
	s.wantHeld(s.admitUnder(s.call("a", "order/1").cost("10"), p), OutcomeUnknown)
	s.wantSpend("0", "10")
	s.pass(24 * time.Hour)
	s.settle(s.sendUnder(s.call("b", "order/2").cost("10"), p), paid("re_1"))
}

func TestNoLimitsCostNothing(t *testing.T) {
	s := tell(t)
	before := s.net.count("Meter")
	s.pay(s.call("a", "order/1"), "re_1")
	r := s.inState(s.call("a", "order/1"), Succeeded)
	if r.Charges != nil || s.net.count("Meter") != before {
		t.Fatalf("it counts for %v, and %d meters were read", r.Charges, s.net.count("Meter")-before)
	}
}

func TestLookalikesAreHeld(t *testing.T) {
	p := storyPolicy()
	p.Lookalike = 2 * time.Minute
	cases := []struct {
		name   string
		change func(*Call)
		held   bool
	}{
		{"another order", func(*Call) {}, true},
		{"another caller", func(c *Call) { c.Caller, c.CallerUID = "other", "uid-2" }, true},
		{"another tool", func(c *Call) { c.Tool = "other" }, true},
		{"another recipient", func(c *Call) { c.Recipient = "c2" }, false},
		{"another amount", func(c *Call) { c.Amount.Value = "50" }, false},
		{"another currency", func(c *Call) { c.Amount.Currency = "EUR" }, false},
		{"no recipient", func(c *Call) { c.Recipient = "" }, false},
		{"no amount", func(c *Call) { c.Amount = nil }, false},
	}
	for _, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			a, b := s.call("a", "order/1").with(tt.change), s.call("b", "order/2")
			b = b.with(func(c *Call) {
				if a.Recipient == "" {
					c.Recipient = ""
				}
				if a.Amount == nil {
					c.Amount = nil
				}
			})
			s.settle(s.sendUnder(a, p), paid("re_1"))
			s.pass(2*time.Minute - time.Second)
			if !tt.held {
				s.settle(s.sendUnder(b, p), paid("re_2"))
				return
			}
			got := s.admitUnder(b, p)
			s.wantHeld(got, Lookalike)
			if got.MatchCount != 1 || got.Matches[0].IntentID != "a" || got.Matches[0].Relation != string(Lookalike) {
				t.Fatalf("it shows %+v", got.Matches)
			}
			// A release passes over what it had shown, and over nothing later.
			s.settle(s.sendUnder(s.call("c", "order/3"), storyPolicy()), paid("re_3"))
			s.take(b, Release)
			s.settle(s.sendUnder(b, p), paid("re_2"))
			s.wantHeld(s.admitUnder(s.call("d", "order/4"), p), Lookalike)
			s.pass(2*time.Minute + time.Second)
			s.settle(s.sendUnder(s.call("e", "order/5"), p), paid("re_5"))
		})
	}
	t.Run("while nobody knows, whatever the age", func(t *testing.T) {
		s := tell(t)
		s.settle(s.sendUnder(s.call("a", "order/1"), p), lost())
		s.pass(24 * time.Hour)
		s.wantHeld(s.admitUnder(s.call("b", "order/2"), p), Lookalike)
	})
	t.Run("a hold that compared none covers none", func(t *testing.T) {
		s := tell(t)
		s.settle(s.sendUnder(s.call("a", "order/1"), p), paid("re_1"))
		b := s.call("b", "order/1")
		s.wantHeld(s.admitUnder(b, storyPolicy()), ScopeOverlap)
		s.take(b, Release)
		s.wantHeld(s.admitUnder(b, p), ScopeOverlap, Lookalike)
		s.take(b, Release)
		s.settle(s.sendUnder(b, p), paid("re_2"))
	})
}

func TestSpendComesAfterTheRateAndBeforeTheSlots(t *testing.T) {
	s := tell(t)
	p := spendPolicy(daily("100"))
	p.MaxInFlight = 1
	s.sendUnder(s.call("a", "order/1").cost("60"), p)
	s.want(s.admitUnder(s.call("b", "order/2").cost("40"), p), Deny, ReasonTooManyInFlight)
	s.wantExceeded(s.call("c", "order/3").cost("40.01"), p, "daily")
	s.wantExceeded(s.call("d", "order/4").with(func(c *Call) { c.Amount = nil }), p, "daily")
	s.wantExceeded(s.call("e", "order/5").cost("40.01").with(func(c *Call) { c.Behind = true }), p, "daily")
	s.want(s.admitUnder(s.call("f", "order/6").cost("40").with(func(c *Call) { c.Behind = true }), p), Deny, ReasonTooManyInFlight)
	p.Rate = Rate{Every: time.Hour, Burst: 1}
	s.wantExceeded(s.call("g", "order/7").cost("40.01"), p, "daily")
	s.want(s.admitUnder(s.call("h", "order/8").cost("40.01"), p), Deny, ReasonRateLimited)
	s.wantSpend("0", "60")
}

// A payment that a status check has found is news for the limits: it counts from now, also
// where the attempt that made it had left the window.
func TestAPaymentThatACheckHasFoundIsNews(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.sendUnder(c, spendPolicy(daily("100"))), lost())
	was := s.record(c.Key)
	was.Charges[0].Payments, was.Charges[0].From = 0, 2
	for on, want := range map[event]int{onChecked: 1, onLateSuccess: 1, onWaitOver: 0} {
		next := was.clone()
		next.Attempts[0].Outcome = AttemptSucceeded
		next.succeed(&next.Attempts[0], s.time.store())
		if _, err := s.spendEntries(pending{from: was, to: next, on: on, now: s.time.store()}); err != nil {
			t.Fatal(err)
		}
		if got := next.Charges[0]; got.Payments != want || (got.From == 0) != (want == 1) || got.Until.IsZero() != (want == 0) {
			t.Errorf("%s: it counts %+v", on, got)
		}
	}
	// An answer that decides otherwise is none.
	next := was.clone()
	if _, err := s.spendEntries(pending{from: was, to: next, on: onChecked, now: s.time.store()}); err != nil || next.Charges[0].From != 2 {
		t.Errorf("still held: %+v, %v", next.Charges[0], err)
	}
}
