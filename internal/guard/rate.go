// This file is how often calls may come, in all processes together: the generic cell
// rate algorithm. A call needs a cell of its tool, and one of its caller. Cells are
// numbered by time: each is one interval after the last that was given out, never before
// the present, and at most a burst ahead of it. Whoever uses a cell between a burst before
// its time and its time keeps the limit, whenever that is: in any span there are never more
// than a burst, and one for each interval of it.
//
// So cells can be taken in advance. How far they were given out is in a record of the
// store, which processes move on by compare-and-set, some cells at once; what a process
// does not use in time is lost, and the limit under-used. A process takes no more than an
// eighth of what is left or what falls due within moments, and only one where its last
// ones were not used. Time is the store's.
//
// Registrations have cells of their own, under the same limits: a call of what was registered
// is not counted twice.
//
// What is in such a record matters no more once its time is over: then the sweep deletes it.

package guard

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// rateShare is the part of what is left that a process takes in advance, at most.
	rateShare = 8
	// rateMoment is how much a process may take in advance also where little is left.
	rateMoment = 20 * time.Millisecond
	// rateMost bounds what is taken at once.
	rateMost = 1024
	// rateKept is how long a record stays after its time, and what a process knows of it
	// after its last use.
	rateKept = 10 * time.Minute
	// rateWrong is how far beyond a burst the last cell may be before it is taken for one of
	// another clock.
	rateWrong = time.Minute
)

// Rate is how often calls may come: one for each Every, and Burst at once after a pause.
type Rate struct {
	Every time.Duration // 0: as often as they like
	Burst int           // 1 or more
}

// ahead is how long before its time a cell may be used.
func (r Rate) ahead() time.Duration { return r.Every * time.Duration(r.Burst-1) }

// rated says that calls under this policy are counted by a rate.
func (p *Policy) rated() bool { return p.Rate.Every > 0 || p.RatePerCaller.Every > 0 }

// ratePrefix tells the records of rates from those of intents, whose keys begin with a digit.
const ratePrefix = "rate/"

func isRate(key string) bool { return strings.HasPrefix(key, ratePrefix) }

// rateKey names the record of a tool's limit, or with a caller of that caller's.
func rateKey(k Key, caller string) string {
	return ratePrefix + lengthPrefixed(k.Namespace, k.Tool, caller)
}

// registrationRateKey is the same for registrations.
func registrationRateKey(k Key, caller string) string {
	return ratePrefix + "registrations/" + lengthPrefixed(k.Namespace, k.Tool, caller)
}

// passage is what became of one call at the limits of its rate.
type passage struct {
	// unregistered: the tool takes only registered intents, and this is none.
	unregistered bool
	// ruled: the rules of the tool were asked, and this is what they say.
	ruled   bool
	ruling  Ruling
	asked   bool
	refused bool
	wait    time.Duration // refused: for how long
	cells   [2]struct {
		of *rateLimit // nil: none
		at time.Time
	}
}

// askRates takes a cell of each limit, or none. name names their records.
func (e *Engine) askRates(ctx context.Context, pass *passage, c Call, p Policy, name func(k Key, caller string) string) error {
	limits := [...]struct {
		rate Rate
		key  string
	}{
		{p.RatePerCaller, name(c.Key, c.Caller)},
		{p.Rate, name(c.Key, "")},
	}
	for i, l := range limits {
		if l.rate.Every <= 0 {
			continue
		}
		of := e.rates.of(l.key, e.o.Clock.Now().Boot)
		at, wait, err := e.takeCell(ctx, of, l.rate)
		if err != nil {
			e.giveBack(pass)
			return err
		}
		if wait > 0 {
			e.giveBack(pass)
			pass.asked, pass.refused, pass.wait = true, true, wait
			return nil
		}
		pass.cells[i].of, pass.cells[i].at = of, at
	}
	pass.asked = true
	return nil
}

// giveBack returns the cells of a call that needed none after all.
func (e *Engine) giveBack(pass *passage) {
	for i := range pass.cells {
		if c := &pass.cells[i]; c.of != nil {
			c.of.put(c.at)
			c.of = nil
		}
	}
	pass.asked = pass.refused
}

func (e *Engine) rateLimited(k Key, cur *record, pass *passage) Answer {
	return Answer{Verdict: Deny, Reason: ReasonRateLimited, RetryAfter: pass.wait, Intent: e.viewOf(k, cur)}
}

