package policy

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

func withOutcomes(rules ...v1alpha1.OutcomeRule) *v1alpha1.AgentTool {
	return refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Outcomes = rules })
}

func status(s string, outcome v1alpha1.AttemptOutcome) v1alpha1.OutcomeRule {
	return v1alpha1.OutcomeRule{Status: s, Outcome: outcome}
}

func when(s string, outcome v1alpha1.AttemptOutcome) v1alpha1.OutcomeRule {
	return v1alpha1.OutcomeRule{When: v1alpha1.AnswerExpression(s), Outcome: outcome}
}

func TestAnswersAreReadByTheFirstRuleThatFits(t *testing.T) {
	json := func(status int, body string, header ...string) Answer {
		a := Answer{Status: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(body)}
		for i := 0; i < len(header); i += 2 {
			a.Header.Add(header[i], header[i+1])
		}
		return a
	}
	rules := func(r ...v1alpha1.OutcomeRule) []v1alpha1.OutcomeRule { return r }
	processing := when(`response.body.status == "processing"`, v1alpha1.OutcomePending)
	declined := when(`has(response.body.code) && response.body.code == "declined"`, v1alpha1.OutcomeFailed)
	for name, c := range map[string]struct {
		rules []v1alpha1.OutcomeRule
		in    Answer
		want  guard.Outcome // "": no rule fits
		why   string
	}{
		"no rules":                 {nil, json(402, `{}`), "", ""},
		"none fits":                {rules(status("402", v1alpha1.OutcomeUnknown)), json(403, `{}`), "", ""},
		"a status":                 {rules(status("402", v1alpha1.OutcomeRetryable)), json(402, `{}`), guard.AttemptRetryable, "outcomes[0] says Retryable"},
		"a class":                  {rules(status("5xx", v1alpha1.OutcomePending)), json(599, `{}`), guard.AttemptPending, ""},
		"below a class":            {rules(status("5xx", v1alpha1.OutcomePending)), json(499, `{}`), "", ""},
		"a range's ends":           {rules(status("402-404", v1alpha1.OutcomeUnknown)), json(404, `{}`), guard.AttemptUnknown, ""},
		"beyond a range":           {rules(status("402-404", v1alpha1.OutcomeUnknown)), json(405, `{}`), "", ""},
		"the first wins":           {rules(status("4xx", v1alpha1.OutcomeUnknown), status("402", v1alpha1.OutcomeFailed)), json(402, `{}`), guard.AttemptUnknown, "outcomes[0]"},
		"a body":                   {rules(processing), json(200, `{"status":"processing"}`), guard.AttemptPending, ""},
		"another body":             {rules(processing), json(200, `{"status":"done"}`), "", ""},
		"a field is missing":       {rules(processing, status("2xx", v1alpha1.OutcomeSucceeded)), json(200, `{}`), guard.AttemptUnknown, "outcomes[0] reads a field that this answer lacks"},
		"a field is asked for":     {rules(declined, status("2xx", v1alpha1.OutcomeSucceeded)), json(200, `{}`), guard.AttemptSucceeded, "outcomes[1]"},
		"no body":                  {rules(processing), Answer{Status: 200}, guard.AttemptUnknown, "lacks"},
		"another type of body":     {rules(processing), Answer{Status: 200, Header: http.Header{"Content-Type": {"text/plain"}}, Body: []byte("processing")}, guard.AttemptUnknown, "lacks"},
		"a body that is no JSON":   {rules(processing), json(200, `{"status":`), guard.AttemptUnknown, "not valid"},
		"duplicate keys":           {rules(processing), json(200, `{"status":"processing","status":"failed"}`), guard.AttemptUnknown, "not valid"},
		"has() of such a body":     {rules(declined), json(402, `{"code":`), guard.AttemptUnknown, "not valid"},
		"an encoded body":          {rules(processing), json(200, `{"status":"processing"}`, "Content-Encoding", "gzip"), guard.AttemptUnknown, "encoded"},
		"a body that was cut":      {rules(processing), Answer{Status: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(`{"status":"processing"}`), Cut: true}, guard.AttemptUnknown, "too long"},
		"a cut body, not read":     {rules(status("2xx", v1alpha1.OutcomeSucceeded)), Answer{Status: 200, Cut: true}, guard.AttemptSucceeded, ""},
		"a form":                   {rules(processing), Answer{Status: 200, Header: http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}, Body: []byte("status=processing")}, guard.AttemptPending, ""},
		"exact numbers":            {rules(when(`response.body.id == 9007199254740993`, v1alpha1.OutcomePending)), json(200, `{"id":9007199254740992}`), "", ""},
		"a header":                 {rules(when(`response.header["x-state"] == "queued"`, v1alpha1.OutcomePending)), json(200, ``, "X-State", "queued"), guard.AttemptPending, ""},
		"a header is missing":      {rules(when(`response.header["x-state"] == "queued"`, v1alpha1.OutcomePending)), json(200, ``), guard.AttemptUnknown, "lacks"},
		"a header, asked for":      {rules(when(`"x-state" in response.header`, v1alpha1.OutcomePending)), json(200, ``), "", ""},
		"status and body":          {rules(when(`response.status == 500 && response.body.code == "declined"`, v1alpha1.OutcomeFailed)), json(500, `{"code":"declined"}`), guard.AttemptFailed, ""},
		"no truth":                 {rules(when(`response.body.ok`, v1alpha1.OutcomeSucceeded)), json(200, `{"ok":"yes"}`), guard.AttemptUnknown, "neither"},
		"null":                     {rules(when(`response.body.ok`, v1alpha1.OutcomeSucceeded)), json(200, `{"ok":null}`), guard.AttemptUnknown, "neither"},
		"too much work":            {rules(when(`response.body.a.all(x, response.body.a.all(y, x != y + "-"))`, v1alpha1.OutcomeSucceeded)), json(200, `{"a":["`+strings.Repeat(`x","`, 999)+`x"]}`), guard.AttemptUnknown, "too much work"},
		"a long text":              {rules(when(`response.body.a == "x"`, v1alpha1.OutcomeSucceeded)), json(200, `{"a":"`+strings.Repeat("y", maxText+1)+`"}`), guard.AttemptUnknown, "fails"},
		"503 with Retry-After":     {rules(status("503", v1alpha1.OutcomeRetryable)), json(503, ``, "Retry-After", "1"), guard.AttemptRetryable, ""},
		"503 with a date":          {rules(status("503", v1alpha1.OutcomeRetryable)), json(503, ``, "Retry-After", "Fri, 31 Dec 2027 23:59:59 GMT"), guard.AttemptRetryable, ""},
		"503 without":              {rules(status("503", v1alpha1.OutcomeRetryable), status("5xx", v1alpha1.OutcomePending)), json(503, ``), guard.AttemptUnknown, "503 with Retry-After"},
		"503 with nonsense":        {rules(status("503", v1alpha1.OutcomeRetryable)), json(503, ``, "Retry-After", "soon"), guard.AttemptUnknown, ""},
		"500 is never Retryable":   {rules(when(`response.body.code == "declined"`, v1alpha1.OutcomeRetryable)), json(500, `{"code":"declined"}`, "Retry-After", "1"), guard.AttemptUnknown, "503"},
		"200 that says try again":  {rules(when(`response.body.code == "busy"`, v1alpha1.OutcomeRetryable)), json(200, `{"code":"busy"}`), guard.AttemptRetryable, ""},
		"409 that says paid":       {rules(when(`response.body.code == "already_paid"`, v1alpha1.OutcomeSucceeded)), json(409, `{"code":"already_paid"}`), guard.AttemptSucceeded, ""},
		"a class, but 409":         {rules(status("4xx", v1alpha1.OutcomeFailed), status("409", v1alpha1.OutcomeFailed)), json(409, ``), guard.AttemptUnknown, "409"},
		"a range, but 408":         {rules(status("400-410", v1alpha1.OutcomeRetryable)), json(408, ``), guard.AttemptUnknown, "408"},
		"a class, but 425":         {rules(status("4xx", v1alpha1.OutcomeFailed)), json(425, ``), guard.AttemptUnknown, "425"},
		"409 by its name":          {rules(status("409", v1alpha1.OutcomeFailed), status("4xx", v1alpha1.OutcomeFailed)), json(409, ``), guard.AttemptFailed, ""},
		"409 by a condition":       {rules(when(`response.body.code == "closed"`, v1alpha1.OutcomeFailed)), json(409, `{"code":"closed"}`), guard.AttemptFailed, ""},
		"a class that succeeds":    {rules(status("4xx", v1alpha1.OutcomeSucceeded)), json(409, ``), guard.AttemptSucceeded, ""},
		"the rest of a class":      {rules(status("4xx", v1alpha1.OutcomeFailed)), json(429, ``), guard.AttemptFailed, ""},
		"a 4xx that is not final":  {rules(status("404", v1alpha1.OutcomeUnknown)), json(404, ``), guard.AttemptUnknown, ""},
		"what a 303 means":         {rules(status("303", v1alpha1.OutcomeSucceeded)), json(303, ``), guard.AttemptSucceeded, ""},
		"content type given twice": {rules(processing), json(200, `{"status":"processing"}`, "Content-Type", "text/plain"), guard.AttemptUnknown, "not valid"},
	} {
		tool, err := Compile(withOutcomes(c.rules...), refundBudget())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, ok := tool.ReadAnswer(c.in)
		if ok != (c.want != "") || got.Outcome != c.want || !strings.Contains(got.Why, c.why) || ok != (got.Why != "") {
			t.Errorf("%s: got %v %q, %q, want %q, …%s…", name, ok, got.Outcome, got.Why, c.want, c.why)
		}
	}
}

