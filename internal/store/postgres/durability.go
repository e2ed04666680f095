package postgres

// What could lose an acknowledged write, in plain words.

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// The reasons of findings.
const (
	// IsStandby: the server takes no writes.
	IsStandby = "IsStandby"
	// NotSynced: writes are answered before they are on the disk.
	NotSynced = "NotSynced"
	// TornPages: a page that was half written cannot be repaired.
	TornPages = "TornPages"
	// AsyncStandby: a failover loses what a standby had not received.
	AsyncStandby = "AsyncStandby"
	// Unlogged: tables of the store do not survive a crash.
	Unlogged = "Unlogged"
)

// facts are what the server says of itself.
type facts struct {
	standby          bool
	fsync            string
	fullPageWrites   string
	commit           string
	synchronousNames string
	replicas         int
	notDurable       []string
}

const factsQuery = `SELECT pg_is_in_recovery(), current_setting('fsync'), current_setting('full_page_writes'),
	current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
	(SELECT count(*) FROM pg_stat_replication),
	ARRAY(SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relkind IN ('r', 'S') AND c.relpersistence <> 'p' ORDER BY 1)`

// Durability looks for what could lose an acknowledged write; none is good. It cannot
// see what the server does not know: a disk that forgets, or a standby that is
// preferred by its operator but not required.
func (s *Store) Durability(ctx context.Context) (store.Durability, error) {
	f, err := call(ctx, s, "judge durability", writeID{}, func(ctx context.Context, c *pgx.Conn) (facts, error) {
		return s.facts(ctx, c)
	})
	if errors.Is(err, errReadOnly) {
		// Is that a standby? The pool does not connect to one.
		if f, err = s.factsOfAnyServer(ctx); err == nil && !f.standby {
			return store.Durability{}, unavailable("judge durability", errReadOnly)
		}
	}
	if err != nil {
		return store.Durability{}, unavailable("judge durability", err)
	}
	return store.Durability{Findings: f.findings(), Replicated: f.replicated()}, nil
}

func (s *Store) facts(ctx context.Context, c *pgx.Conn) (facts, error) {
	var f facts
	err := c.QueryRow(ctx, factsQuery, s.opts.Schema).Scan(
		&f.standby, &f.fsync, &f.fullPageWrites, &f.commit, &f.synchronousNames, &f.replicas, &f.notDurable)
	return f, err
}

func (s *Store) factsOfAnyServer(ctx context.Context) (f facts, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	c, err := s.connect(ctx, func(config *pgx.ConnConfig) { config.ValidateConnect = nil })
	if err != nil {
		return facts{}, err
	}
	defer func() { err = errors.Join(err, c.Close(ctx)) }()
	return s.facts(ctx, c)
}

// replicated: with names in it, a commit waits for one of these standbys.
func (f facts) replicated() bool {
	return f.synchronousNames != "" && (f.commit == "on" || f.commit == "remote_apply")
}

func (f facts) findings() []store.Finding {
	var found []store.Finding
	add := func(reason, format string, args ...any) {
		found = append(found, store.Finding{Reason: reason, Loses: true, Text: fmt.Sprintf(format, args...)})
	}
	if f.standby {
		add(IsStandby, "the server is a standby: it takes no writes, point the DSN at the primary")
	}
	if f.fsync != "on" {
		add(NotSynced, "fsync is %s: acknowledged writes are lost, and the database may be damaged, when the machine fails; set fsync = on", f.fsync)
	}
	if f.fullPageWrites != "on" {
		add(TornPages, "full_page_writes is %s: a page that was half written when the machine failed cannot be repaired; set full_page_writes = on", f.fullPageWrites)
	}
	switch f.commit {
	case "on", "remote_apply":
	case "off":
		add(NotSynced, "synchronous_commit is off: writes are acknowledged before they are on disk; set synchronous_commit = on")
	default:
		if f.replicas > 0 || f.synchronousNames != "" {
			add(AsyncStandby, "synchronous_commit is %s while there are standbys: a failover loses acknowledged writes; set synchronous_commit = on", f.commit)
		}
	}
	if f.replicas > 0 && f.synchronousNames == "" {
		add(AsyncStandby, "%d replicas are attached, and synchronous_standby_names is empty: a failover to one of them loses acknowledged writes; name them in synchronous_standby_names", f.replicas)
	}
	if len(f.notDurable) > 0 {
		add(Unlogged, "not durable after a crash, because they are unlogged: %s; ALTER them with SET LOGGED", strings.Join(f.notDurable, ", "))
	}
	return found
}
