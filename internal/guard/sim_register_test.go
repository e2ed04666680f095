// This file is the part of the simulator in which intents are registered before they are
// sent: by agents, by whoever writes them down for them, at any moment, also after they
// were paid. In some worlds the tool takes only what was registered.

package guard

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// simRegistration is what a world does about registering.
type simRegistration struct {
	dice     *rand.Rand
	required bool
	often    int // once in so many steps somebody registers
	said     map[*simIntent]*Registration
}

// newRegistration has dice of its own, so that a world without it is as it was.
func (w *world) newRegistration() *simRegistration {
	if g := w.registering(); g.dice.IntN(3) == 0 {
		return g
	}
	return nil
}

func (w *world) registering() *simRegistration {
	dice := rand.New(rand.NewPCG(w.seed, 4))
	return &simRegistration{dice: dice, often: 12, required: dice.IntN(3) == 0, said: map[*simIntent]*Registration{}}
}

// registerSome has some intent registered now and then.
func (w *world) registerSome() {
	g := w.registration
	if g == nil || g.dice.IntN(g.often) > 0 {
		return
	}
	p, in := w.procs[g.dice.IntN(len(w.procs))], w.ins[g.dice.IntN(len(w.ins))]
	if p.paused > w.t || len(p.actors) >= 6 {
		return
	}
	w.start(p, fmt.Sprintf("p%d register %s", p.id, in.call.IntentID), func() { w.register(p, in) })
}

// register writes the intent down, with more or less of what its call will say.
func (w *world) register(p *process, in *simIntent) {
	g := w.registration
	said := g.said[in]
	if said == nil {
		said = &Registration{}
		if g.dice.IntN(3) == 0 {
			said.ValidUntil = w.storeNow().Add(time.Duration(g.dice.Int64N(int64(3 * time.Minute))))
		}
		g.said[in] = said
	}
	c, reg := in.call, *said
	if g.dice.IntN(2) == 0 {
		c.Fingerprint = ""
	}
	if g.dice.IntN(2) == 0 {
		c.Lineage = ""
	}
	if g.dice.IntN(2) == 0 {
		reg.Face = fmt.Sprint("face-", g.dice.IntN(2))
	}
	who := fmt.Sprintf("p%d register %s", p.id, in.call.IntentID)
	a, err := p.engine.Register(context.Background(), c, reg, "", w.ruled(w.limited(w.policy(), in), in))
	if err != nil {
		w.logf("%s: %v", who, err)
		w.bug(err)
		return
	}
	w.logf("%s: %s %s %s", who, a.Verdict, a.Reason, a.Hold)
	if a.Ticket != nil {
		w.violate("a registration may send")
	}
	w.tellsSuccess(in, a, who)
}

// judgeRegistered judges a Reserve that was written: whether it registers only, and whether
// what it lets be sent was registered.
func (w *world) judgeRegistered(key string, h *header, b *body) (only bool) {
	if h.State == Registered {
		w.state[key] = Registered
		if len(b.Attempts) > 0 {
			w.violate("%s is registered, and was sent", w.name(key))
		}
		return true
	}
	if b.Policy.RegisteredOnly && b.Registration == nil {
		w.violate("%s was let be sent, and was not registered", w.name(key))
	}
	return false
}

// judgeSent judges that what is sent is still valid, give or take what the store's clock
// stepped, and the lease of whoever sends.
func (w *world) judgeSent(t *Ticket) {
	if g := t.rec.Registration; g != nil && !w.jumps && w.storeNow().After(g.ValidUntil.Add(time.Hour)) && !g.ValidUntil.IsZero() {
		w.violate("%s was sent at %s and was valid until %s", t.IntentID, w.storeNow(), g.ValidUntil)
	}
	w.judgeKey(t)
}
