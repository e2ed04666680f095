package bolt_test

// What a payment costs the process, by how many are settled already.

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// payment is a record with marks like the guard's: a scope of four segments, a lineage
// of two, and who is paid how much by which tool.
func payment(i int, settled bool) store.Reserve {
	key := fmt.Sprintf("7:support12:issue-refund35:system:serviceaccount:support:agent10:sess_%05d", i)
	digest := func(kind string, n int) string {
		return fmt.Sprintf("7:%s7:refunds64:%s", kind, strings.Repeat(fmt.Sprintf("%08x", n), 8))
	}
	account, lineage := fmt.Sprintf("account/a%d", i%1000), fmt.Sprintf("sess_%08d", i)
	order := fmt.Sprintf("%s/order/%d", account, i)
	r := store.Reserve{Write: store.Write{
		Epoch: "e", Key: key, Nonce: fmt.Sprintf("%025d", i),
		Record: &store.Record{Header: make([]byte, 700), Unsettled: true, Due: time.Unix(2e9, 0)},
	}}
	var until time.Time
	if settled {
		until = time.Now().Add(72 * time.Hour)
		r.Nonce += "s"
		r.Record = &store.Record{Header: make([]byte, 800), Body: make([]byte, 500), Due: time.Now().Add(48 * time.Hour)}
	}
	mark := func(s, tag string) {
		r.Marks = append(r.Marks, store.Mark{String: s, Tag: tag, Until: until})
		r.Probes = append(r.Probes, store.Probe{String: s + "?", Except: tag})
		if tag != "" {
			r.Probes[len(r.Probes)-1].String = s
		}
	}
	mark("5:scope7:refunds25:"+order, "")
	for _, s := range []string{account + "/order", account, "account"} {
		mark("11:under-scope7:refunds20:"+s, "")
	}
	mark("7:lineage7:refunds20:"+lineage+"/call-4", "")
	mark("13:under-lineage7:refunds20:"+lineage, "")
	mark(digest("exact", i), "")
	identity := strings.Repeat("1d", 32)
	mark(digest("payment", 1e6+i), identity)
	mark(digest("payment", 2e6+i%1000), identity)
	mark(digest("payment", 3e6), identity)
	return r
}

// pay makes the payments from one number up to another, so many at a time.
func pay(b *testing.B, s *bolt.Store, from, to, writers int) {
	b.Helper()
	ctx := context.Background()
	var next atomic.Int64
	next.Store(int64(from))
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
				result, err := s.Reserve(ctx, payment(i, false))
				if err != nil || result.Outcome != store.Written {
					b.Errorf("reserve: %+v, %v", result, err)
					return
				}
				settled := payment(i, true).Write
				settled.Expected = result.Version
				if result, err = s.Update(ctx, settled); err != nil || result.Outcome != store.Written {
					b.Errorf("update: %+v, %v", result, err)
					return
				}
			}
		})
	}
	group.Wait()
	if b.Failed() {
		b.FailNow()
	}
}

// BenchmarkSettled says what a payment takes of processor time, with so many settled.
func BenchmarkSettled(b *testing.B) {
	for _, settled := range []int{1_000, 100_000} {
		path := filepath.Join(b.TempDir(), "store.db")
		open := func(opts bolt.Options) *bolt.Store {
			s, err := bolt.Open(path, opts)
			if err != nil {
				b.Fatal(err)
			}
			return s
		}
		s, made := open(bolt.Options{NoSync: true}), settled
		if _, err := s.Initialise(context.Background(), store.Identity{Epoch: "e", KeyDomain: "d"}); err != nil {
			b.Fatal(err)
		}
		pay(b, s, 0, made, 256)
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("settled=%d", settled), func(b *testing.B) {
			s := open(bolt.Options{})
			var before, after syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
				b.Fatal(err)
			}
			b.ResetTimer()
			pay(b, s, made, made+b.N, 64)
			b.StopTimer()
			made += b.N
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
				b.Fatal(err)
			}
			cpu := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
			b.ReportMetric(float64(cpu)/float64(b.N)/1e3, "cpu-µs/op")
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
