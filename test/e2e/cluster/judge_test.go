// The judge. After each drill it asks the provider's ledger what the money did, and the
// gateways, from outside, what they say of each intent: each was charged at most once, what
// an agent was told as paid was paid and is answered with the same bytes again, what was held
// is held and shown, and nothing is undecided.

package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/test/agent"
)

const (
	providerNamespace = "drill-provider"
	providerName      = "provider"
	// providerURL is what the tools call.
	providerURL = "http://" + providerName + "." + providerNamespace + ".svc:8080"
)

// providerAt is where the judge asks the provider.
var providerAt string

// startProvider runs it as a pod that is never started again: a ledger that began anew would
// know of nothing.
func startProvider(ctx context.Context) {
	GinkgoHelper()
	ensure(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name:        providerNamespace,
		Labels:      map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
		Annotations: map[string]string{v1alpha1.GroupName + "/allow-upstream-from": "*"},
	}})
	pod := restricted(metav1.ObjectMeta{Namespace: providerNamespace, Name: providerName}, "provider", []string{"--listen=:8080"})
	providerAt = "http://" + expose(ctx, pod)
	Eventually(func(ctx context.Context) error { _, err := readLedger(ctx); return err }).WithContext(ctx).Should(Succeed())
}

// entry is a charge.
type entry struct {
	ID        string `json:"id"`
	AccountID string `json:"accountId"`
	OrderID   string `json:"orderId"`
	Amount    string `json:"amount"`
}

type ledger struct {
	Entries  []entry `json:"entries"`
	InFlight struct {
		Now int `json:"now"`
	} `json:"inFlight"`
}

func readLedger(ctx context.Context) (ledger, error) {
	var l ledger
	return l, ask(ctx, http.MethodGet, providerAt+"/ledger", &l)
}

// charges counts what this world was charged for each order and amount.
func (w *world) charges(ctx context.Context) map[string]int {
	GinkgoHelper()
	var l ledger
	Eventually(func(ctx context.Context) (err error) {
		l, err = readLedger(ctx)
		return err
	}).WithContext(ctx).Should(Succeed())
	n := map[string]int{}
	for _, e := range l.Entries {
		if e.AccountID == w.namespace {
			n[e.OrderID]++
		}
	}
	return n
}

// underWay waits until at least n payments are being worked on at the provider.
func underWay(ctx context.Context, n int) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) (int, error) {
		l, err := readLedger(ctx)
		return l.InFlight.Now, err
	}).WithContext(ctx).WithPolling(20 * time.Millisecond).Should(BeNumerically(">=", n))
}

// judged is what came out.
type judged struct {
	report
	charges int
	held    int
	// heldCharged are those of the held that were charged: their attempt was at the provider when whoever
	// had sent it lost it.
	heldCharged int
	// late are those that an agent was told nobody knows about, and that were known to be paid later.
	late int
}

