// Tools that run inside their agents: real processes with pkg/client, killed at every step
// of a payment, that come back through another gateway.

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/localagent"
)

// This program is also the agents that it kills.
func init() { localagent.RunIfAgent() }

const (
	book       = "book"
	localLease = 2 * time.Second
	// bookInTime is for agents that come back while they have their lease, however busy the machine is.
	bookInTime = "book-in-time"
)

// addLocal makes a tool that agents run themselves, in the budget of the others.
func (w *world) addLocal(ctx context.Context, name string, lease time.Duration) {
	GinkgoHelper()
	tool := w.paymentTool(name, "/charges")
	tool.Spec.Upstream = v1alpha1.ToolUpstream{Local: &v1alpha1.LocalUpstream{
		Lease: &metav1.Duration{Duration: lease}, SettleAfter: metav1.Duration{Duration: settleAfter},
	}}
	tool.Spec.Idempotency.Key = v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}}
	w.add(ctx, tool)
}

// agentOf is an agent with an outbox of its own.
func (w *world) agentOf(id, order string) localagent.Orders {
	GinkgoHelper()
	// Where a disk is: an outbox that is in memory would be none.
	dir, err := os.MkdirTemp(serversDir, "agent-")
	Expect(err).NotTo(HaveOccurred())
	token := filepath.Join(dir, "token")
	Expect(os.WriteFile(token, []byte(w.token), 0o600)).To(Succeed())
	return localagent.Orders{
		URL: one().url(), Namespace: w.namespace, TokenFile: token, Outbox: filepath.Join(dir, "outbox.db"), Provider: all.ProviderURL(),
		Intent: client.Intent{Tool: book, ID: id, Body: []byte(w.order(order, "10"))}, Within: time.Minute,
	}
}

func runAgent(ctx context.Context, o localagent.Orders) localagent.Report {
	GinkgoHelper()
	report, killed, err := localagent.Start(ctx, o)
	Expect(err).NotTo(HaveOccurred())
	Expect(killed).To(BeFalse())
	return report
}

func killAgent(ctx context.Context, o localagent.Orders, step string) {
	GinkgoHelper()
	o.Kill = step
	_, killed, err := localagent.Start(ctx, o)
	Expect(err).NotTo(HaveOccurred())
	Expect(killed).To(BeTrue(), step)
}

// claim asks for an attempt, at one of the gateways.
func (w *world) claim(ctx context.Context, id, order, token string) reply {
	return w.call(ctx, call{tool: book, suffix: "/intents/" + id + "/claim", body: w.order(order, "10"), header: map[string]string{"Holdfast-Claim": token}})
}

// settleOf brings a result for what a claim was answered.
func (w *world) settleOf(ctx context.Context, id string, claimed reply, outcome string) reply {
	GinkgoHelper()
	var doc struct {
		Attempt int    `json:"attempt"`
		Fence   string `json:"fence"`
	}
	Expect(json.Unmarshal([]byte(claimed.body), &doc)).To(Succeed(), claimed.String())
	body := mustJSON(map[string]any{"attempt": doc.Attempt, "fence": doc.Fence, "outcome": outcome})
	return w.call(ctx, call{tool: book, suffix: "/intents/" + id + "/settle", body: body})
}

