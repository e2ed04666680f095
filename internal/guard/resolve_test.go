// This file is what a person's decision does, and does not: each is taken once, by
// the hold for which it was written, and covers what that hold had shown and nothing
// that came since.

package guard

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func (c Call) by(name string) Call {
	c.Caller, c.CallerUID = "system:serviceaccount:support:"+name, "uid of "+name
	return c
}

func TestTwoReleasesAtTheSameMoment(t *testing.T) { // R15
	for round := range 200 {
		s := tell(t)
		a := s.call("a", "order/9")
		s.loseAndWait(a)
		calls := []Call{s.call("b", "order/9").by("b"), s.call("c", "order/9").by("c")}
		for _, c := range calls {
			s.wantHeld(s.admit(c), ScopeOverlap)
		}
		holds := []HoldView{s.hold(calls[0]), s.hold(calls[1])}
		answers := make([]Answer, 2)
		errs := make([]error, 2)
		begin := make(chan struct{})
		var wg sync.WaitGroup
		for i, c := range calls {
			e := s.process()
			wg.Go(func() {
				<-begin
				if _, errs[i] = e.Resolve(s.ctx, Resolution{HoldID: holds[i].HoldID, Decision: Release, By: "alice", Reason: "go"}); errs[i] != nil {
					return
				}
				answers[i], errs[i] = e.Admit(s.ctx, c, storyPolicy())
			})
		}
		close(begin)
		wg.Wait()
		charged := 0
		for i := range calls {
			if errs[i] != nil {
				t.Fatalf("round %d: %v", round, errs[i])
			}
			if answers[i].Verdict == Allow {
				charged++
				continue
			}
			s.wantHeld(answers[i], ScopeOverlap)
			if h := s.hold(calls[i]); h.Number != 2 {
				t.Fatalf("round %d: hold %d", round, h.Number)
			}
		}
		if charged != 1 {
			t.Fatalf("round %d: %d of two were charged", round, charged)
		}
	}
}

func TestFirstCallsAtTheSameMoment(t *testing.T) { // R01, A01, A07
	for name, id := range map[string]func(int) string{
		"one ID":      func(int) string { return "intent-1" },
		"an ID each":  func(i int) string { return fmt.Sprint("intent-", i) },
		"several IDs": func(i int) string { return fmt.Sprint("intent-", i%5) },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			verdicts := make(chan Verdict, 50)
			var wg sync.WaitGroup
			for i := range cap(verdicts) {
				c := s.call(id(i), "order/9").on("sess_a/call-1")
				s.keys[c.Key] = true
				e := s.process()
				wg.Go(func() {
					a, err := e.Admit(s.ctx, c, storyPolicy())
					if err != nil {
						t.Error(err)
					}
					verdicts <- a.Verdict
				})
			}
			wg.Wait()
			close(verdicts)
			count := map[Verdict]int{}
			for v := range verdicts {
				count[v]++
			}
			if count[Allow] != 1 || count[InFlightNow] != 49 {
				t.Fatalf("%v", count)
			}
		})
	}
}

func TestAnOldReleaseDoesNotFreeANewHold(t *testing.T) { // R16
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.loseAndWait(c)
	first := s.hold(c)
	s.resolve(first, Release)
	s.lose(c)
	s.restart()
	second := s.hold(c)
	if second.Number != 2 || second.Name == first.Name || !slices.Equal(second.Reasons, []Reason{OutcomeUnknown}) {
		t.Fatalf("hold %d, %s, %v", second.Number, second.Name, second.Reasons)
	}
	if v := s.resolve(first, Release); v.State != HoldResolved || v.Number != 1 {
		t.Fatalf("the old hold is %s", v.State)
	}
	// Another decision on the old one does nothing either.
	if v := s.resolveWith(first, Resolution{Decision: MarkPaid, ProviderReference: "re_x"}); v.Decision != Release {
		t.Fatalf("the old hold now says %s", v.Decision)
	}
	// It says where to go on, and the new one that there is nothing after it.
	if v := s.resolve(first, Release); v.Next != second.Name || len(v.Sent) != 2 {
		t.Fatalf("after %s comes %q, %d were sent", v.Name, v.Next, len(v.Sent))
	}
	if v, err := s.Hold(s.ctx, second.HoldID); err != nil || v.Next != "" || len(v.Sent) != 2 {
		t.Fatalf("after the newest hold comes %q, %v", v.Next, err)
	}
	s.wantHeld(s.admit(c), OutcomeUnknown)
	if h := s.hold(c); h.HoldID != second.HoldID {
		t.Fatalf("hold %d stands", h.Number)
	}
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	s.resolve(second, Release)
	if tk := s.send(c); tk.Attempt != 3 {
		t.Fatalf("attempt %d", tk.Attempt)
	}
}

