package controller

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// O03: nothing reads as healthy before anybody has looked at it.
func TestConditionsFromTheFirstVisit(t *testing.T) {
	w := newWorld(t)
	w.create(w.store("payments"), w.budget("refunds", "payments"), w.tool("refund", "refunds"))
	for name, o := range map[string]client.Object{"payments": &v1alpha1.IdempotencyStore{}, "refunds": &v1alpha1.IntentBudget{}, "refund": &v1alpha1.AgentTool{}} {
		must(t, w.get(name, o))
		list := conditionsOf(o)
		if tool, ok := o.(*v1alpha1.AgentTool); ok {
			list = tool.Status.Conditions
		}
		if c := find(list, v1alpha1.ConditionReady); c == nil || c.Status != metav1.ConditionUnknown || c.Reason != v1alpha1.ReasonPending {
			t.Errorf("%T: Ready is %s before anybody looked", o, asJSON(c))
		}
	}
	start(t, t.TempDir())
	w.toolReady("refund")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue, reasonKnown)
	w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonStoreReady)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonAccepted)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionProgrammed, metav1.ConditionTrue, reasonProgrammed)
	var st v1alpha1.IdempotencyStore
	must(t, w.get("payments", &st))
	if e := w.memory()[w.key(epochOf, "payments")]; e == "" || e != st.Status.Epoch {
		t.Errorf("the memory has epoch %q, the status %q", e, st.Status.Epoch)
	}
}

// A dependency that is not there yet is waited for, and is not a failure.
func TestChainComesInAnyOrder(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.create(w.tool("refund", "refunds"))
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, policy.ReasonBudgetNotFound)
	var tool v1alpha1.AgentTool
	must(t, w.get("refund", &tool))
	if c := find(tool.Status.Conditions, v1alpha1.ConditionStalled); c != nil {
		t.Errorf("waiting reads as failed: %s", asJSON(c))
	}
	var no *policy.NotServedError
	if _, err := w.try(p, "refund", "a", "9", "1"); !errors.As(err, &no) {
		t.Errorf("the tool should not be served, got %v", err)
	}
	w.create(w.budget("refunds", "payments"))
	w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonStoreNotFound)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonAccepted)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonStoreNotFound)
	if _, err := w.try(p, "refund", "a", "9", "1"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a call should be told that the store is not available, got %v", err)
	}
	w.create(w.store("payments"))
	w.toolReady("refund")
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
}

// O04, O05: at rest nothing is written, also after a restart.
func TestSteadyState(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	readOnly := w.tool("look", "")
	readOnly.Spec.Effect, readOnly.Spec.IntentBudgetRef, readOnly.Spec.Identity, readOnly.Spec.Idempotency = v1alpha1.EffectReadOnly, nil, nil, nil
	readOnly.Spec.Upstream.HTTP.SettleAfter = nil
	bad := w.tool("bad", "refunds")
	bad.Spec.Identity.Recipient = "call.body."
	w.create(readOnly, bad)
	w.toolReady("look")
	w.condition(&v1alpha1.AgentTool{}, "bad", v1alpha1.ConditionStalled, metav1.ConditionTrue, policy.ReasonInvalid)
	resolved := w.held(p)
	w.shown(resolved, v1alpha1.HoldHeld)
	must(t, w.resolve(resolved, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionReject}))
	w.shown(resolved, v1alpha1.HoldResolved)
	held := w.holdOf(p, "third", "9", "12")
	w.shown(held, v1alpha1.HoldHeld)
	eventually(t, func() error {
		var b v1alpha1.IntentBudget
		if err := w.get("refunds", &b); err != nil {
			return err
		}
		if b.Status.Held == nil || *b.Status.Held != 1 {
			return errors.New("the budget does not count its held intent yet")
		}
		return nil
	})

	objects := map[string]client.Object{
		"payments": &v1alpha1.IdempotencyStore{}, "refunds": &v1alpha1.IntentBudget{},
		"refund": &v1alpha1.AgentTool{}, "look": &v1alpha1.AgentTool{}, "bad": &v1alpha1.AgentTool{},
		resolved: &v1alpha1.PaymentHold{}, held: &v1alpha1.PaymentHold{},
	}
	versions := func() string {
		out := map[string]string{}
		for name, o := range objects {
			must(t, w.get(name, o))
			out[name] = o.GetResourceVersion()
		}
		var cm corev1.ConfigMap
		must(t, admin.Get(w.ctx, types.NamespacedName{Namespace: operatorNamespace, Name: MemoryName}, &cm))
		out["memory"] = cm.ResourceVersion
		return asJSON(out)
	}
	visit := func() {
		for name, o := range objects {
			var r reconcile.Reconciler = p.op.holds
			switch o.(type) {
			case *v1alpha1.IdempotencyStore:
				r = p.op.stores
			case *v1alpha1.IntentBudget:
				r = p.op.budgets
			case *v1alpha1.AgentTool:
				r = p.op.tools
			}
			_, err := r.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: name}})
			must(t, err)
		}
	}
	// At rest: the same versions at two looks with a visit between them.
	eventually(t, func() error {
		before := versions()
		visit()
		if after := versions(); before != after {
			return fmt.Errorf("moved from %s to %s", before, after)
		}
		return nil
	})
	rest := versions()
	for range 20 {
		visit()
	}
	if now := versions(); now != rest {
		t.Errorf("looking again has moved\n%s\nto\n%s", rest, now)
	}
	p.stop()
	p = start(t, dir)
	for range 5 {
		visit()
	}
	if now := versions(); now != rest {
		t.Errorf("a restart has moved\n%s\nto\n%s", rest, now)
	}
	for name, o := range objects {
		must(t, w.get(name, o))
		for _, m := range o.GetManagedFields() {
			if strings.HasPrefix(m.Manager, "holdfast-") && m.Subresource == "" && m.Operation == metav1.ManagedFieldsOperationApply {
				t.Errorf("%s: the operator owns fields of the spec: %s", name, m.FieldsV1)
			}
		}
		if len(o.GetFinalizers()) > 0 {
			t.Errorf("%s has finalizers %v", name, o.GetFinalizers())
		}
	}
}

