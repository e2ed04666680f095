// The samples read back as they were written, and the typed API loses nothing of them.

package crd

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/controller"
)

// O02: the smallest sample, applied and read back, is the same; and so is every other.
func TestSamplesReadBackTheSame(t *testing.T) {
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	// The smallest one has no namespace of its own.
	smallest := map[string]bool{"IdempotencyStore default/payments": false, "IntentBudget default/refunds": false, "AgentTool default/refund": false}
	ours := 0
	for _, o := range samples {
		if o.GroupVersionKind().Group != "guardrails.holdfast.dev" {
			continue
		}
		ours++
		if name := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName(); o.GetNamespace() == "default" {
			if _, known := smallest[name]; !known {
				t.Errorf("%s is of no known sample: the smallest one is %v", name, smallest)
			}
			smallest[name] = true
		}
		t.Run(o.GetKind()+" "+o.GetNamespace()+" "+o.GetName(), func(t *testing.T) {
			read := func() *unstructured.Unstructured {
				got := &unstructured.Unstructured{}
				got.SetGroupVersionKind(o.GroupVersionKind())
				if err := admin.Get(t.Context(), client.ObjectKeyFromObject(o), got); err != nil {
					t.Fatal(err)
				}
				return got
			}
			current := read()
			if want, got := text(t, o.Object["spec"]), text(t, current.Object["spec"]); got != want {
				t.Errorf("the spec was applied as\n%s\nand reads back as\n%s", want, got)
			}
			// The first write after creation stores the status that the CRD defaults, once: creation drops any status,
			// and the default of an object without one is filled in on reading.
			versions := make([]string, 2)
			for i := range versions {
				if err := apply(t.Context(), admin, o.DeepCopy()); err != nil {
					t.Fatal(err)
				}
				current = read()
				versions[i] = current.GetResourceVersion()
			}
			if versions[0] != versions[1] {
				t.Error("applying the same again should change nothing")
			}

			typed, err := scheme.New(o.GroupVersionKind())
			if err != nil {
				t.Fatal(err)
			}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(current.Object, typed, true); err != nil {
				t.Fatal(err)
			}
			back, err := runtime.DefaultUnstructuredConverter.ToUnstructured(typed)
			if err != nil {
				t.Fatal(err)
			}
			if want, got := text(t, keys(o.Object["spec"])), text(t, keys(back["spec"])); got != want {
				t.Errorf("the spec has the fields\n%s\nand the typed API keeps\n%s", want, got)
			}
			// A duration may be written in another way by a typed client; the API server must still take it.
			if err := strict().Update(t.Context(), &unstructured.Unstructured{Object: back}, client.DryRunAll); err != nil {
				t.Errorf("what a typed client writes should be accepted: %v", err)
			}
		})
	}
	for name, read := range smallest {
		if !read {
			t.Errorf("the smallest sample has no %s", name)
		}
	}
	if ours < 8 {
		t.Errorf("only %d samples are of this group", ours)
	}
}

// kubectl apply -k config/samples has every sample that needs nothing else, and no object twice.
func TestSamplesStandBesideEachOther(t *testing.T) {
	objects, err := kustomize(t.Context(), filepath.Join(configDir, "samples"))
	if err != nil {
		t.Fatal(err)
	}
	name := func(o *unstructured.Unstructured) string {
		return o.GroupVersionKind().GroupKind().String() + " " + o.GetNamespace() + "/" + o.GetName()
	}
	there := map[string]bool{}
	for _, o := range objects {
		there[name(o)] = true
	}
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	alone := 0
	for _, o := range samples {
		// minimal.yaml is for a namespace of one's own.
		if smallest := o.GetNamespace() == metav1.NamespaceDefault; smallest == there[name(o)] {
			t.Errorf("is %s among the samples that go together? %v", name(o), there[name(o)])
		} else if !smallest {
			alone++
		}
	}
	if alone != len(objects) {
		t.Errorf("%d objects are applied together, and the samples have %d of their own", len(objects), alone)
	}
}

