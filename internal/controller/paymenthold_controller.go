// This file carries a person's decision to the record, once, and writes back what came
// of it.
//
// An object decides nothing: it is shown to the engine under the number, the epoch and
// the nonce that it names, and the record says whether that hold is its own. So a
// forged object, one of a lost memory, or the same one a hundred times releases nothing.

package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// The reasons of a PaymentHold's conditions and events.
const (
	reasonHeld          = "Held"
	reasonWaiting       = "Waiting"
	reasonResolved      = "Resolved"
	reasonVoid          = "Void"
	reasonUnresolved    = "Unresolved"
	reasonNotEnforced   = "AdmissionNotEnforced"
	reasonNotStamped    = "NotStamped"
	reasonOwnCaller     = "OwnCaller"
	reasonRefundOwed    = "RefundOwed"
	reasonDisputed      = "Disputed"
	reasonSent          = "Sent"
	reasonSettled       = "Settled"
	reasonStoreNotKnown = "StoreNotServed"
)

const (
	// maxNote is the longest note of an event.
	maxNote = 1024
	// storeAgain is how soon a store that is not served is asked for again.
	storeAgain = 5 * time.Second
	// tooSoonAgain is how soon it is asked for again while the process begins.
	tooSoonAgain = 200 * time.Millisecond
)

// HoldReconciler takes resolutions and writes the status of PaymentHolds.
type HoldReconciler struct {
	Client client.Client
	Live   client.Client
	// Engines, and what is remembered of stores that none of them serves.
	Engines *guard.Engines
	Memory  *Memory
	Gate    *Gate
	Events  events.EventRecorder
	// Looked says that a store was served or refused since the process began.
	Looked func(types.NamespacedName) bool
	// Look names objects to look at again.
	Look <-chan event.GenericEvent

	// distrusted are objects whose resolution was found while it could be forged, by
	// UID, and why. Their status says it too, once that is written.
	distrusted sync.Map
	// told is what was last told of objects, by name: the cache may still show the status
	// from before the last write, and nothing is told twice.
	told sync.Map
}

// toldOf is one piece of news of one object.
type toldOf struct {
	uid   types.UID
	state v1alpha1.HoldState
}

// SetupWithManager watches the holds, and what the worklist has seen.
func (r *HoldReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.PaymentHold{}).
		Watches(&v1alpha1.IdempotencyStore{}, handler.EnqueueRequestsFromMapFunc(r.ofStore), builder.WithPredicates(conditionsChanged())).
		WatchesRawSource(source.Channel(r.Look, &handler.EnqueueRequestForObject{})).
		Complete(r)
}

// ofStore are the holds of the store's namespace that are not over: whether it is
// served, and under which epoch, is news to them.
func (r *HoldReconciler) ofStore(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.PaymentHoldList{}, obj.GetNamespace(), func(o client.Object) bool {
		h, ok := o.(*v1alpha1.PaymentHold)
		return ok && h.Status.State != v1alpha1.HoldResolved && h.Status.State != v1alpha1.HoldVoid
	})
}

// finding is what is known of a hold at one visit.
type finding struct {
	view guard.HoldView
	// unknown says why nothing can be said of the hold; "" otherwise.
	unknown string
	// withheld says why a resolution was not handed to the record.
	reason, withheld string
	again            time.Duration
}

