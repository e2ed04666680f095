// IntentBudget declares the domain in which intents are compared and held ones are counted.

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// StoreReference names an IdempotencyStore in the same namespace.
type StoreReference struct {
	// name of the IdempotencyStore, in the namespace of the object that refers to it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Name string `json:"name"`
}

// ExactMatchPolicy says what answers a call that repeats an intent under another intent ID.
//
// +kubebuilder:validation:Enum=Replay;Hold
type ExactMatchPolicy string

const (
	// ExactMatchReplay answers with what is known of the first intent.
	ExactMatchReplay ExactMatchPolicy = "Replay"
	// ExactMatchHold holds the call for a person.
	ExactMatchHold ExactMatchPolicy = "Hold"
)

// LineagePolicy says whether lineages are compared.
//
// +kubebuilder:validation:Enum=Compare;Ignore
type LineagePolicy string

const (
	// LineageCompare holds a call whose lineage is related to that of an intent in its way, also where their scopes are disjoint.
	LineageCompare LineagePolicy = "Compare"
	// LineageIgnore compares scopes alone.
	LineageIgnore LineagePolicy = "Ignore"
)

// OverlapSpec says when two intents of a budget overlap.
type OverlapSpec struct {
	// window is how far back settled intents are compared, from their last attempt, evidence or settlement.
	// Intents that are not settled are compared whatever their age. Between 1m and 8760h; effective value when absent: 72h.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1m') && duration(self) <= duration('8760h')",message="window must be between 1m and 8760h"
	Window *metav1.Duration `json:"window,omitempty"`

	// exactMatch says what answers a call with another intent ID but the same tool, caller, scope, lineage and fingerprint
	// as an intent in its way: Replay answers with what is known of that intent, Hold holds the call. Effective value when absent: Replay.
	// +optional
	ExactMatch ExactMatchPolicy `json:"exactMatch,omitempty"`

	// lineage says whether lineages are compared too: Compare or Ignore. Effective value when absent: Compare.
	// +optional
	Lineage LineagePolicy `json:"lineage,omitempty"`

	// lookalike holds a call with the same recipient and the same amount as an intent in its way, whatever their tools, callers and scopes.
	// Calls without a recipient or an amount are not compared so. When absent, no call is.
	// +optional
	Lookalike *LookalikeSpec `json:"lookalike,omitempty"`
}

// LookalikeSpec says how long a payment is compared with others by recipient and amount alone.
type LookalikeSpec struct {
	// window is how far back settled intents are compared so, from their last attempt, evidence or settlement.
	// Intents that are not settled are compared whatever their age. Between 1s and 8760h.
	// It holds for intents that were sent while lookalike was set.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('8760h')",message="window must be between 1s and 8760h"
	Window metav1.Duration `json:"window"`
}

// ExceedPolicy says what becomes of a call that would exceed a limit.
//
// +kubebuilder:validation:Enum=Deny;Hold
type ExceedPolicy string

const (
	// ExceedDeny denies the call with reason spend_exceeded.
	ExceedDeny ExceedPolicy = "Deny"
	// ExceedHold holds the call for a person, with reason BudgetExceeded.
	ExceedHold ExceedPolicy = "Hold"
)

// SpendLimit is how much money the intents of the budget may move within any window of this length.
type SpendLimit struct {
	// name of the limit, one of its kind in the budget.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`

	// currency is an ISO 4217 code; for a token its name and exponent, such as USDC/6. Nothing is converted: a call in a currency that
	// no limit of the budget has, and a call without an amount, is refused as onExceed says.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9][A-Za-z0-9.:/_%-]*$`
	Currency string `json:"currency"`

	// limit is the exact decimal, in the currency itself.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=41
	// +kubebuilder:validation:Pattern=`^(0|[1-9][0-9]*)(\.[0-9]+)?$`
	Limit string `json:"limit"`

	// window is how long settled spend counts, from its settlement. Spend that is reserved, or whose outcome is unknown, counts whatever
	// its age. Between 1s and 8760h. Another window holds for payments that begin after the change.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('8760h')",message="window must be between 1s and 8760h"
	Window metav1.Duration `json:"window"`

	// per is a CEL expression over object, the intent: object.spec has toolRef.name, caller, intentID, scope, lineage, amount and recipient.
	// It yields a string, and the limit is for each of its values: object.spec.caller is a limit for each caller.
	// When absent, the limit is for the whole budget.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Per string `json:"per,omitempty"`

	// onExceed says what becomes of a call that would exceed the limit: Deny or Hold. A release lets one payment pass it.
	// Effective value when absent: Deny.
	// +optional
	OnExceed ExceedPolicy `json:"onExceed,omitempty"`
}

