// The roles give what is needed and no more: nobody has a wildcard, the operator decides about nothing and reads
// no Secret of its own accord, and editing is not resolving.

package crd

import (
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	// deployer is the role that a namespace's owner binds, and deploys the sample's namespace where that was done.
	deployer = "holdfast-store-deployer"
	deploys  = "payments-redis"
)

type role struct {
	kind, name, namespace string
	labels                map[string]string
	rules                 []rbacv1.PolicyRule
}

func roles(t *testing.T, objects []*unstructured.Unstructured) []role {
	t.Helper()
	var list []role
	for _, o := range objects {
		if o.GetKind() != "Role" && o.GetKind() != "ClusterRole" {
			continue
		}
		r := &rbacv1.ClusterRole{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, r, true); err != nil {
			t.Fatalf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
		list = append(list, role{o.GetKind(), o.GetName(), o.GetNamespace(), o.GetLabels(), r.Rules})
	}
	return list
}

func TestRoles(t *testing.T) {
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	all := roles(t, append(slices.Clone(rendered), samples...))
	if len(all) != 14 {
		t.Errorf("found %d roles, want 14", len(all))
	}
	for _, r := range all {
		for _, rule := range r.rules {
			for _, word := range slices.Concat(rule.Verbs, rule.Resources, rule.APIGroups, rule.NonResourceURLs) {
				if strings.Contains(word, "*") {
					t.Errorf("%s %s: has the wildcard %q", r.kind, r.name, word)
				}
			}
			if slices.Contains(rule.Verbs, "resolve") && r.name != "holdfast-resolver" {
				t.Errorf("%s %s: has the verb resolve", r.kind, r.name)
			}
			if slices.Contains(rule.Verbs, "register-for") && r.name != "holdfast-registrar" {
				t.Errorf("%s %s: has the verb register-for", r.kind, r.name)
			}
			if slices.Contains(rule.Verbs, "invoke") && r.name != "holdfast-agent" {
				t.Errorf("%s %s: has the verb invoke", r.kind, r.name)
			}
			if slices.ContainsFunc([]string{"impersonate", "escalate"}, func(v string) bool { return slices.Contains(rule.Verbs, v) }) {
				t.Errorf("%s %s: has a verb that gives other rights", r.kind, r.name)
			}
			if slices.Contains(rule.Verbs, "bind") && (r.name != "holdfast-admin" || len(rule.ResourceNames) == 0) {
				t.Errorf("%s %s: may bind any role", r.kind, r.name)
			}
			if r.name == deployer {
				if !slices.Equal(rule.Verbs, []string{"get"}) && !slices.Equal(rule.Verbs, []string{"get", "patch"}) && !slices.Equal(rule.Verbs, []string{"get", "create", "patch"}) &&
					!(slices.Equal(rule.Resources, []string{"secrets"}) && slices.Equal(rule.Verbs, []string{"get", "create", "update"})) {
					t.Errorf("%s: %v of %v is more than applying takes", r.name, rule.Verbs, rule.Resources)
				}
				continue
			}
			// The request keys and the gateways' certificate, in the operator's own namespace: the manager makes them, and
			// nobody changes the keys.
			keys := r.kind == "Role" && r.namespace == "holdfast-system" && slices.Equal(rule.Resources, []string{"secrets"}) &&
				(slices.Equal(rule.ResourceNames, []string{"holdfast-request-keys"}) && slices.Equal(rule.Verbs, []string{"get"}) ||
					r.name == "holdfast-manager" && slices.Equal(rule.ResourceNames, []string{"holdfast-gateway-ca", "holdfast-gateway-tls"}) && slices.Equal(rule.Verbs, []string{"get", "update"}) ||
					r.name == "holdfast-manager" && len(rule.ResourceNames) == 0 && slices.Equal(rule.Verbs, []string{"create"}))
			if slices.Contains(rule.Resources, "secrets") && !keys && (r.kind == "ClusterRole" || r.namespace == "holdfast-system" || len(rule.ResourceNames) == 0 || !slices.Equal(rule.Verbs, []string{"get"})) {
				t.Errorf("%s %s: reads more than single Secrets of one namespace", r.kind, r.name)
			}
			if r.kind == "ClusterRole" && slices.Contains(rule.Resources, "configmaps") {
				t.Errorf("%s: reads ConfigMaps of all namespaces", r.name)
			}
		}
	}
}

// What it takes to run servers in a namespace is given by its owner alone.
func TestNobodyDeploysEverywhere(t *testing.T) {
	for _, o := range rendered {
		if !strings.HasSuffix(o.GetKind(), "RoleBinding") {
			continue
		}
		if name, _, err := unstructured.NestedString(o.Object, "roleRef", "name"); err != nil || name == deployer {
			t.Errorf("%s %s gives %s (%v)", o.GetKind(), o.GetName(), deployer, err)
		}
	}
}

// What the whole set of roles and bindings comes to, asked of the API server.
func TestWhatEachMayDo(t *testing.T) {
	const group = "guardrails.holdfast.dev"
	type attempt struct{ group, resource, verb, namespace string }
	for _, tc := range []struct {
		user string
		may  []attempt
		not  []attempt
	}{
		{operator,
			[]attempt{
				{group, "paymentholds", "create", namespace}, {group, "paymentholds", "patch", namespace}, {group, "paymentholds", "watch", ""},
				{group, "paymentholds/status", "patch", namespace}, {group, "agenttools", "watch", ""}, {group, "agenttools/status", "patch", namespace},
				{group, "paymentintents", "create", namespace}, {group, "paymentintents", "watch", ""}, {group, "paymentintents/status", "patch", namespace},
				{"", "serviceaccounts", "get", namespace},
				{"authentication.k8s.io", "tokenreviews", "create", ""}, {"authorization.k8s.io", "subjectaccessreviews", "create", ""},
				{"coordination.k8s.io", "leases", "update", "holdfast-system"}, {"", "configmaps", "update", "holdfast-system"},
				{"events.k8s.io", "events", "create", namespace}, {"", "namespaces", "get", namespace},
				{"", "services", "watch", ""}, {"discovery.k8s.io", "endpointslices", "watch", ""},
				{"apps", "statefulsets", "watch", ""}, {"networking.k8s.io", "networkpolicies", "watch", ""}, {"policy", "poddisruptionbudgets", "watch", ""},
				{"storage.k8s.io", "storageclasses", "get", ""}, {"postgresql.cnpg.io", "clusters", "get", namespace},
				// Where the owner has let it deploy.
				{"", "secrets", "create", deploys}, {"", "secrets", "update", deploys}, {"", "configmaps", "patch", deploys}, {"", "services", "create", deploys},
				{"apps", "statefulsets", "patch", deploys}, {"networking.k8s.io", "networkpolicies", "patch", deploys}, {"policy", "poddisruptionbudgets", "patch", deploys},
				{"", "persistentvolumeclaims", "patch", deploys}, {"", "pods", "get", deploys},
			},
			[]attempt{
				{group, "paymentholds", "resolve", namespace}, {group, "agenttools", "invoke", namespace}, {group, "agenttools", "patch", namespace},
				{group, "paymentintents", "patch", namespace}, {"", "serviceaccounts", "list", namespace}, {"", "serviceaccounts/token", "create", namespace},
				{"", "secrets", "list", ""}, {"", "secrets", "get", namespace}, {"", "secrets", "get", "holdfast-system"},
				{"", "configmaps", "get", namespace}, {"coordination.k8s.io", "leases", "update", namespace},
				{"", "services", "patch", namespace}, {"discovery.k8s.io", "endpointslices", "patch", namespace},
				{"apps", "statefulsets", "patch", namespace}, {"", "persistentvolumeclaims", "get", namespace}, {"", "pods", "get", namespace},
				{"", "secrets", "list", deploys}, {"", "secrets", "delete", deploys}, {"apps", "statefulsets", "delete", deploys}, {"", "pods", "create", deploys},
				{"", "pods/exec", "create", deploys}, {"", "persistentvolumeclaims", "delete", deploys}, {"storage.k8s.io", "storageclasses", "patch", ""},
			}},
		// A gateway decides over money, so it decides over nothing else, and writes nothing that others trust.
		{"system:serviceaccount:holdfast-system:holdfast-gateway",
			[]attempt{
				{group, "agenttools", "watch", ""}, {group, "idempotencystores", "watch", ""}, {"", "services", "watch", ""},
				{"authentication.k8s.io", "tokenreviews", "create", ""}, {"coordination.k8s.io", "leases", "update", "holdfast-system"},
			},
			[]attempt{
				{group, "paymentholds", "resolve", namespace}, {group, "paymentholds", "create", namespace}, {group, "paymentholds", "patch", namespace},
				{group, "paymentholds/status", "patch", namespace}, {group, "idempotencystores/status", "patch", namespace}, {group, "agenttools", "invoke", namespace},
				{"", "secrets", "get", namespace}, {"", "configmaps", "update", "holdfast-system"}, {"", "configmaps", "create", "holdfast-system"},
				{"apps", "statefulsets", "create", namespace}, {"apps", "statefulsets", "list", ""},
			}},
		{alice,
			[]attempt{{group, "paymentholds", "resolve", namespace}, {group, "paymentholds", "patch", namespace}, {group, "paymentholds", "list", namespace}},
			[]attempt{{group, "paymentholds", "resolve", "default"}, {group, "paymentholds", "create", namespace}, {group, "paymentholds", "delete", namespace}, {group, "agenttools", "invoke", namespace}}},
		{agent,
			[]attempt{{group, "agenttools", "invoke", namespace}, {group, "paymentintents", "create", namespace}},
			[]attempt{{group, "agenttools", "invoke", "default"}, {group, "paymentintents", "get", namespace}, {group, "paymentintents", "list", namespace},
				{group, "paymentintents", "register-for", namespace}, {group, "paymentintents/status", "patch", namespace}, {group, "agenttools", "get", namespace}, {group, "paymentholds", "get", namespace}, {group, "paymentholds", "resolve", namespace}}},
	} {
		for may, attempts := range map[bool][]attempt{true: tc.may, false: tc.not} {
			for _, a := range attempts {
				resource, sub, _ := strings.Cut(a.resource, "/")
				review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
					User:               tc.user,
					ResourceAttributes: &authorizationv1.ResourceAttributes{Group: a.group, Resource: resource, Subresource: sub, Verb: a.verb, Namespace: a.namespace, Name: ""},
				}}
				if err := admin.Create(t.Context(), review); err != nil {
					t.Fatal(err)
				}
				if review.Status.Allowed != may {
					t.Errorf("%s, %s %s in %q: allowed is %t, want %t (%s)", tc.user, a.verb, a.resource, a.namespace, review.Status.Allowed, may, review.Status.Reason)
				}
			}
		}
	}
}

// The roles that Kubernetes' own ones take in.
func TestAggregatedRoles(t *testing.T) {
	want := map[string]string{"holdfast-view": "view", "holdfast-edit": "edit", "holdfast-admin": "admin"}
	for _, r := range roles(t, rendered) {
		to := want[r.name]
		for _, name := range []string{"view", "edit", "admin"} {
			if got := r.labels["rbac.authorization.k8s.io/aggregate-to-"+name] == "true"; got != (name == to) {
				t.Errorf("%s: taken in by %s is %t", r.name, name, got)
			}
		}
		if to == "" {
			continue
		}
		delete(want, r.name)
		for _, rule := range r.rules {
			if to == "edit" && slices.Contains(rule.Resources, "paymentholds") {
				t.Error("editing must not touch PaymentHolds: nobody edits one but to resolve it")
			}
		}
	}
	if len(want) != 0 {
		t.Errorf("not found: %v", want)
	}
}
