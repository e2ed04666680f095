// This file is what a call is told before anything is sent: by the record of its own
// ID, by a call that it repeats under another ID, by a hold that it has already, and
// by the limits on holds and on attempts.

package guard

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// lives are the states that a record can be in when its ID comes again.
var lives = []struct {
	name  string
	state State
	make  func(s *story, c Call)
}{
	{"in flight", InFlight, func(s *story, c Call) { s.send(c) }},
	{"retryable", Retryable, func(s *story, c Call) { s.settle(s.send(c), unreachable()) }},
	{"held, unknown", Held, func(s *story, c Call) { s.lose(c) }},
	{"held, never sent", Held, func(s *story, c Call) { s.block(c) }},
	{"released", Released, func(s *story, c Call) { s.block(c); s.take(c, Release) }},
	{"succeeded", Succeeded, func(s *story, c Call) { s.pay(c, "re_1") }},
	{"failed", Failed, func(s *story, c Call) { s.settle(s.send(c), declined()) }},
	{"rejected", Rejected, func(s *story, c Call) { s.lose(c); s.take(c, Reject) }},
	{"tombstone", Tombstone, func(s *story, c Call) { s.pay(c, "re_1"); s.pass(storyTTL); s.sweep() }},
}

// block has the call held by a payment for part of the same thing.
func (s *story) block(c Call) {
	s.t.Helper()
	s.pay(s.call("blocker of "+c.IntentID, string(c.Scope[0])+"/part"), "re_blocker")
	s.wantHeld(s.admit(c), ScopeOverlap)
}

func TestSameIDWithAnotherRequestIsAConflict(t *testing.T) {
	changes := []struct {
		name   string
		change func(*Call)
		reason Reason
	}{
		{"fingerprint", func(c *Call) { c.Fingerprint = "sha256:another" }, ReasonRequest},
		{"amount", func(c *Call) { c.Amount.Value = "50" }, ReasonRequest},
		{"no amount", func(c *Call) { c.Amount = nil }, ReasonRequest},
		{"currency", func(c *Call) { c.Amount.Currency = "EUR" }, ReasonRequest},
		{"recipient", func(c *Call) { c.Recipient = "c2" }, ReasonRequest},
		{"scope", func(c *Call) { c.Scope = c.Scope[:1]; c.Scope[0] = "order/8" }, ReasonRequest},
		{"wider scope", func(c *Call) { c.Scope = append(c.Scope, "order/99") }, ReasonRequest},
		{"caller's UID", func(c *Call) { c.CallerUID = "uid-2" }, ReasonCaller},
		{"caller's UID and amount", func(c *Call) { c.CallerUID, c.Amount.Value = "uid-2", "50" }, ReasonCaller},
		// Under another identity block fingerprints cannot be compared: scope, amount and recipient decide.
		{"identity and amount", func(c *Call) { c.IdentityHash, c.Amount.Value = "identity-2", "50" }, ReasonRequest},
		{"identity and recipient", func(c *Call) { c.IdentityHash, c.Recipient = "identity-2", "c2" }, ReasonRequest},
		{"identity and scope", func(c *Call) { c.IdentityHash = "identity-2"; c.Scope = append(c.Scope, "order/99") }, ReasonRequest},
	}
	for _, life := range lives {
		t.Run(life.name, func(t *testing.T) {
			for _, change := range changes {
				t.Run(change.name, func(t *testing.T) {
					s := tell(t)
					c := s.call("intent-1", "order/9")
					life.make(s, c)
					before := s.inState(c, life.state)
					s.pass(3 * time.Second) // a backoff is over
					other := c
					other.Scope = slices.Clone(c.Scope)
					a := s.admit(other.with(change.change))
					s.want(a, Conflict, change.reason)
					if after := s.record(c.Key); after.version != before.version {
						t.Fatalf("the record was written: %s", after.State)
					}
					if change.reason == ReasonCaller && (a.Intent.State != None || a.Intent.Amount != nil || a.Intent.Attempts != nil || a.Response != nil) {
						t.Fatalf("another caller is shown the record: %+v", a.Intent)
					}
				})
			}
		})
	}
}

