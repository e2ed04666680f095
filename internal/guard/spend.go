// This file is about money: what each record counts for in the limits of its budget.
//
// A limit has one meter for each value of its `per`: the sum of what moves, or may have
// moved, and has not left the window. A record's entry in it is
//
//   - set with a limit by every step into flight, and by a registration, in the same Reserve:
//     so no number of processes together ever raises the sum above the limit;
//   - kept whatever its age while money of it may yet move, or nobody knows whether it has;
//   - taken back when the attempts are known to have moved nothing;
//   - let go once the window is over from the record's settlement, by a step of the record
//     itself. The sum is never too low for any window; it is too high for as long as that
//     step is late, which the sweep takes about every second.
//
// What has happened already (a late success, a person's word) is set without a limit: it
// moved, whether it was allowed or not.

package guard

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cockroachdb/apd/v3"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// SpendLimit is one limit of a budget, as it stands for one call.
type SpendLimit struct {
	Name string
	// Amount is the most that may move in any window.
	Amount intent.Money
	Window time.Duration
	// Hold holds a call that would exceed it; otherwise it is denied.
	Hold bool
	// Per is the value that this call counts for; "": the limit is for the whole budget.
	Per string
	// Own: only this caller's intents count for this value.
	Own bool
	// Unknown says why it cannot be told for which value the call counts; "": it can.
	Unknown string
}

// Span is the window as people write it.
func (l SpendLimit) Span() string { return span(l.Window) }

func span(d time.Duration) string {
	text := d.String()
	if rest, ok := strings.CutSuffix(text, "m0s"); ok {
		text = rest + "m"
	}
	if rest, ok := strings.CutSuffix(text, "h0m"); ok {
		text = rest + "h"
	}
	return text
}

// WithSpend is the policy with the limits of its budget, as they stand for one call.
func (p Policy) WithSpend(limits []SpendLimit) Policy {
	p.spend = limits
	return p
}

// compares is for how long after its settlement an intent matters to others.
func (p Policy) compares() time.Duration {
	longest := max(p.Window, p.Lookalike)
	for i := range p.spend {
		longest = max(longest, p.spend[i].Window)
	}
	return longest
}

// SpendExceeded says which limit refused a call.
type SpendExceeded struct {
	Limit SpendLimit
	// Left is what the limit still allows; empty where that would tell of other callers.
	Left string
	// Uncounted says why the call cannot be counted at all; "": it is too much.
	Uncounted string
}

// charge is what a record counts for in one limit.
type charge struct {
	Budget   string
	Name     string
	Currency string
	Per      string
	Window   time.Duration
	// Payments is how many times the record's amount counts.
	Payments int
	// Until is when it leaves the window; zero: it is reserved, and does not age.
	Until time.Time
	// From is the number of the first attempt that counts, where earlier ones have left the
	// window; 0: all of them do.
	From int
}

// same says that both count in the same limit.
func (c *charge) same(o charge) bool {
	return c.Budget == o.Budget && c.Name == o.Name && c.Currency == o.Currency && c.Per == o.Per
}

// spendShards is over how many meters the sums for people are spread, so that calls
// of different callers do not wait for each other because of them.
const spendShards = 8

func spendMeter(budget, name, currency, per string) string {
	return lengthPrefixed("spend", budget, name, currency, per)
}

func spendShard(kind, budget, name, currency string, shard int) string {
	return lengthPrefixed(kind, budget, name, currency, strconv.Itoa(shard))
}

// The sums for people: what is reserved and what is used of a limit, over all its values.
const (
	spendReserved = "spend-reserved"
	spendUsed     = "spend-used"
)

func (c *charge) meter() string { return spendMeter(c.Budget, c.Name, c.Currency, c.Per) }

func shardOf(key string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // never fails
	return int(h.Sum32() % spendShards)
}

// charge has the record count in the limits of this policy. Where it counts already under
// an earlier policy it goes on to, since what may have moved then counts there.
func (r *record) charge(p Policy) {
	if len(p.spend) == 0 || r.Amount == nil {
		return
	}
	charges := slices.Clone(r.Charges)
	for i := range p.spend {
		l := &p.spend[i]
		if l.Amount.Currency != r.Amount.Currency || l.Unknown != "" {
			continue
		}
		c := charge{Budget: p.Budget, Name: l.Name, Currency: l.Amount.Currency, Per: l.Per, Window: l.Window}
		at := slices.IndexFunc(charges, c.same)
		if at < 0 {
			charges = append(charges, c)
		} else {
			charges[at].Window = l.Window
		}
	}
	r.Charges = charges
}

