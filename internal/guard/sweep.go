// This file is what time does to a record. A lease, a grace or a settling time has
// passed only when the store's clock says so and this process has watched that
// attempt for as long on its own clock, so that a clock that jumps decides nothing.

package guard

import (
	"context"
	"errors"
	"slices"
	"sync"
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
		at := r.nextCheck()
		if at.IsZero() {
			at = r.ResumeAt
		}
		if r.Current.Waiting && (at.IsZero() || r.Current.WaitingUntil.Before(at)) {
			at = r.Current.WaitingUntil
		}
		return at
	case Pending:
		if at := r.nextCheck(); !at.IsZero() && at.Before(r.Checks.Until) {
			return at
		}
		return r.Checks.Until
	case Registered:
		return r.registeredUntil()
	case Released:
		return earlier(r.noLaterThanValid(r.ReleasedAt.Add(o.ReleaseFor)), r.keyUntil(o))
	case Retryable:
		return earlier(r.noLaterThanValid(r.Changed.Add(r.Policy.TTL)), r.keyUntil(o))
	case Succeeded, Failed, Rejected:
		if at := r.nextCheck(); !at.IsZero() && at.Before(r.ages()) {
			return at
		}
		return r.ages()
	case Tombstone:
		return r.spendDue(r.purgeAt(o))
	}
	return time.Time{}
}

// earlier is the earlier of two times, of which the second may be zero: then there is none.
func earlier(a, b time.Time) time.Time {
	if !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// ages is when time does the next thing to a settled record by itself.
func (r *record) ages() time.Time { return r.spendDue(r.SettledAt.Add(r.Policy.TTL)) }

// purgeAt is when a tombstone stands in nobody's way any more and counts for nothing.
func (r *record) purgeAt(o Options) time.Time {
	at := r.SettledAt.Add(r.Policy.TTL + max(o.TombstoneFor, r.Policy.compares()))
	if _, last := r.spentUntil(); last.After(at) {
		return last
	}
	return at
}

// step is what time does to the record now; nil: nothing.
func (e *Engine) step(r *record, now time.Time) *pending {
	if p := e.afterLoss(r, now); p != nil {
		return p
	}
	switch r.State {
	case InFlight:
		a := r.last()
		if !over(a.LeaseEnd.Add(a.Grace), a.Lease+a.Grace, now) && e.o.mutation != noWatch || !e.hasWatched(r, a.Lease+a.Grace) {
			return nil
		}
		p := e.stepOf(r, onLeaseOver, now)
		e.leaseOver(p.to, p.nonce, now)
		return p
	case Held:
		h := r.Current
		_, watch := r.waitOver()
		length := watch
		if watch == 0 { // all has become known meanwhile, and there is nothing to watch
			length = h.WaitingUntil.Sub(h.At)
		}
		if !h.Waiting || !over(h.WaitingUntil, length, now) || !e.hasWatched(r, watch) {
			return e.resumeExpired(r, now)
		}
		p := e.stepOf(r, onWaitOver, now)
		p.keepMarks = true
		p.to.Current.Waiting = false
		return p
	}
	if r.State == Pending {
		_, watch := r.waitOver()
		if !over(r.Checks.Until, watch+r.Policy.Check.Deadline, now) || e.jumped() != nil {
			return nil
		}
		p := e.stepOf(r, onDeadline, now)
		p.to.Checks.Next = time.Time{}
		p.to.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: r.Checks.overdue()}, p.nonce, now)
		return p
	}
	if p := e.forgottenUnused(r, now); p != nil {
		return p
	}
	at := r.due(e.o)
	if r.closedByHand() {
		at = r.ages() // a check that is due is made by whoever asks
	}
	if at.IsZero() || now.Before(at) || e.jumped() != nil {
		return nil // nothing ages by a clock that is wrong
	}
	if e.o.mutation == expiredPass && r.overdue(now) && !r.State.Settled() {
		return nil
	}
	if first, _ := r.spentUntil(); !first.IsZero() && !now.Before(first) {
		p := e.stepOf(r, onSpendOver, now)
		p.keepMarks = true
		p.to.age(now)
		return p
	}
	var p *pending
	switch r.State {
	case Released:
		p = e.stepOf(r, onUnused, now)
		h := &hold{Reasons: r.Current.Reasons, Cause: "the release was not used in time"}
		if r.overdue(now) {
			h.Cause = causeNotValid + r.Registration.ValidUntil.UTC().Format(time.RFC3339)
		}
		p.to.hold(h, p.nonce, now)
	case Registered:
		p = e.stepOf(r, onDeadline, now)
		p.to.State, p.to.Changed, p.to.SettledAt, p.to.Expired = Rejected, now, now, true
	case Retryable:
		p = e.stepOf(r, onDeadline, now)
		if r.releasedUnknown() {
			p.to.hold(&hold{Reasons: []Reason{OutcomeUnknown}, Cause: causeForgotten}, p.nonce, now)
			break
		}
		p.to.State, p.to.Changed, p.to.SettledAt, p.to.Expired = Failed, now, now, true
	case Succeeded, Failed, Rejected:
		p = e.stepOf(r, onTTL, now)
		p.keepMarks = true
		p.to.SettledAs, p.to.State, p.to.Response = r.State, Tombstone, nil
	case Tombstone:
		p = e.stepOf(r, onPurge, now)
		p.to = nil
	}
	return p
}

