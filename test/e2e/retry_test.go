// Retry budgets and declared outcomes: the gateway tries again while nothing moved, and
// never after that.

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
)

// retrying gives the tool a retry budget. The provider answers 503 with Retry-After
// before it looks at a request.
func retrying(attempts, minPerSecond int32) setting {
	return func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		tool.Spec.Outcomes = []v1alpha1.OutcomeRule{
			{Status: "503", Outcome: v1alpha1.OutcomeRetryable},
			{When: `response.status == 402 && response.body.error.code == "declined"`, Outcome: v1alpha1.OutcomeFailed},
		}
		tool.Spec.RetryBudget = &v1alpha1.RetryBudget{
			Attempts: &attempts, Ratio: &v1alpha1.RetryRatio{MinPerSecond: &minPerSecond},
			Backoff: &v1alpha1.RetryBackoff{Initial: &metav1.Duration{Duration: 50 * time.Millisecond}, Max: &metav1.Duration{Duration: 500 * time.Millisecond}},
		}
	}
}

// plan makes the next payments of this world meet a fault.
func (w *world) plan(ctx context.Context, fault string, times int) {
	GinkgoHelper()
	DeferCleanup(func(ctx context.Context) { Expect(ask(ctx, http.MethodDelete, "/faults", nil, nil)).To(Succeed()) })
	Expect(ask(ctx, http.MethodPost, "/faults", map[string]any{
		"fault": fault, "times": times, "match": map[string]string{"accountId": w.namespace},
	}, nil)).To(Succeed())
}

// absent is an upstream before the provider that is not there yet.
type absent struct {
	address string
	// requests is how many have come, since it is there.
	requests atomic.Int64
}

func newAbsent() *absent {
	GinkgoHelper()
	free, err := ports.Free(1)
	Expect(err).NotTo(HaveOccurred())
	return &absent{address: net.JoinHostPort(loopback, strconv.Itoa(free[0]))}
}

// comes starts it.
func (a *absent) comes() {
	GinkgoHelper()
	target, err := url.Parse(all.ProviderURL())
	Expect(err).NotTo(HaveOccurred())
	listener, err := net.Listen("tcp", a.address)
	Expect(err).NotTo(HaveOccurred())
	proxy := httputil.NewSingleHostReverseProxy(target)
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		a.requests.Add(1)
		proxy.ServeHTTP(rw, r)
	})}
	go func() { _ = server.Serve(listener) }()
	DeferCleanup(server.Close)
}

func (a *absent) upstream(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
	tool.Spec.Upstream.HTTP.URL = "http://" + a.address + "/charges"
}

