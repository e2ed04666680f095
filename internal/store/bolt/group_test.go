package bolt

// The writer's group: what one request's failure, a caller's leaving and a commit
// that is under way mean to the others.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var testIdentity = store.Identity{Epoch: "e", KeyDomain: "d"}

func openTest(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "store.db"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.Initialise(context.Background(), testIdentity); err != nil {
		t.Fatal(err)
	}
	return s
}

func testWrite(key string) store.Write {
	return store.Write{Epoch: "e", Key: key, Nonce: "nonce of " + key, Record: &store.Record{Body: []byte(key), Held: true}}
}

// busy occupies the writer until the returned function is called.
func busy(t *testing.T, s *Store) (release func()) {
	t.Helper()
	begun, free := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		if _, err := s.submit(context.Background(), 0, func(*txn) (answer, error) {
			close(begun)
			<-free
			return answer{}, nil
		}); err != nil {
			t.Error(err)
		}
	})
	<-begun
	return func() {
		close(free)
		group.Wait()
	}
}

func TestFailureHurtsNobodyElse(t *testing.T) {
	s := openTest(t)
	ctx := context.Background()
	boom := errors.New("boom")
	runs := 0
	group := []*request{}
	add := func(run func(*txn) (answer, error)) *request {
		r := &request{ctx: ctx, run: run, done: make(chan struct{})}
		group = append(group, r)
		return r
	}
	writes := func(key string) func(*txn) (answer, error) {
		return func(tx *txn) (answer, error) {
			runs++
			result, err := tx.apply(newStep(testWrite(key)))
			return answer{result: result}, err
		}
	}
	first := add(writes("a"))
	halfway := add(func(tx *txn) (answer, error) {
		if _, err := tx.apply(newStep(testWrite("half"))); err != nil {
			return answer{}, err
		}
		return answer{result: store.Result{Outcome: store.Written}}, boom
	})
	refused := add(func(*txn) (answer, error) { return answer{}, store.ErrMemoryLost })
	last := add(writes("b"))
	// The writer itself is idle, and bolt has one writing transaction at a time.
	s.write(group)

	if !errors.Is(halfway.err, boom) || !errors.Is(halfway.err, store.ErrUnavailable) || halfway.answer.result.Outcome != "" {
		t.Errorf("the one that failed: %+v, %v", halfway.answer, halfway.err)
	}
	if !errors.Is(refused.err, store.ErrMemoryLost) {
		t.Errorf("the one that was refused: %v", refused.err)
	}
	if first.err != nil || last.err != nil || first.answer.result.Version != 1 || last.answer.result.Version != 2 {
		t.Errorf("the others: %+v, %v and %+v, %v", first.answer, first.err, last.answer, last.err)
	}
	if runs != 3 {
		t.Errorf("the others ran %d times, want the first once more", runs)
	}
	for key, want := range map[string]bool{"a": true, "half": false, "b": true} {
		r, _, err := s.Get(ctx, key)
		if err != nil || (r != nil) != want {
			t.Errorf("%q: %+v, %v", key, r, err)
		}
	}
	if err := s.Check(ctx); err != nil {
		t.Error(err)
	}
}

func TestWaitingRequestsShareACommit(t *testing.T) {
	s := openTest(t)
	const n = 40
	release := busy(t, s)
	var group sync.WaitGroup
	started := make(chan struct{}, n)
	for i := range n {
		group.Go(func() {
			started <- struct{}{}
			if _, err := s.Update(context.Background(), testWrite(fmt.Sprint(i))); err != nil {
				t.Error(err)
			}
		})
	}
	for range n {
		<-started
	}
	release()
	group.Wait()
	// Those that had not come to the channel yet make groups of their own, but not one each.
	var last int
	if err := s.view(context.Background(), func(tx *txn) error {
		last = tx.meta().Tx().ID()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if last > n {
		t.Errorf("%d transactions for %d requests at once", last, n)
	}
}

func TestCallerThatLeavesIsNotWrittenFor(t *testing.T) {
	s := openTest(t)
	ctx, cancel := context.WithCancel(context.Background())
	r := &request{ctx: ctx, done: make(chan struct{}), run: func(*txn) (answer, error) {
		t.Error("its step was made")
		return answer{}, nil
	}}
	cancel()
	s.write([]*request{r})
	if !errors.Is(r.err, store.ErrUnavailable) || !errors.Is(r.err, context.Canceled) {
		t.Errorf("%v", r.err)
	}
}

func TestCloseAnswersThoseWhoWait(t *testing.T) {
	s := openTest(t)
	release := busy(t, s)
	const n = 20
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			_, err := s.Update(context.Background(), testWrite(fmt.Sprint(i)))
			if err != nil && !errors.Is(err, store.ErrUnavailable) {
				t.Error(err)
			}
		})
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	<-s.closing
	release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	group.Wait()
}

