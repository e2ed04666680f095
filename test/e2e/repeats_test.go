// Agents and frameworks that repeat calls.

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// oneWasPaid checks that one of the answers is the payment and every other one the
// same answer again, in flight or held. It returns the payment's body.
func oneWasPaid(answers []reply) string {
	GinkgoHelper()
	allowed, body := 0, ""
	for _, a := range answers {
		Expect(a.err).NotTo(HaveOccurred())
		if a.verdict() == allow {
			allowed++
			body = a.body
			Expect(a.status).To(Equal(http.StatusCreated), a.String())
		}
	}
	Expect(allowed).To(Equal(1))
	for _, a := range answers {
		switch a.verdict() {
		case allow:
		case replay:
			Expect(a.status).To(Equal(http.StatusCreated), a.String())
			Expect(a.body).To(Equal(body))
		case inFlight, unknownHold:
			Expect(a.status).To(Equal(http.StatusConflict), a.String())
		default:
			Fail("not an answer for a repeated call: " + a.String())
		}
	}
	return body
}

var _ = Describe("Agents that repeat calls", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx, unhurried) })

	It("A01: the same call twice, 3 ms apart, with different tool-call ids", func(ctx SpecContext) {
		answers := make([]<-chan reply, 0, 2)
		tick := time.NewTicker(3 * time.Millisecond)
		defer tick.Stop()
		for i := range 2 {
			answers = append(answers, w.start(ctx, call{
				session: "s1", index: "4", body: w.order("9", "49.99"),
				header: map[string]string{"X-Tool-Call-Id": fmt.Sprint("toolu_", i)},
			}))
			<-tick.C
		}
		oneWasPaid([]reply{<-answers[0], <-answers[1]})
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A02: the model plans again after a turn that failed, with another tool-call id", func(ctx SpecContext) {
		// The turn fails: the payment was made and its answer never came back.
		gone, leave := context.WithCancel(ctx)
		failed := w.start(gone, call{session: "s1", index: "4", body: w.order("9", "49.99"), fault: "hold-after-commit"})
		w.underWay(ctx, 1)
		leave()
		Expect((<-failed).err).To(MatchError(context.Canceled))
		w.letGo(ctx)
		// A new plan in the same session: other step, other key, same payee and amount.
		got := w.pay(ctx, call{id: "toolu_2", session: "s1", index: "7", body: w.order("9", "49.99")}, 409, unknownHold)
		Expect(got.problem().Reason).To(Equal("ScopeOverlap"))
		// The same step under another key is the same payment.
		w.pay(ctx, call{id: "toolu_3", session: "s1", index: "4", body: w.order("9", "49.99")}, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A03: a task of two calls fails after the first and is run again whole", func(ctx SpecContext) {
		one := call{session: "s1", index: "0", body: w.order("9", "10")}
		two := call{session: "s1", index: "1", body: w.order("10", "20")}
		first := w.pay(ctx, one, 201, allow)
		Expect(w.pay(ctx, one, 201, replay).body).To(Equal(first.body))
		w.pay(ctx, two, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(w.charged(ctx, "10")).To(Equal(1))
	})

	It("A04: the same intent ID again in an unrelated turn, within the TTL", func(ctx SpecContext) {
		first := w.pay(ctx, call{id: "k1", session: "s1", index: "0", body: w.order("9", "10")}, 201, allow)
		again := w.pay(ctx, call{id: "k1", session: "s2", index: "31", body: w.order("9", "10")}, 201, replay)
		Expect(again.body).To(Equal(first.body))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A05: a hold is released and paid, then the run fails and the agent repeats the call", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		held := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem()
		w.resolve(ctx, held.Hold, release)
		paid := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 201, allow)
		for range 3 {
			Expect(w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 201, replay).body).To(Equal(paid.body))
		}
		// The release was for one payment: another one is held anew.
		w.pay(ctx, call{id: "k3", body: w.order("9", "12")}, 409, unknownHold)
		Expect(w.charged(ctx, "9")).To(Equal(2))
	})

	It("A06: arguments A are released and the agent comes back with arguments B", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		held := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem()
		w.resolve(ctx, held.Hold, release)
		nothingSent(ctx, func() {
			p := w.pay(ctx, call{id: "k2", body: w.order("9", "1100")}, 422, conflict).problem()
			Expect(p.Reason).To(Equal("request"))
		})
		w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(2))
	})

	It("A07: the same call twice in one parallel batch, under different indexes", func(ctx SpecContext) {
		for order := range 10 {
			body := w.order(fmt.Sprint(order), "10")
			session := fmt.Sprint("s", order)
			oneWasPaid(w.atOnce(ctx,
				call{session: session, index: "0", body: body, fault: "delay:100ms"},
				call{session: session, index: "1", body: body, fault: "delay:100ms"},
			))
			Expect(w.charged(ctx, fmt.Sprint(order))).To(Equal(1))
		}
	})

	It("A08: a workflow's node runs again from the top when it goes on", func(ctx SpecContext) {
		before := call{session: "flow", index: "0", body: w.order("9", "10")}
		first := w.pay(ctx, before, 201, allow)
		// The interrupt, and the process that went on elsewhere.
		anyGateway().crash(ctx)
		Expect(w.pay(ctx, before, 201, replay).body).To(Equal(first.body))
		w.pay(ctx, call{session: "flow", index: "1", body: w.order("10", "10")}, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A09: the connection is cut after the provider committed, and the client sends again with a new request id", func(ctx SpecContext) {
		body := `{"accountId":"` + w.namespace + `","orderId":"9","amount":10,"memo":"json-rpc id %d"}`
		gone, leave := context.WithCancel(ctx)
		cut := w.start(gone, call{id: "k1", body: fmt.Sprintf(body, 1), fault: "hold-after-commit"})
		w.underWay(ctx, 1)
		leave()
		<-cut
		again := w.start(ctx, call{id: "k1", body: fmt.Sprintf(body, 2)})
		w.letGo(ctx)
		got := <-again
		Expect(got.verdict()).To(Equal(replay), got.String())
		Expect(w.charged(ctx, "9")).To(Equal(1))

		// The same between Holdfast and the provider: nobody knows, so it is held.
		w.pay(ctx, call{id: "k2", body: w.order("10", "10"), fault: "reset-after-commit"}, 409, unknownHold)
		w.pay(ctx, call{id: "k2", body: w.order("10", "10")}, 409, unknownHold)
		Expect(w.charged(ctx, "10")).To(Equal(1))
	})

	It("A10: the client leaves in the middle of the call", func(ctx SpecContext) {
		gone, leave := context.WithCancel(ctx)
		left := w.start(gone, call{id: "k1", body: w.order("9", "10"), fault: "hold"})
		w.underWay(ctx, 1)
		leave()
		Expect((<-left).err).To(MatchError(context.Canceled))
		Expect(w.charged(ctx, "9")).To(BeZero())
		w.letGo(ctx)
		Eventually(func(ctx context.Context) (string, error) {
			doc, err := w.tryPoll(ctx, charge, "k1", "10s")
			return doc.State, err
		}).WithContext(ctx).Should(Equal("Succeeded"))
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A11: the client tries again by itself, three times, 100 ms apart", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold-after-commit"}
		tries := 0
		// On a busy machine the first ones may be gone before anything is sent.
		Eventually(func(ctx context.Context) (bool, error) {
			short, end := context.WithTimeout(ctx, 100*time.Millisecond)
			defer end()
			Expect(w.call(short, c).err).To(MatchError(context.DeadlineExceeded))
			tries++
			n, err := w.onHold(ctx)
			return tries >= 3 && n == 1, err
		}).WithContext(ctx).WithPolling(time.Millisecond).Should(BeTrue())
		w.letGo(ctx)
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A12: a retry brings another key for the same intent", func(ctx SpecContext) {
		step := func(id string) call { return call{id: id, session: "s1", index: "4", body: w.order("9", "10")} }
		first := w.pay(ctx, step("k1"), 201, allow)
		same := w.pay(ctx, step("k2"), 201, replay)
		Expect(same.body).To(Equal(first.body))
		Expect(same.header.Get("Holdfast-Intent")).To(Equal("k1"))
		// Without a place in a session there is nothing but the order to tell by.
		p := w.pay(ctx, call{id: "k3", body: w.order("9", "10")}, 409, unknownHold).problem()
		Expect(p.OwnMatches).To(HaveLen(1))
		Expect(p.OwnMatches[0].IntentID).To(Equal("k1"))
		Expect(p.SuggestedAction).To(Equal("use_the_earlier_intent_id"))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("A13: an unknown outcome is told in words that a model can act on", func(ctx SpecContext) {
		p := w.pay(ctx, call{id: "s1/4", body: w.order("9", "10"), fault: "close-after-commit"}, 409, unknownHold).problem()
		Expect(p.Reason).To(Equal("OutcomeUnknown"))
		Expect(p.SuggestedAction).To(Equal("do_not_pay_again"))
		Expect(p.Detail).To(ContainSubstring("may have happened"))
		Expect(strings.ToLower(p.Detail)).To(ContainSubstring("do not pay it again"))
		Expect(p.Detail).To(ContainSubstring(p.Poll))
		Expect(p.Hold).NotTo(BeEmpty())
		Expect(p.IntentID).To(Equal("s1/4"))
		Expect(p.Order.Scope).To(Equal([]string{"account/" + w.namespace + "/order/9"}))
		// Where it says to ask, there is an answer.
		got := w.get(ctx, anyGateway().url()+p.Poll)
		Expect(got.status).To(Equal(http.StatusOK), got.String())
		Expect(got.body).To(ContainSubstring(`"state":"Held"`))
	})
})
