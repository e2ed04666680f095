// This file holds the table of a record's life against a second copy of it, walks
// every row with real calls, and breaks every rule that a record must keep.

package guard

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// designedLife is the table as it is agreed, written a second time: from, event, and
// where it may lead.
var designedLife = map[State]map[event][]State{
	None: {
		onCall: {InFlight}, onBlocked: {Held}, onRegister: {Registered}, onImported: {Held}, onLateSuccess: {Succeeded},
	},
	Registered: {
		onCall: {InFlight}, onBlocked: {Held}, onRegister: {Registered}, onDeadline: {Rejected}, onLost: {Held},
	},
	Retryable: {
		onCall: {InFlight}, onRegister: {Retryable}, onBlocked: {Held}, onDeadline: {Failed, Held}, onLost: {Held},
		onLateSuccess: {Succeeded}, onLateEvidence: {Retryable, Held},
	},
	Released: {
		onCall: {InFlight}, onRegister: {Released}, onBlocked: {Held}, onUnused: {Held}, onLost: {Held},
		onLateSuccess: {Succeeded}, onLateEvidence: {Released, Held},
	},
	InFlight: {
		onRegister: {InFlight}, onSettled: {Succeeded, Failed, Retryable, Held}, onLeaseOver: {Succeeded, Held},
		onLateSuccess: {InFlight}, onLateEvidence: {InFlight},
	},
	Held: {
		onRegister: {Held}, onRelease: {Released}, onReject: {Rejected}, onMarkPaid: {Succeeded}, onMarkFailed: {Failed},
		onSpent: {Held}, onRenumbered: {Held}, onImported: {Held}, onLost: {Held}, onWaitOver: {Held},
		onHoldOver: {Rejected}, onLateSuccess: {Succeeded}, onLateEvidence: {Held},
	},
	Succeeded: {onRegister: {Succeeded}, onLateSuccess: {Succeeded}, onLateEvidence: {Succeeded}, onTTL: {Tombstone}},
	Failed:    {onRegister: {Failed}, onLateSuccess: {Succeeded}, onLateEvidence: {Failed}, onTTL: {Tombstone}},
	Rejected:  {onRegister: {Rejected}, onLateSuccess: {Succeeded}, onLateEvidence: {Rejected}, onTTL: {Tombstone}},
	Tombstone: {
		onBlocked: {Held}, onLateSuccess: {Succeeded}, onLateEvidence: {Tombstone}, onPurge: {None},
	},
}

var (
	allStates = []State{None, Registered, InFlight, Retryable, Held, Released, Succeeded, Failed, Rejected, Tombstone}
	allEvents = []event{
		onCall, onBlocked, onRegister, onSettled, onLeaseOver, onRelease, onReject, onMarkPaid, onMarkFailed, onSpent, onRenumbered, onImported, onLost,
		onUnused, onDeadline, onWaitOver, onHoldOver, onLateSuccess, onLateEvidence, onTTL, onPurge,
	}
)

func TestEveryStepIsAllowedOrRefusedAsDesigned(t *testing.T) {
	for _, from := range allStates {
		for _, on := range allEvents {
			for _, to := range allStates {
				err := checkStep(from, on, to)
				if slices.Contains(designedLife[from][on], to) {
					if err != nil {
						t.Errorf("%q on %q to %q: %v", from, on, to, err)
					}
				} else if !errors.Is(err, ErrInvariant) {
					t.Errorf("%q on %q to %q is not refused: %v", from, on, to, err)
				}
			}
		}
	}
}

