// This file lets time do its work on the records: leases that end, holds that have
// waited long enough, answers that are too old. Every call does it for what it sees;
// the sweep does it for what nobody calls.

package controller

import (
	"context"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	sweepTick    = time.Second
	sweepTimeout = 30 * time.Second
)

// Sweep does what is due in every store that is served.
type Sweep struct{ Engines *guard.Engines }

// NeedLeaderElection is false: gateways sweep, and the records' versions keep them apart.
func (s Sweep) NeedLeaderElection() bool { return false }

// Start sweeps until the process ends.
func (s Sweep) Start(ctx context.Context) error {
	tick := time.NewTicker(sweepTick)
	defer tick.Stop()
	failed := map[guard.Served]failing{}
	for {
		for _, served := range s.Engines.All() {
			last := failed[served]
			last.tell(ctx, s.one(ctx, served), "what is due could not all be done; trying on", "namespace", served.Namespace, "store", served.Store)
			if failed[served] = last; last == "" {
				delete(failed, served)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (s Sweep) one(ctx context.Context, served guard.Served) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	return served.Engine.Sweep(ctx)
}
