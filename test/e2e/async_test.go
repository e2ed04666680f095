// Agents that would rather come back than wait (Prefer: respond-async), and what becomes
// of their calls when processes end.

package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// rather is the header of a caller that would rather come back.
func rather(more ...string) map[string]string {
	return map[string]string{"Prefer": strings.Join(append([]string{"respond-async"}, more...), ", ")}
}

// handOff calls and wants a 202, whose poll URL the result takes at any gateway.
func (w *world) handOff(ctx context.Context, c call) {
	GinkgoHelper()
	got := w.pay(ctx, c, http.StatusAccepted, allow)
	Expect(got.header.Get("Preference-Applied")).To(HavePrefix("respond-async"))
	where := "/v1/namespaces/" + w.namespace + "/tools/" + charge + "/intents/" + c.id
	Expect(got.header.Get("Location")).To(Equal(where))
	var body struct {
		State  string `json:"state"`
		Poll   string `json:"poll"`
		Action string `json:"suggested_action"`
	}
	Expect(json.Unmarshal([]byte(got.body), &body)).To(Succeed(), got.String())
	Expect([]string{body.State, body.Poll, body.Action}).To(Equal([]string{"InFlight", where, "poll"}))
	// It is durable: every gateway knows of it.
	for _, g := range gateways() {
		doc, err := w.tryPollAt(ctx, g, charge, c.id, "")
		Expect(err).NotTo(HaveOccurred(), string(g))
		Expect(doc.State).To(BeElementOf("InFlight", "Succeeded"), string(g))
	}
}

var _ = Describe("A caller that would rather come back", func() {
	const tool = `tool="` + charge + `"`

	It("A10: it is answered 202, asks another gateway, and gets the result", func(ctx SpecContext) {
		w := newWorld(ctx, unhurried)
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold", at: one(), header: rather()}
		w.handOff(ctx, c)
		w.underWay(ctx, 1)
		asking := make(chan reply, 1)
		at := w.toolAt(other(), charge) + "/intents/k1?wait=30s"
		go func() { asking <- w.get(ctx, at) }()
		w.pay(ctx, c, 409, inFlight)
		w.letGo(ctx)
		var doc struct {
			State  string `json:"state"`
			Result *struct {
				Status int             `json:"status"`
				Body   json.RawMessage `json:"body"`
			} `json:"result"`
		}
		Expect(json.Unmarshal([]byte((<-asking).body), &doc)).To(Succeed())
		Expect(doc.State).To(Equal("Succeeded"))
		Expect(doc.Result.Status).To(Equal(201))
		Expect(w.pay(ctx, call{id: "k1", body: c.body, at: other(), header: rather()}, 201, replay).body).To(Equal(string(doc.Result.Body)))
		// One that is quick enough is answered itself.
		w.pay(ctx, call{id: "k2", body: w.order("10", "10"), header: rather("wait=10")}, 201, allow)
		// What is decided before anything is sent is answered at once.
		w.pay(ctx, call{id: "k1", body: w.order("9", "11"), header: rather()}, 422, conflict)
		w.pay(ctx, call{id: "k3", body: w.order("9", "11"), header: rather()}, 409, unknownHold)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Eventually(w.metric("holdfast_calls_total", tool, `verdict="ALLOW"`)).WithContext(ctx).Should(BeEquivalentTo(2))
		Expect(w.metric("holdfast_calls_handed_off_total", tool)(ctx)).To(BeEquivalentTo(2))
	})

	It("R03: the gateway is killed after its 202: the intent is held as unknown and not sent again", func(ctx SpecContext) {
		w := newWorld(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold-after-commit", at: other(), header: rather()}
		w.handOff(ctx, c)
		w.underWay(ctx, 1)
		other().crash(ctx)
		nothingSent(ctx, func() {
			doc := w.becomes(ctx, "k1", "Held")
			Expect(doc.Hold.Reasons).To(Equal([]string{"OutcomeUnknown"}))
			w.pay(ctx, call{id: "k1", body: c.body, header: rather()}, 409, unknownHold)
		})
		w.letGo(ctx)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("P03: the gateway is killed after its 202, and the status check finds the payment", func(ctx SpecContext) {
		w := newWorld(ctx, asks(v1alpha1.FinalitySettleAfter))
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold-after-commit", at: other(), header: rather()}
		w.handOff(ctx, c)
		w.underWay(ctx, 1)
		other().crash(ctx)
		w.letGo(ctx)
		w.becomes(ctx, "k1", "Succeeded")
		w.pay(ctx, call{id: "k1", body: c.body}, 200, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Eventually(w.metric("holdfast_status_checks_total", tool, `outcome="Succeeded"`)).WithContext(ctx).Should(BeNumerically(">=", 1))
	})

	It("a gateway that is stopped ends what it has handed off", func(ctx SpecContext) {
		w := newWorld(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "delay-after-commit:1s", at: other(), header: rather()}
		w.handOff(ctx, c)
		other().stop(ctx)
		if one() == other() {
			other().start(ctx)
		}
		doc, err := w.tryPollAt(ctx, one(), charge, "k1", "")
		Expect(err).NotTo(HaveOccurred())
		Expect(doc.State).To(Equal("Succeeded"))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("it waits for its slot as others do, and slots come back when the gateway is killed", func(ctx SpecContext) {
		w := newWorld(ctx, func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
			tool.Spec.Concurrency = &v1alpha1.ConcurrencySpec{MaxInFlight: ptr.To[int32](1), Queue: &v1alpha1.QueueSpec{Max: ptr.To[int32](1)}}
			// Long enough to look at the one that waits while the other is under way.
			tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: 6 * time.Second}
			tool.Spec.Concurrency.Queue.Timeout = &metav1.Duration{Duration: time.Minute}
		})
		w.handOff(ctx, call{id: "k1", body: w.order("1", "10"), fault: "hold", at: other(), header: rather()})
		w.underWay(ctx, 1)
		waiting := w.start(ctx, call{id: "k2", body: w.order("2", "10"), fault: "hold", at: one(), header: rather()})
		Eventually(w.metric("holdfast_calls_queued", tool)).WithContext(ctx).Should(BeEquivalentTo(1))
		w.letGo(ctx)
		Expect((<-waiting).status).To(Equal(http.StatusAccepted))
		w.underWay(ctx, 1)
		one().crash(ctx)
		w.letGo(ctx)
		w.becomes(ctx, "k2", "Held")
		w.pay(ctx, call{id: "k3", body: w.order("3", "10"), header: rather("wait=10")}, 201, allow)
		Expect(w.charged(ctx, "1")).To(Equal(1))
		Expect(w.charged(ctx, "3")).To(Equal(1))
	}, NodeTimeout(2*time.Minute))
})
