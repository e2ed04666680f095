// This file gives every hold of every record its face in the cluster.
//
// The records are the truth: each second, or as often as their number allows, they are
// walked, and what is missing is made. So a PaymentHold that somebody deleted comes back, and one that was lost in
// a crash between record and object is made all the same.

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/metrics"
)

const (
	worklistTick = time.Second
	// restPerWalk is how many times as long as a walk took there is none, maxRest the longest
	// that is: many holds, or a slow store, must not keep process and store busy. What
	// changes meanwhile is shown at once all the same.
	restPerWalk = 5
	maxRest     = 30 * time.Second
	// walkTimeout bounds one walk, so that one bad store cannot stop the others for good.
	walkTimeout = 30 * time.Second
	// changesKept is how many steps may wait to be told. What is dropped the next walk finds.
	changesKept = 4096
	// againPerWalk is how many holds that are over each walk looks at once more.
	againPerWalk = 4
)

// Worklist makes the PaymentHolds.
type Worklist struct {
	Client  client.Client
	Live    client.Client
	Engines *guard.Engines
	Events  events.EventRecorder
	// Leading says whether this process makes the objects; the others only tell of what
	// their own attempts have come to.
	Leading func() bool
	// Metrics show the holds that were walked; nil: nobody asks.
	Metrics *metrics.Metrics

	changes chan guard.Change
	look    chan event.GenericEvent
	// lookIntents names PaymentIntents, and intents is how far their turns have come.
	lookIntents chan event.GenericEvent
	intents     intentTurns
	// next is where the next walk goes on among the holds that are over, for each store.
	next map[string]int
	// failed is the last walk's error, so that it is logged once.
	failed failing
	// open are the holds of each store at its last whole walk.
	open map[metrics.Name][]metrics.Hold
}

// NewWorklist walks these engines.
func NewWorklist(cached, live client.Client, engines *guard.Engines, recorder events.EventRecorder, leading func() bool) *Worklist {
	return &Worklist{
		Client: cached, Live: live, Engines: engines, Events: recorder, Leading: leading,
		changes: make(chan guard.Change, changesKept), look: make(chan event.GenericEvent), lookIntents: make(chan event.GenericEvent), next: map[string]int{},
	}
}

// Observe takes note of a step of a record. It never blocks.
func (w *Worklist) Observe(c guard.Change) {
	select {
	case w.changes <- c:
	default:
	}
}

// NeedLeaderElection is false: every process has steps to tell of.
func (w *Worklist) NeedLeaderElection() bool { return false }

// Start walks until the process ends.
func (w *Worklist) Start(ctx context.Context) error {
	tick := time.NewTicker(worklistTick)
	defer tick.Stop()
	var turns sync.WaitGroup
	defer turns.Wait()
	turns.Go(func() { w.followIntents(ctx) })
	for {
		began := time.Now()
		err := w.walk(ctx)
		ended := time.Now()
		rest := time.Duration(0)
		w.failed.tell(ctx, err, "not all holds could be shown; trying on")
		if err == nil {
			rest = min(restPerWalk*ended.Sub(began), maxRest)
		}
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				waiting = time.Since(ended) < rest
			case c := <-w.changes:
				w.changed(ctx, c)
			}
		}
	}
}

// changed shows one step at once.
func (w *Worklist) changed(ctx context.Context, c guard.Change) {
	v := c.Intent
	if v.HoldCount > 0 && w.Leading() {
		if v.State == guard.Held {
			if engine := w.engineOf(v); engine != nil {
				if err := w.show(ctx, engine, v); err != nil {
					log.FromContext(ctx).V(1).Info("a hold is not shown yet", "namespace", v.Namespace, "hold", v.Hold.Name, "cause", err.Error())
				}
			}
		}
		w.lookAt(ctx, v.Namespace, guard.HoldName(v.Key, v.HoldCount))
		if v.HoldCount > 1 {
			w.lookAt(ctx, v.Namespace, guard.HoldName(v.Key, v.HoldCount-1))
		}
	}
	if v.Registration != nil && v.Registration.Face != "" && w.Leading() {
		w.lookAtIntent(ctx, v.Namespace, v.Registration.Face)
	}
	w.tell(ctx, c)
}

