// This file is about records that another version has written: whatever this one makes of
// names, marks and encodings, it must find what was paid before it came. What was written
// then is kept in testdata/written-1.json as the store was asked to write it. That file is
// never made anew: records that are written in another way get a file beside it.

package guard

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const writtenFile = "testdata/written-1.json"

var writeThem = flag.Bool("write-records", false, "write the records of a new file for TestRecordsOfAnEarlierVersion")

// written is one write, and when it was made.
type written struct {
	At      time.Duration
	Reserve bool
	store.Write
}

// scribe keeps the writes that were made.
type scribe struct {
	store.Store
	time *storyTime
	made []written
}

func (k *scribe) note(w store.Write, res store.Result, err error, reserve bool) {
	if err == nil && res.Outcome == store.Written {
		k.made = append(k.made, written{k.time.t, reserve, w})
	}
}

func (k *scribe) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	res, err := k.Store.Reserve(ctx, r)
	k.note(r.Write, res, err, true)
	return res, err
}

func (k *scribe) Update(ctx context.Context, w store.Write) (store.Result, error) {
	res, err := k.Store.Update(ctx, w)
	k.note(w, res, err, false)
	return res, err
}

// writtenCalls are the calls that the records are of. No two of them meet by their recipients.
type writtenCalls struct{ expired, paid, unknown, neverSent, retryable, released, refused, flying Call }

func (s *story) writtenCalls() writtenCalls {
	call := func(id, recipient, scope string) Call {
		return s.call(id, scope).with(func(c *Call) {
			c.Recipient, c.Fingerprint = recipient, "sha256:"+strings.Repeat("0123456789abcdef", 4)
			c.IdentityHash, c.AmountHash, c.RecipientHash = "identity-1", "amount-1", "recipient-1"
		})
	}
	return writtenCalls{
		expired:   call("expired", "r1", "customer/c0/order/1"),
		paid:      call("paid", "r2", "customer/c1/order/9").on("sess_a/call-4"),
		unknown:   call("unknown", "r3", "customer/c1/order/10"),
		neverSent: call("never sent", "r4", "customer/c1/order/9/part"),
		retryable: call("retryable", "r5", "customer/c2/order/1"),
		released:  call("released", "r6", "customer/c2/order/2"),
		refused:   call("refused", "r7", "customer/c2/order/3"),
		flying:    call("flying", "r8", "customer/c2/order/4"),
	}
}

func earlierPolicy() Policy {
	p := storyPolicy()
	p.Lookalike, p.MaxInFlight, p.MaxInFlightPerScope = storyWindow, 2, 1
	return p
}

// writeEarlier is what an earlier version has done.
func (s *story) writeEarlier() {
	e, p := s.writtenCalls(), earlierPolicy()
	s.settle(s.sendUnder(e.expired, p), paid("re_0"))
	s.pass(storyTTL)
	s.sweep()
	s.settle(s.sendUnder(e.paid, p), paid("re_1"))
	s.settle(s.sendUnder(e.released, p), lost())
	s.pass(storyWait)
	s.sweep()
	s.take(e.released, Release)
	s.settle(s.sendUnder(e.unknown, p), lost())
	s.wantHeld(s.admitUnder(e.neverSent, p), ScopeOverlap)
	s.settle(s.sendUnder(e.retryable, p), unreachable())
	s.settle(s.sendUnder(e.refused, p), declined())
	s.sendUnder(e.flying, p)
}

// findEarlier begins a story behind what an earlier version has done.
func findEarlier(t *testing.T) (*story, writtenCalls) {
	t.Helper()
	text, err := os.ReadFile(writtenFile)
	if err != nil {
		t.Fatal(err)
	}
	var made []written
	if err := json.Unmarshal(text, &made); err != nil {
		t.Fatal(err)
	}
	s := tell(t)
	for _, w := range made {
		s.time.pass(w.At - s.time.t)
		write := s.bolt.Update
		if w.Reserve {
			write = func(ctx context.Context, w store.Write) (store.Result, error) {
				return s.bolt.Reserve(ctx, store.Reserve{Write: w})
			}
		}
		if res, err := write(s.ctx, w.Write); err != nil || res.Outcome != store.Written {
			t.Fatalf("%q at %s: %s, %v", w.Key, w.At, res.Outcome, err)
		}
	}
	e := s.writtenCalls()
	for _, c := range []Call{e.expired, e.paid, e.unknown, e.neverSent, e.retryable, e.released, e.refused, e.flying} {
		s.keys[c.Key] = true
	}
	return s, e
}

