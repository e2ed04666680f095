// Holds in the cluster, and what becomes of objects while the operator is away.

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// shownWithin is how soon a hold must be seen in the cluster.
const shownWithin = 2 * time.Second

var _ = Describe("Holds in the cluster", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	It("a hold is there within 2 seconds, and tells what it is about", func(ctx SpecContext) {
		for i := range 5 {
			order := fmt.Sprint(i)
			w.pay(ctx, call{id: "first-" + order, session: "s1", index: order, body: w.order(order, "10.50")}, 201, allow)
			c := call{id: "second-" + order, session: "s2", index: order, body: w.order(order, "11")}
			p := w.pay(ctx, c, 409, unknownHold).problem()
			var h *v1alpha1.PaymentHold
			Eventually(func(ctx context.Context) (err error) {
				h, err = w.hold(ctx, p.Hold)
				return err
			}).WithContext(ctx).WithTimeout(shownWithin).WithPolling(10 * time.Millisecond).Should(Succeed())
			Expect(h.Spec.ToolRef.Name).To(Equal(charge))
			Expect(h.Spec.Caller).To(Equal(w.caller()))
			Expect(h.Spec.IntentID).To(Equal(c.id))
			Expect(h.Spec.Scope).To(Equal([]v1alpha1.HoldPath{v1alpha1.HoldPath("account/" + w.namespace + "/order/" + order)}))
			Expect(h.Spec.Lineage).To(Equal("s2/" + order))
			Expect(h.Spec.Amount).To(Equal(&v1alpha1.Money{Value: "11.00", Currency: "USD"}))
			Expect(h.Spec.Recipient).To(Equal(w.namespace))
			Expect(h.Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap}))
			Expect(h.Spec.Matches).To(HaveLen(1))
			Expect(h.Spec.Matches[0]).To(And(HaveField("IntentID", "first-"+order), HaveField("State", "Succeeded"), HaveField("Amount.Value", "10.50")))
			Expect(h.Finalizers).To(BeEmpty())
			Expect(h.OwnerReferences).To(BeEmpty())
		}
	}, Serial) // It is about how long it takes, so nobody else is at work.

	It("O10: a hold that somebody deletes comes back, and releases nothing", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		c := call{id: "k2", body: w.order("9", "11")}
		name := w.pay(ctx, c, 409, unknownHold).problem().Hold
		was := w.holdIs(ctx, name, v1alpha1.HoldHeld)
		Expect(admin.Delete(ctx, was)).To(Succeed())
		nothingSent(ctx, func() { w.pay(ctx, c, 409, unknownHold) })
		Eventually(func(ctx context.Context) (types.UID, error) {
			h, err := w.hold(ctx, name)
			return h.UID, err
		}).WithContext(ctx).Should(Not(BeElementOf(was.UID, types.UID(""))))
		w.resolve(ctx, name, release)
		w.pay(ctx, c, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(2))
	})

	It("O07: a namespace with holds goes while no process is there, and so does each object by itself", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		name := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem().Hold
		w.holdIs(ctx, name, v1alpha1.HoldHeld)
		other := newWorld(ctx)
		other.pay(ctx, call{id: "k1", body: other.order("9", "10")}, 201, allow)
		hold := other.pay(ctx, call{id: "k2", body: other.order("9", "11")}, 409, unknownHold).problem().Hold
		other.holdIs(ctx, hold, v1alpha1.HoldHeld)
		for _, g := range gateways() {
			g.stop(ctx)
		}

		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
		Expect(admin.Delete(ctx, ns)).To(Succeed())
		in := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: other.namespace, Name: name} }
		for _, obj := range []client.Object{
			&v1alpha1.PaymentHold{ObjectMeta: in(hold)}, &v1alpha1.AgentTool{ObjectMeta: in(charge)},
			&v1alpha1.IntentBudget{ObjectMeta: in(budgetName)}, &v1alpha1.IdempotencyStore{ObjectMeta: in(storeName)}, ns,
		} {
			if obj != ns {
				Expect(admin.Delete(ctx, obj)).To(Succeed())
			}
			Eventually(func(ctx context.Context) bool {
				return apierrors.IsNotFound(admin.Get(ctx, client.ObjectKeyFromObject(obj), obj))
			}).WithContext(ctx).WithTimeout(time.Minute).Should(BeTrue(), "%T %s", obj, obj.GetName())
		}
	})
})

