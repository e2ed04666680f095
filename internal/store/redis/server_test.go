package redis_test

// A real server on a Unix socket, with a data directory of the test's own.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// patience bounds every wait.
const patience = 30 * time.Second

type server struct {
	dir  string
	args []string
	cmd  *exec.Cmd
	log  bytes.Buffer
	// slow says that start need not wait until all is loaded.
	slow bool
	// gone is closed when the process has ended.
	gone chan struct{}
}

// newServer starts a server that keeps everything written before its answer, also
// when it is killed. Only with "--appendfsync always" does it outlive the machine.
func newServer(t testing.TB, args ...string) *server {
	t.Helper()
	// A socket's path must be short.
	dir, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{dir: dir, args: args}
	t.Cleanup(func() {
		s.kill(t)
		if t.Failed() {
			t.Logf("the server's log:\n%s", s.log.String())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s.start(t)
	return s
}

func (s *server) socket() string { return filepath.Join(s.dir, "socket") }

func (s *server) start(t testing.TB) {
	t.Helper()
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		t.Fatal("redis-server is missing: install the package redis-server (apt-get install redis-server)")
	}
	args := append([]string{
		"--port", "0", "--unixsocket", s.socket(), "--dir", s.dir, "--save", "", "--appendonly", "yes",
		"--appendfsync", "no", "--maxmemory-policy", "noeviction",
	}, s.args...)
	s.cmd = exec.Command(binary, args...)
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.gone = make(chan struct{})
	go func() {
		// Killed by this test, as a rule.
		_ = s.cmd.Wait()
		close(s.gone)
	}()
	s.eventually(t, "the server answers", func() error {
		answer, err := s.plain("PING")
		if err != nil || strings.HasPrefix(answer, "+PONG") || s.slow && strings.HasPrefix(answer, "-LOADING") {
			return err
		}
		return errors.New(answer)
	})
}

// plain sends one line on a connection of its own.
func (s *server) plain(line string) (string, error) {
	c, err := net.Dial("unix", s.socket())
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(c, "%s\r\n", line); err != nil {
		return "", err
	}
	b := make([]byte, 512)
	n, err := c.Read(b)
	return string(b[:n]), err
}

func (s *server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
}

func (s *server) kill(t testing.TB) {
	t.Helper()
	if s.cmd == nil {
		return
	}
	s.signal(t, syscall.SIGKILL)
	<-s.gone
	if err := os.Remove(s.socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

func (s *server) eventually(t testing.TB, what string, try func() error) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not after %s: %v\n%s", what, patience, err, s.log.String())
		}
	}
}

// client asks the server past the store.
func (s *server) client(t testing.TB) valkey.Client {
	t.Helper()
	c, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{s.socket()}, ForceSingleClient: true, DisableCache: true,
		DialCtxFn: dialSocket,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (s *server) do(t testing.TB, args ...string) valkey.ValkeyMessage {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := s.client(t)
	m, err := c.Do(ctx, c.B().Arbitrary(args...).Build()).ToMessage()
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return m
}

func (s *server) options() redis.Options {
	return redis.Options{Addresses: []string{"unix:" + s.socket()}, Namespace: "test"}
}

func (s *server) open(t testing.TB, change ...func(*redis.Options)) *redis.Store {
	t.Helper()
	opts := s.options()
	for _, c := range change {
		c(&opts)
	}
	st, err := redis.Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return st
}
