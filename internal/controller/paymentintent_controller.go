// This file registers the intents that are written down as PaymentIntents, and shows
// what became of them.
//
// An object registers its intent once, and the record is the truth from then on: it is
// never registered again when its record is gone, and deleting it changes nothing. Of two
// objects for one intent the record knows which one is its face; the other moves nothing.
//
// An object that cannot be registered is tried again, the more seldom the older it is, and
// only for a time: then it is refused for good, and collected like all that is over. So
// nobody can fill the cluster with objects that wait for what never comes.
//
// Nothing asks the store about every object all the time. The worklist names the objects
// whose records have news (see worklist_intents.go).

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// The reasons of a PaymentIntent's conditions and events, beside the states of its record.
const (
	reasonToolNotServed  = "ToolNotServed"
	reasonInvalid        = "Invalid"
	reasonCallerNotFound = "CallerNotFound"
	reasonMayNotInvoke   = "CallerMayNotInvoke"
	reasonDuplicate      = "Duplicate"
	reasonConflict       = "Conflict"
	reasonPaidElsewhere  = "PaidUnderAnotherID"
	reasonHeldElsewhere  = "HeldUnderAnotherID"
	reasonDenied         = "Denied"
	reasonExpired        = "Expired"
	reasonNotSent        = "NotSent"
	reasonRecordGone     = "RecordGone"
)

// registerers are how many intents are looked at side by side.
const registerers = 8

const (
	// refusedAgain is how soon an intent is registered again that was refused for what can pass.
	refusedAgain = time.Minute
	// seldomest is how seldom an old one is tried again.
	seldomest = 10 * time.Minute
	// withoutTool is how long it is tried to register an intent whose tool is not there: nothing says how long else.
	withoutTool = 24 * time.Hour
)

// IntentReconciler registers PaymentIntents and writes their status.
type IntentReconciler struct {
	Client  client.Client
	Live    client.Client
	Engines *guard.Engines
	Gate    *Gate
	// Served is the policy that is served now.
	Served func() Served
	Events events.EventRecorder
	// Look names objects to look at again.
	Look <-chan event.GenericEvent

	// distrusted are objects that were found while anybody could have made them, by UID, and
	// why. Their status says it too, once that is written.
	distrusted sync.Map
}

// SetupWithManager watches the intents, what they need to be registered, and what the worklist has seen.
func (r *IntentReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.PaymentIntent{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.AgentTool{}, handler.EnqueueRequestsFromMapFunc(r.ofTool), builder.WithPredicates(conditionsChanged())).
		Watches(&v1alpha1.IdempotencyStore{}, handler.EnqueueRequestsFromMapFunc(r.ofStore), builder.WithPredicates(conditionsChanged())).
		WatchesRawSource(source.Channel(r.Look, &handler.EnqueueRequestForObject{})).
		// Thousands may come at once, and each waits for the store and for the API server. Records keep them apart.
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: registerers}).
		Complete(r)
}

// unregistered are the intents that have no record that is theirs.
func unregistered(o *v1alpha1.PaymentIntent) bool { return o.Status.State == "" }

// refusedForGood are those that never get one, whatever becomes of tool and store. What was invalid the
// tool's next spec may permit; and a duplicate may become the face.
func refusedForGood(o *v1alpha1.PaymentIntent) bool {
	if !unregistered(o) || !isTrue(o.Status.Conditions, v1alpha1.ConditionStalled, o.Generation) {
		return false
	}
	reason := find(o.Status.Conditions, v1alpha1.ConditionStalled).Reason
	return reason != reasonDuplicate && reason != reasonInvalid
}

// mayRegister are the intents that have no record yet, and may get one.
func mayRegister(o *v1alpha1.PaymentIntent) bool { return unregistered(o) && !refusedForGood(o) }

func (r *IntentReconciler) ofTool(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.PaymentIntentList{}, obj.GetNamespace(), func(o client.Object) bool {
		p, ok := o.(*v1alpha1.PaymentIntent)
		return ok && p.Spec.ToolRef.Name == obj.GetName() && mayRegister(p)
	})
}

