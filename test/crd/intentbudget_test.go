package crd

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

var someLimit = map[string]any{
	"name": "daily", "currency": "USD", "limit": "500.00", "window": "24h", "per": "object.spec.caller", "onExceed": "Deny",
}

// limit has one limit, with these fields and without those.
func limit(with map[string]any, without ...string) []change {
	l := maps.Clone(someLimit)
	maps.Copy(l, with)
	for _, field := range without {
		delete(l, field)
	}
	return []change{set("spec.spend", []any{l})}
}

// limits has n limits, with names made of this.
func limits(n int, name string) []change {
	out := make([]any, n)
	for i := range out {
		l := maps.Clone(someLimit)
		l["name"] = name
		if strings.Contains(name, "%") {
			l["name"] = fmt.Sprintf(name, i)
		}
		out[i] = l
	}
	return []change{set("spec.spend", out)}
}

func TestIntentBudget(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IntentBudget
spec:
  storeRef: {name: payments}
  overlap: {window: 72h, exactMatch: Replay, lineage: Compare, lookalike: {window: 2m}}
  spend:
  - {name: daily, currency: USD, limit: "500.00", window: 24h, per: object.spec.caller, onExceed: Deny}
  maxHeld: {total: 100, perCaller: 20}
  holds: {expireAfter: 72h}
`)
	creating(t, strict(), valid, []tableCase{
		{"only what is required", []change{remove("spec.overlap"), remove("spec.spend"), remove("spec.maxHeld")}, ""},
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
		{"lookalike without a window", []change{set("spec.overlap.lookalike", map[string]any{})}, "spec.overlap.lookalike.window: Required value"},
		{"lookalike window too short", []change{set("spec.overlap.lookalike.window", "900ms")}, "window must be between 1s and 8760h"},
		{"lookalike window too long", []change{set("spec.overlap.lookalike.window", "8761h")}, "window must be between 1s and 8760h"},
		{"holds that never expire", []change{remove("spec.holds")}, ""},
		{"holds without a time", []change{remove("spec.holds.expireAfter")}, "spec.holds.expireAfter: Required value"},
		{"holds that expire at once", []change{set("spec.holds.expireAfter", "900ms")}, "expireAfter must be between 1s and 8760h"},
		{"holds that expire too late", []change{set("spec.holds.expireAfter", "8761h")}, "expireAfter must be between 1s and 8760h"},
		{"no limits", []change{set("spec.spend", []any{})}, ""},
		{"a limit for the whole budget, denying", limit(nil, "per", "onExceed"), ""},
		{"a limit that holds", limit(map[string]any{"onExceed": "Hold"}), ""},
		{"a limit in a token", limit(map[string]any{"currency": "USDC/6", "limit": "0.000001"}), ""},
		{"a limit of nothing", limit(map[string]any{"limit": "0"}), ""},
		{"a limit without a name", limit(nil, "name"), "spec.spend[0].name: Required value"},
		{"a limit with a bad name", limit(map[string]any{"name": "Daily Limit"}), "spec.spend[0].name in body should match"},
		{"a limit without a currency", limit(nil, "currency"), "spec.spend[0].currency: Required value"},
		{"a limit without an amount", limit(nil, "limit"), "spec.spend[0].limit: Required value"},
		{"a limit that is a number", limit(map[string]any{"limit": int64(500)}), "must be of type string"},
		{"a limit with an exponent", limit(map[string]any{"limit": "5e2"}), "spec.spend[0].limit in body should match"},
		{"a limit with a sign", limit(map[string]any{"limit": "-1"}), "spec.spend[0].limit in body should match"},
		{"a limit without a window", limit(nil, "window"), "spec.spend[0].window: Required value"},
		{"a limit's window too short", limit(map[string]any{"window": "900ms"}), "window must be between 1s and 8760h"},
		{"a limit's window too long", limit(map[string]any{"window": "8761h"}), "window must be between 1s and 8760h"},
		{"a limit with an empty per", limit(map[string]any{"per": ""}), "spec.spend[0].per"},
		{"a limit with a misspelt field", limit(map[string]any{"onExeed": "Hold"}), `unknown field "spec.spend[0].onExeed"`},
		{"onExceed that does not exist", limit(map[string]any{"onExceed": "Allow"}), `Unsupported value: "Allow"`},
		{"a name given twice", limits(2, "same"), "Duplicate value"},
		{"8 limits", limits(8, "l%d"), ""},
		{"9 limits", limits(9, "l%d"), "must have at most 8 items"},
		{"perCaller alone", []change{remove("spec.maxHeld.total"), set("spec.maxHeld.perCaller", int64(500))}, ""},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"another window", []change{set("spec.overlap.window", "24h")}, ""},
		{"holds that expire later", []change{set("spec.holds.expireAfter", "96h")}, ""},
		{"other limits", limit(map[string]any{"limit": "1", "window": "1h"}), ""},
		{"optional blocks removed", []change{remove("spec.overlap"), remove("spec.spend"), remove("spec.maxHeld")}, ""},
		{"another store", []change{set("spec.storeRef.name", "other")}, "storeRef is immutable"},
		{"the store removed", []change{remove("spec.storeRef")}, "spec.storeRef: Required value"},
	})
}
