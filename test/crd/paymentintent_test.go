// What a PaymentIntent may say, that it never changes, and who may make one and write its status.

package crd

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func validIntent(name string) *unstructured.Unstructured {
	o := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: PaymentIntent
spec:
  toolRef: {name: issue-refund}
  caller: system:serviceaccount:support:agent
  intentID: sess_abc-4
  scope: [account/a1/order/9]
  lineage: sess_abc/call-4
  amount: {value: "49.99", currency: USD}
  recipient: a1
  fingerprint: sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
  quote: q-17
  validUntil: "2126-01-02T03:04:05Z"
`)
	o.SetName(name)
	return o
}

func TestPaymentIntent(t *testing.T) {
	creating(t, as(agent), validIntent("x"), []tableCase{
		{"only what is required", []change{remove("spec.lineage"), remove("spec.amount"), remove("spec.recipient"), remove("spec.fingerprint"), remove("spec.quote"), remove("spec.validUntil")}, ""},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"a misspelt field", []change{set("spec.intent", "x")}, `unknown field "spec.intent"`},
		{"no tool", []change{remove("spec.toolRef")}, "spec.toolRef: Required value"},
		{"no caller", []change{remove("spec.caller")}, "spec.caller: Required value"},
		{"a caller that is no ServiceAccount", []change{set("spec.caller", "alice")}, "spec.caller in body should match"},
		{"a ServiceAccount without namespace", []change{set("spec.caller", "system:serviceaccount:agent")}, "spec.caller in body should match"},
		{"no intent ID", []change{remove("spec.intentID")}, "spec.intentID: Required value"},
		{"an intent ID of 255 characters", []change{set("spec.intentID", strings.Repeat("x", 255))}, ""},
		{"a longer one", []change{set("spec.intentID", strings.Repeat("x", 256))}, "may not be more than 255"},
		{"no scope", []change{remove("spec.scope")}, "spec.scope: Required value"},
		{"empty scope", []change{set("spec.scope", []any{})}, "should have at least 1 items"},
		{"16 paths", []change{set("spec.scope", repeat(16, "a/%d"))}, ""},
		{"17 paths", []change{set("spec.scope", repeat(17, "a/%d"))}, "must have at most 16 items"},
		{"an amount that is a number", []change{set("spec.amount.value", int64(5))}, "must be of type string"},
		{"an amount with a sign", []change{set("spec.amount.value", "-5")}, "spec.amount.value in body should match"},
		{"an amount without currency", []change{remove("spec.amount.currency")}, "spec.amount.currency: Required value"},
		{"a fingerprint that is none", []change{set("spec.fingerprint", "sha256:1")}, "spec.fingerprint in body should match"},
		{"an empty quote", []change{set("spec.quote", "")}, "spec.quote in body should be at least 1 chars long"},
		{"a validity that is no time", []change{set("spec.validUntil", "tomorrow")}, "spec.validUntil"},
	})
	const fixed = "spec cannot change"
	updating(t, as(agent), admin, validIntent("x"), []tableCase{
		{"a label", []change{set("metadata.labels", map[string]any{"a": "b"})}, ""},
		{"another tool", []change{set("spec.toolRef.name", "other")}, fixed},
		{"another caller", []change{set("spec.caller", "system:serviceaccount:support:other")}, fixed},
		{"another intent ID", []change{set("spec.intentID", "other")}, fixed},
		{"a wider scope", []change{set("spec.scope", []any{"account/a1"})}, fixed},
		{"another lineage", []change{set("spec.lineage", "other")}, fixed},
		{"no lineage", []change{remove("spec.lineage")}, fixed},
		{"another amount", []change{set("spec.amount.value", "50")}, fixed},
		{"no amount", []change{remove("spec.amount")}, fixed},
		{"another recipient", []change{set("spec.recipient", "a2")}, fixed},
		{"no fingerprint", []change{remove("spec.fingerprint")}, fixed},
		{"a longer validity", []change{set("spec.validUntil", "2127-01-02T03:04:05Z")}, fixed},
		{"no validity", []change{remove("spec.validUntil")}, fixed},
		{"another quote", []change{set("spec.quote", "q-18")}, fixed},
	})
}

// Whoever makes one is its caller, or may register for others; the operator alone writes the status.
func TestWhoRegisters(t *testing.T) {
	const mallory, flux = "system:serviceaccount:support:mallory", "flux"
	grantOn(t, "paymentintents", mallory, "create", "get", "patch", "update")
	grantOn(t, "paymentintents/status", mallory, "patch", "update")
	grantOn(t, "paymentintents", flux, "create", "register-for")
	own := func(user string, changes ...change) *unstructured.Unstructured {
		o := validIntent("who")
		for _, c := range append(changes, set("spec.caller", user)) {
			c(o.Object)
		}
		return o
	}
	const one, two = "system:serviceaccount:support:one", "system:serviceaccount:support:two"
	grantOn(t, "paymentintents", one, "create")
	grantOn(t, "agenttools", one, "invoke")
	for _, tc := range []struct{ name, user, want string }{
		{"the caller itself", agent, ""},
		{"another caller", mallory, `may not register an intent for "system:serviceaccount:support:agent"`},
		{"who may register for others", flux, ""},
		{"the operator, which brings one back", operator, ""},
		{"who may make none", alice, "cannot create resource"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			check(t, as(tc.user).Create(t.Context(), validIntent("who"), client.DryRunAll), tc.want)
		})
	}
	// What the operator tries is refused to it as to anybody: so it finds out that the policy is in force.
	probe := validIntent("holdfast-admission-probe")
	check(t, as(operator).Create(t.Context(), probe, client.DryRunAll), `user "`+operator+`" may not register an intent for "system:serviceaccount:support:agent"`)
	// For itself it must be allowed to invoke that tool. Of others' callers the operator asks it.
	const mayNot = `may not invoke the tool "issue-refund", so it registers no intent for it: that takes the verb invoke on agenttools in namespace "support", such as a RoleBinding to the ClusterRole holdfast-agent gives`
	check(t, as(mallory).Create(t.Context(), own(mallory), client.DryRunAll), `user "`+mallory+`" `+mayNot)
	check(t, as(one).Create(t.Context(), own(one), client.DryRunAll), "")
	check(t, as(flux).Create(t.Context(), own(mallory), client.DryRunAll), "")
	grantOn(t, "paymentintents", two, "create")
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "invokes-one-tool"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"guardrails.holdfast.dev"}, Resources: []string{"agenttools"}, ResourceNames: []string{"issue-refund"}, Verbs: []string{"invoke"}},
	}}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: two}},
	}
	for _, o := range []client.Object{role, binding} {
		if err := admin.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mustDelete(t, o) })
	}
	if err := poll(t.Context(), func() error { return as(two).Create(t.Context(), own(two), client.DryRunAll) }); err != nil {
		t.Errorf("who may invoke that tool alone: %v", err)
	}
	check(t, as(two).Create(t.Context(), own(two, set("spec.toolRef.name", "other")), client.DryRunAll), `may not invoke the tool "other"`)
	o := validIntent("status")
	if err := as(agent).Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDelete(t, o) })
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"verdict":"ALLOW","state":"Succeeded"}}`))
	check(t, as(mallory).Status().Patch(t.Context(), o.DeepCopy(), status, client.DryRunAll), "only the operator (system:serviceaccount:holdfast-system:holdfast-manager) writes the status")
	check(t, admin.Status().Patch(t.Context(), o.DeepCopy(), status, client.DryRunAll), "only the operator")
	check(t, as(operator).Status().Patch(t.Context(), o.DeepCopy(), status, client.DryRunAll), "")
}
