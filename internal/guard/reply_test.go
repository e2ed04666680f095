// This file is about a store that does not answer: replies that are lost, requests
// that are lost, and a store that is away. A writer recognises its own write, nothing
// is sent under a claim that was given up, and nobody waits without bound.

package guard

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// losses are the ways in which n messages of a kind come to nothing.
var losses = map[string]func(s *story, what string, n int){
	"the request is lost": func(s *story, what string, n int) { s.net.hook(drop(what, n), nil) },
	"the reply is lost":   func(s *story, what string, n int) { s.net.hook(nil, drop(what, n)) },
}

func TestALostClaimIsRecognised(t *testing.T) { // R21
	for name, lose := range losses {
		for _, n := range []int{1, 4} {
			t.Run(fmt.Sprintf("%s %d times", name, n), func(t *testing.T) {
				s := tell(t)
				c := s.call("intent-1", "order/9")
				lose(s, "Reserve", n)
				tk := s.send(c)
				if got := s.net.count("Reserve"); got != n+1 {
					t.Fatalf("asked %d times", got)
				}
				r := s.inState(c, InFlight)
				if len(r.Attempts) != 1 || r.version != tk.rec.version || r.last().Nonce != tk.nonce {
					t.Fatalf("%d attempts, version %d, the ticket has %d", len(r.Attempts), r.version, tk.rec.version)
				}
				s.want(s.settle(tk, paid("re_1")), Allow, "")
				s.runLater()
				s.wantReplay(s.admit(c), "intent-1", "re_1")
			})
		}
	}
}

func TestALostClaimIsRecognisedAlthoughTheRecordMoved(t *testing.T) { // R21
	// The claim of attempt 2 lands, its reply is lost, and before it is repeated the
	// first attempt's late result is written. The lease is still this writer's; but the
	// first attempt may have paid, and by which clock it was reserved is not known.
	for _, tc := range []struct {
		res  Result
		want State
	}{{declined(), Retryable}, {accepted(), Held}, {paid("re_1"), Succeeded}} {
		for _, jumps := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the clock jumps: %v", tc.res.Outcome, jumps), func(t *testing.T) {
				s := tell(t)
				c := s.call("intent-1", "order/9")
				first := s.loseAndWait(c)
				s.take(c, Release)
				other := s.process()
				once := sync.Once{}
				s.net.hook(nil, func(what string) (err error) {
					if what == "Reserve" && s.state(c) == InFlight {
						once.Do(func() {
							if _, e := other.Settle(s.ctx, first, tc.res); e != nil {
								t.Error(e)
							}
							if jumps {
								s.time.stepStore(100 * time.Hour)
							}
							err = errStoryLost
						})
					}
					return err
				})
				a, err := s.Admit(s.ctx, c, storyPolicy())
				switch {
				case jumps && !errors.Is(err, ErrClockJumped):
					t.Fatalf("%+v, %v", a, err)
				case !jumps && err != nil:
					t.Fatal(err)
				case !jumps:
					s.want(a, InFlightNow, ReasonInFlight)
				}
				s.runLater()
				if r := s.inState(c, tc.want); len(r.Attempts) != 2 || r.Attempts[1].Outcome != AttemptRetryable {
					t.Fatalf("%+v", r.Attempts)
				}
				if jumps {
					s.time.stepStore(-100 * time.Hour)
				}
				s.pass(time.Minute)
				if tc.want == Retryable {
					s.settle(s.send(c), paid("re_3"))
					s.inState(c, Succeeded)
				}
			})
		}
	}
}

func TestALostSettlementIsRecognised(t *testing.T) { // R21
	for name, lose := range losses {
		for _, row := range []struct {
			res   Result
			state State
			told  Verdict
		}{
			{paid("re_1"), Succeeded, Allow}, {declined(), Failed, Allow}, {unreachable(), Retryable, Deny}, {lost(), Held, UnknownHold}, {accepted(), Held, UnknownHold},
		} {
			t.Run(name+"/"+string(row.res.Outcome), func(t *testing.T) {
				s := tell(t)
				c := s.call("intent-1", "order/9")
				tk := s.send(c)
				lose(s, "Update", 3)
				if a := s.settle(tk, row.res); a.Verdict != row.told {
					t.Fatalf("told %s", a.Verdict)
				}
				r := s.inState(c, row.state)
				if r.Hold > 1 || r.RefundOwed || r.Disputed || r.last().Late {
					t.Fatalf("the repeat was taken for another result: %+v", r)
				}
			})
		}
	}
}