func TestSameIDUnderAnotherIdentityBlockIsTheSameIntent(t *testing.T) {
	again := func(c Call) Call {
		return c.with(func(c *Call) { c.IdentityHash, c.Fingerprint, c.Lineage = "identity-2", "sha256:another", "sess_b" })
	}
	s := tell(t)
	c := s.call("intent-1", "order/9")
	tk := s.send(c)
	s.want(s.admit(again(c)), InFlightNow, ReasonInFlight)
	s.settle(tk, paid("re_1"))
	s.wantReplay(s.admit(again(c)), "intent-1", "re_1")
}

func TestSameIDIsAnsweredByItsState(t *testing.T) {
	want := map[string]func(s *story, c Call, a Answer){
		"in flight": func(s *story, c Call, a Answer) {
			s.want(a, InFlightNow, ReasonInFlight)
			if a.RetryAfter != 2*time.Second {
				s.t.Fatalf("retry after %s", a.RetryAfter)
			}
		},
		"retryable":        func(s *story, c Call, a Answer) { s.want(a, Allow, "") },
		"held, unknown":    func(s *story, c Call, a Answer) { s.wantHeld(a, OutcomeUnknown) },
		"held, never sent": func(s *story, c Call, a Answer) { s.wantHeld(a, ScopeOverlap) },
		"released":         func(s *story, c Call, a Answer) { s.want(a, Allow, "") },
		"succeeded":        func(s *story, c Call, a Answer) { s.wantReplay(a, "intent-1", "re_1") },
		"failed": func(s *story, c Call, a Answer) {
			s.want(a, Replay, "")
			if a.Response == nil || a.Response.Status != 402 || string(a.Response.Body) != `{"error":"declined"}` {
				s.t.Fatalf("%+v", a.Response)
			}
		},
		"rejected":  func(s *story, c Call, a Answer) { s.want(a, Deny, ReasonRejected) },
		"tombstone": func(s *story, c Call, a Answer) { s.wantHeld(a, KeyExpired) },
	}
	for _, life := range lives {
		t.Run(life.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			life.make(s, c)
			s.pass(3 * time.Second)
			// Whoever asks without calling is told the same, and changes nothing.
			version := s.record(c.Key).version
			poll, err := s.Poll(s.ctx, c.Key)
			if err != nil || s.record(c.Key).version != version || poll.Ticket != nil {
				t.Fatalf("poll: %+v, %v, version %d became %d", poll, err, version, s.record(c.Key).version)
			}
			// So it is by a process that has just started (R07).
			s.restart()
			a := s.admit(c)
			want[life.name](s, c, a)
			if poll.Verdict != a.Verdict || poll.Reason != a.Reason {
				t.Fatalf("the poll said %s %q, the call %s %q", poll.Verdict, poll.Reason, a.Verdict, a.Reason)
			}
		})
	}
	s := tell(t)
	if a, err := s.Poll(s.ctx, s.call("nobody", "order/9").Key); err != nil || a.Intent.Exists || a.Verdict != "" {
		t.Fatalf("poll of an unknown intent: %+v, %v", a, err)
	}
}

func TestOneIDOfTwoToolsAndTwoCallers(t *testing.T) { // K03
	s := tell(t)
	c := s.call("k-1", "order/9")
	s.pay(c, "re_1")
	for i, change := range []func(*Call){
		func(c *Call) { c.Tool = "charge" },
		func(c *Call) { c.Caller = "system:serviceaccount:support:other" },
		func(c *Call) { c.Namespace = "sales" },
		func(c *Call) { c.IntentID = "K-1" },
	} {
		other := c.with(change)
		other.Scope = scopeOf(t, fmt.Sprint("thing/", i))
		s.pay(other, fmt.Sprint("re_other_", i))
		s.wantReplay(s.admit(other), other.IntentID, fmt.Sprint("re_other_", i))
	}
	s.wantReplay(s.admit(c), "k-1", "re_1")
}

func TestAToolThatIsMadeAgainFindsItsMemory(t *testing.T) { // R24
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.pay(c, "re_1")
	s.restart()
	p := storyPolicy()
	p.Timeout, p.TTL, p.Window, p.SettleAfter = 20*time.Second, time.Hour, 2*time.Hour, time.Second
	s.wantReplay(s.admitUnder(c, p), "intent-1", "re_1")
}

func TestAMismatchDoesNotSpoilTheReplay(t *testing.T) { // R08
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.pay(c, "re_1")
	s.want(s.admit(c.with(func(c *Call) { c.Fingerprint = "sha256:another" })), Conflict, ReasonRequest)
	s.wantReplay(s.admit(c), "intent-1", "re_1")
}

