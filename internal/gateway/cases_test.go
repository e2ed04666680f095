package gateway

// The cases that happened to people, told over TCP with the provider's ledger as judge.

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestRetryIsAReplay(t *testing.T) {
	r := setUp(t)
	first := r.pay(ask{id: "k1", body: refundOf("9", "49.99")}, 201, guard.Allow)
	again := r.pay(ask{id: "k1", body: refundOf("9", "49.990")}, 201, guard.Replay)
	if first.body != again.body {
		t.Errorf("the replay differs: %q and %q", first.body, again.body)
	}
	if first.header.Get(headerReplayed) != "" || again.header.Get(headerReplayed) != "true" {
		t.Error("only the replay must say that it is one")
	}
	for _, a := range []reply{first, again} {
		if a.header.Get(headerIntent) != "k1" || a.header.Get(headerAttempt) != "1" || a.header.Get("Content-Type") != "application/json" {
			t.Errorf("headers %v", a.header)
		}
	}
	r.paid(1, 1)
	sent := r.p.Received()[0]
	if key := sent.Header.Get("Idempotency-Key"); key == "" || key == "k1" {
		t.Errorf("the provider received the key %q, want Holdfast's own", key)
	}
	if sent.Header.Get("Authorization") != "" {
		t.Error("the caller's token reached the upstream")
	}
}

func TestK01NoIntentID(t *testing.T) {
	r := setUp(t)
	p := r.pay(ask{body: refundOf("9", "1")}, 400, "").problem(t)
	if p.Reason != "invalid_request" || !strings.Contains(p.Detail, "names no intent") {
		t.Errorf("problem %+v", p)
	}
	r.paid(0, 0)
}

func TestK02OneKeyHoweverItIsWritten(t *testing.T) {
	r := setUp(t)
	r.pay(ask{header: map[string]string{"idempotency-key": "abc"}, body: refundOf("9", "1")}, 201, guard.Allow)
	r.pay(ask{header: map[string]string{"IDEMPOTENCY-KEY": `"abc"`}, body: refundOf("9", "1")}, 201, guard.Replay)
	r.paid(1, 1)
	r.pay(ask{id: "ABC", body: refundOf("10", "1")}, 201, guard.Allow)
	r.paid(2, 2)
}

func TestK03OneClientKeyOnTwoTools(t *testing.T) {
	r := setUp(t)
	r.pay(ask{tool: "charge", id: "k", body: refundOf("9", "1")}, 201, guard.Allow)
	r.pay(ask{tool: "refund", id: "k", body: refundOf("10", "1")}, 201, guard.Allow)
	r.paid(2, 2)
	got := r.p.Received()
	if a, b := got[0].Header.Get("Idempotency-Key"), got[1].Header.Get("Idempotency-Key"); a == "" || a == b {
		t.Errorf("the provider received the keys %q and %q, want two different ones", a, b)
	}
}

func TestK07DuplicateKeys(t *testing.T) {
	r := setUp(t)
	body := `{"accountId":"a1","orderId":"9","amount":1,"amount":999}`
	if p := r.pay(ask{id: "k", body: body}, 400, "").problem(t); !strings.Contains(p.Detail, "twice") {
		t.Errorf("detail %q", p.Detail)
	}
	r.paid(0, 0)
}

// K08: a wallet's address is one recipient and one scope, however its letters are written.
func TestK08OneAddressHoweverItIsWritten(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		tool.Spec.Identity.Scope = []v1alpha1.Expression{`path("wallet", call.body.accountId)`}
		tool.Spec.Identity.Recipient = "call.body.accountId"
		tool.Spec.Identity.Addresses = []v1alpha1.JSONPointer{"/accountId"}
	})
	to := func(wallet string) string { return `{ "accountId":"` + wallet + `", "orderId":"9", "amount":5.00 }` }
	step := map[string]string{"Holdfast-Session": "s1", "Holdfast-Call": "4"}
	first := r.pay(ask{id: "k1", body: to("0xAbC"), header: step}, 201, guard.Allow)
	if got := string(r.p.Received()[0].Body); got != to("0xAbC") {
		t.Errorf("the provider received %s, want it as the agent sent it", got)
	}
	for _, wallet := range []string{"0xabc", "0XABC"} {
		if again := r.pay(ask{id: "k1", body: to(wallet)}, 201, guard.Replay); again.body != first.body {
			t.Errorf("the replay differs: %q", again.body)
		}
		if same := r.pay(ask{id: "k2", body: to(wallet), header: step}, 201, guard.Replay); same.body != first.body || same.header.Get(headerIntent) != "k1" {
			t.Errorf("the exact match got %q for the intent %q", same.body, same.header.Get(headerIntent))
		}
		p := r.pay(ask{id: "k3", body: to(wallet)}, 409, guard.UnknownHold).problem(t)
		if p.Reason != string(guard.ScopeOverlap) || len(p.OwnMatches) != 1 || p.OwnMatches[0].IntentID != "k1" {
			t.Errorf("problem %+v", p)
		}
	}
	r.paid(1, 1)
	r.pay(ask{id: "k4", body: to("0xabd")}, 201, guard.Allow)
	r.paid(2, 2)
}

func TestK11DeclinedCard(t *testing.T) {
	r := setUp(t)
	first := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "decline-402"}, 402, guard.Allow)
	again := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 402, guard.Replay)
	if first.body != again.body || again.header.Get(headerReplayed) != "true" {
		t.Errorf("the stored decline differs: %q and %q", first.body, again.body)
	}
	r.paid(0, 1)
	r.pay(ask{id: "k2", body: refundOf("9", "1")}, 201, guard.Allow)
	r.paid(1, 2)
}

