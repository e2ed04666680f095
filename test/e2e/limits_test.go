// The limits of a tool hold for all gateways together, whoever dies: how many intents are
// in flight, and how often it is called. The provider counts.

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/test/provider"
)

// third is a gateway beside the two, while a spec needs one.
const third = gatewayProcess("third")

// startThird starts it, until the end of the spec, and waits until it serves the world's tool.
func (w *world) startThird(ctx context.Context) {
	GinkgoHelper()
	third.startBeside(ctx)
	third.serves(ctx, w, charge)
}

// slots gives a tool so many, and a queue. Its attempts take up to timeout.
func slots(inFlight, queue int32, timeout time.Duration) func(*v1alpha1.AgentTool) {
	return func(t *v1alpha1.AgentTool) {
		t.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: timeout}
		t.Spec.Concurrency = &v1alpha1.ConcurrencySpec{
			MaxInFlight: &inFlight,
			Queue:       &v1alpha1.QueueSpec{Max: &queue, Timeout: &metav1.Duration{Duration: time.Minute}},
		}
	}
}

func limited(change func(*v1alpha1.AgentTool)) setting {
	return func(_ *v1alpha1.IntentBudget, t *v1alpha1.AgentTool) { change(t) }
}

// payable is a call for an order of its own.
func (w *world) payable(n int) call {
	id := strconv.Itoa(n)
	return call{id: "k" + id, body: w.order(id, "1")}
}

// refusedFor says that a call is refused for this reason, and that nothing is recorded of it.
func (w *world) refusedFor(ctx context.Context, c call, reason string) {
	GinkgoHelper()
	p := w.pay(ctx, c, http.StatusTooManyRequests, deny).problem()
	Expect(p.Reason).To(Equal(reason))
	Expect(p.RetryAfter).To(BeNumerically(">=", 1))
}

// insists is start for a call that comes again until there is a slot for it: two leases that end need not end at once.
func (w *world) insists(ctx context.Context, c call) <-chan reply {
	done := make(chan reply, 1)
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			got := w.call(ctx, c)
			if got.status != http.StatusTooManyRequests || ctx.Err() != nil {
				done <- got
				return
			}
			<-tick.C
		}
	}()
	return done
}