func TestEveryStepIsReachedByRealCalls(t *testing.T) {
	// rejectUnknown leaves a rejected intent whose attempt may have moved money.
	rejectUnknown := func(s *story, c Call) *Ticket {
		tk := s.lose(c)
		s.take(c, Reject)
		return tk
	}
	// secondTry has the first attempt released as unknown, and the second in flight.
	secondTry := func(s *story, c Call) (first, second *Ticket) {
		first = s.loseAndWait(c)
		s.take(c, Release)
		return first, s.send(c)
	}
	entomb := func(s *story, c Call) {
		s.pass(storyTTL)
		s.sweep()
		s.inState(c, Tombstone)
	}
	blocker := func(s *story) { s.pay(s.call("blocker", "order/9/part"), "re_b") }

	reached := map[string]bool{}
	for _, row := range []struct {
		from State
		on   event
		to   State
		tell func(s *story, c Call)
	}{
		{None, onCall, InFlight, func(s *story, c Call) { s.send(c) }},
		{None, onBlocked, Held, func(s *story, c Call) { blocker(s); s.wantHeld(s.admit(c), ScopeOverlap) }},
		{None, onRegister, Registered, func(s *story, c Call) { s.registered(c) }},
		{None, onImported, Held, func(s *story, c Call) { s.importHold(c, 3, ScopeOverlap) }},
		{None, onLateSuccess, Succeeded, func(s *story, c Call) {
			tk := rejectUnknown(s, c)
			entomb(s, c)
			s.pass(90 * 24 * time.Hour)
			s.sweep()
			s.inState(c, None)
			s.settle(tk, paid("re_1"))
		}},

		{Registered, onCall, InFlight, func(s *story, c Call) { s.registered(c); s.send(c) }},
		{Registered, onBlocked, Held, func(s *story, c Call) {
			s.registered(c)
			blocker(s)
			s.wantHeld(s.admit(c), ScopeOverlap)
		}},
		{Registered, onRegister, Registered, func(s *story, c Call) { s.registered(c); s.face(c) }},
		{Registered, onDeadline, Rejected, func(s *story, c Call) {
			s.registered(c)
			s.pass(storyTTL)
			s.sweep()
		}},
		{Registered, onLost, Held, func(s *story, c Call) {
			s.registered(c)
			s.lostMemory(nil)
			s.wantHeld(s.admit(c), OutcomeUnknown)
		}},

		{Retryable, onRegister, Retryable, func(s *story, c Call) { s.settle(s.send(c), unreachable()); s.face(c) }},
		{Retryable, onCall, InFlight, func(s *story, c Call) {
			s.settle(s.send(c), unreachable())
			s.pass(2 * time.Second)
			s.send(c)
		}},
		{Retryable, onBlocked, Held, func(s *story, c Call) {
			s.settle(s.send(c), unreachable())
			blocker(s)
			s.pass(2 * time.Second)
			s.wantHeld(s.admit(c), ScopeOverlap)
		}},
		{Retryable, onDeadline, Failed, func(s *story, c Call) {
			s.settle(s.send(c), unreachable())
			s.pass(storyTTL)
			s.sweep()
		}},
		{Retryable, onDeadline, Held, func(s *story, c Call) {
			_, second := secondTry(s, c)
			s.settle(second, unreachable())
			s.pass(storyTTL)
			s.sweep()
		}},
		{Retryable, onLost, Held, func(s *story, c Call) {
			s.settle(s.send(c), unreachable())
			s.lostMemory(nil)
			s.wantHeld(s.admit(c), OutcomeUnknown)
		}},
		{Retryable, onLateSuccess, Succeeded, func(s *story, c Call) {
			first, second := secondTry(s, c)
			s.settle(second, unreachable())
			s.settle(first, paid("re_1"))
		}},
		{Retryable, onLateEvidence, Retryable, func(s *story, c Call) {
			first, second := secondTry(s, c)
			s.settle(second, unreachable())
			s.settle(first, declined())
		}},
		{Retryable, onLateEvidence, Held, func(s *story, c Call) {
			first, second := secondTry(s, c)
			s.settle(second, unreachable())
			s.settle(first, accepted())
		}},

		{Released, onRegister, Released, func(s *story, c Call) { s.loseAndWait(c); s.take(c, Release); s.face(c) }},
		{Released, onCall, InFlight, func(s *story, c Call) { secondTry(s, c) }},
		{Released, onBlocked, Held, func(s *story, c Call) {
			s.send(c)
			s.pass(storyWait)
			s.sweep() // watched from here on: the lease is over, but nobody has seen it
			s.pass(storyWait)
			s.sweep()
			s.sweep()
			s.take(c, Release)
			s.wantHeld(s.admit(s.call("other", "order/9")), ScopeOverlap)
			s.take(s.call("other", "order/9"), Release)
			s.send(s.call("other", "order/9"))
			s.wantHeld(s.admit(c), ScopeOverlap)
		}},
		{Released, onUnused, Held, func(s *story, c Call) {
			s.loseAndWait(c)
			s.take(c, Release)
			s.pass(24 * time.Hour)
			s.sweep()
		}},
		{Released, onLost, Held, func(s *story, c Call) {
			s.loseAndWait(c)
			s.take(c, Release)
			s.lostMemory(nil)
			s.rehold()
		}},
		{Released, onLateSuccess, Succeeded, func(s *story, c Call) {
			first := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(first, paid("re_1"))
		}},
		{Released, onLateEvidence, Released, func(s *story, c Call) {
			first := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(first, declined())
		}},
		{Released, onLateEvidence, Held, func(s *story, c Call) {
			first := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(first, accepted())
		}},

		{InFlight, onRegister, InFlight, func(s *story, c Call) { s.send(c); s.face(c) }},
		{InFlight, onSettled, Succeeded, func(s *story, c Call) { s.settle(s.send(c), paid("re_1")) }},
		{InFlight, onSettled, Failed, func(s *story, c Call) { s.settle(s.send(c), declined()) }},
		{InFlight, onSettled, Retryable, func(s *story, c Call) { s.settle(s.send(c), unreachable()) }},
		{InFlight, onSettled, Held, func(s *story, c Call) { s.settle(s.send(c), lost()) }},
		{InFlight, onLeaseOver, Held, func(s *story, c Call) {
			s.send(c)
			s.pass(storyLease + storyGrace)
			s.sweep()
		}},
		{InFlight, onLeaseOver, Succeeded, func(s *story, c Call) {
			first, _ := secondTry(s, c)
			s.settle(first, paid("re_1"))
			s.pass(storyLease + storyGrace)
			s.sweep()
		}},
		{InFlight, onLateSuccess, InFlight, func(s *story, c Call) {
			first, _ := secondTry(s, c)
			s.settle(first, paid("re_1"))
		}},
		{InFlight, onLateEvidence, InFlight, func(s *story, c Call) {
			first, _ := secondTry(s, c)
			s.settle(first, declined())
		}},

		{Held, onRegister, Held, func(s *story, c Call) { s.lose(c); s.face(c) }},
		{Held, onRelease, Released, func(s *story, c Call) { s.loseAndWait(c); s.take(c, Release) }},
		{Held, onReject, Rejected, func(s *story, c Call) { s.lose(c); s.take(c, Reject) }},
		{Held, onMarkPaid, Succeeded, func(s *story, c Call) { s.lose(c); s.take(c, MarkPaid) }},
		{Held, onMarkFailed, Failed, func(s *story, c Call) { s.loseAndWait(c); s.take(c, MarkFailed) }},
		{Held, onSpent, Held, func(s *story, c Call) {
			s.lose(c)
			h := s.hold(c)
			s.spent(c, h, s.resolve(h, Release))
		}},
		{Held, onRenumbered, Held, func(s *story, c Call) {
			s.lose(c)
			if err := s.Renumber(s.ctx, s.hold(c).HoldID, 7); err != nil {
				s.t.Fatal(err)
			}
		}},
		{Held, onImported, Held, func(s *story, c Call) {
			s.lose(c)
			s.lostMemory(nil)
			s.importHold(c, 7, OutcomeUnknown)
		}},
		{Held, onLost, Held, func(s *story, c Call) {
			s.lose(c)
			s.lostMemory(nil)
			s.rehold()
		}},
		{Held, onHoldOver, Rejected, func(s *story, c Call) {
			s.block(c)
			p := storyPolicy()
			p.HoldFor = time.Hour
			other := c.under("later")
			s.take(c, Reject)
			s.wantHeld(s.admitUnder(other, p), ScopeOverlap)
			s.pass(time.Hour)
			s.expire(other)
			s.inState(other, Rejected)
			s.mu.Lock()
			defer s.mu.Unlock()
			last := s.changes[len(s.changes)-1]
			last.Intent.Key = c.Key
			s.changes = append(s.changes, last)
		}},
		{Held, onWaitOver, Held, func(s *story, c Call) { s.loseAndWait(c) }},
		{Held, onLateSuccess, Succeeded, func(s *story, c Call) { s.settle(s.lose(c), paid("re_1")) }},
		{Held, onLateEvidence, Held, func(s *story, c Call) { s.settle(s.lose(c), declined()) }},

		{Succeeded, onRegister, Succeeded, func(s *story, c Call) { s.pay(c, "re_1"); s.face(c) }},
		{Succeeded, onLateSuccess, Succeeded, func(s *story, c Call) {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			s.settle(tk, paid("re_1"))
		}},
		{Succeeded, onLateEvidence, Succeeded, func(s *story, c Call) {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			s.settle(tk, declined())
		}},
		{Succeeded, onTTL, Tombstone, func(s *story, c Call) { s.pay(c, "re_1"); entomb(s, c) }},

		{Failed, onRegister, Failed, func(s *story, c Call) { s.settle(s.send(c), declined()); s.face(c) }},
		{Failed, onLateSuccess, Succeeded, func(s *story, c Call) {
			tk := s.loseAndWait(c)
			s.take(c, MarkFailed)
			s.settle(tk, paid("re_1"))
		}},
		{Failed, onLateEvidence, Failed, func(s *story, c Call) {
			tk := s.loseAndWait(c)
			s.take(c, MarkFailed)
			s.settle(tk, declined())
		}},
		{Failed, onTTL, Tombstone, func(s *story, c Call) { s.settle(s.send(c), declined()); entomb(s, c) }},

		{Rejected, onRegister, Rejected, func(s *story, c Call) { rejectUnknown(s, c); s.face(c) }},
		{Rejected, onLateSuccess, Succeeded, func(s *story, c Call) { s.settle(rejectUnknown(s, c), paid("re_1")) }},
		{Rejected, onLateEvidence, Rejected, func(s *story, c Call) { s.settle(rejectUnknown(s, c), declined()) }},
		{Rejected, onTTL, Tombstone, func(s *story, c Call) { rejectUnknown(s, c); entomb(s, c) }},

		{Tombstone, onBlocked, Held, func(s *story, c Call) {
			s.pay(c, "re_1")
			entomb(s, c)
			s.wantHeld(s.admit(c), KeyExpired)
		}},
		{Tombstone, onLateSuccess, Succeeded, func(s *story, c Call) {
			tk := rejectUnknown(s, c)
			entomb(s, c)
			s.settle(tk, paid("re_1"))
		}},
		{Tombstone, onLateEvidence, Tombstone, func(s *story, c Call) {
			tk := rejectUnknown(s, c)
			entomb(s, c)
			s.settle(tk, declined())
		}},
		{Tombstone, onPurge, None, func(s *story, c Call) {
			s.pay(c, "re_1")
			entomb(s, c)
			s.pass(90 * 24 * time.Hour)
			s.sweep()
			s.inState(c, None)
		}},
	} {
		name := rowName(row.from, row.on, row.to)
		reached[name] = true
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			row.tell(s, c)
			if got := s.state(c); got != row.to {
				t.Fatalf("the story ends in %q", got)
			}
			if row.to == None {
				return // a record that is gone is shown to nobody
			}
			if last := s.lastChange(c); last.From != row.from || last.Event != string(row.on) || last.To != row.to {
				t.Fatalf("the last step was %q on %q to %q", last.From, last.Event, last.To)
			}
		})
	}
	for from, events := range designedLife {
		for on, tos := range events {
			for _, to := range tos {
				if name := rowName(from, on, to); !reached[name] {
					t.Errorf("no story reaches %s", name)
				}
			}
		}
	}
}