func TestBadExpression(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	var tool v1alpha1.AgentTool
	must(t, w.get("refund", &tool))
	good := tool.Spec.Identity.Scope
	w.change("refund", func(s *v1alpha1.AgentToolSpec) {
		s.Identity.Scope = []v1alpha1.Expression{`path("order", call.nothing)`}
	})
	message := w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, policy.ReasonInvalid)
	contains(t, message, "spec.identity.scope[0]", "line 1, column 19", "nothing")
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionStalled, metav1.ConditionTrue, policy.ReasonInvalid)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, policy.ReasonInvalid)
	var no *policy.NotServedError
	if _, err := w.try(p, "refund", "a", "9", "1"); !errors.As(err, &no) || no.Reason != policy.ReasonInvalid {
		t.Errorf("the tool should not be served, got %v", err)
	}
	w.change("refund", func(s *v1alpha1.AgentToolSpec) { s.Identity.Scope = good })
	w.toolReady("refund")
	must(t, w.get("refund", &tool))
	if c := find(tool.Status.Conditions, v1alpha1.ConditionStalled); c != nil {
		t.Errorf("Stalled stays: %s", asJSON(c))
	}
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
}

// R24
func TestToolMadeAgainFindsItsMemory(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
	must(t, admin.Delete(w.ctx, w.tool("refund", "refunds")))
	eventually(t, func() error {
		if _, err := w.try(p, "refund", "a", "9", "1"); !errors.Is(err, policy.ErrNoTool) {
			return fmt.Errorf("a deleted tool should not be known, got %v", said(err))
		}
		return nil
	})
	w.create(w.tool("refund", "refunds"))
	w.toolReady("refund")
	if a := w.call(p, "refund", "a", "9", "1"); a.Verdict != guard.Replay || string(a.Response.Body) != `{"paid":true}` {
		t.Errorf("it should be replayed, got %s %s", a.Verdict, a.Reason)
	}
}

