// This file is about intents that are written down before they are sent.
//
// A registration is one Reserve that looks for whatever stands in the way, as a call's
// does, and sends nothing. It reserves its spend, stands in nobody's way, and permits
// nothing by itself: the call's own step into flight is checked like any other. The first
// call under its ID says what the registration had left open, and must agree with the rest.

package guard

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// Registration is what is said of an intent before it is called.
type Registration struct {
	// At is when it was registered, by the store's clock. The guard sets it.
	At time.Time
	// Quote is the offer that is to be paid.
	Quote string
	// ValidUntil is when the intent can no longer be sent; zero: nothing was said.
	ValidUntil time.Time
	// Face is the name of the PaymentIntent that shows it; "": none does.
	Face string
	// Shown is what that object says, for it to come back; the guard does not read it.
	Shown []byte
	// Bound: a call has said the lineage and the fingerprint. The guard sets it.
	Bound bool
}

// causeNotValid begins to say why a release was not used.
const causeNotValid = "what was registered was valid until "

// registeredUntil is when a registration that was never sent ends: nobody reserves spend for ever.
func (r *record) registeredUntil() time.Time {
	return r.noLaterThanValid(r.Registration.At.Add(r.Policy.TTL))
}

// noLaterThanValid is the time, or the end of the registration's validity where that is earlier.
func (r *record) noLaterThanValid(at time.Time) time.Time {
	if g := r.Registration; g != nil && !g.ValidUntil.IsZero() && g.ValidUntil.Before(at) {
		return g.ValidUntil
	}
	return at
}

// overdue says that what was registered is no longer valid.
func (r *record) overdue(now time.Time) bool {
	g := r.Registration
	return g != nil && !g.ValidUntil.IsZero() && !now.Before(g.ValidUntil)
}

// unbound: no call has said lineage and fingerprint yet.
func (r *record) unbound() bool {
	return r.Fingerprint == "" || r.Registration != nil && !r.Registration.Bound
}

// bind takes from the first call what the registration had left open.
//
// What a release covers was compared without it. Where that makes a difference, the
// release covers nothing any more: what it passed over was never shown with this lineage,
// or under this identity, and a rule may say something else of it.
func (r *record) bind(c Call) {
	if !r.unbound() {
		return
	}
	if r.Lineage != c.Lineage || !r.Imported && (r.IdentityHash != c.IdentityHash || r.AmountHash != c.AmountHash || r.RecipientHash != c.RecipientHash) {
		r.Passed, r.RulePass = nil, 0
	}
	r.Lineage, r.Fingerprint, r.named = c.Lineage, c.Fingerprint, nil
	if !r.Imported {
		r.IdentityHash, r.AmountHash, r.RecipientHash = c.IdentityHash, c.AmountHash, c.RecipientHash
	}
	if r.Registration != nil {
		g := *r.Registration
		g.Bound = true
		r.Registration = &g
	}
}

// bindAs binds the record as another copy of it was bound.
func (r *record) bindAs(o *record) {
	r.bind(Call{
		Lineage: o.Lineage, Fingerprint: o.Fingerprint,
		IdentityHash: o.IdentityHash, AmountHash: o.AmountHash, RecipientHash: o.RecipientHash,
	})
}

// registeredRetryAfter is when a registration that found too many others may come again.
const registeredRetryAfter = time.Minute

const registeredOf = "registered"

func registeredMeter(budget, caller string) string {
	return lengthPrefixed(registeredOf, budget, caller)
}

// everyRegistered begins every one of them.
var everyRegistered = lengthPrefixed(registeredOf)

func isRegistered(e store.MeterEntry) bool { return strings.HasPrefix(e.Meter, everyRegistered) }

// registeredMeters count the record while it is registered and was not sent, among those of its caller.
//
// It leaves the count of the budget in which it was registered, which need not be the tool's
// any more. A process of an earlier version may have sent it and left it in there: so it leaves
// once more wherever it stays for long.
func (p *pending) registeredMeters() []store.MeterEntry {
	to, budget := p.to, p.to.Policy.Budget
	var m store.MeterEntry
	switch {
	case to.State == Registered:
		m.Amount, m.Limit = "1", limitText(to.Policy.MaxRegisteredPerCaller, p.from == nil)
	case p.from == nil:
		return nil
	case p.from.State == Registered:
		budget = p.from.Policy.Budget
	case to.Registration == nil || to.State != Held && !to.State.Settled():
		return nil
	}
	m.Meter = registeredMeter(budget, to.Caller)
	return []store.MeterEntry{m}
}