func TestADecisionIsForOneHoldOfOneMemory(t *testing.T) { // R35
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.block(c)
	h := s.hold(c)
	for name, change := range map[string]func(*HoldID){
		"another number":      func(id *HoldID) { id.Number = 2 },
		"another nonce":       func(id *HoldID) { id.Nonce = "forged" },
		"another epoch":       func(id *HoldID) { id.Epoch = "epoch-0" },
		"an unknown intent":   func(id *HoldID) { id.Key.IntentID = "nobody" },
		"another namespace":   func(id *HoldID) { id.Key.Namespace = "sales" },
		"a nonce left empty":  func(id *HoldID) { id.Nonce = "" },
		"an epoch left empty": func(id *HoldID) { id.Epoch = "" },
	} {
		for _, d := range []Decision{Release, Reject, MarkPaid, MarkFailed} {
			stale := h
			change(&stale.HoldID)
			v := s.resolveWith(stale, Resolution{Decision: d, ProviderReference: "re_x"})
			if v.State != HoldVoid || v.Effect == "" || v.HoldID != stale.HoldID {
				t.Errorf("%s: %s gives %s, %q", name, d, v.State, v.Effect)
			}
			if shown, err := s.Hold(s.ctx, stale.HoldID); err != nil || shown.State != HoldVoid {
				t.Errorf("%s is shown as %s (%v)", name, shown.State, err)
			}
		}
	}
	if got := s.hold(c); got.State != HoldHeld || got.HoldID != h.HoldID {
		t.Fatalf("the hold is %s", got.State)
	}
	s.take(c, Release)
}

func TestADecisionIsTakenOnce(t *testing.T) {
	for _, first := range []Decision{Release, Reject, MarkPaid} {
		for _, second := range []Decision{Release, Reject, MarkPaid, MarkFailed} {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.block(c)
			h := s.hold(c)
			s.take(c, first)
			version := s.record(c.Key).version
			v := s.resolveWith(h, Resolution{Decision: second, ProviderReference: "re_x", By: "mallory"})
			if v.State != HoldResolved || v.Decision != first || v.By != "alice" || v.Effect == "" || s.record(c.Key).version != version {
				t.Errorf("%s, then %s: %s by %s", first, second, v.Decision, v.By)
			}
		}
	}
}

