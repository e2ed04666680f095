package redis_test

// What records cost: bytes in the server, and pairs of a Reserve and an Update.

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

var costID = store.Identity{Epoch: "epoch", KeyDomain: "domain"}

// payment is a record like the guard's: a scope of four segments, a lineage of
// two, and about the header that it has then.
func payment(i int, unsettled bool) store.Write {
	key := fmt.Sprintf("7:support12:issue-refund35:system:serviceaccount:support:agent10:sess_%05d", i)
	part := func(kind, rest string) string {
		return fmt.Sprintf("%d:%s7:refunds%d:%s", len(kind), kind, len(rest), rest)
	}
	hex := func(kind string) string { return strings.Repeat(fmt.Sprintf("%08x", i), 8) + kind }
	customer, lineage := fmt.Sprintf("customer/c%d", i/10), fmt.Sprintf("sess_%08d", i)
	w := store.Write{
		Epoch: costID.Epoch, Key: key, Nonce: fmt.Sprintf("%031d", i),
		Record: &store.Record{Header: []byte(strings.Repeat("h", 596)), Unsettled: unsettled, Due: time.Unix(2e9, 0)},
	}
	w.Nonce += "u"
	var until time.Time
	if !unsettled {
		w.Nonce = w.Nonce[:31] + "s"
		until = time.Now().Add(72 * time.Hour)
	}
	for _, m := range []store.Mark{
		{String: part("scope", fmt.Sprintf("%s/order/%d", customer, i))},
		{String: part("under-scope", customer+"/order")},
		{String: part("under-scope", customer)},
		{String: part("under-scope", "customer")},
		{String: part("lineage", lineage+"/call-4")},
		{String: part("under-lineage", lineage)},
		{String: part("exact", hex("exact"))},
		{String: part("payment", hex("payment")), Tag: strings.Repeat("1d", 32)},
	} {
		m.Until = until
		w.Marks = append(w.Marks, m)
	}
	return w
}

// probesOf are those of a call like it.
func probesOf(w store.Write) []store.Probe {
	own := func(s string) string { return strings.ReplaceAll(s, "under-", "probe-") }
	var probes []store.Probe
	for i, m := range w.Marks {
		probes = append(probes, store.Probe{String: own(m.String), Except: m.Tag, First: i == 6})
	}
	// What lies under the scope and under the lineage.
	return append(probes, store.Probe{String: "under " + w.Marks[0].String}, store.Probe{String: "under " + w.Marks[4].String})
}

// pair is a payment as the guard writes it.
func pair(ctx context.Context, s *redis.Store, i, body int) error {
	w := payment(i, true)
	w.Meters = []store.MeterEntry{{Meter: "daily", Amount: "0.01", Limit: "1000000000"}}
	result, err := s.Reserve(ctx, store.Reserve{Write: w, Probes: probesOf(w)})
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("reserve: %+v, %w", result, err)
	}
	settled := payment(i, false)
	settled.Expected, settled.Meters = result.Version, w.Meters
	settled.Record.Body = make([]byte, body)
	result, err = s.Update(ctx, settled)
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("update: %+v, %w", result, err)
	}
	return nil
}

// TestBytesOfARecord: a settled record and its marks, without its body, take 2 KiB at most.
func TestBytesOfARecord(t *testing.T) {
	const n, most = 20_000, 2 << 10
	s := newServer(t, "--appendonly", "no")
	st := s.open(t)
	ctx := context.Background()
	if _, err := st.Initialise(ctx, costID); err != nil {
		t.Fatal(err)
	}
	used := func() int64 {
		var bytes int64
		answer := s.do(t, "INFO", "memory")
		info, err := answer.ToString()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(info) {
			if v, ok := strings.CutPrefix(line, "used_memory:"); ok {
				if _, err := fmt.Sscan(v, &bytes); err != nil {
					t.Fatal(err)
				}
			}
		}
		return bytes
	}
	before := used()
	var group sync.WaitGroup
	for worker := range 16 {
		group.Go(func() {
			for i := worker; i < n; i += 16 {
				if err := pair(ctx, st, i, 0); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	each := (used() - before) / n
	t.Logf("%d bytes a record", each)
	if each > most {
		t.Errorf("%d bytes a record, want %d at most", each, most)
	}
	var sum int64
	for _, prefix := range []string{"r", "b", "m", "e", "t", "due", "held", "sums"} {
		var cursor uint64
		var kind int64
		client := s.client(t)
		for {
			page, err := client.Do(ctx, client.B().Scan().Cursor(cursor).Match(st.Prefix()+prefix+"*").Count(1000).Build()).AsScanEntry()
			if err != nil {
				t.Fatal(err)
			}
			for _, key := range page.Elements {
				m, err := client.Do(ctx, client.B().MemoryUsage().Key(key).Samples(0).Build()).AsInt64()
				if err != nil {
					t.Fatal(err)
				}
				kind += m
			}
			if cursor = page.Cursor; cursor == 0 {
				break
			}
		}
		t.Logf("MEMORY USAGE of %s: %d a record", prefix, kind/n)
		sum += kind
	}
	t.Logf("MEMORY USAGE of all: %d a record", sum/n)
}

func BenchmarkReserveUpdate(b *testing.B) {
	for _, sync := range []string{"always", "no"} {
		for _, writers := range []int{1, 16, 64} {
			b.Run(fmt.Sprintf("fsync=%s/goroutines=%d", sync, writers), func(b *testing.B) {
				s := newServer(b, "--appendfsync", sync)
				benchmarkPairs(b, s.open(b), writers)
			})
		}
	}
}

func benchmarkPairs(b *testing.B, st *redis.Store, writers int) {
	ctx := context.Background()
	if _, err := st.Initialise(ctx, costID); err != nil {
		b.Fatal(err)
	}
	var next atomic.Int64
	var group sync.WaitGroup
	b.ResetTimer()
	for range writers {
		group.Go(func() {
			for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
				if err := pair(ctx, st, int(i), 1500); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
}
