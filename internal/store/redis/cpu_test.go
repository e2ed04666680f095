package redis_test

// What a payment costs the server in all: the scripts, and what it reads, logs and
// synchronises around them.

import (
	"context"
	"fmt"
	"testing"
)

// BenchmarkServerCPU says what the process of the server takes of processor time, and
// what it appends to its log, by payment.
func BenchmarkServerCPU(b *testing.B) {
	for _, sync := range []string{"always", "no"} {
		for _, writers := range []int{1, 64} {
			b.Run(fmt.Sprintf("fsync=%s/goroutines=%d", sync, writers), func(b *testing.B) {
				s := newServer(b, "--appendfsync", sync, "--auto-aof-rewrite-percentage", "0")
				st := s.open(b)
				if _, err := st.Initialise(context.Background(), costID); err != nil {
					b.Fatal(err)
				}
				const settled = 2_000
				pairs(b, st, 0, settled, 16, 1500)
				user, system := s.info(b, "used_cpu_user_main_thread"), s.info(b, "used_cpu_sys_main_thread")
				all := s.info(b, "used_cpu_user") + s.info(b, "used_cpu_sys")
				logged := s.info(b, "aof_current_size")
				b.ResetTimer()
				pairs(b, st, settled, settled+b.N, writers, 1500)
				b.StopTimer()
				per := func(name string, now, before, unit float64) {
					b.ReportMetric((now-before)*unit/float64(b.N), name)
				}
				per("user-µs/op", s.info(b, "used_cpu_user_main_thread"), user, 1e6)
				per("sys-µs/op", s.info(b, "used_cpu_sys_main_thread"), system, 1e6)
				per("cpu-µs/op", s.info(b, "used_cpu_user")+s.info(b, "used_cpu_sys"), all, 1e6)
				per("log-B/op", s.info(b, "aof_current_size"), logged, 1)
			})
		}
	}
}