func rowName(from State, on event, to State) string {
	name := func(s State) string {
		if s == None {
			return "none"
		}
		return string(s)
	}
	return fmt.Sprintf("%s/%s/%s", name(from), on, name(to))
}

// lastChange is the newest step of the intent that was told to the observer.
func (s *story) lastChange(c Call) Change {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ch := range slices.Backward(s.changes) {
		if ch.Intent.Key == c.Key {
			return ch
		}
	}
	s.t.Fatalf("nobody was told of a step of %s", c.IntentID)
	return Change{}
}

// soundRecord is a record that keeps every rule in its state.
func soundRecord(t *testing.T, state State) *record {
	r := &record{key: "k"}
	r.header = header{
		Namespace: "support", Tool: storyTool, Caller: storyCaller, CallerUID: "uid-1", IntentID: "intent-1",
		State: state, Scope: scopeOf(t, "order/9"), Fingerprint: storyFingerprint, IdentityHash: "identity-1", Hold: 1,
	}
	first := attempt{Number: 1, Generation: 1, Nonce: "n1", Outcome: AttemptFailed}
	r.body = body{
		Generation: 1, Attempts: []attempt{first},
		Current: &hold{Number: 1, Nonce: "h1", Reasons: []Reason{ScopeOverlap}, End: HoldResolved},
	}
	switch state {
	case Registered:
		r.Attempts, r.Registration = nil, &Registration{Quote: "q-1"}
	case InFlight:
		r.Attempts = append(r.Attempts, attempt{Number: 2, Generation: 1, Nonce: "n2"})
	case Held:
		r.Current.End = ""
	case Succeeded:
		r.Attempts[0].Outcome = AttemptSucceeded
	}
	return r
}

