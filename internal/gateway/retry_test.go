package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/test/provider"
)

// retrying gives a tool a retry budget with short waits, and what else changes.
func retrying(attempts int32, more ...func(*v1alpha1.AgentTool)) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		many := int32(1000)
		t.Spec.RetryBudget = &v1alpha1.RetryBudget{
			Attempts: &attempts, Ratio: &v1alpha1.RetryRatio{MinPerSecond: &many},
			Backoff: &v1alpha1.RetryBackoff{Initial: &metav1.Duration{Duration: 20 * time.Millisecond}, Max: &metav1.Duration{Duration: 100 * time.Millisecond}},
		}
		// As the test provider does it: 503 with Retry-After, and nothing was paid.
		t.Spec.Outcomes = []v1alpha1.OutcomeRule{{Status: "503", Outcome: v1alpha1.OutcomeRetryable}}
		for _, change := range more {
			change(t)
		}
	}
}

func patience(d time.Duration) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Timeout: &metav1.Duration{Duration: d}}
	}
}

func ratioOf(percent, minPerSecond int32) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.RetryBudget.Ratio = &v1alpha1.RetryRatio{Percent: &percent, MinPerSecond: &minPerSecond}
	}
}

const (
	answer429 = "HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nslow down"
	answer201 = "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok"
	// answerLater has a call wait for time enough to change something meanwhile.
	answerLater = "HTTP/1.1 429 Too Many\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
)

// inOrder is an upstream that gives these answers, and then the last one again.
func inOrder(t *testing.T, answers ...string) *actor {
	return newActor(t, nil, func(n int, conn net.Conn) bool {
		say(conn, answers[min(n, len(answers))-1])
		return true
	})
}

func (a *actor) count() int { return len(a.connections()) }

func TestTheGatewayTriesAgainWhileNothingMoved(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", retrying(5))
	if err := r.p.AddFault(provider.Fault{Fault: "error-503-before-commit", Times: 2}); err != nil {
		t.Fatal(err)
	}
	got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	if got.header.Get(headerAttempt) != "3" {
		t.Errorf("attempt %s", got.header.Get(headerAttempt))
	}
	if again := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Replay); again.body != got.body {
		t.Errorf("the replay is %q", again.body)
	}
	r.paid(1, 3)
	_, doc := r.poll("charge", "k1", "agent", "")
	for i, want := range []guard.Outcome{guard.AttemptRetryable, guard.AttemptRetryable, guard.AttemptSucceeded} {
		if doc.Attempts[i].Outcome != want {
			t.Errorf("attempt %d: %+v", i+1, doc.Attempts[i])
		}
	}
	// The provider asked for a second each time.
	if took := doc.Attempts[2].Started.Sub(doc.Attempts[0].Ended); took < 2*time.Second {
		t.Errorf("the third attempt began after %v", took)
	}
}

func TestAnUpstreamThatComesBackIsPaidOnce(t *testing.T) {
	r := setUp(t)
	free, err := ports.Free(1)
	if err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(free[0]))
	r.upstream = "http://" + address
	r.tool("charge", "/charges", retrying(20))
	answer := make(chan reply, 1)
	go func() { answer <- r.do(ask{id: "k1", body: refundOf("9", "1")}) }()
	eventually(t, "two attempts were refused", func() bool { _, doc := r.poll("charge", "k1", "agent", ""); return len(doc.Attempts) >= 2 })
	r.p = provider.New(provider.Options{})
	if _, err := r.p.Start(address); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.p.Close() })
	if got := <-answer; got.status != 201 || got.verdict() != string(guard.Allow) {
		t.Errorf("the caller got %+v", got)
	}
	r.paid(1, 1)
	if log := r.logged(); strings.Contains(log, "refused") {
		t.Errorf("the line of a call that was paid names the cause of an earlier attempt: %s", log)
	}
}

