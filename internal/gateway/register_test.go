package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// put registers an intent.
func (r *rig) put(id, caller, body string) reply {
	r.t.Helper()
	got := r.do(ask{method: "PUT", suffix: "/intents/" + id, caller: caller, body: body})
	if got.err != nil {
		r.t.Fatal(got.err)
	}
	return got
}

func registrationOf(order, amount, more string) string {
	return fmt.Sprintf(`{"scope":["account/a1/order/%s"],"amount":{"value":%q,"currency":"USD"}%s}`, order, amount, more)
}

func (a reply) document(t *testing.T) intentDocument {
	t.Helper()
	var doc intentDocument
	if err := json.Unmarshal([]byte(a.body), &doc); err != nil || a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	return doc
}

func TestAnIntentIsRegisteredAndThenCalled(t *testing.T) {
	r := setUp(t)
	said := registrationOf("9", "49.99", `,"quote":"q-1","valid_until":"2126-01-02T03:04:05Z"`)
	for range 2 {
		got := r.put("one", "", said)
		doc := got.document(t)
		if doc.State != guard.Registered || doc.Verdict != guard.Allow || doc.Quote != "q-1" || doc.ValidUntil == nil || doc.Expires == nil || doc.Registered == nil ||
			got.verdict() != "ALLOW" || got.header.Get(headerIntent) != "one" || got.header.Get(headerAttempt) != "0" {
			t.Fatalf("headers %v, document %s", got.header, got.body)
		}
	}
	r.paid(0, 0)
	if _, doc := r.poll("charge", "one", "", ""); doc.State != guard.Registered {
		t.Fatalf("the poll URL says %+v", doc)
	}
	// Other callers neither see it nor meet it. That they see nothing does not say that nothing was sent.
	if got, _ := r.poll("charge", "one", "stranger", ""); got.status != http.StatusNotFound || !strings.Contains(got.body, "Nothing was sent under it by this caller. Each caller has intents of its own") {
		t.Errorf("a stranger gets %d: %s", got.status, got.body)
	}
	// What was only registered was never used: the problem says for what it was registered.
	if p := r.pay(ask{id: "one", body: refundOf("9", "50")}, http.StatusUnprocessableEntity, guard.Conflict).problem(t); p.Reason != "request" ||
		!strings.Contains(p.Detail, "was registered for account/a1/order/9, to move 49.99 USD") || strings.Contains(p.Detail, "used before") {
		t.Errorf("another amount: %+v", p)
	}
	r.pay(ask{id: "one", body: refundOf("9", "49.99")}, http.StatusCreated, guard.Allow)
	r.paid(1, 1)
	got := r.put("one", "", said)
	if doc := got.document(t); doc.State != guard.Succeeded || doc.Verdict != guard.Replay || got.verdict() != "REPLAY" {
		t.Errorf("afterwards: %s", got.body)
	}
	p := r.put("two", "", registrationOf("9", "10", "")).problem(t)
	if p.Status != http.StatusConflict || p.Verdict != guard.UnknownHold || p.Reason != "ScopeOverlap" || p.Hold == "" || len(p.OwnMatches) != 1 || p.OwnMatches[0].IntentID != "one" {
		t.Errorf("one for the same order: %+v", p)
	}
	r.pay(ask{id: "two", body: refundOf("9", "10")}, http.StatusConflict, guard.UnknownHold)
	if p := r.put("one", "", registrationOf("8", "49.99", "")).problem(t); p.Verdict != guard.Conflict || !strings.Contains(p.Detail, "used before") {
		t.Errorf("another scope under the ID: %+v", p)
	}
	r.paid(1, 1)
	if log := r.logged(); !strings.Contains(log, `"register"=true`) {
		t.Error("the log does not say that it was a registration")
	}
}

func TestRegistrationsThatCannotBeRead(t *testing.T) {
	r := setUp(t)
	for name, tt := range map[string]struct{ body, says string }{
		"nothing":          {"", "ends too early"},
		"no object":        {"[]", "no JSON object"},
		"a list of what":   {`{"scope":"account/a1"}`, "scope"},
		"a misspelt field": {registrationOf("9", "1", `,"validUntil":"2126-01-02T03:04:05Z"`), "no others"},
		"a key twice":      {registrationOf("9", "1", `,"quote":"a","quote":"b"`), "quote"},
		"no scope":         {`{"amount":{"value":"1","currency":"USD"}}`, "Scope"},
		"no amount":        {`{"scope":["account/a1"]}`, "Amount"},
		"an amount that is a number": {
			`{"scope":["account/a1"],"amount":{"value":1,"currency":"USD"}}`, "amount"},
		"too fine":       {registrationOf("9", "1.001", ""), "Amount"},
		"a bad path":     {`{"scope":["account//a1"],"amount":{"value":"1","currency":"USD"}}`, "segment"},
		"a recipient":    {registrationOf("9", "1", `,"recipient":"a1"`), "Recipient"},
		"a fingerprint":  {registrationOf("9", "1", `,"fingerprint":"sha256:00"`), "Fingerprint"},
		"a long quote":   {registrationOf("9", "1", `,"quote":"`+strings.Repeat("x", 1025)+`"`), "quote"},
		"a bad validity": {registrationOf("9", "1", `,"valid_until":"tomorrow"`), "valid_until"},
	} {
		t.Run(name, func(t *testing.T) {
			p := r.put("one", "", tt.body).problem(t)
			if p.Status != http.StatusBadRequest || !strings.Contains(p.Detail, tt.says) {
				t.Fatalf("%d: %s", p.Status, p.Detail)
			}
			if got, _ := r.poll("charge", "one", "", ""); got.status != http.StatusNotFound {
				t.Fatal("it was registered")
			}
		})
	}
	r.tool("look", "/charges", readOnly(0))
	if p := r.do(ask{tool: "look", method: "PUT", suffix: "/intents/one", body: "{}"}).problem(t); p.Reason != "read_only" {
		t.Errorf("a ReadOnly tool: %+v", p)
	}
}