func TestA09R12AnswerLostAfterCommit(t *testing.T) {
	for _, fault := range []string{"close-after-commit", "reset-after-commit", "cut-body"} {
		t.Run(fault, func(t *testing.T) {
			r := setUp(t)
			p := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: fault}, 409, guard.UnknownHold).problem(t)
			if p.Reason != string(guard.OutcomeUnknown) || p.Hold == "" {
				t.Errorf("problem %+v", p)
			}
			r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.UnknownHold)
			r.pay(ask{id: "k2", body: refundOf("9", "1")}, 409, guard.UnknownHold)
			r.paid(1, 1)
		})
	}
}

func TestA10CallerLeavesInTheMiddle(t *testing.T) {
	r := setUp(t)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan reply, 1)
	go func() { left <- r.do(ask{ctx: ctx, id: "k1", body: refundOf("9", "1"), fault: "hold-after-commit"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	leave()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Fatalf("the caller that left got %+v", got)
	}
	eventually(t, "the gateway knows that the caller has left", r.people.gone)
	// The retry arrives while the first call is still at the provider.
	retry := make(chan reply, 1)
	go func() { retry <- r.do(ask{id: "k1", body: refundOf("9", "1")}) }()
	r.p.Release(nil)
	got := <-retry
	if got.status != 201 || got.verdict() != string(guard.Replay) {
		t.Fatalf("the retry got %+v", got)
	}
	r.paid(1, 1)
}

func TestA11ClientRetriesByItself(t *testing.T) {
	r := setUp(t)
	// Each try gives up before the provider answers.
	tries, end := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { r.do(ask{ctx: tries, id: "k1", body: refundOf("9", "1"), fault: "hold-after-commit"}) })
	}
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	end()
	wg.Wait()
	eventually(t, "the gateway knows that the callers have left", r.people.gone)
	r.p.Release(nil)
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay)
	r.paid(1, 1)
}

func TestA12NewKeyForTheSameIntent(t *testing.T) {
	r := setUp(t)
	step := map[string]string{"Holdfast-Session": "s1", "Holdfast-Call": "4"}
	r.pay(ask{id: "k1", body: refundOf("9", "49.99"), header: step}, 201, guard.Allow)
	same := r.pay(ask{id: "k2", body: refundOf("9", "49.99"), header: step}, 201, guard.Replay)
	if same.header.Get(headerIntent) != "k1" {
		t.Errorf("the replay names the intent %q, want the first one", same.header.Get(headerIntent))
	}
	p := r.pay(ask{id: "k3", body: refundOf("9", "50")}, 409, guard.UnknownHold).problem(t)
	if p.Reason != string(guard.ScopeOverlap) || len(p.OwnMatches) != 1 || p.OwnMatches[0].IntentID != "k1" || p.SuggestedAction != actEarlierID {
		t.Errorf("problem %+v", p)
	}
	if got, doc := r.poll("charge", "k1", "agent", ""); got.status != 200 || doc.State != guard.Succeeded {
		t.Errorf("own_matches' intent: %d %+v", got.status, doc)
	}
	// A ServiceAccount that was made anew does not get what its namesake was answered.
	r.people.uid = "another"
	namesake := r.pay(ask{id: "k4", body: refundOf("9", "49.99"), header: step}, 409, guard.UnknownHold)
	if p := namesake.problem(t); len(p.OwnMatches) != 0 || strings.Contains(namesake.body, "k1") || strings.Contains(namesake.body, same.body) {
		t.Errorf("the namesake got %s", namesake.body)
	}
	r.people.uid = ""
	// Another caller is told that it overlaps, and nothing of whom.
	other := r.pay(ask{caller: "stranger", id: "k9", body: refundOf("9", "50")}, 409, guard.UnknownHold)
	if p := other.problem(t); len(p.OwnMatches) != 0 || strings.Contains(other.body, "49.99") || strings.Contains(other.body, "k1") || strings.Contains(other.body, "agent") {
		t.Errorf("the stranger learnt of the agent's intent: %s", other.body)
	}
	r.paid(1, 1)
}

