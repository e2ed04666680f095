package controller

import (
	"errors"
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// gone waits until there is no such hold, and stays so long that the next walks could bring it back.
func (w *world) gone(name string) {
	w.Helper()
	var since time.Time
	eventually(w.T, func() error {
		var o v1alpha1.PaymentHold
		if err := w.get(name, &o); !apierrors.IsNotFound(err) {
			since = time.Time{}
			return fmt.Errorf("PaymentHold %s should be gone: %s, %s", name, said(err), o.Status.State)
		}
		if since.IsZero() {
			since = time.Now()
		}
		if time.Since(since) < 2*worklistTick {
			return errors.New("it may come back")
		}
		return nil
	})
}

// O06: what is over is collected; and that frees nothing and loses nothing.
func TestHoldsThatAreOverAreCollected(t *testing.T) {
	w := newWorld(t)
	p := startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Gateway: true, GatewayName: "both", CollectAfter: time.Second})
	w.ready()
	w.pay(p, "refund", "first", "9", "10", guard.AttemptSucceeded)
	decide := func(id string, d v1alpha1.HoldDecision) string {
		name := w.holdOf(p, id, "9", "11")
		w.shown(name, v1alpha1.HoldHeld)
		res := v1alpha1.HoldResolution{Decision: d}
		if d == v1alpha1.DecisionMarkPaid {
			res.ProviderReference, res.Result = "re_1", "{no JSON}"
		}
		must(t, w.resolve(name, res))
		eventually(t, func() error {
			if v := w.poll(p, "refund", id); v.State == guard.Held && v.HoldCount == 1 {
				return errors.New("the resolution is not taken yet")
			}
			return nil
		})
		return name
	}
	rejected, released := decide("rejected", v1alpha1.DecisionReject), decide("released", v1alpha1.DecisionRelease)
	spent := decide("spent", v1alpha1.DecisionMarkPaid) // cannot be taken: its hold is void, and stands anew
	w.gone(rejected)
	w.gone(released)
	w.gone(spent)

	// The records are as they were: what was decided is decided once, what is held is held.
	if a := w.call(p, "refund", "rejected", "9", "11"); a.Verdict != guard.Deny {
		t.Errorf("the rejected intent gets %s", a.Verdict)
	}
	anew := w.poll(p, "refund", "spent")
	if anew.State != guard.Held || anew.HoldCount != 2 {
		t.Fatalf("the intent whose resolution was not taken should be held anew, is %s with %d holds", anew.State, anew.HoldCount)
	}
	w.shown(anew.Hold.Name, v1alpha1.HoldHeld)
	if a := w.call(p, "refund", "spent", "9", "11"); a.Verdict != guard.UnknownHold {
		t.Errorf("the held intent gets %s", a.Verdict)
	}
	w.pay(p, "refund", "released", "9", "11", guard.AttemptSucceeded)
	if a := w.call(p, "refund", "released", "9", "11"); a.Verdict != guard.Replay {
		t.Errorf("a release permits once, the next call gets %s", a.Verdict)
	}

	// An object that is made again by hand for a hold that was decided decides nothing.
	forged := &v1alpha1.PaymentHold{ObjectMeta: w.meta(rejected), Spec: w.shown(anew.Hold.Name, v1alpha1.HoldHeld).Spec}
	forged.Spec.IntentID, forged.Spec.Hold = "rejected", 1
	must(t, as(operatorUser).Create(w.ctx, forged))
	if err := w.resolve(rejected, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	w.gone(rejected)
	if v := w.poll(p, "refund", "rejected"); v.State != guard.Rejected {
		t.Errorf("the rejected intent is %s", v.State)
	}
}

