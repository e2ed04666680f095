// The rules of tools: as policies of the API server, and as what a release must still pass.

package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/admission"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

func (w *world) fenceName(tool string) string {
	return admission.Name(types.NamespacedName{Namespace: w.ns, Name: tool})
}

// fences gives the policy and the binding of a tool.
func (w *world) fences(tool string) (*admissionv1.ValidatingAdmissionPolicy, *admissionv1.ValidatingAdmissionPolicyBinding, error) {
	p, b := &admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}
	name := types.NamespacedName{Name: w.fenceName(tool)}
	return p, b, errors.Join(admin.Get(w.ctx, name, p), admin.Get(w.ctx, name, b))
}

// unfenced waits until a tool has no policies.
func (w *world) unfenced(tool string) {
	w.Helper()
	eventually(w.T, func() error {
		for _, o := range []client.Object{&admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}} {
			if err := admin.Get(w.ctx, types.NamespacedName{Name: w.fenceName(tool)}, o); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%T is still there (%w)", o, err)
			}
		}
		return nil
	})
}

// rule makes one, with a message of its own.
func rule(action v1alpha1.AdmissionAction, expression, message string) v1alpha1.AdmissionRule {
	return v1alpha1.AdmissionRule{Expression: v1alpha1.AdmissionExpression(expression), Message: message, Action: action}
}

// change changes a tool.
func (w *world) change(name string, change func(*v1alpha1.AgentToolSpec)) {
	w.Helper()
	var tool v1alpha1.AgentTool
	w.edit(name, &tool, func() { change(&tool.Spec) })
}

func (w *world) rules(name string, rules ...v1alpha1.AdmissionRule) {
	w.Helper()
	w.change(name, func(spec *v1alpha1.AgentToolSpec) { spec.Admission = rules })
}

var (
	below500 = rule(v1alpha1.AdmissionHold, `quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0`, "above 500 a person decides")
	below800 = rule(v1alpha1.AdmissionDeny, `quantity(object.spec.amount.value).compareTo(quantity("800")) <= 0`, "more than 800 is never paid")
	onlyUSD  = rule(v1alpha1.AdmissionDeny, `object.spec.amount.currency == "USD"`, "only USD")
)

