// This file is what time does to a record. A lease, a grace or a settling time has
// passed only when the store's clock says so and this process has watched that
// attempt for as long on its own clock, so that a clock that jumps decides nothing.

package guard

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// horizon is how far ahead the sweep looks, to begin watching in time.
const horizon = 2 * time.Minute

// due is when time will do something to the record; zero: never.
func (r *record) due(o Options) time.Time {
	switch r.State {
	case InFlight:
		a := r.last()
		return a.LeaseEnd.Add(a.Grace)
	case Held:
		if r.Current.Waiting {
			return r.Current.WaitingUntil
		}
	case Released:
		return r.ReleasedAt.Add(o.ReleaseFor)
	case Retryable:
		return r.Changed.Add(r.Policy.TTL)
	case Succeeded, Failed, Rejected:
		return r.SettledAt.Add(r.Policy.TTL)
	case Tombstone:
		return r.SettledAt.Add(r.Policy.TTL + max(o.TombstoneFor, r.Policy.Window))
	}
	return time.Time{}
}

// step is what time does to the record now; nil: nothing.
func (e *Engine) step(r *record, now time.Time) *pending {
	p := &pending{from: r, now: now, nonce: e.o.Nonce()}
	switch r.State {
	case InFlight:
		a := r.last()
		if now.Before(a.LeaseEnd.Add(a.Grace)) && e.o.mutation != noWatch || !e.hasWatched(r, a.Lease+a.Grace) {
			return nil
		}
		p.on, p.to = onLeaseOver, r.clone()
		e.leaseOver(p.to, p.nonce, now)
		return p
	case Held:
		h := r.Current
		if !h.Waiting || now.Before(h.WaitingUntil) {
			return nil
		}
		if _, watch := r.waitOver(); !e.hasWatched(r, watch) {
			return nil
		}
		p.on, p.to, p.keepMarks = onWaitOver, r.clone(), true
		p.to.Current.Waiting = false
		return p
	}
	if at := r.due(e.o); at.IsZero() || now.Before(at) {
		return nil
	}
	switch r.State {
	case Released:
		p.on, p.to = onUnused, r.clone()
		h := &hold{Reasons: r.Current.Reasons, Cause: "the release was not used in time"}
		p.to.hold(h, p.nonce, now)
	case Retryable:
		p.on, p.to = onDeadline, r.clone()
		if r.releasedUnknown() {
			p.to.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: causeForgotten}, p.nonce, now)
			break
		}
		p.to.State, p.to.Changed, p.to.SettledAt, p.to.Expired = Failed, now, now, true
	case Succeeded, Failed, Rejected:
		p.on, p.to, p.keepMarks = onTTL, r.clone(), true
		p.to.SettledAs, p.to.State, p.to.Response = r.State, Tombstone, nil
	case Tombstone:
		p.on = onPurge
	default:
		return nil
	}
	return p
}

// leaseOver joins with the attempt in flight unknown.
func (e *Engine) leaseOver(next *record, nonce string, now time.Time) {
	a := next.last()
	a.Outcome, a.Ended, a.Detail = AttemptUnknown, now, "the lease ended without a result"
	if e.o.mutation == sweepRetries {
		next.State, next.RetryAt, next.Changed = Retryable, now, now
		a.Excused = true
		return
	}
	if outcome, winner := next.join(); outcome == AttemptSucceeded && e.o.mutation != sweepForgets {
		next.joined(winner, now)
		return
	}
	next.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Watermark: e.mutatedFreeze()}, nonce, now)
}

// advance lets time do to the record what is due. Every call that sees a record
// does it, so nothing depends on a sweep being on time.
func (e *Engine) advance(ctx context.Context, r *record, now time.Time) (*record, error) {
	for range maxTries {
		if r == nil {
			return nil, nil
		}
		p := e.step(r, now)
		if p == nil {
			return r, nil
		}
		_, next, err := e.update(ctx, *p, e.soon())
		if err != nil {
			return nil, err
		}
		r = next
	}
	return nil, ErrContended
}

// Sweep does what is due by now, and begins to watch what will be soon.
func (e *Engine) Sweep(ctx context.Context) error {
	now, err := e.now(ctx)
	if err != nil {
		return err
	}
	var failed []error
	cursor := ""
	for {
		page, err := e.st.List(ctx, store.List{What: store.ListDue, Before: now.Add(horizon), Cursor: cursor})
		if err != nil {
			return errors.Join(append(failed, err)...)
		}
		e.heard(page.Now)
		for i := range page.Records {
			if err := e.sweepOne(ctx, &page.Records[i], page.Now); err != nil {
				if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrInvariant) && !errors.Is(err, ErrContended) {
					return errors.Join(append(failed, err)...)
				}
				failed = append(failed, err) // one bad record must not keep the others
			}
		}
		if cursor = page.Cursor; cursor == "" {
			break
		}
	}
	e.forget()
	return errors.Join(failed...)
}

func (e *Engine) sweepOne(ctx context.Context, sr *store.Record, now time.Time) error {
	if sr.Due.After(now) && e.knows(sr) {
		return nil
	}
	h, err := decodeHeader(sr)
	if err != nil {
		return err
	}
	if sr.Due.After(now) && h.State != InFlight && h.State != Held {
		return nil
	}
	r, now, err := e.get(ctx, sr.Key)
	if err != nil {
		return err
	}
	_, err = e.advance(ctx, r, now)
	return err
}

// knows says that this version is being watched already.
func (e *Engine) knows(sr *store.Record) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	w, ok := e.watched[sr.Key]
	if ok && w.version == sr.Version {
		w.seen = e.o.Clock.Now().Boot
		e.watched[sr.Key] = w
		return true
	}
	return false
}

// forget drops what has not been seen for a day: others have settled it.
func (e *Engine) forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	boot := e.o.Clock.Now().Boot
	for k, w := range e.watched {
		if boot-w.seen > 24*time.Hour {
			delete(e.watched, k)
		}
	}
}
