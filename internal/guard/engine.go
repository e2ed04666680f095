// This file is the engine's frame: what it is made of, how it writes, and how it
// knows the store's time.
//
// Every write is compare-and-set with a nonce of its own. A reply that is lost is
// followed by the same write again, which the store recognises.

package guard

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// maxTries is how often one call looks again when others change its record meanwhile.
const maxTries = 32

// Change is a step that was made durable.
type Change struct {
	Intent   View
	From, To State
	Event    string
}

// Options of an engine. Zero values are replaced by the defaults named.
type Options struct {
	Clock Clock // the machine's
	// Settlement is the time within a lease for writing the outcome; 2 s.
	Settlement time.Duration
	// Margin is the time between the send's deadline and the lease's end; 1 s.
	Margin time.Duration
	// Grace is the time after the lease's end in which nobody judges; 2 s.
	Grace time.Duration
	// Attempts is how many attempts an intent has; 5.
	Attempts int
	// Backoff is the least time between two attempts; 2 s.
	Backoff time.Duration
	// ReleaseFor is how long a release may stay unused; 24 h.
	ReleaseFor time.Duration
	// TombstoneFor is how long a tombstone stays, at the least the window; 90 days.
	TombstoneFor time.Duration
	// Repeat is how long a write is repeated while the store does not answer; 3 s. A
	// settlement is repeated until its lease ends.
	Repeat time.Duration
	// LostAt is the store's time at which the loss of its memory was accepted; zero: it
	// never lost any. It stays for as long as the store has this epoch.
	LostAt time.Time
	// ForgetLost has first calls sent although the memory was lost: somebody vouches
	// that none of them was made before.
	ForgetLost bool
	// StoreClock is where the store's clock should be when the engine is made, if
	// somebody knows: then a jump is noticed that came while no process was running.
	StoreClock time.Time
	// Observe is told of every step; it must not block. nil: nobody is.
	Observe func(Change)
	// Evidence is told of a result that could not be written; it must not block.
	Evidence func(Evidence)
	// Sleep waits between repeats of a write.
	Sleep func(ctx context.Context, d time.Duration)
	// Await waits until done ends, which another call of this process sees to.
	Await func(ctx context.Context, done <-chan struct{})
	// Later runs what must still be written after its caller was answered.
	Later func(func())
	// Nonce makes a new one; 128 random bits.
	Nonce func() string
	// Random gives a time from 0 to most, each as likely.
	Random func(most time.Duration) time.Duration

	// mutation takes one rule out, for tests that must then find a double charge.
	mutation mutation
}

// Engine decides for the records of one store.
type Engine struct {
	st store.Store
	id store.Identity
	o  Options

	mu      sync.Mutex
	clock   storeClock
	watched map[string]watch
	inUse   inUse

	// dueChecks are to be asked about, dueResumes to be sent again.
	dueChecks, dueResumes dueKeys

	rates rates

	// seen guesses of which keys there is a record.
	seen seen
}

// watch is since when this process has been watching an attempt.
type watch struct {
	nonce   string
	version uint64
	since   time.Duration
	seen    time.Duration
}

// New makes the engine of a store that has this identity.
func New(st store.Store, id store.Identity, o Options) *Engine {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Settlement, 2*time.Second)
	def(&o.Margin, time.Second)
	def(&o.Grace, 2*time.Second)
	def(&o.Backoff, 2*time.Second)
	def(&o.ReleaseFor, 24*time.Hour)
	def(&o.TombstoneFor, 90*24*time.Hour)
	def(&o.Repeat, 3*time.Second)
	if o.Attempts == 0 {
		o.Attempts = 5
	}
	if o.Clock == nil {
		o.Clock = SystemClock{}
	}
	if o.Evidence == nil {
		o.Evidence = func(Evidence) {}
	}
	if o.Sleep == nil {
		o.Sleep = func(ctx context.Context, d time.Duration) {
			t := time.NewTimer(d)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}
	if o.Await == nil {
		o.Await = func(ctx context.Context, done <-chan struct{}) {
			select {
			case <-done:
			case <-ctx.Done():
			}
		}
	}
	if o.Later == nil {
		o.Later = func(f func()) { go f() }
	}
	if o.Nonce == nil {
		o.Nonce = func() string {
			var b [16]byte
			_, _ = rand.Read(b[:]) // never fails (crypto/rand)
			var digits [2 * len(b)]byte
			hex.Encode(digits[:], b[:])
			return string(digits[:])
		}
	}
	if o.Random == nil {
		o.Random = random
	}
	e := &Engine{st: st, id: id, o: o, watched: map[string]watch{}}
	if !o.StoreClock.IsZero() {
		e.clock.expect(o.StoreClock, o.Clock.Now().Boot)
	}
	return e
}

// Identity is that of the engine's store.
func (e *Engine) Identity() store.Identity { return e.id }

// lease is how long an attempt under this policy holds its record.
func (e *Engine) lease(p Policy) time.Duration { return e.o.lease(p) }

func (o Options) lease(p Policy) time.Duration { return p.Timeout + o.Settlement + o.Margin }