func TestRebound(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	w.create(w.budget("others", "payments"), w.store("elsewhere"))
	w.condition(&v1alpha1.IntentBudget{}, "others", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonStoreReady)

	t.Log("a tool that names another budget")
	must(t, admin.Delete(w.ctx, w.tool("refund", "refunds")))
	w.create(w.tool("refund", "others"))
	message := w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonRebound)
	contains(t, message, `"refunds"`, `"others"`, w.key(budgetOf, "refund"))
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionStalled, metav1.ConditionTrue, v1alpha1.ReasonRebound)
	var no *policy.NotServedError
	if _, err := w.try(p, "refund", "a", "9", "1"); !errors.As(err, &no) || no.Reason != v1alpha1.ReasonRebound {
		t.Errorf("the tool should not be served, got %v", err)
	}
	t.Log("a tool that names none any more")
	must(t, admin.Delete(w.ctx, w.tool("refund", "refunds")))
	readOnly := w.tool("refund", "")
	readOnly.Spec.Effect, readOnly.Spec.IntentBudgetRef, readOnly.Spec.Identity, readOnly.Spec.Idempotency = v1alpha1.EffectReadOnly, nil, nil, nil
	readOnly.Spec.Upstream.HTTP.SettleAfter = nil
	w.create(readOnly)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonRebound)
	t.Log("the old one again")
	must(t, admin.Delete(w.ctx, w.tool("refund", "")))
	w.create(w.tool("refund", "refunds"))
	w.toolReady("refund")

	t.Log("a budget that names another store")
	must(t, admin.Delete(w.ctx, w.budget("refunds", "")))
	w.create(w.budget("refunds", "elsewhere"))
	message = w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonRebound)
	contains(t, message, `"payments"`, `"elsewhere"`, w.key(storeOf, "refunds"))
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonRebound)
	if _, err := w.try(p, "refund", "a", "9", "1"); !errors.As(err, &no) || no.Reason != v1alpha1.ReasonRebound {
		t.Errorf("the tool should not be served, got %v", err)
	}
	t.Log("an admin names the new one")
	w.remember(map[string]*string{w.key(storeOf, "refunds"): ptr.To("elsewhere")})
	w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonStoreReady)
	w.toolReady("refund")
}

