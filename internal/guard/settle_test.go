// This file is what becomes of results: the join of the attempts, what the caller is
// told, the fence, and results that come late, into every state that a record can
// have reached meanwhile.

package guard

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestAnOutcomeIsWrittenAndTold(t *testing.T) {
	for _, row := range []struct {
		name    string
		res     Result
		state   State
		outcome Outcome
		verdict Verdict
		reason  Reason
	}{
		{"succeeded", paid("re_1"), Succeeded, AttemptSucceeded, Allow, ""},
		{"declined", declined(), Failed, AttemptFailed, Allow, ""},
		{"refused to connect", unreachable(), Retryable, AttemptRetryable, Deny, ReasonUnreachable},
		{"too many requests", Result{Outcome: AttemptRetryable, Response: &Response{Status: 429}}, Retryable, AttemptRetryable, Allow, ""},
		{"timed out", lost(), Held, AttemptUnknown, UnknownHold, OutcomeUnknown},
		{"answered 500", Result{Outcome: AttemptUnknown, Response: &Response{Status: 500}}, Held, AttemptUnknown, UnknownHold, OutcomeUnknown},
		{"accepted", accepted(), Held, AttemptUnknown, UnknownHold, OutcomeUnknown},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			row.res.LateSend = true
			a := s.settle(s.send(c), row.res)
			s.want(a, row.verdict, row.reason)
			r := s.inState(c, row.state)
			if got := r.last(); got.Outcome != row.outcome || got.Ended.IsZero() || !got.SentLate || got.Late || (row.res.Response != nil && got.Status != row.res.Response.Status) {
				t.Fatalf("the attempt: %+v", got)
			}
			if row.verdict == Allow && (a.Response == nil || a.Response.Status != row.res.Response.Status) {
				t.Fatalf("told %+v", a.Response)
			}
			if row.state == Succeeded && (r.ProviderReference != "re_1" || a.Intent.ProviderReference != "re_1") {
				t.Fatalf("reference %q", r.ProviderReference)
			}
			if v := a.Intent.Attempts; len(v) != 1 || v[0].Outcome != row.outcome || !v[0].SentLate {
				t.Fatalf("the view: %+v", v)
			}
		})
	}
}

// updates keeps what a process has asked its store to update.
type updates struct {
	store.Store
	asked []store.Write
}

func (u *updates) Update(ctx context.Context, w store.Write) (store.Result, error) {
	u.asked = append(u.asked, w)
	return u.Store.Update(ctx, w)
}