// Reconcile takes the resolution if there is one, and writes the status.
func (r *HoldReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var obj v1alpha1.PaymentHold
	if err := r.Client.Get(ctx, req.NamespacedName, &obj); err != nil {
		if apierrors.IsNotFound(err) {
			r.told.Delete(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !obj.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil
	}
	if obj.Spec.Record.Epoch == probeEpoch {
		return r.collect(ctx, &obj)
	}
	// A new resolution is judged at once: whatever else keeps it waiting, the store for
	// one, must not outlast the time in which it could be forged.
	distrust, err := r.distrust(ctx, &obj)
	if err != nil {
		return ctrl.Result{}, err
	}
	f, failed := r.find(ctx, &obj, distrust)
	if failed != nil && distrust != "" && !distrusts(&obj) {
		f = finding{unknown: failed.Error()} // it must be written down, whatever else fails
	} else if failed != nil {
		return again(failed)
	}
	if distrust != "" {
		f.reason, f.withheld = reasonNotEnforced, distrust
	}
	if f.view.State == guard.HoldVoid && obj.Status.State == v1alpha1.HoldResolved && obj.Status.ObservedGeneration == obj.Generation {
		// What was taken stays taken, also when the record is long gone.
		return ctrl.Result{}, nil
	}
	next := holdStatus(&obj, f)
	was := obj.Status
	was.Conditions = sorted(was.Conditions)
	wrote, err := applyStatus(ctx, r.Client, &obj, &was, next, ownerHold)
	if err != nil {
		return ctrl.Result{}, err
	}
	if wrote {
		r.tell(&obj, &was, next)
	}
	if failed != nil {
		return again(failed)
	}
	return ctrl.Result{RequeueAfter: f.again}, nil
}

// again is how a visit is repeated that could not find out how the hold stands.
func again(err error) (ctrl.Result, error) {
	if errors.Is(err, errTooSoon) {
		return ctrl.Result{RequeueAfter: tooSoonAgain}, nil
	}
	return ctrl.Result{}, err
}

// collect takes away a hold to probe with that was left behind.
func (r *HoldReconciler) collect(ctx context.Context, obj *v1alpha1.PaymentHold) (ctrl.Result, error) {
	if left := probeKept - time.Since(obj.CreationTimestamp.Time); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(r.Live.Delete(ctx, obj, client.Preconditions{UID: &obj.UID}))
}

// distrust says why the resolution of an object is never taken: it was found while
// anybody could have forged it. That is for good, also once the policies are in force:
// who wrote it cannot be told afterwards. "": nothing speaks against it yet.
func (r *HoldReconciler) distrust(ctx context.Context, obj *v1alpha1.PaymentHold) (string, error) {
	if obj.Spec.Resolution == nil {
		return "", nil
	}
	if why, ok := r.distrusted.Load(obj.UID); ok {
		return fmt.Sprint(why), nil
	}
	if distrusts(obj) {
		return find(obj.Status.Conditions, v1alpha1.ConditionResolved).Message, nil
	}
	if obj.Status.State == v1alpha1.HoldResolved || obj.Status.ObservedGeneration == obj.Generation {
		return "", nil // taken, or judged when it was new
	}
	return r.judge(ctx, obj)
}

// distrusts says that the object's status tells so.
func distrusts(obj *v1alpha1.PaymentHold) bool {
	c := find(obj.Status.Conditions, v1alpha1.ConditionResolved)
	return c != nil && c.Reason == reasonNotEnforced
}

// judge probes whether resolutions are protected now.
func (r *HoldReconciler) judge(ctx context.Context, obj *v1alpha1.PaymentHold) (string, error) {
	err := r.Gate.check(ctx, obj.Namespace)
	if err == nil || !errors.Is(err, errNotRefused) {
		return "", err
	}
	why := fmt.Sprintf("The resolution is not taken, also not later: whether a person with the verb resolve gave it cannot be told, because %s. "+
		"Then delete this object: it comes back without a resolution, to be decided anew", err.Error())
	r.distrusted.Store(obj.UID, why)
	return why, nil
}

// find asks the record, and hands it the resolution if nothing speaks against it.
func (r *HoldReconciler) find(ctx context.Context, obj *v1alpha1.PaymentHold, distrust string) (finding, error) {
	id := holdID(obj)
	void := finding{view: guard.HoldView{HoldID: id, Name: obj.Name, State: guard.HoldVoid}}
	if obj.Name != guard.HoldName(id.Key, id.Number) {
		void.view.Effect = "The object's name is not that of the hold which it describes: the operator did not make it. Nothing was done."
		return void, nil
	}
	engine, err := r.engineOf(ctx, id)
	if errors.Is(err, errNoMemory) {
		void.view.Effect = "It was made under another memory of the store. Nothing was done."
		return void, nil
	}
	if errors.Is(err, errNotServed) {
		return finding{unknown: err.Error(), again: storeAgain}, nil
	}
	if err != nil {
		return finding{}, err
	}
	f := finding{}
	if f.view, err = engine.Hold(ctx, id); err != nil {
		return f, fmt.Errorf("ask the record: %w", err)
	}
	if distrust == "" && obj.Spec.Resolution != nil && (f.view.State == guard.HoldHeld || f.view.State == guard.HoldWaiting) {
		if err := r.resolve(ctx, engine, obj, id, &f); err != nil {
			return f, err
		}
	}
	if f.view.Overdue && obj.Spec.Resolution == nil {
		if err := r.expire(ctx, engine, obj, id, &f); err != nil {
			return f, err
		}
	}
	if f.view.State == guard.HoldWaiting && f.again == 0 {
		f.again = max(time.Until(f.view.WaitingUntil), time.Second)
	}
	open := f.view.State == guard.HoldHeld || f.view.State == guard.HoldWaiting
	if until := f.view.Until; open && !until.IsZero() && obj.Spec.Resolution == nil {
		// The store's clock says when it is over; this one says when to ask it.
		left := max(time.Until(until), time.Second)
		if f.again == 0 || left < f.again {
			f.again = left
		}
	}
	return f, nil
}

// expire ends a hold about which nobody has decided in time. It is the only one to do so:
// here alone it can be known that no resolution waits. The record has said that the time is
// over before the object is looked at, so what was decided in time is seen; a resolution
// that is there, also one that is not taken, keeps the hold.
func (r *HoldReconciler) expire(ctx context.Context, engine *guard.Engine, obj *v1alpha1.PaymentHold, id guard.HoldID, f *finding) error {
	var now v1alpha1.PaymentHold
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(obj), &now); err != nil {
		if apierrors.IsNotFound(err) {
			return nil // the worklist makes it again
		}
		return fmt.Errorf("look whether anybody has decided: %w", err)
	}
	if now.Spec.Resolution != nil || now.UID != obj.UID || !now.DeletionTimestamp.IsZero() {
		return nil
	}
	view, err := engine.Undecided(ctx, id)
	if err != nil {
		return fmt.Errorf("end the hold: %w", err)
	}
	f.view = view
	return nil
}

var (
	errNoMemory  = errors.New("no store of this namespace carries the hold's epoch")
	errTooSoon   = errors.New("the stores of this namespace were not all looked at yet")
	errNotServed = errors.New("the store of this hold is not served now, so nothing can be said of it and no resolution is taken")
)

// engineOf finds the engine by the epoch under which the hold was made: it needs no
// tool and no budget, which may be gone.
func (r *HoldReconciler) engineOf(ctx context.Context, id guard.HoldID) (*guard.Engine, error) {
	find := func() *guard.Engine {
		for _, s := range r.Engines.All() {
			if s.Namespace == id.Key.Namespace && s.Engine.Identity().Epoch == id.Epoch {
				return s.Engine
			}
		}
		return nil
	}
	if e := find(); e != nil {
		return e, nil
	}
	// A store that was not looked at yet is no news: what the status says stands.
	var stores v1alpha1.IdempotencyStoreList
	if err := r.Client.List(ctx, &stores, client.InNamespace(id.Key.Namespace)); err != nil {
		return nil, err
	}
	for i := range stores.Items {
		if !r.Looked(client.ObjectKeyFromObject(&stores.Items[i])) {
			return nil, errTooSoon
		}
	}
	known, err := r.Memory.stores(ctx)
	if err != nil {
		return nil, err
	}
	for name, epoch := range known.epochs(id.Key.Namespace) {
		if epoch == id.Epoch {
			return nil, fmt.Errorf("%w: see IdempotencyStore %s", errNotServed, name)
		}
	}
	// A store that has no remembered epoch yet may turn out to carry this one.
	for i := range stores.Items {
		if _, err := r.Engines.Get(id.Key.Namespace, stores.Items[i].Name); err != nil {
			return nil, fmt.Errorf("%w: see IdempotencyStore %s", errNotServed, stores.Items[i].Name)
		}
	}
	if e := find(); e != nil {
		return e, nil
	}
	return nil, errNoMemory
}

// resolve hands the resolution to the record, if the API server vouches for it.
func (r *HoldReconciler) resolve(ctx context.Context, engine *guard.Engine, obj *v1alpha1.PaymentHold, id guard.HoldID, f *finding) error {
	res := obj.Spec.Resolution
	anew := "Delete this object: it comes back without a resolution"
	switch res.By {
	case "":
		f.reason, f.withheld = reasonNotStamped, "The resolution does not say who gave it. "+anew+"."
		return nil
	case obj.Spec.Caller:
		f.reason, f.withheld = reasonOwnCaller, "The caller of a payment cannot resolve its own hold. "+anew+", for somebody else to decide."
		return nil
	}
	why, err := r.judge(ctx, obj)
	if err != nil {
		return err
	}
	if why != "" {
		f.reason, f.withheld = reasonNotEnforced, why
		return nil
	}
	// The cache may show an object that was deleted meanwhile, or miss that its
	// resolution was found wanting: what is there now decides.
	var now v1alpha1.PaymentHold
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(obj), &now); err != nil {
		if apierrors.IsNotFound(err) {
			return nil // nobody asks any more
		}
		return fmt.Errorf("look at the resolution once more: %w", err)
	}
	if now.UID != obj.UID || !now.DeletionTimestamp.IsZero() || !equality.Semantic.DeepEqual(now.Spec.Resolution, res) {
		return nil
	}
	if distrusts(&now) {
		f.reason, f.withheld = reasonNotEnforced, find(now.Status.Conditions, v1alpha1.ConditionResolved).Message
		return nil
	}
	var released callable
	if res.Decision == v1alpha1.DecisionRelease {
		if released, err = r.callable(ctx, types.NamespacedName{Namespace: obj.Namespace, Name: obj.Spec.ToolRef.Name}); err != nil {
			return err
		}
	}
	view, err := engine.Resolve(ctx, guard.Resolution{
		HoldID: id, Decision: guard.Decision(res.Decision), Reason: res.Reason, By: res.By,
		ProviderReference: res.ProviderReference, Result: []byte(res.Result), ToolGone: released.gone, Now: released.now,
	})
	if err != nil {
		return fmt.Errorf("hand the resolution to the record: %w", err)
	}
	f.view = view
	return nil
}