// An intent that was registered is knowledge of a memory, where nothing else is left of it.
func TestARegisteredIntentTellsOfAMemory(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.account()
	w.ready()
	w.create(w.intent("one", "one", "1", "10"))
	w.says("one", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	p.stop()
	must(t, os.Remove(filepath.Join(dir, w.ns+"_payments.db")))
	w.remember(map[string]*string{w.key(epochOf, "payments"): nil, w.key(keyDomainOf, "payments"): nil, w.key(seenOf, "payments"): nil})
	must(t, admin.Delete(w.ctx, w.store("payments")))
	w.create(w.store("payments"), w.store("elsewhere"))
	p = start(t, dir)
	message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	contains(t, message, `set spec.acceptEpoch to "unknown"`)
	// The tool's records were never in the other one.
	w.condition(&v1alpha1.IdempotencyStore{}, "elsewhere", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	if _, err := w.try(p, "refund", "one", "1", "10"); !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("a call is told %v", said(err))
	}
	w.accept("payments", unknownEpoch, "")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	w.says("one", "", v1alpha1.IntentRegistered, reasonRecordGone)
}

func TestMemoryLost(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	name := w.held(p)
	w.shown(name, v1alpha1.HoldHeld)
	w.pay(p, "refund", "other", "5", "10", guard.AttemptSucceeded)
	open := w.holdOf(p, "another", "5", "12")
	w.shown(open, v1alpha1.HoldHeld)
	epoch, domain := w.memory()[w.key(epochOf, "payments")], w.memory()[w.key(keyDomainOf, "payments")]
	file := filepath.Join(dir, w.ns+"_payments.db")
	p.stop()
	copied, err := os.ReadFile(file)
	must(t, err)
	refused := func(p *process, parts ...string) {
		t.Helper()
		message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
		contains(t, message, parts...)
		w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonMemoryLost)
		w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonMemoryLost)
		w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonStoreNotReady)
		eventually(t, func() error {
			if _, err := w.try(p, "refund", "new", "8", "1"); !errors.Is(err, store.ErrMemoryLost) {
				return fmt.Errorf("a call should be told that the memory is lost, got %v", said(err))
			}
			return nil
		})
		var st v1alpha1.IdempotencyStore
		must(t, w.get("payments", &st))
		if st.Status.Epoch != epoch || w.memory()[w.key(epochOf, "payments")] != epoch {
			t.Errorf("the lost epoch %s was overwritten: status %s, memory %s", epoch, st.Status.Epoch, w.memory()[w.key(epochOf, "payments")])
		}
	}

	t.Log("the file is wiped")
	must(t, os.Remove(file))
	p = start(t, dir)
	refused(p, "empty", epoch, "spec.acceptEpoch")
	// A resolution of a hold of the lost memory is not taken, and its object not judged.
	must(t, w.resolve(name, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}))
	w.condition(&v1alpha1.PaymentHold{}, name, v1alpha1.ConditionResolved, metav1.ConditionUnknown, reasonStoreNotKnown)
	p.stop()

	t.Log("the operator's ConfigMap is lost too: the status tells")
	w.remember(map[string]*string{w.key(epochOf, "payments"): nil, w.key(keyDomainOf, "payments"): nil})
	p = start(t, dir)
	message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	contains(t, message, epoch)
	p.stop()

	t.Log("the object is made again: its hold tells")
	must(t, admin.Delete(w.ctx, w.store("payments")))
	w.create(w.store("payments"))
	p = start(t, dir)
	message = w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	contains(t, message, epoch) // which only the hold knows
	p.stop()

	t.Log("the file is back: it is adopted")
	must(t, os.WriteFile(file, copied, 0o600))
	p = start(t, dir)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	if m := w.memory(); m[w.key(epochOf, "payments")] != epoch || m[w.key(keyDomainOf, "payments")] != domain {
		t.Errorf("adopted as %s", asJSON(m))
	}
	w.shown(name, v1alpha1.HoldResolved)

	t.Log("a copy under another name")
	must(t, os.WriteFile(filepath.Join(dir, w.ns+"_copy.db"), copied, 0o600))
	w.create(w.store("copy"))
	message = w.condition(&v1alpha1.IdempotencyStore{}, "copy", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	contains(t, message, w.ns+"/payments")
	must(t, admin.Delete(w.ctx, w.store("copy")))

	t.Log("the file is exchanged under the running process")
	must(t, os.Rename(file, file+".away"))
	must(t, os.WriteFile(file, nil, 0o600))
	_, err = p.op.stores.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: "payments"}})
	must(t, err)
	refused(p, file)

	t.Log("a person accepts the loss of another epoch: it says nothing of this one")
	w.accept("payments", "another", "")
	refused(p, file)

	t.Log("a person accepts the loss: a new epoch, and the old key domain")
	w.accept("payments", epoch, "")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonAccepting)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	m := w.memory()
	if m[w.key(epochOf, "payments")] == epoch || m[w.key(epochOf, "payments")] == "" || m[w.key(keyDomainOf, "payments")] != domain {
		t.Errorf("accepted as %s", asJSON(m))
	}
	p.reconcileHold(w, name)
	w.shown(name, v1alpha1.HoldResolved) // what was taken stays taken
	w.toolReady("refund")
	// What was held is held again, under the next number; a decision on the old object is not taken.
	w.shown(open, v1alpha1.HoldVoid)
	again := w.holdOf(p, "another", "5", "12")
	if again == open {
		t.Errorf("the hold of the lost memory %s stands", open)
	}
	if err := w.resolve(open, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}); !apierrors.IsForbidden(err) {
		t.Errorf("a decision on a hold of the lost memory should be refused, got %v", err)
	}
	if hold := w.holdOf(p, "another", "5", "12"); hold != again {
		t.Errorf("held as %s, and was as %s", hold, again)
	}
	// What the store does not know may have been paid before.
	a := w.call(p, "refund", "new", "8", "1")
	if a.Verdict != guard.UnknownHold || a.Reason != guard.OutcomeUnknown {
		t.Errorf("a first call after a loss should be held, got %s %s", a.Verdict, a.Reason)
	}
	p.stop()

	t.Log("it is lost once more, and forgotten")
	must(t, os.Remove(file))
	p = start(t, dir)
	epoch = m[w.key(epochOf, "payments")]
	refused(p, epoch)
	w.accept("payments", epoch, epoch)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	w.toolReady("refund")
	w.pay(p, "refund", "newer", "7", "1", guard.AttemptSucceeded)
	p.stop()
	p = start(t, dir)
	w.toolReady("refund")
	w.pay(p, "refund", "newest", "6", "1", guard.AttemptSucceeded)
}

// A store whose object is deleted is closed, and its file stays.
func TestStoreDeleted(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
	must(t, admin.Delete(w.ctx, w.store("payments")))
	eventually(t, func() error {
		if _, err := p.op.Engines.Get(w.ns, "payments"); !errors.Is(err, store.ErrUnavailable) {
			return fmt.Errorf("the store should not be served, got %v", said(err))
		}
		return nil
	})
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonStoreNotFound)
	if _, err := os.Stat(filepath.Join(dir, w.ns+"_payments.db")); err != nil {
		t.Fatal(err)
	}
	w.create(w.store("payments"))
	w.toolReady("refund")
	if a := w.call(p, "refund", "a", "9", "1"); a.Verdict != guard.Replay {
		t.Errorf("it should be replayed, got %s", a.Verdict)
	}
}

