package redis_test

// What records cost: bytes in the server, and pairs of a Reserve and an Update.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

var costID = store.Identity{Epoch: "epoch", KeyDomain: "domain"}

// payment is a record like the guard's: a scope of four segments, a lineage of two,
// about the header that it has then, and three marks for who is paid how much by
// which tool, the last of which all payments of the tool have in common.
func payment(i int, unsettled bool) store.Write {
	key := fmt.Sprintf("7:support12:issue-refund35:system:serviceaccount:support:agent10:sess_%05d", i)
	hex := func(kind string) string { return strings.Repeat(fmt.Sprintf("%08x", i), 8) + kind }
	customer, lineage := fmt.Sprintf("customer/c%d", i/10), fmt.Sprintf("sess_%08d", i)
	w := store.Write{
		Epoch: costID.Epoch, Key: key, Nonce: fmt.Sprintf("%025d", i),
		Record: &store.Record{Header: header(i, unsettled), Unsettled: unsettled, Due: time.Unix(2e9, 0)},
	}
	var until time.Time
	if unsettled {
		w.Nonce += "u"
	} else {
		w.Nonce += "s"
		until = time.Now().Add(72 * time.Hour)
	}
	identity := strings.Repeat("1d", 32)
	for _, m := range []store.Mark{
		{String: part("scope", fmt.Sprintf("%s/order/%d", customer, i))},
		{String: part("under-scope", customer+"/order")},
		{String: part("under-scope", customer)},
		{String: part("under-scope", "customer")},
		{String: part("lineage", lineage+"/call-4")},
		{String: part("under-lineage", lineage)},
		{String: part("exact", hex("exact"))},
		{String: part("payment", hex("recipient and amount")), Tag: identity},
		{String: part("payment", hex("recipient")), Tag: identity},
		{String: part("payment", strings.Repeat("tool", 16)), Tag: identity},
	} {
		m.Until = until
		w.Marks = append(w.Marks, m)
	}
	return w
}

// header is as long as the guard's and made like it: a checksum, then texts behind their
// numbers and lengths, hashes by their bytes.
func header(i int, unsettled bool) []byte {
	state, reference := "InFlight", ""
	if !unsettled {
		state, reference = "Succeeded", fmt.Sprintf("re_3N%08d", i*7919)
	}
	random := rand.New(rand.NewPCG(uint64(i), 1))
	noise := func(n int) string {
		b := make([]byte, n)
		for j := range b {
			b[j] = byte(random.Uint32())
		}
		return string(b)
	}
	out := []byte("\x01" + noise(4))
	for j, value := range []string{
		"0f8fad5b-d9cb-469f-a165-70867728950e", state, fmt.Sprintf("customer/c%d/order/%d", i/10, i), fmt.Sprintf("sess_%08d/call-4", i),
		"\x0a\x0549.99\x12\x03USD", fmt.Sprintf("a%d", i/10), "h" + noise(32), "h" + noise(32), "h" + noise(32), "h" + noise(32),
		reference, noise(10), noise(10),
	} {
		out = append(append(out, byte(j<<3|2), byte(len(value))), value...)
	}
	return out
}

func part(kind, rest string) string {
	return fmt.Sprintf("%d:%s7:refunds%d:%s", len(kind), kind, len(rest), rest)
}

// probesOf are those of a call like it: whether it was made or held before, and what
// it meets by its scope, its lineage, and who is paid by which tool.
func probesOf(i int, w store.Write) []store.Probe {
	customer, lineage := fmt.Sprintf("customer/c%d", i/10), fmt.Sprintf("sess_%08d", i)
	scope, call := fmt.Sprintf("%s/order/%d", customer, i), lineage+"/call-4"
	probes := []store.Probe{
		{String: w.Marks[6].String, First: true},
		{String: part("never-sent", strings.Repeat(fmt.Sprintf("%08x", i), 8)), First: true},
	}
	for _, s := range []string{
		part("scope", scope), part("scope", customer+"/order"), part("scope", customer), part("scope", "customer"),
		part("under-scope", scope), part("lineage", call), part("lineage", lineage), part("under-lineage", call),
	} {
		probes = append(probes, store.Probe{String: s})
	}
	for _, m := range w.Marks[7:] {
		probes = append(probes, store.Probe{String: m.String, Except: m.Tag})
	}
	return probes
}

