package policy

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

func ledgerCheck() *v1alpha1.StatusCheck {
	return &v1alpha1.StatusCheck{
		Query:             []v1alpha1.CheckParameter{{Name: "key", Value: `intent.key`}},
		Outcome:           `response.body.count > 0 ? "Succeeded" : "Failed"`,
		ProviderReference: `response.body.entries[0].id`,
		Finality:          v1alpha1.FinalitySettleAfter,
	}
}

func checkedTool(changes ...func(*v1alpha1.StatusCheck)) *v1alpha1.AgentTool {
	return refundTool(func(o *v1alpha1.AgentTool) {
		o.Spec.UnknownOutcome, o.Spec.StatusCheck = v1alpha1.UnknownStatusCheck, ledgerCheck()
		for _, change := range changes {
			change(o.Spec.StatusCheck)
		}
	})
}

func aCheck() *guard.Check {
	return &guard.Check{
		Key: guard.Key{IntentID: "a/b?c"}, ProviderKey: "hf_1", ProviderReference: "op_1",
		Scope: intent.Scope{"account/a1", "order/9"}, Lineage: "s/4", Amount: &intent.Money{Value: "49.99", Currency: "USD"}, Recipient: "../admin",
	}
}

func compiled(t *testing.T, tool *v1alpha1.AgentTool) *Tool {
	t.Helper()
	out, err := Compile(tool, refundBudget())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestWhereTheProviderIsAsked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1alpha1.StatusCheck)
		check  func(*guard.Check)
		want   string
		err    string
	}{
		"query": {nil, nil, "http://crm.support.svc:8080/refunds?key=hf_1", ""},
		"a path": {func(s *v1alpha1.StatusCheck) {
			s.Path, s.Query = `path("v1", "refunds", intent.key)`, nil
		}, nil, "http://crm.support.svc:8080/v1/refunds/hf_1", ""},
		"what an agent chose stays one segment": {func(s *v1alpha1.StatusCheck) { s.Path = `path("refunds", intent.id)` }, nil,
			"http://crm.support.svc:8080/refunds/a%2Fb%3Fc?key=hf_1", ""},
		"and climbs nowhere": {func(s *v1alpha1.StatusCheck) { s.Path = `path("refunds", intent.recipient)` },
			func(c *guard.Check) { c.Recipient = ".." }, "", `".." as a segment`},
		"a slash in a name": {func(s *v1alpha1.StatusCheck) { s.Path = `path("refunds", intent.recipient)` }, nil,
			"http://crm.support.svc:8080/refunds/..%2Fadmin?key=hf_1", ""},
		"all that is known": {func(s *v1alpha1.StatusCheck) {
			s.Query = []v1alpha1.CheckParameter{
				{Name: "ref", Value: `intent.providerReference`}, {Name: "scope", Value: `intent.scope[1]`},
				{Name: "amount", Value: `intent.amount.value + intent.amount.currency`}, {Name: "lineage", Value: `intent.lineage`},
			}
		}, nil, "http://crm.support.svc:8080/refunds?amount=49.99USD&lineage=s%2F4&ref=op_1&scope=order%2F9", ""},
		"a field that it lacks": {func(s *v1alpha1.StatusCheck) { s.Query[0].Value = `intent.providerReference` },
			func(c *guard.Check) { c.ProviderReference = "" }, "", "lacks"},
		"a field that it may lack": {func(s *v1alpha1.StatusCheck) {
			s.Query[0].Value = `has(intent.providerReference) ? intent.providerReference : intent.key`
		},
			func(c *guard.Check) { c.ProviderReference = "" }, "http://crm.support.svc:8080/refunds?key=hf_1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			tool := checkedTool()
			if c.change != nil {
				c.change(tool.Spec.StatusCheck)
			}
			check := aCheck()
			if c.check != nil {
				c.check(check)
			}
			u, err := compiled(t, tool).Check.URL(check)
			switch {
			case c.err != "":
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("%v, %v; want an error with %q", u, err, c.err)
				}
			case err != nil || u.String() != c.want:
				t.Fatalf("%v, %v; want %s", u, err, c.want)
			}
		})
	}
}

