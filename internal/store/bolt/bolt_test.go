package bolt_test

// The conformance suite on a bolt file, and what only this store promises: who may
// open the file, and what is left of it when its process is killed or its disk is full.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/internal/store/storetest"
)

// In a process that a test starts, these name the file and what to do with it.
const (
	envFile  = "HOLDFAST_BOLT_FILE"
	envLimit = "HOLDFAST_BOLT_LIMIT"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(envFile); path != "" {
		if err := child(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// child writes to the store until it is killed, or until the file may grow no more.
func child(path string) error {
	s, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		return err
	}
	if os.Getenv(envLimit) == "" {
		return storetest.Scribe(context.Background(), s, os.Stdout)
	}
	// Beyond the limit a write fails as on a full disk.
	signal.Ignore(syscall.SIGXFSZ)
	var now syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &now); err != nil {
		return err
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 1 << 20, Max: now.Max}); err != nil {
		return err
	}
	if err := storetest.Scribe(context.Background(), s, os.Stdout); !errors.Is(err, store.ErrUnavailable) {
		return fmt.Errorf("on a full disk: %w", err)
	}
	if _, _, err := s.Get(context.Background(), "k"); err != nil {
		return fmt.Errorf("read on a full disk: %w", err)
	}
	if err := s.Check(context.Background()); err != nil {
		return fmt.Errorf("on a full disk: %w", err)
	}
	// There is space again: the same process goes on.
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &now); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	if err := storetest.Scribe(ctx, s, os.Stdout); !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("after the disk was full: %w", err)
	}
	return s.Close()
}

// harness is a store in a file, with a clock that stands still unless it is moved.
// Its restart goes on with a copy of the file as it lay there, without the store's
// having been closed.
type harness struct {
	dir    string
	files  int
	micros atomic.Int64
	now    *bolt.Store
}

func (h *harness) clock() time.Time {
	return time.UnixMicro(h.micros.Load())
}

func (h *harness) path() string {
	return filepath.Join(h.dir, fmt.Sprintf("store-%d.db", h.files))
}

func (h *harness) open(t testing.TB) *bolt.Store {
	t.Helper()
	s, err := bolt.Open(h.path(), bolt.Options{Clock: h.clock})
	if err != nil {
		t.Fatal(err)
	}
	h.now = s
	return s
}

func newHarness(t testing.TB) storetest.Harness {
	h := &harness{dir: t.TempDir()}
	h.micros.Store(time.Date(2030, 1, 2, 3, 4, 5, 678_901_000, time.UTC).UnixMicro())
	s := h.open(t)
	t.Cleanup(func() {
		if err := h.now.Close(); err != nil {
			t.Error(err)
		}
	})
	return storetest.Harness{
		Store:   s,
		Connect: func(testing.TB) store.Store { return h.now },
		Restart: func(t testing.TB) store.Store {
			t.Helper()
			old, from := h.now, h.path()
			h.files++
			copyFile(t, from, h.path())
			if err := old.Close(); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(from); err != nil {
				t.Fatal(err)
			}
			return h.open(t)
		},
		Advance: func(d time.Duration) { h.micros.Add(d.Microseconds()) },
		Check: func(t testing.TB) {
			t.Helper()
			if err := h.now.Check(context.Background()); err != nil {
				t.Errorf("check: %v", err)
			}
		},
	}
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness { return newHarness(t) })
}

// start runs the child on the file, and reads its journal.
func start(t *testing.T, path string, journal *storetest.Journal, env ...string) (cmd *exec.Cmd, read *sync.WaitGroup) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), envFile+"="+path), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read = new(sync.WaitGroup)
	read.Go(func() {
		if err := journal.Read(out); err != nil {
			t.Error(err)
		}
	})
	return cmd, read
}

