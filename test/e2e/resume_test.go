// Unknown outcomes that the gateways send again themselves, to a provider that deduplicates.

package e2e

import (
	"context"
	"net/http"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// resumes has the same request sent again under the same key, which the provider knows for so long.
func resumes(window time.Duration) setting {
	return func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		tool.Spec.UnknownOutcome = v1alpha1.UnknownResume
		tool.Spec.Idempotency.ProviderDeduplicates = &v1alpha1.ProviderDeduplication{Window: metav1.Duration{Duration: window}}
	}
}

// deduplicates has the provider know keys for so long, until the end of the spec.
func deduplicates(ctx context.Context, window time.Duration) {
	GinkgoHelper()
	set := func(ctx context.Context, d time.Duration) {
		Expect(ask(ctx, http.MethodPut, "/deduplication", map[string]string{"window": d.String()}, nil)).To(Succeed())
	}
	set(ctx, window)
	DeferCleanup(func(ctx context.Context) { set(ctx, 0) })
}

var _ = Describe("Resume", func() {
	var (
		w      *world
		before int
		c      call
	)
	BeforeEach(func(ctx SpecContext) {
		deduplicates(ctx, time.Hour)
		w = newWorld(ctx, resumes(time.Hour))
		before = sent(ctx)
		c = call{id: "k1", body: w.order("9", "10")}
	})

	It("sends the same again where the answer was lost, and money moves once", func(ctx SpecContext) {
		w.plan(ctx, "close-after-commit", 1)
		began := time.Now()
		p := w.pay(ctx, c, 409, unknownHold).problem()
		Expect(p.Reason).To(Equal("OutcomeUnknown"))
		doc := w.becomes(ctx, "k1", "Succeeded")
		Expect(time.Since(began)).To(BeNumerically(">=", lease+grace))
		Expect(doc.Attempts).To(HaveLen(2))
		Expect(doc.Attempts[0].Outcome).To(Equal("Unknown"))
		Expect(doc.Attempts[0].Resumed).To(BeFalse())
		Expect(doc.Attempts[1].Resumed).To(BeTrue())
		paid := w.entries(ctx)
		Expect(paid).To(HaveLen(1))
		Expect(doc.ProviderReference).To(Equal(paid[0].ID))
		Expect(w.pay(ctx, c, 201, replay).body).To(ContainSubstring(paid[0].ID))
		h := w.holdIs(ctx, p.Hold, v1alpha1.HoldVoid)
		Expect(h.Status.Effect).To(ContainSubstring("sent again"))
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(2))
		Eventually(w.metric("holdfast_resumed_attempts_total", `tool="`+charge+`"`, `outcome="Succeeded"`)).WithContext(ctx).Should(BeEquivalentTo(1))
	})

	It("pays by the second attempt where the first one never arrived, also after a replay", func(ctx SpecContext) {
		w.plan(ctx, "reset-before-commit", 2)
		w.pay(ctx, c, 409, unknownHold)
		doc := w.becomes(ctx, "k1", "Succeeded")
		Expect(doc.Attempts).To(HaveLen(3))
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(sent(ctx) - before).To(Equal(3))
	})

	It("R18: the resumed attempt is refused: unknown, never failed, and a new ID is held", func(ctx SpecContext) {
		w.plan(ctx, "close-after-commit", 1)
		w.pay(ctx, c, 409, unknownHold)
		w.plan(ctx, "decline-402", 1)
		var doc intentDocument
		Eventually(func(g Gomega, ctx context.Context) {
			var err error
			doc, err = w.tryPoll(ctx, charge, "k1", "")
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(doc.Attempts).To(HaveLen(2))
			g.Expect(doc.State).To(Equal("Held"))
		}).WithContext(ctx).WithTimeout(time.Minute).Should(Succeed())
		Expect(doc.Attempts[1].Outcome).To(Equal("Failed"))
		Expect(doc.Attempts[1].Status).To(Equal(402))
		Expect(doc.Hold.Reasons).To(Equal([]string{"OutcomeUnknown"}))
		Expect(doc.Hold.Cause).To(ContainSubstring("refused"))
		h := w.holdIs(ctx, doc.Hold.Name, v1alpha1.HoldHeld)
		Expect(h.Status.Cause).To(ContainSubstring("may be because an earlier one was paid"))
		w.pay(ctx, c, 409, unknownHold)
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(sent(ctx) - before).To(Equal(2))
	})

	It("R32: what is accepted in the end is not sent again, and not released", func(ctx SpecContext) {
		w.plan(ctx, "reset-before-commit", 1)
		w.pay(ctx, c, 409, unknownHold)
		w.plan(ctx, "accepted-202:never", 1)
		var doc intentDocument
		Eventually(func(g Gomega, ctx context.Context) {
			var err error
			doc, err = w.tryPoll(ctx, charge, "k1", "")
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(doc.Attempts).To(HaveLen(2))
			g.Expect(doc.State).To(Equal("Held"))
		}).WithContext(ctx).WithTimeout(time.Minute).Should(Succeed())
		h := w.holdIs(ctx, doc.Hold.Name, v1alpha1.HoldHeld)
		Expect(h.Status.Cause).To(ContainSubstring("accepted"))
		Expect(w.tryResolve(ctx, resolver, doc.Hold.Name, release)).To(Succeed())
		Expect(w.holdIs(ctx, doc.Hold.Name, v1alpha1.HoldVoid).Status.Effect).To(ContainSubstring("accepted"))
		w.pay(ctx, c, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(2))
		Expect(w.charged(ctx, "9")).To(BeZero())
	})

	It("R13: the upstream changes meanwhile: nothing is sent to the other one", func(ctx SpecContext) {
		w.plan(ctx, "close-after-commit", 1)
		p := w.pay(ctx, c, 409, unknownHold).problem()
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) { tool.Spec.Upstream.HTTP.URL = all.ProviderURL() + "/refunds" })
		Eventually(func(ctx context.Context) (string, error) {
			var h v1alpha1.PaymentHold
			err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: p.Hold}, &h)
			return h.Status.Cause, err
		}).WithContext(ctx).WithTimeout(time.Minute).Should(ContainSubstring("another one than that of the attempt"))
		w.pay(ctx, c, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
		Expect(w.entries(ctx)).To(HaveLen(1))
	})

	It("is killed in the middle of the resumed attempt, in every process: the next one goes on", func(ctx SpecContext) {
		w.plan(ctx, "close-after-commit", 1)
		w.pay(ctx, c, 409, unknownHold)
		w.plan(ctx, "hold-after-commit", 1)
		w.underWay(ctx, 1)
		for _, g := range gateways() {
			g.kill()
		}
		w.letGo(ctx)
		for _, g := range gateways() {
			g.start(ctx)
		}
		doc := w.becomes(ctx, "k1", "Succeeded")
		Expect(doc.Attempts).To(HaveLen(3))
		Expect(doc.Attempts[1].Outcome).To(Equal("Unknown"))
		Expect(doc.Attempts[2].Resumed).To(BeTrue())
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(sent(ctx) - before).To(Equal(3))
	})

	It("R36: the first attempt's late success meets the resumed one, whose process has died", func(ctx SpecContext) {
		w.plan(ctx, "hold-after-commit", 2) // both wait for their answers
		theFirst := c
		theFirst.at = other()
		first := w.start(ctx, theFirst)
		w.underWay(ctx, 1)
		resume := other().pause(ctx)
		if one() == other() {
			// It alone can send again: it comes back to a lease that is over.
			stopped := time.Now()
			Eventually(func() time.Duration { return time.Since(stopped) }).WithTimeout(time.Minute).Should(BeNumerically(">", lease+grace))
			resume()
		} else {
			w.underWay(ctx, 2)
			one().kill()
			resume()
		}
		w.letGo(ctx)
		if one() != other() {
			one().start(ctx)
		}
		<-first
		doc := w.becomes(ctx, "k1", "Succeeded")
		Expect(doc.Disputed).To(HaveValue(BeFalse()))
		Expect(doc.RefundOwed).To(HaveValue(BeFalse()))
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("opens what an earlier request key has sealed", func(ctx SpecContext) {
		var s corev1.Secret
		Expect(admin.Get(ctx, client.ObjectKey{Namespace: "holdfast-system", Name: "holdfast-request-keys"}, &s)).To(Succeed())
		Expect(s.Data).To(HaveKey("current"))
		w.plan(ctx, "close-after-commit", 1)
		w.pay(ctx, c, 409, unknownHold)
		s.Data["key-9"] = []byte(strings.Repeat("9", 32))
		s.Data["current"] = []byte("key-9")
		Expect(admin.Update(ctx, &s)).To(Succeed())
		DeferCleanup(func(ctx context.Context) {
			Expect(admin.Get(ctx, client.ObjectKeyFromObject(&s), &s)).To(Succeed())
			s.Data["current"] = []byte("key-1")
			Expect(admin.Update(ctx, &s)).To(Succeed())
		})
		w.becomes(ctx, "k1", "Succeeded")
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})
})

var _ = Describe("Resume in a short window", func() {
	It("K09: the provider may have forgotten the key: held, never sent again", func(ctx SpecContext) {
		// From its first attempt on it takes lease and grace until it could be sent again, and lease, grace and
		// settleAfter until that would be visible.
		w := newWorld(ctx, resumes(2*(lease+grace)+settleAfter))
		before := sent(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		p := w.pay(ctx, c, 409, unknownHold).problem()
		Eventually(func(ctx context.Context) (string, error) {
			var h v1alpha1.PaymentHold
			err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: p.Hold}, &h)
			return h.Status.Cause, err
		}).WithContext(ctx).WithTimeout(time.Minute).Should(ContainSubstring("the provider knows the key for"))
		w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
		w.pay(ctx, c, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})
})
