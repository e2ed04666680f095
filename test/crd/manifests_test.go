// What runs, as config/default and the operator have it: what its pods may, and that all of it fits together. A real API
// server judges what it can judge.

package crd

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// all are the rendered objects of a kind, strictly decoded.
func all[T any](t *testing.T, kind string) []T {
	t.Helper()
	var list []T
	for _, o := range rendered {
		if o.GetKind() != kind {
			continue
		}
		var typed T
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &typed, true); err != nil {
			t.Fatalf("%s %s: %v", kind, o.GetName(), err)
		}
		list = append(list, typed)
	}
	if len(list) == 0 {
		t.Fatalf("there is no %s", kind)
	}
	return list
}

// stores are one deployed store of each kind, with what the operator renders for it.
func stores(t *testing.T) map[string]workload.Objects {
	t.Helper()
	out := map[string]workload.Objects{}
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "payments", UID: "uid"}
	storage := v1alpha1.StoreStorage{Size: "1Gi"}
	for name, spec := range map[string]v1alpha1.IdempotencyStoreSpec{
		"redis":    {Redis: &v1alpha1.RedisStore{Deploy: &v1alpha1.RedisDeployment{Storage: storage}}},
		"postgres": {Postgres: &v1alpha1.PostgresStore{Deploy: &v1alpha1.PostgresDeployment{Storage: storage}}},
	} {
		o, err := workload.Render(workload.Inputs{Store: &v1alpha1.IdempotencyStore{ObjectMeta: meta, Spec: spec}, OperatorNamespace: "holdfast-system"})
		if err != nil {
			t.Fatal(err)
		}
		out[name] = o
	}
	return out
}

// converted reads what an apply configuration says as the object that it makes.
func converted[T any](t *testing.T, from any) T {
	t.Helper()
	var to T
	text, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(text, &to)
	}
	if err != nil {
		t.Fatal(err)
	}
	return to
}

// pods are the templates of everything that ever runs.
func pods(t *testing.T) map[string]corev1.PodTemplateSpec {
	t.Helper()
	out := map[string]corev1.PodTemplateSpec{}
	for _, d := range all[appsv1.Deployment](t, "Deployment") {
		out[d.Name] = d.Spec.Template
	}
	for name, o := range stores(t) {
		out[name] = converted[appsv1.StatefulSet](t, o.StatefulSet).Spec.Template
	}
	for _, kind := range []string{"DaemonSet", "StatefulSet", "Job", "CronJob", "Pod", "ReplicaSet"} {
		if slices.ContainsFunc(rendered, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind }) {
			t.Errorf("a %s is not looked at here", kind)
		}
	}
	if len(out) != 4 {
		t.Fatalf("found %d kinds of pods, want 4", len(out))
	}
	return out
}

// The namespace's own label has the API server refuse every pod that is not restricted.
func TestPodsAreRestricted(t *testing.T) {
	var ns corev1.Namespace
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "holdfast-system"}, &ns); err != nil {
		t.Fatal(err)
	}
	if ns.Labels["pod-security.kubernetes.io/enforce"] != "restricted" {
		t.Fatalf("the namespace has the labels %v", ns.Labels)
	}
	create := func(ctx context.Context, template corev1.PodTemplateSpec) error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "judged", Labels: template.Labels}, Spec: *template.Spec.DeepCopy()}
		// A StatefulSet gives its pods these.
		for _, c := range pod.Spec.Containers {
			for _, m := range c.VolumeMounts {
				if !slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
					pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: m.Name, VolumeSource: corev1.VolumeSource{
						PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: m.Name},
					}})
				}
			}
		}
		return admin.Create(ctx, pod, client.DryRunAll)
	}
	for name, template := range pods(t) {
		t.Run(name, func(t *testing.T) {
			if err := create(t.Context(), template); err != nil {
				t.Fatal(err)
			}
			// That it is looked at: each of these is one step too far.
			for what, change := range map[string]func(*corev1.PodSpec){
				"hostNetwork": func(p *corev1.PodSpec) { p.HostNetwork = true },
				"hostPath": func(p *corev1.PodSpec) {
					p.Volumes = append(p.Volumes, corev1.Volume{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}})
				},
				"seccompProfile": func(p *corev1.PodSpec) { p.SecurityContext.SeccompProfile = nil },
				"runAsNonRoot": func(p *corev1.PodSpec) {
					p.SecurityContext.RunAsNonRoot, p.Containers[0].SecurityContext.RunAsNonRoot = nil, nil
				},
				"allowPrivilegeEscalation": func(p *corev1.PodSpec) { p.Containers[0].SecurityContext.AllowPrivilegeEscalation = nil },
				"unrestricted capabilities": func(p *corev1.PodSpec) {
					p.Containers[0].SecurityContext.Capabilities = nil
				},
			} {
				worse := *template.DeepCopy()
				change(&worse.Spec)
				if err := create(t.Context(), worse); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), what) {
					t.Errorf("with %s: %v", what, err)
				}
			}
		})
	}
}

