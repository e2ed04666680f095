// The record: what is remembered of a payment, whatever happens around it.

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// swallow is an upstream before the provider: it passes a payment on, waits for the
// answer, and closes the connection instead of giving it back.
func swallow() (address string, answers *atomic.Int64) {
	GinkgoHelper()
	provider, err := url.Parse(all.ProviderURL())
	Expect(err).NotTo(HaveOccurred())
	answers = &atomic.Int64{}
	proxy := httputil.NewSingleHostReverseProxy(provider)
	proxy.ModifyResponse = func(r *http.Response) error {
		answers.Store(int64(r.StatusCode))
		return nil
	}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		proxy.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	}))
	DeferCleanup(server.Close)
	return server.URL, answers
}

var _ = Describe("The record", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	for _, n := range []int{5, 50} {
		It(fmt.Sprintf("R01: %d first-time calls with one ID at the same instant", n), func(ctx SpecContext) {
			calls := make([]call, n)
			for i := range calls {
				calls[i] = call{id: "k1", body: w.order("9", "10"), fault: "delay:200ms"}
			}
			nBefore := sent(ctx)
			body := oneWasPaid(w.atOnce(ctx, calls...))
			Expect(w.charged(ctx, "9")).To(Equal(1))
			Expect(sent(ctx) - nBefore).To(Equal(1))
			Expect(w.pay(ctx, calls[0], 201, replay).body).To(Equal(body))
		})
	}

	It("R01: 50 calls that do not wait are told 409 at once", func(ctx SpecContext) {
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject}
		})
		calls := make([]call, 50)
		for i := range calls {
			calls[i] = call{id: "k1", body: w.order("9", "10"), fault: "delay:500ms"}
		}
		oneWasPaid(w.atOnce(ctx, calls...))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R02: the provider commits and answers 500, three times over", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "error-500-after-commit"}
		holds := map[string]bool{}
		for range 3 {
			p := w.pay(ctx, c, 409, unknownHold).problem()
			Expect(p.Reason).To(Equal("OutcomeUnknown"))
			holds[p.Hold] = true
		}
		Expect(holds).To(HaveLen(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	for _, row := range []struct {
		fault  string
		status int
		state  string
	}{
		{"no-content-204", 204, "Succeeded"},
		{"event-stream", 200, "Succeeded"},
		{"cut-body", 409, "Held"},
		{"accepted-202:never", 409, "Held"},
	} {
		It("R06: the upstream answers with "+row.fault, func(ctx SpecContext) {
			c := call{id: "k1", body: w.order("9", "10"), fault: row.fault}
			first := w.call(ctx, c)
			Expect(first.status).To(Equal(row.status), first.String())
			Expect(w.poll(ctx, charge, "k1", "").State).To(Equal(row.state))
			nothingSent(ctx, func() {
				again := w.call(ctx, c)
				Expect(again.status).To(Equal(row.status), again.String())
				if row.state == "Succeeded" {
					Expect(again.verdict()).To(Equal(replay))
					Expect(again.body).To(Equal(first.body))
					Expect(again.header.Get("Content-Type")).To(Equal(first.header.Get("Content-Type")))
				}
			})
		})
	}

	It("R07: a process that starts cold replays what another one recorded", func(ctx SpecContext) {
		first := w.pay(ctx, call{id: "k1", body: w.order("9", "10.00"), at: one()}, 201, allow)
		other().crash(ctx)
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10"), at: other()}, 201, replay).body).To(Equal(first.body))
			w.pay(ctx, call{id: "k1", body: w.order("9", "11"), at: other()}, 422, conflict)
		})
	})

	It("R08: a mismatching call first, then the right one", func(ctx SpecContext) {
		first := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		nothingSent(ctx, func() {
			w.pay(ctx, call{id: "k1", body: w.order("9", "11")}, 422, conflict)
			Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay).body).To(Equal(first.body))
		})
	})

	It("R09: a replay keeps status, body and headers, and an upstream's 503 does not become a 500", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10")}
		first, again := w.pay(ctx, c, 201, allow), w.pay(ctx, c, 201, replay)
		Expect(again.body).To(Equal(first.body))
		Expect(again.header.Get("Idempotent-Replayed")).To(Equal("true"))
		for _, h := range []http.Header{first.header, again.header} {
			for _, own := range []string{"Holdfast-Verdict", "Idempotent-Replayed", "Date"} {
				h.Del(own)
			}
		}
		Expect(again.header).To(Equal(first.header))

		c = call{id: "k2", body: w.order("10", "10"), fault: "error-503-before-commit"}
		w.pay(ctx, c, 409, unknownHold)
		w.pay(ctx, c, 409, unknownHold)
		doc := w.poll(ctx, charge, "k2", "")
		Expect(doc.Attempts).To(HaveLen(1))
		Expect(doc.Attempts[0].Status).To(Equal(503))
		Expect(w.charged(ctx, "10")).To(BeZero())
	})

	It("R10: an answer of 5 MB", func(ctx SpecContext) {
		const size = 5 << 20
		c := call{id: "k1", body: w.order("9", "10"), fault: fmt.Sprint("big:", size)}
		first := w.pay(ctx, c, 201, allow)
		Expect(first.body).To(HaveLen(size))
		again := w.pay(ctx, c, 201, replay)
		Expect(again.body).To(Equal(first.body[:1<<20]))
		Expect(again.header.Get("Holdfast-Truncated")).To(Equal("true"))
		Expect(again.header.Get("Holdfast-Body-Size")).To(Equal(fmt.Sprint(size)))
		Expect(again.header.Get("Holdfast-Body-Digest")).To(HavePrefix("sha256:"))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R11: the upstream decides between JSON and an event stream", func(ctx SpecContext) {
		both := map[string]string{"Accept": "application/json, text/event-stream"}
		stream := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), header: both, fault: "event-stream"}, 200, allow)
		Expect(stream.header.Get("Content-Type")).To(Equal("text/event-stream"))
		plain := w.pay(ctx, call{id: "k2", body: w.order("10", "10"), header: both}, 201, allow)
		Expect(plain.header.Get("Content-Type")).To(Equal("application/json"))
	})

	It("R12: the upstream commits and closes the connection, and gets exactly one request", func(ctx SpecContext) {
		// The connection has served before: a transport that sends again by itself would do so now.
		w.pay(ctx, call{id: "k0", body: w.order("8", "10")}, 201, allow)
		before := sent(ctx)
		w.pay(ctx, call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R14: 30 IDs for the same order at once are never a 500", func(ctx SpecContext) {
		calls := make([]call, 30)
		for i := range calls {
			calls[i] = call{id: fmt.Sprint("k", i), body: w.order("9", fmt.Sprint(i+1)), fault: "delay:100ms"}
		}
		paid := 0
		for _, got := range w.atOnce(ctx, calls...) {
			Expect(got.err).NotTo(HaveOccurred())
			// 429: too many holds.
			Expect(got.status).To(BeElementOf(201, 409, 429), got.String())
			if got.status == 201 {
				paid++
			}
		}
		Expect(paid).To(Equal(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R16: a release does not reach the hold that came after it, also over a restart", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		c := call{id: "k2", body: w.order("9", "11"), fault: "close-after-commit"}
		old := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.resolve(ctx, old, release)
		p := w.pay(ctx, c, 409, unknownHold).problem()
		Expect(p.Reason).To(Equal("OutcomeUnknown"))
		Expect(p.Hold).NotTo(Equal(old))
		Expect(w.charged(ctx, "9")).To(Equal(2))

		for _, g := range gateways() {
			g.crash(ctx)
		}
		w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, c, 409, unknownHold).problem().Hold).To(Equal(p.Hold))
			w.resolve(ctx, p.Hold, resolution{Decision: "MarkPaid", ProviderReference: "ch_1", Result: `{"id":"ch_1"}`})
			Expect(w.pay(ctx, c, 200, replay).body).To(Equal(`{"id":"ch_1"}`))
		})
		w.holdIs(ctx, old, v1alpha1.HoldResolved)
		Expect(w.charged(ctx, "9")).To(Equal(2))
	})

	It("R17: an unknown intent that a person rejected stands in the way of a new ID", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.resolve(ctx, hold, resolution{Decision: "Reject"})
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, c, 403, deny).problem().Reason).To(Equal("rejected"))
			w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		})
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R18: a later refusal does not make an unknown attempt harmless for a new ID", func(ctx SpecContext) {
		hold := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}, 409, unknownHold).problem().Hold
		w.resolve(ctx, hold, release)
		Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10"), fault: "decline-402"}, 409, unknownHold).problem().Reason).To(Equal("OutcomeUnknown"))
		nothingSent(ctx, func() {
			w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		})
		doc := w.poll(ctx, charge, "k1", "")
		Expect(doc.Attempts).To(HaveLen(2))
		Expect([]string{doc.Attempts[0].Outcome, doc.Attempts[1].Outcome}).To(Equal([]string{"Unknown", "Failed"}))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	for _, status := range []int{301, 302, 303, 307} {
		It(fmt.Sprintf("R23: a redirect with %d is not followed", status), func(ctx SpecContext) {
			before := sent(ctx)
			c := call{id: "k1", body: w.order("9", "10"), fault: fmt.Sprint("redirect-", status)}
			Expect(w.pay(ctx, c, 409, unknownHold).problem().Reason).To(Equal("OutcomeUnknown"))
			w.pay(ctx, c, 409, unknownHold)
			Expect(sent(ctx) - before).To(Equal(1))
			Expect(w.charged(ctx, "9")).To(BeZero())
		})
	}

	It("R24: a tool that is deleted and made again knows its intents", func(ctx SpecContext) {
		first := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		tool := &v1alpha1.AgentTool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: charge}}
		Expect(admin.Delete(ctx, tool)).To(Succeed())
		Eventually(func(ctx context.Context) int { return w.call(ctx, call{id: "k1", body: w.order("9", "10")}).status }).
			WithContext(ctx).Should(Equal(404))
		w.add(ctx, w.paymentTool(charge, "/charges"))
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay).body).To(Equal(first.body))
			w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		})
	})

	It("R25: the identity of a tool changes between two calls for the same order", func(ctx SpecContext) {
		first := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Identity.Scope = []v1alpha1.Expression{`path("order", call.body.orderId)`}
		})
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold).problem().Reason).To(Equal("IdentityChanged"))
		})
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Identity.Scope = w.paymentTool(charge, "/charges").Spec.Identity.Scope
			tool.Spec.Identity.Volatile = append(tool.Spec.Identity.Volatile, "/note")
		})
		nothingSent(ctx, func() {
			// Under the same ID scope, amount and recipient decide.
			Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay).body).To(Equal(first.body))
		})
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R26: a narrower call overtakes a hold, which is held anew when somebody releases it", func(ctx SpecContext) {
		items := func(amount string, orders ...string) string {
			paths := make([]string, len(orders))
			for i, o := range orders {
				paths[i] = fmt.Sprintf(`["account","a","order",%q]`, o)
			}
			return fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%s,"scope":[%s]}`, w.namespace, strings.Join(orders, "+"), amount, strings.Join(paths, ","))
		}
		w.pay(ctx, call{id: "k1", body: items("10", "9")}, 201, allow)
		both := call{id: "k2", body: items("20", "9", "10")}
		old := w.pay(ctx, both, 409, unknownHold).problem().Hold
		w.pay(ctx, call{id: "k3", body: items("10", "10")}, 201, allow)
		w.resolve(ctx, old, release)
		nothingSent(ctx, func() {
			p := w.pay(ctx, both, 409, unknownHold).problem()
			Expect(p.Hold).NotTo(Equal(old))
			h := w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
			Expect(h.Spec.Matches).To(ContainElement(HaveField("IntentID", "k3")))
		})
		Expect(w.charged(ctx, "10")).To(Equal(1))
		Expect(w.charged(ctx, "9+10")).To(BeZero())
	})

	It("R27: MarkFailed frees the order", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "redirect-302"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.resolve(ctx, hold, resolution{Decision: "MarkFailed", Reason: "the provider has no such payment"})
		p := w.pay(ctx, c, 403, deny).problem()
		Expect(p.Reason).To(Equal("marked_failed"))
		Expect(p.SuggestedAction).To(Equal("use_a_new_intent_id"))
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R32: a 202 is lost, and the ledger shows nothing yet", func(ctx SpecContext) {
		upstream, answers := swallow()
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.URL = upstream + "/charges"
			tool.Spec.Upstream.HTTP.SettleAfter = &metav1.Duration{Duration: time.Hour}
		})
		before := sent(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "accepted-202:2s"}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		Expect(answers.Load()).To(Equal(int64(202)))
		Expect(w.charged(ctx, "9")).To(BeZero())
		// Absence does not count: not for the agent, not for a new ID, and not for a person who is in a hurry.
		w.pay(ctx, c, 409, unknownHold)
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		w.holdIs(ctx, hold, v1alpha1.HoldWaiting)
		Expect(w.tryResolve(ctx, resolver, hold, release)).To(MatchError(ContainSubstring("Release is not possible before")))
		Eventually(func() int { return w.charged(ctx, "9") }).Should(Equal(1))
		w.pay(ctx, c, 409, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
	})

	It("R34: a hold that is not for an overlap does not cover one that it never showed", func(ctx SpecContext) {
		unknown := call{id: "k1", body: w.order("9", "10"), fault: "close-after-commit"}
		first := w.pay(ctx, unknown, 409, unknownHold).problem()
		Expect(first.Reason).To(Equal("OutcomeUnknown"))
		other := call{id: "k2", body: w.order("9", "11")}
		second := w.pay(ctx, other, 409, unknownHold).problem()
		w.resolve(ctx, second.Hold, release)
		w.pay(ctx, other, 201, allow)
		w.resolve(ctx, first.Hold, release)
		nothingSent(ctx, func() {
			p := w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 409, unknownHold).problem()
			Expect(p.Hold).NotTo(Equal(first.Hold))
			Expect(p.Reason).To(Equal("ScopeOverlap"))
			h := w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
			Expect(h.Spec.Matches).To(ContainElement(HaveField("IntentID", "k2")))
		})
	})

	It("R37: a release is written and the tool is deleted before it is taken", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		hold := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem().Hold
		w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		controllers.stop(ctx)
		Expect(w.tryResolve(ctx, resolver, hold, release)).To(Succeed())
		Expect(admin.Delete(ctx, &v1alpha1.AgentTool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: charge}})).To(Succeed())
		controllers.start(ctx)
		spent := w.holdIs(ctx, hold, v1alpha1.HoldVoid)
		Expect(spent.Status.Effect).To(ContainSubstring("AgentTool no longer exists"))
		var anew *v1alpha1.PaymentHold
		Eventually(func() bool {
			for _, h := range w.holds(ctx) {
				if h.Name != hold && h.Status.State == v1alpha1.HoldHeld {
					anew = &h
				}
			}
			return anew != nil
		}).Should(BeTrue())
		Expect(anew.Spec.Hold).To(Equal(int64(2)))
		Expect(anew.Status.Cause).To(ContainSubstring("AgentTool no longer exists"))
		// The tool comes back, and nothing is released.
		w.add(ctx, w.paymentTool(charge, "/charges"))
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem().Hold).To(Equal(anew.Name))
		})
	})

	It("R15: two are released at the same moment, and one of the two is charged", func(ctx SpecContext) {
		const pairs, workers = 20, 5
		w := newWorld(ctx, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			most := int32(2*pairs + 10)
			budget.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: &most, PerCaller: &most}
		})
		alice := clientAs(resolver)
		scoped := func(id, amount, scope string) call {
			return call{id: id, body: fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%s,"scope":[%s]}`, w.namespace, id, amount, scope)}
		}
		unknown := scoped("A", "1", `["account","a"]`)
		unknown.fault = "close-after-commit"
		w.pay(ctx, unknown, 409, unknownHold)

		pair := func(i int) {
			defer GinkgoRecover()
			calls := []call{
				scoped(fmt.Sprint("B", i), "2", fmt.Sprintf(`["account","a","order","%d"]`, i)),
				scoped(fmt.Sprint("C", i), "3", fmt.Sprintf(`["account","a","order","%d","item","1"]`, i)),
			}
			holds := make([]string, 2)
			for j, c := range calls {
				holds[j] = w.pay(ctx, c, 409, unknownHold).problem().Hold
			}
			for _, h := range holds {
				w.holdIs(ctx, h, v1alpha1.HoldHeld)
			}
			released := make(chan error, 2)
			for _, h := range holds {
				go func() {
					obj := &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: h}}
					released <- alice.Patch(ctx, obj, client.RawPatch("application/merge-patch+json", []byte(release.patch())))
				}()
			}
			for range 2 {
				Expect(<-released).To(Succeed())
			}
			for _, h := range holds {
				w.holdIs(ctx, h, v1alpha1.HoldResolved)
			}
			verdicts := map[string]int{}
			for j, got := range w.atOnce(ctx, calls...) {
				Expect(got.err).NotTo(HaveOccurred())
				verdicts[got.verdict()]++
				if got.verdict() == unknownHold {
					Expect(got.problem().Hold).NotTo(Equal(holds[j]))
				}
			}
			Expect(verdicts).To(Equal(map[string]int{allow: 1, unknownHold: 1}))
		}
		next := make(chan int)
		done := make(chan struct{})
		for range workers {
			go func() {
				defer func() { done <- struct{}{} }()
				for i := range next {
					pair(i)
				}
			}()
		}
		for i := range pairs {
			next <- i
		}
		close(next)
		for range workers {
			<-done
		}
		charges := map[string]int{}
		for _, e := range w.entries(ctx) {
			charges[strings.TrimLeft(e.OrderID, "BC")]++
		}
		delete(charges, "A")
		Expect(charges).To(HaveLen(pairs))
		for i, n := range charges {
			Expect(n).To(Equal(1), "pair %s", i)
		}
	})
})