// tooMany answers a registration that finds as many others of its caller as the budget allows.
func (e *Engine) tooMany(k Key) Answer {
	return Answer{Verdict: Deny, Reason: ReasonTooManyRegistered, RetryAfter: registeredRetryAfter, Intent: View{Key: k}}
}

// unregistered says that the tool takes only registered intents, and this is none.
func (e *Engine) unregistered(p Policy, cur *record) bool {
	return p.RegisteredOnly && (cur == nil || cur.Registration == nil) && e.o.mutation != unregisteredPass
}

func (e *Engine) notRegistered(k Key, cur *record) Answer {
	return Answer{Verdict: Deny, Reason: ReasonNotRegistered, Intent: e.viewOf(k, cur)}
}

// Register writes an intent down before it is sent, once, and gives its verdict. Where the
// intent is known already, what became of it is told, and the face is taken if it has none;
// instead names one that is gone, whose place the face takes. Lineage and Fingerprint of the
// call may be empty: then the first call says them.
func (e *Engine) Register(ctx context.Context, c Call, g Registration, instead string, p Policy) (Answer, error) {
	if err := e.enter(); err != nil {
		return Answer{}, err
	}
	defer e.leave()
	g.ValidUntil = g.ValidUntil.Truncate(time.Second)
	key := c.Key.String()
	var cur *record
	if e.seen.has(key) {
		r, _, err := e.get(ctx, key)
		if err != nil {
			return Answer{}, err
		}
		cur = r
	}
	var pass passage
	for range maxTries {
		start, now, err := e.started(ctx)
		if err != nil {
			return Answer{}, err
		}
		if cur, err = e.advance(ctx, cur, now); err != nil {
			return Answer{}, err
		}
		var a Answer
		var again bool
		switch {
		case cur != nil:
			e.giveBack(&pass)
			a, again, err = e.registerKnown(ctx, &cur, c, g, instead, now)
		case p.rated() && !pass.asked:
			if err := e.askRates(ctx, &pass, c, p, registrationRateKey); err != nil {
				return Answer{}, err
			}
			continue // the time that this took counts for nothing
		default:
			a, again, err = e.registerNew(ctx, &cur, c, g, p, &pass, now, start)
		}
		if !again {
			return a, err
		}
	}
	return Answer{}, ErrContended
}

// differsFrom compares a registration with the record of its ID. What it leaves open it does not compare.
func (r *record) differsFrom(c Call, g Registration) (Reason, bool) {
	if had := r.Registration; had != nil && (had.Quote != g.Quote || !had.ValidUntil.Equal(g.ValidUntil)) {
		return ReasonRequest, true
	}
	if c.Lineage != "" && c.Lineage != r.Lineage {
		return ReasonRequest, true
	}
	c.Lineage = r.Lineage
	if c.Fingerprint == "" {
		c.Fingerprint = r.Fingerprint
	} else if r.Fingerprint == "" {
		return ReasonRequest, true // what was registered first left it open
	}
	return r.differs(c)
}

// registerKnown tells what became of an intent that there is a record of.
func (e *Engine) registerKnown(ctx context.Context, cur **record, c Call, g Registration, instead string, now time.Time) (Answer, bool, error) {
	r := *cur
	if reason, differs := r.differsFrom(c, g); differs {
		return e.conflict(r, reason), false, nil
	}
	had := r.Registration
	faceless := had == nil || had.Face == "" || instead != "" && had.Face == instead
	if r.State == Tombstone {
		return e.settledLongAgo(r, g.Face, faceless, now), false, nil
	}
	if late := (&record{body: body{Registration: &g}}).overdue(now); had == nil && late {
		// What is not known as registered would be bound by a time that is over. What it has
		// come to is told all the same.
		a, _ := e.answer(r, now)
		if !r.State.Settled() {
			a = Answer{Verdict: Deny, Reason: ReasonExpired, Intent: a.Intent}
		}
		return a, false, nil
	}
	if had == nil || g.Face != "" && faceless {
		next := r.clone()
		if had == nil {
			g.At, g.Bound = now, r.Fingerprint != ""
			next.Registration = &g
		} else {
			named := *had
			named.Face, named.Shown = g.Face, g.Shown
			next.Registration = &named
		}
		res, other, err := e.update(ctx, pending{from: r, to: next, on: onRegister, now: now, nonce: e.o.Nonce(), keepMarks: true}, e.soon())
		if err != nil {
			return Answer{}, false, err
		}
		if res.Outcome != store.Written {
			*cur = other
			return Answer{}, true, nil
		}
		r = next
	}
	a, maySend := e.answer(r, now)
	if maySend && r.overdue(now) {
		a.Verdict, a.Reason = Deny, ReasonExpired
	}
	return a, false, nil
}

