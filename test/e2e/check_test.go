// Status checks: what the gateways ask the provider themselves, and what they make of it.

package e2e

import (
	"context"
	"net/http"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// asks has the provider asked by the key that it was sent.
func asks(finality v1alpha1.CheckFinality) setting {
	return func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		tool.Spec.UnknownOutcome = v1alpha1.UnknownStatusCheck
		tool.Spec.StatusCheck = &v1alpha1.StatusCheck{
			Path: `path("charges", intent.key)`,
			Outcome: `response.status == 404 ? "Failed" : ` +
				`has(response.body.status) && response.body.status == "processing" ? "Pending" : ` +
				`response.body.key == intent.key ? "Succeeded" : "Unknown"`,
			Finality: finality,
			Timeout:  &metav1.Duration{Duration: 2 * time.Second},
			Backoff:  &v1alpha1.CheckBackoff{Initial: &metav1.Duration{Duration: 300 * time.Millisecond}, Max: &metav1.Duration{Duration: time.Second}},
		}
	}
}

// settling is a provider that may show nothing for a minute: until then, that it shows nothing says nothing.
func settling(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
	tool.Spec.Upstream.HTTP.SettleAfter = &metav1.Duration{Duration: time.Minute}
}

// lag has the provider show its payments only so long after they were made, until the end of the spec.
func lag(ctx context.Context, by time.Duration) {
	GinkgoHelper()
	set := func(ctx context.Context, d time.Duration) {
		Expect(ask(ctx, http.MethodPut, "/visibility", map[string]string{"lag": d.String()}, nil)).To(Succeed())
	}
	set(ctx, by)
	DeferCleanup(func(ctx context.Context) { set(ctx, 0) })
}

// becomes waits until the intent is in a state.
func (w *world) becomes(ctx context.Context, id, state string) intentDocument {
	GinkgoHelper()
	var doc intentDocument
	Eventually(func(ctx context.Context) (string, error) {
		var err error
		doc, err = w.tryPoll(ctx, charge, id, "")
		return doc.State, err
	}).WithContext(ctx).WithTimeout(time.Minute).Should(Equal(state))
	return doc
}

// answers waits until so many answers of checks are on the record.
func (w *world) answers(ctx context.Context, id string, n int) []checkAnswer {
	GinkgoHelper()
	var doc intentDocument
	Eventually(func(ctx context.Context) (int, error) {
		var err error
		if doc, err = w.tryPoll(ctx, charge, id, ""); err != nil || doc.Checks == nil {
			return 0, err
		}
		return len(doc.Checks.Answers), nil
	}).WithContext(ctx).Should(BeNumerically(">=", n))
	return doc.Checks.Answers
}

