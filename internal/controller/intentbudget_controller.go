// This file says of each IntentBudget whether it can do its work, how many of its
// intents wait for a person, and what counts against its limits.

package controller

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// The reasons of an IntentBudget's conditions.
const (
	reasonStoreReady    = "StoreReady"
	reasonStoreNotFound = "StoreNotFound"
	reasonStoreNotReady = "StoreNotReady"
)

// heldLook is how often held intents and spend are counted.
const heldLook = 5 * time.Second

// BudgetReconciler writes the status of IntentBudgets.
type BudgetReconciler struct {
	Client  client.Client
	Memory  *Memory
	Engines *guard.Engines
	// Metrics show what was counted; nil: nobody asks.
	Metrics *metrics.Metrics
}

// SetupWithManager watches the budgets, their stores and the operator's memory.
func (r *BudgetReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.IntentBudget{}).
		Watches(&v1alpha1.IdempotencyStore{}, handler.EnqueueRequestsFromMapFunc(r.ofStore), builder.WithPredicates(conditionsChanged())).
		Watches(&corev1.ConfigMap{}, enqueueAll(r.Client, &v1alpha1.IntentBudgetList{}), builder.WithPredicates(isMemory(r.Memory))).
		Complete(r)
}

func (r *BudgetReconciler) ofStore(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.IntentBudgetList{}, obj.GetNamespace(), func(o client.Object) bool {
		b, ok := o.(*v1alpha1.IntentBudget)
		return ok && b.Spec.StoreRef.Name == obj.GetName()
	})
}

// Reconcile writes the budget's status.
func (r *BudgetReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var obj v1alpha1.IntentBudget
	if err := r.Client.Get(ctx, req.NamespacedName, &obj); err != nil {
		if apierrors.IsNotFound(err) {
			r.unmeasure(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	next := v1alpha1.IntentBudgetStatus{ObservedGeneration: obj.Generation, Held: obj.Status.Held, Spend: stillLimited(&obj)}
	set := newConditions(obj.Status.Conditions, obj.Generation)
	result := ctrl.Result{}

	was, err := r.Memory.BindBudget(ctx, req.NamespacedName, obj.Spec.StoreRef.Name)
	if err != nil {
		return result, err
	}
	if was != obj.Spec.StoreRef.Name {
		message := budgetRebound(r.Memory, req.NamespacedName, was, obj.Spec.StoreRef.Name)
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonRebound, message)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, v1alpha1.ReasonRebound, message)
		next.Held, next.Spend = nil, nil
	} else {
		reason, message, err := storeReady(ctx, r.Client, types.NamespacedName{Namespace: req.Namespace, Name: was})
		if err != nil {
			return result, err
		}
		// Admission has checked the spec, but for what only compiling tells.
		if err := policy.CheckBudget(&obj); err != nil {
			set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, policy.ReasonInvalid, err.Error())
			set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, policy.ReasonInvalid, err.Error())
		} else if reason == "" {
			set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reasonStoreReady, "The budget's store serves.")
		} else {
			set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reason, message)
		}
		// While the store cannot be asked, the last numbers stand: nobody cleared those holds.
		if engine, err := r.Engines.Get(req.Namespace, was); err == nil {
			held, err := engine.HeldCount(ctx, req.Name)
			if err != nil {
				return result, fmt.Errorf("count the held intents: %w", err)
			}
			next.Held = ptr.To(int32(held))
			if next.Spend, err = spendOf(ctx, engine, &obj); err != nil {
				return result, fmt.Errorf("sum up the spend: %w", err)
			}
		}
		result.RequeueAfter = heldLook
	}
	r.measure(&obj, next)
	next.Conditions = set.list
	old := obj.Status
	old.Conditions = sorted(old.Conditions)
	if _, err := applyStatus(ctx, r.Client, &obj, &old, &next, ownerBudget); err != nil {
		return ctrl.Result{}, err
	}
	return result, nil
}

// spendOf is what counts against each limit of a budget.
func spendOf(ctx context.Context, engine *guard.Engine, obj *v1alpha1.IntentBudget) ([]v1alpha1.SpendStatus, error) {
	var out []v1alpha1.SpendStatus
	for i := range obj.Spec.Spend {
		l := &obj.Spec.Spend[i]
		spent, err := engine.Spend(ctx, obj.Name, l.Name, l.Currency)
		if err != nil {
			return nil, err
		}
		out = append(out, v1alpha1.SpendStatus{
			Name: l.Name, Currency: l.Currency, Used: spent.Used, Reserved: spent.Reserved, Limit: l.Limit, Per: l.Per,
		})
	}
	return out, nil
}

// stillLimited is the last status of the limits that are still in the spec as they were.
func stillLimited(obj *v1alpha1.IntentBudget) []v1alpha1.SpendStatus {
	var out []v1alpha1.SpendStatus
	for _, s := range obj.Status.Spend {
		for i := range obj.Spec.Spend {
			if l := &obj.Spec.Spend[i]; l.Name == s.Name && l.Currency == s.Currency && l.Limit == s.Limit && l.Per == s.Per {
				out = append(out, s)
			}
		}
	}
	return out
}

// budgetRebound says what to do about a budget that was made again with another store.
func budgetRebound(m *Memory, budget types.NamespacedName, was, is string) string {
	return fmt.Sprintf("IntentBudget %s had the IdempotencyStore %q before, where its memory is, and now names %q. "+
		"Make it again with storeRef %q; or, to leave that memory behind, set the key %q of the %s to %q",
		budget.Name, was, is, was, memoryKey(storeOf, budget), m, is)
}

// storeReady says why a store does not serve; "": it does.
func storeReady(ctx context.Context, c client.Reader, nn types.NamespacedName) (reason, message string, err error) {
	var st v1alpha1.IdempotencyStore
	err = c.Get(ctx, nn, &st)
	if apierrors.IsNotFound(err) {
		return reasonStoreNotFound, fmt.Sprintf("There is no IdempotencyStore %q in this namespace.", nn.Name), nil
	}
	if err != nil {
		return "", "", err
	}
	if isTrue(st.Status.Conditions, v1alpha1.ConditionReady, st.Generation) {
		return "", "", nil
	}
	message = "it was not looked at yet"
	if ready := find(st.Status.Conditions, v1alpha1.ConditionReady); ready != nil {
		message = ready.Reason + ": " + ready.Message
	}
	return reasonStoreNotReady, fmt.Sprintf("IdempotencyStore %q is not ready: %s", nn.Name, message), nil
}
