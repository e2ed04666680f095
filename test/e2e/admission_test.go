// What may be paid at all, and who may do what about it: the rules of a tool, an agent that oversteps, and two people
// who decide at the same moment.

package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// ruled has rules: above 500 a person decides, and more than 800 is never paid.
func ruled(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
	tool.Spec.Admission = []v1alpha1.AdmissionRule{
		{Expression: `quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0`, Message: "above 500 a person decides", Action: v1alpha1.AdmissionHold},
		{Expression: `quantity(object.spec.amount.value).compareTo(quantity("800")) <= 0`, Message: "more than 800 is never paid", Action: v1alpha1.AdmissionDeny},
	}
}

// intent is a PaymentIntent of the charge tool.
func (w *world) intent(name, caller, order, amount string) *v1alpha1.PaymentIntent {
	return &v1alpha1.PaymentIntent{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: v1alpha1.PaymentIntentSpec{
			ToolRef: v1alpha1.ToolReference{Name: charge}, Caller: caller, IntentID: name,
			Scope:  []v1alpha1.HoldPath{v1alpha1.HoldPath("account/" + w.namespace + "/order/" + order)},
			Amount: &v1alpha1.Money{Value: amount, Currency: "USD"}, Recipient: w.namespace,
		},
	}
}

var _ = Describe("Rules of a tool", func() {
	It("deny, hold, and are let pass once", func(ctx SpecContext) {
		w := newWorld(ctx, ruled)
		w.pay(ctx, call{id: "k1", body: w.order("1", "500")}, 201, allow)
		nothingSent(ctx, func() {
			p := w.pay(ctx, call{id: "k2", body: w.order("2", "800.01")}, 403, deny).problem()
			Expect(p.Reason).To(Equal("denied_by_rule"))
			Expect(p.Detail).To(ContainSubstring("more than 800 is never paid"))
		})
		c := call{id: "k3", body: w.order("3", "500.01")}
		p := w.pay(ctx, c, 409, unknownHold).problem()
		Expect(p.Reason).To(Equal("ApprovalRequired"))
		h := w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
		Expect(h.Spec.Reasons).To(Equal([]v1alpha1.HoldReason{v1alpha1.HoldApprovalRequired}))
		Expect(h.Status.Cause).To(Equal("above 500 a person decides"))
		w.resolve(ctx, p.Hold, release)
		w.pay(ctx, c, 201, allow)
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "3")).To(Equal(1))

		// R34: the release covers the rule, and no payment that the hold never showed.
		d := call{id: "k4", body: w.order("4", "600")}
		hold := w.pay(ctx, d, 409, unknownHold).problem().Hold
		w.pay(ctx, call{id: "k5", body: w.order("4", "10")}, 409, unknownHold) // an agent that loops is shown the hold that it has
		w.serviceAccount(ctx, "other", "holdfast-agent")
		w.pay(ctx, call{id: "k6", body: w.order("4", "10"), token: w.tokenOf(ctx, "other", audience)}, 201, allow)
		w.resolve(ctx, hold, release)
		nothingSent(ctx, func() {
			Expect(w.pay(ctx, d, 409, unknownHold).problem().Reason).To(Equal("ScopeOverlap"))
		})
		Expect(w.charged(ctx, "4")).To(Equal(1))
	})

	It("are asked again when a person releases, and the hold that stands anew says why", func(ctx SpecContext) {
		w := newWorld(ctx, ruled)
		c := call{id: "k1", body: w.order("1", "600")}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Admission[1].Expression = `quantity(object.spec.amount.value).compareTo(quantity("550")) <= 0`
			tool.Spec.Admission[1].Message = "more than 550 is never paid"
		})
		Expect(w.tryResolve(ctx, resolver, hold, release)).To(Succeed())
		Expect(w.holdIs(ctx, hold, v1alpha1.HoldVoid).Status.Effect).To(ContainSubstring("It was not taken: a rule of the tool denies it now: more than 550 is never paid"))
		next := w.holdIs(ctx, strings.TrimSuffix(hold, "1")+"2", v1alpha1.HoldHeld)
		Expect(next.Status.Cause).To(ContainSubstring("Release was not taken: a rule of the tool denies it now"))
		nothingSent(ctx, func() { w.pay(ctx, c, 409, unknownHold) })
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) { ruled(nil, tool) })
		w.resolve(ctx, next.Name, release)
		w.pay(ctx, c, 201, allow)
		Expect(w.charged(ctx, "1")).To(Equal(1))
	})

	It("end a hold that nobody decides, and never one whose outcome is unknown", func(ctx SpecContext) {
		w := newWorld(ctx, ruled, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			budget.Spec.Holds = &v1alpha1.HoldsSpec{ExpireAfter: metav1.Duration{Duration: 3 * time.Second}}
		})
		c := call{id: "k1", body: w.order("1", "600")}
		hold := w.pay(ctx, c, 409, unknownHold).problem().Hold
		lost := w.pay(ctx, call{id: "k2", body: w.order("2", "10"), fault: "close-after-commit"}, 409, unknownHold).problem().Hold
		Expect(w.holdIs(ctx, hold, v1alpha1.HoldResolved).Status.Effect).To(ContainSubstring("Nobody decided within 3s: rejected"))
		nothingSent(ctx, func() { Expect(w.pay(ctx, c, 403, deny).problem().Reason).To(Equal("hold_expired")) })
		Expect(w.charged(ctx, "1")).To(BeZero())
		// By then the other one would have expired, too.
		Expect(w.holdIs(ctx, lost, v1alpha1.HoldHeld).Spec.Resolution).To(BeNil())
		w.resolve(ctx, lost, resolution{Decision: "MarkPaid", ProviderReference: "ch_1"})
	})
})

