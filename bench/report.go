// This file is what a run has to say: rows, the ratios that they come to, as JSON for
// programs and as Markdown for people.

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// cell is what is measured.
type cell struct {
	layer, workload string
	connections     int
	records         int
}

// row is a cell with its figures: the median of the rounds, but for the charges, which are all.
type row struct {
	Layer       string  `json:"layer"`
	Workload    string  `json:"workload"`
	Connections int     `json:"connections"`
	RPS         float64 `json:"rps"`
	P50         float64 `json:"p50_ms"`
	P99         float64 `json:"p99_ms"`
	// Charges are those that the provider's ledger has of this row, warm-up included.
	Charges int `json:"charges"`
	// Records is how many settled ones had been loaded (growth).
	Records int `json:"records,omitempty"`
	// CPU is what a call costs each process, in microseconds.
	CPU map[string]float64 `json:"cpu_us,omitempty"`
}

// report is what is written to the results file.
type report struct {
	Taken   time.Time         `json:"taken"`
	Machine map[string]string `json:"machine"`
	Quick   bool              `json:"quick,omitempty"`
	Results []row             `json:"results"`
	Growth  []row             `json:"growth"`
	// Ratios are at the most connections.
	Ratios map[string]float64 `json:"ratios"`
	// RecordBytes is what a settled record takes in its store, with its marks and its body.
	RecordBytes map[string]float64 `json:"record_bytes"`
	// GatewayMemory is the gateway's resident memory after its cells.
	GatewayMemory map[string]int64 `json:"gateway_memory_bytes"`
	// Took is how long each part of the run took, in seconds.
	Took map[string]float64 `json:"took_s"`
}

// took notes how long a part has taken that began then.
func (r *report) took(part string, began time.Time) {
	r.Took[part] = time.Since(began).Seconds()
	progress("%s: took %s", part, time.Since(began).Round(time.Second))
}

func newReport(s settings) *report {
	r := &report{
		Taken: time.Now().UTC().Truncate(time.Second), Quick: s.quick, Ratios: map[string]float64{},
		Results: []row{}, Growth: []row{}, RecordBytes: map[string]float64{}, GatewayMemory: map[string]int64{}, Took: map[string]float64{},
		Machine: map[string]string{
			"cpus": fmt.Sprint(runtime.NumCPU()), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
			"redis": firstLine("redis-server", "--version"),
		},
	}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				r.Machine["cpu"] = strings.TrimSpace(value)
				break
			}
		}
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Machine["load_before"] = strings.Join(strings.Fields(string(load))[:3], " ")
	}
	if binary, err := postgresProgram("postgres"); err == nil {
		r.Machine["postgres"] = firstLine(binary, "--version")
	}
	return r
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	if len(s)%2 == 1 {
		return s[len(s)/2]
	}
	return (s[len(s)/2-1] + s[len(s)/2]) / 2
}

func rowOf(c cell, rounds []figures) row {
	pick := func(get func(figures) float64) float64 {
		values := make([]float64, len(rounds))
		for i, f := range rounds {
			values[i] = get(f)
		}
		return median(values)
	}
	r := row{
		Layer: c.layer, Workload: c.workload, Connections: c.connections, Records: c.records,
		RPS: pick(func(f figures) float64 { return f.RPS }),
		P50: pick(func(f figures) float64 { return f.P50 }),
		P99: pick(func(f figures) float64 { return f.P99 }),
	}
	for _, f := range rounds {
		r.Charges += f.charges
	}
	if len(rounds[0].cost) > 0 {
		r.CPU = map[string]float64{}
		for name := range rounds[0].cost {
			r.CPU[name] = pick(func(f figures) float64 { return f.cost[name] })
		}
	}
	return r
}

func costs(cost map[string]float64) string {
	if len(cost) == 0 {
		return ""
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(cost)) {
		parts = append(parts, fmt.Sprintf("%s %.0f", name, cost[name]))
	}
	return "; CPU µs a call: " + strings.Join(parts, ", ")
}

// find is the row with the most connections.
func find(rows []row, layer, workload string, records int) *row {
	var best *row
	for i := range rows {
		r := &rows[i]
		if r.Layer == layer && r.Workload == workload && r.Records == records && (best == nil || r.Connections > best.Connections) {
			best = r
		}
	}
	return best
}

