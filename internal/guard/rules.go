// This file is about the admission rules of a tool: what they say to an intent before it
// may be sent, and what a person lets pass.
//
// They are asked once for each call that would be sent, after the record of its own ID,
// and before anything is written: a rule that came later changes nothing of what was
// answered. A rule that denies writes nothing. A rule that holds is a hold reason like
// another; a release of it lets that one payment pass, once.

package guard

import "strings"

// Ruling is what the admission rules of a tool say to one intent.
type Ruling struct {
	// Deny says why it may not be sent at all; "": it may.
	Deny string
	// Hold says why a person must decide; "": nobody has to.
	Hold string
}

// WithRules is the policy with the admission rules of its tool. An error is one that may
// pass: the call is refused and may come again.
func (p Policy) WithRules(rules func(*Call) (Ruling, error)) Policy {
	p.rules = rules
	return p
}

// askRules asks the rules about a call, once. A call that is refused anyway is not asked about.
func (e *Engine) askRules(pass *passage, c *Call, p Policy) error {
	if p.rules == nil || pass.ruled || pass.refused || e.o.mutation == rulesIgnored {
		return nil
	}
	of := *c // so that a call without rules has no other memory
	u, err := p.rules(&of)
	if err != nil {
		return err
	}
	pass.ruled, pass.ruling = true, u
	return nil
}

// ruled says that a rule keeps the record from being sent.
func (e *Engine) ruled(pass *passage, next *record) bool {
	return pass.ruling.Deny != "" || e.holdsBy(pass.ruling, next)
}

// holdsBy says that the record's next attempt waits for a person because of a rule.
func (e *Engine) holdsBy(u Ruling, r *record) bool {
	passes := r.passes(r.RulePass) || e.o.mutation == ruleReleasedOnce && r.RulePass > 0
	return u.Hold != "" && !passes
}

// passes says that a person has let this record pass from the attempt of this number on,
// for a payment that has not moved since; 0: nobody has.
func (r *record) passes(from int) bool {
	if from == 0 {
		return false
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if next := i == len(r.Attempts)-1 && r.State == InFlight && a.Outcome == AttemptOpen; !next && a.Number >= from && a.mayHaveMoved() {
			return false
		}
	}
	return true
}

// denyRule answers a call that a rule denies. Nothing was written.
func (e *Engine) denyRule(from, next *record, u Ruling) Answer {
	a := Answer{Verdict: Deny, Reason: ReasonDeniedByRule, Intent: View{Key: next.id()}, Rule: u.Deny}
	if from != nil {
		a.Intent = from.view(e.id.Epoch)
	}
	return a
}

// because adds the reasons of a rule and of a limit to a hold that is about to be made.
func (e *Engine) because(h *hold, u Ruling, next *record, x *SpendExceeded) {
	var causes []string
	if x != nil {
		h.Reasons, causes = append(h.Reasons, BudgetExceeded), append(causes, x.cause())
	}
	if e.holdsBy(u, next) {
		h.Reasons, causes = append(h.Reasons, ApprovalRequired), append(causes, u.Hold)
	}
	h.Cause = clip(strings.Join(causes, "; "))
}

// call is the call that the record is of.
func (r *record) call() Call {
	return Call{
		Key: r.id(), CallerUID: r.CallerUID, Scope: r.Scope, Lineage: r.Lineage, Amount: r.Amount, Recipient: r.Recipient,
		Fingerprint: r.Fingerprint, IdentityHash: r.IdentityHash, AmountHash: r.AmountHash, RecipientHash: r.RecipientHash,
	}
}
