// For which value of per a call counts, and what a budget's limits may say.

package policy

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

func limited(change func(*v1alpha1.SpendLimit)) *v1alpha1.IntentBudget {
	l := v1alpha1.SpendLimit{Name: "daily", Currency: "USD", Limit: "500.00", Window: metav1.Duration{Duration: 24 * time.Hour}}
	change(&l)
	return refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.Spend = []v1alpha1.SpendLimit{l} })
}

func spendCall() *guard.Call {
	return &guard.Call{
		Key:     guard.Key{Namespace: "support", Tool: "issue-refund", Caller: "system:serviceaccount:support:agent", IntentID: "k1"},
		Scope:   intent.Scope{"customer/c1/order/9", "customer/c1/order/10"},
		Lineage: "sess/1", Amount: &intent.Money{Value: "49.99", Currency: "USD"}, Recipient: "c1", Fingerprint: "sha256:one",
	}
}

func TestTheLimitsOfACall(t *testing.T) {
	for per, want := range map[string]string{
		"":                                   "",
		"object.spec.caller":                 "system:serviceaccount:support:agent",
		" object.spec.recipient ":            "c1",
		"object.spec.toolRef.name":           "issue-refund",
		"object.metadata.namespace":          "support",
		"object.spec.intentID":               "k1",
		"object.spec.lineage":                "sess/1",
		"object.spec.fingerprint":            "sha256:one",
		`object.spec.scope[0].split("/")[1]`: "c1",
		`object.spec.amount.currency + " " + object.spec.amount.value`:                                     "USD 49.99",
		`object.spec.caller.startsWith("system:serviceaccount:support:") ? "support" : object.spec.caller`: "support",
		`object.spec.scope.filter(p, p.endsWith("/10"))[0]`:                                                "customer/c1/order/10",
		`object.spec.scope.all(p, p.startsWith("customer/c1/")) ? "c1" : string(size(object.spec.scope))`:  "c1",
	} {
		tool, err := Compile(refundTool(), limited(func(l *v1alpha1.SpendLimit) { l.Per = per }))
		if err != nil {
			t.Errorf("%s: %v", per, err)
			continue
		}
		got, unknown := tool.spendOf(spendCall())[0], ""
		if per != "" {
			unknown = tool.spend[0].Unknown
		}
		if want := (guard.SpendLimit{
			Name: "daily", Amount: intent.Money{Value: "500", Currency: "USD"}, Window: 24 * time.Hour, Per: want, Own: per == "object.spec.caller",
		}); got != want {
			t.Errorf("%s: %+v, want %+v", per, got, want)
		}
		// Whoever does not ask for a call cannot count it.
		if per != "" && unknown == "" {
			t.Errorf("%s: it counts for a value that nobody asked for", per)
		}
	}
	for per, want := range map[string]string{
		`object.spec.scope[7]`:                             "does not yield",
		`object.spec.recipient.split("/")[1]`:              "does not yield",
		strings.Repeat(`object.spec.caller + `, 40) + `""`: "more than 1024 bytes",
	} {
		tool, err := Compile(refundTool(), limited(func(l *v1alpha1.SpendLimit) { l.Per = per }))
		if err != nil {
			t.Errorf("%s: %v", per, err)
			continue
		}
		if got := tool.spendOf(spendCall())[0]; got.Per != "" || !strings.Contains(got.Unknown, want) {
			t.Errorf("%s: %+v, want that it says %q", per, got, want)
		}
	}
	tool, err := Compile(refundTool(), limited(func(l *v1alpha1.SpendLimit) { l.OnExceed = v1alpha1.ExceedHold }))
	if err != nil || !tool.spendOf(spendCall())[0].Hold {
		t.Errorf("%v", err)
	}
}

func TestLimitsThatCannotBeUsed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1alpha1.SpendLimit)
		saying string
	}{
		"no name":            {func(l *v1alpha1.SpendLimit) { l.Name = "" }, "spec.spend[0].name"},
		"no number":          {func(l *v1alpha1.SpendLimit) { l.Limit = "x" }, "spec.spend[0].limit"},
		"negative":           {func(l *v1alpha1.SpendLimit) { l.Limit = "-1" }, "spec.spend[0].limit"},
		"finer than a cent":  {func(l *v1alpha1.SpendLimit) { l.Limit = "1.001" }, "spec.spend[0].limit"},
		"no such currency":   {func(l *v1alpha1.SpendLimit) { l.Currency = "usd" }, "spec.spend[0].limit"},
		"no window":          {func(l *v1alpha1.SpendLimit) { l.Window.Duration = 0 }, "spec.spend[0].window"},
		"window too long":    {func(l *v1alpha1.SpendLimit) { l.Window.Duration = 8761 * time.Hour }, "spec.spend[0].window"},
		"onExceed":           {func(l *v1alpha1.SpendLimit) { l.OnExceed = "x" }, "spec.spend[0].onExceed"},
		"per: empty":         {func(l *v1alpha1.SpendLimit) { l.Per = " " }, "spec.spend[0].per: is empty"},
		"per: no expression": {func(l *v1alpha1.SpendLimit) { l.Per = "x(" }, "spec.spend[0].per: line 1"},
		"per: no such field": {func(l *v1alpha1.SpendLimit) { l.Per = "object.spec.callr" }, "undefined field 'callr'"},
		"per: the call":      {func(l *v1alpha1.SpendLimit) { l.Per = "call.agent" }, "undeclared reference to 'call'"},
		"per: no string":     {func(l *v1alpha1.SpendLimit) { l.Per = "object.spec.scope" }, "must yield a string"},
		"per: not available": {func(l *v1alpha1.SpendLimit) { l.Per = `object.spec.caller.replace("a", "b")` }, "the function replace is not available"},
		"per: made messages": {func(l *v1alpha1.SpendLimit) { l.Per = "policy.Object{}.spec.caller" }, "messages cannot be made"},
		"per: a pattern":     {func(l *v1alpha1.SpendLimit) { l.Per = `object.spec.caller.matches("a*") ? "a" : "b"` }, "the function matches is not available"},
	} {
		_, err := Compile(refundTool(), limited(c.change))
		var waiting *NotServedError
		if !errors.As(err, &waiting) || waiting.Reason != ReasonBudgetInvalid || !strings.Contains(waiting.Message, c.saying) {
			t.Errorf("%s: %v, want that it says %q", name, err, c.saying)
		}
	}
	twice := limited(func(*v1alpha1.SpendLimit) {})
	twice.Spec.Spend = append(twice.Spec.Spend, twice.Spec.Spend[0])
	if err := CheckBudget(twice); err == nil || !strings.Contains(err.Error(), "comes twice") {
		t.Errorf("one name twice: %v", err)
	}
	for range 8 {
		twice.Spec.Spend = append(twice.Spec.Spend, twice.Spec.Spend[0])
	}
	if err := CheckBudget(twice); err == nil || !strings.Contains(err.Error(), "more than 8") {
		t.Errorf("too many: %v", err)
	}
	bad := refundBudget(func(b *v1alpha1.IntentBudget) {
		b.Spec.Overlap = &v1alpha1.OverlapSpec{Lookalike: &v1alpha1.LookalikeSpec{}}
	})
	if err := CheckBudget(bad); err == nil || !strings.Contains(err.Error(), "spec.overlap.lookalike.window") {
		t.Errorf("no window of lookalikes: %v", err)
	}
}
