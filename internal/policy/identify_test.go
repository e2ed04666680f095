package policy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

func identify(t testing.TB, tool *Tool, in CallInput) Identity {
	t.Helper()
	id, err := tool.Identify(in)
	if err != nil {
		t.Fatalf("Identify: %v", err)
	}
	return id
}

func TestIdentifyTellsWhatAPaymentIs(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) { i.Recipient = "call.body.accountId" }))
	id := identify(t, tool, refundCall(refundBody, refundKey, "Holdfast-Session: sess_abc", "Holdfast-Call: 4"))
	want := Identity{
		IntentID:     "k1",
		Scope:        intent.Scope{"account/a1/order/9"},
		Lineage:      "sess_abc/4",
		Amount:       &intent.Money{Value: "49.99", Currency: "USD"},
		Recipient:    "a1",
		Fingerprint:  id.Fingerprint,
		IdentityHash: tool.identity.hash, AmountHash: tool.identity.amountHash, RecipientHash: tool.identity.recipientHash,
	}
	if !reflect.DeepEqual(id, want) {
		t.Errorf("got  %+v\nwant %+v", id, want)
	}
	if !strings.HasPrefix(id.Fingerprint, "sha256:") || !strings.HasPrefix(id.IdentityHash, "sha256:") {
		t.Errorf("hashes are %q and %q", id.Fingerprint, id.IdentityHash)
	}
}

// What makes one call, with the expression under test in the place of a part of the identity.
type part struct {
	expression string
	in         CallInput
	want       string // the value; or the words of the error, after "error: "
}

func (p part) check(t *testing.T, got string, err error) {
	t.Helper()
	if words, refused := strings.CutPrefix(p.want, "error: "); refused {
		var bad *intent.InvalidError
		switch {
		case err == nil:
			t.Errorf("%s gives %q, but must be refused with %q", p.expression, got, words)
		case !errors.As(err, &bad):
			t.Errorf("%s: %v is no InvalidError", p.expression, err)
		case !strings.Contains(err.Error(), words):
			t.Errorf("%s: %q does not say %q", p.expression, err, words)
		}
		return
	}
	if err != nil {
		t.Errorf("%s: %v", p.expression, err)
	} else if got != p.want {
		t.Errorf("%s gives %q, want %q", p.expression, got, p.want)
	}
}

func TestIntentID(t *testing.T) {
	const names = "error: the call names no intent"
	for _, p := range []part{
		// K02: one key, however its header is written; the case of its value counts.
		{`call.header["idempotency-key"]`, refundCall(refundBody, "idempotency-key: abc"), "abc"},
		{`call.header["idempotency-key"]`, refundCall(refundBody, "IDEMPOTENCY-KEY: abc"), "abc"},
		{`call.header["idempotency-key"]`, refundCall(refundBody, `Idempotency-Key: "abc"`), "abc"},
		{`call.header["idempotency-key"]`, refundCall(refundBody, "Idempotency-Key: ABC"), "ABC"},
		{`call.header["idempotency-key"]`, func() CallInput { // HTTP/2 puts names in lower case
			in := refundCall(refundBody)
			in.Header["idempotency-key"] = []string{"abc"}
			return in
		}(), "abc"},
		// K01: nothing is made up.
		{`call.header["idempotency-key"]`, refundCall(refundBody), names},
		{`call.header["idempotency-key"]`, refundCall(refundBody, "Idempotency-Key: "), names},
		{`call.header["idempotency-key"]`, refundCall(refundBody, "Idempotency-Key:  \t "), names},
		{`call.body.intent`, refundCall(`{"intent": null}`), names},
		{`call.body.intent`, refundCall(`{"intent": ""}`), names},
		{`call.body.intent.id`, refundCall(`{}`), names},
		{`call.body.intent.id`, refundCall(`{"intent": "text"}`), names},
		{`call.body.list[3]`, refundCall(`{"list": [1]}`), names},
		{`call.body.?intent`, refundCall(`{}`), names},
		{`call.query.intent`, refundCall(`{}`), names},
		{`path(call.session, call.index)`, refundCall(`{}`, "Holdfast-Session: s"), names},
		{`path(call.session, call.body.?turn)`, refundCall(`{}`, "Holdfast-Session: s"), names},
		// Malformed is not missing.
		{`call.body.intent`, refundCall(`{"intent": true}`), "error: is a bool"},
		{`call.body.intent`, refundCall(`{"intent": ["a"]}`), "error: is a list"},
		{`call.header["idempotency-key"]`, refundCall(refundBody, `Idempotency-Key: "abc`), "error: no closing quote"},
		{`call.body.intent + 1`, refundCall(`{"intent": "x"}`), "error: no such overload"},
		{`path(call.body.a, call.body.b)`, refundCall(`{"a": "x", "b": ""}`), "error: segment 2 is empty"},
		{`call.body.intent`, refundCall(`{"intent": "` + strings.Repeat("x", 300) + `"}`), "error: more than 255 bytes"},
		{`call.body.intent`, refundCall(`{"intent": "` + strings.Repeat("x", 5000) + `"}`), "error: more than 4096 bytes"},
		// What yields.
		{`call.body.intent`, refundCall(`{"intent": 42}`), "42"},
		{`call.body.intent`, refundCall(`{"intent": 42.50}`), "42.5"},
		{`call.body.intent`, refundCall(`{"intent": 9007199254740993}`), "9007199254740993"},
		{`call.body.intent`, refundCall(`{"intent": 123456789012345678901234567890}`), "123456789012345678901234567890"},
		{`path(call.session, call.index)`, refundCall(`{}`, "Holdfast-Session: s", "Holdfast-Call: 4"), "s/4"},
		{`path(call.session, call.body.?turn)`, refundCall(`{"turn": 7}`, "Holdfast-Session: s"), "s/7"},
		{`call.body.?intent.orValue("fallback")`, refundCall(`{}`), "fallback"},
		{`has(call.body.x) ? call.body.x : "none"`, refundCall(`{}`), "none"},
		{`has(call.session) ? "with" : "without"`, refundCall(`{}`), "without"},
		{`call.agent`, refundCall(`{}`), "system:serviceaccount:support:agent"},
		{`call.method + call.path`, refundCall(`{}`), "POST"},
		{`call.body.intent.lowerAscii().trim()`, refundCall(`{"intent": " AbC "}`), "abc"},
		// Twice, and not the same: neither is the intent.
		{`call.header["idempotency-key"]`, refundCall(refundBody, "Idempotency-Key: a", "Idempotency-Key: b"), "error: more than once"},
		{`call.header["x-key"]`, refundCall(refundBody, "X-Key: a", "X-Key: b"), "error: more than once"},
		{`call.session`, refundCall(refundBody, "Holdfast-Session: a", "Holdfast-Session: b"), "error: more than once"},
		// Twice, and the same: what it is once.
		{`call.header["idempotency-key"]`, refundCall(refundBody, "Idempotency-Key: a", "Idempotency-Key: a"), "a"},
		{`call.header["x-key"]`, refundCall(refundBody, "X-Key: a", "X-Key: a"), "a"},
		{`path(call.header["holdfast-session"], call.header["holdfast-call"])`,
			refundCall(refundBody, "Holdfast-Session: s", "Holdfast-Session: s", "Holdfast-Call: 4", "Holdfast-Call: 4"), "s/4"},
		{`path(call.session, call.index)`,
			refundCall(refundBody, "Holdfast-Session: s", "Holdfast-Session: s", "Holdfast-Call: 4", "Holdfast-Call: 4"), "s/4"},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.IntentID = []v1alpha1.Expression{v1alpha1.Expression(p.expression)}
			i.Scope = []v1alpha1.Expression{`path("fixed")`}
			i.Amount = nil
		}))
		id, err := tool.Identify(p.in)
		p.check(t, id.IntentID, err)
	}
}