// Who settles what it has reserved does not give the marks again, unless they differ.
func TestASettlementRenewsItsMarks(t *testing.T) {
	checked := storyPolicy()
	checked.Check = &CheckPolicy{Timeout: time.Second, Initial: time.Second, Max: time.Minute, Factor: 2, Deadline: time.Hour}
	alike, other := storyPolicy(), storyPolicy()
	alike.Lookalike, other.Lookalike = storyWindow, storyWindow/2
	for _, row := range []struct {
		name   string
		p      Policy
		res    Result
		renews bool
		ends   bool
		marks  bool
	}{
		{"succeeded", storyPolicy(), paid("re_1"), true, true, false},
		{"declined", storyPolicy(), declined(), false, false, false},
		{"refused to connect", storyPolicy(), unreachable(), false, false, false},
		{"timed out", storyPolicy(), lost(), true, false, false},
		{"accepted", checked, accepted(), true, false, false},
		{"succeeded, and compared by recipient and amount for as long", alike, paid("re_1"), true, true, false},
		{"succeeded, and compared by recipient and amount for less long", other, paid("re_1"), false, true, true},
		{"timed out, and compared by recipient and amount for less long", other, lost(), true, false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			spy := &updates{Store: s.net}
			s.Engine = New(spy, s.id, s.opts)
			c := s.call("intent-1", "order/9")
			c.Recipient = "a1"
			ticket := s.sendUnder(c, row.p)
			reserved := ticket.rec.marks(time.Time{})
			s.settle(ticket, row.res)
			w := spy.asked[len(spy.asked)-1]
			if w.RenewMarks != row.renews || (len(w.Marks) > 0) != row.marks || w.KeepMarks {
				t.Fatalf("renews %t, keeps %t, gives %+v", w.RenewMarks, w.KeepMarks, w.Marks)
			}
			if !row.renews {
				return
			}
			if w.Until.IsZero() == row.ends {
				t.Errorf("until %s", w.Until)
			}
			r := s.record(c.Key)
			given := r.marks(w.Until.Add(-row.p.Window))
			for i := range reserved {
				reserved[i].Until = w.Until
			}
			if !reflect.DeepEqual(given, reserved) {
				t.Errorf("renewed are %+v\nwould have been given %+v", reserved, given)
			}
		})
	}
	t.Run("what another process has written", func(t *testing.T) {
		s := tell(t)
		spy := &updates{Store: s.net}
		s.Engine = New(spy, s.id, s.opts)
		c := s.call("intent-1", "order/9")
		ticket := s.send(c)
		r := s.record(c.Key)
		w, err := s.write(pending{from: r, to: r.clone(), on: onRegister, now: r.Changed, nonce: s.o.Nonce(), keepMarks: true})
		if err != nil {
			t.Fatal(err)
		}
		if res, err := s.bolt.Update(s.ctx, w); err != nil || res.Outcome != store.Written {
			t.Fatalf("%+v, %v", res, err)
		}
		s.settle(ticket, paid("re_1"))
		if w := spy.asked[len(spy.asked)-1]; len(spy.asked) != 2 || w.RenewMarks || len(w.Marks) == 0 {
			t.Errorf("of %d the last: renews %t, gives %+v", len(spy.asked), w.RenewMarks, w.Marks)
		}
		s.inState(c, Succeeded)
	})
}

// What a record leaves is taken for what an earlier one has left only where that is sure.
func TestOnlyTheSameMarksAreRenewed(t *testing.T) {
	at := time.Unix(1e9, 0)
	unknown := func(r *record) {
		r.State, r.Attempts[0].Outcome = Held, AttemptUnknown
	}
	for name, row := range map[string]struct {
		from, to func(r *record)
		renews   bool
	}{
		"as it was reserved":           {nil, unknown, true},
		"nobody knows what was left":   {func(r *record) { r.named = nil }, unknown, false},
		"never sent":                   {func(r *record) { r.State, r.Attempts = Held, nil }, unknown, false},
		"held":                         {unknown, unknown, false},
		"released":                     {func(r *record) { unknown(r); r.State = Released }, unknown, false},
		"of another budget":            {nil, func(r *record) { unknown(r); r.Policy.Budget += " other" }, false},
		"recipients are compared":      {nil, func(r *record) { unknown(r); r.Policy.Lookalike = time.Minute }, false},
		"imported":                     {nil, func(r *record) { unknown(r); r.Imported = true }, false},
		"another identity":             {nil, func(r *record) { unknown(r); r.IdentityHash += "0" }, false},
		"another amount's expression":  {nil, func(r *record) { unknown(r); r.AmountHash += "0" }, false},
		"all attempts are lost":        {nil, func(r *record) { unknown(r); r.Attempts[0].Lost = true }, false},
		"nothing moved":                {nil, func(r *record) { r.State, r.Attempts[0].Outcome = Retryable, AttemptRetryable }, false},
		"another fingerprint is known": {nil, func(r *record) { unknown(r); r.Fingerprint += "0"; r.named = nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			c.Recipient = "a1"
			from := s.send(c).rec
			if row.from != nil {
				row.from(from)
			}
			to := from.clone()
			if len(to.Attempts) == 0 {
				to.Attempts = []attempt{{Number: 1}}
			}
			row.to(to)
			until, renews := to.renews(from, at)
			if renews != row.renews || !until.IsZero() {
				t.Errorf("it renews: %t, until %s", renews, until)
			}
		})
	}
}

