// This file is how one call makes more than one attempt. What must hold: another one is
// only begun while the guard says that every attempt before it has moved nothing, and
// each is reserved anew, so that whatever was paid meanwhile, or is in flight by another
// call, is met as if the caller had come again by itself. It is judged by the policy and
// the rights of its own moment; where they have changed, the caller must come again.

package gateway

import (
	"errors"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// attempts makes attempts until one of them, or the guard, has an answer.
func (c *call) attempts(engine *guard.Engine, wanted guard.Call, tool *policy.Tool, t target) *problem {
	until := time.Now().Add(tool.InFlight.Timeout)
	if tool.Retry != nil {
		until = time.Now().Add(tool.Retry.Patience)
		wanted.MayRetry = func() (time.Duration, bool) { return c.g.ratios.retry(tool, time.Now()) }
	}
	return c.tries(engine, wanted, tool, t, until, nil)
}

// tries is the rest of attempts, which may begin with what the guard has said already.
func (c *call) tries(engine *guard.Engine, wanted guard.Call, tool *policy.Tool, t target, until time.Time, said *guard.Answer) *problem {
	if tool.Resume != nil {
		c.keeps(&wanted, c.ring, tool, &t)
	}
	patience := c.beforehand(until)
	for made := 0; ; {
		var a guard.Answer
		var err error
		if said != nil {
			a, said = *said, nil
		} else {
			a, err = c.admit(engine, wanted, tool, patience)
		}
		c.waited()
		switch {
		case errors.Is(err, errGone):
			c.abandon()
		case err != nil:
			return c.failure(err, tool)
		case backsOff(a) && tool.Retry != nil && (made > 0 || tool.InFlight.Wait):
		case a.Verdict != guard.Allow || a.Ticket == nil:
			return c.tell(a, tool)
		case c.preferred.async:
			return c.handOffTries(engine, wanted, tool, t, a)
		default:
			if tool.Retry != nil && !a.Ticket.Retry {
				c.g.ratios.first(tool, time.Now())
			}
			p, settled, again := c.spend(engine, tool, t, a.Ticket)
			if !again {
				return p
			}
			a = guard.Answer{Verdict: guard.InFlightNow, Reason: guard.ReasonBackoff, Intent: settled.Intent, RetryAfter: settled.RetryAfter}
			made++
		}
		// From here on, a is what the caller is told if it does not wait.
		if !c.pause(a.RetryAfter, patience) {
			return c.tell(a, tool)
		}
		a.RetryAfter = time.Second
		if !c.stands(tool, engine) || c.equip(tool, &t) != nil {
			return c.tell(a, tool)
		}
		c.cause = nil
	}
}

// handOffTries has the attempts made without the caller. It stands by itself so that a call
// whose caller waits allocates nothing for it.
func (c *call) handOffTries(engine *guard.Engine, wanted guard.Call, tool *policy.Tool, t target, a guard.Answer) *problem {
	return c.handOff(a, func(b *call) *problem {
		return b.tries(engine, wanted, tool, t, time.Now().Add(asyncPatience), &a)
	})
}

// backsOff says that the intent's next attempt must wait.
func backsOff(a guard.Answer) bool {
	return a.Verdict == guard.InFlightNow && a.Reason == guard.ReasonBackoff
}

// stands says whether policy, engine and rights are still what the call began with.
func (c *call) stands(tool *policy.Tool, engine *guard.Engine) bool {
	if now, err := c.g.o.Policies().Tool(c.namespace, c.tool); err != nil || now != tool {
		return false
	}
	if now, err := c.g.o.Engines.Get(tool.Namespace, tool.Store); err != nil || now != engine {
		return false
	}
	return c.g.o.Access.Authorize(c.r.Context(), c.caller, c.namespace, c.tool) == nil
}

// pause waits out a backoff, if that is over in time and there is a place to wait and one
// to go on. Whoever waits leaves the work to others.
func (c *call) pause(wait time.Duration, until time.Time) bool {
	if wait > time.Until(until) {
		return false
	}
	if ok, _ := c.move(c.g.waiting); !ok {
		return false
	}
	c.waits()
	defer c.waited()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.r.Context().Done():
		c.abandon()
	case <-c.g.draining:
		return false
	}
	ok, _ := c.move(c.g.working)
	return ok
}