var _ = Describe("Retry budgets", func() {
	It("an upstream that fails and says that nothing moved, then pays: one charge", func(ctx SpecContext) {
		w := newWorld(ctx, retrying(5, 100))
		w.plan(ctx, "error-503-before-commit", 2)
		before := sent(ctx)
		got := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		Expect(got.header.Get("Holdfast-Attempt")).To(Equal("3"))
		Expect(sent(ctx) - before).To(Equal(3))
		Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay).body).To(Equal(got.body))
		Expect(w.charged(ctx, "9")).To(Equal(1))
		// A definite failure is not tried again.
		w.pay(ctx, call{id: "k2", body: w.order("10", "10"), fault: "decline-402"}, 402, allow)
		Expect(sent(ctx) - before).To(Equal(4))
	})

	It("an upstream that refuses connections and then comes up: one charge", func(ctx SpecContext) {
		up := newAbsent()
		w := newWorld(ctx, retrying(20, 100), up.upstream)
		answer := w.start(ctx, call{id: "k1", body: w.order("9", "10")})
		Eventually(func(ctx context.Context) (int, error) {
			doc, err := w.tryPoll(ctx, charge, "k1", "")
			return len(doc.Attempts), err
		}).WithContext(ctx).WithPolling(5 * time.Millisecond).Should(BeNumerically(">=", 2))
		up.comes()
		got := <-answer
		Expect(got.err).NotTo(HaveOccurred())
		Expect(got.status).To(Equal(201), got.String())
		Expect(up.requests.Load()).To(BeEquivalentTo(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R02: the provider commits and answers 500, three times over, to a tool with a retry budget", func(ctx SpecContext) {
		w := newWorld(ctx, retrying(5, 100))
		w.plan(ctx, "error-500-after-commit", 3)
		before := sent(ctx)
		for range 3 {
			p := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 409, unknownHold).problem()
			Expect(p.Reason).To(Equal("OutcomeUnknown"))
		}
		// The agent that plans anew is held too.
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("L03: killed in the middle of a retry budget, what is left of it is unchanged", func(ctx SpecContext) {
		w := newWorld(ctx, retrying(4, 100))
		w.plan(ctx, "error-503-before-commit", 100)
		before := sent(ctx)
		g := anyGateway()
		c := call{id: "k1", body: w.order("9", "10")}
		first := c
		first.at = g
		cut := w.start(ctx, first)
		Eventually(func(ctx context.Context) (string, error) {
			doc, err := w.tryPoll(ctx, charge, "k1", "")
			return fmt.Sprint(doc.State, len(doc.Attempts)), err
		}).WithContext(ctx).WithPolling(5 * time.Millisecond).Should(BeElementOf("Retryable2", "Retryable3"))
		g.kill() // while it waits out the second that the provider has asked for
		Expect((<-cut).err).To(HaveOccurred())
		g.start(ctx)

		got := w.pay(ctx, c, 503, allow)
		Expect(got.header.Get("Holdfast-Attempt")).To(Equal("4"))
		// The attempts are spent: the last failure is the answer from now on.
		Expect(w.pay(ctx, c, 503, replay).body).To(Equal(got.body))
		Expect(w.poll(ctx, charge, "k1", "").State).To(Equal("Failed"))
		Expect(sent(ctx) - before).To(Equal(4))
		Expect(w.charged(ctx, "9")).To(BeZero())
	})

	It("100 calls while the upstream is down keep to the ratio, and are paid without a restart when it is back", func(ctx SpecContext) {
		const calls, percent, least, inFlight = 100, 20, 10, 25
		up := newAbsent()
		w := newWorld(ctx, retrying(20, least), up.upstream, limited(slots(inFlight, calls, 30*time.Second)), limitOf("daily", "1025", time.Hour))
		w.spendIs(ctx, "daily", "0", "0")
		began := time.Now()
		ended := make(chan error, calls)
		var refused atomic.Int64
		for n := range calls {
			c := call{id: fmt.Sprint("k", n), body: w.order(fmt.Sprint(n), "10")}
			go func() {
				defer GinkgoRecover()
				ended <- w.comeBack(ctx, c, &refused)
			}()
		}
		// Each has been tried once, and some again. It is looked at side by side: meanwhile they are tried on, and none is
		// to have had all its attempts when the upstream is back.
		attempts := func() int {
			var total atomic.Int64
			var looking sync.WaitGroup
			for at := range inFlight {
				looking.Go(func() {
					for n := at; n < calls; n += inFlight {
						doc, err := w.tryPoll(ctx, charge, fmt.Sprint("k", n), "")
						if err == nil {
							total.Add(int64(len(doc.Attempts)))
						}
					}
				})
			}
			looking.Wait()
			return int(total.Load())
		}
		Eventually(attempts).WithContext(ctx).Should(BeNumerically(">=", calls+20))
		Eventually(refused.Load).WithContext(ctx).Should(BeNumerically(">=", calls))
		retries := attempts() - calls
		seconds := int(time.Since(began).Seconds()) + 2
		Expect(retries).To(BeNumerically("<=", calls*percent/100+len(gateways())*least*seconds))
		AddReportEntry("retries", fmt.Sprintf("%d in %d s, %d calls refused", retries, seconds-2, refused.Load()))

		up.comes()
		for range calls {
			Expect(<-ended).To(Succeed())
		}
		Expect(w.entries(ctx)).To(HaveLen(calls))
		for n := range calls {
			Expect(w.charged(ctx, fmt.Sprint(n))).To(Equal(1))
		}
		// What was tried in vain has left nothing behind: the limit counts what was paid, to the
		// last cent of it, and all slots are free.
		w.spendIs(ctx, "daily", "1000", "0")
		var last []<-chan reply
		for n := range inFlight + 1 {
			last = append(last, w.start(ctx, call{id: fmt.Sprint("last", n), body: w.order(fmt.Sprint("last", n), "1"), fault: "hold"}))
			if n < inFlight {
				w.underWay(ctx, n+1)
			}
		}
		over := 0
		w.spendIs(ctx, "daily", "1000", "25")
		w.letGo(ctx)
		for _, answer := range last {
			got := <-answer
			Expect(got.err).NotTo(HaveOccurred())
			if got.status == http.StatusForbidden && got.problem().Reason == "spend_exceeded" {
				over++
				continue
			}
			Expect(got.status).To(Equal(http.StatusCreated), got.String())
		}
		Expect(over).To(Equal(1))
		w.spendIs(ctx, "daily", "1025", "0")
	}, NodeTimeout(4*time.Minute))

	It("a rule that cannot be used keeps the tool from being accepted, and says where it is wrong", func(ctx SpecContext) {
		w := newWorld(ctx)
		tool := w.paymentTool("other", "/charges")
		tool.Spec.Outcomes = []v1alpha1.OutcomeRule{{When: `response.body.code = "declined"`, Outcome: v1alpha1.OutcomeFailed}}
		create(ctx, tool)
		Eventually(func(ctx context.Context) error {
			return w.condition(ctx, "other", v1alpha1.ConditionAccepted, metav1.ConditionTrue)
		}).WithContext(ctx).Should(MatchError(And(ContainSubstring("Accepted is False"), ContainSubstring("spec.outcomes[0].when: line 1, column"))))
	})
})

// comeBack is an agent that comes back with the same call until it is paid.
func (w *world) comeBack(ctx context.Context, c call, refused *atomic.Int64) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		got := w.call(ctx, c)
		switch {
		case got.err == nil && got.status == http.StatusCreated:
			return nil
		case got.err != nil, got.status == http.StatusServiceUnavailable, got.verdict() == inFlight:
		case got.status != http.StatusTooManyRequests || got.problem().SuggestedAction != "retry_later":
			return fmt.Errorf("%s: %s", c.id, got)
		case got.problem().Reason == "retry_ratio":
			refused.Add(1)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: no answer in the end: %s", c.id, got)
		case <-tick.C:
		}
	}
}
