// This file is the relation table, cell by cell: what a call is told when another
// intent has been paid, by their scopes, their lineages and the budget's overlap
// rules; and which states of another intent stand in the way at all.

package guard

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// pair is two scopes or two lineages.
type pair struct{ first, second []string }

var scopePairs = map[string][]pair{
	"equal": {
		{[]string{"customer/c1/order/9"}, []string{"customer/c1/order/9"}},
		{[]string{"order/9", "order/10"}, []string{"order/10", "order/9"}},
	},
	"partial": {
		{[]string{"customer/c1"}, []string{"customer/c1/order/9"}},        // under
		{[]string{"customer/c1/order/9"}, []string{"customer/c1"}},        // over
		{[]string{"customer/c1/order/9"}, []string{"customer"}},           // far over
		{[]string{"order/9", "order/10"}, []string{"order/10", "seat/3"}}, // intersecting
		{[]string{"order/9", "order/10"}, []string{"order/10"}},           // subset
		{[]string{"order/10"}, []string{"order/9", "order/10"}},           // superset
		{[]string{"order/9", "seat/3"}, []string{"seat/3/row", "x"}},      // one nested in one of several
	},
	"disjoint": {
		{[]string{"customer/c1/order/9"}, []string{"customer/c1/order/8"}},
		{[]string{"customer/c1"}, []string{"customer/c10"}},
		{[]string{"customer/c10/order/1"}, []string{"customer/c1"}},
		{[]string{"order/9", "order/10"}, []string{"order/8", "order/11"}},
		{[]string{"order%2F9"}, []string{"order"}}, // an escaped slash parts nothing
	},
}

var lineagePairs = map[string][]pair{
	"same": {{[]string{"sess_a/plan-2/call-4"}, []string{"sess_a/plan-2/call-4"}}},
	"ancestor": {
		{[]string{"sess_a/plan-2"}, []string{"sess_a/plan-2/call-4"}},
		{[]string{"sess_a/plan-2/call-4"}, []string{"sess_a"}},
	},
	"unrelated": {
		{[]string{"sess_a/plan-2/call-4"}, []string{"sess_a/plan-2/call-5"}}, // siblings
		{[]string{"sess_a"}, []string{"sess_ab"}},
		{[]string{"sess_a"}, []string{"sess_b"}},
		{[]string{""}, []string{"sess_a"}},
		{[]string{"sess_a"}, []string{""}},
		{[]string{""}, []string{""}}, // two that are absent are not the same
	},
}

// cell is what the table says; nil reasons: ALLOW.
type cell struct {
	compared []Reason
	ignored  []Reason // lineage: Ignore
}

var relationTable = map[string]map[string]cell{
	"equal": {
		"same":      {[]Reason{ScopeOverlap, LineageOverlap}, []Reason{ScopeOverlap}},
		"ancestor":  {[]Reason{ScopeOverlap, LineageOverlap}, []Reason{ScopeOverlap}},
		"unrelated": {[]Reason{ScopeOverlap}, []Reason{ScopeOverlap}},
	},
	"partial": {
		"same":      {[]Reason{ScopeOverlap, LineageOverlap}, []Reason{ScopeOverlap}},
		"ancestor":  {[]Reason{ScopeOverlap, LineageOverlap}, []Reason{ScopeOverlap}},
		"unrelated": {[]Reason{ScopeOverlap}, []Reason{ScopeOverlap}},
	},
	"disjoint": {
		"same":      {[]Reason{LineageOverlap}, nil},
		"ancestor":  {[]Reason{LineageOverlap}, nil},
		"unrelated": {nil, nil},
	},
}

func TestRelationTable(t *testing.T) {
	for scopes, scopeCases := range scopePairs {
		for lineages, lineageCases := range lineagePairs {
			for i, sp := range scopeCases {
				for j, lp := range lineageCases {
					t.Run(fmt.Sprintf("%s %d/%s %d", scopes, i, lineages, j), func(t *testing.T) {
						s := tell(t)
						for _, ignore := range []bool{false, true} {
							for _, holdExact := range []bool{false, true} {
								for _, again := range []bool{true, false} {
									s.relate(scopes, lineages, sp, lp, ignore, holdExact, again)
								}
							}
						}
					})
				}
			}
		}
	}
}

