// This file aims histories at a rule that was taken out: what it guards against is rare
// in a world that leaves all to chance, and then it would take minutes to be met. Every
// other history is aimed; the rest stay as they were, so that what is found by chance
// alone is still found.

package guard

import (
	"math/rand/v2"
	"time"
)

// aim makes the world one in which the loss of its rule is likely to show.
func (w *world) aim() {
	if w.seed%2 == 0 {
		return
	}
	switch w.mutation {
	case noFence:
		// An agent settles once more what it has settled, since the answer was lost, while the next
		// attempt is in flight: through any process, and long after.
		w.alone()
		w.errs, w.stalls, w.checks, w.tries = false, 55, false, 0
		if w.local == nil {
			w.local, w.fences = rand.New(rand.NewPCG(w.seed, 3)), map[*Ticket]Fence{}
		}
	case sweepForgets, noJoin:
		// A holder stalls until its intent was released and is in flight again: that takes one
		// intent, at which all happens, and a person who lets it go.
		w.alone()
		w.errs, w.stalls, w.checks = true, 55, false
	case resumeAgeOfLast:
		// The first attempt is paid, and what is sent again comes when the provider has forgotten it.
		w.alone()
		w.checks, w.stalls, w.tries, w.short, w.window = false, 8, 0, false, 400*time.Hour
		w.dedup.window = simFinal + 8*time.Second
	case resumeReleased:
		// A person lets it go, and nobody comes back for it.
		w.alone()
		w.checks, w.tries, w.short, w.window = false, 0, false, 400*time.Hour
		w.dedup.window, w.releaseFor = 24*time.Hour, 5*time.Second
	case jumpIgnored:
		w.jumps, w.loss.loses = true, false
	case lostIsNew, importForgets:
		w.jumps, w.loss.loses = false, true
	case registeredPass, unregisteredPass, expiredPass, expiryKeeps:
		if w.registration == nil {
			w.registration = w.registering()
		}
		w.registration.often = 4
	case oneCheckIsEnough, checksAtOnce, absenceCounts:
		w.alone()
		w.checks = true
		w.unbounded = w.mutation == absenceCounts
	}
	switch w.rule {
	case anyNonceIsOwn:
		w.alone()
	case lookEarly, freezeLate, clockStands:
		w.errs, w.stalls = true, 55
	}
}

// alone leaves one intent, in a world whose memory and clock are sound.
func (w *world) alone() {
	w.ins = w.ins[:1]
	w.jumps, w.loss.loses = false, false
}
