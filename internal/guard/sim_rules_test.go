// This file is the simulator's judge of admission rules: in some worlds the tools deny some
// intents and hold others for a person, and holds of what was never sent expire. The
// provider's ledger must show nothing of what is denied, and of what is held no more
// payments than a person has let pass.

package guard

import (
	"math/rand/v2"
	"time"
)

// makeRules has dice of its own, so that a world without rules is as it was.
func (w *world) makeRules() {
	dice := rand.New(rand.NewPCG(w.seed, 4))
	if w.rules = dice.IntN(3) == 0; !w.rules {
		return
	}
	if dice.IntN(2) == 0 {
		w.expire = time.Duration(10+dice.IntN(60)) * time.Second
	}
	for _, in := range w.ins {
		switch dice.IntN(6) {
		case 0:
			in.ruling.Deny = "never"
		case 1, 2, 3:
			in.ruling.Hold = "a person decides"
		}
	}
}

// ruled is the policy with the rules of this world.
func (w *world) ruled(p Policy, in *simIntent) Policy {
	if !w.rules {
		return p
	}
	return p.WithRules(func(*Call) (Ruling, error) { return in.ruling, nil })
}

// asked is a resolution as a controller hands it over: with what the tool says now.
func (w *world) asked(res Resolution) Resolution {
	if w.rules {
		res.Now = func(c *Call) (Policy, string) {
			in := w.byKey[c.Key.String()]
			return w.ruled(w.limited(w.policy(), in), in), ""
		}
	}
	return res
}

// judgeRules looks at the ledger after each payment. What a store has forgotten it does not judge.
func (w *world) judgeRules(c commit) {
	if !w.rules || w.loss.loses {
		return
	}
	if c.in.ruling.Deny != "" {
		w.violate("%s was paid, and a rule denies it", c.in.call.IntentID)
	}
	if c.in.ruling.Hold == "" {
		return
	}
	paid, passed := 0, 0
	for _, o := range w.ledger {
		if o.in == c.in {
			paid++
		}
	}
	for _, o := range c.in.objects {
		if o.resolution != nil && o.resolution.Decision == Release && (&hold{Reasons: o.reasons}).has(ApprovalRequired) {
			passed++
		}
	}
	if paid > passed {
		w.violate("%s was paid %d times, and a person has let it pass %d times", c.in.call.IntentID, paid, passed)
	}
}