func TestRecordsOfAnEarlierVersion(t *testing.T) {
	if *writeThem {
		s := tell(t)
		k := &scribe{Store: s.net.Store, time: s.time}
		s.net.Store = k
		s.writeEarlier()
		text, err := json.MarshalIndent(k.made, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(writtenFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatalf("what was written once stays: %v", err)
		}
		if _, err := f.Write(append(text, '\n')); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	p := earlierPolicy()
	other := func(c *Call) {
		c.Caller, c.CallerUID, c.Recipient = "system:serviceaccount:support:other", "uid-2", "elsewhere"
	}
	for name, find := range map[string]func(*testing.T, *story, writtenCalls){
		"the same call is replayed": func(_ *testing.T, s *story, e writtenCalls) {
			s.wantReplay(s.admitUnder(e.paid, p), "paid", "re_1")
		},
		"also under another ID": func(_ *testing.T, s *story, e writtenCalls) {
			s.wantReplay(s.admitUnder(e.paid.under("again"), p), "paid", "re_1")
		},
		"another request under its ID": func(_ *testing.T, s *story, e writtenCalls) {
			s.want(s.admitUnder(e.paid.with(func(c *Call) { c.Fingerprint = "sha256:another" }), p), Conflict, ReasonRequest)
		},
		"the same thing": func(_ *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.paid.under("again").on("").with(other), p), ScopeOverlap)
		},
		"what lies above it": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.paid.under("again").on("").with(other).with(func(c *Call) { c.Scope = scopeOf(t, "customer/c1") }), p), ScopeOverlap)
		},
		"what lies under it": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.paid.under("again").on("").with(other).with(func(c *Call) { c.Scope = scopeOf(t, "customer/c1/order/9/item/3") }), p), ScopeOverlap)
		},
		"something else": func(t *testing.T, s *story, e writtenCalls) {
			s.sendUnder(e.paid.under("again").on("sess_b").with(other).with(func(c *Call) { c.Scope = scopeOf(t, "customer/c1/order/90") }), p)
		},
		"the same step of the agent": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.paid.under("again").on("sess_a").with(other).with(func(c *Call) { c.Scope = scopeOf(t, "customer/c3") }), p), LineageOverlap)
		},
		"another identity block, the same recipient and amount": func(t *testing.T, s *story, e writtenCalls) {
			q := p
			q.Lookalike = 0
			s.wantHeld(s.admitUnder(e.paid.under("again").on("").with(func(c *Call) { c.Scope, c.IdentityHash = scopeOf(t, "order/9"), "identity-2" }), q), IdentityChanged)
		},
		"another tool, the same recipient and amount": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.paid.under("again").on("").with(func(c *Call) { c.Scope, c.Tool = scopeOf(t, "invoice/1"), "pay-invoice" }), p), Lookalike)
		},
		"an unknown outcome": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.unknown, p), OutcomeUnknown)
			s.wantHeld(s.admitUnder(e.unknown.under("again").with(other), p), ScopeOverlap)
			s.take(e.unknown, MarkPaid)
			s.want(s.admitUnder(e.unknown, p), Replay, "")
		},
		"a hold of what was never sent": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.neverSent, p), ScopeOverlap)
			if a := s.admitUnder(e.neverSent.under("again"), p); a.Verdict != UnknownHold || a.Intent.IntentID != "never sent" {
				t.Errorf("its caller is told %s of %s", a.Verdict, a.Intent.IntentID)
			}
			s.take(e.neverSent, Release)
			s.sendUnder(e.neverSent, p)
		},
		"all holds": func(t *testing.T, s *story, _ writtenCalls) {
			if got := strings.Join(s.heldIntents(), ", "); got != "never sent, unknown" {
				t.Errorf("held are %s", got)
			}
		},
		"a retry has its key": func(t *testing.T, s *story, e writtenCalls) {
			s.pass(storyGrace)
			if k := s.sendUnder(e.retryable, p); k.Attempt != 2 || k.ProviderKey != "hf_09514f7f2fcc6cce8a2b9f4e25907ba804a8dfbb66155df3" {
				t.Errorf("attempt %d has the key %s", k.Attempt, k.ProviderKey)
			}
		},
		"so has what was released": func(t *testing.T, s *story, e writtenCalls) {
			if k := s.sendUnder(e.released, p); k.Attempt != 2 || k.ProviderKey != "hf_ded240d9a1c535297f6cab9e4ee390000f4fbefde90d6a31" {
				t.Errorf("attempt %d has the key %s", k.Attempt, k.ProviderKey)
			}
		},
		"what was refused stays so": func(t *testing.T, s *story, e writtenCalls) {
			if a := s.admitUnder(e.refused, p); a.Verdict != Replay || a.Response == nil || a.Response.Status != 402 {
				t.Errorf("it is %s, %+v", a.Verdict, a.Response)
			}
			s.sendUnder(e.refused.under("again"), p)
		},
		"an ID that expired": func(t *testing.T, s *story, e writtenCalls) {
			s.wantHeld(s.admitUnder(e.expired, p), KeyExpired)
			s.wantHeld(s.admitUnder(e.expired.under("again").with(other), p), ScopeOverlap)
		},
		"what is in flight has its slots": func(t *testing.T, s *story, e writtenCalls) {
			s.want(s.admitUnder(e.flying, p), InFlightNow, ReasonInFlight)
			s.sendUnder(e.refused.under("again"), p)
			s.want(s.admitUnder(e.refused.under("and again").with(func(c *Call) { c.Scope, c.Recipient = scopeOf(t, "order/7"), "elsewhere" }), p), Deny, ReasonTooManyInFlight)
			s.pass(storyWait)
			s.sweep()
			s.wantHeld(s.admitUnder(e.flying, p), OutcomeUnknown)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, e := findEarlier(t)
			find(t, s, e)
		})
	}
}
