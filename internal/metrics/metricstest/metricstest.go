// Package metricstest reads metrics as a scrape would, for tests.
package metricstest

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Read gives the value of every series, by its text form: name{label="value",…} with
// the labels in the order of their names, without empty ones. A histogram is its _count
// and _sum.
func Read(t testing.TB, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := ""
			for _, l := range m.GetLabel() {
				if l.GetValue() == "" {
					continue
				}
				if labels != "" {
					labels += ","
				}
				labels += l.GetName() + `="` + l.GetValue() + `"`
			}
			if labels != "" {
				labels = "{" + labels + "}"
			}
			switch {
			case m.GetHistogram() != nil:
				out[f.GetName()+"_count"+labels] = float64(m.GetHistogram().GetSampleCount())
				out[f.GetName()+"_sum"+labels] = m.GetHistogram().GetSampleSum()
			case m.GetCounter() != nil:
				out[f.GetName()+labels] = m.GetCounter().GetValue()
			default:
				out[f.GetName()+labels] = m.GetGauge().GetValue()
			}
		}
	}
	return out
}
