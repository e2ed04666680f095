// This file is what follows from a memory that was lost and accepted.
//
// Of what the store knew until then, any part may be missing: whole records, and the
// last steps of those that are left. So what could be sent by what is left is held, and
// counts as sent; what its holds' objects still show is made anew; and whoever comes for
// the first time, while others would still be compared with what is missing, is held too.
// Where the tool has a status check, the provider is asked whether it was paid.

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// endOfTime is after everything that can be due.
var endOfTime = time.Date(9998, 1, 1, 0, 0, 0, 0, time.UTC)

// neverWritten in a Reserve has it refused by the store, always: it asks only.
var neverWritten = store.MeterEntry{Meter: lengthPrefixed("never"), Amount: "1", Limit: "0"}

// memory is what the writes of this engine carry, to tell them from those before the loss.
func (e *Engine) memory() string {
	if e.o.LostAt.IsZero() {
		return ""
	}
	return e.id.Epoch
}

// remembers says that nothing can be missing of the record: it was written since the loss.
func (e *Engine) remembers(r *record) bool {
	return e.o.LostAt.IsZero() || r.Memory == e.id.Epoch
}

// forgot says that a first call may have been made before, by a memory that was lost.
func (e *Engine) forgot(p Policy, now time.Time) bool {
	return !e.o.LostAt.IsZero() && !e.o.ForgetLost && now.Before(e.o.LostAt.Add(p.compares())) && e.o.mutation != lostIsNew
}

// lostCause tells a person what was lost, and where to look.
func lostCause(r *record, at time.Time) string {
	return fmt.Sprintf("%s, which was accepted at %s: the payment may have been made before; look for the key %s in the provider's ledger",
		causeLost, at.UTC().Format(time.RFC3339), r.ProviderKey)
}

const causeLost = "the store lost its memory"

// presume has the record count as one that may have been sent, since that may be what is
// missing, and says so in its next hold.
//
// Its nonce is its own: that of the write is the hold's, which is shown, and a nonce is the
// right to settle.
func (e *Engine) presume(r *record, h *hold, now time.Time) {
	at := e.o.LostAt
	if at.IsZero() {
		at = now
	}
	r.Attempts = append(r.Attempts, attempt{
		Number: len(r.Attempts) + 1, Generation: r.Generation, Nonce: e.o.Nonce(), Outcome: AttemptUnknown, Lost: true,
		Started: at, LeaseEnd: at, Ended: at, Detail: "the memory of the store was lost: it is not known whether this attempt was made",
	})
	// What a release had covered was counted by the memory that is gone.
	r.Passed, r.SpendPass, r.RulePass, h.Cause = nil, 0, 0, lostCause(r, at)
	if !h.has(OutcomeUnknown) {
		h.Reasons = append([]Reason{OutcomeUnknown}, h.Reasons...)
	}
}

// afterLoss puts on hold what was left by the lost memory in a state from which it could
// be sent or decided. Attempts in flight end by their lease, and settled records stay.
func (e *Engine) afterLoss(r *record, now time.Time) *pending {
	if e.remembers(r) {
		return nil
	}
	h := &hold{}
	switch r.State {
	case Held:
		h = r.Current.anew("")
		h.Watermark, h.Lineage, h.Lookalike = "", false, false
	case Released:
		h.Reasons = r.Current.Reasons
	case Registered, Retryable, Pending:
	default:
		return nil
	}
	p := e.stepOf(r, onLost, now)
	if r.State == Held {
		p.to.Current.End, p.to.Current.EndedAt = HoldVoid, p.now
		p.to.Current.Effect = "The store lost its memory. The hold stands anew."
	}
	e.presume(p.to, h, p.now)
	p.to.hold(h, p.nonce, p.now)
	return p
}

