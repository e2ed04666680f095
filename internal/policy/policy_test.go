package policy

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// refundTool is a valid Mutating tool, changed by what a test gives.
func refundTool(changes ...func(*v1alpha1.AgentTool)) *v1alpha1.AgentTool {
	tool := &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "support", Name: "issue-refund", Generation: 3},
		Spec: v1alpha1.AgentToolSpec{
			Effect:          v1alpha1.EffectMutating,
			IntentBudgetRef: &v1alpha1.BudgetReference{Name: "refunds"},
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL:         "http://crm.support.svc:8080/refunds",
				Methods:     []v1alpha1.HTTPMethod{"POST"},
				SettleAfter: &metav1.Duration{Duration: time.Minute},
			}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID: []v1alpha1.Expression{`call.header["idempotency-key"]`, `path(call.session, call.index)`},
				Scope:    []v1alpha1.Expression{`path("account", call.body.accountId, "order", call.body.orderId)`},
				Lineage:  `path(call.session, call.index)`,
				Amount:   &v1alpha1.AmountExpressions{Value: `call.body.amount`, Currency: `"USD"`, Unit: v1alpha1.UnitMajor},
				Volatile: []v1alpha1.JSONPointer{"/timestamp", "/memo"},
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"}},
		},
	}
	for _, change := range changes {
		change(tool)
	}
	return tool
}

func readTool(changes ...func(*v1alpha1.AgentTool)) *v1alpha1.AgentTool {
	tool := &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "support", Name: "list-charges", Generation: 1},
		Spec: v1alpha1.AgentToolSpec{
			Effect: v1alpha1.EffectReadOnly,
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL:     "https://crm.example.com/charges",
				Methods: []v1alpha1.HTTPMethod{"GET"},
			}},
			Cache: &v1alpha1.ResponseCache{TTL: metav1.Duration{Duration: 2 * time.Minute}},
		},
	}
	for _, change := range changes {
		change(tool)
	}
	return tool
}

func refundBudget(changes ...func(*v1alpha1.IntentBudget)) *v1alpha1.IntentBudget {
	budget := &v1alpha1.IntentBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "support", Name: "refunds"},
		Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: "payments"}},
	}
	for _, change := range changes {
		change(budget)
	}
	return budget
}

// withIdentity changes the identity block.
func withIdentity(change func(*v1alpha1.ToolIdentity)) func(*v1alpha1.AgentTool) {
	return func(tool *v1alpha1.AgentTool) { change(tool.Spec.Identity) }
}

func mustCompile(t testing.TB, changes ...func(*v1alpha1.AgentTool)) *Tool {
	t.Helper()
	tool, err := Compile(refundTool(changes...), refundBudget())
	if err != nil {
		t.Fatalf("Compile: %v", err)
	}
	return tool
}

// refundCall is a call of refundTool with a JSON body. Headers are given as "Name: value".
func refundCall(body string, headers ...string) CallInput {
	in := CallInput{
		Method: "POST",
		Query:  url.Values{},
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   []byte(body),
		Agent:  "system:serviceaccount:support:agent",
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		in.Header.Add(name, value)
	}
	return in
}

const (
	refundBody = `{"accountId": "a1", "orderId": 9, "amount": 49.99}`
	refundKey  = "Idempotency-Key: k1"
)