func (r *IntentReconciler) ofStore(ctx context.Context, obj client.Object) []reconcile.Request {
	return requests(ctx, r.Client, &v1alpha1.PaymentIntentList{}, obj.GetNamespace(), func(o client.Object) bool {
		p, ok := o.(*v1alpha1.PaymentIntent)
		return ok && mayRegister(p)
	})
}

// intentFinding is what is known of an intent at one visit.
type intentFinding struct {
	// answer is what the guard said; asked: it was.
	answer guard.Answer
	asked  bool
	// reason and message say why the guard was not asked, or could not say.
	reason, message string
	// stalled: that stays so until the spec, or its tool's, changes.
	stalled bool
	again   time.Duration
	// until is when it is tried for the last time to register it; zero: there is nothing to try.
	until time.Time
}

// later has the intent tried again, for so long after it was made, and no sooner than that from now.
func (f *intentFinding) later(obj *v1alpha1.PaymentIntent, soonest, within time.Duration) {
	f.until = obj.CreationTimestamp.Add(within)
	left := time.Until(f.until)
	if left <= 0 {
		f.stalled, f.again = true, 0
		return
	}
	f.again = min(moreSeldom(obj, soonest), left+time.Second)
}

// moreSeldom is when an object is tried again: the older it is, the later.
func moreSeldom(obj *v1alpha1.PaymentIntent, soonest time.Duration) time.Duration {
	return min(max(time.Since(obj.CreationTimestamp.Time)/8, soonest), max(seldomest, soonest))
}

// tried ends the message of what can pass with how long it is tried again.
func (f *intentFinding) tried(message string) string {
	switch until := f.until.UTC().Format(time.RFC3339); {
	case f.until.IsZero():
		return message
	case f.stalled:
		return message + " It could not be registered until " + until + ", and is not tried again: to try it anew, delete this object and make it once more."
	default:
		return message + " It is tried again until " + until + "."
	}
}