func TestRulesThatDenyAreAPolicyOfTheAPIServer(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	w.unfenced("refund")
	w.rules("refund", below500)
	w.toolReady("refund")
	w.unfenced("refund") // what holds is for the guard alone
	w.rules("refund", below500, onlyUSD, below800)
	var versions []string
	is := func() error {
		policy, binding, err := w.fences("refund")
		if err != nil {
			return err
		}
		versions = []string{policy.ResourceVersion, binding.ResourceVersion}
		var said []string
		for _, v := range policy.Spec.Validations {
			said = append(said, fmt.Sprintf("%s: %s (%s)", v.Expression, v.Message, *v.Reason))
		}
		want := []string{string(onlyUSD.Expression) + ": only USD (Forbidden)", string(below800.Expression) + ": more than 800 is never paid (Forbidden)"}
		if strings.Join(said, "\n") != strings.Join(want, "\n") {
			return fmt.Errorf("it validates %q", said)
		}
		return nil
	}
	eventually(t, is)
	policy, binding, err := w.fences("refund")
	must(t, err)
	// O01: it matches the creation of this kind in this namespace, and nothing else.
	rules := policy.Spec.MatchConstraints.ResourceRules
	if len(rules) != 1 || len(policy.Spec.MatchConstraints.NamespaceSelector.MatchLabels) != 1 || policy.Spec.MatchConstraints.NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != w.ns ||
		fmt.Sprint(rules[0].APIGroups, rules[0].APIVersions, rules[0].Resources, rules[0].Operations) != "[guardrails.holdfast.dev] [v1alpha1] [paymentintents] [CREATE]" {
		t.Errorf("it matches %s", asJSON(policy.Spec.MatchConstraints))
	}
	var own corev1.Namespace
	must(t, admin.Get(w.ctx, types.NamespacedName{Name: operatorNamespace}, &own))
	for _, o := range []client.Object{policy, binding} {
		// It goes with the operator's namespace, and with nothing else.
		if owners := o.GetOwnerReferences(); len(owners) != 1 || owners[0].UID != own.UID || owners[0].Kind != "Namespace" || owners[0].BlockOwnerDeletion != nil || len(o.GetFinalizers()) != 0 || o.GetLabels()[admission.Label] != operatorNamespace || o.GetAnnotations()["guardrails.holdfast.dev/agenttool"] != w.ns+"/refund" {
			t.Errorf("%T: %s", o, asJSON(o))
		}
	}
	if c := policy.Spec.MatchConditions; len(c) != 2 || !strings.Contains(c[0].Expression, `== "refund"`) || c[1].Expression != `request.userInfo.username != "`+operatorUser+`"` {
		t.Errorf("its conditions are %s", asJSON(c))
	}
	if fmt.Sprint(binding.Spec.ValidationActions) != "[Deny]" || binding.Spec.PolicyName != policy.Name || binding.Spec.MatchResources != nil {
		t.Errorf("the binding is %s", asJSON(binding.Spec))
	}

	// O04: looked at again, and after a restart, nothing is written.
	atRest := func(what string) {
		t.Helper()
		was := fmt.Sprint(versions)
		for range 3 {
			_, err := p.op.tools.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: "refund"}})
			must(t, err)
		}
		if err := is(); err != nil || fmt.Sprint(versions) != was {
			t.Errorf("%s: the versions moved from %s to %s (%v)", what, was, versions, err)
		}
	}
	for _, name := range []string{"one", "two"} {
		other := w.tool(name, "refunds")
		other.Spec.Admission = []v1alpha1.AdmissionRule{onlyUSD}
		w.create(other)
		w.toolReady(name)
		eventually(t, func() error { _, _, err := w.fences(name); return err })
	}
	atRest("looked at again")
	p.stop()
	p = start(t, dir)
	w.toolReady("refund")
	atRest("after a restart")

	// What somebody takes away or changes is mended.
	must(t, admin.Delete(w.ctx, binding))
	eventually(t, is)
	policy, _, err = w.fences("refund")
	must(t, err)
	w.edit(policy.Name, policy, func() { policy.Spec.Validations[0].Expression = "true" })
	eventually(t, is)

	// The API server's type check is shown, at the place of the tool's own spec.
	policy, _, err = w.fences("refund")
	must(t, err)
	policy.Status = admissionv1.ValidatingAdmissionPolicyStatus{ObservedGeneration: policy.Generation, TypeChecking: &admissionv1.TypeChecking{
		ExpressionWarnings: []admissionv1.ExpressionWarning{{FieldRef: "spec.validations[1].expression", Warning: "guardrails.holdfast.dev/v1alpha1, Kind=PaymentIntent: ERROR: no matching overload"}},
	}}
	must(t, admin.Status().Update(w.ctx, policy))
	message := w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonWarnings)
	contains(t, message, "spec.admission[2].expression: guardrails.holdfast.dev/v1alpha1, Kind=PaymentIntent: ERROR: no matching overload")
	w.rules("refund", below500, onlyUSD)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonAccepted)

	// A tool that is deleted, also while nobody looks, leaves nothing behind.
	must(t, admin.Delete(w.ctx, &v1alpha1.AgentTool{ObjectMeta: w.meta("one")}))
	w.unfenced("one")
	p.stop()
	must(t, admin.Delete(w.ctx, &v1alpha1.AgentTool{ObjectMeta: w.meta("two")}))
	if _, _, err := w.fences("two"); err != nil {
		t.Fatalf("nobody is there to remove them: %v", err)
	}
	start(t, dir)
	w.unfenced("two")
	// And rules that are taken away.
	w.rules("refund")
	w.unfenced("refund")
}

// A release that could not be used is spent, and the hold that stands anew says why.
func TestAReleaseMustPassWhatTheToolSaysNow(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	release := v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}
	n := 0
	held := func() *v1alpha1.PaymentHold {
		t.Helper()
		n++
		order := fmt.Sprint("order-", n)
		w.pay(p, "refund", "first-"+order, order, "10", guard.AttemptSucceeded)
		return w.shown(w.holdOf(p, "second-"+order, order, "11"), v1alpha1.HoldHeld)
	}
	for _, tc := range []struct {
		name, why string
		change    func()
		reasons   string
	}{
		{"a rule denies", "a rule of the tool denies it now: only 9", func() {
			w.rules("refund", rule(v1alpha1.AdmissionDeny, `object.spec.amount.value == "9"`, "only 9"))
		}, "[ScopeOverlap]"},
		{"the spec is not valid", "cannot be called as it is: spec.identity.recipient", func() {
			w.change("refund", func(s *v1alpha1.AgentToolSpec) { s.Identity.Recipient = "call." })
		}, "[ScopeOverlap]"},
		{"no room in a budget that denies", `it would exceed the limit "daily" of the budget`, func() { w.limit(v1alpha1.ExceedDeny) }, "[ScopeOverlap]"},
		{"no room in a budget that holds", `it would exceed the limit "daily" of the budget`, func() { w.limit(v1alpha1.ExceedHold) }, "[ScopeOverlap BudgetExceeded]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			hold := held()
			tc.change()
			must(t, w.resolve(hold.Name, release))
			void := w.shown(hold.Name, v1alpha1.HoldVoid)
			contains(t, void.Status.Effect, "It was not taken: ", tc.why)
			next := w.shown(strings.TrimSuffix(hold.Name, "1")+"2", v1alpha1.HoldHeld)
			contains(t, next.Status.Cause, "Release was not taken: ", tc.why)
			if got := fmt.Sprint(next.Spec.Reasons); got != tc.reasons {
				t.Errorf("the reasons are %s, want %s", got, tc.reasons)
			}
			// Mended, the new one can be released.
			w.change("refund", func(s *v1alpha1.AgentToolSpec) { s.Admission, s.Identity.Recipient = nil, "call.body.order" })
			if tc.reasons == "[ScopeOverlap]" {
				w.limit("")
			}
			must(t, w.resolve(next.Name, release))
			w.shown(next.Name, v1alpha1.HoldResolved)
		})
	}
}