func TestAReplayKeepsStatusHeadersAndBytes(t *testing.T) { // R09
	s := tell(t)
	c := s.call("intent-1", "order/9")
	body := []byte("\x00\xff not JSON at all\r\n")
	res := Result{Outcome: AttemptSucceeded, Response: &Response{
		Status: 207, Header: map[string][]string{"X-Two": {"b", "a"}, "Content-Type": {"text/plain"}}, Body: body,
		Size: 5 << 20, Digest: "sha256:whole", Truncated: true,
	}}
	s.settle(s.send(c), res)
	s.restart()
	got := s.admit(c).Response
	if got == nil || got.Status != 207 || !slices.Equal(got.Header["X-Two"], []string{"b", "a"}) || string(got.Body) != string(body) || got.Size != 5<<20 || got.Digest != "sha256:whole" || !got.Truncated {
		t.Fatalf("replayed %+v", got)
	}
}

func TestADeclineIsFinalForItsIDAlone(t *testing.T) { // K11
	s := tell(t)
	c := s.call("intent-1", "order/9").on("sess_a/call-1")
	s.want(s.settle(s.send(c), declined()), Allow, "")
	for range 3 {
		a := s.admit(c)
		s.want(a, Replay, "")
		if a.Response.Status != 402 {
			t.Fatalf("status %d", a.Response.Status)
		}
	}
	s.send(c.under("intent-2"))
}

func TestAReleaseIsSpentByItsPayment(t *testing.T) { // A05
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.block(c)
	h := s.hold(c)
	s.resolve(h, Release)
	s.pay(c, "re_1")
	s.restart()
	s.wantReplay(s.admit(c), "intent-1", "re_1")
	if v := s.resolve(h, Release); v.State != HoldResolved {
		t.Fatalf("the old hold is %s", v.State)
	}
	s.wantReplay(s.admit(c), "intent-1", "re_1")
}

func TestAReleaseIsOfTheArgumentsThatThePersonSaw(t *testing.T) { // A06
	s := tell(t)
	c := s.call("intent-1", "order/9")
	s.block(c)
	s.take(c, Release)
	s.want(s.admit(c.with(func(c *Call) { c.Amount.Value = "4999" })), Conflict, ReasonRequest)
	s.want(s.admit(c.with(func(c *Call) { c.Fingerprint = "sha256:another" })), Conflict, ReasonRequest)
	s.inState(c, Released)
	s.send(c)
}

func TestAnAgentThatMintsANewIDForEachRetry(t *testing.T) { // A12, R20
	s := tell(t)
	c := s.call("key-1", "order/9")
	s.lose(c)
	for _, id := range ids("key-", 5)[1:] {
		a := s.admit(c.under(id))
		s.wantHeld(a, ScopeOverlap)
		if a.MatchCount != 1 || a.Matches[0].IntentID != "key-1" || a.Matches[0].State != Held {
			t.Fatal(s.tellMatches(a))
		}
	}
	if got := s.heldIntents(); !slices.Equal(got, []string{"key-1", "key-2"}) {
		t.Fatalf("held: %v: a loop must have one hold", got)
	}
	// With the lineage unchanged it is the same call, and is shown the first one's hold.
	d := s.call("key-a", "order/10").on("sess_a/call-1")
	s.lose(d)
	a := s.admit(d.under("key-b"))
	s.wantHeld(a, OutcomeUnknown)
	if a.Intent.IntentID != "key-a" {
		t.Fatalf("shown the hold of %s", a.Intent.IntentID)
	}
	s.inState(d.under("key-b"), None)
}