func TestADecisionThatCannotBeTakenIsSpent(t *testing.T) {
	unknown := func(s *story, c Call) { s.loseAndWait(c) }
	waiting := func(s *story, c Call) { s.lose(c) }
	overlap := func(s *story, c Call) { s.block(c) }
	for _, row := range []struct {
		name string
		make func(s *story, c Call)
		res  Resolution
		says string
	}{
		{"released before it could be visible", waiting, Resolution{Decision: Release}, "could still become visible until"}, // R31
		{"marked failed before it could be visible", waiting, Resolution{Decision: MarkFailed}, "could still become visible until"},
		{"the tool is gone", overlap, Resolution{Decision: Release, ToolGone: true}, "no longer exists"}, // R37
		{"the tool is gone, unknown", unknown, Resolution{Decision: Release, ToolGone: true}, "no longer exists"},
		{"released although it was accepted", func(s *story, c Call) { // R32: the 202 was seen
			s.want(s.settle(s.send(c), accepted()), UnknownHold, OutcomeUnknown)
			s.pass(storyWait)
			s.sweep()
		}, Resolution{Decision: Release}, "accepted the earlier attempt (202)"},
		{"marked paid without a reference", unknown, Resolution{Decision: MarkPaid}, "needs the provider's reference"},
		{"marked paid with what is not JSON", unknown, Resolution{Decision: MarkPaid, ProviderReference: "re_1", Result: []byte("{")}, "is not JSON"},
		{"marked paid with too long a result", unknown, Resolution{Decision: MarkPaid, ProviderReference: "re_1", Result: []byte(`"` + strings.Repeat("x", MaxResultBytes) + `"`)}, "more than 8192"},
		{"marked failed although nothing is unknown", overlap, Resolution{Decision: MarkFailed}, "reject it instead"},
		{"marked failed although it is known to have moved nothing", func(s *story, c Call) { s.settle(s.loseAndWait(c), declined()) }, Resolution{Decision: MarkFailed}, "reject it instead"},
		{"no decision", overlap, Resolution{Decision: "Refund"}, "is no decision"},
		{"an empty decision", overlap, Resolution{}, "is no decision"},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			row.make(s, c)
			before := s.hold(c)
			after := s.resolveWith(before, row.res)
			if !strings.Contains(after.Effect, row.says) {
				t.Errorf("the effect is %q, want that it says %q", after.Effect, row.says)
			}
			anew := s.spent(c, before, after)
			if !strings.Contains(anew.Cause, row.says) || anew.State != before.State {
				t.Errorf("anew: %s, %q", anew.State, anew.Cause)
			}
			// The spent one stays spent, and the one that stands can be resolved.
			if v := s.resolve(before, Reject); v.State != HoldVoid {
				t.Errorf("the spent hold is %s", v.State)
			}
			s.take(c, Reject)
			s.want(s.admit(c), Deny, ReasonRejected)
		})
	}
}

func TestWhileItWaits(t *testing.T) {
	// The payment could still become visible: a person may say that it was paid, or that it is not wanted.
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	s.take(c, MarkPaid)
	s.want(s.admit(c), Replay, "")
	d := s.call("intent-2", "order/10")
	s.lose(d)
	s.take(d, Reject)
	s.want(s.admit(d), Deny, ReasonRejected)
	// R32: the 202 was lost. Until it would be visible, absence says nothing.
	e := s.call("intent-3", "order/11")
	s.lose(e)
	h := s.hold(e)
	if h.State != HoldWaiting || !h.WaitingUntil.Equal(storyStart.Add(storyWait)) {
		t.Fatalf("%s until %s", h.State, h.WaitingUntil)
	}
	s.pass(storyWait - time.Second)
	s.sweep()
	h = s.spent(e, h, s.resolve(h, Release))
	s.pass(time.Second)
	s.sweep()
	if v := s.resolve(h, Release); v.State != HoldResolved {
		t.Fatalf("%s, %q", v.State, v.Effect)
	}
}

func TestMarkPaidIsReplayed(t *testing.T) {
	for name, result := range map[string]string{"a result": `{"id":"re_7","status":"succeeded"}`, "none": ""} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9").on("sess_a/call-1")
			s.lose(c)
			s.resolveWith(s.hold(c), Resolution{Decision: MarkPaid, ProviderReference: "re_7", Result: []byte(result)})
			want := result
			if want == "" {
				want = `{"provider_reference":"re_7","status":"paid"}`
			}
			for _, id := range []string{"intent-1", "intent-2"} {
				a := s.admit(c.under(id))
				s.want(a, Replay, "")
				if a.Response.Status != 200 || string(a.Response.Body) != want || a.Response.Header["Content-Type"][0] != "application/json" || a.Intent.ProviderReference != "re_7" {
					t.Fatalf("%s: %d %s", id, a.Response.Status, a.Response.Body)
				}
			}
		})
	}
}

