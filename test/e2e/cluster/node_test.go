// The node of the stores is killed while agents call, and returns with its disk.

package cluster

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const storeAway = "store_unavailable"

var _ = Describe("The stores' node", func() {
	BeforeEach(func(ctx SpecContext) {
		well(ctx)
		spread(ctx)
	}, NodeTimeout(5*time.Minute))

	drill("is killed like a pulled plug, and returns", func(ctx SpecContext) {
		node := storageNode()
		both := worlds()
		var agents []*run
		var servers []corev1.Pod
		for _, w := range both {
			agents = append(agents, w.begin(ctx, load{concurrency: 6, faults: slow}))
			server, err := w.oneServer(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(server.Spec.NodeName).To(Equal(node), "its volume is on that node")
			servers = append(servers, *server)
		}
		for _, r := range agents {
			r.paid(ctx, 10)
		}
		DeferCleanup(func(ctx context.Context) { bootIfCrashed(ctx, node) }, NodeTimeout(3*time.Minute))
		Expect(box.Crash(ctx, node)).To(Succeed())

		By("the node is noticed to be away, and nobody is paid")
		Eventually(ready(node)).WithContext(ctx).WithTimeout(2 * time.Minute).ShouldNot(Equal(corev1.ConditionTrue))
		for i, w := range both {
			agents[i].refusals(ctx, "503 DENY")
			w.refused(ctx, call{id: "away-" + suiteBegan, body: w.order("away-"+suiteBegan, "10.00")}, storeAway)
		}
		// What was under way at the provider has come to its end.
		Eventually(func(ctx context.Context) (int, error) {
			l, err := readLedger(ctx)
			return l.InFlight.Now, err
		}).WithContext(ctx).Should(BeZero())
		before := []map[string]int{both[0].charges(ctx), both[1].charges(ctx)}

		By("a person deletes the pod of a node that cannot say that it has ended, and no second server begins")
		mustKubectl(ctx, "delete", "pod", "--namespace="+both[0].namespace, both[0].storePod(), "--wait=false")
		Consistently(func(g Gomega, ctx context.Context) {
			for i, w := range both {
				now, err := w.oneServer(ctx)
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(now).NotTo(BeNil(), w.namespace)
				g.Expect(now.UID).To(Equal(servers[i].UID), "%s: another pod has taken its name", w.namespace)
			}
		}).WithContext(ctx).WithTimeout(8 * time.Second).WithPolling(250 * time.Millisecond).Should(Succeed())
		for i, w := range both {
			Expect(w.charges(ctx)).To(Equal(before[i]), "paid while the store was away")
		}

		By("the node returns with its disk")
		Expect(box.Boot(ctx, node)).To(Succeed())
		for i, w := range both {
			w.storeServes(ctx, servers[i])
		}
		for _, r := range agents {
			r.paid(ctx, 10)
		}
		// The judge waits until nothing is under way at the provider, of the other world either.
		for _, r := range agents {
			r.end(ctx)
		}
		for i, w := range both {
			saw := w.judge(ctx, "store's node killed, and returned", agents[i])
			Expect(saw.Answers["503 DENY"]).To(BeNumerically(">", 0), "%v", saw.Answers)
			// What was refused then is paid now, once.
			c := call{id: "away-" + suiteBegan, body: w.order("away-"+suiteBegan, "10.00")}
			if got := w.answer(ctx, c); got.verdict() != replay { // the drill may be made often
				Expect(got.verdict()).To(Equal(allow), got.String())
			}
			Expect(w.charges(ctx)).To(HaveKeyWithValue("away-"+suiteBegan, 1))
		}
		well(ctx)
	})
})

// ready is the condition of a node.
func ready(node string) func(context.Context) (corev1.ConditionStatus, error) {
	return func(ctx context.Context) (corev1.ConditionStatus, error) {
		var n corev1.Node
		err := admin.Get(ctx, client.ObjectKey{Name: node}, &n)
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady {
				return c.Status, err
			}
		}
		return "", err
	}
}

// bootIfCrashed starts a node that a failed drill has left.
func bootIfCrashed(ctx context.Context, node string) {
	GinkgoHelper()
	if is, err := ready(node)(ctx); err != nil || is != corev1.ConditionTrue {
		Expect(box.Boot(ctx, node)).To(Succeed())
	}
}
