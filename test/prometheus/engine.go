// Package prometheus evaluates Holdfast's alert rules and its dashboard's queries with
// Prometheus' own engine, over series that are in memory.
package prometheus

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// Sample is one value at one time.
type Sample struct {
	At    time.Time
	Value float64
}

// Memory holds series. It is a storage.Queryable.
type Memory struct {
	series map[string]*series
	order  []string
}

type series struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// Add adds a sample to the series with these labels. The samples of a series come in
// the order of time.
func (m *Memory) Add(l labels.Labels, s Sample) {
	if m.series == nil {
		m.series = map[string]*series{}
	}
	key := l.String()
	if m.series[key] == nil {
		m.series[key] = &series{labels: l}
		m.order = append(m.order, key)
		slices.Sort(m.order)
	}
	m.series[key].samples = append(m.series[key].samples, sample{s})
}

// Load adds a series as Prometheus' own tests write it, name{label="value"} 0+1x60, with a
// value at each step from the start on.
func (m *Memory) Load(text string, start time.Time, step time.Duration) error {
	l, values, err := Parser.ParseSeriesDesc(text)
	if err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	for i, v := range values {
		if !v.Omitted {
			m.Add(l, Sample{start.Add(time.Duration(i) * step), v.Value})
		}
	}
	return nil
}

// Parser reads PromQL.
var Parser = parser.NewParser(parser.Options{})

var engine = promql.NewEngine(promql.EngineOpts{
	MaxSamples: 10_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, Parser: Parser,
})

// Instant evaluates an expression at one time.
func (m *Memory) Instant(ctx context.Context, expr string, at time.Time) (promql.Vector, error) {
	q, err := engine.NewInstantQuery(ctx, m, nil, expr, at)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", expr, err)
	}
	defer q.Close()
	v, err := q.Exec(ctx).Vector()
	return slices.Clone(v), err
}

// Range evaluates an expression at each step of a time.
func (m *Memory) Range(ctx context.Context, expr string, from, to time.Time, step time.Duration) (promql.Matrix, error) {
	q, err := engine.NewRangeQuery(ctx, m, nil, expr, from, to, step)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", expr, err)
	}
	defer q.Close()
	result, err := q.Exec(ctx).Matrix()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", expr, err)
	}
	out := make(promql.Matrix, len(result)) // the engine uses its own again
	for i, s := range result {
		out[i] = promql.Series{Metric: s.Metric.Copy(), Floats: slices.Clone(s.Floats)}
	}
	return out, nil
}

// Querier implements storage.Queryable.
func (m *Memory) Querier(_, _ int64) (storage.Querier, error) { return querier{m}, nil }

type querier struct{ m *Memory }

func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	set := &found{}
	for _, key := range q.m.order {
		s := q.m.series[key]
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(s.labels.Get(m.Name)) }) {
			set.list = append(set.list, storage.NewListSeries(s.labels, s.samples))
		}
	}
	return set
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

// found is a storage.SeriesSet.
type found struct {
	list []storage.Series
	next int
}

func (f *found) Next() bool                        { f.next++; return f.next <= len(f.list) }
func (f *found) At() storage.Series                { return f.list[f.next-1] }
func (f *found) Err() error                        { return nil }
func (f *found) Warnings() annotations.Annotations { return nil }

// sample is a chunks.Sample.
type sample struct{ s Sample }

func (s sample) ST() int64                     { return 0 }
func (s sample) T() int64                      { return s.s.At.UnixMilli() }
func (s sample) F() float64                    { return s.s.Value }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }
