package gateway

// Status checks over TCP, with the provider's ledger as judge.

import (
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// statusOf is how the provider's status of one payment is read.
const statusOf = `response.status == 404 ? "Failed" : has(response.body.status) && response.body.status == "processing" ? "Pending" : ` +
	`response.body.key == intent.key ? "Succeeded" : "Unknown"`

func asks(changes ...func(*v1alpha1.AgentTool)) func(*v1alpha1.AgentTool) {
	return func(o *v1alpha1.AgentTool) {
		o.Spec.UnknownOutcome = v1alpha1.UnknownStatusCheck
		o.Spec.StatusCheck = &v1alpha1.StatusCheck{
			Path: `path("charges", intent.key)`, Outcome: statusOf, Finality: v1alpha1.FinalitySettleAfter,
			Backoff: &v1alpha1.CheckBackoff{Max: &metav1.Duration{Duration: 2 * time.Second}},
		}
		for _, change := range changes {
			change(o)
		}
	}
}

// check lets time pass, and makes the checks that are due.
func (r *rig) check(pass time.Duration) {
	r.t.Helper()
	r.clock.pass(pass)
	if err := r.engine.Sweep(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	c := r.g.Checker(r.engines.All)
	c.pass(r.t.Context())
	c.making.Wait()
}

// questions is how often the provider was asked about a payment.
func (r *rig) questions() (n int) {
	for _, got := range r.p.Received() {
		if got.Method == http.MethodGet {
			n++
		}
	}
	return n
}

func TestP03TheCheckFindsThePaymentWhoseAnswerWasLost(t *testing.T) {
	r := setUp(t)
	r.secrets[namespace+"/provider/token"] = "secret-1"
	r.tool("charge", "/charges", asks(func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
			SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
		}
	}))
	a := ask{id: "k1", body: refundOf("9", "49.99"), fault: "close-after-commit"}
	p := r.pay(a, 409, guard.UnknownHold).problem(t)
	if p.Reason != string(guard.OutcomeUnknown) || p.Hold == "" || p.Poll == "" || !strings.Contains(p.Detail, "The provider is being asked") {
		t.Errorf("problem %+v", p)
	}
	r.check(time.Second)
	r.paid(1, 1)
	again := r.pay(ask{id: "k1", body: a.body}, 200, guard.Replay)
	if again.header.Get(headerAnswerFrom) != fromCheck || !strings.Contains(again.body, `"orderId":"9"`) {
		t.Errorf("the replay: %v %s", again.header, again.body)
	}
	l, err := r.p.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Succeeded || doc.ProviderReference != l.Entries[0].ID || doc.Hold.State != guard.HoldVoid {
		t.Errorf("the poll: %+v", doc)
	}
	if c := doc.Checks; c == nil || c.Made != 1 || len(c.Answers) != 1 || c.Answers[0].Outcome != guard.AttemptSucceeded || c.Answers[0].Status != 200 {
		t.Errorf("the history: %+v", doc.Checks)
	}
	for _, got := range r.p.Received() {
		if got.Header.Get("Authorization") != "Bearer secret-1" {
			t.Errorf("%s %s came with the credential %q", got.Method, got.Path, got.Header.Get("Authorization"))
		}
	}
	r.paid(1, 1)
}

func TestP02PendingThenSettled(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", asks())
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "accepted-202:2s"}
	p := r.pay(a, 409, guard.InFlightNow).problem(t)
	if p.Reason != string(guard.ReasonPending) || p.RetryAfter == 0 || p.Poll == "" || p.Hold != "" {
		t.Errorf("problem %+v", p)
	}
	r.check(time.Second)
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Pending || doc.Checks == nil || doc.Checks.Answers[0].Outcome != guard.AttemptPending {
		t.Fatalf("the poll: %+v", doc)
	}
	r.pay(ask{id: "k1", body: a.body}, 409, guard.InFlightNow)
	r.pay(ask{id: "k2", body: a.body}, 409, guard.UnknownHold)
	eventually(t, "the provider commits", func() bool {
		l, err := r.p.Ledger()
		return err == nil && l.Count == 1
	})
	r.check(2 * time.Second)
	r.pay(ask{id: "k1", body: a.body}, 200, guard.Replay)
	r.paid(1, 1)
}

// waitedOut is longer than lease, grace and settleAfter.
const waitedOut = 20 * time.Second

func TestNothingMovedAndTheNextCallPays(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", asks())
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "reset-before-commit"}
	r.pay(a, 409, guard.UnknownHold)
	r.check(time.Second) // too early to count
	r.pay(a, 409, guard.UnknownHold)
	r.check(waitedOut)
	r.pay(a, 409, guard.UnknownHold) // one answer is not enough
	r.check(4 * time.Second)
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Retryable || doc.Hold.State != guard.HoldVoid {
		t.Fatalf("the poll: %+v", doc)
	}
	r.paid(0, 1)
	r.clock.pass(time.Minute)
	r.pay(ask{id: "k1", body: a.body}, 201, guard.Allow)
	r.paid(1, 2)
}

