// This file is about the store's clock: it is believed while it goes as this process's
// own does, and when it jumps nothing is sent and nothing ages.

package guard

import (
	"errors"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func (s *story) refusedByClock(c Call) {
	s.t.Helper()
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, ErrClockJumped) {
		s.t.Fatalf("got %v, want that the clock has jumped", err)
	}
	if _, _, jumped := s.ClockJump(); !jumped {
		s.t.Fatal("no jump is told")
	}
}

const bigStep = time.Hour + time.Second

func TestAJumpStopsCalls(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": bigStep, "back": -bigStep} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("paid", "order/1"), "re_1")
			s.time.stepStore(step)
			s.pass(staleAfter + time.Second)
			s.refusedByClock(s.call("intent-1", "order/9"))
			from, to, _ := s.ClockJump()
			if got := to.Sub(from); got != step {
				t.Fatalf("from %s to %s", from, to)
			}
			s.refusedByClock(s.call("paid", "order/1"))
			s.inState(s.call("intent-1", "order/9"), None)
			// It came back to within an hour.
			s.time.stepStore(-step + 30*time.Minute)
			s.send(s.call("intent-1", "order/9"))
			if _, _, jumped := s.ClockJump(); jumped {
				t.Fatal("a clock that came back is still a jump")
			}
		})
	}
}

func TestAnAcceptedJump(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 5 * time.Hour, "back": -5 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			flying, unknown := s.call("flying", "order/1"), s.call("unknown", "order/2")
			s.send(flying)
			s.lose(unknown)
			s.time.stepStore(step)
			s.sweep()
			s.pass(staleAfter + time.Second)
			s.refusedByClock(s.call("intent-1", "order/9"))
			s.AcceptClock()
			s.send(s.call("intent-1", "order/9"))
			// What was in flight and what was waited for ends by those who watch.
			s.pass(storyLease + storyGrace + horizon)
			s.sweep()
			s.sweep()
			s.inState(flying, Held)
			if h := s.hold(unknown); h.State != HoldHeld {
				t.Fatalf("after its time the hold is %s", h.State)
			}
			s.time.stepStore(-step)
			s.pass(staleAfter + time.Second)
			s.refusedByClock(s.call("intent-2", "order/8"))
		})
	}
}

func TestAnAttemptWhoseReserveShowsTheJumpIsNotSent(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 100 * time.Hour, "back": -100 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("paid", "order/9"), "re_1")
			c := s.call("intent-1", "order/8")
			s.net.hook(func(what string) error {
				if what == "Reserve" {
					s.net.hook(nil, nil)
					s.time.stepStore(step)
				}
				return nil
			}, nil)
			s.refusedByClock(c)
			s.inState(c, InFlight)
			s.runLater()
			if r := s.inState(c, Retryable); r.last().Outcome != AttemptRetryable {
				t.Fatalf("%+v", r.last())
			}
			s.time.stepStore(-step)
			s.pass(2 * time.Second)
			s.keys[c.Key] = true
			s.send(c)
		})
	}
}

// What stands in the way by a wrong clock is not shown to a person.
func TestARefusedReserveThatShowsTheJumpHoldsNothing(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9"), "re_1")
	c := s.call("intent-1", "order/9/item")
	s.net.hook(func(what string) error {
		if what == "Reserve" {
			s.net.hook(nil, nil)
			s.time.stepStore(-100 * time.Hour)
		}
		return nil
	}, nil)
	s.refusedByClock(c)
	s.inState(c, None)
}

func TestAReserveThatWasRepeatedOverAJumpIsNotSent(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9"), "re_1")
	c := s.call("intent-1", "order/9/item") // by the wrong clock nothing stands in its way
	jumped := false
	s.net.hook(func(what string) error {
		if what == "Reserve" && !jumped {
			s.time.stepStore(100 * time.Hour)
		}
		return nil
	}, func(what string) error {
		if what == "Reserve" && !jumped {
			jumped = true
			s.time.stepStore(-100 * time.Hour)
			return errStoryLost
		}
		return nil
	})
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, ErrClockJumped) {
		t.Fatalf("got %v, want that the clock had jumped", err)
	}
	s.keys[c.Key] = true
	s.runLater()
	s.inState(c, Retryable)
	s.pass(2 * time.Second)
	s.wantHeld(s.admit(c), ScopeOverlap)
}

