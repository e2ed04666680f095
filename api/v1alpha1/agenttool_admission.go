// This file is about the admission rules of a tool: what may be paid at all, and what a person decides.

package v1alpha1

// AdmissionAction says what becomes of an intent that does not pass a rule.
//
// +kubebuilder:validation:Enum=Deny;Hold
type AdmissionAction string

const (
	// AdmissionDeny denies it, with reason denied_by_rule.
	AdmissionDeny AdmissionAction = "Deny"
	// AdmissionHold holds it for a person, with reason ApprovalRequired.
	AdmissionHold AdmissionAction = "Hold"
)

// AdmissionExpression is CEL over object, the intent as a PaymentIntent shows it.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
type AdmissionExpression string

// AdmissionRule is one rule that an intent must pass before it is sent.
type AdmissionRule struct {
	// expression is CEL that yields true for an intent that passes. It reads object.metadata.namespace and the fields of object.spec,
	// with the functions of the API server's admission policies; a field that is absent is asked for with has(). Amounts are text:
	// compare them with quantity(). An expression that fails denies, whatever its action is.
	// +required
	Expression AdmissionExpression `json:"expression,omitempty"`

	// message says to people and agents, in one line, what the rule is for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^[^\n\r]*[^\s][^\n\r]*$`
	Message string `json:"message,omitempty"`

	// action is what becomes of an intent that does not pass: Deny or Hold.
	// +required
	Action AdmissionAction `json:"action,omitempty"`
}