func TestAReadingQuotesNothingOfTheAnswer(t *testing.T) {
	tool, err := Compile(withOutcomes(when(`int(response.body.card) > 0`, v1alpha1.OutcomeSucceeded)), refundBudget())
	if err != nil {
		t.Fatal(err)
	}
	got, _ := tool.ReadAnswer(Answer{Status: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(`{"card":"hunter2"}`)})
	if got.Outcome != guard.AttemptUnknown || strings.Contains(got.Why, "hunter2") {
		t.Errorf("got %+v", got)
	}
}

func TestRulesThatCannotBeUsed(t *testing.T) {
	for _, c := range []struct {
		rule           v1alpha1.OutcomeRule
		field, message string
	}{
		{v1alpha1.OutcomeRule{Outcome: "Failed"}, "", "exactly one"},
		{v1alpha1.OutcomeRule{Status: "402", When: "true", Outcome: "Failed"}, "", "exactly one"},
		{status("402", ""), ".outcome", "not known"},
		{status("402", "Maybe"), ".outcome", "not known"},
		{status("4x", "Failed"), ".status", "not a status"},
		{status("100", "Succeeded"), ".status", "not a status"},
		{status("600", "Succeeded"), ".status", "not a status"},
		{status("402 ", "Failed"), ".status", "not a status"},
		{status("4xx-5xx", "Unknown"), ".status", "not a status"},
		{status("404-402", "Failed"), ".status", "go up"},
		{status("400-599", "Failed"), ".status", "one class"},
		{status("500", "Failed"), ".status", "nothing moved"},
		{status("5xx", "Failed"), ".status", "nothing moved"},
		{status("503", "Failed"), ".status", "nothing moved"},
		{status("200", "Failed"), ".status", "nothing moved"},
		{status("302", "Failed"), ".status", "nothing moved"},
		{status("500", "Retryable"), ".status", "503"},
		{status("5xx", "Retryable"), ".status", "503"},
		{status("503-504", "Retryable"), ".status", "503"},
		{status("302", "Retryable"), ".status", "503"},
		{status("204", "Retryable"), ".status", "503"},
		{when("response.status == 500", "Failed"), ".when", "status alone"},
		{when("response.status >= 500", "Retryable"), ".when", "status alone"},
		{when(" ", "Failed"), ".when", "is empty"},
		{when("response.body.", "Failed"), ".when", "line 1"},
		{when("response.headers.x == '1'", "Failed"), ".when", "undefined field"},
		{when("response.header['X-State'] == 'a'", "Failed"), ".when", "lower case"},
		{when("call.body.x == 1", "Failed"), ".when", "undeclared reference"},
		{when("response.status", "Unknown"), ".when", "must yield true or false"},
		{when("response.body.x == 1.5", "Unknown"), ".when", "not exact"},
		{when("response.body.x.matches('a+')", "Unknown"), ".when", "not available here"},
	} {
		_, err := Compile(withOutcomes(status("402", "Failed"), c.rule), refundBudget())
		var bad *SpecError
		if !errors.As(err, &bad) || bad.Field != "spec.outcomes[1]"+c.field || !strings.Contains(bad.Message, c.message) {
			t.Errorf("%+v: got %v, want …%s…", c.rule, err, c.message)
		}
	}
	if _, err := Compile(withOutcomes(make([]v1alpha1.OutcomeRule, 17)...), refundBudget()); err == nil || !strings.Contains(err.Error(), "more than 16") {
		t.Errorf("17 rules: %v", err)
	}
	read := readTool(func(o *v1alpha1.AgentTool) { o.Spec.Outcomes = []v1alpha1.OutcomeRule{status("402", "Failed")} })
	if _, err := Compile(read, nil); err == nil || !strings.Contains(err.Error(), "no intents") {
		t.Errorf("a ReadOnly tool: %v", err)
	}
}

