// This file is the part of the simulator that is about local tools: the agent itself holds
// the attempt. It claims it, renews its lease while it runs, and settles it, each time
// through whichever process it comes to, and goes by its own clock. Its requests and their
// answers get lost on the way, and it asks again.

package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const simRenewFor = 20 * time.Second

// claim asks for an attempt, and again under the same token if the answer is lost.
func (w *world) claim(p *process, engine *Engine, c Call, pol Policy) (Answer, error) {
	w.claims++
	c.Claim = fmt.Sprint("token", w.claims)
	for tries := 0; ; tries++ {
		through := p
		if tries > 0 {
			through, engine = w.anyProcess()
		}
		asked, came := simClock{w, p}.Now(), simClock{w, through}.Now()
		a, err := engine.Admit(context.Background(), c, pol)
		if again := err == nil && w.chance(10) || errors.Is(err, store.ErrUnavailable); again && tries < 3 {
			w.logf("the answer to the claim %s is lost: %s %v", c.Claim, a.Verdict, err)
			w.stall()
			continue
		}
		if a.Ticket != nil {
			a.Ticket = w.handOver(p, engine, a.Ticket, asked, came)
		}
		return a, err
	}
}

// handOver makes the holder's own ticket of what an engine has said: a time from when it
// was asked, on the holder's clock.
func (w *world) handOver(p *process, engine *Engine, t *Ticket, asked, came Reading) *Ticket {
	fence := t.Fence()
	engine.HandOver(t)
	mine := *t
	mine.clock, mine.deadline = simClock{w, p}, asked.after(came.left(t.deadline))
	w.fences[&mine] = fence
	return &mine
}

func (w *world) anyProcess() (*process, *Engine) {
	p := w.procs[w.local.IntN(len(w.procs))]
	return p, p.engine
}

// renew keeps the lease while the holder does not come to send.
func (w *world) renew(p *process, t *Ticket, who string) *Ticket {
	for range w.local.IntN(5) {
		if !t.InTime() && w.mutation != renewsOver {
			return t // its time is over, and it does not ask any more
		}
		fence := w.fences[t]
		through, engine := w.anyProcess()
		asked, came := simClock{w, p}.Now(), simClock{w, through}.Now()
		a, err := engine.Renew(context.Background(), fence)
		w.bug(err)
		if err == nil {
			w.logf("%s: renews attempt %d: %s %s", who, t.Attempt, a.Verdict, a.Reason)
		}
		if a.Ticket != nil && !w.chance(10) {
			next := w.handOver(p, engine, a.Ticket, asked, came)
			w.engineOf[next] = engine
			t = next
		}
		if w.local.IntN(3) == 0 {
			w.stall()
			continue
		}
		until := w.t + time.Duration(w.local.Int64N(int64(simTimeout)))
		w.giveWay(func() bool { return w.t >= until })
	}
	return t
}

// settleFor settles an attempt, by its own engine or, where its agent holds it, through any.
func (w *world) settleFor(t *Ticket, res Result) (a Answer, err error) {
	fence, handedOver := w.fences[t]
	if !handedOver {
		return w.engineOf[t].Settle(context.Background(), t, res)
	}
	for tries := 0; ; tries++ {
		_, engine := w.anyProcess()
		a, err = engine.SettleClaim(context.Background(), fence, res)
		lost := err == nil && w.chance(10)
		if !lost && !errors.Is(err, store.ErrUnavailable) || tries == 20 {
			return a, err
		}
		w.logf("the answer to the settlement of %s is lost: %v", fence.IntentID, err)
		w.stall()
	}
}
