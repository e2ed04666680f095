package storetest

// Stores that were set back: to an older copy of their files, or to a replica that
// lagged behind. Whoever has lost a write is told so, and then all are.
//
// A store of one process has no cases here.

import (
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var losses = []testCase{
	{"who has lost a write is told so by whatever it asks first, and for good", lostWrite},
	{"who has lost nothing is told so once somebody has found a loss", lostByAnother},
	{"who was answered with what is still there is not told of a loss", nothingLost},
	{"who has disowned the store and finds it as before is told so", lostDisowning},
	{"who comes back after a loss that was found by others leaves the store as it is", lostBefore},
}

// questions are all kinds; each gives the error that it was answered with. None may
// write anything where writes were lost.
func (f *fixture) questions(s store.Store, epoch string, version uint64) map[string]func() error {
	ctx, cancel := patient()
	f.Cleanup(cancel)
	write := func() store.Write {
		w := f.write("after the loss", 0)
		w.Epoch = epoch
		return w
	}
	over := func(renew bool) error {
		w := f.write("k", version)
		w.Epoch, w.RenewMarks = epoch, renew
		_, err := s.Update(ctx, w)
		return err
	}
	return map[string]func() error{
		"Standing":   func() error { _, err := s.Standing(ctx); return err },
		"Initialise": func() error { _, err := s.Initialise(ctx, identity); return err },
		"Disown":     func() error { return s.Disown(ctx, epoch, "by the loser") },
		"Reserve": func() error {
			_, err := s.Reserve(ctx, store.Reserve{Write: write(), Probes: []store.Probe{{String: "p"}}})
			return err
		},
		"Update": func() error { _, err := s.Update(ctx, write()); return err },
		// Which a store may write in another way.
		"Update of a record": func() error { return over(false) },
		"RenewMarks":         func() error { return over(true) },
		"Get":                func() error { _, _, err := s.Get(ctx, "k"); return err },
		"List":               func() error { _, err := s.List(ctx, store.List{What: store.ListHeld}); return err },
		"Meter":              func() error { _, err := s.Meter(ctx, "m"); return err },
	}
}

// answer asks until the store can be reached again.
func answer(f *fixture, ask func() error) error {
	f.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := ask()
		if !errors.Is(err, store.ErrUnavailable) {
			return err
		}
		if time.Now().After(deadline) {
			f.Fatalf("the store does not come back: %v", err)
		}
	}
}

// writeThrough makes a write through s, under the epoch that the store has now.
func writeThrough(f *fixture, s store.Store, key string, expected uint64) store.Result {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	w := f.write(key, expected)
	w.Epoch = f.standing(s).Epoch
	result, err := s.Update(ctx, w)
	if err != nil {
		f.Fatalf("Update %q: %v", key, err)
	}
	f.outcome(result, store.Written)
	return result
}

func lostWrite(f *fixture) {
	if f.h.Rewind == nil {
		return
	}
	version := f.put(f.write("k", 0))
	for name := range f.questions(f.s, "", version) {
		s := f.h.Connect(f)
		epoch := f.standing(s).Epoch
		f.h.Snapshot(f)
		writeThrough(f, s, fmt.Sprint("lost before ", name), 0)
		f.h.Rewind(f)
		questions := f.questions(s, epoch, version)
		f.fails(answer(f, questions[name]), store.ErrMemoryLost, name+" as the first question")
		for again := range 2 {
			for next, ask := range questions {
				f.fails(answer(f, ask), store.ErrMemoryLost, fmt.Sprintf("%s after %s (%d)", next, name, again))
			}
		}
		// All others know the epoch that it had.
		fresh := f.h.Connect(f)
		f.until("the store has another epoch after "+name, func() error {
			have := f.standing(fresh)
			if have.Epoch == epoch || have.Epoch == "" || have.Epoch == "by the loser" {
				return fmt.Errorf("epoch %q, it was %q before", have.Epoch, epoch)
			}
			return nil
		})
		ctx, cancel := f.ctx()
		if r, _, err := fresh.Get(ctx, "after the loss"); r != nil || err != nil {
			f.Errorf("%s: the loser has written %+v, %v", name, r, err)
		}
		if r, _, err := fresh.Get(ctx, "k"); err != nil || r == nil || r.Version != version {
			f.Errorf("%s: what was kept is %+v, %v", name, r, err)
		}
		cancel()
	}
	f.s = f.h.Connect(f)
}