// relate pays one intent and calls another, in a budget of their own. again: with the same fingerprint.
func (s *story) relate(scopes, lineages string, sp, lp pair, ignore, holdExact, again bool) {
	s.t.Helper()
	p := storyPolicy()
	p.IgnoreLineage, p.HoldExactMatch = ignore, holdExact
	p.Budget = fmt.Sprintf("ignore lineage: %t, hold exact match: %t, again: %t", ignore, holdExact, again)
	first := s.call("first, "+p.Budget, sp.first...).on(lp.first[0])
	second := s.call("second, "+p.Budget, sp.second...).on(lp.second[0])
	if !again {
		second.Fingerprint = "sha256:another"
	}
	s.settle(s.sendUnder(first, p), paid("re_1"))
	a := s.admitUnder(second, p)

	want := relationTable[scopes][lineages].compared
	if ignore {
		want = relationTable[scopes][lineages].ignored
	}
	exact := scopes == "equal" && lineages == "same" && again
	switch {
	case exact && holdExact:
		s.wantHeld(a, ExactMatch)
	case exact:
		s.wantReplay(a, first.IntentID, "re_1")
		s.inState(second, None)
		return
	case want == nil:
		s.want(a, Allow, "")
		return
	default:
		s.wantHeld(a, want...)
	}
	r := s.inState(second, Held)
	if len(r.Attempts) != 0 || a.MatchCount != 1 || len(a.Matches) != 1 {
		s.t.Fatalf("%d attempts, %s", len(r.Attempts), s.tellMatches(a))
	}
	m := a.Matches[0]
	if m.IntentID != first.IntentID || m.Caller != storyCaller || m.Tool != storyTool || m.State != Succeeded || m.Relation != string(a.Reasons[0]) || m.Amount == nil || m.Amount.Value != "49.99" {
		s.t.Fatalf("the match is %+v", m)
	}
}

func TestExactMatchIsOfOneToolAndOneCaller(t *testing.T) {
	for name, change := range map[string]func(*Call){
		"another caller": func(c *Call) { c.Caller, c.CallerUID = "system:serviceaccount:support:other", "uid-2" },
		"another tool":   func(c *Call) { c.Tool = "charge" },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			first := s.call("first", "order/9").on("sess_a/call-4")
			s.pay(first, "re_1")
			s.wantHeld(s.admit(first.under("second").with(change)), ScopeOverlap, LineageOverlap)
			// The same ID is another intent there.
			s.wantHeld(s.admit(first.under("first").with(change)), ScopeOverlap, LineageOverlap)
		})
	}
}

func TestAnotherServiceAccountOfTheSameNameIsAnotherCaller(t *testing.T) {
	s := tell(t)
	again := func(c *Call) { c.CallerUID = "uid-2" }
	first := s.call("first", "order/9").on("sess_a/call-4")
	s.pay(first, "re_1")
	// It gets nobody else's answer,
	s.wantHeld(s.admit(first.under("second").with(again)), ScopeOverlap, LineageOverlap)
	// nor somebody else's hold.
	s.pay(s.call("cause", "order/10/item/1"), "re_2")
	held := s.call("held", "order/10")
	s.wantHeld(s.admit(held), ScopeOverlap)
	if a := s.admit(held.under("other").with(again)); a.Intent.IntentID != "other" {
		t.Fatalf("shown the hold of %s", a.Intent.IntentID)
	}
}

func TestIntentsAreComparedWithinABudget(t *testing.T) {
	s := tell(t)
	first := s.call("first", "order/9").on("sess_a/call-4")
	s.pay(first, "re_1")
	elsewhere := storyPolicy()
	elsewhere.Budget = "other"
	s.want(s.admitUnder(first.under("second"), elsewhere), Allow, "") // intents are compared within a budget
}

