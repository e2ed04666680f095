// Intents that are written down before they are sent: what a registration is told, what it
// binds and what its first call must agree with, what it reserves and when that ends, and
// who shows it.

package guard

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// stated is the call as a registration states it: what only a call can say is left open.
func stated(c Call) Call {
	c.Fingerprint, c.Lineage = "", ""
	return c
}

func (s *story) register(c Call, g Registration, instead string, p Policy) Answer {
	s.t.Helper()
	a, err := s.tryRegister(s.Engine, c, g, instead, p)
	if err != nil {
		s.t.Fatal(err)
	}
	return a
}

func (s *story) tryRegister(e *Engine, c Call, g Registration, instead string, p Policy) (Answer, error) {
	s.mu.Lock()
	s.keys[c.Key] = true
	s.mu.Unlock()
	return e.Register(s.ctx, c, g, instead, p)
}

// registered writes the call down, which must pass.
func (s *story) registered(c Call) Answer {
	s.t.Helper()
	a := s.register(stated(c), Registration{}, "", storyPolicy())
	if a.Verdict != Allow || a.Intent.State != Registered || a.Intent.Key != c.Key {
		s.t.Fatalf("register %s: %s %s, %s of %s", c.IntentID, a.Verdict, a.Reason, a.Intent.State, a.Intent.IntentID)
	}
	return a
}

// face gives the intent an object that shows it.
func (s *story) face(c Call) {
	s.t.Helper()
	a := s.register(stated(c), Registration{Face: "first", Shown: []byte("{}")}, "", storyPolicy())
	if a.Intent.Registration == nil || a.Intent.Registration.Face != "first" {
		s.t.Fatalf("the face of %s is %+v", c.IntentID, a.Intent.Registration)
	}
}

func TestRegisterSaysWhatACallWouldBeTold(t *testing.T) {
	for _, tt := range []struct {
		name    string
		before  func(*story)
		call    func(*story) Call
		verdict Verdict
		reason  Reason
		id      string
	}{
		{"nothing in its way", func(*story) {}, func(s *story) Call { return stated(s.call("new", "order/9")) }, Allow, "", "new"},
		{"the same scope was paid", func(s *story) { s.pay(s.call("paid", "order/9"), "re_1") }, func(s *story) Call { return stated(s.call("new", "order/9")) }, UnknownHold, ScopeOverlap, "new"},
		{"a part of it was paid", func(s *story) { s.pay(s.call("paid", "order/9/item/1"), "re_1") }, func(s *story) Call { return stated(s.call("new", "order/9")) }, UnknownHold, ScopeOverlap, "new"},
		{"something else was paid", func(s *story) { s.pay(s.call("paid", "order/8"), "re_1") }, func(s *story) Call { return stated(s.call("new", "order/9")) }, Allow, "", "new"},
		{"the same scope is registered only", func(s *story) { s.registered(s.call("other", "order/9")) }, func(s *story) Call { return stated(s.call("new", "order/9")) }, Allow, "", "new"},
		{"the very same call was paid", func(s *story) { s.pay(s.call("paid", "order/9").on("s/1"), "re_1") },
			func(s *story) Call { return s.call("new", "order/9").on("s/1") }, Replay, "", "paid"},
		{"the same step and scope was paid, and the fingerprint is left open", func(s *story) { s.pay(s.call("paid", "order/9").on("s/1"), "re_1") },
			func(s *story) Call { c := s.call("new", "order/9").on("s/1"); c.Fingerprint = ""; return c }, UnknownHold, ScopeOverlap, "new"},
		{"it was paid", func(s *story) { s.pay(s.call("new", "order/9"), "re_1") }, func(s *story) Call { return stated(s.call("new", "order/9")) }, Replay, "", "new"},
		{"it is in flight", func(s *story) { s.send(s.call("new", "order/9")) }, func(s *story) Call { return stated(s.call("new", "order/9")) }, InFlightNow, ReasonInFlight, "new"},
		{"its outcome is unknown", func(s *story) { s.lose(s.call("new", "order/9")) }, func(s *story) Call { return stated(s.call("new", "order/9")) }, UnknownHold, OutcomeUnknown, "new"},
		{"it was paid for something else", func(s *story) { s.pay(s.call("new", "order/9"), "re_1") }, func(s *story) Call { return stated(s.call("new", "order/8")) }, Conflict, ReasonRequest, "new"},
		{"it was paid longer ago than the TTL", func(s *story) { s.pay(s.call("new", "order/9"), "re_1"); s.pass(storyTTL); s.sweep() },
			func(s *story) Call { return stated(s.call("new", "order/9")) }, Replay, "", "new"},
		{"it is another ServiceAccount's", func(s *story) { s.registered(s.call("new", "order/9")) },
			func(s *story) Call { c := stated(s.call("new", "order/9")); c.CallerUID = "uid-2"; return c }, Conflict, ReasonCaller, "new"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			tt.before(s)
			c := tt.call(s)
			sent := s.sends()
			a := s.register(c, Registration{}, "", storyPolicy())
			if a.Verdict != tt.verdict || a.Reason != tt.reason || a.Intent.IntentID != tt.id {
				t.Fatalf("%s %s of %q", a.Verdict, a.Reason, a.Intent.IntentID)
			}
			if again := s.register(c, Registration{}, "", storyPolicy()); again.Verdict != a.Verdict || again.Hold != a.Hold {
				t.Fatalf("the second time: %s %s, hold %s and %s", again.Verdict, again.Reason, a.Hold, again.Hold)
			}
			if s.sends() != sent {
				t.Fatal("registering has sent something")
			}
		})
	}
}

