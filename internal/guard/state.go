// This file is the life of a record as one table. Every write of the engine is
// checked against it: a step that is not listed is a bug and is refused.

package guard

import "fmt"

// State is where a record stands in its life.
type State string

const (
	// None: there is no record.
	None State = ""
	// Registered: it was written down before it is sent. Nothing was sent, and its spend is reserved.
	Registered State = "Registered"
	// InFlight: an attempt holds the lease and may have been sent.
	InFlight State = "InFlight"
	// Retryable: nothing moved, attempts are left; the next call is the next attempt.
	Retryable State = "Retryable"
	// Held: waits for a person.
	Held State = "Held"
	// Released: a person allowed it; the next identical call sends, once.
	Released State = "Released"
	// Pending: the upstream accepted it, and it is not final; status checks decide.
	Pending State = "Pending"
	// Succeeded: it was paid. Replayed for the TTL.
	Succeeded State = "Succeeded"
	// Failed: every attempt is known to have moved nothing.
	Failed State = "Failed"
	// Rejected: a person refused it.
	Rejected State = "Rejected"
	// Tombstone: settled longer ago than the TTL; the answer is gone, the fact is not.
	Tombstone State = "Tombstone"
)

// Settled says that no further step is expected.
func (s State) Settled() bool {
	return s == Succeeded || s == Failed || s == Rejected || s == Tombstone
}

// event is what makes a record take a step.
type event string

const (
	onCall         event = "call"          // Reserve passes
	onBlocked      event = "blocked"       // a call, or a registration, met a hold reason
	onRegister     event = "register"      // it is written down; or a face is given to what there is
	onRenewed      event = "renewed"       // by the attempt's holder: its lease begins anew
	onSettled      event = "settled"       // by the attempt's holder: the join
	onLeaseOver    event = "lease over"    // the sweep, or any call that sees it: the join with this attempt unknown
	onRelease      event = "Release"       //
	onReject       event = "Reject"        //
	onMarkPaid     event = "MarkPaid"      //
	onMarkFailed   event = "MarkFailed"    //
	onSpent        event = "spent"         // a resolution that cannot be taken
	onRenumbered   event = "renumbered"    // an object of another memory bears this hold's name
	onImported     event = "imported"      // an object of a lost memory shows that it was held
	onLost         event = "lost"          // it was written before the store lost its memory: later steps may be missing
	onUnused       event = "unused"        // a release that nobody used for a day, or before the provider may forget the key
	onDeadline     event = "deadline"      // a registered or retryable intent past its TTL
	onWaitOver     event = "wait over"     // an unknown payment would be visible by now
	onLateSuccess  event = "late success"  // the result of an attempt that no longer holds the lease
	onLateEvidence event = "late evidence" // any other late result
	onCheckBegun   event = "check begun"   // somebody asks the provider what became of it
	onChecked      event = "status check"  // the provider's answer
	onHoldOver     event = "hold over"     // nobody decided in the time that the budget gives
	onTTL          event = "TTL"           //
	onResume       event = "resume"        // the same request is sent again: Reserve passes
	onPutOff       event = "put off"       // nobody can send it again now
	onResumesOver  event = "resumes over"  // it is not sent again
	onSpendOver    event = "spend over"    // what it counts for has left the window of a limit
	onPurge        event = "purge"         // a tombstone's end
)

type step struct {
	from State
	on   event
	to   []State
}