// Reconcile registers the intent if that was not done, and writes the status.
func (r *IntentReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var obj v1alpha1.PaymentIntent
	if err := r.Client.Get(ctx, req.NamespacedName, &obj); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !obj.DeletionTimestamp.IsZero() || refusedForGood(&obj) {
		return ctrl.Result{}, nil
	}
	f, err := r.distrust(ctx, &obj)
	if err == nil && f.reason == "" {
		f, err = r.find(ctx, &obj)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	was := obj.Status
	was.Conditions = sorted(was.Conditions)
	next := intentStatus(&obj, f)
	wrote, err := applyStatus(ctx, r.Client, &obj, &was, next, ownerIntent)
	if err != nil {
		return ctrl.Result{}, err
	}
	if wrote {
		r.tell(&obj, &was, next)
	}
	r.distrusted.Delete(obj.UID)
	return ctrl.Result{RequeueAfter: f.again}, nil
}

// distrust is the finding about an object that is seen for the first time while anybody could
// have made it. It is never registered, also not once the policies are in force: who wrote it
// cannot be told afterwards. Without a reason: nothing speaks against it.
func (r *IntentReconciler) distrust(ctx context.Context, obj *v1alpha1.PaymentIntent) (intentFinding, error) {
	if obj.Status.ObservedGeneration != 0 {
		return intentFinding{}, nil // it was judged when it was new
	}
	why, ok := r.distrusted.Load(obj.UID)
	if !ok {
		err := r.Gate.checkIntents(ctx, obj.Namespace)
		if !errors.Is(err, errNotRefused) {
			return intentFinding{}, err
		}
		why = fmt.Sprintf("This object registers nothing, also not later, and tells nothing of the intent: whether its caller has made it, or somebody who may register for others, cannot be told, because %s. "+
			"Then delete this object and make it once more.", err.Error())
		r.distrusted.Store(obj.UID, why)
	}
	return intentFinding{reason: reasonNotEnforced, message: fmt.Sprint(why), stalled: true}, nil
}

// intentKey is the key of the record that the object is about.
func intentKey(obj *v1alpha1.PaymentIntent) (guard.Key, error) {
	id, err := intent.ParseIntentID(obj.Spec.IntentID)
	return guard.Key{Namespace: obj.Namespace, Tool: obj.Spec.ToolRef.Name, Caller: obj.Spec.Caller, IntentID: id}, err
}

// find asks the record, and registers the intent if there is none.
func (r *IntentReconciler) find(ctx context.Context, obj *v1alpha1.PaymentIntent) (intentFinding, error) {
	within := withoutTool
	waits := func(reason, format string, args ...any) (intentFinding, error) {
		f := intentFinding{reason: reason, message: fmt.Sprintf(format, args...), again: moreSeldom(obj, storeAgain)}
		if unregistered(obj) {
			f.later(obj, storeAgain, within)
		}
		return f, nil
	}
	invalid := func(format string, args ...any) (intentFinding, error) {
		return intentFinding{reason: reasonInvalid, message: fmt.Sprintf(format, args...), stalled: true}, nil
	}
	tool, err := r.Served().Tool(obj.Namespace, obj.Spec.ToolRef.Name)
	var notServed *policy.NotServedError
	switch {
	case errors.Is(err, policy.ErrNoTool):
		return waits(reasonToolNotServed, "There is no AgentTool %s in this namespace.", obj.Spec.ToolRef.Name)
	case errors.As(err, &notServed):
		return waits(reasonToolNotServed, "The AgentTool %s is not served: %s.", obj.Spec.ToolRef.Name, notServed.Message)
	case err != nil:
		return intentFinding{}, err
	case !tool.Mutating:
		return invalid("The AgentTool %s is ReadOnly: it has no intents.", tool.Name)
	}
	engine, err := r.Engines.Get(obj.Namespace, tool.Store)
	if err != nil {
		// It may be registered already: so this ends with the store's outage alone.
		return intentFinding{
			reason: reasonStoreNotKnown, again: moreSeldom(obj, storeAgain),
			message: fmt.Sprintf("The store of the AgentTool %s is not served, so nothing can be said of the intent: see IdempotencyStore %s.", tool.Name, tool.Store),
		}, nil
	}
	key, err := intentKey(obj)
	if err != nil {
		return invalid("spec.intentID: %s.", sentence(err))
	}
	f := intentFinding{asked: true}
	if unregistered(obj) {
		within = tool.Guard.TTL
		id, err := tool.IdentifyStated(statedBy(obj))
		if problem := (*intent.InvalidError)(nil); errors.As(err, &problem) {
			return invalid("The spec cannot be registered: %s.", problem)
		} else if err != nil {
			return intentFinding{}, err
		}
		uid, err := r.callerUID(ctx, obj.Spec.Caller)
		if err != nil {
			return intentFinding{}, err
		}
		if uid == "" {
			return waits(reasonCallerNotFound, "There is no ServiceAccount %s: whose intent it is cannot be told.", obj.Spec.Caller)
		}
		c := tool.CallOf(id, obj.Spec.Caller, string(uid))
		// Asked here too, as the admission policy may be missing, and does not ask it of who registers for others.
		may, err := r.mayInvoke(ctx, obj.Spec.Caller, uid, tool)
		if err != nil {
			return intentFinding{}, err
		}
		if !may {
			// Of an intent that has a record nothing new is permitted by telling it.
			a, err := engine.Poll(ctx, key)
			if err != nil {
				return r.storeFailed(ctx, obj, tool, err)
			}
			if !a.Intent.Exists {
				return waits(reasonMayNotInvoke, "The ServiceAccount %s may not invoke the AgentTool %s: bind a Role with the verb invoke to it, such as the ClusterRole holdfast-agent.", obj.Spec.Caller, tool.Name)
			}
		}
		f.answer, err = r.register(ctx, engine, obj, c, tool.GuardFor(&c))
		if err != nil {
			return r.storeFailed(ctx, obj, tool, err)
		}
		if canPass(key, f.answer) {
			f.later(obj, refusedAgain, within)
			if valid := obj.Spec.ValidUntil; valid != nil && f.again > 0 {
				f.again = min(f.again, max(time.Until(valid.Time), time.Second))
			}
		}
	} else if f.answer, err = engine.Poll(ctx, key); err != nil {
		return r.storeFailed(ctx, obj, tool, err)
	}
	return f, nil
}

// storeFailed is the finding where the guard could not say anything.
func (r *IntentReconciler) storeFailed(ctx context.Context, obj *v1alpha1.PaymentIntent, tool *policy.Tool, err error) (intentFinding, error) {
	if ctx.Err() != nil || errors.Is(err, guard.ErrInvariant) {
		return intentFinding{}, err
	}
	log.FromContext(ctx).Error(err, "the record of an intent cannot be asked; trying on", "store", tool.Store)
	return intentFinding{
		reason: reasonStoreNotKnown, again: moreSeldom(obj, storeAgain),
		message: fmt.Sprintf("The IdempotencyStore %s cannot be asked, so nothing can be said of the intent.", tool.Store),
	}, nil
}

// register writes the intent down with this object as its face, if it has none that exists.
func (r *IntentReconciler) register(ctx context.Context, engine *guard.Engine, obj *v1alpha1.PaymentIntent, c guard.Call, p guard.Policy) (guard.Answer, error) {
	shown, err := json.Marshal(obj.Spec)
	if err != nil {
		return guard.Answer{}, fmt.Errorf("write down the spec: %w", err)
	}
	g := guard.Registration{Quote: obj.Spec.Quote, Face: obj.Name, Shown: shown}
	if obj.Spec.ValidUntil != nil {
		g.ValidUntil = obj.Spec.ValidUntil.Time
	}
	a, err := engine.Register(ctx, c, g, "", p)
	face := faceOf(a, c.Key)
	if err != nil || face == "" || face == obj.Name {
		return a, err
	}
	// Another object is its face, if it still is there.
	var other v1alpha1.PaymentIntent
	err = r.Live.Get(ctx, types.NamespacedName{Namespace: obj.Namespace, Name: face}, &other)
	if err != nil && !apierrors.IsNotFound(err) {
		return guard.Answer{}, fmt.Errorf("look for the face of the intent: %w", err)
	}
	if key, failed := intentKey(&other); err == nil && failed == nil && key == c.Key {
		return a, nil
	}
	return engine.Register(ctx, c, g, face, p)
}

// faceOf is the name of the object that shows the intent with this key.
func faceOf(a guard.Answer, key guard.Key) string {
	if a.Intent.Key != key || a.Intent.Registration == nil {
		return ""
	}
	return a.Intent.Registration.Face
}

// callerUID is the UID of a ServiceAccount; "": there is none.
func (r *IntentReconciler) callerUID(ctx context.Context, caller string) (types.UID, error) {
	parts := strings.Split(caller, ":") // the API has checked the form
	if len(parts) != 4 {
		return "", nil
	}
	account := &metav1.PartialObjectMetadata{}
	account.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ServiceAccount"))
	err := r.Live.Get(ctx, types.NamespacedName{Namespace: parts[2], Name: parts[3]}, account)
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look for the ServiceAccount of the caller: %w", err)
	}
	return account.UID, nil
}