// callable is what a tool would say to a call now.
type callable struct {
	gone bool
	now  func(*guard.Call) (guard.Policy, string)
}

// callable asks for the tool and its budget as they are now: a release that could not be
// used would look as if the payment were under way.
func (r *HoldReconciler) callable(ctx context.Context, name types.NamespacedName) (callable, error) {
	unusable := func(why string) (callable, error) {
		return callable{now: func(*guard.Call) (guard.Policy, string) { return guard.Policy{}, why }}, nil
	}
	var tool v1alpha1.AgentTool
	if err := r.Live.Get(ctx, name, &tool); apierrors.IsNotFound(err) {
		return callable{gone: true}, nil
	} else if err != nil {
		return callable{}, fmt.Errorf("look for the hold's AgentTool: %w", err)
	}
	var budget *v1alpha1.IntentBudget
	if ref := tool.Spec.IntentBudgetRef; ref != nil {
		budget = &v1alpha1.IntentBudget{}
		err := r.Live.Get(ctx, types.NamespacedName{Namespace: name.Namespace, Name: ref.Name}, budget)
		if apierrors.IsNotFound(err) {
			budget = nil
		} else if err != nil {
			return callable{}, fmt.Errorf("look for the IntentBudget of the hold's AgentTool: %w", err)
		}
	}
	compiled, err := policy.Compile(&tool, budget)
	var invalid *policy.SpecError
	var unserved *policy.NotServedError
	switch {
	case errors.As(err, &invalid):
		return unusable("the AgentTool " + name.Name + " cannot be called as it is: " + invalid.Error())
	case errors.As(err, &unserved):
		return unusable("the AgentTool " + name.Name + " cannot be called: " + unserved.Message)
	case err != nil:
		return callable{}, fmt.Errorf("read the hold's AgentTool: %w", err)
	case !compiled.Mutating:
		return unusable("the AgentTool " + name.Name + " is ReadOnly now, so nothing could be sent")
	}
	return callable{now: func(c *guard.Call) (guard.Policy, string) { return compiled.GuardFor(c), "" }}, nil
}

