// IdempotencyStore declares where records live.

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IdempotencyStoreSpec says which store keeps the records. Exactly one member is set; which one cannot
// change, since the records would be left behind. With one kind of store, the first rule says both.
//
// +kubebuilder:validation:XValidation:rule="has(self.embedded)",message="exactly one kind of store must be set, and it cannot be removed: set embedded"
type IdempotencyStoreSpec struct {
	// embedded keeps the records in a file inside the operator's own single process: the store for a first run
	// and for one replica. The file is the one that the process was started with.
	// +optional
	Embedded *EmbeddedStore `json:"embedded,omitempty"`
}

// EmbeddedStore has no settings: the place of the file belongs to the process, not to the namespace.
type EmbeddedStore struct{}

// IdempotencyStoreStatus is what the operator has seen of the store.
type IdempotencyStoreStatus struct {
	// observedGeneration is the generation of the spec that this status speaks of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// epoch names the store's memory. It is written at the store's first use, and another epoch means another memory.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Epoch string `json:"epoch,omitempty"`

	// conditions are Ready and EpochAccepted, and Stalled or Reconciling only while they are true.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// IdempotencyStore declares where records live.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,shortName=idem,categories=guardrails
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Epoch",type=string,JSONPath=`.status.epoch`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 40",message="the name of an IdempotencyStore has at most 40 characters"
type IdempotencyStore struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the object's standard metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec says which store keeps the records.
	// +required
	Spec IdempotencyStoreSpec `json:"spec"`

	// status is what the operator has seen of the store.
	// +optional
	// +kubebuilder:default={conditions: {{type: "Ready", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "EpochAccepted", status: "Unknown", reason: "Pending", message: "Waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status IdempotencyStoreStatus `json:"status,omitzero"`
}

// IdempotencyStoreList is a list of IdempotencyStores.
//
// +kubebuilder:object:root=true
type IdempotencyStoreList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []IdempotencyStore `json:"items"`
}
