// What an AgentTool says of unknown outcomes: whether a person decides, the provider is asked, or the same request is sent again.

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// UnknownOutcome says who decides about an attempt whose outcome is unknown.
//
// +kubebuilder:validation:Enum=Hold;StatusCheck;Resume
type UnknownOutcome string

const (
	// UnknownHold leaves it to a person.
	UnknownHold UnknownOutcome = "Hold"
	// UnknownStatusCheck asks the provider first.
	UnknownStatusCheck UnknownOutcome = "StatusCheck"
	// UnknownResume sends the same request again under the same key of a provider that deduplicates.
	UnknownResume UnknownOutcome = "Resume"
)

// CheckFinality says when a payment is final.
//
// +kubebuilder:validation:Enum=SettleAfter;Unbounded
type CheckFinality string

const (
	// FinalitySettleAfter: within settleAfter it is visible at the provider, or never will be.
	FinalitySettleAfter CheckFinality = "SettleAfter"
	// FinalityUnbounded: it may take longer.
	FinalityUnbounded CheckFinality = "Unbounded"
)

// ProviderDeduplication says that the provider moves money once for a key, however often it comes, also at the same moment and while a payment is
// only accepted, and for how long. It is the provider's promise: a tool whose provider does not keep it pays twice.
type ProviderDeduplication struct {
	// window is how long the provider knows a key, at the least, counted from the first request with it. As the provider's documentation has it:
	// Stripe removes keys once they are at least 24 hours old (https://docs.stripe.com/api/idempotent_requests); the IETF draft
	// draft-ietf-httpapi-idempotency-key-header has every resource publish its own expiry. Where it is counted from the first answer, or in days,
	// say less. Between 10s and 720h.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('10s') && duration(self) <= duration('720h')",message="window must be between 10s and 720h"
	Window metav1.Duration `json:"window"`
}

// CheckExpression is a CEL expression over the variable intent: key (the provider's key that was sent), providerReference, id, scope
// (a list of paths), lineage, amount (value and currency) and recipient.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
type CheckExpression string

// CheckAnswerExpression is a CEL expression over the variables intent and response: status, header and body of the check's answer.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
type CheckAnswerExpression string

// CheckParameter is a parameter of a check's query.
type CheckParameter struct {
	// name of the parameter.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_.\[\]-]+$`
	Name string `json:"name,omitempty"`

	// value yields the parameter's value, a string or a number.
	// +required
	Value CheckExpression `json:"value,omitempty"`
}

// CheckBackoff says how long to wait between two checks.
//
// +kubebuilder:validation:XValidation:rule="!has(self.initial) || !has(self.max) || duration(self.initial) <= duration(self.max)",message="max must not be less than initial"
type CheckBackoff struct {
	// initial is the wait before the first check. Between 100ms and 1h; effective value when absent: 1s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('1h')",message="initial must be between 100ms and 1h"
	Initial *metav1.Duration `json:"initial,omitempty"`

	// factor is how many times longer the wait becomes with each check. Between 1 and 10; effective value when absent: 2.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10
	Factor *int32 `json:"factor,omitempty"`

	// max is how long the wait becomes at most. Between 100ms and 24h; effective value when absent: 1m, or initial if that is more.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('24h')",message="max must be between 100ms and 24h"
	Max *metav1.Duration `json:"max,omitempty"`
}

// StatusCheck says how the provider is asked what became of an attempt whose outcome is unknown: by a GET to the tool's own upstream,
// with the tool's own credential.
type StatusCheck struct {
	// path yields the path on the upstream's host, such as path("refunds", intent.key): each argument is one segment and is escaped.
	// Effective value when absent: the path of upstream.http.url.
	// +optional
	Path CheckExpression `json:"path,omitempty"`

	// query are the parameters of the query. Path, query or outcome must read intent: otherwise the answer would not be about this payment.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Query []CheckParameter `json:"query,omitempty"`

	// outcome yields what the answer means: "Succeeded", it was paid; "Failed", nothing moved and nothing will; "Pending", accepted but not final;
	// "Unknown". An expression that fails means Unknown, and so does an answer that does not come. Succeeded counts at once, and only of an
	// answer 2xx; Failed only of an answer 2xx, 404 or 410, after the lease, a grace and settleAfter, and if two checks a grace apart say the same.
	// +required
	Outcome CheckAnswerExpression `json:"outcome,omitempty"`

	// providerReference yields the provider's own name of the payment, where it was found. Effective value when absent: the member id of a JSON object.
	// +optional
	ProviderReference CheckAnswerExpression `json:"providerReference,omitempty"`

	// finality is SettleAfter if a payment is visible at the provider, or never will be, within upstream.http.settleAfter, also one that was
	// only accepted (202). It is Unbounded if an accepted payment may be processed for longer: then Failed never counts, and a hold whose outcome
	// is unknown cannot be released. Nobody but the tool's owner can know it.
	// +required
	Finality CheckFinality `json:"finality,omitempty"`

	// timeout is how long one check may take. Between 100ms and 1m; effective value when absent: 5s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('1m')",message="timeout must be between 100ms and 1m"
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// backoff is how long to wait between two checks. When absent, each of its fields has its effective value.
	// +optional
	Backoff *CheckBackoff `json:"backoff,omitempty"`

	// deadline is how long the provider is asked after settleAfter is over. Then a person decides; a payment that was accepted is held.
	// Between 1s and 720h; effective value when absent: 24h.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('720h')",message="deadline must be between 1s and 720h"
	Deadline *metav1.Duration `json:"deadline,omitempty"`
}
