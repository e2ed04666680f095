package guard

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

func TestSeen(t *testing.T) {
	var s seen
	for i := range 100 {
		if s.has(fmt.Sprint(i)) {
			t.Errorf("%d is known before it was put in", i)
		}
		s.add(fmt.Sprint(i))
		if !s.has(fmt.Sprint(i)) {
			t.Errorf("%d was forgotten at once", i)
		}
	}
	for i := range 2 * seenPages * seenPage {
		s.add(fmt.Sprint("more ", i))
	}
}

// asked counts what a store is asked.
type asked struct {
	store.Store
	said []string
}

func (a *asked) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	a.said = append(a.said, "Get")
	return a.Store.Get(ctx, key)
}

func (a *asked) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	a.said = append(a.said, "Reserve")
	return a.Store.Reserve(ctx, r)
}

func (a *asked) Update(ctx context.Context, w store.Write) (store.Result, error) {
	a.said = append(a.said, "Update")
	return a.Store.Update(ctx, w)
}

func (a *asked) List(ctx context.Context, l store.List) (store.Page, error) {
	a.said = append(a.said, "List")
	return a.Store.List(ctx, l)
}

func (a *asked) Standing(ctx context.Context) (store.Standing, error) {
	a.said = append(a.said, "Standing")
	return a.Store.Standing(ctx)
}

// A payment is one Reserve and one Update, a retry one question, whoever it asks.
func TestWhatACallAsksTheStore(t *testing.T) {
	st, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	id, err := st.Initialise(t.Context(), store.Identity{Epoch: "e", KeyDomain: "d"})
	if err != nil {
		t.Fatal(err)
	}
	first, second := &asked{Store: st}, &asked{Store: st}
	payer, other := New(first, id, Options{}), New(second, id, Options{})
	call := Call{
		Key: Key{Namespace: "n", Tool: "t", Caller: "c", IntentID: "warm"}, CallerUID: "u",
		Scope: intent.Scope{"account/1/order/0"}, Fingerprint: "sha256:x", IdentityHash: "h",
	}
	policy := Policy{Budget: "b", Window: time.Hour, TTL: time.Hour, Timeout: time.Second}
	admit := func(e *Engine, want Verdict) *Ticket {
		t.Helper()
		a, err := e.Admit(t.Context(), call, policy)
		if err != nil || a.Verdict != want {
			t.Fatalf("%s, %v, want %s", a.Verdict, err, want)
		}
		return a.Ticket
	}
	pay := func(e *Engine) {
		t.Helper()
		if a, err := e.Settle(t.Context(), admit(e, Allow), Result{Outcome: AttemptSucceeded, Response: &Response{Status: 200}}); err != nil || a.Verdict != Allow {
			t.Fatalf("%s, %v", a.Verdict, err)
		}
	}
	pay(payer) // which hears the store's time for the first time
	admit(other, Replay)
	for i := range 3 {
		call.IntentID, call.Scope = fmt.Sprint("intent ", i), intent.Scope{intent.Path(fmt.Sprint("account/1/order/", i+1))}
		first.said, second.said = nil, nil
		pay(payer)
		admit(payer, Replay)
		admit(other, Replay)
		admit(other, Replay)
		if want := []string{"Reserve", "Update", "Get"}; !slices.Equal(first.said, want) {
			t.Errorf("the payer asked %v, want %v", first.said, want)
		}
		if want := []string{"Reserve", "Get"}; !slices.Equal(second.said, want) {
			t.Errorf("the other one asked %v, want %v", second.said, want)
		}
	}
}

// What was seen and is gone is a first call again.
func TestWhatWasSeenIsNoRecord(t *testing.T) {
	st, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	id, err := st.Initialise(t.Context(), store.Identity{Epoch: "e", KeyDomain: "d"})
	if err != nil {
		t.Fatal(err)
	}
	e := New(st, id, Options{})
	call := Call{
		Key: Key{Namespace: "n", Tool: "t", Caller: "c", IntentID: "i"}, CallerUID: "u",
		Scope: intent.Scope{"account/1"}, Fingerprint: "sha256:x", IdentityHash: "h",
	}
	e.seen.add(call.Key.String())
	a, err := e.Admit(t.Context(), call, Policy{Budget: "b", Window: time.Hour, TTL: time.Hour, Timeout: time.Second})
	if err != nil || a.Verdict != Allow || a.Ticket == nil {
		t.Errorf("%+v, %v", a, err)
	}
}