func TestA13TheAnswerSpeaksToAModel(t *testing.T) {
	r := setUp(t)
	got := r.pay(ask{id: "s1/a b%", body: refundOf("9", "1"), fault: "error-500-after-commit"}, 409, guard.UnknownHold)
	p := got.problem(t)
	for _, want := range []string{"may have happened", "Do not pay it again", "do not report it as failed", p.Hold, "GET " + p.Poll} {
		if want == "" || !strings.Contains(p.Detail, want) {
			t.Errorf("the detail does not say %q: %s", want, p.Detail)
		}
	}
	if p.SuggestedAction != actDoNotPay || p.Intent != "s1/a b%" || p.Order == nil || len(p.Order.Scope) != 1 || p.Order.Scope[0] != "account/a1/order/9" {
		t.Errorf("problem %+v", p)
	}
	// Where to ask is a URL that works as it is.
	req, err := http.NewRequestWithContext(t.Context(), "GET", r.url+p.Poll, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer agent")
	polled := send(http.DefaultClient, req)
	if polled.status != 200 || !strings.Contains(polled.body, `"state":"Held"`) || !strings.Contains(polled.body, `"intent_id":"s1/a b%"`) {
		t.Errorf("the poll URL %s gives %d %s", p.Poll, polled.status, polled.body)
	}
	r.paid(1, 1)
}

func TestR01FiftyAtOnce(t *testing.T) {
	r := setUp(t)
	answers := make(chan reply, 50)
	start := make(chan struct{})
	for range 50 {
		go func() {
			<-start
			answers <- r.do(ask{id: "k1", body: refundOf("9", "1")})
		}()
	}
	close(start)
	bodies := map[string]int{}
	for range 50 {
		a := <-answers
		switch {
		case a.err != nil:
			t.Error(a.err)
		case a.status == 201:
			bodies[a.body]++
		case a.status != 409: // R14: above all no 500
			t.Errorf("status %d: %s", a.status, a.body)
		}
	}
	if len(bodies) != 1 {
		t.Errorf("the answers differ: %v", bodies)
	}
	r.paid(1, 1)
}

// R14: the same scope under 30 IDs at once, which all want the same mark.
func TestR14ManyIDsAtOnce(t *testing.T) {
	r := setUp(t)
	answers := make(chan reply, 30)
	for i := range 30 {
		go func() {
			answers <- r.do(ask{id: fmt.Sprint("k", i), body: refundOf("9", fmt.Sprint(i+1))})
		}()
	}
	ok := 0
	for range 30 {
		switch a := <-answers; {
		case a.err != nil || a.status != 201 && a.status != 409 && a.status != 429: // 429: too many holds
			t.Errorf("answer %+v", a)
		case a.status == 201:
			ok++
		}
	}
	if ok != 1 {
		t.Errorf("%d were told that it was paid, want 1", ok)
	}
	r.paid(1, 1)
}

func TestR02CommitThen500(t *testing.T) {
	r := setUp(t)
	for range 3 {
		r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "error-500-after-commit"}, 409, guard.UnknownHold)
	}
	r.paid(1, 1)
	held, _, err := r.engine.Holds(t.Context(), "")
	if err != nil || len(held) != 1 {
		t.Errorf("%d holds, error %v; want one", len(held), err)
	}
}

func TestR06UnusualAnswersAreFinal(t *testing.T) {
	for _, tc := range []struct {
		fault  string
		status int
		state  guard.State
	}{
		{"no-content-204", 204, guard.Succeeded},
		{"event-stream", 200, guard.Succeeded},
		{"cut-body", 409, guard.Held},
		{"accepted-202:never", 409, guard.Held},
	} {
		t.Run(tc.fault, func(t *testing.T) {
			r := setUp(t)
			verdicts := []guard.Verdict{guard.Allow, guard.Replay}
			if tc.status == 409 {
				verdicts = []guard.Verdict{guard.UnknownHold, guard.UnknownHold}
			}
			first := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: tc.fault}, tc.status, verdicts[0])
			again := r.pay(ask{id: "k1", body: refundOf("9", "1")}, tc.status, verdicts[1])
			if tc.status < 300 && (first.body != again.body || first.header.Get("Content-Type") != again.header.Get("Content-Type")) {
				t.Errorf("the replay differs: %q %v and %q %v", first.body, first.header, again.body, again.header)
			}
			if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != tc.state {
				t.Errorf("state %q, want %q", doc.State, tc.state)
			}
		})
	}
}

func TestR08MismatchThenTheRightOne(t *testing.T) {
	r := setUp(t)
	first := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	p := r.pay(ask{id: "k1", body: refundOf("9", "2")}, 422, guard.Conflict).problem(t)
	if p.Reason != "request" || p.Intent != "k1" {
		t.Errorf("problem %+v", p)
	}
	if again := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay); again.body != first.body {
		t.Errorf("replay %q, want %q", again.body, first.body)
	}
	r.paid(1, 1)
}

func TestR10LongAnswer(t *testing.T) {
	const size = 5 << 20
	r := setUp(t)
	first := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: fmt.Sprintf("big:%d", size)}, 201, guard.Allow)
	if len(first.body) != size || first.header.Get(headerTruncated) != "" {
		t.Errorf("the caller got %d bytes, want %d, unmarked", len(first.body), size)
	}
	again := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay)
	if len(again.body) != 1<<20 || again.body != first.body[:1<<20] {
		t.Errorf("the replay has %d bytes, want the first MiB", len(again.body))
	}
	if again.header.Get(headerTruncated) != "true" || again.header.Get(headerSize) != fmt.Sprint(size) || !strings.HasPrefix(again.header.Get(headerDigest), "sha256:") {
		t.Errorf("the replay does not say what is missing: %v", again.header)
	}
	r.paid(1, 1)
}

// Beyond what is passed on whole, the caller gets the start, and the money is accounted for all the same.
func TestAnswerBeyondTheBound(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxAnswerBytes = 2 << 20 })
	first := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: fmt.Sprintf("big:%d", 3<<20)}, 201, guard.Allow)
	if len(first.body) != 1<<20 || first.header.Get(headerTruncated) != "true" || first.header.Get(headerSize) != fmt.Sprint(3<<20) {
		t.Errorf("%d bytes, headers %v", len(first.body), first.header)
	}
	if got := r.g.sender.memory.left.Load(); got != 256<<20 {
		t.Errorf("%d bytes of memory are left, want all", got)
	}
	r.paid(1, 1)
}

func TestR11TheUpstreamDecidesTheContentType(t *testing.T) {
	r := setUp(t)
	both := map[string]string{"Accept": "application/json, text/event-stream"}
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "event-stream", header: both}, 200, guard.Allow); got.header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("content type %q", got.header.Get("Content-Type"))
	}
	if got := r.pay(ask{id: "k2", body: refundOf("10", "1"), header: both}, 201, guard.Allow); got.header.Get("Content-Type") != "application/json" {
		t.Errorf("content type %q", got.header.Get("Content-Type"))
	}
	if got := r.p.Received()[0].Header.Get("Accept"); got != both["Accept"] {
		t.Errorf("the upstream was told to accept %q", got)
	}
}

