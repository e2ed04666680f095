// This file lists the rules that a test may take out of the engine, one at a time,
// to show that the simulator notices. In production no rule is ever out.

package guard

import (
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

type mutation string

const (
	none             mutation = ""
	noDeadline       mutation = "a sender ignores its deadline"
	noGrace          mutation = "the sweep acts at the lease's end"
	noWatch          mutation = "a judge trusts the store's clock alone"
	noWaiting        mutation = "an unknown outcome is released at once"
	earlyMarkFailed  mutation = "an unknown outcome is marked as failed at once"
	noHoldNumber     mutation = "a resolution is not bound to its hold"
	noFence          mutation = "a stale holder settles what is in flight"
	noJoin           mutation = "a failure erases an unknown outcome"
	sweepRetries     mutation = "a lease that is over gives a free retry"
	sweepForgets     mutation = "the sweep ignores a success that was kept"
	coversEverything mutation = "a release passes over whatever came since"
	everyHoldFreezes mutation = "every hold freezes a watermark"
	noLaterProbes    mutation = "later steps into flight do not probe"
	unknownIsFree    mutation = "an unknown outcome stands in nobody's way"
	rejectedIsFree   mutation = "a rejected unknown outcome stands in nobody's way"
	jumpIgnored      mutation = "a jump of the store's clock does not stop"
	lostIsNew        mutation = "a first call in the window of a lost memory is sent"
	spendUnlimited   mutation = "a step into flight sets its spend without the limit"
	spendUnknownFree mutation = "an unknown outcome counts for nothing"
	spendAgesEarly   mutation = "spend leaves the window before it is over"
	importForgets    mutation = "a hold of a lost memory is not imported"
	noBudget         mutation = "attempts are not counted"
	slotsStay        mutation = "whoever leaves flight keeps its slots"
	oneCheckIsEnough mutation = "one check that finds nothing is enough"
	checksAtOnce     mutation = "a check that finds nothing counts before the payment could be visible"
	resumeAnyAge     mutation = "what the provider may have forgotten is sent again"
	resumeAgeOfLast  mutation = "the provider's window is counted from the last attempt"
	resumeByStore    mutation = "the provider's window is counted by the store's clock alone"
	resumeNewKey     mutation = "what is sent again has another key"
	resumeReleased   mutation = "a release that nobody used is sent by itself"
	releaseAnyAge    mutation = "what was released is sent under a key that the provider may have forgotten"
	resumeDecides    mutation = "a refused resumed attempt has failed"
	renewsOver       mutation = "a lease that is over is renewed"
	renewsUnwritten  mutation = "a renewal is told and not written"
	rulesIgnored     mutation = "what a rule holds or denies is sent"
	ruleReleasedOnce mutation = "a release for a rule lets everything later pass"
	unknownExpires   mutation = "nobody decides about an unknown outcome, and it expires"
	absenceCounts    mutation = "a payment that was accepted and is not visible counts as failed"
	registeredPass   mutation = "what was registered is sent without probes"
	unregisteredPass mutation = "what was not registered is sent"
	expiredPass      mutation = "what was registered is sent after its time"
	expiryKeeps      mutation = "a registration that ends keeps its spend"
)

// atRest is what a mutated engine freezes for a hold that was never refused anything.
const atRest store.Watermark = "at rest"

func (e *Engine) mutatedProbes(probes []store.Probe, from *record) []store.Probe {
	released := from != nil && len(from.Passed) > 0
	switch {
	case e.o.mutation == noLaterProbes && from != nil,
		e.o.mutation == registeredPass && from != nil && from.State == Registered,
		(e.o.mutation == coversEverything || e.o.mutation == everyHoldFreezes) && released:
		return nil
	}
	return probes
}

// grace is the time after a lease's end in which nobody judges.
func (e *Engine) grace() time.Duration {
	if e.o.mutation == noGrace {
		return 0
	}
	return e.o.Grace
}

func (e *Engine) mutatedFreeze() store.Watermark {
	if e.o.mutation == everyHoldFreezes {
		return atRest
	}
	return ""
}

func (e *Engine) mutatedMarks(r *record, now time.Time) []store.Mark {
	if e.mutatedFree(r) {
		return nil
	}
	return r.marks(now)
}

func (e *Engine) mutatedFree(r *record) bool {
	return e.o.mutation == unknownIsFree && (r.State == Held || r.State == Released) ||
		e.o.mutation == rejectedIsFree && r.State == Rejected
}

func (e *Engine) mutatedCharges(r *record) {
	for i := range r.Charges {
		c := &r.Charges[i]
		switch {
		case e.o.mutation == expiryKeeps && r.State == Rejected && r.Expired:
			c.Payments = 1
		case e.o.mutation == spendUnknownFree && (r.State == Held || r.State == Released):
			c.Payments, c.Until = 0, time.Time{}
		case e.o.mutation == spendAgesEarly && !c.Until.IsZero():
			c.Until = c.Until.Add(-c.Window / 2)
		}
	}
}
