package policy

import (
	"context"
	"reflect"
	"testing"

	"github.com/google/cel-go/common/types"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// simple are expressions that are read directly, where the call allows it.
var simple = []string{
	`call.header["idempotency-key"]`, `call.header.accept`, `call.method`, `call.path`, `call.agent`, `call.session`,
	`call.query.intent`, `call.query["intent"]`, `call.body.amount`, `call.body.a.b`, `call.body["a"].b`, `call.body.?currency.orValue("USD")`,
	`call.body.a.?b.orValue("")`, `"USD"`, `""`, `path("order", call.body.orderId)`, `path(call.session, call.index)`,
	`path("account", call.body.accountId, "order", call.body.a.b)`, `path("x", call.query.intent)`, `path(call.body.?a.orValue("z"), "y")`,
}

// other are expressions that CEL alone reads.
var other = []string{
	`call.body.amount + 1`, `has(call.body.a) ? call.body.a : "b"`, `call.body.items.map(i, path("item", i.sku))`, `call.body.items[0]`,
	`call.body.?a`, `call.body[?"a"].orValue("b")`, `call.body.?a.orValue(1)`, `call.body.?a.?b.orValue("c")`, `[path("a")]`,
	`call.header["a" + "b"]`, `path("a", string(call.body.a))`, `number("1.5")`,
}

// A direct reader says what CEL says, or nothing.
func TestDirectIsWhatCELSays(t *testing.T) {
	env, err := environment()
	if err != nil {
		t.Fatal(err)
	}
	compile := func(text string) *expression {
		t.Helper()
		checked, issues := env.Compile(text)
		if issues.Err() != nil {
			t.Fatalf("%s: %v", text, issues.Err())
		}
		program, err := env.Program(checked)
		if err != nil {
			t.Fatal(err)
		}
		return &expression{name: text, text: text, program: program, direct: directOf(checked.NativeRep().Expr())}
	}
	long := string(make([]byte, maxText+1))
	bodies := []any{
		nil, "text", []any{"x"}, map[string]any{},
		map[string]any{"amount": number49(t), "currency": "EUR", "orderId": "9", "accountId": "a/1", "a": map[string]any{"b": "c"}},
		map[string]any{"amount": true, "currency": nil, "orderId": "", "accountId": "a1", "a": "b", "items": []any{"x"}},
		map[string]any{"amount": map[string]any{}, "currency": number49(t), "orderId": []any{}, "a": map[string]any{"b": nil}},
		map[string]any{"amount": "1", "currency": "", "orderId": "\x00", "accountId": long, "a": map[string]any{"b": long}},
		map[string]any{"amount": long, "currency": long, "a": map[string]any{"b": "", "c": "d"}},
	}
	var calls []*call
	for _, body := range bodies {
		calls = append(calls,
			&call{method: "POST", path: "/x", body: body, session: "s", index: "4", agent: "a",
				header: map[string]any{"idempotency-key": "k", "accept": "*/*"}, query: map[string]any{"intent": "i"}},
			&call{body: body, header: map[string]any{"idempotency-key": long}, query: map[string]any{"intent": []any{"i", "j"}}, index: "4"})
	}
	said := 0
	for _, text := range simple {
		e := compile(text)
		if e.direct == nil {
			t.Errorf("%s is not read directly", text)
			continue
		}
		for i, c := range calls {
			got, ok := e.direct(c)
			if !ok {
				continue
			}
			said++
			want, err := e.evalCEL(context.Background(), c)
			if got == types.String("") {
				got = nil // as eval takes it
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s over call %d is %.100v, but CEL says %.100v (%v)", text, i, got, want, err)
			}
		}
	}
	if said < len(simple) {
		t.Errorf("only %d values were read directly", said)
	}
	for _, text := range other {
		if compile(text).direct != nil {
			t.Errorf("%s is read directly", text)
		}
	}
}

func number49(t *testing.T) intent.Number {
	t.Helper()
	n, err := intent.ParseNumber("49.99")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// No timer is started for a call that CEL is not asked about.
func TestDirectNeedsNoTimer(t *testing.T) {
	tool := mustCompile(t)
	in := refundCall(refundBody, refundKey, "Holdfast-Session: s", "Holdfast-Call: 4")
	c, err := newCall(in, tool.identity.volatile, tool.identity.keyHeaders)
	if err != nil {
		t.Fatal(err)
	}
	p := &patience{}
	defer p.end()
	if _, err := tool.identity.readScope(p, c); err != nil {
		t.Fatal(err)
	}
	if p.of != nil {
		t.Error("CEL was asked")
	}
	c.header = map[string]any{}
	if _, err := tool.identity.readIntentID(p, c, ""); err != nil {
		t.Fatal(err)
	}
	if p.of == nil {
		t.Error("CEL was not asked about a header that is missing")
	}
	if _, ok := p.Deadline(); !ok {
		t.Error("there is no end to it")
	}
}
