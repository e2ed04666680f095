// This file is the payment that is made again and again: the tool, its callers, and
// call number i, which is the same call whoever makes it and however often.

package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

const (
	namespace = "bench"
	toolName  = "charge"
	storeName = "payments"
	toolPath  = "/v1/namespaces/" + namespace + "/tools/" + toolName

	// callers share the calls by turns; so do accounts.
	callers  = 4
	accounts = 1000
)

// compiled is the tool: a scope of four segments, a lineage of two, an amount, a
// recipient, and fields that are volatile.
func compiled(upstream string) (*policy.Tool, error) {
	tool := &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: toolName, Generation: 1},
		Spec: v1alpha1.AgentToolSpec{
			Effect: v1alpha1.EffectMutating, IntentBudgetRef: &v1alpha1.BudgetReference{Name: "payments"},
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL: upstream + "/charges", Methods: []v1alpha1.HTTPMethod{"POST"},
				Timeout: &metav1.Duration{Duration: 10 * time.Second}, SettleAfter: &metav1.Duration{Duration: time.Minute},
			}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID:  []v1alpha1.Expression{`call.header["idempotency-key"]`, `path(call.session, call.index)`},
				Scope:     []v1alpha1.Expression{`path("account", call.body.accountId, "order", call.body.orderId)`},
				Lineage:   `path(call.session, call.index)`,
				Amount:    &v1alpha1.AmountExpressions{Value: "call.body.amount", Currency: `call.body.?currency.orValue("USD")`, Unit: v1alpha1.UnitMajor},
				Recipient: "call.body.accountId",
				Volatile:  []v1alpha1.JSONPointer{"/timestamp", "/memo"},
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"}},
		},
	}
	budget := &v1alpha1.IntentBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "payments"},
		Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: storeName}},
	}
	return policy.Compile(tool, budget)
}

func callerName(n int64) string {
	return fmt.Sprintf("system:serviceaccount:%s:agent-%d", namespace, n%callers)
}

func callerUID(n int64) string {
	return fmt.Sprintf("6f1d7b1e-5c0a-4a57-9f0e-00000000000%d", n%callers)
}

// token is a ServiceAccount's, in form and size.
func token(n int64) string {
	part := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err) // maps of texts and numbers
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	name := fmt.Sprintf("agent-%d", n%callers)
	return part(map[string]string{"alg": "RS256", "kid": "0mXQ4bVvR8n0m3l9kq1sT2uV3wX4yZ5aB6cD7eF8gH9"}) + "." +
		part(map[string]any{
			"aud": []string{"holdfast"}, "iss": "https://kubernetes.default.svc.cluster.local", "sub": callerName(n),
			"exp": 4102444800, "iat": 1767225600, "nbf": 1767225600, "jti": "f3b1c9de-2d0a-4f4a-8a54-7c39f0a0c5a1",
			"kubernetes.io": map[string]any{
				"namespace": namespace, "node": map[string]string{"name": "node-1", "uid": "7a8d7e0c-1111-4c7e-9d43-2b1f6f6d3c10"},
				"pod":            map[string]string{"name": name + "-6d4cf56db6-x7k2p", "uid": "b0c6a7a5-2222-4b8e-8f0e-5a4f1b2c3d4e"},
				"serviceaccount": map[string]string{"name": name, "uid": callerUID(n)},
			},
		}) + "." + strings.Repeat("c2ln", 85)
}

// call is one payment.
type call struct {
	id, session, index string
	body               []byte
}

// callOf is call number i. Its volatile fields differ each time that it is made.
func callOf(i int64) call {
	return call{
		id:      fmt.Sprintf("8d3f5c1e-7b42-4e0a-%012x", i),
		session: fmt.Sprintf("sess_%010d", i/4),
		index:   "call-" + strconv.FormatInt(i%4, 10),
		body: fmt.Appendf(nil, `{"accountId":"acct_%04d","orderId":"order_%010d","amount":49.99,"currency":"USD","memo":"your order %d","timestamp":%q}`,
			i%accounts, i, i, time.Now().UTC().Format(time.RFC3339Nano)),
	}
}

// request is the call as it is sent to a gateway, or to the proxy.
func (c call) header(token string) http.Header {
	return http.Header{
		"Authorization":    {"Bearer " + token},
		"Content-Type":     {"application/json"},
		"Idempotency-Key":  {c.id},
		"Holdfast-Session": {c.session},
		"Holdfast-Call":    {c.index},
		"User-Agent":       {"holdfast-bench"},
	}
}
