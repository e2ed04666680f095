// The judge is judged: with gateways, a provider, a cluster and an agent that say what they
// are told to, it must find each kind of wrong.

package cluster

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/test/agent"
)

// said is what everybody says: of an order that was paid, of one that is held, and of those that stand.
type said struct {
	entries []entry
	intents []intent
	// answers are by intent ID.
	answers map[string]reply
	holds   []v1alpha1.PaymentHold
}

const judgedNamespace = "drill"

func saysPaid(body string) reply {
	return reply{status: 201, header: http.Header{"Holdfast-Verdict": {replay}}, body: body}
}

func saysHeld(hold string) reply {
	return reply{
		status: 409, header: http.Header{"Holdfast-Verdict": {unknownHold}, "Content-Type": {"application/problem+json"}},
		body: fmt.Sprintf(`{"status":409,"hold":%q}`, hold),
	}
}

func holdNamed(name, id string) v1alpha1.PaymentHold {
	h := v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: judgedNamespace, Name: name}}
	h.Spec.IntentID = id
	h.Status.State = v1alpha1.HoldHeld
	return h
}

// allIsWell is how it must be.
func allIsWell() said {
	sum := sha256.Sum256([]byte("receipt"))
	charged := func(order string) entry { return entry{AccountID: judgedNamespace, OrderID: order} }
	return said{
		entries: []entry{charged("p-1"), charged("standing"), {AccountID: "another", OrderID: "p-2"}},
		intents: []intent{
			{ID: "p-1", Order: "p-1", Amount: "1.00", End: agent.Paid, BodySHA256: hex.EncodeToString(sum[:])},
			{ID: "p-2", Order: "p-2", Amount: "2.00", End: agent.Held},
		},
		answers: map[string]reply{
			"p-1": saysPaid("receipt"), "p-2": saysHeld("h2"), "standing": saysPaid("old"), "standing-again": saysHeld("h0"),
		},
		holds: []v1alpha1.PaymentHold{holdNamed("h2", "p-2"), holdNamed("h0", "standing-again")},
	}
}

func TestTheJudgeFindsWhatIsWrong(t *testing.T) {
	RegisterTestingT(t)
	EnforceDefaultTimeoutsWhenUsingContexts()
	SetDefaultEventuallyTimeout(500 * time.Millisecond)
	wasUndecided := undecided
	undecided = 1500 * time.Millisecond
	t.Cleanup(func() {
		undecided, rows = wasUndecided, nil
		SetDefaultEventuallyTimeout(time.Minute)
	})
	for _, row := range []struct {
		name  string
		wrong func(*said)
		finds string
	}{
		{"all is well", func(*said) {}, ""},
		{"what was held turns out to be paid", func(s *said) {
			s.answers["p-2"], s.entries = saysPaid("late"), append(s.entries, entry{AccountID: judgedNamespace, OrderID: "p-2"})
		}, ""},
		{"charged twice", func(s *said) { s.entries = append(s.entries, s.entries[0]) }, "p-1 was charged twice"},
		{"what is held was charged twice", func(s *said) {
			e := entry{AccountID: judgedNamespace, OrderID: "p-2"}
			s.entries = append(s.entries, e, e)
		}, "p-2 was charged twice"},
		{"told as paid, and not charged", func(s *said) { s.entries = s.entries[1:] }, "p-1 is told that it was paid"},
		{"answered with other bytes", func(s *said) { s.answers["p-1"] = saysPaid("Receipt") }, "other bytes"},
		{"what was paid is forgotten", func(s *said) {
			s.answers["p-1"] = reply{status: 201, header: http.Header{"Holdfast-Verdict": {allow}}, body: "receipt"}
		}, `p-1 was told "paid", and now`},
		{"what was paid is held", func(s *said) { s.answers["p-1"] = saysHeld("h2") }, `p-1 was told "paid", and now`},
		{"what was held is let go", func(s *said) {
			s.answers["p-2"] = reply{status: 201, header: http.Header{"Holdfast-Verdict": {allow}}}
		}, `p-2 was told "held", and now`},
		{"nobody decides", func(s *said) {
			s.answers["p-2"] = reply{status: 409, header: http.Header{"Holdfast-Verdict": {"IN_FLIGHT"}}}
		}, "p-2, which was told \"held\", is undecided"},
		{"a hold that the cluster does not show", func(s *said) { s.holds = s.holds[1:] }, "its hold h2"},
		{"a hold that is void in the cluster", func(s *said) { s.holds[0].Status.State = v1alpha1.HoldVoid }, "its hold h2"},
		{"a charge that nobody asked for", func(s *said) {
			s.entries = append(s.entries, entry{AccountID: judgedNamespace, OrderID: "p-3"})
		}, "nobody asked for it"},
		{"what stood is forgotten", func(s *said) {
			s.answers["standing"] = reply{status: 409, header: http.Header{"Holdfast-Verdict": {"DENY"}}}
		}, "standing"},
		{"what stood has another answer", func(s *said) { s.answers["standing"] = saysPaid("new") }, "standing"},
		{"what stood was charged again", func(s *said) { s.entries = append(s.entries, s.entries[1]) }, "standing"},
		{"a hold that stood is another", func(s *said) { s.answers["standing-again"] = saysHeld("h2") }, "h0"},
		{"a hold that stood says something else", func(s *said) { s.holds[1].Spec.Reasons = []v1alpha1.HoldReason{v1alpha1.HoldOutcomeUnknown} }, "h0"},
		{"a hold that stood is resolved", func(s *said) { s.holds[1].Status.State = v1alpha1.HoldResolved }, "h0"},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := NewWithT(t)
			s := allIsWell()
			stood := s.holds[1].Spec
			row.wrong(&s)
			w := saying(t, s)
			w.paid = []standingPayment{{call: call{id: "standing"}, body: "old"}}
			w.held = []standingHold{{call: call{id: "standing-again"}, name: "h0", spec: stood}}
			err := InterceptGomegaFailure(func() { w.judge(t.Context(), "itself", &run{w: w, prefix: "p", at: providerAt}) })
			if row.finds == "" {
				g.Expect(err).NotTo(HaveOccurred())
				return
			}
			g.Expect(err).To(MatchError(ContainSubstring(row.finds)))
		})
	}
}

// saying starts everybody, saying this, and gives the world that they are asked about.
func saying(t *testing.T, s said) *world {
	t.Helper()
	gateway := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		a := s.answers[r.Header.Get("Idempotency-Key")]
		for name, values := range a.header {
			w.Header()[name] = values
		}
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, a.body)
	}))
	// Connections that the client gave up are nobody's trouble.
	gateway.Config.ErrorLog = log.New(io.Discard, "", 0)
	gateway.StartTLS()
	t.Cleanup(gateway.Close)
	front.address, front.client = strings.TrimPrefix(gateway.URL, "https://"), gateway.Client()
	others := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body any
		switch r.URL.Path {
		case "/ledger":
			body = ledger{Entries: s.entries}
		case "/progress", "/report":
			body = agent.Report{Done: true, Orders: len(s.intents), Intents: s.intents}
		}
		_ = json.NewEncoder(w).Encode(body)
	}))
	t.Cleanup(others.Close)
	providerAt = others.URL
	known := runtime.NewScheme()
	NewWithT(t).Expect(v1alpha1.AddToScheme(known)).To(Succeed())
	b := fake.NewClientBuilder().WithScheme(known)
	for _, h := range s.holds {
		b.WithObjects(&h)
	}
	admin = b.Build()
	return &world{on: redis, namespace: judgedNamespace}
}
