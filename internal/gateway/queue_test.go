// Calls that wait for a slot, and calls that come too often.

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// slotsOf gives a tool so many slots, and a queue.
func slotsOf(inFlight, queue int32, timeout time.Duration) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.Concurrency = &v1alpha1.ConcurrencySpec{
			MaxInFlight: &inFlight,
			Queue:       &v1alpha1.QueueSpec{Max: &queue, Timeout: &metav1.Duration{Duration: timeout}},
		}
	}
}

// queued is how many calls wait for a slot of the charge tool.
func (r *rig) queued() int {
	r.g.queues.mu.Lock()
	defer r.g.queues.mu.Unlock()
	return len(r.g.queues.of[queueName{namespace, "charge"}])
}

// start makes a call, whose answer comes later.
func (r *rig) start(a ask) <-chan reply {
	out := make(chan reply, 1)
	go func() { out <- r.do(a) }()
	return out
}

func (r *rig) holds(n int) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("the provider works on %d payments", n), func() bool { return len(r.p.Held()) == n })
}

func (r *rig) atRest() {
	r.t.Helper()
	if n := r.queued(); n != 0 {
		r.t.Errorf("%d calls wait in the end", n)
	}
	for _, s := range []*slots{r.g.reading, r.g.working, r.g.waiting} {
		eventually(r.t, "all places of the gateway are free", func() bool { return s.count() == 0 })
	}
}

func TestCallsWaitForASlotInTheirOrder(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 10, time.Minute))
	first := r.start(ask{id: "k0", body: refundOf("0", "1"), fault: "hold"})
	r.holds(1)
	var waiting []<-chan reply
	for n := 1; n <= 4; n++ {
		waiting = append(waiting, r.start(ask{id: fmt.Sprint("k", n), body: refundOf(fmt.Sprint(n), "1"), fault: "hold"}))
		eventually(t, "it waits", func() bool { return r.queued() == n })
	}
	r.paid(0, 1)
	for n := 0; n <= 4; n++ {
		r.holds(1)
		if got := r.p.Held()[0].OrderID; got != fmt.Sprint(n) {
			t.Fatalf("the provider works on order %s, want %d", got, n)
		}
		if n == 0 {
			// Others may see that it is in progress, and have no place in the queue.
			p := r.pay(ask{id: "k0", body: refundOf("0", "2")}, 422, guard.Conflict).problem(t)
			if p.Reason != string(guard.ReasonRequest) {
				t.Errorf("problem %+v", p)
			}
		}
		r.p.Release(nil)
		answer := first
		if n > 0 {
			answer = waiting[n-1]
		}
		if got := <-answer; got.status != 201 || got.verdict() != string(guard.Allow) {
			t.Fatalf("call %d got %+v", n, got)
		}
	}
	r.paid(5, 5)
	r.atRest()
}

func TestAQueueHasAnEnd(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 1, 300*time.Millisecond))
	first := r.start(ask{id: "k0", body: refundOf("0", "1"), fault: "hold"})
	r.holds(1)
	began := time.Now()
	second := r.start(ask{id: "k1", body: refundOf("1", "1")})
	eventually(t, "it waits", func() bool { return r.queued() == 1 })
	// There is room for one.
	got := r.pay(ask{id: "k2", body: refundOf("2", "1")}, 429, guard.Deny)
	p := got.problem(t)
	if p.Reason != string(guard.ReasonTooManyInFlight) || p.RetryAfter < 1 || got.header.Get("Retry-After") == "" || p.SuggestedAction != actRetryLater || p.Intent != "k2" || p.Poll != "" {
		t.Errorf("problem %+v", p)
	}
	if got := <-second; got.status != 429 || time.Since(began) < 300*time.Millisecond {
		t.Errorf("after %s the one that waited got %+v", time.Since(began), got)
	}
	// Nothing of the two is recorded.
	for _, id := range []string{"k1", "k2"} {
		if got, _ := r.poll("charge", id, "agent", ""); got.status != 404 {
			t.Errorf("there is a record of %s: %+v", id, got)
		}
	}
	// None may wait at all.
	r.tool("charge", "/charges", slotsOf(1, 0, time.Minute))
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 429, guard.Deny)
	r.p.Release(nil)
	<-first
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 201, guard.Allow)
	// Repeats need no slot.
	hold := r.start(ask{id: "k3", body: refundOf("3", "1"), fault: "hold"})
	r.holds(1)
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 201, guard.Replay)
	r.p.Release(nil)
	<-hold
	r.paid(3, 3)
	r.atRest()
}

