// This file is about a memory that was lost and accepted: nothing that may have been
// paid is paid again without a person, no decision about the old memory is taken, and
// everything can be cleared.

package guard

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// lostMemory goes on under another epoch, as after a loss that was accepted. What the
// store still has is all that is left.
func (s *story) lostMemory(change func(*Options)) {
	s.t.Helper()
	next := "after-" + s.id.Epoch
	if err := s.bolt.Disown(s.ctx, s.id.Epoch, next); err != nil {
		s.t.Fatal(err)
	}
	s.id.Epoch = next
	s.opts.LostAt = s.time.store()
	if change != nil {
		change(&s.opts)
	}
	s.restart()
}

// wiped goes on with an empty store that has the same key domain.
func (s *story) wiped(change func(*Options)) {
	s.t.Helper()
	if err := s.bolt.Close(); err != nil {
		s.t.Fatal(err)
	}
	st, err := bolt.Open(filepath.Join(memory(s.t), "records.db"), bolt.Options{NoSync: true, Clock: s.time.store})
	if err != nil {
		s.t.Fatal(err)
	}
	s.bolt, s.net.Store = st, st
	if s.id, err = st.Initialise(s.ctx, store.Identity{Epoch: "wiped-" + s.id.Epoch, KeyDomain: s.id.KeyDomain}); err != nil {
		s.t.Fatal(err)
	}
	s.opts.LostAt = s.time.store()
	if change != nil {
		change(&s.opts)
	}
	s.restart()
}

func forget(o *Options) { o.ForgetLost = true }

func (s *story) rehold() {
	s.t.Helper()
	if err := s.Rehold(s.ctx); err != nil {
		s.t.Fatal(err)
	}
}