var _ = Describe("The limits of a tool", func() {
	It("L02: holders of slots are killed, again and again", func(ctx SpecContext) {
		w := newWorld(ctx, limited(slots(2, 0, upstreamTimeout)))
		n := 0
		next := func() call {
			n++
			return w.payable(n)
		}
		for range 3 {
			dies := other()
			for range 2 {
				c := next()
				c.at, c.fault = dies, "hold"
				w.insists(ctx, c)
			}
			w.underWay(ctx, 2)
			dies.kill()
			if dies != one() {
				c := next()
				c.at = one()
				w.refusedFor(ctx, c, "too_many_in_flight")
			}
			dies.start(ctx)
			w.letGo(ctx)
			// Both come back, once their leases and the grace are over.
			for range 2 {
				c := next()
				Eventually(func(ctx context.Context) int { return w.call(ctx, c).status }).
					WithContext(ctx).WithPolling(200 * time.Millisecond).Should(Equal(http.StatusCreated))
			}
		}
		// None was lost on the way, and none was won.
		w.change(ctx, charge, slots(2, 0, time.Minute))
		held := []call{next(), next()}
		var answers []<-chan reply
		for _, c := range held {
			c.fault = "hold"
			answers = append(answers, w.insists(ctx, c))
		}
		w.underWay(ctx, 2)
		w.refusedFor(ctx, next(), "too_many_in_flight")
		w.letGo(ctx)
		for _, a := range answers {
			Expect((<-a).status).To(Equal(http.StatusCreated))
		}
	}, SpecTimeout(4*time.Minute))

	It("L02: the limit is changed while slots are held", func(ctx SpecContext) {
		w := newWorld(ctx, limited(slots(3, 0, 2*time.Minute)))
		held := func(ns ...int) (answers []<-chan reply) {
			for _, n := range ns {
				c := w.payable(n)
				c.fault = "hold"
				answers = append(answers, w.start(ctx, c))
			}
			return answers
		}
		done := func(answers []<-chan reply) {
			GinkgoHelper()
			w.letGo(ctx)
			for _, a := range answers {
				Expect((<-a).status).To(Equal(http.StatusCreated))
			}
		}
		first := held(1, 2, 3)
		w.underWay(ctx, 3)
		w.change(ctx, charge, slots(1, 0, 2*time.Minute))
		w.refusedFor(ctx, w.payable(4), "too_many_in_flight")
		done(first)
		second := held(4)
		w.underWay(ctx, 1)
		w.refusedFor(ctx, w.payable(5), "too_many_in_flight")
		w.change(ctx, charge, slots(2, 0, 2*time.Minute))
		second = append(second, held(5)...)
		w.underWay(ctx, 2)
		w.refusedFor(ctx, w.payable(6), "too_many_in_flight")
		done(second)
		w.pay(ctx, w.payable(6), 201, allow)
		Expect(w.entries(ctx)).To(HaveLen(6))
	}, SpecTimeout(2*time.Minute))

	It("L04: slots and rates are of all gateways together", func(ctx SpecContext) {
		w := newWorld(ctx, limited(slots(3, 0, 2*time.Minute)))
		if kind != bolt {
			w.startThird(ctx)
		}
		calls := make([]call, 15)
		for i := range calls {
			calls[i] = w.payable(i)
			calls[i].fault = "hold"
			calls[i].at = w.among(i)
		}
		got := make(chan []reply, 1)
		go func() { got <- w.atOnce(ctx, calls...) }()
		w.underWay(ctx, 3)
		w.refusedFor(ctx, w.payable(99), "too_many_in_flight")
		w.letGo(ctx)
		// Whoever was slow to ask may have found a slot that was free again, and then waits at the provider.
		var answers []reply
		Eventually(func(ctx context.Context) bool {
			select {
			case answers = <-got:
				return true
			default:
				w.letGo(ctx)
				return false
			}
		}).WithContext(ctx).Should(BeTrue())
		paid := 0
		for _, a := range answers {
			if a.status == http.StatusCreated {
				paid++
				continue
			}
			Expect(a.status).To(Equal(http.StatusTooManyRequests), a.String())
		}
		Expect(paid).To(BeNumerically(">=", 3))
		Expect(w.entries(ctx)).To(HaveLen(paid))

		By("a burst of 10, and then one in a minute")
		rated := w.paymentTool("rated", "/charges")
		one, burst, perCaller := int32(60), int32(10), int32(4)
		rated.Spec.RateLimit = &v1alpha1.RateLimitSpec{
			Requests: &one, Per: &metav1.Duration{Duration: time.Hour}, Burst: &burst,
			PerCaller: &v1alpha1.CallerRateSpec{Requests: 60, Per: metav1.Duration{Duration: time.Hour}, Burst: &perCaller},
		}
		w.add(ctx, rated)
		if kind != bolt {
			third.serves(ctx, w, rated.Name)
		}
		tokens := []string{w.token}
		for _, name := range []string{"agent-2", "agent-3", "agent-4"} {
			w.serviceAccount(ctx, name, "holdfast-agent")
			tokens = append(tokens, w.tokenOf(ctx, name, audience))
		}
		calls = make([]call, 60)
		for i := range calls {
			calls[i] = call{tool: "rated", id: fmt.Sprint("r", i), body: w.order(fmt.Sprint("r", i), "2"), at: w.among(i), token: tokens[i%len(tokens)]}
		}
		passed, by := []call{}, map[string]int{}
		for i, a := range w.atOnce(ctx, calls...) {
			if a.status == http.StatusCreated {
				passed = append(passed, calls[i])
				by[calls[i].token]++
				continue
			}
			Expect(a.status).To(Equal(http.StatusTooManyRequests), a.String())
			Expect(a.problem().Reason).To(Equal("rate_limited"))
		}
		// What a gateway has taken for calls that came too late may be left over, and no more.
		Expect(len(passed)).To(And(BeNumerically("<=", 10), BeNumerically(">=", 7)))
		for _, n := range by {
			Expect(n).To(BeNumerically("<=", 4))
		}
		Expect(w.entries(ctx)).To(HaveLen(paid + len(passed)))
		// Repeats are not counted, at any gateway.
		for _, c := range passed {
			w.pay(ctx, c, 201, replay)
		}
	}, SpecTimeout(2*time.Minute))

	It("are never exceeded under load", Label("drill"), func(ctx SpecContext) {
		const connections, most = 200, 64
		admissions, within := admissionsAtLoad()
		// A provider of its own: the ledger of the others' is read whole again and again.
		p := provider.New(provider.Options{})
		DeferCleanup(p.Close)
		url, err := p.Start("")
		Expect(err).NotTo(HaveOccurred())
		w := newWorld(ctx, limited(slots(most, 1000, 10*time.Second)), limited(func(t *v1alpha1.AgentTool) {
			t.Spec.Upstream.HTTP.URL = url + "/charges"
		}))
		if kind != bolt {
			w.startThird(ctx)
		}
		// No caller has more than a quarter of a gateway.
		tokens := []string{w.token}
		for i := range 4 {
			name := fmt.Sprint("agent-", i)
			w.serviceAccount(ctx, name, "holdfast-agent")
			tokens = append(tokens, w.tokenOf(ctx, name, audience))
		}
		began := time.Now()
		var next, paid, refused atomic.Int64
		failed := make(chan error, connections)
		var working sync.WaitGroup
		for i := range connections {
			working.Go(func() {
				for {
					n := int(next.Add(1))
					if n > admissions || ctx.Err() != nil {
						return
					}
					if time.Since(began) > within {
						failed <- fmt.Errorf("only %d of %d were paid within %s", paid.Load(), admissions, within)
						return
					}
					c := w.payable(n)
					// Long enough for all slots to be taken, however fast the gateways are.
					c.at, c.token, c.fault = w.among(i), tokens[i%len(tokens)], "delay:40ms"
					for again := false; ; again = true {
						got := w.call(ctx, c)
						if got.status == http.StatusCreated && (got.verdict() == allow || again && got.verdict() == replay) {
							paid.Add(1)
							break
						}
						switch {
						case got.status == http.StatusTooManyRequests || got.status == http.StatusServiceUnavailable:
						case got.verdict() == inFlight:
							// An attempt that moved nothing, such as one whose claim took too long: until the record says so, and
							// for the backoff after that, the agent comes again.
							select {
							case <-time.After(time.Second):
							case <-ctx.Done():
							}
						default:
							failed <- errors.Join(fmt.Errorf("%s: %s", c.id, got), got.err)
							return
						}
						refused.Add(1)
					}
				}
			})
		}
		working.Wait()
		took := time.Since(began)
		close(failed)
		l, err := p.Ledger()
		Expect(err).NotTo(HaveOccurred())
		AddReportEntry("limits under load", fmt.Sprintf("%d payments in %s (%.0f/s) over %d gateways, %d refusals; the provider worked on %d at most, the limit is %d",
			paid.Load(), took.Round(time.Second), float64(paid.Load())/took.Seconds(), len(w.gatewaysNow()), refused.Load(), l.InFlight.Most, most))
		Expect(<-failed).NotTo(HaveOccurred())
		Expect(paid.Load()).To(BeEquivalentTo(admissions))
		Expect(l.Count).To(Equal(admissions))
		// How many it comes to is for the store to say: PostgreSQL lets writes of one meter wait for each other.
		Expect(l.InFlight.Most).To(And(BeNumerically("<=", most), BeNumerically(">=", 2)))
		Expect(l.InFlight.Now).To(BeZero())
		// All of the slots are there in the end.
		Expect(w.slotsFree(ctx, p, tokens, most)).To(Succeed())
	}, SpecTimeout(drillTime+10*time.Minute), Serial)
})