// engineOf is the engine whose record this is: epochs tell stores apart.
func (w *Worklist) engineOf(v guard.View) *guard.Engine {
	if v.Hold == nil {
		return nil
	}
	for _, s := range w.Engines.All() {
		if s.Namespace == v.Namespace && s.Engine.Identity().Epoch == v.Hold.Epoch {
			return s.Engine
		}
	}
	return nil
}

// lookAt has a PaymentHold reconciled.
func (w *Worklist) lookAt(ctx context.Context, namespace, name string) {
	e := event.GenericEvent{Object: &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}}
	select {
	case w.look <- e:
	case <-ctx.Done():
	}
}

// walk shows all holds, and has those objects looked at that say something else than the record.
func (w *Worklist) walk(ctx context.Context) error {
	if !w.Leading() {
		w.measure(nil)
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, walkTimeout)
	defer cancel()
	var errs []error
	open := map[metrics.Name][]metrics.Hold{}
	for _, served := range w.Engines.All() {
		name := metrics.Name{Namespace: served.Namespace, Name: served.Store}
		open[name] = w.open[name] // stands if the store cannot be walked: nobody decided those
		if err := w.walkStore(ctx, served, func(holds []metrics.Hold) { open[name] = holds }); err != nil {
			errs = append(errs, fmt.Errorf("IdempotencyStore %s/%s: %w", served.Namespace, served.Store, err))
		}
	}
	w.measure(open)
	return errors.Join(errs...)
}

