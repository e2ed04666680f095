// Package ruletest is what admission rules must say of intents, as one table: the gateway
// and the API server are both held to it, each in its own tests.
package ruletest

import (
	"fmt"
	"strings"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// The place of every intent of the table.
const (
	Namespace = "support"
	Tool      = "ruled-refund"
	Caller    = "system:serviceaccount:support:agent"
	Message   = "the first rule"
)

// Case is one row: rules that deny, an intent, and what is said of it.
type Case struct {
	Name  string
	Rules []v1alpha1.AdmissionRule
	Call  guard.Call
	// Denied is the whole of what is said; "": it passes.
	Denied string
}

// rules are the expressions with messages of their own.
func rules(expressions ...string) []v1alpha1.AdmissionRule {
	out := make([]v1alpha1.AdmissionRule, len(expressions))
	for i, e := range expressions {
		out[i] = v1alpha1.AdmissionRule{Expression: v1alpha1.AdmissionExpression(e), Message: message(i), Action: v1alpha1.AdmissionDeny}
	}
	return out
}

func message(i int) string {
	if i == 0 {
		return Message
	}
	return fmt.Sprintf("rule %d", i+1)
}

// refund is an intent with everything that one can have.
func refund(changes ...func(*guard.Call)) guard.Call {
	c := guard.Call{
		Key:   guard.Key{Namespace: Namespace, Tool: Tool, Caller: Caller, IntentID: "k1"},
		Scope: intent.Scope{"customer/c1/order/10", "customer/c1/order/9"}, Lineage: "sess/1",
		Amount: &intent.Money{Value: "49.99", Currency: "USD"}, Recipient: "c1", Fingerprint: "sha256:" + strings.Repeat("0", 64),
	}
	for _, change := range changes {
		change(&c)
	}
	return c
}

func amount(value, currency string) func(*guard.Call) {
	return func(c *guard.Call) { c.Amount = &intent.Money{Value: value, Currency: currency} }
}

func recipient(r string) func(*guard.Call) { return func(c *guard.Call) { c.Recipient = r } }

// bare has only what every intent has.
func bare(c *guard.Call) { c.Lineage, c.Amount, c.Recipient, c.Fingerprint = "", nil, "", "" }

// wide has as many and as long paths as there may be, in the order that a scope has.
func wide(c *guard.Call) {
	c.Scope = nil
	for i := range intent.MaxScopePaths {
		c.Scope = append(c.Scope, intent.Path(fmt.Sprintf("customer/c1/order/%02d%s", i, strings.Repeat("x", 200))))
	}
}

// nested asks about every combination of so many paths of a scope.
func nested(depth int) string {
	condition := `size(a0) > 0`
	for i := depth - 1; i >= 0; i-- {
		condition = fmt.Sprintf("object.spec.scope.all(a%d, %s)", i, condition)
	}
	return condition
}

// failing is what is said of an expression that fails.
func failing(expression, why string) string {
	return fmt.Sprintf("expression '%s' resulted in error: %s", expression, why)
}

// Cases are the rows.
func Cases() []Case {
	one := func(name, expression string, denied string, changes ...func(*guard.Call)) Case {
		return Case{Name: name, Rules: rules(expression), Call: refund(changes...), Denied: denied}
	}
	passes := func(expression string, changes ...func(*guard.Call)) Case {
		return one("passes: "+expression, expression, "", changes...)
	}
	denied := func(expression string, changes ...func(*guard.Call)) Case {
		return one("denied: "+expression, expression, Message, changes...)
	}
	fails := func(expression, why string, changes ...func(*guard.Call)) Case {
		return one("fails: "+expression, expression, failing(expression, why), changes...)
	}
	const (
		currencies = `object.spec.amount.currency in ["USD", "EUR"]`
		most500    = `quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0`
	)
	return []Case{
		passes(`true`),
		denied(`false`),
		passes(currencies),
		denied(currencies, amount("10", "GBP")),
		denied(currencies, amount("10", "usd-token")),

		// Decimals, to the last digit.
		passes(most500),
		passes(most500, amount("500", "USD")),
		denied(most500, amount("500.01", "USD")),
		denied(most500, amount("500.000000001", "GLD")),
		denied(most500, amount("99999999999999999999999", "USD")),
		passes(`quantity(object.spec.amount.value).isLessThan(quantity("0.3"))`, amount("0.29", "USD")),
		denied(`quantity(object.spec.amount.value).isLessThan(quantity("0.3"))`, amount("0.3", "USD")),
		passes(`quantity(object.spec.amount.value).add(quantity("0.01")).compareTo(quantity("50")) == 0`),
		passes(`isQuantity(object.spec.amount.value)`),
		passes(`object.spec.amount.value == "49.99"`),
		passes(`sign(quantity(object.spec.amount.value)) == 1`),

		// Fields that are absent.
		passes(`!has(object.spec.amount)`, bare),
		denied(`has(object.spec.lineage)`, bare),
		passes(`!has(object.spec.recipient) || object.spec.recipient == "c1"`),
		passes(`!has(object.spec.recipient) || object.spec.recipient == "c1"`, bare),
		denied(`object.spec.?recipient.orValue("nobody") != "nobody"`, bare),
		passes(`object.spec.?amount.?currency.orValue("USD") == "USD"`, bare),
		passes(`object.spec.?lineage.hasValue()`),
		fails(`object.spec.lineage == "sess/1"`, "no such key: lineage", bare),
		fails(`object.spec.amount.currency == "USD"`, "no such key: amount", bare),
		// What fails on one side of an or decides nothing if the other is true.
		passes(`object.spec.lineage == "sess/1" || true`, bare),
		denied(`object.spec.lineage == "sess/1" && false`, bare),

		// Text, in characters and not in bytes, and never normalised.
		passes(`object.spec.recipient == "Zoë"`, recipient("Zoë")),
		passes(`object.spec.recipient == "Zo\u00eb"`, recipient("Zoë")),
		denied(`object.spec.recipient == "Zoë"`, recipient("Zoe\u0308")),
		passes(`size(object.spec.recipient) == 3`, recipient("Zoë")),
		passes(`size(object.spec.recipient) == 2`, recipient("日本")),
		passes(`object.spec.recipient.lowerAscii() == "zoË"`, recipient("ZOË")),
		passes(`object.spec.recipient.startsWith("😀")`, recipient("😀x")),
		passes(`object.spec.recipient.matches("^c[0-9]+$")`),
		denied(`object.spec.recipient.matches("^c[0-9]+$")`, recipient("c1\nd")),
		passes(`object.spec.recipient.find("[0-9]+") == "1"`),
		passes(`object.spec.caller.split(":")[2] == object.metadata.namespace`),
		passes(`object.spec.intentID.substring(0, 1) == "k" && object.spec.toolRef.name == "ruled-refund"`),
		denied(`object.spec.recipient.replace("c", "d") == "c1"`),
		passes(`object.spec.fingerprint.startsWith("sha256:")`),

		// Lists.
		passes(`object.spec.scope.all(p, p.startsWith("customer/c1/"))`),
		denied(`object.spec.scope.exists(p, p.endsWith("/9"))`, wide),
		passes(`object.spec.scope.exists_one(p, p.endsWith("/9"))`),
		passes(`object.spec.scope.filter(p, p.endsWith("/9")).size() == 1`),
		passes(`object.spec.scope.map(p, p.split("/")[1]).all(c, c == "c1")`),
		passes(`object.spec.scope.isSorted() && object.spec.scope.indexOf("customer/c1/order/9") == 1`),
		passes(`object.spec.scope.all(i, p, i < 2 && p != "")`),
		passes(`sets.contains(["USD", "EUR"], [object.spec.amount.currency])`),
		passes(`object.spec.scope == ["customer/c1/order/10", "customer/c1/order/9"]`),

		// The API server's own libraries.
		passes(`!format.dns1123Label().validate(object.spec.recipient).hasValue()`),
		denied(`!format.dns1123Label().validate(object.spec.recipient).hasValue()`, recipient("C_1")),
		passes(`isIP("10.0.0.1") && cidr("10.0.0.0/8").containsIP("10.0.0.1")`),
		passes(`url("https://example.com/" + object.spec.recipient).getEscapedPath() == "/c1"`),
		passes(`timestamp("2026-01-01T00:00:00Z").getFullYear() == 2026 && duration("90s") > duration("1m")`),

		// What fails.
		fails(`object.spec.scope[7] == ""`, "index out of bounds: 7"),
		fails(`10 / (size(object.spec.scope) - 2) == 1`, "division by zero"),
		fails(`object.spec.amount.value > 5`, "no such overload"),
		fails(`int(object.spec.amount.value) > 5`, `type conversion error from 'string' to 'int'`),
		fails(nested(6), "operation cancelled: actual cost limit exceeded", wide),
		passes(nested(2), wide),

		// Several: all are asked, and the first that does not pass is told.
		{"all of three pass", rules(`true`, currencies, most500), refund(), ""},
		{"the second of three denies", rules(`true`, currencies, `false`), refund(amount("10", "GBP")), "rule 2"},
		{"the first fails and the second denies", rules(`object.spec.lineage != ""`, `false`), refund(bare), failing(`object.spec.lineage != ""`, "no such key: lineage")},
		{"a message in other letters", []v1alpha1.AdmissionRule{{Expression: "false", Message: "  日本 only – “please” 😀 ", Action: v1alpha1.AdmissionDeny}}, refund(), "日本 only – “please” 😀"},
	}
}
