// This file compiles the AgentTools into the policy that the gateway runs.
//
// A tool is served only if its spec is valid as a whole and its chain of references
// is the one that is remembered. Whether its store is ready is asked for each call.

package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// The reasons of an AgentTool's conditions.
const (
	reasonAccepted        = "Accepted"
	reasonProgrammed      = "Programmed"
	reasonNotServed       = "NotServed"
	reasonWaitsForGateway = "WaitingForGateways"
	reasonReady           = "Ready"
	reasonRequestKeys     = "RequestKeysMissing"
	reasonWarnings        = "AcceptedWithWarnings"
)

// pendingMessage is why a tool is refused that could not be looked at to the end.
const pendingMessage = "Holdfast could not look at it to the end, and tries again; the manager's log says why"

// ToolReconciler keeps the policy, and writes the status of AgentTools.
type ToolReconciler struct {
	Client   client.Client
	Memory   *Memory
	Policies *policy.Current
	Gateways *Gateways
	// RequestKeys seal what is kept of tools with unknownOutcome Resume.
	RequestKeys *RequestKeys
	// Leading says whether this process writes the status; the others only serve.
	Leading func() bool
	// Fences keeps the admission policies; nil: this process keeps none.
	Fences *Fences
	// Programmed is told when the policy has changed; nil: nobody is.
	Programmed func()

	mu  sync.Mutex
	run map[types.NamespacedName]running
}

// running is what the policy holds of a tool.
type running struct {
	tool, budget objectVersion
	compiled     *policy.Tool
	refused      refusal
}

// objectVersion is one spec of one object.
type objectVersion struct {
	uid        types.UID
	generation int64
}

func versionOf(o client.Object) objectVersion { return objectVersion{o.GetUID(), o.GetGeneration()} }

// SetupWithManager watches the tools, all that they refer to, and the gateways.
func (r *ToolReconciler) SetupWithManager(mgr ctrl.Manager) error {
	all := enqueueAll(r.Client, &v1alpha1.AgentToolList{})
	b := ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.AgentTool{}).
		Watches(&v1alpha1.IntentBudget{}, handler.EnqueueRequestsFromMapFunc(r.ofBudget), builder.WithPredicates(conditionsChanged())).
		Watches(&v1alpha1.IdempotencyStore{}, handler.EnqueueRequestsFromMapFunc(r.ofStore), builder.WithPredicates(conditionsChanged())).
		Watches(&corev1.ConfigMap{}, all, builder.WithPredicates(isMemory(r.Memory))).
		Watches(&coordinationv1.Lease{}, all, builder.WithPredicates(seenChanged())).
		WatchesRawSource(onElection(mgr, r.Client, &v1alpha1.AgentToolList{})).
		// Every gateway compiles the tools.
		WithOptions(ctrlcontroller.Options{NeedLeaderElection: ptr.To(false)})
	if r.Fences != nil {
		r.Fences.watches(mgr, b)
	}
	return b.Complete(r)
}

func (r *ToolReconciler) ofBudget(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.AgentToolList{}, obj.GetNamespace(), func(o client.Object) bool {
		t, ok := o.(*v1alpha1.AgentTool)
		return ok && t.Spec.IntentBudgetRef != nil && t.Spec.IntentBudgetRef.Name == obj.GetName()
	})
}

func (r *ToolReconciler) ofStore(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.AgentToolList{}, obj.GetNamespace(), func(o client.Object) bool {
		t, ok := o.(*v1alpha1.AgentTool)
		return ok && t.Spec.IntentBudgetRef != nil
	})
}

// refusal is why a tool is not accepted.
type refusal struct {
	reason, message string
	// stalled: only a person can change it.
	stalled bool
}

