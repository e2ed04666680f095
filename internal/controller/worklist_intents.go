// This file brings the news of records to the PaymentIntents that show them.
//
// Steps that this process makes are told at once. Those of other gateways are found:
// every held intent by the walk, and the others in turn, each second some of them: as many
// as it takes to come round in a minute, within bounds. So an object may be behind its
// record; nothing that is paid depends on it.

package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	// openPerTick is how many open intents are looked at each second at the least, and
	// mostPerTick at the most: each is a question to the store. settledPerTick is how many
	// settled ones: a late result may have made a refund owed.
	openPerTick, mostPerTick, settledPerTick = 64, 512, 4
	// turnTakes is how long one turn of the open ones takes, if that many can be looked at.
	turnTakes = time.Minute
	// turnAtLeast is how long one turn lasts at the least.
	turnAtLeast = 2 * time.Second
)

// turn goes through objects, some at a time.
type turn struct {
	left []types.NamespacedName
}

func (t *turn) next(n int) []types.NamespacedName {
	n = min(n, len(t.left))
	out := t.left[:n]
	t.left = t.left[n:]
	return out
}

// intentTurns are the turns that are taken.
type intentTurns struct {
	began time.Time
	// perTick is how many of the open ones are looked at each second of this turn.
	perTick       int
	open, settled turn
	// failed is the last error, so that it is logged once.
	failed failing
}

// perTick is how many of so many are looked at each second.
func perTick(open int) int {
	ticks := int(turnTakes / worklistTick)
	return min(max((open+ticks-1)/ticks, openPerTick), mostPerTick)
}

// followIntents takes turns until the process ends.
func (w *Worklist) followIntents(ctx context.Context) {
	tick := time.NewTicker(worklistTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !w.Leading() {
			continue
		}
		w.intents.failed.tell(ctx, w.lookAtIntents(ctx), "the news of intents are not shown; trying on")
	}
}

// lookAtIntents has some intents reconciled, in turn.
func (w *Worklist) lookAtIntents(ctx context.Context) error {
	t := &w.intents
	if (len(t.open.left) == 0 || len(t.settled.left) == 0) && time.Since(t.began) >= turnAtLeast {
		var list v1alpha1.PaymentIntentList
		if err := w.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return fmt.Errorf("list the intents: %w", err)
		}
		t.began = time.Now()
		openOver, settledOver := len(t.open.left) == 0, len(t.settled.left) == 0
		for i := range list.Items {
			o := &list.Items[i]
			if unregistered(o) {
				continue
			}
			nn := client.ObjectKeyFromObject(o)
			if c := find(o.Status.Conditions, v1alpha1.ConditionSettled); c != nil && c.Status == metav1.ConditionTrue {
				if settledOver {
					t.settled.left = append(t.settled.left, nn)
				}
			} else if openOver {
				t.open.left = append(t.open.left, nn)
			}
		}
		if openOver {
			t.perTick = perTick(len(t.open.left))
		}
	}
	for _, nn := range t.open.next(t.perTick) {
		w.lookAtIntent(ctx, nn.Namespace, nn.Name)
	}
	for _, nn := range t.settled.next(settledPerTick) {
		w.lookAtIntent(ctx, nn.Namespace, nn.Name)
	}
	return nil
}

// lookAtIntent has a PaymentIntent reconciled.
func (w *Worklist) lookAtIntent(ctx context.Context, namespace, name string) {
	e := event.GenericEvent{Object: &v1alpha1.PaymentIntent{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}}
	select {
	case w.lookIntents <- e:
	case <-ctx.Done():
	}
}

// showFace makes the object of a held intent again where somebody has deleted it, and has
// it looked at if it says something else than the record. It is made only while nobody can forge
// one: an object that is new while anybody can is distrusted for good.
func (w *Worklist) showFace(ctx context.Context, v guard.View) error {
	if v.Registration == nil || v.Registration.Face == "" {
		return nil
	}
	name := v.Registration.Face
	var have v1alpha1.PaymentIntent
	err := w.Client.Get(ctx, types.NamespacedName{Namespace: v.Namespace, Name: name}, &have)
	switch key, failed := intentKey(&have); {
	case err == nil && failed == nil && key == v.Key:
		if have.Status.State != v1alpha1.IntentHeld || have.Status.Hold != v.Hold.Name {
			w.lookAtIntent(ctx, v.Namespace, name)
		}
		return nil
	case err == nil:
		name = guard.IntentName(v.Key) // its name was given to another intent meanwhile
	case !apierrors.IsNotFound(err):
		return err
	}
	again := &v1alpha1.PaymentIntent{ObjectMeta: metav1.ObjectMeta{Namespace: v.Namespace, Name: name}}
	if err := json.Unmarshal(v.Registration.Shown, &again.Spec); err != nil {
		return fmt.Errorf("read what PaymentIntent %s said: %w", name, err)
	}
	if err := NewGate(w.Live).checkIntents(ctx, v.Namespace); err != nil {
		return fmt.Errorf("it was deleted, and is not made again yet: %w", err)
	}
	err = w.Live.Create(ctx, again, client.FieldOwner(ownerIntent))
	if apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil // the cache was behind; or its objects go, and the records stay
	}
	return err
}
