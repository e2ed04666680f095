package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// account makes the agent's ServiceAccount, whose calls these are from then on, and lets it invoke the tools.
func (w *world) account() {
	w.Helper()
	w.accountAlone()
	w.mayInvoke()
}

// accountAlone makes one that may nothing.
func (w *world) accountAlone() {
	w.Helper()
	sa := &corev1.ServiceAccount{ObjectMeta: w.meta("agent")}
	must(w.T, admin.Create(w.ctx, sa))
	w.uid = string(sa.UID)
}

func (w *world) mayInvoke() {
	w.Helper()
	must(w.T, admin.Create(w.ctx, &rbacv1.RoleBinding{
		ObjectMeta: w.meta("agent-invokes"),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "holdfast-agent"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.ns, Name: "agent"}},
	}))
}

// intent is a refund for an order that is written down.
func (w *world) intent(name, id, order, amount string) *v1alpha1.PaymentIntent {
	return &v1alpha1.PaymentIntent{ObjectMeta: w.meta(name), Spec: v1alpha1.PaymentIntentSpec{
		ToolRef: v1alpha1.ToolReference{Name: "refund"}, Caller: w.agent(), IntentID: id, Scope: []v1alpha1.HoldPath{v1alpha1.HoldPath("order/" + order)},
		Amount: &v1alpha1.Money{Value: amount, Currency: "USD"}, Recipient: order,
	}}
}

// says waits for an intent that says so, and returns it.
func (w *world) says(name string, verdict v1alpha1.IntentVerdict, state v1alpha1.IntentState, reason string) *v1alpha1.PaymentIntent {
	w.Helper()
	var o v1alpha1.PaymentIntent
	eventually(w.T, func() error {
		o = v1alpha1.PaymentIntent{}
		if err := w.get(name, &o); err != nil {
			return err
		}
		c := find(o.Status.Conditions, v1alpha1.ConditionAdmitted)
		if o.Status.Verdict != verdict || o.Status.State != state || c == nil || c.Reason != reason || o.Status.ObservedGeneration != o.Generation {
			return fmt.Errorf("PaymentIntent %s should say %s, %s, %s: %s", name, verdict, state, reason, asJSON(o.Status))
		}
		return nil
	})
	return &o
}

// wantConditions compares the statuses of the conditions: T, F and U.
func wantConditions(t *testing.T, list []metav1.Condition, want string) {
	t.Helper()
	var got []string
	for _, c := range sorted(list) {
		got = append(got, c.Type+"="+string(c.Status[0]))
	}
	if s := strings.Join(got, " "); s != want {
		t.Errorf("the conditions are %s, want %s", s, want)
	}
}

func TestAnIntentIsRegisteredAndFollowed(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	// It may come before what it needs.
	w.create(w.intent("early", "early", "1", "10"))
	o := w.says("early", "", "", reasonToolNotServed)
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F")
	w.ready()
	o = w.says("early", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	wantConditions(t, o.Status.Conditions, "Admitted=T Ready=T Settled=F")
	if o.Status.Attempts != nil || o.Status.Hold != "" {
		t.Errorf("the status is %s", asJSON(o.Status))
	}
	// The first call must agree with it.
	if a := w.call(p, "refund", "early", "1", "11"); a.Verdict != guard.Conflict {
		t.Errorf("another amount: %s %s", a.Verdict, a.Reason)
	}
	w.pay(p, "refund", "early", "1", "10", guard.AttemptSucceeded)
	o = w.says("early", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded, "Succeeded")
	wantConditions(t, o.Status.Conditions, "Admitted=T Ready=T Settled=T")
	if o.Status.Attempts == nil || *o.Status.Attempts != 1 {
		t.Errorf("the status is %s", asJSON(o.Status))
	}

	// Once paid, another one for the same order is held, and released from its PaymentHold.
	w.create(w.intent("again", "again", "1", "12"))
	o = w.says("again", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F")
	hold := o.Status.Hold
	if h := w.shown(hold, v1alpha1.HoldHeld); h.Spec.Fingerprint != "" || h.Spec.IntentID != "again" {
		t.Errorf("the hold is %s", asJSON(h.Spec))
	}
	must(t, w.resolve(hold, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}))
	w.says("again", v1alpha1.IntentAllow, v1alpha1.IntentReleased, "Released")
	w.pay(p, "refund", "again", "1", "12", guard.AttemptFailed)
	o = w.says("again", v1alpha1.IntentReplay, v1alpha1.IntentFailed, "Failed")
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=T Stalled=T")

	// At rest nothing is written.
	before := o.ResourceVersion
	for range 3 {
		_, err := p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(o)})
		must(t, err)
	}
	must(t, w.get("again", o))
	if o.ResourceVersion != before {
		t.Error("reconciling an intent at rest has written it")
	}
	eventually(t, func() error {
		var list eventsv1.EventList
		must(t, admin.List(w.ctx, &list, client.InNamespace(w.ns)))
		var got []string
		for _, e := range list.Items {
			if e.Regarding.Name == "again" && e.Regarding.Kind == "PaymentIntent" {
				got = append(got, e.Reason)
			}
		}
		for _, want := range []string{"Held", "Released", "Failed"} {
			if !strings.Contains(strings.Join(got, " "), want) {
				return fmt.Errorf("the events are %v", got)
			}
		}
		return nil
	})
}

