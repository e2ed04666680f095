// A store that forgot: nobody pays until a person has accepted it, and then nobody pays
// what may have been paid before.

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// loss is one way to lose a memory.
type loss struct {
	name string
	// prepare is done once a first payment is remembered, lose after the later ones.
	prepare, lose func(ctx context.Context, l *loss)
	// keepsFirst: the first payment is still remembered.
	keepsFirst bool

	on      memory
	proxy   *servers.Proxy
	standby servers.Server
	copied  string

	w              *world
	first, paid    call
	held           call
	hold           string
	firstBody      string
	epoch, holdNow string
}

// forget removes everything on a server that runs.
func forget(ctx context.Context, l *loss) {
	GinkgoHelper()
	switch s := l.on.Server.(type) {
	case *servers.Redis:
		_, err := s.Do(ctx, "FLUSHALL")
		Expect(err).NotTo(HaveOccurred())
	case *servers.Postgres:
		Expect(s.Exec(ctx, "DROP SCHEMA "+l.w.schema()+" CASCADE")).To(Succeed())
	}
}

func wipe(ctx context.Context, l *loss) {
	GinkgoHelper()
	Expect(l.on.Kill(ctx)).To(Succeed())
	Expect(l.on.Wipe()).To(Succeed())
	Expect(l.on.Start(ctx)).To(Succeed())
}

func backUp(ctx context.Context, l *loss) {
	GinkgoHelper()
	l.copied = filepath.Join(serversDir, "copy-"+l.w.namespace)
	DeferCleanup(os.RemoveAll, l.copied)
	Expect(l.on.Stop(ctx)).To(Succeed())
	Expect(l.on.Save(l.copied)).To(Succeed())
	Expect(l.on.Start(ctx)).To(Succeed())
	l.w.servedEverywhere(ctx, l.first)
}

func restore(ctx context.Context, l *loss) {
	GinkgoHelper()
	Expect(l.on.Stop(ctx)).To(Succeed())
	Expect(l.on.Restore(l.copied)).To(Succeed())
	Expect(l.on.Start(ctx)).To(Succeed())
}

// follow starts a server that has all that was written until now, and nothing later.
func follow(ctx context.Context, l *loss) {
	GinkgoHelper()
	dir, err := os.MkdirTemp(serversDir, "standby-")
	Expect(err).NotTo(HaveOccurred())
	Expect(os.Chmod(dir, 0o755)).To(Succeed())
	o := servers.Options{Dir: filepath.Join(dir, "server")}
	switch s := l.on.Server.(type) {
	case *servers.Redis:
		// Replicas that are not waited for are a finding, so they are only attached for a moment: what they
		// have then is what a replica that lags has.
		replica, err := servers.NewRedis(ctx, o)
		Expect(err).NotTo(HaveOccurred())
		l.standby = replica
		Expect(replica.SetPassword(ctx, s.Password())).To(Succeed())
		Expect(replica.Follow(ctx, s)).To(Succeed())
		Eventually(func(ctx context.Context) error {
			err := replica.Following(ctx)
			n, errSize := replica.Do(ctx, "DBSIZE")
			if err == nil && errSize == nil && n == "0" {
				err = errors.New("the replica is empty")
			}
			return errors.Join(err, errSize)
		}).WithContext(ctx).Should(Succeed())
		Expect(replica.Promote(ctx)).To(Succeed())
	case *servers.Postgres:
		standby, err := s.Standby(ctx, o)
		Expect(err).NotTo(HaveOccurred())
		l.standby = standby
		Expect(standby.Stop(ctx)).To(Succeed())
	}
	DeferCleanup(func(ctx context.Context) { Expect(l.standby.Remove(ctx)).To(Succeed()) })
	l.w.storeIs(ctx, v1alpha1.ConditionDurable, metav1.ConditionTrue)
	l.w.servedEverywhere(ctx, l.first)
}

// failOver leads the store's address to the standby.
func failOver(ctx context.Context, l *loss) {
	GinkgoHelper()
	Expect(l.on.Kill(ctx)).To(Succeed())
	if p, ok := l.standby.(*servers.Postgres); ok {
		Expect(p.Start(ctx)).To(Succeed())
		Expect(p.Promote(ctx)).To(Succeed())
	}
	l.proxy.Lead(net.JoinHostPort("127.0.0.1", strconv.Itoa(l.standby.Port())))
}

func nothing(context.Context, *loss) {}

