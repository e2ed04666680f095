package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// A process that starts after the store's clock has jumped finds it by what is remembered.
func TestClockThatJumpedMeanwhile(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
	p.stop()

	nn := types.NamespacedName{Namespace: w.ns, Name: "payments"}
	last, err := storeMemory(w.memory()).seen(nn)
	must(t, err)
	// The store's clock had shown three hours less than it does now.
	last.clock, last.wall = time.Now().Add(-3*time.Hour), time.Now()
	w.remember(map[string]*string{w.key(seenOf, "payments"): ptr.To(last.String())})
	p = start(t, dir)
	message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonClockJumped)
	contains(t, message, last.name(), "acceptClock")
	eventually(t, func() error {
		if _, err := w.try(p, "refund", "b", "8", "1"); !errors.Is(err, guard.ErrClockJumped) {
			return fmt.Errorf("a call should be told that the clock has jumped, got %v", said(err))
		}
		return nil
	})
	if got := w.memory()[w.key(seenOf, "payments")]; got != last.String() {
		t.Errorf("the wrong clock was remembered: %s", got)
	}

	accept := func(name string) {
		t.Helper()
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"acceptClock": name}})
		must(t, err)
		must(t, admin.Patch(w.ctx, w.store("payments"), client.RawPatch(types.MergePatchType, patch)))
	}
	accept("2026-01-01T00:00:00Z") // another one
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonClockJumped)
	accept(last.name())
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	w.toolReady("refund")
	w.pay(p, "refund", "b", "8", "1", guard.AttemptSucceeded)
	if got, err := storeMemory(w.memory()).seen(nn); err != nil || far(time.Since(got.clock)) || got.name() == last.name() {
		t.Errorf("the accepted clock is remembered as %v, %v", got, err)
	}
	p.stop()

	t.Log("the same jump again: what was said of the first says nothing of it")
	last.clock, last.wall = time.Now().Add(-2*time.Hour), time.Now()
	w.remember(map[string]*string{w.key(seenOf, "payments"): ptr.To(last.String())})
	p = start(t, dir)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonClockJumped)
	p.stop()
}

// An acceptance that was there before the loss does not accept it.
func TestAcceptanceBeforeTheLoss(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
	epoch := w.memory()[w.key(epochOf, "payments")]
	w.accept("payments", epoch, epoch)
	eventually(t, func() error {
		if got := w.memory()[w.key(spentOf, "payments")]; got != epoch {
			return fmt.Errorf("spent is %q", got)
		}
		return nil
	})
	p.stop()
	must(t, os.Remove(filepath.Join(dir, w.ns+"_payments.db")))
	p = start(t, dir)
	message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonMemoryLost)
	contains(t, message, "since before the loss")
	if _, err := w.try(p, "refund", "b", "8", "1"); !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("a call should be told that the memory is lost, got %v", err)
	}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"acceptEpoch":null,"forgetEpoch":null}}`))
	must(t, admin.Patch(w.ctx, w.store("payments"), patch))
	eventually(t, func() error {
		if got, ok := w.memory()[w.key(spentOf, "payments")]; ok {
			return fmt.Errorf("spent is %q", got)
		}
		return nil
	})
	w.accept("payments", epoch, "")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing)
	w.toolReady("refund")
	if a := w.call(p, "refund", "b", "8", "1"); a.Verdict != guard.UnknownHold {
		t.Errorf("a first call after a loss should be held, got %s", a.Verdict)
	}
	// It may be forgotten later, too.
	lost := epoch
	w.accept("payments", lost, lost)
	tries := 0
	eventually(t, func() error {
		tries++ // what was held once stays so
		if a := w.call(p, "refund", fmt.Sprint("c", tries), fmt.Sprint("7-", tries), "1"); a.Verdict != guard.Allow {
			return fmt.Errorf("what is forgotten is %s %s", a.Verdict, a.Reason)
		}
		return nil
	})
}