func TestAFailureDoesNotEraseAnUnknown(t *testing.T) {
	// Under one provider key: nobody released the first attempt, so the record cannot have a second.
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	s.wantHeld(s.admit(c), OutcomeUnknown)

	// A release lets the next attempt be sent; its refusal is not the end of the intent (R18).
	d := s.call("intent-2", "order/10")
	s.loseAndWait(d)
	s.take(d, Release)
	s.wantHeld(s.settle(s.send(d), declined()), OutcomeUnknown)
	if h := s.hold(d); h.State != HoldHeld || h.Number != 2 || h.Cause != causeRefused {
		t.Fatalf("the hold is %+v", h)
	}
	s.wantHeld(s.admit(d.under("intent-3")), ScopeOverlap)

	// A second attempt that is unknown is held on its own, whatever was released before it.
	e := s.call("intent-4", "order/11")
	s.loseAndWait(e)
	s.take(e, Release)
	s.lose(e)
	if h := s.hold(e); h.Number != 2 || h.State != HoldWaiting {
		t.Fatalf("hold %d is %s", h.Number, h.State)
	}
}

func TestTheJoin(t *testing.T) {
	a := func(generation int, o Outcome) attempt { return attempt{Generation: generation, Outcome: o} }
	excused := func(at attempt) attempt { at.Excused = true; return at }
	for _, row := range []struct {
		name     string
		attempts []attempt
		want     Outcome
	}{
		{"nothing was begun", nil, AttemptFailed},
		{"open", []attempt{a(1, AttemptOpen)}, AttemptUnknown},
		{"succeeded", []attempt{a(1, AttemptSucceeded)}, AttemptSucceeded},
		{"unknown, then failed", []attempt{a(1, AttemptUnknown), a(1, AttemptFailed)}, AttemptUnknown},
		{"failed, then unknown", []attempt{a(1, AttemptFailed), a(1, AttemptUnknown)}, AttemptUnknown},
		{"retryable, then failed", []attempt{a(1, AttemptRetryable), a(1, AttemptFailed)}, AttemptFailed},
		{"unknown, then succeeded", []attempt{a(1, AttemptUnknown), a(1, AttemptSucceeded)}, AttemptSucceeded},
		{"succeeded, then failed", []attempt{a(1, AttemptSucceeded), a(1, AttemptFailed)}, AttemptSucceeded},
		{"succeeded, then unknown", []attempt{a(1, AttemptSucceeded), a(1, AttemptUnknown)}, AttemptSucceeded},
		{"released, then failed", []attempt{excused(a(1, AttemptUnknown)), a(1, AttemptFailed)}, AttemptFailed},
		{"released, then unknown", []attempt{excused(a(1, AttemptUnknown)), a(1, AttemptUnknown)}, AttemptUnknown},
		{"of an earlier generation: unknown", []attempt{a(1, AttemptUnknown), a(2, AttemptFailed)}, AttemptFailed},
		{"of an earlier generation: succeeded", []attempt{a(1, AttemptSucceeded), a(2, AttemptUnknown)}, AttemptUnknown},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := &record{}
			r.Generation, r.Attempts = 1, row.attempts
			if n := len(row.attempts); n > 0 {
				r.Generation = row.attempts[n-1].Generation
			}
			if got, _ := r.join(); got != row.want {
				t.Fatalf("got %q, want %q", got, row.want)
			}
		})
	}
}

