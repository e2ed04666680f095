// What a budget lets move: limits that hold for all gateways together, and lookalikes.
// How much has moved is asked of the provider.

package e2e

import (
	"context"
	"fmt"
	"math/big"
	"net/http"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// limitOf gives the budget a limit.
func limitOf(name, amount string, window time.Duration, change ...func(*v1alpha1.SpendLimit)) setting {
	l := v1alpha1.SpendLimit{Name: name, Currency: "USD", Limit: amount, Window: metav1.Duration{Duration: window}}
	for _, c := range change {
		c(&l)
	}
	return func(b *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) { b.Spec.Spend = append(b.Spec.Spend, l) }
}

func holding(l *v1alpha1.SpendLimit) { l.OnExceed = v1alpha1.ExceedHold }

func per(expression string) func(*v1alpha1.SpendLimit) {
	return func(l *v1alpha1.SpendLimit) { l.Per = expression }
}

// moved is what the provider has paid in this world.
func (w *world) moved(ctx context.Context) string {
	GinkgoHelper()
	sum := new(big.Rat)
	for _, e := range w.entries(ctx) {
		amount, ok := new(big.Rat).SetString(e.Amount)
		Expect(ok).To(BeTrue(), e.Amount)
		sum.Add(sum, amount)
	}
	return sum.FloatString(2)
}

// spendIs waits until the budget's status shows this of a limit.
func (w *world) spendIs(ctx context.Context, name, used, reserved string) {
	GinkgoHelper()
	Eventually(func(g Gomega, ctx context.Context) {
		var b v1alpha1.IntentBudget
		g.Expect(admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: budgetName}, &b)).To(Succeed())
		var shown []string
		for _, s := range b.Status.Spend {
			if s.Name == name {
				shown = append(shown, s.Used, s.Reserved)
			}
		}
		g.Expect(shown).To(Equal([]string{used, reserved}))
	}).WithContext(ctx).Should(Succeed())
}

func (w *world) exceeded(ctx context.Context, c call) problem {
	GinkgoHelper()
	p := w.pay(ctx, c, 403, deny).problem()
	Expect(p.Reason).To(Equal("spend_exceeded"))
	return p
}

