// Gateways go away while agents call: killed, deleted, replaced by a rolling update, and
// drained from their node.

package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/test/agent"
)

// podsOf are the running pods of a Deployment of Holdfast's that are not on their way out.
func podsOf(ctx context.Context, deployment string) []corev1.Pod {
	GinkgoHelper()
	var d appsv1.Deployment
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: system, Name: deployment}, &d)).To(Succeed())
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	Expect(err).NotTo(HaveOccurred())
	var list corev1.PodList
	Expect(admin.List(ctx, &list, client.InNamespace(system), client.MatchingLabelsSelector{Selector: selector})).To(Succeed())
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning
	})
}

// kill ends the container of a pod as a crash does, from its node.
func kill(ctx context.Context, pod corev1.Pod) {
	GinkgoHelper()
	var now corev1.Pod
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(&pod), &now)).To(Succeed())
	Expect(now.Status.ContainerStatuses).To(HaveLen(1))
	id := strings.TrimPrefix(now.Status.ContainerStatuses[0].ContainerID, "containerd://")
	_, err := box.Exec(ctx, now.Spec.NodeName, "ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", id)
	Expect(err).NotTo(HaveOccurred())
}

// well waits until everybody is: the nodes, all of Holdfast on both of them, and both worlds.
func well(ctx context.Context) {
	GinkgoHelper()
	var list corev1.NodeList
	Eventually(func(g Gomega, ctx context.Context) {
		g.Expect(admin.List(ctx, &list)).To(Succeed())
		for _, n := range list.Items {
			g.Expect(n.Spec.Unschedulable).To(BeFalse(), n.Name)
			for _, c := range n.Status.Conditions {
				if c.Type == corev1.NodeReady {
					g.Expect(c.Status).To(Equal(corev1.ConditionTrue), n.Name)
				}
			}
		}
	}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
	available(ctx)
	for _, w := range worlds() {
		w.ready(ctx)
	}
}

// spread has gateways on both nodes again, as a person does who has drained one.
func spread(ctx context.Context) {
	GinkgoHelper()
	on := map[string]bool{}
	for _, p := range podsOf(ctx, gatewayName) {
		on[p.Spec.NodeName] = true
	}
	if len(on) < 2 {
		mustKubectl(ctx, "rollout", "restart", "--namespace="+system, "deployment/"+gatewayName)
		available(ctx)
	}
}

// slow are payments that a gateway can die in the middle of.
var slow = []string{"delay:150ms", "delay-after-commit:150ms", "", "delay-after-commit:50ms"}

var _ = Describe("Gateways", func() {
	BeforeEach(func(ctx SpecContext) {
		well(ctx)
		spread(ctx)
	}, NodeTimeout(5*time.Minute))

	drill("are killed with SIGKILL, one after another", func(ctx SpecContext) {
		w := onRedis
		r := w.begin(ctx, load{concurrency: 12, faults: []string{"delay-after-commit:1500ms", "delay:1s"}})
		for _, p := range podsOf(ctx, gatewayName) {
			r.paid(ctx, 10)
			underWay(ctx, 9)
			kill(ctx, p)
			Eventually(func(ctx context.Context) (int32, error) {
				var now corev1.Pod
				if err := admin.Get(ctx, client.ObjectKeyFromObject(&p), &now); err != nil {
					return 0, err
				}
				return now.Status.ContainerStatuses[0].RestartCount, nil
			}).WithContext(ctx).Should(BeNumerically(">", p.Status.ContainerStatuses[0].RestartCount), p.Name)
		}
		r.paid(ctx, 10)
		met(w.judge(ctx, "gateways killed (SIGKILL)", r))
	})

	drill("are deleted without grace", func(ctx SpecContext) {
		w := onPostgres
		// The kubelet leaves a process two seconds: a gateway ends what takes less, and nobody notices.
		r := w.begin(ctx, load{concurrency: 12, faults: []string{"delay:3s", "delay-after-commit:3s", "delay:100ms"}})
		for _, p := range podsOf(ctx, gatewayName)[:2] {
			r.paid(ctx, 10)
			underWay(ctx, 9)
			mustKubectl(ctx, "delete", "pod", "--namespace="+system, "--grace-period=0", "--force", p.Name)
			available(ctx)
		}
		r.paid(ctx, 10)
		met(w.judge(ctx, "gateway pods deleted (grace 0)", r))
	})

	drill("are rolled under 100 calls in flight: no call is lost or answered with a connection error", func(ctx SpecContext) {
		before := names(podsOf(ctx, gatewayName))
		// Two callers: of one, a gateway has no more than 64 calls in progress, and the last old one may get all.
		var agents []*run
		for _, w := range worlds() {
			agents = append(agents, w.begin(ctx, load{concurrency: 50, faults: []string{"delay:2s"}}))
		}
		underWay(ctx, 90)
		mustKubectl(ctx, "rollout", "restart", "--namespace="+system, "deployment/"+gatewayName)
		available(ctx)
		for name := range names(podsOf(ctx, gatewayName)) {
			Expect(before).NotTo(HaveKey(name), "it was not replaced")
		}
		// Those that were replaced have ended, with what they had in flight.
		Eventually(func(ctx context.Context) error {
			for name := range before {
				err := admin.Get(ctx, client.ObjectKey{Namespace: system, Name: name}, &corev1.Pod{})
				if client.IgnoreNotFound(err) != nil || err == nil {
					return fmt.Errorf("%s is still there: %w", name, err)
				}
			}
			return nil
		}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
		// Both, before either is judged: nothing may be under way then.
		for _, r := range agents {
			r.end(ctx)
		}
		for _, r := range agents {
			r.w.lostNone(r.w.judge(ctx, "gateways rolled, 100 in flight", r))
		}
	})

	drill("are drained from a node: no call is lost or answered with a connection error", func(ctx SpecContext) {
		w := onPostgres
		node := steadyNode()
		DeferCleanup(func(ctx context.Context) { mustKubectl(ctx, "uncordon", node) })
		r := w.begin(ctx, load{concurrency: 20, faults: []string{"delay:500ms"}})
		underWay(ctx, 15)
		// Holdfast's own pods alone: the node's others are the drill's.
		mustKubectl(ctx, "drain", node, "--pod-selector=app.kubernetes.io/name=holdfast", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=2m")
		available(ctx)
		for _, p := range podsOf(ctx, gatewayName) {
			Expect(p.Spec.NodeName).NotTo(Equal(node), p.Name)
		}
		r.paid(ctx, 20)
		mustKubectl(ctx, "uncordon", node)
		saw := w.judge(ctx, "gateways' node drained", r)
		w.lostNone(saw)
	})
})

func names(pods []corev1.Pod) map[string]bool {
	out := map[string]bool{}
	for _, p := range pods {
		out[p.Name] = true
	}
	return out
}

// met says that attempts were at the provider when their gateways died: the money had moved, and
// since nobody has heard of it, the intent is held and was not sent again.
func met(saw judged) {
	GinkgoHelper()
	Expect(saw.connectionErrors()).To(BeNumerically(">", 0), "nobody was in the middle of a call")
	Expect(saw.heldCharged).To(BeNumerically(">", 0), "no attempt was at the provider")
}

// lostNone says that each intent was paid by its first call.
func (w *world) lostNone(saw judged) {
	GinkgoHelper()
	Expect(saw.connectionErrors()).To(BeZero(), "%v %v", saw.ConnectionErrors, saw.LastErrors)
	Expect(slices.Collect(maps.Keys(saw.Answers))).To(Equal([]string{"201 ALLOW"}), "%v %v", saw.Answers, saw.LastRefusals)
	Expect(saw.Calls).To(Equal(saw.Orders))
	Expect(saw.Ends[agent.Paid]).To(Equal(saw.Orders))
	Expect(saw.charges).To(Equal(saw.Orders))
}
