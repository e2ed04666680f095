// This file decides how much garbage a process with a gateway keeps before it collects it.
//
// A call makes much garbage and a gateway keeps little, so at Go's own 100 it would collect
// all the time. But a process that also runs the controllers keeps every object of the
// cluster: five times that would be hundreds of MiB.

package gateway

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// garbage is GOGC as long as little is kept, leastGarbage that however much is.
	garbage, leastGarbage = 400, 50
	// heapAim is what the heap grows to at the most, unless more than half of it is kept.
	heapAim = 112 << 20
	// garbageTick is how often it is looked how much is kept.
	garbageTick = time.Second
	liveHeap    = "/gc/heap/live:bytes"
)

// garbageFor is GOGC for a process that keeps so many bytes.
func garbageFor(kept uint64) int {
	if kept == 0 {
		return garbage
	}
	return min(max(int(heapAim*100/kept)-100, leastGarbage), garbage)
}

// collectGarbage sets GOGC by what is kept, until ctx ends, if the environment names none.
func collectGarbage(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	set := garbage
	debug.SetGCPercent(set)
	go func() {
		tick := time.NewTicker(garbageTick)
		defer tick.Stop()
		sample := []metrics.Sample{{Name: liveHeap}}
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			metrics.Read(sample)
			if sample[0].Value.Kind() != metrics.KindUint64 {
				return
			}
			if now := garbageFor(sample[0].Value.Uint64()); now != set {
				set = now
				debug.SetGCPercent(set)
			}
		}
	}()
}
