package postgres_test

// What a guarded call costs the store: a Reserve and an Update, each durable. Beside
// it the floor: pgbench, which does the same two durable writes and nothing else.
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
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

var benchConnections = []int{1, 16, 64}

// callOf is call number n as the guard makes it: a scope of four segments and a lineage
// of two, each with its ancestors, an exact match, and three strings with tags, of
// which one is that of all calls.
func callOf(n int64) store.Reserve {
	account := n % 1000
	order, call := fmt.Sprintf("account/%d/order/%d", account, n), fmt.Sprintf("session-%d/%d", n/4, n%4)
	r := reserve(fmt.Sprintf("9:namespace6:charge41:system:serviceaccount:namespace:agent-0001:%020d", n), order, call)
	r.Nonce = fmt.Sprintf("%032d", n)
	r.Record.Due = time.Now().Add(time.Minute)
	// As many bytes as the guard's, and as the floor's.
	r.Record.Header, r.Record.Body = make([]byte, 560), make([]byte, 480)
	r.Marks = append(r.Marks, store.Mark{String: "exact " + order})
	r.Probes = append(r.Probes, store.Probe{String: "exact " + order, First: true}, store.Probe{String: "never sent " + order, First: true})
	for i, s := range []string{fmt.Sprint("payment ", account, " 49.99"), fmt.Sprint("payment ", account), "payment"} {
		tag := fmt.Sprint("tag ", i)
		r.Marks = append(r.Marks, store.Mark{String: s, Tag: tag})
		r.Probes = append(r.Probes, store.Probe{String: s, Except: tag})
	}
	return r
}

// settlementOf is the settlement of a call that was reserved with this version.
func settlementOf(r store.Reserve, version uint64) store.Write {
	w := r.Write
	w.Expected, w.Nonce = version, "settlement of "+r.Nonce
	settled := *r.Record
	w.Record = &settled
	w.Record.Unsettled, w.Record.Due = false, time.Now().Add(48*time.Hour)
	w.Record.Header, w.Record.Body = make([]byte, 600), make([]byte, 1210)
	w.Marks = nil
	until := time.Now().Add(72 * time.Hour)
	for _, m := range r.Marks {
		w.Marks = append(w.Marks, store.Mark{String: m.String, Tag: m.Tag, Until: until})
	}
	return w
}

// calls counts them, so that each is another one.
var calls atomic.Int64

// pair is a call that passes.
func pair(t testing.TB, s store.Store, n int64) {
	r := callOf(n)
	result, err := s.Reserve(context.Background(), r)
	if err != nil || result.Outcome != store.Written {
		t.Errorf("Reserve: %+v, %v", result, err)
		return
	}
	w := settlementOf(r, result.Version)
	w.RenewMarks, w.Until, w.Marks = true, w.Marks[0].Until, nil
	if result, err := s.Update(context.Background(), w); err != nil || result.Outcome != store.Written {
		t.Errorf("Update: %+v, %v", result, err)
	}
}

// cpu is what the server's processes have used, and what this one has.
func (s *server) cpu(t testing.TB) (server, own time.Duration) {
	t.Helper()
	ticks := func(pid int, fields ...int) int {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0
		}
		sum := 0
		rest := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		for _, f := range fields {
			n, err := strconv.Atoi(rest[f])
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		return sum
	}
	// utime, stime, and those of children that have ended.
	sum := ticks(s.cmd.Process.Pid, 11, 12, 13, 14)
	for _, pid := range s.children() {
		sum += ticks(pid, 11, 12)
	}
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(sum) * (time.Second / 100), time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func BenchmarkPair(b *testing.B) {
	server := newServer(b, "fsync=on", "shared_buffers=256MB", "max_wal_size=4GB")
	s := open(b, postgres.Options{DSN: server.dsn("postgres"), MaxConns: 64})
	initialise(b, s)
	for _, connections := range benchConnections {
		b.Run(fmt.Sprintf("goroutines=%d", connections), func(b *testing.B) {
			var mu sync.Mutex
			var took []time.Duration
			var left atomic.Int64
			left.Store(int64(b.N))
			var group sync.WaitGroup
			server0, own0 := server.cpu(b)
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
			server1, own1 := server.cpu(b)
			b.ReportMetric(float64((server1-server0).Microseconds())/float64(b.N), "server-cpu-µs")
			b.ReportMetric(float64((own1-own0).Microseconds())/float64(b.N), "client-cpu-µs")
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

var tps = regexp.MustCompile(`tps = ([0-9.]+)`)

func BenchmarkFloor(b *testing.B) {
	server := newServer(b, "fsync=on", "shared_buffers=256MB", "max_wal_size=4GB")
	initialise(b, open(b, postgres.Options{DSN: server.dsn("postgres")}))
	text, err := os.ReadFile("testdata/floor.sql")
	if err != nil {
		b.Fatal(err)
	}
	script := filepath.Join(server.dir, "floor.sql")
	if err := os.WriteFile(script, text, 0o644); err != nil {
		b.Fatal(err)
	}
	for _, connections := range benchConnections {
		b.Run(fmt.Sprintf("clients=%d", connections), func(b *testing.B) {
			each := max(1, b.N/connections)
			cmd := server.program(b, "pgbench", "-n", "-M", "prepared", "-f", script, "-c", strconv.Itoa(connections), "-j", "2",
				"-t", strconv.Itoa(each), server.dsn("postgres"))
			cmd.Env = append(cmd.Env, "PGOPTIONS=-c search_path=holdfast -c synchronous_commit=on")
			server0, _ := server.cpu(b)
			out, err := cmd.CombinedOutput()
			if err != nil {
				b.Fatalf("%v\n%s", err, out)
			}
			// What a session has used is the server's once it has ended.
			watch := server.admin(b, "postgres")
			eventually(b, "sessions end", func() error {
				if n := ask[int](b, watch, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench'"); n > 0 {
					return fmt.Errorf("%d are there", n)
				}
				return nil
			})
			server1, _ := server.cpu(b)
			found := tps.FindSubmatch(out)
			if found == nil {
				b.Fatalf("%s", out)
			}
			perSecond, err := strconv.ParseFloat(string(found[1]), 64)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64((server1-server0).Microseconds())/float64(each*connections), "server-cpu-µs")
			b.ReportMetric(float64((cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()).Microseconds())/float64(each*connections), "client-cpu-µs")
			report(b, perSecond, nil)
		})
	}
}