func TestALostHoldOrDecisionIsRecognised(t *testing.T) {
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("paid", "order/9/item/1"), "re_1")
			c := s.call("intent-1", "order/9")
			lose(s, "Update", 2)
			s.wantHeld(s.admit(c), ScopeOverlap)
			if h := s.hold(c); h.Number != 1 {
				t.Fatalf("hold %d", h.Number)
			}
			lose(s, "Update", 2)
			s.take(c, Release)
			if r := s.inState(c, Released); len(r.Passed) != 1 {
				t.Fatalf("the release was taken %d times", len(r.Passed))
			}
			s.send(c)
		})
	}
}

func TestAClaimThatIsGivenUpIsNeverSent(t *testing.T) {
	t.Run("it had landed", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.net.hook(nil, drop("Reserve", -1))
		began := s.time.Now()
		_, err := s.Admit(s.ctx, c, storyPolicy())
		s.unavailable(err)
		if took := s.time.Now().Boot - began.Boot; took > 3*time.Second {
			t.Fatalf("it took %s", took)
		}
		s.net.hook(nil, nil)
		s.inState(c, InFlight)
		s.want(s.admit(c), InFlightNow, ReasonInFlight)
		s.runLater()
		r := s.inState(c, Retryable) // not held: nothing was sent
		if r.last().Outcome != AttemptRetryable || r.last().Detail == "" {
			t.Fatalf("%+v", r.last())
		}
		s.pass(2 * time.Second)
		if tk := s.send(c); tk.Attempt != 2 {
			t.Fatalf("attempt %d", tk.Attempt)
		}
	})
	t.Run("it had not landed", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.net.hook(drop("Reserve", -1), nil)
		_, err := s.Admit(s.ctx, c, storyPolicy())
		s.unavailable(err)
		s.net.hook(nil, nil)
		s.runLater()
		s.inState(c, None)
		s.send(c)
	})
	t.Run("it had not landed, and another call claims it", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.net.hook(drop("Reserve", -1), nil)
		_, err := s.Admit(s.ctx, c, storyPolicy())
		s.unavailable(err)
		s.net.hook(nil, nil)
		tk := s.send(c)
		s.runLater()
		s.inState(c, InFlight)
		s.want(s.settle(tk, paid("re_1")), Allow, "")
	})
	t.Run("the store stays away until the lease is over", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		s.net.hook(nil, drop("Reserve", -1))
		_, err := s.Admit(s.ctx, c, storyPolicy())
		s.unavailable(err)
		s.net.hook(dropAll, nil)
		s.runLater() // comes to an end
		s.net.hook(nil, nil)
		s.sweep()
		s.pass(storyLease + storyGrace)
		s.sweep()
		s.inState(c, Held) // the safe side
	})
}