func TestAnExactMatchIsAnsweredByTheFirst(t *testing.T) {
	first := func(s *story) Call { return s.call("first", "order/9").on("sess_a/call-4") }
	t.Run("paid", func(t *testing.T) {
		s := tell(t)
		s.pay(first(s), "re_1")
		s.wantReplay(s.admit(first(s).under("second")), "first", "re_1")
		s.inState(first(s).under("second"), None)
	})
	t.Run("in flight", func(t *testing.T) {
		s := tell(t)
		s.send(first(s))
		a := s.admit(first(s).under("second"))
		s.want(a, InFlightNow, ReasonInFlight)
		if a.Intent.IntentID != "first" || a.RetryAfter <= 0 {
			t.Fatalf("%s, retry after %s", a.Intent.IntentID, a.RetryAfter)
		}
		s.inState(first(s).under("second"), None)
	})
	t.Run("in flight, and its lease is over", func(t *testing.T) {
		s := tell(t)
		s.send(first(s))
		s.pass(storyLease + storyGrace)
		a := s.admit(first(s).under("second"))
		s.wantHeld(a, OutcomeUnknown)
		if a.Intent.IntentID != "first" {
			t.Fatalf("shown the hold of %s", a.Intent.IntentID)
		}
		s.inState(first(s).under("second"), None)
	})
	t.Run("unknown", func(t *testing.T) {
		s := tell(t)
		s.lose(first(s))
		a := s.admit(first(s).under("second"))
		s.wantHeld(a, OutcomeUnknown)
		if a.Intent.IntentID != "first" || a.Hold != HoldName(first(s).Key, 1) {
			t.Fatalf("shown hold %s of %s", a.Hold, a.Intent.IntentID)
		}
		s.inState(first(s).under("second"), None)
	})
	for _, swept := range []bool{true, false} {
		t.Run(fmt.Sprintf("the answer is gone, swept: %t", swept), func(t *testing.T) {
			s := tell(t)
			s.pay(first(s), "re_1")
			s.pass(storyTTL)
			if swept {
				s.sweep()
			}
			s.wantHeld(s.admit(first(s).under("second")), ExactMatch)
		})
	}
	t.Run("retryable after an attempt that is unknown", func(t *testing.T) {
		s := tell(t)
		s.loseAndWait(first(s))
		s.take(first(s), Release)
		s.settle(s.send(first(s)), unreachable())
		s.wantHeld(s.admit(first(s).under("second")), ScopeOverlap)
	})
	t.Run("absent lineages are not the same", func(t *testing.T) {
		s := tell(t)
		s.pay(s.call("first", "order/9"), "re_1")
		s.wantHeld(s.admit(s.call("second", "order/9")), ScopeOverlap)
	})
}

func TestTheLatestSuccessWinsOverAllOtherHits(t *testing.T) {
	s := tell(t)
	strict := storyPolicy()
	strict.HoldExactMatch = true
	c := s.call("first", "order/9").on("sess_a/call-4")
	s.pay(c, "re_1")
	s.pass(time.Minute)

	// The same call, allowed by a person: a second payment.
	second := c.under("second")
	s.wantHeld(s.admitUnder(second, strict), ExactMatch)
	s.take(second, Release)
	s.settle(s.sendUnder(second, strict), paid("re_2"))
	s.pass(time.Minute)
	s.wantReplay(s.admit(c.under("a")), "second", "re_2")

	// And again, now in flight; and other calls for the same order, unknown and in flight.
	third := c.under("third")
	s.wantHeld(s.admitUnder(third, strict), ExactMatch)
	s.take(third, Release)
	inFlight := s.sendUnder(third, strict)
	other := c.under("other").with(func(c *Call) { c.Fingerprint, c.Lineage = "sha256:another", "" })
	s.wantHeld(s.admit(other), ScopeOverlap)
	s.take(other, Release)
	s.lose(other)
	s.pass(time.Second)
	s.wantReplay(s.admit(c.under("b")), "second", "re_2")

	s.settle(inFlight, paid("re_3"))
	s.wantReplay(s.admit(c.under("c")), "third", "re_3")
	for _, id := range []string{"a", "b", "c"} {
		s.inState(c.under(id), None)
	}
}

func TestALoopIsShownTheHoldThatItHas(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9/item/1"), "re_1")
	c := s.call("try-1", "order/9")
	s.wantHeld(s.admit(c), ScopeOverlap)
	for i, id := range ids("try-", 50)[1:] {
		// Whatever else it says, it is the same tool and caller for the same thing.
		again := c.under(id).with(func(c *Call) {
			c.Fingerprint, c.Lineage = fmt.Sprint("sha256:", i), ""
			c.Amount.Value = fmt.Sprint(50 + i)
		})
		a := s.admit(again)
		s.wantHeld(a, ScopeOverlap)
		if a.Intent.IntentID != "try-1" || a.Hold != HoldName(c.Key, 1) {
			t.Fatalf("shown hold %s of %s", a.Hold, a.Intent.IntentID)
		}
		s.inState(again, None)
	}
	if got := s.heldIntents(); !slices.Equal(got, []string{"try-1"}) {
		t.Fatalf("held: %v", got)
	}
	// Others have holds of their own.
	s.wantHeld(s.admit(c.under("x").with(func(c *Call) { c.Caller = "system:serviceaccount:support:other" })), ScopeOverlap)
	s.wantHeld(s.admit(c.under("y").with(func(c *Call) { c.Tool = "charge" })), ScopeOverlap)
	s.wantHeld(s.admit(s.call("z", "order")), ScopeOverlap)
	if got := s.heldIntents(); !slices.Equal(got, []string{"try-1", "x", "y", "z"}) {
		t.Fatalf("held: %v", got)
	}
	// Once the hold is cleared a new one may come.
	s.take(c, Reject)
	a := s.admit(c.under("try-again"))
	s.wantHeld(a, ScopeOverlap)
	if a.Intent.IntentID != "try-again" {
		t.Fatalf("shown the hold of %s", a.Intent.IntentID)
	}
}

