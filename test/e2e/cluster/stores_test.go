// What the records stand on goes away while agents call: the store's server, and its volume.
// Nobody pays meanwhile, and afterwards everything is there, or a person decides.

package cluster

import (
	"context"
	"fmt"
	"net/http"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/test/agent"
)

// storeServes waits until another server than was, or the same one begun anew, is ready.
func (w *world) storeServes(ctx context.Context, was corev1.Pod) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		now, err := w.oneServer(ctx)
		if err != nil {
			return err
		}
		if now == nil || len(now.Status.ContainerStatuses) != 1 {
			return fmt.Errorf("there is no pod of the store in %s", w.namespace)
		}
		is, before := now.Status.ContainerStatuses[0], was.Status.ContainerStatuses[0]
		if now.DeletionTimestamp != nil || !is.Ready || is.ContainerID == before.ContainerID {
			return fmt.Errorf("the store in %s has not begun anew: %+v", w.namespace, is)
		}
		return nil
	}).WithContext(ctx).WithTimeout(3 * time.Minute).Should(Succeed())
}

var _ = Describe("Stores", func() {
	BeforeEach(func(ctx SpecContext) {
		well(ctx)
		spread(ctx)
	}, NodeTimeout(5*time.Minute))

	for i, on := range []storeKind{redis, postgres} {
		drill("on "+string(on)+": the server is killed with SIGKILL, and its pod deleted, with its grace and without", func(ctx SpecContext) {
			w := worlds()[i]
			r := w.begin(ctx, load{concurrency: 8, faults: slow})
			for _, end := range []func(context.Context, corev1.Pod){
				kill,
				func(ctx context.Context, p corev1.Pod) { w.deletePod(ctx, p.Name) },
				func(ctx context.Context, p corev1.Pod) { w.deletePod(ctx, p.Name, client.GracePeriodSeconds(0)) },
			} {
				r.paid(ctx, 10)
				server, err := w.oneServer(ctx)
				Expect(err).NotTo(HaveOccurred())
				Expect(server).NotTo(BeNil())
				end(ctx, *server)
				w.storeServes(ctx, *server)
			}
			r.paid(ctx, 20)
			// A gateway waits for a store that is back at once, so there may be nobody who was refused.
			w.judge(ctx, "store's pod killed and deleted", r)
		})
	}

	for _, on := range []storeKind{redis, postgres} {
		drill("on "+string(on)+": the volume is wiped, and a person accepts it", func(ctx SpecContext) {
			w := newWorld(ctx, on)
			// Who has lost the memory tells callers to come back in a minute. The agent calls all the while, also when
			// the loss is accepted.
			r := w.begin(ctx, load{concurrency: 4, faults: slow, impatience: 2 * time.Second})
			r.paid(ctx, 10)
			epoch := w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue).Status.Epoch

			By("the volume is wiped")
			w.wipe(ctx)
			r.refusals(ctx, "503 DENY")
			r.stop(ctx)
			w.refused(ctx, w.paid[0].call, "memory_lost")
			w.refused(ctx, call{id: "new", body: w.order("new", "10.00")}, "memory_lost")
			lost := w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse)
			Expect(lost.Status.Epoch).To(Equal(epoch))
			w.storeIs(ctx, v1alpha1.ConditionStalled, metav1.ConditionTrue)
			// What was held is still shown.
			for _, h := range w.held {
				_, err := w.hold(ctx, h.name)
				Expect(err).NotTo(HaveOccurred())
			}
			before := w.charges(ctx)

			By("a person accepts the loss")
			w.acceptLoss(ctx, epoch)
			Expect(w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionTrue).Status.Epoch).NotTo(Equal(epoch))
			w.ready(ctx)
			saw := r.end(ctx)
			// Whatever may have been paid before is held, and so is what nobody knows.
			for _, p := range w.paid {
				w.pay(ctx, p.call, http.StatusConflict, unknownHold)
			}
			for _, h := range w.held {
				name := w.pay(ctx, h.call, http.StatusConflict, unknownHold).problem().Hold
				Expect(name).NotTo(Equal(h.name), "it is held again, under another number")
				w.holdIs(ctx, name, v1alpha1.HoldHeld)
			}
			fresh := call{id: "new", body: w.order("new", "10.00")}
			held := w.pay(ctx, fresh, http.StatusConflict, unknownHold).problem().Hold
			open := 0
			for _, i := range saw.Intents {
				switch i.End {
				case agent.Paid:
					Expect(before).To(HaveKeyWithValue(i.Order, 1), i.ID)
				case agent.Held:
					open++
					w.pay(ctx, w.again(i), http.StatusConflict, unknownHold)
				default:
					Fail(fmt.Sprintf("%s ended as %q", i.ID, i.End))
				}
			}
			Expect(open).To(BeNumerically(">", 0), "nobody was in the middle of a payment")
			Expect(w.charges(ctx)).To(Equal(before), "paid after the loss, and before anybody has decided")

			By("a person decides by the provider's ledger")
			paid := w.paid[0].call
			name := w.pay(ctx, paid, http.StatusConflict, unknownHold).problem().Hold
			w.markPaid(ctx, name, w.reference(ctx, paid.id))
			Expect(w.pay(ctx, paid, http.StatusOK, replay).body).To(ContainSubstring(w.reference(ctx, paid.id)))
			w.holdIs(ctx, held, v1alpha1.HoldHeld)
			Expect(w.resolve(ctx, resolver, held, "Release")).To(Succeed())
			w.holdIs(ctx, held, v1alpha1.HoldResolved)
			body := w.pay(ctx, fresh, http.StatusCreated, allow).body
			Expect(w.pay(ctx, fresh, http.StatusCreated, replay).body).To(Equal(body))
			before["new"] = 1
			Expect(w.charges(ctx)).To(Equal(before))
			for order, n := range before {
				Expect(n).To(Equal(1), order)
			}
			charged := 0
			for _, i := range saw.Intents {
				charged += before[i.Order]
			}
			tell("store's volume wiped, loss accepted", w.on, judged{report: saw, charges: charged, held: open})
		})
	}
})

// wipe empties the volume of the store while its server is away, so that what begins then
// finds nothing.
func (w *world) wipe(ctx context.Context) {
	GinkgoHelper()
	node := storageNode()
	mustKubectl(ctx, "cordon", node)
	DeferCleanup(func(ctx context.Context) { mustKubectl(ctx, "uncordon", node) })
	was, err := w.oneServer(ctx)
	Expect(err).NotTo(HaveOccurred())
	// With its grace: the kubelet says that it has ended before another pod takes its name.
	mustKubectl(ctx, "delete", "pod", "--namespace="+w.namespace, was.Name, "--timeout=2m")
	Expect(box.Wipe(ctx, node, w.volumeDir())).To(Succeed())
	_, err = box.Exec(ctx, node, "mkdir", "-p", w.volumeDir())
	Expect(err).NotTo(HaveOccurred())
	mustKubectl(ctx, "uncordon", node)
	w.storeServes(ctx, *was)
}