// judge ends the runs, judges their intents and what stands in the world since before, and
// puts what callers saw on the table under the drill's name.
func (w *world) judge(ctx context.Context, drill string, runs ...*run) judged {
	GinkgoHelper()
	var all judged
	var intents []intent
	for i, r := range runs {
		saw := r.end(ctx)
		Expect(saw.Intents).To(HaveLen(saw.Orders), r.pod)
		intents = append(intents, saw.Intents...)
		if i == 0 {
			all.report = saw
		} else {
			all.add(saw)
		}
	}
	all.Intents = intents
	// What nobody heard the end of: a request of a gateway that died may still be at the provider.
	Eventually(func(ctx context.Context) (int, error) {
		l, err := readLedger(ctx)
		return l.InFlight.Now, err
	}).WithContext(ctx).Should(BeZero())
	var (
		mu      sync.Mutex
		faults  []error
		paid    = map[string]bool{}
		working sync.WaitGroup
		turns   = make(chan struct{}, 12)
	)
	for _, i := range intents {
		turns <- struct{}{}
		working.Go(func() {
			defer func() { <-turns }()
			held, err := w.decided(ctx, i)
			mu.Lock()
			defer mu.Unlock()
			faults = append(faults, err)
			if held {
				all.held++
				return
			}
			paid[i.Order] = true
			if i.End != agent.Paid {
				all.late++
			}
		})
	}
	working.Wait()
	Expect(errors.Join(faults...)).NotTo(HaveOccurred())

	// The ledger is read last, so that what the judge's own calls could have moved is in it.
	charges := w.charges(ctx)
	asked := map[string]bool{}
	for _, i := range intents {
		asked[i.Order] = true
		all.charges += charges[i.Order]
		Expect(charges[i.Order]).To(BeNumerically("<=", 1), "%s was charged twice", i.ID)
		if !paid[i.Order] {
			all.heldCharged += charges[i.Order]
		} else {
			Expect(charges[i.Order]).To(Equal(1), "%s is told that it was paid", i.ID)
		}
	}
	for order := range charges {
		for _, r := range runs {
			if strings.HasPrefix(order, r.prefix+"-") {
				Expect(asked).To(HaveKey(order), "it was charged, and nobody asked for it")
			}
		}
	}
	w.stands(ctx)
	tell(drill, w.on, all)
	return all
}

// decided says what became of one intent, which must not be undecided.
func (w *world) decided(ctx context.Context, i intent) (held bool, err error) {
	c := w.again(i)
	ctx, cancel := context.WithTimeout(ctx, undecided)
	defer cancel()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		got := w.call(ctx, c)
		switch {
		case got.err == nil && got.status == http.StatusCreated && got.verdict() == replay:
			sum := sha256.Sum256([]byte(got.body))
			if i.End == agent.Paid && hex.EncodeToString(sum[:]) != i.BodySHA256 {
				return false, fmt.Errorf("%s is answered with other bytes than before: %s", i.ID, got)
			}
			return false, nil
		case got.err == nil && got.verdict() == unknownHold && i.End == agent.Held:
			var p problem
			if err := json.Unmarshal([]byte(got.body), &p); err != nil {
				return false, fmt.Errorf("%s: %w: %s", i.ID, err, got)
			}
			// It is in the cluster too, and stands.
			h, err := w.hold(ctx, p.Hold)
			if err == nil && (h.Status.State == v1alpha1.HoldHeld || h.Status.State == v1alpha1.HoldWaiting) && h.Spec.IntentID == i.ID {
				return true, nil
			}
			if client.IgnoreNotFound(err) == nil {
				got.err = fmt.Errorf("its hold %s is %q in the cluster: %w", p.Hold, h.Status.State, err)
			}
		case got.err == nil && got.status < 500 && got.verdict() != "IN_FLIGHT":
			return false, fmt.Errorf("%s was told %q, and now: %s", i.ID, i.End, got)
		}
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("%s, which was told %q, is undecided after %s: %s", i.ID, i.End, undecided, got)
		case <-tick.C:
		}
	}
}

// stands checks that what was paid and held before the drills is as it was.
func (w *world) stands(ctx context.Context) {
	GinkgoHelper()
	before := w.charges(ctx)
	for _, p := range w.paid {
		Expect(w.pay(ctx, p.call, http.StatusCreated, replay).body).To(Equal(p.body), p.call.id)
	}
	for _, h := range w.held {
		Expect(w.pay(ctx, h.call, http.StatusConflict, unknownHold).problem().Hold).To(Equal(h.name))
		Expect(w.holdIs(ctx, h.name, v1alpha1.HoldHeld).Spec).To(Equal(h.spec), h.name)
	}
	Expect(w.charges(ctx)).To(Equal(before))
	for _, p := range w.paid {
		// Its intent is named for its order.
		Expect(before).To(HaveKeyWithValue(p.call.id, 1))
	}
}