// get reads a record and begins to watch it.
func (e *Engine) get(ctx context.Context, key string) (*record, time.Time, error) {
	return e.getAt(ctx, key, e.o.Clock.Now().Boot)
}

// getAt is get, where the own clock was just read.
func (e *Engine) getAt(ctx context.Context, key string, boot time.Duration) (*record, time.Time, error) {
	q := e.ask(boot)
	sr, now, err := e.st.Get(ctx, key)
	if err != nil {
		return nil, now, err
	}
	now, boot, _ = e.heard(q, now)
	r, err := decode(sr)
	if err != nil {
		return nil, now, err
	}
	e.see(r, boot)
	return r, now, nil
}

// see begins to watch the attempt that time will judge, if there is one. boot is when the
// store had told of it.
func (e *Engine) see(r *record, boot time.Duration) {
	if r == nil {
		return
	}
	e.seen.add(r.key)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !r.isWatched() {
		delete(e.watched, r.key)
		return
	}
	nonce := r.watched()
	w, ok := e.watched[r.key]
	if !ok || w.nonce != nonce {
		w = watch{nonce: strings.Clone(nonce), since: boot} // it may be part of a whole body
	}
	w.version, w.seen = r.version, boot
	e.watched[r.key] = w
}

// isWatched says whether time will do something to the record that has to be watched for.
func (r *record) isWatched() bool {
	switch r.State {
	case InFlight, Pending:
		return true
	case Held:
		return r.Current != nil && (r.Current.Waiting || !r.nextCheck().IsZero() || !r.ResumeAt.IsZero())
	}
	return false
}

