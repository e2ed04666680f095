// Calls that go on without their callers.

package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/metrics/metricstest"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/test/provider"
)

func async(more ...string) map[string]string {
	return map[string]string{"Prefer": strings.Join(append([]string{"respond-async"}, more...), ", ")}
}

// accepted wants a 202 that says all that the caller needs.
func (r *rig) accepted(a ask) intentDocument {
	r.t.Helper()
	got := r.pay(a, 202, guard.Allow)
	poll := pollPath(namespace, "charge", a.id)
	if got.header.Get("Preference-Applied") != a.header["Prefer"] || got.header.Get("Location") != poll || got.header.Get(headerIntent) != a.id || got.header.Get(headerAttempt) == "" {
		r.t.Errorf("the headers of a 202: %v", got.header)
	}
	var doc intentDocument
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
		r.t.Fatal(err)
	}
	if doc.IntentID != a.id || doc.Poll != poll || doc.State != guard.InFlight || doc.SuggestedAction != actPoll || doc.Detail == "" || doc.Result != nil {
		r.t.Errorf("the body of a 202: %s", got.body)
	}
	return doc
}

// settles waits until an intent has come to this.
func (r *rig) settles(id string, state guard.State) intentDocument {
	r.t.Helper()
	var doc intentDocument
	eventually(r.t, fmt.Sprintf("%s is %s", id, state), func() bool {
		_, doc = r.poll("charge", id, "agent", "?wait=1s")
		return doc.State == state
	})
	return doc
}

func TestACallGoesOnWithoutItsCaller(t *testing.T) {
	m := metrics.New(metrics.Options{})
	r := setUp(t, func(o *Options) { o.Metrics = m })
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "hold", header: async()}
	if doc := r.accepted(a); len(doc.Attempts) != 1 || doc.Attempts[0].Outcome != guard.AttemptOpen {
		t.Errorf("the attempts: %+v", doc.Attempts)
	}
	r.holds(1)
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.InFlight || doc.Poll == "" {
		t.Errorf("the poll: %+v", doc)
	}
	// A repeated one does not wait either.
	began := time.Now()
	if p := r.pay(a, 409, guard.InFlightNow).problem(t); p.Poll == "" || time.Since(began) > 5*time.Second {
		t.Errorf("after %v: %+v", time.Since(began), p)
	}
	if n := metricstest.Read(t, m)["holdfast_calls_async"]; n != 1 {
		t.Errorf("%v calls go on", n)
	}
	waiting := make(chan intentDocument, 1)
	go func() { _, doc := r.poll("charge", "k1", "agent", "?wait=30s"); waiting <- doc }()
	r.p.Release(nil)
	doc := <-waiting
	if doc.State != guard.Succeeded || doc.Result == nil || doc.Result.Status != 201 || doc.Result.ContentType != "application/json" ||
		!strings.Contains(string(doc.Result.Body), `"orderId":"9"`) || doc.ProviderReference == "" {
		t.Errorf("the poll: %+v, result %+v", doc, doc.Result)
	}
	if again := r.pay(ask{id: "k1", body: a.body, header: async()}, 201, guard.Replay); again.body != string(doc.Result.Body) || again.header.Get("Preference-Applied") != "" {
		t.Errorf("the replay: %v %q", again.header, again.body)
	}
	r.atRest()
	r.paid(1, 1)
	var lines []string
	eventually(t, "the line of the call", func() bool {
		lines = slices.DeleteFunc(strings.Split(r.logged(), "\n"), func(l string) bool { return !strings.Contains(l, `"async"=true`) })
		return len(lines) > 0
	})
	if len(lines) != 1 || !strings.Contains(lines[0], `"verdict"="ALLOW"`) || !strings.Contains(lines[0], `"outcome"="Succeeded"`) || !strings.Contains(lines[0], `"status"=201`) {
		t.Errorf("the lines of the call: %q", lines)
	}
	for name, want := range map[string]float64{
		`holdfast_calls_handed_off_total{namespace="support",tool="charge"}`:      1,
		`holdfast_calls_total{namespace="support",tool="charge",verdict="ALLOW"}`: 1,
		`holdfast_calls_async`: 0,
	} {
		eventually(t, fmt.Sprintf("%s is %v", name, want), func() bool { return metricstest.Read(t, m)[name] == want })
	}
}

