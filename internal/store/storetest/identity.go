package storetest

// First use: a store without an identity has no memory, and gets one once.

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func runFirstUse(t *testing.T, h Harness) {
	ctx, cancel := patient()
	defer cancel()
	unused := func() {
		t.Helper()
		have, err := h.Store.Standing(ctx)
		if err != nil || have.Identity != (store.Identity{}) || have.Sequence != 0 || have.Now.IsZero() {
			t.Errorf("a store that was never used: %+v, %v", have, err)
		}
	}
	unused()
	if err := h.Store.Disown(ctx, "epoch-1", "epoch-2"); err != nil {
		t.Errorf("Disown of a store without an epoch: %v", err)
	}
	unused()
	w := store.Write{Epoch: "epoch-1", Key: "k", Nonce: "n", Record: &store.Record{}}
	if _, err := h.Store.Update(ctx, w); !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("Update of a store without an epoch: %v", err)
	}
	if _, err := h.Store.Reserve(ctx, store.Reserve{Write: w}); !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("Reserve of a store without an epoch: %v", err)
	}
	if r, _, err := h.Store.Get(ctx, "k"); r != nil || err != nil {
		t.Errorf("Get: %v, %v", r, err)
	}
	if page, err := h.Store.List(ctx, store.List{What: store.ListDue, Before: time.Unix(1e9, 0)}); len(page.Records) > 0 || page.Cursor != "" || err != nil {
		t.Errorf("List: %v, %v", page, err)
	}
	if sum, err := h.Store.Meter(ctx, "m"); err != nil || rat(t, sum).Sign() != 0 {
		t.Errorf("Meter: %q, %v", sum, err)
	}

	conns := [2]store.Store{h.Store, h.Connect(t)}
	ids := make([]store.Identity, 50)
	each(len(ids), func(i int) {
		var err error
		ids[i], err = conns[i%2].Initialise(ctx, store.Identity{Epoch: fmt.Sprint("epoch ", i), KeyDomain: fmt.Sprint("domain ", i)})
		if err != nil {
			t.Errorf("Initialise: %v", err)
		}
	})
	var n int
	if _, err := fmt.Sscanf(ids[0].Epoch, "epoch %d", &n); err != nil || ids[0].KeyDomain != fmt.Sprint("domain ", n) {
		t.Errorf("the identity is of nobody or mixed: %+v", ids[0])
	}
	for i, id := range ids {
		if id != ids[0] {
			t.Errorf("%d was told of %+v, another one of %+v", i, id, ids[0])
		}
	}
	s := h.Restart(t)
	if id, err := s.Standing(ctx); err != nil || id.Identity != ids[0] {
		t.Errorf("after a restart: %+v, %v, was %+v", id, err, ids[0])
	}
}