func TestWhatStandsInTheWay(t *testing.T) {
	type stand struct {
		name string
		make func(s *story, c Call)
		held bool
	}
	never := func(s *story, c Call) {
		s.pay(s.call("cause", "order/9/part"), "re_c")
		s.wantHeld(s.admit(c), ScopeOverlap)
		// What held it is marked as over for the rest of the story by its window.
		s.pass(storyWindow)
	}
	retry := func(s *story, c Call) {
		s.settle(s.send(c), unreachable())
	}
	for _, st := range []stand{
		{"in flight", func(s *story, c Call) { s.send(c) }, true},
		{"succeeded", func(s *story, c Call) { s.pay(c, "re_1") }, true},
		{"succeeded, the window is almost over", func(s *story, c Call) { s.pay(c, "re_1"); s.pass(storyWindow - time.Second) }, true},
		{"succeeded, a tombstone within the window", func(s *story, c Call) {
			s.pay(c, "re_1")
			s.pass(storyTTL + time.Hour)
			s.sweep()
			s.inState(c, Tombstone)
		}, true},
		{"succeeded, the window is over", func(s *story, c Call) { s.pay(c, "re_1"); s.pass(storyWindow) }, false},
		{"failed", func(s *story, c Call) { s.settle(s.send(c), declined()) }, false},
		{"retryable", retry, false},
		{"held, never sent", never, false},
		{"released, never sent", func(s *story, c Call) { never(s, c); s.take(c, Release) }, false},
		{"rejected, never sent", func(s *story, c Call) { never(s, c); s.take(c, Reject) }, false},
		{"marked paid, never sent", func(s *story, c Call) { never(s, c); s.take(c, MarkPaid) }, true},
		{"held, unknown", func(s *story, c Call) { s.lose(c) }, true},
		{"held, unknown for longer than the window", func(s *story, c Call) { s.lose(c); s.pass(10 * storyWindow); s.sweep() }, true}, // R20
		{"held, and the attempt turned out to have failed", func(s *story, c Call) { s.settle(s.lose(c), declined()) }, false},
		{"released, unknown", func(s *story, c Call) { s.loseAndWait(c); s.take(c, Release) }, true},
		{"retryable, and an earlier attempt is unknown", func(s *story, c Call) {
			s.loseAndWait(c)
			s.take(c, Release)
			s.settle(s.send(c), unreachable())
		}, true},
		{"refused, and an earlier attempt is unknown", func(s *story, c Call) { // R18, by a release
			s.loseAndWait(c)
			s.take(c, Release)
			s.wantHeld(s.settle(s.send(c), declined()), OutcomeUnknown)
		}, true},
		{"marked failed", func(s *story, c Call) { s.loseAndWait(c); s.take(c, MarkFailed) }, false},
		{"marked paid", func(s *story, c Call) { s.lose(c); s.take(c, MarkPaid) }, true},
		{"rejected, unknown", func(s *story, c Call) { s.lose(c); s.take(c, Reject) }, true}, // R17
		{"rejected, unknown, the window from the rejection is almost over", func(s *story, c Call) {
			s.lose(c)
			s.pass(storyWindow)
			s.take(c, Reject)
			s.pass(storyWindow - time.Second)
		}, true},
		{"rejected, unknown, the window from the rejection is over", func(s *story, c Call) {
			s.lose(c)
			s.take(c, Reject)
			s.pass(storyWindow)
		}, false},
	} {
		t.Run(st.name, func(t *testing.T) {
			s := tell(t)
			first := s.call("first", "order/9")
			st.make(s, first)
			// Another caller: a loop of the same one is answered with its own hold.
			a := s.admit(first.under("second").with(func(c *Call) { c.Caller, c.CallerUID = "system:serviceaccount:support:other", "uid-2" }))
			if st.held {
				s.wantHeld(a, ScopeOverlap)
			} else {
				s.want(a, Allow, "")
			}
		})
	}
}

func TestAnotherIdentityBlockIsHeldByRecipientAndAmount(t *testing.T) { // R25
	for _, row := range []struct {
		name   string
		change func(*Call)
		held   []Reason
	}{
		{"the expressions changed, the order has another name", func(c *Call) {}, []Reason{IdentityChanged}},
		{"and the fingerprint", func(c *Call) { c.Fingerprint = "sha256:another" }, []Reason{IdentityChanged}},
		{"and another caller", func(c *Call) { c.Caller, c.CallerUID = "system:serviceaccount:support:other", "uid-2" }, []Reason{IdentityChanged}},
		{"the scopes still meet", func(c *Call) { c.Scope = c.Scope[:1]; c.Scope[0] = "order/9" }, []Reason{ScopeOverlap, IdentityChanged}},
		{"another amount", func(c *Call) { c.Amount.Value = "50" }, nil},
		{"another currency", func(c *Call) { c.Amount.Currency = "EUR" }, nil},
		{"no amount", func(c *Call) { c.Amount = nil }, nil},
		{"another recipient", func(c *Call) { c.Recipient = "c2" }, nil},
		{"another tool", func(c *Call) { c.Tool = "charge" }, nil},
		{"the same expressions", func(c *Call) { c.IdentityHash = "identity-1" }, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			s.pay(s.call("first", "order/9"), "re_1")
			second := s.call("second", "purchase/9").with(func(c *Call) { c.IdentityHash = "identity-2" }).with(row.change)
			a := s.admit(second)
			if row.held == nil {
				s.want(a, Allow, "")
				return
			}
			s.wantHeld(a, row.held...)
			// A person may allow it, and then it is sent.
			s.take(second, Release)
			s.send(second)
		})
	}
	t.Run("the window is over", func(t *testing.T) {
		s := tell(t)
		s.pay(s.call("first", "order/9"), "re_1")
		s.pass(storyWindow)
		s.want(s.admit(s.call("second", "purchase/9").with(func(c *Call) { c.IdentityHash = "identity-2" })), Allow, "")
	})
}

