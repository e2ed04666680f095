// This file counts the round trips to stores, around whatever driver there is.

package metrics

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/holdfast-dev/holdfast/internal/store"
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

// done counts a round trip.
func (s *measured) done(op int, began time.Time, err error) {
	s.to.took[op].Observe(time.Since(began).Seconds())
	if err == nil {
		return
	}
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
}

// Standing implements store.Store.
func (s *measured) Standing(ctx context.Context) (store.Standing, error) {
	began := time.Now()
	is, err := s.of.Standing(ctx)
	s.done(opStanding, began, err)
	return is, err
}

// Initialise implements store.Store.
func (s *measured) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	began := time.Now()
	is, err := s.of.Initialise(ctx, id)
	s.done(opInitialise, began, err)
	return is, err
}

// Disown implements store.Store.
func (s *measured) Disown(ctx context.Context, epoch, next string) error {
	began := time.Now()
	err := s.of.Disown(ctx, epoch, next)
	s.done(opDisown, began, err)
	return err
}

// Reserve implements store.Store.
func (s *measured) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	began := time.Now()
	res, err := s.of.Reserve(ctx, r)
	s.done(opReserve, began, err)
	return res, err
}

// Update implements store.Store.
func (s *measured) Update(ctx context.Context, w store.Write) (store.Result, error) {
	began := time.Now()
	res, err := s.of.Update(ctx, w)
	s.done(opUpdate, began, err)
	return res, err
}

// Get implements store.Store.
func (s *measured) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	began := time.Now()
	r, now, err := s.of.Get(ctx, key)
	s.done(opGet, began, err)
	return r, now, err
}

// List implements store.Store.
func (s *measured) List(ctx context.Context, l store.List) (store.Page, error) {
	began := time.Now()
	page, err := s.of.List(ctx, l)
	s.done(opList, began, err)
	return page, err
}

// Meter implements store.Store.
func (s *measured) Meter(ctx context.Context, meter string) (string, error) {
	began := time.Now()
	sum, err := s.of.Meter(ctx, meter)
	s.done(opMeter, began, err)
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