// mayInvoke asks whether the ServiceAccount may invoke the tool, as it is asked for a call.
func (r *IntentReconciler) mayInvoke(ctx context.Context, caller string, uid types.UID, tool *policy.Tool) (bool, error) {
	account := access.ServiceAccount(caller, string(uid))
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: account.Username, UID: account.UID, Groups: account.Groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: access.Verb, Group: access.Group, Resource: access.Resource, Namespace: tool.Namespace, Name: tool.Name,
		},
	}}
	if err := r.Live.Create(ctx, review); err != nil {
		return false, fmt.Errorf("ask whether the caller may invoke the tool: %w", err)
	}
	return review.Status.Allowed && !review.Status.Denied, nil
}

func statedBy(obj *v1alpha1.PaymentIntent) policy.Stated {
	s := policy.Stated{IntentID: obj.Spec.IntentID, Lineage: obj.Spec.Lineage, Recipient: obj.Spec.Recipient, Fingerprint: obj.Spec.Fingerprint}
	for _, p := range obj.Spec.Scope {
		s.Scope = append(s.Scope, string(p))
	}
	if m := obj.Spec.Amount; m != nil {
		s.Amount = &policy.StatedAmount{Value: m.Value, Currency: m.Currency}
	}
	return s
}

// passing are the reasons of refusals that may be over later.
var passing = []guard.Reason{guard.ReasonTooManyHolds, guard.ReasonSpendExceeded, guard.ReasonTooManyRegistered, guard.ReasonRateLimited}

