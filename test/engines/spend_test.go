// Limits of spend under races: two engines together never let more through than the
// limit allows in any window, and what did not move returns.

package engines

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// books are what surely counts at a moment: what was let in and not settled, and what
// was paid less than a window ago.
type books struct {
	mu      sync.Mutex
	t       *testing.T
	limit   *big.Rat
	window  time.Duration
	open    *big.Rat
	entries []paidAt
	most    *big.Rat
}

type paidAt struct {
	at     time.Time
	amount *big.Rat
}

func rat(t *testing.T, text string) *big.Rat {
	r, ok := new(big.Rat).SetString(text)
	if !ok {
		t.Errorf("%q is no decimal", text)
		return new(big.Rat)
	}
	return r
}

// letIn looks at the books once something was let in.
func (b *books) letIn(amount *big.Rat) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open.Add(b.open, amount)
	sum := new(big.Rat).Set(b.open)
	for _, e := range b.entries {
		if time.Since(e.at) < b.window {
			sum.Add(sum, e.amount)
		}
	}
	if sum.Cmp(b.limit) > 0 {
		b.t.Errorf("%s counts, and the limit is %s", sum.FloatString(2), b.limit.FloatString(2))
	}
	if sum.Cmp(b.most) > 0 {
		b.most.Set(sum)
	}
}

// ends is called before it is settled: from then on it counts for the window, if it was paid.
func (b *books) ends(amount *big.Rat, paid bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open.Sub(b.open, amount)
	if paid {
		b.entries = append(b.entries, paidAt{time.Now(), amount})
	}
}

func TestSpendIsNeverMoreThanTheLimit(t *testing.T) { // L01, L04
	onEachStore(t, func(t *testing.T, s *stage) {
		const window = 2 * time.Second
		limit := intent.Money{Value: "100.5", Currency: "USD"}
		p := generous.WithSpend([]guard.SpendLimit{{Name: "short", Amount: limit, Window: window}})
		b := &books{t: t, limit: rat(t, limit.Value), window: window, open: new(big.Rat), most: new(big.Rat)}
		began := time.Now()
		var passed, denied int
		var wg sync.WaitGroup
		stop := make(chan struct{})
		sweeper := make(chan struct{})
		go func() {
			defer close(sweeper)
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				e := s.one
				if i%2 == 1 {
					e = s.two
				}
				if err := e.Sweep(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}()
		for g := range 16 {
			wg.Go(func() {
				dice := rand.New(rand.NewPCG(uint64(g), 7))
				e := s.one
				if g%2 == 1 {
					e = s.two
				}
				for n := 0; time.Since(began) < 7*time.Second; n++ {
					id := fmt.Sprintf("g%d-%d", g, n)
					c := s.call(id, "order/"+id)
					amount := fmt.Sprintf("%d.%02d", dice.IntN(20), dice.IntN(100))
					m, err := intent.NewMoney(amount, "USD", intent.UnitMajor)
					if err != nil {
						t.Error(err)
						return
					}
					c.Amount = &m
					a, err := e.Admit(t.Context(), c, p)
					if err != nil {
						t.Error(err)
						return
					}
					b.mu.Lock()
					if a.Verdict == guard.Allow {
						passed++
					} else {
						denied++
					}
					b.mu.Unlock()
					if a.Verdict != guard.Allow {
						if a.Reason != guard.ReasonSpendExceeded {
							t.Errorf("%s: %s %s", id, a.Verdict, a.Reason)
							return
						}
						continue
					}
					b.letIn(rat(t, amount))
					r := paid("re_" + id)
					if dice.IntN(3) == 0 {
						r = guard.Result{Outcome: guard.AttemptFailed, Response: &guard.Response{Status: 402}}
					}
					b.ends(rat(t, amount), r.Outcome == guard.AttemptSucceeded)
					if _, err := e.Settle(t.Context(), a.Ticket, r); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		// In the end it is where it began.
		deadline, tick := time.After(patience), time.NewTicker(50*time.Millisecond)
		defer tick.Stop()
		for {
			got, err := s.two.Spend(t.Context(), policy.Budget, "short", "USD")
			if err != nil {
				t.Fatal(err)
			}
			if got == (guard.Spent{Used: "0", Reserved: "0"}) {
				break
			}
			if got.Reserved != "0" {
				t.Fatalf("nothing is under way, and %+v counts", got)
			}
			select {
			case <-tick.C:
			case <-deadline:
				t.Fatalf("in the end %+v counts", got)
			}
		}
		close(stop)
		<-sweeper
		t.Logf("%d passed and %d were denied; at most %s counted", passed, denied, b.most.FloatString(2))
		if passed < 20 || denied == 0 || b.most.Cmp(rat(t, "90")) < 0 {
			t.Errorf("%d passed and %d were denied, and at most %s counted: the limit was hardly reached", passed, denied, b.most.FloatString(2))
		}
	})
}
