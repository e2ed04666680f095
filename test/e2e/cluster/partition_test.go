// Links are cut while agents call: between a gateway and the store, between the gateways
// and the provider, and between the leader of the controllers and the API server. Packets
// are dropped, so that nobody is told; later the link is mended.

package cluster

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// addressesOf are all at which a Service is reached: its own, and those behind it.
func addressesOf(ctx context.Context, namespace, service string) []string {
	GinkgoHelper()
	var s corev1.Service
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: service}, &s)).To(Succeed())
	out := append([]string{}, s.Spec.ClusterIPs...)
	var slices discoveryv1.EndpointSliceList
	Expect(admin.List(ctx, &slices, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelServiceName: service})).To(Succeed())
	for _, slice := range slices.Items {
		for _, e := range slice.Endpoints {
			out = append(out, e.Addresses...)
		}
	}
	Expect(len(out)).To(BeNumerically(">=", 2), "%s has nobody behind it", service)
	return out
}

// cut cuts a pod off, until mend or the end of the spec.
func cut(ctx context.Context, pod corev1.Pod, addresses []string) (mend func(context.Context)) {
	GinkgoHelper()
	Expect(box.CutPod(ctx, pod.Namespace, pod.Name, addresses...)).To(Succeed())
	mended := false
	mend = func(ctx context.Context) {
		if mended {
			return
		}
		mended = true
		Expect(box.MendPod(ctx, pod.Namespace, pod.Name)).To(Succeed())
	}
	DeferCleanup(func(ctx context.Context) { mend(ctx) })
	return mend
}

// refusals waits until agents have got this answer more often than before.
func (r *run) refusals(ctx context.Context, answer string) {
	GinkgoHelper()
	count := func(ctx context.Context) (int, error) {
		now, err := r.progress(ctx)
		return now.Answers[answer], err
	}
	before, err := count(ctx)
	Expect(err).NotTo(HaveOccurred())
	Eventually(count).WithContext(ctx).Should(BeNumerically(">", before), answer)
}

// leader is the pod whose controllers work.
func leader(ctx context.Context) string {
	GinkgoHelper()
	name, err := tryLeader(ctx)
	Expect(err).NotTo(HaveOccurred())
	return name
}

func tryLeader(ctx context.Context) (string, error) {
	var lease coordinationv1.Lease
	if err := admin.Get(ctx, client.ObjectKey{Namespace: system, Name: controllersName}, &lease); err != nil {
		return "", err
	}
	if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "" {
		return "", fmt.Errorf("nobody leads")
	}
	name, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return name, nil
}