// R02: whoever answers 500 may have paid. No budget makes the gateway send that again.
func TestR02NothingIsTriedAgainAfterA500(t *testing.T) {
	r := setUp(t)
	if err := r.p.SetWindow(0); err != nil { // the provider does not recognise the key
		t.Fatal(err)
	}
	r.tool("charge", "/charges", retrying(5))
	if err := r.p.AddFault(provider.Fault{Fault: "error-500-after-commit", Times: 3}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.UnknownHold).problem(t); p.Reason != "OutcomeUnknown" {
			t.Errorf("problem %+v", p)
		}
	}
	for _, fault := range []string{"lost-answer", "close-after-commit", "reset-after-commit", "reset-before-commit", "cut-body", "redirect-307", "accepted-202:never"} {
		r.tool("charge", "/charges", retrying(5, timeout(soon)))
		r.pay(ask{id: fault, body: refundOf(fault, "1"), fault: fault}, 409, guard.UnknownHold)
		if _, doc := r.poll("charge", fault, "agent", ""); len(doc.Attempts) != 1 {
			t.Errorf("%s: attempts %+v", fault, doc.Attempts)
		}
	}
	r.paid(1+4, 1+7)
}

// What was not answered in full cannot be declared.
func TestRulesReadCompleteAnswersOnly(t *testing.T) {
	r := setUp(t)
	everything := []v1alpha1.OutcomeRule{
		{Status: "2xx", Outcome: v1alpha1.OutcomeSucceeded}, {Status: "3xx", Outcome: v1alpha1.OutcomeSucceeded},
		{Status: "4xx", Outcome: v1alpha1.OutcomeFailed}, {Status: "5xx", Outcome: v1alpha1.OutcomeSucceeded},
	}
	for name, says := range map[string]string{
		"a cut body":          "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
		"a cut chunk":         "HTTP/1.1 402 No\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nsh",
		"a cut header":        "HTTP/1.1 402 No\r\nContent-Le",
		"no final answer":     "HTTP/1.1 100 Continue\r\n\r\n",
		"nothing":             "",
		"HTTP/2 all the same": "\x00\x00\x12\x04\x00\x00\x00\x00\x00",
	} {
		a := newActor(t, nil, func(_ int, conn net.Conn) bool { say(conn, says); return false })
		r.upstream = a.url
		r.tool("charge", "/charges", retrying(5, func(t *v1alpha1.AgentTool) { t.Spec.Outcomes = everything }))
		r.pay(ask{id: strings.ReplaceAll(name, " ", "-"), body: refundOf(name, "1")}, 409, guard.UnknownHold)
		if a.count() != 1 {
			t.Errorf("%s: sent %d times", name, a.count())
		}
	}
	// And what could not be sent is not asked either.
	r.upstream = "http://127.0.0.1:1"
	r.tool("charge", "/charges", func(t *v1alpha1.AgentTool) { t.Spec.Outcomes = everything })
	r.pay(ask{id: "unsent", body: refundOf("unsent", "1")}, 502, guard.Deny)
}

