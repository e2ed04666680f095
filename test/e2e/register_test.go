// Intents that are written down before they are sent: over HTTP, and as PaymentIntents.

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// soonOver is how long an intent is valid that is to be seen before and after its end.
const soonOver = 10 * time.Second

// said is an intent as somebody writes it down, for this world's account.
type said struct {
	id, lineage, amount, fingerprint, quote string
	scope                                   []string
	validUntil                              time.Time
	// token; "": the agent's.
	token string
	at    gatewayProcess
}

// put registers an intent over HTTP.
func (w *world) put(ctx context.Context, s said) reply {
	GinkgoHelper()
	body := map[string]any{"scope": s.scope, "amount": map[string]string{"value": s.amount, "currency": "USD"}, "recipient": w.namespace}
	for name, value := range map[string]string{"lineage": s.lineage, "fingerprint": s.fingerprint, "quote": s.quote} {
		if value != "" {
			body[name] = value
		}
	}
	if !s.validUntil.IsZero() {
		body["valid_until"] = s.validUntil.UTC().Format(time.RFC3339)
	}
	data, err := json.Marshal(body)
	Expect(err).NotTo(HaveOccurred())
	at := s.at
	if at == "" {
		at = anyGateway()
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, w.toolAt(at, charge)+"/intents/"+url.PathEscape(s.id), strings.NewReader(string(data)))
	Expect(err).NotTo(HaveOccurred())
	token := s.token
	if token == "" {
		token = w.token
	}
	request.Header.Set("Authorization", "Bearer "+token)
	got := do(request)
	Expect(got.err).NotTo(HaveOccurred())
	return got
}

// saidAs is what is said, as a PaymentIntent.
func (w *world) saidAs(name string, s said) *v1alpha1.PaymentIntent {
	o := &v1alpha1.PaymentIntent{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "PaymentIntent"},
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: v1alpha1.PaymentIntentSpec{
			ToolRef: v1alpha1.ToolReference{Name: charge}, Caller: w.caller(), IntentID: s.id, Lineage: s.lineage,
			Amount: &v1alpha1.Money{Value: s.amount, Currency: "USD"}, Recipient: w.namespace, Fingerprint: s.fingerprint, Quote: s.quote,
		},
	}
	for _, p := range s.scope {
		o.Spec.Scope = append(o.Spec.Scope, v1alpha1.HoldPath(p))
	}
	if !s.validUntil.IsZero() {
		o.Spec.ValidUntil = &metav1.Time{Time: s.validUntil}
	}
	return o
}

// saysOf waits until a PaymentIntent says so, and returns it.
func (w *world) saysOf(ctx context.Context, name string, verdict v1alpha1.IntentVerdict, state v1alpha1.IntentState) *v1alpha1.PaymentIntent {
	GinkgoHelper()
	var o v1alpha1.PaymentIntent
	Eventually(func(g Gomega, ctx context.Context) {
		o = v1alpha1.PaymentIntent{}
		g.Expect(admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &o)).To(Succeed())
		g.Expect(o.Status.Verdict).To(Equal(verdict), mustJSON(o.Status))
		g.Expect(o.Status.State).To(Equal(state), mustJSON(o.Status))
	}).WithContext(ctx).Should(Succeed())
	return &o
}

// file writes an object down for kubectl.
func (w *world) file(o client.Object) string {
	GinkgoHelper()
	name := filepath.Join(GinkgoT().TempDir(), o.GetName()+".json")
	var content map[string]any
	Expect(json.Unmarshal([]byte(mustJSON(o)), &content)).To(Succeed())
	delete(content, "status")
	Expect(os.WriteFile(name, []byte(mustJSON(content)), 0o600)).To(Succeed())
	return name
}

// ofOrder is the scope of an order of this world's account.
func (w *world) ofOrder(n string) []string { return []string{"account/" + w.namespace + "/order/" + n} }