func TestAHolderThatOutlivesItsLease(t *testing.T) { // R04
	for _, row := range []struct {
		name  string
		res   Result
		state State
		told  func(s *story, c Call, a Answer)
	}{
		{"was paid", paid("re_1"), Succeeded, func(s *story, c Call, a Answer) { s.want(a, Allow, "") }},
		{"was declined", declined(), Held, func(s *story, c Call, a Answer) { s.wantHeld(a, OutcomeUnknown) }},
		{"does not know", lost(), Held, func(s *story, c Call, a Answer) { s.wantHeld(a, OutcomeUnknown) }},
		{"was accepted", accepted(), Held, func(s *story, c Call, a Answer) { s.wantHeld(a, OutcomeUnknown) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			tk := s.send(c)
			s.pass(storyLease + storyGrace)
			s.sweep()
			s.inState(c, Held)
			row.told(s, c, s.settle(tk, row.res))
			r := s.inState(c, row.state)
			if row.res.Outcome != AttemptUnknown && (!r.last().Late || r.last().Detail != row.res.Detail) {
				t.Fatalf("it is not on the record as late: %+v", r.last())
			}
			if row.state == Succeeded {
				if h := s.hold(c); h.State != HoldVoid || h.Effect == "" {
					t.Fatalf("the hold is %s, %q", h.State, h.Effect)
				}
				s.wantReplay(s.admit(c), "intent-1", "re_1")
			}
		})
	}
}

func TestAStaleHolderFreesNobodysLease(t *testing.T) { // R05
	for _, res := range []Result{declined(), unreachable(), lost(), accepted(), paid("re_late")} {
		t.Run(string(res.Outcome), func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			first := s.loseAndWait(c)
			s.take(c, Release)
			second := s.send(c)
			before := *s.record(c.Key).last()
			s.want(s.settle(first, res), InFlightNow, ReasonInFlight)
			after := s.inState(c, InFlight)
			if got := after.last(); got.Number != 2 || got.Nonce != before.Nonce || !got.LeaseEnd.Equal(before.LeaseEnd) || got.Outcome != AttemptOpen {
				t.Fatalf("attempt 2 was %+v, is %+v", before, got)
			}
			s.want(s.admit(c), InFlightNow, ReasonInFlight)
			// A forged fence settles nothing.
			forged := *second
			forged.nonce = first.nonce
			if _, err := s.Settle(s.ctx, &forged, paid("re_forged")); err == nil {
				t.Fatal("another attempt's nonce settles")
			}
			s.inState(c, InFlight)
			s.settle(second, paid("re_2"))
			s.inState(c, Succeeded)
		})
	}
}

func TestAKeptSuccessIsJoined(t *testing.T) {
	two := func(t *testing.T) (s *story, c Call, second *Ticket) {
		s = tell(t)
		c = s.call("intent-1", "order/9")
		first := s.loseAndWait(c)
		s.take(c, Release)
		second = s.send(c)
		s.want(s.settle(first, paid("re_1")), InFlightNow, ReasonInFlight)
		return s, c, second
	}
	t.Run("the lease ends", func(t *testing.T) { // R36
		s, c, _ := two(t)
		s.pass(storyLease + storyGrace)
		s.wantReplay(s.admit(c), "intent-1", "re_1")
		s.inState(c, Succeeded)
	})
	t.Run("the second is unknown", func(t *testing.T) {
		s, c, second := two(t)
		s.wantReplay(s.settle(second, lost()), "intent-1", "re_1")
		s.inState(c, Succeeded)
	})
	t.Run("the second was declined", func(t *testing.T) {
		s, c, second := two(t)
		s.wantReplay(s.settle(second, declined()), "intent-1", "re_1")
		if r := s.inState(c, Succeeded); r.RefundOwed || r.Disputed {
			t.Fatalf("one payment, but refund owed %t, disputed %t", r.RefundOwed, r.Disputed)
		}
	})
	t.Run("the second was paid too", func(t *testing.T) {
		s, c, second := two(t)
		s.wantReplay(s.settle(second, paid("re_2")), "intent-1", "re_1") // one answer for one intent
		if r := s.inState(c, Succeeded); !r.RefundOwed {
			t.Fatal("two payments, and nobody is told that one is owed")
		}
	})
	t.Run("the second was paid too, and settled first", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		first := s.loseAndWait(c)
		s.take(c, Release)
		s.pay(c, "re_2")
		s.wantReplay(s.settle(first, paid("re_1")), "intent-1", "re_2")
		if r := s.inState(c, Succeeded); !r.RefundOwed || r.Disputed {
			t.Fatalf("refund owed %t, disputed %t", r.RefundOwed, r.Disputed)
		}
	})
	for name, reference := range map[string]string{"the same payment told twice": "re_1", "without a reference": ""} {
		t.Run("the second was paid, "+name, func(t *testing.T) {
			s, c, second := two(t)
			s.wantReplay(s.settle(second, paid(reference)), "intent-1", "re_1")
			if r := s.inState(c, Succeeded); r.RefundOwed || r.Disputed != (reference == "") {
				t.Fatalf("refund owed %t, disputed %t", r.RefundOwed, r.Disputed)
			}
		})
	}
}

