package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// loadOf lets the load generator call a gateway that knows every payment, and returns
// which calls were made, in their order.
func loadOf(t *testing.T, args ...string) (loaded, []int64) {
	t.Helper()
	var mu sync.Mutex
	var calls []int64
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Idempotency-Key")
		i, err := strconv.ParseInt(id[strings.LastIndexByte(id, '-')+1:], 16, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		mu.Lock()
		calls = append(calls, i)
		mu.Unlock()
		w.Header().Set("Holdfast-Verdict", "REPLAY")
		w.Header().Set("Idempotent-Replayed", "true")
		w.WriteHeader(http.StatusCreated)
	}))
	defer gateway.Close()
	var said bytes.Buffer
	if err := load(append(args, "-to", gateway.URL, "-connections", "4", "-warm-up", "20ms", "-measure", "500ms"), &said); err != nil {
		t.Fatal(err)
	}
	text, measured := strings.CutPrefix(said.String(), "begin\nend\n")
	if !measured {
		t.Fatalf("it says %q", said.String())
	}
	var out loaded
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatal(err)
	}
	if out.Replayed != len(calls) || len(out.Other) > 0 {
		t.Errorf("%d calls came to %+v", len(calls), out)
	}
	return out, calls
}

// Each payment of the sample is seen before its retry is measured, and there are as many
// of them however many were loaded.
func TestReplaySample(t *testing.T) {
	for _, known := range []int64{60, 100, 12_345, 1_000_000} {
		const sample = 100
		n := min(known, sample)
		out, calls := loadOf(t, "-workload", workReplay, "-known", fmt.Sprint(known), "-sample", fmt.Sprint(sample))
		if out.Short || out.Calls == 0 || int64(len(calls)) <= n {
			t.Fatalf("%d payments: %d calls, of which were measured %+v", known, len(calls), out)
		}
		seen := map[int64]bool{}
		for _, i := range calls[:n] {
			seen[i] = true
		}
		for k := range n {
			if !seen[k*known/n] {
				t.Fatalf("%d payments: call %d was not made before the warm-up", known, k*known/n)
			}
		}
		for _, i := range calls {
			if !seen[i] {
				t.Fatalf("%d payments: call %d is not of the sample", known, i)
			}
		}
	}
}

// No payment is retried twice at a gateway that is to see each for the first time.
func TestReplayElsewhere(t *testing.T) {
	for known, short := range map[int64]bool{30: true, 1_000_000: false} {
		out, calls := loadOf(t, "-workload", workElsewhere, "-known", fmt.Sprint(known))
		if out.Short != short || short != (out.Calls == 0) {
			t.Errorf("%d payments came to %+v", known, out)
		}
		if short && int64(len(calls)) != known {
			t.Errorf("%d of %d payments were retried", len(calls), known)
		}
		seen := map[int64]bool{}
		for _, i := range calls {
			if seen[i] || i < 0 || i >= known {
				t.Fatalf("call %d of %d was made once more, or was not paid", i, known)
			}
			seen[i] = true
		}
	}
}

// What grows is told of each workload by itself, from the fewest records that it was
// measured with to the most.
func TestGrowthRatios(t *testing.T) {
	r := newReport(settings{})
	for _, x := range []struct {
		workload string
		records  int
		rps      float64
	}{
		{workReplay, 1_000, 900}, {workReplay, 100_000, 800}, {workReplay, 1_000_000, 750},
		{workElsewhere, 100_000, 300}, {workElsewhere, 1_000_000, 200}, {workNew, 1_000, 100},
	} {
		r.Growth = append(r.Growth, row{Layer: "redis", Workload: x.workload, Connections: 64, Records: x.records, RPS: x.rps, CPU: map[string]float64{"store": 3000 / x.rps}})
	}
	r.finish()
	for name, want := range map[string]float64{
		"redis_replay_growth": 1.2, "redis_replay_growth_cpu": 1.2, "redis_replay_elsewhere_growth": 1.5, "redis_replay_elsewhere_growth_cpu": 1.5,
		"redis_new_growth": 0, "postgres_replay_growth": 0,
	} {
		if got := r.Ratios[name]; got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}
