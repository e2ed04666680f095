// How often calls may come: never more in any span than a burst and one for each
// interval of it, by the store's clock and whoever lets them in; repeats not counted;
// and no trace of it among the intents.

package guard

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func ratePolicy(every time.Duration, burst int) Policy {
	p := storyPolicy()
	p.Rate = Rate{Every: every, Burst: burst}
	return p
}

// rateRecords are the records of rates in the store.
func (s *story) rateRecords() []store.Record {
	s.t.Helper()
	page, err := s.bolt.List(s.ctx, store.List{What: store.ListDue, Before: endOfTime})
	if err != nil {
		s.t.Fatal(err)
	}
	return slices.DeleteFunc(page.Records, func(r store.Record) bool { return !isRate(r.Key) })
}

func TestABurstAndThenOneForEachInterval(t *testing.T) {
	s := tell(t)
	p := ratePolicy(10*time.Second, 3)
	processes := []*Engine{s.process(), s.process()}
	n := 0
	next := func() Answer {
		n++
		s.Engine = processes[n%2]
		return s.admitUnder(s.order(n), p)
	}
	for range 3 {
		s.want(next(), Allow, "")
	}
	a := next()
	s.want(a, Deny, ReasonRateLimited)
	if a.RetryAfter <= 9*time.Second || a.RetryAfter > 10*time.Second {
		t.Fatalf("it may come again after %s, want 10s", a.RetryAfter)
	}
	s.inState(s.order(n), None) // nothing was recorded
	s.pass(a.RetryAfter)
	s.want(next(), Allow, "")
	s.want(next(), Deny, ReasonRateLimited)
	s.pass(time.Hour)
	for range 3 {
		s.want(next(), Allow, "")
	}
	s.want(next(), Deny, ReasonRateLimited)
}

func TestARefusedCallAsksTheStoreForNoRate(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Hour, 1)
	s.want(s.admitUnder(s.order(1), p), Allow, "")
	updates := s.net.count("Update")
	for n := range 20 {
		s.want(s.admitUnder(s.order(2+n), p), Deny, ReasonRateLimited)
	}
	if got := s.net.count("Update"); got != updates {
		t.Fatalf("%d writes for 20 calls that were refused", got-updates)
	}
}

func TestMostCallsAskTheStoreForNoRate(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Millisecond, 1000)
	const calls = 400
	for n := range calls {
		s.settle(s.sendUnder(s.order(n), p), paid(fmt.Sprint("p", n)))
		s.pass(time.Millisecond)
	}
	// Each settlement is an Update too.
	if got := s.net.count("Update") - calls; got > calls/10 {
		t.Fatalf("%d calls took cells of the store %d times", calls, got)
	}
}

func TestEachCallerHasARateOfItsOwn(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Minute, 3)
	p.RatePerCaller = Rate{Every: time.Minute, Burst: 2}
	by := func(n int, caller string) Call {
		return s.order(n).with(func(c *Call) { c.Caller = caller })
	}
	s.want(s.admitUnder(by(1, "a"), p), Allow, "")
	s.want(s.admitUnder(by(2, "a"), p), Allow, "")
	s.want(s.admitUnder(by(3, "a"), p), Deny, ReasonRateLimited)
	s.want(s.admitUnder(by(4, "b"), p), Allow, "") // the refused one has taken none of the tool's
	s.want(s.admitUnder(by(5, "b"), p), Deny, ReasonRateLimited)
	// That one was the tool's limit: the caller's cell is still there.
	s.pass(time.Minute)
	s.want(s.admitUnder(by(6, "b"), p), Allow, "")
}