// payments is how many times the amount has moved or may have, of the attempts from this
// number on; 0: of all.
//
// Each success that is not told twice is one, and so is an attempt that nobody has judged:
// it may be another payment. One that a person has released counts only where nothing
// else does: the person has seen that it had not moved.
func (r *record) payments(from int) int {
	n, moved := 0, false
	byHand := r.PaidByHand && from <= r.PaidAttempts
	if byHand {
		n++
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Number < from || !a.mayHaveMoved() {
			continue
		}
		moved = true
		last := i == len(r.Attempts)-1
		switch {
		case a.Outcome == AttemptSucceeded:
			if !r.toldTwice(i, from, byHand) {
				n++
			}
		case a.Excused || byHand && a.Number <= r.PaidAttempts:
		case a.Resumed && r.succeededUnder(a.Generation): // it is that payment, or none
		case last || a.Late:
			n++
		}
	}
	if n == 0 && moved {
		return 1
	}
	return n
}

// toldTwice says that this success is the same payment as one that counts already.
func (r *record) toldTwice(i, from int, byHand bool) bool {
	a := &r.Attempts[i]
	if byHand && (a.Reference != "" && a.Reference == r.ProviderReference || a.Number <= r.PaidAttempts && (a.Reference == "" || r.ProviderReference == "")) {
		return true
	}
	return slices.ContainsFunc(r.Attempts[:i], func(b attempt) bool {
		return b.Number >= from && b.Outcome == AttemptSucceeded && (a.Reference != "" && b.Reference == a.Reference || a.sameKey(&b))
	})
}

// recount brings the record's charges up to its state. anew: what ages does so from now.
func (r *record) recount(now time.Time, anew bool) {
	stands, ends := r.standing()
	// A person may decide while a payment can still become visible: it moves no later than then.
	from := now
	if at, _ := r.waitOver(); at.After(from) {
		from = at
	}
	charges := slices.Clone(r.Charges)
	for i := range charges {
		c := &charges[i]
		counted := c.Payments > 0
		switch c.Payments = 0; {
		case stands:
			c.Payments = r.payments(c.From)
		case r.State == Registered:
			c.Payments = 1
		}
		switch {
		case c.Payments == 0 || !ends:
			c.Until = time.Time{}
		case anew || !counted || c.Until.IsZero():
			c.Until = from.Add(c.Window)
		}
	}
	r.Charges = charges
}

// spentUntil is when the first and the last of what the record counts for leaves the
// window; zero: nothing does.
func (r *record) spentUntil() (first, last time.Time) {
	for i := range r.Charges {
		until := r.Charges[i].Until
		if !until.IsZero() && (first.IsZero() || until.Before(first)) {
			first = until
		}
		if until.After(last) {
			last = until
		}
	}
	return first, last
}

// spendDue is when time does the next thing to a settled record, where its own time is at.
func (r *record) spendDue(at time.Time) time.Time {
	if first, _ := r.spentUntil(); !first.IsZero() && first.Before(at) {
		return first
	}
	return at
}

// age lets go what has left the window.
func (r *record) age(now time.Time) {
	charges := slices.Clone(r.Charges)
	for i := range charges {
		if c := &charges[i]; !c.Until.IsZero() && !now.Before(c.Until) {
			c.From, c.Payments, c.Until = len(r.Attempts)+1, 0, time.Time{}
		}
	}
	r.Charges = charges
}

// spendEntries brings the record's charges up to its state, and gives the meter entries
// of that step: limits that deny first, then those that hold, then those without a limit.
func (e *Engine) spendEntries(p pending) ([]store.MeterEntry, error) {
	r := p.to
	if len(r.Charges) == 0 {
		return nil, nil
	}
	var before []charge
	if p.from != nil {
		before = p.from.Charges
	}
	if p.on == onLateSuccess || p.on == onLateEvidence && !p.keepMarks || p.on == onChecked && r.State == Succeeded {
		// What came as news counts from now, also of attempts that had left the window.
		r.Charges = slices.Clone(r.Charges)
		for i := range r.Charges {
			r.Charges[i].From = 0
		}
	}
	r.recount(e.noEarlierOf(p), !p.keepMarks)
	e.mutatedCharges(r)

	limits := r.limits((p.on == onCall || p.on == onRegister) && e.o.mutation != spendUnlimited)
	var limited, held, out []store.MeterEntry
	var sums []shardSum
	shard := shardOf(r.key)
	for i := range r.Charges {
		c, was := &r.Charges[i], charge{}
		if at := slices.IndexFunc(before, c.same); at >= 0 {
			was = before[at]
		}
		sums = addTo(sums, c, shard, c.Until.IsZero(), c.Payments, 0)
		sums = addTo(sums, c, shard, was.Until.IsZero(), 0, was.Payments)
		if c.Payments == was.Payments {
			continue
		}
		amount, err := r.times(c.Payments)
		if err != nil {
			return nil, err
		}
		m := store.MeterEntry{Meter: c.meter(), Amount: amount}
		switch l := c.limitOf(limits); {
		case l == nil:
			out = append(out, m)
		case l.Hold:
			m.Limit = l.Amount.Value
			held = append(held, m)
		default:
			m.Limit = l.Amount.Value
			limited = append(limited, m)
		}
	}
	for _, s := range sums {
		if s.is == s.was {
			continue
		}
		amount, err := r.times(s.is)
		if err != nil {
			return nil, err
		}
		out = append(out, store.MeterEntry{Meter: s.meter, Amount: amount})
	}
	return slices.Concat(limited, held, out), nil
}