func TestR23RedirectsAreNotFollowed(t *testing.T) {
	for _, status := range []int{301, 302, 303, 307} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			r := setUp(t)
			r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: fmt.Sprintf("redirect-%d", status)}, 409, guard.UnknownHold)
			r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.UnknownHold)
			l, err := r.p.Ledger()
			if err != nil {
				t.Fatal(err)
			}
			r.paid(0, 1)
			if len(l.Requests) != 1 {
				t.Errorf("the redirect was followed: %v", l.Requests)
			}
		})
	}
}

func TestTimeoutIsUnknown(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", timeout(soon))
	r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "lost-answer"}, 409, guard.UnknownHold)
	_, doc := r.poll("charge", "k1", "agent", "")
	if len(doc.Attempts) != 1 || doc.Attempts[0].Outcome != guard.AttemptUnknown || !strings.Contains(doc.Attempts[0].Detail, "did not answer in time") {
		t.Errorf("attempts %+v", doc.Attempts)
	}
	r.paid(1, 1)
}

func TestNothingSentIsNotPaidAndMayBeTriedAgain(t *testing.T) {
	r := setUp(t)
	upstream := r.upstream
	r.upstream = "http://127.0.0.1:1"
	r.tool("charge", "/charges", nil)
	p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 502, guard.Deny).problem(t)
	if p.Reason != "upstream_unreachable" || p.RetryAfter < 1 || !strings.Contains(p.Detail, "Nothing was paid: the upstream refused the connection") || strings.Contains(p.Detail, "127.0.0.1") {
		t.Errorf("problem %+v", p)
	}
	back := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow)
	if p := back.problem(t); p.Reason != "backoff" || back.header.Get("Retry-After") != fmt.Sprint(p.RetryAfter) || p.RetryAfter < 1 {
		t.Errorf("problem %+v, Retry-After %q", p, back.header.Get("Retry-After"))
	}
	r.upstream = upstream
	r.tool("charge", "/charges", nil)
	var got reply
	eventually(t, "the backoff is over", func() bool {
		got = r.do(ask{id: "k1", body: refundOf("9", "1")})
		return got.status != 409
	})
	if got.status != 201 || got.header.Get(headerAttempt) != "2" {
		t.Errorf("second attempt: %+v", got)
	}
	r.paid(1, 1)
}

// An intent that nobody came back for is closed, and says so: with its last answer, if it has one.
func TestAnIntentWhoseTimeIsOver(t *testing.T) {
	const busy = "HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nslow down"
	for _, tc := range []struct {
		name          string
		answers       []string // what the upstream says to each attempt; "": it cannot be reached
		status        int
		kind, details string
	}{
		{"never reached", []string{""}, 502, "upstream-unreachable", "Nothing was paid: the upstream refused the connection; nothing was sent"},
		{"reached, then not", []string{busy, ""}, 409, "expired", "Nothing was paid: the upstream refused the connection; nothing was sent"},
		{"answered last", []string{"", busy}, 429, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := setUp(t)
			for _, answer := range tc.answers {
				r.upstream = "http://127.0.0.1:1"
				if answer != "" {
					r.upstream, _ = raw(t, answer)
				}
				r.tool("charge", "/charges", nil)
				if got := r.do(ask{id: "k1", body: refundOf("9", "1")}); got.status != 502 && got.status != 429 {
					t.Fatalf("an attempt got %+v", got)
				}
				r.clock.pass(time.Minute)
			}
			r.clock.pass(48 * time.Hour)
			for range 2 {
				got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, tc.status, guard.Replay)
				if got.header.Get(headerReplayed) != "true" || got.header.Get("Retry-After") != "" {
					t.Errorf("headers %v", got.header)
				}
				if tc.kind == "" {
					if got.body != "slow down" {
						t.Errorf("body %q, want the upstream's last answer", got.body)
					}
					continue
				}
				p := got.problem(t)
				if p.Reason != string(guard.ReasonExpired) || p.Type != problemBase+tc.kind || p.SuggestedAction != actNewIntent ||
					!strings.Contains(p.Detail, tc.details) || !strings.Contains(p.Detail, "not sent again in time") || strings.Contains(p.Detail, "used up") {
					t.Errorf("problem %+v", p)
				}
			}
			if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Failed || len(doc.Attempts) != len(tc.answers) {
				t.Errorf("the intent is %+v", doc)
			}
		})
	}
}

