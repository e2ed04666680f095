// This file compiles how many intents of a tool may be in flight, and how often it may
// be called.

package policy

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// The effective values of fields that are absent.
const (
	defaultQueueMax     = 100             // AgentTool spec.concurrency.queue.max
	defaultQueueTimeout = 5 * time.Second // AgentTool spec.concurrency.queue.timeout
	defaultBurst        = 1               // AgentTool spec.rateLimit.burst and spec.rateLimit.perCaller.burst
)

// The bounds of fields, both ends included.
var (
	boundsSlots    = [2]int{1, 10_000}
	boundsQueue    = [2]int{0, 1000}
	boundsRequests = [2]int{1, 1_000_000}
	boundsBurst    = [2]int{1, 10_000}
	boundsPer      = [2]time.Duration{time.Second, 24 * time.Hour}
)

// compileConcurrency fills in the slots of the tool.
func (t *Tool) compileConcurrency(spec *v1alpha1.ConcurrencySpec) error {
	const field = "spec.concurrency"
	if spec == nil {
		return nil
	}
	if spec.MaxInFlight == nil && spec.PerScope == nil {
		return specError(field, "limits nothing: set maxInFlight or perScope")
	}
	var err error
	if t.Guard.MaxInFlight, err = count(field+".maxInFlight", spec.MaxInFlight, 0, boundsSlots); err != nil {
		return err
	}
	if t.Guard.MaxInFlightPerScope, err = count(field+".perScope", spec.PerScope, 0, boundsSlots); err != nil {
		return err
	}
	queue := v1alpha1.QueueSpec{}
	if spec.Queue != nil {
		queue = *spec.Queue
	}
	if t.Queue.Max, err = count(field+".queue.max", queue.Max, defaultQueueMax, boundsQueue); err != nil {
		return err
	}
	t.Queue.Timeout, err = duration(field+".queue.timeout", queue.Timeout, defaultQueueTimeout, boundsTimeout)
	return err
}

// compileRateLimit fills in how often the tool may be called.
func (t *Tool) compileRateLimit(spec *v1alpha1.RateLimitSpec) error {
	const field = "spec.rateLimit"
	if spec == nil {
		return nil
	}
	switch {
	case (spec.Requests == nil) != (spec.Per == nil):
		return specError(field, "requests and per come together: set both")
	case spec.Requests == nil && spec.PerCaller == nil:
		return specError(field, "limits nothing: set requests and per, or perCaller")
	case spec.Requests == nil && spec.Burst != nil:
		return specError(field+".burst", "belongs to requests and per: set them, or remove it")
	}
	var err error
	if spec.Requests != nil {
		if t.Guard.Rate, err = rate(field, *spec.Requests, *spec.Per, spec.Burst); err != nil {
			return err
		}
	}
	if c := spec.PerCaller; c != nil {
		t.Guard.RatePerCaller, err = rate(field+".perCaller", c.Requests, c.Per, c.Burst)
	}
	return err
}

func rate(field string, requests int32, per metav1.Duration, burst *int32) (r guard.Rate, err error) {
	n, err := count(field+".requests", &requests, 0, boundsRequests)
	if err != nil {
		return r, err
	}
	within, err := duration(field+".per", &per, 0, boundsPer)
	if err != nil {
		return r, err
	}
	// Rounded up: never more often than it says.
	r.Every = (within + time.Duration(n) - 1) / time.Duration(n)
	r.Burst, err = count(field+".burst", burst, defaultBurst, boundsBurst)
	return r, err
}

// count gives the effective value of a number.
func count(field string, spec *int32, effective int, bounds [2]int) (int, error) {
	if spec == nil {
		return effective, nil
	}
	if n := int(*spec); n < bounds[0] || n > bounds[1] {
		return 0, specError(field, "is %d, but must be between %d and %d", n, bounds[0], bounds[1])
	}
	return int(*spec), nil
}
