// This file starts the servers that hold the stores: Redis and PostgreSQL as they
// must be in production as to durability, on free ports, with data of the run's own.

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// redisServer is a server that syncs every write.
type redisServer struct {
	*process
	port int
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

func (b *bench) startRedis(ctx context.Context, name string) (*redisServer, error) {
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("redis-server is missing: install the package redis-server, or leave the layer out with -layers")
	}
	dir := filepath.Join(b.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir, "--save", "",
		"--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction")
	p, err := b.launch(name, cmd)
	if err != nil {
		return nil, err
	}
	go func() { // its log is on its standard output
		for p.lines.Scan() {
		}
	}()
	s := &redisServer{process: p, port: port}
	return s, eventually(ctx, "start Redis", func() error {
		answer, err := s.cli("PING")
		if err == nil && answer != "PONG" {
			err = errors.New(answer)
		}
		return err
	})
}

func (s *redisServer) address() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

func (s *redisServer) cli(args ...string) (string, error) {
	out, err := exec.Command("redis-cli", append([]string{"-p", strconv.Itoa(s.port)}, args...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("redis-cli %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

func (s *redisServer) sync(on bool) error {
	value := map[bool]string{true: "always", false: "no"}[on]
	answer, err := s.cli("CONFIG", "SET", "appendfsync", value)
	if err == nil && answer != "OK" {
		err = errors.New(answer)
	}
	return err
}

// size is what all records take in memory.
func (s *redisServer) size(context.Context, string) (int64, error) {
	info, err := s.cli("INFO", "memory")
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
	*process
	dir  string
	port int
	cred *syscall.Credential
}

// postgresBinary finds a program of PostgreSQL.
func postgresBinary(name string) (string, error) {
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

// postgresUser is whom the server runs as: it refuses to run as root.
func postgresUser() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL does not run as root, and there is no user postgres: install the package postgresql-15: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, err
}

func (s *postgresServer) command(name string, args ...string) (*exec.Cmd, error) {
	binary, err := postgresBinary(name)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred}
	return cmd, nil
}

func (b *bench) startPostgres(ctx context.Context, name string) (*postgresServer, error) {
	cred, err := postgresUser()
	if err != nil {
		return nil, err
	}
	s := &postgresServer{dir: filepath.Join(b.dir, name), cred: cred}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, err
	}
	if cred != nil {
		if err := os.Chown(s.dir, int(cred.Uid), int(cred.Gid)); err != nil {
			return nil, err
		}
	}
	if s.port, err = freePort(); err != nil {
		return nil, err
	}
	data := filepath.Join(s.dir, "data")
	initdb, err := s.command("initdb", "-D", data, "-U", "holdfast", "-E", "UTF8", "--locale=C", "-A", "trust")
	if err != nil {
		return nil, err
	}
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	cmd, err := s.command("postgres", "-D", data, "-p", strconv.Itoa(s.port), "-k", s.dir, "-c", "listen_addresses=127.0.0.1",
		"-c", "max_connections=200", "-c", "shared_buffers=512MB", "-c", "max_wal_size=8GB")
	if err != nil {
		return nil, err
	}
	if s.process, err = b.launch(name, cmd); err != nil {
		return nil, err
	}
	return s, eventually(ctx, "start PostgreSQL", func() error { return s.exec(ctx, "SELECT 1") })
}

func (s *postgresServer) dsn() string {
	return fmt.Sprintf("host=127.0.0.1 port=%d user=holdfast dbname=postgres sslmode=disable", s.port)
}

func (s *postgresServer) exec(ctx context.Context, statements ...string) error {
	c, err := pgx.Connect(ctx, s.dsn())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(context.WithoutCancel(ctx)) }()
	for _, statement := range statements {
		if _, err := c.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// sync turns syncing on or off, for loading in bulk. What was loaded is on the disk
// afterwards, and looked at as the server does from time to time.
func (s *postgresServer) sync(ctx context.Context, on bool) error {
	if !on {
		return s.exec(ctx, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
	}
	return s.exec(ctx, "ALTER SYSTEM SET fsync = on", "SELECT pg_reload_conf()", "VACUUM ANALYZE", "CHECKPOINT")
}

// size is what a schema takes, its indexes included.
func (s *postgresServer) size(ctx context.Context, schema string) (int64, error) {
	c, err := pgx.Connect(ctx, s.dsn())
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close(context.WithoutCancel(ctx)) }()
	var size int64
	err = c.QueryRow(ctx, `SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'r'`, schema).Scan(&size)
	return size, err
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