func TestInFlightReject(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		tool.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject, RetryAfter: &metav1.Duration{Duration: 3 * time.Second}}
	})
	first := make(chan reply, 1)
	go func() { first <- r.do(ask{id: "k1", body: refundOf("9", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow)
	if p := got.problem(t); p.RetryAfter != 3 || got.header.Get("Retry-After") != "3" || p.Poll == "" || p.SuggestedAction != actPoll {
		t.Errorf("problem %+v", p)
	}
	r.p.Release(nil)
	if got := <-first; got.status != 201 {
		t.Errorf("the first got %+v", got)
	}
	r.paid(1, 1)
}

func TestInFlightWaitEnds(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		tool.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Timeout: &metav1.Duration{Duration: 200 * time.Millisecond}}
	})
	first := make(chan reply, 1)
	go func() { first <- r.do(ask{id: "k1", body: refundOf("9", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	started := time.Now()
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow)
	if took := time.Since(started); took < 200*time.Millisecond {
		t.Errorf("it waited for %s, want 200ms", took)
	}
	r.p.Release(nil)
	<-first
	r.paid(1, 1)
}

// A call may take longer than its body may.
func TestBodysDeadlineIsTheBodysOwn(t *testing.T) {
	const bodyTime = time.Second
	r := setUp(t, func(o *Options) { o.BodyTimeout = bodyTime })
	upstream, asked, answer := slow(t)
	r.upstream = upstream
	for _, a := range []ask{{tool: "look", method: "GET"}, {tool: "charge", id: "k1", body: refundOf("9", "1")}} {
		r.tool("look", "/", readOnly(0))
		r.tool("charge", "/", nil)
		// Over a connection of its own, because on a used one Go's client would quietly try again.
		a.client = &http.Client{Transport: &http.Transport{}}
		got := make(chan reply, 1)
		go func() { got <- r.do(a) }()
		<-asked
		began := time.Now()
		eventually(t, "the body's time is over", func() bool { return time.Since(began) > bodyTime })
		if r.people.gone() {
			t.Errorf("%s: the call was given up", a.tool)
		}
		answer <- struct{}{}
		if got := <-got; got.err != nil || got.status != 200 {
			t.Errorf("%s got %+v", a.tool, got)
		}
	}
}

func TestInformationalAnswersAreNotTheAnswer(t *testing.T) {
	r := setUp(t)
	r.upstream, _ = raw(t, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}")
	r.tool("charge", "/", nil)
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow); got.body != "{}" || got.header.Get("Link") != "" {
		t.Errorf("answer %+v", got)
	}
}

// Verdict, intent and attempt are named as soon as they are known, also by refusals, and never guessed.
func TestWhatAnAnswerNames(t *testing.T) {
	r := setUp(t)
	const none = "-"
	check := func(name string, got reply, status int, verdict, id, attempt, state string) {
		t.Helper()
		if got.err != nil || got.status != status {
			t.Fatalf("%s: %+v, want status %d", name, got, status)
		}
		for header, want := range map[string]string{headerVerdict: verdict, headerIntent: id, headerAttempt: attempt, headerState: state} {
			have := none
			if v, ok := got.header[header]; ok {
				have = strings.Join(v, ",")
			}
			if have != want {
				t.Errorf("%s: %s is %q, want %q", name, header, have, want)
			}
		}
		if got.header.Get("Content-Type") == "application/problem+json" {
			if p := got.problem(t); p.Intent != strings.TrimPrefix(id, none) {
				t.Errorf("%s: intent_id %q, want %q", name, p.Intent, id)
			}
		}
	}
	fail := func(err error) {
		r.store.mu.Lock()
		defer r.store.mu.Unlock()
		r.store.fail = err
	}
	r.tool("look", "/charges", readOnly(0))
	check("no such tool", r.do(ask{tool: "nothing", id: "k1", body: refundOf("9", "1")}), 404, none, none, none, none)
	check("no intent ID", r.do(ask{body: refundOf("9", "1")}), 400, none, none, none, none)
	check("not JSON", r.do(ask{id: "k1", body: "{"}), 400, none, none, none, none)
	check("a bad amount", r.do(ask{id: "k1", body: refundOf("9", "-1")}), 400, none, "k1", none, none)
	check("no scope", r.do(ask{id: "k1", body: `{"amount":1}`}), 400, none, "k1", none, none)
	fail(store.ErrUnavailable)
	check("no store", r.do(ask{id: "k1", body: refundOf("9", "1")}), 503, "DENY", "k1", none, none)
	fail(nil)
	check("no such intent", r.do(ask{method: "GET", suffix: "/intents/k0"}), 404, none, "k0", none, none)
	check("a read-only tool", r.do(ask{tool: "look", method: "GET"}), 200, "ALLOW", none, none, none)
	check("paid", r.do(ask{id: "k1", body: refundOf("9", "1")}), 201, "ALLOW", "k1", "1", "Succeeded")
	check("again", r.do(ask{id: "k1", body: refundOf("9", "1")}), 201, "REPLAY", "k1", "1", "Succeeded")
	check("asked for", r.do(ask{method: "GET", suffix: "/intents/k1"}), 200, "REPLAY", "k1", "1", "Succeeded")
	check("another request", r.do(ask{id: "k1", body: refundOf("9", "2")}), 422, "CONFLICT", "k1", "1", none)
	check("held, never sent", r.do(ask{id: "k2", body: refundOf("9", "2")}), 409, "UNKNOWN_HOLD", "k2", "0", none)
	check("unknown", r.do(ask{id: "k3", body: refundOf("10", "1"), fault: "error-500-after-commit"}), 409, "UNKNOWN_HOLD", "k3", "1", none)
	check("declined", r.do(ask{id: "k5", body: refundOf("12", "1"), fault: "decline-402"}), 402, "ALLOW", "k5", "1", "Failed")
	check("declined before", r.do(ask{id: "k5", body: refundOf("12", "1"), fault: "decline-402"}), 402, "REPLAY", "k5", "1", "Failed")
	check("handed off", r.do(ask{id: "k6", body: refundOf("13", "1"), fault: "hold", header: async()}), 202, "ALLOW", "k6", "1", "InFlight")
	r.holds(1)
	r.p.Release(nil)
	eventually(t, "it is paid", func() bool { _, doc := r.poll("charge", "k6", "agent", ""); return doc.State == guard.Succeeded })
	r.people.uid = "another"
	check("a namesake's", r.do(ask{id: "k1", body: refundOf("9", "1")}), 422, "CONFLICT", "k1", none, none)
	r.people.uid = ""
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		tool.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{SecretRef: v1alpha1.SecretKeyReference{Name: "gone", Key: "token"}, Header: "Authorization"}
	})
	check("no credential", r.do(ask{id: "k4", body: refundOf("11", "1")}), 503, "DENY", "k4", none, none)
	check("no credential, sent before", r.do(ask{id: "k3", body: refundOf("10", "1")}), 503, "DENY", "k3", "1", none)
	r.paid(3, 4)
}

