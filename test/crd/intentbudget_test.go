package crd

import "testing"

func TestIntentBudget(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IntentBudget
spec:
  storeRef: {name: payments}
  overlap: {window: 72h, exactMatch: Replay, lineage: Compare}
  maxHeld: {total: 100, perCaller: 20}
`)
	creating(t, strict(), valid, []tableCase{
		{"only what is required", []change{remove("spec.overlap"), remove("spec.maxHeld")}, ""},
		{"empty blocks", []change{set("spec.overlap", map[string]any{}), set("spec.maxHeld", map[string]any{})}, ""},
		{"the other words", []change{set("spec.overlap.exactMatch", "Hold"), set("spec.overlap.lineage", "Ignore")}, ""},
		{"name of 63 characters", []change{set("metadata.name", letters(63))}, ""},
		{"name of 64 characters", []change{set("metadata.name", letters(64))}, "the name of an IntentBudget has at most 63 characters"},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"no store", []change{remove("spec.storeRef")}, "spec.storeRef: Required value"},
		{"no name of a store", []change{remove("spec.storeRef.name")}, "spec.storeRef.name: Required value"},
		{"empty name of a store", []change{set("spec.storeRef.name", "")}, "spec.storeRef.name"},
		{"name of a store too long", []change{set("spec.storeRef.name", letters(41))}, "may not be more than 40"},
		{"name of a store in upper case", []change{set("spec.storeRef.name", "Payments")}, "spec.storeRef.name in body should match"},
		{"a store in another namespace", []change{set("spec.storeRef.namespace", "default")}, `unknown field "spec.storeRef.namespace"`},
		{"a misspelt field", []change{set("spec.maxHold", map[string]any{})}, `unknown field "spec.maxHold"`},
		{"exactMatch that does not exist", []change{set("spec.overlap.exactMatch", "Allow")}, `Unsupported value: "Allow"`},
		{"lineage that does not exist", []change{set("spec.overlap.lineage", "None")}, `Unsupported value: "None"`},
		{"window of 1m", []change{set("spec.overlap.window", "1m")}, ""},
		{"window in several units", []change{set("spec.overlap.window", "1h30m0.5s")}, ""},
		{"window too short", []change{set("spec.overlap.window", "59s")}, "window must be between 1m and 8760h"},
		{"window too long", []change{set("spec.overlap.window", "8761h")}, "window must be between 1m and 8760h"},
		{"window negative", []change{set("spec.overlap.window", "-1h")}, "spec.overlap.window in body should match"},
		{"window without unit", []change{set("spec.overlap.window", "72")}, "spec.overlap.window in body should match"},
		{"window in days", []change{set("spec.overlap.window", "3d")}, "spec.overlap.window in body should match"},
		{"total of none", []change{set("spec.maxHeld.total", int64(0))}, "spec.maxHeld.total in body should be greater than or equal to 1"},
		{"total too great", []change{set("spec.maxHeld.total", int64(10001))}, "spec.maxHeld.total in body should be less than or equal to 10000"},
		{"perCaller of none", []change{set("spec.maxHeld.perCaller", int64(0))}, "spec.maxHeld.perCaller in body should be greater than or equal to 1"},
		{"perCaller above total", []change{set("spec.maxHeld.perCaller", int64(101))}, "perCaller must not be greater than total"},
		{"perCaller alone", []change{remove("spec.maxHeld.total"), set("spec.maxHeld.perCaller", int64(500))}, ""},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"another window", []change{set("spec.overlap.window", "24h")}, ""},
		{"optional blocks removed", []change{remove("spec.overlap"), remove("spec.maxHeld")}, ""},
		{"another store", []change{set("spec.storeRef.name", "other")}, "storeRef is immutable"},
		{"the store removed", []change{remove("spec.storeRef")}, "spec.storeRef: Required value"},
	})
}