func TestWhoPrefersToWaitIsAnsweredIfItIsInTime(t *testing.T) {
	r := setUp(t)
	if got := r.pay(ask{id: "k1", body: refundOf("1", "5"), header: async("wait=30")}, 201, guard.Allow); got.header.Get("Preference-Applied") != "" || !strings.Contains(got.body, `"orderId":"1"`) {
		t.Errorf("%v %s", got.header, got.body)
	}
	began := time.Now()
	r.accepted(ask{id: "k2", body: refundOf("2", "5"), fault: "hold", header: async("wait=1")})
	if took := time.Since(began); took < time.Second {
		t.Errorf("it waited for %v", took)
	}
	r.p.Release(nil)
	r.settles("k2", guard.Succeeded)
	// A failure is an answer, too, and so is an outcome that is not known.
	r.pay(ask{id: "k3", body: refundOf("3", "5"), fault: "decline-402", header: async("wait=30")}, 402, guard.Allow)
	r.pay(ask{id: "k4", body: refundOf("4", "5"), fault: "reset-after-commit", header: async("wait=30")}, 409, guard.UnknownHold).problem(t)
	// Alone it changes nothing.
	r.pay(ask{id: "k5", body: refundOf("5", "5"), fault: "delay:1100ms", header: map[string]string{"Prefer": "wait=1"}}, 201, guard.Allow)
	if got, doc := r.pollPreferring("k5", "wait=30"); doc.State != guard.Succeeded || got.header.Get("Preference-Applied") != "wait=30" {
		t.Errorf("%v %+v", got.header, doc)
	}
	r.atRest()
	r.paid(4, 5)
}

func (r *rig) pollPreferring(id, prefer string) (got reply, doc intentDocument) {
	r.t.Helper()
	got = r.do(ask{method: "GET", suffix: "/intents/" + id, header: map[string]string{"Prefer": prefer}})
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
		r.t.Fatal(got, err)
	}
	return got, doc
}

func TestWhatIsDecidedBeforeTheReserveIsAnsweredAtOnce(t *testing.T) {
	r := setUp(t)
	r.pay(ask{id: "k1", body: refundOf("9", "5")}, 201, guard.Allow)
	r.pay(ask{id: "k2", body: refundOf("8", "5"), fault: "decline-402"}, 402, guard.Allow)
	for name, tc := range map[string]struct {
		a       ask
		status  int
		verdict guard.Verdict
	}{
		"a replay":         {ask{id: "k1", body: refundOf("9", "5")}, 201, guard.Replay},
		"another request":  {ask{id: "k1", body: refundOf("9", "6")}, 422, guard.Conflict},
		"a hold":           {ask{id: "k3", body: refundOf("9", "6")}, 409, guard.UnknownHold},
		"a failure":        {ask{id: "k2", body: refundOf("8", "5")}, 402, guard.Replay},
		"no intent ID":     {ask{body: refundOf("7", "5")}, 400, ""},
		"no such tool":     {ask{tool: "nothing", id: "k4", body: refundOf("7", "5")}, 404, ""},
		"a reader's tool":  {ask{tool: "list", method: "GET"}, 200, guard.Allow},
		"a malformed body": {ask{id: "k4", body: `{"amount":1,"amount":2}`}, 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r.tool("list", "/charges", readOnly(0))
			tc.a.header = async("wait=20")
			if got := r.pay(tc.a, tc.status, tc.verdict); got.header.Get("Preference-Applied") != "" || got.header.Get("Location") != "" {
				t.Errorf("%v", got.header)
			}
		})
	}
	r.store.mu.Lock()
	r.store.fail = store.ErrUnavailable
	r.store.mu.Unlock()
	r.pay(ask{id: "k5", body: refundOf("5", "5"), header: async()}, 503, guard.Deny).problem(t)
	r.paid(1, 2)
	r.atRest()
}

