// Package bolt keeps records in one bbolt file, for the one process that owns it.
//
// This file opens the store and holds its two rules of order:
//
//   - One goroutine writes. It applies all requests that wait, one after the
//     other, in one bolt transaction and so with one fsync, and answers after
//     the commit. A request either changes nothing or makes its whole step.
//   - Nobody reads what is not yet durable. bbolt's new root is visible as soon
//     as it is written, which is before it is synced; the fence keeps readers out
//     in between. Otherwise a writer that lost its reply could recognise its
//     write, send the payment, and lose the write to a power failure.
package bolt

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sync/semaphore"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// maxGroup and maxGroupBytes bound what one transaction takes on.
	maxGroup      = 256
	maxGroupBytes = 8 << 20

	defaultLockWait = 5 * time.Second
)

// Options of a store. The zero value is right for production.
type Options struct {
	// LockWait is how long Open waits for another process to let go of the file; 0: 5 s.
	LockWait time.Duration
	// Clock is the store's time; nil: time.Now. For tests and simulations.
	Clock func() time.Time
	// NoSync leaves out fsync. UNSAFE: acknowledged writes are lost, and the file
	// may be damaged, when the machine fails. For simulations only.
	NoSync bool
}

// Store is a store.Store in one file.
type Store struct {
	db    *bbolt.DB
	clock func() time.Time

	requests chan *request
	closing  chan struct{}
	stopped  chan struct{}
	close    sync.Once
	closeErr error

	// fence is held whole during a commit, and by one while a reader takes its snapshot.
	fence *semaphore.Weighted
	// broken is set when it is not known whether a commit has reached the disk.
	// What memory shows may then not be there after a crash: nothing is answered
	// until the file is opened anew.
	broken atomic.Pointer[error]
}

var _ store.Store = (*Store)(nil)

// answer is what a request comes to; one of its fields is used.
type answer struct {
	result   store.Result
	identity store.Identity
}

type request struct {
	ctx  context.Context
	size int
	// run checks first and writes then. It can be called again after its
	// transaction was rolled back, so it keeps nothing from one call to the next.
	run func(*txn) (answer, error)

	answer answer
	err    error
	done   chan struct{}
}

// Open opens the store in the file at path, and makes it if it is not there. One
// process at a time can have it open.
func Open(path string, opts Options) (*Store, error) {
	if opts.LockWait <= 0 {
		opts.LockWait = defaultLockWait
	}
	if opts.Clock == nil {
		opts.Clock = time.Now
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout:      opts.LockWait,
		FreelistType: bbolt.FreelistMapType,
		NoSync:       opts.NoSync,
		NoGrowSync:   opts.NoSync,
	})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("open store %s: waited %s: the file is in use by %s; the embedded store belongs to one process: stop that one, or run a single replica", path, opts.LockWait, lockHolder(path))
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch), errors.Is(err, berrors.ErrChecksum):
		return nil, fmt.Errorf("open store %s: this is not a store's file, or it is damaged: restore it from a copy, or name another path: %w", path, err)
	case err != nil:
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	s := &Store{
		db:       db,
		clock:    opts.Clock,
		requests: make(chan *request),
		closing:  make(chan struct{}),
		stopped:  make(chan struct{}),
		fence:    semaphore.NewWeighted(math.MaxInt64),
	}
	if err := prepare(db); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", path, err), db.Close())
	}
	if !opts.NoSync {
		if err := syncDir(filepath.Dir(path)); err != nil {
			return nil, errors.Join(fmt.Errorf("open store %s: make its directory entry durable: %w", path, err), db.Close())
		}
	}
	go s.serve()
	return s, nil
}

// prepare makes the buckets of a new file and refuses a file of another format.
func prepare(db *bbolt.DB) error {
	empty := true
	err := db.View(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(buckets[inMeta])
		if meta == nil {
			return tx.ForEach(func([]byte, *bbolt.Bucket) error {
				empty = false
				return errors.New("this is a bbolt file of another program: name another path")
			})
		}
		empty = false
		if have := string(meta.Get(metaFormat)); have != format {
			return fmt.Errorf("the file has format %q, this program reads %q: run the program that made it", have, format)
		}
		for _, name := range buckets {
			if tx.Bucket(name) == nil {
				return fmt.Errorf("the file is damaged: bucket %s is missing: restore it from a copy", name)
			}
		}
		return nil
	})
	if err != nil || !empty {
		return err
	}
	return db.Update(func(tx *bbolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return tx.Bucket(buckets[inMeta]).Put(metaFormat, []byte(format))
	})
}

// syncDir makes a new file's name survive a failure of the machine.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Close ends the use of the store. Requests that are being written are answered first.
func (s *Store) Close() error {
	s.close.Do(func() {
		close(s.closing)
		<-s.stopped
		s.closeErr = s.db.Close()
	})
	return s.closeErr
}

func unavailable(doing string, cause error) error {
	return fmt.Errorf("%w: %s: %w", store.ErrUnavailable, doing, cause)
}

var errClosed = errors.New("the store is closed")