var _ = Describe("a budget's spend", func() {
	It("L01 and L04: of 50 parallel calls of 10 under a limit of 100, through all gateways, exactly 10 pass", func(ctx SpecContext) {
		w := newWorld(ctx, limitOf("daily", "100", 24*time.Hour, per("object.spec.caller")))
		calls := make([]call, 50)
		for i := range calls {
			calls[i] = call{id: fmt.Sprint("k", i), body: w.order(fmt.Sprint(i), "10"), at: gateways()[i%len(gateways())]}
		}
		var paid, denied []call
		for i, got := range w.atOnce(ctx, calls...) {
			// The meter takes one after another: on a busy machine a store may refuse to wait, and nothing was sent then.
			if got.status == http.StatusServiceUnavailable {
				Eventually(func(ctx context.Context) int {
					got = w.call(ctx, calls[i])
					return got.status
				}).WithContext(ctx).ShouldNot(Equal(http.StatusServiceUnavailable), got.String())
			}
			switch {
			case got.verdict() == allow:
				Expect(got.status).To(Equal(201), got.String())
				paid = append(paid, calls[i])
			default:
				Expect(got.status).To(Equal(403), got.String())
				Expect(got.problem().Reason).To(Equal("spend_exceeded"))
				denied = append(denied, calls[i])
			}
		}
		Expect(paid).To(HaveLen(10))
		Expect(w.moved(ctx)).To(Equal("100.00"))
		w.spendIs(ctx, "daily", "100", "0")
		nothingSent(ctx, func() {
			for _, c := range denied[:5] {
				Expect(w.exceeded(ctx, c).Detail).To(ContainSubstring("You have 0.00 USD left."))
			}
			// A replay costs nothing.
			w.pay(ctx, paid[0], 201, replay)
		})
		// Another caller has a limit of its own.
		w.serviceAccount(ctx, "second", "holdfast-agent")
		c := denied[0]
		c.token = w.tokenOf(ctx, "second", audience)
		w.pay(ctx, c, 201, allow)
		w.spendIs(ctx, "daily", "110", "0")
	})

	It("returns when nothing moved, and leaves the window when that is over", func(ctx SpecContext) {
		const window = 4 * time.Second
		w := newWorld(ctx, limitOf("short", "10", window))
		w.pay(ctx, call{id: "k1", body: w.order("1", "10"), fault: "decline-402"}, 402, allow)
		w.spendIs(ctx, "short", "0", "0")
		// To the cent.
		Expect(w.exceeded(ctx, call{id: "k0", body: w.order("0", "10.01")}).Detail).To(ContainSubstring("10.00 USD within 4s"))
		began := time.Now()
		w.pay(ctx, call{id: "k2", body: w.order("2", "10")}, 201, allow)
		w.exceeded(ctx, call{id: "k3", body: w.order("3", "0.01")})
		Eventually(func(ctx context.Context) string {
			return w.call(ctx, call{id: "k3", body: w.order("3", "0.01")}).verdict()
		}).
			WithContext(ctx).Should(Equal(allow))
		Expect(time.Since(began)).To(BeNumerically(">=", window))
		Expect(w.moved(ctx)).To(Equal("10.01"))
		w.spendIs(ctx, "short", "0", "0")
		w.pay(ctx, call{id: "k2", body: w.order("2", "10")}, 201, replay)
	})

	It("R17: what a rejected, unknown attempt may have spent is still counted", func(ctx SpecContext) {
		w := newWorld(ctx, limitOf("daily", "100", 24*time.Hour))
		c := call{id: "k1", body: w.order("9", "60"), fault: "close-after-commit"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.spendIs(ctx, "daily", "0", "60")
		nothingSent(ctx, func() { w.exceeded(ctx, call{id: "k2", body: w.order("8", "60")}) })
		w.resolve(ctx, hold, resolution{Decision: "Reject"})
		w.spendIs(ctx, "daily", "60", "0")
		nothingSent(ctx, func() {
			w.pay(ctx, call{id: "k3", body: w.order("9", "10")}, 409, unknownHold)
			w.exceeded(ctx, call{id: "k2", body: w.order("8", "60")})
		})
		w.pay(ctx, call{id: "k4", body: w.order("7", "40")}, 201, allow)
		Expect(w.moved(ctx)).To(Equal("100.00"))
	})

	It("R34: beyond it a person decides, for one payment and for no overlap", func(ctx SpecContext) {
		w := newWorld(ctx, limitOf("daily", "100", 24*time.Hour, holding))
		w.pay(ctx, call{id: "k1", body: w.order("1", "100")}, 201, allow)
		c := call{id: "k2", body: w.order("2", "50")}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		shown := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		Expect(shown.Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldBudgetExceeded}))
		Expect(shown.Status.Cause).To(ContainSubstring("100 USD in 24h"))
		// An overlapping payment comes in between, of nothing, so that the limit lets it.
		w.pay(ctx, call{id: "k3", body: fmt.Sprintf(`{"accountId":%q,"orderId":"2","amount":0,"scope":[["account",%q,"order","2","item","1"]]}`, w.namespace, w.namespace)}, 201, allow)
		w.resolve(ctx, hold, release)
		hold = w.pay(ctx, c, 409, unknownHold).problem().Hold
		Expect(w.holdIs(ctx, hold, v1alpha1.HoldHeld).Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap}))
		w.resolve(ctx, hold, release)
		w.pay(ctx, c, 201, allow)
		w.pay(ctx, c, 201, replay)
		Expect(w.moved(ctx)).To(Equal("150.00"))
		w.spendIs(ctx, "daily", "150", "0")
		nothingSent(ctx, func() {
			got := w.pay(ctx, call{id: "k4", body: w.order("4", "0.01")}, 409, unknownHold).problem()
			Expect(got.Reason).To(Equal("BudgetExceeded"))
		})
	})

	It("refuses what it cannot count", func(ctx SpecContext) {
		w := newWorld(ctx, limitOf("daily", "100", 24*time.Hour))
		nothingSent(ctx, func() {
			p := w.exceeded(ctx, call{id: "k1", body: fmt.Sprintf(`{"accountId":%q,"orderId":"1","amount":1,"currency":"EUR"}`, w.namespace)})
			Expect(p.Detail).To(ContainSubstring("no limit in EUR"))
		})
		Expect(w.entries(ctx)).To(BeEmpty())
	})
})

var _ = Describe("lookalikes", func() {
	It("are held: the same amount to the same recipient within the window", func(ctx SpecContext) {
		w := newWorld(ctx, func(b *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			b.Spec.Overlap = &v1alpha1.OverlapSpec{Lookalike: &v1alpha1.LookalikeSpec{Window: metav1.Duration{Duration: time.Minute}}}
		})
		w.pay(ctx, call{id: "k1", body: w.order("1", "10")}, 201, allow)
		hold := w.pay(ctx, call{id: "k2", body: w.order("2", "10")}, 409, unknownHold).problem().Hold
		shown := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		Expect(shown.Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldLookalike}))
		Expect(shown.Spec.Matches).To(HaveLen(1))
		Expect(shown.Spec.Matches[0].IntentID).To(Equal("k1"))
		w.pay(ctx, call{id: "k3", body: w.order("3", "11")}, 201, allow)
		w.resolve(ctx, hold, release)
		w.pay(ctx, call{id: "k2", body: w.order("2", "10")}, 201, allow)
		Expect(w.moved(ctx)).To(Equal("31.00"))
	})
})
