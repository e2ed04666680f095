// This file gives the metrics what the controllers know: which tools exist, what waits
// for a person, how the stores and budgets stand.

package controller

import (
	"errors"
	"strconv"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// toolNames are the AgentTools that exist.
func (o *Operator) toolNames() (names []metrics.Name) {
	o.Policies.Load().Names(func(namespace, name string) {
		names = append(names, metrics.Name{Namespace: namespace, Name: name})
	})
	return names
}

// evidence writes down what is known of an attempt whose result could not be written
// to its record: it is held as unknown, and whoever resolves that looks here.
func evidence(log logr.Logger, m *metrics.Metrics) func(guard.Evidence) {
	return func(e guard.Evidence) {
		log.Error(e.Cause, "the result of an attempt could not be written to its record; the intent will be held as unknown",
			"namespace", e.Key.Namespace, "tool", e.Key.Tool, "caller", e.Key.Caller, "intentID", e.Key.IntentID, "attempt", e.Attempt,
			"outcome", e.Outcome, "status", e.Status, "providerKey", e.ProviderKey, "providerReference", e.ProviderReference, "detail", e.Detail)
		m.Tool(e.Key.Namespace, e.Key.Tool).NotWritten()
	}
}

// contradicts says that a late result contradicts what was decided.
func contradicts(c guard.Change) bool {
	return (c.Event == lateSuccess || c.Event == lateEvidence) && (c.Intent.RefundOwed || c.Intent.Disputed)
}

// countLate counts a late result that contradicts what was decided.
func countLate(m *metrics.Metrics, c guard.Change) {
	if !contradicts(c) {
		return
	}
	t := m.Tool(c.Intent.Namespace, c.Intent.Tool)
	if c.Intent.RefundOwed {
		t.Late(metrics.RefundOwed)
	}
	if c.Intent.Disputed {
		t.Late(metrics.Disputed)
	}
}

// openHold is a held record as it is counted.
func openHold(v guard.View) metrics.Hold {
	h := metrics.Hold{Namespace: v.Namespace, Tool: v.Tool, State: string(v.Hold.State), Since: v.Hold.At}
	if len(v.Hold.Reasons) > 0 {
		h.Reason = string(v.Hold.Reasons[0])
	}
	return h
}

// measure shows the open holds of all stores.
func (w *Worklist) measure(open map[metrics.Name][]metrics.Hold) {
	w.open = open
	if w.Metrics == nil {
		return
	}
	var all []metrics.Hold
	for _, holds := range open {
		all = append(all, holds...)
	}
	w.Metrics.SetHolds(all)
}

// measure shows what a visit of a store has come to.
func (r *StoreReconciler) measure(nn types.NamespacedName, v visit, failed error) {
	if r.Metrics == nil {
		return
	}
	s := metrics.StoreState{Refused: refused(failed), Judged: v.judged, Durable: losing(v.found.Findings) == nil}
	r.Metrics.SetStore(metrics.Name{Namespace: nn.Namespace, Name: nn.Name}, s)
}

func (r *StoreReconciler) unmeasure(nn types.NamespacedName) {
	if r.Metrics != nil {
		r.Metrics.RemoveStore(metrics.Name{Namespace: nn.Namespace, Name: nn.Name})
	}
}

// refused is why no calls are served from a store, in one word.
func refused(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, store.ErrMemoryLost):
		return metrics.MemoryLost
	case errors.Is(err, guard.ErrClockJumped):
		return metrics.ClockJumped
	case errors.Is(err, store.ErrNotDurable):
		return metrics.NotDurable
	default:
		return metrics.Unavailable
	}
}

// measure shows how a budget stands.
func (r *BudgetReconciler) measure(obj *v1alpha1.IntentBudget, now v1alpha1.IntentBudgetStatus) {
	if r.Metrics == nil || now.Held == nil {
		return
	}
	b := metrics.Budget{Held: int(*now.Held), HeldLimit: policy.MaxHeld(obj)}
	for i := range now.Spend {
		if s, err := spendShown(&now.Spend[i]); err == nil {
			b.Spend = append(b.Spend, s)
		}
	}
	r.Metrics.SetBudget(metrics.Name{Namespace: obj.Namespace, Name: obj.Name}, b)
}

// spendShown is a limit as it is shown. An amount that is no number is one that the
// status should not have, and is left out.
func spendShown(s *v1alpha1.SpendStatus) (metrics.Spend, error) {
	used, err1 := strconv.ParseFloat(s.Used, 64)
	reserved, err2 := strconv.ParseFloat(s.Reserved, 64)
	limit, err3 := strconv.ParseFloat(s.Limit, 64)
	if s.Per != "" {
		limit = 0 // of each value, and not of their sum
	}
	return metrics.Spend{Limit: s.Name, Currency: s.Currency, Used: used, Reserved: reserved, Max: limit}, errors.Join(err1, err2, err3)
}

func (r *BudgetReconciler) unmeasure(nn types.NamespacedName) {
	if r.Metrics != nil {
		r.Metrics.RemoveBudget(metrics.Name{Namespace: nn.Namespace, Name: nn.Name})
	}
}