// What was sent before a store's object was deleted is still recorded: while it is
// gone, and when it is back.
func TestStoreDeletedDuringAnAttempt(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	nn := types.NamespacedName{Namespace: w.ns, Name: "payments"}
	engine, err := p.op.Engines.Get(w.ns, "payments")
	must(t, err)
	while := w.call(p, "refund", "while", "7", "1").Ticket
	after := w.call(p, "refund", "after", "8", "1").Ticket
	must(t, admin.Delete(w.ctx, w.store("payments")))
	refused := func() {
		t.Helper()
		eventually(t, func() error {
			if _, err := engine.Admit(w.ctx, guard.Call{}, guard.Policy{}); !errors.Is(err, store.ErrUnavailable) {
				return fmt.Errorf("the engine should let nobody in, got %v", said(err))
			}
			return nil
		})
	}
	refused()
	if _, err := p.op.Engines.Get(w.ns, "payments"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("the store should not be served, got %v", err)
	}
	settle := func(ticket *guard.Ticket) {
		t.Helper()
		a, err := engine.Settle(w.ctx, ticket, guard.Result{Outcome: guard.AttemptSucceeded, Response: &guard.Response{Status: 200}})
		must(t, err)
		if a.Intent.State != guard.Succeeded {
			t.Fatalf("the answer that arrived is told as %s %s", a.Verdict, a.Intent.State)
		}
	}
	settle(while)
	w.create(w.store("payments"))
	w.toolReady("refund")
	settle(after)
	for _, id := range []string{"while", "after"} {
		if v := w.poll(p, "refund", id); v.State != guard.Succeeded {
			t.Errorf("%s: the record is %s, want Succeeded", id, v.State)
		}
	}
	// With nothing in hand the file is closed.
	must(t, admin.Delete(w.ctx, w.store("payments")))
	refused()
	eventually(t, func() error {
		if p.op.stores.held(nn) != nil {
			return errors.New("the file of the deleted store is still open")
		}
		return nil
	})
}

// A second process with the same files must not serve them.
func TestFileOfAnotherProcess(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	other := &StoreReconciler{
		Client: p.op.client, Live: p.live, Memory: p.op.stores.Memory, Engines: guard.NewEngines(), Events: p.op.stores.Events, DataDir: dir,
		Gateway: true, AllInOne: true, Leading: func() bool { return false },
	}
	var obj v1alpha1.IdempotencyStore
	must(t, w.get("payments", &obj))
	if _, err := other.look(w.ctx, &obj); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "one process") {
		t.Errorf("the file is in use, got %v", err)
	}
	if _, err := other.Engines.Get(w.ns, "payments"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("the store should not be served, got %v", err)
	}
}

func TestProgrammedNeedsALiveGateway(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	var tool v1alpha1.AgentTool
	must(t, w.get("refund", &tool))
	key := client.ObjectKeyFromObject(&tool)

	// Another gateway that has come to nothing yet.
	stale := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: "holdfast-gateway-another", Labels: map[string]string{gatewayLabel: "true"}},
		Spec:       coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NowMicro()), LeaseDurationSeconds: ptr.To(int32(3600))},
	}
	must(t, admin.Create(w.ctx, stale))
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(admin.Delete(w.ctx, stale.DeepCopy())); err != nil {
			t.Error(err)
		}
	})
	// The time of grace after a start is over.
	p.op.tools.Gateways.mu.Lock()
	p.op.tools.Gateways.started = time.Now().Add(-leaseDuration)
	p.op.tools.Gateways.mu.Unlock()
	eventually(t, func() error {
		if _, err := p.op.tools.Reconcile(w.ctx, ctrl.Request{NamespacedName: key}); err != nil {
			return err
		}
		if err := w.get("refund", &tool); err != nil {
			return err
		}
		if c := find(tool.Status.Conditions, v1alpha1.ConditionProgrammed); c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, stale.Name) {
			return fmt.Errorf("Programmed is %s", asJSON(c))
		}
		return nil
	})
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonWaitsForGateway)
	stale.Annotations = map[string]string{seenTools: tool.ResourceVersion}
	must(t, admin.Update(w.ctx, stale))
	w.toolReady("refund")
	// It dies: only the living count.
	stale.Annotations, stale.Spec.RenewTime = nil, ptr.To(metav1.NewMicroTime(time.Now().Add(-2*time.Hour)))
	must(t, admin.Update(w.ctx, stale))
	w.change("refund", func(s *v1alpha1.AgentToolSpec) { s.Description = "a new generation" })
	w.toolReady("refund")
	must(t, p.op.tools.Gateways.collect(w.ctx))
	if err := admin.Get(w.ctx, client.ObjectKeyFromObject(stale), stale); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the Lease of a gateway that is long gone should be deleted, got %v", err)
	}
	p.stop()
	var leases coordinationv1.LeaseList
	must(t, admin.List(w.ctx, &leases, client.InNamespace(operatorNamespace), client.MatchingLabels{gatewayLabel: "true"}))
	if len(leases.Items) != 0 {
		t.Errorf("a gateway that ended leaves its Lease: %s", leases.Items[0].Name)
	}
}