// holdStatus says what was found.
func holdStatus(obj *v1alpha1.PaymentHold, f finding) *v1alpha1.PaymentHoldStatus {
	next := standing(obj, f)
	next.Summary = summaryOf(obj)
	next.Explanation = explain(obj, next, f.view.Sent)
	if f.unknown != "" && len(obj.Status.Explanation) > 0 {
		next.Explanation = obj.Status.Explanation // what was sent cannot be asked for now, and stays to be read
	}
	return next
}

// effectOf is what came of the hold, with where to go on if the intent was held again.
func effectOf(v guard.HoldView) string {
	if v.Next == "" || v.State != guard.HoldVoid && v.State != guard.HoldResolved {
		return v.Effect
	}
	// The name stands whole, also in the explanation, however long the sentence before it is.
	again := " The intent was held again, as PaymentHold " + v.Next + "."
	return clip(v.Effect, maxSentence-len(nothingToDecide)-len(again)) + again
}

// standing says where the hold stands.
func standing(obj *v1alpha1.PaymentHold, f finding) *v1alpha1.PaymentHoldStatus {
	next := &v1alpha1.PaymentHoldStatus{ObservedGeneration: obj.Generation}
	set := newConditions(obj.Status.Conditions, obj.Generation)
	if f.unknown != "" {
		// The last state stands, as what it was.
		next.State, next.Effect, next.Cause, next.WaitingUntil = obj.Status.State, obj.Status.Effect, obj.Status.Cause, obj.Status.WaitingUntil
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonStoreNotKnown, f.unknown)
		set.set(v1alpha1.ConditionHeld, metav1.ConditionUnknown, reasonStoreNotKnown, f.unknown)
		if f.withheld != "" {
			set.set(v1alpha1.ConditionResolved, metav1.ConditionFalse, f.reason, f.withheld)
		} else {
			set.set(v1alpha1.ConditionResolved, metav1.ConditionUnknown, reasonStoreNotKnown, f.unknown)
		}
		next.Conditions = set.list
		return next
	}
	v := f.view
	v.Effect = effectOf(v)
	next.State = v1alpha1.HoldState(v.State)
	set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, string(v.State), "The status tells how the hold stands.")
	next.Effect, next.Cause = clip(v.Effect, maxMessage), clip(v.Cause, maxMessage)
	unresolved := func() {
		if f.withheld != "" {
			set.set(v1alpha1.ConditionResolved, metav1.ConditionFalse, f.reason, f.withheld)
			return
		}
		set.set(v1alpha1.ConditionResolved, metav1.ConditionFalse, reasonUnresolved, "Nobody has decided yet.")
	}
	switch v.State {
	case guard.HoldWaiting:
		until := metav1.NewTime(v.WaitingUntil.Truncate(time.Second))
		if v.WaitingUntil.After(until.Time) {
			until = metav1.NewTime(until.Add(time.Second)) // never earlier than it is
		}
		next.WaitingUntil = ptr.To(until)
		set.set(v1alpha1.ConditionHeld, metav1.ConditionTrue, reasonWaiting,
			fmt.Sprintf("The payment was sent and may become visible at the provider until %s. Only Reject and MarkPaid are possible before.", until.UTC().Format(time.RFC3339)))
		unresolved()
	case guard.HoldHeld:
		set.set(v1alpha1.ConditionHeld, metav1.ConditionTrue, reasonHeld, "The payment waits for a person to decide: set spec.resolution.")
		unresolved()
	case guard.HoldResolved:
		set.set(v1alpha1.ConditionHeld, metav1.ConditionFalse, reasonResolved, v.Effect)
		set.set(v1alpha1.ConditionResolved, metav1.ConditionTrue, string(v.Decision), v.Effect)
	default:
		set.set(v1alpha1.ConditionHeld, metav1.ConditionFalse, reasonVoid, v.Effect)
		if f.withheld != "" {
			// A memory that comes back makes the hold stand again.
			set.set(v1alpha1.ConditionResolved, metav1.ConditionFalse, f.reason, f.withheld)
		} else {
			set.set(v1alpha1.ConditionResolved, metav1.ConditionFalse, reasonVoid, v.Effect)
		}
	}
	if v.Refund != nil {
		set.set(v1alpha1.ConditionRefundOwed, metav1.ConditionTrue, reasonRefundOwed, clip("It was paid although it counted as not paid, or twice. A refund is owed: "+v.Refund.String()+".", maxMessage))
	} else if old := find(obj.Status.Conditions, v1alpha1.ConditionRefundOwed); old != nil {
		set.set(old.Type, old.Status, old.Reason, old.Message) // it stays owed, also where a newer hold or no record shows it
	}
	next.Conditions = set.list
	return next
}