func TestPoll(t *testing.T) {
	r := setUp(t)
	if got, _ := r.poll("charge", "k1", "agent", ""); got.status != 404 || got.problem(t).Reason != "no_such_intent" {
		t.Errorf("unknown intent: %d %s", got.status, got.body)
	}
	first := make(chan reply, 1)
	go func() { first <- r.do(ask{id: "k1", body: refundOf("9", "49.99"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	if got, doc := r.poll("charge", "k1", "agent", "?wait=0.1s"); doc.State != guard.InFlight || doc.Verdict != guard.InFlightNow || got.verdict() != "IN_FLIGHT" {
		t.Errorf("in flight: %+v", doc)
	}
	waiting := make(chan intentDocument, 1)
	go func() {
		_, doc := r.poll("charge", "%22k1%22", "agent", "?wait=30")
		waiting <- doc
	}()
	r.p.Release(nil)
	<-first
	doc := <-waiting
	if doc.State != guard.Succeeded || doc.Verdict != guard.Replay || doc.IntentID != "k1" || doc.Amount == nil || doc.Amount.Value != "49.99" ||
		doc.ProviderReference == "" || len(doc.Attempts) != 1 || doc.Attempts[0].Status != 201 || doc.Scope[0] != "account/a1/order/9" {
		t.Errorf("after the wait: %+v", doc)
	}
	if got, _ := r.poll("charge", "k1", "stranger", ""); got.status != 404 {
		t.Errorf("another caller's poll: %d %s", got.status, got.body)
	}
	if got, _ := r.poll("refund", "k1", "agent", ""); got.status != 404 {
		t.Errorf("another tool's poll: %d %s", got.status, got.body)
	}
	// Nor does a ServiceAccount that was made anew see what its namesake did.
	r.people.uid = "another"
	if got, _ := r.poll("charge", "k1", "agent", ""); got.status != 404 {
		t.Errorf("a namesake's poll: %d %s", got.status, got.body)
	}
	if p := r.pay(ask{id: "k1", body: refundOf("9", "49.99")}, 422, guard.Conflict).problem(t); p.Reason != "caller" || p.Order != nil || p.Poll != "" {
		t.Errorf("a namesake's call: %+v", p)
	}
	r.people.uid = ""
	for _, bad := range []string{"?wait=soon", "?wait=-1s", "?until=30s"} {
		if got, _ := r.poll("charge", "k1", "agent", bad); got.status != 400 {
			t.Errorf("%s: %d", bad, got.status)
		}
	}
	if got := r.do(ask{method: "POST", suffix: "/intents/k1", body: refundOf("9", "1")}); got.status != 400 {
		t.Errorf("POST to an intent: %d", got.status)
	}
	r.paid(1, 1)
}

// A person's answer reaches whoever waits at the poll URL, and the retry.
func TestMarkPaidReachesTheAgent(t *testing.T) {
	r := setUp(t)
	p := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "error-500-after-commit"}, 409, guard.UnknownHold).problem(t)
	waiting := make(chan intentDocument, 1)
	go func() {
		_, doc := r.poll("charge", "k1", "agent", "?wait=30s")
		waiting <- doc
	}()
	held, _, err := r.engine.Holds(t.Context(), "")
	if err != nil || len(held) != 1 {
		t.Fatalf("holds %v, %v", held, err)
	}
	id := holdOf(t, r, p)
	if _, err := r.engine.Resolve(t.Context(), guard.Resolution{
		HoldID: id, Decision: guard.MarkPaid, By: "alice", Reason: "seen in the ledger", ProviderReference: "ch_1", Result: []byte(`{"id":"ch_1"}`),
	}); err != nil {
		t.Fatal(err)
	}
	if doc := <-waiting; doc.State != guard.Succeeded || doc.ProviderReference != "ch_1" {
		t.Errorf("the waiting poll got %+v", doc)
	}
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 200, guard.Replay); got.body != `{"id":"ch_1"}` {
		t.Errorf("the retry got %q", got.body)
	}
	r.paid(1, 1)
}

func holdOf(t *testing.T, r *rig, p problem) guard.HoldID {
	t.Helper()
	a, err := r.engine.Poll(t.Context(), guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: p.Intent})
	if err != nil || a.Intent.Hold == nil || a.Intent.Hold.Name != p.Hold {
		t.Fatalf("the hold %q: %+v, %v", p.Hold, a.Intent.Hold, err)
	}
	return a.Intent.Hold.HoldID
}

func TestRejectedAndMarkedFailed(t *testing.T) {
	for _, tc := range []struct {
		decision guard.Decision
		reason   string
	}{{guard.Reject, "rejected"}, {guard.MarkFailed, "marked_failed"}} {
		t.Run(string(tc.decision), func(t *testing.T) {
			r := setUp(t)
			p := r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "redirect-302"}, 409, guard.UnknownHold).problem(t)
			resolve := func() bool {
				held, err := r.engine.Resolve(t.Context(), guard.Resolution{HoldID: holdOf(t, r, p), Decision: tc.decision, By: "alice", Reason: "x"})
				if err != nil {
					t.Fatal(err)
				}
				return held.State == guard.HoldResolved
			}
			if tc.decision == guard.Reject && !resolve() {
				t.Fatal("not rejected")
			}
			if tc.decision == guard.MarkFailed {
				// Not before the payment could have become visible.
				eventually(t, "the hold waits no longer", func() bool {
					if err := r.engine.Sweep(t.Context()); err != nil {
						t.Fatal(err)
					}
					a := holdOf(t, r, p)
					h, err := r.engine.Hold(t.Context(), a)
					if err != nil {
						t.Fatal(err)
					}
					if h.State == guard.HoldWaiting {
						r.clock.pass(time.Second)
						return false
					}
					return true
				})
				if !resolve() {
					t.Fatal("not marked as failed")
				}
			}
			got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 403, guard.Deny).problem(t)
			if got.Reason != tc.reason {
				t.Errorf("problem %+v", got)
			}
			r.paid(0, 1)
		})
	}
}