// canPass says that the intent was not registered for something that may be over later.
func canPass(key guard.Key, a guard.Answer) bool {
	return a.Verdict == guard.Deny && !a.Intent.Exists && slices.Contains(passing, a.Reason) ||
		a.Intent.Key != key && (a.Verdict == guard.UnknownHold || a.Verdict == guard.InFlightNow)
}

// sentence is an error's text, to go on with.
func sentence(err error) string { return strings.TrimSuffix(err.Error(), ".") }

// intentStatus says what was found.
func intentStatus(obj *v1alpha1.PaymentIntent, f intentFinding) *v1alpha1.PaymentIntentStatus {
	next := obj.Status.DeepCopy()
	next.ObservedGeneration = obj.Generation
	set := newConditions(obj.Status.Conditions, obj.Generation)
	defer func() { next.Conditions = set.list }()
	keepRefund := func() {
		if old := find(obj.Status.Conditions, v1alpha1.ConditionRefundOwed); old != nil {
			set.set(old.Type, old.Status, old.Reason, old.Message) // it stays owed, also where no record shows it
		}
	}
	admitted := func(status metav1.ConditionStatus, reason, message string) {
		set.set(v1alpha1.ConditionAdmitted, status, reason, message)
		set.set(v1alpha1.ConditionReady, status, reason, message)
	}
	refused := func(reason, message string) {
		admitted(metav1.ConditionFalse, reason, message)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reason, message)
	}
	unsettled := func() {
		set.set(v1alpha1.ConditionSettled, metav1.ConditionFalse, reasonNotSent, "Nothing was sent for this object.")
	}

	key, _ := intentKey(obj)
	v := f.answer.Intent
	settled := find(obj.Status.Conditions, v1alpha1.ConditionSettled)
	switch known := !unregistered(obj); {
	case known && (!f.asked || !v.Exists || v.Key != key) && settled != nil && settled.Status == metav1.ConditionTrue:
		// What it came to stands, also when the record is long gone.
		for _, c := range obj.Status.Conditions {
			set.set(c.Type, c.Status, c.Reason, c.Message)
		}
		return next
	case known && f.asked && !v.Exists:
		// The state stays as it was last seen: with it, the object is never registered anew.
		next.Verdict = ""
		message := fmt.Sprintf("There is no record of it any more; it was %s when it was last seen. Look at the provider's ledger whether it was paid. "+
			"To register it anew, delete this object and make it once more.", next.State)
		refused(reasonRecordGone, message)
		set.set(v1alpha1.ConditionSettled, metav1.ConditionUnknown, reasonRecordGone, message)
		keepRefund()
		return next
	case !f.asked && f.stalled:
		refused(f.reason, f.tried(f.message))
		unsettled()
		return next
	case !f.asked && known:
		admitted(metav1.ConditionUnknown, f.reason, f.message)
		set.set(v1alpha1.ConditionSettled, metav1.ConditionUnknown, f.reason, f.message)
		keepRefund()
		return next
	case !f.asked:
		admitted(metav1.ConditionFalse, f.reason, f.tried(f.message))
		unsettled()
		return next
	}
	next.Verdict = v1alpha1.IntentVerdict(f.answer.Verdict)
	if face := faceOf(f.answer, key); face != "" && face != obj.Name {
		next.State, next.Hold, next.Attempts, next.ProviderReference = "", "", nil, ""
		refused(reasonDuplicate, fmt.Sprintf("The PaymentIntent %s is for the same intent and was there first: see its status. This object moves nothing, and can be deleted.", face))
		unsettled()
		return next
	}
	if !v.Exists || v.Key != key || f.answer.Verdict == guard.Conflict {
		next.State, next.Hold, next.Attempts, next.ProviderReference = "", f.answer.Hold, nil, ""
		notRegistered(obj, f, admitted, refused)
		unsettled()
		return next
	}
	showRecord(next, f.answer, set, admitted, refused)
	if v.Refund == nil {
		keepRefund()
	}
	return next
}