func TestTheFirstSourceThatYieldsWins(t *testing.T) {
	tool := mustCompile(t)
	for headers, want := range map[string]string{
		"Idempotency-Key: k1|Holdfast-Session: s|Holdfast-Call: 1": "k1",
		"Holdfast-Session: s|Holdfast-Call: 1":                     "s/1",
		"Idempotency-Key: |Holdfast-Session: s|Holdfast-Call: 1":   "s/1",
	} {
		if id := identify(t, tool, refundCall(refundBody, strings.Split(headers, "|")...)); id.IntentID != want {
			t.Errorf("%s: %q, want %q", headers, id.IntentID, want)
		}
	}
	// A first source that is malformed does not give way to the second.
	if _, err := tool.Identify(refundCall(refundBody, `Idempotency-Key: "k1`, "Holdfast-Session: s", "Holdfast-Call: 1")); err == nil {
		t.Error("a malformed key was passed over")
	}
}

func TestScope(t *testing.T) {
	for _, p := range []part{
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": 9}`), "order/9"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": 9.0}`), "order/9"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": "9"}`), "order/9"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": 9007199254740993}`), "order/9007199254740993"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": 9007199254740992}`), "order/9007199254740992"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": 18446744073709551616}`), "order/18446744073709551616"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": "9/../8"}`), "order/9%2F..%2F8"},
		{`call.body.items.map(i, path("item", i.sku))`, refundCall(`{"items": [{"sku": "b"}, {"sku": "a"}, {"sku": "b"}]}`), "item/a\nitem/b"},
		{`[path("a", call.body.x), path("b")]`, refundCall(`{"x": 1}`), "a/1\nb"},
		{`[path("a")] + call.body.items.map(i, path(i))`, refundCall(`{"items": ["z"]}`), "a\nz"},
		{`has(call.body.x) ? path("x", call.body.x) : path("none")`, refundCall(`{}`), "none"},
		{`path("q", call.query.order)`, func() CallInput {
			in := refundCall(`{}`)
			in.Query.Set("order", "7")
			return in
		}(), "q/7"},
		{`path("q", call.query.order)`, func() CallInput {
			in := refundCall(`{}`)
			in.Query["order"] = []string{"7", "8"}
			return in
		}(), "error: segment 2 is a list"},
		{`path("f", call.body.field)`, func() CallInput {
			in := refundCall(`field=a+b`)
			in.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			return in
		}(), "f/a b"},
		{`path("order", call.body.orderId)`, refundCall(`{}`), "error: no such key"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": ""}`), "error: segment 2 is empty"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": null}`), "error: segment 2 is null"},
		{`path("order", call.body.orderId)`, refundCall(`{"orderId": {}}`), "error: segment 2 is a map"},
		{`call.body.items.map(i, path("item", i))`, refundCall(`{"items": []}`), "error: yields nothing"},
		{`call.body.items.map(i, path("item", i))`, refundCall(`{"items": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}`), "error: more than 16 paths"},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.IntentID = []v1alpha1.Expression{`"fixed"`}
			i.Scope = []v1alpha1.Expression{v1alpha1.Expression(p.expression)}
			i.Amount = nil
		}))
		id, err := tool.Identify(p.in)
		if strings.Contains(p.want, "no such key") { // what is missing is told by the expression
			p.want = "error: yields nothing for this call"
		}
		p.check(t, id.Scope.String(), err)
	}
}

// A refusal can name the intent that it refuses, and nothing else of it.
func TestWithAnErrorComesTheIntentID(t *testing.T) {
	for _, change := range []func(*v1alpha1.ToolIdentity){
		func(i *v1alpha1.ToolIdentity) { i.Scope = []v1alpha1.Expression{`path(call.body.absent)`} },
		func(i *v1alpha1.ToolIdentity) { i.Amount.Value = "call.body.absent" },
		func(i *v1alpha1.ToolIdentity) { i.Recipient = "call.body.absent" },
	} {
		id, err := mustCompile(t, withIdentity(change)).Identify(refundCall(refundBody, refundKey, "Holdfast-Session: s", "Holdfast-Call: 4"))
		if err == nil || !reflect.DeepEqual(id, Identity{IntentID: "k1"}) {
			t.Errorf("%+v, %v", id, err)
		}
	}
	id, err := mustCompile(t).Identify(refundCall(refundBody))
	if err == nil || !reflect.DeepEqual(id, Identity{}) {
		t.Errorf("without an intent ID: %+v, %v", id, err)
	}
}

func TestEachScopeExpressionMustYield(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.Scope = append(i.Scope, `path("invoice", call.body.invoice)`)
	}))
	if _, err := tool.Identify(refundCall(refundBody, refundKey)); err == nil {
		t.Error("a scope was taken without its second path")
	}
}

func TestLineageInErrorIsAbsent(t *testing.T) {
	for _, p := range []part{
		{`path(call.session, call.index)`, refundCall(`{}`, "Holdfast-Session: s", "Holdfast-Call: 4"), "s/4"},
		{`path(call.session, call.index)`, refundCall(`{}`, "Holdfast-Session: s"), ""},
		{`path(call.session, call.body.plan)`, refundCall(`{"plan": false}`, "Holdfast-Session: s"), ""},
		{`path(call.session, call.body.plan)`, refundCall(`{"plan": ""}`, "Holdfast-Session: s"), ""},
		{`call.body.?plan.optMap(p, path(p))`, refundCall(`{}`), ""},
		{`call.body.?plan.optMap(p, path(p))`, refundCall(`{"plan": "p1"}`), "p1"},
		// Not absent: else a large body would rid a caller of its lineage.
		{`call.body.l.all(a, call.body.l.all(b, a != b || true)) ? path("x") : path("y")`, refundCall(bigList(2000)), "error: too much work"},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.IntentID = []v1alpha1.Expression{`"fixed"`}
			i.Scope = []v1alpha1.Expression{`path("fixed")`}
			i.Lineage = v1alpha1.Expression(p.expression)
			i.Amount = nil
		}))
		id, err := tool.Identify(p.in)
		p.check(t, string(id.Lineage), err)
	}
}

func TestAmount(t *testing.T) {
	type row struct {
		value, currency string
		unit            v1alpha1.AmountUnit
		body            string
		want            string
	}
	const v = `call.body.v`
	const major, minor = v1alpha1.UnitMajor, v1alpha1.UnitMinor
	for _, r := range []row{
		// K05
		{v, `"JPY"`, major, `{"v": 10000}`, "10000 JPY"},
		{v, `"JPY"`, minor, `{"v": 10000}`, "10000 JPY"},
		{v, `"JPY"`, major, `{"v": "705.00"}`, "705 JPY"},
		{v, `"JPY"`, major, `{"v": 705.00}`, "705 JPY"},
		{v, `"JPY"`, major, `{"v": 10.5}`, "error: finer than JPY allows"},
		{v, `"KWD"`, major, `{"v": 1.234}`, "1.234 KWD"},
		{v, `"KWD"`, minor, `{"v": 1234}`, "1.234 KWD"},
		{v, `"KWD"`, major, `{"v": 1.2345}`, "error: finer than KWD allows"},
		// Exact, whatever the size.
		{v, `"USD"`, major, `{"v": 9007199254740993}`, "9007199254740993 USD"},
		{v, `"USD"`, major, `{"v": 9007199254740992}`, "9007199254740992 USD"},
		{v, `"USD"`, major, `{"v": 90071992547409.93}`, "90071992547409.93 USD"},
		{v, `"USDC/18"`, minor, `{"v": 1000000000000000001}`, "1.000000000000000001 USDC/18"},
		{v, `"USDC/18"`, minor, `{"v": 10000000000000000000001}`, "10000.000000000000000001 USDC/18"},
		{v, `"USD"`, major, `{"v": 1e1}`, "10 USD"},
		{v, `"USD"`, major, `{"v": 10.0}`, "10 USD"},
		{v, `"USD"`, major, `{"v": -0}`, "0 USD"},
		// Arithmetic is exact too, in either order.
		{`call.body.n * call.body.p`, `"USD"`, major, `{"n": 3, "p": 0.1}`, "0.3 USD"},
		{`call.body.p * call.body.n`, `"USD"`, major, `{"n": 3, "p": 0.1}`, "0.3 USD"},
		{`call.body.p * call.body.n`, `"USD"`, major, `{"n": 100, "p": 0.1}`, "10 USD"},
		{`call.body.n + call.body.p`, `"USD"`, major, `{"n": 9007199254740993, "p": 0.01}`, "9007199254740993.01 USD"},
		{`call.body.n - call.body.p`, `"USD"`, major, `{"n": 1, "p": 0.01}`, "0.99 USD"},
		{`call.body.n * call.body.n`, `"USD"`, major, `{"n": 9223372036854775807}`, "85070591730234615847396907784232501249 USD"},
		{`number(call.body.p) * 2`, `"USD"`, major, `{"p": "0.15"}`, "0.3 USD"},
		{`call.body.n * number("0.01")`, `"USD"`, major, `{"n": 7}`, "0.07 USD"},
		{`call.body.n > number("0.5") ? call.body.n : 1`, `"USD"`, major, `{"n": 0.6}`, "0.6 USD"},
		{`1 <= call.body.n ? call.body.n : 1`, `"USD"`, major, `{"n": 0.6}`, "1 USD"},
		{`call.body.n + call.body.p`, `"USD"`, major, `{"n": 1e9999, "p": 1e-9999}`, "error: too far apart"},
		{`call.body.n * call.body.n`, `"USD"`, major, `{"n": 1e9999}`, "error: exponent"},
		// Refused.
		{v, `"USD"`, major, `{"v": 10.005}`, "error: finer than USD allows"},
		{v, `"USD"`, major, `{"v": -1}`, "error: negative"},
		{v, `"USD"`, major, `{"v": "ten"}`, "error: not a decimal number"},
		{v, `"USD"`, major, `{"v": ""}`, "error: yields nothing"},
		{v, `"USD"`, major, `{"v": null}`, "error: yields nothing"},
		{v, `"USD"`, major, `{}`, "error: yields nothing"},
		{v, `"USD"`, major, `{"v": true}`, "error: is a bool"},
		{v, `"USD"`, major, `{"v": 1` + strings.Repeat("0", 60) + `}`, "error: more than 40 digits"},
		{v, `call.body.c`, major, `{"v": 1}`, "error: yields nothing"},
		{v, `call.body.c`, major, `{"v": 1, "c": 840}`, "error: give a string"},
		{v, `call.body.c`, major, `{"v": 1, "c": "usd"}`, "error: write USD"},
		{v, `call.body.c.upperAscii()`, major, `{"v": 1, "c": "usd"}`, "1 USD"},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.Scope = []v1alpha1.Expression{`path("fixed")`}
			i.Amount = &v1alpha1.AmountExpressions{Value: v1alpha1.Expression(r.value), Currency: v1alpha1.Expression(r.currency), Unit: r.unit}
		}))
		id, err := tool.Identify(refundCall(r.body, refundKey))
		got := ""
		if id.Amount != nil {
			got = id.Amount.String()
		}
		part{r.value + " of " + r.body, CallInput{}, r.want}.check(t, got, err)
	}
}

func TestRecipient(t *testing.T) {
	for _, p := range []part{
		{`call.body.to`, refundCall(`{"to": "a1"}`), "a1"},
		{`call.body.to`, refundCall(`{"to": 7}`), "7"},
		{`path(call.body.to, "x")`, refundCall(`{"to": "a/b"}`), "a%2Fb/x"},
		{`call.body.?to.orValue("")`, refundCall(`{}`), ""},
		{`call.body.to`, refundCall(`{"to": ""}`), ""},
		{`call.body.to`, refundCall(`{}`), "error: yields nothing"},
		{`call.body.to`, refundCall(`{"to": {}}`), "error: is a map"},
		{`call.body.to`, refundCall(`{"to": "a\u0000"}`), "error: control character"},
		{`call.body.to`, refundCall(`{"to": "` + strings.Repeat("x", 254) + `"}`), "error: more than 253 bytes"},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.IntentID = []v1alpha1.Expression{`"fixed"`}
			i.Scope = []v1alpha1.Expression{`path("fixed")`}
			i.Amount = nil
			i.Recipient = v1alpha1.Expression(p.expression)
		}))
		id, err := tool.Identify(p.in)
		p.check(t, id.Recipient, err)
	}
}

func TestFingerprint(t *testing.T) {
	plain := func(i *v1alpha1.ToolIdentity) {
		i.Scope = []v1alpha1.Expression{`path("fixed")`}
		i.Amount = nil
	}
	for name, c := range map[string]struct {
		identity func(*v1alpha1.ToolIdentity)
		tool     func(*v1alpha1.AgentTool)
		a, b     CallInput
		equal    bool
	}{
		"K04: volatile fields": {
			identity: func(i *v1alpha1.ToolIdentity) {
				i.Volatile = []v1alpha1.JSONPointer{"/createdAt", "/attempt", "/card/enc"}
			},
			a:     refundCall(`{"amount": 1, "createdAt": "10:00", "attempt": "x", "card": {"enc": "AA", "last4": "4242"}}`, refundKey),
			b:     refundCall(`{"card": {"last4": "4242", "enc": "BB"}, "attempt": "y", "createdAt": "10:01", "amount": 1.0}`, refundKey),
			equal: true,
		},
		"K04: another amount":            {a: refundCall(`{"amount": 1}`, refundKey), b: refundCall(`{"amount": 2}`, refundKey)},
		"K06: 18 decimals":               {a: refundCall(`{"v": 1000000000000000001}`, refundKey), b: refundCall(`{"v": 1000000000000000000}`, refundKey)},
		"K06: 10 and 1e1":                {a: refundCall(`{"v": 10.0}`, refundKey), b: refundCall(`{"v": 1e1}`, refundKey), equal: true},
		"K06: -0 and 0":                  {a: refundCall(`{"v": -0}`, refundKey), b: refundCall(`{"v": 0}`, refundKey), equal: true},
		"beyond a float's 53 bits":       {a: refundCall(`{"v": 9007199254740993}`, refundKey), b: refundCall(`{"v": 9007199254740992}`, refundKey)},
		"a number is not its text":       {a: refundCall(`{"v": 1}`, refundKey), b: refundCall(`{"v": "1"}`, refundKey)},
		"headers do not count":           {a: refundCall(`{}`, refundKey, "X-Trace: 1"), b: refundCall(`{}`, refundKey, "Authorization: Bearer x"), equal: true},
		"the intent ID does not count":   {a: refundCall(`{}`, "Idempotency-Key: a"), b: refundCall(`{}`, "Idempotency-Key: b"), equal: true},
		"K08: addresses":                 {identity: func(i *v1alpha1.ToolIdentity) { i.Addresses = []v1alpha1.JSONPointer{"/to"} }, a: refundCall(`{"to": "0xAbC"}`, refundKey), b: refundCall(`{"to": "0xabc"}`, refundKey), equal: true},
		"K08: other fields keep case":    {identity: func(i *v1alpha1.ToolIdentity) { i.Addresses = []v1alpha1.JSONPointer{"/to"} }, a: refundCall(`{"from": "0xAbC"}`, refundKey), b: refundCall(`{"from": "0xabc"}`, refundKey)},
		"the argument of the key":        {tool: func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key = v1alpha1.ProviderKey{Argument: "/key"} }, a: refundCall(`{"key": "a"}`, refundKey), b: refundCall(`{"key": "b"}`, refundKey), equal: true},
		"a field that is no argument":    {a: refundCall(`{"key": "a"}`, refundKey), b: refundCall(`{"key": "b"}`, refundKey)},
		"another suffix":                 {a: refundCall(`{}`, refundKey), b: func() CallInput { in := refundCall(`{}`, refundKey); in.Suffix = "/x"; return in }()},
		"another method":                 {a: refundCall(`{}`, refundKey), b: func() CallInput { in := refundCall(`{}`, refundKey); in.Method = "PUT"; return in }()},
		"another query":                  {a: refundCall(`{}`, refundKey), b: func() CallInput { in := refundCall(`{}`, refundKey); in.Query.Set("a", "1"); return in }()},
		"an id that is not of JSON-RPC":  {a: refundCall(`{"id": 1}`, refundKey), b: refundCall(`{"id": 2}`, refundKey)},
		"A14: other arguments":           {a: refundCall(rpc(1, `{}`, `1`), refundKey), b: refundCall(rpc(2, `{}`, `2`), refundKey)},
		"A14: id, trace, token and info": {a: refundCall(rpc(1, `{"traceparent": "00-a", "progressToken": 1, "clientInfo": {"v": 1}}`, `1`), refundKey), b: refundCall(rpc(2, `{"traceparent": "00-b", "progressToken": 2}`, `1`), refundKey), equal: true},
	} {
		tool := mustCompile(t, withIdentity(plain), func(o *v1alpha1.AgentTool) {
			if c.identity != nil {
				c.identity(o.Spec.Identity)
			}
			if c.tool != nil {
				c.tool(o)
			}
		})
		a, b := identify(t, tool, c.a).Fingerprint, identify(t, tool, c.b).Fingerprint
		if (a == b) != c.equal {
			t.Errorf("%s: equal is %v, want %v", name, a == b, c.equal)
		}
	}
}

// K08: what is declared an address is one address, however its letters are written,
// to every part of the identity. Else the fingerprints would be equal and the scopes
// disjoint, and the second call another payment.
func TestTheCaseOfAnAddressMeansNothing(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.IntentID = []v1alpha1.Expression{`path("pay", call.body.to, call.body.n)`}
		i.Scope = []v1alpha1.Expression{`path("wallet", call.body.to)`, `call.body.cc.map(a, path("copy", a))`}
		i.Lineage = `path(call.body.from, call.body.n)`
		i.Amount = &v1alpha1.AmountExpressions{Value: "call.body.n", Currency: `call.body.asset.upperAscii()`, Unit: v1alpha1.UnitMajor}
		i.Recipient = "call.body.to"
		i.Addresses = []v1alpha1.JSONPointer{"/to", "/cc", "/from", "/asset"}
		i.Volatile = []v1alpha1.JSONPointer{"/from"}
	}))
	want := Identity{
		IntentID: "pay/0xabc/5", Scope: intent.Scope{"copy/0xd", "wallet/0xabc"}, Lineage: "0xf/5",
		Amount: &intent.Money{Value: "5", Currency: "USD"}, Recipient: "0xabc", IdentityHash: tool.identity.hash, AmountHash: tool.identity.amountHash, RecipientHash: tool.identity.recipientHash,
	}
	form := func(body string) CallInput {
		in := refundCall(body)
		in.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return in
	}
	for name, calls := range map[string][]CallInput{
		"JSON": {
			refundCall(`{"to": "0xAbC", "cc": ["0xD"], "from": "0xF", "n": 5, "asset": "uSd"}`),
			refundCall(`{"to": "0xabc", "cc": ["0xd"], "from": "0xf", "n": 5, "asset": "usd"}`),
			refundCall(`{"to": "0XABC", "cc": ["0XD"], "from": "0XF", "n": 5, "asset": "USD"}`),
		},
		"a form": {form("to=0xAbC&cc=0xD&cc=0xd&from=0xF&n=5&asset=usd"), form("to=0xabc&cc=0xd&cc=0XD&from=0XF&n=5&asset=USD")},
		"JSON-RPC": {
			refundCall(`{"jsonrpc": "2.0", "id": 1, "to": "0xAbC", "cc": ["0xD"], "from": "0xF", "n": 5, "asset": "usd"}`),
			refundCall(`{"jsonrpc": "2.0", "id": 2, "to": "0xabc", "cc": ["0xd"], "from": "0xf", "n": 5, "asset": "USD"}`),
		},
	} {
		want.Fingerprint = ""
		for _, in := range calls {
			body := string(in.Body)
			got := identify(t, tool, in)
			if want.Fingerprint == "" {
				want.Fingerprint = got.Fingerprint
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %s is\n%+v, want\n%+v", name, body, got, want)
			}
			if string(in.Body) != body {
				t.Errorf("%s: the body became %s", name, in.Body)
			}
		}
	}
	// A field that is no address keeps its case.
	other := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.Scope = []v1alpha1.Expression{`path("wallet", call.body.from)`}
		i.Amount, i.Addresses = nil, []v1alpha1.JSONPointer{"/to"}
	}))
	if got := identify(t, other, refundCall(`{"from": "0xAbC"}`, refundKey)).Scope.String(); got != "wallet/0xAbC" {
		t.Errorf("the scope is %s", got)
	}
}

func rpc(id int, meta, amount string) string {
	return fmt.Sprintf(`{"jsonrpc": "2.0", "id": %d, "method": "tools/call", "params": {"name": "pay", "arguments": {"amount": %s}, "_meta": %s}}`, id, amount, meta)
}

// What re-planning mints anew can name no intent, even if the spec says so.
func TestWhatIsNeverPartOfAnIdentity(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.IntentID = []v1alpha1.Expression{`call.body.id`}
		i.Scope = []v1alpha1.Expression{`path("fixed")`}
		i.Amount = nil
	}))
	if id, err := tool.Identify(refundCall(rpc(1, `{}`, `1`))); err == nil {
		t.Errorf("a JSON-RPC id names the intent %q", id.IntentID)
	}
	if id := identify(t, tool, refundCall(`{"id": "order-1"}`)); id.IntentID != "order-1" {
		t.Errorf("an id that is not of JSON-RPC gives %q", id.IntentID)
	}
	tool = mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.IntentID = []v1alpha1.Expression{`call.header.map(h, h).filter(h, h in ["authorization", "cookie", "traceparent"])[0]`}
		i.Scope = []v1alpha1.Expression{`path("fixed")`}
		i.Amount = nil
	}))
	if id, err := tool.Identify(refundCall(`{}`, "Authorization: Bearer x", "Cookie: c", "Traceparent: t")); err == nil {
		t.Errorf("a credential is seen as %q", id.IntentID)
	}
}

func TestBodiesThatCanBeReadInTwoWaysAreRefused(t *testing.T) {
	tool := mustCompile(t)
	for body, words := range map[string]string{
		`{"amount":1,"amount":999}`:       "twice", // K07
		`{"amount":1,"\u0061mount":999}`:  "twice",
		`{"a":{"b":1,"b":2}}`:             "twice",
		`{"amount":1}{"amount":2}`:        "after the JSON value",
		`{"amount":1`:                     "is missing",
		strings.Repeat("[", 100):          "nests deeper",
		`{"amount":1e99999999999999999}`:  "exponent",
		"{\"accountId\":\"\xff\xfe\"}":    "UTF-8",
		`{"accountId":"\ud800","a":1}`:    "surrogate",
		`{"amount": 1, "memo": NaN }`:     "JSON",
		`accountId=a1&orderId=9&amount=1`: "JSON",
	} {
		_, err := tool.Identify(refundCall(body, refundKey))
		part{body, CallInput{}, "error: " + words}.check(t, "", err)
	}
	for name, in := range map[string]CallInput{
		"content coding":    refundCall(refundBody, refundKey, "Content-Encoding: gzip"),
		"two content types": refundCall(refundBody, refundKey, "Content-Type: text/plain"),
		"charset": func() CallInput {
			in := refundCall(refundBody, refundKey)
			in.Header.Set("Content-Type", "application/json; charset=utf-16")
			return in
		}(),
	} {
		var bad *intent.InvalidError
		if _, err := tool.Identify(in); !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func bigList(n int) string {
	return `{"l": [` + strings.Repeat("1,", n-1) + `1], "s": "` + strings.Repeat("a", 4000) + `", "t": "` + strings.Repeat("a", 1<<20) + `"}`
}

// A call whose identity is too much work ends in bounded time, with an error. It is
// the cost limit that ends it, so it ends the same way on every machine: the clock
// is set far away here.
func TestAHostileCallEndsInBoundedTime(t *testing.T) {
	body := bigList(100_000)
	bigKey := `{"m": {"` + strings.Repeat("k", 1<<19) + `": 1}, "l": [` + strings.Repeat("1,", 9999) + `1]}`
	for _, c := range []struct {
		expression, body string
		costly           bool
	}{
		{`call.body.l.all(a, call.body.l.all(b, call.body.l.all(c, a + b + c > 0))) ? "x" : "y"`, body, true},
		{`string(call.body.l.map(a, call.body.s + call.body.s).size())`, body, true},
		{`string(call.body.l.filter(a, call.body.l == call.body.l).size())`, body, true},
		{`string(call.body.l.filter(a, 2 in call.body.l).size())`, body, true},
		{`string(call.body.l.map(a, call.body.s.split("")).size())`, body, true},
		{`string(call.body.l.map(a, call.body.l.map(b, call.body.l.map(c, [a, b, c]))).size())`, body, true},
		{`string(call.body.l.map(a, call.body.m.map(k, k + k)).size())`, bigKey, true},
		{`string(call.body.l.filter(a, call.body.m.all(k, k.upperAscii() == k)).size())`, bigKey, true},
		// Few steps, but each of them reads much.
		{`string(call.body.l.map(a, call.body.s + call.body.s).size())`, bigList(300), true},
		{`string(call.body.l.filter(a, call.body.l == call.body.l).size())`, bigList(300), true},
		{`string(call.body.l.filter(a, [call.body.l] == [call.body.l]).size())`, bigList(300), true},
		{`string(call.body.l.filter(a, call.body.m == call.body.m).size())`, strings.TrimSuffix(bigList(300), "}") + `, "m": {"k": [` + strings.Repeat("1,", 299) + `1]}}`, true},
		{`string(call.body.l.filter(a, call.body.s.lowerAscii() == "").size())`, bigList(300), true},
		{`string(call.body.l.filter(a, a == 1).size())`, bigList(300), false},
		{`call.body.t + "x"`, body, false},
		{`call.body.t`, body, false},
	} {
		tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
			i.IntentID = []v1alpha1.Expression{v1alpha1.Expression(c.expression)}
		}))
		decoded, err := newCall(refundCall(c.body), intent.Volatile{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // without a limit: hours
		_, err = tool.identity.intentID[0].eval(ctx, decoded)
		cancel()
		t.Logf("%v for %s", time.Since(start), c.expression)
		var costly *tooCostly
		if got := errors.As(err, &costly); got != c.costly || got && costly.byClock {
			t.Errorf("%s: too costly is %v, want %v (%v)", c.expression, got, c.costly, err)
		}
	}
}

// What the clock ends is nobody's fault: it is not the caller's to mend, and never
// an expression that does not yield.
func TestWhatTheClockEndsMayBeTriedAgain(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		loop := `call.body.l.all(a, a == 1) ? path("x") : path("y")`
		i.IntentID = []v1alpha1.Expression{v1alpha1.Expression(loop), `"second"`}
		i.Scope = []v1alpha1.Expression{v1alpha1.Expression(loop)}
		i.Lineage = v1alpha1.Expression(loop)
	}))
	c, err := newCall(refundCall(bigList(1000)), intent.Volatile{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	i := tool.identity
	_, idErr := i.readIntentID(over, c, "")
	_, scopeErr := i.readScope(over, c)
	_, lineageErr := i.readLineage(over, c)
	for _, err := range []error{idErr, scopeErr, lineageErr} {
		var bad *intent.InvalidError
		if !errors.Is(err, ErrBusy) || errors.As(err, &bad) {
			t.Errorf("got %v", err)
		}
	}
}

// An error quotes no more than a short piece of what came.
func TestErrorsAreShort(t *testing.T) {
	tool := mustCompile(t, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.IntentID = []v1alpha1.Expression{`{"a": "b"}[call.body.k]`}
	}))
	for _, in := range []CallInput{
		refundCall(`{"k": "`+strings.Repeat("x", 4000)+`"}`, refundKey),
		refundCall(`{}`, refundKey, "Content-Encoding: "+strings.Repeat("x", 4000)),
		refundCall(`{}`, refundKey, "Content-Type: "+strings.Repeat("x", 4000)),
	} {
		if _, err := tool.Identify(in); err == nil || len(err.Error()) > 600 {
			t.Errorf("the error has %d bytes: %v", len(err.Error()), err)
		}
	}
}

func TestAReadOnlyToolHasNoIdentity(t *testing.T) {
	tool, err := Compile(readTool(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tool.Identify(refundCall(refundBody)); !errors.Is(err, ErrReadOnly) {
		t.Errorf("got %v", err)
	}
}

// Whatever comes is refused with a text for the caller, or identified the same way
// each time, in full.
func FuzzIdentify(f *testing.F) {
	tool := mustCompile(f, withIdentity(func(i *v1alpha1.ToolIdentity) {
		i.IntentID = append(i.IntentID, `call.body.intent`, `call.query.intent`, `call.body.items[0].id`)
		i.Scope = []v1alpha1.Expression{
			`has(call.body.items) ? call.body.items.map(i, path("item", i.sku)) : [path("order", call.body.orderId)]`,
			`path("p", call.body.n * call.body.p + 1)`,
		}
		i.Amount.Currency = `call.body.?currency.orValue("USD")`
		i.Recipient = `call.body.?to.orValue("")`
		i.Addresses = []v1alpha1.JSONPointer{"/to"}
	}))
	f.Add("POST", "", "", "application/json", "k", "s", []byte(refundBody))
	f.Add("POST", "/x", "intent=a&intent=b", "application/json", "", "s", []byte(`{"items": [{"sku": 1.50, "id": "x"}], "n": 1e9999, "p": 1e-9999, "amount": "1"}`))
	f.Add("POST", "/x", "intent=a", "application/x-www-form-urlencoded", `"a`, "", []byte(`items=1&orderId=2&n=3&p=4&amount=5`))
	f.Add("POST", "/x", "%zz", "application/json; charset=x", "", "", []byte(`{"jsonrpc": "2.0", "id": {"a": [null, true]}, "items": {"a": 1}, "orderId": -0, "n": 9223372036854775807, "p": 2}`))
	f.Fuzz(func(t *testing.T, method, suffix, query, contentType, key, session string, body []byte) {
		in := CallInput{Method: method, Suffix: suffix, Query: map[string][]string{"intent": strings.Split(query, "&")}, Body: body, Header: http.Header{}}
		for name, value := range map[string]string{"Content-Type": contentType, "Idempotency-Key": key, "Holdfast-Session": session, "Holdfast-Call": "1"} {
			in.Header.Set(name, value)
		}
		first, err := tool.Identify(in)
		again, againErr := tool.Identify(in)
		if !reflect.DeepEqual(first, again) || (err == nil) != (againErr == nil) {
			t.Fatalf("two answers for one call: %+v (%v) and %+v (%v)", first, err, again, againErr)
		}
		if err != nil {
			var bad *intent.InvalidError
			if !errors.As(err, &bad) || strings.Contains(err.Error(), "internal error") {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		if parsed, err := intent.ParseIntentID(first.IntentID); err != nil || parsed != first.IntentID {
			t.Errorf("the intent ID %q is not canonical: %q, %v", first.IntentID, parsed, err)
		}
		if scope, err := intent.NewScope(slices.Clone(first.Scope)...); err != nil || !scope.Equal(first.Scope) {
			t.Errorf("the scope %q is not canonical: %v", first.Scope, err)
		}
		if first.Amount == nil || first.Fingerprint == "" || first.IdentityHash == "" {
			t.Errorf("incomplete: %+v", first)
		}
	})
}

func BenchmarkIdentify(b *testing.B) {
	tool := mustCompile(b)
	in := refundCall(`{"accountId": "a1", "orderId": 9, "amount": 49.99, "memo": "x", "lines": [1,2,3,4,5,6,7,8,9]}`, refundKey, "Holdfast-Session: s", "Holdfast-Call: 4")
	for b.Loop() {
		if _, err := tool.Identify(in); err != nil {
			b.Fatal(err)
		}
	}
}

// Where amount or recipient are read in another way, what they say cannot be compared.
func TestTheHashesOfAmountAndRecipient(t *testing.T) {
	type hashes struct{ amount, recipient string }
	of := func(change func(*v1alpha1.ToolIdentity)) hashes {
		tool := mustCompile(t, withIdentity(change))
		return hashes{tool.identity.amountHash, tool.identity.recipientHash}
	}
	as := of(func(*v1alpha1.ToolIdentity) {})
	for _, row := range []struct {
		name              string
		change            func(*v1alpha1.ToolIdentity)
		amount, recipient bool
	}{
		{"the scope", func(i *v1alpha1.ToolIdentity) { i.Scope = []v1alpha1.Expression{`path("other", "1")`} }, false, false},
		{"the amount", func(i *v1alpha1.ToolIdentity) { i.Amount.Value = "call.body.other" }, true, false},
		{"its currency", func(i *v1alpha1.ToolIdentity) { i.Amount.Currency = `"EUR"` }, true, false},
		{"no amount", func(i *v1alpha1.ToolIdentity) { i.Amount = nil }, true, false},
		{"the recipient", func(i *v1alpha1.ToolIdentity) { i.Recipient = "call.body.other" }, false, true},
		{"the recipient's letters", func(i *v1alpha1.ToolIdentity) { i.Addresses = []v1alpha1.JSONPointer{"/to"} }, false, true},
	} {
		got := of(row.change)
		if (got.amount != as.amount) != row.amount || (got.recipient != as.recipient) != row.recipient {
			t.Errorf("%s: another amount %t, another recipient %t", row.name, got.amount != as.amount, got.recipient != as.recipient)
		}
	}
}
