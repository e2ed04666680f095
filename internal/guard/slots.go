// This file is how many intents of a tool, and of one path of their scopes, may be in
// flight at once, in all processes together. A slot is an entry of 1 in a meter of the
// store: the Reserve into InFlight sets it, against the limit of its call, and whatever
// write leaves InFlight takes it away. So a slot lasts as long as its lease, whoever
// died meanwhile; a meter is always the sum of what is in flight, whatever the limits
// were; and a limit that was changed holds for whoever comes next.

package guard

import (
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// slotRetryAfter is when a call that found no slot may come again.
const slotRetryAfter = time.Second

const (
	slotOfTool  = "slots-of-tool"
	slotOfScope = "slots-of-scope"
)

// limited says that intents under this policy take slots.
func (p *Policy) limited() bool { return p.MaxInFlight > 0 || p.MaxInFlightPerScope > 0 }

func slotMeter(k Key) string { return lengthPrefixed(slotOfTool, k.Namespace, k.Tool) }

// slots are the entries that the record has while it is in flight under its policy. An
// attempt keeps the policy that it began with, so what was set is what is taken away.
func (r *record) slots(taken bool) []store.MeterEntry {
	if !r.Policy.limited() {
		return nil
	}
	amount := ""
	if taken {
		amount = "1"
	}
	var out []store.MeterEntry
	if n := r.Policy.MaxInFlight; n > 0 {
		out = append(out, store.MeterEntry{Meter: slotMeter(r.id()), Amount: amount, Limit: limitText(n, taken)})
	}
	if n := r.Policy.MaxInFlightPerScope; n > 0 {
		var in namer
		for _, path := range r.Scope {
			meter := in.hashed(slotOfScope, r.Namespace, r.Tool, string(path))
			out = append(out, store.MeterEntry{Meter: meter, Amount: amount, Limit: limitText(n, taken)})
		}
	}
	return out
}

// slotSteps are the entries to change with a step: all of them where it enters flight or
// leaves it, and none where it does not.
func (e *Engine) slotSteps(from, to *record) []store.MeterEntry {
	was, is := from != nil && from.State == InFlight, to.State == InFlight
	switch {
	case is && !was:
		return to.slots(true)
	case was && !is && e.o.mutation != slotsStay:
		return from.slots(false)
	}
	return nil
}

// noSlot says what was full, if it was a slot that the Reserve did not get.
func (e *Engine) noSlot(k Key, cur *record, meter string) (Answer, bool) {
	a := Answer{Verdict: Deny, Reason: ReasonTooManyInFlight, RetryAfter: slotRetryAfter, Intent: e.viewOf(k, cur)}
	switch {
	case meter == slotMeter(k), meter == neverWritten.Meter: // others are before it
	case strings.HasPrefix(meter, scopeSlots):
		a.Reason = ReasonScopeInFlight
	default:
		return Answer{}, false
	}
	return a, true
}

// toolSlots begins every meter of a tool, and scopeSlots every one of a path.
var toolSlots, scopeSlots = lengthPrefixed(slotOfTool), lengthPrefixed(slotOfScope)

func isSlot(e store.MeterEntry) bool {
	return strings.HasPrefix(e.Meter, toolSlots) || strings.HasPrefix(e.Meter, scopeSlots)
}

// viewOf is what may be shown of a call's intent, of which there may be no record.
func (e *Engine) viewOf(k Key, cur *record) View {
	if cur == nil {
		return View{Key: k}
	}
	return cur.view(e.id.Epoch)
}