// sends is how many steps into flight there were.
func (s *story) sends() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.changes {
		if c.Event == string(onCall) {
			n++
		}
	}
	return n
}

func TestTheFirstCallBindsWhatWasLeftOpen(t *testing.T) {
	usd := func(v string) *intent.Money { return &intent.Money{Value: v, Currency: "USD"} }
	for _, tt := range []struct {
		name   string
		change func(*story, *Call)
		reason Reason // "": it is sent
	}{
		{"as registered", func(*story, *Call) {}, ""},
		{"with a lineage that was left open", func(_ *story, c *Call) { c.Lineage = "s/1" }, ""},
		{"another fingerprint than any", func(_ *story, c *Call) { c.Fingerprint = "sha256:other" }, ""},
		{"another amount", func(_ *story, c *Call) { c.Amount = usd("50") }, ReasonRequest},
		{"another currency", func(_ *story, c *Call) { c.Amount = &intent.Money{Value: "49.99", Currency: "EUR"} }, ReasonRequest},
		{"no amount", func(_ *story, c *Call) { c.Amount = nil }, ReasonRequest},
		{"another recipient", func(_ *story, c *Call) { c.Recipient = "c2" }, ReasonRequest},
		{"a wider scope", func(s *story, c *Call) { c.Scope = scopeOf(s.t, "order") }, ReasonRequest},
		{"a narrower scope", func(s *story, c *Call) { c.Scope = scopeOf(s.t, "order/9/item/1") }, ReasonRequest},
		{"another ServiceAccount of the name", func(_ *story, c *Call) { c.CallerUID = "uid-2" }, ReasonCaller},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			first := s.call("new", "order/9")
			s.registered(first)
			c := s.call("new", "order/9")
			tt.change(s, &c)
			if a := s.admit(c); tt.reason != "" {
				if a.Verdict != Conflict || a.Reason != tt.reason {
					t.Fatalf("%s %s", a.Verdict, a.Reason)
				}
				s.inState(first, Registered)
				return
			} else if a.Verdict != Allow || a.Ticket == nil {
				t.Fatalf("%s %s", a.Verdict, a.Reason)
			} else {
				s.settle(a.Ticket, paid("re_1"))
			}
			r := s.inState(first, Succeeded)
			if r.Fingerprint != c.Fingerprint || r.Lineage != c.Lineage || !r.Registration.Bound {
				t.Fatalf("bound to %q, %q", r.Fingerprint, r.Lineage)
			}
			other := c
			other.Fingerprint = "sha256:third"
			if a := s.admit(other); a.Verdict != Conflict || a.Reason != ReasonRequest {
				t.Fatalf("another request under the bound ID: %s %s", a.Verdict, a.Reason)
			}
		})
	}
}

