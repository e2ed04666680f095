// Many intents in the cluster: written down as PaymentIntents, some of them held. Lists and
// watches must stay quick, the manager small, and etcd must hold it.
//
// How many is given by the environment; without it a few are made, so that the way is tested.
// Figures of twenty thousand are in docs/gitops.md.

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	intentsEnv, heldEnv = "HOLDFAST_E2E_INTENTS", "HOLDFAST_E2E_HELD"
	// most is what a manager may take, in MiB.
	most = 256
	// makers create objects side by side.
	makers = 16
)

// howMany is a number from the environment.
func howMany(name string, without int) int {
	GinkgoHelper()
	text := os.Getenv(name)
	if text == "" {
		return without
	}
	n, err := strconv.Atoi(text)
	Expect(err).NotTo(HaveOccurred(), name)
	return n
}

// memory are the MiB that a process has, and had at the most.
func memoryOf(g gatewayProcess) (now, peak int) {
	GinkgoHelper()
	pid, err := all.Processes().PID(string(g))
	Expect(err).NotTo(HaveOccurred())
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	Expect(err).NotTo(HaveOccurred())
	for _, of := range []struct {
		field string
		into  *int
	}{{"VmRSS:", &now}, {"VmHWM:", &peak}} {
		_, after, found := strings.Cut(string(text), of.field)
		Expect(found).To(BeTrue(), of.field)
		kib, err := strconv.Atoi(strings.Fields(after)[0])
		Expect(err).NotTo(HaveOccurred())
		*of.into = kib / 1024
	}
	return now, peak
}

// etcdMiB is the size of etcd's database, as the API server sees it.
func etcdMiB(ctx context.Context) int {
	GinkgoHelper()
	config, err := all.RESTConfig()
	Expect(err).NotTo(HaveOccurred())
	c, err := kubernetes.NewForConfig(config)
	Expect(err).NotTo(HaveOccurred())
	text, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	Expect(err).NotTo(HaveOccurred())
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(line, []byte("apiserver_storage_size_bytes{")) {
			fields := strings.Fields(string(line))
			size, err := strconv.ParseFloat(fields[len(fields)-1], 64)
			Expect(err).NotTo(HaveOccurred())
			return int(size / (1 << 20))
		}
	}
	Fail("the API server does not say how large etcd is")
	return 0
}

// figure is told also when all is well: it is what the drill is made for.
func figure(format string, args ...any) {
	GinkgoHelper()
	AddReportEntry(fmt.Sprintf(format, args...))
}