func TestHowTheProvidersAnswerIsRead(t *testing.T) {
	json := func(status int, body string) Answer {
		return Answer{Status: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(body)}
	}
	outcome := func(text string) func(*v1alpha1.StatusCheck) {
		return func(s *v1alpha1.StatusCheck) { s.Outcome = v1alpha1.CheckAnswerExpression(text) }
	}
	always := func(word string) func(*v1alpha1.StatusCheck) {
		return outcome(`intent.key == "hf_1" ? "` + word + `" : "Unknown"`)
	}
	for name, c := range map[string]struct {
		change func(*v1alpha1.StatusCheck)
		in     Answer
		want   guard.Outcome
		ref    string
		why    string
	}{
		"found":                          {nil, json(200, `{"count":1,"entries":[{"id":"re_1"}]}`), guard.AttemptSucceeded, "re_1", ""},
		"not found":                      {nil, json(200, `{"count":0,"entries":[]}`), guard.AttemptFailed, "", "says Failed"},
		"a field is missing":             {nil, json(200, `{}`), guard.AttemptUnknown, "", "lacks"},
		"no JSON":                        {nil, json(200, `{"count":`), guard.AttemptUnknown, "", "not valid"},
		"another word":                   {always("failed"), json(200, `{}`), guard.AttemptUnknown, "", "none of"},
		"Retryable is no word of it":     {always("Retryable"), json(200, `{}`), guard.AttemptUnknown, "", "none of"},
		"nothing":                        {always(""), json(200, `{}`), guard.AttemptUnknown, "", ""},
		"pending":                        {always("Pending"), json(200, `{}`), guard.AttemptPending, "", ""},
		"no entry is 404":                {always("Failed"), json(404, `{}`), guard.AttemptFailed, "", ""},
		"who asks is not known":          {always("Failed"), json(401, `{}`), guard.AttemptUnknown, "", "not 2xx, 404 or 410"},
		"too many questions":             {always("Failed"), json(429, `{}`), guard.AttemptUnknown, "", "not 2xx"},
		"the provider is in trouble":     {always("Failed"), json(500, `{}`), guard.AttemptUnknown, "", "not 2xx"},
		"a redirect":                     {always("Failed"), json(302, `{}`), guard.AttemptUnknown, "", "not 2xx"},
		"no success but 2xx":             {always("Succeeded"), json(404, `{}`), guard.AttemptUnknown, "", "not 2xx"},
		"a reference that is none":       {nil, json(200, `{"count":1,"entries":[{"id":"a b"}]}`), guard.AttemptSucceeded, "", ""},
		"a reference that is missing":    {nil, json(200, `{"count":1,"entries":[]}`), guard.AttemptSucceeded, "", ""},
		"compared with what was to move": {outcome(`response.body.amount == intent.amount.value ? "Succeeded" : "Unknown"`), json(200, `{"amount":"5"}`), guard.AttemptUnknown, "", "says Unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			tool := checkedTool()
			if c.change != nil {
				c.change(tool.Spec.StatusCheck)
			}
			got := compiled(t, tool).Check.Read(aCheck(), c.in)
			if got.Outcome != c.want || got.Reference != c.ref || !strings.Contains(got.Why, c.why) {
				t.Fatalf("%+v", got)
			}
		})
	}
}

func TestStatusChecksThatCannotBeUsed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1alpha1.AgentTool)
		field  string
		text   string
	}{
		"no check":                    {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck = nil }, "spec.statusCheck", "missing"},
		"a check and Hold":            {func(o *v1alpha1.AgentTool) { o.Spec.UnknownOutcome = "" }, "spec.statusCheck", "remove it"},
		"another word":                {func(o *v1alpha1.AgentTool) { o.Spec.UnknownOutcome = "Guess" }, "spec.unknownOutcome", "not known"},
		"no finality":                 {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Finality = "" }, "spec.statusCheck.finality", "not known"},
		"no outcome":                  {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Outcome = "" }, "spec.statusCheck.outcome", "empty"},
		"a field that does not exist": {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Query[0].Value = "intent.keys" }, "spec.statusCheck.query[0].value", "undefined field"},
		"a question about nothing": {func(o *v1alpha1.AgentTool) {
			o.Spec.StatusCheck.Query[0].Value = `"x"`
		}, "spec.statusCheck", "nothing of this intent"},
		"response in a question": {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Query[0].Value = "response.status" }, "spec.statusCheck.query[0].value", "undeclared"},
		"a path that is a text":  {func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Path = `"/refunds/" + intent.key` }, "spec.statusCheck.path", "must yield a path"},
		"a parameter twice": {func(o *v1alpha1.AgentTool) {
			o.Spec.StatusCheck.Query = append(o.Spec.StatusCheck.Query, o.Spec.StatusCheck.Query[0])
		}, "spec.statusCheck.query[1].name", "twice"},
		"a key that is not sent": {func(o *v1alpha1.AgentTool) {
			o.Spec.Idempotency.Key = v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}}
		}, "spec.statusCheck.query[0].value", "takes no key"},
		"a time": {func(o *v1alpha1.AgentTool) {
			o.Spec.StatusCheck.Timeout = &metav1.Duration{Duration: time.Hour}
		}, "spec.statusCheck.timeout", "between"},
		"backoff": {func(o *v1alpha1.AgentTool) {
			o.Spec.StatusCheck.Backoff = &v1alpha1.CheckBackoff{Initial: &metav1.Duration{Duration: time.Minute}, Max: &metav1.Duration{Duration: time.Second}}
		}, "spec.statusCheck.backoff.max", "less than initial"},
	} {
		t.Run(name, func(t *testing.T) {
			tool := checkedTool()
			c.change(tool)
			_, err := Compile(tool, refundBudget())
			var spec *SpecError
			if !errors.As(err, &spec) || spec.Field != c.field || !strings.Contains(spec.Message, c.text) {
				t.Fatalf("%v, want %s: …%s…", err, c.field, c.text)
			}
		})
	}
}

// What names the upstream of a check changes with all that says whom is asked.
func TestTheUpstreamOfACheck(t *testing.T) {
	base := compiled(t, checkedTool())
	if g := base.Guard.Check; g == nil || g.Upstream != base.Check.Upstream || g.Timeout != 5*time.Second || g.Max != time.Minute || g.Deadline != 24*time.Hour || g.Unbounded {
		t.Fatalf("%+v", base.Guard.Check)
	}
	for name, change := range map[string]func(*v1alpha1.AgentTool){
		"url": func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP.URL = "http://crm.support.svc:8080/other" },
		"credential": func(o *v1alpha1.AgentTool) {
			o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{SecretRef: v1alpha1.SecretKeyReference{Name: "s", Key: "k"}, Header: "Authorization"}
		},
		"key": func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key.Header = "X-Key" },
	} {
		tool := checkedTool()
		change(tool)
		if compiled(t, tool).Check.Upstream == base.Check.Upstream {
			t.Errorf("another %s is the same upstream", name)
		}
	}
	other := checkedTool(func(s *v1alpha1.StatusCheck) { s.Outcome = `response.body.count == 1 ? "Succeeded" : "Failed"` })
	if o := compiled(t, other).Check; o.Upstream != base.Check.Upstream || o.By == base.Check.By {
		t.Error("another outcome must be another question to the same upstream")
	}
}
