package postgres_test

// A real PostgreSQL server for the tests: its own data directory, a free port of
// the loopback, and no mercy when it is killed.

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

// patience bounds every wait.
const patience = 60 * time.Second

// eventually polls until done says so.
func eventually(t testing.TB, what string, done func() error) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := done()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: %v", what, err)
		}
	}
}

// binary finds a program of PostgreSQL.
func binary(t testing.TB, name string) string {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(found) > 0 {
		return found[len(found)-1]
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("PostgreSQL's %s is not here: install Debian's package postgresql-15 (apt-get install postgresql-15)", name)
	}
	return path
}

// credential is whom the server runs as: it refuses to run as root.
func credential(t testing.TB) *syscall.Credential {
	t.Helper()
	if os.Getuid() != 0 {
		return nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		t.Fatalf("the tests run as root, and there is no user postgres to run the server as: install Debian's package postgresql-15: %v", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

type server struct {
	dir  string
	port int
	cred *syscall.Credential
	cmd  *exec.Cmd
	dead chan struct{}
	// settings are of the command line.
	settings []string
}

// program runs one of PostgreSQL's own.
func (s *server) program(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(binary(t, name), args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred}
	return cmd
}

func (s *server) run(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := s.program(t, name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

func (s *server) data() string { return filepath.Join(s.dir, "data") }

func emptyServer(t testing.TB, settings ...string) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "holdfast-pg-")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{dir: dir, cred: credential(t), settings: settings}
	if s.cred != nil {
		if err := os.Chown(dir, int(s.cred.Uid), int(s.cred.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	free, err := ports.Free(1)
	if err != nil {
		t.Fatal(err)
	}
	s.port = free[0]
	return s
}

// newServer is one that runs until the end of the test.
func newServer(t testing.TB, settings ...string) *server {
	t.Helper()
	s := emptyServer(t, settings...)
	t.Cleanup(s.remove)
	s.init(t)
	s.start(t)
	return s
}

func (s *server) init(t testing.TB) {
	t.Helper()
	password := filepath.Join(s.dir, "password")
	if err := os.WriteFile(password, []byte("first"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.run(t, "initdb", "-D", s.data(), "-U", "holdfast", "-E", "UTF8", "--locale=C", "--pwfile="+password, "-A", "scram-sha-256", "--no-sync")
}

func (s *server) start(t testing.TB) {
	t.Helper()
	args := []string{"-D", s.data(), "-p", strconv.Itoa(s.port), "-k", s.dir,
		"-c", "listen_addresses=127.0.0.1", "-c", "log_min_messages=warning", "-c", "log_checkpoints=off", "-c", "max_connections=100"}
	for _, setting := range s.settings {
		args = append(args, "-c", setting)
	}
	s.cmd = s.program(t, "postgres", args...)
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := make(chan struct{})
	s.dead = dead
	cmd := s.cmd
	go func() {
		_ = cmd.Wait()
		close(dead)
	}()
	eventually(t, "start the server", func() error {
		select {
		case <-dead:
			text, _ := os.ReadFile(filepath.Join(s.dir, "log"))
			t.Fatalf("the server has ended:\n%s", text)
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		c, err := pgx.Connect(ctx, s.dsn("postgres"))
		if err != nil {
			return err
		}
		return c.Close(ctx)
	})
}

func (s *server) dsn(database string) string {
	return fmt.Sprintf("host=127.0.0.1 port=%d user=holdfast password=first dbname=%s sslmode=disable", s.port, database)
}

// patient is for what has many connect at once and does not judge how long that takes.
func (s *server) patient() string { return s.dsn("postgres") + " connect_timeout=60" }

// children are the processes of the server, itself apart.
func (s *server) children() []int {
	var pids []int
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		rest := string(text[strings.LastIndexByte(string(text), ')')+1:])
		fields := strings.Fields(rest)
		if len(fields) > 1 && fields[1] == strconv.Itoa(s.cmd.Process.Pid) && fields[0] != "Z" {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// running says whether a process is more than a zombie.
func running(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	return !strings.HasPrefix(strings.TrimSpace(string(text[strings.LastIndexByte(string(text), ')')+1:])), "Z")
}

// kill ends the server and all its children at once.
func (s *server) kill(t testing.TB) {
	t.Helper()
	// Stopped first, so that it has no new ones while the old ones are counted.
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
	pids := s.children()
	_ = s.cmd.Process.Kill()
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-s.dead
	eventually(t, "the server's children end", func() error {
		for _, pid := range pids {
			if running(pid) {
				return fmt.Errorf("process %d is still there", pid)
			}
		}
		return nil
	})
}

// stop ends the server in an orderly way: SIGINT cuts its sessions off.
func (s *server) stop(t testing.TB) {
	t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.dead:
	case <-time.After(patience):
		t.Fatal("the server does not stop")
	}
}

func (s *server) remove() {
	if s.cmd != nil {
		select {
		case <-s.dead:
		default:
			_ = s.cmd.Process.Signal(syscall.SIGQUIT)
			<-s.dead
		}
	}
	_ = os.RemoveAll(s.dir)
}

// admin is a session of the server's owner.
func (s *server) admin(t testing.TB, database string) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := pgx.Connect(ctx, s.dsn(database))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (s *server) exec(t testing.TB, database string, statements ...string) {
	t.Helper()
	c := s.admin(t, database)
	for _, statement := range statements {
		if _, err := c.Exec(context.Background(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	if err := c.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// ask returns the first column of the first row.
func ask[T any](t testing.TB, c *pgx.Conn, query string, args ...any) T {
	t.Helper()
	var value T
	if err := c.QueryRow(context.Background(), query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// Most tests share a server, each with a schema of its own. It does not flush: what
// is killed are processes, not the machine.
var (
	sharedOnce sync.Once
	shared     *server
	schemas    atomic.Int64
)

func sharedServer(t testing.TB) *server {
	t.Helper()
	sharedOnce.Do(func() {
		s := emptyServer(t, "fsync=off", "full_page_writes=off")
		s.init(t)
		s.start(t)
		shared = s
	})
	if shared == nil {
		t.Fatal("the shared server could not be started")
	}
	return shared
}

func newSchema() string { return fmt.Sprintf("test_%d", schemas.Add(1)) }

func open(t testing.TB, opts postgres.Options) *postgres.Store {
	t.Helper()
	s, err := postgres.Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// servers are further ones that outlive their test.
var servers []*server

func TestMain(m *testing.M) {
	code := m.Run()
	if shared != nil {
		shared.remove()
	}
	for _, s := range servers {
		s.remove()
	}
	os.Exit(code)
}
