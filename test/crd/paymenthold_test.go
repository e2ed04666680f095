package crd

import (
	"encoding/json"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// validHold is a hold as the operator makes it.
func validHold(name string) *unstructured.Unstructured {
	o := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: PaymentHold
spec:
  toolRef: {name: issue-refund}
  caller: system:serviceaccount:support:agent
  intentID: sess_abc-4
  hold: 1
  scope: [account/a1/order/9]
  lineage: sess_abc/call-4
  amount: {value: "49.99", currency: USD}
  recipient: a1
  fingerprint: sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
  record: {epoch: e1, nonce: n1}
  reasons: [ScopeOverlap]
  matches:
  - {caller: "system:serviceaccount:support:agent", tool: issue-refund, intentID: sess_abc-1, relation: equal scopes, amount: {value: "50", currency: USD}, state: Succeeded, at: "2026-01-02T03:04:05Z"}
  matchCount: 1
`)
	o.SetName(name)
	return o
}

// writeStatus writes the status as the operator.
func writeStatus(t *testing.T, hold *unstructured.Unstructured, status map[string]any) {
	t.Helper()
	content, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		t.Fatal(err)
	}
	if err := as(operator).Status().Patch(t.Context(), hold, client.RawPatch("application/merge-patch+json", content)); err != nil {
		t.Fatalf("writing the status: %v", err)
	}
}

func TestPaymentHold(t *testing.T) {
	match := validHold("x").Object["spec"].(map[string]any)["matches"].([]any)[0]
	matches := func(n int) []any {
		list := make([]any, n)
		for i := range list {
			list[i] = match
		}
		return list
	}
	changedMatch := func(path string, value any) []change {
		m := (&unstructured.Unstructured{Object: match.(map[string]any)}).DeepCopy().Object
		if value == nil {
			remove(path)(m)
		} else {
			set(path, value)(m)
		}
		return []change{set("spec.matches", []any{m})}
	}
	// Unlike other kinds, a hold is made by the operator alone.
	creating(t, as(operator), validHold("x"), []tableCase{
		{"only what is required", []change{remove("spec.lineage"), remove("spec.amount"), remove("spec.recipient"), remove("spec.matches"), remove("spec.matchCount")}, ""},
		{"all reasons", []change{set("spec.reasons", []any{"ScopeOverlap", "LineageOverlap", "ExactMatch", "OutcomeUnknown", "KeyExpired", "IdentityChanged"})}, ""},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"a misspelt field", []change{set("spec.intent", "x")}, `unknown field "spec.intent"`},
		{"no tool", []change{remove("spec.toolRef")}, "spec.toolRef: Required value"},
		{"no caller", []change{remove("spec.caller")}, "spec.caller: Required value"},
		{"no intent ID", []change{remove("spec.intentID")}, "spec.intentID: Required value"},
		{"no number", []change{remove("spec.hold")}, "spec.hold: Required value"},
		{"number 0", []change{set("spec.hold", int64(0))}, "spec.hold in body should be greater than or equal to 1"},
		{"no scope", []change{remove("spec.scope")}, "spec.scope: Required value"},
		{"empty scope", []change{set("spec.scope", []any{})}, "should have at least 1 items"},
		{"16 paths", []change{set("spec.scope", repeat(16, "a/%d"))}, ""},
		{"17 paths", []change{set("spec.scope", repeat(17, "a/%d"))}, "must have at most 16 items"},
		{"a path too long", []change{set("spec.scope", []any{letters(2049)})}, "may not be more than 2048"},
		{"no fingerprint, since no call said it", []change{remove("spec.fingerprint")}, ""},
		{"another kind of digest", []change{set("spec.fingerprint", "md5:00")}, "spec.fingerprint in body should match"},
		{"no record", []change{remove("spec.record")}, "spec.record: Required value"},
		{"no nonce", []change{remove("spec.record.nonce")}, "spec.record.nonce: Required value"},
		{"no epoch", []change{remove("spec.record.epoch")}, "spec.record.epoch: Required value"},
		{"no reasons", []change{remove("spec.reasons")}, "spec.reasons: Required value"},
		{"empty reasons", []change{set("spec.reasons", []any{})}, "should have at least 1 items"},
		{"reason that does not exist", []change{set("spec.reasons", []any{"Suspicious"})}, `Unsupported value: "Suspicious"`},
		{"all reasons", []change{set("spec.reasons", []any{"ScopeOverlap", "LineageOverlap", "ExactMatch", "Lookalike", "OutcomeUnknown", "KeyExpired", "IdentityChanged", "BudgetExceeded"})}, ""},
		{"reason given twice", []change{set("spec.reasons", []any{"ScopeOverlap", "ScopeOverlap"})}, "Duplicate value"},
		{"amount as a number", []change{set("spec.amount.value", 49.99)}, "spec.amount.value in body must be of type string"},
		{"amount with an exponent", []change{set("spec.amount.value", "1e3")}, "spec.amount.value in body should match"},
		{"amount with a sign", []change{set("spec.amount.value", "-1")}, "spec.amount.value in body should match"},
		{"amount with a leading zero", []change{set("spec.amount.value", "01")}, "spec.amount.value in body should match"},
		{"amount of 18 decimals", []change{set("spec.amount.value", "1.000000000000000001"), set("spec.amount.currency", "WETH/18")}, ""},
		{"amount without currency", []change{remove("spec.amount.currency")}, "spec.amount.currency: Required value"},
		{"32 matches", []change{set("spec.matches", matches(32))}, ""},
		{"33 matches", []change{set("spec.matches", matches(33))}, "must have at most 32 items"},
		{"match without intent ID", changedMatch("intentID", nil), "spec.matches[0].intentID: Required value"},
		{"match at no time", changedMatch("at", "yesterday"), "spec.matches[0].at"},
		{"match with a misspelt field", changedMatch("intent", "x"), `unknown field "spec.matches[0].intent"`},
		{"negative count of matches", []change{set("spec.matchCount", int64(-1))}, "spec.matchCount in body should be greater than or equal to 0"},
	})

	const fixed = "spec says what was held and cannot change"
	updating(t, as(operator), as(alice), validHold("x"), []tableCase{
		{"another tool", []change{set("spec.toolRef.name", "charge-card")}, fixed},
		{"another caller", []change{set("spec.caller", "eve")}, fixed},
		{"another intent ID", []change{set("spec.intentID", "x")}, fixed},
		{"another number", []change{set("spec.hold", int64(2))}, fixed},
		{"another scope", []change{set("spec.scope", []any{"account/a2"})}, fixed},
		{"another lineage", []change{set("spec.lineage", "x")}, fixed},
		{"lineage removed", []change{remove("spec.lineage")}, fixed},
		{"another amount", []change{set("spec.amount.value", "1")}, fixed},
		{"amount removed", []change{remove("spec.amount")}, fixed},
		{"another recipient", []change{set("spec.recipient", "a2")}, fixed},
		{"recipient removed", []change{remove("spec.recipient")}, fixed},
		{"another fingerprint", []change{set("spec.fingerprint", "sha256:"+strings.Repeat("0", 64))}, fixed},
		{"a fingerprint that is gone", []change{remove("spec.fingerprint")}, fixed},
		{"another nonce", []change{set("spec.record.nonce", "n2")}, fixed},
		{"another reason", []change{set("spec.reasons", []any{"ExactMatch"})}, fixed},
		{"matches removed", []change{remove("spec.matches")}, fixed},
		{"another count of matches", []change{set("spec.matchCount", int64(2))}, fixed},
		{"count of matches removed", []change{remove("spec.matchCount")}, fixed},

		{"released", resolution("Release"), ""},
		{"rejected", resolution("Reject"), ""},
		{"marked as failed, where nothing was sent", resolution("MarkFailed"), "choose Reject"},
		{"marked as paid", resolution("MarkPaid", "providerReference", "re_1"), ""},
		{"marked as paid, with a result", resolution("MarkPaid", "providerReference", "re_1", "result", ` {"id":"re_1","amount":49.990} `), ""},
		{"marked as paid, with a list as result", resolution("MarkPaid", "providerReference", "re_1", "result", `["re_1"]`), ""},
		{"marked as paid, with text as result", resolution("MarkPaid", "providerReference", "re_1", "result", `"re_1"`), ""},
		{"marked as paid without reference", resolution("MarkPaid"), "MarkPaid needs providerReference"},
		{"marked as paid with an empty reference", resolution("MarkPaid", "providerReference", ""), "should be at least 1 chars long"},
		{"released with a reference", resolution("Release", "providerReference", "re_1"), "providerReference and result are for MarkPaid only"},
		{"rejected with a result", resolution("Reject", "result", "{}"), "providerReference and result are for MarkPaid only"},
		{"result that is no JSON", resolution("MarkPaid", "providerReference", "re_1", "result", "paid"), "spec.resolution.result in body should match"},
		{"result as an object", resolution("MarkPaid", "providerReference", "re_1", "result", map[string]any{}), "spec.resolution.result in body must be of type string"},
		{"result too long", resolution("MarkPaid", "providerReference", "re_1", "result", `"`+letters(8192)+`"`), "may not be more than 8192"},
		{"a decision that does not exist", resolution("Approve"), `Unsupported value: "Approve"`},
		{"no decision", append(resolution("Release"), remove("spec.resolution.decision")), "spec.resolution.decision: Required value"},
		{"no reason", append(resolution("Release"), remove("spec.resolution.reason")), "spec.resolution.reason: Required value"},
		{"an empty reason", resolution("Release", "reason", ""), "should be at least 1 chars long"},
		{"a reason too long", resolution("Release", "reason", letters(1025)), "may not be more than 1024"},
		{"a misspelt field", resolution("Release", "because", "x"), `unknown field "spec.resolution.because"`},
		{"resolved, and something else changed", append(resolution("Release"), set("spec.amount.value", "1")), fixed},
	})
}

// resolution sets a resolution, with more fields given as name and value.
func resolution(decision string, more ...any) []change {
	r := map[string]any{"decision": decision, "reason": "confirmed with the customer"}
	for i := 0; i < len(more); i += 2 {
		r[more[i].(string)] = more[i+1]
	}
	return []change{set("spec.resolution", r)}
}

// The list of holds is a worklist: what a person needs to choose one, and a way to see only those that wait.
func TestPaymentHoldsReadLikeAWorklist(t *testing.T) {
	held, void := validHold("worklist-1"), validHold("worklist-2")
	for hold, state := range map[*unstructured.Unstructured]string{held: "Held", void: "Void"} {
		if err := as(operator).Create(t.Context(), hold); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mustDelete(t, hold) })
		writeStatus(t, hold, map[string]any{"state": state, "summary": map[string]any{
			"amount": "49.99 USD", "reasons": "ScopeOverlap,Lookalike", "overlaps": "sess_abc-1 (Succeeded) and 2 more",
		}})
	}
	out, errOut, err := kubectl(t.Context(), "get", "holds", "--namespace", namespace, "--field-selector", "status.state=Held,spec.toolRef.name=issue-refund")
	if err != nil {
		t.Fatalf("%v: %s", err, errOut)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 2 {
		t.Fatalf("one hold is held, got:\n%s", out)
	}
	if got, want := strings.Join(strings.Fields(lines[0]), " "), "NAME TOOL INTENT AMOUNT REASONS OVERLAPS STATE AGE"; got != want {
		t.Errorf("columns are %q, want %q", got, want)
	}
	if got, want := strings.Join(strings.Fields(lines[1])[:12], " "), `worklist-1 issue-refund sess_abc-4 49.99 USD ScopeOverlap,Lookalike sess_abc-1 (Succeeded) and 2 more Held`; got != want {
		t.Errorf("the row is %q, want %q", got, want)
	}
	for _, name := range []string{"hold", "holds", "guardrails"} {
		if out, errOut, err := kubectl(t.Context(), "get", name, "--namespace", namespace); err != nil || !strings.Contains(out, "worklist-2") {
			t.Errorf("kubectl get %s should list the holds: %v: %s%s", name, err, out, errOut)
		}
	}
}