func TestMarkFailedFreesTheScope(t *testing.T) { // R27
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.loseAndWait(c)
	s.take(c, MarkFailed)
	s.want(s.admit(c), Deny, ReasonMarkedFailed)
	s.send(c.under("intent-2"))
	s.settle(tk, paid("re_1"))
	if r := s.inState(c, Succeeded); !r.RefundOwed {
		t.Fatal("no refund is owed")
	}
}

func TestARejectedUnknownStandsInTheWay(t *testing.T) { // R17
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.lose(c)
	s.take(c, Reject)
	a := s.admit(c.under("intent-2"))
	s.wantHeld(a, ScopeOverlap)
	if a.Matches[0].State != Rejected {
		t.Fatal(s.tellMatches(a))
	}
	s.want(s.admit(c), Deny, ReasonRejected)
}

func TestANarrowerCallOvertakesItsHold(t *testing.T) { // R26
	s := tell(t)
	s.pay(s.call("nine", "order/9"), "re_9")
	both := s.call("both", "order/9", "order/10")
	s.wantHeld(s.admit(both), ScopeOverlap)
	ten := s.call("ten", "order/10")
	s.pay(ten, "re_10")
	s.take(both, Release)
	a := s.admit(both)
	s.wantHeld(a, ScopeOverlap)
	if a.MatchCount != 1 || a.Matches[0].IntentID != "ten" {
		t.Fatalf("held for %s: the release covered the first", s.tellMatches(a))
	}
	// What an intent's releases cover adds up.
	s.take(both, Release)
	s.pay(both, "re_both")
}

func TestAReleaseCoversWhatTheRefusedReserveSaw(t *testing.T) { // R33
	// Between the refused Reserve and the writing of the hold something happens.
	meanwhile := func(t *testing.T, happens func(s *story, inTheWay *Ticket)) (*story, Call) {
		s := tell(t)
		tk := s.send(s.call("in the way", "order/9/item/1"))
		c := s.call("held", "order/9")
		once := sync.Once{}
		s.net.update = func(w store.Write) {
			if w.Key == c.Key.String() {
				once.Do(func() { happens(s, tk) })
			}
		}
		s.wantHeld(s.admit(c), ScopeOverlap)
		s.take(c, Release)
		return s, c
	}
	t.Run("nothing", func(t *testing.T) {
		s, c := meanwhile(t, func(*story, *Ticket) {})
		s.send(c)
	})
	t.Run("the one in the way settles", func(t *testing.T) {
		s, c := meanwhile(t, func(s *story, tk *Ticket) { s.settle(tk, paid("re_1")) })
		a := s.admit(c)
		s.wantHeld(a, ScopeOverlap)
		if a.Matches[0].State != Succeeded || s.hold(c).Number != 2 {
			t.Fatalf("hold %d, %s", s.hold(c).Number, s.tellMatches(a))
		}
		s.take(c, Release)
		s.send(c)
	})
	t.Run("a third one starts", func(t *testing.T) {
		s, c := meanwhile(t, func(s *story, _ *Ticket) { s.send(s.call("third", "order/9/item/2")) })
		a := s.admit(c)
		s.wantHeld(a, ScopeOverlap)
		if a.MatchCount != 1 || a.Matches[0].IntentID != "third" {
			t.Fatal(s.tellMatches(a))
		}
	})
	t.Run("a third one starts and fails", func(t *testing.T) {
		s, c := meanwhile(t, func(s *story, _ *Ticket) { s.settle(s.send(s.call("third", "order/9/item/2")), declined()) })
		s.send(c)
	})
	t.Run("both", func(t *testing.T) {
		s, c := meanwhile(t, func(s *story, tk *Ticket) {
			s.settle(tk, paid("re_1"))
			s.send(s.call("third", "order/9/item/2"))
		})
		if a := s.admit(c); a.MatchCount != 2 {
			t.Fatal(s.tellMatches(a))
		}
	})
	t.Run("after the hold was written", func(t *testing.T) {
		s, c := meanwhile(t, func(*story, *Ticket) {})
		s.send(s.call("third", "order/9/item/2"))
		s.wantHeld(s.admit(c), ScopeOverlap)
	})
}