func verify(t *testing.T, path string, journal *storetest.Journal) {
	t.Helper()
	s, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(context.Background()); err != nil {
		t.Errorf("check: %v", err)
	}
	journal.Verify(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestKilled(t *testing.T) {
	const rounds = 12
	path := filepath.Join(t.TempDir(), "store.db")
	journal := storetest.NewJournal()
	for round := range rounds {
		before := journal.Acknowledged()
		cmd, read := start(t, path, journal)
		// Killed after a random number of acknowledgements, so always in the middle of work.
		wanted := before + 1 + rand.IntN(400)
		deadline := time.After(time.Minute)
		for tick := time.NewTicker(time.Millisecond); journal.Acknowledged() < wanted; {
			select {
			case <-tick.C:
			case <-deadline:
				t.Fatalf("round %d: %d acknowledged, want %d", round, journal.Acknowledged(), wanted)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		read.Wait()
		if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("round %d: the child ended with %v", round, err)
		}
		verify(t, path, journal)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	t.Logf("%d acknowledged writes in %d rounds", journal.Acknowledged(), rounds)
}

func TestDiskFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	journal := storetest.NewJournal()
	cmd, read := start(t, path, journal, envLimit+"=1")
	read.Wait()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("child: %v", err)
	}
	if journal.Acknowledged() < 100 {
		t.Errorf("%d acknowledged writes only", journal.Acknowledged())
	}
	verify(t, path, journal)
}

func TestOpenOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	s, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	_, err = bolt.Open(path, bolt.Options{LockWait: 200 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (", os.Getpid())) {
		t.Errorf("a second Open: %v", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the second Open took %s", took)
	}
	// One that is let go in time is waited for.
	opened := make(chan error, 1)
	go func() {
		second, err := bolt.Open(path, bolt.Options{LockWait: time.Minute})
		if err == nil {
			err = second.Close()
		}
		opened <- err
	}()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-opened; err != nil {
		t.Errorf("Open after Close: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	raw := func(fn func(tx *bbolt.Tx) error) func(path string) error {
		return func(path string) error {
			db, err := bbolt.Open(path, 0o600, nil)
			if err != nil {
				return err
			}
			return errors.Join(db.Update(fn), db.Close())
		}
	}
	ours := func(change func(tx *bbolt.Tx) error) func(path string) error {
		return func(path string) error {
			s, err := bolt.Open(path, bolt.Options{})
			if err != nil {
				return err
			}
			return errors.Join(s.Close(), raw(change)(path))
		}
	}
	for name, c := range map[string]struct {
		prepare func(path string) error
		want    string
	}{
		"another format": {ours(func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte("meta")).Put([]byte("format"), []byte("1"))
		}), `format "1"`},
		"a missing bucket": {ours(func(tx *bbolt.Tx) error {
			return tx.DeleteBucket([]byte("sums"))
		}), "bucket sums is missing"},
		"a file of another program": {raw(func(tx *bbolt.Tx) error {
			_, err := tx.CreateBucket([]byte("raft"))
			return err
		}), "another program"},
		"no bolt file": {func(path string) error {
			return os.WriteFile(path, []byte(strings.Repeat("no database ", 10_000)), 0o600)
		}, "not a store's file"},
		"no directory": {func(path string) error { return os.RemoveAll(filepath.Dir(path)) }, "no such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "store.db")
			if err := c.prepare(path); err != nil {
				t.Fatal(err)
			}
			var before []byte
			if name != "no directory" {
				before, _ = os.ReadFile(path)
			}
			s, err := bolt.Open(path, bolt.Options{})
			if err == nil {
				_ = s.Close()
				t.Fatal("it was opened")
			}
			if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if after, _ := os.ReadFile(path); string(after) != string(before) {
				t.Error("the file was changed")
			}
		})
	}
}

func BenchmarkReserveUpdate(b *testing.B) {
	for _, writers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("goroutines=%d", writers), func(b *testing.B) {
			s, err := bolt.Open(filepath.Join(b.TempDir(), "store.db"), bolt.Options{})
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			id := store.Identity{Epoch: "e", KeyDomain: "d"}
			if _, err := s.Initialise(ctx, id); err != nil {
				b.Fatal(err)
			}
			var next atomic.Int64
			var group sync.WaitGroup
			b.ResetTimer()
			for range writers {
				group.Go(func() {
					for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
						if err := pair(ctx, s, id.Epoch, i); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			group.Wait()
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// pair is a payment as the guard writes it: a Reserve before it is sent, an Update after.
func pair(ctx context.Context, s *bolt.Store, epoch string, i int64) error {
	key := fmt.Sprintf("payments/issue-refund/agent/%d", i)
	w := store.Write{
		Epoch: epoch, Key: key, Nonce: key + "/1",
		Record: &store.Record{Header: make([]byte, 600), Body: make([]byte, 1500), Unsettled: true},
		Meters: []store.MeterEntry{{Meter: "daily", Amount: "0.01", Limit: "1000000000"}},
	}
	r := store.Reserve{Write: w}
	for _, part := range []string{"customer", "customer/c", key} {
		r.Marks = append(r.Marks, store.Mark{String: part + key})
		r.Probes = append(r.Probes, store.Probe{String: part + key}, store.Probe{String: key + part})
	}
	result, err := s.Reserve(ctx, r)
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("reserve: %+v, %w", result, err)
	}
	w.Expected, w.Nonce, w.Marks = result.Version, key+"/2", r.Marks
	result, err = s.Update(ctx, w)
	if err != nil || result.Outcome != store.Written {
		return fmt.Errorf("update: %+v, %w", result, err)
	}
	return nil
}

// A file that a version of before has written.
func TestFileOfAnEarlierVersion(t *testing.T) {
	at := func(name string) string { return filepath.Join(t.TempDir(), name) }
	opened := func(path string) *bolt.Store {
		s, err := bolt.Open(path, bolt.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	content := storetest.EarlierCopy(t, "testdata/format-2.db.gz", func() []byte {
		path := at("old.db")
		s := opened(path)
		storetest.WriteEarlier(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return content
	})
	path := at("new.db")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	s := opened(path)
	storetest.FindEarlier(t, s)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
