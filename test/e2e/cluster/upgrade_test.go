// Two versions at once: gateways of an older commit and of this one serve the same intents
// from the same records, while agents call.

package cluster

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/images/build"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

const (
	// olderCommit is the version from which is upgraded: one that is installed as this one is, and whose Redis keeps its
	// records when it is started anew.
	olderCommit  = "403c6a3ab8693425b0e3fb09cb11dd75a1bc41e3"
	olderVersion = "before"
)

// older has the nodes load the older image, once.
var older = sync.OnceValue(func() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "git", "cat-file", "-e", olderCommit+"^{commit}")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("this clone does not have the commit %s, from which is upgraded: git fetch --unshallow brings it: %w: %s", olderCommit, err, out)
	}
	images, err := build.Images(ctx, build.Options{Out: GinkgoT().TempDir(), Version: olderVersion, Commit: olderCommit, Log: GinkgoWriter}, "manager")
	if err != nil {
		return err
	}
	for _, i := range images {
		if err := box.Load(ctx, i.Archive); err != nil {
			return err
		}
	}
	return nil
})

// become has the Deployments run a version of the manager, as an update does.
func become(ctx context.Context, version string, deployments ...string) {
	GinkgoHelper()
	for _, d := range deployments {
		mustKubectl(ctx, "set", "image", "--namespace="+system, "deployment/"+d, "manager="+build.Reference("manager", version))
	}
}

// serving are the gateways of a version that are ready, and at which NodePort they alone are reached.
func serving(ctx context.Context, version string) (at string, pods int) {
	GinkgoHelper()
	var hash string
	for _, p := range podsOf(ctx, gatewayName) {
		if p.Spec.Containers[0].Image == build.Reference("manager", version) && p.Status.ContainerStatuses[0].Ready {
			hash = p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
			pods++
		}
	}
	if pods == 0 {
		return "", 0
	}
	name := "drill-gateway-" + version
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: name},
		Spec: corev1.ServiceSpec{
			Type:     corev1.ServiceTypeNodePort,
			Selector: map[string]string{"app.kubernetes.io/component": "gateway", appsv1.DefaultDeploymentUniqueLabelKey: hash},
			Ports:    []corev1.ServicePort{{Port: 8443}},
		},
	}
	Expect(client.IgnoreNotFound(admin.Delete(ctx, service.DeepCopy()))).To(Succeed())
	Expect(admin.Create(ctx, service)).To(Succeed())
	DeferCleanup(func(ctx context.Context) { Expect(client.IgnoreNotFound(admin.Delete(ctx, service))).To(Succeed()) })
	return nodePort(ctx, system, name), pods
}

// payAt calls at one version until it answers, and says what it must answer.
func (w *world) payAt(ctx context.Context, address string, c call, status int, verdict string) reply {
	GinkgoHelper()
	var got reply
	Eventually(func(ctx context.Context) error {
		got = w.callAt(ctx, address, c)
		if got.err != nil || got.status == http.StatusServiceUnavailable || got.verdict() == "IN_FLIGHT" {
			return fmt.Errorf("%s: no answer: %s", c.id, got)
		}
		return nil
	}).WithContext(ctx).Should(Succeed())
	Expect(got.status).To(Equal(status), "%s: %s", c.id, got)
	Expect(got.verdict()).To(Equal(verdict), "%s: %s", c.id, got)
	return got
}

var _ = Describe("An upgrade", func() {
	BeforeEach(func(ctx SpecContext) {
		well(ctx)
		spread(ctx)
	}, NodeTimeout(5*time.Minute))

	drill("has two versions serve at once: each replays what the other was paid for, and holds what the other holds", func(ctx SpecContext) {
		Expect(older()).To(Succeed())
		DeferCleanup(func(ctx context.Context) {
			_, _ = kubectl(ctx, "rollout", "resume", "--namespace="+system, "deployment/"+gatewayName) // an error if it is not paused
			become(ctx, build.Version, controllersName, gatewayName)
			available(ctx)
		}, NodeTimeout(4*time.Minute))

		By("the older version is run, and knows what this one has written")
		become(ctx, olderVersion, controllersName, gatewayName)
		available(ctx)
		for _, w := range worlds() {
			w.ready(ctx)
			w.stands(ctx)
		}
		agents := map[*world]*run{}
		for _, w := range worlds() {
			agents[w] = w.begin(ctx, load{concurrency: 5, faults: slow})
		}

		By("the update begins, and stops half way")
		become(ctx, build.Version, controllersName, gatewayName)
		Eventually(func(ctx context.Context) (int32, error) {
			var d appsv1.Deployment
			err := admin.Get(ctx, client.ObjectKey{Namespace: system, Name: gatewayName}, &d)
			if d.Status.ObservedGeneration < d.Generation {
				return 0, err // what it says is of the update before
			}
			return d.Status.UpdatedReplicas, err
		}).WithContext(ctx).WithPolling(50 * time.Millisecond).Should(BeNumerically(">", 0))
		mustKubectl(ctx, "rollout", "pause", "--namespace="+system, "deployment/"+gatewayName)
		mustKubectl(ctx, "rollout", "status", "--namespace="+system, "--timeout=3m", "deployment/"+controllersName)
		var before, after string
		Eventually(func(g Gomega, ctx context.Context) {
			var n, m int
			before, n = serving(ctx, olderVersion)
			after, m = serving(ctx, build.Version)
			g.Expect([]int{n, m}).To(HaveEach(BeNumerically(">", 0)), "gateways of the two versions")
		}).WithContext(ctx).WithPolling(time.Second).Should(Succeed())

		for _, w := range worlds() {
			w.storeRenewed(ctx)
		}
		for _, w := range worlds() {
			w.acrossVersions(ctx, before, after)
			// A change of the tool is in force once both versions have it.
			mustKubectl(ctx, "patch", "atool", charge, "--namespace="+w.namespace, "--type=merge",
				fmt.Sprintf(`--patch={"spec":{"description":"changed at %s"}}`, time.Now().Format(time.RFC3339Nano)))
			Eventually(w.isReady).WithContext(ctx).WithTimeout(time.Minute).Should(Succeed())
			agents[w].paid(ctx, 10)
		}
		for _, version := range []string{olderVersion, build.Version} {
			_, n := serving(ctx, version)
			Expect(n).To(BeNumerically(">", 0), "gateways of version %s", version)
		}

		By("the update goes on")
		mustKubectl(ctx, "rollout", "resume", "--namespace="+system, "deployment/"+gatewayName)
		available(ctx)
		for _, p := range podsOf(ctx, gatewayName) {
			Expect(p.Spec.Containers[0].Image).To(Equal(build.Reference("manager", build.Version)))
		}
		// The judge waits until nothing is under way at the provider, of the other world either.
		for _, r := range agents {
			r.end(ctx)
		}
		for _, w := range worlds() {
			saw := w.judge(ctx, "two versions at once", agents[w])
			Expect(saw.connectionErrors()).To(BeZero(), "%v %v", saw.ConnectionErrors, saw.LastErrors)
		}
	}, NodeTimeout(10*time.Minute))
})