var _ = onServers("A store that forgot", long, func() {
	It("S01: acknowledged writes are lost, and nobody pays until a person accepts it", func(ctx SpecContext) {
		losses := []*loss{
			{name: "everything is removed", prepare: nothing, lose: forget},
			{name: "the volume is wiped", prepare: nothing, lose: wipe},
			{name: "an older copy is restored", prepare: backUp, lose: restore, keepsFirst: true},
			{name: "a replica that lags takes over", prepare: follow, lose: failOver, keepsFirst: true},
		}
		for _, l := range losses {
			By("before: " + l.name)
			l.on, l.proxy = newMemory(ctx, servers.Options{})
			l.w = newWorldOn(ctx, l.on)
			l.first = call{id: "first", body: l.w.order("1", "10")}
			l.firstBody = l.w.pay(ctx, l.first, 201, allow).body
			l.prepare(ctx, l)
			// On every gateway something was acknowledged that will be lost.
			for i, g := range gateways() {
				l.paid = call{id: fmt.Sprint("paid-", i), body: l.w.order("9", fmt.Sprint(10+i)), at: g}
				if i == 0 {
					l.w.pay(ctx, l.paid, 201, allow)
					continue
				}
				l.held = l.paid
				l.hold = l.w.pay(ctx, l.held, 409, unknownHold).problem().Hold
			}
			l.paid = call{id: "paid-0", body: l.w.order("9", "10")}
			l.held.at = ""
			l.w.holdIs(ctx, l.hold, v1alpha1.HoldHeld)
			l.epoch = l.w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue).Status.Epoch
		}
		nothingSent(ctx, func() {
			for _, l := range losses {
				By(l.name)
				l.lose(ctx, l)
				// From the first question on, whatever is asked.
				for _, c := range []call{l.paid, l.held, {id: "new", body: l.w.order("2", "10")}} {
					l.w.refusedEverywhere(ctx, c, "memory_lost")
				}
			}
			for _, l := range losses {
				By("accepted: " + l.name)
				s := l.w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse)
				Expect(s.Status.Epoch).To(Equal(l.epoch))
				Eventually(l.w.metric("holdfast_store_refused", `reason="memory_lost"`)).WithContext(ctx).Should(BeEquivalentTo(len(gateways())))
				l.w.refusedEverywhere(ctx, l.paid, "memory_lost")
				// R35: somebody releases what the lost memory held.
				Expect(l.w.tryResolve(ctx, resolver, l.hold, release)).To(Succeed())
				l.w.changeStore(ctx, func(spec *v1alpha1.IdempotencyStoreSpec) { spec.AcceptEpoch = l.epoch })
			}
			for _, l := range losses {
				By("afterwards: " + l.name)
				s := l.w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue)
				Expect(s.Status.Epoch).NotTo(Equal(l.epoch))
				l.w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionTrue)
				Eventually(l.w.metric("holdfast_store_refused")).WithContext(ctx).Should(BeZero())
				for _, g := range gateways() {
					Eventually(func(ctx context.Context) string {
						c := l.paid
						c.at = g
						return l.w.call(ctx, c).verdict()
					}).WithContext(ctx).Should(Equal(unknownHold), string(g))
				}
				// What was paid, what was held, and what nobody knows: all may have been paid before.
				for _, c := range []call{l.paid, l.held, {id: "other", body: l.w.order("9", "10")}, {id: "new", body: l.w.order("2", "10")}} {
					p := l.w.pay(ctx, c, 409, unknownHold).problem()
					Expect(p.Hold).NotTo(Equal(l.hold), c.id)
					l.holdNow = p.Hold
				}
				if l.keepsFirst {
					Expect(l.w.pay(ctx, l.first, 201, replay).body).To(Equal(l.firstBody))
				} else {
					l.w.pay(ctx, l.first, 409, unknownHold)
				}
			}
		})
		for _, l := range losses {
			By("a person decides: " + l.name)
			// R35: the release of the lost memory's hold is not taken, however long it waits.
			l.w.pay(ctx, l.held, 409, unknownHold)
			// What a person knows to be new is paid once.
			l.w.resolve(ctx, l.holdNow, release)
			l.w.pay(ctx, call{id: "new", body: l.w.order("2", "10")}, 201, allow)
			l.w.pay(ctx, call{id: "new", body: l.w.order("2", "10")}, 201, replay)
			for _, order := range []string{"1", "2", "9"} {
				Expect(l.w.charged(ctx, order)).To(Equal(1), "%s: order %s", l.name, order)
			}
		}
	}, NodeTimeout(5*time.Minute))

	It("S01: the provider is asked by its key about what comes first after the loss", func(ctx SpecContext) {
		on, _ := newMemory(ctx, servers.Options{})
		l := &loss{on: on}
		w := newWorldOn(ctx, on, asks(v1alpha1.FinalitySettleAfter))
		l.w = w
		paid := call{id: "paid", body: w.order("9", "10")}
		w.pay(ctx, paid, 201, allow)
		reference := w.entries(ctx)[0].ID
		epoch := w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue).Status.Epoch
		forget(ctx, l)
		w.refusedEverywhere(ctx, paid, "memory_lost")
		w.storeIs(ctx, v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse)
		w.changeStore(ctx, func(spec *v1alpha1.IdempotencyStoreSpec) { spec.AcceptEpoch = epoch })
		w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionTrue)
		before := sent(ctx)
		fresh := call{id: "fresh", body: w.order("10", "10")}
		for _, g := range gateways() {
			Eventually(func(ctx context.Context) string {
				c := fresh
				c.at = g
				return w.call(ctx, c).verdict()
			}).WithContext(ctx).Should(Equal(unknownHold), string(g))
		}
		// First calls at the same moment make one record, and are held until the provider has answered.
		for _, got := range w.atOnce(ctx, slices.Repeat([]call{paid}, 8)...) {
			Expect(got.verdict()).To(BeElementOf(unknownHold, replay), got.String())
		}
		doc := w.becomes(ctx, "paid", "Succeeded")
		Expect(doc.ProviderReference).To(Equal(reference))
		Expect(doc.Attempts).To(HaveLen(1))
		got := w.pay(ctx, paid, 200, replay)
		Expect(got.header.Get("Holdfast-Answer-From")).To(Equal("status-check"))
		Expect(got.body).To(ContainSubstring(reference))
		w.pay(ctx, call{id: "again", body: paid.body}, 409, unknownHold)
		// That there is no payment under a key proves nothing: it may have been paid under another one.
		for _, a := range w.answers(ctx, "fresh", 4) {
			Expect(a.Outcome).To(Equal("Failed"))
		}
		w.pay(ctx, fresh, 409, unknownHold)
		Expect(sent(ctx)).To(Equal(before))
		Expect(w.charged(ctx, "9")).To(Equal(1))
	}, NodeTimeout(3*time.Minute))
})