// importHold imports what the call's hold of that number had shown.
func (s *story) importHold(c Call, number int, reasons ...Reason) {
	s.t.Helper()
	s.mu.Lock()
	s.keys[c.Key] = true
	s.mu.Unlock()
	err := s.Import(s.ctx, ImportedHold{
		Key: c.Key, Scope: c.Scope, Lineage: c.Lineage, Amount: c.Amount, Recipient: c.Recipient, Fingerprint: c.Fingerprint,
		Reasons: reasons, Number: number, Policy: storyPolicy(),
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

func TestAFirstCallAfterALossIsHeld(t *testing.T) { // S01
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.send(c)
	s.settle(tk, paid("re_1"))
	s.wiped(nil)
	a := s.admit(c)
	s.wantHeld(a, OutcomeUnknown)
	for _, part := range []string{tk.ProviderKey, s.opts.LostAt.Format(time.RFC3339), "lost"} {
		if !strings.Contains(a.Cause, part) || !strings.Contains(s.hold(c).Cause, part) {
			t.Errorf("the cause %q does not say %q", a.Cause, part)
		}
	}
	if h := s.hold(c); h.State != HoldHeld {
		t.Fatalf("%s: whoever accepted the loss has waited", h.State)
	}
	if again := s.admit(c); again.Hold != a.Hold {
		t.Fatalf("%s, and then %s", a.Hold, again.Hold)
	}
	// A person releases it: it is sent once, under the key that the provider knows.
	s.take(c, Release)
	second := s.send(c)
	if second.ProviderKey != tk.ProviderKey {
		t.Fatalf("key %s, it was %s", second.ProviderKey, tk.ProviderKey)
	}
	s.settle(second, paid("re_1"))
	s.wantReplay(s.admit(c), "intent-1", "re_1")
}

func TestEveryDecisionOnAHoldAfterALoss(t *testing.T) {
	for d, want := range map[Decision]struct {
		state   State
		verdict Verdict
		reason  Reason
	}{
		MarkPaid:   {Succeeded, Replay, ""},
		Reject:     {Rejected, Deny, ReasonRejected},
		MarkFailed: {Failed, Deny, ReasonMarkedFailed},
	} {
		t.Run(string(d), func(t *testing.T) {
			s := tell(t)
			s.wiped(nil)
			c, other := s.call("intent-1", "order/9"), s.call("intent-2", "order/9/item/1")
			s.wantHeld(s.admit(c), OutcomeUnknown)
			s.take(c, d)
			s.inState(c, want.state)
			s.want(s.admit(c), want.verdict, want.reason)
			// It stands in the way of others unless a person said that nothing moved.
			s.opts.LostAt = s.opts.LostAt.Add(-2 * storyWindow)
			s.restart()
			a := s.admit(other)
			if d == MarkFailed {
				s.want(a, Allow, "")
			} else {
				s.wantHeld(a, ScopeOverlap)
			}
		})
	}
}

func TestARefusalAfterALossIsNotTheEnd(t *testing.T) {
	s := tell(t)
	s.wiped(nil)
	c := s.call("intent-1", "order/9")
	s.admit(c)
	s.take(c, Release)
	s.settle(s.send(c), declined()) // perhaps just because it was paid before
	s.inState(c, Held)
}

func TestTheWindowAfterALossEnds(t *testing.T) {
	s := tell(t)
	s.wiped(nil)
	held := s.call("intent-1", "order/9")
	s.admit(held)
	s.pass(storyWindow - time.Second)
	s.wantHeld(s.admit(s.call("intent-2", "order/8")), OutcomeUnknown)
	s.pass(time.Second)
	s.send(s.call("intent-3", "order/7"))
	// What was held then stays.
	s.wantHeld(s.admit(held), OutcomeUnknown)
	s.wantHeld(s.admit(s.call("intent-4", "order/9/item/1")), ScopeOverlap)
}

func TestForgetSendsFirstCalls(t *testing.T) {
	s := tell(t)
	retry := s.call("intent-2", "order/8")
	s.settle(s.send(retry), unreachable())
	s.lostMemory(forget)
	s.send(s.call("intent-1", "order/9"))
	// Of what is left, later steps may be missing all the same.
	s.wantHeld(s.admit(retry), OutcomeUnknown)
}

func TestWhatIsLeftAnswersFirstAfterALoss(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").on("sess/1")
	s.pay(c, "re_1")
	s.lostMemory(nil)
	s.wantReplay(s.admit(c), "intent-1", "re_1")
	s.wantReplay(s.admit(c.under("intent-2")), "intent-1", "re_1") // the exact match
	s.want(s.admit(c.with(func(c *Call) { c.Fingerprint = "sha256:two" })), Conflict, ReasonRequest)
	a := s.admit(s.call("intent-3", "order/9/item/1"))
	s.wantHeld(a, OutcomeUnknown, ScopeOverlap)
	if a.MatchCount != 1 {
		t.Fatalf("%d in the way", a.MatchCount)
	}
}

func TestALoopAfterALossMakesOneHold(t *testing.T) {
	s := tell(t)
	s.wiped(nil)
	c := s.call("intent-1", "order/9")
	first := s.admit(c)
	for _, id := range ids("loop-", 5) {
		if a := s.admit(c.under(id)); a.Hold != first.Hold || s.state(c.under(id)) != None {
			t.Fatalf("%s has a hold of its own: %s", id, a.Hold)
		}
	}
}

func TestFirstCallsAfterALossCountAsHolds(t *testing.T) { // O06
	s := tell(t)
	s.wiped(nil)
	p := storyPolicy()
	p.MaxHeld = 2
	for i, id := range ids("intent-", 3) {
		a := s.admitUnder(s.call(id, "order/"+id), p)
		if i < 2 {
			s.wantHeld(a, OutcomeUnknown)
			continue
		}
		s.want(a, Deny, ReasonTooManyHolds)
		if !slices.Equal(a.Reasons, []Reason{OutcomeUnknown}) || !strings.Contains(a.Cause, "lost") {
			t.Fatalf("%v, %q: the caller is not told why it would be held", a.Reasons, a.Cause)
		}
		s.inState(s.call(id, "order/"+id), None)
	}
	// What an object shows is held whatever the count.
	s.importHold(s.call("imported", "order/1"), 1, OutcomeUnknown)
	s.inState(s.call("imported", "order/1"), Held)
}

func TestReholdMakesAllVisibleUnderTheNewMemory(t *testing.T) { // R35
	s := tell(t)
	paidOne := s.call("paid", "order/1")
	s.pay(paidOne, "re_1")
	overlap, unknown, released, retry, flying := s.call("overlap", "order/1"), s.call("unknown", "order/2"), s.call("released", "order/3"), s.call("retry", "order/4"), s.call("flying", "order/5")
	s.loseAndWait(released)
	s.take(released, Release)
	s.wantHeld(s.admit(overlap), ScopeOverlap)
	s.lose(unknown)
	s.settle(s.send(retry), unreachable())
	s.send(flying)
	old := map[string]HoldView{"overlap": s.hold(overlap), "unknown": s.hold(unknown)}

	s.lostMemory(nil)
	for range 2 { // it may be repeated
		s.rehold()
		for _, row := range []struct {
			c       Call
			state   State
			number  int
			reasons []Reason
		}{
			{overlap, Held, 2, []Reason{OutcomeUnknown, ScopeOverlap}},
			{unknown, Held, 2, []Reason{OutcomeUnknown}},
			{released, Held, 2, []Reason{OutcomeUnknown}},
			{retry, Held, 1, []Reason{OutcomeUnknown}},
			{flying, InFlight, 0, nil},
			{paidOne, Succeeded, 0, nil},
		} {
			r := s.inState(row.c, row.state)
			if r.Hold != row.number {
				t.Fatalf("%s has hold %d", row.c.IntentID, r.Hold)
			}
			if row.state != Held {
				continue
			}
			if h := s.hold(row.c); !slices.Equal(h.Reasons, row.reasons) || !strings.Contains(h.Cause, "lost") || h.Epoch != s.id.Epoch {
				t.Fatalf("%s: %v, %q", row.c.IntentID, h.Reasons, h.Cause)
			}
		}
	}
	for id, h := range old {
		if v := s.resolve(h, Release); v.State != HoldVoid {
			t.Fatalf("the old hold of %s is %s", id, v.State)
		}
	}
	s.inState(overlap, Held)
	s.inState(unknown, Held)
	// What a release would pass over was seen by the lost memory: it is looked at anew.
	s.take(overlap, Release)
	s.wantHeld(s.admit(overlap), ScopeOverlap)
	s.take(overlap, Release)
	s.send(overlap)
	// The attempt in flight ends by its lease.
	s.pass(storyLease + storyGrace)
	s.sweep()
	s.inState(flying, Held)
	if h := s.hold(flying); !strings.Contains(h.Cause, "lost") {
		t.Fatalf("%q", h.Cause)
	}
}

func TestATombstoneOfALostMemory(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.pay(c, "re_1")
	s.pass(storyTTL)
	s.sweep()
	s.inState(c, Tombstone)
	s.lostMemory(nil)
	s.wantHeld(s.admit(c), OutcomeUnknown, KeyExpired)
}

func TestAnImportedHold(t *testing.T) { // R35
	s := tell(t)
	c := s.call("intent-1", "order/9").on("sess/1")
	tk := s.loseAndWait(c)
	old := s.hold(c)
	s.wiped(nil)
	s.importHold(c, 1, OutcomeUnknown)
	s.importHold(c, 1, OutcomeUnknown)
	h := s.hold(c)
	if h.Number != 2 || h.State != HoldHeld || !slices.Equal(h.Reasons, []Reason{OutcomeUnknown}) {
		t.Fatalf("%+v", h)
	}
	if v := s.resolve(old, Release); v.State != HoldVoid || s.state(c) != Held {
		t.Fatalf("the old hold was taken: %s", v.State)
	}
	// It stands in the way, also after the window.
	s.pass(2 * storyWindow)
	s.wantHeld(s.admit(s.call("intent-2", "order/9/item/1")), ScopeOverlap, IdentityChanged)
	s.wantHeld(s.admit(c), OutcomeUnknown)
	s.want(s.admit(c.with(func(c *Call) { c.Fingerprint = "sha256:two" })), Conflict, ReasonRequest)
	s.want(s.admit(c.with(func(c *Call) { c.IdentityHash, c.Fingerprint = "identity-2", "sha256:two" })), Conflict, ReasonRequest)
	// And it does not stand in the way of what is for something else.
	s.send(s.call("intent-3", "order/8").with(func(c *Call) {
		c.Amount, c.AmountHash, c.RecipientHash = &intent.Money{Value: "1", Currency: "USD"}, "a", "r"
	}))
	s.take(c, Release)
	second := s.send(c)
	if second.ProviderKey != tk.ProviderKey {
		t.Fatalf("key %s, it was %s", second.ProviderKey, tk.ProviderKey)
	}
	s.settle(second, paid("re_2"))
	s.wantReplay(s.admit(c), "intent-1", "re_2")
	// Since it was sent it is that caller's.
	s.want(s.admit(c.with(func(c *Call) { c.CallerUID = "uid-2" })), Conflict, ReasonCaller)
}

func TestAnImportedHoldThatStandsAlready(t *testing.T) {
	s := tell(t)
	c, done := s.call("intent-1", "order/9"), s.call("intent-2", "order/8")
	s.lose(c)
	s.pay(done, "re_1")
	s.lostMemory(nil)
	for range 2 {
		s.importHold(c, 5, OutcomeUnknown) // its later holds are missing
		s.importHold(done, 1, OutcomeUnknown)
		if h := s.hold(c); h.Number != 6 || h.State != HoldWaiting {
			t.Fatalf("hold %d is %s", h.Number, h.State)
		}
		s.inState(done, Succeeded)
	}
	s.importHold(c, 6, OutcomeUnknown) // an object has the very number
	if h := s.hold(c); h.Number != 7 {
		t.Fatalf("hold %d", h.Number)
	}
}

// A release that the lost memory had taken passes over nothing any more.
func TestWhatWasPassedOverIsForgotten(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9"), "re_1")
	c := s.call("intent-1", "order/9/item")
	s.wantHeld(s.admit(c), ScopeOverlap)
	s.take(c, Release)
	s.lostMemory(nil)
	s.wantHeld(s.admit(c), OutcomeUnknown, ScopeOverlap)
	s.take(c, Release)
	s.wantHeld(s.admit(c), ScopeOverlap)
}

func TestWhoseAnImportedHoldIs(t *testing.T) {
	namesake := func(c *Call) { c.CallerUID = "uid-2" }
	s := tell(t)
	s.wiped(nil)
	c := s.call("intent-1", "order/9")
	s.importHold(c, 1, ScopeOverlap)
	s.wantHeld(s.admit(c), OutcomeUnknown, ScopeOverlap)
	s.wantHeld(s.admit(c.with(namesake)), OutcomeUnknown, ScopeOverlap)
	// A person's answer is given to nobody of whom it is not known that it is theirs.
	s.take(c, MarkPaid)
	for _, c := range []Call{c, c.with(namesake)} {
		if a := s.admit(c); a.Verdict != Deny || a.Reason != ReasonMarkedPaid || a.Response != nil {
			t.Fatalf("%s %s, %v", a.Verdict, a.Reason, a.Response)
		}
		if a := s.admit(c.on("sess/1").under("intent-2")); a.Response != nil {
			t.Fatalf("a replay for another ID: %s", a.Response.Body)
		}
	}
	if a, err := s.Poll(s.ctx, c.Key); err != nil || a.Response != nil {
		t.Fatalf("a poll is told %v (%v)", a.Response, err)
	}
	// Where the UID is known it is the rightful owner's alone.
	known := s.call("intent-3", "order/8")
	if err := s.Import(s.ctx, ImportedHold{
		Key: known.Key, CallerUID: known.CallerUID, Scope: known.Scope, Fingerprint: known.Fingerprint, Amount: known.Amount, Recipient: known.Recipient,
		Reasons: []Reason{OutcomeUnknown}, Number: 1, Policy: storyPolicy(),
	}); err != nil {
		t.Fatal(err)
	}
	s.keys[known.Key] = true
	s.want(s.admit(known.with(namesake)), Conflict, ReasonCaller)
	s.take(known, MarkPaid)
	if a := s.admit(known); a.Verdict != Replay || a.Response == nil {
		t.Fatalf("%s %s", a.Verdict, a.Reason)
	}
}

func TestAnImportThatSaysTooLittleIsRefused(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	whole := ImportedHold{Key: c.Key, Scope: c.Scope, Fingerprint: c.Fingerprint, Reasons: []Reason{ScopeOverlap}, Number: 1, Policy: storyPolicy()}
	for name, change := range map[string]func(*ImportedHold){
		"no tool":    func(h *ImportedHold) { h.Tool = "" },
		"no scope":   func(h *ImportedHold) { h.Scope = nil },
		"no reasons": func(h *ImportedHold) { h.Reasons = nil },
		"no number":  func(h *ImportedHold) { h.Number = 0 },
		"no budget":  func(h *ImportedHold) { h.Policy.Budget = "" },
	} {
		h := whole
		change(&h)
		if err := s.Import(s.ctx, h); !errors.Is(err, ErrInvariant) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.inState(c, None)
}

func TestALostReplyToAnImport(t *testing.T) { // R21
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			s.wiped(nil)
			c := s.call("intent-1", "order/9")
			lose(s, "Update", 2)
			s.importHold(c, 4, ScopeOverlap)
			if h := s.hold(c); h.Number != 5 {
				t.Fatalf("hold %d", h.Number)
			}
		})
	}
}

// What a hold shows gives nobody the right to settle what only a person may decide.
func TestTheHoldsNonceSettlesNothing(t *testing.T) {
	for _, res := range []Result{{Outcome: AttemptFailed, Detail: "forged"}, paid("forged")} {
		for name, held := range map[string]func(*story, Call){
			"a first call after the loss": func(s *story, c Call) {
				s.settle(s.send(c), paid("re_1"))
				s.wiped(nil)
				s.wantHeld(s.admit(c), OutcomeUnknown)
			},
			"a hold made anew": func(s *story, c Call) {
				s.block(c)
				s.lostMemory(nil)
				s.rehold()
			},
			"an imported hold": func(s *story, c Call) {
				s.wiped(nil)
				s.importHold(c, 3, ScopeOverlap)
			},
			"a lease that is over":    func(s *story, c Call) { s.loseAndWait(c) },
			"an attempt of a gateway": func(s *story, c Call) { s.lose(c) },
		} {
			t.Run(name+", "+string(res.Outcome), func(t *testing.T) {
				s := tell(t)
				c := s.call("intent-1", "order/9")
				held(s, c)
				h, before := s.hold(c), s.inState(c, Held)
				if len(before.Attempts) == 0 {
					t.Fatal("there is no attempt")
				}
				nonces := []string{h.Nonce}
				if !before.last().Lost {
					nonces = append(nonces, before.last().Nonce) // a gateway's own, which nobody is told
				} else if before.last().Nonce == h.Nonce {
					t.Error("the hold's nonce is that of the presumed attempt")
				}
				for _, nonce := range nonces {
					f := Fence{Key: c.Key, CallerUID: before.CallerUID, Attempt: len(before.Attempts), Nonce: nonce}
					if a, err := s.SettleClaim(s.ctx, f, res); !errors.Is(err, ErrNoClaim) {
						t.Errorf("settled: %s, %v", a.Verdict, err)
					}
					if a, err := s.Renew(s.ctx, f); !errors.Is(err, ErrNoClaim) {
						t.Errorf("renewed: %s, %v", a.Verdict, err)
					}
				}
				if after := s.inState(c, Held); after.version != before.version || !after.anyUnknown() {
					t.Errorf("the record was changed: %+v", after.Attempts)
				}
			})
		}
	}
}

// Nor does it let the hold of what may have moved end by itself.
func TestTheHoldsNonceEndsNoHold(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	p := storyPolicy()
	p.HoldFor = time.Hour
	s.settle(s.sendUnder(c, p), paid("re_1"))
	s.wiped(nil)
	s.wantHeld(s.admitUnder(c, p), OutcomeUnknown)
	h := s.hold(c)
	if _, err := s.SettleClaim(s.ctx, Fence{Key: c.Key, CallerUID: c.CallerUID, Attempt: 1, Nonce: h.Nonce}, declined()); !errors.Is(err, ErrNoClaim) {
		t.Fatalf("settled: %v", err)
	}
	s.pass(2 * time.Hour)
	s.expire(c)
	s.wantHeld(s.admitUnder(c, p), OutcomeUnknown)
}
