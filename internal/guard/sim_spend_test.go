// This file is the simulator's judge of money: in some worlds the budget has a limit, and
// the provider's ledger must never show more within its window than it allows, but for
// what a person has let pass or was wrong about. In the end all that did not move has
// returned.

package guard

import (
	"context"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// simAmount is that of every payment but for those that nobody meant.
const simAmount = 10

// simMoney is the limit of a world.
type simMoney struct {
	payments  int // how many it allows
	hold      bool
	perCaller bool
	// excused are payments that nobody could have counted.
	excused map[*message]bool
}

// newMoney has dice of its own, so that a world without a limit is as it was. What a
// store has forgotten, and what a clock that jumped let go, it does not judge.
func (w *world) newMoney() *simMoney {
	dice := rand.New(rand.NewPCG(w.seed, 3))
	if dice.IntN(2) == 0 || w.loss.loses || w.jumps {
		return nil
	}
	return &simMoney{payments: 1 + dice.IntN(2), hold: dice.IntN(3) == 0, perCaller: dice.IntN(4) == 0, excused: map[*message]bool{}}
}

// limited is the policy as it stands for an intent.
func (w *world) limited(p Policy, in *simIntent) Policy {
	if w.money == nil {
		return p
	}
	l := SpendLimit{
		Name: "limit", Amount: intent.Money{Value: strconv.Itoa(w.money.payments * simAmount), Currency: "USD"},
		Window: w.window, Hold: w.money.hold,
	}
	if w.money.perCaller {
		l.Per = in.call.Caller
	}
	return p.WithSpend([]SpendLimit{l})
}

// letPass says that a person has let this intent pass the limit, or was wrong about it.
func (w *world) letPass(in *simIntent) bool {
	if in.wrong > 0 || w.denied[in.call.Key.String()] {
		return true
	}
	for _, o := range in.objects {
		if o.resolution != nil && o.resolution.Decision == Release && (&hold{Reasons: o.reasons}).has(BudgetExceeded) {
			return true
		}
	}
	return false
}

// recent is how far back a payment surely counts still, give or take the store's clock.
func (w *world) recent() time.Duration {
	if w.short {
		return w.window - 10*time.Second
	}
	return w.window / 2
}

// judgeSpend looks at the ledger after each payment.
func (w *world) judgeSpend(c commit) {
	if w.money == nil {
		return
	}
	if w.state[c.in.call.Key.String()].Settled() {
		w.money.excused[c.m] = true // a person has decided what was still on its way
	}
	paid := map[*simIntent]bool{}
	for _, o := range w.ledger {
		if o.at <= w.t-w.recent() || w.money.excused[o.m] || w.letPass(o.in) || w.money.perCaller && o.in.call.Caller != c.in.call.Caller {
			continue
		}
		paid[o.in] = true
	}
	if len(paid) > w.money.payments {
		w.violate("%d intents were paid within the window, and the limit is %d", len(paid), w.money.payments)
	}
}

// judgeSpendAtTheEnd compares what the limit's meters say with the records, and with the ledger.
func (w *world) judgeSpendAtTheEnd(in *simIntent, r *record) {
	if w.money == nil || r == nil {
		return
	}
	lastly := time.Duration(-1)
	for _, c := range w.ledger {
		if c.in == in && !w.money.excused[c.m] {
			lastly = c.at
		}
	}
	for i := range r.Charges {
		n := r.Charges[i].Payments
		switch {
		case !r.mayHaveMoved() && !r.PaidByHand && n != 0:
			w.violate("nothing of %s has moved, and it counts as %d payments", in.call.IntentID, n)
		case lastly >= 0 && lastly > w.t-w.recent() && !w.letPass(in) && n == 0:
			w.violate("%s was paid a short time ago, and counts for nothing", in.call.IntentID)
		}
	}
}

// judgeMeters compares the meters with what the records count for.
func (w *world) judgeMeters(records []*record) {
	if w.money == nil {
		return
	}
	want := map[string]int{}
	for _, r := range records {
		for i := range r.Charges {
			amount, err := strconv.Atoi(r.Amount.Value)
			if err != nil {
				w.violate("%s: %v", r.IntentID, err)
			}
			want[r.Charges[i].meter()] += r.Charges[i].Payments * amount
		}
	}
	for meter, n := range want {
		if sum, err := w.bolt.Meter(context.Background(), meter); err != nil || sum != strconv.Itoa(n) {
			w.violate("a limit's meter says %s, and the records %d (%v)", sum, n, err)
		}
	}
}