// Rehold goes through all that the lost memory has left, once the loss was accepted, so
// that it is visible under the present epoch. Calls do the same to the records that they
// see; it may be repeated.
func (e *Engine) Rehold(ctx context.Context) error {
	if e.o.LostAt.IsZero() {
		return nil
	}
	look := func(sr *store.Record, _ time.Time) error {
		if isRate(sr.Key) {
			return nil
		}
		h, err := decodeHeader(sr)
		if err != nil || h.State.Settled() {
			return err
		}
		return e.look(ctx, sr.Key)
	}
	held := e.each(ctx, store.List{What: store.ListHeld}, look)
	if held != nil && !spared(held) {
		return held
	}
	return errors.Join(held, e.each(ctx, store.List{What: store.ListDue, Before: endOfTime}, look))
}

// ImportedHold is what a PaymentHold of a lost memory still shows of its record.
type ImportedHold struct {
	Key
	// CallerUID may be empty: then it is whose ServiceAccount sends it next.
	CallerUID   string
	Scope       intent.Scope
	Lineage     intent.Path
	Amount      *intent.Money
	Recipient   string
	Fingerprint string
	Reasons     []Reason
	// Number is the highest one of all objects of this record.
	Number int
	// Policy is what the tool and its budget say now.
	Policy Policy
}

func (h *ImportedHold) check() error {
	switch {
	case h.Namespace == "" || h.Tool == "" || h.Caller == "" || h.IntentID == "":
		return fmt.Errorf("%w: an imported hold without its whole key", ErrInvariant)
	case len(h.Scope) == 0 || len(h.Reasons) == 0 || h.Number < 1:
		return fmt.Errorf("%w: an imported hold needs scope, reasons and number", ErrInvariant)
	case h.Policy.Budget == "":
		return fmt.Errorf("%w: an imported hold needs the policy of its budget", ErrInvariant)
	}
	return nil
}

// Import makes held again what a PaymentHold shows that stood open when the memory was
// lost. Since then it may have been released and sent, so it counts as sent. Its number
// is above that of every object, so that an object of the lost memory is never taken.
// What the store knows otherwise stays, and to import a hold twice changes nothing.
func (e *Engine) Import(ctx context.Context, h ImportedHold) error {
	if err := h.check(); err != nil {
		return err
	}
	if e.o.mutation == importForgets {
		return nil
	}
	r, now, err := e.get(ctx, h.Key.String())
	if err != nil {
		return err
	}
	for range maxTries {
		if r, err = e.advance(ctx, r, now); err != nil {
			return err
		}
		p := pending{from: r, on: onImported, now: now, nonce: e.o.Nonce()}
		switch {
		case r == nil:
			p.to = e.imported(h, p.nonce, now)
		case r.State == Held && r.Hold <= h.Number:
			p.to = r.clone()
			p.to.Current.End, p.to.Current.EndedAt = HoldVoid, now
			p.to.Current.Effect = "An object of a lost memory has a higher number: the hold has a new one."
			p.to.Hold = h.Number
			p.to.hold(r.Current.anew(r.Current.Cause), p.nonce, now)
		default:
			return nil
		}
		wr, other, err := e.update(ctx, p, e.soon())
		if err != nil || wr.Outcome == store.Written {
			return err
		}
		r, now = other, wr.Now
	}
	return ErrContended
}

// imported is the record of a hold of which only the object is left.
func (e *Engine) imported(h ImportedHold, nonce string, now time.Time) *record {
	r := &record{key: h.Key.String()}
	r.header = header{
		Namespace: h.Namespace, Tool: h.Tool, Caller: h.Caller, CallerUID: h.CallerUID, IntentID: h.IntentID,
		Scope: h.Scope, Lineage: h.Lineage, Amount: h.Amount, Recipient: h.Recipient,
		Fingerprint: h.Fingerprint, Created: now, Hold: h.Number,
	}
	r.Policy, r.Generation, r.Imported = h.Policy, 1, true
	r.ProviderKey = providerKey(e.id.KeyDomain, h.Key, 1)
	r.charge(h.Policy)
	held := &hold{Reasons: slices.Clone(h.Reasons)}
	e.presume(r, held, now)
	r.hold(held, nonce, now)
	return r
}
