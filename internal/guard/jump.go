// This file knows the store's time, and whether its clock is where it should be.
//
// Windows, TTLs and deadlines follow the store's clock. When it goes on by more than
// an hour more, or less, than this process's own clock has since the store last
// answered, it has jumped: what stood in the way may seem to be over. From then on no
// call is let in and nothing ages, until the clock is set right or somebody accepts it.
// The own clock is CLOCK_BOOTTIME, so a machine that was suspended sees no jump.

package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// jumpLimit is how far from where it should be the store's clock is believed.
	jumpLimit = time.Hour
	// staleAfter is how old the last known time of the store may be before it is asked anew.
	staleAfter = 5 * time.Second
)

// longAgo bounds a list that is asked for the store's time alone.
var longAgo = time.Date(1972, 1, 1, 0, 0, 0, 0, time.UTC)

// ErrClockJumped: the store's clock is not where it should be, so nobody can say how
// long ago anything was paid.
var ErrClockJumped = errors.New("store clock jumped")

// storeClock is what the answers of the store have told about its clock. The Engine's
// mutex guards it.
//
// An answer was given at some moment between its question and its arrival. So it bounds
// the offset between the store's clock and the own one from both sides, however long it
// was on its way, and answers that overtake each other agree.
type storeClock struct {
	// turn counts questions and answers, to tell which came first.
	turn uint64
	// The time as last heard, the own clock at its arrival, and which question it answered.
	time     time.Time
	heardAt  time.Duration
	question uint64
	slow     bool // it was long on its way

	// low and high bound the offset from base plus the own clock, as it should be; agreed
	// is the question whose answer last moved them, 0: nothing is known.
	base      time.Time
	low, high time.Duration
	agreed    uint64

	// While jumped: the bounds as they were heard, and when that was last heard.
	jumped            bool
	jumpLow, jumpHigh time.Duration
	from, to          time.Time
	shown             uint64
}

// question is the moment before the store is asked.
type question struct {
	turn uint64
	boot time.Duration
}

// expect says where the clock should be now.
func (c *storeClock) expect(t time.Time, boot time.Duration) {
	c.turn++
	c.base, c.agreed = t, c.turn
	c.low, c.high = -boot, -boot
}

// should is where the clock should be.
func (c *storeClock) should(boot time.Duration) time.Time { return c.base.Add(c.high + boot) }

// hear takes in an answer. jumped: by this answer the clock is not where it should be.
func (c *storeClock) hear(q question, t time.Time, boot time.Duration) (jumped bool) {
	c.turn++
	if q.turn > c.question {
		c.time, c.heardAt, c.question, c.slow = t, boot, q.turn, boot-q.boot > staleAfter
	}
	if c.agreed == 0 {
		c.base, c.low, c.high = t, -boot, -q.boot
	}
	at := t.Sub(c.base)
	low, high := at-boot, at-q.boot
	if apart(low, high, c.low, c.high) {
		if !c.jumped || apart(low, high, c.jumpLow, c.jumpHigh) {
			c.from, c.to = c.should(boot), t
		}
		c.jumped, c.jumpLow, c.jumpHigh, c.shown = true, low, high, c.turn
		return true
	}
	if c.jumped && q.turn < c.shown {
		return false // it was asked before: it does not say that the clock came back
	}
	c.jumped = false
	if q.turn >= c.agreed {
		c.agreed = q.turn
		if low <= c.high && high >= c.low {
			c.low, c.high = max(low, c.low), min(high, c.high)
		} else {
			c.low, c.high = low, high // it was stepped, or has drifted
		}
	}
	return false
}

// apart says that two pairs of bounds are further apart than a clock is believed.
func apart(low, high, otherLow, otherHigh time.Duration) bool {
	return low > otherHigh+jumpLimit || high < otherLow-jumpLimit
}

// ask is called before every question to the store, with the own clock as it was then or,
// where it was just read, shortly before: the bounds that follow are as true, and wider.
func (e *Engine) ask(boot time.Duration) question {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clock.turn++
	return question{turn: e.clock.turn, boot: boot}
}