func TestDeclaredOutcomes(t *testing.T) {
	answered := func(status int, body string) string {
		return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
	}
	for name, c := range map[string]struct {
		rule    v1alpha1.OutcomeRule
		says    string
		status  int
		verdict guard.Verdict
		outcome guard.Outcome
		detail  string
	}{
		"a 404 that is not final": {v1alpha1.OutcomeRule{Status: "404", Outcome: v1alpha1.OutcomeUnknown}, answered(404, `{}`), 409, guard.UnknownHold, guard.AttemptUnknown, "the upstream answered 404, and outcomes[0] says Unknown"},
		"a 200 still at work":     {v1alpha1.OutcomeRule{When: `response.body.status == "processing"`, Outcome: v1alpha1.OutcomePending}, answered(200, `{"status":"processing"}`), 409, guard.UnknownHold, guard.AttemptUnknown, "Pending"},
		"a 200 that declines":     {v1alpha1.OutcomeRule{When: `response.body.ok == false`, Outcome: v1alpha1.OutcomeFailed}, answered(200, `{"ok":false}`), 200, guard.Allow, guard.AttemptFailed, "Failed"},
		"a 409 that was paid":     {v1alpha1.OutcomeRule{When: `response.body.code == "paid"`, Outcome: v1alpha1.OutcomeSucceeded}, answered(409, `{"code":"paid","id":"ch_1"}`), 409, guard.Allow, guard.AttemptSucceeded, "Succeeded"},
		"a 202 that is final":     {v1alpha1.OutcomeRule{Status: "202", Outcome: v1alpha1.OutcomeSucceeded}, answered(202, `{"id":"ch_1"}`), 202, guard.Allow, guard.AttemptSucceeded, ""},
		"a rule that fails":       {v1alpha1.OutcomeRule{When: `response.body.code == "paid"`, Outcome: v1alpha1.OutcomeSucceeded}, answered(201, `{"id":"ch_1"}`), 409, guard.UnknownHold, guard.AttemptUnknown, "outcomes[0] reads a field that this answer lacks"},
		"503 without Retry-After": {v1alpha1.OutcomeRule{Status: "503", Outcome: v1alpha1.OutcomeRetryable}, answered(503, `{}`), 409, guard.UnknownHold, guard.AttemptUnknown, "Retry-After"},
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t)
			a := inOrder(t, c.says)
			r.upstream = a.url
			r.tool("charge", "/charges", func(t *v1alpha1.AgentTool) { t.Spec.Outcomes = []v1alpha1.OutcomeRule{c.rule} })
			r.pay(ask{id: "k1", body: refundOf("9", "1")}, c.status, c.verdict)
			_, doc := r.poll("charge", "k1", "agent", "")
			if len(doc.Attempts) != 1 || doc.Attempts[0].Outcome != c.outcome || !strings.Contains(doc.Attempts[0].Detail, c.detail) {
				t.Errorf("attempts %+v", doc.Attempts)
			}
			if c.outcome == guard.AttemptSucceeded && doc.Attempts[0].ProviderReference != "ch_1" {
				t.Errorf("reference %q", doc.Attempts[0].ProviderReference)
			}
		})
	}
}

func TestAttemptsSpent(t *testing.T) {
	r := setUp(t)
	a := inOrder(t, answer429)
	r.upstream = a.url
	r.tool("charge", "/charges", retrying(3))
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 429, guard.Allow); got.body != "slow down" || got.header.Get(headerAttempt) != "3" {
		t.Errorf("got %+v", got)
	}
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 429, guard.Replay); got.body != "slow down" {
		t.Errorf("got %+v", got)
	}
	if a.count() != 3 {
		t.Errorf("sent %d times", a.count())
	}
	// A caller gets the answer of the attempt that ended it, also a definite one.
	r.upstream = inOrder(t, answer429, "HTTP/1.1 402 No\r\nContent-Length: 0\r\n\r\n").url
	r.tool("charge", "/charges", retrying(3))
	r.pay(ask{id: "k2", body: refundOf("10", "1")}, 402, guard.Allow)
	// And one that reached nobody.
	r.upstream = "http://127.0.0.1:1"
	r.tool("charge", "/charges", retrying(2))
	if p := r.pay(ask{id: "k3", body: refundOf("11", "1")}, 502, guard.Deny).problem(t); p.Reason != "upstream_unreachable" {
		t.Errorf("problem %+v", p)
	}
	r.pay(ask{id: "k3", body: refundOf("11", "1")}, 502, guard.Replay)
}

func TestABackoffLongerThanTheCallersPatience(t *testing.T) {
	r := setUp(t)
	r.upstream = inOrder(t, "HTTP/1.1 429 Too Many\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n").url
	r.tool("charge", "/charges", retrying(3))
	for range 2 { // the one that made the attempt, and another one
		p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow).problem(t)
		if p.Reason != "backoff" || p.RetryAfter < 110 || p.RetryAfter > 120 || p.Poll == "" {
			t.Errorf("problem %+v", p)
		}
	}
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Retryable || len(doc.Attempts) != 1 {
		t.Errorf("intent %+v", doc)
	}
}