// notRegistered says why there is no record of the intent.
func notRegistered(obj *v1alpha1.PaymentIntent, f intentFinding, admitted func(metav1.ConditionStatus, string, string), refused func(string, string)) {
	a := f.answer
	say := func(reason, message string) {
		if message = f.tried(message); f.until.IsZero() || f.stalled {
			refused(reason, message)
		} else {
			admitted(metav1.ConditionFalse, reason, message)
		}
	}
	switch {
	case a.Verdict == guard.Conflict && a.Reason == guard.ReasonCaller:
		say(reasonConflict, "The intentID belongs to an earlier ServiceAccount of the same name. Another payment is another intentID.")
	case a.Verdict == guard.Conflict:
		say(reasonConflict, "The intentID was used before, for another scope, amount, recipient, quote or validity. Another payment is another intentID.")
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonExpired:
		say(reasonExpired, "validUntil is over, so the intent was not registered.")
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonSpendExceeded && a.Spend != nil && a.Spend.Uncounted != "":
		say("SpendExceeded", fmt.Sprintf("It cannot be counted in the limit %q of the budget: %s.", a.Spend.Limit.Name, a.Spend.Uncounted))
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonSpendExceeded && a.Spend != nil:
		l := a.Spend.Limit
		say("SpendExceeded", fmt.Sprintf("It would exceed the limit %q of the budget: %s %s within %s.", l.Name, l.Amount.Value, l.Amount.Currency, l.Span()))
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonTooManyHolds:
		say("TooManyHolds", "It would have to wait for a person, and too many intents of the budget do already.")
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonTooManyRegistered:
		say("TooManyRegistered", "As many intents of its caller as the budget allows (maxRegistered) are registered and were not sent.")
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonRateLimited:
		say("RateLimited", "Intents of the tool are registered more often than its rateLimit allows.")
	case a.Verdict == guard.Deny && a.Reason == guard.ReasonDeniedByRule:
		say("DeniedByRule", "A rule of the tool denies it: "+strings.TrimSuffix(a.Rule, ".")+".")
	case a.Verdict == guard.Deny:
		say(reasonDenied, fmt.Sprintf("It is refused: %s.", a.Reason))
	case a.Verdict == guard.UnknownHold:
		say(reasonHeldElsewhere, fmt.Sprintf("The intent %q of the same caller and scope is held already (PaymentHold %s). Nothing was registered under this intentID.", a.Intent.IntentID, a.Hold))
	default:
		say(reasonPaidElsewhere, fmt.Sprintf("The very same call is %s under the intent %q of the same caller. Nothing was registered under this intentID.", a.Intent.State, a.Intent.IntentID))
	}
}