// MaxHeldSpec bounds the intents that are held and were never sent. What was sent can always be held.
//
// +kubebuilder:validation:XValidation:rule="!has(self.total) || !has(self.perCaller) || self.perCaller <= self.total",message="perCaller must not be greater than total"
type MaxHeldSpec struct {
	// total bounds the held, never-sent intents of the whole budget. Effective value when absent: 100.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	Total *int32 `json:"total,omitempty"`

	// perCaller bounds the held, never-sent intents of one caller. Effective value when absent: 20, or total if that is less.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	PerCaller *int32 `json:"perCaller,omitempty"`
}

// MaxRegisteredSpec bounds the intents that are registered and were never sent.
type MaxRegisteredSpec struct {
	// perCaller bounds those of one caller. Effective value when absent: 1000.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	PerCaller *int32 `json:"perCaller,omitempty"`
}

// HoldsSpec says for how long holds wait for a person.
type HoldsSpec struct {
	// expireAfter is how long a hold waits for a person before its intent is rejected. That is done only while nothing of the intent can
	// have moved: where the outcome of an attempt is unknown, a person decides, however long it takes. Between 1s and 8760h.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('8760h')",message="expireAfter must be between 1s and 8760h"
	ExpireAfter metav1.Duration `json:"expireAfter"`
}

// IntentBudgetSpec says where the budget's records live, and how its intents are compared and bounded.
//
// +kubebuilder:validation:XValidation:rule="self.storeRef == oldSelf.storeRef",message="storeRef is immutable: the budget's memory is in that store"
type IntentBudgetSpec struct {
	// storeRef names the IdempotencyStore, in this namespace, that keeps the budget's records. Immutable.
	// +required
	StoreRef StoreReference `json:"storeRef"`

	// overlap says when two intents overlap. When absent, each of its fields has its effective value.
	// +optional
	Overlap *OverlapSpec `json:"overlap,omitempty"`

	// spend limits how much money the budget's intents move. Each limit is checked with the step that lets an attempt be sent,
	// for all gateways together, and holds in any window of its length.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Spend []SpendLimit `json:"spend,omitempty"`

	// maxHeld bounds the intents that are held and were never sent; beyond it calls are denied with reason too_many_holds.
	// When absent, each of its fields has its effective value.
	// +optional
	MaxHeld *MaxHeldSpec `json:"maxHeld,omitempty"`

	// maxRegistered bounds the intents that are registered and were never sent; beyond it registrations are denied with reason
	// too_many_registered. When absent, its field has its effective value.
	// +optional
	MaxRegistered *MaxRegisteredSpec `json:"maxRegistered,omitempty"`

	// holds says for how long holds wait for a person. When absent, for as long as it takes.
	// +optional
	Holds *HoldsSpec `json:"holds,omitempty"`
}

// IntentBudgetStatus is what the operator has seen of the budget.
type IntentBudgetStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// held is how many intents of the budget are held and were never sent: what maxHeld bounds.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Held *int32 `json:"held,omitempty"`

	// spend is what counts against each limit of spec.spend now.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Spend []SpendStatus `json:"spend,omitempty"`

	// conditions are Ready, and Stalled or Reconciling only while they are true.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SpendStatus is what counts against one limit. Of a limit with per it is the sum over all values.
type SpendStatus struct {
	// name of the limit.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// currency of the amounts.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=128
	Currency string `json:"currency"`

	// used is what was settled and has not left the window yet.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Used string `json:"used"`

	// reserved is what is in flight, or whose outcome is not known. It does not age.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Reserved string `json:"reserved"`

	// limit is that of spec.spend: for used and reserved together, or, with per, for each value.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Limit string `json:"limit"`

	// per is that of spec.spend: the limit is for each of its values.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Per string `json:"per,omitempty"`
}

// IntentBudget is the domain in which intents are compared and held ones are counted.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=ibudget,categories=guardrails
// +kubebuilder:printcolumn:name="Store",type=string,JSONPath=`.spec.storeRef.name`
// +kubebuilder:printcolumn:name="Held",type=integer,JSONPath=`.status.held`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="the name of an IntentBudget has at most 63 characters"
type IntentBudget struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec says where the budget's records live, and how its intents are compared and bounded.
	// +required
	Spec IntentBudgetSpec `json:"spec"`

	// status is what the operator has seen of the budget.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status IntentBudgetStatus `json:"status,omitzero"`
}

// IntentBudgetList is a list of IntentBudgets.
//
// +kubebuilder:object:root=true
type IntentBudgetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []IntentBudget `json:"items"`
}
