package crd

import "testing"

func TestIdempotencyStore(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  embedded: {}
`)
	creating(t, strict(), valid, []tableCase{
		{"name of 40 characters", []change{set("metadata.name", letters(40))}, ""},
		{"name of 41 characters", []change{set("metadata.name", letters(41))}, "the name of an IdempotencyStore has at most 40 characters"},
		{"no kind of store", []change{remove("spec.embedded")}, "exactly one kind of store must be set"},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"a kind of store that does not exist", []change{set("spec.memory", map[string]any{})}, `unknown field "spec.memory"`},
		{"a setting that does not exist", []change{set("spec.embedded.path", "/data")}, `unknown field "spec.embedded.path"`},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"a label", []change{set("metadata.labels", map[string]any{"team": "support"})}, ""},
		{"the kind of store removed", []change{remove("spec.embedded")}, "exactly one kind of store must be set, and it cannot be removed"},
	})
}