func TestALoopIsShownTheNewestHold(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9/item/1"), "re_1")
	one, two := s.call("one", "order/9"), s.call("two", "order/9")
	s.wantHeld(s.admit(one), ScopeOverlap)
	s.take(one, Release)
	s.pass(time.Second)
	s.wantHeld(s.admit(two), ScopeOverlap) // nothing is held any more: its own
	s.pass(time.Second)
	if a := s.admit(one.under("three")); a.Intent.IntentID != "two" {
		t.Fatalf("shown the hold of %s", a.Intent.IntentID)
	}
	// A twin's hold does not stop one's own release, and comes anew is newest.
	s.pay(s.call("late", "order/9/item/2"), "re_2")
	s.pass(time.Second)
	s.wantHeld(s.admit(one), ScopeOverlap)
	s.pass(time.Second)
	if a := s.admit(one.under("four")); a.Intent.IntentID != "one" || a.Hold != HoldName(one.Key, 2) {
		t.Fatalf("shown hold %s of %s", a.Hold, a.Intent.IntentID)
	}
}

func TestTooManyHolds(t *testing.T) {
	s := tell(t)
	p := storyPolicy()
	p.MaxHeld, p.MaxHeldPerCaller = 3, 2
	other := func(c Call) Call { return c.with(func(c *Call) { c.Caller = "system:serviceaccount:support:other" }) }
	s.settle(s.sendUnder(s.call("paid", "customer/c1"), p), paid("re_1"))
	var n int
	fresh := func() Call { n++; return s.call(fmt.Sprint("try-", n), fmt.Sprint("customer/c1/order/", n)) }
	held := func(want int) {
		t.Helper()
		if got, err := s.HeldCount(s.ctx, p.Budget); err != nil || got != want {
			t.Fatalf("%d are held, want %d (%v)", got, want, err)
		}
	}
	tooMany := func(c Call) {
		t.Helper()
		a := s.admitUnder(c, p)
		s.want(a, Deny, ReasonTooManyHolds)
		if a.RetryAfter <= 0 || a.MatchCount != 1 || !slices.Equal(a.Reasons, []Reason{ScopeOverlap}) {
			t.Fatalf("%+v", a)
		}
	}
	first, second := fresh(), fresh()
	s.wantHeld(s.admitUnder(first, p), ScopeOverlap)
	s.wantHeld(s.admitUnder(second, p), ScopeOverlap)
	held(2)
	denied := fresh()
	tooMany(denied) // this caller's
	s.inState(denied, None)
	theirs := other(fresh())
	s.wantHeld(s.admitUnder(theirs, p), ScopeOverlap)
	held(3)
	tooMany(other(fresh())) // the budget's

	// What was sent can always be held, and does not count.
	free := s.call("free", "elsewhere")
	s.settle(s.sendUnder(free, p), lost())
	s.inState(free, Held)
	retry := s.call("retry", "shop/1")
	s.settle(s.sendUnder(retry, p), unreachable())
	s.settle(s.sendUnder(s.call("taken", "shop/1/item"), p), paid("re_2"))
	s.pass(2 * time.Second)
	s.wantHeld(s.admitUnder(retry, p), ScopeOverlap)
	held(3)

	// Calls that need no hold go on.
	s.settle(s.sendUnder(s.call("plain", "shop/2"), p), paid("re_3"))

	// The count goes back on every way out of Held, and one more can be held each time.
	for _, way := range []Decision{Release, Reject, MarkPaid} {
		s.take(first, way)
		held(2)
		first = fresh()
		s.wantHeld(s.admitUnder(first, p), ScopeOverlap)
		held(3)
	}
	// A decision that is spent, and a new number, leave it as it is.
	h := s.hold(first)
	s.spent(first, h, s.resolve(h, MarkFailed))
	held(3)
	if err := s.Renumber(s.ctx, s.hold(first).HoldID, 9); err != nil {
		t.Fatal(err)
	}
	held(3)
	// A release that comes to nothing counts again; while there is no room it is told so and stays released.
	s.take(first, Release)
	held(2)
	part := other(s.call("part", string(first.Scope[0])+"/part"))
	s.wantHeld(s.admitUnder(part, p), ScopeOverlap)
	s.take(part, Release)
	s.settle(s.sendUnder(part, p), paid("re_5"))
	beside := fresh()
	s.wantHeld(s.admitUnder(beside, p), ScopeOverlap)
	held(3)
	if a := s.admitUnder(first, p); a.Verdict != Deny || a.Reason != ReasonTooManyHolds {
		t.Fatalf("%s %q", a.Verdict, a.Reason)
	}
	s.inState(first, Released)
	s.take(theirs, Reject)
	s.take(second, Reject)
	s.wantHeld(s.admitUnder(first, p), ScopeOverlap)
	held(2)
	// Releases that nobody uses count again too, without a limit: this one and one of above.
	s.take(beside, Release)
	held(1)
	s.wantHeld(s.admitUnder(fresh(), p), ScopeOverlap)
	held(2)
	s.pass(24 * time.Hour)
	s.sweep()
	s.inState(beside, Held)
	held(4)
}