func lostByAnother(f *fixture) {
	if f.h.Rewind == nil {
		return
	}
	ctx, cancel := f.ctx()
	defer cancel()
	lucky, idle, unlucky := f.h.Connect(f), f.h.Connect(f), f.h.Connect(f)
	version := writeThrough(f, lucky, "k", 0).Version
	f.standing(idle)
	f.h.Snapshot(f)
	writeThrough(f, unlucky, "lost", 0)
	f.h.Rewind(f)
	f.fails(answer(f, func() error { _, err := unlucky.Meter(ctx, "m"); return err }), store.ErrMemoryLost, "of the one that has lost a write")
	for name, s := range map[string]store.Store{"who wrote before": lucky, "who wrote nothing": idle} {
		f.until(name+" is told", func() error {
			err := answer(f, func() error { _, err := s.Update(ctx, f.write("k", version)); return err })
			if !errors.Is(err, store.ErrMemoryLost) {
				return fmt.Errorf("update: %w", err)
			}
			return nil
		})
		_, err := s.Reserve(ctx, store.Reserve{Write: f.write("new", 0)})
		f.fails(err, store.ErrMemoryLost, "Reserve of "+name)
		// What it reads is what there is.
		if r, _, err := s.Get(ctx, "k"); r == nil || err != nil {
			f.Errorf("Get of %s: %+v, %v", name, r, err)
		}
	}
	// Under the store's new epoch they go on.
	for i, s := range []store.Store{lucky, idle} {
		writeThrough(f, s, fmt.Sprint("later ", i), 0)
	}
	f.s = lucky
}

func nothingLost(f *fixture) {
	if f.h.Rewind == nil {
		return
	}
	ctx, cancel := f.ctx()
	defer cancel()
	s := f.h.Connect(f)
	version := writeThrough(f, s, "k", 0).Version
	repeated := f.write("repeated", 0)
	for range 3 {
		if result, err := s.Update(ctx, repeated); err != nil || result.Outcome != store.Written {
			f.Fatalf("%+v, %v", result, err)
		}
	}
	f.h.Snapshot(f)
	// Nothing of this is a write.
	if result, err := s.Update(ctx, repeated); err != nil || result.Outcome != store.Written {
		f.Errorf("a repeated write: %+v, %v", result, err)
	}
	if result, err := s.Update(ctx, f.write("k", version+100)); err != nil || result.Outcome != store.Mismatch {
		f.Errorf("a mismatch: %+v, %v", result, err)
	}
	if _, err := s.Initialise(ctx, identity); err != nil {
		f.Errorf("Initialise: %v", err)
	}
	if err := s.Disown(ctx, "of nobody", "next"); err != nil {
		f.Errorf("Disown: %v", err)
	}
	f.h.Rewind(f)
	if err := answer(f, func() error { _, _, err := s.Get(ctx, "k"); return err }); err != nil {
		f.Errorf("Get: %v", err)
	}
	if have := f.standing(s); have.Identity != identity {
		f.Errorf("the store was disowned: %+v", have)
	}
	writeThrough(f, s, "k", version)
	f.s = s
}

func lostDisowning(f *fixture) {
	if f.h.Rewind == nil {
		return
	}
	ctx, cancel := f.ctx()
	defer cancel()
	f.h.Snapshot(f)
	s := f.h.Connect(f)
	if err := s.Disown(ctx, identity.Epoch, "epoch-2"); err != nil {
		f.Fatal(err)
	}
	f.h.Rewind(f)
	f.fails(answer(f, func() error { _, err := s.Standing(ctx); return err }), store.ErrMemoryLost, "of the one that had disowned the store")
	f.s = f.h.Connect(f)
	f.until("the store has another epoch", func() error {
		if have := f.standing(f.s); have.Epoch == identity.Epoch || have.Epoch == "" {
			return fmt.Errorf("epoch %q", have.Epoch)
		}
		return nil
	})
}

func lostBefore(f *fixture) {
	if f.h.Rewind == nil {
		return
	}
	ctx, cancel := f.ctx()
	defer cancel()
	f.h.Snapshot(f)
	away := f.h.Connect(f)
	epoch := f.standing(away).Epoch
	writeThrough(f, away, "lost", 0)
	f.h.Rewind(f)
	// Others have found it, and a person has accepted it since.
	f.s = f.h.Connect(f)
	if err := answer(f, func() error { return f.s.Disown(ctx, epoch, "accepted") }); err != nil {
		f.Fatal(err)
	}
	f.fails(answer(f, func() error { _, err := away.Standing(ctx); return err }), store.ErrMemoryLost, "of the one that comes back")
	if _, err := away.Update(ctx, f.write("late", 0)); !errors.Is(err, store.ErrMemoryLost) {
		f.Errorf("a write of the one that comes back: %v", err)
	}
	// Some stores are disowned a moment later.
	for i := range 20 {
		writeThrough(f, f.s, fmt.Sprint("k", i), 0)
	}
	if have := f.standing(f.s); have.Epoch != "accepted" {
		f.Errorf("the store was disowned anew: %+v", have)
	}
}

// until tries until it goes well.
func (f *fixture) until(what string, try func() error) {
	f.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			f.Fatalf("%s: %v", what, err)
		}
	}
}