// What somebody must still see stays.
func TestWhatIsNotCollected(t *testing.T) {
	w := newWorld(t)
	p := startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Gateway: true, GatewayName: "both", CollectAfter: time.Hour})
	w.ready()
	old := metav1.NewTime(time.Now().Add(-2 * time.Hour))
	c := &Collector{Client: admin, Live: as(operatorUser), Engines: p.op.Engines, After: time.Hour}
	w.pay(p, "refund", "first", "9", "10", guard.AttemptSucceeded)
	name := w.holdOf(p, "second", "9", "11")
	w.shown(name, v1alpha1.HoldHeld)
	must(t, w.resolve(name, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionReject}))
	over := w.shown(name, v1alpha1.HoldResolved)
	if !holdOver(over).After(time.Now().Add(-time.Minute)) {
		t.Fatalf("it is over since %s", holdOver(over))
	}
	for i := range over.Status.Conditions {
		over.Status.Conditions[i].LastTransitionTime = old
	}
	if !c.over(holdOver(over)) {
		t.Fatal("an old one should go")
	}
	for what, change := range map[string]func(*v1alpha1.PaymentHold){
		"one that is held":               func(h *v1alpha1.PaymentHold) { h.Status.State = v1alpha1.HoldHeld },
		"one that waits":                 func(h *v1alpha1.PaymentHold) { h.Status.State = v1alpha1.HoldWaiting },
		"one that nobody looked at":      func(h *v1alpha1.PaymentHold) { h.Status = v1alpha1.PaymentHoldStatus{} },
		"one with a resolution not seen": func(h *v1alpha1.PaymentHold) { h.Generation++ },
		"one of which nothing is known":  func(h *v1alpha1.PaymentHold) { find(h.Status.Conditions, "Held").Status = metav1.ConditionUnknown },
		"one that is on its way out":     func(h *v1alpha1.PaymentHold) { h.DeletionTimestamp = &old },
		"one for which a refund is owed": func(h *v1alpha1.PaymentHold) {
			h.Status.Conditions = append(h.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionRefundOwed, Status: metav1.ConditionTrue})
		},
	} {
		h := over.DeepCopy()
		change(h)
		if c.over(holdOver(h)) {
			t.Errorf("%s would be collected", what)
		}
	}
	// A younger one, and any of a namespace where a store is not served: it may be what is left of its memory.
	exists := func() bool {
		t.Helper()
		must(t, c.collect(w.ctx, flowcontrol.NewFakeAlwaysRateLimiter()))
		err := w.get(name, &v1alpha1.PaymentHold{})
		must(t, client.IgnoreNotFound(err))
		return err == nil
	}
	if !exists() {
		t.Error("a young one was collected")
	}
	c.After = 0
	w.create(&v1alpha1.IdempotencyStore{ObjectMeta: w.meta("away"), Spec: v1alpha1.IdempotencyStoreSpec{Postgres: &v1alpha1.PostgresStore{
		External: &v1alpha1.ExternalPostgres{DSNFrom: v1alpha1.SecretKeyReference{Name: "none", Key: "dsn"}},
	}}})
	if !exists() {
		t.Error("it was collected while a store of its namespace is away")
	}
	// Also if it went away while the round was under way.
	fresh := &v1alpha1.PaymentHold{}
	must(t, w.get(name, fresh))
	must(t, c.delete(w.ctx, flowcontrol.NewFakeAlwaysRateLimiter(), fresh))
	if err := w.get(name, fresh); err != nil {
		t.Errorf("it was collected in a round that began before a store of its namespace went: %v", err)
	}
	must(t, admin.Delete(w.ctx, &v1alpha1.IdempotencyStore{ObjectMeta: w.meta("away")}))
	// The object that was listed is not the one that is there now.
	stale := &v1alpha1.PaymentHold{}
	must(t, w.get(name, stale))
	stale.ResourceVersion = "1"
	must(t, c.delete(w.ctx, flowcontrol.NewFakeAlwaysRateLimiter(), stale))
	if err := w.get(name, &v1alpha1.PaymentHold{}); err != nil {
		t.Errorf("an object with news was deleted: %v", err)
	}
	if exists() {
		t.Error("an old one was not collected")
	}
}

// Deleting is slow on purpose.
func TestCollectingIsPaced(t *testing.T) {
	w := newWorld(t)
	const many = collectRate + 5
	for i := range many {
		h := probeHold(w.ns)
		h.GenerateName, h.Name, h.Spec.Record.Epoch = "", fmt.Sprintf("paced-%d", i), "paced"
		must(t, as(operatorUser).Create(w.ctx, h))
		next := holdStatus(h, finding{view: guard.HoldView{State: guard.HoldVoid, Effect: "over"}})
		_, err := applyStatus(w.ctx, as(operatorUser), h, &h.Status, next, ownerHold)
		must(t, err)
	}
	c := &Collector{Client: admin, Live: as(operatorUser), Engines: guard.NewEngines(), After: 0}
	began := time.Now()
	must(t, c.collect(w.ctx, flowcontrol.NewTokenBucketRateLimiter(collectRate, collectRate)))
	if took := time.Since(began); took < 400*time.Millisecond {
		t.Errorf("%d objects were deleted within %s", many, took)
	}
	var left v1alpha1.PaymentHoldList
	must(t, admin.List(w.ctx, &left, client.InNamespace(w.ns)))
	if len(left.Items) > 0 {
		t.Errorf("%d objects are left", len(left.Items))
	}
}