func TestRepeatsAreNotCounted(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Hour, 3)
	done, busy := s.order(1).on("plan/1"), s.order(2)
	s.settle(s.sendUnder(done, p), paid("p1"))
	s.sendUnder(busy, p)
	repeats := func() {
		s.wantReplay(s.admitUnder(done, p), "i1", "p1")
		s.wantReplay(s.admitUnder(done.under("again"), p), "i1", "p1") // an exact match
		s.want(s.admitUnder(busy, p), InFlightNow, ReasonInFlight)
		s.want(s.admitUnder(done.with(func(c *Call) { c.Fingerprint = "sha256:two" }), p), Conflict, ReasonRequest)
	}
	for range 5 {
		repeats()
	}
	s.sendUnder(s.order(3), p) // the third of the burst is still there
	s.want(s.admitUnder(s.order(4), p), Deny, ReasonRateLimited)
	// They are answered where no other call is let in, also by a process that knows none of the intents.
	repeats()
	s.restart()
	repeats()
	// What would be held is refused: nothing is recorded of it.
	s.want(s.admitUnder(s.call("i5", "order/1"), p), Deny, ReasonRateLimited)
	s.inState(s.call("i5", "order/1"), None)
}

func TestACallThatWaitedForASlotIsCountedOnce(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Hour, 2)
	p.MaxInFlight = 1
	first := s.sendUnder(s.order(1), p)
	c := s.order(2)
	s.want(s.admitUnder(c, p), Deny, ReasonTooManyInFlight)
	c.Passed = true
	s.want(s.admitUnder(c, p), Deny, ReasonTooManyInFlight)
	s.settle(first, paid("p1"))
	s.sendUnder(c, p)
	s.want(s.admitUnder(s.order(3), p), Deny, ReasonRateLimited)
}

func TestALimitOfTheRateIsChanged(t *testing.T) {
	s := tell(t)
	slow, fast := ratePolicy(time.Hour, 10), ratePolicy(time.Second, 2)
	for n := range 10 {
		s.want(s.admitUnder(s.order(n), slow), Allow, "")
	}
	s.want(s.admitUnder(s.order(10), slow), Deny, ReasonRateLimited)
	// Nobody waits ten hours under the new one, in this process or another.
	s.want(s.admitUnder(s.order(11), fast), Deny, ReasonRateLimited)
	s.restart()
	s.pass(time.Second)
	s.want(s.admitUnder(s.order(12), fast), Allow, "")
	s.want(s.admitUnder(s.order(13), fast), Deny, ReasonRateLimited)
	// And back: no new burst.
	s.want(s.admitUnder(s.order(14), ratePolicy(time.Hour, 2)), Deny, ReasonRateLimited)
	s.sendUnder(s.order(15), storyPolicy()) // none at all
}

func TestTheClockIsPutBack(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Second, 2)
	s.want(s.admitUnder(s.order(1), p), Allow, "")
	s.want(s.admitUnder(s.order(2), p), Allow, "")
	s.time.stepStore(-50 * time.Minute)
	s.restart()
	s.want(s.admitUnder(s.order(3), p), Deny, ReasonRateLimited)
	s.pass(time.Second)
	s.want(s.admitUnder(s.order(4), p), Allow, "")
}

func TestRecordsOfRatesAreDeleted(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Minute, 2)
	p.RatePerCaller = Rate{Every: time.Minute, Burst: 2}
	s.settle(s.sendUnder(s.order(1), p), paid("p1"))
	if n := len(s.rateRecords()); n != 2 {
		t.Fatalf("%d records of rates, want 2", n)
	}
	other := s.process()
	s.pass(rateKept - time.Second)
	s.sweep()
	if n := len(s.rateRecords()); n != 2 {
		t.Fatalf("%d records of rates before their time is over, want 2", n)
	}
	s.pass(time.Minute)
	s.sweep()
	if n := len(s.rateRecords()); n != 0 {
		t.Fatalf("%d records of rates are left", n)
	}
	if held := s.heldIntents(); len(held) != 0 {
		t.Fatalf("held: %v", held)
	}
	// Whoever still knows the old one goes on, and so does who knows none.
	s.sendUnder(s.order(2), p)
	s.Engine = other
	s.sendUnder(s.order(3), p)
	s.want(s.admitUnder(s.order(4), p), Deny, ReasonRateLimited)
}