// The provider shows a payment only after a while. Until then it says that there is none.
func TestACheckThatSaysFailedTooEarly(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", asks())
	if err := r.p.SetVisibility(time.Hour); err != nil {
		t.Fatal(err)
	}
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "close-after-commit"}
	r.pay(a, 409, guard.UnknownHold)
	for range 4 {
		r.check(2 * time.Second)
	}
	if n := r.questions(); n < 3 {
		t.Fatalf("it was asked %d times", n)
	}
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Held || doc.Checks.Answers[2].Outcome != guard.AttemptFailed {
		t.Fatalf("the poll: %+v, %+v", doc, doc.Checks)
	}
	if err := r.p.SetVisibility(0); err != nil {
		t.Fatal(err)
	}
	r.check(waitedOut)
	r.pay(ask{id: "k1", body: a.body}, 200, guard.Replay)
	r.paid(1, 1)
}

// R32: the 202 is lost, and the ledger shows nothing yet: absence does not count.
func TestR32ALost202AndFinalityUnbounded(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", asks(func(o *v1alpha1.AgentTool) {
		o.Spec.StatusCheck.Finality = v1alpha1.FinalityUnbounded
		o.Spec.StatusCheck.Path = ""
		o.Spec.StatusCheck.Query = []v1alpha1.CheckParameter{{Name: "key", Value: "intent.key"}}
		o.Spec.StatusCheck.Outcome = `response.body.count > 0 ? "Succeeded" : "Failed"`
	}))
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "reset-before-commit"}
	p := r.pay(a, 409, guard.UnknownHold).problem(t)
	r.check(waitedOut)
	for range 4 {
		r.check(5 * time.Second)
	}
	r.pay(a, 409, guard.UnknownHold)
	h, err := r.engine.Resolve(t.Context(), guard.Resolution{HoldID: holdOf(t, r, p), Decision: guard.Release, By: "alice", Reason: "x"})
	if err != nil || h.State != guard.HoldVoid {
		t.Errorf("the release: %+v, %v", h, err)
	}
	r.paid(0, 1)
}

func TestWhatIsNotAskedIsNotKnown(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*rig)
		detail string
	}{
		"another upstream":  {func(r *rig) { r.tool("charge", "/refunds", asks()) }, "another one"},
		"no check any more": {func(r *rig) { r.tool("charge", "/charges", nil) }, "no statusCheck"},
		"no tool":           {func(r *rig) { r.tools.Remove(namespace, "charge") }, "does not exist"},
		"no answer":         {func(r *rig) { _ = r.p.Close() }, "refused the connection"},
		"another question that fails": {func(r *rig) {
			r.tool("charge", "/charges", asks(func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck.Path = `path("charges", intent.lineage)` }))
		}, "lacks"},
	} {
		t.Run(name, func(t *testing.T) {
			r := setUp(t)
			r.tool("charge", "/charges", asks())
			r.pay(ask{id: "k1", body: refundOf("9", "5"), fault: "reset-before-commit"}, 409, guard.UnknownHold)
			tc.change(r)
			r.check(waitedOut)
			r.check(10 * time.Second)
			r.check(10 * time.Second)
			a, err := r.engine.Poll(t.Context(), guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"})
			if err != nil || a.Intent.State != guard.Held || a.Intent.Checks == nil || len(a.Intent.Checks.Answers) == 0 {
				t.Fatalf("%+v, %v", a.Intent, err)
			}
			last := a.Intent.Checks.Answers[len(a.Intent.Checks.Answers)-1]
			if last.Outcome != guard.AttemptUnknown || !strings.Contains(last.Detail, tc.detail) {
				t.Errorf("the last check: %+v", last)
			}
		})
	}
}

// Two gateways on one store: a check is asked once a turn, and one that dies is replaced.
func TestTwoGatewaysCheck(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", asks())
	other := guard.New(r.store, r.engine.Identity(), guard.Options{Clock: r.clock})
	engines := []guard.Served{{Namespace: namespace, Store: "payments", Engine: r.engine}, {Namespace: namespace, Store: "payments", Engine: other}}
	all := r.g.Checker(func() []guard.Served { return engines })
	turn := func(pass time.Duration) {
		t.Helper()
		r.clock.pass(pass)
		for _, e := range engines {
			if err := e.Engine.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		all.pass(t.Context())
		all.making.Wait()
	}
	a := ask{id: "k1", body: refundOf("9", "5"), fault: "reset-before-commit"}
	r.pay(a, 409, guard.UnknownHold)
	turn(time.Second)
	if n := r.questions(); n != 1 {
		t.Fatalf("%d questions in one turn", n)
	}
	// One takes a check on and is killed: the turn after, another one asks.
	r.clock.pass(2 * time.Second)
	if err := other.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	key := guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"}
	if c, err := other.BeginCheck(t.Context(), key); err != nil || c == nil {
		t.Fatalf("%+v, %v", c, err)
	}
	engines = engines[:1]
	turn(waitedOut)
	for range 6 {
		turn(5 * time.Second)
	}
	if _, doc := r.poll("charge", "k1", "agent", ""); doc.State != guard.Retryable {
		t.Fatalf("the poll: %+v %+v", doc, doc.Checks)
	}
	r.clock.pass(time.Minute)
	r.pay(ask{id: "k1", body: a.body}, 201, guard.Allow)
	r.paid(1, 2)
}
