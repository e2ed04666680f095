// This file is what time does to a record, and what it does not when a clock steps:
// the store's clock and the watching of one's own must both say that it is over.

package guard

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestTheStoresClockStepsWhileAnAttemptIsInFlight(t *testing.T) { // R28
	for _, step := range []time.Duration{20 * time.Minute, -20 * time.Minute} {
		t.Run(step.String(), func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			tk := s.send(c)
			s.pass(time.Second)
			s.time.stepStore(step)
			for _, e := range []*Engine{s.Engine, s.process()} {
				s.Engine = e
				s.sweep()
				s.sweep()
				s.want(s.admit(c), InFlightNow, ReasonInFlight)
				s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
				if a, err := s.Poll(s.ctx, c.Key); err != nil || a.Verdict != InFlightNow {
					t.Fatalf("%s, %v", a.Verdict, err)
				}
			}
			if !tk.InTime() || tk.Left() != storyLease-2*time.Second {
				t.Fatalf("the sender has %s left: the store's clock is not its own", tk.Left())
			}
			s.pass(2 * time.Second)
			s.want(s.settle(tk, paid("re_1")), Allow, "")
			s.wantReplay(s.admit(c), "intent-1", "re_1")
		})
	}
	t.Run("forward, and the holder is dead", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.send(c)
		s.time.stepStore(20 * time.Minute)
		s.pass(storyLease + storyGrace - time.Second)
		s.sweep()
		s.inState(c, InFlight)
		s.pass(time.Second)
		s.sweep()
		s.inState(c, Held)
	})
	t.Run("back into the grace, and the holder is dead", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.send(c)
		s.time.stepStore(-1)
		s.pass(storyLease + storyGrace)
		s.sweep()
		s.want(s.admit(c), InFlightNow, ReasonInFlight)
		s.pass(1)
		s.sweep()
		s.inState(c, Held)
	})
	t.Run("back, and the holder is dead", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.send(c)
		s.time.stepStore(-20 * time.Minute)
		s.pass(storyLease + storyGrace)
		s.sweep()
		s.inState(c, InFlight) // later than need be, never sooner
		s.pass(20 * time.Minute)
		s.sweep()
		s.inState(c, Held)
	})
}

func TestTheSendersClockSteps(t *testing.T) {
	const deadline = storyLease - time.Second
	for _, row := range []struct {
		name string
		pass time.Duration
		wall time.Duration
		in   bool
		left time.Duration
	}{
		{"nothing", 0, 0, true, deadline},
		{"just before", deadline - 1, 0, true, 1},
		{"at the deadline", deadline, 0, false, 0},
		{"the wall clock steps forward", 0, time.Hour, false, deadline - time.Hour},
		{"the wall clock steps to just before", 0, deadline - 1, true, 1},
		{"the wall clock steps back, and the time is over", deadline, -time.Hour, false, 0},
		{"the wall clock steps back", time.Second, -time.Hour, true, deadline - time.Second},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			tk := s.send(s.call("intent-1", "order/9"))
			s.pass(row.pass)
			s.time.stepWall(row.wall)
			if tk.InTime() != row.in || tk.Left() != row.left {
				t.Fatalf("in time: %t, left %s; want %t, %s", tk.InTime(), tk.Left(), row.in, row.left)
			}
		})
	}
}

func TestTheSendersClockStartsBeforeTheReserve(t *testing.T) {
	s := tell(t)
	s.net.hook(func(what string) error {
		if what == "Reserve" {
			s.pass(time.Second) // a slow store
		}
		return nil
	}, nil)
	tk := s.send(s.call("intent-1", "order/9"))
	if got := tk.Left(); got != storyLease-time.Second-time.Second {
		t.Fatalf("%s left", got)
	}
}

func TestAJudgeMustHaveWatched(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.send(c)
	s.pass(storyLease + storyGrace - 1)
	s.sweep()
	s.inState(c, InFlight)
	// A process that has just started has seen nothing of it, however late it is.
	s.restart()
	s.pass(time.Hour)
	s.sweep()
	s.want(s.admit(c), InFlightNow, ReasonInFlight)
	s.pass(storyLease + storyGrace - 1)
	s.sweep()
	s.inState(c, InFlight)
	// And again from the start.
	s.restart()
	s.sweep()
	s.pass(storyLease + storyGrace - 1)
	s.sweep()
	s.inState(c, InFlight)
	s.pass(1)
	s.sweep()
	s.inState(c, Held)
	if at := s.record(c.Key).last(); at.Outcome != AttemptUnknown || at.Ended.IsZero() {
		t.Fatalf("%+v", at)
	}
}

