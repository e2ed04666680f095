// Package engines has two engines, as two gateway processes have them, on one real Redis
// or PostgreSQL server, for what cannot be brought about from outside: results that come
// late, decisions that slip through, and very many records. Time is real, and short.
package engines

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/servers"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

const (
	timeout     = 300 * time.Millisecond
	settlement  = 300 * time.Millisecond
	margin      = 50 * time.Millisecond
	grace       = 100 * time.Millisecond
	settleAfter = 100 * time.Millisecond
	patience    = 30 * time.Second
)

var policy = guard.Policy{Budget: "money", Window: 72 * time.Hour, TTL: 48 * time.Hour, Timeout: timeout, SettleAfter: settleAfter}

// stage is two engines, one and two, on one store.
type stage struct {
	*testing.T
	one, two *guard.Engine
}

var spaces atomic.Int64

// onEachStore runs a test on both kinds of server.
func onEachStore(t *testing.T, run func(t *testing.T, s *stage)) {
	for _, kind := range []string{"redis", "postgres"} {
		t.Run(kind, func(t *testing.T) {
			s := &stage{T: t}
			n := spaces.Add(1)
			open := func() store.Store { return open(t, kind, n) }
			first := open()
			id, err := first.Initialise(t.Context(), store.Identity{Epoch: rand.Text(), KeyDomain: rand.Text()})
			if err != nil {
				t.Fatal(err)
			}
			// A machine that is busy must not end a test.
			o := guard.Options{Settlement: settlement, Margin: margin, Grace: grace, Repeat: time.Minute}
			s.one, s.two = guard.New(first, id, o), guard.New(open(), id, o)
			run(t, s)
		})
	}
}

// The servers are started at their first use, and end with the tests.
var (
	dir      string
	theRedis = sync.OnceValues(func() (*servers.Redis, error) {
		return servers.NewRedis(context.Background(), servers.Options{Dir: filepath.Join(dir, "redis")})
	})
	thePostgres = sync.OnceValues(func() (*servers.Postgres, error) {
		return servers.NewPostgres(context.Background(), servers.Options{Dir: filepath.Join(dir, "postgres")})
	})
	started []servers.Server
)

