// This file compiles a tool's retry budget. Without one the guard's own numbers hold,
// and the gateway tries once a call.

package policy

import (
	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// compileRetryBudget comes after compileIdempotency, whose patience it takes over.
func (t *Tool) compileRetryBudget(spec *v1alpha1.RetryBudget) error {
	const field = "spec.retryBudget"
	if spec == nil {
		return nil
	}
	budget, retry := guard.RetryBudget{}, Retry{}
	var err error
	if budget.Attempts, err = whole(field+".attempts", spec.Attempts, defaultAttempts, boundsAttempts); err != nil {
		return err
	}
	backoff := v1alpha1.RetryBackoff{}
	if spec.Backoff != nil {
		backoff = *spec.Backoff
	}
	if budget.Initial, budget.Max, budget.Factor, err = retryBackoff.read(field+".backoff", backoff.Initial, backoff.Max, backoff.Factor); err != nil {
		return err
	}
	// Where a call does not wait for others, it has as long as one attempt may take.
	retry.Patience = t.Upstream.Timeout
	if t.InFlight.Wait {
		retry.Patience = t.InFlight.Timeout
	}
	each, err := duration(field+".perAttemptTimeout", spec.PerAttemptTimeout, t.Upstream.Timeout, boundsTimeout)
	if err != nil {
		return err
	}
	if each > t.Upstream.Timeout {
		return specError(field+".perAttemptTimeout", "is %v, but must not be more than upstream.http.timeout, %v", each, t.Upstream.Timeout)
	}
	t.Upstream.Timeout, t.Guard.Timeout = each, each
	ratio := v1alpha1.RetryRatio{}
	if spec.Ratio != nil {
		ratio = *spec.Ratio
	}
	if retry.Percent, err = whole(field+".ratio.percent", ratio.Percent, defaultRetryPercent, boundsPercent); err != nil {
		return err
	}
	if retry.MinPerSecond, err = whole(field+".ratio.minPerSecond", ratio.MinPerSecond, defaultRetriesPerSecond, boundsPerSecond); err != nil {
		return err
	}
	t.Retry, t.Guard.Retry = &retry, &budget
	return nil
}

// whole gives the effective value of a whole number.
func whole(field string, spec *int32, effective int, bounds [2]int) (int, error) {
	n := orPointer(spec, effective)
	if n < bounds[0] || n > bounds[1] {
		return 0, specError(field, "is %d, but must be between %d and %d", n, bounds[0], bounds[1])
	}
	return n, nil
}