func TestNothingAgesByAClockThatJumped(t *testing.T) {
	s := tell(t)
	done, dead, released, retry := s.call("done", "order/1"), s.call("dead", "order/2"), s.call("released", "order/3"), s.call("retry", "order/4")
	s.pay(dead, "re_2")
	s.pass(storyTTL)
	s.sweep()
	s.pay(done, "re_1")
	s.loseAndWait(released)
	s.take(released, Release)
	s.settle(s.send(retry), unreachable())
	for _, step := range []time.Duration{1000 * 24 * time.Hour, -1000 * 24 * time.Hour} {
		s.time.stepStore(step)
		s.sweep()
		for _, c := range []Call{done, dead, released, retry} {
			if _, err := s.Poll(s.ctx, c.Key); err != nil {
				t.Fatal(err)
			}
		}
		s.inState(done, Succeeded)
		s.inState(dead, Tombstone)
		s.inState(released, Released)
		s.inState(retry, Retryable)
		s.time.stepStore(-step)
		s.sweep()
	}
	s.time.stepStore(1000 * 24 * time.Hour)
	s.sweep()
	s.AcceptClock()
	s.sweep()
	s.inState(done, None)
	s.inState(dead, None)
	s.inState(released, Held)
	s.inState(retry, Failed)
}

// A result that is written while the clock is wrong stands no shorter than by the right one.
func TestAResultWrittenDuringAJumpStandsForTheWholeWindow(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 100 * time.Hour, "back": -100 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			tk := s.send(s.call("intent-1", "order/9"))
			marked := s.call("intent-2", "order/8")
			s.lose(marked)
			s.time.stepStore(step)
			s.sweep()
			s.settle(tk, paid("re_1"))
			s.take(marked, MarkPaid)
			s.time.stepStore(-step)
			s.pass(storyWindow - time.Second)
			s.wantHeld(s.admit(s.call("intent-3", "order/9/item")), ScopeOverlap)
			s.wantHeld(s.admit(s.call("intent-4", "order/8/item")), ScopeOverlap)
		})
	}
}

func TestWhatIsNoJump(t *testing.T) {
	for name, tale := range map[string]func(s *story){
		"a step of 20 minutes":      func(s *story) { s.time.stepStore(20 * time.Minute) },
		"a step back":               func(s *story) { s.time.stepStore(-20 * time.Minute) },
		"an idle month":             func(s *story) { s.pass(30 * 24 * time.Hour) },
		"the wall clock is set":     func(s *story) { s.time.stepWall(100 * time.Hour) },
		"an hour, to the moment":    func(s *story) { s.time.stepStore(time.Hour) },
		"small steps that add up":   func(s *story) { s.time.stepStore(50 * time.Minute); s.sweep(); s.time.stepStore(50 * time.Minute) },
		"an answer long on its way": func(s *story) { s.slowAnswer(3 * time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("paid", "order/1"), "re_1")
			tale(s)
			s.pass(staleAfter + time.Second)
			s.sweep()
			s.send(s.call("intent-1", "order/9"))
			if _, _, jumped := s.ClockJump(); jumped {
				t.Fatal("it is told as a jump")
			}
		})
	}
}

// slowAnswer has the process stopped between the store's answer and its arrival.
func (s *story) slowAnswer(d time.Duration) {
	s.t.Helper()
	s.net.hook(nil, func(string) error { s.net.hook(nil, nil); s.pass(d); return nil })
	if _, err := s.Poll(s.ctx, s.call("nobody", "order/0").Key); err != nil {
		s.t.Fatal(err)
	}
	if now, err := s.now(s.ctx, s.o.Clock.Now().Boot); err != nil || !now.Equal(s.time.store()) {
		s.t.Fatalf("the store's time is taken for %s, it is %s (%v)", now, s.time.store(), err)
	}
}

