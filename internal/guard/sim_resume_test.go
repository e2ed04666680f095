// This file is the simulator's provider that deduplicates, and its gateways that send again
// what may have been paid: in some worlds the provider knows a key from its first request
// on, for its window and not a moment longer. It looks a key up when it processes a request
// or accepts it, and tells keys apart by the credential with which they came. What is a duplicate by then
// moves nothing; it is answered as the first one was, or refused as used already.

package guard

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// simDedup is a provider that deduplicates.
type simDedup struct {
	window time.Duration
	// walls: the processes' wall clocks drift in this world, and the store's is right;
	// otherwise it is the other way round. Where both are wrong nobody knows the time.
	walls bool
	// credential is the one that the tool has now.
	credential int
	seen       map[string]time.Duration // keys, since when
	paid       map[string]int           // which payment each was
	accepted   map[string]*message      // which request of each was accepted, and is made later or never
	dice       *rand.Rand
	// changes has the tool say for a while, at first too, that its provider does not deduplicate;
	// nil: it never does.
	changes *rand.Rand
	silent  bool
	// said are the attempts that were sent while the tool said that it does.
	said map[string]bool
}

// newDedup has dice of its own, so that a world without it is as it was.
func (w *world) newDedup() *simDedup {
	dice := rand.New(rand.NewPCG(w.seed, 4))
	aimed := w.rule == anyCredential
	switch w.mutation {
	case resumeAnyAge, resumeAgeOfLast, releaseAnyAge, resumeNewKey, resumeDecides, resumeReleased:
		aimed = true
	}
	if dice.IntN(4) > 0 && !aimed {
		return nil
	}
	d := &simDedup{seen: map[string]time.Duration{}, paid: map[string]int{}, accepted: map[string]*message{}, dice: dice, said: map[string]bool{}}
	d.window = []time.Duration{simFinal + 8*time.Second, time.Minute, 3 * time.Minute, 24 * time.Hour}[dice.IntN(4)]
	if d.walls = dice.IntN(3) == 0; d.walls {
		w.jumps = false
	}
	if changes := rand.New(rand.NewPCG(w.seed, 14)); changes.IntN(3) == 0 && !aimed {
		d.changes, d.silent = changes, changes.IntN(2) == 0
	}
	return d
}

// keyOf is what the provider knows a request by.
func (m *message) keyOf() string { return fmt.Sprintf("%s/%d", m.key, m.credential) }

// arrivesAt notes the key of a request that has come to the provider.
func (d *simDedup) arrivesAt(m *message, t time.Duration) {
	if d == nil || m.key == "" {
		return
	}
	if first, known := d.seen[m.keyOf()]; !known || t-first >= d.window {
		d.seen[m.keyOf()] = t
		delete(d.paid, m.keyOf())
		delete(d.accepted, m.keyOf())
	}
}

// duplicate says whether a request is one that the provider has made or accepted already,
// and which payment it is; 0: none yet.
func (w *world) duplicate(m *message) (number int, known bool) {
	d := w.dedup
	if d == nil || m.key == "" || d.accepted[m.keyOf()] == m {
		return 0, false
	}
	if w.t-d.seen[m.keyOf()] >= d.window {
		return 0, false // forgotten
	}
	number = d.paid[m.keyOf()]
	return number, number > 0 || d.accepted[m.keyOf()] != nil
}

// accepts says whether the provider makes an accepted payment, which it may know already.
func (w *world) accepts(m *message) bool {
	if w.dedup == nil || m.key == "" {
		return true
	}
	if _, known := w.duplicate(m); known {
		return false
	}
	w.dedup.accepted[m.keyOf()] = m
	return true
}

// processed is what the provider does with a request that is due.
func (w *world) processed(m *message) {
	number, known := w.duplicate(m)
	if !known {
		w.pay(m)
		number = len(w.ledger)
		if w.dedup != nil && m.key != "" {
			w.dedup.paid[m.keyOf()] = number
		}
	} else {
		w.logf("the provider knows the key of %s(attempt %d): it is payment %d", m.in.call.IntentID, m.attempt, number)
		if m.answer != nil && w.dedup.dice.IntN(3) == 0 {
			m.answer = &Result{Outcome: AttemptFailed, Response: &Response{Status: 422}, Detail: "this key was used already"}
		}
	}
	if m.answer != nil && m.answer.Outcome == AttemptSucceeded && number == 0 {
		m.answer = &Result{Outcome: AttemptPending, Response: &Response{Status: 202}}
	}
	if m.answer != nil && m.answer.Outcome == AttemptSucceeded {
		id := fmt.Sprintf("payment-%d", number)
		m.answer.ProviderReference = id
		m.answer.Response = &Response{Status: 200, Body: []byte(id)}
	}
}