// stepOf begins a step, whose record is the same until it is changed.
func (e *Engine) stepOf(r *record, on event, now time.Time) *pending {
	return &pending{from: r, to: r.clone(), on: on, now: now, nonce: e.o.Nonce()}
}

// holdOver is when nobody will be waited for any more; zero: never. Of what may have moved
// nothing is decided without a person.
func (r *record) holdOver(o Options) time.Time {
	if r.Policy.HoldFor <= 0 || (r.mayHaveMoved() || r.PaidByHand) && o.mutation != unknownExpires {
		return time.Time{}
	}
	return r.Current.At.Add(r.Policy.HoldFor)
}

// isOverdue says that the hold has waited for long enough, and nothing but a decision would still be waited for.
func (e *Engine) isOverdue(r *record, now time.Time) bool {
	at := r.holdOver(e.o)
	return !at.IsZero() && !now.Before(at) && e.jumped() == nil
}

// Undecided ends a hold that is Overdue, as Hold said before it was looked whether anybody
// had decided. Neither the sweep nor a call ends it: they cannot know whether a decision
// that was made in time waits to be taken. Until somebody has looked, the hold stands.
func (e *Engine) Undecided(ctx context.Context, id HoldID) (HoldView, error) {
	r, now, err := e.get(ctx, id.Key.String())
	if err != nil {
		return HoldView{}, err
	}
	for range maxTries {
		if r, err = e.advance(ctx, r, now); err != nil {
			return HoldView{}, err
		}
		if !e.isCurrent(r, id) || !e.isOverdue(r, now) {
			return e.holdOf(r, id), nil
		}
		p := pending{from: r, to: r.clone(), on: onHoldOver, now: now, nonce: e.o.Nonce()}
		p.to.holdExpired(now)
		wr, other, err := e.update(ctx, p, e.soon())
		if err != nil {
			return HoldView{}, err
		}
		if wr.Outcome == store.Written {
			return e.holdOf(p.to, id), nil
		}
		r, now = other, wr.Now
	}
	return HoldView{}, ErrContended
}

// heldTooLong says that nobody decided about it in time, which nobody but the time has done.
func (r *record) heldTooLong() bool {
	h := r.Current
	return r.Expired && h != nil && h.End == HoldResolved && h.Decision == Reject && h.By == ""
}

// holdExpired rejects what nobody decided about.
func (r *record) holdExpired(now time.Time) {
	h := r.Current
	h.End, h.EndedAt, h.Decision = HoldResolved, now, Reject
	h.Effect = "Nobody decided within " + span(r.Policy.HoldFor) + ": rejected, it is never sent."
	r.State, r.Changed, r.SettledAt, r.Expired = Rejected, now, now, true
}