func TestAHoldForAnotherReasonFreezesNothing(t *testing.T) { // R34
	for name, make := range map[string]func(s *story, c Call){
		"OutcomeUnknown": func(s *story, c Call) { s.loseAndWait(c) },
		"KeyExpired": func(s *story, c Call) {
			s.settle(s.send(c), declined())
			s.pass(storyTTL)
			s.wantHeld(s.admit(c), KeyExpired)
		},
	} {
		for when, before := range map[string]bool{"before": true, "since": false} {
			t.Run(name+", the overlap came "+when, func(t *testing.T) {
				s := tell(t)
				c := s.call("intent-1", "order/9")
				other := s.call("other", "order/9/item/1").by("other")
				pay := func() {
					if a := s.admit(other); a.Verdict == Allow {
						s.settle(a.Ticket, paid("re_o"))
						return
					}
					s.take(other, Release)
					s.pay(other, "re_o")
				}
				make(s, c)
				if before {
					pay()
					s.take(c, Release)
				} else {
					s.take(c, Release)
					pay()
				}
				a := s.admit(c)
				s.wantHeld(a, ScopeOverlap)
				if a.Matches[0].IntentID != "other" {
					t.Fatal(s.tellMatches(a))
				}
				// That hold has shown it, so its release covers it.
				s.take(c, Release)
				s.send(c)
			})
		}
	}
}

func TestAReleaseCoversLineagesOnlyIfTheyWereCompared(t *testing.T) {
	ignore, compare := storyPolicy(), storyPolicy()
	ignore.IgnoreLineage = true
	s := tell(t)
	s.settle(s.sendUnder(s.call("scope", "order/9/item/1"), ignore), paid("re_1"))
	s.settle(s.sendUnder(s.call("lineage", "seat/1").on("sess_a/call-1"), ignore), paid("re_2"))
	c := s.call("intent-1", "order/9").on("sess_a")
	s.wantHeld(s.admitUnder(c, ignore), ScopeOverlap)
	s.take(c, Release)
	a := s.admitUnder(c, compare) // the budget was changed meanwhile
	if a.Verdict != UnknownHold || !slices.Contains(a.Reasons, LineageOverlap) {
		t.Fatalf("%s %v: nobody was shown the lineage", a.Verdict, a.Reasons)
	}
	s.take(c, Release)
	s.sendUnder(c, compare)
}

func TestWhatReleasesCoverAddsUp(t *testing.T) {
	ignore, compare := storyPolicy(), storyPolicy()
	ignore.IgnoreLineage = true
	s := tell(t)
	s.settle(s.sendUnder(s.call("lineage", "seat/1").on("sess_a/call-1"), compare), paid("re_1"))
	c := s.call("intent-1", "order/9").on("sess_a")
	s.wantHeld(s.admitUnder(c, compare), LineageOverlap)
	s.take(c, Release)
	s.settle(s.sendUnder(s.call("scope", "order/9/item/1"), ignore), paid("re_2"))
	s.wantHeld(s.admitUnder(c, ignore), ScopeOverlap)
	s.take(c, Release)
	// The second hold had not compared lineages, so its release does not count; the first one's does.
	a := s.admitUnder(c, compare)
	s.wantHeld(a, ScopeOverlap)
	if a.MatchCount != 1 || a.Matches[0].IntentID != "scope" {
		t.Fatal(s.tellMatches(a))
	}
	s.take(c, Release)
	s.sendUnder(c, compare)
}