// What the restricted standard does not ask for.
func TestPodsAreFrugal(t *testing.T) {
	for name, template := range pods(t) {
		p := template.Spec
		if p.EnableServiceLinks == nil || *p.EnableServiceLinks {
			t.Errorf("%s: its environment has every Service of the namespace", name)
		}
		// Only what speaks with the API server has a token for it, and says so.
		ours := strings.HasPrefix(name, "holdfast-")
		if p.AutomountServiceAccountToken == nil || *p.AutomountServiceAccountToken != ours {
			t.Errorf("%s: automountServiceAccountToken should be %t", name, ours)
		}
		if len(p.Containers) != 1 || len(p.InitContainers) != 0 {
			t.Errorf("%s: has %d containers", name, len(p.Containers)+len(p.InitContainers))
		}
		for _, c := range p.Containers {
			if sc := c.SecurityContext; sc.ReadOnlyRootFilesystem == nil || !*sc.ReadOnlyRootFilesystem {
				t.Errorf("%s: its root can be written", name)
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
				t.Errorf("%s: has the resources %v", name, c.Resources)
			}
			if c.StartupProbe == nil || c.LivenessProbe == nil || c.ReadinessProbe == nil {
				t.Errorf("%s: a probe is missing", name)
			}
			if c.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
				t.Errorf("%s: what it says last is not in its status", name)
			}
			for _, e := range c.Env {
				if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
					t.Errorf("%s: the Secret in %s is in its environment", name, e.Name)
				}
			}
		}
		for _, v := range p.Volumes {
			if v.Secret != nil && (v.Secret.DefaultMode == nil || *v.Secret.DefaultMode&0o007 != 0) {
				t.Errorf("%s: everybody in the pod reads the Secret of volume %s", name, v.Name)
			}
		}
	}
	for _, sa := range all[corev1.ServiceAccount](t, "ServiceAccount") {
		if sa.AutomountServiceAccountToken == nil || *sa.AutomountServiceAccountToken {
			t.Errorf("whoever runs as %s has its token, asked or not", sa.Name)
		}
	}
}