var _ = Describe("A tool that runs inside its agent", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) {
		w = newWorld(ctx)
		w.addLocal(ctx, book, localLease)
	})

	It("is paid once, however its agent dies", func(ctx SpecContext) {
		// What nobody can know is held: the payment was never sent, or it was.
		held := map[string]int{"function-begun": 0, "payment-sent": 1, "function-finished": 1}
		w.addLocal(ctx, bookInTime, time.Minute)
		for _, step := range localagent.Steps {
			By(step)
			id, order := "intent-"+step, "order-"+step
			o := w.agentOf(id, order)
			paid, unknown := held[step]
			if !unknown {
				o.Intent.Tool = bookInTime
			}
			killAgent(ctx, o, step)
			o.URL = other().url()
			report := runAgent(ctx, o)
			if !unknown {
				Expect(report).To(And(HaveField("Status", 201), HaveField("Held", false), HaveField("Pending", 0)), "%s: %+v", step, report)
				Expect(w.charged(ctx, order)).To(Equal(1), step)
				continue
			}
			Expect(report).To(And(HaveField("Held", true), HaveField("Pending", 1)), "%s: %+v", step, report)
			Expect(w.charged(ctx, order)).To(Equal(paid), step)
			// Somebody else's call for the same order meets it.
			w.pay(ctx, call{id: "other-" + step, body: w.order(order, "10")}, 409, unknownHold)

			hold := w.claim(ctx, id, order, "somebody-elses-"+step).problem().Hold
			h := w.appears(ctx, hold)
			Expect(h.Spec.Reasons).To(ConsistOf(v1alpha1.HoldReason("OutcomeUnknown")))
			decision := resolution{Decision: "Release", Reason: "the provider has nothing"}
			if paid > 0 {
				decision = resolution{Decision: "MarkPaid", Reason: "the provider has it", ProviderReference: "looked-up"}
			}
			w.resolve(ctx, hold, decision)
			o.URL = one().url()
			report = runAgent(ctx, o)
			Expect(report).To(And(HaveField("Error", ""), HaveField("Pending", 0), HaveField("Replayed", paid > 0)), "%s: %+v", step, report)
			Expect(w.charged(ctx, order)).To(Equal(1), step)
		}
	}, SpecTimeout(5*time.Minute))

	It("asks its provider what an earlier process has paid", func(ctx SpecContext) {
		o := w.agentOf("k1", "9")
		o.LooksUp = true
		killAgent(ctx, o, "payment-sent")
		Expect(runAgent(ctx, o)).To(And(HaveField("Status", 201), HaveField("Error", "")))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("is held when its agent does not come back, and paid when it does after all", func(ctx SpecContext) {
		o := w.agentOf("k1", "9")
		killAgent(ctx, o, "before-settle")
		var hold string
		Eventually(func(ctx context.Context) string {
			got := w.claim(ctx, "k1", "9", "somebody-elses-claim")
			if got.verdict() == unknownHold {
				hold = got.problem().Hold
			}
			return got.verdict()
		}).WithContext(ctx).Should(Equal(unknownHold))
		w.appears(ctx, hold)
		// R04, R22: what it knows arrives late, and is the end of the hold.
		Expect(runAgent(ctx, o)).To(And(HaveField("Status", 201), HaveField("Error", "")))
		w.holdIs(ctx, hold, v1alpha1.HoldVoid)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("R03: a gateway that dies between claim and settlement changes nothing", func(ctx SpecContext) {
		at := one()
		request := call{tool: book, suffix: "/intents/k1/claim", body: w.order("9", "10"), header: map[string]string{"Holdfast-Claim": "claim-000000000001"}, at: at}
		claimed := w.pay(ctx, request, 201, allow)
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
		at.crash(ctx)
		// It takes longer than the lease, so this may be late: then it is evidence.
		Eventually(func(ctx context.Context) int { return w.settleOf(ctx, "k1", claimed, "Succeeded").status }).WithContext(ctx).Should(Equal(http.StatusOK))
		Expect(w.claim(ctx, "k1", "9", "claim-000000000002").verdict()).To(Equal(replay))
	})

	It("counts for the same budget as the tools that Holdfast calls", func(ctx SpecContext) {
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		got := w.claim(ctx, "k2", "9", "claim-000000000001")
		Expect(got.verdict()).To(Equal(unknownHold), got.String())
		w.resolve(ctx, got.problem().Hold, release)
		got = w.claim(ctx, "k2", "9", "claim-000000000002")
		Expect(got.status).To(Equal(201), got.String())
		Expect(w.settleOf(ctx, "k2", got, "Failed").status).To(Equal(200))
		for n, wrong := range []call{
			{tool: book, id: "k3", body: w.order("10", "10")},
			{suffix: "/intents/k4/claim", body: w.order("10", "10"), header: map[string]string{"Holdfast-Claim": fmt.Sprint("claim-00000000000", 3)}},
		} {
			refused := w.call(ctx, wrong)
			Expect(refused.status).To(Equal(400), "%d: %s", n, refused)
		}
		Expect(w.charged(ctx, "10")).To(BeZero())
	})
})

// appears waits until a PaymentHold is there.
func (w *world) appears(ctx context.Context, name string) *v1alpha1.PaymentHold {
	GinkgoHelper()
	var h *v1alpha1.PaymentHold
	Eventually(func(ctx context.Context) (err error) {
		h, err = w.hold(ctx, name)
		return err
	}).WithContext(ctx).Should(Succeed())
	return h
}
