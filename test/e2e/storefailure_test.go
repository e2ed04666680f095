// A store's server that is away, slow, full, not to be trusted, or whose clock steps:
// nothing is sent without a durable claim, waits are bounded, and all goes on by itself.

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// refusedWithin is how long a call may take to be refused where the store does not answer.
const refusedWithin = 20 * time.Second

// saysNothingWasSent is in every refusal of a call that was let nowhere.
var saysNothingWasSent = Or(ContainSubstring("othing was sent"), ContainSubstring("sent nothing"))

// set changes a setting of a server that runs, as its own administrator changes it.
func set(ctx context.Context, on memory, name, value string) {
	GinkgoHelper()
	switch s := on.Server.(type) {
	case *servers.Redis:
		_, err := s.Do(ctx, "CONFIG", "SET", name, value)
		Expect(err).NotTo(HaveOccurred())
	case *servers.Postgres:
		Expect(s.Exec(ctx, "ALTER SYSTEM SET "+name+" = '"+value+"'", "SELECT pg_reload_conf()")).To(Succeed())
	}
}

// giveSecret writes what the store's Secret must hold now.
func (w *world) giveSecret(ctx context.Context, on memory) {
	GinkgoHelper()
	Expect(admin.Patch(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: storeSecret}},
		client.RawPatch("application/merge-patch+json", []byte(mustJSON(map[string]any{"stringData": on.secretOf()}))))).To(Succeed())
}