// tell makes an event of what is new.
func (r *HoldReconciler) tell(obj *v1alpha1.PaymentHold, was, now *v1alpha1.PaymentHoldStatus) {
	if c := find(now.Conditions, v1alpha1.ConditionResolved); c.Reason == reasonNotEnforced || c.Reason == reasonNotStamped || c.Reason == reasonOwnCaller {
		if old := find(was.Conditions, v1alpha1.ConditionResolved); old == nil || old.Reason != c.Reason {
			r.Events.Eventf(obj, nil, corev1.EventTypeWarning, c.Reason, "Resolve", "%s", clip(c.Message, maxNote))
		}
	}
	if was.State == now.State {
		return
	}
	news := toldOf{obj.UID, now.State}
	if last, ok := r.told.Swap(client.ObjectKeyFromObject(obj), news); ok && last == news {
		return
	}
	switch now.State {
	case v1alpha1.HoldHeld, v1alpha1.HoldWaiting:
		note := fmt.Sprintf("Intent %q of %s waits for a person: %v", obj.Spec.IntentID, obj.Spec.Caller, obj.Spec.Reasons)
		if now.Cause != "" {
			note += ": " + now.Cause
		}
		reason := reasonHeld
		if now.State == v1alpha1.HoldWaiting {
			reason = reasonWaiting
		}
		r.Events.Eventf(obj, nil, corev1.EventTypeNormal, reason, "Hold", "%s", clip(note, maxNote))
	case v1alpha1.HoldResolved:
		by := ""
		if obj.Spec.Resolution != nil {
			by = fmt.Sprintf(" (%s by %s)", obj.Spec.Resolution.Decision, obj.Spec.Resolution.By)
		}
		r.Events.Eventf(obj, nil, corev1.EventTypeNormal, reasonResolved, "Resolve", "%s", clip(now.Effect+by, maxNote))
	case v1alpha1.HoldVoid:
		kind := corev1.EventTypeNormal
		if obj.Spec.Resolution != nil {
			kind = corev1.EventTypeWarning // somebody decided, and it did not count
		}
		r.Events.Eventf(obj, nil, kind, reasonVoid, "Resolve", "%s", clip(now.Effect, maxNote))
	}
}

