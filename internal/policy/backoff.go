// This file reads backoffs: waits that become longer each time, of attempts and of checks.

package policy

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// backoffRule is what holds of a backoff: the effective values of what is absent, where max
// is at least initial, and the bounds.
type backoffRule struct {
	initial, max     time.Duration
	factor           int
	ofInitial, ofMax [2]time.Duration
	ofFactor         [2]int
}

var (
	retryBackoff = backoffRule{
		defaultBackoffInitial, defaultBackoffMax, defaultBackoffFactor, boundsInitial, boundsMax, boundsFactor,
	}
	checkBackoff = backoffRule{
		defaultCheckInitial, defaultCheckMax, defaultCheckFactor, boundsCheckInitial, boundsCheckMax, boundsCheckFactor,
	}
)

// read gives the effective values of what the spec says at a field.
func (r backoffRule) read(field string, initial, longest *metav1.Duration, factor *int32) (first, most time.Duration, by int, err error) {
	if first, err = duration(field+".initial", initial, r.initial, r.ofInitial); err != nil {
		return 0, 0, 0, err
	}
	if by, err = whole(field+".factor", factor, r.factor, r.ofFactor); err != nil {
		return 0, 0, 0, err
	}
	if most, err = duration(field+".max", longest, max(r.max, first), r.ofMax); err != nil {
		return 0, 0, 0, err
	}
	if most < first {
		return 0, 0, 0, specError(field+".max", "is %v, which is less than initial, %v", most, first)
	}
	return first, most, by, nil
}