// walkStore is walk for one store. walked is told of its open holds once all were seen.
func (w *Worklist) walkStore(ctx context.Context, served guard.Served, walked func([]metrics.Hold)) error {
	var errs []error
	var open []metrics.Hold
	states := map[string]guard.HoldState{}
	for cursor := ""; ; {
		page, next, err := served.Engine.Holds(ctx, cursor)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		for _, v := range page {
			if v.Namespace != served.Namespace || v.Hold == nil {
				continue // a store is of one namespace
			}
			states[v.Hold.Name] = v.Hold.State
			open = append(open, openHold(v))
			if err := w.show(ctx, served.Engine, v); err != nil {
				errs = append(errs, fmt.Errorf("hold %s: %w", v.Hold.Name, err))
			}
			if err := w.showFace(ctx, v); err != nil {
				errs = append(errs, fmt.Errorf("PaymentIntent %s: %w", v.Registration.Face, err))
			}
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	walked(open)
	var objects v1alpha1.PaymentHoldList
	if err := w.Client.List(ctx, &objects, client.InNamespace(served.Namespace), client.UnsafeDisableDeepCopy); err != nil { // they are only read
		return errors.Join(append(errs, err)...)
	}
	for i := range objects.Items {
		o := &objects.Items[i]
		open := o.Status.State != v1alpha1.HoldResolved && o.Status.State != v1alpha1.HoldVoid
		if open && o.Spec.Record.Epoch == served.Engine.Identity().Epoch && o.Status.State != v1alpha1.HoldState(states[o.Name]) {
			w.lookAt(ctx, o.Namespace, o.Name)
		}
	}
	w.lookAgain(ctx, served, objects.Items)
	return errors.Join(errs...)
}

// lookAgain has some of the holds that are over looked at once more, in turn: a late result
// in another process may have made a refund owed.
func (w *Worklist) lookAgain(ctx context.Context, served guard.Served, holds []v1alpha1.PaymentHold) {
	var done []*v1alpha1.PaymentHold
	for i := range holds {
		o := &holds[i]
		if (o.Status.State == v1alpha1.HoldResolved || o.Status.State == v1alpha1.HoldVoid) && o.Spec.Record.Epoch == served.Engine.Identity().Epoch {
			done = append(done, o)
		}
	}
	slices.SortFunc(done, func(a, b *v1alpha1.PaymentHold) int { return strings.Compare(a.Name, b.Name) })
	at := w.next[served.Engine.Identity().Epoch]
	for range min(len(done), againPerWalk) {
		o := done[at%len(done)]
		w.lookAt(ctx, o.Namespace, o.Name)
		at++
	}
	w.next[served.Engine.Identity().Epoch] = at
}

// show makes the hold's object if it is not there. Where an object of another record's
// write has its name, the hold gets a number above all that exist.
func (w *Worklist) show(ctx context.Context, engine *guard.Engine, v guard.View) error {
	var have v1alpha1.PaymentHold
	nn := types.NamespacedName{Namespace: v.Namespace, Name: v.Hold.Name}
	err := w.Client.Get(ctx, nn, &have)
	if err == nil && isOf(&have, v.Hold.HoldID) {
		return nil
	}
	// The cache may be behind: creating tells.
	err = w.Live.Create(ctx, holdObject(v), client.FieldOwner(ownerHold))
	switch {
	case err == nil:
		return nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil // its objects go; the records stay
	case !apierrors.IsAlreadyExists(err):
		return err
	}
	if err := w.Live.Get(ctx, nn, &have); err != nil {
		return client.IgnoreNotFound(err) // deleted just now: the next walk makes it
	}
	if isOf(&have, v.Hold.HoldID) {
		return nil
	}
	highest, err := w.highest(ctx, v.Key)
	if err != nil {
		return fmt.Errorf("find a free number: %w", err)
	}
	log.FromContext(ctx).Info("an object of another memory or write has the hold's name: the hold gets a new number",
		"namespace", v.Namespace, "hold", v.Hold.Name, "above", highest)
	return engine.Renumber(ctx, v.Hold.HoldID, max(highest, v.Hold.Number))
}

// isOf says that the object is this very hold's.
func isOf(o *v1alpha1.PaymentHold, id guard.HoldID) bool { return holdID(o) == id }

// holdID is what the object says that it shows.
func holdID(o *v1alpha1.PaymentHold) guard.HoldID {
	return guard.HoldID{
		Key: guard.Key{
			Namespace: o.Namespace, Tool: o.Spec.ToolRef.Name, Caller: o.Spec.Caller, IntentID: o.Spec.IntentID,
		},
		Number: int(o.Spec.Hold), Epoch: o.Spec.Record.Epoch, Nonce: o.Spec.Record.Nonce,
	}
}

// highest is the highest number of an existing object of this record.
func (w *Worklist) highest(ctx context.Context, k guard.Key) (int, error) {
	prefix := strings.TrimSuffix(guard.HoldName(k, 0), "0")
	highest, next := 0, ""
	for {
		var page v1alpha1.PaymentHoldList
		if err := w.Live.List(ctx, &page, client.InNamespace(k.Namespace), client.Limit(500), client.Continue(next)); err != nil {
			return 0, err
		}
		for i := range page.Items {
			if digits, ok := strings.CutPrefix(page.Items[i].Name, prefix); ok {
				if n, err := strconv.Atoi(digits); err == nil {
					highest = max(highest, n)
				}
			}
		}
		if next = page.Continue; next == "" {
			return highest, nil
		}
	}
}

// holdObject is the PaymentHold of a held record.
func holdObject(v guard.View) *v1alpha1.PaymentHold {
	h := v.Hold
	o := &v1alpha1.PaymentHold{
		ObjectMeta: metav1.ObjectMeta{Namespace: v.Namespace, Name: h.Name},
		Spec: v1alpha1.PaymentHoldSpec{
			ToolRef:     v1alpha1.ToolReference{Name: v.Tool},
			Caller:      v.Caller,
			IntentID:    v.IntentID,
			Hold:        int64(h.Number),
			Lineage:     string(v.Lineage),
			Amount:      moneyOf(v.Amount),
			Recipient:   v.Recipient,
			Fingerprint: v.Fingerprint,
			Record:      v1alpha1.HoldRecord{Epoch: h.Epoch, Nonce: h.Nonce},
		},
	}
	for _, p := range v.Scope {
		o.Spec.Scope = append(o.Spec.Scope, v1alpha1.HoldPath(p))
	}
	for _, r := range h.Reasons {
		o.Spec.Reasons = append(o.Spec.Reasons, v1alpha1.HoldReason(r))
	}
	for _, m := range h.Matches[:min(len(h.Matches), guard.MaxMatches)] {
		match := v1alpha1.HoldMatch{
			Caller: m.Caller, Tool: m.Tool, IntentID: m.IntentID, Relation: m.Relation,
			Amount: moneyOf(m.Amount), State: string(m.State),
		}
		if !m.At.IsZero() {
			match.At = ptr.To(metav1.NewTime(m.At))
		}
		o.Spec.Matches = append(o.Spec.Matches, match)
	}
	if h.MatchCount > 0 {
		o.Spec.MatchCount = ptr.To(int32(h.MatchCount))
	}
	return o
}

func moneyOf(m *intent.Money) *v1alpha1.Money {
	if m == nil {
		return nil
	}
	return &v1alpha1.Money{Value: m.Display(), Currency: m.Currency}
}
