package gateway

// A tool that runs inside its agent: what its claims, renewals and settlements are told,
// over TCP. The agent's own function is the test.

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// localTool is run by its agent; the lease is 5 s.
func localTool(change func(*v1alpha1.AgentTool)) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.Upstream = v1alpha1.ToolUpstream{Local: &v1alpha1.LocalUpstream{
			Lease: &metav1.Duration{Duration: 5 * time.Second}, SettleAfter: metav1.Duration{Duration: 100 * time.Millisecond},
		}}
		t.Spec.Idempotency.Key = v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}}
		if change != nil {
			change(t)
		}
	}
}

func setUpLocal(t *testing.T, change func(*v1alpha1.AgentTool)) *rig {
	t.Helper()
	r := setUp(t)
	r.tool("book", "", localTool(change))
	return r
}

// at is a request about an intent of the tool book.
func (r *rig) at(id, act, caller, token, body string) reply {
	r.t.Helper()
	a := ask{tool: "book", suffix: "/intents/" + id + "/" + act, caller: caller, body: body}
	if token != "" {
		a.header = map[string]string{headerClaim: token}
	}
	got := r.do(a)
	if got.err != nil {
		r.t.Fatal(got.err)
	}
	return got
}

func token(n int) string { return fmt.Sprintf("token-%012d", n) }

func (r *rig) claims(id, order string, n int) claimDocument {
	r.t.Helper()
	got := r.at(id, "claim", "", token(n), refundOf(order, "1"))
	r.wants(got, 201, guard.Allow)
	return claimOf(r.t, got)
}

func claimOf(t *testing.T, got reply) claimDocument {
	t.Helper()
	var doc claimDocument
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
		t.Fatalf("%v: %s", err, got.body)
	}
	return doc
}

func (r *rig) wants(got reply, status int, verdict guard.Verdict) {
	r.t.Helper()
	if got.status != status || got.verdict() != string(verdict) {
		r.t.Fatalf("status %d, verdict %q, want %d, %q; body %.600s", got.status, got.verdict(), status, verdict, got.body)
	}
}

// brings settles a claim, and gives the intent as it is then.
func (r *rig) brings(d claimDocument, more string) (reply, intentDocument) {
	r.t.Helper()
	got := r.at(d.IntentID, "settle", "", "", fmt.Sprintf(`{"attempt":%d,"fence":%q,%s}`, d.Attempt, d.Fence, more))
	var doc intentDocument
	if got.status == http.StatusOK {
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
			r.t.Fatal(err)
		}
	}
	return got, doc
}

func (r *rig) renews(d claimDocument) reply {
	r.t.Helper()
	return r.at(d.IntentID, "renew", "", "", fmt.Sprintf(`{"attempt":%d,"fence":%q}`, d.Attempt, d.Fence))
}

const booked = `"outcome":"Succeeded","provider_reference":"pay_1","result":{"status":201,"content_type":"application/json","body":{"id":"pay_1",  "n":9007199254740993}}`