func TestABrokenRecordIsRefused(t *testing.T) {
	unknown := func(r *record) { r.Attempts[0].Outcome = AttemptUnknown }
	first := attempt{Number: 1, Generation: 1, Nonce: "n1", Outcome: AttemptFailed}
	succeeded := func(r *record) { r.Attempts[0].Outcome = AttemptSucceeded }
	for _, state := range allStates[1:] {
		if err := soundRecord(t, state).check(); err != nil {
			t.Errorf("a sound record: %v", err)
		}
	}
	for _, c := range []struct {
		state  State
		name   string
		breaks func(*record)
		says   string
	}{
		{InFlight, "nothing was begun", func(r *record) { r.Attempts = nil }, "not open"},
		{InFlight, "the last attempt has ended", func(r *record) { r.last().Outcome = AttemptUnknown }, "not open"},
		{InFlight, "an earlier attempt is unknown", unknown, "attempt 1 is unknown and nobody released it"},
		{InFlight, "the hold is open", func(r *record) { r.Current.End = "" }, "has no end"},
		{Registered, "it was sent", func(r *record) { r.Attempts = []attempt{first} }, "or was sent"},
		{Registered, "nobody registered it", func(r *record) { r.Registration = nil }, "was not registered"},
		{Held, "no hold", func(r *record) { r.Current = nil }, "no current hold"},
		{Held, "the hold has ended", func(r *record) { r.Current.End = HoldVoid }, "no current hold"},
		{Held, "another number", func(r *record) { r.Current.Number = 2 }, "no current hold"},
		{Held, "no nonce", func(r *record) { r.Current.Nonce = "" }, "no current hold"},
		{Held, "no reason", func(r *record) { r.Current.Reasons = nil }, "no current hold"},
		{Held, "it was paid", succeeded, "a success is on the record"},
		{Retryable, "an attempt is unknown", unknown, "the join is Unknown"},
		{Retryable, "it was paid", succeeded, "the join is Succeeded"},
		{Released, "an attempt is unknown", unknown, "the join is Unknown"},
		{Released, "it was paid", succeeded, "the join is Succeeded"},
		{Failed, "an attempt is unknown", unknown, "the join is Unknown"},
		{Failed, "it was paid", succeeded, "the join is Succeeded"},
		{Succeeded, "nothing was paid", func(r *record) { r.Attempts[0].Outcome = AttemptFailed }, "the join is Failed"},
		{Succeeded, "an attempt is unknown", unknown, "the join is Unknown"},
		{Rejected, "the hold is open", func(r *record) { r.Current.End = "" }, "has no end"},
		{Tombstone, "the hold is open", func(r *record) { r.Current.End = "" }, "has no end"},
		{Failed, "no scope", func(r *record) { r.Scope = nil }, "the identity is incomplete"},
		{Failed, "no fingerprint", func(r *record) { r.Fingerprint = "" }, "the identity is incomplete"},
		{Failed, "no caller", func(r *record) { r.Caller = "" }, "the identity is incomplete"},
		{Failed, "no intent ID", func(r *record) { r.IntentID = "" }, "the identity is incomplete"},
	} {
		t.Run(string(c.state)+"/"+c.name, func(t *testing.T) {
			r := soundRecord(t, c.state)
			c.breaks(r)
			err := r.check()
			if !errors.Is(err, ErrInvariant) || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v, want that it says %q", err, c.says)
			}
		})
	}
}

