// This file measures what the engine itself costs: the store behind it is a map.

package guard

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// quick is a store without probes: it answers at once.
type quick struct {
	store.Store
	mu      sync.Mutex
	records map[string]*store.Record
	version uint64
}

func (q *quick) write(w store.Write) store.Result {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now().UTC().Truncate(time.Microsecond)
	have := q.records[w.Key]
	if have != nil && have.Version != w.Expected || have == nil && w.Expected != 0 {
		return store.Result{Outcome: store.Mismatch, Now: now, Record: have}
	}
	q.version++
	r := *w.Record
	r.Key, r.Version, r.Nonce, r.At = w.Key, q.version, w.Nonce, now
	q.records[w.Key] = &r
	return store.Result{Outcome: store.Written, Now: now, Version: r.Version}
}

func (q *quick) Reserve(_ context.Context, r store.Reserve) (store.Result, error) {
	return q.write(r.Write), nil
}
func (q *quick) Update(_ context.Context, w store.Write) (store.Result, error) {
	return q.write(w), nil
}
func (q *quick) Get(_ context.Context, key string) (*store.Record, time.Time, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.records[key], time.Now(), nil
}
func (q *quick) List(context.Context, store.List) (store.Page, error) {
	return store.Page{Now: time.Now()}, nil
}

func benchmarkCall(id string) Call {
	return Call{
		Key:       Key{Namespace: "support", Tool: "issue-refund", Caller: "system:serviceaccount:support:agent", IntentID: id},
		CallerUID: "0b6f8c1e-7c0c-4a63-9a37-6f3f0f4f5b1a",
		Scope:     intent.Scope{intent.Path("customer/c1/order/" + id)}, Lineage: intent.Path("sess_abc/" + id),
		Amount: &intent.Money{Value: "49.99", Currency: "USD"}, Recipient: "customer-1",
		Fingerprint:  "sha256:4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a",
		IdentityHash: "sha256:5f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a",
		AmountHash:   "sha256:6f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a", RecipientHash: "sha256:7f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a",
	}
}

func benchmarkResult() Result {
	return Result{
		Outcome: AttemptSucceeded, ProviderReference: "re_1",
		Response: &Response{
			Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}, "Date": {"Mon, 02 Mar 2026 12:00:00 GMT"}},
			Body: make([]byte, 300), Size: 300, Digest: "sha256:4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a6c2a9a8f4f2a",
		},
	}
}

func BenchmarkNew(b *testing.B) {
	e := New(&quick{records: map[string]*store.Record{}}, store.Identity{Epoch: "e", KeyDomain: "d"}, Options{})
	p, res, ctx := storyPolicy(), benchmarkResult(), context.Background()
	b.ReportAllocs()
	for i := range b.N {
		a, err := e.Admit(ctx, benchmarkCall(strconv.Itoa(i)), p)
		if err != nil || a.Ticket == nil {
			b.Fatal(a.Verdict, err)
		}
		if _, err := e.Settle(ctx, a.Ticket, res); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReplay(b *testing.B) {
	e := New(&quick{records: map[string]*store.Record{}}, store.Identity{Epoch: "e", KeyDomain: "d"}, Options{})
	p, ctx, c := storyPolicy(), context.Background(), benchmarkCall("1")
	a, err := e.Admit(ctx, c, p)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := e.Settle(ctx, a.Ticket, benchmarkResult()); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for range b.N {
		if a, err := e.Admit(ctx, c, p); err != nil || a.Verdict != Replay {
			b.Fatal(a.Verdict, err)
		}
	}
}
