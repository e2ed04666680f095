// Package metrics counts what an operator of agents has to see: what calls came to,
// what waits for a person, and what the stores do.
//
// What must hold: a call costs a few additions to counters that were found before, and
// never a question to a store; every label is bounded by what is declared in the
// cluster, whatever callers send; and the series of what was deleted are gone with the
// next scrape.
package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Name is a namespaced name.
type Name struct{ Namespace, Name string }

// unknown are the labels of calls of tools that do not exist or that their caller may
// not know of. No object can have this name.
var unknown = Name{"_unknown", "_unknown"}

// Options of metrics.
type Options struct {
	// Tools are the AgentTools that exist now. Each has its series from the first scrape
	// on, so that the first event of a kind is a rise from 0. Nil: those that were called.
	Tools func() []Name
	// Now is the time by which holds age; nil: the machine's.
	Now func() time.Time
}

// Metrics are those of one process. It is a prometheus.Collector. All methods may be
// called at the same time.
type Metrics struct {
	o Options

	counters   map[*Definition]*prometheus.CounterVec
	histograms map[*Definition]*prometheus.HistogramVec
	// unknown has no series but those of its calls.
	unknown *Tool

	mu      sync.RWMutex
	tools   map[Name]*Tool
	opened  map[Name]*openedStore
	stores  map[Name]StoreState
	holds   []Hold
	budgets map[Name]Budget
	places  func() Places
	// certificate gives when the gateway's ends.
	certificate func() time.Time
}

// New counts nothing yet.
func New(o Options) *Metrics {
	if o.Now == nil {
		o.Now = time.Now
	}
	m := &Metrics{
		o:        o,
		counters: map[*Definition]*prometheus.CounterVec{}, histograms: map[*Definition]*prometheus.HistogramVec{},
		tools: map[Name]*Tool{}, opened: map[Name]*openedStore{}, stores: map[Name]StoreState{}, budgets: map[Name]Budget{},
	}
	for _, d := range definitions {
		switch d.Kind {
		case Counter:
			m.counters[d] = d.counter()
		case Histogram:
			m.histograms[d] = d.histogram()
		}
	}
	m.unknown = &Tool{m: m, name: unknown, by: map[series]prometheus.Counter{}}
	return m
}

// Places are how many calls are where in the gateway.
type Places struct {
	Reading, Working, Waiting, Limit int
	// Async are those of the calls that go on without their callers.
	Async int
	// Queued are those that wait for a slot of a tool.
	Queued map[Name]int
}

// Gateway has the places of the gateway's calls shown.
func (m *Metrics) Gateway(places func() Places) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.places = places
}

// Certificate has the end of the gateway's certificate shown; zero: it is not known.
func (m *Metrics) Certificate(end func() time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.certificate = end
}

// Hold is one open hold.
type Hold struct {
	Namespace, Tool, Reason, State string
	// Since is when it was made.
	Since time.Time
}

// SetHolds shows these holds, and no others.
func (m *Metrics) SetHolds(holds []Hold) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holds = holds
}

// Budget is what an IntentBudget has counted.
type Budget struct {
	Held int
	// HeldLimit is 0 if there is none.
	HeldLimit int
	Spend     []Spend
}

// Spend is what counts against one limit. The amounts are shown and not decided by, so
// they need not be exact.
type Spend struct {
	Limit, Currency string
	Used, Reserved  float64
	// Max is what Used and Reserved may come to together; 0: nothing limits the sum.
	Max float64
}

// SetBudget shows an IntentBudget.
func (m *Metrics) SetBudget(name Name, b Budget) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.budgets[name] = b
}

// RemoveBudget shows it no longer.
func (m *Metrics) RemoveBudget(name Name) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.budgets, name)
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range definitions {
		ch <- d.desc()
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.follow()
	for _, v := range m.counters {
		v.Collect(ch)
	}
	for _, v := range m.histograms {
		v.Collect(ch)
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	gauge := func(d *Definition, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d.desc(), prometheus.GaugeValue, v, labels...)
	}
	if m.places != nil {
		p := m.places()
		gauge(&callsInProgress, float64(p.Working))
		gauge(&callsReading, float64(p.Reading))
		gauge(&callsWaiting, float64(p.Waiting))
		gauge(&callsAsync, float64(p.Async))
		gauge(&callsLimit, float64(p.Limit))
		for name, n := range p.Queued {
			gauge(&callsQueued, float64(n), name.Namespace, name.Name)
		}
	}
	if m.certificate != nil {
		if end := m.certificate(); !end.IsZero() {
			gauge(&certificateEnd, float64(end.Unix()))
		}
	}
	open, oldest := m.heldNow()
	for k, n := range open {
		gauge(&holdsOpen, float64(n), k.namespace, k.tool, k.reason, k.state)
	}
	for k, since := range oldest {
		gauge(&holdOldest, max(0, m.o.Now().Sub(since).Seconds()), k.namespace, k.tool, k.reason)
	}
	for name, b := range m.budgets {
		gauge(&heldIntents, float64(b.Held), name.Namespace, name.Name)
		if b.HeldLimit > 0 {
			gauge(&heldLimit, float64(b.HeldLimit), name.Namespace, name.Name)
		}
		for _, s := range b.Spend {
			gauge(&spendUsed, s.Used, name.Namespace, name.Name, s.Limit, s.Currency)
			gauge(&spendReserved, s.Reserved, name.Namespace, name.Name, s.Limit, s.Currency)
			if s.Max > 0 {
				gauge(&spendLimit, s.Max, name.Namespace, name.Name, s.Limit, s.Currency)
			}
		}
	}
	for name, s := range m.stores {
		for _, r := range refusals {
			v := 0.0
			if s.Refused == r {
				v = 1
			}
			gauge(&storeRefused, v, name.Namespace, name.Name, r)
		}
		if s.Judged {
			v := 0.0
			if s.Durable {
				v = 1
			}
			gauge(&storeDurable, v, name.Namespace, name.Name)
		}
	}
}

type holdKey struct{ namespace, tool, reason, state string }

// heldNow counts the holds, and finds the oldest of each tool and reason.
func (m *Metrics) heldNow() (open map[holdKey]int, oldest map[holdKey]time.Time) {
	open, oldest = map[holdKey]int{}, map[holdKey]time.Time{}
	for _, h := range m.holds {
		open[holdKey{h.Namespace, h.Tool, h.Reason, h.State}]++
		k := holdKey{namespace: h.Namespace, tool: h.Tool, reason: h.Reason}
		if at, ok := oldest[k]; !ok || h.Since.Before(at) {
			oldest[k] = h.Since
		}
	}
	return open, oldest
}

// follow has series for the tools that exist, and for no others.
func (m *Metrics) follow() {
	if m.o.Tools == nil {
		return
	}
	exist := map[Name]bool{}
	for _, name := range m.o.Tools() {
		exist[name] = true
		m.Tool(name.Namespace, name.Name)
	}
	m.mu.Lock()
	var gone []*Tool
	for name, t := range m.tools {
		if !exist[name] {
			gone = append(gone, t)
			delete(m.tools, name)
		}
	}
	m.mu.Unlock()
	for _, t := range gone {
		t.end()
	}
}