// rates are the limits that this process has had to do with.
type rates struct {
	mu sync.Mutex
	by map[string]*rateLimit
}

// rateLimit is one limit, as this process knows it.
type rateLimit struct {
	key string

	mu sync.Mutex
	// asking ends when the one who asks the store has its answer; nil: nobody asks.
	asking chan struct{}
	// used is when a call last had to do with it, by the own clock. rates.mu guards it.
	used time.Duration
	rate Rate
	// cells are those that were taken in advance, by their time.
	cells []time.Time
	// state is the record's as it was last heard of, in this version.
	state   rateState
	version uint64
	// want is how many to take next; lost: some were not used in time since.
	want int
	lost bool
	// waiting are those who wait until asking ends.
	waiting int
}

func (r *rates) of(key string, boot time.Duration) *rateLimit {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.by[key]
	if l == nil {
		if r.by == nil {
			r.by = map[string]*rateLimit{}
		}
		l = &rateLimit{key: key, want: 1}
		r.by[key] = l
	}
	l.used = boot
	return l
}

// forget drops what was not used for long.
func (r *rates) forget(boot time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, l := range r.by {
		if boot-l.used > rateKept {
			delete(r.by, key)
		}
	}
}

// put puts a cell back among the others.
func (l *rateLimit) put(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := 0
	for i < len(l.cells) && l.cells[i].Before(at) {
		i++
	}
	l.cells = append(l.cells[:i], append([]time.Time{at}, l.cells[i:]...)...)
}

// take takes a cell whose time is not over, if there is one. If there is none the caller
// waits until asked ends, or is the one to ask if asked is nil. waits: it has waited.
func (l *rateLimit) take(r Rate, now time.Time, waits bool) (at time.Time, ok bool, asked <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if waits {
		l.waiting--
	}
	if l.rate != r {
		l.rate, l.cells = r, nil
	}
	for len(l.cells) > 0 {
		at, l.cells = l.cells[0], l.cells[1:]
		if !at.Before(now) {
			return at, true, nil
		}
		l.lost = true
	}
	if l.asking == nil {
		l.asking = make(chan struct{})
		return time.Time{}, false, nil
	}
	l.waiting++
	return time.Time{}, false, l.asking
}

// latest is the store's time as it may be now at the latest.
func (e *Engine) latest(ctx context.Context) (time.Time, error) {
	boot := e.o.Clock.Now().Boot
	now, err := e.now(ctx, boot)
	if err != nil {
		return now, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if at := e.clock.should(e.o.Clock.Now().Boot); !e.clock.jumped && at.After(now) {
		now = at
	}
	return now, nil
}

// takeCell takes a cell, of those in hand or of the store's. wait is for how long there is none.
func (e *Engine) takeCell(ctx context.Context, l *rateLimit, r Rate) (at time.Time, wait time.Duration, err error) {
	for waits := false; ; waits = true {
		now, err := e.latest(ctx)
		if err != nil {
			if waits {
				l.waits(-1)
			}
			return at, 0, err
		}
		at, ok, asked := l.take(r, now, waits)
		switch {
		case ok:
			return at, 0, nil
		case asked == nil:
			return e.claimCells(ctx, l, r)
		}
		// Whoever asks takes enough for all who wait, if there is enough.
		e.o.Await(ctx, asked)
		if ctx.Err() != nil {
			l.waits(-1)
			return at, 0, fmt.Errorf("%w: wait for the rate of calls: %w", store.ErrUnavailable, ctx.Err())
		}
	}
}

func (l *rateLimit) waits(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting += n
}

// claimCells takes cells of the store: one to use now, and some in advance.
func (e *Engine) claimCells(ctx context.Context, l *rateLimit, r Rate) (at time.Time, wait time.Duration, err error) {
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		close(l.asking)
		l.asking = nil
	}()
	for range maxTries {
		now, err := e.latest(ctx)
		if err != nil {
			return at, 0, err
		}
		c := l.plan(r, now)
		if c.cells == 0 && !c.anew {
			return at, c.wait, nil
		}
		written, err := e.writeRate(ctx, l, c.next)
		if err != nil {
			return at, 0, err
		}
		if !written {
			continue // others were before, and it is known now how far they came
		}
		if c.cells > 0 {
			l.got(c)
			return c.first, 0, nil
		}
	}
	return at, 0, fmt.Errorf("%w: the rate of calls", ErrContended)
}

