// A local tool runs inside its agent: between a claim and a settlement, the agent itself moves the money.

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// LocalUpstream is a tool that its agent runs itself.
type LocalUpstream struct {
	// lease is how long the agent may run after a claim, and again after each renewal, before it must have stopped. Whoever dies while it
	// runs is noticed after that time. Between 1s and 5m; effective value when absent: 30s.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('5m')",message="lease must be between 1s and 5m"
	Lease *metav1.Duration `json:"lease,omitempty"`

	// renewFor is how long after its claim an attempt's lease may be renewed. Between 1s and 24h; effective value when absent: 15m.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="renewFor must be between 1s and 24h"
	RenewFor *metav1.Duration `json:"renewFor,omitempty"`

	// settleAfter is the longest time from the end of the lease until a payment is visible in the provider's ledger or never will be. An attempt
	// whose outcome is unknown can be released or marked as failed only after it. Nobody but the tool's owner can know it; between 100ms and 720h.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(\.[0-9]{1,3})?(h|m|s)|[0-9]{1,6}ms){1,4}$`
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('720h')",message="settleAfter must be between 100ms and 720h"
	SettleAfter metav1.Duration `json:"settleAfter,omitzero"`
}