// over says whether the store's clock says that a time is over which began that long
// before. A clock by which more is left than there ever was has been set back since: it
// says nothing, and those who watch decide alone. They began to watch after the beginning.
func over(at time.Time, length time.Duration, now time.Time) bool {
	return !now.Before(at) || at.Sub(now) > length+jumpLimit
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
	h := &hold{Reasons: []Reason{OutcomeUnknown}, Watermark: e.mutatedFreeze()}
	if !e.remembers(next) {
		h.Cause, next.Passed = lostCause(next, e.o.LostAt), nil
	}
	next.hold(h, nonce, now)
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
	now, err := e.now(ctx, e.o.Clock.Now().Boot)
	if err != nil {
		return err
	}
	began := e.o.Clock.Now().Boot
	due := store.List{What: store.ListDue, Before: e.sweepTime(now).Add(horizon)}
	err = e.each(ctx, due, func(sr *store.Record, now time.Time) error { return e.sweepOne(ctx, sr, now) })
	if err != nil && !spared(err) {
		return err
	}
	failed := []error{err}
	for _, key := range e.overlooked(began) {
		if err := e.look(ctx, key); err != nil {
			if failed = append(failed, err); !spared(err) {
				break
			}
		}
	}
	e.forget()
	e.rates.forget(e.o.Clock.Now().Boot)
	return errors.Join(failed...)
}

// spared: an error of one record, which must not keep the others.
func spared(err error) bool {
	return errors.Is(err, ErrCorrupt) || errors.Is(err, ErrInvariant) || errors.Is(err, ErrContended)
}

// each does something to every record of a list. What goes wrong with one does not keep
// the others.
func (e *Engine) each(ctx context.Context, l store.List, do func(*store.Record, time.Time) error) error {
	var failed []error
	for {
		page, _, err := e.list(ctx, l)
		if err != nil {
			return err
		}
		for i := range page.Records {
			if err := do(&page.Records[i], page.Now); err != nil {
				if !spared(err) {
					return err
				}
				failed = append(failed, err)
			}
		}
		if l.Cursor = page.Cursor; l.Cursor == "" {
			return errors.Join(failed...)
		}
	}
}

// look lets time do to one record what is due.
func (e *Engine) look(ctx context.Context, key string) error {
	r, now, err := e.get(ctx, key)
	if err != nil {
		return err
	}
	if r, err = e.advance(ctx, r, now); err == nil {
		e.noteDue(r, now)
		e.noteResume(r, now)
	}
	return err
}

// overlooked are the records that are watched and that the sweep has not met for a
// while: the store's clock was set back, and takes them for due in a distant future.
func (e *Engine) overlooked(began time.Duration) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for k, w := range e.watched {
		if began-w.seen > horizon {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

func (e *Engine) sweepOne(ctx context.Context, sr *store.Record, now time.Time) error {
	if isRate(sr.Key) {
		return e.purgeRate(ctx, sr, now)
	}
	if sr.Due.After(now) && e.knows(sr) {
		return nil
	}
	h, err := decodeHeader(sr)
	if err != nil {
		return err
	}
	if sr.Due.After(now) && h.State != InFlight && h.State != Pending && h.State != Held {
		return nil
	}
	return e.look(ctx, sr.Key)
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

// dueKeys are intents of which a sweep has found that something is to be done outside.
type dueKeys struct {
	mu   sync.Mutex
	keys []Key
}

// maxDue bounds what one sweep finds: the next one finds the rest.
const maxDue = 256

func (d *dueKeys) add(k Key) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.keys) < maxDue && !slices.Contains(d.keys, k) {
		d.keys = append(d.keys, k)
	}
}

// take gives each once.
func (d *dueKeys) take() []Key {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys := d.keys
	d.keys = nil
	return keys
}