func TestALocalToolIsClaimedRenewedAndSettled(t *testing.T) {
	r := setUpLocal(t, nil)
	d := r.claims("k1", "9", 1)
	if d.Attempt != 1 || d.Fence == "" || d.Tool != "book" || d.IntentID != "k1" || !strings.HasPrefix(d.ProviderKey, "hf_") {
		t.Fatalf("claimed %+v", d)
	}
	if d.RunForMS < 4_000 || d.RunForMS > 5_500 {
		t.Errorf("it may run for %d ms", d.RunForMS)
	}
	// Others of the same intent wait, others of the same order are held.
	r.tool("book", "", localTool(func(t *v1alpha1.AgentTool) {
		t.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject}
	}))
	if p := r.at("k1", "claim", "", token(2), refundOf("9", "1")).problem(t); p.Verdict != guard.InFlightNow || p.Poll != pollPath(namespace, "book", "k1") {
		t.Errorf("told %+v", p)
	}
	r.wants(r.at("k2", "claim", "", token(3), refundOf("9", "1")), 409, guard.UnknownHold)
	r.wants(r.at("k1", "claim", "", token(2), refundOf("9", "2")), 422, guard.Conflict)

	r.clock.pass(4 * time.Second)
	got := r.renews(d)
	r.wants(got, 200, guard.Allow)
	if again := claimOf(t, got); again.Fence != d.Fence || again.Attempt != 1 || again.RunForMS < 4_000 {
		t.Errorf("renewed %+v", again)
	}
	r.clock.pass(4 * time.Second)
	got, doc := r.brings(d, booked)
	r.wants(got, 200, guard.Allow)
	if doc.State != guard.Succeeded || doc.ProviderReference != "pay_1" || len(doc.Attempts) != 1 || doc.Attempts[0].Outcome != guard.AttemptSucceeded {
		t.Errorf("settled %+v", doc)
	}
	// A lost answer: the same again changes nothing.
	got, _ = r.brings(d, booked)
	r.wants(got, 200, guard.Allow)
	// The result is replayed byte for byte, under a new token and under the old one.
	for _, n := range []int{1, 4} {
		replay := r.at("k1", "claim", "", token(n), refundOf("9", "1"))
		r.wants(replay, 201, guard.Replay)
		if replay.body != `{"id":"pay_1",  "n":9007199254740993}` || replay.header.Get(headerReplayed) != "true" || replay.header.Get("Content-Type") != "application/json" {
			t.Errorf("replayed %q, %v", replay.body, replay.header)
		}
	}
	if p := r.renews(d).problem(t); p.Status != 409 || p.Reason != string(guard.ReasonLeaseOver) {
		t.Errorf("renewed after its end: %+v", p)
	}
	r.paid(0, 0)
}

// The answer to a claim is lost.
func TestAClaimIsGivenAgain(t *testing.T) {
	r := setUpLocal(t, nil)
	first := r.claims("k1", "9", 1)
	second := r.claims("k1", "9", 1)
	if first.Fence != second.Fence || second.Attempt != 1 {
		t.Fatalf("%+v, then %+v", first, second)
	}
	got, _ := r.brings(first, `"outcome":"Retryable","retry_after":0,"detail":"the shop is closed"`)
	r.wants(got, 200, guard.Allow)
	r.clock.pass(time.Minute)
	if p := r.at("k1", "claim", "", token(1), refundOf("9", "1")).problem(t); p.Status != 409 || p.Reason != string(guard.ReasonClaimUsed) || p.Verdict != guard.Deny {
		t.Fatalf("told %+v", p)
	}
	if d := r.claims("k1", "9", 2); d.Attempt != 2 || d.Fence == first.Fence {
		t.Fatalf("claimed %+v", d)
	}
}