func TestNoCallPassesARateThatCannotBeAsked(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Second, 5)
	s.net.hook(func(what string) error {
		if what == "Update" {
			return errStoryLost
		}
		return nil
	}, nil)
	_, err := s.Admit(s.ctx, s.order(1), p)
	s.unavailable(err)
	s.inState(s.order(1), None)
	s.net.hook(nil, drop("Update", 1)) // a reply is lost: it is recognised
	s.sendUnder(s.order(1), p)
	if err := s.bolt.Check(s.ctx); err != nil {
		t.Fatal(err)
	}
}

func TestAnUnreadableRateIsNotPassed(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Second, 5)
	key := rateKey(s.order(1).Key, "")
	w := store.Write{Epoch: s.id.Epoch, Key: key, Nonce: "n", Record: &store.Record{Header: []byte("{}")}}
	if _, err := s.bolt.Update(s.ctx, w); err != nil {
		t.Fatal(err)
	}
	_, err := s.Admit(s.ctx, s.order(1), p)
	if err == nil || !strings.Contains(err.Error(), ErrCorrupt.Error()) {
		t.Fatalf("got %v, want that it cannot be read", err)
	}
}

// TestNoSpanHasMoreThanItsShare lets some processes take cells at any moments, with answers
// of the store that take their time, and looks at every span between two of them.
func TestNoSpanHasMoreThanItsShare(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			s := tell(t)
			r := Rate{Every: time.Duration(1+rng.IntN(2000)) * time.Millisecond, Burst: 1 + rng.IntN(200)}
			var slowest time.Duration
			s.net.hook(nil, func(string) error {
				d := time.Duration(rng.IntN(3000)) * time.Microsecond
				slowest = max(slowest, d)
				s.pass(d)
				return nil
			})
			processes := []*Engine{s.process(), s.process(), s.process()}
			k := s.order(0).Key
			var taken []time.Time
			refused := 0
			for range 1500 {
				e := processes[rng.IntN(len(processes))]
				before := s.time.store()
				at, wait, err := e.takeCell(s.ctx, e.rates.of(rateKey(k, ""), 0), r)
				if err != nil {
					t.Fatal(err)
				}
				switch {
				case wait > 0:
					refused++
				case rng.IntN(10) == 0:
					e.rates.of(rateKey(k, ""), 0).put(at)
				default:
					taken = append(taken, before)
				}
				if rng.IntN(3) == 0 {
					s.pass(time.Duration(rng.Int64N(int64(r.Every) * 3)))
				}
			}
			// The moment at which a cell is taken is known but for the store's answer.
			blur := 2 * slowest
			for i := range taken {
				for j := i; j < len(taken); j++ {
					span := taken[j].Sub(taken[i]) + blur
					if most := r.Burst + int(span/r.Every); j-i+1 > most {
						t.Fatalf("%d cells in %s; one every %s and a burst of %d make %d", j-i+1, span, r.Every, r.Burst, most)
					}
				}
			}
			if len(taken) == 0 || refused == 0 {
				t.Fatalf("%d taken, %d refused", len(taken), refused)
			}
			// Under-used it is, but not by much.
			span := taken[len(taken)-1].Sub(taken[0])
			if most := r.Burst + int(span/r.Every); len(taken) < most/2 && refused > len(taken) {
				t.Errorf("%d cells of %d were used", len(taken), most)
			}
		})
	}
}

func TestManyAtOnceGetABurst(t *testing.T) {
	s := tell(t)
	p := ratePolicy(time.Hour, 20)
	processes := []*Engine{s.process(), s.process(), s.process()}
	var mu sync.Mutex
	told := map[Reason]int{}
	var wg sync.WaitGroup
	for n := range 60 {
		c := s.order(n)
		s.keys[c.Key] = true
		wg.Go(func() {
			a, err := processes[n%3].Admit(s.ctx, c, p)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			told[a.Reason]++
			if (a.Verdict == Allow) != (a.Reason == "") {
				t.Errorf("%s %s", a.Verdict, a.Reason)
			}
		})
	}
	wg.Wait()
	// What a process took in advance for those who then came too late may be left over.
	if told[""] > 20 || told[""] < 15 || told[""]+told[ReasonRateLimited] != 60 {
		t.Fatalf("told %v; a burst is 20", told)
	}
}
