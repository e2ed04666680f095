// Package v1alpha1 holds the kinds of guardrails.holdfast.dev/v1alpha1, types only.
//
// No field of a spec has a schema default: a GitOps tool would see a permanent difference.
// Where a field is optional its comment names the effective value, which internal/policy computes.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +kubebuilder:ac:output:package=../applyconfiguration
// +groupName=guardrails.holdfast.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the one API group of the project.
const GroupName = "guardrails.holdfast.dev"

var (
	// GroupVersion is the group and version of the kinds in this package.
	GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

	// SchemeGroupVersion is GroupVersion under the name that generated apply configurations expect.
	SchemeGroupVersion = GroupVersion

	schemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme adds the kinds in this package to a scheme.
	AddToScheme = schemeBuilder.AddToScheme
)

func addKnownTypes(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&AgentTool{}, &AgentToolList{},
		&IdempotencyStore{}, &IdempotencyStoreList{},
		&IntentBudget{}, &IntentBudgetList{},
		&PaymentHold{}, &PaymentHoldList{},
		&PaymentIntent{}, &PaymentIntentList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