func TestIntentsThatAreNotRegistered(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	w.create(w.intent("nobody", "nobody", "1", "10"))
	w.says("nobody", "", "", reasonCallerNotFound)
	w.account()
	w.pay(p, "refund", "paid", "2", "10", guard.AttemptSucceeded)
	with := func(o *v1alpha1.PaymentIntent, change func(*v1alpha1.PaymentIntentSpec)) *v1alpha1.PaymentIntent {
		change(&o.Spec)
		return o
	}
	past := metav1.NewTime(time.Now().Add(-time.Hour))
	for _, tt := range []struct {
		obj     *v1alpha1.PaymentIntent
		verdict v1alpha1.IntentVerdict
		reason  string
		message string
	}{
		{w.intent("conflict", "paid", "2", "11"), v1alpha1.IntentConflict, reasonConflict, "was used before"},
		{with(w.intent("no-amount", "x1", "3", "1"), func(s *v1alpha1.PaymentIntentSpec) { s.Amount = nil }), "", reasonInvalid, "amount: is missing"},
		{with(w.intent("lineage", "x2", "3", "1"), func(s *v1alpha1.PaymentIntentSpec) { s.Lineage = "s/1" }), "", reasonInvalid, "no call of this tool has one"},
		{with(w.intent("bad-path", "x3", "3", "1"), func(s *v1alpha1.PaymentIntentSpec) { s.Scope[0] = "order//3" }), "", reasonInvalid, "segment 2 is empty"},
		{with(w.intent("cents", "x4", "3", "1"), func(s *v1alpha1.PaymentIntentSpec) { s.Amount.Value = "1.001" }), "", reasonInvalid, "finer than USD allows"},
		{with(w.intent("late", "x5", "3", "1"), func(s *v1alpha1.PaymentIntentSpec) { s.ValidUntil = &past }), v1alpha1.IntentDeny, reasonExpired, "validUntil is over"},
	} {
		w.create(tt.obj)
		o := w.says(tt.obj.Name, tt.verdict, "", tt.reason)
		if m := find(o.Status.Conditions, v1alpha1.ConditionAdmitted).Message; !strings.Contains(m, tt.message) {
			t.Errorf("%s: the message is %q", tt.obj.Name, m)
		}
		wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F Stalled=T")
	}
	for _, id := range []string{"x1", "x2", "x3", "x4", "x5"} {
		if v := w.poll(p, "refund", id); v.Exists {
			t.Errorf("%s was registered: %s", id, asJSON(v))
		}
	}
}

