// This file is how often an intent is tried. What must hold: attempts are counted in
// the record, so neither a restart nor another replica gives an intent more of them;
// and nobody but a caller asks for another one unless every attempt under this key of
// the provider is known to have moved nothing.

package guard

import (
	"math/rand/v2"
	"time"
)

// RetryBudget says how often an intent is tried, and how long is waited in between.
// It never changes once it is part of a Policy.
type RetryBudget struct {
	// Attempts is how many there are, from the last release.
	Attempts int
	// The longest wait is Initial after the first attempt and Factor times longer after
	// each, up to Max. How long it really is is random.
	Initial, Max time.Duration
	Factor       int
}

// longest is the longest wait after so many attempts.
func (b *RetryBudget) longest(attempts int) time.Duration {
	return backoff(b.Initial, b.Max, b.Factor, attempts-1)
}

// backoff is a wait that became factor times longer so many times, up to most.
func backoff(wait, most time.Duration, factor, times int) time.Duration {
	by := time.Duration(max(factor, 1))
	wait = min(wait, most)
	for range times {
		if wait >= most/by {
			return most
		}
		wait *= by
	}
	return wait
}

// random is a time from 0 to most, each as likely.
func random(most time.Duration) time.Duration { return rand.N(most + 1) }

// tried is how many attempts count against the budget.
func (r *record) tried() int { return len(r.Attempts) - r.BudgetFrom }

// attemptsLeft says whether the intent may be tried again, and how long to wait at least.
func (r *record) attemptsLeft(o Options) (bool, time.Duration) {
	b := r.Policy.Retry
	if o.mutation == noBudget {
		return true, o.Backoff
	}
	if b == nil {
		return r.tried() < o.Attempts, o.Backoff
	}
	// Full jitter: those that were turned away together do not come back together.
	return r.tried() < b.Attempts, o.Random(b.longest(r.tried()))
}

// nothingMovedForSure: every attempt under this key of the provider is known to have
// moved nothing; none was only counted so by a person's word.
func (r *record) nothingMovedForSure() bool {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Generation == r.Generation && (a.Lost || !a.Outcome.movedNothing()) {
			return false
		}
	}
	return true
}

// refuseRetry asks the caller's own bound on retries, once for a call.
func (r *record) refuseRetry(c *Call, asked *bool) (wait time.Duration, refused bool) {
	if r.State != Retryable || c.MayRetry == nil || *asked {
		return 0, false
	}
	wait, allowed := c.MayRetry()
	*asked = allowed
	return wait, !allowed
}
