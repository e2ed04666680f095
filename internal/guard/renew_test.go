// This file is the life of an attempt that its agent holds: claimed once under a token,
// renewed through whatever process, settled by its fence, and nobody else's.

package guard

import (
	"errors"
	"testing"
	"time"
)

const storyRenewFor = 10 * time.Minute

func localPolicy() Policy {
	p := storyPolicy()
	p.RenewFor = storyRenewFor
	return p
}

// claim is the call under a token.
func (c Call) claim(token string) Call { c.Claim = token; return c }

// claimed gives an attempt into the agent's hands.
func (s *story) claimed(c Call) Fence {
	s.t.Helper()
	t := s.sendUnder(c, localPolicy())
	s.HandOver(t)
	return t.Fence()
}

func (s *story) renewThrough(e *Engine, f Fence) Answer {
	s.t.Helper()
	a, err := e.Renew(s.ctx, f)
	if err != nil {
		s.t.Fatalf("renew attempt %d of %s: %v", f.Attempt, f.IntentID, err)
	}
	return a
}

func (s *story) settleClaim(f Fence, res Result) Answer {
	s.t.Helper()
	a, err := s.SettleClaim(s.ctx, f, res)
	if err != nil {
		s.t.Fatalf("settle attempt %d of %s: %v", f.Attempt, f.IntentID, err)
	}
	return a
}

func TestAClaimIsRenewedAndSettledThroughOtherProcesses(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	if s.Busy() {
		t.Fatal("an attempt that was handed over keeps the store of this process open")
	}
	for range 20 {
		s.pass(storyLease - time.Second)
		s.restart()
		a := s.renewThrough(s.Engine, f)
		s.want(a, Allow, "")
		if left := a.Ticket.Left(); left != storyLease-time.Second {
			t.Fatalf("a renewed attempt may run for %s", left)
		}
		s.HandOver(a.Ticket)
		s.sweep()
		s.inState(c, InFlight)
	}
	s.restart()
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
	s.inState(c, Succeeded)
	// The holder's reply was lost, and it settles again.
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
	s.wantReplay(s.admitUnder(c.claim("token-2"), localPolicy()), "intent-1", "re_1")
	if r := s.record(c.Key); len(r.Attempts) != 1 || r.Attempts[0].Renewals != 20 || r.RefundOwed || r.Disputed {
		t.Fatalf("the record: %+v", r.Attempts)
	}
	if s.Busy() {
		t.Fatal("busy, and nothing is under way")
	}
}

func TestALeaseIsNotRenewedWithoutItsFence(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	for name, wrong := range map[string]func(*Fence){
		"another nonce":   func(f *Fence) { f.Nonce = "x" },
		"no nonce":        func(f *Fence) { f.Nonce = "" },
		"another number":  func(f *Fence) { f.Attempt = 2 },
		"number 0":        func(f *Fence) { f.Attempt = 0 },
		"another caller":  func(f *Fence) { f.Caller = "system:serviceaccount:support:other" },
		"another UID":     func(f *Fence) { f.CallerUID = "uid-2" },
		"another intent":  func(f *Fence) { f.IntentID = "intent-2" },
		"the claim token": func(f *Fence) { f.Nonce = "token-1" },
	} {
		g := f
		wrong(&g)
		if a, err := s.Renew(s.ctx, g); !errors.Is(err, ErrNoClaim) {
			t.Errorf("%s: renewed: %s, %v", name, a.Verdict, err)
		}
		if a, err := s.SettleClaim(s.ctx, g, paid("re_1")); !errors.Is(err, ErrNoClaim) {
			t.Errorf("%s: settled: %s, %v", name, a.Verdict, err)
		}
	}
	if r := s.inState(c, InFlight); r.last().Renewals != 0 {
		t.Fatalf("the attempt: %+v", r.last())
	}
}

