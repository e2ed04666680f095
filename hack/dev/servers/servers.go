// Package servers runs real Redis and PostgreSQL servers for a developer's machine
// and for tests: each a process with a data directory, a port and a password of its
// own, which can be stopped, killed, stood still, wiped and set back to an older copy
// of its data.
//
// Invariant: an acknowledged write is durable, as it is for a store in production
// (every write is synced before it is answered), and a signal goes to nobody but the
// server that was started here (see package process). What a test takes from a server
// it takes by one of the methods below.
//
// This file is what the two kinds have in common.
package servers

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/process"
)

const (
	// address is where all listen: no other machine reaches them.
	address = "127.0.0.1"
	// startLimit is how long a server may take until it answers, its recovery included.
	startLimit = time.Minute
	// endLimit is how long the processes of a killed server may take to be gone.
	endLimit = 15 * time.Second
	poll     = 10 * time.Millisecond
)

// Options of a server.
type Options struct {
	// Dir is the server's own directory; it is made if it is not there. PostgreSQL does
	// not run as root: whoever is root needs a directory that others may reach.
	Dir string
	// Name tells servers of one directory's processes apart; "": the kind.
	Name string
	// Port and Password are those of an earlier time; without them they are made.
	Port     int
	Password string
	// Clock lets SetClock turn the server's clock. It takes the package faketime.
	Clock bool
	// Settings are further settings, as the server's own configuration names them.
	Settings map[string]string
}

// Server is a server that can be treated badly.
type Server interface {
	// Start starts it on the data that is there, and waits until it answers.
	Start(ctx context.Context) error
	// Stop ends it in an orderly way.
	Stop(ctx context.Context) error
	// Kill ends it and all its processes at once, as a crash does.
	Kill(ctx context.Context) error
	// Pause stands it still; Resume lets it go on.
	Pause() error
	Resume() error
	// Wipe removes the data of a server that does not run, as a lost volume does.
	Wipe() error
	// Save copies the data of a server that does not run; Restore puts it back.
	Save(to string) error
	Restore(from string) error
	// SetPassword gives it another password. Connections that are open stay.
	SetPassword(ctx context.Context, password string) error
	// SetClock lets the server's clock go so far ahead of the machine's from now on.
	SetClock(ahead time.Duration) error
	// Port is on the loopback address; Password is the present one.
	Port() int
	Password() string
	// Log is the end of what it wrote.
	Log() string
	// Remove ends it and removes its directory.
	Remove(ctx context.Context) error
}

// base is what both kinds are.
type base struct {
	o         Options
	processes process.Set
	port      int
	password  string
	// user runs the server's programs: argv before theirs.
	user []string
	// uid and gid own the data; -1: whoever runs this.
	uid, gid int
}

func newBase(o Options, kind string) (base, error) {
	if o.Name == "" {
		o.Name = kind
	}
	if o.Dir == "" {
		return base{}, fmt.Errorf("%s: no directory", o.Name)
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return base{}, err
	}
	o.Dir = dir
	if o.Port == 0 {
		free, err := ports.Free(1)
		if err != nil {
			return base{}, err
		}
		o.Port = free[0]
	}
	if o.Password == "" {
		o.Password = rand.Text()
	}
	return base{o: o, processes: process.In(dir), port: o.Port, password: o.Password, uid: -1, gid: -1}, os.MkdirAll(dir, 0o755)
}

func (b *base) Port() int        { return b.port }
func (b *base) Password() string { return b.password }
func (b *base) Log() string      { return b.processes.Tail(b.o.Name, 30) }
func (b *base) data() string     { return filepath.Join(b.o.Dir, "data") }
func (b *base) clock() string    { return filepath.Join(b.o.Dir, "clock") }

// mkdir makes a directory that is the server's.
func (b *base) mkdir(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	return os.Chown(path, b.uid, b.gid)
}

// launch starts the program, unless it runs already, and waits until ready says nil.
func (b *base) launch(ctx context.Context, argv, env []string, ready func(context.Context) error) error {
	if b.o.Clock {
		library, err := faketime()
		if err != nil {
			return err
		}
		if _, err := os.Stat(b.clock()); errors.Is(err, fs.ErrNotExist) {
			if err := b.SetClock(0); err != nil {
				return err
			}
		}
		// By env, so that the library is loaded by the server's user and by nothing before it.
		// Waits go by the monotonic clock, which is left alone.
		argv = append([]string{
			"env", "LD_PRELOAD=" + library, "FAKETIME_TIMESTAMP_FILE=" + b.clock(), "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1",
		}, argv...)
	}
	if _, err := b.processes.Ensure(b.o.Name, append(append([]string{}, b.user...), argv...), env); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return b.processes.Await(ctx, b.o.Name, b.o.Name+" answered", ready)
}