func TestCallsOfOneIntentWaitForItsRetries(t *testing.T) {
	r := setUp(t)
	a := inOrder(t, answer429, answer429, answer201)
	r.upstream = a.url
	r.tool("charge", "/charges", retrying(20))
	answers := make(chan reply, 20)
	for range cap(answers) {
		go func() { answers <- r.do(ask{id: "k1", body: refundOf("9", "1")}) }()
	}
	allowed := 0
	for range cap(answers) {
		got := <-answers
		if got.status != 201 || got.body != "ok" {
			t.Errorf("got %+v", got)
		}
		if got.verdict() == string(guard.Allow) {
			allowed++
		}
	}
	if allowed != 1 || a.count() != 3 {
		t.Errorf("%d were allowed, sent %d times", allowed, a.count())
	}
}

func TestInFlightRejectAndABackoff(t *testing.T) {
	r := setUp(t)
	release := make(chan struct{})
	a := newActor(t, nil, func(n int, conn net.Conn) bool {
		if n == 1 {
			say(conn, answer429)
			return true
		}
		<-release
		say(conn, answer201)
		return true
	})
	r.upstream = a.url
	r.tool("charge", "/charges", retrying(3, func(t *v1alpha1.AgentTool) {
		t.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject}
	}))
	// The call itself tries again; others are turned away meanwhile.
	answer := make(chan reply, 1)
	go func() { answer <- r.do(ask{id: "k1", body: refundOf("9", "1")}) }()
	eventually(t, "the second attempt is under way", func() bool { return a.count() == 2 })
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 409, guard.InFlightNow)
	close(release)
	if got := <-answer; got.status != 201 {
		t.Errorf("got %+v", got)
	}
}

// backingOff makes a call that waits for a long backoff of its own.
func backingOff(t *testing.T, ctx context.Context, more ...func(*v1alpha1.AgentTool)) (*rig, *actor, <-chan reply) {
	t.Helper()
	r := setUp(t)
	a := inOrder(t, answerLater, answer201)
	r.upstream = a.url
	r.tool("charge", "/charges", retrying(5, more...))
	answer := make(chan reply, 1)
	go func() { answer <- r.do(ask{ctx: ctx, id: "k1", body: refundOf("9", "1")}) }()
	eventually(t, "the call waits", func() bool { return a.count() == 1 && r.g.waiting.count() == 1 })
	return r, a, answer
}

func wantBackoff(t *testing.T, got reply) {
	t.Helper()
	if got.err != nil || got.status != 409 || got.problem(t).Reason != "backoff" {
		t.Fatalf("got %+v", got)
	}
}

func TestACallerThatLeavesEndsTheRetries(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	r, a, answer := backingOff(t, ctx)
	leave()
	if got := <-answer; !errors.Is(got.err, context.Canceled) {
		t.Fatalf("got %+v", got)
	}
	eventually(t, "its place is free", func() bool { return r.g.waiting.count() == 0 })
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Retryable || a.count() != 1 {
		t.Errorf("%+v, sent %d times", doc, a.count())
	}
	// Whoever comes back goes on where it was left.
	r.clock.pass(5 * time.Second)
	if got := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow); got.header.Get(headerAttempt) != "2" {
		t.Errorf("got %+v", got)
	}
}

func TestARetryIsJudgedByItsOwnMoment(t *testing.T) {
	for name, change := range map[string]func(*rig){
		"the tool was changed": func(r *rig) { r.tool("charge", "/charges", retrying(5)) },
		"the tool was deleted": func(r *rig) { r.tools.Remove(namespace, "charge") },
		"the tool is refused":  func(r *rig) { r.tools.Refuse(&policy.NotServedError{Namespace: namespace, Tool: "charge"}) },
		"the store has gone":   func(r *rig) { r.engines.Put(namespace, "payments", nil) },
		"the caller lost its right": func(r *rig) {
			r.people.mu.Lock()
			defer r.people.mu.Unlock()
			r.people.forbidden["system:serviceaccount:"+namespace+":agent"] = true
		},
		"the credential was taken away": func(r *rig) { delete(r.secrets, namespace+"/provider/token") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait
			r := setUp(t)
			r.secrets[namespace+"/provider/token"] = "secret"
			a := inOrder(t, answerLater, answer201)
			r.upstream = a.url
			r.tool("charge", "/charges", retrying(5, func(t *v1alpha1.AgentTool) {
				t.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization"}
			}))
			answer := make(chan reply, 1)
			go func() { answer <- r.do(ask{id: "k1", body: refundOf("9", "1")}) }()
			eventually(t, "the call waits", func() bool { return a.count() == 1 && r.g.waiting.count() == 1 })
			change(r)
			wantBackoff(t, <-answer)
			if a.count() != 1 {
				t.Errorf("sent %d times", a.count())
			}
		})
	}
}

