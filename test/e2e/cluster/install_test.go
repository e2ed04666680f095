// What a user does with an installation: applies it and at once the samples, deletes both in
// either order, and takes Holdfast away and puts it back. Nothing gets stuck, and no money moves
// twice for it.

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// reinstall installs Holdfast again, and puts back what went with its kinds.
func reinstall(ctx context.Context) {
	GinkgoHelper()
	install(ctx)
	for _, w := range worlds() {
		w.apply(ctx)
	}
	onRedis.resolutionsAreStamped(ctx)
}

// uninstall is what make undeploy ALL=1 does.
func uninstall(ctx context.Context) {
	GinkgoHelper()
	cmd := exec.CommandContext(ctx, filepath.Join(root, "hack", "install.sh"), "undeploy")
	cmd.Env = append(os.Environ(), "ALL=1", "KUBECONFIG="+box.Kubeconfig(), "KUBECTL="+tools.Kubectl)
	out, err := cmd.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), string(out))
}

// left are the objects of the cluster, by kind and name, that are of Holdfast or its samples.
func left(ctx context.Context) []string {
	GinkgoHelper()
	out := []string{}
	samples := sampleNamespaces(ctx)
	for _, resource := range []string{
		"namespaces", "customresourcedefinitions", "clusterroles", "clusterrolebindings",
		"validatingadmissionpolicies", "validatingadmissionpolicybindings", "mutatingadmissionpolicies", "mutatingadmissionpolicybindings",
	} {
		for _, name := range strings.Fields(mustKubectl(ctx, "get", resource, "--output=name")) {
			_, is, _ := strings.Cut(name, "/")
			if strings.HasPrefix(is, "holdfast-") || strings.HasSuffix(is, "."+v1alpha1.GroupName) || slices.Contains(samples, is) {
				out = append(out, name)
			}
		}
	}
	return out
}

func samplesDir() string { return filepath.Join(root, "config", "samples") }
func defaultDir() string { return filepath.Join(root, "config", "default") }

// sampleNamespaces are those that the samples make.
func sampleNamespaces(ctx context.Context) []string {
	GinkgoHelper()
	var out []string
	documents := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(mustKubectl(ctx, "kustomize", samplesDir())), 4096)
	for {
		var o metav1.PartialObjectMetadata
		err := documents.Decode(&o)
		if errors.Is(err, io.EOF) {
			break
		}
		Expect(err).NotTo(HaveOccurred())
		if o.Kind == "Namespace" {
			out = append(out, o.Name)
		}
	}
	Expect(out).To(ContainElement("support"))
	return out
}

// looked says that the operator has looked at each object of the samples, and takes the tools
// for right. Whether each store runs is another matter: the samples are for many places.
func looked(ctx context.Context) error {
	for _, resource := range []string{"atool", "ibudget", "idem", "pint"} {
		out, err := kubectl(ctx, "get", resource, "--all-namespaces",
			`--output=jsonpath={range .items[*]}{.metadata.namespace}{"/"}{.metadata.name}{" "}{.metadata.generation}{" "}{.status.observedGeneration}{" "}{.status.conditions[?(@.type=="Accepted")].status}{"\n"}{end}`)
		if err != nil {
			return err
		}
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if len(lines) == 0 || lines[0] == "" {
			return fmt.Errorf("there is no %s", resource)
		}
		for _, line := range lines {
			words := strings.Fields(line)
			if len(words) < 3 || words[1] != words[2] {
				return fmt.Errorf("%s: nobody has looked at %q", resource, line)
			}
			if resource == "atool" && (len(words) < 4 || words[3] != "True") {
				return fmt.Errorf("the tool %q is not accepted", line)
			}
		}
	}
	return nil
}

var _ = Describe("An installation", func() {
	BeforeEach(func(ctx SpecContext) { well(ctx) }, NodeTimeout(5*time.Minute))

	drill("is taken away and put back: the stores keep what they remember, the holds are there again, and answers are replayed", func(ctx SpecContext) {
		both := worlds()
		var agents []*run
		var volumes, passwords []string
		for _, w := range both {
			agents = append(agents, w.begin(ctx, load{concurrency: 4, faults: slow}))
			volumes = append(volumes, w.uid(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: w.in("data-" + w.storePod())}))
			passwords = append(passwords, w.uid(ctx, &corev1.Secret{ObjectMeta: w.in(w.storeService())}))
		}
		for _, r := range agents {
			r.paid(ctx, 10)
		}
		// Who calls while nothing knows him is refused for good, and no record tells of it: so they end before.
		for _, r := range agents {
			r.end(ctx)
		}
		uninstall(ctx)
		Expect(left(ctx)).To(BeEmpty())
		before := []map[string]int{both[0].charges(ctx), both[1].charges(ctx)}
		for i, w := range both {
			// The server goes with its object, and its volume and passwords stay.
			gone(ctx, &corev1.Pod{ObjectMeta: w.in(w.storePod())})
			Expect(w.uid(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: w.in("data-" + w.storePod())})).To(Equal(volumes[i]))
			Expect(w.uid(ctx, &corev1.Secret{ObjectMeta: w.in(w.storeService())})).To(Equal(passwords[i]))
			Expect(w.charges(ctx)).To(Equal(before[i]))
		}

		reinstall(ctx)
		for i, w := range both {
			Expect(w.uid(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: w.in("data-" + w.storePod())})).To(Equal(volumes[i]))
			w.judge(ctx, "uninstalled and installed again", agents[i])
		}
	}, NodeTimeout(12*time.Minute))

	It("and its samples are applied at once, and deleted in either order", func(ctx SpecContext) {
		DeferCleanup(func(ctx context.Context) {
			mustKubectl(ctx, "delete", "-k", samplesDir(), "--ignore-not-found", "--timeout=3m")
			reinstall(ctx)
		}, NodeTimeout(5*time.Minute))
		uninstall(ctx)
		for _, order := range [][]string{{samplesDir(), defaultDir()}, {defaultDir(), samplesDir()}} {
			By("applied, and deleted in this order: " + strings.Join(order, ", "))
			// As a user types it: nothing is waited for between the two.
			mustKubectl(ctx, "apply", "-k", defaultDir())
			mustKubectl(ctx, "apply", "-k", samplesDir())
			available(ctx)
			Eventually(looked).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
			for _, dir := range order {
				if dir == defaultDir() {
					// A namespace takes half of its pods' grace to go, however soon they end. What they do
					// when all is taken away under them, taking away and putting back shows.
					mustKubectl(ctx, "scale", "deployment", gatewayName, "--namespace="+system, "--replicas=0")
					mustKubectl(ctx, "wait", "pods", "--namespace="+system, "--selector=app.kubernetes.io/component=gateway", "--for=delete", "--timeout=2m")
				}
				// What went with its namespace or its kind is not there to be deleted.
				mustKubectl(ctx, "delete", "-k", dir, "--ignore-not-found", "--timeout=3m")
			}
			Eventually(left).WithContext(ctx).WithTimeout(2 * time.Minute).Should(BeEmpty())
		}
	}, NodeTimeout(20*time.Minute))
})

// uid tells an object from another of the same name.
func (w *world) uid(ctx context.Context, o client.Object) string {
	GinkgoHelper()
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
	return string(o.GetUID())
}