// A reader takes its snapshot before a commit begins or after it is durable, and
// never in between, when bbolt shows what is not synced yet.
func TestReadersAreFencedFromCommits(t *testing.T) {
	s := openTest(t)
	ctx := context.Background()
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()

	// As in the middle of a commit: nobody reads.
	if err := s.fence.Acquire(ctx, math.MaxInt64); err != nil {
		t.Fatal(err)
	}
	for name, read := range map[string]func() error{
		"Get":      func() error { _, _, err := s.Get(short, "k"); return err },
		"List":     func() error { _, err := s.List(short, store.List{What: store.ListHeld}); return err },
		"Meter":    func() error { _, err := s.Meter(short, "m"); return err },
		"Standing": func() error { _, err := s.Standing(short); return err },
	} {
		if err := read(); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%s during a commit: %v", name, err)
		}
	}
	s.fence.Release(math.MaxInt64)

	// As in the middle of taking a snapshot: nobody commits.
	before, err := s.lastCommit()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.fence.Acquire(ctx, 1); err != nil {
		t.Fatal(err)
	}
	leaving, leave := context.WithCancel(ctx)
	defer leave()
	updated := make(chan error, 1)
	go func() {
		_, err := s.Update(leaving, testWrite("k"))
		updated <- err
	}()
	for deadline := time.After(time.Minute); s.fence.TryAcquire(1); {
		s.fence.Release(1) // the commit does not wait yet
		select {
		case <-deadline:
			t.Fatal("there is no commit")
		default:
			runtime.Gosched()
		}
	}
	leave()
	if err := <-updated; !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Update was answered before its commit: %v", err)
	}
	if id, err := s.lastCommit(); err != nil || id != before {
		t.Errorf("committed beside a reader: transaction %d, %v", id, err)
	}
	s.fence.Release(1)
	if r := getWhenThere(t, s, "k"); r == nil {
		t.Error("the write of a caller that left was not made")
	}
}

func getWhenThere(t *testing.T, s *Store, key string) *store.Record {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		r, _, err := s.Get(context.Background(), key)
		if err != nil {
			t.Fatal(err)
		}
		if r != nil {
			return r
		}
	}
	return nil
}

func TestHalfACommitStopsTheStore(t *testing.T) {
	s := openTest(t)
	cause := errors.New("input/output error")
	s.broken.Store(&cause)
	ctx := context.Background()
	_, err := s.Update(ctx, testWrite("k"))
	if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, cause) {
		t.Errorf("Update: %v", err)
	}
	if _, _, err := s.Get(ctx, "k"); !errors.Is(err, cause) {
		t.Errorf("Get: %v", err)
	}
	// Also those that were waiting.
	r := &request{ctx: ctx, done: make(chan struct{}), run: func(*txn) (answer, error) { return answer{}, nil }}
	s.write([]*request{r})
	if !errors.Is(r.err, cause) {
		t.Errorf("one that waited: %v", r.err)
	}
}

func TestEveryCommitIsSynced(t *testing.T) {
	s := openTest(t)
	if s.db.NoSync || s.db.NoGrowSync {
		t.Error("the default leaves out fsync")
	}
}

// A watermark of a memory that has come further would cover what is still to come.
func TestWatermarkFromBeyond(t *testing.T) {
	s := openTest(t)
	ctx := context.Background()
	if _, err := s.Update(ctx, testWrite("k")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		watermark store.Watermark
		want      error
	}{{"0", nil}, {"1", nil}, {"2", store.ErrInvalid}, {"18446744073709551616", store.ErrInvalid}, {"-1", store.ErrInvalid}} {
		r := store.Reserve{Write: testWrite("k"), PassedOver: []store.Watermark{c.watermark}}
		if _, err := s.Reserve(ctx, r); !errors.Is(err, c.want) {
			t.Errorf("watermark %q: %v, want %v", c.watermark, err, c.want)
		}
	}
}