// A10: whoever leaves before the 202 changes nothing.
func TestA10ACallerLeavesBeforeItIsHandedOff(t *testing.T) {
	r := setUp(t)
	ctx, leave := context.WithCancel(t.Context())
	known := make(chan struct{})
	r.store.mu.Lock()
	r.store.after = func() {
		leave()
		eventually(t, "the gateway knows", r.people.gone)
		close(known)
	}
	r.store.mu.Unlock()
	if got := r.do(ask{id: "k1", body: refundOf("9", "5"), header: async("wait=5"), ctx: ctx}); got.err == nil {
		t.Fatalf("%+v", got)
	}
	<-known
	r.store.mu.Lock()
	r.store.after = nil
	r.store.mu.Unlock()
	r.settles("k1", guard.Succeeded)
	r.pay(ask{id: "k1", body: refundOf("9", "5")}, 201, guard.Replay)
	r.paid(1, 1)
	r.atRest()
}

func TestShutdownWaitsForCallsWithoutCallers(t *testing.T) {
	r := setUp(t)
	r.accepted(ask{id: "k1", body: refundOf("9", "5"), fault: "hold", header: async()})
	r.holds(1)
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	eventually(t, "it drains", func() bool { return r.g.Ready(nil) != nil })
	select {
	case err := <-stopped:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	r.p.Release(nil)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	key := guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"}
	if a, err := r.engine.Poll(t.Context(), key); err != nil || a.Intent.State != guard.Succeeded {
		t.Errorf("%+v, %v", a.Intent, err)
	}
	r.paid(1, 1)
}

func TestShutdownDoesNotWaitForEver(t *testing.T) {
	r := setUp(t, func(o *Options) { o.Drain = 200 * time.Millisecond })
	r.accepted(ask{id: "k1", body: refundOf("9", "5"), fault: "hold", header: async()})
	r.holds(1)
	stop := r.stop
	r.stop = func() error { return nil }
	if err := stop(); err == nil || !strings.Contains(err.Error(), "their intents will be held") {
		t.Errorf("%v", err)
	}
	r.p.Release(nil)
	r.g.background.Wait()
	r.paid(1, 1)
}

// They take the places of other calls: there are no more of them, and a caller has its share.
func TestCallsWithoutCallersAreBounded(t *testing.T) {
	r := setUp(t, func(o *Options) { o.MaxCalls = 8 })
	for n := range 2 {
		r.accepted(ask{id: fmt.Sprint("k", n), body: refundOf(fmt.Sprint(n), "5"), fault: "hold", header: async()})
	}
	r.holds(2)
	if p := r.pay(ask{id: "k2", body: refundOf("2", "5"), header: async()}, 503, guard.Deny).problem(t); p.Reason != "busy" || !strings.Contains(p.Detail, "This caller") {
		t.Errorf("%+v", p)
	}
	r.pay(ask{id: "k2", body: refundOf("2", "5"), caller: "other", header: async("wait=30")}, 201, guard.Allow)
	r.p.Release(nil)
	r.settles("k0", guard.Succeeded)
	r.settles("k1", guard.Succeeded)
	r.atRest()
	r.pay(ask{id: "k3", body: refundOf("3", "5"), header: async("wait=30")}, 201, guard.Allow)
	r.paid(4, 4)
}

func TestACallWithoutItsCallerTriesAgain(t *testing.T) {
	r := setUp(t)
	// Nobody waits for longer than this; the call does.
	r.tool("charge", "/charges", retrying(5, patience(100*time.Millisecond)))
	if err := r.p.AddFault(provider.Fault{Fault: "error-503-before-commit", Times: 2}); err != nil {
		t.Fatal(err)
	}
	r.accepted(ask{id: "k1", body: refundOf("9", "5"), header: async()})
	if doc := r.settles("k1", guard.Succeeded); len(doc.Attempts) != 3 {
		t.Errorf("the attempts: %+v", doc.Attempts)
	}
	r.atRest()
	r.paid(1, 3)
}

func TestACallThatIsHandedOffHasWaitedForItsSlot(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 1, time.Minute))
	r.accepted(ask{id: "k1", body: refundOf("1", "5"), fault: "hold", header: async()})
	r.holds(1)
	second := r.start(ask{id: "k2", body: refundOf("2", "5"), fault: "hold", header: async()})
	eventually(t, "it waits for a slot", func() bool { return r.queued() == 1 })
	if got, _ := r.poll("charge", "k2", "agent", ""); got.status != 404 {
		t.Errorf("it is known with status %d", got.status)
	}
	r.pay(ask{id: "k3", body: refundOf("3", "5"), header: async()}, 429, guard.Deny)
	r.p.Release(nil)
	if got := <-second; got.status != 202 {
		t.Errorf("%+v", got)
	}
	r.holds(1)
	r.p.Release(nil)
	r.settles("k2", guard.Succeeded)
	r.atRest()
	r.paid(2, 2)
}