// heard takes note of the store's time. It returns the time to go by, and the own clock. While the clock
// is wrong that is the later one of what it shows and what it should show: whatever is
// written meanwhile stands no shorter than it would have.
func (e *Engine) heard(q question, t time.Time) (now time.Time, boot time.Duration, jumped bool) {
	boot = e.o.Clock.Now().Boot
	if t.IsZero() {
		return t, boot, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	jumped = e.clock.hear(q, t, boot)
	if should := e.clock.should(boot); jumped && should.After(t) {
		t = should
	}
	return t, boot, jumped
}

// now is the store's time: as last heard, and gone on by this process's clock, which shows boot.
func (e *Engine) now(ctx context.Context, boot time.Duration) (time.Time, error) {
	now, _, err := e.nowAt(ctx, boot)
	return now, err
}

// nowAt is now, with what the own clock showed then: boot, or later if the store had to be asked.
func (e *Engine) nowAt(ctx context.Context, boot time.Duration) (time.Time, time.Duration, error) {
	e.mu.Lock()
	t, at := e.clock.time, e.clock.heardAt
	fresh := !t.IsZero() && !e.clock.slow && !e.clock.jumped && boot-at <= staleAfter
	e.mu.Unlock()
	if fresh {
		return t.Add(boot - at), boot, nil
	}
	page, boot, err := e.list(ctx, store.List{What: store.ListDue, Before: longAgo, Limit: 1})
	return page.Now, boot, err
}

// noEarlier is a time that the store's clock has not passed yet, if it goes right. What now
// gives is behind it by as long as the answer was on its way, commit and all: too early for
// what is to be remembered for a time from now on.
func (e *Engine) noEarlier(now time.Time) time.Time {
	return e.noEarlierAt(now, e.o.Clock.Now().Boot)
}

// noEarlierAt is noEarlier as it was at now, when the own clock showed boot.
func (e *Engine) noEarlierAt(now time.Time, boot time.Duration) time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.clock.agreed == 0 || e.clock.jumped {
		return now
	}
	if at := e.clock.should(boot); at.After(now) {
		return at
	}
	return now
}

// started gives the own clock and then the store's, which must be one that can be believed: what
// is written next begins by them.
func (e *Engine) started(ctx context.Context) (start Reading, now time.Time, err error) {
	start = e.o.Clock.Now()
	if now, err = e.now(ctx, start.Boot); err == nil {
		err = e.jumped()
	}
	return start, now, err
}

// list asks for a page. boot is the own clock when it had come.
func (e *Engine) list(ctx context.Context, l store.List) (page store.Page, boot time.Duration, err error) {
	q := e.ask(e.o.Clock.Now().Boot)
	if page, err = e.st.List(ctx, l); err != nil {
		return store.Page{}, 0, err
	}
	page.Now, boot, _ = e.heard(q, page.Now)
	return page, boot, nil
}

// jumped says why nobody may go by the store's clock; nil: it is where it should be.
func (e *Engine) jumped() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.clock.jumped || e.o.mutation == jumpIgnored {
		return nil
	}
	return fmt.Errorf("%w: it should have shown %s and showed %s; set it right, or accept it", ErrClockJumped,
		e.clock.from.UTC().Format(time.RFC3339), e.clock.to.UTC().Format(time.RFC3339))
}

// sweepTime is by when the sweep looks for what is due: where the clock should be.
func (e *Engine) sweepTime(now time.Time) time.Time {
	boot := e.o.Clock.Now().Boot
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.clock.jumped {
		return e.clock.should(boot)
	}
	return now
}

// ClockJump says whether the store's clock has jumped: where it should be now, and what it
// shows now if it has gone on since as clocks do.
func (e *Engine) ClockJump() (from, to time.Time, jumped bool) {
	boot := e.o.Clock.Now().Boot
	e.mu.Lock()
	defer e.mu.Unlock()
	c := &e.clock
	if !c.jumped {
		return time.Time{}, time.Time{}, false
	}
	return c.should(boot), c.base.Add(c.jumpHigh + boot), true
}

// AcceptClock goes on from the time as it was last heard.
func (e *Engine) AcceptClock() {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := &e.clock
	if !c.jumped {
		return
	}
	c.turn++
	c.jumped, c.low, c.high, c.agreed = false, c.jumpLow, c.jumpHigh, c.turn
}
