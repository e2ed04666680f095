// PaymentIntent is an intent that is written down before it is sent. The record in the store is the truth:
// the object registers it, once, and shows what became of it. Deleting the object changes nothing of that.

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PaymentIntentSpec is what is to be paid. It never changes: another payment is another intent.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec cannot change: another payment is another PaymentIntent, with an intentID of its own"
type PaymentIntentSpec struct {
	// toolRef names the AgentTool that will be called.
	// +required
	ToolRef ToolReference `json:"toolRef,omitzero"`

	// caller is the user name of the ServiceAccount that will call, such as system:serviceaccount:support:agent. The ServiceAccount must exist.
	// It must be allowed to invoke the tool. Whoever makes the object must be this caller, or have the verb register-for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^system:serviceaccount:[a-z0-9]([-a-z0-9]*[a-z0-9])?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Caller string `json:"caller,omitempty"`

	// intentID is the name under which the intent will be called. The first call under it must be for the same scope, amount and recipient.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	IntentID string `json:"intentID,omitempty"`

	// scope is what the money is for: 1 to 16 paths, as the tool's identity would build them, such as account/a1/order/9.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Scope []HoldPath `json:"scope,omitempty"`

	// lineage is where the intent comes from, one path. When absent, the first call says it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	Lineage string `json:"lineage,omitempty"`

	// amount is what the intent moves. Required if the tool's identity reads an amount, and absent if it reads none.
	// +optional
	Amount *Money `json:"amount,omitempty"`

	// recipient is who is paid. Absent if the tool's identity reads none.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Recipient string `json:"recipient,omitempty"`

	// fingerprint is the digest of the canonical call without its volatile fields. When absent, the first call says it.
	// +optional
	// +kubebuilder:validation:MaxLength=71
	// +kubebuilder:validation:Pattern=`^sha256:[0-9a-f]{64}$`
	Fingerprint string `json:"fingerprint,omitempty"`

	// quote is the offer that is to be paid, as whoever made it calls it. It is kept with the intent.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Quote string `json:"quote,omitempty"`

	// validUntil is when the intent can no longer be sent, to the second. Effective value when absent, and at the latest: the ttl of the
	// tool's idempotency after it was registered.
	// +optional
	ValidUntil *metav1.Time `json:"validUntil,omitempty"`
}

// IntentVerdict is what a call of the intent would be told.
//
// +kubebuilder:validation:Enum=ALLOW;REPLAY;IN_FLIGHT;CONFLICT;DENY;UNKNOWN_HOLD
type IntentVerdict string

const (
	// IntentAllow says that a call of the intent is sent, if nothing has come in its way since.
	IntentAllow IntentVerdict = "ALLOW"
	// IntentReplay says that a call of the intent gets the answer that was given before.
	IntentReplay IntentVerdict = "REPLAY"
	// IntentInFlight says that the intent is being paid.
	IntentInFlight IntentVerdict = "IN_FLIGHT"
	// IntentConflict says that the intentID belongs to another request.
	IntentConflict IntentVerdict = "CONFLICT"
	// IntentDeny says that the intent is refused.
	IntentDeny IntentVerdict = "DENY"
	// IntentUnknownHold says that a person must decide.
	IntentUnknownHold IntentVerdict = "UNKNOWN_HOLD"
)

// IntentState is where the record of an intent stands.
//
// +kubebuilder:validation:Enum=Registered;InFlight;Retryable;Pending;Held;Released;Succeeded;Failed;Rejected
type IntentState string

const (
	// IntentRegistered was never sent.
	IntentRegistered IntentState = "Registered"
	// IntentStateInFlight has an attempt that is being made.
	IntentStateInFlight IntentState = "InFlight"
	// IntentRetryable was tried, and nothing moved.
	IntentRetryable IntentState = "Retryable"
	// IntentPending was accepted by the upstream and is not final.
	IntentPending IntentState = "Pending"
	// IntentHeld waits for a person.
	IntentHeld IntentState = "Held"
	// IntentReleased was permitted by a person: the next call is sent, once.
	IntentReleased IntentState = "Released"
	// IntentSucceeded was paid.
	IntentSucceeded IntentState = "Succeeded"
	// IntentFailed has moved nothing, and is not tried again.
	IntentFailed IntentState = "Failed"
	// IntentRejected is never sent: a person has refused it, or its time was over before it was.
	IntentRejected IntentState = "Rejected"
)

// PaymentIntentStatus is where the intent stands, as the record says.
type PaymentIntentStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// verdict is what a call of the intent would be told now. Absent before the intent was registered, and once its record is gone.
	// +optional
	Verdict IntentVerdict `json:"verdict,omitempty"`

	// state is where the record stands. Absent while there is none: before the intent was registered, and where it was refused.
	// Once the record is gone it is the state in which it was last seen.
	// +optional
	State IntentState `json:"state,omitempty"`

	// hold is the name of the PaymentHold of the intent, the newest one.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Hold string `json:"hold,omitempty"`

	// attempts is how often the intent was sent.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Attempts *int32 `json:"attempts,omitempty"`

	// providerReference is the provider's own name of the payment, once it is known.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	ProviderReference string `json:"providerReference,omitempty"`

	// conditions are Admitted, Settled and Ready; Stalled only while it is true, and RefundOwed once it is.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PaymentIntent is an intent that was written down before it is sent, with kubectl, from Git or by an agent.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=pint,categories=guardrails
// +kubebuilder:selectablefield:JSONPath=`.spec.toolRef.name`
// +kubebuilder:selectablefield:JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Tool",type=string,JSONPath=`.spec.toolRef.name`
// +kubebuilder:printcolumn:name="Intent",type=string,JSONPath=`.spec.intentID`
// +kubebuilder:printcolumn:name="Amount",type=string,JSONPath=`.spec.amount.value`
// +kubebuilder:printcolumn:name="Currency",type=string,JSONPath=`.spec.amount.currency`
// +kubebuilder:printcolumn:name="Verdict",type=string,JSONPath=`.status.verdict`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Recipient",type=string,JSONPath=`.spec.recipient`,priority=1
// +kubebuilder:printcolumn:name="Caller",type=string,JSONPath=`.spec.caller`,priority=1
// +kubebuilder:printcolumn:name="Hold",type=string,JSONPath=`.status.hold`,priority=1
// +kubebuilder:printcolumn:name="Reference",type=string,JSONPath=`.status.providerReference`,priority=1
type PaymentIntent struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what is to be paid.
	// +required
	Spec PaymentIntentSpec `json:"spec"`

	// status is where the intent stands.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Admitted", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Settled", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status PaymentIntentStatus `json:"status,omitzero"`
}

// PaymentIntentList is a list of PaymentIntents.
//
// +kubebuilder:object:root=true
type PaymentIntentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []PaymentIntent `json:"items"`
}