func TestManySettledUnderOnePath(t *testing.T) { // R30
	const many = 10_000
	s := tell(t)
	next := make(chan int, many)
	for i := range many {
		next <- i
	}
	close(next)
	failed := make(chan error, 256)
	for range cap(failed) {
		go func() {
			for i := range next {
				c := s.call(fmt.Sprint("paid-", i), fmt.Sprint("customer/c1/order/", i))
				if err := s.remember(c); err != nil {
					failed <- err
					return
				}
			}
			failed <- nil
		}()
	}
	for range cap(failed) {
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}
	// One of them is unknown: it must be among those shown, whatever its age.
	s.pass(time.Hour)
	unknown := s.call("unknown", "customer/c1/order/unknown")
	s.lose(unknown)
	s.pass(time.Hour)
	for i := range 100 {
		s.pay(s.call(fmt.Sprint("new-", i), fmt.Sprint("customer/c1/new/", i)), "re")
	}

	began := time.Now()
	c := s.call("broad", "customer/c1")
	a := s.admit(c)
	took := time.Since(began)
	s.wantHeld(a, ScopeOverlap)
	if a.MatchCount != many+101 || len(a.Matches) != MaxMatches {
		t.Fatalf("%d matches shown, %d counted", len(a.Matches), a.MatchCount)
	}
	if a.Matches[0].IntentID != "unknown" || a.Matches[1].IntentID != "new-99" || a.Matches[2].IntentID != "new-98" {
		t.Fatalf("first come %s, %s, %s: want what is unsettled, then what is newest", a.Matches[0].IntentID, a.Matches[1].IntentID, a.Matches[2].IntentID)
	}
	if took > 5*time.Second {
		t.Errorf("the call took %s", took)
	}
	r := s.inState(c, Held)
	if len(r.Current.Matches) != MaxMatches || r.Current.MatchCount != many+101 {
		t.Fatalf("the hold keeps %d matches of %d", len(r.Current.Matches), r.Current.MatchCount)
	}
	// One release covers all of them, shown or not.
	s.take(c, Release)
	s.send(c)
}

// remember writes a paid intent past the calls that would have paid it.
func (s *story) remember(c Call) error {
	now := s.time.store()
	r := s.begin(nil, c, storyPolicy(), now)
	r.last().learn(Result{Outcome: AttemptSucceeded, Response: &Response{Status: 200}}, now)
	r.succeed(r.last(), now)
	res, _, err := s.update(s.ctx, pending{to: r, on: onLateSuccess, now: now, nonce: s.o.Nonce()}, s.soon())
	if err == nil && res.Outcome != store.Written {
		err = fmt.Errorf("%s: %s", c.IntentID, res.Outcome)
	}
	return err
}

func TestReasonsBeyondTheHeaders(t *testing.T) {
	// 64 unsettled ones meet by their scope and are shown first. One that was paid
	// long ago meets by its lineage alone: it is not among the headers.
	s := tell(t)
	s.pay(s.call("related", "seat/1").on("sess_a"), "re_1")
	for i := range store.MaxHits {
		s.send(s.call(fmt.Sprint("unsettled-", i), fmt.Sprint("order/9/item/", i)))
	}
	a := s.admit(s.call("broad", "order/9").on("sess_a/call-4"))
	s.wantHeld(a, ScopeOverlap, LineageOverlap)
	if a.MatchCount != store.MaxHits+1 {
		t.Fatalf("%d in the way", a.MatchCount)
	}
}