func TestDrainEndsABackoff(t *testing.T) {
	r, a, answer := backingOff(t, t.Context(), patience(time.Minute))
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	wantBackoff(t, <-answer)
	if err := <-stopped; err != nil || a.count() != 1 {
		t.Errorf("%v, sent %d times", err, a.count())
	}
}

func TestPerAttemptTimeout(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", retrying(5, timeout(time.Minute), func(t *v1alpha1.AgentTool) {
		t.Spec.RetryBudget.PerAttemptTimeout = &metav1.Duration{Duration: soon}
	}))
	r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "lost-answer"}, 409, guard.UnknownHold)
	if _, doc := r.poll("charge", "k1", "agent", ""); len(doc.Attempts) != 1 || doc.Attempts[0].Ended.Sub(doc.Attempts[0].Started) > 30*time.Second {
		t.Errorf("attempts %+v", doc.Attempts)
	}
}

// While the upstream is down, every call becomes a retry; most of them are not sent.
func TestRetriesKeepToTheirShare(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 1024 })
	var down atomic.Bool
	down.Store(true)
	a := newActor(t, nil, func(_ int, conn net.Conn) bool {
		if down.Load() {
			say(conn, answer429)
		} else {
			say(conn, answer201)
		}
		return true
	})
	r.upstream = a.url
	const calls, percent, least = 100, 20, 3
	r.tool("charge", "/charges", retrying(20, ratioOf(percent, least)))
	began := time.Now()
	var refused atomic.Int64
	var wg sync.WaitGroup
	for n := range calls {
		wg.Go(func() {
			got := r.do(ask{id: fmt.Sprint("k", n), body: refundOf(fmt.Sprint(n), "1")})
			if got.status != 429 || got.verdict() != string(guard.Deny) {
				t.Errorf("got %+v", got)
				return
			}
			if p := got.problem(t); p.Reason != "retry_ratio" || p.RetryAfter < 1 || got.header.Get("Retry-After") == "" || p.Poll == "" {
				t.Errorf("problem %+v", p)
			}
			refused.Add(1)
		})
	}
	wg.Wait()
	retries, took := a.count()-calls, time.Since(began)
	if most := calls*percent/100 + least*(int(took.Seconds())+2); retries > most || retries < 1 {
		t.Errorf("%d retries of %d calls in %v, want 1 to %d", retries, calls, took, most)
	}
	if refused.Load() != calls {
		t.Errorf("%d calls were refused", refused.Load())
	}
	eventually(t, "all places are free", func() bool { return r.g.working.count()+r.g.waiting.count() == 0 })
	// It comes back by itself: each agent that comes back is paid, at the tool's pace.
	down.Store(false)
	for n := range 5 {
		eventually(t, "the upstream is back", func() bool {
			return r.do(ask{id: fmt.Sprint("k", n), body: refundOf(fmt.Sprint(n), "1")}).status == 201
		})
	}
}