func TestMain(m *testing.M) {
	os.Exit(func() (code int) {
		var err error
		if dir, err = os.MkdirTemp("", "holdfast-engines-"); err == nil {
			err = os.Chmod(dir, 0o755)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code = m.Run()
		for _, s := range started {
			err = errors.Join(err, s.Remove(context.Background()))
		}
		if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}())
}

func open(t *testing.T, kind string, n int64) (st store.Store) {
	t.Helper()
	if kind == "redis" {
		r, err := theRedis()
		if err != nil {
			t.Fatal(err)
		}
		remember(r)
		st, err = redis.Open(redis.Options{
			Addresses: []string{net.JoinHostPort("127.0.0.1", strconv.Itoa(r.Port()))}, Namespace: fmt.Sprint("engines-", n),
			Credentials: func() (string, string, error) { return "", r.Password(), nil },
		})
		if err != nil {
			t.Fatal(err)
		}
	} else {
		p, err := thePostgres()
		if err != nil {
			t.Fatal(err)
		}
		remember(p)
		st, err = postgres.Open(postgres.Options{DSN: p.DSN("127.0.0.1", p.Port()), Schema: fmt.Sprint("engines_", n)})
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return st
}

func remember(s servers.Server) {
	for _, known := range started {
		if known == s {
			return
		}
	}
	started = append(started, s)
}

func (s *stage) call(id, scope string) guard.Call {
	s.Helper()
	path, err := intent.ParsePath(scope)
	if err != nil {
		s.Fatal(err)
	}
	paths, err := intent.NewScope(path)
	if err != nil {
		s.Fatal(err)
	}
	amount, err := intent.NewMoney("10", "USD", intent.UnitMajor)
	if err != nil {
		s.Fatal(err)
	}
	return guard.Call{
		Key:       guard.Key{Namespace: "support", Tool: "refund", Caller: "system:serviceaccount:support:agent", IntentID: id},
		CallerUID: "uid", Scope: paths, Amount: &amount, Recipient: "c1", Fingerprint: "sha256:one",
		IdentityHash: "identity", AmountHash: "amount", RecipientHash: "recipient",
	}
}

func (s *stage) admit(e *guard.Engine, c guard.Call) guard.Answer {
	s.Helper()
	a, err := e.Admit(s.Context(), c, policy)
	if err != nil {
		s.Fatal(err)
	}
	return a
}

// send is a call that must be let in.
func (s *stage) send(e *guard.Engine, c guard.Call) *guard.Ticket {
	s.Helper()
	a := s.admit(e, c)
	if a.Verdict != guard.Allow {
		s.Fatalf("%s: %s %s, want ALLOW", c.IntentID, a.Verdict, a.Reason)
	}
	return a.Ticket
}

func (s *stage) settle(e *guard.Engine, t *guard.Ticket, r guard.Result) guard.Answer {
	s.Helper()
	a, err := e.Settle(s.Context(), t, r)
	if err != nil {
		s.Fatal(err)
	}
	return a
}

func paid(reference string) guard.Result {
	return guard.Result{
		Outcome: guard.AttemptSucceeded, ProviderReference: reference,
		Response: &guard.Response{Status: 201, Body: []byte(`{"id":"` + reference + `"}`)},
	}
}

func (s *stage) view(e *guard.Engine, c guard.Call) guard.View {
	s.Helper()
	a, err := e.Poll(s.Context(), c.Key)
	if err != nil {
		s.Fatal(err)
	}
	return a.Intent
}

// awaits sweeps with an engine until a condition of the record holds.
func (s *stage) awaits(e *guard.Engine, c guard.Call, what string, done func(guard.View) bool) guard.View {
	s.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := e.Sweep(s.Context()); err != nil {
			s.Fatal(err)
		}
		v := s.view(e, c)
		if done(v) {
			return v
		}
		select {
		case <-tick.C:
		case <-deadline:
			s.Fatalf("%s: not %s: %+v", c.IntentID, what, v)
		}
	}
}

func held(v guard.View) bool { return v.Hold != nil && v.Hold.State == guard.HoldHeld }

// lost is an attempt of engine one of which nothing is heard: engine two holds it, and it
// has waited for as long as the payment may take to be seen.
func (s *stage) lost(c guard.Call) *guard.Ticket {
	s.Helper()
	t := s.send(s.one, c)
	s.awaits(s.two, c, "held", held)
	return t
}

// decide is a person's word on the present hold, taken by an engine.
func (s *stage) decide(e *guard.Engine, c guard.Call, d guard.Decision, reference string) guard.HoldView {
	s.Helper()
	h := s.view(e, c).Hold
	v, err := e.Resolve(s.Context(), guard.Resolution{HoldID: h.HoldID, Decision: d, Reason: "looked at it", By: "alice", ProviderReference: reference})
	if err != nil {
		s.Fatal(err)
	}
	return v
}

// R22: a late success arrives at one engine, of an intent on which the other one, and a
// person, have decided meanwhile.
func TestALateSuccess(t *testing.T) {
	onEachStore(t, func(t *testing.T, s *stage) {
		for i, row := range []struct {
			name      string
			decision  guard.Decision
			reference string
			owed      bool
		}{
			{"held", "", "re_1", false},
			{"released", guard.Release, "re_1", false},
			{"rejected", guard.Reject, "re_1", true},
			{"marked paid, the same", guard.MarkPaid, "re_1", false},
			{"marked paid, another", guard.MarkPaid, "by-hand", true},
			{"marked failed", guard.MarkFailed, "re_1", true},
		} {
			c := s.call(fmt.Sprint("late-", i), fmt.Sprint("order/late-", i))
			ticket := s.lost(c)
			if row.decision != "" {
				reference := ""
				if row.decision == guard.MarkPaid {
					reference = row.reference
				}
				if v := s.decide(s.two, c, row.decision, reference); v.State != guard.HoldResolved {
					t.Fatalf("%s: the decision was not taken: %+v", row.name, v)
				}
			}
			s.settle(s.one, ticket, paid("re_1"))
			v := s.view(s.two, c)
			if v.State != guard.Succeeded || v.ProviderReference != row.reference || v.RefundOwed != row.owed {
				t.Errorf("%s: %s with reference %q, refund owed %t; want Succeeded, %q, %t", row.name, v.State, v.ProviderReference, v.RefundOwed, row.reference, row.owed)
			}
			if a := s.admit(s.two, c); a.Verdict == guard.Allow {
				t.Errorf("%s: it was sent again", row.name)
			}
			another := s.call(fmt.Sprint("another-", i), fmt.Sprint("order/late-", i))
			if a := s.admit(s.one, another); a.Verdict != guard.UnknownHold {
				t.Errorf("%s: another ID for the same: %s, want UNKNOWN_HOLD", row.name, a.Verdict)
			}
		}
	})
}

// R36: the lease of a later attempt ends, and an earlier one's late success is on the record.
func TestAKeptSuccessIsJoined(t *testing.T) {
	onEachStore(t, func(t *testing.T, s *stage) {
		c := s.call("kept", "order/kept")
		first := s.lost(c)
		s.decide(s.two, c, guard.Release, "")
		// Time enough to look at the second attempt.
		slow := policy
		slow.Timeout = 3 * time.Second
		if a, err := s.two.Admit(t.Context(), c, slow); err != nil || a.Verdict != guard.Allow {
			t.Fatal(a.Verdict, err)
		}
		if a := s.settle(s.one, first, paid("re_1")); a.Verdict != guard.InFlightNow {
			t.Errorf("the late holder is told %s, want IN_FLIGHT", a.Verdict)
		}
		if v := s.view(s.one, c); v.State != guard.InFlight {
			t.Fatalf("the late success freed the lease of the later attempt: %s", v.State)
		}
		v := s.awaits(s.one, c, "Succeeded", func(v guard.View) bool { return v.State != guard.InFlight })
		if v.State != guard.Succeeded || v.ProviderReference != "re_1" {
			t.Errorf("it is %s with reference %q, want Succeeded, re_1", v.State, v.ProviderReference)
		}
		if a := s.admit(s.two, c); a.Verdict != guard.Replay {
			t.Errorf("the next call is told %s, want REPLAY", a.Verdict)
		}
	})
}

// R31: a release that slips through before the payment could have become visible is spent,
// and the hold stands anew.
func TestAReleaseThatIsTooEarly(t *testing.T) {
	onEachStore(t, func(t *testing.T, s *stage) {
		for i, d := range []guard.Decision{guard.Release, guard.MarkFailed} {
			c := s.call(fmt.Sprint("early-", i), fmt.Sprint("order/early-", i))
			slow := policy
			slow.SettleAfter = time.Hour
			a, err := s.one.Admit(t.Context(), c, slow)
			if err != nil || a.Verdict != guard.Allow {
				t.Fatal(a.Verdict, err)
			}
			s.settle(s.one, a.Ticket, guard.Result{Outcome: guard.AttemptUnknown, Detail: "the answer was cut"})
			before := s.view(s.two, c).Hold
			if before.State != guard.HoldWaiting {
				t.Fatalf("the hold is %s, want Waiting", before.State)
			}
			if v := s.decide(s.two, c, d, ""); v.State != guard.HoldVoid {
				t.Errorf("%s is %s, want Void", d, v.State)
			}
			after := s.view(s.one, c).Hold
			if after.Number <= before.Number || after.State != guard.HoldWaiting {
				t.Errorf("%s: afterwards the hold is %+v, want a new one that waits", d, after)
			}
			if a := s.admit(s.one, c); a.Verdict != guard.UnknownHold {
				t.Errorf("%s: the next call is told %s", d, a.Verdict)
			}
		}
	})
}

// R30: very many settled intents under one path, and a call for all of it.
func TestManySettledUnderOnePath(t *testing.T) {
	const many, workers = 10_000, 16
	onEachStore(t, func(t *testing.T, s *stage) {
		var next atomic.Int64
		var working sync.WaitGroup
		failed := make(chan error, workers)
		for i := range workers {
			e := []*guard.Engine{s.one, s.two}[i%2]
			working.Go(func() {
				for {
					n := next.Add(1)
					if n > many {
						return
					}
					c := s.call(fmt.Sprint("paid-", n), fmt.Sprint("customer/c1/order/", n))
					a, err := e.Admit(t.Context(), c, generous)
					if err == nil && a.Verdict != guard.Allow {
						err = fmt.Errorf("%s: %s", c.IntentID, a.Verdict)
					}
					if err == nil {
						_, err = e.Settle(t.Context(), a.Ticket, paid("re"))
					}
					if err != nil {
						failed <- err
						return
					}
				}
			})
		}
		working.Wait()
		close(failed)
		for err := range failed {
			t.Fatal(err)
		}
		unknown := s.call("unknown", "customer/c1/unknown")
		s.settle(s.one, s.send(s.one, unknown), guard.Result{Outcome: guard.AttemptUnknown, Detail: "the answer was cut"})
		newest := s.call("newest", "customer/c1/newest")
		s.settle(s.two, s.send(s.two, newest), paid("re"))

		began := time.Now()
		a := s.admit(s.two, s.call("broad", "customer/c1"))
		took := time.Since(began)
		if a.Verdict != guard.UnknownHold || a.MatchCount != many+2 || len(a.Matches) != guard.MaxMatches {
			t.Fatalf("%s with %d of %d matches, want UNKNOWN_HOLD with %d of %d", a.Verdict, len(a.Matches), a.MatchCount, guard.MaxMatches, many+2)
		}
		if a.Matches[0].IntentID != "unknown" || a.Matches[1].IntentID != "newest" {
			t.Errorf("first come %s and %s, want what is unsettled, then what is newest", a.Matches[0].IntentID, a.Matches[1].IntentID)
		}
		if took > 3*time.Second {
			t.Errorf("it took %s", took)
		}
		t.Logf("%d settled intents, and a call over all of them in %s", many, took)
	})
}

// generous is a policy whose leases last on a machine that is busy.
var generous = guard.Policy{Budget: "money", Window: 72 * time.Hour, TTL: 48 * time.Hour, Timeout: time.Minute, SettleAfter: settleAfter}