func TestALateSuccess(t *testing.T) { // R22
	for _, row := range []struct {
		name      string
		make      func(s *story, c Call) *Ticket
		reference string // of the late success
		want      string // the record's reference afterwards
		owed      bool
		disputed  bool
		state     State
	}{
		{"held", func(s *story, c Call) *Ticket { return s.lose(c) }, "re_1", "re_1", false, false, Succeeded},
		{"held, never waiting any more", func(s *story, c Call) *Ticket { return s.loseAndWait(c) }, "re_1", "re_1", false, false, Succeeded},
		{"released", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"held anew by an overlap", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			other := s.call("other", "order/9")
			s.wantHeld(s.admit(other), ScopeOverlap)
			s.take(other, Release)
			s.send(other)
			s.wantHeld(s.admit(c), ScopeOverlap)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"retryable", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(s.send(c), unreachable())
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"rejected", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, Reject)
			return tk
		}, "re_1", "re_1", true, false, Succeeded},
		{"marked paid, same reference", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			return tk
		}, "by-hand", "by-hand", false, false, Succeeded},
		{"marked paid, no reference", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			return tk
		}, "", "by-hand", false, false, Succeeded},
		{"marked paid, another reference", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			return tk
		}, "re_1", "by-hand", true, false, Succeeded},
		{"marked failed", func(s *story, c Call) *Ticket { // R27
			tk := s.loseAndWait(c)
			s.take(c, MarkFailed)
			return tk
		}, "re_1", "re_1", true, false, Succeeded},
		{"refused at its second attempt", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(s.send(c), declined())
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"tombstone of a rejected one", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, Reject)
			s.pass(storyTTL)
			s.sweep()
			return tk
		}, "re_1", "re_1", true, false, Succeeded},
		{"tombstone of one marked paid, another reference", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			s.pass(storyTTL)
			s.sweep()
			return tk
		}, "re_1", "by-hand", true, false, Tombstone},
		{"tombstone of one marked paid, same reference", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, MarkPaid)
			s.pass(storyTTL)
			s.sweep()
			return tk
		}, "by-hand", "by-hand", false, false, Tombstone},
		{"its ID has expired and is held", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, Reject)
			s.pass(storyTTL)
			s.wantHeld(s.admit(c), KeyExpired)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"its expired ID was released, with a new key", func(s *story, c Call) *Ticket {
			tk := expire(s, c)
			s.take(c, Release)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"its expired ID was released and declined", func(s *story, c Call) *Ticket {
			tk := expire(s, c)
			s.take(c, Release)
			s.settle(s.send(c), declined())
			return tk
		}, "re_1", "re_1", true, false, Succeeded},
		{"its expired ID was released and is unknown again", func(s *story, c Call) *Ticket {
			tk := expire(s, c)
			s.take(c, Release)
			s.lose(c)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
		{"purged", func(s *story, c Call) *Ticket {
			tk := s.lose(c)
			s.take(c, Reject)
			s.pass(storyTTL)
			s.sweep()
			s.pass(90 * 24 * time.Hour)
			s.sweep()
			s.inState(c, None)
			return tk
		}, "re_1", "re_1", false, false, Succeeded},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			tk := row.make(s, c)
			s.settle(tk, paid(row.reference))
			r := s.inState(c, row.state)
			if r.ProviderReference != row.want || r.RefundOwed != row.owed || r.Disputed != row.disputed {
				t.Fatalf("reference %q, refund owed %t, disputed %t; want %q, %t, %t", r.ProviderReference, r.RefundOwed, r.Disputed, row.want, row.owed, row.disputed)
			}
			if at := r.attemptWith(tk.Attempt, tk.nonce); at == nil || at.Outcome != AttemptSucceeded || !at.Late || at.Reference != row.reference {
				t.Fatalf("the evidence: %+v", at)
			}
			if r.Current != nil && r.Current.End == "" {
				t.Fatalf("hold %d still stands", r.Current.Number)
			}
			// Told twice, it changes nothing.
			version := r.version
			s.settle(tk, paid(row.reference))
			if got := s.record(c.Key).version; got != version {
				t.Fatalf("a second telling wrote version %d over %d", got, version)
			}
			if row.state == Tombstone {
				return
			}
			a := s.admit(c)
			s.want(a, Replay, "")
			if row.want != "by-hand" && string(a.Response.Body) != `{"id":"re_1"}` {
				t.Fatalf("replayed %s", a.Response.Body)
			}
			// It was paid, so it stands in the way.
			s.wantHeld(s.admit(c.under("intent-2").with(func(c *Call) { c.Caller = "system:serviceaccount:support:other" })), ScopeOverlap)
		})
	}
}