func TestAttemptsAreCountedInTheRecord(t *testing.T) { // L03
	s := tell(t)
	c := s.call("intent-1", "order/9")
	for n := 1; n <= 5; n++ {
		tk := s.send(c)
		if tk.Attempt != n {
			t.Fatalf("attempt %d, want %d", tk.Attempt, n)
		}
		res := unreachable()
		if n == 2 { // the upstream asks for more than the least backoff
			res = Result{Outcome: AttemptRetryable, RetryAfter: 30 * time.Second, Response: &Response{Status: 429}}
		}
		a := s.settle(tk, res)
		s.restart()
		if n == 5 {
			s.want(a, Deny, ReasonUnreachable)
			break
		}
		wait := 2 * time.Second
		if n == 2 {
			wait = 30 * time.Second
			s.want(a, Allow, "") // its answer goes to the caller
			if a.Response == nil || a.Response.Status != 429 {
				t.Fatalf("%+v", a.Response)
			}
		} else {
			s.want(a, Deny, ReasonUnreachable)
		}
		if a.RetryAfter != wait {
			t.Fatalf("told to retry after %s, want %s", a.RetryAfter, wait)
		}
		s.pass(wait - time.Second)
		a = s.admit(c)
		s.want(a, InFlightNow, ReasonBackoff)
		if a.RetryAfter != time.Second {
			t.Fatalf("backing off for %s more", a.RetryAfter)
		}
		s.pass(time.Second)
	}
	s.inState(c, Failed)
	s.want(s.admit(c), Replay, ReasonUnreachable)
	// With an answer of the upstream it is that which is replayed.
	d := s.call("intent-2", "order/10")
	for range 5 {
		s.settle(s.send(d), Result{Outcome: AttemptRetryable, Response: &Response{Status: 429, Body: []byte("slow down")}})
		s.pass(2 * time.Second)
	}
	a := s.admit(d)
	s.want(a, Replay, "")
	if a.Response == nil || a.Response.Status != 429 || string(a.Response.Body) != "slow down" {
		t.Fatalf("%+v", a.Response)
	}
	// A new intent for the same thing is not held by it.
	s.send(d.under("intent-3"))
}

func TestAReleaseGivesItsAttemptsAnew(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	for range 4 {
		s.settle(s.send(c), unreachable())
		s.pass(2 * time.Second)
	}
	s.loseAndWait(c) // the fifth
	s.take(c, Release)
	for n := 6; n <= 10; n++ {
		tk := s.send(c)
		if tk.Attempt != n {
			t.Fatalf("attempt %d, want %d", tk.Attempt, n)
		}
		s.settle(tk, unreachable())
		s.pass(2 * time.Second)
	}
	// They are spent; how the fifth ended is not known to this day.
	if h := s.hold(c); h.Number != 2 || h.State != HoldHeld || h.Cause != causeRefused {
		t.Fatalf("the hold is %+v", h)
	}
}