var _ = Describe("Links", func() {
	BeforeEach(func(ctx SpecContext) {
		well(ctx)
		spread(ctx)
	}, NodeTimeout(5*time.Minute))

	drill("of a gateway to the store are cut, and mended", func(ctx SpecContext) {
		w := onPostgres
		r := w.begin(ctx, load{concurrency: 12, faults: slow})
		gateway := podsOf(ctx, gatewayName)[0]
		mend := cut(ctx, gateway, addressesOf(ctx, w.namespace, w.storeService()))
		// What reaches this gateway is refused, and what reaches the others is paid.
		r.refusals(ctx, "503 DENY")
		r.paid(ctx, 20)
		mend(ctx)
		r.paid(ctx, 20)
		w.judge(ctx, "a gateway cut off from the store", r)
	})

	drill("of all gateways to the provider are cut, and mended", func(ctx SpecContext) {
		w := onRedis
		r := w.begin(ctx, load{concurrency: 8, faults: slow})
		provider := addressesOf(ctx, providerNamespace, providerName)
		var mends []func(context.Context)
		for _, p := range podsOf(ctx, gatewayName) {
			mends = append(mends, cut(ctx, p, provider))
		}
		// Whoever finds no connection has sent nothing, and says so.
		r.refusals(ctx, "502 DENY")
		for _, mend := range mends {
			mend(ctx)
		}
		r.paid(ctx, 20)
		w.judge(ctx, "the gateways cut off from the provider", r)
	})

	drill("of the leader to the API server are cut: another leads, nothing is decided twice, and nobody forges", func(ctx SpecContext) {
		w := onRedis
		r := w.begin(ctx, load{concurrency: 4, faults: slow})
		// Holds for a second item of an order that was paid.
		const held = 6
		began := time.Now().UnixMilli()
		order := func(i int) string { return fmt.Sprintf("leader-%d-%d", began, i) }
		second := func(i int) call { return call{id: order(i) + "-second", body: w.order(order(i), "11.00")} }
		holds := make([]string, held)
		for i := range holds {
			w.pay(ctx, call{id: order(i), body: w.order(order(i), "10.00")}, http.StatusCreated, allow)
			holds[i] = w.pay(ctx, second(i), http.StatusConflict, unknownHold).problem().Hold
			w.holdIs(ctx, holds[i], v1alpha1.HoldHeld)
		}
		w.mayPatch(ctx, "bob")

		was := leader(ctx)
		var pod corev1.Pod
		Expect(admin.Get(ctx, client.ObjectKey{Namespace: system, Name: was}, &pod)).To(Succeed())
		// One decision may have reached the leader when it is cut off, and two reach nobody at first.
		Expect(w.resolve(ctx, resolver, holds[0], "Release")).To(Succeed())
		mend := cut(ctx, pod, addressesOf(ctx, "default", "kubernetes"))
		for _, name := range holds[1:3] {
			Expect(w.resolve(ctx, resolver, name, "Release")).To(Succeed())
		}
		forged := func() {
			GinkgoHelper()
			Expect(w.resolve(ctx, "bob", holds[3], "Release")).To(MatchError(ContainSubstring(`"bob" may not resolve this hold`)))
			Expect(w.resolve(ctx, "system:serviceaccount:"+w.namespace+":"+agentName, holds[3], "Release")).To(MatchError(ContainSubstring("forbidden")))
			h, err := w.hold(ctx, holds[3])
			Expect(err).NotTo(HaveOccurred())
			h.Status.State = v1alpha1.HoldResolved
			Expect(admin.Status().Update(ctx, h)).To(MatchError(ContainSubstring("only the operator")))
		}
		forged()
		Eventually(tryLeader).WithContext(ctx).WithTimeout(90 * time.Second).ShouldNot(Equal(was))
		forged()
		for i := range 3 {
			w.holdIs(ctx, holds[i], v1alpha1.HoldResolved)
			// The one call that the release permits, and its answer again.
			body := w.pay(ctx, second(i), http.StatusCreated, allow).body
			Expect(w.pay(ctx, second(i), http.StatusCreated, replay).body).To(Equal(body))
		}
		r.paid(ctx, 10)

		mend(ctx)
		// It has given up, and comes back as one who waits.
		Eventually(func(ctx context.Context) (bool, error) {
			var now corev1.Pod
			err := admin.Get(ctx, client.ObjectKeyFromObject(&pod), &now)
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return err == nil && now.Status.ContainerStatuses[0].RestartCount > pod.Status.ContainerStatuses[0].RestartCount, err
		}).WithContext(ctx).WithTimeout(2*time.Minute).Should(BeTrue(), "the leader that was cut off went on")
		available(ctx)
		Expect(w.resolve(ctx, resolver, holds[4], "Release")).To(Succeed())
		w.holdIs(ctx, holds[4], v1alpha1.HoldResolved)
		w.pay(ctx, second(4), http.StatusCreated, allow)

		charges := w.charges(ctx)
		for i := range holds {
			switch {
			case i < 3 || i == 4:
				w.pay(ctx, second(i), http.StatusCreated, replay)
				Expect(charges).To(HaveKeyWithValue(order(i), 2), "it was paid, and once more after the release")
				// A release covers its own hold and nothing that comes later.
				w.pay(ctx, call{id: order(i) + "-third", body: w.order(order(i), "12.00")}, http.StatusConflict, unknownHold)
			default:
				w.pay(ctx, second(i), http.StatusConflict, unknownHold)
				Expect(w.holdIs(ctx, holds[i], v1alpha1.HoldHeld).Spec.Resolution).To(BeNil())
				Expect(charges).To(HaveKeyWithValue(order(i), 1))
			}
		}
		after := w.charges(ctx)
		for i := range holds {
			Expect(after[order(i)]).To(Equal(charges[order(i)]), order(i))
		}
		w.judge(ctx, "the leader cut off from the API server", r)
	})
})

// mayPatch lets a user patch PaymentHolds, without the verb resolve.
func (w *world) mayPatch(ctx context.Context, user string) {
	GinkgoHelper()
	ensure(ctx, &rbacv1.Role{ObjectMeta: w.in("patcher"), Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{v1alpha1.GroupName}, Resources: []string{"paymentholds"}, Verbs: []string{"get", "list", "patch", "update"},
	}}}, &rbacv1.RoleBinding{
		ObjectMeta: w.in("patcher"), Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "patcher"},
	})
}