// expire rejects an unknown intent, lets its ID expire and has it held until it may be released.
func expire(s *story, c Call) *Ticket {
	s.t.Helper()
	tk := s.lose(c)
	s.take(c, Reject)
	s.pass(storyTTL)
	s.wantHeld(s.admit(c), KeyExpired)
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	return tk
}

func TestALateFailure(t *testing.T) {
	for _, row := range []struct {
		name     string
		make     func(s *story, c Call) *Ticket
		state    State
		disputed bool
		stands   bool // in the way of others, afterwards
	}{
		{"held", func(s *story, c Call) *Ticket { return s.lose(c) }, Held, false, false},
		{"released", func(s *story, c Call) *Ticket { tk := s.loseAndWait(c); s.take(c, Release); return tk }, Released, false, false},
		{"rejected", func(s *story, c Call) *Ticket { tk := s.lose(c); s.take(c, Reject); return tk }, Rejected, false, false},
		{"marked paid", func(s *story, c Call) *Ticket { tk := s.lose(c); s.take(c, MarkPaid); return tk }, Succeeded, true, true},
		{"marked failed", func(s *story, c Call) *Ticket { tk := s.loseAndWait(c); s.take(c, MarkFailed); return tk }, Failed, false, false},
		{"refused at its second attempt", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			s.settle(s.send(c), declined())
			return tk
		}, Held, false, false},
		{"succeeded by its second attempt", func(s *story, c Call) *Ticket {
			tk := s.loseAndWait(c)
			s.take(c, Release)
			s.pay(c, "re_2")
			return tk
		}, Succeeded, false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			tk := row.make(s, c)
			s.settle(tk, declined())
			r := s.inState(c, row.state)
			if at := r.attemptWith(tk.Attempt, tk.nonce); at.Outcome != AttemptFailed || !at.Late || at.Status != 402 {
				t.Fatalf("the evidence: %+v", at)
			}
			if r.Disputed != row.disputed || r.RefundOwed {
				t.Fatalf("disputed %t, refund owed %t", r.Disputed, r.RefundOwed)
			}
			a := s.admit(c.under("intent-2").with(func(c *Call) { c.Caller = "system:serviceaccount:support:other" }))
			if row.stands {
				s.wantHeld(a, ScopeOverlap)
			} else {
				s.want(a, Allow, "")
			}
		})
	}
	t.Run("purged", func(t *testing.T) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		tk := s.lose(c)
		s.take(c, Reject)
		s.pass(storyTTL)
		s.sweep()
		s.pass(90 * 24 * time.Hour)
		s.sweep()
		s.settle(tk, declined())
		s.inState(c, None)
	})
}

