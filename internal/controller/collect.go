// This file takes away the objects that have told their story: holds that are over, and
// intents that are settled or were refused for good.
//
// An object decides nothing, so a missing one releases nothing, and a hold whose record
// is held gets its object again. What keeps an object is that somebody still has to read
// it: a refund that is owed, or a store whose memory is in doubt.

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	// collectAfter is how long an object stays once it is over, unless it is said otherwise.
	collectAfter = 7 * 24 * time.Hour
	// goneAfter is how long an intent stays whose record is gone, at the least: a person should look for
	// it in the provider's ledger, and it is as long as a record that is over would have stayed.
	goneAfter = 90 * 24 * time.Hour
	// collectTick is how often it is looked for objects to collect, at the most seldom.
	collectTick = time.Minute
	// minCollectTick is that at the most often.
	minCollectTick = time.Second
	// collectRate is how many objects are deleted in a second: an API server has other work.
	collectRate = 10
)

// Collector deletes objects some time after they are over.
type Collector struct {
	Client, Live client.Client
	Engines      *guard.Engines
	Leading      func() bool
	// After is how long an object stays once it is over.
	After time.Duration

	failed failing
}

// NeedLeaderElection is false: it asks itself whether it leads, as the worklist does.
func (c *Collector) NeedLeaderElection() bool { return false }

// Start collects until the process ends.
func (c *Collector) Start(ctx context.Context) error {
	tick := time.NewTicker(min(max(c.After/10, minCollectTick), collectTick))
	defer tick.Stop()
	slowly := flowcontrol.NewTokenBucketRateLimiter(collectRate, collectRate)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if !c.Leading() {
			continue
		}
		c.failed.tell(ctx, c.collect(ctx, slowly), "not all objects that are over could be collected; trying on")
	}
}

func (c *Collector) collect(ctx context.Context, slowly flowcontrol.RateLimiter) error {
	doubted, err := c.doubted(ctx)
	if err != nil {
		return err
	}
	var holds v1alpha1.PaymentHoldList
	if err := c.Client.List(ctx, &holds, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list PaymentHolds: %w", err)
	}
	var errs []error
	for i := range holds.Items {
		if h := &holds.Items[i]; !doubted[h.Namespace] && c.over(holdOver(h)) {
			errs = append(errs, c.delete(ctx, slowly, h))
		}
	}
	var intents v1alpha1.PaymentIntentList
	if err := c.Client.List(ctx, &intents, client.UnsafeDisableDeepCopy); err != nil {
		return errors.Join(append(errs, fmt.Errorf("list PaymentIntents: %w", err))...)
	}
	for i := range intents.Items {
		if o := &intents.Items[i]; !doubted[o.Namespace] && (c.over(intentOver(o)) || c.gone(o)) {
			errs = append(errs, c.delete(ctx, slowly, o))
		}
	}
	return errors.Join(errs...)
}

// doubted are the namespaces with a store that is not served: its holds may be what is
// left of a memory.
func (c *Collector) doubted(ctx context.Context) (map[string]bool, error) {
	var stores v1alpha1.IdempotencyStoreList
	if err := c.Client.List(ctx, &stores, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list IdempotencyStores: %w", err)
	}
	served := map[types.NamespacedName]bool{}
	for _, s := range c.Engines.All() {
		served[types.NamespacedName{Namespace: s.Namespace, Name: s.Store}] = true
	}
	out := map[string]bool{}
	for i := range stores.Items {
		if nn := client.ObjectKeyFromObject(&stores.Items[i]); !served[nn] {
			out[nn.Namespace] = true
		}
	}
	return out, nil
}

// over says that what ended then may go now. The zero time: it has not ended.
func (c *Collector) over(ended time.Time) bool {
	return !ended.IsZero() && time.Since(ended) >= c.After
}

// holdOver is when the hold came to its end; zero: it has not, or somebody must still see it.
func holdOver(h *v1alpha1.PaymentHold) time.Time {
	if !h.DeletionTimestamp.IsZero() || h.Status.ObservedGeneration != h.Generation ||
		h.Status.State != v1alpha1.HoldResolved && h.Status.State != v1alpha1.HoldVoid {
		return time.Time{}
	}
	if owed := find(h.Status.Conditions, v1alpha1.ConditionRefundOwed); owed != nil {
		return time.Time{} // a person deletes it, once that is settled
	}
	held := find(h.Status.Conditions, v1alpha1.ConditionHeld)
	if held == nil || held.Status != metav1.ConditionFalse || held.ObservedGeneration != h.Generation {
		return time.Time{}
	}
	return held.LastTransitionTime.Time
}

// intentOver is when the intent came to its end: when it was settled, or, if the object has
// no record, when it was refused until its spec changes, which cannot. Zero: it has not.
func intentOver(o *v1alpha1.PaymentIntent) time.Time {
	if !o.DeletionTimestamp.IsZero() || o.Status.ObservedGeneration != o.Generation || find(o.Status.Conditions, v1alpha1.ConditionRefundOwed) != nil {
		return time.Time{}
	}
	end := v1alpha1.ConditionSettled
	if unregistered(o) {
		end = v1alpha1.ConditionStalled
	}
	if !isTrue(o.Status.Conditions, end, o.Generation) {
		return time.Time{}
	}
	return find(o.Status.Conditions, end).LastTransitionTime.Time
}

// gone says that the intent's record has been gone for long enough.
func (c *Collector) gone(o *v1alpha1.PaymentIntent) bool {
	stalled := find(o.Status.Conditions, v1alpha1.ConditionStalled)
	if unregistered(o) || stalled == nil || stalled.Reason != reasonRecordGone || !isTrue(o.Status.Conditions, v1alpha1.ConditionStalled, o.Generation) {
		return false
	}
	return o.DeletionTimestamp.IsZero() && find(o.Status.Conditions, v1alpha1.ConditionRefundOwed) == nil &&
		time.Since(stalled.LastTransitionTime.Time) >= max(goneAfter, c.After)
}

// delete takes this very version of the object away, unless its namespace is in doubt by now: one that has news stays.
func (c *Collector) delete(ctx context.Context, slowly flowcontrol.RateLimiter, o client.Object) error {
	if err := slowly.Wait(ctx); err != nil {
		return err
	}
	uid, version := o.GetUID(), o.GetResourceVersion()
	target, ok := o.DeepCopyObject().(client.Object) // the cache's own must not be written to
	if !ok {
		return fmt.Errorf("%T is no object", o)
	}
	// The round may be long, and a store may have gone since it began.
	doubted, err := c.doubted(ctx)
	if err != nil || doubted[o.GetNamespace()] {
		return err
	}
	err = c.Live.Delete(ctx, target, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the next round looks at it anew
	}
	return err
}
