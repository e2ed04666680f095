// PostgreSQL: fsync on, passwords as SCRAM, over TCP.

package servers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
)

const (
	owner = "holdfast"
	// version is the one that Debian's package is of.
	postgresPackage = "postgresql-15"
)

// Postgres is a PostgreSQL server.
type Postgres struct{ base }

var _ Server = (*Postgres)(nil)

// NewPostgres makes a server with an empty database holdfast, and starts it.
func NewPostgres(ctx context.Context, o Options) (*Postgres, error) {
	b, err := newBase(o, "postgres")
	if err != nil {
		return nil, err
	}
	p := &Postgres{base: b}
	if os.Geteuid() == 0 {
		if err := p.runAs("postgres"); err != nil {
			return nil, err
		}
	}
	return p, p.Start(ctx)
}

// runAs is for root, as whom the server refuses to run.
func (p *Postgres) runAs(name string) error {
	u, err := user.Lookup(name)
	if err != nil {
		return fmt.Errorf("this runs as root, and there is no user %s to run PostgreSQL as: install the package %s: %w", name, postgresPackage, err)
	}
	if p.uid, err = strconv.Atoi(u.Uid); err != nil {
		return err
	}
	if p.gid, err = strconv.Atoi(u.Gid); err != nil {
		return err
	}
	// It becomes the server: the pid stays the same.
	p.user = []string{"setpriv", "--reuid=" + u.Uid, "--regid=" + u.Gid, "--clear-groups"}
	return os.Chown(p.o.Dir, p.uid, p.gid)
}

func (p *Postgres) tool(name string) (string, error) {
	return program(name, "/usr/lib/postgresql/*/bin/"+name, postgresPackage)
}

// run runs one of PostgreSQL's programs to its end.
func (p *Postgres) run(ctx context.Context, name string, args ...string) error {
	binary, err := p.tool(name)
	if err != nil {
		return err
	}
	argv := append(append(slices.Clone(p.user), binary), args...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = p.o.Dir
	cmd.Env = p.env()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}

func (p *Postgres) env() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
}

// Start starts it; where there is no data it makes a new cluster first.
func (p *Postgres) Start(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(p.data(), "PG_VERSION")); err != nil {
		if err := p.initialise(ctx); err != nil {
			return err
		}
	}
	binary, err := p.tool("postgres")
	if err != nil {
		return err
	}
	settings := map[string]string{
		"listen_addresses": address, "port": strconv.Itoa(p.port), "unix_socket_directories": "", "max_connections": "400",
		"log_min_messages": "warning", "log_checkpoints": "off", "password_encryption": "scram-sha-256",
	}
	maps.Copy(settings, p.o.Settings)
	argv := []string{binary, "-D", p.data()}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		argv = append(argv, "-c", name+"="+settings[name])
	}
	if err := p.launch(ctx, argv, []string{"LC_ALL=C", "TZ=UTC"}, func(ctx context.Context) error {
		c, err := p.Connect(ctx)
		if err != nil {
			return err
		}
		return c.Close(ctx)
	}); err != nil {
		return err
	}
	return nil
}

func (p *Postgres) initialise(ctx context.Context) error {
	// Its parent is a place where initdb's user may make it.
	secret := filepath.Join(p.o.Dir, "password")
	if err := os.WriteFile(secret, []byte(p.password), 0o600); err != nil {
		return err
	}
	defer func() { _ = os.Remove(secret) }()
	if err := os.Chown(secret, p.uid, p.gid); err != nil {
		return err
	}
	return p.run(ctx, "initdb", "-D", p.data(), "-U", owner, "-E", "UTF8", "--locale=C", "--pwfile="+secret, "-A", "scram-sha-256", "--no-sync")
}

// Stop is the server's fast shutdown: it cuts its sessions off, and ends.
func (p *Postgres) Stop(ctx context.Context) error {
	if p.processes.Running(p.o.Name) {
		if err := p.processes.Kill(p.o.Name, syscall.SIGINT); err != nil {
			return err
		}
	}
	return p.base.Stop(ctx)
}

// Remove ends it and removes its directory.
func (p *Postgres) Remove(ctx context.Context) error {
	return errors.Join(p.Stop(ctx), p.base.Remove(ctx))
}

// Pause stands all its processes still: a session serves without the first one.
func (p *Postgres) Pause() error { return p.signalAll(syscall.SIGSTOP) }

// Resume lets them go on.
func (p *Postgres) Resume() error { return p.signalAll(syscall.SIGCONT) }

func (p *Postgres) signalAll(signal syscall.Signal) error {
	pid, err := p.processes.PID(p.o.Name)
	if err != nil {
		return err
	}
	// The first one makes the others: it is stood still before they are looked for.
	if err := p.processes.Kill(p.o.Name, signal); err != nil {
		return err
	}
	for _, child := range family(pid)[1:] {
		if err := syscall.Kill(child, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// DSN is of the database at an address, its own or a proxy's.
func (p *Postgres) DSN(host string, port int) string { return DSN(host, port, p.password) }

// DSN is of the database of such a server.
func DSN(host string, port int, password string) string {
	return fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=postgres sslmode=disable", host, port, owner, password)
}

// Connect opens a session of the owner, past the store.
func (p *Postgres) Connect(ctx context.Context) (*pgx.Conn, error) {
	return pgx.Connect(ctx, p.DSN(address, p.port))
}

// Exec runs statements.
func (p *Postgres) Exec(ctx context.Context, statements ...string) (err error) {
	c, err := p.Connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close(ctx)) }()
	for _, s := range statements {
		if _, err := c.Exec(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// SetPassword changes the owner's password.
func (p *Postgres) SetPassword(ctx context.Context, password string) error {
	if err := p.Exec(ctx, "ALTER ROLE "+owner+" PASSWORD '"+strings.ReplaceAll(password, "'", "''")+"'"); err != nil {
		return err
	}
	p.password = password
	return nil
}

// Standby makes a server that follows this one without being waited for, from a copy
// of its present data.
func (p *Postgres) Standby(ctx context.Context, o Options) (*Postgres, error) {
	b, err := newBase(o, "postgres")
	if err != nil {
		return nil, err
	}
	s := &Postgres{base: b}
	s.password, s.user, s.uid, s.gid = p.password, p.user, p.uid, p.gid
	if err := os.Chown(s.o.Dir, s.uid, s.gid); err != nil {
		return nil, err
	}
	from := fmt.Sprintf("host=%s port=%d user=%s password=%s", address, p.port, owner, p.password)
	if err := s.run(ctx, "pg_basebackup", "-d", from, "-D", s.data(), "-R", "-X", "stream", "-c", "fast", "--no-sync"); err != nil {
		return nil, err
	}
	return s, s.Start(ctx)
}

// Promote makes a standby a primary with what it has.
func (p *Postgres) Promote(ctx context.Context) error {
	return p.Exec(ctx, "SELECT pg_promote(true)")
}