// R03, R04, R22: a holder that dies is noticed, and what it still says is evidence.
func TestAHolderThatDoesNotRenewLosesItsLease(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	s.sweep()
	s.pass(storyLease + storyGrace)
	s.sweep()
	s.inState(c, Held)
	s.want(s.renewThrough(s.Engine, f), Deny, ReasonLeaseOver)
	s.wantHeld(s.admitUnder(c.claim("token-2"), localPolicy()), OutcomeUnknown)

	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	s.want(s.renewThrough(s.Engine, f), Deny, ReasonLeaseOver)
	g := s.claimed(c.claim("token-3"))
	s.want(s.renewThrough(s.Engine, f), Deny, ReasonLeaseOver)
	// The stale holder does not settle the attempt that is in flight now.
	if a := s.settleClaim(f, declined()); a.Verdict != InFlightNow {
		t.Fatalf("told %s %s", a.Verdict, a.Reason)
	}
	s.inState(c, InFlight)
	s.want(s.settleClaim(g, paid("re_2")), Allow, "")
	if a := s.settleClaim(f, paid("re_1")); a.Verdict != Replay || !a.Intent.RefundOwed {
		t.Fatalf("a second payment: %s, refund owed %v", a.Verdict, a.Intent.RefundOwed)
	}
}