// showRecord says what the record of the intent says.
func showRecord(next *v1alpha1.PaymentIntentStatus, a guard.Answer, set *conditions, admitted func(metav1.ConditionStatus, string, string), refused func(string, string)) {
	v := a.Intent
	state := v.State
	if state == guard.Tombstone {
		state = v.SettledAs // the answer is gone, and what it came to is not
		next.Verdict = v1alpha1.IntentReplay
		if state == guard.Rejected {
			next.Verdict = v1alpha1.IntentDeny
		}
	}
	next.State = v1alpha1.IntentState(state)
	next.ProviderReference, next.Hold, next.Attempts = clip(v.ProviderReference, 1024), "", nil
	if v.HoldCount > 0 {
		next.Hold = guard.HoldName(v.Key, v.HoldCount)
	}
	attempts := 0
	for _, at := range v.Attempts {
		if !at.Lost {
			attempts++
		}
	}
	if attempts > 0 {
		next.Attempts = ptr.To(int32(attempts))
	}
	settled := func(status metav1.ConditionStatus, message string) {
		set.set(v1alpha1.ConditionSettled, status, string(state), message)
	}
	open := func(message string) {
		admitted(metav1.ConditionTrue, string(state), message)
		settled(metav1.ConditionFalse, message)
	}
	switch state {
	case guard.Registered:
		open(fmt.Sprintf("Registered. It can be sent until %s.", v.Expires.UTC().Format(time.RFC3339)))
	case guard.InFlight:
		open("It is being paid.")
	case guard.Pending:
		open("The upstream has accepted it. It is not final.")
	case guard.Retryable:
		open("It was tried, and nothing moved. The next call is the next attempt.")
	case guard.Released:
		open("A person has released it: the next call is sent, once.")
	case guard.Held:
		message := fmt.Sprintf("A person must decide: see PaymentHold %s.", next.Hold)
		if v.Hold != nil {
			message = fmt.Sprintf("A person must decide (%s): see PaymentHold %s.", joinReasons(v.Hold.Reasons), next.Hold)
		}
		admitted(metav1.ConditionFalse, reasonHeld, message)
		settled(metav1.ConditionFalse, message)
	case guard.Succeeded:
		message := "It was paid."
		admitted(metav1.ConditionTrue, string(state), message)
		settled(metav1.ConditionTrue, message)
	case guard.Failed:
		message := "Nothing was paid, and it is not tried again."
		refused(string(state), message)
		settled(metav1.ConditionTrue, message)
	case guard.Rejected:
		message := "It was rejected, and is never sent."
		if a.Reason == guard.ReasonExpired {
			message = "It was not sent in time, and is never sent. What it had reserved was given back."
		}
		refused(string(state), message)
		settled(metav1.ConditionTrue, message)
	}
	if v.Refund != nil {
		set.set(v1alpha1.ConditionRefundOwed, metav1.ConditionTrue, reasonRefundOwed,
			clip("It was paid although it counted as not paid, or twice. A refund is owed: "+v.Refund.String()+".", maxMessage))
	}
}

func joinReasons(reasons []guard.Reason) string {
	texts := make([]string, len(reasons))
	for i, r := range reasons {
		texts[i] = string(r)
	}
	return strings.Join(texts, ", ")
}

// tell makes an event of what is new.
func (r *IntentReconciler) tell(obj *v1alpha1.PaymentIntent, was, now *v1alpha1.PaymentIntentStatus) {
	c, old := find(now.Conditions, v1alpha1.ConditionAdmitted), find(was.Conditions, v1alpha1.ConditionAdmitted)
	stalls := find(now.Conditions, v1alpha1.ConditionStalled) != nil
	same := was.State == now.State && old != nil && c != nil && old.Reason == c.Reason && stalls == (find(was.Conditions, v1alpha1.ConditionStalled) != nil)
	if c == nil || same || c.Status == metav1.ConditionUnknown {
		return
	}
	kind := corev1.EventTypeNormal
	if stalls {
		kind = corev1.EventTypeWarning
	}
	r.Events.Eventf(obj, nil, kind, c.Reason, "Register", "%s", clip(c.Message, maxNote))
}
