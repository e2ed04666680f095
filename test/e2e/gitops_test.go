// What a cluster and a GitOps tool see: objects that are ready when they say so, differ from
// Git in nothing, and go on without the operator.

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

var _ = Describe("GitOps", func() {
	It("O02: what was applied is ready by itself, and differs in nothing, also after the operator has looked at it again", func(ctx SpecContext) {
		sample, err := os.ReadFile(filepath.Join("..", "..", "config", "samples", "minimal.yaml"))
		Expect(err).NotTo(HaveOccurred())
		file := filepath.Join(GinkgoT().TempDir(), "minimal.yaml")
		text := strings.ReplaceAll(string(sample), "https://payments.example.com", all.ProviderURL())
		if kind != bolt {
			// The kind of store under test; what the sample says of it is for one process.
			text = text[strings.Index(text, "---\n")+4:]
		}
		Expect(os.WriteFile(file, []byte(text), 0o600)).To(Succeed())
		for _, how := range [][]string{{"--server-side"}, {}} {
			w := bareWorld(ctx)
			if kind != bolt {
				w.newStore(ctx, shared)
			}
			run := func(args ...string) string {
				GinkgoHelper()
				out, err := w.kubectl(ctx, "", args...)
				Expect(err).NotTo(HaveOccurred(), out)
				return out
			}
			run(append([]string{"apply", "--filename=" + file}, how...)...)
			run("wait", "--for=condition=Ready", "--timeout=30s", "idem/payments", "ibudget/refunds", "atool/refund")
			diff := append([]string{"diff", "--filename=" + file}, how...)
			Expect(run(diff...)).To(BeEmpty())
			versions := func() string {
				GinkgoHelper()
				return run("get", "idem,ibudget,atool", "--output=jsonpath={.items[*].metadata.resourceVersion}")
			}
			rest := versions()
			for range 3 {
				// Each of them is visited anew when it is labelled, and when the label goes.
				run("label", "idem,ibudget,atool", "--all", "looked=at")
				run("label", "idem,ibudget,atool", "--all", "looked-")
			}
			Expect(run(diff...)).To(BeEmpty())
			// Nothing but the labels has moved: applying what is there already moves nothing either.
			moved := versions()
			Expect(moved).NotTo(Equal(rest))
			run(append([]string{"apply", "--filename=" + file}, how...)...)
			Consistently(versions, "2s", "200ms").Should(Equal(moved))
		}
	})

	It("the operator stops: the cluster works, calls are decided, holds stand, and resolutions wait for it", func(ctx SpecContext) {
		w := newWorld(ctx)
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		c := call{id: "k2", body: w.order("9", "11")}
		released := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.holdIs(ctx, released, v1alpha1.HoldHeld)
		w.pay(ctx, call{id: "k3", body: w.order("8", "10")}, 201, allow)
		stays := w.pay(ctx, call{id: "k4", body: w.order("8", "11")}, 409, unknownHold).problem().Hold
		w.holdIs(ctx, stays, v1alpha1.HoldHeld)
		controllers.stop(ctx)

		// The cluster: other objects are made and changed, ours too, and they read as in progress.
		other := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "other"}}
		create(ctx, other)
		other.Data = map[string]string{"changed": "too"}
		Expect(admin.Update(ctx, other)).To(Succeed())
		Expect(admin.Delete(ctx, other)).To(Succeed())
		late := w.paymentTool("late", "/charges")
		create(ctx, late)
		Expect(w.condition(ctx, "late", v1alpha1.ConditionReady, metav1.ConditionTrue)).NotTo(Succeed())
		Expect(w.holds(ctx)).To(HaveLen(2))

		anew := ""
		if kind != bolt { // with bolt, the process that stopped is also the only gateway
			at := func(c call) call { c.at = second; return c }
			before := sent(ctx)
			w.pay(ctx, at(call{id: "k1", body: w.order("9", "10")}), 201, replay)
			w.pay(ctx, at(c), 409, unknownHold)
			w.pay(ctx, at(call{id: "k1", body: w.order("9", "12")}), 422, conflict)
			Expect(sent(ctx)).To(Equal(before))
			w.pay(ctx, at(call{id: "k5", body: w.order("7", "10")}), 201, allow)
			anew = w.pay(ctx, at(call{id: "k6", body: w.order("7", "11")}), 409, unknownHold).problem().Hold
		}
		Expect(w.tryResolve(ctx, resolver, released, release)).To(Succeed())
		if kind != bolt {
			c := c
			c.at = second
			nothingSent(ctx, func() { w.pay(ctx, c, 409, unknownHold) })
		}

		controllers.start(ctx)
		w.holdIs(ctx, released, v1alpha1.HoldResolved)
		Eventually(func(ctx context.Context) int { return w.call(ctx, c).status }).WithContext(ctx).Should(Equal(201))
		Expect(w.charged(ctx, "9")).To(Equal(2))
		w.holdIs(ctx, stays, v1alpha1.HoldHeld)
		w.ready(ctx, "late")
		if anew != "" {
			w.holdIs(ctx, anew, v1alpha1.HoldHeld)
		}
	})

	It("kubectl get holds is a worklist, and kubectl describe tells the story of a hold", func(ctx SpecContext) {
		w := newWorld(ctx)
		w.pay(ctx, call{id: "plan-1", body: w.order("9", "10.50")}, 201, allow)
		c := call{id: "plan-2", body: w.order("9", "11")}
		name := w.pay(ctx, c, 409, unknownHold).problem().Hold
		w.holdIs(ctx, name, v1alpha1.HoldHeld)
		out, err := w.kubectl(ctx, "", "get", "holds")
		Expect(err).NotTo(HaveOccurred())
		lines := strings.Split(strings.TrimSpace(out), "\n")
		Expect(lines).To(HaveLen(2))
		Expect(strings.Fields(lines[0])).To(Equal([]string{"NAME", "TOOL", "INTENT", "AMOUNT", "REASONS", "OVERLAPS", "STATE", "AGE"}))
		Expect(strings.Fields(lines[1])[:9]).To(Equal([]string{name, charge, "plan-2", "11.00", "USD", "ScopeOverlap", "plan-1", "(Succeeded)", "Held"}))

		w.resolve(ctx, name, release)
		w.pay(ctx, c, 201, allow)
		Eventually(func(g Gomega, ctx context.Context) {
			out, err := w.kubectl(ctx, "", "describe", "hold", name)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(out).To(And(
				ContainSubstring(w.caller()+" asked the tool charge to move 11.00 USD to "+w.namespace+`, as the intent "plan-2".`),
				ContainSubstring("ScopeOverlap: another intent is for the same thing"),
				MatchRegexp(`(?m)^ +this +plan-2 +\S+ +charge +11\.00 USD`),
				MatchRegexp(`(?m)^ +other +plan-1 +\S+ +charge +10\.50 USD +Succeeded`),
				ContainSubstring(resolver+" decided Release"),
			))
			_, events, _ := strings.Cut(out, "Events:")
			for _, reason := range []string{"Held", "Resolved", "Sent", "Settled"} {
				g.Expect(strings.Count(events, " "+reason+" ")).To(Equal(1), "%s in %s", reason, events)
			}
		}).WithContext(ctx).Should(Succeed())
	})
})
