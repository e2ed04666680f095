package postgres

// What an error means: whether something may have been written, whether to try
// again, and what a person should look at.

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// judgement of an error.
type judgement struct {
	// nothingDone: the server said that it has undone the call.
	nothingDone bool
	// worthRepeating: another try may end differently at once.
	worthRepeating bool
	// connectionBad: the others in the pool may be as bad.
	connectionBad bool
	// schemaGone: something of the schema is not there.
	schemaGone bool
}

func judge(err error) judgement {
	if errors.Is(err, errUnreplicated) || errors.Is(err, errBusy) || errors.Is(err, errPassword) {
		return judgement{}
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return judgement{worthRepeating: !connecting(err), connectionBad: true}
	}
	j := judgement{nothingDone: pg.Severity == "ERROR" || pg.SeverityUnlocalized == "ERROR"}
	switch {
	case pg.Code == "40001", pg.Code == "40P01", pg.Code == "23505":
		// Serialisation, deadlock, and a unique index: the other one is done now.
		j.worthRepeating = true
	case pg.Code == "25006", pg.Code == "55000":
		// The primary has moved; new connections look for it.
		j.worthRepeating, j.connectionBad = true, true
	case pg.Code == "0A000", pg.Code == "26000":
		// What the session had prepared is of no use any more.
		j.worthRepeating, j.connectionBad = true, true
	case pg.Code == "42P01", pg.Code == "42883", pg.Code == "3F000":
		j.worthRepeating, j.schemaGone = true, true
	case strings.HasPrefix(pg.Code, "57P"), strings.HasPrefix(pg.Code, "08"):
		j.worthRepeating, j.connectionBad = !connecting(err), true
	}
	return j
}

// connecting says that there was no connection to begin with: an immediate second
// try is no better than the first.
func connecting(err error) bool {
	var c *pgconn.ConnectError
	return errors.As(err, &c)
}

// unavailable is what every failure becomes, with what to look at.
func unavailable(doing string, cause error) error {
	if errors.Is(cause, store.ErrUnavailable) || errors.Is(cause, store.ErrMemoryLost) || errors.Is(cause, store.ErrInvalid) {
		return cause
	}
	if hint := hint(cause); hint != "" {
		return fmt.Errorf("%w: %s: %w: %s", store.ErrUnavailable, doing, cause, hint)
	}
	return fmt.Errorf("%w: %s: %w", store.ErrUnavailable, doing, cause)
}

func hint(cause error) string {
	var pg *pgconn.PgError
	if !errors.As(cause, &pg) {
		return ""
	}
	switch pg.Code {
	case "25006", "55000":
		return "the server is read-only: point the DSN at the primary, or name all servers in it"
	case "53100":
		return "the server's disk is full: make space"
	case "53200":
		return "the server is out of memory: if it says shared memory, raise max_locks_per_transaction"
	case "53300":
		return "the server has no connection left: raise max_connections, or lower this process's share"
	case "53400":
		return "a configured limit of the server is reached"
	case "55P03":
		return "another write of the same record, scope or meter was in the way: look for a slow commit or a session that hangs"
	case "57014":
		return "the server did not finish in time: look at its load and disks"
	case "57P01", "57P02", "57P03":
		return "the server is stopping, starting or failing over"
	case "28P01", "28000":
		return "the server does not accept this role or password: look at the credentials in the DSN"
	case "3D000":
		return "there is no such database: make it, or correct the DSN"
	case "42501":
		return "the role lacks a right: it needs CREATE on the database, or must own the schema"
	}
	return ""
}
