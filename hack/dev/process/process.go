// Package process starts programs that outlive their starter, and finds and ends
// them again from another process.
//
// Invariant: a signal only ever goes to a process that this package started. A
// process is known by its pid and the moment it started, so that a pid which the
// system has given to somebody else since is never taken for ours.
package process

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"
)

// ErrNotRunning says that no process of that name is running.
var ErrNotRunning = errors.New("not running")

const (
	// poll is how often a process that should end is looked at.
	poll = 20 * time.Millisecond
	// pausePoll is how often one that should stand still is looked at.
	pausePoll = time.Millisecond
	// askLimit is how long one question whether a process is ready may take.
	askLimit = 2 * time.Second
	// grace is how long a process may take after SIGTERM before SIGKILL.
	grace = 15 * time.Second
)

// Set is the processes of one state directory: run/ has a file for each, logs/
// what they wrote.
type Set struct {
	run, logs string
}

// In returns the processes of a state directory.
func In(dir string) Set {
	return Set{run: filepath.Join(dir, "run"), logs: filepath.Join(dir, "logs")}
}

// record is what is kept of a started process.
type record struct {
	PID     int    `json:"pid"`
	Started string `json:"started"`
	// Spec is a hash of program, arguments and environment: it tells whether the
	// running one is what is wanted now. A hash, as the environment may have secrets.
	Spec string   `json:"spec"`
	Argv []string `json:"argv"`
}

// Start starts a program in the background under a name. It gets a session of
// its own, so that no signal to the starter's terminal or group reaches it; env
// comes on top of the starter's environment; its output goes to Log(name).
func (s Set) Start(name string, argv, env []string) error {
	if s.Running(name) {
		return fmt.Errorf("%s is already running", name)
	}
	_, err := s.Ensure(name, argv, env)
	return err
}

// Ensure starts the program unless it is running already with the same program
// file, arguments and environment; one that differs is ended first.
func (s Set) Ensure(name string, argv, env []string) (started bool, err error) {
	if len(argv) == 0 {
		return false, fmt.Errorf("%s: no program", name)
	}
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	if program, err = filepath.Abs(program); err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	spec, err := specOf(program, argv[1:], env)
	if err != nil {
		return false, fmt.Errorf("%s: %w", name, err)
	}
	if old, err := s.read(name); err == nil && old.alive() {
		if old.Spec == spec {
			return false, nil
		}
		if err := s.Stop(context.Background(), name); err != nil {
			return false, err
		}
	}
	for _, dir := range []string{s.run, s.logs} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return false, err
		}
	}
	log, err := os.OpenFile(s.Log(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, log.Close()) }()

	cmd := exec.Command(program, argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return false, fmt.Errorf("starting %s: %w", name, err)
	}
	born, ok := startOf(cmd.Process.Pid)
	// Collects the exit status as long as the starter lives; without it an ended
	// process would stay in the table.
	go func() { _ = cmd.Wait() }()
	if !ok {
		return false, fmt.Errorf("%s ended at once\n%s", name, s.Tail(name, 20))
	}
	if err := s.write(name, record{PID: cmd.Process.Pid, Started: born, Spec: spec, Argv: append([]string{program}, argv[1:]...)}); err != nil {
		// A process that no later command could find must not be left behind.
		return false, errors.Join(err, cmd.Process.Kill())
	}
	return true, nil
}

// Running says whether the process is alive.
func (s Set) Running(name string) bool {
	r, err := s.read(name)
	return err == nil && r.alive()
}

// PID returns the pid of a running process.
func (s Set) PID(name string) (int, error) {
	r, err := s.read(name)
	if err != nil || !r.alive() {
		return 0, fmt.Errorf("%s: %w", name, ErrNotRunning)
	}
	return r.PID, nil
}

// Argv is the command line of a running process; nil if it is not running.
func (s Set) Argv(name string) []string {
	r, err := s.read(name)
	if err != nil || !r.alive() {
		return nil
	}
	return r.Argv
}

// Kill sends a signal. It does not wait.
func (s Set) Kill(name string, signal syscall.Signal) error {
	r, err := s.read(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, ErrNotRunning)
	}
	if err := r.signal(signal); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Pause stops a process with SIGSTOP and returns once it stands still: the signal is one
// thread's to take, and until that one has run all others go on. SIGCONT lets it go on.
func (s Set) Pause(ctx context.Context, name string) error {
	if err := s.Kill(name, syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		pid, err := s.PID(name)
		if err != nil {
			return err
		}
		still, err := stopped(pid)
		if err != nil {
			return fmt.Errorf("pausing %s: %w", name, err)
		}
		if still {
			return nil
		}
		select {
		case <-time.After(pausePoll):
		case <-ctx.Done():
			return fmt.Errorf("pausing %s: %w", name, ctx.Err())
		}
	}
}

// stopped says whether all threads of a process are stopped: the state in
// /proc/pid/task/tid/stat, proc(5).
func stopped(pid int) (bool, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it has ended since
		}
		if err != nil {
			return false, err
		}
		// The name in parentheses may hold anything.
		if i := bytes.LastIndexByte(stat, ')'); i+2 >= len(stat) || stat[i+2] != 'T' {
			return false, nil
		}
	}
	return true, nil
}

// Stop ends a process: SIGTERM, and SIGKILL if it does not end by itself. One
// that is not running is fine. It returns once the process is gone.
func (s Set) Stop(ctx context.Context, name string) error {
	r, err := s.read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := r.end(ctx); err != nil {
		return fmt.Errorf("stopping %s (pid %d): %w", name, r.PID, err)
	}
	return os.Remove(s.file(name))
}

// Await polls done until it says true, and gives up when the process has ended,
// with the end of its log, or when ctx has. What is awaited goes into the errors.
func (s Set) Await(ctx context.Context, name, what string, done func(context.Context) error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		// Whoever has its port instead of it may never answer.
		ask, cancel := context.WithTimeout(ctx, askLimit)
		err := done(ask)
		cancel()
		if err == nil {
			return nil
		}
		if !s.Running(name) {
			return fmt.Errorf("%s ended before %s; the end of %s:\n%s", name, what, s.Log(name), s.Tail(name, 20))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w; last: %w (see %s)", what, ctx.Err(), err, s.Log(name))
		case <-tick.C:
		}
	}
}

// Names returns the names of all that were started and not stopped.
func (s Set) Names() ([]string, error) {
	files, err := filepath.Glob(filepath.Join(s.run, "*.json"))
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".json"))
	}
	sort.Strings(names)
	return names, nil
}

// Log is the file that has what the process wrote.
func (s Set) Log(name string) string { return filepath.Join(s.logs, name+".log") }

// Tail returns the last lines of the log.
func (s Set) Tail(name string, lines int) string {
	data, err := os.ReadFile(s.Log(name))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (s Set) file(name string) string { return filepath.Join(s.run, name+".json") }

func (s Set) read(name string) (record, error) {
	var r record
	data, err := os.ReadFile(s.file(name))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("reading %s: %w", s.file(name), err)
	}
	return r, nil
}

// write replaces the file as a whole: a torn one would lose a running process.
func (s Set) write(name string, r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	tmp := s.file(name) + ".partial"
	if err := os.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, s.file(name))
}

func (r record) alive() bool {
	born, ok := startOf(r.PID)
	return ok && born == r.Started
}

// signal sends a signal to this process and to no other. The handle is taken
// before the start is compared: where the system has process handles it then
// cannot come to mean another process in between.
func (r record) signal(signal syscall.Signal) error {
	p, err := os.FindProcess(r.PID)
	if err != nil {
		return ErrNotRunning
	}
	defer func() { _ = p.Release() }()
	if !r.alive() {
		return ErrNotRunning
	}
	if err := p.Signal(signal); err != nil {
		if errors.Is(err, os.ErrProcessDone) || errors.Is(err, syscall.ESRCH) {
			return ErrNotRunning
		}
		return err
	}
	return nil
}

func (r record) end(ctx context.Context) error {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if err := r.signal(signal); errors.Is(err, ErrNotRunning) {
			return nil
		} else if err != nil {
			return err
		}
		if signal == syscall.SIGTERM {
			// A stopped process would take SIGTERM only once it goes on.
			if err := r.signal(syscall.SIGCONT); err != nil && !errors.Is(err, ErrNotRunning) {
				return err
			}
		}
		gone, err := r.gone(ctx)
		if gone || err != nil {
			return err
		}
	}
	return errors.New("it survives SIGKILL")
}

func (r record) gone(ctx context.Context) (bool, error) {
	limit := time.NewTimer(grace)
	defer limit.Stop()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for r.alive() {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-limit.C:
			return false, nil
		case <-tick.C:
		}
	}
	return true, nil
}

// startOf says when a process started, in terms that differ for every process
// that ever has this pid. An ended process that nobody has collected counts as gone.
func startOf(pid int) (string, bool) {
	if _, err := os.Stat("/proc/self/stat"); err == nil {
		return startFromProc(pid)
	}
	out, err := exec.Command("ps", "-o", "stat=,lstart=", "-p", fmt.Sprint(pid)).Output()
	state, born, found := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !found || strings.HasPrefix(state, "Z") {
		return "", false
	}
	return strings.TrimSpace(born), true
}

// startFromProc reads Linux's process table. Ticks since boot say when, the boot
// id in which run of the machine.
func startFromProc(pid int) (string, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", false
	}
	// The second field is the name in parentheses, which may have spaces itself.
	rest := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	const state, startTime = 0, 19 // fields 3 and 22 of proc_pid_stat(5)
	if len(rest) <= startTime || rest[state] == "Z" || rest[state] == "X" {
		return "", false
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", false
	}
	return strings.TrimSpace(string(boot)) + "/" + rest[startTime], true
}

// specOf hashes what a process is made of, the program's content included: a
// program that was built anew is another one.
func specOf(program string, args, env []string) (string, error) {
	h := sha256.New()
	f, err := os.Open(program)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(h, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	for _, list := range [][]string{args, env} {
		data, err := json.Marshal(list)
		if err != nil {
			return "", err
		}
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
