// The provider as a judge sees it: over HTTP, its ledger and its count of requests.

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

type entry struct {
	ID        string `json:"id"`
	Kind      string `json:"kind"`
	AccountID string `json:"accountId"`
	OrderID   string `json:"orderId"`
	Amount    string `json:"amount"`
	Currency  string `json:"currency"`
	Key       string `json:"key"`
	Memo      string `json:"memo"`
}

type ledger struct {
	Entries  []entry        `json:"entries"`
	Requests map[string]int `json:"requests"`
}

// ask is a request to the provider's own routes.
func ask(ctx context.Context, method, path string, in, out any) error {
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, all.ProviderURL()+path, &body)
	if err != nil {
		return err
	}
	got := do(request)
	if got.err != nil {
		return got.err
	}
	if got.status >= 300 {
		return fmt.Errorf("%s %s: %s", method, path, got)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal([]byte(got.body), out)
}

func readLedger(ctx context.Context) ledger {
	GinkgoHelper()
	var l ledger
	Expect(ask(ctx, http.MethodGet, "/ledger", nil, &l)).To(Succeed())
	return l
}

// entries are the payments of this world.
func (w *world) entries(ctx context.Context) []entry {
	GinkgoHelper()
	out := []entry{}
	for _, e := range readLedger(ctx).Entries {
		if e.AccountID == w.namespace {
			out = append(out, e)
		}
	}
	return out
}

// charged says how often an order of this world was paid.
func (w *world) charged(ctx context.Context, order string) int {
	GinkgoHelper()
	n := 0
	for _, e := range w.entries(ctx) {
		if e.OrderID == order {
			n++
		}
	}
	return n
}

// sent is how many requests for payments have reached the provider.
func sent(ctx context.Context) int {
	GinkgoHelper()
	r := readLedger(ctx).Requests
	return r["POST /charges"] + r["POST /refunds"]
}

// nothingSent runs do and says that no request reached the provider meanwhile but those
// that ask what became of a payment: an intent of an earlier spec may still be looked after.
func nothingSent(ctx context.Context, do func()) {
	GinkgoHelper()
	before := readLedger(ctx)
	do()
	after := readLedger(ctx)
	for _, l := range []*ledger{&before, &after} {
		maps.DeleteFunc(l.Requests, func(request string, _ int) bool { return strings.HasPrefix(request, "GET /charges/") })
	}
	Expect(after.Requests).To(Equal(before.Requests))
	Expect(after.Entries).To(HaveLen(len(before.Entries)))
}

// onHold are the requests that wait at the provider for their release.
func (w *world) onHold(ctx context.Context) (int, error) {
	var answer struct {
		Held []entry `json:"held"`
	}
	if err := ask(ctx, http.MethodGet, "/faults", nil, &answer); err != nil {
		return 0, err
	}
	n := 0
	for _, h := range answer.Held {
		if h.AccountID == w.namespace {
			n++
		}
	}
	return n, nil
}

// underWay waits until n requests of this world wait at the provider.
func (w *world) underWay(ctx context.Context, n int) {
	GinkgoHelper()
	Eventually(w.onHold).WithContext(ctx).Should(Equal(n))
}

// letGo releases what waits at the provider.
func (w *world) letGo(ctx context.Context) {
	GinkgoHelper()
	Expect(ask(ctx, http.MethodPost, "/faults/release", map[string]any{"match": map[string]string{"accountId": w.namespace}}, nil)).To(Succeed())
}