func TestWhatWasStatedMustBeCalled(t *testing.T) {
	s := tell(t)
	c := s.call("new", "order/9").on("s/1")
	if a := s.register(c, Registration{}, "", storyPolicy()); a.Verdict != Allow {
		t.Fatalf("%s %s", a.Verdict, a.Reason)
	}
	for _, change := range []func(*Call){func(c *Call) { c.Lineage = "s/2" }, func(c *Call) { c.Lineage = "" }, func(c *Call) { c.Fingerprint = "sha256:other" }} {
		other := c
		change(&other)
		if a := s.admit(other); a.Verdict != Conflict || a.Reason != ReasonRequest {
			t.Fatalf("%q, %q: %s %s", other.Lineage, other.Fingerprint, a.Verdict, a.Reason)
		}
	}
	s.pay(c, "re_1")
}

// A hold that was made before the first call shows what was registered. What a call adds
// was never shown, so the release does not pass over what that meets.
func TestAReleaseOfARegistrationCoversWhatItShowed(t *testing.T) {
	s := tell(t)
	s.pay(s.call("paid", "order/9"), "re_1")
	s.pay(s.call("step", "order/7").on("s/1"), "re_2")
	c := s.call("new", "order/9")
	s.wantHeld(s.register(stated(c), Registration{}, "", storyPolicy()), ScopeOverlap)
	s.take(c, Release)
	same := c.on("s/1")
	if a := s.admit(same); a.Verdict != UnknownHold {
		t.Fatalf("a call with a lineage that the hold had not shown: %s %s", a.Verdict, a.Reason)
	} else if r := s.inState(c, Held); r.Lineage != "s/1" || r.Fingerprint != c.Fingerprint {
		t.Fatalf("the hold shows %q, %q", r.Lineage, r.Fingerprint)
	}
	s.take(c, Release)
	s.settle(s.send(same), paid("re_3"))

	// Without a lineage nothing is added.
	plain := s.call("plain", "order/9")
	s.wantHeld(s.register(stated(plain), Registration{}, "", storyPolicy()), ScopeOverlap)
	s.take(plain, Release)
	s.settle(s.send(plain), paid("re_4"))
}

func TestARegistrationReservesItsSpendUntilItEnds(t *testing.T) {
	s := tell(t)
	limit := SpendLimit{Name: "daily", Amount: intent.Money{Value: "100", Currency: "USD"}, Window: 24 * time.Hour}
	p := storyPolicy().WithSpend([]SpendLimit{limit})
	register := func(id, order string, g Registration) Answer {
		return s.register(stated(s.call(id, order)), g, "", p)
	}
	spent := func(want string) {
		t.Helper()
		if sum, err := s.bolt.Meter(s.ctx, spendMeter(p.Budget, "daily", "USD", "")); err != nil || sum != want && !(want == "0" && sum == "") {
			t.Fatalf("the limit says that %q is taken, want %s (%v)", sum, want, err)
		}
		total, err := s.Spend(s.ctx, p.Budget, "daily", "USD")
		if err != nil || total.Reserved != want && total.Used != want {
			t.Fatalf("people are told %+v, want %s (%v)", total, want, err)
		}
	}
	for i, id := range []string{"one", "two"} {
		if a := register(id, fmt.Sprint("order/", i), Registration{}); a.Verdict != Allow {
			t.Fatalf("%s: %s %s", id, a.Verdict, a.Reason)
		}
	}
	spent("99.98")
	if a := register("three", "order/3", Registration{}); a.Verdict != Deny || a.Reason != ReasonSpendExceeded || a.Intent.Exists {
		t.Fatalf("a third one: %s %s", a.Verdict, a.Reason)
	}
	if a := s.admitUnder(s.call("four", "order/4"), p); a.Verdict != Deny || a.Reason != ReasonSpendExceeded {
		t.Fatalf("a call beside them: %s %s", a.Verdict, a.Reason)
	}
	// What was reserved is what is spent.
	a := s.admitUnder(s.call("one", "order/0"), p)
	if a.Verdict != Allow {
		t.Fatalf("its own call: %s %s", a.Verdict, a.Reason)
	}
	spent("99.98")
	s.settle(a.Ticket, paid("re_1"))
	s.pass(23 * time.Hour)
	// The other one ends with the TTL, and gives back what it had.
	s.pass(storyTTL - 23*time.Hour)
	s.sweep()
	s.sweep()
	s.inState(s.call("two", "order/1"), Rejected)
	spent("0")
	if a := s.admitUnder(s.call("two", "order/1"), p); a.Verdict != Deny || a.Reason != ReasonExpired {
		t.Fatalf("a call after the end: %s %s", a.Verdict, a.Reason)
	}
	if a := register("two", "order/1", Registration{}); a.Verdict != Deny || a.Reason != ReasonExpired {
		t.Fatalf("registered again after the end: %s %s", a.Verdict, a.Reason)
	}
}