func TestRatio(t *testing.T) {
	tool := func(name string, percent, least int) *policy.Tool {
		return &policy.Tool{Namespace: namespace, Name: name, Retry: &policy.Retry{Percent: percent, MinPerSecond: least}}
	}
	r := newRatios()
	at := func(d time.Duration) time.Time { return r.began.Add(d) }
	granted := func(t *policy.Tool, d time.Duration) (n int) {
		for range 100 {
			if _, ok := r.retry(t, at(d)); !ok {
				return n
			}
			n++
		}
		return n
	}
	least := tool("least", 20, 3)
	if n := granted(least, 0); n != 3 {
		t.Errorf("without calls: %d", n)
	}
	if n := granted(least, 999*time.Millisecond); n != 0 {
		t.Errorf("within the second: %d", n)
	}
	if n := granted(least, 1100*time.Millisecond); n != 3 {
		t.Errorf("in the next second: %d", n)
	}
	share := tool("share", 20, 1)
	for range 50 {
		r.first(share, at(0))
	}
	if n := granted(share, 5*time.Second); n != 10 {
		t.Errorf("a fifth of 50 calls: %d", n)
	}
	if n := granted(share, 7*time.Second); n != 1 {
		t.Errorf("the least: %d", n)
	}
	if n := granted(share, 10*time.Second); n != 1 {
		t.Errorf("after the window of the calls: %d", n)
	}
	if n := granted(tool("share", 100, 1), time.Hour); n != 1 {
		t.Errorf("after an hour: %d", n)
	}
	// In any ten seconds there are no more than the share and the least.
	steady, times := tool("steady", 10, 2), []time.Duration(nil)
	for d := time.Duration(0); d < time.Minute; d += 50 * time.Millisecond {
		r.first(steady, at(2*time.Hour+d))
		for range granted(steady, 2*time.Hour+d) {
			times = append(times, d)
		}
		if len(times) > 1000 {
			t.Fatal("there is no end of retries")
		}
	}
	for i := range times {
		n := 0
		for _, d := range times[i:] {
			if d-times[i] < ratioWindow {
				n++
			}
		}
		if most := 200*10/100 + 2*10; n > most {
			t.Errorf("%d retries in the 10 s from %v, want at most %d", n, times[i], most)
		}
	}
	// Tools that are idle are forgotten.
	for i := range 3 * ratioTools {
		r.first(tool(fmt.Sprint("idle", i), 20, 1), at(3*time.Hour+time.Duration(i)*time.Second))
	}
	if len(r.of) > ratioTools {
		t.Errorf("%d tools are remembered", len(r.of))
	}
}

// An upstream that speaks nothing but HTTP/2 and says so is refused in the handshake:
// nothing of the request was written, so nothing moved. There are no streams that could
// be refused, and no connection that goes away with some of them unanswered.
func TestAnUpstreamOfOnlyHTTP2IsRefusedBeforeAByteIsSent(t *testing.T) {
	certFile, keyFile, roots := certificate(t, t.TempDir())
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		r := setUp(t, func(o *Options) { o.RootCAs = roots })
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		offered, plain := make(chan []string, 100), make(chan []byte, 100)
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				secured := tls.Server(conn, &tls.Config{
					Certificates: []tls.Certificate{pair}, MaxVersion: version, NextProtos: []string{"h2"},
					// Go's own server lets clients of HTTP/1.1 pass here; most others refuse them, as RFC 7301 wants it.
					GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
						offered <- hello.SupportedProtos
						return nil, errors.New("no application protocol in common")
					},
				})
				var request bytes.Buffer
				_, _ = request.ReadFrom(secured)
				plain <- request.Bytes()
				_ = conn.Close()
			}
		}()
		r.upstream = "https://" + l.Addr().String()
		r.tool("charge", "/charges", nil)
		if p := r.pay(ask{id: "k1", body: refundOf("9", "1")}, 502, guard.Deny).problem(t); p.Reason != "upstream_unreachable" {
			t.Errorf("problem %+v", p)
		}
		if got := <-offered; len(got) != 1 || got[0] != "http/1.1" {
			t.Errorf("the gateway offers %v", got)
		}
		if got := <-plain; len(got) > 0 {
			t.Errorf("the upstream read %q", got)
		}
		if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Retryable || doc.Attempts[0].Outcome != guard.AttemptRetryable {
			t.Errorf("intent %+v", doc)
		}
	}
}
