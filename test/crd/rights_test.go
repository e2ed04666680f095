// What each of the shipped identities may do, whole: as the API server lists it, compared with a table. A right more
// or a right less fails, so that nobody gets one without a line here.

package crd

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// rightsOf lists what a user may do in a namespace that not everybody may.
func rightsOf(t *testing.T, user, in string) string {
	t.Helper()
	own := listRights(t, user, in)
	for right := range listRights(t, "system:serviceaccount:nobody:nobody", in) {
		delete(own, right)
	}
	var lines string
	for right := range own {
		verb, resource, _ := strings.Cut(right, " ")
		lines += resource + ": " + verb + "\n"
	}
	return verbsOf(lines)
}

// verbsOf brings lines of rights into one form: one for each resource, in order.
func verbsOf(lines string) string {
	verbs := map[string][]string{}
	for line := range strings.Lines(lines) {
		if resource, list, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			verbs[resource] = append(verbs[resource], strings.Fields(list)...)
		}
	}
	var out []string
	for resource, list := range verbs {
		slices.Sort(list)
		out = append(out, resource+": "+strings.Join(slices.Compact(list), " "))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// rightName is a resource with its group and, if it is for some names only, these.
func rightName(group, resource string, names []string) string {
	if group != "" {
		resource += "." + group
	}
	if len(names) > 0 {
		resource += fmt.Sprint(names)
	}
	return resource
}

// listRights gives "verb resource" for each right.
func listRights(t *testing.T, user, in string) map[string]bool {
	t.Helper()
	c := rest.CopyConfig(restConfig)
	c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	if parts := strings.Split(user, ":"); len(parts) == 4 {
		c.Impersonate.Groups = append(c.Impersonate.Groups, "system:serviceaccounts", "system:serviceaccounts:"+parts[2])
	}
	cl, err := client.New(c, client.Options{Scheme: scheme, Mapper: admin.RESTMapper()})
	if err != nil {
		t.Fatal(err)
	}
	review := &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: in}}
	if err := cl.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	if review.Status.Incomplete || review.Status.EvaluationError != "" {
		t.Fatalf("the list is incomplete: %s", review.Status.EvaluationError)
	}
	out := map[string]bool{}
	for _, rule := range review.Status.ResourceRules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					out[verb+" "+rightName(group, resource, rule.ResourceNames)] = true
				}
			}
		}
	}
	for _, rule := range review.Status.NonResourceRules {
		for _, url := range rule.NonResourceURLs {
			for _, verb := range rule.Verbs {
				out[verb+" "+url] = true
			}
		}
	}
	return out
}

func TestTheWholeOfWhatEachMayDo(t *testing.T) {
	for _, tc := range []struct {
		user string
		// everywhere is what it may in every namespace, and also what it may besides in some.
		everywhere string
		also       map[string]string
	}{
		// The controllers, and in an all-in-one the gateway, too. It has neither resolve nor invoke, and reads the Secrets
		// that a namespace's owner gives it.
		{operator, `
agenttools.guardrails.holdfast.dev: get list watch
agenttools/status.guardrails.holdfast.dev: get patch update
intentbudgets.guardrails.holdfast.dev: get list watch
intentbudgets/status.guardrails.holdfast.dev: get patch update
idempotencystores.guardrails.holdfast.dev: get list watch
idempotencystores/status.guardrails.holdfast.dev: get patch update
paymentholds.guardrails.holdfast.dev: create delete get list patch watch
paymentholds/status.guardrails.holdfast.dev: get patch update
paymentintents.guardrails.holdfast.dev: create delete get list watch
paymentintents/status.guardrails.holdfast.dev: get patch update
serviceaccounts: get
validatingadmissionpolicies.admissionregistration.k8s.io: create delete get list patch watch
validatingadmissionpolicybindings.admissionregistration.k8s.io: create delete get list patch watch
namespaces: get
services: get list watch
endpointslices.discovery.k8s.io: get list watch
statefulsets.apps: list watch
networkpolicies.networking.k8s.io: list watch
poddisruptionbudgets.policy: list watch
storageclasses.storage.k8s.io: get
clusters.postgresql.cnpg.io: get
tokenreviews.authentication.k8s.io: create
subjectaccessreviews.authorization.k8s.io: create
events.events.k8s.io: create patch
`, map[string]string{
			"holdfast-system": `
leases.coordination.k8s.io: create delete get list patch update watch
configmaps: create get list patch update watch
events: create patch
secrets: create
secrets[holdfast-request-keys]: get
secrets[holdfast-gateway-ca holdfast-gateway-tls]: get update
`,
			namespace: `
secrets[provider]: get
`,
			// Where the owner lets it run the server of a store.
			deploys: `
secrets: create get update
configmaps: create get patch
services: create patch
statefulsets.apps: create get patch
networkpolicies.networking.k8s.io: create get patch
poddisruptionbudgets.policy: create get patch
persistentvolumeclaims: get patch
pods: get
`,
		}},
		// A gateway on its own writes nothing that others trust.
		{"system:serviceaccount:holdfast-system:holdfast-gateway", `
agenttools.guardrails.holdfast.dev: get list watch
intentbudgets.guardrails.holdfast.dev: get list watch
idempotencystores.guardrails.holdfast.dev: get list watch
paymentholds.guardrails.holdfast.dev: get list watch
namespaces: get
services: get list watch
endpointslices.discovery.k8s.io: get list watch
tokenreviews.authentication.k8s.io: create
subjectaccessreviews.authorization.k8s.io: create
events.events.k8s.io: create patch
`, map[string]string{
			"holdfast-system": `
leases.coordination.k8s.io: create delete get list patch update watch
configmaps[holdfast-memory]: get list watch
secrets[holdfast-request-keys]: get
`,
			deploys: `
secrets[payments-redis]: get
`,
		}},
		{agent, ``, map[string]string{namespace: `
agenttools.guardrails.holdfast.dev: invoke
paymentintents.guardrails.holdfast.dev: create
`}},
		{alice, ``, map[string]string{namespace: `
paymentholds.guardrails.holdfast.dev: get list patch resolve update watch
`}},
		// Who may nothing, may nothing.
		{"mallory", ``, nil},
	} {
		for _, in := range []string{"holdfast-system", namespace, deploys, "default"} {
			t.Run(tc.user+" in "+in, func(t *testing.T) {
				want := verbsOf(tc.everywhere + tc.also[in])
				if got := rightsOf(t, tc.user, in); got != want {
					t.Errorf("is:\n%s\n\nshould be:\n%s", got, want)
				}
			})
		}
	}
}