// Names and labels by which one object means another.
func TestTheInstallationFitsTogether(t *testing.T) {
	deployments := map[string]appsv1.Deployment{}
	accounts := map[string]bool{}
	for _, sa := range all[corev1.ServiceAccount](t, "ServiceAccount") {
		accounts[sa.Name] = true
	}
	for _, d := range all[appsv1.Deployment](t, "Deployment") {
		deployments[d.Name] = d
		pod := d.Spec.Template
		if !labels.SelectorFromSet(d.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels)) {
			t.Errorf("%s: selects %v, and its pods have %v", d.Name, d.Spec.Selector.MatchLabels, pod.Labels)
		}
		if !accounts[pod.Spec.ServiceAccountName] {
			t.Errorf("%s: there is no ServiceAccount %s", d.Name, pod.Spec.ServiceAccountName)
		}
		// The stores' NetworkPolicies know the pods by it.
		if pod.Labels[workload.NameLabel] != workload.Operator {
			t.Errorf("%s: its pods may not connect to deployed stores", d.Name)
		}
		if image := pod.Spec.Containers[0].Image; image != "holdfast-dev/manager:dev" {
			t.Errorf("%s: runs %s", d.Name, image)
		}
		if u := d.Spec.Strategy.RollingUpdate; u == nil || u.MaxUnavailable == nil || *u.MaxUnavailable != intstr.FromInt32(0) || *d.Spec.Replicas < 2 {
			t.Errorf("%s: an update has fewer of its %d pods serve", d.Name, *d.Spec.Replicas)
		}
		for _, c := range pod.Spec.TopologySpreadConstraints {
			if !labels.SelectorFromSet(c.LabelSelector.MatchLabels).Matches(labels.Set(pod.Labels)) || c.WhenUnsatisfiable != corev1.ScheduleAnyway {
				t.Errorf("%s: spreads %v, or does not run where it cannot spread", d.Name, c.LabelSelector.MatchLabels)
			}
		}
		if len(pod.Spec.TopologySpreadConstraints) == 0 {
			t.Errorf("%s: its pods may all be on one node", d.Name)
		}
		for _, probe := range []*corev1.Probe{pod.Spec.Containers[0].StartupProbe, pod.Spec.Containers[0].LivenessProbe, pod.Spec.Containers[0].ReadinessProbe} {
			if !slices.ContainsFunc(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == probe.HTTPGet.Port.StrVal }) {
				t.Errorf("%s: a probe asks at port %s", d.Name, probe.HTTPGet.Port.String())
			}
		}
	}
	selected := func(selector map[string]string) []appsv1.Deployment {
		var out []appsv1.Deployment
		for _, d := range deployments {
			if labels.SelectorFromSet(selector).Matches(labels.Set(d.Spec.Template.Labels)) {
				out = append(out, d)
			}
		}
		return out
	}
	guarded := map[string]bool{}
	for _, b := range all[policyv1.PodDisruptionBudget](t, "PodDisruptionBudget") {
		of := selected(b.Spec.Selector.MatchLabels)
		if len(of) != 1 {
			t.Fatalf("the PodDisruptionBudget %s is of %d Deployments", b.Name, len(of))
		}
		guarded[of[0].Name] = true
		// A drain of a node must come to an end.
		if b.Spec.MaxUnavailable == nil || *b.Spec.MaxUnavailable != intstr.FromInt32(1) || b.Spec.UnhealthyPodEvictionPolicy == nil || *b.Spec.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow {
			t.Errorf("the PodDisruptionBudget %s: %+v", b.Name, b.Spec)
		}
	}
	scraped := map[string]bool{}
	for _, s := range all[corev1.Service](t, "Service") {
		of := selected(s.Spec.Selector)
		if len(of) != 1 {
			t.Fatalf("the Service %s leads to %d Deployments", s.Name, len(of))
		}
		for _, port := range s.Spec.Ports {
			if !slices.ContainsFunc(of[0].Spec.Template.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == port.TargetPort.StrVal }) {
				t.Errorf("the Service %s leads to port %s, which %s does not have", s.Name, port.TargetPort.String(), of[0].Name)
			}
		}
		if s.Labels["guardrails.holdfast.dev/metrics"] == "true" {
			scraped[of[0].Name] = true
		}
	}
	for name := range deployments {
		if !guarded[name] || !scraped[name] {
			t.Errorf("%s: has a PodDisruptionBudget: %t, has a Service for its metrics: %t", name, guarded[name], scraped[name])
		}
	}
	monitoring, err := kustomize(t.Context(), filepath.Join(configDir, "prometheus"))
	if err != nil {
		t.Fatal(err)
	}
	monitors := 0
	for _, o := range monitoring {
		if o.GetKind() != "ServiceMonitor" {
			continue
		}
		monitors++
		selector, _, err := unstructured.NestedStringMap(o.Object, "spec", "selector", "matchLabels")
		if err != nil || o.GetNamespace() != "holdfast-system" || len(selector) != 1 || selector["guardrails.holdfast.dev/metrics"] != "true" {
			t.Errorf("the ServiceMonitor in %s selects %v (%v)", o.GetNamespace(), selector, err)
		}
		endpoints, _, err := unstructured.NestedSlice(o.Object, "spec", "endpoints")
		if endpoint, ok := endpoints[0].(map[string]any); err != nil || !ok || endpoint["port"] != "metrics" || endpoint["scheme"] != "https" {
			t.Errorf("the ServiceMonitor asks at %v (%v)", endpoints, err)
		}
	}
	if monitors != 1 {
		t.Errorf("there are %d ServiceMonitors", monitors)
	}
	// The controllers make a certificate for the Service that there is.
	env := deployments["holdfast-controllers"].Spec.Template.Spec.Containers[0].Env
	if !slices.ContainsFunc(env, func(e corev1.EnvVar) bool { return e.Name == "GATEWAY_SERVICE" && e.Value == "holdfast-gateway" }) {
		t.Errorf("the controllers' environment is %v", env)
	}
}