func (b *base) Stop(ctx context.Context) error { return b.processes.Stop(ctx, b.o.Name) }

func (b *base) Pause() error {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	return b.processes.Pause(ctx, b.o.Name)
}

func (b *base) Resume() error { return b.processes.Kill(b.o.Name, syscall.SIGCONT) }

func (b *base) Wipe() error {
	if err := b.mustNotRun("wiped"); err != nil {
		return err
	}
	return os.RemoveAll(b.data())
}

func (b *base) Save(to string) error {
	if err := b.mustNotRun("copied"); err != nil {
		return err
	}
	return copyTree(b.data(), to)
}

func (b *base) Restore(from string) error {
	if err := b.Wipe(); err != nil {
		return err
	}
	return copyTree(from, b.data())
}

func (b *base) mustNotRun(done string) error {
	if b.processes.Running(b.o.Name) {
		return fmt.Errorf("%s runs: its data cannot be %s under it", b.o.Name, done)
	}
	return nil
}

func (b *base) SetClock(ahead time.Duration) error {
	if !b.o.Clock {
		return fmt.Errorf("%s was not made for its clock to be turned", b.o.Name)
	}
	// As a whole: the server reads it at each look at the clock.
	partial := b.clock() + ".partial"
	if err := os.WriteFile(partial, fmt.Appendf(nil, "%+.6fs\n", ahead.Seconds()), 0o644); err != nil {
		return err
	}
	return os.Rename(partial, b.clock())
}

func (b *base) Remove(ctx context.Context) error {
	return errors.Join(b.Stop(ctx), os.RemoveAll(b.o.Dir))
}

// copyTree keeps owners and times: a server refuses data that is not its own.
func copyTree(from, to string) error {
	if out, err := exec.Command("cp", "-a", "--", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s to %s: %w: %s", from, to, err, out)
	}
	return nil
}

// program finds a server's program: on the PATH, or where Debian has it.
func program(name, debian, pack string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	if found, err := filepath.Glob(debian); err == nil && len(found) > 0 {
		return found[len(found)-1], nil
	}
	return "", fmt.Errorf("%s is not here: install the package %s (Debian: apt-get install %s)", name, pack, pack)
}

// faketime is what is loaded into a server whose clock can be turned: the library, and
// the C library behind it. Redis's own allocator asks for the time before the library is
// ready to tell, so memory is taken from the C library instead.
func faketime() (string, error) {
	found, err := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if err != nil || len(found) == 0 {
		return "", errors.New("libfaketime is not here, which turns a server's clock: install the package faketime (Debian: apt-get install faketime)")
	}
	return found[0] + ":" + filepath.Join(filepath.Dir(filepath.Dir(found[0])), "libc.so.6"), nil
}

// family are a process and all that come from it, from the system's table.
func family(pid int) []int {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		// The name in parentheses may have spaces; behind it are the state and the parent.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		child, errChild := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if len(fields) < 2 || errChild != nil || fields[0] == "Z" {
			continue
		}
		if parent, err := strconv.Atoi(fields[1]); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}

// Kill stands the first process still before it looks for the others, so that there
// are no new ones meanwhile.
func (b *base) Kill(ctx context.Context) error {
	pid, err := b.processes.PID(b.o.Name)
	if err != nil {
		return err
	}
	if err := b.Pause(); err != nil {
		return err
	}
	all := family(pid)
	for _, p := range all {
		if err := syscall.Kill(p, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill process %d of %s: %w", p, b.o.Name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for _, p := range all {
		for alive(p) {
			select {
			case <-ctx.Done():
				return fmt.Errorf("process %d of %s survives SIGKILL: %w", p, b.o.Name, ctx.Err())
			case <-tick.C:
			}
		}
	}
	return nil
}

// alive says whether a process is there and more than a zombie.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	return !strings.HasPrefix(strings.TrimSpace(string(text[strings.LastIndexByte(string(text), ')')+1:])), "Z")
}
