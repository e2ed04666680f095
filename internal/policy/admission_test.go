// What the rules of a tool say, and which cannot be used.

package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/admission/ruletest"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// The API server is held to the same table, in package test/crd.
func TestRulesSayWhatTheAPIServerSays(t *testing.T) {
	for _, c := range ruletest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			compiled, err := CompileAdmission(c.Rules)
			if err != nil {
				t.Fatal(err)
			}
			got, err := Ruling(compiled, &c.Call)
			if err != nil || got != (guard.Ruling{Deny: c.Denied}) {
				t.Errorf("%+v, want %q (%v)", got, c.Denied, err)
			}
		})
	}
}

func ruleOf(action v1alpha1.AdmissionAction, expression, message string) v1alpha1.AdmissionRule {
	return v1alpha1.AdmissionRule{Expression: v1alpha1.AdmissionExpression(expression), Message: message, Action: action}
}

func TestRulesThatHoldAndRulesThatDeny(t *testing.T) {
	const deny, hold = v1alpha1.AdmissionDeny, v1alpha1.AdmissionHold
	fails := `object.spec.scope[7] == ""`
	for name, c := range map[string]struct {
		rules []v1alpha1.AdmissionRule
		want  guard.Ruling
	}{
		"none":                         {nil, guard.Ruling{}},
		"all pass":                     {[]v1alpha1.AdmissionRule{ruleOf(hold, "true", "a"), ruleOf(deny, "true", "b")}, guard.Ruling{}},
		"two hold":                     {[]v1alpha1.AdmissionRule{ruleOf(hold, "false", "a"), ruleOf(hold, "true", "b"), ruleOf(hold, "false", "c")}, guard.Ruling{Hold: "a; c"}},
		"one holds before one denies":  {[]v1alpha1.AdmissionRule{ruleOf(hold, "false", "a"), ruleOf(deny, "false", "b")}, guard.Ruling{Deny: "b"}},
		"one that holds fails":         {[]v1alpha1.AdmissionRule{ruleOf(hold, fails, "a")}, guard.Ruling{Deny: "expression '" + fails + "' resulted in error: index out of bounds: 7"}},
		"one fails and another denies": {[]v1alpha1.AdmissionRule{ruleOf(hold, fails, "a"), ruleOf(deny, "false", "b")}, guard.Ruling{Deny: "b"}},
	} {
		compiled, err := CompileAdmission(c.rules)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := Ruling(compiled, spendCall()); err != nil || got != c.want {
			t.Errorf("%s: %+v, want %+v (%v)", name, got, c.want, err)
		}
	}
}

func TestAdmissionRulesThatCannotBeUsed(t *testing.T) {
	for expression, saying := range map[string]string{
		``:                                     "is empty",
		` `:                                    "is empty",
		`x(`:                                   "line 1, column",
		`object.spec.recipient`:                "must yield true or false",
		`object.spec.amount.value`:             "must yield true or false",
		`"yes"`:                                "must yield true or false",
		`request.userInfo.username == "a"`:     "undeclared reference to 'request'",
		`oldObject == null`:                    "undeclared reference to 'oldObject'",
		`params.x == 1`:                        "undeclared reference to 'params'",
		`namespaceObject.metadata.name == "a"`: "undeclared reference to 'namespaceObject'",
		`authorizer.group("").resource("pods").check("get").allowed()`: "undeclared reference to 'authorizer'",
		`variables.a`:                          "undeclared reference to 'variables'",
		`object.metadata.name == "a"`:          `object.metadata has no field "name"`,
		`has(object.metadata.labels)`:          `object.metadata has no field "labels"`,
		`object.spec.callr == "a"`:             `object.spec has no field "callr"`,
		`object.spec.?callr.hasValue()`:        `object.spec has no field "callr"`,
		`object.spec.amount.unit == "a"`:       `object.spec.amount has no field "unit"`,
		`object.status.state == "Held"`:        `object has no field "status"`,
		`object.spec == object.spec`:           "object.spec can only be read field by field",
		`size(object.metadata) == 1`:           "object.metadata can only be read field by field",
		`object["spec"]["recipient"] == "a"`:   "object can only be read field by field",
		`has(object.spec)`:                     "object.spec can only be read field by field",
		`[1].all(object, object > 0)`:          "object can only be read field by field",
		`double(object.spec.amount.value) < 5`: "the function double is not exact",
		`quantity(object.spec.amount.value).asApproximateFloat() < quantity("1").asApproximateFloat()`: "the function asApproximateFloat is not exact",
		`1.5 < 2.5`:                              "a floating-point number is not exact",
		`"a" + `:                                 "line 1",
		strings.Repeat("true || ", 128) + "true": "more than 1024 characters",
	} {
		_, err := CompileAdmission([]v1alpha1.AdmissionRule{ruleOf(v1alpha1.AdmissionHold, "true", "a"), ruleOf(v1alpha1.AdmissionDeny, expression, "b")})
		var spec *SpecError
		if !errors.As(err, &spec) || spec.Field != "spec.admission[1].expression" || !strings.Contains(spec.Message, saying) {
			t.Errorf("%s: %v, want that it says %q", expression, err, saying)
		}
	}
	for name, c := range map[string]struct {
		rule  v1alpha1.AdmissionRule
		field string
	}{
		"no action":    {ruleOf("", "true", "a"), "spec.admission[0].action"},
		"other action": {ruleOf("Warn", "true", "a"), "spec.admission[0].action"},
		"no message":   {ruleOf(v1alpha1.AdmissionDeny, "true", " "), "spec.admission[0].message"},
		"two lines":    {ruleOf(v1alpha1.AdmissionDeny, "true", "a\nb"), "spec.admission[0].message"},
	} {
		_, err := CompileAdmission([]v1alpha1.AdmissionRule{c.rule})
		var spec *SpecError
		if !errors.As(err, &spec) || spec.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := CompileAdmission(make([]v1alpha1.AdmissionRule, 11)); err == nil || !strings.Contains(err.Error(), "more than 10") {
		t.Errorf("eleven rules: %v", err)
	}
	reads := readTool(func(o *v1alpha1.AgentTool) {
		o.Spec.Admission = []v1alpha1.AdmissionRule{ruleOf(v1alpha1.AdmissionDeny, "true", "a")}
	})
	if _, err := Compile(reads, nil); err == nil || !strings.Contains(err.Error(), "spec.admission: a ReadOnly tool has no intents") {
		t.Errorf("a tool that reads: %v", err)
	}
}

func TestAToolWithARuleThatCannotBeUsedIsNotServed(t *testing.T) {
	if _, err := Compile(refundTool(func(o *v1alpha1.AgentTool) {
		o.Spec.Admission = []v1alpha1.AdmissionRule{ruleOf(v1alpha1.AdmissionDeny, "object.spec.x", "a")}
	}), refundBudget()); err == nil || !strings.Contains(err.Error(), "spec.admission[0].expression") {
		t.Errorf("%v", err)
	}
}

func BenchmarkRuling(b *testing.B) {
	compiled, err := CompileAdmission([]v1alpha1.AdmissionRule{
		ruleOf(v1alpha1.AdmissionDeny, `object.spec.amount.currency in ["USD", "EUR"]`, "a"),
		ruleOf(v1alpha1.AdmissionHold, `quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0`, "b"),
	})
	if err != nil {
		b.Fatal(err)
	}
	c := spendCall()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Ruling(compiled, c); err != nil {
			b.Fatal(err)
		}
	}
}