func TestValidUntil(t *testing.T) {
	in := func(s *story, d time.Duration) Registration {
		return Registration{Quote: "q-1", ValidUntil: s.time.store().Add(d)}
	}
	t.Run("it is kept, and a call after it is refused", func(t *testing.T) {
		s := tell(t)
		c := s.call("new", "order/9")
		g := in(s, time.Hour)
		a := s.register(stated(c), g, "", storyPolicy())
		if a.Verdict != Allow || a.Intent.Registration.Quote != "q-1" || !a.Intent.Expires.Equal(g.ValidUntil) {
			t.Fatalf("%s, %+v, expires %s", a.Verdict, a.Intent.Registration, a.Intent.Expires)
		}
		other := g
		other.Quote = "q-2"
		if a := s.register(stated(c), other, "", storyPolicy()); a.Verdict != Conflict {
			t.Fatalf("with another quote: %s", a.Verdict)
		}
		other = g
		other.ValidUntil = g.ValidUntil.Add(time.Hour)
		if a := s.register(stated(c), other, "", storyPolicy()); a.Verdict != Conflict {
			t.Fatalf("with a longer validity: %s", a.Verdict)
		}
		s.pass(time.Hour)
		if a := s.admit(c); a.Verdict != Deny || a.Reason != ReasonExpired {
			t.Fatalf("%s %s", a.Verdict, a.Reason)
		}
		s.inState(c, Rejected)
	})
	t.Run("no longer than the TTL", func(t *testing.T) {
		s := tell(t)
		c := s.call("new", "order/9")
		s.register(stated(c), in(s, 1000*time.Hour), "", storyPolicy())
		s.pass(storyTTL)
		s.sweep()
		s.inState(c, Rejected)
	})
	t.Run("over when it comes", func(t *testing.T) {
		s := tell(t)
		c := s.call("new", "order/9")
		if a := s.register(stated(c), in(s, -time.Second), "", storyPolicy()); a.Verdict != Deny || a.Reason != ReasonExpired || a.Intent.Exists {
			t.Fatalf("%s %s", a.Verdict, a.Reason)
		}
		s.inState(c, None)
	})
	t.Run("over between two attempts", func(t *testing.T) {
		s := tell(t)
		c := s.call("new", "order/9")
		s.register(stated(c), in(s, time.Hour), "", storyPolicy())
		s.settle(s.send(c), unreachable())
		s.pass(time.Hour)
		if a := s.admit(c); a.Verdict == Allow {
			t.Fatal("it was sent after its time")
		}
		s.sweep()
		s.inState(c, Failed)
	})
	t.Run("over after a release", func(t *testing.T) {
		s := tell(t)
		s.pay(s.call("paid", "order/9"), "re_1")
		c := s.call("new", "order/9")
		s.register(stated(c), in(s, time.Hour), "", storyPolicy())
		s.take(c, Release)
		s.pass(time.Hour)
		if a := s.admit(c); a.Verdict != UnknownHold {
			t.Fatalf("%s %s", a.Verdict, a.Reason)
		}
		if h := s.hold(c); h.Number != 2 || h.Cause == "" {
			t.Fatalf("the hold stands as %+v", h)
		}
	})
}

