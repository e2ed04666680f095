package postgres

// What this process knows to be in the store, held against what is there.
//
// What survives of a database is what was committed up to some moment: an older copy of
// its files, a standby that lagged behind. So it is enough to know one's latest writes. A
// process remembers its last ones by version, and lets a row of its own in the store, its
// beat, count all of them from time to time. It looks for both on each new connection,
// before it is used, as no connection outlives the server that it was made to; and in each
// Standing. The sequence of versions tells as well, and is looked at by every question.
//
// Whoever misses a write asks and writes nothing more, for good, and gives the store
// another epoch, so that everybody else is told.

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// latest is how many writes are remembered, at least. The last one that was committed
	// must be among them: they are not acknowledged in the order of their commits, but no
	// more than there are connections come in between.
	latest = 64
	// stale is the age at which nothing more is concluded from what is not there: the
	// store takes beats and graves away after 30 days.
	stale = 20 * 24 * time.Hour
)

// acknowledged is a write that was.
type acknowledged struct {
	digest  digest
	version uint64
	// number is the process's count with it.
	number int64
	at     time.Time
}

type memory struct {
	process digest
	top     atomic.Uint64
	lost    atomic.Pointer[error]

	mu     sync.Mutex
	count  int64
	beat   int64
	beatAt time.Time
	// epochs are those that writes named, or made.
	epochs [][]byte
	// ring holds the latest writes, of each record the last; next is where the oldest is.
	ring []acknowledged
	next int
	of   map[digest]int
}

func (m *memory) init(connections int) {
	n := max(latest, 2*connections)
	m.ring, m.of = make([]acknowledged, n), make(map[digest]int, n)
	// It does not fail.
	_, _ = rand.Read(m.process[:])
}

func (m *memory) highest() uint64 { return m.top.Load() }

func (m *memory) writes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.count
}

// acknowledge remembers a write that its caller is now told of.
func (m *memory) acknowledge(d digest, version uint64, epoch string) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count++
	m.wrote(epoch)
	if version > m.top.Load() {
		m.top.Store(version)
	}
	if i, there := m.of[d]; there {
		if m.ring[i].version >= version {
			return
		}
		m.ring[i] = acknowledged{}
	}
	if old := m.ring[m.next]; old.number != 0 && m.of[old.digest] == m.next {
		delete(m.of, old.digest)
	}
	m.ring[m.next] = acknowledged{d, version, m.count, now}
	m.of[d] = m.next
	m.next = (m.next + 1) % len(m.ring)
}

// disowned notes a disowning, which was counted with its number.
func (m *memory) disowned(epoch, next string, number int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count = max(m.count+1, number)
	m.beat, m.beatAt = max(m.beat, number), time.Now()
	m.wrote(epoch)
	m.wrote(next)
}

// wrote notes the epoch of a write.
func (m *memory) wrote(epoch string) {
	if !slices.ContainsFunc(m.epochs, func(e []byte) bool { return string(e) == epoch }) {
		m.epochs = append(m.epochs, []byte(epoch))
	}
}

// beaten notes that the store counts so many writes: those up to there need no other
// evidence.
func (m *memory) beaten(writes int64) {
	if writes == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.beatAt = time.Now()
	if writes <= m.beat {
		return
	}
	m.beat = writes
	for i, a := range m.ring {
		if a.number != 0 && a.number <= writes {
			delete(m.of, a.digest)
			m.ring[i] = acknowledged{}
		}
	}
}

// recalled is what the store has to show.
type recalled struct {
	writes, beat int64
	highest      int64
	digests      []digest
	versions     []int64
}

func (m *memory) recall() recalled {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := recalled{writes: m.count, highest: int64(m.top.Load()), digests: []digest{}, versions: []int64{}}
	if time.Since(m.beatAt) < stale {
		r.beat = m.beat
	}
	for _, a := range m.ring {
		if a.number != 0 && time.Since(a.at) < stale {
			r.digests, r.versions = append(r.digests, a.digest), append(r.versions, int64(a.version))
		}
	}
	return r
}

// forgotten is set once a write is missed.
func (s *Store) forgotten() error {
	if err := s.memory.lost.Load(); err != nil {
		return *err
	}
	return nil
}

// lose is for whoever misses a write. Only the first one's finding is kept.
func (s *Store) lose(what string) error {
	err := fmt.Errorf("%w: it lacks what was acknowledged to this process: %s", store.ErrMemoryLost, what)
	if s.memory.lost.CompareAndSwap(nil, &err) {
		// Close waits for what has begun by then.
		s.memory.mu.Lock()
		if s.closing.Err() == nil {
			s.background.Go(s.disownForgetful)
		}
		s.memory.mu.Unlock()
	}
	return s.forgotten()
}

// remembers looks on a new connection for what was acknowledged.
func (s *Store) remembers(ctx context.Context, c *pgx.Conn) error {
	if err := s.forgotten(); err != nil {
		return err
	}
	m := s.memory.recall()
	if m.writes == 0 {
		return nil
	}
	var lacks *string
	err := c.QueryRow(ctx, "SELECT lacks($1, $2, $3, $4, $5)", s.memory.process, m.beat, m.highest, m.digests, m.versions).Scan(&lacks)
	switch {
	case schemaGone(err):
		return s.lose("its tables are not there")
	case err != nil:
		return fmt.Errorf("look for what was acknowledged: %w", err)
	case lacks != nil:
		return s.lose(*lacks)
	}
	return nil
}

// look is for whoever was told by a server that it ends: the one that is there now may
// have forgotten, and what is asked next is too late to say so.
func (s *Store) look(ctx context.Context, err error) {
	var pg *pgconn.PgError
	if s.memory.writes() == 0 || !errors.As(err, &pg) || connecting(err) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, fenceTime)
	defer cancel()
	c, err := s.connect(ctx, nil)
	if err != nil {
		return
	}
	// If it cannot be found out now, the next connection will.
	_ = s.remembers(ctx, c)
	_ = c.Close(ctx)
}

func schemaGone(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "42883" || pg.Code == "3F000")
}

// disownForgetful tries until it succeeds, or the store is closed.
func (s *Store) disownForgetful() {
	s.memory.mu.Lock()
	known := slices.Clone(s.memory.epochs)
	s.memory.mu.Unlock()
	next := rand.Text()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		if s.disownOnce(known, next) == nil {
			return
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-s.closing.Done():
			pause.Stop()
			return
		}
	}
}

func (s *Store) disownOnce(known [][]byte, next string) error {
	ctx, cancel := context.WithTimeout(s.closing, s.opts.Timeout)
	defer cancel()
	c, err := s.connect(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	_, err = c.Exec(ctx, "SELECT disown_forgetful($1, $2)", known, []byte(next))
	if schemaGone(err) {
		// Nobody takes that for a memory.
		return nil
	}
	return err
}