// What people get with Kubernetes' own roles, and what the roles give that are bound.
func TestTheWholeOfEachRole(t *testing.T) {
	want := map[string]string{
		"holdfast-view": `
paymentintents.guardrails.holdfast.dev: get list watch
agenttools.guardrails.holdfast.dev: get list watch
intentbudgets.guardrails.holdfast.dev: get list watch
idempotencystores.guardrails.holdfast.dev: get list watch
paymentholds.guardrails.holdfast.dev: get list watch
`,
		"holdfast-edit": `
paymentintents.guardrails.holdfast.dev: create delete deletecollection patch update
agenttools.guardrails.holdfast.dev: create delete deletecollection patch update
intentbudgets.guardrails.holdfast.dev: create delete deletecollection patch update
idempotencystores.guardrails.holdfast.dev: create delete deletecollection patch update
`,
		"holdfast-admin": `
paymentholds.guardrails.holdfast.dev: delete deletecollection
clusterroles.rbac.authorization.k8s.io[holdfast-agent holdfast-registrar holdfast-resolver holdfast-store-deployer]: bind
`,
		"holdfast-agent": `
agenttools.guardrails.holdfast.dev: invoke
paymentintents.guardrails.holdfast.dev: create
`,
		"holdfast-registrar": `
paymentintents.guardrails.holdfast.dev: create delete get list patch register-for update watch
`,
		"holdfast-resolver": `
paymentholds.guardrails.holdfast.dev: get list patch resolve update watch
`,
	}
	// What these have is in the table above.
	elsewhere := []string{"holdfast-operator", "holdfast-manager", "holdfast-gateway", deployer}
	for _, r := range roles(t, rendered) {
		if slices.Contains(elsewhere, r.name) {
			continue
		}
		var lines string
		for _, rule := range r.rules {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					lines += rightName(group, resource, rule.ResourceNames) + ": " + strings.Join(rule.Verbs, " ") + "\n"
				}
			}
		}
		if got, want := verbsOf(lines), verbsOf(want[r.name]); got != want {
			t.Errorf("%s is:\n%s\n\nshould be:\n%s", r.name, got, want)
		}
		delete(want, r.name)
	}
	if len(want) > 0 {
		t.Errorf("not found: %v", want)
	}
}

// A binding's role cannot be changed: applying a version whose binding has another role fails over the one before,
// unless it is another binding.
func TestABindingIsNamedForItsRole(t *testing.T) {
	found := 0
	for _, o := range rendered {
		if o.GetKind() != "ClusterRoleBinding" {
			continue
		}
		found++
		role, _, err := unstructured.NestedString(o.Object, "roleRef", "name")
		if err != nil || role != o.GetName() {
			t.Errorf("the ClusterRoleBinding %s is of the role %q (%v)", o.GetName(), role, err)
		}
	}
	if found < 2 {
		t.Fatalf("only %d were found", found)
	}
}