func TestRetryBudgets(t *testing.T) {
	budget := func(change func(*v1alpha1.AgentTool)) (*Tool, error) {
		return Compile(refundTool(change), refundBudget())
	}
	tool, err := budget(func(o *v1alpha1.AgentTool) { o.Spec.RetryBudget = &v1alpha1.RetryBudget{} })
	if err != nil {
		t.Fatal(err)
	}
	if want := (guard.RetryBudget{Attempts: 5, Initial: 200 * time.Millisecond, Factor: 2, Max: 10 * time.Second}); *tool.Guard.Retry != want {
		t.Errorf("nothing set: %+v", *tool.Guard.Retry)
	}
	if want := (Retry{Patience: 10 * time.Second, Percent: 20, MinPerSecond: 3}); *tool.Retry != want || tool.Guard.Timeout != 10*time.Second {
		t.Errorf("nothing set: %+v, timeout %v", *tool.Retry, tool.Guard.Timeout)
	}
	tool, err = budget(func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.HTTP.Timeout = d(4 * time.Second)
		o.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject}
		o.Spec.RetryBudget = &v1alpha1.RetryBudget{
			Attempts: p(int32(1)), PerAttemptTimeout: d(time.Second), Ratio: &v1alpha1.RetryRatio{Percent: p(int32(0)), MinPerSecond: p(int32(1000))},
			Backoff: &v1alpha1.RetryBackoff{Initial: d(time.Minute), Factor: p(int32(1))},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := (guard.RetryBudget{Attempts: 1, Initial: time.Minute, Factor: 1, Max: time.Minute}); *tool.Guard.Retry != want {
		t.Errorf("all set: %+v", *tool.Guard.Retry)
	}
	if want := (Retry{Patience: 4 * time.Second, MinPerSecond: 1000}); *tool.Retry != want || tool.Guard.Timeout != time.Second || tool.Upstream.Timeout != time.Second {
		t.Errorf("all set: %+v, timeout %v", *tool.Retry, tool.Guard.Timeout)
	}
	for _, c := range []struct {
		spec           v1alpha1.RetryBudget
		field, message string
	}{
		{v1alpha1.RetryBudget{Attempts: p(int32(0))}, "attempts", "between 1 and 20"},
		{v1alpha1.RetryBudget{Attempts: p(int32(21))}, "attempts", "between 1 and 20"},
		{v1alpha1.RetryBudget{Backoff: &v1alpha1.RetryBackoff{Initial: d(time.Millisecond)}}, "backoff.initial", "between"},
		{v1alpha1.RetryBudget{Backoff: &v1alpha1.RetryBackoff{Max: d(2 * time.Hour)}}, "backoff.max", "between"},
		{v1alpha1.RetryBudget{Backoff: &v1alpha1.RetryBackoff{Max: d(100 * time.Millisecond)}}, "backoff.max", "less than initial"},
		{v1alpha1.RetryBudget{Backoff: &v1alpha1.RetryBackoff{Factor: p(int32(0))}}, "backoff.factor", "between"},
		{v1alpha1.RetryBudget{PerAttemptTimeout: d(11 * time.Second)}, "perAttemptTimeout", "not be more than upstream.http.timeout"},
		{v1alpha1.RetryBudget{PerAttemptTimeout: d(time.Millisecond)}, "perAttemptTimeout", "between"},
		{v1alpha1.RetryBudget{Ratio: &v1alpha1.RetryRatio{Percent: p(int32(101))}}, "ratio.percent", "between 0 and 100"},
		{v1alpha1.RetryBudget{Ratio: &v1alpha1.RetryRatio{MinPerSecond: p(int32(0))}}, "ratio.minPerSecond", "between 1 and 1000"},
	} {
		_, err := budget(func(o *v1alpha1.AgentTool) { o.Spec.RetryBudget = &c.spec })
		var bad *SpecError
		if !errors.As(err, &bad) || bad.Field != "spec.retryBudget."+c.field || !strings.Contains(bad.Message, c.message) {
			t.Errorf("%s: got %v, want …%s…", c.field, err, c.message)
		}
	}
	read := readTool(func(o *v1alpha1.AgentTool) { o.Spec.RetryBudget = &v1alpha1.RetryBudget{} })
	if _, err := Compile(read, nil); err == nil || !strings.Contains(err.Error(), "no intents") {
		t.Errorf("a ReadOnly tool: %v", err)
	}
}