// The sample that works in a cluster names only what is there: a store that a server keeps, and a provider that a Service of a
// namespace that consents leads to.
func TestTheSampleInAClusterIsWhole(t *testing.T) {
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	get := func(kind, namespace, name string, into any) {
		t.Helper()
		for _, o := range samples {
			if o.GetKind() != kind || o.GetNamespace() != namespace || o.GetName() != name {
				continue
			}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, into, true); err != nil {
				t.Fatal(err)
			}
			return
		}
		t.Fatalf("no sample is the %s %s/%s", kind, namespace, name)
	}
	const namespace = "payments-redis"
	var tool v1alpha1.AgentTool
	get("AgentTool", namespace, "charge", &tool)
	var budget v1alpha1.IntentBudget
	get("IntentBudget", namespace, tool.Spec.IntentBudgetRef.Name, &budget)
	var store v1alpha1.IdempotencyStore
	get("IdempotencyStore", namespace, budget.Spec.StoreRef.Name, &store)
	if store.Spec.Redis == nil || store.Spec.Redis.Deploy == nil {
		t.Error("gateways that run apart from the controllers need a store that a server keeps")
	}

	upstream, err := url.Parse(tool.Spec.Upstream.HTTP.URL)
	if err != nil {
		t.Fatal(err)
	}
	host := strings.Split(upstream.Hostname(), ".")
	if len(host) != 3 || host[2] != "svc" || upstream.Port() != "" || upstream.Scheme != "http" {
		t.Fatalf("the tool's url %s is not that of a Service at port 80", upstream)
	}
	var home corev1.Namespace
	get("Namespace", "", host[1], &home)
	if home.Annotations[controller.UpstreamConsent] != namespace {
		t.Errorf("the namespace %s lets its Services be upstreams of %q, want %s", home.Name, home.Annotations[controller.UpstreamConsent], namespace)
	}
	var service corev1.Service
	get("Service", host[1], host[0], &service)
	var provider appsv1.Deployment
	get("Deployment", host[1], host[0], &provider)
	if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(provider.Spec.Template.Labels)) {
		t.Error("the Service does not lead to the provider's pods")
	}
	ports, at := service.Spec.Ports, provider.Spec.Template.Spec.Containers[0]
	if len(ports) != 1 || ports[0].Port != 80 || len(at.Ports) != 1 || ports[0].TargetPort.StrVal != at.Ports[0].Name {
		t.Errorf("the Service's ports %v are not the provider's %v", ports, at.Ports)
	}
	if want := fmt.Sprintf("--listen=:%d", at.Ports[0].ContainerPort); !slices.Contains(at.Args, want) {
		t.Errorf("the provider is started with %v, want %s", at.Args, want)
	}

	var binding rbacv1.RoleBinding
	get("RoleBinding", namespace, "sample-agent-invokes", &binding)
	if binding.RoleRef.Name != "holdfast-agent" || len(binding.Subjects) != 1 {
		t.Fatalf("the agent's RoleBinding is %v for %v", binding.RoleRef, binding.Subjects)
	}
	var agent corev1.ServiceAccount
	get("ServiceAccount", binding.Subjects[0].Namespace, binding.Subjects[0].Name, &agent)
	// Both ends are behind the fence of network-policy.yaml.
	for name, at := range map[string]string{"only-the-gateways": agent.Namespace, "only-from-gateways": home.Name} {
		get("NetworkPolicy", at, name, &networkingv1.NetworkPolicy{})
	}

	// A namespace that enforces the restricted standard takes the pod.
	fenced := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "restricted-", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}
	if err := admin.Create(t.Context(), fenced); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fenced.Name, Name: "provider"}, Spec: provider.Spec.Template.Spec}
	if err := poll(t.Context(), func() error {
		err := admin.Create(t.Context(), pod.DeepCopy(), client.DryRunAll)
		if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "PodSecurity") {
			return permanent{err}
		}
		return err
	}); err != nil {
		t.Errorf("the provider's pod is not restricted: %v", err)
	}
}

// Who applies all samples gives their namespaces away: the list says which, and none is one that somebody has already.
func TestSamplesNameTheirNamespaces(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(configDir, "samples", "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	comment := strings.Join(strings.Fields(strings.ReplaceAll(string(content), "\n#", "\n")), " ")
	objects, err := kustomize(t.Context(), filepath.Join(configDir, "samples"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range objects {
		if o.GetKind() == "Namespace" {
			names = append(names, o.GetName())
		}
	}
	slices.Sort(names)
	last := len(names) - 1
	if want := "They make the namespaces " + strings.Join(names[:last], ", ") + " and " + names[last] + ","; !strings.Contains(comment, want) {
		t.Errorf("kustomization.yaml does not say: %s", want)
	}
	for _, plain := range []string{"agents", "provider"} {
		if slices.Contains(names, plain) {
			t.Errorf("the samples take the namespace %s, which a cluster may have", plain)
		}
	}
}

// The README's first tool stays short.
func TestTheMinimalSampleIsMinimal(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(configDir, "samples", "minimal.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(content), "\n"); n > 25 {
		t.Errorf("minimal.yaml has %d lines, want at most 25", n)
	}
}

func text(t *testing.T, v any) string {
	t.Helper()
	content, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// keys replaces every scalar, so that only the fields are compared.
func keys(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for k, e := range v {
			out[k] = keys(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = keys(e)
		}
		return out
	}
	return reflect.ValueOf(v).IsValid()
}