func TestAnswersThatOvertakeEachOther(t *testing.T) {
	at := func(h time.Duration) time.Time { return storyStart.Add(h) }
	var c storeClock
	ask := func(boot time.Duration) question { c.turn++; return question{c.turn, boot} }
	hear := func(q question, boot, store time.Duration, jumped, still bool) {
		t.Helper()
		if got := c.hear(q, at(store), boot); got != jumped || c.jumped != still {
			t.Fatalf("asked at %s, at %s the store's %s: jumped %v, and on the whole %v", q.boot, boot, store, got, c.jumped)
		}
	}
	first, early, late := ask(0), ask(0), ask(time.Second)
	hear(first, 0, 0, false, false)
	hear(late, 2*time.Second, time.Second, false, false)
	hear(early, 3*time.Hour, time.Millisecond, false, false) // on its way for three hours
	// An answer to an earlier question does not end a jump.
	before := ask(3 * time.Hour)
	showing := ask(3 * time.Hour)
	hear(showing, 3*time.Hour, 5*time.Hour, true, true)
	hear(before, 3*time.Hour, 3*time.Hour, false, true)
	hear(ask(3*time.Hour), 3*time.Hour, 3*time.Hour, false, false)
}

func TestAJumpWhileNoProcessWasRunning(t *testing.T) {
	s := tell(t)
	s.opts.StoreClock = s.time.store()
	s.time.stepStore(bigStep)
	s.restart()
	s.refusedByClock(s.call("intent-1", "order/9"))
	s.AcceptClock()
	s.send(s.call("intent-1", "order/9"))
}

// StoreTime is what the store's clock shows by now, as far as this process has heard.
func (e *Engine) StoreTime() (time.Time, bool) {
	boot := e.o.Clock.Now().Boot
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.clock.time.IsZero() {
		return time.Time{}, false
	}
	return e.clock.time.Add(boot - e.clock.heardAt), true
}

func TestTheStoresTime(t *testing.T) {
	s := tell(t)
	if now, ok := s.StoreTime(); ok {
		t.Fatalf("%s, and nobody was asked", now)
	}
	s.sweep()
	s.pass(time.Minute)
	if now, ok := s.StoreTime(); !ok || !now.Equal(s.time.store()) {
		t.Fatalf("%s %v, it is %s", now, ok, s.time.store())
	}
}

func TestARefusalLetsNobodyIn(t *testing.T) {
	s := tell(t)
	c, unknown := s.call("intent-1", "order/9"), s.call("unknown", "order/8")
	tk := s.send(c)
	s.loseAndWait(unknown)
	why := errors.New("append-only is off")
	s.Refuse(why)
	if _, err := s.Admit(s.ctx, s.call("intent-2", "order/7"), storyPolicy()); !errors.Is(err, ErrRefused) || !errors.Is(err, why) {
		t.Fatalf("got %v", err)
	}
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, ErrRefused) {
		t.Fatalf("got %v", err)
	}
	// What was let in goes on, and so do people and polls.
	s.settle(tk, paid("re_1"))
	s.take(unknown, Reject)
	s.sweep()
	if a, err := s.Poll(s.ctx, c.Key); err != nil || a.Verdict != Replay {
		t.Fatalf("%s, %v", a.Verdict, err)
	}
	s.Refuse(nil)
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, ErrRefused) {
		t.Fatalf("a refusal without a reason lets in: %v", err)
	}
	s.Retire()
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("got %v", err)
	}
	s.Resume()
	s.wantReplay(s.admit(c), "intent-1", "re_1")
}

func TestAResultThatCannotBeWrittenIsTold(t *testing.T) {
	lost := errors.Join(store.ErrMemoryLost, errors.New("another epoch"))
	for name, row := range map[string]struct {
		err  error
		told bool // to the caller, as an error
	}{
		"the store is away":  {errStoryLost, false},
		"the memory is lost": {lost, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			var got []Evidence
			s.opts.Evidence = func(v Evidence) { got = append(got, v) }
			s.restart()
			c := s.call("intent-1", "order/9")
			tk := s.send(c)
			s.net.hook(func(string) error { return row.err }, nil)
			a, err := s.Settle(s.ctx, tk, paid("re_1"))
			if (err != nil) != row.told || err == nil && a.Verdict != UnknownHold {
				t.Fatalf("%s, %v", a.Verdict, err)
			}
			if len(got) != 1 {
				t.Fatalf("told %d times", len(got))
			}
			v := got[0]
			if v.Key != c.Key || v.Attempt != 1 || v.Outcome != AttemptSucceeded || v.ProviderReference != "re_1" || v.Status != 201 ||
				v.ProviderKey != tk.ProviderKey || !errors.Is(v.Cause, row.err) {
				t.Fatalf("%+v", v)
			}
			// The writing goes on.
			s.net.hook(nil, nil)
			s.runLater()
			if len(got) != 1 {
				t.Fatalf("told %d times", len(got))
			}
			if !row.told {
				s.inState(c, Succeeded)
			}
		})
	}
}