var _ = Describe("An intent that is registered", func() {
	var w *world
	var order9 said
	at := func(settings ...setting) {
		BeforeEach(func(ctx SpecContext) {
			w = newWorld(ctx, settings...)
			order9 = said{id: "k1", scope: w.ofOrder("9"), amount: "10"}
		})
	}

	Context("by default", func() {
		at()

		It("over HTTP, at one gateway and called at another", func(ctx SpecContext) {
			nothingSent(ctx, func() {
				for _, g := range gateways() {
					s := order9
					s.at = g
					got := w.put(ctx, s)
					Expect(got.status).To(Equal(http.StatusOK), got.String())
					Expect(got.verdict()).To(Equal(allow))
					Expect(w.poll(ctx, charge, "k1", "").State).To(Equal("Registered"))
				}
				Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "11")}, 422, conflict).problem().Reason).To(Equal("request"))
				Expect(w.pay(ctx, call{id: "k1", body: w.order("8", "10")}, 422, conflict).problem().Reason).To(Equal("request"))
			})
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
			Expect(w.put(ctx, order9).verdict()).To(Equal(replay))
			Expect(w.charged(ctx, "9")).To(Equal(1))
		})

		It("by the agent with kubectl, followed to its end, and ready for kubectl wait", func(ctx SpecContext) {
			o := w.saidAs("nine", order9)
			Expect(all.RunKubectl(ctx, "--namespace="+w.namespace, "--as="+w.caller(), "create", "--filename="+w.file(o))).Error().NotTo(HaveOccurred())
			Expect(w.kubectl(ctx, "", "wait", "--for=condition=Ready", "--timeout=30s", "pint/nine")).Error().NotTo(HaveOccurred())
			Expect(w.kubectl(ctx, "", "diff", "--filename="+w.file(o))).To(BeEmpty())
			w.saysOf(ctx, "nine", v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
			Expect(w.kubectl(ctx, "", "wait", "--for=condition=Settled", "--timeout=30s", "pint/nine")).Error().NotTo(HaveOccurred())
			got := w.saysOf(ctx, "nine", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded)
			Expect(*got.Status.Attempts).To(Equal(int32(1)))
			// After the payment another way of registering it is told the same, and moves nothing.
			Expect(w.put(ctx, order9).verdict()).To(Equal(replay))
			create(ctx, w.saidAs("later", order9))
			later := w.saysOf(ctx, "later", v1alpha1.IntentReplay, "")
			Expect(apimeta.FindStatusCondition(later.Status.Conditions, v1alpha1.ConditionAdmitted).Reason).To(Equal("Duplicate"))
			Expect(w.charged(ctx, "9")).To(Equal(1))
		})

		It("A12: a retry mints a new key for the same intent, registered or not", func(ctx SpecContext) {
			w.put(ctx, order9)
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
			again := order9
			again.id = "k2"
			p := w.put(ctx, again).problem()
			Expect(p.Verdict).To(Equal(unknownHold))
			Expect(p.OwnMatches).To(HaveLen(1))
			Expect(p.OwnMatches[0].IntentID).To(Equal("k1"))
			w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
			w.pay(ctx, call{id: "k3", body: w.order("9", "10")}, 409, unknownHold)
			Expect(w.charged(ctx, "9")).To(Equal(1))
		})

		It("A07: the same call twice in one batch, each registered before", func(ctx SpecContext) {
			var calls []call
			for i := range 2 {
				s := order9
				s.id, s.lineage = fmt.Sprint("k", i), fmt.Sprint("s1/", i)
				Expect(w.put(ctx, s).verdict()).To(Equal(allow))
				calls = append(calls, call{id: s.id, session: "s1", index: fmt.Sprint(i), body: w.order("9", "10"), at: gateways()[i%len(gateways())]})
			}
			oneWasPaid(w.atOnce(ctx, calls...))
			Expect(w.charged(ctx, "9")).To(Equal(1))
		})

		It("two gateways register and call it at the same instant, 20 times: one payment each", func(ctx SpecContext) {
			for n := range 20 {
				order := fmt.Sprint(n)
				s := said{id: "k" + order, scope: w.ofOrder(order), amount: "10"}
				done := make(chan reply, 4)
				for i := range 4 {
					g := gateways()[i%len(gateways())]
					go func() {
						defer GinkgoRecover()
						s := s
						s.at = g
						done <- w.put(ctx, s)
					}()
				}
				c := call{id: "k" + order, body: w.order(order, "10")}
				answers := w.atOnce(ctx, c, c, c)
				for range 4 {
					Expect((<-done).verdict()).To(BeElementOf(allow, inFlight, replay))
				}
				oneWasPaid(answers)
				Expect(w.charged(ctx, order)).To(Equal(1))
			}
		})

		It("R15: two that overlap are both registered, and one of them is paid", func(ctx SpecContext) {
			for _, s := range []said{{id: "b", scope: append(w.ofOrder("1"), w.ofOrder("2")...), amount: "10"}, {id: "c", scope: append(w.ofOrder("2"), w.ofOrder("3")...), amount: "11"}} {
				create(ctx, w.saidAs(s.id, s))
				w.saysOf(ctx, s.id, v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			}
			body := func(amount string, orders ...string) string {
				var scope [][]string
				for _, n := range orders {
					scope = append(scope, []string{"account", w.namespace, "order", n})
				}
				return mustJSON(map[string]any{"accountId": w.namespace, "orderId": "9", "amount": amount, "scope": scope})
			}
			got := w.atOnce(ctx, call{id: "b", body: body("10", "1", "2"), at: gateways()[0]}, call{id: "c", body: body("11", "2", "3"), at: gateways()[len(gateways())-1]})
			Expect([]string{got[0].verdict(), got[1].verdict()}).To(ConsistOf(allow, unknownHold))
			Expect(w.entries(ctx)).To(HaveLen(1))
			states := []v1alpha1.IntentState{v1alpha1.IntentSucceeded, v1alpha1.IntentHeld}
			verdicts := []v1alpha1.IntentVerdict{v1alpha1.IntentReplay, v1alpha1.IntentUnknownHold}
			if got[0].verdict() == unknownHold {
				states[0], states[1], verdicts[0], verdicts[1] = states[1], states[0], verdicts[1], verdicts[0]
			}
			w.saysOf(ctx, "b", verdicts[0], states[0])
			w.saysOf(ctx, "c", verdicts[1], states[1])
		})

		It("R17: an intent whose outcome is unknown is rejected; the same order is held when it is registered", func(ctx SpecContext) {
			w.put(ctx, order9)
			hold := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), fault: "error-500-after-commit"}, 409, unknownHold).problem().Hold
			w.holdIs(ctx, hold, v1alpha1.HoldHeld)
			w.resolve(ctx, hold, resolution{Decision: "Reject"})
			again := order9
			again.id = "k2"
			Expect(w.put(ctx, again).verdict()).To(Equal(unknownHold))
			create(ctx, w.saidAs("third", said{id: "k3", scope: w.ofOrder("9"), amount: "11"}))
			w.saysOf(ctx, "third", v1alpha1.IntentUnknownHold, "") // of the one that is held already
			Expect(w.charged(ctx, "9")).To(Equal(1))
		})

		It("O10: a held PaymentIntent that is deleted comes back, and its hold stands", func(ctx SpecContext) {
			w.pay(ctx, call{id: "paid", body: w.order("9", "10")}, 201, allow)
			o := w.saidAs("held", order9)
			create(ctx, o)
			hold := w.saysOf(ctx, "held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld).Status.Hold
			Expect(w.kubectl(ctx, "", "delete", "--wait=false", "pint/held")).Error().NotTo(HaveOccurred())
			Eventually(func(g Gomega, ctx context.Context) {
				var back v1alpha1.PaymentIntent
				g.Expect(admin.Get(ctx, client.ObjectKeyFromObject(o), &back)).To(Succeed())
				g.Expect(back.UID).NotTo(Equal(o.UID))
				g.Expect(back.Spec).To(Equal(o.Spec))
			}).WithContext(ctx).Should(Succeed())
			Expect(w.saysOf(ctx, "held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld).Status.Hold).To(Equal(hold))
			// Released, it is called, and is followed by the object that came back.
			w.resolve(ctx, hold, release)
			w.saysOf(ctx, "held", v1alpha1.IntentAllow, v1alpha1.IntentReleased)
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
			w.saysOf(ctx, "held", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded)
			Expect(w.charged(ctx, "9")).To(Equal(2))
		})

		It("for its own caller alone, and shown to nobody else", func(ctx SpecContext) {
			w.serviceAccount(ctx, "other", "holdfast-agent")
			other := "system:serviceaccount:" + w.namespace + ":other"
			o := w.saidAs("nine", order9)
			_, err := w.kubectl(ctx, other, "create", "--filename="+w.file(o))
			Expect(err).To(MatchError(ContainSubstring(`may not register an intent for "` + w.caller() + `"`)))
			_, err = w.kubectl(ctx, w.caller(), "get", "pint")
			Expect(err).To(MatchError(ContainSubstring("cannot list resource")))
			create(ctx, o)
			w.saysOf(ctx, "nine", v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			_, err = w.kubectl(ctx, w.caller(), "patch", "pint/nine", "--type=merge", `--patch={"spec":{"amount":{"value":"1"}}}`)
			Expect(err).To(MatchError(ContainSubstring("cannot get resource")))
			err = admin.Patch(ctx, o.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"amount":{"value":"1"}}}`)))
			Expect(err).To(MatchError(ContainSubstring("spec cannot change")))
			err = admin.Status().Patch(ctx, o.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"status":{"state":"Succeeded"}}`)))
			Expect(apierrors.IsForbidden(err)).To(BeTrue(), "%v", err)
			// Over the gateway the same ID of another caller is another intent.
			s := order9
			s.token = w.tokenOf(ctx, "other", audience)
			s.scope, s.amount = w.ofOrder("8"), "12"
			Expect(w.put(ctx, s).verdict()).To(Equal(allow))
			Expect(w.poll(ctx, charge, "k1", "").Amount.Value).To(Equal("10.00"))
		})

		It("until its time is over", func(ctx SpecContext) {
			s := order9
			s.validUntil = time.Now().Add(soonOver)
			create(ctx, w.saidAs("nine", s))
			w.saysOf(ctx, "nine", v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			o := w.saysOf(ctx, "nine", v1alpha1.IntentDeny, v1alpha1.IntentRejected)
			Expect(apimeta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionStalled)).To(BeTrue())
			nothingSent(ctx, func() {
				Expect(w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 403, deny).problem().Reason).To(Equal("expired"))
			})
		})
	})

	Context("where the tool takes nothing else", func() {
		at(func(_ *v1alpha1.IntentBudget, t *v1alpha1.AgentTool) {
			t.Spec.Identity.Registration = v1alpha1.RegistrationRequired
		})

		It("is sent, and what was not registered is refused", func(ctx SpecContext) {
			nothingSent(ctx, func() {
				for _, g := range gateways() {
					p := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), at: g}, 403, deny).problem()
					Expect(p.Reason).To(Equal("not_registered"))
					Expect(p.SuggestedAction).To(Equal("register_first"))
				}
			})
			create(ctx, w.saidAs("nine", order9))
			w.saysOf(ctx, "nine", v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
			w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, replay)
		})
	})

	Context("under a limit of spend", func() {
		at(limitOf("daily", "25", 24*time.Hour))

		It("reserves what it will spend, and gives it back when its time is over", func(ctx SpecContext) {
			s := order9
			s.validUntil = time.Now().Add(soonOver)
			Expect(w.put(ctx, s).verdict()).To(Equal(allow))
			create(ctx, w.saidAs("eight", said{id: "k2", scope: w.ofOrder("8"), amount: "10"}))
			w.saysOf(ctx, "eight", v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
			third := said{id: "k3", scope: w.ofOrder("7"), amount: "10"}
			p := w.put(ctx, third).problem()
			Expect(p.Status).To(Equal(403))
			Expect(p.Reason).To(Equal("spend_exceeded"))
			w.exceeded(ctx, call{id: "k4", body: w.order("6", "10")})
			// What was registered is what is spent: nothing is counted twice.
			w.pay(ctx, call{id: "k2", body: w.order("8", "10")}, 201, allow)
			Eventually(func(ctx context.Context) string { return w.put(ctx, third).verdict() }).WithContext(ctx).Should(Equal(allow))
			w.spendIs(ctx, "daily", "10", "10")
			w.pay(ctx, call{id: "k3", body: w.order("7", "10")}, 201, allow)
			w.spendIs(ctx, "daily", "20", "0")
			Expect(w.moved(ctx)).To(Equal("20.00"))
		})
	})
})