func TestRegisteredOnly(t *testing.T) {
	s := tell(t)
	p := storyPolicy()
	p.RegisteredOnly = true
	c := s.call("new", "order/9")
	refused := func(a Answer) {
		t.Helper()
		if a.Verdict != Deny || a.Reason != ReasonNotRegistered || a.Ticket != nil {
			t.Fatalf("%s %s", a.Verdict, a.Reason)
		}
	}
	refused(s.admitUnder(c, p))
	s.inState(c, None)
	s.registered(c)
	a := s.admitUnder(c, p)
	if a.Verdict != Allow {
		t.Fatalf("registered: %s %s", a.Verdict, a.Reason)
	}
	s.settle(a.Ticket, paid("re_1"))
	if a := s.admitUnder(c, p); a.Verdict != Replay {
		t.Fatalf("the same again: %s %s", a.Verdict, a.Reason)
	}
	refused(s.admitUnder(s.call("other", "order/9"), p)) // and makes no hold
	s.inState(s.call("other", "order/9"), None)

	// An exact match is told before the rule, as before every other.
	first := s.call("first", "order/1").on("s/1")
	s.pay(first, "re_2")
	again := first
	again.IntentID = "again"
	if a := s.admitUnder(again, p); a.Verdict != Replay || a.Intent.IntentID != "first" {
		t.Fatalf("an exact match: %s %s", a.Verdict, a.Reason)
	}

	// What was begun before the rule needs to be registered too, and then goes on.
	begun := s.call("begun", "order/2")
	s.settle(s.send(begun), unreachable())
	s.pass(2 * time.Second)
	refused(s.admitUnder(begun, p))
	s.register(stated(begun), Registration{}, "", p)
	if a := s.admitUnder(begun, p); a.Verdict != Allow {
		t.Fatalf("registered afterwards: %s %s", a.Verdict, a.Reason)
	}
}

func TestOneFaceForOneIntent(t *testing.T) {
	s := tell(t)
	c := s.call("new", "order/9")
	face := func(name, instead string) string {
		t.Helper()
		a := s.register(stated(c), Registration{Face: name, Shown: []byte(name)}, instead, storyPolicy())
		if a.Verdict != Allow || string(a.Intent.Registration.Shown) != a.Intent.Registration.Face {
			t.Fatalf("%s %s, %+v", a.Verdict, a.Reason, a.Intent.Registration)
		}
		return a.Intent.Registration.Face
	}
	s.registered(c)
	for _, step := range []struct{ name, instead, want string }{
		{"a", "", "a"},  // one that was registered without has none yet
		{"a", "", "a"},  //
		{"b", "", "a"},  // the first one is its face
		{"b", "x", "a"}, // nor does it take the place of another
		{"b", "a", "b"}, // whoever knows that the first is gone
		{"a", "", "b"},  //
	} {
		before := s.net.count("Update")
		if got := face(step.name, step.instead); got != step.want {
			t.Fatalf("%+v: the face is %q", step, got)
		}
		if writes := s.net.count("Update") - before; writes > 1 {
			t.Fatalf("%+v: %d writes", step, writes)
		}
	}
}