// hasWatched says that this process has watched the record's last attempt for so long.
func (e *Engine) hasWatched(r *record, d time.Duration) bool {
	if e.o.mutation == noWatch {
		return true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	w, ok := e.watched[r.key]
	return ok && w.nonce == r.watched() && e.o.Clock.Now().Boot-w.since >= d
}

// pending is a write that is ready to be made.
type pending struct {
	from      *record // nil: none
	to        *record // nil: deleted
	on        event
	now       time.Time
	boot      time.Duration // the own clock at now; 0: it is not known
	nonce     string
	keepMarks bool
	limited   bool // maxHeld applies
	// retryAfter is the upstream's wish, where it may be sent again.
	retryAfter time.Duration
}

// write turns a pending step into what the store takes.
func (e *Engine) write(p pending) (store.Write, error) {
	w := store.Write{Epoch: e.id.Epoch, Nonce: p.nonce, KeepMarks: p.keepMarks}
	from, to := None, None
	if p.from != nil {
		w.Key, w.Expected, from = p.from.key, p.from.version, p.from.State
	}
	if p.to != nil {
		to = p.to.State
	}
	if err := checkStep(from, p.on, to); err != nil {
		return w, err
	}
	if p.to == nil {
		return w, nil
	}
	w.Key = p.to.key
	e.planResume(p)
	p.to.Memory = e.memory()
	if e.o.mutation == none {
		if err := p.to.check(); err != nil {
			return w, fmt.Errorf("%w (on %s)", err, p.on)
		}
	}
	spend, err := e.spendEntries(p)
	if err != nil {
		return w, err
	}
	w.Record = &store.Record{
		Due: p.to.due(e.o), Held: to == Held, Unsettled: !to.Settled(), Header: p.to.header.pack(), Body: p.to.body.pack(),
	}
	if !p.keepMarks {
		at := p.now
		if _, ends := p.to.standing(); ends {
			at = e.noEarlierOf(p)
		}
		if until, renews := p.to.renews(p.from, at); renews && !e.mutatedFree(p.to) {
			w.RenewMarks, w.Until = true, until
		} else {
			w.Marks = e.mutatedMarks(p.to, at)
		}
	}
	w.Meters = append(w.Meters, p.registeredMeters()...)
	if to == Held || from == Held {
		w.Meters = append(w.Meters, p.to.heldMeters(p.limited)...)
	}
	w.Meters = append(w.Meters, spend...)
	w.Meters = append(w.Meters, e.slotSteps(p.from, p.to)...)
	return w, nil
}

// noEarlierOf is noEarlier for what counts from the step's own time on.
func (e *Engine) noEarlierOf(p pending) time.Time {
	if p.boot == 0 {
		return e.noEarlier(p.now)
	}
	return e.noEarlierAt(p.now, p.boot)
}

func heldMeter(budget string) string           { return lengthPrefixed("held", budget) }
func heldMeterOf(budget, caller string) string { return lengthPrefixed("held", budget, caller) }
func limitText(n int, limited bool) (limit string) {
	if limited && n > 0 {
		limit = strconv.Itoa(n)
	}
	return limit
}

// heldMeters counts the record while it is held and no send of it is known.
func (r *record) heldMeters(limited bool) []store.MeterEntry {
	amount := ""
	if r.State == Held && r.unsent() {
		amount = "1"
	}
	return []store.MeterEntry{
		{Meter: heldMeter(r.Policy.Budget), Amount: amount, Limit: limitText(r.Policy.MaxHeld, limited)},
		{Meter: heldMeterOf(r.Policy.Budget, r.Caller), Amount: amount, Limit: limitText(r.Policy.MaxHeldPerCaller, limited)},
	}
}

// answer is what the store said to a write.
type answer struct {
	store.Result
	asked  int           // how often, until it answered
	boot   time.Duration // the own clock when it had answered
	jumped bool          // by this answer its clock is not where it should be
}

// repeat asks the store until it answers, at most until the time is over. The
// request is the same every time, so that a write that was made is recognised.
// boot is the own clock, just read.
func (e *Engine) repeat(ctx context.Context, boot time.Duration, until Reading, ask func() (store.Result, error)) (answer, error) {
	wait := 20 * time.Millisecond
	for asked := 1; ; asked++ {
		q := e.ask(boot)
		res, err := ask()
		if err == nil {
			a := answer{Result: res, asked: asked}
			a.Now, a.boot, a.jumped = e.heard(q, res.Now)
			return a, nil
		}
		if !errors.Is(err, store.ErrUnavailable) || ctx.Err() != nil {
			return answer{}, err
		}
		left := e.o.Clock.Now().left(until)
		if left <= 0 {
			return answer{}, err
		}
		e.o.Sleep(ctx, min(wait, left))
		wait, boot = min(wait*2, time.Second), e.o.Clock.Now().Boot
	}
}

// update makes a step other than one into flight. A mismatch returns the record that is there.
func (e *Engine) update(ctx context.Context, p pending, until Reading) (store.Result, *record, error) {
	return e.updateAt(ctx, p, e.o.Clock.Now().Boot, until)
}

// updateAt is update, where the own clock was just read.
func (e *Engine) updateAt(ctx context.Context, p pending, boot time.Duration, until Reading) (store.Result, *record, error) {
	w, err := e.write(p)
	if err != nil {
		return store.Result{}, nil, err
	}
	res, err := e.repeat(ctx, boot, until, func() (store.Result, error) { return e.st.Update(ctx, w) })
	if err != nil {
		return res.Result, nil, err
	}
	switch res.Outcome {
	case store.Written:
		if p.to == nil {
			return res.Result, nil, nil
		}
		p.to.version = res.Version
		e.done(p, res.boot)
		return res.Result, p.to, nil
	case store.Mismatch:
		r, err := decode(res.Record)
		e.see(r, res.boot)
		return res.Result, r, err
	default:
		return res.Result, p.from, nil
	}
}

// done tells the observer, and begins or ends the watching.
func (e *Engine) done(p pending, boot time.Duration) {
	e.see(p.to, boot)
	if e.o.Observe == nil {
		return
	}
	from := None
	if p.from != nil {
		from = p.from.State
	}
	e.o.Observe(Change{Intent: p.to.view(e.id.Epoch), From: from, To: p.to.State, Event: string(p.on)})
}

// soon is the end of the time in which ordinary writes are repeated.
func (e *Engine) soon() Reading { return e.o.Clock.Now().after(e.o.Repeat) }

// Poll says what a call with this key would be told now, without sending anything.
func (e *Engine) Poll(ctx context.Context, k Key) (Answer, error) {
	r, now, err := e.get(ctx, k.String())
	if err != nil {
		return Answer{}, err
	}
	if r, err = e.advance(ctx, r, now); err != nil {
		return Answer{}, err
	}
	if r == nil {
		return Answer{Intent: View{Key: k}}, nil
	}
	a, _ := e.answer(r, now)
	return a, nil
}

// Hold says what has become of a hold.
func (e *Engine) Hold(ctx context.Context, id HoldID) (HoldView, error) {
	r, now, err := e.get(ctx, id.Key.String())
	if err != nil {
		return HoldView{}, err
	}
	if r, err = e.advance(ctx, r, now); err != nil {
		return HoldView{}, err
	}
	v := e.holdOf(r, id)
	if e.isCurrent(r, id) {
		v.Until = r.holdOver(e.o)
		v.Overdue = e.isOverdue(r, now)
	}
	return v, nil
}

// Holds returns a page of the intents that are held, each with its current hold.
func (e *Engine) Holds(ctx context.Context, cursor string) ([]View, string, error) {
	page, _, err := e.list(ctx, store.List{What: store.ListHeld, Cursor: cursor})
	if err != nil {
		return nil, "", err
	}
	var out []View
	for i := range page.Records {
		r, _, err := e.get(ctx, page.Records[i].Key)
		if err != nil {
			if errors.Is(err, ErrCorrupt) {
				continue // it is refused when it is called; the others must be shown
			}
			return nil, "", err
		}
		if r != nil && r.State == Held {
			out = append(out, r.view(e.id.Epoch))
		}
	}
	return out, page.Cursor, nil
}

// HeldCount is how many intents of the budget are held without a send that is known.
func (e *Engine) HeldCount(ctx context.Context, budget string) (int, error) {
	s, err := e.st.Meter(ctx, heldMeter(budget))
	if err != nil {
		return 0, err
	}
	if s == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("%w: meter of held intents: %w", ErrCorrupt, err)
	}
	return n, nil
}