// Settled intents are collected; what is open, or held, is not; and one that is made again
// finds its record.
func TestSettledIntentsAreCollected(t *testing.T) {
	w := newWorld(t)
	p := startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Gateway: true, GatewayName: "both", CollectAfter: 5 * time.Second})
	w.ready()
	w.account()
	make := func(name, id, order string) *v1alpha1.PaymentIntent {
		o := w.intent(name, id, order, "10")
		w.create(o)
		return o
	}
	state := func(name string, want v1alpha1.IntentState) {
		t.Helper()
		eventually(t, func() error {
			var o v1alpha1.PaymentIntent
			if err := w.get(name, &o); err != nil {
				return err
			}
			if o.Status.State != want || o.Status.ObservedGeneration != o.Generation {
				return fmt.Errorf("PaymentIntent %s should be %s, its status is %s", name, want, asJSON(o.Status))
			}
			return nil
		})
	}
	goes := func(name string) {
		t.Helper()
		eventually(t, func() error {
			if err := w.get(name, &v1alpha1.PaymentIntent{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("PaymentIntent %s should be gone: %s", name, said(err))
			}
			return nil
		})
	}
	w.pay(p, "refund", "first", "9", "10", guard.AttemptSucceeded)
	make("open", "open", "1")
	state("open", v1alpha1.IntentRegistered)
	make("held", "held", "9")
	state("held", v1alpha1.IntentHeld)
	paid := make("paid", "paid", "2")
	state("paid", v1alpha1.IntentRegistered)
	w.pay(p, "refund", "paid", "2", "10", guard.AttemptSucceeded)
	make("twin", "paid", "2") // a second object for one intent is refused for good
	goes("paid")
	goes("twin")
	// Made again, it finds its record, and nothing is paid.
	again := &v1alpha1.PaymentIntent{ObjectMeta: w.meta("paid"), Spec: paid.Spec}
	w.create(again)
	state("paid", v1alpha1.IntentSucceeded)
	if v := w.poll(p, "refund", "paid"); v.State != guard.Succeeded || len(v.Attempts) != 1 {
		t.Errorf("the record is %s after %d attempts", v.State, len(v.Attempts))
	}
	goes("paid")
	state("open", v1alpha1.IntentRegistered)
	state("held", v1alpha1.IntentHeld)

	old := metav1.NewTime(time.Now().Add(-2 * time.Hour))
	settled := &v1alpha1.PaymentIntent{Status: v1alpha1.PaymentIntentStatus{State: v1alpha1.IntentSucceeded, Conditions: []metav1.Condition{
		{Type: v1alpha1.ConditionSettled, Status: metav1.ConditionTrue, LastTransitionTime: old},
	}}}
	c := &Collector{After: time.Hour}
	if !c.over(intentOver(settled)) {
		t.Fatal("an old one should go")
	}
	for what, change := range map[string]func(*v1alpha1.PaymentIntent){
		"one that nobody looked at":      func(o *v1alpha1.PaymentIntent) { o.Generation++ },
		"one that is on its way out":     func(o *v1alpha1.PaymentIntent) { o.DeletionTimestamp = &old },
		"one that is not settled":        func(o *v1alpha1.PaymentIntent) { o.Status.Conditions[0].Status = metav1.ConditionFalse },
		"one of which nothing is known":  func(o *v1alpha1.PaymentIntent) { o.Status.Conditions[0].Status = metav1.ConditionUnknown },
		"a young one":                    func(o *v1alpha1.PaymentIntent) { o.Status.Conditions[0].LastTransitionTime = metav1.Now() },
		"one without a record, that may": func(o *v1alpha1.PaymentIntent) { o.Status.State = "" },
		"one for which a refund is owed": func(o *v1alpha1.PaymentIntent) {
			o.Status.Conditions = append(o.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionRefundOwed, Status: metav1.ConditionTrue})
		},
	} {
		o := settled.DeepCopy()
		change(o)
		if c.over(intentOver(o)) {
			t.Errorf("%s would be collected", what)
		}
	}
}
