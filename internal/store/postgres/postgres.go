// Package postgres keeps records in a schema of a PostgreSQL database, for any
// number of processes at once.
//
// Each primitive is one SQL function, called in a transaction of its own; what it
// locks and why that makes writes serial is said where it is, in migrations. This
// file opens the store and holds the rules of a call:
//
//   - A call that was sent is never cancelled. PostgreSQL answers a cancelled wait
//     for a standby by showing the write to everybody although it may still be lost.
//     A caller that leaves is answered at once; its call goes on without it, within
//     the server's own limits.
//   - A write is repeated here only if the server said that nothing was written, or
//     nothing was sent. Otherwise its outcome is unknown, and the writer's to find out:
//     repeated in secret, a write that was made and then overwritten would look refused.
//   - Sessions are the store's own: behind a pooler that lends one to many clients
//     by the transaction, the settings below do not hold, and the store refuses.
package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	defaultSchema  = "holdfast"
	defaultConns   = 16
	defaultTimeout = 10 * time.Second
	connectTimeout = 5 * time.Second

	// grace is how long beyond the server's own limit an answer is waited for.
	grace = 5 * time.Second
	// maxTries bounds how often a call is made that is known to have done nothing.
	maxTries = 5
	// oldestServer is the first version that the store is tested with.
	oldestServer = 150000
)

// Options of a store.
type Options struct {
	// DSN says where the database is and who asks: a postgres:// URL or keyword=value
	// pairs. Only the parameters in allowedParameters may be in it. The environment
	// adds nothing.
	DSN string
	// RootCA are the certificates of the authorities that the server is verified by, in
	// PEM; nil: those of the machine.
	RootCA []byte
	// Password is asked for at each connection; nil: the DSN's.
	Password func(ctx context.Context) (string, error)
	// Dial connects to host:port, and resolves names; nil: a plain dialler.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// AllowSockets lets the DSN name Unix sockets. They are not dialled by Dial.
	AllowSockets bool
	// Schema holds the store, and nothing else; "": holdfast. It is made at first use
	// if the role may, and the tables in it.
	Schema string
	// MaxConns is the most connections of this process; 0: 16.
	MaxConns int
	// Timeout is the longest that the server works on one call; 0: 10 s. Beside it an
	// answer is waited for 5 s more, if the server cannot be heard.
	Timeout time.Duration
}

// Store is a store.Store in a schema of a PostgreSQL database.
type Store struct {
	opts   Options
	config *pgx.ConnConfig
	pool   *pgxpool.Pool
	seed   int64
	// place names the database and schema, for this process.
	place  string
	closed atomic.Bool
	close  sync.Once

	// prepared is set once the schema was seen to be as this program needs it;
	// preparing lets one goroutine at a time look.
	prepared  atomic.Bool
	preparing chan struct{}

	lanes  lanes
	memory memory

	// closing ends with the store, and with it what goes on in the background.
	closing    context.Context
	cancel     context.CancelFunc
	background sync.WaitGroup
}

var _ store.Store = (*Store)(nil)

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// Open takes the options and asks nothing of the server yet: one that cannot be
// reached is an ErrUnavailable of each call, until it can.
func Open(opts Options) (*Store, error) {
	if opts.Schema == "" {
		opts.Schema = defaultSchema
	}
	if !schemaName.MatchString(opts.Schema) || strings.HasPrefix(opts.Schema, "pg_") || opts.Schema == "information_schema" {
		return nil, fmt.Errorf("open store: schema %q: use a lower-case letter, then up to 62 letters, digits and _, not beginning with pg_", opts.Schema)
	}
	if opts.MaxConns == 0 {
		opts.MaxConns = defaultConns
	}
	if opts.Timeout == 0 {
		opts.Timeout = defaultTimeout
	}
	if opts.MaxConns < 1 || opts.MaxConns > 10_000 || opts.Timeout < 100*time.Millisecond || opts.Timeout > time.Hour {
		return nil, fmt.Errorf("open store: %d connections, timeout %s: use 1 to 10000 and 100ms to 1h", opts.MaxConns, opts.Timeout)
	}
	config, err := parseDSN(opts.DSN)
	if err == nil {
		err = verifyBy(config, opts.RootCA)
	}
	if err == nil && !opts.AllowSockets {
		err = refuseSockets(config)
	}
	if err == nil && opts.Dial != nil {
		dialBy(config, opts.Dial)
	}
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	s := &Store{opts: opts, seed: seed(opts.Schema), preparing: make(chan struct{}, 1)}
	s.lanes = lanes{known: map[digest]kind{}, busy: map[use]int{}, met: map[use]int{}, often: often}
	s.memory.init(opts.MaxConns)
	s.closing, s.cancel = context.WithCancel(context.Background())
	config.RuntimeParams = s.settings()
	config.OnNotice = noteUnreplicated
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler { return hangUp{c.Conn()} }
	s.config = config
	s.place = fmt.Sprint(config.Host, " ", config.Port, " ", config.Database, " ", opts.Schema)

	pool, err := pgxpool.ParseConfig("host=unused user=unused sslmode=disable")
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	pool.ConnConfig = config
	pool.MaxConns = int32(opts.MaxConns)
	pool.MinConns = 0
	pool.PingTimeout = connectTimeout
	pool.BeforeConnect = s.beforeConnect
	pool.AfterConnect = s.afterConnect
	s.pool, err = pgxpool.NewWithConfig(context.Background(), pool)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	return s, nil
}

