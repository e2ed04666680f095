package gateway

import (
	"runtime/metrics"
	"testing"
)

func TestGarbageFollowsWhatIsKept(t *testing.T) {
	for _, tt := range []struct{ keptMiB, want int }{{0, 400}, {8, 400}, {22, 400}, {28, 300}, {56, 100}, {75, 50}, {500, 50}} {
		if got := garbageFor(uint64(tt.keptMiB) << 20); got != tt.want {
			t.Errorf("for %d MiB it is %d, want %d", tt.keptMiB, got, tt.want)
		}
	}
	sample := []metrics.Sample{{Name: liveHeap}}
	if metrics.Read(sample); sample[0].Value.Kind() != metrics.KindUint64 {
		t.Errorf("Go does not tell %s", liveHeap)
	}
}
