// The rules of a tool that deny, as the API server enforces them: held to the same table as the gateway.

package crd

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/admission"
	"github.com/holdfast-dev/holdfast/internal/admission/ruletest"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// intentOf is the PaymentIntent that shows a call.
func intentOf(name string, c *guard.Call) *unstructured.Unstructured {
	scope := make([]any, len(c.Scope))
	for i, p := range c.Scope {
		scope[i] = string(p)
	}
	spec := map[string]any{"toolRef": map[string]any{"name": c.Tool}, "caller": c.Caller, "intentID": c.IntentID, "scope": scope}
	for field, value := range map[string]string{"lineage": string(c.Lineage), "recipient": c.Recipient, "fingerprint": c.Fingerprint} {
		if value != "" {
			spec[field] = value
		}
	}
	if c.Amount != nil {
		spec["amount"] = map[string]any{"value": c.Amount.Value, "currency": c.Amount.Currency}
	}
	o := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	o.SetAPIVersion(v1alpha1.GroupVersion.String())
	o.SetKind("PaymentIntent")
	o.SetNamespace(c.Namespace)
	o.SetName(name)
	return o
}

// enforce applies the policies of a tool with these rules.
func enforce(t *testing.T, tool types.NamespacedName, rules []v1alpha1.AdmissionRule) {
	t.Helper()
	p := admission.Render(&v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: tool.Namespace, Name: tool.Name}, Spec: v1alpha1.AgentToolSpec{Admission: rules},
	}, admission.Operator{Namespace: "holdfast-system", Username: operator})
	if p == nil {
		t.Fatal("there is nothing to enforce")
	}
	if err := errors.Join(admin.Apply(t.Context(), p.Policy, client.FieldOwner("test"), client.ForceOwnership),
		admin.Apply(t.Context(), p.Binding, client.FieldOwner("test"), client.ForceOwnership)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, kind := range []string{"ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"} {
			o := &unstructured.Unstructured{}
			o.SetAPIVersion("admissionregistration.k8s.io/v1")
			o.SetKind(kind)
			o.SetName(*p.Policy.Name)
			mustDelete(t, o)
		}
	})
}

func TestTheAPIServerSaysWhatTheGatewaySays(t *testing.T) {
	// Each row has a tool of its own, so that one wait is enough for all.
	cases := ruletest.Cases()
	last := v1alpha1.AdmissionRule{Expression: "object.spec.intentID != 'probe'", Message: "it is in force", Action: v1alpha1.AdmissionDeny}
	for i := range cases {
		c := &cases[i]
		c.Call.Tool = fmt.Sprintf("ruled-%d", i)
		for j := range c.Rules {
			c.Rules[j].Expression = v1alpha1.AdmissionExpression(strings.ReplaceAll(string(c.Rules[j].Expression), ruletest.Tool, c.Call.Tool))
		}
		c.Denied = strings.ReplaceAll(c.Denied, ruletest.Tool, c.Call.Tool)
		enforce(t, types.NamespacedName{Namespace: c.Call.Namespace, Name: c.Call.Tool}, append(c.Rules, last))
	}
	name := func(c *ruletest.Case) string {
		return admission.Name(types.NamespacedName{Namespace: c.Call.Namespace, Name: c.Call.Tool})
	}
	for i := range cases {
		c := &cases[i]
		probe := c.Call
		probe.IntentID = "probe"
		if err := poll(t.Context(), func() error {
			err := admin.Create(t.Context(), intentOf("probe", &probe), client.DryRunAll)
			if err == nil || !strings.Contains(err.Error(), name(c)) {
				return errors.Join(errors.New("the policy is not in force"), err)
			}
			return nil
		}); err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		t.Run(c.Name, func(t *testing.T) {
			err := admin.Create(t.Context(), intentOf("ruled", &c.Call), client.DryRunAll)
			_, said, _ := strings.Cut(fmt.Sprint(err), "ValidatingAdmissionPolicy '"+name(c)+"' with binding '"+name(c)+"' denied request: ")
			switch {
			case c.Denied == "" && err != nil:
				t.Errorf("should pass, got %v", err)
			case c.Denied != "" && said != c.Denied:
				t.Errorf("says %q (%v), should say %q", said, err, c.Denied)
			case c.Denied != "" && !strings.HasPrefix(c.Denied, "expression ") && !apierrors.IsForbidden(err):
				t.Errorf("should be forbidden: %v", err)
			}
			// The operator shows what is on the record, whatever the rules say now.
			if c.Denied != "" {
				if err := as(operator, "system:masters").Create(t.Context(), intentOf("ruled", &c.Call), client.DryRunAll); err != nil && strings.Contains(err.Error(), name(c)) {
					t.Errorf("the operator is refused: %v", err)
				}
			}
		})
	}
	// Another tool, and the same tool in another namespace, are not asked.
	denied := ruletest.Case{}
	for _, c := range cases {
		if c.Denied == ruletest.Message {
			denied = c
		}
	}
	for what, change := range map[string]func(*guard.Call){
		"another tool":      func(c *guard.Call) { c.Tool = "not-ruled" },
		"another namespace": func(c *guard.Call) { c.Namespace = metav1.NamespaceDefault },
	} {
		c := denied.Call
		change(&c)
		if err := admin.Create(t.Context(), intentOf("ruled", &c), client.DryRunAll); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
