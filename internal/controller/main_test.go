// The controllers are tested against a real API server with everything of
// config/without-manager applied: the operator acts under its own name and rights, people under theirs.
//
// A process of these tests is a manager with all controllers, a data directory and real
// stores. It is started and stopped as the real one is.

package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

const (
	operatorNamespace = "holdfast-system"
	operatorUser      = "system:serviceaccount:holdfast-system:holdfast-manager"
	alice             = "alice"
	patience          = 30 * time.Second
)

var (
	scheme     = runtime.NewScheme()
	restConfig *rest.Config
	admin      client.Client
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "setting up:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	assets := os.Getenv("KUBEBUILDER_ASSETS")
	if assets == "" {
		return 0, errors.New("KUBEBUILDER_ASSETS is not set: it must name the directory with etcd, kube-apiserver and kubectl; `make test` sets it")
	}
	ctrl.SetLogger(logr.Discard())
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return 0, err
	}
	env := &envtest.Environment{}
	if restConfig, err = env.Start(); err != nil {
		return 0, fmt.Errorf("start the API server: %w", err)
	}
	defer func() { err = errors.Join(err, env.Stop()) }()
	restConfig.QPS = -1
	restConfig.WarningHandler = rest.NoWarnings{}
	if admin, err = client.New(restConfig, client.Options{Scheme: scheme}); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(assets, "kubectl"), "kustomize", "../../config/without-manager").Output()
	if err != nil {
		return 0, fmt.Errorf("render config/without-manager: %w", err)
	}
	decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(out), 4096)
	for {
		o := &unstructured.Unstructured{}
		if err := decoder.Decode(o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return 0, err
		}
		if err := admin.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"), client.ForceOwnership); err != nil {
			return 0, fmt.Errorf("apply %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	if err := CheckAPI(ctx, restConfig, patience); err != nil {
		return 0, err
	}
	// The scheme's mapper must know the kinds that were just made.
	if admin, err = client.New(restConfig, client.Options{Scheme: scheme}); err != nil {
		return 0, err
	}
	// A policy is in force some time after it was made.
	gate := NewGate(as(operatorUser))
	if err := poll(patience, func() error {
		return errors.Join(gate.check(ctx, metav1.NamespaceDefault), gate.checkIntents(ctx, metav1.NamespaceDefault))
	}); err != nil {
		return 0, err
	}
	// The policy that stamps knows the kind some time later still.
	hold := probeHold(metav1.NamespaceDefault)
	if err := as(operatorUser).Create(ctx, hold); err != nil {
		return 0, err
	}
	reject := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"resolution":{"decision":"Reject","reason":"probe"}}}`))
	if err := poll(patience, func() error { return admin.Patch(ctx, hold.DeepCopy(), reject, client.DryRunAll) }); err != nil {
		return 0, fmt.Errorf("wait for resolutions to be stamped: %w", err)
	}
	if err := admin.Delete(ctx, hold); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

func configOf(user string) *rest.Config {
	c := rest.CopyConfig(restConfig)
	c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	return c
}

// as is a client of another user.
func as(user string) client.Client {
	c, err := client.New(configOf(user), client.Options{Scheme: scheme, Mapper: admin.RESTMapper()})
	if err != nil {
		panic(err) // the same configuration made the admin's client
	}
	return client.WithFieldValidation(c, metav1.FieldValidationStrict)
}

// poll calls f until it succeeds.
func poll(within time.Duration, f func() error) error {
	deadline := time.Now().Add(within)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("still after %s: %w", within, err)
		}
		<-tick.C
	}
}

func eventually(t *testing.T, f func() error) {
	t.Helper()
	if err := poll(patience, f); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// process is one run of the manager.
type process struct {
	t    *testing.T
	op   *Operator
	live client.Client
	stop func()
}

// start runs the manager under the operator's name until stop, or the test's end.
func start(t *testing.T, dataDir string) *process {
	t.Helper()
	return startAs(t, operatorUser, Options{DataDir: dataDir, Controllers: true, Gateway: true, GatewayName: "both"})
}

// startAs runs a process with these roles under this name.
func startAs(t *testing.T, user string, o Options) *process {
	t.Helper()
	cfg := configOf(user)
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Cache: CacheOptions(operatorNamespace),
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress:  "0",
		GracefulShutdownTimeout: ptr.To(patience),
		Controller:              config.Controller{SkipNameValidation: ptr.To(true)}, // one process after the other
	})
	must(t, err)
	live, err := LiveClient(cfg, mgr)
	must(t, err)
	o.Namespace = operatorNamespace
	o.Guard = guard.Options{Settlement: 300 * time.Millisecond, Margin: 200 * time.Millisecond, Grace: 200 * time.Millisecond, Backoff: time.Millisecond}
	op, err := Setup(mgr, live, o)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	p := &process{t: t, op: op, live: live}
	stopped := false
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := errors.Join(<-ended, op.Close()); err != nil {
			t.Errorf("the process ended with: %v", err)
		}
	}
	t.Cleanup(p.stop)
	if o.Gateway {
		eventually(t, op.Programmed)
	}
	return p
}

// world is a namespace of one test, with what is in it.
type world struct {
	*testing.T
	ns  string
	ctx context.Context
	// uid is that of the agent's ServiceAccount.
	uid string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx := context.Background()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}
	must(t, admin.Create(ctx, ns))
	w := &world{T: t, ns: ns.Name, ctx: ctx, uid: "uid"}
	must(t, admin.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "alice-resolves"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "holdfast-resolver"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: alice}},
	}))
	// The next test's process must not find this one's objects without their files.
	t.Cleanup(func() {
		for _, o := range []client.Object{&v1alpha1.AgentTool{}, &v1alpha1.IntentBudget{}, &v1alpha1.IdempotencyStore{}, &v1alpha1.PaymentHold{}, &v1alpha1.PaymentIntent{}} {
			if err := admin.DeleteAllOf(ctx, o, client.InNamespace(w.ns)); err != nil {
				t.Errorf("clear away: %v", err)
			}
		}
	})
	return w
}

func (w *world) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.ns, Name: name}
}

func (w *world) store(name string) *v1alpha1.IdempotencyStore {
	return &v1alpha1.IdempotencyStore{ObjectMeta: w.meta(name), Spec: v1alpha1.IdempotencyStoreSpec{Embedded: &v1alpha1.EmbeddedStore{}}}
}

func (w *world) budget(name, store string) *v1alpha1.IntentBudget {
	return &v1alpha1.IntentBudget{ObjectMeta: w.meta(name), Spec: v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: store}}}
}

func (w *world) tool(name, budget string) *v1alpha1.AgentTool {
	return &v1alpha1.AgentTool{ObjectMeta: w.meta(name), Spec: v1alpha1.AgentToolSpec{
		Effect:          v1alpha1.EffectMutating,
		IntentBudgetRef: &v1alpha1.BudgetReference{Name: budget},
		Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
			URL: "https://provider.example/refunds", Methods: []v1alpha1.HTTPMethod{"POST"},
			Timeout: &metav1.Duration{Duration: time.Second}, SettleAfter: &metav1.Duration{Duration: 300 * time.Millisecond},
		}},
		Identity: &v1alpha1.ToolIdentity{
			IntentID:  []v1alpha1.Expression{`call.header["idempotency-key"]`},
			Scope:     []v1alpha1.Expression{`path("order", call.body.order)`},
			Amount:    &v1alpha1.AmountExpressions{Value: "call.body.amount", Currency: `"USD"`, Unit: v1alpha1.UnitMajor},
			Recipient: "call.body.order",
		},
		Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"}},
	}}
}

func (w *world) create(objects ...client.Object) {
	w.Helper()
	for _, o := range objects {
		must(w.T, admin.Create(w.ctx, o))
	}
}

func (w *world) get(name string, o client.Object) error {
	return admin.Get(w.ctx, types.NamespacedName{Namespace: w.ns, Name: name}, o)
}

// edit changes an object that controllers may be writing to at the same moment.
func (w *world) edit(name string, o client.Object, change func()) {
	w.Helper()
	eventually(w.T, func() error {
		reflect.ValueOf(o).Elem().SetZero() // what is read is merged into what is there
		if err := w.get(name, o); err != nil {
			return err
		}
		change()
		return admin.Update(w.ctx, o)
	})
}

// ready makes store, budget and tool, and waits until the tool can be called.
func (w *world) ready() {
	w.Helper()
	w.create(w.store("payments"), w.budget("refunds", "payments"), w.tool("refund", "refunds"))
	w.toolReady("refund")
}

func (w *world) toolReady(name string) {
	w.Helper()
	w.condition(&v1alpha1.AgentTool{}, name, v1alpha1.ConditionReady, metav1.ConditionTrue, reasonReady)
}

// condition waits for a condition of the object's present generation, and returns its message.
func (w *world) condition(o client.Object, name, kind string, status metav1.ConditionStatus, reason string) string {
	w.Helper()
	var message string
	eventually(w.T, func() error {
		if err := w.get(name, o); err != nil {
			return err
		}
		list := conditionsOf(o)
		switch o := o.(type) {
		case *v1alpha1.AgentTool:
			list = o.Status.Conditions
		case *v1alpha1.PaymentHold:
			list = o.Status.Conditions
		}
		c := find(list, kind)
		if c == nil || c.Status != status || c.Reason != reason || c.ObservedGeneration != o.GetGeneration() {
			return fmt.Errorf("%T %s: %s should be %s (%s) at generation %d, conditions are %s", o, name, kind, status, reason, o.GetGeneration(), asJSON(list))
		}
		message = c.Message
		return nil
	})
	return message
}

func asJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// agent is the caller of all calls.
func (w *world) agent() string { return "system:serviceaccount:" + w.ns + ":agent" }

// call asks the guard as the gateway would.
func (w *world) call(p *process, tool, id, order, amount string) guard.Answer {
	w.Helper()
	a, err := w.try(p, tool, id, order, amount)
	must(w.T, err)
	return a
}

func (w *world) try(p *process, tool, id, order, amount string) (guard.Answer, error) {
	t, err := p.op.Policies.Load().Tool(w.ns, tool)
	if err != nil {
		return guard.Answer{}, err
	}
	in := policy.CallInput{
		Method: http.MethodPost, Header: http.Header{"Idempotency-Key": {id}, "Content-Type": {"application/json"}},
		Body: []byte(fmt.Sprintf(`{"order":%q,"amount":%q}`, order, amount)), Agent: w.agent(),
	}
	i, err := t.Identify(in)
	if err != nil {
		return guard.Answer{}, err
	}
	e, err := p.op.Engines.Get(w.ns, t.Store)
	if err != nil {
		return guard.Answer{}, err
	}
	c := guard.Call{
		Key:       guard.Key{Namespace: w.ns, Tool: tool, Caller: w.agent(), IntentID: i.IntentID},
		CallerUID: w.uid, Scope: i.Scope, Lineage: i.Lineage, Amount: i.Amount, Recipient: i.Recipient,
		Fingerprint: i.Fingerprint, IdentityHash: i.IdentityHash, AmountHash: i.AmountHash, RecipientHash: i.RecipientHash,
	}
	return e.Admit(w.ctx, c, t.GuardFor(&c))
}

// pay calls and lets the attempt end so.
func (w *world) pay(p *process, tool, id, order, amount string, outcome guard.Outcome) guard.Answer {
	w.Helper()
	a := w.call(p, tool, id, order, amount)
	if a.Verdict != guard.Allow {
		w.Fatalf("call %s should be allowed, got %s %s", id, a.Verdict, a.Reason)
	}
	e, err := p.op.Engines.Get(w.ns, "payments")
	must(w.T, err)
	res := guard.Result{Outcome: outcome}
	if outcome == guard.AttemptSucceeded {
		res.Response = &guard.Response{Status: 200, Body: []byte(`{"paid":true}`), Size: 13}
	}
	out, err := e.Settle(w.ctx, a.Ticket, res)
	must(w.T, err)
	return out
}

// held makes a payment and a second one for the same order, which is held.
func (w *world) held(p *process) (name string) {
	w.Helper()
	w.pay(p, "refund", "first", "9", "10", guard.AttemptSucceeded)
	return w.holdOf(p, "second", "9", "11")
}

func (w *world) holdOf(p *process, id, order, amount string) string {
	w.Helper()
	a := w.call(p, "refund", id, order, amount)
	if a.Verdict != guard.UnknownHold {
		w.Fatalf("call %s should be held, got %s %s", id, a.Verdict, a.Reason)
	}
	return a.Hold
}

// shown waits for a PaymentHold in this state.
func (w *world) shown(name string, state v1alpha1.HoldState) *v1alpha1.PaymentHold {
	w.Helper()
	o := &v1alpha1.PaymentHold{}
	eventually(w.T, func() error {
		if err := w.get(name, o); err != nil {
			return err
		}
		if o.Status.State != state || o.Status.ObservedGeneration != o.Generation {
			return fmt.Errorf("PaymentHold %s should be %s, its status is %s", name, state, asJSON(o.Status))
		}
		return nil
	})
	return o
}

// resolve is a person's kubectl patch.
func (w *world) resolve(name string, r v1alpha1.HoldResolution) error {
	fields := map[string]any{"decision": r.Decision, "reason": "the customer confirmed"}
	if r.ProviderReference != "" {
		fields["providerReference"] = r.ProviderReference
	}
	if r.Result != "" {
		fields["result"] = r.Result
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"resolution": fields}})
	if err != nil {
		return err
	}
	o := &v1alpha1.PaymentHold{ObjectMeta: w.meta(name)}
	return as(alice).Patch(w.ctx, o, client.RawPatch(types.MergePatchType, patch))
}

// accept is an admin's acknowledgement that a memory is lost.
func (w *world) accept(name, epoch, forget string) {
	w.Helper()
	spec := map[string]any{"acceptEpoch": epoch, "forgetEpoch": nil}
	if forget != "" {
		spec["forgetEpoch"] = forget
	}
	patch, err := json.Marshal(map[string]any{"spec": spec})
	must(w.T, err)
	must(w.T, admin.Patch(w.ctx, w.store(name), client.RawPatch(types.MergePatchType, patch)))
}

func (w *world) poll(p *process, tool, id string) guard.View {
	w.Helper()
	e, err := p.op.Engines.Get(w.ns, "payments")
	must(w.T, err)
	a, err := e.Poll(w.ctx, guard.Key{Namespace: w.ns, Tool: tool, Caller: w.agent(), IntentID: id})
	must(w.T, err)
	return a.Intent
}

// memory is the operator's ConfigMap.
func (w *world) memory() map[string]string {
	w.Helper()
	var cm corev1.ConfigMap
	err := admin.Get(w.ctx, types.NamespacedName{Namespace: operatorNamespace, Name: MemoryName}, &cm)
	if apierrors.IsNotFound(err) {
		return nil
	}
	must(w.T, err)
	return cm.Data
}

// remember sets keys of the operator's ConfigMap, or takes them away.
func (w *world) remember(set map[string]*string) {
	w.Helper()
	patch, err := json.Marshal(map[string]any{"data": set})
	must(w.T, err)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: MemoryName}}
	must(w.T, admin.Patch(w.ctx, cm, client.RawPatch(types.MergePatchType, patch)))
}

func (w *world) key(kind, name string) string {
	return memoryKey(kind, types.NamespacedName{Namespace: w.ns, Name: name})
}

func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q should say %q", text, p)
		}
	}
}

// said is an error that is not the one of the caller: it is told, and not wrapped.
func said(err error) string { return fmt.Sprint(err) }