// Two agents, or replicas, at once: one intent, one send.
func TestRegisteringRaces(t *testing.T) {
	s := tell(t)
	for round := range 40 {
		c := s.call(fmt.Sprint("new-", round), fmt.Sprint("order/", round))
		var wg sync.WaitGroup
		var mu sync.Mutex
		var tickets []*Ticket
		for i := range 6 {
			e := s.process()
			wg.Go(func() {
				if i%2 == 0 {
					a, err := s.tryRegister(e, stated(c), Registration{Face: fmt.Sprint(i)}, "", storyPolicy())
					if err != nil || a.Verdict != Allow && a.Verdict != InFlightNow {
						t.Errorf("register: %s %s (%v)", a.Verdict, a.Reason, err)
					}
					return
				}
				s.mu.Lock()
				s.keys[c.Key] = true
				s.mu.Unlock()
				a, err := e.Admit(s.ctx, c, storyPolicy())
				if err != nil {
					t.Errorf("call: %v", err)
					return
				}
				if a.Ticket != nil {
					mu.Lock()
					tickets = append(tickets, a.Ticket)
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if len(tickets) != 1 {
			t.Fatalf("round %d: %d may send", round, len(tickets))
		}
		s.settle(tickets[0], paid("re"))
		if r := s.inState(c, Succeeded); r.Registration == nil || r.Registration.Face == "" {
			t.Fatalf("round %d: no face", round)
		}
	}
}

// The reply to a registration is lost: it is recognised, or told when it is repeated.
func TestARegistrationWhoseReplyIsLost(t *testing.T) {
	s := tell(t)
	c := s.call("new", "order/9")
	lost := 0
	s.net.hook(nil, func(what string) error {
		if what == "Reserve" && lost < 2 {
			lost++
			return errStoryLost
		}
		return nil
	})
	s.registered(c)
	if lost != 2 {
		t.Fatal("nothing was lost")
	}
	s.net.hook(func(what string) error { return errStoryLost }, nil)
	if _, err := s.tryRegister(s.Engine, stated(s.call("other", "order/8")), Registration{}, "", storyPolicy()); !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("without a store: %v", err)
	}
}

// After a lost memory a first registration is as suspicious as a first call.
func TestRegisterAfterALostMemory(t *testing.T) {
	s := tell(t)
	s.lostMemory(nil)
	c := s.call("new", "order/9")
	if a := s.register(stated(c), Registration{}, "", storyPolicy()); a.Verdict != UnknownHold || a.Reason != OutcomeUnknown {
		t.Fatalf("%s %s", a.Verdict, a.Reason)
	}
	if a := s.admit(c); a.Verdict != UnknownHold {
		t.Fatalf("its call: %s %s", a.Verdict, a.Reason)
	}
}

// An object that stays in Git after its intent was settled, and after it was collected itself, is made
// again by whatever syncs it. It asks for nothing to be sent, so it makes no work for a person.
func TestARegistrationLongAfterTheEnd(t *testing.T) {
	for _, tt := range []struct {
		name    string
		end     func(*story, Call)
		settled State
		verdict Verdict
		reason  Reason
	}{
		{"paid", func(s *story, c Call) { s.pay(c, "re_1") }, Succeeded, Replay, ""},
		{"refused", func(s *story, c Call) { s.settle(s.send(c), declined()) }, Failed, Replay, ""},
		{"never sent", func(s *story, _ Call) { s.pass(storyTTL); s.sweep() }, Rejected, Deny, ReasonExpired},
		{"rejected", func(s *story, c Call) {
			s.pay(s.call("other", "order/9"), "re_2")
			s.admit(c)
			s.resolve(s.hold(c), Reject)
		}, Rejected, Deny, ReasonRejected},
		{"held, and marked as failed", func(s *story, c Call) {
			s.lose(c)
			s.pass(storyLease + storyGrace + storyPolicy().SettleAfter)
			s.resolve(s.hold(c), MarkFailed)
		}, Failed, Deny, ReasonMarkedFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := tell(t)
			c := s.call("new", "order/9")
			g := Registration{Face: "from-git", Shown: []byte("{}"), Quote: "q-1"}
			if a := s.register(stated(c), g, "", storyPolicy()); a.Verdict != Allow {
				t.Fatal(a.Verdict)
			}
			tt.end(s, c)
			if r := s.inState(c, tt.settled); !r.Registration.Bound && tt.settled == Succeeded {
				t.Fatal("the call has bound nothing")
			}
			s.pass(storyTTL)
			s.sweep()
			before := s.inState(c, Tombstone).version
			again := func(g Registration, instead string) Answer {
				a := s.register(stated(c), g, instead, storyPolicy())
				if r := s.inState(c, Tombstone); r.version != before {
					t.Fatal("telling it has written it")
				}
				return a
			}
			a := again(g, "")
			if a.Verdict != tt.verdict || a.Reason != tt.reason || a.Hold != "" || a.Intent.State != Tombstone || a.Intent.SettledAs != tt.settled ||
				a.Intent.Registration.Face != "from-git" {
				t.Fatalf("%s %s, hold %q, %s as %s, %+v", a.Verdict, a.Reason, a.Hold, a.Intent.State, a.Intent.SettledAs, a.Intent.Registration)
			}
			// Another object is its face only if the first is gone.
			other := g
			other.Face = "other"
			if a := again(other, ""); a.Intent.Registration.Face != "from-git" {
				t.Fatalf("the face is %q", a.Intent.Registration.Face)
			}
			if a := again(other, "from-git"); a.Intent.Registration.Face != "other" || a.Verdict != tt.verdict {
				t.Fatalf("%s, the face is %q", a.Verdict, a.Intent.Registration.Face)
			}
			// What does not agree with it is a conflict as ever.
			other.Quote = "q-2"
			if a := again(other, ""); a.Verdict != Conflict {
				t.Fatalf("another quote: %s", a.Verdict)
			}
			// Whoever wants it sent is held.
			s.wantHeld(s.admit(c), KeyExpired)
			if a := s.register(stated(c), g, "", storyPolicy()); a.Verdict != UnknownHold || a.Reason != KeyExpired {
				t.Fatalf("after the call: %s %s", a.Verdict, a.Reason)
			}
		})
	}
}

// A registration that comes after its own time binds nothing that is there without it.
func TestARegistrationThatIsOverIsNotAttached(t *testing.T) {
	s := tell(t)
	over := Registration{ValidUntil: s.time.store().Add(-time.Hour), Face: "pi-1"}
	c := s.call("intent-1", "order/9")
	tk := s.send(c)
	check := func(a Answer, v Verdict, reason Reason) {
		t.Helper()
		s.want(a, v, reason)
		if s.record(c.Key).Registration != nil {
			t.Fatal("it is attached")
		}
	}
	check(s.register(stated(c), over, "", storyPolicy()), Deny, ReasonExpired)
	s.settle(tk, lost())
	check(s.register(stated(c), over, "", storyPolicy()), Deny, ReasonExpired)
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release) // it was not bound by that time
	check(s.register(stated(c), over, "", storyPolicy()), Deny, ReasonExpired)
	s.settle(s.send(c), paid("re_1"))
	check(s.register(stated(c), over, "", storyPolicy()), Replay, "")
	// One that is good is attached all the same.
	s.register(stated(c), Registration{Face: "pi-1"}, "", storyPolicy())
	if s.record(c.Key).Registration == nil {
		t.Fatal("it is not attached")
	}
}

// However many processes register at once, there are never more of one caller than the budget allows.
func TestTooManyAreRegistered(t *testing.T) {
	s := tell(t)
	p := storyPolicy()
	p.MaxRegisteredPerCaller = 3
	register := func(n int) Answer { return s.register(stated(s.order(n)), Registration{}, "", p) }
	var group sync.WaitGroup
	allowed := make(chan int, 10)
	for n := range 10 {
		e := s.process()
		group.Go(func() {
			a, err := s.tryRegister(e, stated(s.order(n)), Registration{}, "", p)
			switch {
			case err != nil:
				t.Error(err)
			case a.Verdict == Allow:
				allowed <- n
			case a.Reason != ReasonTooManyRegistered || a.RetryAfter != registeredRetryAfter || a.Intent.Exists:
				t.Errorf("%s %s after %s, exists %v", a.Verdict, a.Reason, a.RetryAfter, a.Intent.Exists)
			}
		})
	}
	group.Wait()
	close(allowed)
	var open []int
	for n := range allowed {
		open = append(open, n)
	}
	if len(open) != 3 {
		t.Fatalf("%d were registered", len(open))
	}
	// What is registered is told, and an exact match is not asked for room.
	if a := register(open[0]); a.Verdict != Allow {
		t.Fatalf("%s %s", a.Verdict, a.Reason)
	}
	s.want(register(20), Deny, ReasonTooManyRegistered)
	other := s.order(30)
	other.Caller += "-2"
	if a := s.register(stated(other), Registration{}, "", p); a.Verdict != Allow {
		t.Fatalf("another caller: %s %s", a.Verdict, a.Reason)
	}
	// Whatever ends it makes room: a send, a hold, its time.
	s.settle(s.sendUnder(s.order(open[0]), p), paid("re_1"))
	s.want(register(21), Allow, "")
	s.want(register(22), Deny, ReasonTooManyRegistered)
	s.wantHeld(s.admitUnder(s.order(open[1]), ruledBy(p, Ruling{Hold: holds})), ApprovalRequired)
	s.want(register(22), Allow, "")
	s.want(register(23), Deny, ReasonTooManyRegistered)
	// What a person must decide about is held, and takes no place among the registered.
	held := s.order(40)
	s.wantHeld(s.register(stated(held), Registration{}, "", ruledBy(p, Ruling{Hold: holds})), ApprovalRequired)
	s.pass(storyTTL)
	s.sweep()
	for n := 50; n < 53; n++ {
		s.want(register(n), Allow, "")
	}
	s.want(register(53), Deny, ReasonTooManyRegistered)
}

// Registrations come as often as the tool allows calls, and each is counted where it belongs.
func TestRegistrationsAreRated(t *testing.T) {
	for name, rate := range map[string]func(*Policy){
		"of the tool":   func(p *Policy) { p.Rate = Rate{Every: 10 * time.Second, Burst: 2} },
		"of the caller": func(p *Policy) { p.RatePerCaller = Rate{Every: 10 * time.Second, Burst: 2} },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			p := storyPolicy()
			rate(&p)
			register := func(n int) Answer { return s.register(stated(s.order(n)), Registration{}, "", p) }
			for n := range 2 {
				s.want(register(n), Allow, "")
			}
			a := register(2)
			s.want(a, Deny, ReasonRateLimited)
			if a.RetryAfter <= 9*time.Second || a.RetryAfter > 10*time.Second {
				t.Fatalf("it may come again after %s, want 10s", a.RetryAfter)
			}
			s.inState(s.order(2), None)
			// What is known is told, however often it is asked.
			for range 5 {
				s.want(register(1), Allow, "")
			}
			// Calls have the whole of their own rate.
			for n := range 2 {
				s.settle(s.sendUnder(s.order(n).on(fmt.Sprint("s/", n)), p), paid(fmt.Sprint("re_", n)))
			}
			s.want(s.admitUnder(s.order(3), p), Deny, ReasonRateLimited)
			s.pass(10 * time.Second)
			s.want(register(2), Allow, "")
			s.want(register(3), Deny, ReasonRateLimited)
			// The very same call of another intent is told of that one, and takes nothing.
			again := s.order(0).on("s/0").under("again")
			s.want(s.register(again, Registration{}, "", p), Replay, "")
		})
	}
}