// Reconcile puts the tool into the policy, or takes it out, and writes its status.
func (r *ToolReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var obj v1alpha1.AgentTool
	if err := r.Client.Get(ctx, req.NamespacedName, &obj); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, err
		}
		r.remove(req.NamespacedName)
		if r.Fences != nil && r.Leading() {
			return ctrl.Result{}, r.Fences.remove(ctx, req.NamespacedName)
		}
		return ctrl.Result{}, nil
	}
	no, store, err := r.program(ctx, &obj)
	var unbound *notBoundError
	if errors.As(err, &unbound) {
		// The change of what is remembered brings the tool here again. Until then this
		// gateway has not come to it, and says so by its Lease.
		if _, _, ok := r.Serves(req.NamespacedName); !ok {
			r.Policies.Refuse(&policy.NotServedError{
				Namespace: req.Namespace, Tool: req.Name, Reason: policy.ReasonPending, Message: "the controllers have not looked at it yet",
			})
		}
		return ctrl.Result{}, nil
	}
	if err != nil {
		r.failed(&obj)
		return ctrl.Result{}, err
	}
	if !r.Leading() {
		return ctrl.Result{}, nil
	}
	next := v1alpha1.AgentToolStatus{ObservedGeneration: obj.Generation}
	set := newConditions(obj.Status.Conditions, obj.Generation)
	result := ctrl.Result{}
	if no != nil {
		set.set(v1alpha1.ConditionAccepted, metav1.ConditionFalse, no.reason, no.message)
		set.set(v1alpha1.ConditionProgrammed, metav1.ConditionFalse, reasonNotServed, "A tool that is not accepted is not served.")
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, no.reason, no.message)
		if no.stalled {
			set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, no.reason, no.message)
		}
	} else {
		warnings, err := r.Fences.apply(ctx, &obj)
		if err != nil {
			return result, err
		}
		set.set(v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonAccepted, "The spec is valid and its references hold.")
		if len(warnings) > 0 {
			set.set(v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonWarnings, warned(warnings))
		}
		programmed, why, err := r.Gateways.programmed(ctx, &obj)
		if err != nil {
			return result, err
		}
		reason, message := "", ""
		if store != "" {
			reason, message, err = storeReady(ctx, r.Client, types.NamespacedName{Namespace: req.Namespace, Name: store})
			if err != nil {
				return result, err
			}
		}
		if now := r.runs(req.NamespacedName).compiled; reason == "" && now != nil && now.Resume != nil {
			// Without keys its calls are refused.
			if _, err := r.RequestKeys.Reread(ctx); errors.Is(err, errRequestKeys) {
				reason = reasonRequestKeys
				message = fmt.Sprintf("A tool with unknownOutcome Resume is refused while its requests cannot be kept encrypted: %v.", err)
			} else if err != nil {
				return result, err
			}
		}
		if programmed {
			set.set(v1alpha1.ConditionProgrammed, metav1.ConditionTrue, reasonProgrammed, "Every gateway serves this generation.")
		} else {
			set.set(v1alpha1.ConditionProgrammed, metav1.ConditionFalse, reasonWaitsForGateway, why)
		}
		switch {
		case reason != "":
			set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reason, message)
		case !programmed:
			set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonWaitsForGateway, why)
		default:
			set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reasonReady, "The tool can be called.")
		}
		// A gateway that stops tells nobody.
		result.RequeueAfter = leaseDuration
		if reason == reasonRequestKeys {
			result.RequeueAfter = keysRetry
		}
	}
	next.Conditions = set.list
	was := obj.Status
	was.Conditions = sorted(was.Conditions)
	if _, err := applyStatus(ctx, r.Client, &obj, &was, &next, ownerTool); err != nil {
		return ctrl.Result{}, err
	}
	return result, nil
}

// program brings the policy to what the tool is now. It returns why the tool is
// refused, or the name of its store.
func (r *ToolReconciler) program(ctx context.Context, obj *v1alpha1.AgentTool) (*refusal, string, error) {
	nn := client.ObjectKeyFromObject(obj)
	budget, no, err := r.budget(ctx, obj)
	if err != nil {
		return nil, "", err
	}
	now := running{tool: versionOf(obj)}
	if budget != nil {
		now.budget = versionOf(budget)
	}
	was := r.runs(nn)
	if no == nil {
		// What was compiled of the same objects is the same.
		if now.compiled = was.compiled; now.compiled == nil || was.tool != now.tool || was.budget != now.budget {
			now.compiled, err = policy.Compile(obj, budget)
			var invalid *policy.SpecError
			var unserved *policy.NotServedError
			switch {
			case errors.As(err, &invalid):
				no = &refusal{reason: policy.ReasonInvalid, message: invalid.Error(), stalled: true}
			case errors.As(err, &unserved):
				no = &refusal{reason: unserved.Reason, message: unserved.Message}
			case err != nil:
				return nil, "", fmt.Errorf("compile AgentTool %s: %w", nn, err)
			}
		}
	}
	if no == nil {
		// A person may change what is remembered at any time: it is asked at every visit.
		if no, err = r.bind(ctx, obj, budget); err != nil {
			return nil, "", err
		}
	}
	if no != nil {
		now.refused = *no
		if now != was {
			r.Policies.Refuse(&policy.NotServedError{Namespace: nn.Namespace, Tool: nn.Name, Reason: no.reason, Message: no.message})
			r.set(nn, now)
		}
		return no, "", nil
	}
	if now != was {
		r.Policies.Set(now.compiled)
		r.set(nn, now)
	}
	return nil, now.compiled.Store, nil
}