func TestAnyCallThatSeesItEndsALease(t *testing.T) {
	for name, look := range map[string]func(s *story, c Call){
		"the same ID": func(s *story, c Call) { s.wantHeld(s.admit(c), OutcomeUnknown) },
		"a poll": func(s *story, c Call) {
			if a, err := s.Poll(s.ctx, c.Key); err != nil || a.Verdict != UnknownHold {
				s.t.Fatalf("%s, %v", a.Verdict, err)
			}
		},
		"a sweep": func(s *story, _ Call) { s.sweep() },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.send(c)
			s.pass(storyLease + storyGrace)
			look(s, c)
			s.inState(c, Held)
		})
	}
}

func TestAJudgeWatchesTheAttemptNotTheRecord(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	judge := s.process()
	watch := func() {
		t.Helper()
		if err := judge.Sweep(s.ctx); err != nil {
			t.Fatal(err)
		}
	}
	first := s.send(c)
	watch()
	s.pass(time.Second)
	s.settle(first, unreachable())
	s.pass(2 * time.Second)
	s.send(c) // the judge has seen nothing in between
	watch()
	s.pass(storyLease + storyGrace - 1)
	watch()
	s.inState(c, InFlight)
	s.pass(1)
	watch()
	s.inState(c, Held)
}

func TestWaitingEndsOnceAndStaysEnded(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	s.pass(storyWait - 1)
	s.sweep()
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s a moment too early", h.State)
	}
	// A process that has just started must watch for as long.
	s.restart()
	s.pass(time.Second)
	s.sweep()
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s although nobody has watched", h.State)
	}
	s.pass(storyWait - 1)
	s.sweep()
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s a moment too early", h.State)
	}
	s.pass(1)
	s.sweep()
	h := s.hold(c)
	if h.State != HoldHeld {
		t.Fatalf("%s", h.State)
	}
	// It is a fact of the record now: no restart and no step of a clock takes it back.
	version := s.record(c.Key).version
	s.restart()
	s.time.stepStore(-24 * time.Hour)
	s.sweep()
	if got := s.hold(c); got.State != HoldHeld || got.HoldID != h.HoldID || s.record(c.Key).version != version {
		t.Fatalf("%s, hold %d, version %d was %d", got.State, got.Number, s.record(c.Key).version, version)
	}
	s.take(c, Release)
}

func TestTheStoresClockStepsWhileAHoldWaits(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	s.time.stepStore(24 * time.Hour)
	s.sweep()
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s: nobody has waited", h.State)
	}
	s.pass(storyWait - 1)
	s.sweep()
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s a moment too early", h.State)
	}
	s.pass(1)
	s.sweep()
	if h := s.hold(c); h.State != HoldHeld {
		t.Fatalf("%s", h.State)
	}
}

func TestTheStoresClockHasSteppedWhenTheOutcomeIsLost(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.send(c)
	s.time.stepStore(24 * time.Hour)
	if _, err := s.Poll(s.ctx, c.Key); err != nil { // hears the new time
		t.Fatal(err)
	}
	s.wantHeld(s.settle(tk, lost()), OutcomeUnknown)
	if h := s.hold(c); h.State != HoldWaiting {
		t.Fatalf("%s: nobody has waited", h.State)
	}
}

func TestAnUnusedReleaseEnds(t *testing.T) {
	for name, make := range map[string]func(s *story, c Call){
		"an overlap": func(s *story, c Call) { s.block(c) },
		"unknown":    func(s *story, c Call) { s.loseAndWait(c) },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			make(s, c)
			before := s.hold(c)
			s.take(c, Release)
			s.pass(24*time.Hour - time.Second)
			s.sweep()
			s.inState(c, Released)
			s.pass(time.Second)
			a := s.admit(c) // a call that comes then finds it ended
			s.wantHeld(a, before.Reasons...)
			h := s.hold(c)
			if h.Number != 2 || h.Cause == "" {
				t.Fatalf("hold %d, %q", h.Number, h.Cause)
			}
			if v := s.resolve(before, Release); v.State != HoldResolved || s.state(c) != Held {
				t.Fatalf("the old hold is %s, the record %s", v.State, s.state(c))
			}
			s.sweep()
			s.pass(storyWait)
			s.sweep()
			s.take(c, Release)
			s.send(c)
		})
	}
}

func TestARetryableIntentEnds(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.settle(s.send(c), unreachable())
	s.pass(storyTTL - time.Second)
	s.sweep()
	s.inState(c, Retryable)
	s.pass(time.Second)
	s.sweep()
	s.inState(c, Failed)
	s.want(s.admit(c), Replay, ReasonExpired)
	s.pass(storyTTL) // its own, from here
	s.sweep()
	s.inState(c, Tombstone)
}

