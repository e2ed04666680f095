// A namespace in which somebody still has to decide is deleted, and made again. Nothing keeps
// it from going, and no money moves twice for it.

package cluster

import (
	"context"
	"net/http"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

var _ = Describe("An installation", func() {
	BeforeEach(func(ctx SpecContext) { well(ctx) }, NodeTimeout(5*time.Minute))

	It("does not keep a namespace with holds from being deleted, and remembers what was paid there", func(ctx SpecContext) {
		w := newWorld(ctx, redis)
		paid, held := w.paid[0], w.held[0]
		// And an intent that was written down, and is held: its order was paid under another one.
		w.pay(ctx, call{id: "first", body: w.order("registered", "10.00")}, http.StatusCreated, allow)
		registered := &v1alpha1.PaymentIntent{
			ObjectMeta: w.in("registered"),
			Spec: v1alpha1.PaymentIntentSpec{
				ToolRef: v1alpha1.ToolReference{Name: charge}, Caller: "system:serviceaccount:" + w.namespace + ":" + agentName,
				IntentID: "registered", Scope: []v1alpha1.HoldPath{v1alpha1.HoldPath("account/" + w.namespace + "/order/registered")},
				Amount: &v1alpha1.Money{Value: "12.00", Currency: "USD"}, Recipient: w.namespace,
			},
		}
		ensure(ctx, registered)
		Eventually(func(ctx context.Context) (v1alpha1.IntentState, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(registered), registered)
			return registered.Status.State, err
		}).WithContext(ctx).Should(Equal(v1alpha1.IntentHeld))
		before := w.charges(ctx)

		began := time.Now()
		w.deleteNamespace(ctx)
		AddReportEntry("a namespace with holds was gone after", time.Since(began).Round(time.Second).String())

		By("it is made again, with the volume that was left")
		// The administrator lets the next claim of that name have it.
		mustKubectl(ctx, "patch", "pv", w.volume, "--type=merge", `--patch={"spec":{"claimRef":{"uid":null,"resourceVersion":null}}}`)
		w.token = ""
		w.apply(ctx)
		// The ServiceAccount is another one of the same name, which learns nothing of the earlier one's.
		for _, c := range []call{paid.call, held.call} {
			got := w.answer(ctx, c)
			Expect(got.status).To(Equal(http.StatusUnprocessableEntity), got.String())
			Expect(got.problem().Reason).To(Equal("caller"))
		}
		// What was paid then stands in the way of whoever pays for it now.
		w.pay(ctx, call{id: "once-more", body: paid.call.body}, http.StatusConflict, unknownHold)
		// What waited for a person waits again.
		w.holdIs(ctx, held.name, v1alpha1.HoldHeld)
		Expect(w.charges(ctx)).To(Equal(before))
		w.pay(ctx, call{id: "other", body: w.order("other", "10.00")}, http.StatusCreated, allow)
		before["other"]++
		Expect(w.charges(ctx)).To(Equal(before))

		By("it is made again, and the volume is lost")
		w.deleteNamespace(ctx)
		Expect(box.Wipe(ctx, storageNode(), w.volumeDir())).To(Succeed())
		Expect(admin.Delete(ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: w.volume}})).To(Succeed())
		gone(ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: w.volume}})
		w.token = ""
		w.made(ctx)
		w.token = tokenOf(ctx, w.namespace, agentName)
		w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse)
		for _, c := range []call{paid.call, {id: "once-more", body: paid.call.body}, {id: "yet-another", body: w.order("yet-another", "10.00")}} {
			w.refused(ctx, c, "memory_lost")
		}
		Expect(w.charges(ctx)).To(Equal(before))
	}, NodeTimeout(8*time.Minute))
})
