// This file knows which engine serves which IdempotencyStore, and why one does not.

package guard

import (
	"fmt"
	"sort"
	"sync"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// Served is the engine of one store.
type Served struct {
	Namespace, Store string
	Engine           *Engine
}

// Engines are all that this process serves.
type Engines struct {
	mu sync.RWMutex
	by map[[2]string]entry
}

type entry struct {
	engine *Engine
	err    error
}

// NewEngines serves nothing yet.
func NewEngines() *Engines { return &Engines{by: map[[2]string]entry{}} }

// Put serves a store with this engine.
func (r *Engines) Put(namespace, name string, e *Engine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by[[2]string{namespace, name}] = entry{engine: e}
}

// Fail refuses a store, with an error that says what to do.
func (r *Engines) Fail(namespace, name string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by[[2]string{namespace, name}] = entry{err: err}
}

// Remove forgets a store.
func (r *Engines) Remove(namespace, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.by, [2]string{namespace, name})
}

// Get returns the engine that serves a store, or why none does.
func (r *Engines) Get(namespace, name string) (*Engine, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.by[[2]string{namespace, name}]
	switch {
	case !ok:
		return nil, fmt.Errorf("%w: IdempotencyStore %s/%s is not open in this process", store.ErrUnavailable, namespace, name)
	case e.err != nil:
		return nil, e.err
	}
	return e.engine, nil
}

// All returns what is served, in a stable order.
func (r *Engines) All() []Served {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var out []Served
	for k, e := range r.by {
		if e.engine != nil {
			out = append(out, Served{Namespace: k[0], Store: k[1], Engine: e.engine})
		}
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Namespace != out[j].Namespace {
			return out[i].Namespace < out[j].Namespace
		}
		return out[i].Store < out[j].Store
	})
	return out
}
