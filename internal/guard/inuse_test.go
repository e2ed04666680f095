// An engine that is taken out of service lets nobody in, and says for how long its
// store is still needed.

package guard

import (
	"errors"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestBusyUntilTheResultIsDurable(t *testing.T) {
	s := tell(t)
	c := s.call("1", "order/1")
	a := s.admit(c)
	s.Retire()
	if !s.Busy() {
		t.Fatal("an attempt is under way, and the engine is not busy")
	}
	if _, err := s.Admit(s.ctx, s.call("2", "order/2"), Policy{}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a retired engine should let nobody in, got %v", err)
	}
	// The store does not take the result within the lease: it is still in hand.
	s.net.hook(func(string) error { return errStoryLost }, nil)
	if _, err := s.Settle(s.ctx, a.Ticket, Result{Outcome: AttemptSucceeded, Response: &Response{Status: 200}}); err != nil {
		t.Fatal(err)
	}
	if !s.Busy() {
		t.Error("the result is not durable, and the engine is not busy")
	}
	s.net.hook(nil, nil)
	s.runLater()
	s.inState(c, Succeeded)
	if s.Busy() {
		t.Error("the result is durable, and the engine is still busy")
	}
	s.Resume()
	s.admit(s.call("2", "order/2"))
}

func TestBusyEndsAfterTheLease(t *testing.T) {
	s := tell(t)
	s.admit(s.call("1", "order/1"))
	s.Retire()
	s.time.pass(storyLease + inHandFor - time.Millisecond)
	if !s.Busy() {
		t.Error("the minute after the lease is not over, and the engine is not busy")
	}
	s.time.pass(time.Millisecond)
	if s.Busy() {
		t.Error("a result that never comes keeps the store open")
	}
}

// A Reserve whose reply was lost is still to be withdrawn.
func TestBusyUntilAReserveIsWithdrawn(t *testing.T) {
	s := tell(t)
	c := s.call("1", "order/1")
	s.net.hook(nil, func(what string) error {
		if what == "Reserve" {
			return errStoryLost
		}
		return nil
	})
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("the reply should be lost, got %v", err)
	}
	s.net.hook(nil, nil)
	s.Retire()
	if !s.Busy() {
		t.Error("a Reserve is to be withdrawn, and the engine is not busy")
	}
	s.runLater()
	s.inState(c, Retryable)
	if s.Busy() {
		t.Error("the Reserve is withdrawn, and the engine is still busy")
	}
}