func TestHowASettlementIsRead(t *testing.T) {
	for _, row := range []struct {
		name, more string
		status     int
		verdict    guard.Verdict
		state      guard.State
		replay     int // the status of the next claim
		body       string
	}{
		{"succeeded, no result", `"outcome":"Succeeded"`, 200, guard.Allow, guard.Succeeded, 204, ""},
		{"a text", `"outcome":"Succeeded","result":{"status":200,"content_type":"text/plain","body_base64":"aGVsbG8="}`, 200, guard.Allow, guard.Succeeded, 200, "hello"},
		{"declined", `"outcome":"Failed","result":{"status":402,"body":{"code":"declined"}}`, 200, guard.Allow, guard.Failed, 402, `{"code":"declined"}`},
		{"failed, no result", `"outcome":"Failed","detail":"no such account"`, 200, guard.Allow, guard.Failed, 422, `{"detail":"no such account","outcome":"Failed"}`},
		{"moved nothing", `"outcome":"Retryable","retry_after":30`, 200, guard.Allow, guard.Retryable, 409, ""},
		{"unknown", `"outcome":"Unknown","detail":"it timed out"`, 200, guard.UnknownHold, guard.Held, 409, ""},
		{"unknown, and late", `"outcome":"Unknown","sent_late":true`, 200, guard.UnknownHold, guard.Held, 409, ""},
		{"accepted", `"outcome":"Pending","provider_reference":"p"`, 200, guard.UnknownHold, guard.Held, 409, ""},
		{"no outcome", `"detail":"x"`, 400, "", guard.InFlight, 0, ""},
		{"another outcome", `"outcome":"Done"`, 400, "", guard.InFlight, 0, ""},
		{"an unknown field", `"outcome":"Succeeded","state":"x"`, 400, "", guard.InFlight, 0, ""},
		{"an outcome and one in another case", `"outcome":"Unknown","Outcome":"Failed"`, 400, "", guard.InFlight, 0, ""},
		{"an outcome in another case", `"OUTCOME":"Failed"`, 400, "", guard.InFlight, 0, ""},
		{"a status in another case", `"outcome":"Failed","result":{"status":402,"Status":500}`, 400, "", guard.InFlight, 0, ""},
		{"a field twice", `"outcome":"Failed","outcome":"Succeeded"`, 400, "", guard.InFlight, 0, ""},
		{"a success with the status of a failure", `"outcome":"Succeeded","result":{"status":402}`, 400, "", guard.InFlight, 0, ""},
		{"a failure with that of a success", `"outcome":"Failed","result":{"status":200}`, 400, "", guard.InFlight, 0, ""},
		{"a result of what is unknown", `"outcome":"Unknown","result":{"status":500}`, 400, "", guard.InFlight, 0, ""},
		{"two bodies", `"outcome":"Succeeded","result":{"status":200,"body":1,"body_base64":"aGVsbG8="}`, 400, "", guard.InFlight, 0, ""},
		{"no base64", `"outcome":"Succeeded","result":{"status":200,"body_base64":"!"}`, 400, "", guard.InFlight, 0, ""},
		{"a header in a header", `"outcome":"Succeeded","result":{"status":200,"content_type":"a\r\nb: c"}`, 400, "", guard.InFlight, 0, ""},
		{"204 with a body", `"outcome":"Succeeded","result":{"status":204,"body":1}`, 400, "", guard.InFlight, 0, ""},
		{"a reference with a blank", `"outcome":"Succeeded","provider_reference":"a b"`, 400, "", guard.InFlight, 0, ""},
		{"a wait for what is settled", `"outcome":"Succeeded","retry_after":3`, 400, "", guard.InFlight, 0, ""},
		{"another type", `"outcome":3`, 400, "", guard.InFlight, 0, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := setUpLocal(t, func(t *v1alpha1.AgentTool) {
				t.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject}
			})
			d := r.claims("k1", "9", 1)
			got, _ := r.brings(d, row.more)
			r.wants(got, row.status, row.verdict)
			if row.status == 400 {
				got.problem(t)
			}
			if _, doc := r.poll("book", "k1", "", ""); doc.State != row.state {
				t.Fatalf("it is %s, want %s", doc.State, row.state)
			}
			if row.replay == 0 {
				return
			}
			next := r.at("k1", "claim", "", token(2), refundOf("9", "1"))
			if next.status != row.replay || row.body != "" && next.body != row.body {
				t.Errorf("the next claim is told %d %s", next.status, next.body)
			}
		})
	}
}

func TestALongResultIsCut(t *testing.T) {
	r := setUpLocal(t, nil)
	d := r.claims("k1", "9", 1)
	long := strings.Repeat("x", 900<<10)
	r.tool("book", "", localTool(func(t *v1alpha1.AgentTool) {
		t.Spec.Idempotency.Record = &v1alpha1.RecordSpec{MaxBodyBytes: resource.NewQuantity(1<<10, resource.BinarySI)}
	}))
	got, _ := r.brings(d, `"outcome":"Succeeded","result":{"status":200,"body":"`+long+`"}`)
	r.wants(got, 200, guard.Allow)
	again := r.at("k1", "claim", "", token(2), refundOf("9", "1"))
	r.wants(again, 200, guard.Replay)
	if len(again.body) != 1<<10 || again.header.Get(headerTruncated) != "true" || again.header.Get(headerSize) != fmt.Sprint(len(long)+2) || again.header.Get(headerDigest) == "" {
		t.Errorf("%d bytes, %v", len(again.body), again.header)
	}
}