var _ = Describe("Asking what became of an intent", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	It("waits for the end of a payment, and tells its history", func(ctx SpecContext) {
		w := newWorld(ctx, unhurried)
		Expect(w.get(ctx, w.toolURL(charge)+"/intents/k1").status).To(Equal(http.StatusNotFound))
		paying := w.start(ctx, call{id: "k1", session: "s1", index: "1", body: w.order("9", "10.50"), fault: "hold"})
		w.underWay(ctx, 1)
		doc := w.poll(ctx, charge, "k1", "100ms")
		Expect([]string{doc.State, doc.Verdict}).To(Equal([]string{"InFlight", inFlight}))
		waiting := make(chan reply, 1)
		go func() { waiting <- w.get(ctx, w.toolURL(charge)+"/intents/k1?wait=30s") }()
		Consistently(waiting, "200ms").ShouldNot(Receive())
		w.letGo(ctx)
		Expect((<-paying).status).To(Equal(201))
		var told reply
		Eventually(waiting).Should(Receive(&told))
		Expect(told.status).To(Equal(http.StatusOK), told.String())
		Expect(told.body).To(ContainSubstring(`"state":"Succeeded"`))

		doc = w.poll(ctx, charge, "k1", "")
		Expect(doc.Verdict).To(Equal(replay))
		Expect(doc.Scope).To(Equal([]string{"account/" + w.namespace + "/order/9"}))
		Expect(doc.Amount.Value).To(Equal("10.50"))
		Expect(doc.Fingerprint).To(HavePrefix("sha256:"))
		Expect(doc.Attempts).To(HaveLen(1))
		Expect(doc.Attempts[0]).To(And(HaveField("Number", 1), HaveField("Outcome", "Succeeded"), HaveField("Status", 201)))
		Expect(doc.Attempts[0].Ended).To(BeTemporally(">=", doc.Attempts[0].Started))
		entries := w.entries(ctx)
		Expect(entries).To(HaveLen(1))
		Expect(doc.ProviderReference).To(Equal(entries[0].ID))
		Expect(doc.RefundOwed).To(HaveValue(BeFalse()))
		Expect(doc.Disputed).To(HaveValue(BeFalse()))
		Expect(doc.Hold).To(BeNil())
	})

	It("tells each attempt, and a person's word reaches who waits", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.resolve(ctx, hold, release)
		hold = w.pay(ctx, c, 409, unknownHold).problem().Hold
		doc := w.poll(ctx, charge, "k1", "")
		Expect(doc.Attempts).To(HaveLen(2))
		for i, a := range doc.Attempts {
			Expect(a).To(And(HaveField("Number", i+1), HaveField("Outcome", "Unknown"), HaveField("Detail", Not(BeEmpty()))))
		}
		Expect(doc.Hold.Name).To(Equal(hold))
		Expect(doc.Hold.Reasons).To(Equal([]string{"OutcomeUnknown"}))
		waiting := make(chan reply, 1)
		go func() { waiting <- w.get(ctx, w.toolURL(charge)+"/intents/k1?wait=60s") }()
		w.resolve(ctx, hold, resolution{Decision: "MarkPaid", ProviderReference: "ch_77"})
		var told reply
		Eventually(waiting).Should(Receive(&told))
		Expect(told.body).To(And(ContainSubstring(`"state":"Succeeded"`), ContainSubstring("ch_77")), told.String())
	})

	It("is for its caller alone", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		w.serviceAccount(ctx, "other", "holdfast-agent")
		other := *w
		other.token = w.tokenOf(ctx, "other", audience)
		Expect(other.get(ctx, w.toolURL(charge)+"/intents/k1").problem().Status).To(Equal(http.StatusNotFound))
	})
})