func TestAnExpiredIDIsHeldAndHasANewKeyOnceReleased(t *testing.T) { // K10
	s := tell(t)
	c := s.call("intent-1", "order/9")
	first := s.send(c)
	s.settle(first, paid("re_1"))
	s.pass(storyTTL)
	s.want(s.admit(c.with(func(c *Call) { c.Fingerprint = "sha256:another" })), Conflict, ReasonRequest)
	s.inState(c, Tombstone)
	s.wantHeld(s.admit(c), KeyExpired)
	s.wantHeld(s.admit(c), KeyExpired)
	if h := s.hold(c); h.Number != 1 || h.State != HoldHeld {
		t.Fatalf("hold %d is %s", h.Number, h.State)
	}
	// It was paid: whoever comes under another ID is held while that is within the window.
	s.wantHeld(s.admit(c.under("intent-2")), ScopeOverlap)

	s.take(c, Release)
	second := s.send(c)
	if second.ProviderKey == first.ProviderKey || !strings.HasPrefix(second.ProviderKey, "hf_") || second.Attempt != 2 {
		t.Fatalf("attempt %d has key %s, the first had %s", second.Attempt, second.ProviderKey, first.ProviderKey)
	}
	s.settle(second, unreachable())
	s.pass(2 * time.Second)
	third := s.send(c)
	if third.ProviderKey != second.ProviderKey {
		t.Fatalf("the key changed between two attempts")
	}
	s.settle(third, paid("re_2"))
	s.wantReplay(s.admit(c), "intent-1", "re_2")
}

func TestEveryWayToAnExpiredID(t *testing.T) {
	for _, row := range []struct {
		name string
		make func(s *story, c Call)
	}{
		{"succeeded", func(s *story, c Call) { s.pay(c, "re_1") }},
		{"failed", func(s *story, c Call) { s.settle(s.send(c), declined()) }},
		{"rejected, never sent", func(s *story, c Call) { s.block(c); s.take(c, Reject); s.pass(storyWindow) }},
		{"rejected, unknown", func(s *story, c Call) { s.lose(c); s.take(c, Reject) }},
		{"marked failed", func(s *story, c Call) { s.loseAndWait(c); s.take(c, MarkFailed) }},
		{"marked paid", func(s *story, c Call) { s.lose(c); s.take(c, MarkPaid) }},
		{"marked paid, never sent", func(s *story, c Call) { s.block(c); s.take(c, MarkPaid); s.pass(storyWindow) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			row.make(s, c)
			s.pass(storyTTL)
			s.wantHeld(s.admit(c), KeyExpired)
			s.sweep()
			s.pass(storyWait) // an unknown attempt is watched for once more
			s.sweep()
			s.take(c, Release)
			s.settle(s.send(c), paid("re_2"))
			s.wantReplay(s.admit(c), "intent-1", "re_2")
		})
	}
}

func TestAPaymentMadeByHandIsRememberedPastItsID(t *testing.T) {
	// A person paid what was never sent. Its ID expires and comes again: held for
	// another reason, it still was paid.
	for name, then := range map[string]func(s *story, c Call){
		"tombstone": func(*story, Call) {},
		"held":      func(s *story, c Call) { s.wantHeld(s.admit(c), KeyExpired) },
		"released":  func(s *story, c Call) { s.wantHeld(s.admit(c), KeyExpired); s.take(c, Release) },
		"rejected":  func(s *story, c Call) { s.wantHeld(s.admit(c), KeyExpired); s.take(c, Reject) },
		"released, tried": func(s *story, c Call) {
			s.wantHeld(s.admit(c), KeyExpired)
			s.take(c, Release)
			s.settle(s.send(c), unreachable())
		},
		"released, failed": func(s *story, c Call) {
			s.wantHeld(s.admit(c), KeyExpired)
			s.take(c, Release)
			s.settle(s.send(c), declined())
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			c := s.call("intent-1", "order/9")
			s.block(c)
			s.pass(storyWindow - storyTTL) // what blocked it is forgotten once the ID expires
			s.take(c, MarkPaid)
			s.pass(storyTTL)
			s.sweep()
			s.inState(c, Tombstone)
			then(s, c)
			s.wantHeld(s.admit(c.under("intent-2").by("other")), ScopeOverlap)
		})
	}
}