// seed tells the locks of this store from those of others in the same database.
func seed(schema string) int64 {
	sum := sha256.Sum256([]byte("holdfast store " + schema))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// settings are those of each session. They come with its start, where neither the
// role's nor the database's defaults can undo them.
func (s *Store) settings() map[string]string {
	return map[string]string{
		"application_name": "holdfast",
		"search_path":      `"` + s.opts.Schema + `", pg_temp`,
		// The locks are made for this one.
		"default_transaction_isolation": "read committed",
		// An answer is given after the flush, and after the standbys' where they are synchronous.
		"synchronous_commit": "on",
		"statement_timeout":  milliseconds(s.opts.Timeout),
		// Shorter, so that it is told who was in the way.
		"lock_timeout":                        milliseconds(s.opts.Timeout * 4 / 5),
		"idle_in_transaction_session_timeout": milliseconds(s.opts.Timeout),
		// One plan for tables of any size: along the indexes.
		"plan_cache_mode":    "force_generic_plan",
		"enable_seqscan":     "off",
		"enable_hashjoin":    "off",
		"enable_mergejoin":   "off",
		"jit":                "off",
		"row_security":       "off",
		"client_encoding":    "UTF8",
		"DateStyle":          "ISO",
		"extra_float_digits": "0",
	}
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// hangUp ends a connection whose answer is no longer waited for.
type hangUp struct{ conn net.Conn }

func (h hangUp) HandleCancel(context.Context) {
	// Even with a network that swallows everything, closing does not wait; and what
	// was not sent yet is not sent later.
	if tcp, ok := h.conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = h.conn.SetDeadline(time.Unix(1, 0))
	_ = h.conn.Close()
}

func (hangUp) HandleUnwatchAfterCancel() {}

var errNoCancel = errors.New("a call that was sent is not cancelled")

var errPassword = errors.New("the password cannot be had")

// password asks for the one of the moment.
func (s *Store) password(ctx context.Context, config *pgx.ConnConfig) (err error) {
	if s.opts.Password == nil {
		return nil
	}
	if config.Password, err = s.opts.Password(ctx); err != nil {
		return fmt.Errorf("%w: %w", errPassword, err)
	}
	return nil
}

// connect makes a connection beside the pool's.
func (s *Store) connect(ctx context.Context, change func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	config := s.config.Copy()
	if change != nil {
		change(config)
	}
	if err := s.password(ctx, config); err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, config)
}

// beforeConnect keeps the connection from dialling again once it stands: that would
// be to cancel what it was asked.
func (s *Store) beforeConnect(ctx context.Context, config *pgx.ConnConfig) error {
	if err := s.password(ctx, config); err != nil {
		return err
	}
	dial, stands := config.DialFunc, new(atomic.Bool)
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if stands.Load() {
			return nil, errNoCancel
		}
		return dial(ctx, network, address)
	}
	validate := config.ValidateConnect
	config.ValidateConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		if err := validate(ctx, c); err != nil {
			return err
		}
		stands.Store(true)
		return nil
	}
	return nil
}

// unreplicated is set among a connection's data once it was told that a commit is
// on its disk, but perhaps on no standby's.
const unreplicated = "holdfast.unreplicated"

// noteUnreplicated takes every warning for that one: it has no code of its own, its
// text is translated, and no function of the store warns of anything.
func noteUnreplicated(c *pgconn.PgConn, n *pgconn.Notice) {
	if n.SeverityUnlocalized == "WARNING" {
		c.CustomData()[unreplicated] = n.Message
	}
}

