package postgres

// The schema's making and its changes, by goose, once for each of them however many
// processes start at the same time.

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

//go:embed migrations/*.sql
var migrations embed.FS

// format is the version of the schema that this program works with: that of the
// last file in migrations. Programs of before refuse another one: with it nobody can go
// back, nor run both versions while one is rolled out.
const format = 1

// prepare sees to it, once, that the schema is as this program needs it.
func (s *Store) prepare(ctx context.Context) error {
	if s.prepared.Load() {
		return nil
	}
	select {
	case s.preparing <- struct{}{}:
		defer func() { <-s.preparing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.prepared.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.Timeout)
	defer cancel()
	have, err := s.format(ctx)
	if err != nil {
		return err
	}
	if have == 0 && s.memory.writes() > 0 {
		return s.lose("its tables are not there")
	}
	if have < format {
		if err := s.migrate(ctx); err != nil {
			return err
		}
		if have, err = s.format(ctx); err != nil {
			return err
		}
	}
	if have != format {
		return fmt.Errorf("schema %s has format %d, this program reads %d: run the program that made it", s.opts.Schema, have, format)
	}
	if err := s.loadLanes(ctx); err != nil {
		return err
	}
	s.prepared.Store(true)
	return nil
}

// format is that of the schema as it is; 0: nothing is there.
func (s *Store) format(ctx context.Context) (int64, error) {
	for try := 1; ; try++ {
		version, sent, err := once(ctx, s, writeID{}, func(ctx context.Context, c *pgx.Conn) (int64, error) {
			var version int64
			err := c.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied").Scan(&version)
			return version, err
		})
		var pg *pgconn.PgError
		switch {
		case err == nil:
			return version, nil
		case errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "3F000"):
			return 0, nil
		}
		if f := judge(err); f.connectionBad {
			s.pool.Reset()
			if (sent || f.nothingDone) && f.worthRepeating && try < maxTries && ctx.Err() == nil {
				continue
			}
		}
		return 0, err
	}
}

// migrate holds a lock on one connection while goose works on another: whoever comes
// meanwhile waits, and then finds nothing to do.
func (s *Store) migrate(ctx context.Context) (err error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	db := stdlib.OpenDB(*s.config.Copy(), stdlib.OptionBeforeConnect(s.password))
	defer func() { err = errors.Join(err, db.Close()) }()
	lock, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	// Its end lets go of the lock.
	defer func() { err = errors.Join(err, lock.Close()) }()
	// Of the kind of records' locks; no record's is taken together with it.
	number := s.number(digestOf("the schema's migrations"))
	if _, err := lock.ExecContext(ctx, "SELECT pg_advisory_lock($1)", number); err != nil {
		return fmt.Errorf("wait for another process's migration: %w", err)
	}
	// A role that may not make schemas can be given one.
	var there bool
	if err := lock.QueryRowContext(ctx, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", s.opts.Schema).Scan(&there); err != nil {
		return err
	}
	if !there {
		if _, err := lock.ExecContext(ctx, `CREATE SCHEMA "`+s.opts.Schema+`"`); err != nil {
			return fmt.Errorf("make schema %s: %w", s.opts.Schema, err)
		}
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}
