// This file is where calls wait for a slot of their tool. How many slots there are is for
// the guard to say, which counts those of all gateways; here is only the order in which
// the calls of this process ask for them.
//
// Who came first asks first: while somebody waits, a call that comes is told all else that
// the guard has to say of it, and takes no slot. The first of those who wait asks again
// shortly after a call of this process has given its slot back, and now and then, since
// others give theirs back, too. Whoever gets a slot has the next one ask.

package gateway

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// queues are the calls that wait, by their tools.
type queues struct {
	mu sync.Mutex
	of map[queueName][]*waiter
}

type queueName struct{ namespace, tool string }

// waiter is one call that waits.
type waiter struct {
	// turn is filled when it is to ask.
	turn chan struct{}
	// aside: a path of its scope is full, so it keeps nobody from the slots of the tool.
	aside bool
}

func nameOf(tool *policy.Tool) queueName { return queueName{tool.Namespace, tool.Name} }

// line says whether somebody waits for whom others have to wait, too.
func (q *queues) line(of queueName) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.ContainsFunc(q.of[of], func(w *waiter) bool { return !w.aside })
}

// join lets a call wait behind all others, if there are fewer than most; nil: it may not.
func (q *queues) join(of queueName, most int) *waiter {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.of[of]) >= most {
		return nil
	}
	if q.of == nil {
		q.of = map[queueName][]*waiter{}
	}
	w := &waiter{turn: make(chan struct{}, 1)}
	q.of[of] = append(q.of[of], w)
	return w
}

// leave ends the waiting of one, and has the next one ask.
func (q *queues) leave(of queueName, w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	rest := slices.DeleteFunc(q.of[of], func(o *waiter) bool { return o == w })
	if len(rest) == 0 {
		delete(q.of, of)
		return
	}
	q.of[of] = rest
	next(rest)
}

// lengths are how many calls wait for each tool.
func (q *queues) lengths() map[queueName]int {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := make(map[queueName]int, len(q.of))
	for of, waiting := range q.of {
		out[of] = len(waiting)
	}
	return out
}

// stand has the waiter stand aside or in line, and says whether it is the first of those in line.
func (q *queues) stand(of queueName, w *waiter, aside bool) (first bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.aside != aside {
		if w.aside = aside; aside {
			next(q.of[of])
		}
	}
	for _, o := range q.of[of] {
		if !o.aside {
			return o == w
		}
	}
	return false
}

// A slot that was held for some time is left alone for this part of it, at most for
// giveMost, before it is asked for here again: otherwise those who wait at other gateways,
// who look now and then, would never find one while somebody waits here.
const (
	givePart = 16
	giveMost = waitMost
)

// freed has somebody ask for the slot that a call of this process has given back.
func (q *queues) freed(of queueName, held time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.of[of]) == 0 {
		return
	}
	time.AfterFunc(min(held/givePart, giveMost), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		next(q.of[of])
	})
}

// next has the first one ask that stands in line and was not told to.
func next(waiting []*waiter) {
	for _, w := range waiting {
		if w.aside {
			continue
		}
		select {
		case w.turn <- struct{}{}:
			return
		default: // it is about to ask
		}
	}
}

// limited says that the tool's intents take slots.
func limited(tool *policy.Tool) bool {
	return tool.Guard.MaxInFlight > 0 || tool.Guard.MaxInFlightPerScope > 0
}

// noSlot says that nothing but a slot was missing, of the tool or of a path.
func noSlot(a guard.Answer) (missing, ofPath bool) {
	if a.Verdict != guard.Deny {
		return false, false
	}
	return a.Reason == guard.ReasonTooManyInFlight || a.Reason == guard.ReasonScopeInFlight, a.Reason == guard.ReasonScopeInFlight
}

// ask asks the guard once. A Reserve that was made must get its ticket back, also if the
// caller leaves now.
func (c *call) ask(engine *guard.Engine, wanted guard.Call, p guard.Policy) (guard.Answer, error) {
	ctx := c.g.admitting.context(time.Now())
	if c.span != nil {
		ctx = trace.ContextWithSpan(ctx, c.span)
	}
	return engine.Admit(ctx, wanted, p)
}

// reserve asks the guard, and waits for a slot if the tool has none left.
func (c *call) reserve(engine *guard.Engine, wanted guard.Call, tool *policy.Tool, p guard.Policy) (guard.Answer, error) {
	if !limited(tool) {
		return c.ask(engine, wanted, p)
	}
	of := nameOf(tool)
	wanted.Behind = c.g.queues.line(of)
	a, err := c.ask(engine, wanted, p)
	missing, ofPath := noSlot(a)
	if err != nil || !missing {
		return a, err
	}
	// What was counted once for this attempt is not counted again.
	wanted.Behind, wanted.Passed, wanted.MayRetry = false, true, nil
	w := c.g.queues.join(of, tool.Queue.Max)
	if w == nil {
		return a, nil
	}
	defer c.g.queues.leave(of, w)
	// Who waits leaves the work to others. Too many of one caller do not wait.
	if ok, _ := c.move(c.g.waiting); !ok {
		return a, nil
	}
	c.waits()
	until := time.Now().Add(tool.Queue.Timeout)
	pause := waitFirst
	for {
		left := time.Until(until)
		if left <= 0 {
			return a, nil
		}
		// The first one looks by itself, too, and so does whoever stands aside.
		wait := left
		if c.g.queues.stand(of, w, ofPath) || ofPath {
			wait = min(left, pause/2+rand.N(pause))
			pause = min(pause*2, waitMost)
		}
		timer := time.NewTimer(wait)
		select {
		case <-w.turn:
			pause = waitFirst
		case <-timer.C:
			if time.Until(until) <= 0 {
				return a, nil
			}
		case <-c.r.Context().Done():
			timer.Stop()
			return guard.Answer{}, errGone
		case <-c.g.draining:
			timer.Stop()
			return a, nil
		}
		timer.Stop()
		if ok, _ := c.move(c.g.working); !ok {
			continue // there is no slot in this gateway itself
		}
		if a, err = c.ask(engine, wanted, p); err != nil {
			return a, err
		}
		if missing, ofPath = noSlot(a); !missing {
			return a, nil
		}
		if ok, _ := c.move(c.g.waiting); !ok {
			return a, nil
		}
	}
}
