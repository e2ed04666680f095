// PaymentHold is the face in the cluster of one hold of a record. The record in the store is the truth:
// the object says what a person needs to know to decide, and carries the decision back.

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ToolReference names an AgentTool in the same namespace.
type ToolReference struct {
	// name of the AgentTool, in the namespace of the object that refers to it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// HoldPath is a path of a scope.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=2048
type HoldPath string

// Money is an exact amount. It is text, since a float or a Quantity would change it.
type Money struct {
	// value is the exact decimal, in the currency itself.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^(0|[1-9][0-9]*)(\.[0-9]+)?$`
	Value string `json:"value"`

	// currency is an ISO 4217 code; for a token its name and exponent, such as USDC/6.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9][A-Za-z0-9.:/_%-]*$`
	Currency string `json:"currency"`
}

// HoldRecord names the write that made a hold. A resolution is taken only by the record of this write.
type HoldRecord struct {
	// epoch of the store under which the hold was made.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Epoch string `json:"epoch"`

	// nonce of the write that made the hold.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Nonce string `json:"nonce"`
}

// HoldReason says why an intent is held.
//
// +kubebuilder:validation:Enum=ScopeOverlap;LineageOverlap;ExactMatch;Lookalike;OutcomeUnknown;KeyExpired;IdentityChanged;BudgetExceeded;ApprovalRequired
type HoldReason string

const (
	// HoldScopeOverlap says that another intent is for the same thing, or for a part of it.
	HoldScopeOverlap HoldReason = "ScopeOverlap"
	// HoldLineageOverlap says that another intent comes from the same place.
	HoldLineageOverlap HoldReason = "LineageOverlap"
	// HoldExactMatch says that the same call was made under another intent ID.
	HoldExactMatch HoldReason = "ExactMatch"
	// HoldOutcomeUnknown says that an attempt was sent and nobody knows whether it moved anything.
	HoldOutcomeUnknown HoldReason = "OutcomeUnknown"
	// HoldKeyExpired says that the intent ID was used, and its answer is gone; beside OutcomeUnknown, that the provider may have forgotten the
	// key of the attempt. A release sends it under a new key.
	HoldKeyExpired HoldReason = "KeyExpired"
	// HoldIdentityChanged says that an equal payment was made before the tool's identity changed.
	HoldIdentityChanged HoldReason = "IdentityChanged"
	// HoldLookalike says that a payment with the same recipient and amount was made a short time before.
	HoldLookalike HoldReason = "Lookalike"
	// HoldBudgetExceeded says that the payment would exceed a limit of the budget's spend.
	HoldBudgetExceeded HoldReason = "BudgetExceeded"
	// HoldApprovalRequired says that a rule of the tool's admission wants a person to decide.
	HoldApprovalRequired HoldReason = "ApprovalRequired"
)

// HoldMatch is a record that stands in the way of the held intent.
type HoldMatch struct {
	// caller whose intent it is.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Caller string `json:"caller"`

	// tool that was called.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Tool string `json:"tool"`

	// intentID of the intent.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	IntentID string `json:"intentID"`

	// relation says how the two meet, such as equal scopes.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Relation string `json:"relation,omitempty"`

	// amount that it moves. Absent when the tool declares none.
	// +optional
	Amount *Money `json:"amount,omitempty"`

	// state of its record when the hold was made.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	State string `json:"state,omitempty"`

	// at is when its record last changed before the hold was made.
	// +optional
	At *metav1.Time `json:"at,omitempty"`
}

// HoldDecision is what a person decides about a hold.
//
// +kubebuilder:validation:Enum=Release;Reject;MarkPaid;MarkFailed
type HoldDecision string

const (
	// DecisionRelease permits the intent: the next identical call is sent, once.
	DecisionRelease HoldDecision = "Release"
	// DecisionReject refuses the intent for good.
	DecisionReject HoldDecision = "Reject"
	// DecisionMarkPaid says that the payment happened.
	DecisionMarkPaid HoldDecision = "MarkPaid"
	// DecisionMarkFailed says that nothing moved.
	DecisionMarkFailed HoldDecision = "MarkFailed"
)

// HoldResolution is what a person says of a hold.
//
// +kubebuilder:validation:XValidation:rule="self.decision != 'MarkPaid' || has(self.providerReference)",message="MarkPaid needs providerReference: the provider's own name of the payment"
// +kubebuilder:validation:XValidation:rule="self.decision == 'MarkPaid' || !(has(self.providerReference) || has(self.result))",message="providerReference and result are for MarkPaid only"
type HoldResolution struct {
	// decision is Release, Reject, MarkPaid or MarkFailed. Release permits the intent: the next identical call is sent, once.
	// Reject refuses it for good. MarkPaid says that the payment happened, and the agent gets result as its answer.
	// MarkFailed says that nothing moved, where an attempt's outcome is unknown.
	// +required
	Decision HoldDecision `json:"decision,omitempty"`

	// reason says why, for the next person and for the agent.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Reason string `json:"reason,omitempty"`

	// by is the name of the user who decided. The API server stamps it; it need not be given, and no other name is accepted.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	By string `json:"by,omitempty"`

	// providerReference is the provider's own name of the payment. Required for MarkPaid.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ProviderReference string `json:"providerReference,omitempty"`

	// result is JSON text that agents get as the answer of a payment that was marked as paid. At most 8192 bytes; only for MarkPaid.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=8192
	// +kubebuilder:validation:Pattern=`^\s*(\{[\s\S]*\}|\[[\s\S]*\]|"[^\n]*"|-?[0-9][0-9.eE+-]*|true|false|null)\s*$`
	Result string `json:"result,omitempty"`
}

// PaymentHoldSpec is what was held and why, as it was then, and the resolution.
//
// +kubebuilder:validation:XValidation:rule="self.toolRef == oldSelf.toolRef && self.caller == oldSelf.caller && self.intentID == oldSelf.intentID && self.hold == oldSelf.hold && self.scope == oldSelf.scope && self.record == oldSelf.record && self.reasons == oldSelf.reasons",message="spec says what was held and cannot change: only resolution can be set, once"
// +kubebuilder:validation:XValidation:rule="has(self.lineage) == has(oldSelf.lineage) && (!has(self.lineage) || self.lineage == oldSelf.lineage) && has(self.amount) == has(oldSelf.amount) && (!has(self.amount) || self.amount == oldSelf.amount) && has(self.recipient) == has(oldSelf.recipient) && (!has(self.recipient) || self.recipient == oldSelf.recipient)",message="spec says what was held and cannot change: only resolution can be set, once"
// +kubebuilder:validation:XValidation:rule="has(self.fingerprint) == has(oldSelf.fingerprint) && (!has(self.fingerprint) || self.fingerprint == oldSelf.fingerprint) && has(self.matches) == has(oldSelf.matches) && (!has(self.matches) || self.matches == oldSelf.matches) && has(self.matchCount) == has(oldSelf.matchCount) && (!has(self.matchCount) || self.matchCount == oldSelf.matchCount)",message="spec says what was held and cannot change: only resolution can be set, once"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.resolution) || (has(self.resolution) && self.resolution == oldSelf.resolution)",message="resolution is set already and cannot be changed or removed: if it cannot be taken, the operator makes a new hold"
type PaymentHoldSpec struct {
	// toolRef names the AgentTool that was called.
	// +required
	ToolRef ToolReference `json:"toolRef,omitzero"`

	// caller is the user name of the ServiceAccount that called.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Caller string `json:"caller,omitempty"`

	// intentID is the name that the agent gave the intent.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	IntentID string `json:"intentID,omitempty"`

	// hold is the number of this hold of the record. A record can be held again, under a higher number.
	// +required
	// +kubebuilder:validation:Minimum=1
	Hold int64 `json:"hold,omitempty"`

	// scope is what the money is for.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Scope []HoldPath `json:"scope,omitempty"`

	// lineage is where the intent comes from. Absent when the call had none.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	Lineage string `json:"lineage,omitempty"`

	// amount is what the intent moves. Absent when the tool declares none.
	// +optional
	Amount *Money `json:"amount,omitempty"`

	// recipient is who is paid. Absent when the tool declares none.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	Recipient string `json:"recipient,omitempty"`

	// fingerprint is the digest of the canonical call without its volatile fields. Absent where the intent was registered without one and
	// never called.
	// +optional
	// +kubebuilder:validation:MaxLength=71
	// +kubebuilder:validation:Pattern=`^sha256:[0-9a-f]{64}$`
	Fingerprint string `json:"fingerprint,omitempty"`

	// record names the write that made this hold: a resolution is taken only by the record of that write.
	// +required
	Record HoldRecord `json:"record,omitzero"`

	// reasons are all that hold the intent; a release covers exactly these.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=9
	Reasons []HoldReason `json:"reasons,omitempty"`

	// matches are the records that stand in the way, the most telling first and at most 32 of them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Matches []HoldMatch `json:"matches,omitempty"`

	// matchCount is how many records stand in the way, also those that matches does not list.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MatchCount *int32 `json:"matchCount,omitempty"`

	// resolution is what a person says of this hold. It can be set once, by a user with the verb resolve who is not the caller.
	// +optional
	Resolution *HoldResolution `json:"resolution,omitempty"`
}

// HoldState is where a hold stands.
//
// +kubebuilder:validation:Enum=Held;Waiting;Resolved;Void
type HoldState string

const (
	// HoldHeld is a hold that a person can resolve.
	HoldHeld HoldState = "Held"
	// HoldWaiting is a hold whose payment may not be visible at the provider yet: only Reject and MarkPaid act.
	HoldWaiting HoldState = "Waiting"
	// HoldResolved is a hold whose resolution was taken.
	HoldResolved HoldState = "Resolved"
	// HoldVoid is a hold that was overtaken, by a result or by a newer hold.
	HoldVoid HoldState = "Void"
)

// HoldSummary is a hold as one line of a worklist.
type HoldSummary struct {
	// amount is what the intent moves, with its currency, such as 49.99 USD. Absent when the tool declares none.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Amount string `json:"amount,omitempty"`

	// reasons are all that hold the intent, in one text, such as ScopeOverlap,Lookalike.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Reasons string `json:"reasons,omitempty"`

	// overlaps is the intent that stands most in the way, with its state, and how many more there are: plan-1/call-1 (Succeeded) and 2 more.
	// Absent when nothing stands in the way.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Overlaps string `json:"overlaps,omitempty"`
}

// HoldSentence is a line of a hold's explanation.
//
// +kubebuilder:validation:MaxLength=1024
type HoldSentence string

// PaymentHoldStatus is where the hold stands, as the record says.
type PaymentHoldStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// state is Held while a person can resolve the hold; Waiting while the payment may not be visible at the provider yet, so that only Reject and
	// MarkPaid act; Resolved when a resolution was taken; Void when a result or a newer hold overtook it.
	// +optional
	State HoldState `json:"state,omitempty"`

	// waitingUntil is when the payment would be visible at the provider if it was made. Present while state is Waiting.
	// +optional
	WaitingUntil *metav1.Time `json:"waitingUntil,omitempty"`

	// effect says what came of the hold, in a sentence.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Effect string `json:"effect,omitempty"`

	// cause says why the intent is held again, where an earlier hold of the record did not end it, or which limit of the budget it would exceed.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Cause string `json:"cause,omitempty"`

	// summary is the hold as kubectl get shows it.
	// +optional
	Summary *HoldSummary `json:"summary,omitempty"`

	// explanation says in sentences what is held, why and what can be done, and shows the intent beside those that stand in its way.
	// Long values are shortened there; spec has them whole.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Explanation []HoldSentence `json:"explanation,omitempty"`

	// conditions are Ready, Held and Resolved, and RefundOwed only once it is true. Ready says that this status tells how the hold stands.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PaymentHold is an intent that waits for a person. Only the operator makes one.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=hold;holds,categories=guardrails
// +kubebuilder:selectablefield:JSONPath=`.spec.toolRef.name`
// +kubebuilder:selectablefield:JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Tool",type=string,JSONPath=`.spec.toolRef.name`
// +kubebuilder:printcolumn:name="Intent",type=string,JSONPath=`.spec.intentID`
// +kubebuilder:printcolumn:name="Amount",type=string,JSONPath=`.status.summary.amount`
// +kubebuilder:printcolumn:name="Reasons",type=string,JSONPath=`.status.summary.reasons`
// +kubebuilder:printcolumn:name="Overlaps",type=string,JSONPath=`.status.summary.overlaps`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Recipient",type=string,JSONPath=`.spec.recipient`,priority=1
// +kubebuilder:printcolumn:name="Caller",type=string,JSONPath=`.spec.caller`,priority=1
// +kubebuilder:printcolumn:name="Scope",type=string,JSONPath=`.spec.scope`,priority=1
// +kubebuilder:printcolumn:name="Decision",type=string,JSONPath=`.spec.resolution.decision`,priority=1
// +kubebuilder:printcolumn:name="By",type=string,JSONPath=`.spec.resolution.by`,priority=1
type PaymentHold struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what was held and why, and the resolution.
	// +required
	Spec PaymentHoldSpec `json:"spec"`

	// status is where the hold stands.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Held", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Resolved", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status PaymentHoldStatus `json:"status,omitzero"`
}

// PaymentHoldList is a list of PaymentHolds.
//
// +kubebuilder:object:root=true
type PaymentHoldList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []PaymentHold `json:"items"`
}
