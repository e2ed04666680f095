package admission

import (
	"reflect"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func TestNames(t *testing.T) {
	seen := map[string]types.NamespacedName{}
	for _, tool := range []types.NamespacedName{
		{Namespace: "a", Name: "bc"}, {Namespace: "ab", Name: "c"}, {Namespace: "abc", Name: ""}, {Namespace: "1", Name: "1:a"}, {Namespace: "11", Name: ":a"},
	} {
		name := Name(tool)
		if other, ok := seen[name]; ok {
			t.Errorf("%s and %s have the same name", tool, other)
		}
		seen[name] = tool
		if len(name) > 63 || strings.ToLower(name) != name {
			t.Errorf("%s is no name", name)
		}
	}
}

// Whoever writes another tool's name on a policy does not have that one removed or mended.
func TestAPolicyBelongsToTheToolOfItsName(t *testing.T) {
	tool := types.NamespacedName{Namespace: "support", Name: "refund"}
	for annotation, want := range map[string]bool{"support/refund": true, "support/other": false, "support": false, "": false, "/": false} {
		o := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: Name(tool), Annotations: map[string]string{toolAnnotation: annotation}}}
		if got, ok := ToolOf(o); ok != want || ok && got != tool {
			t.Errorf("%q: %s, %t", annotation, got, ok)
		}
	}
}

func TestRulesThatHoldAreNoPolicy(t *testing.T) {
	tool := &v1alpha1.AgentTool{Spec: v1alpha1.AgentToolSpec{Admission: []v1alpha1.AdmissionRule{{Expression: "true", Message: "a", Action: v1alpha1.AdmissionHold}}}}
	if p := Render(tool, Operator{}); p != nil {
		t.Errorf("%+v", p)
	}
}

func TestWarningsSpeakOfTheToolsSpec(t *testing.T) {
	deny, hold := v1alpha1.AdmissionDeny, v1alpha1.AdmissionHold
	tool := &v1alpha1.AgentTool{Spec: v1alpha1.AgentToolSpec{Admission: []v1alpha1.AdmissionRule{{Action: hold}, {Action: deny}, {Action: hold}, {Action: deny}}}}
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Generation: 2}}
	policy.Status = admissionv1.ValidatingAdmissionPolicyStatus{ObservedGeneration: 2, TypeChecking: &admissionv1.TypeChecking{ExpressionWarnings: []admissionv1.ExpressionWarning{
		{FieldRef: "spec.validations[0].expression", Warning: "a\n"}, {FieldRef: "spec.validations[1].expression", Warning: "b"}, {FieldRef: "spec.elsewhere", Warning: "c"},
	}}}
	want := []string{"spec.admission[1].expression: a", "spec.admission[3].expression: b", "spec.elsewhere: c"}
	if got := Warnings(policy, tool); !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// What was said of an earlier one is no news.
	policy.Generation = 3
	if got := Warnings(policy, tool); got != nil {
		t.Errorf("%q", got)
	}
}