// Check is what tests rely on: each kind of damage must be found.
func TestCheckFindsDamage(t *testing.T) {
	m := packMarks([]store.Mark{{String: "scope", Tag: "tag"}})
	due := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, damage := range map[string]func(tx *txn) error{
		"facts gone":        func(tx *txn) error { return tx.remove(tx.facts(), number(1)) },
		"key gone":          func(tx *txn) error { return tx.remove(tx.keys(), []byte("k")) },
		"key of another":    func(tx *txn) error { return tx.put(tx.keys(), []byte("k"), number(2)) },
		"key of nobody":     func(tx *txn) error { return tx.put(tx.keys(), []byte("x"), number(1)) },
		"body of nobody":    func(tx *txn) error { return tx.put(tx.bodies(), number(9), []byte("x")) },
		"mark gone":         func(tx *txn) error { return tx.remove(tx.endless(), markKey(m, 1)) },
		"mark not listed":   func(tx *txn) error { return tx.remove(tx.owned(), number(1)) },
		"mark of nobody":    func(tx *txn) error { return tx.put(tx.endless(), markKey(m, 9), number(1)) },
		"mark twice":        func(tx *txn) error { return tx.put(tx.marks(), markKey(m, 1), number(1)) },
		"mark in parts":     func(tx *txn) error { return tx.put(tx.owned(), number(1), m[1:]) },
		"marks of nobody":   func(tx *txn) error { return tx.put(tx.owned(), number(9), m) },
		"stamp to come":     func(tx *txn) error { return tx.put(tx.endless(), markKey(m, 1), number(99)) },
		"sequence behind":   func(tx *txn) error { return tx.put(tx.meta(), metaSequence, number(1)) },
		"not held":          func(tx *txn) error { return tx.remove(tx.held(), []byte("k")) },
		"held but is not":   func(tx *txn) error { return tx.put(tx.held(), []byte("other"), number(2)) },
		"not due":           func(tx *txn) error { return tx.remove(tx.due(), dueKey(due.UnixMilli(), 1)) },
		"due twice":         func(tx *txn) error { return tx.put(tx.due(), dueKey(due.UnixMilli()+1, 1), nil) },
		"sum off":           func(tx *txn) error { return tx.put(tx.sums(), []byte("m"), []byte("1.51")) },
		"sum of no entries": func(tx *txn) error { return tx.put(tx.sums(), []byte("n"), []byte("1")) },
		"sum gone":          func(tx *txn) error { return tx.remove(tx.sums(), []byte("m")) },
		"entry gone":        func(tx *txn) error { return tx.remove(tx.entries(), entryKey(1, "m")) },
		"entry of nobody":   func(tx *txn) error { return tx.put(tx.entries(), entryKey(9, "m"), []byte("0")) },
	} {
		t.Run(name, func(t *testing.T) {
			s := openTest(t)
			ctx := context.Background()
			w := testWrite("k")
			w.Record.Due = due
			w.Marks = []store.Mark{{String: "scope", Tag: "tag"}}
			w.Meters = []store.MeterEntry{{Meter: "m", Amount: "1.5"}}
			other := testWrite("other")
			other.Record.Held = false
			for _, w := range []store.Write{w, other} {
				if _, err := s.Update(ctx, w); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Check(ctx); err != nil {
				t.Fatalf("before: %v", err)
			}
			if _, err := s.submit(ctx, 0, func(tx *txn) (answer, error) { return answer{}, damage(tx) }); err != nil {
				t.Fatal(err)
			}
			if err := s.Check(ctx); err == nil {
				t.Error("nothing was found")
			}
		})
	}
}

// A caller that left may use its memory again before its write is made.
func TestStepIsACopy(t *testing.T) {
	header, body := []byte("header"), []byte("body")
	w := testWrite("k")
	w.Record.Header, w.Record.Body = header, body
	w.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
	s := newStep(w)
	copy(header, "xxxxxx")
	copy(body, "xxxx")
	w.Meters[0].Amount = "2"
	w.Record.Held = false
	if string(s.header) != "header" || string(s.body) != "body" || s.meters[0].Amount != "1" || !s.record.held {
		t.Errorf("the step changed with its caller: %+v", s)
	}
}