// settledLongAgo tells what an intent came to whose answer is no longer kept. A registration asks for
// nothing to be sent, so nobody has to decide, and nothing is written: only a call is held as
// KeyExpired. The face is told as it would be, for an object that was made again.
func (e *Engine) settledLongAgo(r *record, face string, faceless bool, now time.Time) Answer {
	was := r.clone()
	was.State = r.SettledAs
	a, _ := e.answer(was, now)
	if a.Reason == ReasonUnreachable {
		a.Reason = "" // why it failed went with the answer
	}
	a.Intent = r.view(e.id.Epoch)
	if had := r.Registration; had != nil && face != "" && faceless {
		named := *had
		named.Face = face
		a.Intent.Registration = &named
	}
	return a
}

// registerNew is the one Reserve of an intent that there is no record of.
func (e *Engine) registerNew(ctx context.Context, cur **record, c Call, g Registration, p Policy, pass *passage, now time.Time, start Reading) (Answer, bool, error) {
	next := e.registered(c, g, p, now)
	if next.overdue(now) {
		e.giveBack(pass)
		return Answer{Verdict: Deny, Reason: ReasonExpired, Intent: View{Key: c.Key}}, false, nil
	}
	if err := e.askRules(pass, &c, p); err != nil {
		e.giveBack(pass)
		return Answer{}, false, err
	}
	probes, kinds := next.probes(true)
	w, err := e.write(pending{to: next, on: onRegister, now: now, nonce: e.o.Nonce()})
	if err != nil {
		return Answer{}, false, err
	}
	lost := e.forgot(p, now)
	uncounted := next.uncounted()
	asks := lost || uncounted != nil || pass.refused || e.ruled(pass, next)
	if asks {
		// It will not be registered, and need not wait for those that are.
		w.Meters = append(slices.DeleteFunc(w.Meters, isRegistered), neverWritten)
	}
	req := store.Reserve{Write: w, Probes: e.mutatedProbes(probes, nil)}
	res, err := e.repeat(ctx, start.Boot, start.after(e.o.Repeat), func() (store.Result, error) { return e.st.Reserve(ctx, req) })
	if err != nil {
		return Answer{}, false, err
	}
	if res.Outcome == store.Written {
		if asks {
			return Answer{}, false, fmt.Errorf("%w: the store wrote what it was to refuse", ErrInvariant)
		}
		next.version = res.Version
		e.done(pending{to: next, on: onRegister}, res.boot)
	}
	if err := e.jumped(); err != nil {
		return Answer{}, false, err // whatever was written sends nothing
	}
	switch res.Outcome {
	case store.Written:
		a, _ := e.answer(next, now)
		return a, false, nil
	case store.Mismatch:
		*cur, err = decode(res.Record)
		e.see(*cur, res.boot)
		return Answer{}, true, err
	case store.Blocked:
		return e.blocked(ctx, cur, next, p, res.Result, kinds, lost, pass)
	case store.OverLimit:
		if pass.refused {
			return e.rateLimited(c.Key, nil, pass), false, nil
		}
		if res.Meter == registeredMeter(p.Budget, c.Caller) {
			e.giveBack(pass)
			return e.tooMany(c.Key), false, nil
		}
		return e.overLimit(ctx, cur, next, p, uncounted, lost, res.Result, pass)
	}
	return Answer{}, false, fmt.Errorf("%w: a Reserve cannot be %s", ErrInvariant, res.Outcome)
}

// registered is the record of an intent that was written down and not sent.
func (e *Engine) registered(c Call, g Registration, p Policy, now time.Time) *record {
	next := e.first(c, now)
	g.At, g.Bound = now, false
	next.Registration = &g
	next.Policy = p
	next.charge(p)
	next.State, next.Changed = Registered, now
	return next
}