// shardSum is what the record counts for in a sum for people, in payments, and did before.
type shardSum struct {
	meter   string
	is, was int
}

func addTo(sums []shardSum, c *charge, shard int, reserved bool, is, was int) []shardSum {
	kind := spendUsed
	if reserved {
		kind = spendReserved
	}
	meter := spendShard(kind, c.Budget, c.Name, c.Currency, shard)
	at := slices.IndexFunc(sums, func(s shardSum) bool { return s.meter == meter })
	if at < 0 {
		at, sums = len(sums), append(sums, shardSum{meter: meter})
	}
	sums[at].is += is
	sums[at].was += was
	return sums
}

// times is so many of the record's payments; empty: nothing.
func (r *record) times(n int) (string, error) {
	if n == 0 || r.Amount == nil {
		return "", nil
	}
	d, err := decimal(r.Amount.Value)
	if err != nil {
		return "", err
	}
	if _, err := exact.Mul(d, d, apd.New(int64(n), 0)); err != nil {
		return "", fmt.Errorf("%w: %d payments of %s: %w", ErrInvariant, n, r.Amount.Value, err)
	}
	return store.PlainDecimal(d), nil
}

// exact never rounds.
var exact = apd.BaseContext

func decimal(text string) (*apd.Decimal, error) {
	if text == "" {
		return apd.New(0, 0), nil
	}
	d, _, err := apd.NewFromString(text)
	if err != nil {
		return nil, fmt.Errorf("%w: amount %q: %w", ErrCorrupt, text, err)
	}
	return d, nil
}

// limits are those of the policy that the record's next attempt must keep.
func (r *record) limits(limited bool) []*SpendLimit {
	if !limited || r.Amount == nil {
		return nil
	}
	var out []*SpendLimit
	for i := range r.Policy.spend {
		l := &r.Policy.spend[i]
		if l.Amount.Currency == r.Amount.Currency && l.Unknown == "" && !(l.Hold && r.maySpend()) {
			out = append(out, l)
		}
	}
	return out
}

func (c *charge) limitOf(limits []*SpendLimit) *SpendLimit {
	for _, l := range limits {
		if l.Name == c.Name && l.Per == c.Per && l.Amount.Currency == c.Currency {
			return l
		}
	}
	return nil
}

// maySpend says that a person has let this record pass its limits, for a payment that has
// not moved since.
func (r *record) maySpend() bool { return r.passes(r.SpendPass) }

// uncounted says which limit a call breaks because it cannot be counted; nil: it can.
// A limit that denies comes before one that holds.
func (r *record) uncounted() *SpendExceeded {
	limits := r.Policy.spend
	if len(limits) == 0 {
		return nil
	}
	covered := r.Amount != nil && slices.ContainsFunc(limits, func(l SpendLimit) bool { return l.Amount.Currency == r.Amount.Currency })
	var out *SpendExceeded
	for i := range limits {
		l, why := &limits[i], ""
		switch {
		case r.Amount == nil:
			why = "the tool declares no amount, so nobody can tell what it spends"
		case !covered:
			why = "the budget has no limit in " + r.Amount.Currency + ", and nothing is converted"
		case l.Amount.Currency == r.Amount.Currency:
			why = l.Unknown
		}
		if why == "" || l.Hold && (out != nil || r.maySpend()) {
			continue
		}
		if out == nil || out.Limit.Hold {
			out = &SpendExceeded{Limit: *l, Uncounted: why}
		}
	}
	return out
}

