// This file is about attempts that are not this process's own: a local tool runs inside
// its agent, which claims an attempt, renews its lease while it runs, and settles it, each
// time perhaps through another process.
//
// What must hold: number and nonce are the fence, as for every attempt. A lease is renewed
// only while its attempt is the one in flight, by compare-and-set, so that nobody has
// judged it meanwhile; and whoever judges watches anew from each renewal, since the record
// has another name to be watched by. The holder's own clock starts before it asks.

package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// ErrNoClaim: there is no such attempt of this caller, so there is nothing to renew or to settle.
var ErrNoClaim = errors.New("there is no such claim")

// Fence is what the holder of an attempt shows: its number and its nonce. The UID is the
// ServiceAccount's, which must be the one that claimed it.
type Fence struct {
	Key
	CallerUID string
	Attempt   int
	Nonce     string
}

// Fence gives the attempt into other hands: whoever has it holds the lease.
func (t *Ticket) Fence() Fence {
	return Fence{Key: t.Key, CallerUID: t.rec.CallerUID, Attempt: t.Attempt, Nonce: t.nonce}
}

// HandOver ends this process's own part in an attempt that another one settles.
func (e *Engine) HandOver(t *Ticket) { e.written(t) }

// RunFor is the time that is left to run the attempt: what follows is for its settlement.
func (t *Ticket) RunFor() time.Duration { return t.Left() - t.settling }

// find gives the attempt that a fence names. Only what was claimed is anybody's to renew or
// to settle: all else is a gateway's, or a person's to decide about.
func (r *record) find(f Fence) *attempt {
	if r == nil || r.CallerUID != f.CallerUID || f.Nonce == "" {
		return nil
	}
	if a := r.attemptWith(f.Attempt, f.Nonce); a != nil && a.Claim != "" {
		return a
	}
	return nil
}

// ticketOf is the ticket of an attempt that was claimed before.
func (e *Engine) ticketOf(r *record, f Fence) *Ticket {
	return &Ticket{Key: f.Key, Attempt: f.Attempt, ProviderKey: r.ProviderKey, clock: e.o.Clock, nonce: f.Nonce, rec: r}
}

// Renew begins the lease of an attempt anew. ALLOW carries a ticket with the new times;
// whoever gets another answer holds no lease, or one that ends when it would have.
func (e *Engine) Renew(ctx context.Context, f Fence) (Answer, error) {
	e.keepOpen()
	defer e.leave()
	// The clock that ends the holder's run starts before the record is read.
	start := e.o.Clock.Now()
	r, now, err := e.get(ctx, f.Key.String())
	if err != nil {
		return Answer{}, err
	}
	for range maxTries {
		if err := e.jumped(); err != nil {
			return Answer{}, err // a lease by a clock that is wrong would end at any time
		}
		if r, err = e.advance(ctx, r, now); err != nil {
			return Answer{}, err
		}
		if r.find(f) == nil {
			return Answer{}, fmt.Errorf("renewing attempt %d: %w", f.Attempt, ErrNoClaim)
		}
		if !e.holds(r, e.ticketOf(r, f)) {
			if e.o.mutation == renewsOver {
				t := e.ticketOf(r, f)
				lease := r.attemptWith(f.Attempt, f.Nonce).Lease
				t.deadline, t.leaseEnd = start.after(lease-e.o.Margin), start.after(lease)
				return Answer{Verdict: Allow, Intent: r.view(e.id.Epoch), Ticket: t}, nil
			}
			return Answer{Verdict: Deny, Reason: ReasonLeaseOver, Intent: r.view(e.id.Epoch)}, nil
		}
		a, other, err := e.extend(ctx, r, start, now)
		if err != nil || other == nil {
			return a, err
		}
		r = other
		if now, err = e.now(ctx, e.o.Clock.Now().Boot); err != nil {
			return Answer{}, err
		}
	}
	return Answer{}, ErrContended
}

// extend writes a lease that begins anew. other is the record that is there instead, if
// somebody has changed it meanwhile.
func (e *Engine) extend(ctx context.Context, r *record, start Reading, now time.Time) (a Answer, other *record, err error) {
	old := r.last()
	if !e.remembers(r) {
		// What became of it since may be what the store has lost. It ends by its lease.
		return Answer{Verdict: Deny, Reason: ReasonLeaseOver, Intent: r.view(e.id.Epoch)}, nil, nil
	}
	if now.Sub(old.Started) >= r.Policy.RenewFor {
		return Answer{Verdict: Deny, Reason: ReasonRenewedEnough, Intent: r.view(e.id.Epoch)}, nil, nil
	}
	next := r.clone()
	x := next.last()
	x.Renewals++
	// A clock that was set back must not end it sooner than was said.
	if end := now.Add(x.Lease); end.After(x.LeaseEnd) {
		x.LeaseEnd = end
	}
	if e.o.mutation == renewsUnwritten {
		return e.ticket(next, start), nil, nil
	}
	p := pending{from: r, to: next, on: onRenewed, now: now, nonce: e.o.Nonce(), keepMarks: true}
	res, there, err := e.updateAt(ctx, p, start.Boot, start.after(e.o.Repeat))
	if err != nil {
		return Answer{}, nil, err
	}
	if res.Outcome == store.Written {
		return e.ticket(next, start), nil, nil
	}
	if there == nil {
		return Answer{}, nil, fmt.Errorf("renewing attempt %d: %w", old.Number, ErrNoClaim)
	}
	return Answer{}, there, nil
}

// reclaim answers a claim that was made already and whose answer was lost: under its own
// token, which names one claim, and with a lease that begins anew. other: look once more.
// After what was registered is no longer valid nothing is given: it may not have begun yet.
func (e *Engine) reclaim(ctx context.Context, r *record, start Reading, now time.Time) (a Answer, other *record, err error) {
	if r.overdue(now) && e.o.mutation != expiredPass {
		a, _ = e.answer(r, now)
		return a, nil, nil
	}
	if a, other, err = e.extend(ctx, r, start, now); err == nil && other == nil && a.Ticket == nil {
		// Nobody runs it any longer than its lease, and this caller would not know how long that is.
		a, _ = e.answer(r, now)
	}
	if a.Ticket != nil {
		a.Ticket.Retry = true // it was counted when it was given first
	}
	return a, other, err
}

// claimedBy says that the record's attempt in flight is this call's own claim.
func (r *record) claimedBy(c *Call) bool {
	return c.Claim != "" && r.State == InFlight && r.last().Claim == c.Claim
}

// hasClaim says that an attempt was claimed under this token before.
func (r *record) hasClaim(token string) bool {
	if token == "" {
		return false
	}
	for i := range r.Attempts {
		if r.Attempts[i].Claim == token {
			return true
		}
	}
	return false
}

// SettleClaim is Settle for an attempt that was handed over. It does not go on by itself
// when the store is away: the holder keeps its result, and brings it again.
func (e *Engine) SettleClaim(ctx context.Context, f Fence, res Result) (Answer, error) {
	e.keepOpen()
	defer e.leave()
	until := e.soon()
	r, _, err := e.get(ctx, f.Key.String())
	if err != nil {
		return Answer{}, err
	}
	if r.find(f) == nil {
		err := fmt.Errorf("settling attempt %d: %w", f.Attempt, ErrNoClaim)
		e.evidence(&Ticket{Key: f.Key, Attempt: f.Attempt}, res, err)
		return Answer{}, err
	}
	t := e.ticketOf(r, f)
	a, err := e.settle(ctx, t, r, res, until)
	if err != nil && !errors.Is(err, store.ErrUnavailable) {
		e.evidence(t, res, err)
	}
	return a, err
}