// Whoever leaves the registered ones leaves those of the budget in which it was registered.
func TestARegistrationLeavesTheBudgetThatItWasIn(t *testing.T) {
	for name, leave := range map[string]func(*story, Call, Policy){
		"it is sent": func(s *story, c Call, p Policy) { s.sendUnder(c, p) },
		"it is held": func(s *story, c Call, p Policy) {
			s.wantHeld(s.admitUnder(c, p.WithRules(func(*Call) (Ruling, error) { return Ruling{Hold: "above"}, nil })), ApprovalRequired)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			p := storyPolicy()
			p.MaxRegisteredPerCaller = 1
			s.want(s.register(stated(s.order(1)), Registration{}, "", p), Allow, "")
			s.want(s.register(stated(s.order(2)), Registration{}, "", p), Deny, ReasonTooManyRegistered)
			other := p
			other.Budget = "another"
			leave(s, s.order(1), other)
			s.want(s.register(stated(s.order(2)), Registration{}, "", p), Allow, "")
		})
	}
}

// A process of an earlier version has sent it and left it among the registered ones.
func TestARegistrationThatWasLeftBehindLeavesLater(t *testing.T) {
	for name, end := range map[string]func(*story, *Ticket){
		"settled":   func(s *story, sent *Ticket) { s.settle(sent, paid("re_1")) },
		"held":      func(s *story, sent *Ticket) { s.settle(sent, lost()) },
		"the sweep": func(s *story, _ *Ticket) { s.sweep(); s.pass(gone); s.sweep() },
	} {
		t.Run(name, func(t *testing.T) {
			s := tell(t)
			p := storyPolicy()
			p.MaxRegisteredPerCaller = 1
			s.want(s.register(stated(s.order(1)), Registration{}, "", p), Allow, "")
			sent := s.sendUnder(s.order(1), p)
			r := s.record(s.order(1).Key)
			w, err := s.write(pending{from: r, to: r.clone(), on: onRegister, now: r.Changed, nonce: s.o.Nonce(), keepMarks: true})
			if err != nil {
				t.Fatal(err)
			}
			w.Meters = append(w.Meters, store.MeterEntry{Meter: registeredMeter(p.Budget, r.Caller), Amount: "1"})
			if res, err := s.bolt.Update(s.ctx, w); err != nil || res.Outcome != store.Written {
				t.Fatalf("%+v, %v", res, err)
			}
			s.want(s.register(stated(s.order(2)), Registration{}, "", p), Deny, ReasonTooManyRegistered)
			end(s, sent)
			s.want(s.register(stated(s.order(2)), Registration{}, "", p), Allow, "")
		})
	}
}
