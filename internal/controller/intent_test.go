package controller

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// account makes the agent's ServiceAccount, whose calls these are from then on.
func (w *world) account() {
	w.Helper()
	sa := &corev1.ServiceAccount{ObjectMeta: w.meta("agent")}
	must(w.T, admin.Create(w.ctx, sa))
	w.uid = string(sa.UID)
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

// An intent whose record is gone is not registered anew: what it came to stands.
func TestAnIntentIsRegisteredOnce(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.account()
	w.ready()
	o := w.intent("once", "once", "1", "10")
	w.create(o)
	o = w.says("once", v1alpha1.IntentAllow, v1alpha1.IntentRegistered, "Registered")
	e, err := p.op.Engines.Get(w.ns, "payments")
	must(t, err)
	must(t, w.drop(p, guard.Key{Namespace: w.ns, Tool: "refund", Caller: w.agent(), IntentID: "once"}))
	_, err = p.op.intents.Reconcile(w.ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: w.ns, Name: "once"}})
	must(t, err)
	if a, err := e.Poll(w.ctx, guard.Key{Namespace: w.ns, Tool: "refund", Caller: w.agent(), IntentID: "once"}); err != nil || a.Intent.Exists {
		t.Fatalf("it was registered again: %s (%v)", asJSON(a.Intent), err)
	}
	var now v1alpha1.PaymentIntent
	must(t, w.get("once", &now))
	if now.Status.State != o.Status.State {
		t.Errorf("the status is %s", asJSON(now.Status))
	}
}
