package main

// A short run of everything, on real servers: the figures mean nothing, the money and
// the shape of what is said do.

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// quickRun builds the bench, lets it run and reads what it wrote.
func quickRun(t *testing.T, args ...string) report {
	t.Helper()
	dir := t.TempDir()
	program, out := filepath.Join(dir, "bench"), filepath.Join(dir, "results.json")
	if text, err := exec.Command("go", "build", "-buildvcs=false", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, text)
	}
	cmd := exec.Command(program, append([]string{"-quick", "-out", out}, args...)...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestQuick(t *testing.T) {
	r := quickRun(t)
	// Every cell is there once, and every payment in the ledger.
	type key struct {
		layer, workload      string
		connections, records int
	}
	have := map[key]row{}
	for _, x := range append(r.Results, r.Growth...) {
		k := key{x.Layer, x.Workload, x.Connections, x.Records}
		if _, twice := have[k]; twice {
			t.Errorf("%+v comes twice", k)
		}
		have[k] = x
		if x.RPS <= 0 || x.P50 <= 0 || x.P99 < x.P50 {
			t.Errorf("%+v: %.2f/s, p50 %.3f ms, p99 %.3f ms", k, x.RPS, x.P50, x.P99)
		}
	}
	want := func(k key, pays bool) {
		t.Helper()
		x, ok := have[k]
		switch {
		case !ok:
			t.Errorf("%+v is missing", k)
		case pays != (x.Charges > 0):
			t.Errorf("%+v: %d charges", k, x.Charges)
		}
		delete(have, k)
	}
	for _, connections := range []int{1, 16} {
		for _, layer := range stores {
			want(key{layer, workNew, connections, 0}, true)
			want(key{layer, workReplay, connections, 0}, false)
		}
		want(key{layerProxy, workNew, connections, 0}, true)
		want(key{layerFloorRedis, workNew, connections, 0}, false)
		want(key{layerFloorPostgres, workNew, connections, 0}, false)
	}
	for _, layer := range stores {
		for _, records := range []int{100, 1_000} {
			want(key{layer, workNew, 16, records}, true)
			want(key{layer, workReplay, 16, records}, false)
		}
		// A retry at a gateway that has not seen the payment is measured where these suffice.
		for _, records := range []int{100, 1_000} {
			k := key{layer, workElsewhere, 16, records}
			if _, measured := have[k]; measured {
				want(k, false)
			}
		}
		if r.RecordBytes[layer] <= 0 || r.GatewayMemory[layer] <= 0 {
			t.Errorf("%s: %.0f bytes of a record, %d of the gateway", layer, r.RecordBytes[layer], r.GatewayMemory[layer])
		}
	}
	for k := range have {
		t.Errorf("%+v is not asked for", k)
	}
	for _, ratio := range []string{
		"bolt_new_to_proxy", "redis_new_to_proxy", "redis_new_p99_to_proxy", "redis_replay_to_proxy", "redis_new_to_proxy_by_cpu", "redis_new_to_floor",
		"postgres_new_to_floor", "postgres_new_growth", "redis_replay_growth_cpu",
	} {
		if r.Ratios[ratio] <= 0 {
			t.Errorf("the ratio %s is %v", ratio, r.Ratios[ratio])
		}
	}
}

// A report takes the place of the one before it, and of nothing else.
func TestDocument(t *testing.T) {
	dir := t.TempDir()
	page, results := filepath.Join(dir, "page.md"), filepath.Join(dir, "results.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := newReport(settings{})
	r.Results = append(r.Results, row{Layer: "redis", Workload: workNew, Connections: 64, RPS: 4321})
	if err := r.save(results); err != nil {
		t.Fatal(err)
	}
	write("before\n" + runBegins + "\nan earlier one\n" + runEnds + "\nafter\n")
	for range 2 {
		if err := run([]string{"-from", results, "-docs", page}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(text); !strings.HasPrefix(got, "before\n"+runBegins+"\n") || !strings.HasSuffix(got, runEnds+"\nafter\n") ||
			strings.Contains(got, "earlier") || strings.Count(got, "| redis | new | 64 | 4321 |") != 1 {
			t.Errorf("the page is\n%s", got)
		}
	}
	write("nothing\n" + runBegins + "\n")
	if err := run([]string{"-from", results, "-docs", page}); err == nil {
		t.Error("a page without a place for a run was written")
	}
}