// exceeded is the limit that has this meter.
func (r *record) exceeded(meter string) *SpendExceeded {
	for _, l := range r.limits(true) {
		if spendMeter(r.Policy.Budget, l.Name, l.Amount.Currency, l.Per) == meter {
			return &SpendExceeded{Limit: *l}
		}
	}
	return nil
}

// wouldExceed asks whether a step into flight, which is refused for other reasons, would
// exceed a limit too. It tells, and lets nothing pass.
func (e *Engine) wouldExceed(ctx context.Context, from, next *record) (*SpendExceeded, error) {
	if x := next.uncounted(); x != nil || len(next.Policy.spend) == 0 {
		return x, nil
	}
	entries, err := e.spendEntries(pending{from: from, to: next, on: onCall, now: next.Changed})
	if err != nil {
		return nil, err
	}
	for _, m := range entries {
		if m.Limit == "" {
			continue
		}
		left, err := e.left(ctx, from, next, m)
		if err != nil {
			return nil, err
		}
		amount, err := decimal(m.Amount)
		if err != nil {
			return nil, err
		}
		if left.Cmp(amount) < 0 {
			return next.exceeded(m.Meter), nil
		}
	}
	return nil, nil
}

// left is what a meter's limit still allows to this record, with what it counts for.
func (e *Engine) left(ctx context.Context, from, next *record, m store.MeterEntry) (*apd.Decimal, error) {
	sum, err := e.st.Meter(ctx, m.Meter)
	if err != nil {
		return nil, err
	}
	had := ""
	if from != nil {
		for i := range from.Charges {
			if c := &from.Charges[i]; c.meter() == m.Meter {
				if had, err = next.times(c.Payments); err != nil {
					return nil, err
				}
			}
		}
	}
	d := apd.New(0, 0)
	for _, term := range []struct {
		text string
		op   func(d, x, y *apd.Decimal) (apd.Condition, error)
	}{{m.Limit, exact.Add}, {sum, exact.Sub}, {had, exact.Add}} {
		n, err := decimal(term.text)
		if err != nil {
			return nil, err
		}
		if _, err := term.op(d, d, n); err != nil {
			return nil, fmt.Errorf("%w: what is left of a limit: %w", ErrCorrupt, err)
		}
	}
	return d, nil
}

// denySpend answers a call that would exceed a limit. Nothing was written.
func (e *Engine) denySpend(ctx context.Context, from, next *record, x *SpendExceeded) Answer {
	a := Answer{Verdict: Deny, Reason: ReasonSpendExceeded, Intent: View{Key: next.id()}, Spend: x}
	if from != nil {
		a.Intent = from.view(e.id.Epoch)
	}
	if l := &x.Limit; l.Own && x.Uncounted == "" {
		m := store.MeterEntry{Meter: spendMeter(next.Policy.Budget, l.Name, l.Amount.Currency, l.Per), Limit: l.Amount.Value}
		// It is for the caller's information: without it the answer is as right.
		if left, err := e.left(ctx, from, next, m); err == nil {
			if x.Left = "0"; left.Sign() > 0 {
				x.Left = store.PlainDecimal(left)
			}
		}
	}
	return a
}

// cause says to a person which limit it is, and nothing of what others have spent.
func (x *SpendExceeded) cause() string {
	if x.Uncounted != "" {
		return fmt.Sprintf("it cannot be counted in the limit %q of the budget: %s", x.Limit.Name, x.Uncounted)
	}
	return fmt.Sprintf("it would exceed the limit %q of the budget: %s %s in %s", x.Limit.Name, x.Limit.Amount.Value, x.Limit.Amount.Currency, x.Limit.Span())
}

// Spent is what counts against a limit of a budget, over all its values.
type Spent struct{ Used, Reserved string }

// Spend sums up what counts against a limit.
func (e *Engine) Spend(ctx context.Context, budget, name, currency string) (Spent, error) {
	var out Spent
	for kind, sum := range map[string]*string{spendUsed: &out.Used, spendReserved: &out.Reserved} {
		total := apd.New(0, 0)
		for shard := range spendShards {
			text, err := e.st.Meter(ctx, spendShard(kind, budget, name, currency, shard))
			if err != nil {
				return Spent{}, err
			}
			n, err := decimal(text)
			if err != nil {
				return Spent{}, err
			}
			if _, err := exact.Add(total, total, n); err != nil {
				return Spent{}, fmt.Errorf("%w: sum of spend: %w", ErrCorrupt, err)
			}
		}
		if *sum = "0"; !total.IsZero() {
			*sum = store.PlainDecimal(total)
		}
	}
	return out, nil
}