var _ = Describe("Status checks", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx, asks(v1alpha1.FinalitySettleAfter)) })

	It("P03: the payment was made and its answer was lost: the check finds it", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalitySettleAfter), settling)
		// Not before the hold is shown: one that the check has voided by then never is.
		lag(ctx, time.Hour)
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		p := w.pay(ctx, c, 409, unknownHold).problem()
		Expect(p.Reason).To(Equal("OutcomeUnknown"))
		w.holdIs(ctx, p.Hold, v1alpha1.HoldWaiting)
		lag(ctx, 0)
		doc := w.becomes(ctx, "k1", "Succeeded")
		paid := w.entries(ctx)
		Expect(paid).To(HaveLen(1))
		Expect(doc.ProviderReference).To(Equal(paid[0].ID))
		Expect(doc.Checks.Made).To(BeNumerically(">=", 1))
		again := w.pay(ctx, c, 200, replay)
		Expect(again.header.Get("Holdfast-Answer-From")).To(Equal("status-check"))
		Expect(again.body).To(ContainSubstring(paid[0].ID))
		h := w.holdIs(ctx, p.Hold, v1alpha1.HoldVoid)
		Expect(h.Status.Effect).To(ContainSubstring(paid[0].ID))
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("P02: accepted, pending, then settled: one send", func(ctx SpecContext) {
		before := sent(ctx)
		// It is shown as accepted, however long that takes, until it is looked at.
		lag(ctx, time.Hour)
		c := call{id: "k1", body: w.order("9", "10"), fault: "accepted-202:2s"}
		p := w.pay(ctx, c, 409, inFlight).problem()
		Expect(p.Reason).To(Equal("pending"))
		Expect(p.Hold).To(BeEmpty())
		Expect(w.answers(ctx, "k1", 1)[0].Outcome).To(Equal("Pending"))
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		Expect(w.poll(ctx, charge, "k1", "").State).To(Equal("Pending"))
		lag(ctx, 0)
		w.becomes(ctx, "k1", "Succeeded")
		w.pay(ctx, c, 200, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(sent(ctx) - before).To(Equal(1))
	})

	It("does not believe a check that says too early that nothing moved", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalitySettleAfter), settling)
		lag(ctx, time.Hour)
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		began := time.Now()
		p := w.pay(ctx, c, 409, unknownHold).problem()
		// Whatever it answers while lease and grace pass, and twice more a grace apart.
		Eventually(func(g Gomega, ctx context.Context) {
			doc, err := w.tryPoll(ctx, charge, "k1", "")
			g.Expect(err).NotTo(HaveOccurred())
			Expect(doc.State).To(Equal("Held"))
			g.Expect(time.Since(began)).To(BeNumerically(">", lease+3*grace))
			g.Expect(doc.Checks.Made).To(BeNumerically(">=", 4))
			Expect(doc.Checks.Answers).To(HaveEach(HaveField("Outcome", "Failed")))
		}).WithContext(ctx).Should(Succeed())
		w.holdIs(ctx, p.Hold, v1alpha1.HoldWaiting)
		lag(ctx, 0)
		w.becomes(ctx, "k1", "Succeeded")
		w.pay(ctx, c, 200, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("believes it late and twice, and the next call pays", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "reset-before-commit"}
		began := time.Now()
		p := w.pay(ctx, c, 409, unknownHold).problem()
		doc := w.becomes(ctx, "k1", "Retryable")
		Expect(time.Since(began)).To(BeNumerically(">=", lease+2*grace+settleAfter))
		Expect(doc.Attempts).To(HaveLen(1))
		Expect(doc.Attempts[0].Outcome).To(Equal("Retryable"))
		w.holdIs(ctx, p.Hold, v1alpha1.HoldVoid)
		c.fault = ""
		Eventually(func(ctx context.Context) string { return w.call(ctx, c).verdict() }).WithContext(ctx).Should(BeElementOf(allow, replay))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("goes on asking when the gateways die between two checks", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalitySettleAfter), settling)
		lag(ctx, time.Hour)
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		w.pay(ctx, c, 409, unknownHold)
		w.answers(ctx, "k1", 1)
		for _, g := range gateways() {
			g.crash(ctx)
		}
		lag(ctx, 0)
		w.becomes(ctx, "k1", "Succeeded")
		w.pay(ctx, c, 200, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("asks from one gateway at a time", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "reset-before-commit"}
		w.pay(ctx, c, 409, unknownHold)
		doc := w.becomes(ctx, "k1", "Retryable")
		c.fault = ""
		for range 2 {
			Eventually(func(ctx context.Context) string { return w.call(ctx, c).verdict() }).WithContext(ctx).Should(BeElementOf(allow, replay))
		}
		paid := w.entries(ctx)
		Expect(paid).To(HaveLen(1))
		// By its key, since an intent of an earlier spec may still be asked about.
		Expect(readLedger(ctx).Requests).To(HaveKeyWithValue("GET /charges/"+paid[0].Key, doc.Checks.Made))
	})
})

var _ = Describe("Status checks without an end", func() {
	It("R32: with finality Unbounded absence never counts, and nothing is released", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalityUnbounded))
		before := sent(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "reset-before-commit"}
		p := w.pay(ctx, c, 409, unknownHold).problem()
		w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
		seen := len(w.poll(ctx, charge, "k1", "").Checks.Answers)
		for _, a := range w.answers(ctx, "k1", seen+3) {
			Expect(a.Outcome).To(Equal("Failed"))
		}
		w.pay(ctx, c, 409, unknownHold)
		Expect(w.tryResolve(ctx, resolver, p.Hold, release)).To(Succeed())
		h := w.holdIs(ctx, p.Hold, v1alpha1.HoldVoid)
		Expect(h.Status.Effect).To(ContainSubstring("Unbounded"))
		w.pay(ctx, c, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
	})

	It("R22: a person rejects what was paid, and the check finds it: a refund is owed", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalitySettleAfter), settling)
		lag(ctx, time.Hour)
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.answers(ctx, "k1", 1)
		h := w.holdIs(ctx, hold, v1alpha1.HoldWaiting)
		Expect(w.tryResolve(ctx, resolver, h.Name, resolution{Decision: "Reject", Reason: "not wanted"})).To(Succeed())
		w.becomes(ctx, "k1", "Rejected")
		w.pay(ctx, c, 403, deny)
		lag(ctx, 0)
		doc := w.becomes(ctx, "k1", "Succeeded")
		Expect(doc.RefundOwed).To(HaveValue(BeTrue()))
		paid := w.entries(ctx)
		Expect(paid).To(HaveLen(1))
		Expect(doc.ProviderReference).To(Equal(paid[0].ID))
		Eventually(func(ctx context.Context) (string, error) {
			h, err := w.hold(ctx, hold)
			if err != nil {
				return "", err
			}
			owed := apimeta.FindStatusCondition(h.Status.Conditions, v1alpha1.ConditionRefundOwed)
			if owed == nil || owed.Status != metav1.ConditionTrue {
				return "", nil
			}
			return owed.Message, nil
		}).WithContext(ctx).Should(And(ContainSubstring("10.00 USD"), ContainSubstring(paid[0].ID)))
		Eventually(w.metric("holdfast_late_results_total", `reason="refund_owed"`)).WithContext(ctx).Should(BeEquivalentTo(1))
		// What is paid stands in the way.
		w.pay(ctx, call{id: "k2", body: c.body}, 409, unknownHold)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})
})