func TestRegistrationRequired(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) { tool.Spec.Identity.Registration = v1alpha1.RegistrationRequired })
	p := r.pay(ask{id: "one", body: refundOf("9", "49.99")}, http.StatusForbidden, guard.Deny).problem(t)
	if p.Reason != "not_registered" || p.SuggestedAction != "register_first" || !strings.Contains(p.Detail, "PUT") {
		t.Fatalf("%+v", p)
	}
	r.put("one", "", registrationOf("9", "49.99", "")).document(t)
	r.pay(ask{id: "one", body: refundOf("9", "49.99")}, http.StatusCreated, guard.Allow)
	r.pay(ask{id: "one", body: refundOf("9", "49.99")}, http.StatusCreated, guard.Replay)
	r.paid(1, 1)
}

func TestARegistrationThatIsOver(t *testing.T) {
	r := setUp(t)
	until := r.clock.storeTime().Add(time.Minute).UTC().Format(time.RFC3339)
	r.put("one", "", registrationOf("9", "49.99", `,"valid_until":"`+until+`"`)).document(t)
	r.clock.pass(2 * time.Minute)
	p := r.pay(ask{id: "one", body: refundOf("9", "49.99")}, http.StatusForbidden, guard.Deny).problem(t)
	if p.Reason != "expired" || p.SuggestedAction != actNewIntent {
		t.Fatalf("%+v", p)
	}
	r.paid(0, 0)
	if p := r.put("two", "", registrationOf("8", "49.99", `,"valid_until":"`+until+`"`)).problem(t); p.Reason != "expired" || p.Status != http.StatusForbidden {
		t.Fatalf("one that is over when it comes: %+v", p)
	}
}

// An exact match of a ServiceAccount that had the same name is not told.
func TestRegisterTellsNothingOfOthers(t *testing.T) {
	r := setUp(t)
	r.pay(ask{id: "one", body: refundOf("9", "49.99"), header: map[string]string{"Holdfast-Session": "s", "Holdfast-Call": "1"}}, http.StatusCreated, guard.Allow)
	_, doc := r.poll("charge", "one", "", "")
	same := registrationOf("9", "49.99", fmt.Sprintf(`,"lineage":"s/1","fingerprint":%q`, doc.Fingerprint))
	got := r.put("again", "", same)
	if found := got.document(t); found.IntentID != "one" || got.verdict() != "REPLAY" || got.header.Get(headerIntent) != "one" {
		t.Errorf("an exact match: %s", got.body)
	}
	if got := r.put("other", "stranger", same); strings.Contains(got.body, "49.99") || strings.Contains(got.body, `"one"`) || got.verdict() != string(guard.UnknownHold) {
		t.Errorf("a stranger learns %s", got.body)
	}
	r.people.mu.Lock()
	r.people.uid = "another"
	r.people.mu.Unlock()
	if got := r.put("one", "", registrationOf("9", "49.99", "")); got.verdict() != string(guard.Conflict) || strings.Contains(got.body, "Succeeded") {
		t.Errorf("a namesake learns %s", got.body)
	}
}

// Names count to the letter, so that nothing is said twice and read once.
func TestARegistrationsNamesAreExact(t *testing.T) {
	r := setUp(t)
	for _, body := range []string{
		registrationOf("9", "1", `,"Scope":["account/a1/order/10"]`),
		strings.Replace(registrationOf("9", "1", ""), `"scope"`, `"SCOPE"`, 1),
		strings.Replace(registrationOf("9", "1", ""), `"value":"1"`, `"value":"1","Value":"2"`, 1),
	} {
		if p := r.put("one", "", body).problem(t); p.Status != http.StatusBadRequest {
			t.Errorf("%s: told %+v", body, p)
		}
	}
	if got, _ := r.poll("charge", "one", "", ""); got.status != http.StatusNotFound {
		t.Errorf("it is registered: %s", got.body)
	}
}

// Beyond the tool's rate, and beyond what a caller may have open, a registration is told to come back.
func TestRegistrationsAreBounded(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(o *v1alpha1.AgentTool) {
		o.Spec.RateLimit = &v1alpha1.RateLimitSpec{PerCaller: &v1alpha1.CallerRateSpec{Requests: 1, Per: metav1.Duration{Duration: time.Minute}}}
	})
	r.put("one", "", registrationOf("1", "5", "")).document(t)
	got := r.put("two", "", registrationOf("2", "5", ""))
	if p := got.problem(t); p.Status != http.StatusTooManyRequests || p.Reason != string(guard.ReasonRateLimited) || p.RetryAfter < 55 || got.header.Get("Retry-After") != fmt.Sprint(p.RetryAfter) {
		t.Errorf("%+v", p)
	}
	r.put("one", "", registrationOf("1", "5", "")).document(t)
	r.put("other", "other", registrationOf("3", "5", "")).document(t)
	p := fromGuard(guard.Answer{Verdict: guard.Deny, Reason: guard.ReasonTooManyRegistered, RetryAfter: time.Minute}, access.Caller{})
	if p.Status != http.StatusTooManyRequests || p.RetryAfter != 60 || p.SuggestedAction != actRetryLater || !strings.Contains(p.Detail, "Nothing was registered") {
		t.Errorf("%+v", p)
	}
	r.paid(0, 0)
}
