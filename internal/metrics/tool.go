// This file counts for one tool. What a call needs is found once, when the tool is seen
// first; a verdict with a reason once, when it is given first.

package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NoVerdict stands for calls that got none.
const NoVerdict = "none"

// The reasons of late results.
const (
	RefundOwed = "refund_owed"
	Disputed   = "disputed"
)

// Tool counts for one AgentTool.
type Tool struct {
	m    *Metrics
	name Name

	conflicts, expired, notWritten, handedOff prometheus.Counter
	attempt, guard                            prometheus.Observer

	mu sync.RWMutex
	// gone: its series were removed, and no new ones are made.
	gone bool
	by   map[series]prometheus.Counter
}

// series is a counter with labels beside the tool's.
type series struct {
	of   *Definition
	a, b string
}

func newTool(m *Metrics, name Name) *Tool {
	t := &Tool{m: m, name: name, by: map[series]prometheus.Counter{}}
	counter := func(d *Definition) prometheus.Counter {
		return m.counters[d].WithLabelValues(name.Namespace, name.Name)
	}
	t.conflicts, t.expired, t.notWritten = counter(&concurrentConflicts), counter(&keyExpiryCollisions), counter(&resultsNotWritten)
	t.handedOff = counter(&callsHandedOff)
	t.attempt = m.histograms[&attemptSeconds].WithLabelValues(name.Namespace, name.Name)
	t.guard = m.histograms[&guardSeconds].WithLabelValues(name.Namespace, name.Name)
	// What an alert looks for must be there before it happens.
	for verdict, reason := range map[string]string{
		"ALLOW": "", "REPLAY": "", "CONFLICT": "request", "DENY": "spend_exceeded", "UNKNOWN_HOLD": "BudgetExceeded",
	} {
		t.counter(&callsTotal, verdict, reason)
	}
	for _, outcome := range []string{"Succeeded", "Failed", "Retryable", "Pending", "Unknown"} {
		t.counter(&attemptsTotal, outcome, "")
	}
	for _, outcome := range []string{"Succeeded", "Failed", "Pending", "Unknown"} {
		t.counter(&checksTotal, outcome, "")
	}
	for _, reason := range []string{RefundOwed, Disputed} {
		t.counter(&lateResults, reason, "")
	}
	return t
}

// Tool gives what counts for an AgentTool, which must exist.
func (m *Metrics) Tool(namespace, name string) *Tool {
	n := Name{namespace, name}
	m.mu.RLock()
	t := m.tools[n]
	m.mu.RUnlock()
	if t != nil {
		return t
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if t = m.tools[n]; t == nil {
		t = newTool(m, n)
		m.tools[n] = t
	}
	return t
}

// Refused counts a call of a tool that does not exist, or of which it is not known
// whether its caller may know of it: what callers make up becomes no series.
func (m *Metrics) Refused(verdict, reason string) { m.unknown.Call(verdict, reason) }

// counter gives one with one or two more labels; nil if the tool is gone.
func (t *Tool) counter(d *Definition, a, b string) prometheus.Counter {
	k := series{d, a, b}
	t.mu.RLock()
	c := t.by[k]
	t.mu.RUnlock()
	if c != nil {
		return c
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone {
		return nil
	}
	labels := []string{t.name.Namespace, t.name.Name, a}
	if len(d.Labels) > len(labels) {
		labels = append(labels, b)
	}
	c = t.m.counters[d].WithLabelValues(labels...)
	t.by[k] = c
	return c
}

func (t *Tool) count(d *Definition, a, b string) {
	if c := t.counter(d, a, b); c != nil {
		c.Inc()
	}
}

// end removes the tool's series.
func (t *Tool) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.gone = true
	labels := prometheus.Labels{"namespace": t.name.Namespace, "tool": t.name.Name}
	for _, d := range definitions {
		if len(d.Labels) < 2 || d.Labels[1] != "tool" {
			continue
		}
		switch d.Kind {
		case Counter:
			t.m.counters[d].DeletePartialMatch(labels)
		case Histogram:
			t.m.histograms[d].DeletePartialMatch(labels)
		}
	}
}

// Call counts a call that was answered. verdict and reason are words of the code, never
// a caller's.
func (t *Tool) Call(verdict, reason string) {
	if verdict == "" {
		verdict = NoVerdict
	}
	t.count(&callsTotal, verdict, reason)
}

// Register counts an intent that was written down.
func (t *Tool) Register(verdict string) {
	if t == nil {
		return
	}
	if verdict == "" {
		verdict = NoVerdict
	}
	t.count(&registrationsTotal, verdict, "")
}

// Poll counts a question at the poll URL.
func (t *Tool) Poll(verdict string) {
	if verdict == "" {
		verdict = NoVerdict
	}
	t.count(&pollsTotal, verdict, "")
}

// Conflict counts a call that met its own intent in flight.
func (t *Tool) Conflict() { t.conflicts.Inc() }

// Expired counts a call under an intent ID whose answer is no longer kept.
func (t *Tool) Expired() { t.expired.Inc() }

// HandedOff counts a call that goes on without its caller.
func (t *Tool) HandedOff() { t.handedOff.Inc() }

// Attempt counts an attempt that ended.
func (t *Tool) Attempt(outcome string, took time.Duration) {
	t.attempt.Observe(took.Seconds())
	t.count(&attemptsTotal, outcome, "")
}

// Resumed counts an attempt that sent again what an earlier one had sent.
func (t *Tool) Resumed(outcome string) { t.count(&resumedTotal, outcome, "") }

// Guarded takes what the guard added to a call.
func (t *Tool) Guarded(added time.Duration) { t.guard.Observe(max(0, added).Seconds()) }

// NotWritten counts a result that could not be written to its record.
func (t *Tool) NotWritten() { t.notWritten.Inc() }

// Check counts a status check that was made.
func (t *Tool) Check(outcome string) { t.count(&checksTotal, outcome, "") }

// Late counts a late result that contradicts what was decided.
func (t *Tool) Late(reason string) { t.count(&lateResults, reason, "") }
