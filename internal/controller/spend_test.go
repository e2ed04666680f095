// What counts against a budget's limits is in its status, and a limit that cannot be
// used is told there.

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

func TestSpendIsInTheStatus(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	b := w.budget("refunds", "payments")
	day := metav1.Duration{Duration: 24 * time.Hour}
	b.Spec.Spend = []v1alpha1.SpendLimit{
		{Name: "daily", Currency: "USD", Limit: "100.00", Window: day, Per: "object.spec.caller"},
		{Name: "euro", Currency: "EUR", Limit: "5", Window: day},
	}
	w.create(w.store("payments"), b, w.tool("refund", "refunds"))
	w.toolReady("refund")
	shows := func(want ...v1alpha1.SpendStatus) {
		t.Helper()
		eventually(t, func() error {
			if _, err := p.op.budgets.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: "refunds"}}); err != nil {
				return err
			}
			var got v1alpha1.IntentBudget
			if err := w.get("refunds", &got); err != nil {
				return err
			}
			if !slices.Equal(got.Status.Spend, want) {
				return fmt.Errorf("the status shows %s", asJSON(got.Status.Spend))
			}
			return nil
		})
	}
	daily := v1alpha1.SpendStatus{Name: "daily", Currency: "USD", Used: "0", Reserved: "0", Limit: "100.00", Per: "object.spec.caller"}
	euro := v1alpha1.SpendStatus{Name: "euro", Currency: "EUR", Used: "0", Reserved: "0", Limit: "5"}
	shows(daily, euro)
	w.pay(p, "refund", "a", "9", "60.50", guard.AttemptSucceeded)
	w.pay(p, "refund", "b", "10", "30", guard.AttemptUnknown)
	daily.Used, daily.Reserved = "60.5", "30"
	shows(daily, euro)
	if a := w.call(p, "refund", "c", "11", "9.51"); a.Verdict != guard.Deny || a.Reason != guard.ReasonSpendExceeded || a.Spend.Left != "9.5" {
		t.Errorf("%s %s %+v", a.Verdict, a.Reason, a.Spend)
	}

	t.Log("a limit that is taken away is no longer shown")
	change := func(limits ...v1alpha1.SpendLimit) {
		t.Helper()
		eventually(t, func() error {
			var now v1alpha1.IntentBudget
			if err := w.get("refunds", &now); err != nil {
				return err
			}
			now.Spec.Spend = limits
			return admin.Update(w.ctx, &now)
		})
	}
	change(b.Spec.Spend[1])
	shows(euro)

	t.Log("one that cannot be used stalls the budget, and its tools are not served")
	bad := b.Spec.Spend[1]
	bad.Per = "object.spec.callr"
	change(bad)
	message := w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionReady, metav1.ConditionFalse, policy.ReasonInvalid)
	contains(t, message, "spec.spend[0].per", "undefined field")
	w.condition(&v1alpha1.IntentBudget{}, "refunds", v1alpha1.ConditionStalled, metav1.ConditionTrue, policy.ReasonInvalid)
	w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionAccepted, metav1.ConditionFalse, policy.ReasonBudgetInvalid)
}