// rateState is what the store keeps of a limit: the last cell that was given out.
type rateState struct {
	Last time.Time
	// Rate is that of whoever wrote it.
	Rate Rate
}

func (s *rateState) fields(c *coder) {
	c.time(1, &s.Last)
	s.Rate.fields(c, 2, 3)
}

// rateClaim is what to take.
type rateClaim struct {
	first time.Time
	cells int
	// next is what the store is to keep then. anew: it is to be written also without cells.
	next rateState
	anew bool
	// wait is until there is a cell, where there is none.
	wait time.Duration
}

// plan says which cells can be taken, by what is known of the record.
func (l *rateLimit) plan(r Rate, now time.Time) rateClaim {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, most := l.state.Last, now.Add(r.ahead())
	c := rateClaim{}
	if last.After(most.Add(rateWrong)) || last.After(most) && l.state.Rate != r {
		// It was written under a rate with a longer burst, or by a clock that was ahead. Nobody
		// is made to wait for longer than after a whole burst of this rate.
		last, c.anew = most, true
	}
	c.first = last.Add(r.Every)
	if c.first.Before(now) {
		c.first = now
	}
	if c.first.After(most) {
		c.wait = c.first.Sub(most)
		c.next = rateState{Last: last, Rate: r}
		return c
	}
	left := int(most.Sub(c.first)/r.Every) + 1
	moment := min(int(rateMoment/r.Every)+1, max(r.Burst/rateShare, 1))
	want := min(l.want, max(left/rateShare, moment))
	c.cells = min(left, max(want, l.waiting+1), rateMost)
	c.next = rateState{Last: c.first.Add(r.Every * time.Duration(c.cells-1)), Rate: r}
	return c
}

// got takes over what was taken: the first is used at once.
func (l *rateLimit) got(c rateClaim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost {
		l.want = max(1, l.want/2)
	} else {
		l.want = min(2*l.want, rateMost)
	}
	l.lost = false
	for i := 1; i < c.cells; i++ {
		l.cells = append(l.cells, c.first.Add(c.next.Rate.Every*time.Duration(i)))
	}
}

// writeRate moves the record on from where it is known to be. If it was elsewhere, that
// is known afterwards.
func (e *Engine) writeRate(ctx context.Context, l *rateLimit, next rateState) (bool, error) {
	l.mu.Lock()
	version := l.version
	l.mu.Unlock()
	c := coder{out: make([]byte, contentAt, 64)}
	next.fields(&c)
	w := store.Write{
		Epoch: e.id.Epoch, Key: l.key, Expected: version, Nonce: e.o.Nonce(),
		Record: &store.Record{Due: next.Last.Add(rateKept), Header: seal(c.out)},
	}
	// If its reply stays away, what it took is lost.
	res, err := e.repeat(ctx, e.o.Clock.Now().Boot, e.soon(), func() (store.Result, error) { return e.st.Update(ctx, w) })
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch res.Outcome {
	case store.Written:
		l.state, l.version = next, res.Version
		return true, nil
	case store.Mismatch:
		l.state, l.version = rateState{}, 0
		if res.Record == nil {
			return false, nil
		}
		if err := unpack(res.Record.Header, &l.state, (*rateState).fields); err != nil {
			return false, fmt.Errorf("%w: header of %q: %w", ErrCorrupt, l.key, err)
		}
		l.version = res.Record.Version
		return false, nil
	default:
		return false, fmt.Errorf("%w: an Update without meters cannot be %s", ErrInvariant, res.Outcome)
	}
}

// purgeRate deletes the record of a limit whose time was over long ago.
func (e *Engine) purgeRate(ctx context.Context, sr *store.Record, now time.Time) error {
	if sr.Due.After(now) || e.jumped() != nil {
		return nil
	}
	w := store.Write{Epoch: e.id.Epoch, Key: sr.Key, Expected: sr.Version, Nonce: e.o.Nonce()}
	_, err := e.repeat(ctx, e.o.Clock.Now().Boot, e.soon(), func() (store.Result, error) { return e.st.Update(ctx, w) })
	return err
}
