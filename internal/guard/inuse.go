// This file is about taking an engine out of service without losing what this process
// has in hand: an attempt that is under way must still find its store open.

package guard

import (
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// inHandFor is how long after its lease an attempt may keep the store open. By then the
// record was put on hold, and a person looks.
const inHandFor = time.Minute

// inUse is what of an engine's work needs its store. The Engine's mutex guards it.
type inUse struct {
	retired   bool
	refused   error // why no call is let in; nil: they are
	admitting int   // calls that are let in, renewals and settlements
	// open are the attempts whose results are not durable, by nonce, and when each lease ends.
	open map[string]Reading
}

// Retire lets no call in any more. What was let in can be settled.
func (e *Engine) Retire() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inUse.retired = true
}

// Refuse lets no call in, with this error, until Resume. What was let in can be settled,
// and time, people and polls go on.
func (e *Engine) Refuse(err error) {
	refused := ErrRefused
	if err != nil {
		refused = fmt.Errorf("%w: %w", ErrRefused, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inUse.refused = refused
}

// Resume lets calls in again, after Retire and after Refuse.
func (e *Engine) Resume() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inUse.retired, e.inUse.refused = false, nil
}

// Busy says whether a call is being let in, or an attempt's result is still to be
// written. Of an engine that is retired and not busy, the store may be closed.
func (e *Engine) Busy() bool {
	now := e.o.Clock.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	for nonce, end := range e.inUse.open {
		if now.left(end.after(inHandFor)) <= 0 {
			delete(e.inUse.open, nonce)
		}
	}
	return e.inUse.admitting > 0 || len(e.inUse.open) > 0
}

// enter begins to let a call in. Being retired and being counted exclude each other, so
// that no attempt begins on a store that is about to close.
func (e *Engine) enter() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.inUse.retired {
		return fmt.Errorf("%w: the store was taken out of service", store.ErrUnavailable)
	}
	if e.inUse.refused != nil {
		return e.inUse.refused
	}
	e.inUse.admitting++
	return nil
}

// keepOpen begins what is done about an attempt that was let in before: it is done also
// where no call is let in any more.
func (e *Engine) keepOpen() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inUse.admitting++
}

func (e *Engine) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inUse.admitting--
}

// inHand takes note of an attempt whose result must be written.
func (e *Engine) inHand(t *Ticket) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.inUse.open == nil {
		e.inUse.open = map[string]Reading{}
	}
	e.inUse.open[t.nonce] = t.leaseEnd
}

// written: the attempt's result is durable, or will not be tried again.
func (e *Engine) written(t *Ticket) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.inUse.open, t.nonce)
}