func TestWhoeverWaitsForASlotMayLeave(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 10, time.Minute))
	first := r.start(ask{id: "k0", body: refundOf("0", "1"), fault: "hold"})
	r.holds(1)
	ctx, leave := context.WithCancel(t.Context())
	second := r.start(ask{ctx: ctx, id: "k1", body: refundOf("1", "1")})
	eventually(t, "it waits", func() bool { return r.queued() == 1 })
	third := r.start(ask{id: "k2", body: refundOf("2", "1")})
	eventually(t, "both wait", func() bool { return r.queued() == 2 })
	leave()
	if got := <-second; !errors.Is(got.err, context.Canceled) {
		t.Fatalf("the one that left got %+v", got)
	}
	eventually(t, "its place is free", func() bool { return r.queued() == 1 })
	r.p.Release(nil)
	<-first
	if got := <-third; got.status != 201 {
		t.Fatalf("the other one got %+v", got)
	}
	r.paid(2, 2)
	r.atRest()
}

// elsewhere is a call of somebody at another gateway.
func elsewhere(t *testing.T, tool *policy.Tool) guard.Call {
	t.Helper()
	id, err := tool.Identify(policy.CallInput{
		Method: "POST", Header: http.Header{"Idempotency-Key": {"x"}, "Content-Type": {"application/json"}}, Body: []byte(refundOf("elsewhere", "1")),
	})
	if err != nil {
		t.Fatal(err)
	}
	return guard.Call{
		Key:       guard.Key{Namespace: namespace, Tool: tool.Name, Caller: "somebody", IntentID: id.IntentID},
		CallerUID: "u", Scope: id.Scope, Lineage: id.Lineage, Amount: id.Amount, Fingerprint: id.Fingerprint,
		IdentityHash: id.IdentityHash, AmountHash: id.AmountHash, RecipientHash: id.RecipientHash,
	}
}

func TestASlotThatAnotherGatewayGivesBackIsFound(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 10, time.Minute))
	// The other one has the same store.
	tool, err := r.tools.Load().Tool(namespace, "charge")
	if err != nil {
		t.Fatal(err)
	}
	other := guard.New(r.store, r.engine.Identity(), guard.Options{Clock: r.clock})
	a, err := other.Admit(t.Context(), elsewhere(t, tool), tool.Guard)
	if err != nil || a.Ticket == nil {
		t.Fatalf("%+v %v", a, err)
	}
	waits := r.start(ask{id: "k1", body: refundOf("1", "1")})
	eventually(t, "it waits", func() bool { return r.queued() == 1 })
	if _, err := other.Settle(t.Context(), a.Ticket, guard.Result{Outcome: guard.AttemptFailed}); err != nil {
		t.Fatal(err)
	}
	if got := <-waits; got.status != 201 {
		t.Fatalf("the one that waited got %+v", got)
	}
	r.atRest()
}

func TestManyCallsOfFewSlots(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(3, 1000, time.Minute))
	var wg sync.WaitGroup
	for n := range 150 {
		wg.Go(func() {
			got := r.do(ask{id: fmt.Sprint("k", n), caller: fmt.Sprint("agent", n%10), body: refundOf(fmt.Sprint(n), "1"), fault: "delay:10ms"})
			if got.status != 201 {
				t.Errorf("call %d got %+v", n, got)
			}
		})
	}
	wg.Wait()
	r.paid(150, 150)
	if l, err := r.p.Ledger(); err != nil || l.InFlight.Most > 3 || l.InFlight.Most < 2 || l.InFlight.Now != 0 {
		t.Errorf("the provider worked on %+v at once, the limit is 3 (%v)", l.InFlight, err)
	}
	r.atRest()
}

func TestWhoeverWaitsForASlotIsToldWhenTheGatewayEnds(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 10, time.Minute))
	first := r.start(ask{id: "k0", body: refundOf("0", "1"), fault: "hold"})
	r.holds(1)
	second := r.start(ask{id: "k1", body: refundOf("1", "1")})
	eventually(t, "it waits", func() bool { return r.queued() == 1 })
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	if got := <-second; got.status != 429 {
		t.Fatalf("the one that waited got %+v", got)
	}
	r.p.Release(nil)
	if got := <-first; got.status != 201 {
		t.Fatalf("the first got %+v", got)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	r.paid(1, 1)
}