// The steps of a record that bring word after the fact.
const (
	lateSuccess  = "late success"
	lateEvidence = "late evidence"
)

// tell makes an event of what a late result means for people: it is shown on the
// record's last hold, or on the tool if it was never held.
func (w *Worklist) tell(ctx context.Context, c guard.Change) {
	v := c.Intent
	w.tellGoesOn(ctx, c)
	if !contradicts(c) {
		return
	}
	var about runtime.Object
	if hold := w.lastHold(ctx, v); hold != nil {
		about = hold
	}
	if about == nil {
		var tool v1alpha1.AgentTool
		if err := w.Client.Get(ctx, types.NamespacedName{Namespace: v.Namespace, Name: v.Tool}, &tool); err != nil {
			return // nothing is left to hang it on; the poll URL tells it all the same
		}
		about = &tool
	}
	if v.RefundOwed {
		w.Events.Eventf(about, nil, corev1.EventTypeWarning, reasonRefundOwed, "Settle", "%s",
			clip(fmt.Sprintf("A late result says that intent %q of %s was paid although it counted as not paid, or twice: a refund is owed (%s). Look at the provider's ledger.", v.IntentID, v.Caller, v.Refund), maxNote))
	}
	if v.Disputed {
		w.Events.Eventf(about, nil, corev1.EventTypeWarning, reasonDisputed, "Settle", "%s",
			clip(fmt.Sprintf("A late result contradicts what is on the record of intent %q of %s. Look at the provider's ledger.", v.IntentID, v.Caller), maxNote))
	}
}