func TestAReleasedCallIsSentOnce(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.block(c)
	s.take(c, Release)
	verdicts := make(chan Verdict, 20)
	var wg sync.WaitGroup
	for range cap(verdicts) {
		e := s.process()
		wg.Go(func() {
			a, err := e.Admit(s.ctx, c, storyPolicy())
			if err != nil {
				t.Error(err)
			}
			verdicts <- a.Verdict
		})
	}
	wg.Wait()
	close(verdicts)
	sent := 0
	for v := range verdicts {
		if v == Allow {
			sent++
		} else if v != InFlightNow {
			t.Errorf("told %s", v)
		}
	}
	if sent != 1 {
		t.Fatalf("sent %d times", sent)
	}
}

func TestAHoldGetsANumberAboveForeignObjects(t *testing.T) {
	for _, waiting := range []bool{true, false} {
		s := tell(t)
		c := s.call("intent-1", "order/9")
		if waiting {
			s.lose(c)
		} else {
			s.block(c)
		}
		before := s.hold(c)
		if err := s.Renumber(s.ctx, before.HoldID, 7); err != nil {
			t.Fatal(err)
		}
		after := s.hold(c)
		if after.Number != 8 || after.State != before.State || !slices.Equal(after.Reasons, before.Reasons) || after.MatchCount != before.MatchCount || len(after.Matches) != len(before.Matches) {
			t.Fatalf("%+v became %+v", before, after)
		}
		if v, err := s.Hold(s.ctx, before.HoldID); err != nil || v.State != HoldVoid {
			t.Fatalf("the old number is %s (%v)", v.State, err)
		}
		// Once is enough, and a stale one does nothing.
		for _, id := range []HoldID{after.HoldID, before.HoldID} {
			if err := s.Renumber(s.ctx, id, 7); err != nil {
				t.Fatal(err)
			}
		}
		if got := s.hold(c); got.HoldID != after.HoldID {
			t.Fatalf("hold %d", got.Number)
		}
		if v := s.resolve(before, Reject); v.State != HoldVoid {
			t.Fatalf("a decision on the old number: %s", v.State)
		}
		if waiting {
			continue
		}
		// Its release still covers what was shown.
		s.take(c, Release)
		s.send(c)
	}
}

func TestManyHoldsOfOneRecord(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.block(c)
	first := s.hold(c)
	for n := 1; n <= maxHoldHistory+5; n++ {
		h := s.hold(c)
		if h.Number != n {
			t.Fatalf("hold %d, want %d", h.Number, n)
		}
		s.spent(c, h, s.resolve(h, MarkFailed))
	}
	if r := s.record(c.Key); len(r.Ended) != maxHoldHistory {
		t.Fatalf("%d holds are remembered", len(r.Ended))
	}
	// One that is forgotten is void, never taken.
	if v := s.resolve(first, Release); v.State != HoldVoid {
		t.Fatalf("hold 1 is %s", v.State)
	}
	s.take(c, Release)
	s.send(c)
}

func TestHoldsAreListedPageByPage(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "customer/c1"), "re_1")
	var want []string
	for i := range 300 {
		c := s.call(fmt.Sprintf("held-%03d", i), fmt.Sprint("customer/c1/order/", i))
		s.wantHeld(s.admit(c), ScopeOverlap)
		want = append(want, c.IntentID)
	}
	if got := s.heldIntents(); !slices.Equal(got, want) {
		t.Fatalf("%d are listed of %d", len(got), len(want))
	}
	page, next, err := s.Holds(s.ctx, "")
	if err != nil || next == "" || len(page) == 0 {
		t.Fatalf("%d, %q, %v", len(page), next, err)
	}
	for _, v := range page {
		h := v.Hold
		if h == nil || h.Name != HoldName(v.Key, 1) || h.State != HoldHeld || h.Number != 1 || h.Epoch != s.id.Epoch || h.Nonce == "" || h.MatchCount != 1 || len(h.Matches) != 1 || v.Amount == nil || v.Scope == nil {
			t.Fatalf("%+v of %+v", h, v)
		}
	}
}
