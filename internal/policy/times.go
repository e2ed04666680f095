// This file is about the times of a tool, for those who must know them of one that is
// not served, too.

package policy

import (
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// OfTool is what the guard is told of a tool that is not served, where a record of it has
// to be made all the same. A nil tool is one that is gone.
func OfTool(obj *v1alpha1.AgentTool, budget string) guard.Policy {
	p := guard.Policy{Budget: budget, Window: defaultOverlapWindow, TTL: defaultTTL, Timeout: defaultUpstreamTimeout}
	if obj != nil {
		p.Timeout, p.SettleAfter = Times(obj)
	}
	return p
}

// Times are how long an attempt of this tool may take, and how long after it a payment
// may still become visible, as its spec says or as they count where it does not.
func Times(obj *v1alpha1.AgentTool) (timeout, settleAfter time.Duration) {
	timeout = defaultUpstreamTimeout
	if http := obj.Spec.Upstream.HTTP; http != nil {
		if http.Timeout != nil {
			timeout = http.Timeout.Duration
		}
		if http.SettleAfter != nil {
			settleAfter = http.SettleAfter.Duration
		}
	}
	if local := obj.Spec.Upstream.Local; local != nil {
		timeout, settleAfter = defaultLease, local.SettleAfter.Duration
		if local.Lease != nil {
			timeout = local.Lease.Duration
		}
	}
	return timeout, settleAfter
}