// R03, R04: the holder dies, or comes back too late.
func TestAHolderThatIsGone(t *testing.T) {
	r := setUpLocal(t, nil)
	d := r.claims("k1", "9", 1)
	if err := r.engine.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.clock.pass(8*time.Second + 2*time.Second)
	if err := r.engine.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	p := r.at("k1", "claim", "", token(2), refundOf("9", "1")).problem(t)
	if p.Verdict != guard.UnknownHold || p.Reason != string(guard.OutcomeUnknown) || p.Hold == "" || p.SuggestedAction != actDoNotPay {
		t.Fatalf("told %+v", p)
	}
	if p := r.renews(d).problem(t); p.Status != 409 || p.Reason != string(guard.ReasonLeaseOver) || p.SuggestedAction != actStop {
		t.Fatalf("told %+v", p)
	}
	got, doc := r.brings(d, booked)
	r.wants(got, 200, guard.Allow)
	if doc.State != guard.Succeeded || !doc.Attempts[0].Late || doc.Hold == nil || doc.Hold.State != guard.HoldVoid {
		t.Errorf("settled late: %+v", doc)
	}
}

func TestWhoMaySettle(t *testing.T) {
	r := setUpLocal(t, nil)
	d := r.claims("k1", "9", 1)
	for name, wrong := range map[string]func(*claimDocument){
		"another fence":  func(d *claimDocument) { d.Fence = "x" },
		"no fence":       func(d *claimDocument) { d.Fence = "" },
		"another number": func(d *claimDocument) { d.Attempt = 2 },
		"a negative one": func(d *claimDocument) { d.Attempt = -1 },
		"another intent": func(d *claimDocument) { d.IntentID = "k2" },
	} {
		e := d
		wrong(&e)
		got, _ := r.brings(e, booked)
		if p := got.problem(t); p.Status != 404 || p.Reason != "no_such_claim" {
			t.Errorf("%s: told %+v", name, p)
		}
		if p := r.renews(e).problem(t); p.Status != 404 {
			t.Errorf("%s: told %+v", name, p)
		}
	}
	body := fmt.Sprintf(`{"attempt":1,"fence":%q,%s}`, d.Fence, booked)
	if got := r.at("k1", "settle", "other", "", body); got.status != 404 {
		t.Errorf("another caller: %d %s", got.status, got.body)
	}
	r.people.mu.Lock()
	r.people.uid = "a later namesake"
	r.people.mu.Unlock()
	if got := r.at("k1", "settle", "", "", body); got.status != 404 {
		t.Errorf("a namesake: %d %s", got.status, got.body)
	}
	r.people.mu.Lock()
	r.people.uid = ""
	r.people.mu.Unlock()
	if !strings.Contains(r.logged(), "outcome\"=\"Succeeded\"") {
		t.Errorf("a settlement that was refused leaves no line: %s", r.logged())
	}
	if _, doc := r.poll("book", "k1", "", ""); doc.State != guard.InFlight {
		t.Errorf("it is %s", doc.State)
	}
}

func TestWhatIsLocalIsNotCalledAndWhatIsCalledIsNotLocal(t *testing.T) {
	r := setUpLocal(t, nil)
	for name, got := range map[string]reply{
		"called":              r.do(ask{tool: "book", id: "k1", body: refundOf("9", "1")}),
		"called below":        r.do(ask{tool: "book", suffix: "/now", id: "k1", body: refundOf("9", "1")}),
		"called with GET":     r.do(ask{tool: "book", method: "GET"}),
		"claimed over HTTP":   r.do(ask{tool: "charge", suffix: "/intents/k1/claim", header: map[string]string{headerClaim: token(1)}, body: refundOf("9", "1")}),
		"no token":            r.at("k1", "claim", "", "", refundOf("9", "1")),
		"a short token":       r.at("k1", "claim", "", "short", refundOf("9", "1")),
		"a token with blanks": r.at("k1", "claim", "", "token 000000000001", refundOf("9", "1")),
		"no body":             r.at("k1", "claim", "", token(1), ""),
		"no amount":           r.at("k1", "claim", "", token(1), `{"accountId":"a1","orderId":"9"}`),
		"two names": r.do(ask{tool: "book", suffix: "/intents/k1/claim", id: "k2", header: map[string]string{headerClaim: token(1)},
			body: refundOf("9", "1")}),
	} {
		if p := got.problem(t); p.Status != 400 || got.verdict() != "" {
			t.Errorf("%s: told %+v", name, p)
		}
	}
	// A namesake of an action, asked for with GET, is an intent.
	if got, _ := r.poll("book", "k1/claim", "", ""); got.status != 404 {
		t.Errorf("polled %d", got.status)
	}
	// Both name it, and say the same.
	r.wants(r.do(ask{tool: "book", suffix: "/intents/a%2Fclaim/claim", id: "a/claim", header: map[string]string{headerClaim: token(1)}, body: refundOf("9", "1")}), 201, guard.Allow)
	if got, doc := r.poll("book", "a%2Fclaim", "", ""); got.status != 200 || doc.State != guard.InFlight {
		t.Errorf("polled %d, %+v", got.status, doc)
	}
	r.paid(0, 0)
}

