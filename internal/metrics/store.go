// This file counts the round trips to stores, around whatever driver there is, and makes
// each a span of its call's trace, if there is one.

package metrics

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/tracing"
)

// Why a store is refused.
const (
	MemoryLost  = "memory_lost"
	ClockJumped = "clock_jumped"
	NotDurable  = "not_durable"
	Unavailable = "unavailable"
)

var refusals = []string{MemoryLost, ClockJumped, NotDurable, Unavailable}

// StoreState is what the last look at an IdempotencyStore has found.
type StoreState struct {
	// Refused is why no calls are served from it; "": they are.
	Refused string
	// Judged says that it is known whether it is Durable.
	Judged, Durable bool
}

// SetStore shows an IdempotencyStore. What was judged of it stands until it is judged anew.
func (m *Metrics) SetStore(name Name, s StoreState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if was := m.stores[name]; !s.Judged {
		s.Judged, s.Durable = was.Judged, was.Durable
	}
	m.stores[name] = s
}

// RemoveStore shows it no longer.
func (m *Metrics) RemoveStore(name Name) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.stores, name)
}

// The operations, as labels.
const (
	opStanding = iota
	opInitialise
	opDisown
	opReserve
	opUpdate
	opGet
	opList
	opMeter
)

var operations = [...]string{"standing", "initialise", "disown", "reserve", "update", "get", "list", "meter"}

// spans are their names in a trace.
var spans = func() (names [len(operations)]string) {
	for i, op := range operations {
		names[i] = "store " + op
	}
	return names
}()

// openedStore counts for one IdempotencyStore, for as long as anybody has it open.
type openedStore struct {
	users int
	took  [len(operations)]prometheus.Observer
}

// measured is a store whose round trips are counted.
type measured struct {
	of   store.Store
	m    *Metrics
	name Name
	to   *openedStore
	end  sync.Once
}

// Store counts the round trips to this one until it is closed.
func (m *Metrics) Store(st store.Store, name Name) store.Store {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := m.opened[name]
	if o == nil {
		o = &openedStore{}
		for i, op := range operations {
			o.took[i] = m.histograms[&storeSeconds].WithLabelValues(name.Namespace, name.Name, op)
			m.counters[&storeErrors].WithLabelValues(name.Namespace, name.Name, op, Unavailable)
		}
		m.opened[name] = o
	}
	o.users++
	return &measured{of: st, m: m, name: name, to: o}
}

// trip is one round trip under way.
type trip struct {
	s     *measured
	op    int
	began time.Time
	span  trace.Span
}

func (s *measured) begin(ctx context.Context, op int) (context.Context, trip) {
	ctx, span := tracing.Child(ctx, spans[op])
	if span != nil {
		span.SetAttributes(attribute.String("holdfast.namespace", s.name.Namespace), attribute.String("holdfast.store", s.name.Name))
	}
	return ctx, trip{s: s, op: op, began: time.Now(), span: span}
}

// end counts it.
func (t trip) end(err error) {
	t.s.to.took[t.op].Observe(time.Since(t.began).Seconds())
	word := ""
	if err != nil {
		word = t.s.failed(t.op, err)
	}
	if t.span != nil {
		if word != "" {
			tracing.Fail(t.span, word)
		}
		t.span.End()
	}
}

// failed counts a round trip that failed, and says why in a word.
func (s *measured) failed(op int, err error) string {
	reason := "other"
	switch {
	case errors.Is(err, store.ErrMemoryLost):
		reason = MemoryLost
	case errors.Is(err, context.Canceled):
		reason = "canceled"
	case errors.Is(err, store.ErrUnavailable):
		reason = Unavailable
	}
	s.m.mu.RLock()
	defer s.m.mu.RUnlock()
	if s.m.opened[s.name] == s.to { // else its series are gone
		s.m.counters[&storeErrors].WithLabelValues(s.name.Namespace, s.name.Name, operations[op], reason).Inc()
	}
	return reason
}

// Standing implements store.Store.
func (s *measured) Standing(ctx context.Context) (store.Standing, error) {
	ctx, t := s.begin(ctx, opStanding)
	is, err := s.of.Standing(ctx)
	t.end(err)
	return is, err
}

// Initialise implements store.Store.
func (s *measured) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	ctx, t := s.begin(ctx, opInitialise)
	is, err := s.of.Initialise(ctx, id)
	t.end(err)
	return is, err
}

// Disown implements store.Store.
func (s *measured) Disown(ctx context.Context, epoch, next string) error {
	ctx, t := s.begin(ctx, opDisown)
	err := s.of.Disown(ctx, epoch, next)
	t.end(err)
	return err
}

// Reserve implements store.Store.
func (s *measured) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	ctx, t := s.begin(ctx, opReserve)
	res, err := s.of.Reserve(ctx, r)
	t.end(err)
	return res, err
}

// Update implements store.Store.
func (s *measured) Update(ctx context.Context, w store.Write) (store.Result, error) {
	ctx, t := s.begin(ctx, opUpdate)
	res, err := s.of.Update(ctx, w)
	t.end(err)
	return res, err
}

// Get implements store.Store.
func (s *measured) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	ctx, t := s.begin(ctx, opGet)
	r, now, err := s.of.Get(ctx, key)
	t.end(err)
	return r, now, err
}

// List implements store.Store.
func (s *measured) List(ctx context.Context, l store.List) (store.Page, error) {
	ctx, t := s.begin(ctx, opList)
	page, err := s.of.List(ctx, l)
	t.end(err)
	return page, err
}

// Meter implements store.Store.
func (s *measured) Meter(ctx context.Context, meter string) (string, error) {
	ctx, t := s.begin(ctx, opMeter)
	sum, err := s.of.Meter(ctx, meter)
	t.end(err)
	return sum, err
}

// Close implements store.Store. With the last one of a store its series go.
func (s *measured) Close() error {
	err := s.of.Close()
	s.end.Do(func() {
		s.m.mu.Lock()
		defer s.m.mu.Unlock()
		if s.to.users--; s.to.users > 0 {
			return
		}
		delete(s.m.opened, s.name)
		labels := prometheus.Labels{"namespace": s.name.Namespace, "store": s.name.Name}
		s.m.histograms[&storeSeconds].DeletePartialMatch(labels)
		s.m.counters[&storeErrors].DeletePartialMatch(labels)
	})
	return err
}
