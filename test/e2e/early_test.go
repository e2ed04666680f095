// What needs a minute to pass: it is begun before all specs, and looked at at the
// end of its time, so that the minute costs nothing.

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// minute is the shortest TTL and the shortest window.
const minute = time.Minute

// earlyWorld has the shortest TTL and window.
type earlyWorld struct {
	*world
	// over is when both have passed for everything that was begun.
	over time.Time
}

var early earlyWorld

var (
	expiring = func() call { return call{id: "expires", body: early.order("paid", "10")} }
	// lapses is for the signals alone.
	lapses = func() call { return call{id: "lapses", body: early.order("kept", "10")} }
	silent = func() call {
		return call{id: "silent", body: early.order("unknown", "10"), fault: "close-after-commit"}
	}
)

func (e *earlyWorld) begin(ctx context.Context) {
	GinkgoHelper()
	e.world = newWorld(ctx, func(budget *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		budget.Spec.Overlap = &v1alpha1.OverlapSpec{Window: &metav1.Duration{Duration: minute}}
		tool.Spec.Idempotency.TTL = &metav1.Duration{Duration: minute}
	})
	e.pay(ctx, expiring(), 201, allow)
	e.pay(ctx, lapses(), 201, allow)
	e.pay(ctx, silent(), 409, unknownHold)
	// The sweep, and what was begun last.
	e.over = time.Now().Add(minute + lease + grace + 2*time.Second)
}

// wait ends when the minute is over.
func (e *earlyWorld) wait(ctx context.Context) {
	GinkgoHelper()
	timer := time.NewTimer(time.Until(e.over))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		Fail("the spec ended before the minute did")
	}
}

var _ = Describe("After the TTL and the window", func() {
	BeforeEach(func(ctx SpecContext) { early.wait(ctx) })

	It("K10: the same key after the TTL is held as KeyExpired", func(ctx SpecContext) {
		var p problem
		nothingSent(ctx, func() {
			Expect(early.pay(ctx, call{id: "expires", body: early.order("paid", "11")}, 422, conflict).problem().Reason).To(Equal("request"))
			p = early.pay(ctx, expiring(), 409, unknownHold).problem()
		})
		Expect(p.Reason).To(Equal("KeyExpired"))
		h := early.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
		Expect(h.Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldKeyExpired}))
		// Whoever releases it says that it is another payment: the provider gets another key.
		early.resolve(ctx, p.Hold, release)
		early.pay(ctx, expiring(), 201, allow)
		keys := map[string]bool{}
		for _, e := range early.entries(ctx) {
			if e.OrderID == "paid" {
				keys[e.Key] = true
			}
		}
		Expect(keys).To(HaveLen(2))
	})

	It("R20: an unknown outcome older than the window still stands in the way", func(ctx SpecContext) {
		var p problem
		nothingSent(ctx, func() {
			p = early.pay(ctx, call{id: "another", body: early.order("unknown", "10")}, 409, unknownHold).problem()
		})
		Expect(p.Reason).To(Equal("ScopeOverlap"))
		Expect(p.OwnMatches).To(HaveLen(1))
		Expect(p.OwnMatches[0].IntentID).To(Equal("silent"))
		Expect(early.charged(ctx, "unknown")).To(Equal(1))
	})
})