func TestAStoreThatIsAway(t *testing.T) {
	for name, hook := range map[string]func(s *story){
		"requests are lost": func(s *story) { s.net.hook(dropAll, nil) },
		"replies are lost":  func(s *story) { s.net.hook(nil, dropAll) },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.opts.Repeat = 10 * time.Second
			s.restart()
			c, unknown := s.call("intent-1", "order/9"), s.call("intent-2", "order/10")
			s.loseAndWait(unknown)
			id := s.hold(unknown).HoldID
			for doing, do := range map[string]func() error{
				"a call":           func() error { _, err := s.Admit(s.ctx, c, storyPolicy()); return err },
				"a poll":           func() error { _, err := s.Poll(s.ctx, c.Key); return err },
				"a decision":       func() error { _, err := s.Resolve(s.ctx, Resolution{HoldID: id, Decision: Release}); return err },
				"a look at a hold": func() error { _, err := s.Hold(s.ctx, id); return err },
				"a list of holds":  func() error { _, _, err := s.Holds(s.ctx, ""); return err },
				"a count of holds": func() error { _, err := s.HeldCount(s.ctx, "refunds"); return err },
				"a new number":     func() error { return s.Renumber(s.ctx, id, 3) },
				"a sweep":          func() error { return s.Sweep(s.ctx) },
			} {
				for _, fresh := range []bool{true, false} { // is the store's time known?
					s.net.hook(nil, nil)
					if !fresh {
						s.pass(time.Minute)
					} else if _, err := s.Poll(s.ctx, c.Key); err != nil {
						t.Fatal(err)
					}
					hook(s)
					began := s.time.Now()
					err := do()
					if !errors.Is(err, store.ErrUnavailable) {
						t.Errorf("%s: %v", doing, err)
					}
					if took := s.time.Now().Boot - began.Boot; took > 11*time.Second {
						t.Errorf("%s took %s", doing, took)
					}
				}
			}
			s.net.hook(nil, nil)
			s.runLater()
		})
	}
}

func TestWritesAreRepeatedForAsLongAsTheySay(t *testing.T) {
	for _, repeat := range []time.Duration{time.Second, 20 * time.Second} {
		s := tell(t)
		s.opts.Repeat = repeat
		s.restart()
		s.sweep() // the store's time is known
		s.net.hook(drop("Reserve", -1), nil)
		began := s.time.Now()
		_, err := s.Admit(s.ctx, s.call("intent-1", "order/9"), storyPolicy())
		s.unavailable(err)
		if took := s.time.Now().Boot - began.Boot; took != repeat {
			t.Fatalf("given up after %s, want %s", took, repeat)
		}
	}
}

func TestASettlementThatCannotBeWrittenInTime(t *testing.T) {
	t.Run("nobody has judged it meanwhile", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		tk := s.send(c)
		s.pass(time.Second)
		s.net.hook(dropAll, nil)
		began := s.time.Now()
		s.want(s.settle(tk, paid("re_1")), UnknownHold, OutcomeUnknown)
		if took := s.time.Now().Boot - began.Boot; took != storyLease-time.Second {
			t.Fatalf("the caller was told after %s, its lease had %s", took, storyLease-time.Second)
		}
		s.net.hook(nil, nil)
		s.inState(c, InFlight)
		s.runLater()
		s.wantReplay(s.admit(c), "intent-1", "re_1")
	})
	t.Run("it is held meanwhile", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		tk := s.send(c)
		s.net.hook(dropAll, nil)
		s.want(s.settle(tk, paid("re_1")), UnknownHold, OutcomeUnknown)
		s.net.hook(nil, nil)
		s.pass(storyGrace)
		s.sweep()
		s.inState(c, Held)
		s.runLater()
		s.wantReplay(s.admit(c), "intent-1", "re_1")
		if h := s.hold(c); h.State != HoldVoid {
			t.Fatalf("the hold is %s", h.State)
		}
	})
	t.Run("the store stays away", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		tk := s.send(c)
		s.net.hook(dropAll, nil)
		s.want(s.settle(tk, paid("re_1")), UnknownHold, OutcomeUnknown)
		began := s.time.Now()
		s.runLater()
		if took := s.time.Now().Boot - began.Boot; took < keepTrying || took > keepTrying+time.Minute {
			t.Fatalf("tried for %s", took)
		}
		s.net.hook(nil, nil)
		s.sweep()
		s.pass(storyLease + storyGrace)
		s.sweep()
		s.inState(c, Held)
	})
}

func TestAStoreThatForgot(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.id.Epoch = "epoch-0"
	s.restart() // this process knows another memory
	if _, err := s.Admit(s.ctx, c, storyPolicy()); !errors.Is(err, store.ErrMemoryLost) {
		t.Fatalf("%v", err)
	}
	if got := s.net.count("Reserve"); got != 1 {
		t.Fatalf("asked %d times: it will not remember by being asked again", got)
	}
	s.inState(c, None)
}