func TestALateWordThatItWasAccepted(t *testing.T) {
	// A 202 that comes late: the payment may happen yet, so a release that counted it
	// as nothing moved no longer holds.
	two := func(t *testing.T) (*story, Call, *Ticket) {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		first := s.loseAndWait(c)
		return s, c, first
	}
	anew := func(s *story, c Call) {
		s.t.Helper()
		s.inState(c, Held)
		h := s.hold(c)
		if h.Number != 2 || h.Cause == "" || !slices.Equal(h.Reasons, []Reason{OutcomeUnknown}) {
			s.t.Fatalf("hold %d: %v, %q", h.Number, h.Reasons, h.Cause)
		}
		s.sweep()
		s.pass(storyWait)
		s.sweep()
		h = s.hold(c)
		if after := s.resolve(h, Release); after.State != HoldVoid || !strings.Contains(after.Effect, "accepted") {
			s.t.Fatalf("release of what was accepted: %s, %q", after.State, after.Effect)
		}
	}
	t.Run("held", func(t *testing.T) {
		s, c, first := two(t)
		s.settle(first, accepted())
		s.inState(c, Held)
		h := s.hold(c)
		s.spent(c, h, s.resolve(h, Release))
	})
	t.Run("released", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		s.wantHeld(s.settle(first, accepted()), OutcomeUnknown)
		anew(s, c)
	})
	t.Run("retryable", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		s.settle(s.send(c), unreachable())
		s.settle(first, accepted())
		anew(s, c)
	})
	t.Run("in flight again, then declined", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		second := s.send(c)
		s.want(s.settle(first, accepted()), InFlightNow, ReasonInFlight)
		s.wantHeld(s.settle(second, declined()), OutcomeUnknown)
	})
	t.Run("in flight again, then paid", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		second := s.send(c)
		s.settle(first, accepted())
		s.want(s.settle(second, paid("re_2")), Allow, "")
		s.inState(c, Succeeded)
	})
	t.Run("in flight again, then its lease ends", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		s.send(c)
		s.settle(first, accepted())
		s.pass(storyLease + storyGrace)
		s.sweep()
		s.inState(c, Held)
	})
	t.Run("refused", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		s.wantHeld(s.settle(s.send(c), declined()), OutcomeUnknown)
		s.settle(first, accepted())
		s.inState(c, Held)
	})
	t.Run("marked failed", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, MarkFailed)
		s.settle(first, accepted())
		if r := s.inState(c, Failed); !r.Disputed {
			t.Fatal("nobody is told that a payment marked as failed was accepted")
		}
	})
	t.Run("a byte was written late", func(t *testing.T) {
		s, c, first := two(t)
		s.take(c, Release)
		res := lost()
		res.LateSend = true
		s.wantHeld(s.settle(first, res), OutcomeUnknown)
		if r := s.inState(c, Held); !r.Attempts[0].SentLate {
			t.Fatal("a late send is not on the record")
		}
	})
}

func TestLongWordsAreClipped(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	res := lost()
	res.Detail, res.ProviderReference = strings.Repeat("é", 10_000), strings.Repeat("r", 10_000)
	s.settle(s.send(c), res)
	if at := s.inState(c, Held).last(); len(at.Detail) > maxDetail+len("…") || !strings.HasPrefix(at.Detail, "éé") || len(at.Reference) > maxDetail+len("…") {
		t.Fatalf("%d bytes of detail, %d of reference", len(at.Detail), len(at.Reference))
	}
}
