package postgres_test

// What a guarded call costs the store: a Reserve and an Update, each durable. Beside
// it the floor: pgbench, which does two durable writes of a single row.
//
//	go test ./internal/store/postgres -run '^$' -bench . -benchtime 5s

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

var benchConnections = []int{1, 16, 64}

// pair is a call that passes: a scope of four segments and a lineage of two.
func pair(b *testing.B, s store.Store, n int64) {
	scope, lineage := fmt.Sprintf("customer/c%d/order/%d", n%1000, n), fmt.Sprintf("session/%d", n)
	r := reserve(fmt.Sprint("namespace/tool/caller/", n), scope, lineage)
	r.Record.Due = time.Now().Add(time.Minute)
	r.Record.Header = make([]byte, 600)
	result, err := s.Reserve(context.Background(), r)
	if err != nil || result.Outcome != store.Written {
		b.Errorf("Reserve: %+v, %v", result, err)
		return
	}
	w := r.Write
	w.Expected, w.Nonce = result.Version, "second"
	settled := *r.Record
	w.Record = &settled
	w.Record.Unsettled, w.Record.Due, w.Record.Body = false, time.Now().Add(48*time.Hour), make([]byte, 300)
	w.Marks = nil
	for _, m := range r.Marks {
		w.Marks = append(w.Marks, store.Mark{String: m.String, Until: time.Now().Add(72 * time.Hour)})
	}
	if result, err := s.Update(context.Background(), w); err != nil || result.Outcome != store.Written {
		b.Errorf("Update: %+v, %v", result, err)
	}
}

func BenchmarkPair(b *testing.B) {
	server := newServer(b, "fsync=on", "shared_buffers=256MB", "max_wal_size=4GB")
	s := open(b, postgres.Options{DSN: server.dsn("postgres"), MaxConns: 64})
	initialise(b, s)
	var calls atomic.Int64
	for _, connections := range benchConnections {
		b.Run(fmt.Sprintf("goroutines=%d", connections), func(b *testing.B) {
			var mu sync.Mutex
			var took []time.Duration
			var left atomic.Int64
			left.Store(int64(b.N))
			var group sync.WaitGroup
			b.ResetTimer()
			for range connections {
				group.Go(func() {
					var mine []time.Duration
					for left.Add(-1) >= 0 {
						start := time.Now()
						pair(b, s, calls.Add(1))
						mine = append(mine, time.Since(start))
					}
					mu.Lock()
					took = append(took, mine...)
					mu.Unlock()
				})
			}
			group.Wait()
			b.StopTimer()
			report(b, float64(b.N)/b.Elapsed().Seconds(), took)
		})
	}
}

func report(b *testing.B, perSecond float64, took []time.Duration) {
	b.ReportMetric(perSecond, "pairs/s")
	if len(took) > 0 {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
		b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	}
}

const floorScript = `\set id random(1, 1000000000)
INSERT INTO floor (id, body) VALUES (:id, repeat('x', 600)) ON CONFLICT (id) DO NOTHING;
UPDATE floor SET body = repeat('y', 900) WHERE id = :id;
`

var tps = regexp.MustCompile(`tps = ([0-9.]+)`)

func BenchmarkFloor(b *testing.B) {
	server := newServer(b, "fsync=on", "shared_buffers=256MB", "max_wal_size=4GB")
	server.exec(b, "postgres", "CREATE TABLE floor (id bigint PRIMARY KEY, body text)")
	script := filepath.Join(server.dir, "floor.sql")
	if err := os.WriteFile(script, []byte(floorScript), 0o644); err != nil {
		b.Fatal(err)
	}
	for _, connections := range benchConnections {
		b.Run(fmt.Sprintf("clients=%d", connections), func(b *testing.B) {
			each := max(1, b.N/connections)
			out, err := server.program(b, "pgbench", "-n", "-M", "prepared", "-f", script, "-c", strconv.Itoa(connections), "-j", "2",
				"-t", strconv.Itoa(each), "-d", server.dsn("postgres")).CombinedOutput()
			if err != nil {
				b.Fatalf("%v\n%s", err, out)
			}
			found := tps.FindSubmatch(out)
			if found == nil {
				b.Fatalf("%s", out)
			}
			perSecond, err := strconv.ParseFloat(string(found[1]), 64)
			if err != nil {
				b.Fatal(err)
			}
			report(b, perSecond, nil)
		})
	}
}
