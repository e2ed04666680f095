package postgres

// Writes that come late. A writer that has left, or lost its connection, repeats its
// write with the same nonce and takes the answer as the last word: refused means that
// it was never made and never will be. An earlier copy of it that begins only after
// that answer would break this. So a copy that was sent and not answered is either
// waited for, or its session is ended, before the next one is sent. One that has
// begun needs no care: it has the record's lock, or is before the next one in its queue.

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// writeID is one write; the zero value is of none. Stores of one process that are
// opened for the same place share it.
type writeID struct{ place, key, nonce string }

// left holds the writes whose callers have left, until they end.
var left = struct {
	sync.Mutex
	writes map[writeID]chan struct{}
}{writes: map[writeID]chan struct{}{}}

func leave(id writeID, ended chan struct{}) {
	left.Lock()
	left.writes[id] = ended
	left.Unlock()
	go func() {
		<-ended
		left.Lock()
		defer left.Unlock()
		if left.writes[id] == ended {
			delete(left.writes, id)
		}
	}()
}

// awaitEarlier waits until no earlier copy of the write is under way in this process.
func awaitEarlier(ctx context.Context, id writeID) error {
	left.Lock()
	ended := left.writes[id]
	left.Unlock()
	if ended == nil {
		return nil
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// session is one of the server's, told from a later one with the same number.
type session struct {
	pid     uint32
	started time.Time
}

const sessionData = "holdfast.session"

// fenceTime bounds how long a lost session is looked for. A server that does not
// answer by then is cut off from this process: nothing more reaches that session either.
const fenceTime = 2 * time.Second

// fence ends the session of a connection that was lost with a write under way. One
// that waits for a standby has made its write and is left alone: ended, it would show
// what may yet be lost.
func (s *Store) fence(c *pgx.Conn, err error) {
	lost, known := c.PgConn().CustomData()[sessionData].(session)
	var pg *pgconn.PgError
	if err == nil || !known || errors.As(err, &pg) || pgconn.SafeToRetry(err) || !c.PgConn().IsClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), fenceTime)
	defer cancel()
	other, err := s.connect(ctx, func(config *pgx.ConnConfig) { config.ConnectTimeout = fenceTime })
	if err != nil {
		return
	}
	defer func() { _ = other.Close(ctx) }()
	_, _ = other.Exec(ctx, `SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
		WHERE pid = $1 AND backend_start = $2 AND wait_event IS DISTINCT FROM 'SyncRep'`, lost.pid, lost.started)
	// The server that is there now may be one that has forgotten. If that cannot be found
	// out now, the next connection will.
	_ = s.remembers(ctx, other)
}