var _ = Describe("An agent that oversteps", func() {
	It("is refused by the API server or the gateway, each time with a clear message", func(ctx SpecContext) {
		w := newWorld(ctx, ruled)
		hold := w.pay(ctx, call{id: "k1", body: w.order("1", "600")}, 409, unknownHold).problem().Hold
		w.serviceAccount(ctx, "other", "holdfast-agent")
		other := w.tokenOf(ctx, "other", audience)
		w.pay(ctx, call{id: "theirs", body: w.order("2", "10"), token: other}, 201, allow)
		kubeconfig, err := all.ServiceAccountKubeconfig(ctx, w.namespace, "agent", time.Hour)
		Expect(err).NotTo(HaveOccurred())
		// as is kubectl with the agent's own token.
		as := func(args ...string) error {
			_, err := all.RunKubectl(ctx, append([]string{"--kubeconfig=" + kubeconfig, "--namespace=" + w.namespace}, args...)...)
			return err
		}
		h := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		forbidden := func(verb, what string) string {
			// kubectl reads what it patches.
			return fmt.Sprintf(`User %q cannot (get|%s) resource %q`, w.caller(), verb, what)
		}
		status := `{"status":{"state":"Resolved"}}`
		for _, row := range []struct {
			what string
			err  error
			want string
		}{
			{"resolves its own hold", as("patch", "hold", hold, "--type=merge", "--patch="+release.patch()), forbidden("patch", "paymentholds")},
			{"writes a hold's status", as("patch", "hold", hold, "--subresource=status", "--type=merge", "--patch="+status), forbidden("patch", "paymentholds/status")},
			{"reads holds", as("get", "holds"), forbidden("list", "paymentholds")},
			{"changes its tool", as("patch", "atool", charge, "--type=merge", `--patch={"spec":{"admission":null}}`), forbidden("patch", "agenttools")},
			{"changes its budget", as("patch", "ibudget", budgetName, "--type=merge", `--patch={"spec":{"holds":null}}`), forbidden("patch", "intentbudgets")},
			{"writes its tool's status", as("patch", "atool", charge, "--subresource=status", "--type=merge", `--patch={"status":{"conditions":[]}}`), forbidden("patch", "agenttools/status")},
			{"reads everybody's intents", as("get", "paymentintents"), forbidden("list", "paymentintents")},
			{"removes the policies", as("delete", "validatingadmissionpolicies", "--all"), "cannot list resource"},
		} {
			Expect(row.err).To(MatchError(MatchRegexp(row.want)), row.what)
		}
		agent := clientAs(w.caller())
		forged := &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "forged-1"}, Spec: h.Spec}
		Expect(agent.Create(ctx, forged)).To(MatchError(MatchRegexp(forbidden("create", "paymentholds"))), "makes a hold")
		// Its own intents it may write down, and nobody else's; and none that a rule denies.
		Expect(agent.Create(ctx, w.intent("forged", "system:serviceaccount:"+w.namespace+":other", "3", "10"))).To(
			MatchError(ContainSubstring(`may not register an intent for "system:serviceaccount:` + w.namespace + `:other"`)))
		Expect(agent.Create(ctx, w.intent("own", w.caller(), "3", "10"))).To(Succeed())
		Eventually(func(ctx context.Context) error {
			return agent.Create(ctx, w.intent("too-much", w.caller(), "4", "801"), client.DryRunAll)
		}).
			WithContext(ctx).Should(MatchError(ContainSubstring("denied request: more than 800 is never paid")))
		Eventually(func(ctx context.Context) (v1alpha1.IntentState, error) {
			var o v1alpha1.PaymentIntent
			err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: "own"}, &o)
			return o.Status.State, err
		}).WithContext(ctx).Should(Equal(v1alpha1.IntentRegistered))
		own := w.intent("own", w.caller(), "3", "10")
		Expect(agent.Status().Patch(ctx, own, client.RawPatch(types.MergePatchType, []byte(`{"status":{"verdict":"REPLAY"}}`)))).To(
			MatchError(MatchRegexp(forbidden("patch", "paymentintents/status"))))
		// Over the gateway nobody sees another caller's intent, not even that there is one.
		theirs := w.toolURL(charge) + "/intents/theirs"
		got := w.get(ctx, theirs)
		Expect(got.status).To(Equal(404), got.String())
		Expect(got.body).NotTo(ContainSubstring("order/2"))
		Expect(got.problem().Detail).To(Equal(strings.ReplaceAll(w.get(ctx, w.toolURL(charge)+"/intents/absent").problem().Detail, "absent", "theirs")))
		Expect(w.charged(ctx, "1")).To(BeZero())
	})
})