// failed notes a visit that could not come to an end. What is served of the tool stays
// so; a tool of which nothing is served is refused until a later visit knows more.
func (r *ToolReconciler) failed(obj *v1alpha1.AgentTool) {
	nn := client.ObjectKeyFromObject(obj)
	was := r.runs(nn)
	if was.tool == versionOf(obj) || was.compiled != nil && was.refused == (refusal{}) {
		return
	}
	no := refusal{reason: policy.ReasonPending, message: pendingMessage}
	r.Policies.Refuse(&policy.NotServedError{Namespace: nn.Namespace, Tool: nn.Name, Reason: no.reason, Message: no.message})
	r.set(nn, running{tool: versionOf(obj), refused: no})
}

// budget is the one that the tool refers to.
func (r *ToolReconciler) budget(ctx context.Context, obj *v1alpha1.AgentTool) (*v1alpha1.IntentBudget, *refusal, error) {
	if obj.Spec.IntentBudgetRef == nil {
		return nil, nil, nil
	}
	var budget v1alpha1.IntentBudget
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: obj.Namespace, Name: obj.Spec.IntentBudgetRef.Name}, &budget)
	if apierrors.IsNotFound(err) {
		return nil, &refusal{
			reason:  policy.ReasonBudgetNotFound,
			message: fmt.Sprintf("There is no IntentBudget %q in this namespace.", obj.Spec.IntentBudgetRef.Name),
		}, nil
	}
	if err != nil {
		return nil, nil, err
	}
	return &budget, nil, nil
}

// bind remembers the chain before the tool is served, and refuses one that is not as remembered.
func (r *ToolReconciler) bind(ctx context.Context, obj *v1alpha1.AgentTool, budget *v1alpha1.IntentBudget) (*refusal, error) {
	nn := client.ObjectKeyFromObject(obj)
	ref := ""
	if budget != nil {
		of := client.ObjectKeyFromObject(budget)
		was, err := r.Memory.BindBudget(ctx, of, budget.Spec.StoreRef.Name)
		if err != nil {
			return nil, err
		}
		if was != budget.Spec.StoreRef.Name {
			return &refusal{v1alpha1.ReasonRebound, budgetRebound(r.Memory, of, was, budget.Spec.StoreRef.Name), true}, nil
		}
		ref = budget.Name
	}
	was, err := r.Memory.BindTool(ctx, nn, ref)
	if err != nil || was == ref {
		return nil, err
	}
	is, set := "names none", fmt.Sprintf("remove the key %q from the %s", memoryKey(budgetOf, nn), r.Memory)
	if ref != "" {
		is, set = fmt.Sprintf("names %q", ref), fmt.Sprintf("set the key %q of the %s to %q", memoryKey(budgetOf, nn), r.Memory, ref)
	}
	return &refusal{v1alpha1.ReasonRebound, fmt.Sprintf("AgentTool %s had the IntentBudget %q before, where its intents are compared, and now %s. "+
		"Make it again with intentBudgetRef %q; or, to leave those intents behind, %s", nn.Name, was, is, was, set), true}, nil
}

func (r *ToolReconciler) runs(nn types.NamespacedName) running {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.run[nn]
}

// set notes what the policy holds now. The policy was changed before.
func (r *ToolReconciler) set(nn types.NamespacedName, now running) {
	r.mu.Lock()
	if r.run == nil {
		r.run = map[types.NamespacedName]running{}
	}
	r.run[nn] = now
	r.mu.Unlock()
	if r.Programmed != nil {
		r.Programmed()
	}
}

func (r *ToolReconciler) remove(nn types.NamespacedName) {
	r.Policies.Remove(nn.Namespace, nn.Name)
	r.mu.Lock()
	uid := r.run[nn].tool.uid
	delete(r.run, nn)
	r.mu.Unlock()
	r.Gateways.forget(uid)
}

// Serves says at which generation the policy has this tool, also where it refuses it.
func (r *ToolReconciler) Serves(nn types.NamespacedName) (types.UID, int64, bool) {
	t := r.runs(nn).tool
	return t.uid, t.generation, t.uid != ""
}