// lastHold is the object of the record's newest hold; nil: it had none, or none is there.
func (w *Worklist) lastHold(ctx context.Context, v guard.View) *v1alpha1.PaymentHold {
	if v.HoldCount == 0 {
		return nil
	}
	var hold v1alpha1.PaymentHold
	if err := w.Client.Get(ctx, types.NamespacedName{Namespace: v.Namespace, Name: guard.HoldName(v.Key, v.HoldCount)}, &hold); err != nil {
		return nil
	}
	return &hold
}

// tellGoesOn makes an event of what became of a payment after a person's word: that it
// was sent, and how it ended. The process that took the step tells it, so it is told once.
func (w *Worklist) tellGoesOn(ctx context.Context, c guard.Change) {
	v := c.Intent
	sent := c.From == guard.Released && c.To == guard.InFlight
	settled := c.From == guard.InFlight && (c.To == guard.Succeeded || c.To == guard.Failed)
	if !sent && !settled {
		return
	}
	hold := w.lastHold(ctx, v)
	if hold == nil || hold.Spec.Resolution == nil {
		return
	}
	switch {
	case sent:
		w.Events.Eventf(hold, nil, corev1.EventTypeNormal, reasonSent, "Send", "%s",
			clip(fmt.Sprintf("Intent %q of %s was called again after the release, and is sent: attempt %d.", v.IntentID, v.Caller, len(v.Attempts)), maxNote))
	case c.To == guard.Succeeded:
		reference := ""
		if v.ProviderReference != "" {
			reference = "; provider reference " + v.ProviderReference
		}
		w.Events.Eventf(hold, nil, corev1.EventTypeNormal, reasonSettled, "Settle", "%s",
			clip(fmt.Sprintf("Intent %q of %s succeeded%s.", v.IntentID, v.Caller, reference), maxNote))
	default:
		w.Events.Eventf(hold, nil, corev1.EventTypeNormal, reasonSettled, "Settle", "%s",
			clip(fmt.Sprintf("Intent %q of %s failed: nothing was moved.", v.IntentID, v.Caller), maxNote))
	}
}