func TestTwoObjectsForOneIntent(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	w.ready()
	first := w.intent("first", "one", "1", "10")
	w.create(first)
	w.says("first", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.create(w.intent("second", "one", "1", "10"))
	o := w.says("second", v1alpha1.IntentAllow, "", reasonDuplicate)
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F Stalled=T")
	// It moves nothing when it goes, and neither does the first.
	must(t, admin.Delete(w.ctx, o))
	must(t, admin.Delete(w.ctx, first))
	if v := w.poll(p, "refund", "one"); v.State != guard.Registered {
		t.Fatalf("the record is %s", asJSON(v))
	}
	// The first of those that are left is the face then.
	w.create(w.intent("third", "one", "1", "10"))
	w.says("third", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.pay(p, "refund", "one", "1", "10", guard.AttemptSucceeded)
	w.says("third", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded, "Succeeded")
}

// O10: the hold stands, and the object comes back as it was.
func TestADeletedIntentThatIsHeldComesBack(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	w.ready()
	w.pay(p, "refund", "paid", "1", "10", guard.AttemptSucceeded)
	made := w.intent("held", "held", "1", "10.5")
	made.Spec.Quote = "q-1"
	w.create(made)
	o := w.says("held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)
	must(t, admin.Delete(w.ctx, o))
	eventually(t, func() error {
		var back v1alpha1.PaymentIntent
		if err := w.get("held", &back); err != nil {
			return err
		}
		if back.UID == o.UID || asJSON(back.Spec) != asJSON(o.Spec) {
			return fmt.Errorf("it is %s", asJSON(back.Spec))
		}
		return nil
	})
	back := w.says("held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)
	if back.Status.Hold != o.Status.Hold {
		t.Errorf("the hold is %s, and was %s", back.Status.Hold, o.Status.Hold)
	}
	w.shown(o.Status.Hold, v1alpha1.HoldHeld)

	// Not while anybody could make it: it would be distrusted for good.
	restore := w.unprotected(IntentCallerPolicy)
	must(t, admin.Delete(w.ctx, back))
	live := as(operatorUser)
	if err := NewWorklist(live, live, nil, nil, nil).showFace(w.ctx, w.poll(p, "refund", "held")); !errors.Is(err, errNotRefused) {
		t.Errorf("it should not be made again, got %v", said(err))
	}
	restore()
	back = w.says("held", v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)

	// Where its name was given to another intent, it comes back under another one.
	must(t, admin.Delete(w.ctx, back))
	other := w.intent("held", "other", "2", "1")
	if err := admin.Create(w.ctx, other); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	} else if err == nil {
		name := guard.IntentName(guard.Key{Namespace: w.ns, Tool: "refund", Caller: w.agent(), IntentID: "held"})
		w.says(name, v1alpha1.IntentUnknownHold, v1alpha1.IntentHeld, reasonHeld)
		w.says("held", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	}
}

// drop removes a record, as a purge does.
func (w *world) drop(p *process, k guard.Key) error {
	st := p.op.stores.held(types.NamespacedName{Namespace: w.ns, Name: "payments"}).store
	is, err := st.Standing(w.ctx)
	if err != nil {
		return err
	}
	r, _, err := st.Get(w.ctx, k.String())
	if err != nil {
		return err
	}
	res, err := st.Update(w.ctx, store.Write{Key: k.String(), Expected: r.Version, Epoch: is.Epoch, Nonce: "drop"})
	if err == nil && res.Outcome != store.Written {
		err = fmt.Errorf("the store says %s", res.Outcome)
	}
	return err
}

// An intent whose record is gone is not registered anew, and does not read as if it could be sent.
func TestAnIntentIsRegisteredOnce(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	w.ready()
	key := func(id string) guard.Key {
		return guard.Key{Namespace: w.ns, Tool: "refund", Caller: w.agent(), IntentID: id}
	}
	w.create(w.intent("once", "once", "1", "10"), w.intent("paid", "paid", "2", "10"))
	o := w.says("once", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.says("paid", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.pay(p, "refund", "paid", "2", "10", guard.AttemptSucceeded)
	w.says("paid", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded, "Succeeded")
	e, err := p.op.Engines.Get(w.ns, "payments")
	must(t, err)
	for _, id := range []string{"once", "paid"} {
		must(t, w.drop(p, key(id)))
		_, err = p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: id}})
		must(t, err)
		if a, err := e.Poll(w.ctx, key(id)); err != nil || a.Intent.Exists {
			t.Fatalf("%s was registered again: %s (%v)", id, asJSON(a.Intent), err)
		}
	}
	now := w.says("once", "", o.Status.State, reasonRecordGone)
	wantConditions(t, now.Status.Conditions, "Admitted=F Ready=F Settled=U Stalled=T")
	if !intentOver(now).IsZero() {
		t.Error("somebody must see that its record is gone, and it would be collected")
	}
	c := &Collector{After: time.Hour}
	if c.gone(now) {
		t.Error("its record has just gone, and it would be collected")
	}
	at := metav1.NewTime(time.Now().Add(-goneAfter - time.Minute))
	find(now.Status.Conditions, v1alpha1.ConditionStalled).LastTransitionTime = at
	if !c.gone(now) {
		t.Error("its record has been gone for long, and it would stay for ever")
	}
	now.Status.Conditions = append(now.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionRefundOwed, Status: metav1.ConditionTrue})
	if c.gone(now) {
		t.Error("a refund is owed, and it would be collected")
	}
	// What it came to stands.
	now = w.says("paid", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded, "Succeeded")
	wantConditions(t, now.Status.Conditions, "Admitted=T Ready=T Settled=T")
}

// An object that others made is registered only if its caller may invoke the tool.
func TestACallerThatMayNotInvoke(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.accountAlone()
	w.ready()
	w.create(w.intent("early", "early", "1", "10"))
	o := w.says("early", "", "", reasonMayNotInvoke)
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F")
	contains(t, find(o.Status.Conditions, v1alpha1.ConditionAdmitted).Message, "verb invoke", "tried again until")
	if v := w.poll(p, "refund", "early"); v.Exists {
		t.Fatalf("it was registered: %s", asJSON(v))
	}
	// One that has a record shows it.
	w.pay(p, "refund", "paid", "2", "10", guard.AttemptSucceeded)
	w.create(w.intent("paid", "paid", "2", "10"))
	w.says("paid", v1alpha1.IntentReplay, v1alpha1.IntentSucceeded, "Succeeded")
	w.mayInvoke()
	w.says("early", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
}

// What waits for what never comes is tried the more seldom the older it is, is refused for
// good after a time, and collected then.
func TestAnIntentThatCannotBeRegisteredIsGivenUp(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	r := p.op.intents
	aged := func(o *v1alpha1.PaymentIntent, age time.Duration) (intentFinding, *v1alpha1.PaymentIntentStatus) {
		t.Helper()
		o = o.DeepCopy()
		o.Generation, o.CreationTimestamp = 1, metav1.NewTime(time.Now().Add(-age))
		f, err := r.find(w.ctx, o)
		must(t, err)
		return f, intentStatus(o, f)
	}
	tries := func(o *v1alpha1.PaymentIntent, reason string, within, soonest time.Duration) {
		t.Helper()
		for _, tt := range []struct{ age, atLeast, atMost time.Duration }{
			{0, soonest, soonest}, {16 * time.Minute, 2 * time.Minute, 3 * time.Minute}, {within / 2, seldomest, seldomest},
			{within - 30*time.Second, time.Second, time.Minute},
		} {
			f, s := aged(o, tt.age)
			if f.again < tt.atLeast || f.again > tt.atMost || find(s.Conditions, v1alpha1.ConditionStalled) != nil {
				t.Errorf("%s, %s old: again after %s: %s", reason, tt.age, f.again, asJSON(s))
			}
			if c := find(s.Conditions, v1alpha1.ConditionAdmitted); c == nil || c.Reason != reason || !strings.Contains(c.Message, "tried again until") {
				t.Errorf("%s, %s old: %s", reason, tt.age, asJSON(s))
			}
		}
		f, s := aged(o, within)
		c := find(s.Conditions, v1alpha1.ConditionStalled)
		if f.again != 0 || c == nil || c.Reason != reason || !strings.Contains(c.Message, "make it once more") {
			t.Errorf("%s, %s old: again after %s: %s", reason, within, f.again, asJSON(s))
		}
		over := o.DeepCopy()
		over.Generation, over.Status = 1, *s
		if !refusedForGood(over) || mayRegister(over) || intentOver(over).IsZero() {
			t.Errorf("%s: it is not over: %s", reason, asJSON(s))
		}
	}
	o := w.intent("x", "x", "1", "10")
	tries(o, reasonToolNotServed, withoutTool, storeAgain)
	w.ready()
	ttl := 48 * time.Hour
	tries(o, reasonCallerNotFound, ttl, storeAgain)
	w.accountAlone()
	tries(o, reasonMayNotInvoke, ttl, storeAgain)
	w.mayInvoke()
	// Held under another name, by a request that is the very same.
	w.pay(p, "refund", "paid", "1", "10", guard.AttemptSucceeded)
	w.holdOf(p, "held", "1", "12")
	same := w.intent("y", "y", "1", "12")
	v := w.poll(p, "refund", "held")
	same.Spec.Fingerprint, same.Spec.Lineage = v.Fingerprint, string(v.Lineage)
	tries(same, reasonHeldElsewhere, ttl, refusedAgain)
}

// What was refused for good is not asked for again, whatever becomes of its tool; what its tool's
// next spec may permit is.
func TestWhatWasRefusedForGoodStaysRefused(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	w.ready()
	w.pay(p, "refund", "paid", "1", "10", guard.AttemptSucceeded)
	w.create(w.intent("conflict", "paid", "1", "11"))
	o := w.says("conflict", v1alpha1.IntentConflict, "", reasonConflict)
	if !refusedForGood(o) {
		t.Fatalf("it is %s", asJSON(o.Status))
	}
	must(t, w.drop(p, guard.Key{Namespace: w.ns, Tool: "refund", Caller: w.agent(), IntentID: "paid"}))
	_, err := p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(o)})
	must(t, err)
	tool := &v1alpha1.AgentTool{}
	must(t, w.get("refund", tool))
	if got := p.op.intents.ofTool(w.ctx, tool); len(got) > 0 {
		t.Errorf("a change of the tool looks at %v", got)
	}
	if v := w.poll(p, "refund", "paid"); v.Exists {
		t.Fatalf("it was registered after it was refused: %s", asJSON(v))
	}
	for reason, want := range map[string]bool{reasonInvalid: false, reasonDuplicate: false, reasonExpired: true, reasonDenied: true} {
		o := o.DeepCopy()
		find(o.Status.Conditions, v1alpha1.ConditionStalled).Reason = reason
		if refusedForGood(o) != want || mayRegister(o) == want {
			t.Errorf("%s is refused for good: %t", reason, !want)
		}
	}
	o.Generation++
	if refusedForGood(o) {
		t.Error("nobody has looked at this generation")
	}
}

// What was made while anybody could have made it is never registered: not when the policy is
// back, and not by the next process.
func TestIntentsThatAnybodyCouldHaveMade(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.account()
	w.ready()
	restore := w.unprotected(IntentCallerPolicy)
	w.create(w.intent("forged", "forged", "1", "10"))
	o := w.says("forged", "", "", reasonNotEnforced)
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F Stalled=T")
	contains(t, find(o.Status.Conditions, v1alpha1.ConditionAdmitted).Message, "This object registers nothing", "config/admission", IntentCallerPolicy, "register-for", "delete this object")
	restore()
	stays := func(p *process) {
		t.Helper()
		for range 3 {
			_, err := p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(o)})
			must(t, err)
		}
		w.says("forged", "", "", reasonNotEnforced)
		if v := w.poll(p, "refund", "forged"); v.Exists {
			t.Fatalf("it was registered: %s", asJSON(v))
		}
	}
	stays(p)
	w.create(w.intent("own", "own", "2", "10"))
	w.says("own", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	p.stop()
	p = start(t, dir)
	w.toolReady("refund")
	stays(p)
	// Made once more it is as good as any.
	must(t, admin.Delete(w.ctx, o))
	w.create(w.intent("forged", "forged", "1", "10"))
	w.says("forged", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	var probes v1alpha1.PaymentIntentList
	must(t, admin.List(w.ctx, &probes, client.InNamespace(w.ns)))
	if len(probes.Items) != 2 {
		t.Errorf("the probe left something: %d objects", len(probes.Items))
	}
}

// A refusal before any policy was asked tells nothing of them: it is asked again. One behind them tells that they have let it pass.
func TestWhichRefusalsTellOfThePolicy(t *testing.T) {
	of := schema.GroupResource{Group: v1alpha1.GroupName, Resource: "paymentintents"}
	forbidden := func(why string) error { return apierrors.NewForbidden(of, probeIntentName, errors.New(why)) }
	invalid := apierrors.NewInvalid(schema.GroupKind{Group: of.Group, Kind: "PaymentIntent"}, probeIntentName, field.ErrorList{field.Required(field.NewPath("spec", "new"), "")})
	for name, c := range map[string]struct {
		answer                error
		isProtected, cannotBe bool
	}{
		"accepted":       {nil, false, true},
		"the policy":     {forbidden("ValidatingAdmissionPolicy '" + IntentCallerPolicy + "' with binding 'b' denied request: no"), true, false},
		"another policy": {forbidden("ValidatingAdmissionPolicy 'other' with binding 'b' denied request: User \"x\" cannot create resource \"y\""), false, true},
		"a quota":        {forbidden("exceeded quota: few, requested: 1, used: 1, limited: 1"), false, true},
		"RBAC":           {forbidden(`User "x" cannot create resource "paymentintents" in API group "` + of.Group + `" in the namespace "n"`), false, false},
		"the schema":     {invalid, false, false},
		"a timeout":      {apierrors.NewTimeoutError("slow", 1), false, false},
	} {
		answers := interceptor.NewClient(nil, interceptor.Funcs{Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error { return c.answer }})
		err := NewGate(answers).checkIntents(t.Context(), "n")
		if (err == nil) != c.isProtected || errors.Is(err, errNotRefused) != c.cannotBe {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Beyond the limits of its caller and its tool an object waits, and is registered once there is room.
func TestIntentsBeyondTheLimitsWait(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	budget, tool := w.budget("refunds", "payments"), w.tool("refund", "refunds")
	budget.Spec.MaxRegistered = &v1alpha1.MaxRegisteredSpec{PerCaller: ptr.To(int32(1))}
	tool.Spec.RateLimit = &v1alpha1.RateLimitSpec{Requests: ptr.To(int32(2)), Per: &metav1.Duration{Duration: time.Hour}, Burst: ptr.To(int32(2))}
	w.create(w.store("payments"), budget, tool)
	w.toolReady("refund")
	w.create(w.intent("one", "one", "1", "10"))
	w.says("one", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.create(w.intent("two", "two", "2", "10"))
	o := w.says("two", v1alpha1.IntentDeny, "", "TooManyRegistered")
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F")
	contains(t, find(o.Status.Conditions, v1alpha1.ConditionAdmitted).Message, "maxRegistered", "tried again until")
	w.pay(p, "refund", "one", "1", "10", guard.AttemptSucceeded)
	again := func(name string) {
		t.Helper()
		_, err := p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: name}})
		must(t, err)
	}
	again("two")
	w.says("two", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	w.pay(p, "refund", "two", "2", "10", guard.AttemptSucceeded)
	w.create(w.intent("three", "three", "3", "10"))
	o = w.says("three", v1alpha1.IntentDeny, "", "RateLimited")
	wantConditions(t, o.Status.Conditions, "Admitted=F Ready=F Settled=F")
	contains(t, find(o.Status.Conditions, v1alpha1.ConditionAdmitted).Message, "rateLimit", "tried again until")
	if v := w.poll(p, "refund", "three"); v.Exists {
		t.Fatalf("it was registered: %s", asJSON(v))
	}
}
