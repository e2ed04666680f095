// What an operator sees: the metrics that every process serves.

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// metricsURLs are those of all processes that serve agents.
func metricsURLs() []string {
	if kind == bolt {
		return []string{all.MetricsURL()}
	}
	return []string{all.MetricsURL(), all.SecondMetricsURL()}
}

// scraped adds up the series of a metric of this world that have these labels, as
// label="value", over all processes, and says how many there are.
func (w *world) scraped(ctx context.Context, metric string, labels ...string) (sum float64, series int, err error) {
	labels = append(labels, `namespace="`+w.namespace+`"`)
	for _, url := range metricsURLs() {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return 0, 0, err
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, 0, err
		}
		lines := bufio.NewScanner(answer.Body)
	next:
		for lines.Scan() {
			line := lines.Text()
			if !strings.HasPrefix(line, metric+"{") {
				continue
			}
			for _, l := range labels {
				if !strings.Contains(line, l) {
					continue next
				}
			}
			v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				return 0, 0, fmt.Errorf("%s: %w", line, err)
			}
			sum += v
			series++
		}
		if err := lines.Err(); err != nil {
			return 0, 0, err
		}
		if err := answer.Body.Close(); err != nil {
			return 0, 0, err
		}
	}
	return sum, series, nil
}

// metric is the sum of scraped.
func (w *world) metric(metric string, labels ...string) func(context.Context) (float64, error) {
	return func(ctx context.Context) (float64, error) {
		sum, _, err := w.scraped(ctx, metric, labels...)
		return sum, err
	}
}