// usable says why nothing can be asked, if so.
func (s *Store) usable(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return unavailable("ask the store", err)
	}
	select {
	case <-s.closing:
		return unavailable("ask the store", errClosed)
	default:
	}
	if cause := s.broken.Load(); cause != nil {
		return unavailable("a commit failed half way, restart the process to recover", *cause)
	}
	return nil
}

// now is the store's time, as it is kept.
func (s *Store) now() time.Time {
	return s.clock().UTC().Truncate(time.Microsecond)
}

// submit hands a request to the writer and waits for its answer. A caller that
// leaves may have its write made all the same.
func (s *Store) submit(ctx context.Context, size int, run func(*txn) (answer, error)) (answer, error) {
	if err := s.usable(ctx); err != nil {
		return answer{}, err
	}
	r := &request{ctx: ctx, size: size, run: run, done: make(chan struct{})}
	select {
	case s.requests <- r:
	case <-s.closing:
		return answer{}, unavailable("ask the store", errClosed)
	case <-ctx.Done():
		return answer{}, unavailable("wait for the writer", ctx.Err())
	}
	select {
	case <-r.done:
		return r.answer, r.err
	case <-ctx.Done():
		return answer{}, unavailable("wait for the write", ctx.Err())
	}
}

// serve is the writer.
func (s *Store) serve() {
	defer close(s.stopped)
	for {
		select {
		case <-s.closing:
			return
		case r := <-s.requests:
			group := s.gather(r)
			s.write(group)
			for _, r := range group {
				close(r.done)
			}
		}
	}
}

// gather takes the requests that are waiting now. Those that were just answered
// are often about to come back: it lets them run before it goes on without them.
func (s *Store) gather(first *request) []*request {
	group, size := []*request{first}, first.size
	for seen := 0; len(group) < maxGroup && size < maxGroupBytes; {
		select {
		case r := <-s.requests:
			group = append(group, r)
			size += r.size
		default:
			if seen == len(group) {
				return group
			}
			seen = len(group)
			runtime.Gosched()
		}
	}
	return group
}

// write runs a group in one transaction. A request that fails in the middle of
// its step takes the transaction with it; the others then run again without it.
func (s *Store) write(group []*request) {
	failed := make(map[*request]bool)
	for {
		culprit, err := s.attempt(group, failed)
		if culprit == nil {
			if err != nil {
				for _, r := range group {
					if !failed[r] {
						r.answer, r.err = answer{}, err
					}
				}
			}
			return
		}
		culprit.answer, culprit.err = answer{}, unavailable("write", err)
		failed[culprit] = true
	}
}

// attempt runs the requests of a group that have not failed, and commits. It
// returns the request that broke the transaction, or why nothing was committed.
func (s *Store) attempt(group []*request, failed map[*request]bool) (*request, error) {
	if cause := s.broken.Load(); cause != nil {
		return nil, unavailable("a commit failed half way, restart the process to recover", *cause)
	}
	btx, err := s.db.Begin(true)
	if err != nil {
		return nil, unavailable("begin a transaction", err)
	}
	tx := newTxn(btx, s.now)
	for _, r := range group {
		if failed[r] {
			continue
		}
		if err := r.ctx.Err(); err != nil {
			r.answer, r.err = answer{}, unavailable("wait for the writer", err)
			continue
		}
		before := tx.changes
		r.answer, r.err = r.run(tx)
		if r.err != nil && tx.changes != before {
			if err := btx.Rollback(); err != nil {
				return nil, unavailable("roll back", err)
			}
			return r, r.err
		}
	}
	if tx.changes == 0 {
		if err := btx.Rollback(); err != nil {
			return nil, unavailable("end a transaction", err)
		}
		return nil, nil
	}
	return nil, s.commit(btx)
}

func (s *Store) commit(btx *bbolt.Tx) error {
	if err := s.fence.Acquire(context.Background(), math.MaxInt64); err != nil {
		return unavailable("wait for readers", err)
	}
	defer s.fence.Release(math.MaxInt64)
	id := btx.ID()
	err := btx.Commit()
	if err == nil {
		return nil
	}
	// Before the new root was written, nothing has happened and writing can go on
	// once there is space again. After it, only a new look at the disk can tell.
	if seen, viewErr := s.lastCommit(); viewErr != nil || seen >= id {
		cause := errors.Join(err, viewErr)
		s.broken.Store(&cause)
	}
	return unavailable("commit", err)
}

// lastCommit is the number of the transaction that readers see.
func (s *Store) lastCommit() (int, error) {
	btx, err := s.db.Begin(false)
	if err != nil {
		return 0, err
	}
	return btx.ID(), btx.Rollback()
}

// view runs fn on a durable snapshot.
func (s *Store) view(ctx context.Context, fn func(*txn) error) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err := s.fence.Acquire(ctx, 1); err != nil {
		return unavailable("wait for a commit", err)
	}
	if err := s.usable(ctx); err != nil {
		s.fence.Release(1)
		return err
	}
	btx, err := s.db.Begin(false)
	s.fence.Release(1)
	if err != nil {
		return unavailable("begin to read", err)
	}
	return errors.Join(fn(newTxn(btx, s.now)), btx.Rollback())
}
