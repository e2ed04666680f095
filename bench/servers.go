// This file starts the servers that hold the stores: Redis and PostgreSQL as they
// must be in production as to durability, on free ports, with data of the run's own.

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	started "github.com/holdfast-dev/holdfast/hack/dev/process"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// host is where all servers listen.
const host = "127.0.0.1"

// redisServer is a server that syncs every write.
type redisServer struct {
	*servers.Redis
	pid int
}

// server makes one and sees to its end.
func server[S servers.Server](ctx context.Context, b *bench, name string, start func(context.Context, servers.Options) (S, error), settings map[string]string) (S, int, error) {
	dir := filepath.Join(b.dir, name)
	s, err := start(ctx, servers.Options{Dir: dir, Name: name, Settings: settings})
	if err != nil {
		return s, 0, fmt.Errorf("%w (or leave its layers out with -layers)", err)
	}
	b.servers = append(b.servers, s)
	pid, err := started.In(dir).PID(name)
	return s, pid, err
}

func (b *bench) startRedis(ctx context.Context, name string) (*redisServer, error) {
	s, pid, err := server(ctx, b, name, servers.NewRedis, nil)
	return &redisServer{s, pid}, err
}

func (s *redisServer) place(name string) place {
	return place{kind: "redis", at: s.Address(), name: name, password: s.Password()}
}

// sync turns syncing on or off, for loading in bulk. Once it is on again the log is as
// short as it can be: else the server would begin to shorten it while it is measured.
func (s *redisServer) sync(ctx context.Context, on bool) error {
	answer, err := s.Do(ctx, "CONFIG", "SET", "appendfsync", map[bool]string{true: "always", false: "no"}[on])
	if err == nil && answer != "OK" {
		err = errors.New(answer)
	}
	if err != nil || !on {
		return err
	}
	if _, err := s.Do(ctx, "BGREWRITEAOF"); err != nil {
		return err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := s.Do(ctx, "INFO", "persistence")
		if err != nil {
			return err
		}
		if strings.Contains(info, "aof_rewrite_in_progress:0") && strings.Contains(info, "aof_rewrite_scheduled:0") {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// size is what all records take in memory.
func (s *redisServer) size(ctx context.Context) (int64, error) {
	info, err := s.Do(ctx, "INFO", "memory")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); ok {
			return strconv.ParseInt(value, 10, 64)
		}
	}
	return 0, errors.New("the server does not tell its memory")
}

// postgresServer is a server as initdb makes it, with a little more memory.
type postgresServer struct {
	*servers.Postgres
	pid int
}

func (b *bench) startPostgres(ctx context.Context, name string) (*postgresServer, error) {
	s, pid, err := server(ctx, b, name, servers.NewPostgres, map[string]string{"shared_buffers": "512MB", "max_wal_size": "8GB"})
	return &postgresServer{s, pid}, err
}

func (s *postgresServer) place(name string) place {
	return place{kind: "postgres", at: s.DSN(host, s.Port()), name: name}
}

// sync turns syncing on or off, for loading in bulk. What was loaded is on the disk
// afterwards, and looked at as the server does from time to time.
func (s *postgresServer) sync(ctx context.Context, on bool) error {
	if !on {
		return s.Exec(ctx, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
	}
	return s.Exec(ctx, "ALTER SYSTEM SET fsync = on", "SELECT pg_reload_conf()", "VACUUM ANALYZE", "CHECKPOINT")
}

// size is what a schema takes, its indexes included.
func (s *postgresServer) size(ctx context.Context, schema string) (int64, error) {
	c, err := s.Connect(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close(context.WithoutCancel(ctx)) }()
	var size int64
	err = c.QueryRow(ctx, `SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'r'`, schema).Scan(&size)
	return size, err
}

// postgresProgram finds one of PostgreSQL's own.
func postgresProgram(name string) (string, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(found) > 0 {
		return found[len(found)-1], nil
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("PostgreSQL's %s is missing: install the package postgresql-15, or leave the layer out with -layers", name)
	}
	return path, nil
}

// firstLine is the first line of what a program says of itself.
func firstLine(name string, args ...string) string {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return ""
	}
	line, _, _ := bytes.Cut(out, []byte("\n"))
	return string(line)
}
