// What overlapping means, driven from outside: the relation of scopes by that of lineages.

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/utils/ptr"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// where is a scope or a lineage as a call's body gives it.
type where []string

func order(n string, more ...string) where {
	return append(where{"account", "a", "order", n}, more...)
}

var _ = Describe("The relation of two payments", func() {
	// pair is a payment by its scope and lineage. Bodies differ in these alone.
	pair := func(w *world, id, amount string, lineage where, scope ...where) call {
		GinkgoHelper()
		body := map[string]any{"accountId": w.namespace, "orderId": "9", "amount": amount, "scope": scope}
		if lineage != nil {
			body["lineage"] = lineage
		}
		data, err := json.Marshal(body)
		Expect(err).NotTo(HaveOccurred())
		return call{id: id, body: string(data)}
	}
	first := []where{order("9"), order("10")}
	at := where{"flow", "s", "p", "q"}

	// In row n of a table everything is another account and another session.
	inRow := func(n int, paths ...where) []where {
		out := make([]where, len(paths))
		for i, p := range paths {
			if p != nil {
				out[i] = append(where{p[0], fmt.Sprint(p[1], n)}, p[2:]...)
			}
		}
		return out
	}

	scopes := []struct {
		name   string
		scopes [][]where
	}{
		{"equal", [][]where{first, {order("10"), order("9")}}},
		{"partial", [][]where{
			{order("9")}, {order("9"), order("11")}, {order("9"), order("10"), order("11")},
			{{"account", "a"}}, {order("9", "item", "1")},
		}},
		{"disjoint", [][]where{{order("8")}, {{"account", "b"}}, {order("90")}}},
	}
	lineages := []struct {
		name     string
		lineages []where
	}{
		{"same", []where{at}},
		{"ancestor", []where{{"flow", "s"}, {"flow", "s", "p", "q", "r", "t"}}},
		{"unrelated", []where{{"flow", "s", "x", "y"}, {"flow", "t", "p", "q"}, nil}},
	}
	// Whoever comes second calls, registers over HTTP, or has a PaymentIntent: the verdict is the same.
	path := func(p where) string { return strings.Join(p, "/") }
	paths := func(list []where) (out []string) {
		for _, p := range list {
			out = append(out, path(p))
		}
		return out
	}
	for _, scope := range scopes {
		for _, lineage := range lineages {
			It(fmt.Sprintf("scope %s, lineage %s", scope.name, lineage.name), func(ctx SpecContext) {
				w := newWorld(ctx, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
					budget.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: ptr.To(int32(100)), PerCaller: ptr.To(int32(100))}
				})
				free := scope.name == "disjoint" && lineage.name == "unrelated"
				var reasons []v1alpha1.HoldReason
				if scope.name != "disjoint" {
					reasons = append(reasons, v1alpha1.HoldScopeOverlap)
				}
				if lineage.name != "unrelated" {
					reasons = append(reasons, v1alpha1.HoldLineageOverlap)
				}
				// held looks at the hold of a second intent.
				held := func(hold string, row int, what string) {
					GinkgoHelper()
					h := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
					Expect(h.Spec.Reasons).To(ConsistOf(reasons), what)
					Expect(h.Spec.Matches).To(HaveLen(1), what)
					Expect(h.Spec.Matches[0].IntentID).To(Equal(fmt.Sprint("first-", row)), what)
				}
				var shown []func()
				row := 0
				for _, s := range scope.scopes {
					for _, l := range lineage.lineages {
						for _, how := range []string{"call", "PUT", "PaymentIntent"} {
							row++
							what := fmt.Sprintf("row %d: %s, scope %v, lineage %v", row, how, s, l)
							had, from := inRow(row, first...), inRow(row, at, l)
							paid := w.pay(ctx, pair(w, fmt.Sprint("first-", row), "10", from[0], had...), 201, allow)
							before := len(w.entries(ctx))
							// Another amount, so that nothing is the very same call.
							second := said{id: fmt.Sprint("second-", row), amount: "11", scope: paths(inRow(row, s...)), lineage: path(from[1])}
							// The very same call under another ID gets the first one's answer, and no other does.
							third := second
							third.id, third.amount = fmt.Sprint("third-", row), "10"
							third.fingerprint = w.poll(ctx, charge, fmt.Sprint("first-", row), "").Fingerprint
							// A call says its fingerprint by its body, and a registration outright.
							same := scope.name == "equal" && lineage.name == "same" && (how != "call" || fmt.Sprint(s) == fmt.Sprint(first))
							switch {
							case how == "PaymentIntent":
								n, name := row, fmt.Sprint("second-", row)
								create(ctx, w.saidAs(name, second))
								if same {
									create(ctx, w.saidAs(fmt.Sprint("third-", row), third))
								}
								shown = append(shown, func() {
									if free {
										w.saysOf(ctx, name, v1alpha1.IntentAllow, v1alpha1.IntentRegistered)
										return
									}
									held(w.saysOf(ctx, name, v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld).Status.Hold, n, what)
									if same {
										w.saysOf(ctx, fmt.Sprint("third-", n), v1alpha1.IntentReplay, "")
									}
								})
							case how == "PUT" && free:
								Expect(w.put(ctx, second).verdict()).To(Equal(allow), what)
							case how == "PUT":
								p := w.put(ctx, second).problem()
								Expect(p.Verdict).To(Equal(unknownHold), what)
								held(p.Hold, row, what)
								got := w.put(ctx, third)
								if same {
									Expect(got.verdict()).To(Equal(replay), what)
									Expect(got.header.Get("Holdfast-Intent")).To(Equal(fmt.Sprint("first-", row)), what)
								} else {
									Expect(got.verdict()).To(Equal(unknownHold), what)
								}
							case free:
								w.pay(ctx, pair(w, second.id, "11", from[1], inRow(row, s...)...), 201, allow)
								Expect(w.entries(ctx)).To(HaveLen(before+1), what)
								before++
							default:
								held(w.pay(ctx, pair(w, second.id, "11", from[1], inRow(row, s...)...), 409, unknownHold).problem().Hold, row, what)
								again := pair(w, third.id, "10", from[1], inRow(row, s...)...)
								if same {
									got := w.pay(ctx, again, 201, replay)
									Expect(got.body).To(Equal(paid.body), what)
									Expect(got.header.Get("Holdfast-Intent")).To(Equal(fmt.Sprint("first-", row)), what)
								} else {
									w.pay(ctx, again, 409, unknownHold)
								}
							}
							Expect(w.entries(ctx)).To(HaveLen(before), what)
						}
					}
				}
				Expect(row).To(Equal(3 * len(scope.scopes) * len(lineage.lineages)))
				before := len(w.entries(ctx))
				for _, look := range shown {
					look()
				}
				Expect(w.entries(ctx)).To(HaveLen(before))
			})
		}
	}

	It("the very same call is held where the budget says so", func(ctx SpecContext) {
		w := newWorld(ctx, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			budget.Spec.Overlap = &v1alpha1.OverlapSpec{ExactMatch: v1alpha1.ExactMatchHold}
		})
		w.pay(ctx, pair(w, "k1", "10", at, first...), 201, allow)
		Expect(w.pay(ctx, pair(w, "k2", "10", at, first...), 409, unknownHold).problem().Reason).To(Equal("ExactMatch"))
		Expect(w.entries(ctx)).To(HaveLen(1))
	})

	It("lineages are not compared where the budget says so", func(ctx SpecContext) {
		w := newWorld(ctx, func(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
			budget.Spec.Overlap = &v1alpha1.OverlapSpec{Lineage: v1alpha1.LineageIgnore}
		})
		w.pay(ctx, pair(w, "k1", "10", at, order("9")), 201, allow)
		w.pay(ctx, pair(w, "k2", "10", at, order("8")), 201, allow)
		w.pay(ctx, pair(w, "k3", "11", at, order("9")), 409, unknownHold)
		Expect(w.entries(ctx)).To(HaveLen(2))
	})

	It("a payment that is still in flight stands in the way", func(ctx SpecContext) {
		w := newWorld(ctx, unhurried)
		c := pair(w, "k1", "10", at, first...)
		c.fault = "hold"
		going := w.start(ctx, c)
		w.underWay(ctx, 1)
		p := w.pay(ctx, pair(w, "k2", "11", nil, order("9")), 409, unknownHold).problem()
		Expect(p.OwnMatches).To(HaveLen(1))
		Expect(p.OwnMatches[0].State).To(Equal("InFlight"))
		Expect(w.pay(ctx, pair(w, "k1", "11", at, first...), 422, conflict).problem().Reason).To(Equal("request"))
		w.letGo(ctx)
		Expect((<-going).status).To(Equal(201))
		Expect(w.entries(ctx)).To(HaveLen(1))
	})

	It("another caller's payment stands in the way, and nobody learns of it", func(ctx SpecContext) {
		w := newWorld(ctx)
		w.serviceAccount(ctx, "other", "holdfast-agent")
		secret := "k-of-the-first-caller"
		w.pay(ctx, pair(w, secret, "987.65", at, first...), 201, allow)
		c := pair(w, "k2", "11", nil, order("9"))
		c.token = w.tokenOf(ctx, "other", audience)
		got := w.pay(ctx, c, 409, unknownHold)
		Expect(got.problem().OwnMatches).To(BeEmpty())
		Expect(got.body).NotTo(Or(ContainSubstring(secret), ContainSubstring("987.65")))
		// The same ID of another caller is another intent.
		c = pair(w, secret, "987.65", nil, order("8"))
		c.token = w.tokenOf(ctx, "other", audience)
		w.pay(ctx, c, 201, allow)
		Expect(w.entries(ctx)).To(HaveLen(2))
	})
})