// O08
func TestOldCRDIsRefused(t *testing.T) {
	w := newWorld(t)
	must(t, apiextensionsv1.AddToScheme(scheme))
	const name = "agenttools.guardrails.holdfast.dev"
	var crd apiextensionsv1.CustomResourceDefinition
	must(t, w.get(name, &crd))
	spec := crd.Spec.DeepCopy()
	w.edit(name, &crd, func() {
		http := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["upstream"].Properties["http"]
		delete(http.Properties, "suffixes")
	})
	t.Cleanup(func() {
		w.edit(name, &crd, func() { crd.Spec = *spec })
		must(t, CheckAPI(w.ctx, restConfig, patience))
	})
	eventually(t, func() error {
		err := CheckAPI(w.ctx, configOf(operatorUser), 0)
		if !errors.Is(err, ErrOldAPI) {
			return fmt.Errorf("the old CRD should be refused, got %v", said(err))
		}
		if !strings.Contains(err.Error(), "missing: AgentTool.spec.upstream.http.suffixes;") {
			t.Errorf("it should say exactly what is missing: %v", err)
		}
		return nil
	})
}

func TestCredentials(t *testing.T) {
	w := newWorld(t)
	c := Credentials{Live: as(operatorUser)}
	get := func() (string, error) { return c.Get(w.ctx, w.ns, "provider", "token") }
	secret := &corev1.Secret{ObjectMeta: w.meta("provider"), StringData: map[string]string{"token": "s3cret", "empty": ""}}
	w.create(secret)
	_, err := get()
	if err == nil || !strings.Contains(err.Error(), "RoleBinding") {
		t.Errorf("without a RoleBinding it should say what to do, got %v", err)
	}
	w.create(
		&rbacv1.Role{ObjectMeta: w.meta("credentials"), Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}}}},
		&rbacv1.RoleBinding{
			ObjectMeta: w.meta("credentials"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "credentials"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: operatorUser}},
		})
	eventually(t, func() error {
		if _, err := get(); err == nil || !strings.Contains(err.Error(), v1alpha1.CredentialsLabel) {
			return fmt.Errorf("without the label it should be refused, got %v", said(err))
		}
		return nil
	})
	secret.Labels = map[string]string{v1alpha1.CredentialsLabel: "true"}
	must(t, admin.Update(w.ctx, secret))
	if v, err := get(); err != nil || v != "s3cret" {
		t.Errorf("got %q, %v", v, err)
	}
	for _, key := range []string{"none", "empty"} {
		if _, err := c.Get(w.ctx, w.ns, "provider", key); !errors.Is(err, errCredentials) {
			t.Errorf("key %s: got %v", key, err)
		}
	}
	if _, err := c.Get(w.ctx, w.ns, "other", "token"); !errors.Is(err, errCredentials) {
		t.Errorf("another Secret: got %v", err)
	}
}

func TestConsent(t *testing.T) {
	w := newWorld(t)
	c := Consent{Live: as(operatorUser)}
	for _, tt := range []struct {
		annotation, tool string
		want             bool
	}{
		{"", "support", false}, {"support", "support", true}, {"a, support ,b", "support", true},
		{"supporters", "support", false}, {"*", "support", true}, {"", w.ns, true},
	} {
		var ns corev1.Namespace
		must(t, admin.Get(w.ctx, types.NamespacedName{Name: w.ns}, &ns))
		ns.Annotations = map[string]string{UpstreamConsent: tt.annotation}
		must(t, admin.Update(w.ctx, &ns))
		if got, err := c.Allows(w.ctx, w.ns, tt.tool); err != nil || got != tt.want {
			t.Errorf("%q for %s: got %t, %v", tt.annotation, tt.tool, got, err)
		}
	}
	if got, err := c.Allows(w.ctx, "no-such-namespace", "support"); err != nil || got {
		t.Errorf("a namespace that does not exist: got %t, %v", got, err)
	}
}