func TestAResultThatIsWrittenIsNoEvidence(t *testing.T) {
	s := tell(t)
	s.opts.Evidence = func(v Evidence) { t.Errorf("%+v", v) }
	s.restart()
	s.net.hook(nil, drop("Update", 3))
	s.pay(s.call("intent-1", "order/9"), "re_1")
}

func TestAnAcceptedJumpBackEndsLongWaits(t *testing.T) {
	s := tell(t)
	flying := s.call("flying", "order/1")
	s.send(flying)
	s.time.stepStore(-12 * time.Hour)
	s.pass(staleAfter + time.Second)
	s.sweep()
	s.AcceptClock()
	s.pass(storyLease + storyGrace + horizon)
	s.sweep()
	s.inState(flying, Held)
	s.pass(storyWait + horizon)
	s.sweep()
	s.sweep()
	if h := s.hold(flying); h.State != HoldHeld {
		t.Fatalf("%s until %s, and it is %s", h.State, h.WaitingUntil, s.time.store())
	}
}

// Somebody accepts a jump long after it was noticed: what was noticed has gone on since.
func TestAJumpIsToldAsTheClockShowsItNow(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 5 * time.Hour, "back": -5 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("paid", "order/1"), "re_1")
			right := s.time.store()
			s.time.stepStore(step)
			s.pass(staleAfter + time.Second)
			s.refusedByClock(s.call("intent-1", "order/9"))
			s.pass(3 * time.Hour)
			from, to, jumped := s.ClockJump()
			if !jumped || to.Sub(s.time.store()).Abs() > time.Minute || from.Sub(right.Add(3*time.Hour)).Abs() > time.Minute {
				t.Fatalf("jumped %v, from %s to %s; it shows %s", jumped, from, to, s.time.store())
			}
		})
	}
}

// The store's time is known too early by as long as its last answer was on its way. What a
// payment leaves for the window must not end the earlier for it, nor what it has spent.
func TestTheWindowIsNotShorterForASlowAnswer(t *testing.T) {
	for _, row := range []struct {
		slow string
		took time.Duration // the upstream, so that the store is asked for its time again
	}{{"Reserve", 0}, {"List", 2 * staleAfter}} {
		t.Run(row.slow, func(t *testing.T) {
			s := tell(t)
			c, limit := s.call("intent-1", "order/9"), daily("100")
			slow := 0
			isSlow := func(what string) error {
				if what == row.slow {
					slow++
					s.pass(4 * time.Second)
				}
				return nil
			}
			if row.took == 0 {
				s.net.hook(nil, isSlow)
			}
			ticket := s.sendUnder(c, spendPolicy(limit))
			s.net.hook(nil, isSlow)
			if row.took == 0 {
				if now, err := s.now(s.ctx, s.o.Clock.Now().Boot); err != nil || !now.Before(s.time.store()) {
					t.Fatalf("the store's time is taken for %s, it is %s (%v)", now, s.time.store(), err)
				}
			}
			s.pass(row.took)
			s.want(s.settle(ticket, paid("re_1")), Allow, "")
			s.net.hook(nil, nil)
			if slow != 1 {
				t.Fatalf("%d answers were slow", slow)
			}
			if spent, want := s.record(c.Key).Charges[0].Until, s.time.store().Add(limit.Window); spent.Before(want) {
				t.Errorf("it is spent until %s, want %s", spent, want)
			}
			s.pass(storyWindow - 2*time.Second)
			s.wantHeld(s.admit(c.under("intent-2").with(func(c *Call) { c.Fingerprint = "sha256:two" })), ScopeOverlap)
		})
	}
}