// storeRenewed waits until the store's server was begun as this version has it: an older one may have
// begun it otherwise, and then it is replaced, on its volume.
func (w *world) storeRenewed(ctx context.Context) {
	GinkgoHelper()
	var s v1alpha1.IdempotencyStore
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: storeName}, &s)).To(Succeed())
	objects, err := workload.Render(workload.Inputs{Store: &s, OperatorNamespace: system})
	Expect(err).NotTo(HaveOccurred())
	want := objects.StatefulSet.Spec.Template.Annotations[workload.ContentAnnotation]
	Eventually(func(ctx context.Context) error {
		now, err := w.oneServer(ctx)
		if err != nil {
			return err
		}
		if now == nil || now.DeletionTimestamp != nil || now.Annotations[workload.ContentAnnotation] != want ||
			len(now.Status.ContainerStatuses) != 1 || !now.Status.ContainerStatuses[0].Ready {
			return fmt.Errorf("the store in %s should serve with content %s: %+v", w.namespace, want, now)
		}
		return nil
	}).WithContext(ctx).WithTimeout(3 * time.Minute).Should(Succeed())
}

// acrossVersions has intents begun at one version and continued at the other, both ways.
func (w *world) acrossVersions(ctx context.Context, before, after string) {
	GinkgoHelper()
	began := time.Now().UnixMilli()
	versions := []string{before, after}
	for i, here := range versions {
		there := versions[1-i]
		order := func(what string) string { return fmt.Sprintf("versions-%d-%d-%s", began, i, what) }

		// Paid here, replayed there.
		paid := call{id: order("paid"), body: w.order(order("paid"), "10.00")}
		body := w.payAt(ctx, here, paid, http.StatusCreated, allow).body
		Expect(w.payAt(ctx, there, paid, http.StatusCreated, replay).body).To(Equal(body))

		// Held here, held there under the same name; released, it is sent there, and replayed here.
		again := call{id: order("again"), body: w.order(order("paid"), "11.00")}
		hold := w.payAt(ctx, here, again, http.StatusConflict, unknownHold).problem().Hold
		Expect(w.payAt(ctx, there, again, http.StatusConflict, unknownHold).problem().Hold).To(Equal(hold))
		w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		Expect(w.resolve(ctx, resolver, hold, "Release")).To(Succeed())
		w.holdIs(ctx, hold, v1alpha1.HoldResolved)
		body = w.payAt(ctx, there, again, http.StatusCreated, allow).body
		Expect(w.payAt(ctx, here, again, http.StatusCreated, replay).body).To(Equal(body))

		// Paid, and the answer was lost here: unknown there, until a person has found it.
		lost := call{id: order("lost"), body: w.order(order("lost"), "10.00"), fault: "close-after-commit"}
		hold = w.payAt(ctx, here, lost, http.StatusConflict, unknownHold).problem().Hold
		lost.fault = ""
		Expect(w.payAt(ctx, there, lost, http.StatusConflict, unknownHold).problem().Hold).To(Equal(hold))
		Eventually(func(ctx context.Context) error { _, err := w.hold(ctx, hold); return err }).WithContext(ctx).Should(Succeed())
		w.markPaid(ctx, hold, w.reference(ctx, order("lost")))
		for _, at := range versions {
			Expect(w.payAt(ctx, at, lost, http.StatusOK, replay).body).To(ContainSubstring(w.reference(ctx, order("lost"))))
		}

		// Called at both at the same moment.
		both := call{id: order("both"), body: w.order(order("both"), "10.00"), fault: "delay:300ms"}
		verdicts := make([]string, 2)
		var calls sync.WaitGroup
		for j, at := range versions {
			calls.Go(func() {
				got := w.callAt(ctx, at, both)
				verdicts[j] = got.verdict()
				if got.err != nil {
					verdicts[j] = got.String()
				}
			})
		}
		calls.Wait()
		Expect(strings.Count(strings.Join(verdicts, " "), allow)).To(Equal(1), "%v", verdicts)
		w.payAt(ctx, there, both, http.StatusCreated, replay)

		charges := w.charges(ctx)
		Expect(charges).To(HaveKeyWithValue(order("paid"), 2), "once, and once more after the release")
		Expect(charges).To(HaveKeyWithValue(order("lost"), 1))
		Expect(charges).To(HaveKeyWithValue(order("both"), 1))
	}
}
