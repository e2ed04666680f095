// This file says of each IntentBudget whether it can do its work, and how many of its
// intents wait for a person.

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
)

// The reasons of an IntentBudget's conditions.
const (
	reasonStoreReady    = "StoreReady"
	reasonStoreNotFound = "StoreNotFound"
	reasonStoreNotReady = "StoreNotReady"
)

// heldLook is how often the number of held intents is counted.
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
	next := v1alpha1.IntentBudgetStatus{ObservedGeneration: obj.Generation, Held: obj.Status.Held}
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
		next.Held = nil
	} else {
		reason, message, err := storeReady(ctx, r.Client, types.NamespacedName{Namespace: req.Namespace, Name: was})
		if err != nil {
			return result, err
		}
		if reason == "" {
			set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reasonStoreReady, "The budget's store serves.")
		} else {
			set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reason, message)
		}
		// While the store cannot be asked, the last number stands: nobody cleared those holds.
		if engine, err := r.Engines.Get(req.Namespace, was); err == nil {
			held, err := engine.HeldCount(ctx, req.Name)
			if err != nil {
				return result, fmt.Errorf("count the held intents: %w", err)
			}
			next.Held = ptr.To(int32(held))
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