// afterConnect looks at what it is connected to.
func (s *Store) afterConnect(ctx context.Context, c *pgx.Conn) error {
	var version int
	own := session{pid: c.PgConn().PID()}
	var timeout, isolation, commit, system string
	err := c.QueryRow(ctx, `SELECT current_setting('server_version_num')::int,
		extract(epoch FROM current_setting('statement_timeout')::interval)::numeric * 1000,
		current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
		(SELECT set_config('holdfast.incarnation', system_identifier || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), false) FROM pg_control_system()),
		(SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())`,
	).Scan(&version, &timeout, &isolation, &commit, &system, &own.started)
	if err != nil {
		return fmt.Errorf("look at the server: %w", err)
	}
	if version < oldestServer {
		return fmt.Errorf("the server has version %d.%d: PostgreSQL %d or newer is needed", version/10000, version%10000, oldestServer/10000)
	}
	// What it warned of so far was of the connection.
	delete(c.PgConn().CustomData(), unreplicated)
	c.PgConn().CustomData()[sessionData] = own
	wait, err := strconv.ParseFloat(timeout, 64)
	if err != nil || int64(wait) != s.opts.Timeout.Milliseconds() || isolation != "read committed" || commit != "on" {
		return errors.New("the session does not have the settings that it was started with: connect to the server itself, or to a pooler in session mode")
	}
	return s.remembers(ctx, c)
}

// Close ends the use of the store. Calls that were sent are waited for.
func (s *Store) Close() error {
	s.close.Do(func() {
		s.closed.Store(true)
		s.memory.mu.Lock()
		s.cancel()
		s.memory.mu.Unlock()
		s.pool.Close()
		s.background.Wait()
	})
	return nil
}

var (
	errBusy         = errors.New("all connections of this process are in use: look for slow calls, or allow more connections")
	errClosed       = errors.New("the store is closed")
	errUnreplicated = errors.New("the wait for a standby was cut short by an administrator: the write may be lost if the server is")
)

// call makes one call of the database, on a connection of its own. What do returns
// must not be shared with its caller, who may have left before it ends. With an id it
// is a write, whose unknown outcome is its writer's to find out; without one it can
// be made again.
func call[T any](ctx context.Context, s *Store, doing string, id writeID, do func(context.Context, *pgx.Conn) (T, error)) (T, error) {
	var none T
	for try := 1; ; try++ {
		if err := s.usable(ctx); err != nil {
			return none, unavailable(doing, err)
		}
		if err := awaitEarlier(ctx, id); err != nil {
			return none, unavailable(doing+": an earlier copy of this write is under way", err)
		}
		if err := s.prepare(ctx); err != nil {
			return none, unavailable(doing+": prepare the schema", err)
		}
		value, sent, err := once(ctx, s, id, do)
		if lost := s.forgotten(); lost != nil {
			return none, lost
		}
		if err == nil {
			return value, nil
		}
		if ctxErr := ctx.Err(); ctxErr != nil {
			return none, unavailable(doing, errors.Join(ctxErr, err))
		}
		f := judge(err)
		if f.schemaGone {
			s.prepared.Store(false)
		}
		if f.connectionBad {
			s.pool.Reset()
			if s.look(ctx, err); s.forgotten() != nil {
				return none, s.forgotten()
			}
		}
		again := f.nothingDone || (f.connectionBad && (!sent || id == writeID{}))
		if !again || !f.worthRepeating || try == maxTries {
			return none, unavailable(doing, err)
		}
	}
}

// once waits for a connection no longer than the caller does, and for an answer no
// longer either; but the call then goes on.
func once[T any](ctx context.Context, s *Store, id writeID, do func(context.Context, *pgx.Conn) (T, error)) (value T, sent bool, err error) {
	var none T
	waitCtx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	conn, err := s.pool.Acquire(waitCtx)
	if err != nil && errors.Is(err, context.DeadlineExceeded) && waitCtx.Err() != nil && !connecting(err) {
		err = errors.Join(errBusy, err)
	}
	cancel()
	if err != nil {
		return none, false, fmt.Errorf("connect: %w", err)
	}
	type answer struct {
		value T
		err   error
	}
	done, ended := make(chan answer, 1), make(chan struct{})
	go func() {
		defer close(ended)
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.Timeout+grace)
		defer cancel()
		defer conn.Release()
		value, err := do(callCtx, conn.Conn())
		if id != (writeID{}) {
			s.fence(conn.Conn(), err)
		}
		if pg := conn.Conn().PgConn(); pg.CustomData()[unreplicated] != nil {
			err = errors.Join(fmt.Errorf("%w: the server warns: %v", errUnreplicated, pg.CustomData()[unreplicated]), err)
			_ = pg.Close(callCtx)
		}
		done <- answer{value, err}
	}()
	select {
	case a := <-done:
		return a.value, !pgconn.SafeToRetry(a.err), a.err
	case <-ctx.Done():
		if id != (writeID{}) {
			leave(id, ended)
		}
		return none, true, ctx.Err()
	}
}

// usable says why nothing can be asked, if so.
func (s *Store) usable(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.closed.Load() {
		return errClosed
	}
	return s.forgotten()
}