// keeps is what the gateway keeps of a call's request: with which credential it was sent.
func (w *world) keeps(c Call) Call {
	if w.dedup == nil {
		return c
	}
	if w.dedup.dice.IntN(12) == 0 {
		c.NotKept = "it is too large"
		return c
	}
	credential := w.dedup.credential
	c.Keep = func(bound []byte) ([]byte, error) {
		return append([]byte{byte(credential)}, bound...), nil
	}
	return c
}

// sendAgain does what the sweep has found: it sends again what may have been paid.
func (w *world) sendAgain(p *process) {
	if w.dedup == nil {
		return
	}
	engine := p.engine
	for _, k := range engine.DueResumes() {
		ctx := context.Background()
		m, err := engine.NextResume(ctx, k)
		w.bug(err)
		if err != nil || m == nil {
			continue
		}
		in := w.byKey[k.String()]
		if string(m.Sealed[1:]) != string(m.Bound) {
			w.violate("the request that is kept of %s is bound to %q and not to %q", k.IntentID, m.Sealed[1:], m.Bound)
			return
		}
		w.stall()
		credential := w.dedup.credential
		switch {
		case w.dedup.silent:
			w.bug(engine.EndResumes(ctx, m, "the tool does not say Resume any more"))
			continue
		case int(m.Sealed[0]) != credential && w.rule != anyCredential:
			w.bug(engine.EndResumes(ctx, m, "the tool has another credential"))
			continue
		case w.mutation == resumeReleased && w.dedup.dice.IntN(3) > 0:
			w.bug(engine.EndResumes(ctx, m, "the tool has another upstream"))
			continue
		case w.chance(10):
			w.bug(engine.PutOffResume(ctx, m))
			continue
		}
		t, err := engine.BeginResume(ctx, m, w.dedup.window)
		w.bug(err)
		if err != nil || t == nil {
			continue
		}
		if w.begun[k.String()] < 2 && w.loss.seq == 0 {
			w.violate("%s is sent again though a person has released it and nobody has called since", k.IntentID)
			return
		}
		w.engineOf[t] = engine
		who := fmt.Sprintf("p%d resumes %s", p.id, k.IntentID)
		w.logf("%s as attempt %d", who, t.Attempt)
		w.stall()
		w.attempt(p, in, t, who)
	}
}

// resumeWorldEvent has the tool's credential become another one, of another account, or the tool
// say something else of its provider.
func (w *world) resumeWorldEvent() {
	if d := w.dedup; d != nil && d.changes != nil && !w.quiet && d.changes.IntN(40) == 0 {
		d.silent = !d.silent
		w.logf("the tool says that its provider deduplicates: %v", !d.silent)
	}
	if w.dedup != nil && !w.quiet && w.dedup.dice.IntN(40) == 0 {
		w.dedup.credential++
		w.logf("the tool has credential %d", w.dedup.credential)
	}
}

// judgeKey judges that nothing that may have been paid is sent under a key that the provider has
// forgotten, where the tool has said at either attempt that it does. Since when it has the key of
// what a lost memory hides, nobody knows.
func (w *world) judgeKey(t *Ticket) {
	d := w.dedup
	if d == nil {
		return
	}
	named := func(attempt int) string { return fmt.Sprint(t.ProviderKey, "/", attempt) }
	says := t.rec.Policy.Resume != nil
	d.said[named(t.Attempt)] = says
	unknown := false
	for _, a := range t.rec.Attempts[:t.Attempt-1] {
		if a.Lost {
			return
		}
		if a.unknown() && !a.Denied && a.Generation == t.rec.Generation {
			unknown, says = true, says || d.said[named(a.Number)]
		}
	}
	if !unknown || !says {
		return
	}
	for credential := range d.credential + 1 {
		m := message{key: t.ProviderKey, credential: credential}
		if first, known := d.seen[m.keyOf()]; known && w.t-first >= d.window {
			w.violate("%s may have been paid, and is sent again under a key that the provider has had for %s and knows for %s", t.IntentID, w.t-first, d.window)
			return
		}
	}
}