var _ = Describe("Many intents", Label("drill"), func() {
	It("are written down and held, and the worklist stays quick", func(ctx SpecContext) {
		intents, heldOnes := howMany(intentsEnv, 200), howMany(heldEnv, 20)
		w := newWorld(ctx, func(budget *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
			n := int32(min(heldOnes+10, 10_000))
			budget.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: &n, PerCaller: &n}
			budget.Spec.MaxRegistered = &v1alpha1.MaxRegisteredSpec{PerCaller: ptr.To(int32(min(intents, 100_000)))}
			tool.Spec.Idempotency.TTL = &metav1.Duration{Duration: 48 * time.Hour}
		})
		before := etcdMiB(ctx)
		// What stands in the way of the held ones: each is for an order of this account.
		w.pay(ctx, call{id: "paid", body: fmt.Sprintf(`{"accountId":%q,"orderId":"0","amount":1,"scope":[["account",%q]]}`, w.namespace, w.namespace)}, 201, allow)
		intent := func(i int) *v1alpha1.PaymentIntent {
			scope := fmt.Sprintf("account/%s-%d/order/%d", w.namespace, i, i)
			if i < heldOnes {
				scope = fmt.Sprintf("account/%s/order/%d", w.namespace, i)
			}
			return &v1alpha1.PaymentIntent{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprintf("intent-%05d", i)},
				Spec: v1alpha1.PaymentIntentSpec{
					ToolRef: v1alpha1.ToolReference{Name: charge}, Caller: w.caller(), IntentID: fmt.Sprintf("intent-%05d", i),
					Scope: []v1alpha1.HoldPath{v1alpha1.HoldPath(scope)}, Amount: &v1alpha1.Money{Value: "10.50", Currency: "USD"}, Recipient: w.namespace,
				},
			}
		}
		registered := func(ctx context.Context) (open, held int) {
			var list v1alpha1.PaymentIntentList
			Expect(admin.List(ctx, &list, client.InNamespace(w.namespace))).To(Succeed())
			for i := range list.Items {
				switch list.Items[i].Status.State {
				case v1alpha1.IntentRegistered:
					open++
				case v1alpha1.IntentHeld:
					held++
				}
			}
			return open, held
		}
		began := time.Now()
		numbers := make(chan int)
		var group sync.WaitGroup
		for range makers {
			group.Go(func() {
				defer GinkgoRecover()
				for i := range numbers {
					Expect(admin.Create(ctx, intent(i))).To(Succeed())
				}
			})
		}
		for i := range intents {
			numbers <- i
		}
		close(numbers)
		group.Wait()
		made := time.Since(began)
		Eventually(func(ctx context.Context) [2]int {
			open, held := registered(ctx)
			return [2]int{open, held}
		}).WithContext(ctx).WithTimeout(30 * time.Minute).WithPolling(time.Second).Should(Equal([2]int{intents - heldOnes, heldOnes}))
		figure("%d intents were made in %s, and all registered after %s", intents, made, time.Since(began))
		Eventually(func(ctx context.Context) int {
			n := 0
			for _, h := range w.holds(ctx) {
				if h.Status.State == v1alpha1.HoldHeld {
					n++
				}
			}
			return n
		}).WithContext(ctx).WithTimeout(5 * time.Minute).WithPolling(time.Second).Should(Equal(heldOnes))

		// Lists: of everything, of a page, and as people see them.
		timed := func(what string, within time.Duration, f func()) {
			GinkgoHelper()
			began := time.Now()
			f()
			took := time.Since(began)
			figure("%s: %s", what, took.Round(time.Millisecond))
			Expect(took).To(BeNumerically("<", within), what)
		}
		timed("list all intents", 30*time.Second, func() { registered(ctx) })
		timed("list 500 intents", 5*time.Second, func() {
			Expect(admin.List(ctx, &v1alpha1.PaymentIntentList{}, client.InNamespace(w.namespace), client.Limit(500))).To(Succeed())
		})
		timed("list all holds", 10*time.Second, func() { Expect(w.holds(ctx)).To(HaveLen(heldOnes)) })
		kubectl := func(args ...string) {
			GinkgoHelper()
			out, err := w.kubectl(ctx, "", args...)
			Expect(err).NotTo(HaveOccurred(), out)
		}
		timed("kubectl get holds", 20*time.Second, func() { kubectl("get", "holds", "--field-selector=status.state=Held") })
		timed("kubectl get pint", time.Minute, func() { kubectl("get", "pint") })

		// Watches: how long news takes.
		config, err := all.RESTConfig()
		Expect(err).NotTo(HaveOccurred())
		watching, err := client.NewWithWatch(config, client.Options{Scheme: admin.Scheme()})
		Expect(err).NotTo(HaveOccurred())
		watch, err := watching.Watch(ctx, &v1alpha1.PaymentHoldList{}, client.InNamespace(w.namespace))
		Expect(err).NotTo(HaveOccurred())
		defer watch.Stop()
		seen := func(ok func(*v1alpha1.PaymentHold) bool) {
			GinkgoHelper()
			end := time.After(time.Minute)
			for {
				select {
				case e := <-watch.ResultChan():
					if h, is := e.Object.(*v1alpha1.PaymentHold); is && ok(h) {
						return
					}
				case <-end:
					Fail("no news within a minute")
				}
			}
		}
		var name string
		timed("a new hold is seen by a watch", 30*time.Second, func() {
			name = w.pay(ctx, call{id: "late", body: w.order("late", "11")}, 409, unknownHold).problem().Hold
			seen(func(h *v1alpha1.PaymentHold) bool { return h.Name == name && h.Status.State == v1alpha1.HoldHeld })
		})
		timed("a resolution is taken", 30*time.Second, func() {
			Expect(w.tryResolve(ctx, resolver, name, resolution{Decision: "Reject"})).To(Succeed())
			seen(func(h *v1alpha1.PaymentHold) bool { return h.Name == name && h.Status.State == v1alpha1.HoldResolved })
		})
		timed("a call while all that is there", 10*time.Second, func() {
			// Another account: nothing stands in its way.
			w.pay(ctx, call{id: "free", body: `{"accountId":"free-` + w.namespace + `","orderId":"1","amount":3}`}, 201, allow)
		})
		timed("a registered intent that is paid shows it", 2*time.Minute, func() {
			last := intent(intents - 1)
			// What this process pays it shows at once; what another gateway pays it finds in turn.
			w.pay(ctx, call{id: last.Spec.IntentID, at: controllers, body: fmt.Sprintf(
				`{"accountId":%q,"orderId":"1","amount":"10.50","scope":[["account","%s-%d","order","%d"]]}`, w.namespace, w.namespace, intents-1, intents-1)}, 201, allow)
			Eventually(func(ctx context.Context) (v1alpha1.IntentState, error) {
				var o v1alpha1.PaymentIntent
				err := admin.Get(ctx, types.NamespacedName{Namespace: w.namespace, Name: last.Name}, &o)
				return o.Status.State, err
			}).WithContext(ctx).WithTimeout(10 * time.Minute).Should(Equal(v1alpha1.IntentSucceeded))
		})
		for _, g := range gateways() {
			now, peak := memoryOf(g)
			figure("%s: %d MiB, at the most %d MiB", g, now, peak)
			Expect(peak).To(BeNumerically("<", most), "%s", g)
		}
		figure("etcd: %d MiB, before %d MiB", etcdMiB(ctx), before)
	}, SpecTimeout(time.Hour))
})