func TestABrokenStepIsNotWritten(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	before := s.record(c.Key)

	free := before.clone()
	free.State = Retryable
	if _, _, err := s.update(s.ctx, pending{from: before, to: free, on: onSettled, nonce: "n"}, s.soon()); !errors.Is(err, ErrInvariant) {
		t.Fatalf("a step that the table does not list: %v", err)
	}
	unheard := before.clone()
	unheard.Current = nil
	if _, _, err := s.update(s.ctx, pending{from: before, to: unheard, on: onLateEvidence, nonce: "n"}, s.soon()); !errors.Is(err, ErrInvariant) {
		t.Fatalf("a record that breaks a rule: %v", err)
	}
	if after := s.record(c.Key); after.version != before.version {
		t.Fatalf("version %d became %d", before.version, after.version)
	}
}

func TestACloneSharesNothingThatChanges(t *testing.T) {
	r := soundRecord(t, Held)
	r.Passed, r.Ended = []passed{{Watermark: "1"}}, []hold{{Number: 0}}
	c := r.clone()
	c.Attempts[0].Outcome, c.Current.Number, c.Passed[0].Watermark, c.Ended[0].Number = AttemptUnknown, 7, "7", 7
	if r.Attempts[0].Outcome != AttemptFailed || r.Current.Number != 1 || r.Passed[0].Watermark != "1" || r.Ended[0].Number != 0 {
		t.Fatalf("the original changed with it: %+v", r)
	}
}
