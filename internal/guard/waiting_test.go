// A settling time is over only when the store's clock says so and the judging process
// has watched for as long: a clock that jumps releases nothing.

package guard

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// handClock is moved by hand.
type handClock struct{ boot time.Duration }

func (c *handClock) Now() Reading {
	return Reading{Boot: c.boot, Wall: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(c.boot)}
}

func TestAJumpOfTheStoresClockEndsNoWaiting(t *testing.T) {
	const settleAfter = 10 * time.Minute
	storeTime := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	st, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true, Clock: func() time.Time { return storeTime }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	id, err := st.Initialise(t.Context(), store.Identity{Epoch: "epoch", KeyDomain: "domain"})
	if err != nil {
		t.Fatal(err)
	}
	clock := &handClock{}
	sender, judge := New(st, id, Options{Clock: clock}), New(st, id, Options{Clock: clock})

	call := Call{
		Key:       Key{Namespace: "ns", Tool: "refund", Caller: "agent", IntentID: "1"},
		CallerUID: "uid", Scope: intent.Scope{"order/9"}, Fingerprint: "sha256:f", IdentityHash: "sha256:h",
	}
	a, err := sender.Admit(t.Context(), call, Policy{
		Budget: "refunds", Window: time.Hour, TTL: time.Hour, Timeout: time.Second, SettleAfter: settleAfter,
	})
	if err != nil || a.Verdict != Allow {
		t.Fatalf("%v, %v", a.Verdict, err)
	}
	sweep := func() HoldView {
		t.Helper()
		if err := judge.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		held, _, err := judge.Holds(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		if len(held) == 0 {
			return HoldView{}
		}
		return *held[0].Hold
	}
	sweep() // begins to watch

	// The sender is never heard of again. The store's clock jumps far beyond all; the
	// judge has watched for the lease and its grace, and no longer.
	clock.boot += 4*time.Second + 2*time.Second
	storeTime = storeTime.Add(24 * time.Hour)
	h := sweep()
	if h.State != HoldWaiting {
		t.Fatalf("the hold is %q, it should be Waiting: the payment may arrive yet", h.State)
	}
	spent, err := judge.Resolve(t.Context(), Resolution{HoldID: h.HoldID, Decision: Release, By: "alice", Reason: "too early"})
	if err != nil || spent.State != HoldVoid {
		t.Fatalf("a release while it waits gives %q (%v), it should be spent", spent.State, err)
	}
	if h = sweep(); h.State != HoldWaiting || h.Number != 2 {
		t.Fatalf("hold %d is %q, it should be the second, and Waiting", h.Number, h.State)
	}

	clock.boot += settleAfter
	if h = sweep(); h.State != HoldHeld {
		t.Fatalf("the judge has watched for long enough, the hold is %q", h.State)
	}
	// A hold that follows one which had waited does not wait again.
	spent, err = judge.Resolve(t.Context(), Resolution{HoldID: h.HoldID, Decision: Release, By: "alice", Reason: "go on", ToolGone: true})
	if err != nil || spent.State != HoldVoid {
		t.Fatalf("a release without a tool gives %q (%v), it should be spent", spent.State, err)
	}
	if h = sweep(); h.State != HoldHeld || h.Number != 3 {
		t.Fatalf("hold %d is %q, it should be the third, and Held", h.Number, h.State)
	}
	release := Resolution{HoldID: h.HoldID, Decision: Release, By: "alice", Reason: "not in the ledger"}
	if _, err := judge.Resolve(t.Context(), release); !errors.Is(err, ErrClockJumped) {
		t.Fatalf("a release by a clock that jumped: %v", err)
	}
	judge.AcceptClock()
	taken, err := judge.Resolve(t.Context(), release)
	if err != nil || taken.State != HoldResolved {
		t.Fatalf("%q (%v)", taken.State, err)
	}
}
