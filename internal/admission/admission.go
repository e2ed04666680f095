// Package admission turns the rules of an AgentTool that deny into what the API server
// enforces: a ValidatingAdmissionPolicy and its binding, for the creation of that tool's
// PaymentIntents in that namespace.
//
// A policy is cluster-scoped, so no tool can own it. It is named by a hash of the tool, its
// annotations say whose it is, and its label says which installation made it; one whose tool
// is gone is found by that label. The operator's namespace owns it, so that an installation
// that is taken away leaves none behind. Nothing carries a finalizer: a policy that is left
// matches objects of a tool that does not exist, and nothing else.
//
// It is a fence. Whoever registers an intent asks the same rules again.
package admission

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	admissionv1ac "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	// Label is on all that is made here; its value is the namespace of the operator that made it.
	Label = v1alpha1.GroupName + "/admission-of"
	// toolAnnotation names the tool, as namespace/name.
	toolAnnotation = v1alpha1.GroupName + "/agenttool"
)

// Operator is the installation that makes policies.
type Operator struct {
	// Namespace is its own.
	Namespace string
	// Username is what the API server calls it. It has asked the rules before it makes a
	// PaymentIntent, and what is registered already must be shown whatever they say now.
	Username string
}

// Policies are what enforces one tool's rules.
type Policies struct {
	Policy  *admissionv1ac.ValidatingAdmissionPolicyApplyConfiguration
	Binding *admissionv1ac.ValidatingAdmissionPolicyBindingApplyConfiguration
}

// GoWith has both collected when the operator's namespace is deleted.
func (p *Policies) GoWith(namespace *corev1.Namespace) {
	owner := func() *metav1ac.OwnerReferenceApplyConfiguration {
		return metav1ac.OwnerReference().WithAPIVersion("v1").WithKind("Namespace").WithName(namespace.Name).WithUID(namespace.UID)
	}
	p.Policy.WithOwnerReferences(owner())
	p.Binding.WithOwnerReferences(owner())
}

// Name is that of a tool's policy and binding.
func Name(tool types.NamespacedName) string {
	sum := sha256.Sum256([]byte(strconv.Itoa(len(tool.Namespace)) + ":" + tool.Namespace + tool.Name))
	digits := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
	return "holdfast-agenttool-" + strings.ToLower(digits[:26])
}

// ToolOf is the tool that a policy or a binding belongs to.
func ToolOf(o client.Object) (types.NamespacedName, bool) {
	namespace, name, ok := strings.Cut(o.GetAnnotations()[toolAnnotation], "/")
	tool := types.NamespacedName{Namespace: namespace, Name: name}
	return tool, ok && o.GetName() == Name(tool)
}

// Render gives what enforces the rules of a tool that deny; nil: it has none.
func Render(tool *v1alpha1.AgentTool, by Operator) *Policies {
	var validations []*admissionv1ac.ValidationApplyConfiguration
	for i := range tool.Spec.Admission {
		if r := &tool.Spec.Admission[i]; r.Action == v1alpha1.AdmissionDeny {
			validations = append(validations, admissionv1ac.Validation().
				WithExpression(string(r.Expression)).WithMessage(strings.TrimSpace(r.Message)).WithReason(metav1.StatusReasonForbidden))
		}
	}
	if len(validations) == 0 {
		return nil
	}
	nn := client.ObjectKeyFromObject(tool)
	name := Name(nn)
	labels := map[string]string{Label: by.Namespace}
	annotations := map[string]string{toolAnnotation: nn.String()}
	// The conditions read only what is there: one in error would refuse every PaymentIntent of the namespace.
	mine := fmt.Sprintf("has(object.spec) && has(object.spec.toolRef) && has(object.spec.toolRef.name) && object.spec.toolRef.name == %s", strconv.Quote(nn.Name))
	policy := admissionv1ac.ValidatingAdmissionPolicy(name).WithLabels(labels).WithAnnotations(annotations).
		WithSpec(admissionv1ac.ValidatingAdmissionPolicySpec().
			WithFailurePolicy(admissionv1.Fail).
			WithMatchConstraints(admissionv1ac.MatchResources().
				WithNamespaceSelector(metav1ac.LabelSelector().WithMatchLabels(map[string]string{"kubernetes.io/metadata.name": nn.Namespace})).
				WithResourceRules(admissionv1ac.NamedRuleWithOperations().
					WithOperations(admissionv1.Create).
					WithAPIGroups(v1alpha1.GroupName).WithAPIVersions(v1alpha1.GroupVersion.Version).WithResources("paymentintents").
					WithScope(admissionv1.NamespacedScope))).
			WithMatchConditions(
				admissionv1ac.MatchCondition().WithName("tool").WithExpression(mine),
				admissionv1ac.MatchCondition().WithName("not-by-the-operator").
					WithExpression("request.userInfo.username != "+strconv.Quote(by.Username)),
			).
			WithValidations(validations...))
	binding := admissionv1ac.ValidatingAdmissionPolicyBinding(name).WithLabels(labels).WithAnnotations(annotations).
		WithSpec(admissionv1ac.ValidatingAdmissionPolicyBindingSpec().
			WithPolicyName(name).WithValidationActions(admissionv1.Deny))
	return &Policies{policy, binding}
}

// Warnings are what the API server's type check says of a policy, in words of the tool's spec.
func Warnings(policy *admissionv1.ValidatingAdmissionPolicy, tool *v1alpha1.AgentTool) []string {
	if policy.Status.TypeChecking == nil || policy.Status.ObservedGeneration != policy.Generation {
		return nil
	}
	var field []string // of each validation, where it stands in the tool
	for i := range tool.Spec.Admission {
		if tool.Spec.Admission[i].Action == v1alpha1.AdmissionDeny {
			field = append(field, fmt.Sprintf("spec.admission[%d].expression", i))
		}
	}
	var out []string
	for _, w := range policy.Status.TypeChecking.ExpressionWarnings {
		at := w.FieldRef
		for i, f := range field {
			if w.FieldRef == fmt.Sprintf("spec.validations[%d].expression", i) {
				at = f
			}
		}
		out = append(out, at+": "+strings.TrimSpace(w.Warning))
	}
	return out
}