var _ = Describe("What an operator sees", func() {
	const (
		calls      = "holdfast_calls_total"
		conflicts  = "holdfast_concurrent_conflicts_total"
		collisions = "holdfast_key_expiry_collisions_total"
		tool       = `tool="` + charge + `"`
	)

	It("the metrics endpoints show the replay rate, concurrent conflicts and key-expiry collisions", func(ctx SpecContext) {
		w := newWorld(ctx, unhurried)
		// Before anything has happened they are there, at 0: the first event is a rise.
		for _, m := range []string{conflicts, collisions} {
			sum, series, err := w.scraped(ctx, m, tool)
			Expect(err).NotTo(HaveOccurred())
			Expect(sum).To(BeZero())
			Expect(series).To(Equal(len(metricsURLs())), m)
		}

		paid := call{id: "k1", body: w.order("9", "10")}
		w.pay(ctx, paid, 201, allow)
		for range 3 {
			w.pay(ctx, paid, 201, replay)
		}
		rate := func(ctx context.Context) (string, error) {
			replays, err := w.metric(calls, tool, `verdict="REPLAY"`)(ctx)
			if err != nil {
				return "", err
			}
			all, err := w.metric(calls, tool)(ctx)
			return fmt.Sprintf("%v of %v", replays, all), err
		}
		Eventually(rate).WithContext(ctx).Should(Equal("3 of 4"))

		slow := call{id: "k2", body: w.order("10", "10"), fault: "hold-after-commit"}
		first := w.start(ctx, slow)
		w.underWay(ctx, 1)
		again := w.start(ctx, slow)
		Eventually(w.metric(conflicts, tool)).WithContext(ctx).Should(BeEquivalentTo(1))
		w.letGo(ctx)
		oneWasPaid([]reply{<-first, <-again})
		Eventually(rate).WithContext(ctx).Should(Equal("4 of 6"))
		Eventually(w.metric(conflicts, tool)).WithContext(ctx).Should(BeEquivalentTo(1))
		Expect(w.metric(collisions, tool)(ctx)).To(BeZero())
		Expect(w.metric("holdfast_attempts_total", tool, `outcome="Succeeded"`)(ctx)).To(BeEquivalentTo(2))
		Expect(w.metric("holdfast_guard_duration_seconds_count", tool)(ctx)).To(BeEquivalentTo(6))
		Expect(w.metric("holdfast_store_duration_seconds_count", `store="`+storeName+`"`, `operation="reserve"`)(ctx)).To(BeNumerically(">=", 2))

		early.wait(ctx)
		before, err := early.metric(collisions, tool)(ctx)
		Expect(err).NotTo(HaveOccurred())
		early.pay(ctx, lapses(), 409, unknownHold)
		Eventually(early.metric(collisions, tool)).WithContext(ctx).Should(Equal(before + 1))
		held := `reason="KeyExpired"`
		Eventually(early.metric("holdfast_holds", tool, held, `state="Held"`)).WithContext(ctx).Should(BeNumerically(">=", 1))
		age, err := early.metric("holdfast_hold_oldest_age_seconds", tool, held)(ctx)
		Expect(err).NotTo(HaveOccurred())
		Eventually(early.metric("holdfast_hold_oldest_age_seconds", tool, held)).WithContext(ctx).Should(BeNumerically(">", age))
		Eventually(early.metric("holdfast_held_intents", `budget="`+budgetName+`"`)).WithContext(ctx).Should(BeNumerically(">=", 0))
	})

	It("the spend of a limit: what is settled, what is in flight, and the limit", func(ctx SpecContext) {
		w := newWorld(ctx, limitOf("daily", "100", time.Hour), limited(func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: 40 * time.Second} // to be looked at in flight
		}))
		limit := []string{`budget="` + budgetName + `"`, `limit="daily"`, `currency="USD"`}
		shows := func(used, reserved float64) {
			GinkgoHelper()
			for metric, want := range map[string]float64{"holdfast_spend_used": used, "holdfast_spend_reserved": reserved, "holdfast_spend_limit": 100} {
				Eventually(func(ctx context.Context) ([]float64, error) {
					sum, series, err := w.scraped(ctx, metric, limit...)
					return []float64{sum, float64(series)}, err
				}).WithContext(ctx).Should(Equal([]float64{want, 1}), metric) // one process tells, the one that leads
			}
		}
		shows(0, 0)
		w.pay(ctx, call{id: "k1", body: w.order("1", "10.25")}, 201, allow)
		shows(10.25, 0)
		flying := w.start(ctx, call{id: "k2", body: w.order("2", "30"), fault: "hold"})
		w.underWay(ctx, 1)
		shows(10.25, 30)
		w.letGo(ctx)
		Expect((<-flying).status).To(Equal(201))
		shows(40.25, 0)
		w.pay(ctx, call{id: "k3", body: w.order("3", "59.76")}, 403, deny)
		w.pay(ctx, call{id: "k4", body: w.order("4", "5"), fault: "decline-402"}, 402, allow)
		shows(40.25, 0)
	})

	It("a tool and a store that are deleted leave no series", func(ctx SpecContext) {
		w := newWorld(ctx)
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		Eventually(w.metric(calls, tool, `verdict="ALLOW"`)).WithContext(ctx).Should(BeEquivalentTo(1))
		Expect(w.metric("holdfast_store_refused", `store="`+storeName+`"`)(ctx)).To(BeZero())
		in := metav1.ObjectMeta{Namespace: w.namespace}
		for _, o := range []struct{ metric, label string }{{calls, tool}, {"holdfast_store_duration_seconds_count", `store="` + storeName + `"`}, {"holdfast_store_refused", `store="` + storeName + `"`}} {
			_, series, err := w.scraped(ctx, o.metric, o.label)
			Expect(err).NotTo(HaveOccurred())
			Expect(series).To(BeNumerically(">", 0), o.metric)
		}
		Expect(admin.Delete(ctx, &v1alpha1.AgentTool{ObjectMeta: named(in, charge)})).To(Succeed())
		Expect(admin.Delete(ctx, &v1alpha1.IntentBudget{ObjectMeta: named(in, budgetName)})).To(Succeed())
		Expect(admin.Delete(ctx, &v1alpha1.IdempotencyStore{ObjectMeta: named(in, storeName)})).To(Succeed())
		for _, metric := range []string{
			calls, conflicts, "holdfast_attempts_total", "holdfast_attempt_duration_seconds_count", "holdfast_guard_duration_seconds_bucket",
			"holdfast_store_duration_seconds_count", "holdfast_store_refused", "holdfast_store_durable", "holdfast_held_intents",
		} {
			Eventually(func(ctx context.Context) (int, error) {
				_, series, err := w.scraped(ctx, metric)
				return series, err
			}).WithContext(ctx).Should(BeZero(), metric)
		}
	})
})

func named(m metav1.ObjectMeta, name string) metav1.ObjectMeta {
	m.Name = name
	return m
}