func TestKeyAsArgument(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		tool.Spec.Idempotency.Key = v1alpha1.ProviderKey{Argument: "/idempotencyKey"}
	})
	r.pay(ask{id: "k1", body: `{"accountId":"a1","orderId":"9","amount":9007199254740993.10,"memo":"<&>"}`}, 201, guard.Allow)
	l, err := r.p.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if e := l.Entries[0]; e.Amount != "9007199254740993.10" || e.Memo != "<&>" || e.Key == "" || e.Key == "k1" {
		t.Errorf("the provider received %+v", e)
	}
	for name, body := range map[string]string{"a list": `[{"accountId":"a1"}]`, "no JSON": "a=b"} {
		if got := r.do(ask{id: "k2", body: body}); got.status != 400 {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	r.paid(1, 1)
}

func TestCredentials(t *testing.T) {
	r := setUp(t)
	with := func(tool *v1alpha1.AgentTool) {
		tool.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
			SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
		}
	}
	r.tool("charge", "/charges", with)
	p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 503, guard.Deny).problem(t)
	if p.Reason != "credentials_not_available" || !strings.Contains(p.Detail, `"provider"`) || strings.Contains(p.Detail, "internal detail") {
		t.Errorf("problem %+v", p)
	}
	if got, _ := r.poll("charge", "k1", "agent", ""); got.status != 404 {
		t.Errorf("something was reserved: %s", got.body)
	}
	r.paid(0, 0)

	r.secrets[namespace+"/provider/token"] = "s3cret\n"
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	if got := r.p.Received()[0].Header.Get("Authorization"); got != "Bearer s3cret" {
		t.Errorf("the upstream received %q", got)
	}
	// What was paid is told, whatever became of the Secret; but not to another request.
	delete(r.secrets, namespace+"/provider/token")
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay)
	r.pay(ask{id: "k1", body: refundOf("9", "2")}, 503, guard.Deny)
	r.paid(1, 1)
	if strings.Contains(r.logged(), "s3cret") {
		t.Error("the secret is in the log")
	}
}

func TestRequestHeadersGoByList(t *testing.T) {
	r := setUp(t)
	r.pay(ask{id: "k1", body: refundOf("9", "1"), header: map[string]string{
		"Cookie": "a=b", "X-Secret": "x", "Holdfast-Session": "s", "Accept": "application/json", "Provider-Fault": "", "Connection": "accept",
	}}, 201, guard.Allow)
	got := r.p.Received()[0].Header
	for _, name := range []string{"Cookie", "X-Secret", "Holdfast-Session", "Authorization", "Accept"} {
		if v := got.Get(name); v != "" {
			t.Errorf("%s: %q reached the upstream", name, v)
		}
	}
	if got.Get("Content-Type") != "application/json" {
		t.Errorf("headers %v", got)
	}
}

func TestQueryAndSuffix(t *testing.T) {
	r := setUp(t)
	r.tool("look", "", func(tool *v1alpha1.AgentTool) {
		readOnly(0)(tool)
		tool.Spec.Upstream.HTTP.Suffixes = []v1alpha1.PathSuffix{"/charges", "/*/x"}
	})
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	got := r.pay(ask{tool: "look", method: "GET", suffix: "/charges?orderId=9"}, 200, guard.Allow)
	if !strings.Contains(got.body, `"count":1`) {
		t.Errorf("body %s", got.body)
	}
	for _, suffix := range []string{"/ledger", "/charges/", "//charges", "/charges/../ledger", "/charges%2F..%2Fledger", "/..%2f/x", "/../x", "/%2e%2e/x", "/"} {
		if got := r.pay(ask{tool: "look", method: "GET", suffix: suffix}, 400, ""); got.problem(t).Reason != "suffix_not_declared" {
			t.Errorf("%s: %s", suffix, got.body)
		}
	}
	if got := r.do(ask{tool: "look", method: "DELETE", suffix: "/charges"}); got.status != 400 || got.problem(t).Reason != "method_not_declared" {
		t.Errorf("DELETE: %+v", got)
	}
	if got := r.do(ask{tool: "look", method: "GET", suffix: "/charges?a=%zz"}); got.status != 400 {
		t.Errorf("bad query: %+v", got)
	}
}