// limit gives the budget a limit that is too small for anything, or takes it away.
func (w *world) limit(exceed v1alpha1.ExceedPolicy) {
	w.Helper()
	eventually(w.T, func() error {
		var b v1alpha1.IntentBudget
		if err := w.get("refunds", &b); err != nil {
			return err
		}
		b.Spec.Spend = nil
		if exceed != "" {
			b.Spec.Spend = []v1alpha1.SpendLimit{{Name: "daily", Currency: "USD", Limit: "1", Window: metav1.Duration{Duration: time.Hour}, OnExceed: exceed}}
		}
		return admin.Update(w.ctx, &b)
	})
}

// ApprovalRequired from the call to the release, and an expiry that a person sees.
func TestAnApprovalIsGivenOrExpires(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	budget, tool := w.budget("refunds", "payments"), w.tool("refund", "refunds")
	budget.Spec.Holds = &v1alpha1.HoldsSpec{ExpireAfter: metav1.Duration{Duration: 12 * time.Second}}
	tool.Spec.Admission = []v1alpha1.AdmissionRule{below500, below800}
	w.create(w.store("payments"), budget, tool)
	w.toolReady("refund")
	if a := w.call(p, "refund", "a", "1", "801"); a.Verdict != guard.Deny || a.Reason != guard.ReasonDeniedByRule || a.Rule != below800.Message {
		t.Errorf("%+v", a)
	}
	approved, expires := w.holdOf(p, "b", "2", "501"), w.holdOf(p, "c", "3", "501")
	hold := w.shown(approved, v1alpha1.HoldHeld)
	if fmt.Sprint(hold.Spec.Reasons) != "[ApprovalRequired]" || hold.Status.Cause != below500.Message {
		t.Errorf("%s", asJSON(hold))
	}
	must(t, w.resolve(approved, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}))
	w.shown(approved, v1alpha1.HoldResolved)
	w.pay(p, "refund", "b", "2", "501", guard.AttemptSucceeded)
	over := w.shown(expires, v1alpha1.HoldResolved)
	contains(t, over.Status.Effect, "Nobody decided within 12s: rejected")
	if c := find(over.Status.Conditions, v1alpha1.ConditionResolved); c == nil || c.Status != metav1.ConditionTrue || c.Reason != "Reject" || over.Spec.Resolution != nil {
		t.Errorf("%s", asJSON(over))
	}
	if a := w.call(p, "refund", "c", "3", "501"); a.Verdict != guard.Deny || a.Reason != guard.ReasonHoldExpired {
		t.Errorf("%+v", a)
	}
	// Too late to be decided.
	if err := w.resolve(expires, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}); err == nil || !strings.Contains(err.Error(), "this hold is Resolved") {
		t.Errorf("a hold that is over should not be resolved, got %v", err)
	}
}

// The rules of a PaymentIntent: refused by the API server where they deny, and asked again by whoever registers it.
func TestAPaymentIntentMustPassTheRules(t *testing.T) {
	w := newWorld(t)
	start(t, t.TempDir())
	w.account()
	tool := w.tool("refund", "refunds")
	tool.Spec.Admission = []v1alpha1.AdmissionRule{
		below500, below800, rule(v1alpha1.AdmissionHold, `object.spec.recipient != "13" || object.spec.lineage == "a"`, "13 needs a lineage"),
	}
	w.create(w.store("payments"), w.budget("refunds", "payments"), tool)
	w.toolReady("refund")
	// The API server knows a policy some time after it was made.
	eventually(t, func() error {
		err := admin.Create(w.ctx, w.intent("probe", "probe", "1", "801"), client.DryRunAll)
		if err == nil || !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "denied request: "+below800.Message) {
			return fmt.Errorf("an intent that a rule denies should be refused, got: %w", err)
		}
		return nil
	})
	// The operator is not asked there, and asks itself.
	denied := w.intent("denied", "denied", "2", "801")
	must(t, as(operatorUser).Create(w.ctx, denied))
	o := w.says("denied", v1alpha1.IntentDeny, "", "DeniedByRule")
	contains(t, asJSON(o.Status), below800.Message)
	failing := w.intent("failing", "failing", "13", "1")
	w.create(failing)
	o = w.says("failing", v1alpha1.IntentDeny, "", "DeniedByRule")
	contains(t, asJSON(o.Status), "no such key: lineage")
	w.create(w.intent("held", "held", "4", "501"))
	o = w.says("held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)
	w.create(w.intent("fine", "fine", "5", "500"))
	w.says("fine", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	if hold := w.shown(o.Status.Hold, v1alpha1.HoldHeld); hold.Status.Cause != below500.Message {
		t.Errorf("%s", asJSON(hold.Status))
	}
}