// Nobody settles or renews what a gateway sends.
func TestWhatIsCalledIsNotSettledByItsCaller(t *testing.T) {
	r := setUp(t)
	answers := make(chan reply, 1)
	go func() { answers <- r.do(ask{id: "k1", body: refundOf("9", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	for _, act := range []string{"renew", "settle"} {
		body := `{"attempt":1,"fence":"x"}`
		if act == "settle" {
			body = `{"attempt":1,"fence":"x","outcome":"Failed"}`
		}
		got := r.do(ask{suffix: "/intents/k1/" + act, body: body})
		if p := got.problem(t); p.Status != 404 || p.Reason != "no_such_claim" {
			t.Errorf("%s: told %+v", act, p)
		}
	}
	r.p.Release(nil)
	if got := <-answers; got.status != 201 {
		t.Errorf("the call got %+v", got)
	}
	r.paid(1, 1)
}

// A settlement that is refused may be the only word of a payment: the log has it, and nobody
// is told that nothing was sent.
func TestASettlementThatIsRefusedLeavesALine(t *testing.T) {
	const small = 2000
	for name, row := range map[string]struct {
		refuse  func(r *rig, a *ask)
		status  int
		outcome string
	}{
		"not allowed": {func(r *rig, _ *ask) {
			r.people.mu.Lock()
			r.people.forbidden["system:serviceaccount:"+namespace+":agent"] = true
			r.people.mu.Unlock()
		}, 403, "Succeeded"},
		"no such tool":      {func(_ *rig, a *ask) { a.tool = "gone" }, 404, "Succeeded"},
		"no such claim":     {func(_ *rig, a *ask) { a.body = strings.Replace(a.body, `"attempt":1`, `"attempt":2`, 1) }, 404, "Succeeded"},
		"the store is away": {func(r *rig, _ *ask) { r.engines.Fail(namespace, "payments", fmt.Errorf("closed")) }, 503, "Succeeded"},
		"busy": {func(r *rig, _ *ask) {
			go func() { r.do(ask{id: "k9", body: refundOf("99", "1"), fault: "hold"}) }()
			eventually(r.t, "the gateway is busy", func() bool { return len(r.p.Held()) == 1 })
			r.t.Cleanup(func() { r.p.Release(nil) })
		}, 503, "Succeeded"},
		"too large": {func(_ *rig, a *ask) {
			a.body = strings.TrimSuffix(a.body, "}") + `,"detail":"` + strings.Repeat("x", small) + `"}`
		}, 413, "Succeeded"},
		"a long result before the reference": {func(_ *rig, a *ask) {
			const reference = `"provider_reference":"pay_1"`
			a.body = strings.Replace(strings.Replace(a.body, `"attempt":1`, `"attempt":2`, 1), reference+",", "", 1)
			a.body = strings.Replace(a.body, `{"id":"pay_1",`, `{"id":"`+strings.Repeat("x", maxUnsettled)+`",`, 1)
			a.body = strings.TrimSuffix(a.body, "}") + "," + reference + "}"
		}, 404, "Succeeded"},
		"cannot be read":  {func(_ *rig, a *ask) { a.body = strings.TrimSuffix(a.body, "}") }, 400, "Succeeded"},
		"another outcome": {func(_ *rig, a *ask) { a.body = strings.Replace(a.body, "Succeeded", "Done", 1) }, 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t, func(o *Options) {
				o.MaxCalls, o.MaxRequestBytes = 1, small
				if strings.Contains(name, "long") {
					o.MaxRequestBytes = 4 * maxUnsettled
				}
				ordinary := o.Log
				o.Evidence = funcr.New(func(_, args string) { ordinary.Info("evidence " + args) }, funcr.Options{})
			})
			r.tool("book", "", localTool(nil))
			d := r.claims("k1", "9", 1)
			a := ask{tool: "book", suffix: "/intents/k1/settle", body: fmt.Sprintf(`{"attempt":1,"fence":%q,%s}`, d.Fence, booked)}
			row.refuse(r, &a)
			got := r.do(a)
			if got.err != nil {
				t.Fatal(got.err)
			}
			p := got.problem(t)
			if p.Status != row.status || strings.Contains(p.Detail, "as sent") || !strings.Contains(p.Detail, "un the tool again") && !strings.Contains(p.Detail, "a person must look at it") {
				t.Errorf("told %+v", p)
			}
			line := ""
			eventually(t, "the line", func() bool {
				for _, l := range strings.Split(r.logged(), "\n") {
					if strings.Contains(l, "evidence") && strings.Contains(l, "settle") && strings.Contains(l, "k1") {
						line = l
					}
				}
				return line != ""
			})
			if row.outcome != "" && (!strings.Contains(line, row.outcome) || !strings.Contains(line, "pay_1")) {
				t.Errorf("the line: %s", line)
			}
			if strings.Contains(line, d.Fence) {
				t.Errorf("the line tells the fence: %s", line)
			}
		})
	}
}

func TestTheLimitsHoldForClaims(t *testing.T) {
	one, none := int32(1), int32(0)
	r := setUpLocal(t, func(t *v1alpha1.AgentTool) {
		t.Spec.Concurrency = &v1alpha1.ConcurrencySpec{MaxInFlight: &one, Queue: &v1alpha1.QueueSpec{Max: &none}}
		t.Spec.RetryBudget = &v1alpha1.RetryBudget{Attempts: new(int32(2)), Backoff: &v1alpha1.RetryBackoff{
			Initial: &metav1.Duration{Duration: time.Second}, Max: &metav1.Duration{Duration: time.Second}}}
	})
	d := r.claims("k1", "9", 1)
	if p := r.at("k2", "claim", "", token(2), refundOf("10", "1")).problem(t); p.Status != 429 || p.Reason != string(guard.ReasonTooManyInFlight) {
		t.Fatalf("told %+v", p)
	}
	// The same claim again takes no second slot.
	r.claims("k1", "9", 1)
	for n := 1; ; n++ {
		got, doc := r.brings(d, `"outcome":"Retryable","detail":"closed"`)
		r.wants(got, 200, guard.Allow)
		if n == 2 {
			if doc.State != guard.Failed {
				t.Fatalf("after %d attempts it is %s", n, doc.State)
			}
			break
		}
		r.clock.pass(2 * time.Second)
		d = r.claims("k1", "9", 10+n)
	}
	replay := r.at("k1", "claim", "", token(20), refundOf("9", "1"))
	r.wants(replay, 503, guard.Replay)
	r.claims("k2", "10", 21)
}

func TestClaimsWhileTheStoreIsAway(t *testing.T) {
	r := setUpLocal(t, nil)
	d := r.claims("k1", "9", 1)
	r.engines.Fail(namespace, "payments", fmt.Errorf("closed"))
	for name, got := range map[string]reply{"claim": r.at("k2", "claim", "", token(2), refundOf("10", "1")), "renew": r.renews(d)} {
		if p := got.problem(t); p.Status != 503 || p.SuggestedAction != actRetryLater {
			t.Errorf("%s: told %+v", name, p)
		}
	}
	got, _ := r.brings(d, booked)
	if p := got.problem(t); p.Status != 503 || !strings.Contains(p.Detail, "do not run the tool again") {
		t.Errorf("told %+v", p)
	}
	r.engines.Put(namespace, "payments", r.engine)
	got, _ = r.brings(d, booked)
	r.wants(got, 200, guard.Allow)
}
