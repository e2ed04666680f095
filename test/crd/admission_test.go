// Who may make and resolve a PaymentHold, as the shipped admission policies and roles say together.

package crd

import (
	"fmt"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	release  = "Release"
	forAudit = "confirmed with the customer"
)

func decided(decision string) map[string]any {
	return map[string]any{"decision": decision, "reason": forAudit}
}

// held makes a hold, as the operator does.
func held(t *testing.T, name string, status map[string]any, changes ...change) *unstructured.Unstructured {
	t.Helper()
	hold := validHold(name)
	for _, change := range changes {
		change(hold.Object)
	}
	if err := as(operator).Create(t.Context(), hold); err != nil {
		t.Fatalf("the operator should be able to make a hold: %v", err)
	}
	t.Cleanup(func() { mustDelete(t, hold) })
	if status != nil {
		writeStatus(t, hold, status)
	}
	return hold
}

// grant gives a user rights on PaymentHolds in the tests' namespace.
func grant(t *testing.T, user string, verbs ...string) {
	t.Helper()
	grantOn(t, "paymentholds", user, verbs...)
}

// grantOn gives a user rights on a resource in the tests' namespace.
func grantOn(t *testing.T, resource, user string, verbs ...string) {
	t.Helper()
	name := strings.ReplaceAll(strings.ToLower(t.Name()+"-"+resource+"-"+user), "/", "-")
	name = strings.NewReplacer("_", "-", ":", "-", "'", "", ",", "").Replace(name)
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	role := &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"guardrails.holdfast.dev"}, Resources: []string{resource}, Verbs: verbs}}}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	}
	for _, o := range []client.Object{role, binding} {
		if err := admin.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mustDelete(t, o) })
	}
	// The authorizer sees a new binding a moment later.
	name, sub, _ := strings.Cut(resource, "/")
	if err := poll(t.Context(), func() error {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{
				Group: "guardrails.holdfast.dev", Resource: name, Subresource: sub, Verb: verbs[0], Namespace: namespace,
			},
		}}
		if err := admin.Create(t.Context(), review); err != nil {
			return err
		}
		if !review.Status.Allowed {
			return fmt.Errorf("%s may not %s %s yet", user, verbs[0], resource)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestAResolverReleasesAHold(t *testing.T) {
	hold := held(t, "released", map[string]any{"state": "Held"})
	out, errOut, err := kubectl(t.Context(), "patch", "hold", hold.GetName(), "--namespace", namespace, "--as", alice, "--type", "merge",
		"-p", `{"spec":{"resolution":{"decision":"Release","reason":"second item, confirmed with customer"}}}`)
	if err != nil {
		t.Fatalf("%v: %s%s", err, out, errOut)
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(hold), hold); err != nil {
		t.Fatal(err)
	}
	by, _, _ := unstructured.NestedString(hold.Object, "spec", "resolution", "by")
	if by != alice {
		t.Errorf("the resolution should be stamped with %q, is by %q", alice, by)
	}

	// It is a person's word, once.
	grant(t, "carol", "get", "patch", "resolve")
	const once = "resolution is set already and cannot be changed or removed"
	for _, tc := range []struct {
		name, user string
		patch      map[string]any
		want       string
	}{
		{"the same again, by the same user", alice, map[string]any{"decision": release, "reason": "second item, confirmed with customer"}, ""},
		{"another decision by the same user", alice, map[string]any{"decision": "Reject"}, once},
		{"another decision by another user", "carol", decided("Reject"), once},
		{"another name", "carol", map[string]any{"by": "carol"}, once},
		{"another reason", alice, map[string]any{"reason": "other"}, once},
		{"removed", alice, nil, once},
		{"changed by the operator", operator, map[string]any{"reason": "other"}, once},
	} {
		t.Run(tc.name, func(t *testing.T) {
			check(t, as(tc.user).Patch(t.Context(), hold.DeepCopy(), resolve(tc.patch), client.DryRunAll), tc.want)
		})
	}
	t.Run("other parts of a resolved hold can change", func(t *testing.T) {
		labelled := hold.DeepCopy()
		labelled.SetLabels(map[string]string{"seen": "true"})
		check(t, as("carol").Patch(t.Context(), labelled, client.MergeFrom(hold), client.DryRunAll), "")
		writeStatus(t, hold, map[string]any{"state": "Resolved"})
	})
}

func TestAnAppliedResolutionCanBeAppliedAgain(t *testing.T) {
	hold := held(t, "applied", map[string]any{"state": "Held"})
	applied := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": hold.GetAPIVersion(), "kind": hold.GetKind(),
		"metadata": map[string]any{"name": hold.GetName(), "namespace": hold.GetNamespace()},
		"spec":     map[string]any{"resolution": decided("Reject")},
	}}
	var versions []string
	for range 2 {
		if err := apply(t.Context(), as(alice), applied.DeepCopy()); err != nil {
			t.Fatal(err)
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(hold), hold); err != nil {
			t.Fatal(err)
		}
		versions = append(versions, hold.GetResourceVersion())
	}
	if by, _, _ := unstructured.NestedString(hold.Object, "spec", "resolution", "by"); by != alice {
		t.Errorf("the resolution should be by %q, is by %q", alice, by)
	}
	if versions[0] != versions[1] {
		t.Error("applying the same again should change nothing")
	}
}