// What goes wrong in this code itself ends one call, and not the process.
func TestAPanicWithoutACallerEndsOneCall(t *testing.T) {
	var fail atomic.Bool
	var r *rig
	r = setUp(t, func(o *Options) {
		o.Policies = func() Policies {
			if fail.CompareAndSwap(true, false) {
				panic("broken")
			}
			return r.tools.Load()
		}
	})
	a := inOrder(t, answerLater, answer201)
	r.upstream = a.url
	r.tool("charge", "/charges", retrying(5))
	r.accepted(ask{id: "k1", body: refundOf("9", "5"), header: async()})
	fail.Store(true)
	eventually(t, "it is logged", func() bool { return strings.Contains(r.logged(), "a call panicked after it was handed off") })
	r.atRest()
	r.pay(ask{id: "k1", body: refundOf("9", "5")}, 201, guard.Allow)
	if n := a.count(); n != 2 {
		t.Errorf("sent %d times", n)
	}
}

func TestPreferences(t *testing.T) {
	for _, tc := range []struct {
		lines []string
		want  preferences
		rest  string
	}{
		{[]string{"respond-async"}, preferences{async: true}, ""},
		{[]string{"Respond-Async, WAIT = 10"}, preferences{async: true, wait: 10 * time.Second, waits: true}, ""},
		{[]string{`respond-async="";x=y`, `wait="7"`}, preferences{async: true, wait: 7 * time.Second, waits: true}, ""},
		{[]string{"wait=3, wait=9"}, preferences{wait: 3 * time.Second, waits: true}, ""},
		{[]string{"wait=0"}, preferences{waits: true}, ""},
		{[]string{"wait=-1", "wait=ten", "wait", "wait=99999999999"}, preferences{}, ""},
		{[]string{"wait=2000000000"}, preferences{wait: maxPreferWait, waits: true}, ""},
		{[]string{`return=minimal, foo="a, respond-async, \", wait=3"; b=c`, "", ",,"}, preferences{}, `return=minimal|foo="a, respond-async, \", wait=3"; b=c`},
		{nil, preferences{}, ""},
	} {
		if got, rest := prefers(tc.lines); got != tc.want || strings.Join(rest, "|") != tc.rest {
			t.Errorf("%q: %+v, %q", tc.lines, got, rest)
		}
	}
}

// The upstream is not asked to hand off what is handed off here.
func TestThePreferenceIsNotTheUpstreams(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.HTTP.RequestHeaders = append(o.Spec.Upstream.HTTP.RequestHeaders, "prefer")
		o.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: 5 * time.Second}
	})
	r.pay(ask{id: "k1", body: refundOf("1", "5"), header: async("wait=30", "return=minimal")}, 201, guard.Allow)
	r.pay(ask{id: "k2", body: refundOf("2", "5"), header: async("wait=30")}, 201, guard.Allow)
	var got []string
	for _, one := range r.p.Received() {
		got = append(got, strings.Join(one.Header[http.CanonicalHeaderKey("Prefer")], "|"))
	}
	if want := []string{"return=minimal", ""}; !slices.Equal(got, want) {
		t.Errorf("the upstream got %q", got)
	}
}