func TestTombstones(t *testing.T) {
	for name, window := range map[string]time.Duration{
		"90 days":               storyWindow,
		"the window, if longer": 100 * 24 * time.Hour,
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			p := storyPolicy()
			p.Window = window
			c := s.call("intent-1", "order/9")
			s.settle(s.sendUnder(c, p), paid("re_1"))
			s.pass(storyTTL - time.Second)
			s.sweep()
			s.wantReplay(s.admitUnder(c, p), "intent-1", "re_1")
			s.pass(time.Second)
			s.sweep()
			r := s.inState(c, Tombstone)
			if r.SettledAs != Succeeded || r.Response != nil || len(r.Attempts) != 1 || r.ProviderReference != "re_1" {
				t.Fatalf("a tombstone keeps its header and attempts, not the answer: %+v", r)
			}
			if a, err := s.Poll(s.ctx, c.Key); err != nil || a.Intent.SettledAs != Succeeded {
				t.Fatalf("%+v, %v", a, err)
			}
			stays := max(90*24*time.Hour, window)
			s.pass(stays - time.Second)
			s.sweep()
			s.inState(c, Tombstone)
			s.pass(time.Second)
			s.sweep()
			s.inState(c, None)
			s.sendUnder(c, p)
		})
	}
}

func TestMarksLiveForTheWindowNotTheTTL(t *testing.T) {
	for _, row := range []struct {
		name        string
		ttl, window time.Duration
		swept       bool
	}{
		{"the window is longer", time.Hour, 10 * time.Hour, true},
		{"the window is longer, unswept", time.Hour, 10 * time.Hour, false},
		{"the TTL is longer", 10 * time.Hour, time.Hour, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			p := storyPolicy()
			p.TTL, p.Window = row.ttl, row.window
			c := s.call("intent-1", "order/9")
			s.settle(s.sendUnder(c, p), paid("re_1"))
			s.pass(row.window - time.Second)
			if row.swept {
				s.sweep()
			}
			s.wantHeld(s.admitUnder(c.under("before").by("b"), p), ScopeOverlap)
			s.pass(time.Second)
			s.sendUnder(c.under("after").by("c"), p)
		})
	}
	t.Run("late evidence stands for a window of its own", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		tk := s.lose(c)
		s.take(c, Reject)
		s.pass(storyTTL - time.Second)
		s.settle(tk, paid("re_1"))
		s.pass(storyWindow - time.Second)
		s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)
	})
}

func TestOneBadRecordKeepsNoOtherFromBeingSwept(t *testing.T) {
	s := tell(t)
	sent, held, good := s.call("sent", "order/8"), s.call("held", "order/9"), s.call("good", "order/10")
	s.send(sent)
	s.lose(held)
	s.send(good)
	// spoil cuts the body off, and gives it back.
	spoil := func(c Call) (mend func()) {
		t.Helper()
		write := func(body []byte) []byte {
			t.Helper()
			r, _, err := s.bolt.Get(s.ctx, c.Key.String())
			if err != nil {
				t.Fatal(err)
			}
			old := r.Body
			rec := *r
			rec.Body = body
			res, err := s.bolt.Update(s.ctx, store.Write{Epoch: s.id.Epoch, Key: c.Key.String(), Expected: r.Version, Nonce: s.o.Nonce(), Record: &rec, KeepMarks: true})
			if err != nil || res.Outcome != store.Written {
				t.Fatal(res.Outcome, err)
			}
			return old
		}
		body := write([]byte("not a body"))
		return func() { write(body) }
	}
	mend := []func(){spoil(sent), spoil(held)}
	s.pass(storyLease + storyGrace)
	if err := s.Sweep(s.ctx); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("the sweep says %v", err)
	}
	s.inState(good, Held)
	if got := s.heldIntents(); !slices.Equal(got, []string{"good"}) {
		t.Fatalf("held: %v", got)
	}
	for _, bad := range []Call{sent, held} {
		if _, err := s.Admit(s.ctx, bad, storyPolicy()); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("a call says %v", err)
		}
		if _, err := s.Poll(s.ctx, bad.Key); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("a poll says %v", err)
		}
		// It still stands in the way of others.
		s.wantHeld(s.admit(bad.under("beside "+bad.IntentID)), ScopeOverlap)
	}
	for _, m := range mend {
		m()
	}
}

func TestWatchesAreForgotten(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	other := s.process()
	s.send(c)
	if err := other.Sweep(s.ctx); err != nil {
		t.Fatal(err)
	}
	if len(other.watched) != 1 {
		t.Fatalf("%d watched", len(other.watched))
	}
	s.pass(storyLease + storyGrace)
	s.sweep()
	s.take(c, Reject)
	s.pass(25 * time.Hour)
	if err := other.Sweep(s.ctx); err != nil {
		t.Fatal(err)
	}
	if len(other.watched) != 0 {
		t.Fatalf("%d are still watched", len(other.watched))
	}
	if len(s.watched) != 0 {
		t.Fatalf("%d are still watched by the one who settled it", len(s.watched))
	}
}