func TestWhoMayResolve(t *testing.T) {
	hold := held(t, "who", map[string]any{"state": "Held"})
	grant(t, "bob", "get", "list", "watch", "patch", "update")
	grant(t, agent, "get", "patch", "resolve")
	forged := decided(release)
	forged["by"] = "bob"
	own := decided(release)
	own["by"] = alice
	for _, tc := range []struct {
		name, user string
		patch      map[string]any
		want       string
	}{
		{"a resolver", alice, decided(release), ""},
		{"a resolver who gives the own name", alice, own, ""},
		{"a user without any right", "mallory", decided(release), `User "mallory" cannot patch resource "paymentholds"`},
		{"a user who may edit but not resolve", "bob", decided(release), `user "bob" may not resolve this hold: it takes the verb resolve on paymentholds in namespace "support"`},
		{"a user who may edit but not resolve, in another's name", "bob", own, `user "bob" may not resolve this hold`},
		{"the operator", operator, decided(release), `may not resolve this hold`},
		{"the hold's own caller, although it has the verb", agent, decided(release), "the caller of a payment cannot resolve its own hold: another user with the verb resolve must decide"},
		{"a resolver in another's name", alice, forged, `spec.resolution.by must be "alice", who is asking: leave it out, or, where the API server does not write it, give that name`},
		{"a resolver who becomes the caller's stand-in", alice, map[string]any{"decision": release, "reason": forAudit, "by": agent}, `spec.resolution.by must be "alice"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			check(t, as(tc.user).Patch(t.Context(), hold.DeepCopy(), resolve(tc.patch), client.DryRunAll), tc.want)
		})
	}
}

func TestWhatMayBeDecidedWhen(t *testing.T) {
	unknown := set("spec.reasons", []any{"OutcomeUnknown"})
	waiting := map[string]any{"state": "Waiting", "waitingUntil": "2026-01-02T03:04:05Z"}
	const (
		notYet = "is not possible before 2026-01-02T03:04:05Z: the payment was sent and may still become visible at the provider"
		unseen = "is not possible yet: the payment was sent"
		known  = "MarkFailed is for a hold with the reason OutcomeUnknown"
		over   = "and waits for nobody: if the intent is held again, there is a newer hold to resolve"
	)
	for i, tc := range []struct {
		state  string
		status map[string]any
		change change
		want   map[string]string
	}{
		{"unknown outcome, waiting", waiting, unknown, map[string]string{"Release": "Release " + notYet, "MarkFailed": "MarkFailed " + notYet, "Reject": "", "MarkPaid": ""}},
		{"unknown outcome, not looked at yet", nil, unknown, map[string]string{"Release": "Release " + unseen, "MarkFailed": "MarkFailed " + unseen, "Reject": "", "MarkPaid": ""}},
		{"unknown outcome, held", map[string]any{"state": "Held"}, unknown, map[string]string{"Release": "", "MarkFailed": "", "Reject": "", "MarkPaid": ""}},
		{"overlap, not looked at yet", nil, nil, map[string]string{"Release": "", "MarkFailed": known, "Reject": "", "MarkPaid": ""}},
		{"overlap, held", map[string]any{"state": "Held"}, nil, map[string]string{"Release": "", "MarkFailed": known, "Reject": "", "MarkPaid": ""}},
		// An attempt of it may be unknown, and released: the record knows.
		{"overlap, a later hold", map[string]any{"state": "Held"}, set("spec.hold", int64(2)), map[string]string{"Release": "", "MarkFailed": "", "Reject": ""}},
		{"void", map[string]any{"state": "Void"}, nil, map[string]string{"Release": "this hold is Void " + over, "Reject": "this hold is Void " + over}},
		{"resolved", map[string]any{"state": "Resolved"}, nil, map[string]string{"Release": "this hold is Resolved " + over}},
	} {
		t.Run(tc.state, func(t *testing.T) {
			var changes []change
			if tc.change != nil {
				changes = append(changes, tc.change)
			}
			hold := held(t, "when-"+string(rune('a'+i)), tc.status, changes...)
			for decision, want := range tc.want {
				patch := decided(decision)
				if decision == "MarkPaid" {
					patch["providerReference"] = "re_1"
				}
				t.Run(decision, func(t *testing.T) {
					check(t, as(alice).Patch(t.Context(), hold.DeepCopy(), resolve(patch), client.DryRunAll), want)
				})
			}
		})
	}
}

func TestOnlyTheOperatorMakesHolds(t *testing.T) {
	const onlyOperator = "only the operator (system:serviceaccount:holdfast-system:holdfast-manager) makes a PaymentHold and writes its status"
	resolved := validHold("made")
	for _, change := range append(resolution(release), set("spec.resolution.by", operator)) {
		change(resolved.Object)
	}
	t.Run("an admin", func(t *testing.T) {
		check(t, admin.Create(t.Context(), validHold("made"), client.DryRunAll), onlyOperator)
	})
	t.Run("a ServiceAccount of the same name elsewhere", func(t *testing.T) {
		check(t, as("system:serviceaccount:support:holdfast-manager", "system:masters").Create(t.Context(), validHold("made"), client.DryRunAll), onlyOperator)
	})
	t.Run("an admin, by server-side apply", func(t *testing.T) {
		check(t, apply(t.Context(), admin, validHold("made")), onlyOperator)
	})
	t.Run("the operator", func(t *testing.T) {
		check(t, as(operator).Create(t.Context(), validHold("made"), client.DryRunAll), "")
	})
	t.Run("the operator, with a resolution", func(t *testing.T) {
		check(t, as(operator).Create(t.Context(), resolved, client.DryRunAll), "a PaymentHold cannot be made with a resolution")
	})

	hold := held(t, "status", map[string]any{"state": "Waiting"})
	t.Run("a status that an admin writes", func(t *testing.T) {
		changed := hold.DeepCopy()
		set("status.state", "Held")(changed.Object)
		check(t, admin.Status().Update(t.Context(), changed, client.DryRunAll), onlyOperator)
	})
	t.Run("an admin deletes", func(t *testing.T) {
		check(t, admin.Delete(t.Context(), hold.DeepCopy(), client.DryRunAll), "")
	})
}

// What the policies read stays inside this project's group, so that a fault in them can never stop the cluster.
func TestPoliciesMatchThisGroupOnly(t *testing.T) {
	policies := 0
	for _, o := range rendered {
		group := o.GroupVersionKind().Group
		if group != "admissionregistration.k8s.io" {
			continue
		}
		switch o.GetKind() {
		case "ValidatingAdmissionPolicy", "MutatingAdmissionPolicy":
		case "ValidatingAdmissionPolicyBinding", "MutatingAdmissionPolicyBinding":
			continue
		default:
			t.Errorf("%s %s: no webhooks, and nothing else", o.GetKind(), o.GetName())
			continue
		}
		policies++
		if p, _, _ := unstructured.NestedString(o.Object, "spec", "failurePolicy"); p != "Fail" {
			t.Errorf("%s %s: failurePolicy is %q, want Fail", o.GetKind(), o.GetName(), p)
		}
		rules, _, err := unstructured.NestedSlice(o.Object, "spec", "matchConstraints", "resourceRules")
		if err != nil || len(rules) == 0 {
			t.Errorf("%s %s: no rules: %v", o.GetKind(), o.GetName(), err)
		}
		for _, rule := range rules {
			groups, _, err := unstructured.NestedStringSlice(rule.(map[string]any), "apiGroups")
			if err != nil || len(groups) != 1 || groups[0] != "guardrails.holdfast.dev" {
				t.Errorf("%s %s: matches groups %v (%v)", o.GetKind(), o.GetName(), groups, err)
			}
			resources, _, err := unstructured.NestedStringSlice(rule.(map[string]any), "resources")
			if err != nil || len(resources) == 0 || strings.Contains(strings.Join(resources, " "), "*") {
				t.Errorf("%s %s: matches resources %v (%v)", o.GetKind(), o.GetName(), resources, err)
			}
		}
	}
	if policies != 5 {
		t.Errorf("found %d policies, want 5", policies)
	}
}
