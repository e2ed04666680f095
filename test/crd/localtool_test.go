package crd

import "testing"

func TestLocalAgentTool(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: AgentTool
spec:
  effect: Mutating
  intentBudgetRef: {name: refunds}
  upstream:
    local: {lease: 30s, renewFor: 15m, settleAfter: 1m}
  identity:
    intentID: ['call.header["idempotency-key"]']
    scope: ['path("order", call.body.orderId)']
  idempotency: {key: {none: {}}}
  unknownOutcome: Hold
  retryBudget: {attempts: 3}
  concurrency: {maxInFlight: 10}
  rateLimit: {requests: 100, per: 1m}
`)
	const local = "spec.upstream.local."
	creating(t, strict(), valid, []tableCase{
		{"only what is required", []change{
			remove(local + "lease"), remove(local + "renewFor"), remove("spec.unknownOutcome"), remove("spec.retryBudget"),
			remove("spec.concurrency"), remove("spec.rateLimit")}, ""},
		{"no settleAfter", []change{remove(local + "settleAfter")}, "spec.upstream.local.settleAfter: Required value"},
		{"an HTTP upstream, too", []change{set("spec.upstream.http", map[string]any{"url": "http://crm/x", "methods": []any{"POST"}, "settleAfter": "1m"})}, "exactly one kind of upstream must be set"},
		{"a lease too short", []change{set(local+"lease", "500ms")}, "lease must be between 1s and 5m"},
		{"a lease too long", []change{set(local+"lease", "6m")}, "lease must be between 1s and 5m"},
		{"renewFor too short", []change{set(local+"renewFor", "0s")}, "renewFor must be between 1s and 24h"},
		{"renewFor too long", []change{set(local+"renewFor", "25h")}, "renewFor must be between 1s and 24h"},
		{"settleAfter too short", []change{set(local+"settleAfter", "1ms")}, "settleAfter must be between 100ms and 720h"},
		{"a lease that is no duration", []change{set(local+"lease", "long")}, "should match"},
		{"a misspelt field", []change{set(local+"leases", "1m")}, `unknown field "spec.upstream.local.leases"`},
		{"a key in a header", []change{remove("spec.idempotency.key.none"), set("spec.idempotency.key.header", "Idempotency-Key")}, "set idempotency.key to none"},
		{"outcomes", []change{set("spec.outcomes", []any{map[string]any{"status": "402", "outcome": "Failed"}})}, "remove outcomes and statusCheck"},
		{"a status check", []change{set("spec.unknownOutcome", "StatusCheck"), set("spec.statusCheck", map[string]any{"outcome": `"Unknown"`, "finality": "SettleAfter"})}, "remove outcomes and statusCheck"},
		{"an attempt's timeout", []change{set("spec.retryBudget.perAttemptTimeout", "1s")}, "use upstream.local.lease"},
		{"ReadOnly", []change{
			set("spec.effect", "ReadOnly"), remove("spec.intentBudgetRef"), remove("spec.identity"), remove("spec.idempotency"), remove("spec.unknownOutcome"),
			remove("spec.retryBudget"), remove("spec.concurrency"), remove("spec.rateLimit")}, "a local tool must be Mutating"},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"another lease", []change{set(local+"lease", "1m")}, ""},
		{"the settling time removed", []change{remove(local + "settleAfter")}, "spec.upstream.local.settleAfter: Required value"},
	})
}
