// What an AgentTool says of its attempts: how an upstream's answer is read, and how often an intent is tried.

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AttemptOutcome is how one attempt ended.
//
// +kubebuilder:validation:Enum=Succeeded;Failed;Retryable;Pending;Unknown
type AttemptOutcome string

const (
	// OutcomeSucceeded: it was done.
	OutcomeSucceeded AttemptOutcome = "Succeeded"
	// OutcomeFailed: nothing moved, for good.
	OutcomeFailed AttemptOutcome = "Failed"
	// OutcomeRetryable: nothing moved; another attempt may.
	OutcomeRetryable AttemptOutcome = "Retryable"
	// OutcomePending: accepted but not final.
	OutcomePending AttemptOutcome = "Pending"
	// OutcomeUnknown: it may have moved.
	OutcomeUnknown AttemptOutcome = "Unknown"
)

// AnswerExpression is a CEL expression over the variable response: status, header and body of a complete answer.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
type AnswerExpression string

// OutcomeRule says how a complete answer of the upstream is read. Exactly one of status and when is set.
//
// +kubebuilder:validation:XValidation:rule="has(self.status) != has(self.when)",message="exactly one of status and when must be set"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || self.outcome != 'Retryable' || self.status.startsWith('4') || self.status == '503'",message="a status says Retryable only where it is 4xx, or 503, which then counts only with Retry-After: of any other answer it is not certain that nothing moved"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || self.outcome != 'Failed' || self.status.startsWith('4')",message="a status alone says Failed only where it is 4xx: write a condition on response.body or response.header in when"
type OutcomeRule struct {
	// status is the answer's status: one, such as 402; a class, such as 5xx; or a range within one class, such as 500-503.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=7
	// +kubebuilder:validation:Pattern=`^([2-5]xx|[2-5][0-9]{2}|2[0-9]{2}-2[0-9]{2}|3[0-9]{2}-3[0-9]{2}|4[0-9]{2}-4[0-9]{2}|5[0-9]{2}-5[0-9]{2})$`
	Status string `json:"status,omitempty"`

	// when yields true for the answers that this rule is for, such as response.body.status == "processing". It reads response.status,
	// response.header (names in lower case) and response.body. One that fails, for example because the answer lacks a field that it reads,
	// makes the outcome Unknown: ask for the field first, with has(). For Failed and Retryable it must read header or body.
	// +optional
	When AnswerExpression `json:"when,omitempty"`

	// outcome is what such an answer means: Succeeded; Failed, nothing moved for good; Retryable, nothing moved and another attempt may;
	// Pending, accepted but not final; Unknown, it may have moved. Of answers 5xx only 503 with Retry-After can be Retryable: others that
	// a rule calls so are Unknown. So are 408, 409 and 425 that a class or range calls Failed or Retryable: name them one by one.
	// +required
	Outcome AttemptOutcome `json:"outcome,omitempty"`
}

// RetryBackoff says how long to wait between two attempts.
type RetryBackoff struct {
	// initial is the longest wait after the first attempt. Between 10ms and 5m; effective value when absent: 200ms.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('10ms') && duration(self) <= duration('5m')",message="initial must be between 10ms and 5m"
	Initial *metav1.Duration `json:"initial,omitempty"`

	// factor is how many times longer the longest wait becomes with each attempt. Between 1 and 10; effective value when absent: 2.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10
	Factor *int32 `json:"factor,omitempty"`

	// max is how long the longest wait becomes at most. Between 10ms and 1h; effective value when absent: 10s, or initial if that is more.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('10ms') && duration(self) <= duration('1h')",message="max must be between 10ms and 1h"
	Max *metav1.Duration `json:"max,omitempty"`
}

// RetryRatio bounds the retries of a tool by its calls, in each gateway process.
type RetryRatio struct {
	// percent is how many retries there may be for 100 intents that were sent for the first time within the last 10 s.
	// Between 0 and 100; effective value when absent: 20.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Percent *int32 `json:"percent,omitempty"`

	// minPerSecond is how many retries there may be within a second however few calls there are. Between 1 and 1000; effective value when absent: 3.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	MinPerSecond *int32 `json:"minPerSecond,omitempty"`
}

// RetryBudget says how often an intent is tried, while every attempt is known to have moved nothing. With it the gateway
// tries again by itself, for as long as the caller waits.
//
// +kubebuilder:validation:XValidation:rule="!has(self.backoff) || !has(self.backoff.initial) || !has(self.backoff.max) || duration(self.backoff.initial) <= duration(self.backoff.max)",message="backoff.max must not be less than backoff.initial"
type RetryBudget struct {
	// attempts is how many attempts an intent has, whoever asks for them and however often gateways restart; a release gives it as many again.
	// Between 1 and 20; effective value when absent: 5.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=20
	Attempts *int32 `json:"attempts,omitempty"`

	// backoff is how long to wait between two attempts: a random time up to initial, then up to factor times that, and so on up to max;
	// at least what the upstream's Retry-After says. When absent, each of its fields has its effective value.
	// +optional
	Backoff *RetryBackoff `json:"backoff,omitempty"`

	// perAttemptTimeout is how long one attempt may take, in the place of upstream.http.timeout, and not more than that.
	// Between 100ms and 5m; effective value when absent: upstream.http.timeout.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('5m')",message="perAttemptTimeout must be between 100ms and 5m"
	PerAttemptTimeout *metav1.Duration `json:"perAttemptTimeout,omitempty"`

	// ratio bounds the tool's retries, those that callers ask for included, by its calls, in each gateway process; beyond it a call is answered 429.
	// When absent, each of its fields has its effective value.
	// +optional
	Ratio *RetryRatio `json:"ratio,omitempty"`
}
