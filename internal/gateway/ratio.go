// This file is the bound on a tool's retries as a share of its calls. While an upstream
// is down every call becomes a retry, and they must not be what keeps it down.
//
// Each gateway process counts for itself. That bounds the whole: calls and retries of all
// gateways are the sums of theirs, and each adds its own minimum.

package gateway

import (
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/internal/policy"
)

const (
	// ratioWindow is how far back calls and retries are counted, in steps.
	ratioWindow = 10 * time.Second
	ratioStep   = 100 * time.Millisecond
	ratioSteps  = int64(ratioWindow / ratioStep)
	ratioSecond = int64(time.Second / ratioStep)
	// ratioTools is how many tools are counted before those that are idle are forgotten.
	ratioTools = 1024
)

// ratios are the counts of all tools with a retry budget, by namespace and name.
type ratios struct {
	began time.Time // of the monotonic clock

	mu sync.Mutex
	of map[[2]string]*ratio
}

func newRatios() *ratios { return &ratios{began: time.Now(), of: map[[2]string]*ratio{}} }

// ratio counts one tool's intents that were sent for the first time, and its retries.
type ratio struct {
	// One more step than the window has: the first is over only in part.
	calls, retries [ratioSteps + 1]int
	at             int64 // the step that is being counted
}

// with gives the counts of a tool, moved on to the present.
func (r *ratios) with(tool *policy.Tool, now time.Time, do func(*ratio)) {
	step := int64(now.Sub(r.began) / ratioStep)
	r.mu.Lock()
	defer r.mu.Unlock()
	name := [2]string{tool.Namespace, tool.Name}
	counts := r.of[name]
	if counts == nil {
		if len(r.of) >= ratioTools {
			for n, c := range r.of {
				if step-c.at > ratioSteps {
					delete(r.of, n)
				}
			}
		}
		counts = &ratio{at: step}
		r.of[name] = counts
	}
	counts.move(step)
	do(counts)
}

// move empties the steps that begin anew.
func (c *ratio) move(to int64) {
	for s := max(c.at+1, to-ratioSteps); s <= to; s++ {
		c.calls[s%(ratioSteps+1)], c.retries[s%(ratioSteps+1)] = 0, 0
	}
	c.at = max(c.at, to)
}

// sum is what was counted in the last steps, the present one included.
func (c *ratio) sum(counts *[ratioSteps + 1]int, steps int64) (n int) {
	for s := max(c.at-steps+1, 0); s <= c.at; s++ {
		n += counts[s%(ratioSteps+1)]
	}
	return n
}

// first counts an intent that is sent for the first time.
func (r *ratios) first(tool *policy.Tool, now time.Time) {
	r.with(tool, now, func(c *ratio) { c.calls[c.at%(ratioSteps+1)]++ })
}

// retry counts a retry if there may be one; else it says when to ask again. Where a step
// is over only in part, its retries count and its calls do not.
func (r *ratios) retry(tool *policy.Tool, now time.Time) (wait time.Duration, allowed bool) {
	r.with(tool, now, func(c *ratio) {
		share := c.sum(&c.calls, ratioSteps) * tool.Retry.Percent / 100
		if c.sum(&c.retries, ratioSteps+1) >= share && c.sum(&c.retries, ratioSecond+1) >= tool.Retry.MinPerSecond {
			wait = time.Second
			return
		}
		c.retries[c.at%(ratioSteps+1)]++
		allowed = true
	})
	return wait, allowed
}