func TestCallsThatComeTooOften(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		n, burst := int32(60), int32(3)
		tool.Spec.RateLimit = &v1alpha1.RateLimitSpec{
			Requests: &n, Per: &metav1.Duration{Duration: time.Hour}, Burst: &burst,
			PerCaller: &v1alpha1.CallerRateSpec{Requests: 60, Per: metav1.Duration{Duration: time.Hour}, Burst: new(int32(2))},
		}
	})
	call := func(n int, caller string) ask {
		return ask{id: fmt.Sprint("k", n), caller: caller, body: refundOf(fmt.Sprint(n), "1")}
	}
	r.pay(call(1, "agent"), 201, guard.Allow)
	r.pay(call(2, "agent"), 201, guard.Allow)
	got := r.pay(call(3, "agent"), 429, guard.Deny)
	p := got.problem(t)
	if p.Reason != string(guard.ReasonRateLimited) || p.RetryAfter < 55 || p.RetryAfter > 60 || got.header.Get("Retry-After") != fmt.Sprint(p.RetryAfter) || p.SuggestedAction != actRetryLater {
		t.Errorf("problem %+v", p)
	}
	r.pay(call(1, "agent"), 201, guard.Replay)
	r.pay(call(4, "other"), 201, guard.Allow)
	r.pay(call(5, "other"), 429, guard.Deny) // the tool's own burst
	r.pay(call(6, "third"), 429, guard.Deny)
	r.clock.pass(time.Minute)
	r.pay(call(6, "third"), 201, guard.Allow)
	r.pay(call(7, "third"), 429, guard.Deny)
	if got := r.do(ask{id: "k7", caller: "third", method: http.MethodGet, suffix: "/intents/k7"}); got.status != 404 {
		t.Errorf("there is a record of a call that came too often: %+v", got)
	}
	r.paid(4, 4)
	r.atRest()
}

func TestAGatewayThatIsAlwaysBusyLeavesSlotsToOthers(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", slotsOf(1, 100, time.Minute))
	tool, err := r.tools.Load().Tool(namespace, "charge")
	if err != nil {
		t.Fatal(err)
	}
	// Here somebody always waits.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				id := fmt.Sprintf("k%d-%d", i, n)
				if got := r.do(ask{id: id, body: refundOf(id, "1"), fault: "delay:100ms"}); got.status != 201 {
					t.Errorf("%s got %+v", id, got)
				}
			}
		})
	}
	eventually(t, "they wait", func() bool { return r.queued() >= 2 })
	// The other gateway looks now and then.
	other := guard.New(r.store, r.engine.Identity(), guard.Options{Clock: r.clock})
	var ticket *guard.Ticket
	tick := time.NewTicker(waitMost)
	defer tick.Stop()
	for looks := 0; ticket == nil; looks++ {
		if looks > 200 {
			t.Fatalf("no slot was found in %d looks", looks)
		}
		a, err := other.Admit(t.Context(), elsewhere(t, tool), tool.Guard)
		if err != nil {
			t.Fatal(err)
		}
		if ticket = a.Ticket; ticket == nil {
			<-tick.C
		}
	}
	if _, err := other.Settle(t.Context(), ticket, guard.Result{Outcome: guard.AttemptFailed}); err != nil {
		t.Fatal(err)
	}
	close(stop)
	wg.Wait()
	r.atRest()
}

func TestARetryThatWaitsForASlotIsCountedOnce(t *testing.T) {
	r := setUp(t)
	r.tool("charge", "/charges", func(tool *v1alpha1.AgentTool) {
		slotsOf(1, 10, time.Minute)(tool)
		tool.Spec.RetryBudget = &v1alpha1.RetryBudget{}
	})
	tool, err := r.tools.Load().Tool(namespace, "charge")
	if err != nil {
		t.Fatal(err)
	}
	// The slot is taken by another call between the attempt and its retry.
	retries := 0
	engine, wanted := r.engine, elsewhere(t, tool)
	a, err := engine.Admit(t.Context(), wanted, tool.Guard)
	if err != nil || a.Ticket == nil {
		t.Fatalf("%+v %v", a, err)
	}
	if _, err := engine.Settle(t.Context(), a.Ticket, guard.Result{Outcome: guard.AttemptRetryable}); err != nil {
		t.Fatal(err)
	}
	r.clock.pass(time.Minute)
	first := r.start(ask{id: "k1", body: refundOf("1", "1"), fault: "hold"})
	r.holds(1)
	wanted.MayRetry = func() (time.Duration, bool) {
		retries++
		return 0, retries == 1
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &call{g: r.g, r: req}
	defer c.move(nil)
	got := make(chan guard.Answer, 1)
	go func() {
		a, err := c.reserve(engine, wanted, tool, tool.Guard)
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	eventually(t, "it waits", func() bool { return r.queued() == 1 })
	asked := r.store.reserves()
	eventually(t, "it has looked again", func() bool { return r.store.reserves() > asked+2 })
	r.p.Release(nil)
	<-first
	a = <-got
	if a.Ticket == nil || retries != 1 {
		t.Fatalf("%+v after it was counted %d times", a, retries)
	}
	if _, err := engine.Settle(t.Context(), a.Ticket, guard.Result{Outcome: guard.AttemptFailed}); err != nil {
		t.Fatal(err)
	}
}