// gatewaysNow are those that serve in this spec.
func (w *world) gatewaysNow() []gatewayProcess {
	if kind == bolt {
		return gateways()
	}
	return append(gateways(), third)
}

// among chooses one of them in turn.
func (w *world) among(i int) gatewayProcess {
	now := w.gatewaysNow()
	return now[i%len(now)]
}

// slotsFree takes all slots at once, at a provider that answers when it is told to.
func (w *world) slotsFree(ctx context.Context, p *provider.Provider, tokens []string, most int) error {
	var answers []<-chan reply
	for i := range most {
		c := w.payable(10_000_000 + i)
		c.at, c.token, c.fault = w.among(i), tokens[i%len(tokens)], "hold"
		answers = append(answers, w.start(ctx, c))
	}
	defer p.Release(nil)
	deadline := time.Now().Add(8 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for len(p.Held()) < most {
		if time.Now().After(deadline) {
			return fmt.Errorf("only %d of %d slots are there", len(p.Held()), most)
		}
		<-tick.C
	}
	p.Release(nil)
	for _, a := range answers {
		if got := <-a; got.status != http.StatusCreated {
			return errors.New(got.String())
		}
	}
	return nil
}

// admissionsEnv is how many calls are admitted under load.
const admissionsEnv = "HOLDFAST_E2E_ADMISSIONS"

// drillTime bounds how long they may take where their number is given, and loadTime where it is not.
const (
	drillTime = 3 * time.Hour
	loadTime  = 8 * time.Minute
)

// admissionsAtLoad is fewer where each admission waits for the one before to be on the disk: at
// a meter of PostgreSQL, and in the one file of the embedded store.
func admissionsAtLoad() (n int, within time.Duration) {
	GinkgoHelper()
	text := os.Getenv(admissionsEnv)
	switch {
	case text == "" && kind == redis:
		return 50_000, loadTime
	case text == "":
		return 5_000, loadTime
	}
	n, err := strconv.Atoi(text)
	Expect(err).NotTo(HaveOccurred(), admissionsEnv)
	return n, drillTime
}