// life is the whole of it.
var life = []step{
	{None, onCall, []State{InFlight}},
	{None, onRegister, []State{Registered}},
	{None, onBlocked, []State{Held}},
	{None, onImported, []State{Held}},
	{None, onLateSuccess, []State{Succeeded}}, // the record was purged meanwhile

	{Registered, onCall, []State{InFlight}},
	{Registered, onBlocked, []State{Held}},
	{Registered, onRegister, []State{Registered}},
	{Registered, onDeadline, []State{Rejected}},
	{Registered, onLost, []State{Held}},

	{Retryable, onCall, []State{InFlight}},
	{Retryable, onRegister, []State{Retryable}},
	{Retryable, onBlocked, []State{Held}},
	{Retryable, onDeadline, []State{Failed, Held}},
	{Retryable, onLost, []State{Held}},
	{Retryable, onLateSuccess, []State{Succeeded}},
	{Retryable, onLateEvidence, []State{Retryable, Held}}, // held: it may be paid yet

	{Released, onCall, []State{InFlight}},
	{Released, onRegister, []State{Released}},
	{Released, onBlocked, []State{Held}},
	{Released, onUnused, []State{Held}},
	{Released, onLost, []State{Held}},
	{Released, onLateSuccess, []State{Succeeded}},
	{Released, onLateEvidence, []State{Released, Held}}, // held: it may be paid yet

	{InFlight, onRenewed, []State{InFlight}},
	{InFlight, onSettled, []State{Succeeded, Failed, Retryable, Pending, Held}},
	{InFlight, onRegister, []State{InFlight}},
	{InFlight, onLeaseOver, []State{Succeeded, Held}},
	{InFlight, onLateSuccess, []State{InFlight}}, // kept, and joined at settlement
	{InFlight, onLateEvidence, []State{InFlight}},

	{Pending, onRegister, []State{Pending}},
	{Pending, onCheckBegun, []State{Pending}},
	{Pending, onChecked, []State{Pending, Succeeded, Failed, Retryable}},
	{Pending, onDeadline, []State{Held}},
	{Pending, onLost, []State{Held}},
	{Pending, onLateSuccess, []State{Succeeded}},
	{Pending, onLateEvidence, []State{Pending, Held}}, // held: it contradicts that it was accepted

	{Held, onRegister, []State{Held}},
	{Held, onRelease, []State{Released}},
	{Held, onReject, []State{Rejected}},
	{Held, onMarkPaid, []State{Succeeded}},
	{Held, onMarkFailed, []State{Failed}},
	{Held, onSpent, []State{Held}},
	{Held, onRenumbered, []State{Held}},
	{Held, onImported, []State{Held}},
	{Held, onLost, []State{Held}},
	{Held, onWaitOver, []State{Held}},
	{Held, onResume, []State{InFlight}}, // the hold is void
	{Held, onPutOff, []State{Held}},
	{Held, onResumesOver, []State{Held}},
	{Held, onHoldOver, []State{Rejected}},
	{Held, onCheckBegun, []State{Held}},
	{Held, onChecked, []State{Held, Succeeded, Failed, Retryable}}, // the hold is void
	{Held, onLateSuccess, []State{Succeeded}},                      // the hold is void
	{Held, onLateEvidence, []State{Held}},

	{Succeeded, onRegister, []State{Succeeded}},
	{Succeeded, onLateSuccess, []State{Succeeded}},
	{Succeeded, onLateEvidence, []State{Succeeded}},
	{Succeeded, onSpendOver, []State{Succeeded}},
	{Succeeded, onTTL, []State{Tombstone}},

	{Failed, onCheckBegun, []State{Failed}}, // marked as failed by a person
	{Failed, onChecked, []State{Failed}},
	{Failed, onLateSuccess, []State{Succeeded}}, // a refund is owed
	{Failed, onRegister, []State{Failed}},
	{Failed, onLateEvidence, []State{Failed}},
	{Failed, onSpendOver, []State{Failed}},
	{Failed, onTTL, []State{Tombstone}},

	{Rejected, onCheckBegun, []State{Rejected}},
	{Rejected, onChecked, []State{Rejected}},
	{Rejected, onLateSuccess, []State{Succeeded}}, // a refund is owed
	{Rejected, onRegister, []State{Rejected}},
	{Rejected, onLateEvidence, []State{Rejected}},
	{Rejected, onSpendOver, []State{Rejected}},
	{Rejected, onTTL, []State{Tombstone}},

	{Tombstone, onBlocked, []State{Held}}, // the same ID again: KeyExpired
	{Tombstone, onLateSuccess, []State{Succeeded}},
	{Tombstone, onLateEvidence, []State{Tombstone}},
	{Tombstone, onSpendOver, []State{Tombstone}},
	{Tombstone, onPurge, []State{None}},
}

// checkStep refuses a step that the table does not list.
func checkStep(from State, on event, to State) error {
	for _, s := range life {
		if s.from != from || s.on != on {
			continue
		}
		for _, t := range s.to {
			if t == to {
				return nil
			}
		}
	}
	return fmt.Errorf("%w: no step from %q on %q to %q", ErrInvariant, from, on, to)
}