// finish computes the ratios.
func (r *report) finish() {
	ratio := func(name string, a, b *row, get func(*row) float64) {
		if a != nil && b != nil && get(b) > 0 {
			r.Ratios[name] = get(a) / get(b)
		}
	}
	rps := func(r *row) float64 { return r.RPS }
	p99 := func(r *row) float64 { return r.P99 }
	cpu := func(r *row) (sum float64) {
		for _, c := range r.CPU {
			sum += c
		}
		return sum
	}
	proxy := find(r.Results, layerProxy, workNew, 0)
	for _, name := range stores {
		paying, replaying := find(r.Results, name, workNew, 0), find(r.Results, name, workReplay, 0)
		ratio(name+"_new_to_proxy", paying, proxy, rps)
		ratio(name+"_new_p99_to_proxy", paying, proxy, p99)
		ratio(name+"_replay_to_proxy", replaying, proxy, rps)
		// As the ratio of rates is where nothing but the cores is waited for.
		ratio(name+"_new_to_proxy_by_cpu", proxy, paying, cpu)
		ratio(name+"_replay_to_proxy_by_cpu", proxy, replaying, cpu)
		ratio(name+"_new_to_floor", paying, find(r.Results, "floor-"+name, workNew, 0), rps)
		for _, workload := range []string{workNew, workReplay, workElsewhere} {
			var few, many *row
			for i := range r.Growth {
				x := &r.Growth[i]
				if x.Layer != name || x.Workload != workload {
					continue
				}
				if few == nil || x.Records < few.Records {
					few = x
				}
				if many == nil || x.Records > many.Records {
					many = x
				}
			}
			if few == many {
				continue // one size says nothing of growth
			}
			// The cost of a call with the most records, by that with the fewest.
			prefix := name + "_" + strings.ReplaceAll(workload, "-", "_") + "_growth"
			ratio(prefix, few, many, rps)
			ratio(prefix+"_cpu", many, few, func(r *row) float64 { return r.CPU["store"] + r.CPU["gateway"] })
		}
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Machine["load_after"] = strings.Join(strings.Fields(string(load))[:3], " ")
	}
}

func (r *report) save(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// readReport reads what save has written.
func readReport(path string) (*report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &r, nil
}

// The part of a page that is about a run lies between these lines.
const (
	runBegins = "<!-- run -->"
	runEnds   = "<!-- /run -->"
)

// document writes the report into a page, in the place of the one that is there.
func (r *report) document(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begins := strings.Cut(string(text), runBegins+"\n")
	_, after, ends := strings.Cut(rest, runEnds+"\n")
	if !begins || !ends {
		return fmt.Errorf("%s has no place for a run: it needs the lines\n%s\n%s", path, runBegins, runEnds)
	}
	var part strings.Builder
	r.print(&part)
	return os.WriteFile(path, []byte(before+runBegins+"\n\n"+part.String()+"\n"+runEnds+"\n"+after), 0o644)
}

func (r *report) print(w io.Writer) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) } // to standard output
	table := func(rows []row, records bool) {
		head, line := "", ""
		if records {
			head, line = " records |", " ---: |"
		}
		say("| layer | workload |%s connections | calls/s | p50 ms | p99 ms | charges | CPU µs a call |", head)
		say("| --- | --- |%s ---: | ---: | ---: | ---: | ---: | --- |", line)
		for _, x := range rows {
			count := ""
			if records {
				count = fmt.Sprintf(" %d |", x.Records)
			}
			say("| %s | %s |%s %d | %.0f | %.2f | %.2f | %d | %s |", x.Layer, x.Workload, count, x.Connections, x.RPS, x.P50, x.P99, x.Charges,
				strings.TrimPrefix(costs(x.CPU), "; CPU µs a call: "))
		}
		say("")
	}
	table(r.Results, false)
	if len(r.Growth) > 0 {
		say("With settled records in the store:")
		say("")
		table(r.Growth, true)
	}
	say("| ratio, at the most connections | |")
	say("| --- | ---: |")
	for _, name := range slices.Sorted(maps.Keys(r.Ratios)) {
		say("| %s | %.2f |", name, r.Ratios[name])
	}
	say("")
	say("| | %s |", strings.Join(stores, " | "))
	say("| --- |%s", strings.Repeat(" ---: |", len(stores)))
	line := func(title string, value func(string) string) {
		say("| %s | %s | %s | %s |", title, value("bolt"), value("redis"), value("postgres"))
	}
	line("bytes of a settled record, its body included", func(name string) string { return fmt.Sprintf("%.0f", r.RecordBytes[name]) })
	line("gateway's memory, MiB", func(name string) string { return fmt.Sprintf("%.0f", float64(r.GatewayMemory[name])/(1<<20)) })
	say("")
	if len(r.Took) > 0 {
		var parts []string
		for _, part := range slices.Sorted(maps.Keys(r.Took)) {
			parts = append(parts, fmt.Sprintf("%s %.0f", part, r.Took[part]))
		}
		say("Seconds that the parts took: %s.", strings.Join(parts, ", "))
		say("")
	}
	say("Taken: %s  ", r.Taken.Format(time.DateTime))
	for _, name := range slices.Sorted(maps.Keys(r.Machine)) {
		say("%s: %s  ", name, r.Machine[name])
	}
}