func TestReadOnlyCacheIsEachCallersOwn(t *testing.T) {
	r := setUp(t)
	r.tool("look", "/charges", readOnly(time.Minute))
	count := func() int {
		l, err := r.p.Ledger()
		if err != nil {
			t.Fatal(err)
		}
		return l.Requests["GET /charges"]
	}
	look := func(caller, query string, verdict guard.Verdict, asked int) {
		t.Helper()
		got := r.pay(ask{tool: "look", method: "GET", caller: caller, suffix: query}, 200, verdict)
		if count() != asked || (got.header.Get("Age") != "") != (verdict == guard.Replay) {
			t.Errorf("the upstream was asked %d times, want %d; headers %v", count(), asked, got.header)
		}
	}
	look("agent", "?key=a", guard.Allow, 1)
	look("agent", "?key=a", guard.Replay, 1)
	look("agent", "?key=b", guard.Allow, 2)
	look("stranger", "?key=a", guard.Allow, 3)
	r.people.mu.Lock()
	r.people.forbidden["system:serviceaccount:"+namespace+":agent"] = true
	r.people.mu.Unlock()
	r.pay(ask{tool: "look", method: "GET", suffix: "?key=a"}, 403, "")
	// A refusal of the upstream passes as it is, and is not kept.
	for i := range 2 {
		if got := r.do(ask{tool: "look", method: "GET", caller: "stranger", suffix: "?nonsense=1"}); got.status != 400 || count() != 4+i {
			t.Errorf("upstream's 400: %d, asked %d times", got.status, count())
		}
	}
}

func TestTwoAtATimeOverOneStore(t *testing.T) {
	r := setUp(t)
	// A second gateway on the same store sees the same record.
	second := setUp(t)
	second.engines.Put(namespace, "payments", r.engine)
	second.upstream = r.upstream
	second.tool("charge", "/charges", nil)
	first := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	if again := second.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay); again.body != first.body {
		t.Errorf("replay %q", again.body)
	}
	r.paid(1, 1)
}

func TestDrain(t *testing.T) {
	r := setUp(t)
	first, second := make(chan reply, 1), make(chan reply, 1)
	go func() { first <- r.do(ask{id: "k1", body: refundOf("9", "1"), fault: "hold"}) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	started := make(chan struct{})
	go func() {
		close(started)
		second <- r.do(ask{id: "k1", body: refundOf("9", "1")})
	}()
	<-started
	eventually(t, "the second call waits", func() bool { return r.g.waiting.count() == 1 })
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	// Who waits for another's answer is sent away at once.
	if got := <-second; got.status != 409 || got.verdict() != string(guard.InFlightNow) {
		t.Errorf("the waiting call got %+v", got)
	}
	if resp, err := http.Get(r.url); err == nil {
		t.Error("a draining gateway still accepts connections", resp.Body.Close())
	}
	r.p.Release(nil)
	if got := <-first; got.status != 201 {
		t.Errorf("the call in progress got %+v", got)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	a, err := r.engine.Poll(t.Context(), guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"})
	if err != nil || a.Intent.State != guard.Succeeded {
		t.Errorf("after the drain: %+v, %v", a, err)
	}
	r.paid(1, 1)
}

func TestAfter429TheUpstreamsWishIsKept(t *testing.T) {
	r := setUp(t)
	r.upstream, _ = raw(t, "HTTP/1.1 429 Too Many\r\nRetry-After: 120\r\nSet-Cookie: session=1\r\nHoldfast-Verdict: REPLAY\r\nHoldfast-State: Succeeded\r\n"+
		"Idempotent-Replayed: true\r\nConnection: X-Hop, close\r\nX-Hop: 1\r\nX-End: 1\r\nContent-Length: 9\r\n\r\nslow down")
	r.tool("charge", "/charges", nil)
	got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 429, guard.Allow)
	if got.header.Get("Retry-After") != "120" || got.body != "slow down" || got.header.Get("X-End") != "1" || len(got.header[headerState]) != 1 || got.header.Get(headerState) != "Retryable" {
		t.Errorf("answer %+v", got)
	}
	for _, name := range []string{"Set-Cookie", "X-Hop", "Connection", headerReplayed} {
		if got.header.Get(name) != "" {
			t.Errorf("%s came through", name)
		}
	}
	if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow).problem(t); p.RetryAfter < 110 || p.RetryAfter > 120 {
		t.Errorf("retry after %d seconds, want the upstream's 120", p.RetryAfter)
	}
}

// curl -d calls everything a form.
func TestAJSONBodyThatWasNotReadAsOneIsSaidToBe(t *testing.T) {
	r := setUp(t)
	for kind, says := range map[string]string{
		"application/x-www-form-urlencoded": "The body was read as a form; send Content-Type: application/json.",
		"":                                  "no Content-Type says what it is; send Content-Type: application/json.",
	} {
		p := r.pay(ask{id: "k1", body: refundOf("9", "1"), header: map[string]string{"Content-Type": kind}}, 400, "").problem(t)
		if !strings.Contains(p.Detail, says) {
			t.Errorf("%q: %s", kind, p.Detail)
		}
	}
	// A form that lacks a field is one, and so is JSON.
	for kind, body := range map[string]string{"application/x-www-form-urlencoded": "accountId=a1&amount=1", "application/json": `{"amount":1}`} {
		p := r.pay(ask{id: "k1", body: body, header: map[string]string{"Content-Type": kind}}, 400, "").problem(t)
		if strings.Contains(p.Detail, "send Content-Type") {
			t.Errorf("%q: %s", kind, p.Detail)
		}
	}
	r.paid(0, 0)
}

// An amount has all digits of its currency, as kubectl shows it.
func TestAmountsAreShownWithTheirDigits(t *testing.T) {
	r := setUp(t)
	r.pay(ask{id: "k1", body: refundOf("9", "49.9")}, 201, guard.Allow)
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.Amount == nil || doc.Amount.Value != "49.90" {
		t.Errorf("the poll URL says %+v", doc.Amount)
	}
	p := r.pay(ask{id: "k2", body: refundOf("9", "5")}, 409, guard.UnknownHold).problem(t)
	if len(p.OwnMatches) != 1 || p.OwnMatches[0].Amount == nil || p.OwnMatches[0].Amount.Value != "49.90" {
		t.Errorf("own_matches are %+v", p.OwnMatches)
	}
}