var _ = onServers("A store's server", func() {
	It("S02: settings that lose acknowledged writes are told, and nobody pays meanwhile", func(ctx SpecContext) {
		on, _ := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on)
		known := call{id: "known", body: w.order("1", "10")}
		w.pay(ctx, known, 201, allow)
		Expect(w.storeIs(ctx, v1alpha1.ConditionDurable, metav1.ConditionTrue).Status.Durability.Class).To(Equal(v1alpha1.DurabilitySingleNode))
		rows := map[string][]struct{ name, bad, good, reason, word string }{
			redis: {
				{"maxmemory-policy", "allkeys-lru", "noeviction", "Evicts", "noeviction"},
				{"appendonly", "no", "yes", "NoAppendOnlyFile", "appendonly"},
				{"appendfsync", "everysec", "always", "NotSynced", "appendfsync"},
			},
			postgres: {
				{"fsync", "off", "on", "", "fsync"},
				{"full_page_writes", "off", "on", "", "full_page_writes"},
			},
		}[kind]
		for i, row := range rows {
			By(row.name + " " + row.bad)
			set(ctx, on, row.name, row.bad)
			s := w.storeIs(ctx, v1alpha1.ConditionDurable, metav1.ConditionFalse)
			Expect(s.Status.Durability.Class).To(Equal(v1alpha1.DurabilityAtRisk))
			Expect(s.Status.Durability.Findings).To(ContainElement(And(
				HaveField("Severity", v1alpha1.FindingLoses), HaveField("Message", ContainSubstring(row.word)))))
			if row.reason != "" {
				Expect(s.Status.Durability.Findings).To(ContainElement(HaveField("Reason", row.reason)))
			}
			c := call{id: fmt.Sprint("new-", i), body: w.order(fmt.Sprint(100+i), "10")}
			nothingSent(ctx, func() {
				for _, g := range gateways() {
					c.at = g
					Eventually(func(ctx context.Context) int { return w.call(ctx, call{id: known.id, body: known.body, at: g}).status }).
						WithContext(ctx).WithTimeout(time.Minute).Should(Equal(http.StatusServiceUnavailable))
					p := w.pay(ctx, c, http.StatusServiceUnavailable, deny).problem()
					Expect(p.RetryAfter).To(BeNumerically(">", 0))
					Expect(p.Detail).To(saysNothingWasSent)
				}
			})
			set(ctx, on, row.name, row.good)
			w.storeIs(ctx, v1alpha1.ConditionDurable, metav1.ConditionTrue)
			w.servedEverywhere(ctx, known)
			c.at = ""
			w.pay(ctx, c, 201, allow)
		}

		By("an owner who chose to be warned")
		set(ctx, on, rows[0].name, rows[0].bad)
		w.changeStore(ctx, func(spec *v1alpha1.IdempotencyStoreSpec) { spec.DurabilityPolicy = v1alpha1.DurabilityWarn })
		w.storeIs(ctx, v1alpha1.ConditionDurable, metav1.ConditionFalse)
		w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionTrue)
		w.servedEverywhere(ctx, known)
		w.pay(ctx, call{id: "warned", body: w.order("200", "10")}, 201, allow)
	}, NodeTimeout(4*time.Minute))

	It("S02: with its memory full, or taking no writes, nothing is sent", func(ctx SpecContext) {
		on, proxy := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on)
		w.pay(ctx, call{id: "known", body: w.order("1", "10")}, 201, allow)
		c := call{id: "k1", body: w.order("9", "10")}
		switch s := on.Server.(type) {
		case *servers.Redis:
			info, err := s.Do(ctx, "INFO", "memory")
			Expect(err).NotTo(HaveOccurred())
			_, used, _ := strings.Cut(info, "used_memory:")
			used, _, _ = strings.Cut(used, "\r")
			n, err := strconv.Atoi(used)
			Expect(err).NotTo(HaveOccurred())
			set(ctx, on, "maxmemory", strconv.Itoa(n/2))
		case *servers.Postgres:
			set(ctx, on, "default_transaction_read_only", "on")
			// What a server that went over to be read-only does to its sessions.
			proxy.Cut()
		}
		nothingSent(ctx, func() {
			for _, g := range gateways() {
				c.at = g
				began := time.Now()
				p := w.pay(ctx, c, http.StatusServiceUnavailable, deny).problem()
				Expect(p.RetryAfter).To(BeNumerically(">", 0))
				Expect(time.Since(began)).To(BeNumerically("<", refusedWithin))
			}
		})
		switch s := on.Server.(type) {
		case *servers.Redis:
			set(ctx, on, "maxmemory", "0")
		case *servers.Postgres:
			Expect(s.Exec(ctx, "SET default_transaction_read_only = off", "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")).To(Succeed())
			proxy.Cut()
		}
		p := &payment{call: call{id: c.id, body: c.body}, order: "9"}
		p.drive(ctx, w)
		Expect(p.err).NotTo(HaveOccurred())
		Expect(p.acked).NotTo(BeNil())
		Expect(w.charged(ctx, "9")).To(Equal(1))
	}, NodeTimeout(2*time.Minute))

	It("S04: it is black-holed, and stands still: a bounded wait, 503, and nothing is sent", func(ctx SpecContext) {
		on, proxy := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on)
		known := call{id: "known", body: w.order("1", "10")}
		w.pay(ctx, known, 201, allow)
		for i, away := range []struct {
			name        string
			begin, over func()
		}{
			{"packets are dropped", proxy.BlackHole, proxy.Mend},
			{"the server stands still", func() { Expect(on.Pause()).To(Succeed()) }, func() { Expect(on.Resume()).To(Succeed()) }},
			{"the server is gone", func() { Expect(on.Kill(ctx)).To(Succeed()) }, func() { Expect(on.Start(ctx)).To(Succeed()) }},
		} {
			By(away.name)
			order := fmt.Sprint("9-", i)
			var calls []call
			for _, g := range gateways() {
				for j := range 5 {
					calls = append(calls, call{id: fmt.Sprint("k", i, "-", j), body: w.order(order, fmt.Sprint(10+j)), at: g})
				}
			}
			calls = append(calls, known)
			over := sync.OnceFunc(away.over)
			DeferCleanup(over)
			nothingSent(ctx, func() {
				away.begin()
				began := time.Now()
				for _, got := range w.atOnce(ctx, calls...) {
					Expect(got.err).NotTo(HaveOccurred())
					Expect(got.status).To(Equal(http.StatusServiceUnavailable), got.String())
					Expect(got.header.Get("Retry-After")).NotTo(BeEmpty())
					Expect(got.problem().Detail).To(saysNothingWasSent)
				}
				Expect(time.Since(began)).To(BeNumerically("<", refusedWithin))
			})
			over()
			w.servedEverywhere(ctx, known)
			// What was asked for while it was away may have been written when it came back, and then nobody
			// knows that it was not sent: it is held. But it is never charged twice.
			var payments sync.WaitGroup
			paid := make([]*payment, 5)
			for j := range paid {
				paid[j] = &payment{call: call{id: fmt.Sprint("k", i, "-", j), body: w.order(order, fmt.Sprint(10+j))}, order: order}
				payments.Go(func() { paid[j].drive(ctx, w) })
			}
			payments.Wait()
			acked := 0
			for _, p := range paid {
				Expect(p.err).NotTo(HaveOccurred())
				if p.acked != nil {
					acked++
				}
			}
			Expect(acked).To(BeNumerically("<=", 1))
			Expect(w.charged(ctx, order)).To(Equal(acked))
			w.pay(ctx, call{id: fmt.Sprint("afterwards-", i), body: w.order(fmt.Sprint("after-", i), "10")}, 201, allow)
		}
	}, NodeTimeout(3*time.Minute))

	It("S05: its password is rotated under load, and no call is lost", func(ctx SpecContext) {
		on, proxy := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on)
		const agentsAtWork = 6
		var working sync.WaitGroup
		var mu sync.Mutex
		var payments []*payment
		stop := make(chan struct{})
		end := sync.OnceFunc(func() { close(stop) })
		defer working.Wait()
		defer end()
		for agent := range agentsAtWork {
			working.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					order := fmt.Sprint("order-", agent, "-", n)
					p := &payment{order: order, call: call{id: order, body: w.order(order, "10"), fault: "delay:20ms"}}
					p.drive(ctx, w)
					mu.Lock()
					payments = append(payments, p)
					mu.Unlock()
				}
			})
		}
		passed := func(more int) {
			GinkgoHelper()
			before := len(w.entries(ctx))
			Eventually(func() int { return len(w.entries(ctx)) }).WithContext(ctx).Should(BeNumerically(">=", before+more))
		}
		passed(20)
		rotations := 3
		if kind == postgres {
			rotations = 1
		}
		for i := range rotations {
			By(fmt.Sprint("rotation ", i+1))
			Expect(on.SetPassword(ctx, fmt.Sprint("rotated-", i))).To(Succeed())
			if p, ok := on.Server.(*servers.Postgres); ok {
				// Sessions that are open stay, and the DSN is read again while they do.
				w.giveSecret(ctx, on)
				rotated := time.Now()
				Eventually(func(g Gomega, ctx context.Context) {
					c, err := p.Connect(ctx)
					g.Expect(err).NotTo(HaveOccurred())
					defer func() { _ = c.Close(ctx) }()
					var old int
					g.Expect(c.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast' AND backend_start < $1", rotated).Scan(&old)).To(Succeed())
					// Or they are kept, and only new ones have the new password.
					g.Expect(old == 0 || time.Since(rotated) > 25*time.Second).To(BeTrue())
				}).WithContext(ctx).WithTimeout(time.Minute).WithPolling(time.Second).Should(Succeed())
			} else {
				// The password is read at each connection: some are refused until the Secret is right.
				proxy.Cut()
				w.giveSecret(ctx, on)
			}
			proxy.Cut()
			passed(20)
		}
		end()
		working.Wait()
		servedAfterLoad(ctx, w, payments)
		held := 0
		for _, p := range payments {
			Expect(p.err).NotTo(HaveOccurred())
			if p.acked == nil {
				held++
				continue
			}
			Expect(w.pay(ctx, p.call, 201, replay).body).To(Equal(p.acked.body))
		}
		charges := map[string]int{}
		for _, e := range w.entries(ctx) {
			charges[e.OrderID]++
		}
		for order, n := range charges {
			Expect(n).To(Equal(1), order)
		}
		AddReportEntry("rotated", fmt.Sprintf("%d payments, %d held", len(payments), held))
		Expect(held).To(BeZero(), "a payment was lost to a person's worklist")
		Expect(charges).To(HaveLen(len(payments)))
	}, NodeTimeout(3*time.Minute))

	It("R21: replies are lost after the store has written, and the writer recognises its write", func(ctx SpecContext) {
		on, proxy := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on, unhurried)
		for i, row := range []struct {
			name string
			// times replies are lost: of the claim, or of the settlement.
			times      int
			settlement bool
		}{
			{"claim", 1, false}, {"claim, twice", 2, false}, {"settlement", 1, true}, {"settlement, twice", 2, true},
		} {
			By(row.name)
			// The claim is known by the scope in its record, and the settlement by its key: what asks for a
			// record carries no scope, and what is settled may be written in short.
			order := fmt.Sprint("lost-reply-", i)
			c := call{id: fmt.Sprint("settled-", i), body: w.order(order, "10"), fault: "hold"}
			before := sent(ctx)
			var rule *servers.Rule
			if !row.settlement {
				rule = proxy.On(order, row.times, servers.LoseReply)
			}
			going := w.start(ctx, c)
			w.underWay(ctx, 1)
			if row.settlement {
				rule = proxy.On(c.id, row.times, servers.LoseReply)
			}
			w.letGo(ctx)
			got := <-going
			Expect(got.err).NotTo(HaveOccurred())
			Expect(rule.Met()).To(BeNumerically(">=", 1), "no reply was lost")
			rule.Release()
			Expect([]any{got.status, got.verdict()}).To(Equal([]any{201, allow}), got.String())
			Expect(w.pay(ctx, c, 201, replay).body).To(Equal(got.body))
			Expect(sent(ctx) - before).To(Equal(1))
			Expect(w.charged(ctx, order)).To(Equal(1))
		}
		Expect(w.holds(ctx)).To(BeEmpty())
	}, NodeTimeout(2*time.Minute))

	It("R28: its clock steps forward by 20 minutes while an attempt is in flight, and then by hours", func(ctx SpecContext) {
		on, _ := newMemory(ctx, servers.Options{Clock: true})
		w := newWorldOn(ctx, on, unhurried)
		known := call{id: "known", body: w.order("1", "10")}
		w.pay(ctx, known, 201, allow)
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold"}
		going := w.start(ctx, c)
		w.underWay(ctx, 1)
		Expect(on.SetClock(20 * time.Minute)).To(Succeed())
		// Several sweeps of each gateway later it is still in flight, and stands in the way.
		Consistently(func(g Gomega, ctx context.Context) {
			for _, at := range gateways() {
				doc, err := w.tryPollAt(ctx, at, charge, c.id, "")
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(doc.State).To(Equal("InFlight"))
			}
		}).WithContext(ctx).WithTimeout(4 * time.Second).WithPolling(500 * time.Millisecond).Should(Succeed())
		w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold)
		w.letGo(ctx)
		Expect((<-going).status).To(Equal(201))
		w.pay(ctx, c, 201, replay)
		Expect(w.charged(ctx, "9")).To(Equal(1))

		By("a jump of hours stops mutating calls until the clock is right again")
		nothingSent(ctx, func() {
			Expect(on.SetClock(5 * time.Hour)).To(Succeed())
			for _, g := range gateways() {
				Eventually(func(ctx context.Context) int {
					return w.call(ctx, call{id: "jumped", body: w.order("10", "10"), at: g}).status
				}).WithContext(ctx).Should(Equal(http.StatusServiceUnavailable))
			}
			w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionFalse)
		})
		Expect(on.SetClock(20 * time.Minute)).To(Succeed())
		w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionTrue)
		w.servedEverywhere(ctx, known)
		p := &payment{call: call{id: "jumped", body: w.order("10", "10")}, order: "10"}
		p.drive(ctx, w)
		Expect(p.err).NotTo(HaveOccurred())
		Expect(p.acked).NotTo(BeNil())
		Expect(w.charged(ctx, "10")).To(Equal(1))
	}, NodeTimeout(3*time.Minute))

	It("R33: what came between a refused Reserve and its hold is not covered by the hold's release", func(ctx SpecContext) {
		on, proxy := newMemory(ctx, servers.Options{})
		w := newWorldOn(ctx, on, unhurried)
		scoped := func(id, amount string, orders ...string) call {
			paths := make([]string, len(orders))
			for i, o := range orders {
				paths[i] = fmt.Sprintf(`["account","a","order",%q]`, o)
			}
			return call{id: id, body: fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%s,"scope":[%s]}`, w.namespace, id, amount, strings.Join(paths, ","))}
		}
		first := scoped("in-the-way", "10", "9")
		first.fault, first.at = "hold", other()
		going := w.start(ctx, first)
		w.underWay(ctx, 1)
		// The Reserve is refused, and the hold that follows, with its reason, takes its time on the way.
		rule := proxy.On(string(v1alpha1.HoldScopeOverlap), 1, servers.HoldRequest)
		both := scoped("refused", "20", "9", "10")
		both.at = one()
		refused := w.start(ctx, both)
		Eventually(rule.Met).WithContext(ctx).WithPolling(time.Millisecond).Should(Equal(1))
		w.letGo(ctx)
		Expect((<-going).status).To(Equal(201))
		third := scoped("third", "30", "10")
		third.at = other()
		Expect(w.call(ctx, third).status).To(Equal(201))
		rule.Release()
		got := <-refused
		Expect(got.verdict()).To(Equal(unknownHold), got.String())
		hold := got.problem().Hold
		h := w.holdIs(ctx, hold, v1alpha1.HoldHeld)
		Expect(h.Spec.Matches).To(ConsistOf(HaveField("IntentID", first.id)), "the refused Reserve saw more than it should have")
		w.resolve(ctx, hold, release)
		nothingSent(ctx, func() {
			p := w.pay(ctx, both, 409, unknownHold).problem()
			Expect(p.Hold).NotTo(Equal(hold))
			Expect(w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld).Spec.Matches).To(ContainElement(HaveField("IntentID", third.id)))
		})
		Expect(w.charged(ctx, both.id)).To(BeZero())
	}, NodeTimeout(2*time.Minute))
})
