// A world of its own for a drill that damages it, and what such a drill asks for that leaves
// nothing as it was.

package cluster

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// newWorld makes a world for one drill that damages it.
func newWorld(ctx context.Context, on storeKind) *world {
	GinkgoHelper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "drill-" + string(on) + "-"}}
	Expect(admin.Create(ctx, ns)).To(Succeed())
	w := &world{on: on, namespace: ns.Name}
	DeferCleanup(func(ctx context.Context) {
		w.deleteNamespace(ctx)
		Expect(client.IgnoreNotFound(admin.Delete(ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: w.volume}}))).To(Succeed())
		Expect(box.Wipe(ctx, storageNode(), w.volumeDir())).To(Succeed())
	}, NodeTimeout(4*time.Minute))
	w.apply(ctx)
	w.stand(ctx)
	return w
}

// deleteNamespace deletes the namespace as a person does, and waits until it is gone with all that was in it.
func (w *world) deleteNamespace(ctx context.Context) {
	GinkgoHelper()
	mustKubectl(ctx, "delete", "namespace", w.namespace, "--ignore-not-found", "--timeout=3m")
}

// gone waits until there is no such object.
func gone(ctx context.Context, o client.Object) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		err := admin.Get(ctx, client.ObjectKeyFromObject(o), o)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%T %s is still there: %w", o, o.GetName(), err)
	}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
}

// again asks for the same payment again.
func (w *world) again(i intent) call {
	return call{id: i.ID, body: w.order(i.Order, i.Amount)}
}

// callAt is call at one of several addresses, by a connection of its own: each goes to a gateway that
// the Service there chooses.
func (w *world) callAt(ctx context.Context, address string, c call) reply {
	transport := front.client.Transport.(*http.Transport).Clone()
	transport.DisableKeepAlives = true
	url := strings.Replace(w.toolURL(), front.address, address, 1)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(c.body))
	if err != nil {
		return reply{err: err}
	}
	request.Header.Set("Authorization", "Bearer "+w.token)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", c.id)
	if c.fault != "" {
		request.Header.Set("Provider-Fault", c.fault)
	}
	return send(&http.Client{Transport: transport, Timeout: front.client.Timeout}, request)
}

// refused says that a call is refused with 503 for this reason by every gateway that answers.
func (w *world) refused(ctx context.Context, c call, reason string) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		// More often than there are gateways.
		for range 8 {
			got := w.callAt(ctx, front.address, c)
			if got.err != nil {
				return got.err
			}
			if got.status != http.StatusServiceUnavailable || !strings.Contains(got.body, `"reason":"`+reason+`"`) {
				return fmt.Errorf("%s should be refused with 503 %s: %s", c.id, reason, got)
			}
			if got.header.Get("Retry-After") == "" {
				return fmt.Errorf("%s is refused without Retry-After: %s", c.id, got)
			}
		}
		return nil
	}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
}

// storeIs waits until the store has this condition, and returns it.
func (w *world) storeIs(ctx context.Context, kind string, status metav1.ConditionStatus) *v1alpha1.IdempotencyStore {
	GinkgoHelper()
	s := &v1alpha1.IdempotencyStore{}
	Eventually(func(ctx context.Context) error {
		if err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: storeName}, s); err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(s.Status.Conditions, kind)
		if c == nil || c.Status != status || c.ObservedGeneration != s.Generation {
			return fmt.Errorf("%s should be %s: %+v", kind, status, s.Status.Conditions)
		}
		return nil
	}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
	return s
}

// oneServer says that the store has had one pod at most: nothing serves the volume beside it.
func (w *world) oneServer(ctx context.Context) (*corev1.Pod, error) {
	var list corev1.PodList
	err := admin.List(ctx, &list, client.InNamespace(w.namespace), client.MatchingLabels{v1alpha1.GroupName + "/store": storeName})
	if err != nil {
		return nil, err
	}
	switch len(list.Items) {
	case 0:
		return nil, nil
	case 1:
		return &list.Items[0], nil
	}
	return nil, StopTrying(fmt.Sprintf("the store in %s has %d pods", w.namespace, len(list.Items)))
}

// acceptLoss is what a person types, as the operations page has it.
func (w *world) acceptLoss(ctx context.Context, epoch string) {
	GinkgoHelper()
	mustKubectl(ctx, "patch", "idem", storeName, "--namespace="+w.namespace, "--type=merge",
		fmt.Sprintf(`--patch={"spec":{"acceptEpoch":%q}}`, epoch))
}

// markPaid is a person who has found the payment at the provider.
func (w *world) markPaid(ctx context.Context, hold, reference string) {
	GinkgoHelper()
	Expect(w.decide(ctx, resolver, hold, fmt.Sprintf(`{"decision":"MarkPaid","reason":"found it","providerReference":%q}`, reference))).To(Succeed())
	w.holdIs(ctx, hold, v1alpha1.HoldResolved)
}

// reference is what the provider calls its charge for an order.
func (w *world) reference(ctx context.Context, order string) string {
	GinkgoHelper()
	l, err := readLedger(ctx)
	Expect(err).NotTo(HaveOccurred())
	for _, e := range l.Entries {
		if e.AccountID == w.namespace && e.OrderID == order {
			return e.ID
		}
	}
	Fail("the ledger has no charge for " + order)
	return ""
}

// stop has the agent begin no order more. It goes on asking for what it began.
func (r *run) stop(ctx context.Context) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error { return ask(ctx, http.MethodPost, r.at+"/stop", nil) }).WithContext(ctx).Should(Succeed())
}

// deletePod deletes a pod of this world, with its grace, or at once, whoever is there to know it: then
// the next one may begin while the first still runs.
func (w *world) deletePod(ctx context.Context, name string, options ...client.DeleteOption) {
	GinkgoHelper()
	pod := &corev1.Pod{ObjectMeta: w.in(name)}
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(pod), pod)).To(Succeed())
	uid := pod.UID
	Expect(client.IgnoreNotFound(admin.Delete(ctx, pod, append(options, client.Preconditions{UID: &uid})...))).To(Succeed())
}