// All that is installed besides the kinds. What is new gets a line here, and a thought.
func TestWhatIsInstalled(t *testing.T) {
	want := strings.Fields(`
ClusterRole/holdfast-admin ClusterRole/holdfast-agent ClusterRole/holdfast-edit ClusterRole/holdfast-gateway ClusterRole/holdfast-operator
ClusterRole/holdfast-registrar ClusterRole/holdfast-resolver ClusterRole/holdfast-store-deployer ClusterRole/holdfast-view
ClusterRoleBinding/holdfast-gateway ClusterRoleBinding/holdfast-operator
Deployment/holdfast-controllers Deployment/holdfast-gateway
MutatingAdmissionPolicy/holdfast-paymentholds-stamp MutatingAdmissionPolicyBinding/holdfast-paymentholds-stamp
Namespace/holdfast-system
NetworkPolicy/holdfast-controllers NetworkPolicy/holdfast-gateway NetworkPolicy/holdfast-nobody
PodDisruptionBudget/holdfast-controllers PodDisruptionBudget/holdfast-gateway
Role/holdfast-gateway Role/holdfast-manager RoleBinding/holdfast-gateway RoleBinding/holdfast-manager
Service/holdfast-controllers-metrics Service/holdfast-gateway Service/holdfast-gateway-metrics
ServiceAccount/holdfast-gateway ServiceAccount/holdfast-manager
ValidatingAdmissionPolicy/holdfast-paymentholds-operator-only ValidatingAdmissionPolicy/holdfast-paymentholds-resolution
ValidatingAdmissionPolicy/holdfast-paymentintents-caller ValidatingAdmissionPolicy/holdfast-paymentintents-operator-only
ValidatingAdmissionPolicyBinding/holdfast-paymentholds-operator-only ValidatingAdmissionPolicyBinding/holdfast-paymentholds-resolution
ValidatingAdmissionPolicyBinding/holdfast-paymentintents-caller ValidatingAdmissionPolicyBinding/holdfast-paymentintents-operator-only
`)
	var got []string
	for _, o := range rendered {
		if o.GetKind() != "CustomResourceDefinition" {
			got = append(got, o.GetKind()+"/"+o.GetName())
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("installed is\n%s\nand should be\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// Nobody is given anything but the two that run.
	for _, kind := range []string{"ClusterRoleBinding", "RoleBinding"} {
		for _, b := range all[rbacv1.ClusterRoleBinding](t, kind) {
			for _, s := range b.Subjects {
				if who := fmt.Sprintf("%s %s/%s", s.Kind, s.Namespace, s.Name); who != "ServiceAccount holdfast-system/holdfast-gateway" && who != "ServiceAccount holdfast-system/holdfast-manager" {
					t.Errorf("%s %s gives %s to %s", kind, b.Name, b.RoleRef.Name, who)
				}
			}
		}
	}
}