func TestAJudgeWatchesARenewedLeaseAnew(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	other := s.process()
	if err := other.Sweep(s.ctx); err != nil { // begins to watch
		t.Fatal(err)
	}
	s.pass(storyLease)
	s.HandOver(s.renewThrough(s.Engine, f).Ticket)
	// R28: by the store's clock the renewed lease is over, and the other has watched the
	// attempt for longer than a lease; but not since it was renewed.
	s.time.stepStore(20 * time.Minute)
	s.pass(storyGrace)
	if err := other.Sweep(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.inState(c, InFlight)
	s.pass(storyLease + storyGrace)
	if err := other.Sweep(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.inState(c, Held)
}

func TestARenewalComesToAnEnd(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	var a Answer
	for range int(storyRenewFor/storyTimeout) + 1 {
		if a = s.renewThrough(s.Engine, f); a.Ticket == nil {
			break
		}
		s.HandOver(a.Ticket)
		s.pass(storyTimeout)
	}
	s.want(a, Deny, ReasonRenewedEnough)
	// What it has is left to it.
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")

	// What is sent by a gateway is renewed and settled by nobody else.
	d := s.call("intent-2", "order/10")
	f = s.send(d).Fence()
	if a, err := s.Renew(s.ctx, f); !errors.Is(err, ErrNoClaim) {
		t.Fatalf("renewed: %s, %v", a.Verdict, err)
	}
	if a, err := s.SettleClaim(s.ctx, f, paid("re_2")); !errors.Is(err, ErrNoClaim) {
		t.Fatalf("settled: %s, %v", a.Verdict, err)
	}
	s.inState(d, InFlight)
}

// After the time in which it may be sent, an attempt is not given again: it may not have begun.
func TestAClaimIsNotGivenAgainAfterItsTime(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	s.register(stated(c), Registration{ValidUntil: s.time.store().Add(5 * time.Second)}, "", localPolicy())
	f := s.claimed(c)
	s.pass(4 * time.Second)
	a := s.admitUnder(c, localPolicy())
	s.want(a, Allow, "")
	s.HandOver(a.Ticket)
	s.pass(time.Second)
	before := s.record(c.Key)
	a = s.admitUnder(c, localPolicy())
	s.want(a, InFlightNow, ReasonInFlight)
	if a.Ticket != nil || s.record(c.Key).version != before.version {
		t.Fatalf("given again: %+v", s.record(c.Key).last())
	}
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
}

// The answer to a claim is lost: under its token the same attempt is given again.
func TestAClaimIsGivenAgainUnderItsToken(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	s.pass(storyLease - time.Second)
	s.restart()
	a := s.admitUnder(c, localPolicy())
	s.want(a, Allow, "")
	if g := a.Ticket.Fence(); g != f {
		t.Fatalf("another attempt: %+v, was %+v", g, f)
	}
	if left := a.Ticket.Left(); left != storyLease-time.Second {
		t.Fatalf("it may run for %s", left)
	}
	s.HandOver(a.Ticket)
	if r := s.record(c.Key); len(r.Attempts) != 1 || r.last().Renewals != 1 {
		t.Fatalf("attempts: %+v", r.Attempts)
	}
	// Nobody else gets it.
	s.want(s.admitUnder(c.claim("token-2"), localPolicy()), InFlightNow, ReasonInFlight)
	s.want(s.admitUnder(c.claim(""), localPolicy()), InFlightNow, ReasonInFlight)
	s.want(s.admitUnder(c.with(func(c *Call) { c.Fingerprint = "sha256:two" }), localPolicy()), Conflict, ReasonRequest)
	s.want(s.admitUnder(c.with(func(c *Call) { c.CallerUID = "uid-2" }), localPolicy()), Conflict, ReasonCaller)
	// One token names one attempt.
	s.want(s.settleClaim(f, unreachable()), Deny, ReasonUnreachable)
	s.pass(time.Minute)
	s.want(s.admitUnder(c, localPolicy()), Deny, ReasonClaimUsed)
	s.claimed(c.claim("token-3"))
}

func TestARenewalWhoseReplyIsLost(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	s.net.hook(nil, drop("Update", 2))
	a := s.renewThrough(s.Engine, f)
	s.want(a, Allow, "")
	// It counts from before the first question.
	if left := a.Ticket.Left(); left >= storyLease-time.Second {
		t.Fatalf("it may run for %s", left)
	}
	if r := s.record(c.Key); r.last().Renewals != 1 {
		t.Fatalf("one renewal was made of %d", r.last().Renewals)
	}
	s.net.hook(dropAll, nil)
	_, err := s.Renew(s.ctx, f)
	s.unavailable(err)
	_, err = s.SettleClaim(s.ctx, f, paid("re_1"))
	s.unavailable(err)
	s.net.hook(nil, nil)
	// A clock that cannot be believed begins no lease.
	s.time.stepStore(3 * time.Hour)
	if a, err := s.Renew(s.ctx, f); !errors.Is(err, ErrClockJumped) {
		t.Fatalf("renewed by a clock that has jumped: %s, %v", a.Verdict, err)
	}
	s.time.stepStore(-3 * time.Hour)
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
}

func TestARetiredEngineStillSettles(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	s.Refuse(nil)
	s.want(s.renewThrough(s.Engine, f), Allow, "")
	s.Retire()
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
	s.Resume()
}

func TestWhatIsSettledUnderNoClaimIsToldOf(t *testing.T) {
	s := tell(t)
	var told []Evidence
	s.opts.Evidence = func(e Evidence) { told = append(told, e) }
	s.restart()
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	f.Nonce = "of another memory"
	if _, err := s.SettleClaim(s.ctx, f, paid("re_1")); !errors.Is(err, ErrNoClaim) {
		t.Fatal(err)
	}
	if len(told) != 1 || told[0].Outcome != AttemptSucceeded || told[0].ProviderReference != "re_1" || !errors.Is(told[0].Cause, ErrNoClaim) {
		t.Fatalf("told of %+v", told)
	}
}

// A copy of the store does not know what became of an attempt since it was made.
func TestALostMemoryRenewsNothing(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9").claim("token-1")
	f := s.claimed(c)
	s.opts.LostAt = s.time.store()
	if err := s.bolt.Disown(s.ctx, s.id.Epoch, "epoch-2"); err != nil {
		t.Fatal(err)
	}
	s.id.Epoch = "epoch-2"
	s.restart()
	s.want(s.renewThrough(s.Engine, f), Deny, ReasonLeaseOver)
	s.want(s.admitUnder(c, localPolicy()), InFlightNow, ReasonInFlight)
	s.want(s.settleClaim(f, paid("re_1")), Allow, "")
}
