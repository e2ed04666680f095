// Who may resolve a hold, and when: the API server says so, in words.

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

var _ = Describe("Resolving a hold", func() {
	var w *world
	// held makes a hold for an overlap and waits until it can be resolved.
	held := func(ctx context.Context, order string) (call, string) {
		GinkgoHelper()
		w.pay(ctx, call{id: "first-" + order, body: w.order(order, "10")}, 201, allow)
		c := call{id: "second-" + order, body: w.order(order, "11")}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		return c, hold
	}
	// stands checks that a hold has no resolution, and that nothing is sent.
	stands := func(ctx context.Context, c call, hold string) {
		GinkgoHelper()
		h := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		Expect(h.Spec.Resolution).To(BeNil())
		nothingSent(ctx, func() { w.pay(ctx, c, 409, unknownHold) })
	}
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	It("kubectl patch hold clears it, as a user with the verb resolve", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		out, err := w.kubectl(ctx, resolver, "get", "holds")
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(And(ContainSubstring(hold), ContainSubstring("Held"), ContainSubstring("ScopeOverlap")))
		out, err = w.kubectl(ctx, resolver, "patch", "hold", hold, "--type", "merge", "-p",
			`{"spec":{"resolution":{"decision":"Release","reason":"second item, confirmed with customer"}}}`)
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(ContainSubstring("patched"))
		h := w.holdIs(ctx, hold, v1alpha1.HoldResolved)
		Expect(h.Spec.Resolution.By).To(Equal(resolver))
		w.pay(ctx, c, 201, allow)
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(2))
	})

	It("is refused without the verb resolve", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		// Bob may patch a hold, and carol may nothing.
		create(ctx, &rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "patcher"},
			Rules: []rbacv1.PolicyRule{{
				APIGroups: []string{v1alpha1.GroupName}, Resources: []string{"paymentholds"}, Verbs: []string{"get", "list", "patch", "update"},
			}},
		})
		create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "patcher"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "patcher"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "bob"}},
		})
		Eventually(func(ctx context.Context) error { return w.tryResolve(ctx, "bob", hold, release) }).WithContext(ctx).Should(MatchError(And(
			ContainSubstring(`user "bob" may not resolve this hold: it takes the verb resolve on paymentholds`), ContainSubstring("holdfast-resolver"))))
		Expect(w.tryResolve(ctx, "carol", hold, release)).To(MatchError(ContainSubstring(`User "carol" cannot`)))
		stands(ctx, c, hold)
	})

	It("is refused to the hold's own caller", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		w.bind(ctx, "holdfast-resolver", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.namespace, Name: "agent"})
		kubeconfig, err := all.ServiceAccountKubeconfig(ctx, w.namespace, "agent", time.Hour)
		Expect(err).NotTo(HaveOccurred())
		Eventually(func(ctx context.Context) error {
			_, err := all.RunKubectl(ctx, "--kubeconfig="+kubeconfig, "--namespace="+w.namespace, "patch", "hold", hold, "--type=merge", "--patch="+release.patch())
			return err
		}).WithContext(ctx).Should(MatchError(ContainSubstring("the caller of a payment cannot resolve its own hold: another user with the verb resolve must decide")))
		stands(ctx, c, hold)
	})

	It("is refused with the name of somebody else", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		forged := release
		forged.By = "bob"
		Expect(w.tryResolve(ctx, resolver, hold, forged)).To(MatchError(ContainSubstring(
			`spec.resolution.by must be "alice", who is asking: leave it out, or, where the API server does not write it, give that name`)))
		stands(ctx, c, hold)
	})

	It("is refused for the second time with another decision", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		w.resolve(ctx, hold, resolution{Decision: "Reject"})
		Expect(w.tryResolve(ctx, resolver, hold, release)).To(MatchError(ContainSubstring("resolution is set already and cannot be changed or removed")))
		Expect(w.holdIs(ctx, hold, v1alpha1.HoldResolved).Spec.Resolution.Decision).To(Equal(v1alpha1.DecisionReject))
		nothingSent(ctx, func() { Expect(w.pay(ctx, c, 403, deny).problem().Reason).To(Equal("rejected")) })
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R31: Release and MarkFailed are refused before the payment could have become visible", func(ctx SpecContext) {
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.SettleAfter = &metav1.Duration{Duration: time.Hour}
		})
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		h := w.holdIs(ctx, hold, v1alpha1.HoldWaiting)
		Expect(h.Status.WaitingUntil.Time).To(BeTemporally("~", time.Now().Add(time.Hour), 2*time.Minute))
		for _, decision := range []string{"Release", "MarkFailed"} {
			Expect(w.tryResolve(ctx, resolver, hold, resolution{Decision: decision})).To(MatchError(And(
				ContainSubstring(decision+" is not possible before"), ContainSubstring("may still become visible at the provider"))))
		}
		nothingSent(ctx, func() { w.pay(ctx, c, 409, unknownHold) })
		// What can do no harm may be said at once.
		Expect(w.tryResolve(ctx, resolver, hold, resolution{Decision: "MarkPaid", ProviderReference: "ch_1"})).To(Succeed())
		w.holdIs(ctx, hold, v1alpha1.HoldResolved)
		nothingSent(ctx, func() { w.pay(ctx, c, 200, replay) })
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("nobody but the operator makes a hold or writes its status", func(ctx SpecContext) {
		c, hold := held(ctx, "9")
		h, err := w.hold(ctx, hold)
		Expect(err).NotTo(HaveOccurred())
		forged := &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "forged-1"}, Spec: h.Spec}
		Expect(admin.Create(ctx, forged)).To(MatchError(ContainSubstring("only the operator")))
		h.Status.State = v1alpha1.HoldResolved
		Expect(admin.Status().Update(ctx, h)).To(MatchError(ContainSubstring("only the operator")))
		stands(ctx, c, hold)
	})
})
