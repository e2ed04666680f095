// This file is a gateway within the test's own process, for agents that run beside it: on
// an embedded store, with a provider to judge by. Who calls is what its token says.

package localagent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/gateway"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/provider"
)

const (
	// Namespace, LocalTool and HTTPTool are what a Rig serves: one tool that its agent runs,
	// and one that the gateway calls.
	Namespace = "support"
	LocalTool = "book"
	HTTPTool  = "charge"
	// Lease is the local tool's.
	Lease = 2 * time.Second
	// SettleAfter is that of both.
	SettleAfter = 100 * time.Millisecond
)

// Rig is a gateway and a provider.
type Rig struct {
	URL         string
	TokenFile   string
	ProviderURL string
	Provider    *provider.Provider
	Engine      *guard.Engine
	Engines     *guard.Engines
}

// everybody calls as the token says, and may.
type everybody struct{}

func (everybody) Authenticate(_ context.Context, h http.Header) (access.Caller, error) {
	name, ok := strings.CutPrefix(h.Get("Authorization"), "Bearer ")
	if !ok || name == "expired" {
		return access.Caller{}, fmt.Errorf("%w: no token", access.ErrUnauthenticated)
	}
	return access.Caller{Username: "system:serviceaccount:" + Namespace + ":" + name, UID: name + "-uid"}, nil
}

func (everybody) Authorize(context.Context, access.Caller, string, string) error { return nil }

// SetUp serves until the test ends. change may change each of the tools; nil: nothing does.
func SetUp(t *testing.T, change func(*v1alpha1.AgentTool)) *Rig {
	t.Helper()
	r := &Rig{Provider: provider.New(provider.Options{}), Engines: guard.NewEngines(), TokenFile: filepath.Join(t.TempDir(), "token")}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	r.ProviderURL, err = r.Provider.Start("")
	must(err)
	t.Cleanup(func() { _ = r.Provider.Close() })
	must(os.WriteFile(r.TokenFile, []byte("agent\n"), 0o600))
	st, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true})
	must(err)
	t.Cleanup(func() { _ = st.Close() })
	id, err := st.Initialise(t.Context(), store.Identity{Epoch: "e1", KeyDomain: "d1"})
	must(err)
	r.Engine = guard.New(st, id, guard.Options{Grace: 500 * time.Millisecond, Settlement: time.Second, Margin: 500 * time.Millisecond})
	r.Engines.Put(Namespace, "payments", r.Engine)

	var tools policy.Current
	for _, tool := range []*v1alpha1.AgentTool{localTool(change), r.httpTool(change)} {
		compiled, err := policy.Compile(tool, &v1alpha1.IntentBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: "payments"},
			Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: "payments"}},
		})
		must(err)
		tools.Set(compiled)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	g, err := gateway.New(gateway.Options{
		Access: everybody{}, Policies: func() gateway.Policies { return tools.Load() }, Engines: r.Engines,
		Addresses: gateway.Addresses{AllowLoopback: true}, InsecureHTTP: true, Listener: listener,
	})
	must(err)
	r.URL = "http://" + listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the gateway did not stop well: %v", err)
		}
	})
	return r
}

func tool(name string) *v1alpha1.AgentTool {
	return &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name, Generation: 1},
		Spec: v1alpha1.AgentToolSpec{
			Effect: v1alpha1.EffectMutating, IntentBudgetRef: &v1alpha1.BudgetReference{Name: "payments"},
			Identity: &v1alpha1.ToolIdentity{
				IntentID: []v1alpha1.Expression{`call.header["idempotency-key"]`},
				Scope:    []v1alpha1.Expression{`path("order", call.body.orderId)`},
				Lineage:  `path(call.session, call.index)`,
				Amount:   &v1alpha1.AmountExpressions{Value: "call.body.amount", Currency: `"USD"`, Unit: v1alpha1.UnitMajor},
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}}},
		},
	}
}

func localTool(change func(*v1alpha1.AgentTool)) *v1alpha1.AgentTool {
	t := tool(LocalTool)
	t.Spec.Upstream.Local = &v1alpha1.LocalUpstream{Lease: &metav1.Duration{Duration: Lease}, SettleAfter: metav1.Duration{Duration: SettleAfter}}
	if change != nil {
		change(t)
	}
	return t
}

func (r *Rig) httpTool(change func(*v1alpha1.AgentTool)) *v1alpha1.AgentTool {
	t := tool(HTTPTool)
	t.Spec.Upstream.HTTP = &v1alpha1.HTTPUpstream{
		URL: r.ProviderURL + "/charges", Methods: []v1alpha1.HTTPMethod{"POST"}, SettleAfter: &metav1.Duration{Duration: SettleAfter},
		RequestHeaders: []v1alpha1.RequestHeader{"content-type", "provider-fault"},
	}
	if change != nil {
		change(t)
	}
	return t
}

// Options are those of a client of this rig.
func (r *Rig) Options(outbox string) client.Options {
	return client.Options{URL: r.URL, Namespace: Namespace, TokenFile: r.TokenFile, Outbox: outbox}
}

// Orders are those of an agent of this rig, with an outbox of its own.
func (r *Rig) Orders(outbox string) Orders {
	return Orders{URL: r.URL, Namespace: Namespace, TokenFile: r.TokenFile, Outbox: outbox, Provider: r.ProviderURL, Within: time.Minute}
}

// Paid is how many payments of an order are in the ledger.
func (r *Rig) Paid(t *testing.T, order string) int {
	t.Helper()
	l, err := r.Provider.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range l.Entries {
		if e.OrderID == order {
			n++
		}
	}
	return n
}

// State is what the guard says of an intent of the agent.
func (r *Rig) State(t *testing.T, tool, id string) guard.View {
	t.Helper()
	a, err := r.Engine.Poll(t.Context(), guard.Key{Namespace: Namespace, Tool: tool, Caller: "system:serviceaccount:" + Namespace + ":agent", IntentID: id})
	if err != nil {
		t.Fatal(err)
	}
	return a.Intent
}

// Body is a payment of 10 for an order.
func Body(order string) []byte {
	return fmt.Appendf(nil, `{"accountId":"a1","orderId":%q,"amount":10}`, order)
}