// pair is a payment as the guard writes it.
func pair(ctx context.Context, s *redis.Store, i, body int) error {
	w := payment(i, true)
	result, err := s.Reserve(ctx, store.Reserve{Write: w, Probes: probesOf(i, w)})
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("reserve: %+v, %w", result, err)
	}
	settled := payment(i, false)
	settled.Expected, settled.RenewMarks, settled.Until, settled.Marks = result.Version, true, settled.Marks[0].Until, nil
	settled.Record.Body = make([]byte, body)
	result, err = s.Update(ctx, settled)
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("update: %+v, %w", result, err)
	}
	return nil
}

// pairs makes the payments from one number up to another, so many at a time.
func pairs(t testing.TB, st *redis.Store, from, to, writers, body int) {
	t.Helper()
	next := atomic.Int64{}
	next.Store(int64(from))
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
				if err := pair(context.Background(), st, i, body); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// info is a number that the server says of itself, 0 if it does not say it. Of a
// command it is the microseconds that it took in all, of an error how often it came.
func (s *server) info(t testing.TB, name string) float64 {
	t.Helper()
	answer := s.do(t, "INFO", "everything")
	info, err := answer.ToString()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(info) {
		of, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if of != name {
			continue
		}
		if _, usec, ok := strings.Cut(value, ",usec="); ok {
			value, _, _ = strings.Cut(usec, ",")
		}
		value = strings.TrimPrefix(value, "count=")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return n
	}
	return 0
}

// TestBytesOfARecord: a settled record and its marks, without its body, take 2 KiB at most.
func TestBytesOfARecord(t *testing.T) {
	const n, most = 10_000, 2 << 10
	s := newServer(t, "--appendonly", "no")
	st := s.open(t)
	ctx := context.Background()
	if _, err := st.Initialise(ctx, costID); err != nil {
		t.Fatal(err)
	}
	before := s.info(t, "used_memory")
	pairs(t, st, 0, n, 16, 0)
	each := int64(s.info(t, "used_memory")-before) / n
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
	b.ResetTimer()
	pairs(b, st, 0, b.N, writers, 1500)
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
}

// BenchmarkServer says what the two scripts of a payment take the server, with so many
// payments settled before. It is the middle of all that were run, so that a moment in
// which the machine was busy with something else does not count.
func BenchmarkServer(b *testing.B) {
	for _, settled := range []int{1_000, 30_000} {
		b.Run(fmt.Sprintf("settled=%d", settled), func(b *testing.B) {
			s := newServer(b)
			st := s.open(b)
			if _, err := st.Initialise(context.Background(), costID); err != nil {
				b.Fatal(err)
			}
			pairs(b, st, 0, settled, 16, 0)
			b.ResetTimer()
			reserve, update := s.durations(b, func() { pairs(b, st, settled, settled+b.N, 1, 1500) })
			b.ReportMetric(float64(reserve), "reserve-µs")
			b.ReportMetric(float64(update), "update-µs")
		})
	}
}

// durations are the medians, in microseconds, of what Reserves and Updates took the
// server in this run, which makes one of each by turns.
func (s *server) durations(t testing.TB, run func()) (reserve, update int64) {
	t.Helper()
	s.do(t, "CONFIG", "SET", "slowlog-max-len", "1000000")
	s.do(t, "SLOWLOG", "RESET")
	s.do(t, "CONFIG", "SET", "slowlog-log-slower-than", "0")
	run()
	s.do(t, "CONFIG", "SET", "slowlog-log-slower-than", "-1")
	answer := s.do(t, "SLOWLOG", "GET", "-1")
	entries, err := answer.ToArray()
	if err != nil {
		t.Fatal(err)
	}
	var took [2][]int64
	for _, e := range entries {
		parts, err := e.ToArray()
		if err != nil {
			t.Fatal(err)
		}
		args, err := parts[3].AsStrSlice()
		if err != nil || args[0] != "EVALSHA" {
			continue
		}
		n, err := parts[2].AsInt64()
		if err != nil {
			t.Fatal(err)
		}
		// The newest comes first, and was an Update.
		of := (len(took[0]) + len(took[1]) + 1) % 2
		took[of] = append(took[of], n)
	}
	for _, of := range took {
		slices.Sort(of)
	}
	if len(took[0]) == 0 || len(took[0]) != len(took[1]) {
		t.Fatalf("%d Reserves and %d Updates were seen", len(took[0]), len(took[1]))
	}
	return took[0][len(took[0])/2], took[1][len(took[1])/2]
}