var _ = Describe("Two people at one hold", long, func() {
	// The race is the API server's and the record's; on the other stores a few rounds show that it is the same there.
	rounds := 20
	if kind == bolt {
		rounds = 200
	}
	It("one of two decisions wins, and the money follows that one", func(ctx SpecContext) {
		w := newWorld(ctx, ruled, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			many := int32(1000)
			budget.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: &many, PerCaller: &many}
		})
		w.bind(ctx, "holdfast-resolver", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "bob"})
		people := map[string]client.Client{resolver: clientAs(resolver), "bob": clientAs("bob")}
		decisions := map[string]string{resolver: "Release", "bob": "Reject"}
		calls, holds := make([]call, rounds), make([]string, rounds)
		for i := range rounds {
			calls[i] = call{id: fmt.Sprint("k", i), body: w.order(fmt.Sprint(i), "600")}
			holds[i] = w.pay(ctx, calls[i], 409, unknownHold).problem().Hold
		}
		wins := map[string]int{}
		for i := range rounds {
			w.holdIs(ctx, holds[i], v1alpha1.HoldHeld)
			var mu sync.Mutex
			errs := map[string]error{}
			start := make(chan struct{})
			var both sync.WaitGroup
			for who, c := range people {
				both.Go(func() {
					<-start
					err := w.tryResolveAs(ctx, c, holds[i], decisions[who])
					mu.Lock()
					defer mu.Unlock()
					errs[who] = err
				})
			}
			close(start)
			both.Wait()
			winner, loser := resolver, "bob"
			if errs[resolver] != nil {
				winner, loser = "bob", resolver
			}
			Expect(errs[winner]).NotTo(HaveOccurred())
			Expect(errs[loser]).To(MatchError(ContainSubstring("resolution is set already and cannot be changed or removed")))
			wins[winner]++
			h, err := w.hold(ctx, holds[i])
			Expect(err).NotTo(HaveOccurred())
			Expect(h.Spec.Resolution.By).To(Equal(winner))
			Expect(string(h.Spec.Resolution.Decision)).To(Equal(decisions[winner]))
		}
		for i := range rounds {
			h := w.holdIs(ctx, holds[i], v1alpha1.HoldResolved)
			charged := 0
			if h.Spec.Resolution.Decision == v1alpha1.DecisionRelease {
				w.pay(ctx, calls[i], 201, allow)
				charged = 1
			} else {
				Expect(w.pay(ctx, calls[i], 403, deny).problem().Reason).To(Equal("rejected"))
			}
			Expect(w.charged(ctx, fmt.Sprint(i))).To(Equal(charged))
		}
		AddReportEntry("wins", fmt.Sprintf("of %d: %v", rounds, wins))
	}, NodeTimeout(10*time.Minute))
})

// tryResolveAs is a person's patch, without the time that kubectl takes to start.
func (w *world) tryResolveAs(ctx context.Context, c client.Client, hold, decision string) error {
	o := &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: hold}}
	patch := fmt.Sprintf(`{"spec":{"resolution":{"decision":%q,"reason":"looked at it"}}}`, decision)
	return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)))
}
