// This file starts and ends the processes, and reads what they cost. Only those that
// it started are ever signalled; none outlives this one.

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// patience bounds every wait for a process.
const patience = 60 * time.Second

// tick is the unit of CPU times in /proc (USER_HZ), the same on every Linux.
const tick = 10 * time.Millisecond

// process is one that was started.
type process struct {
	name  string
	cmd   *exec.Cmd
	lines *bufio.Scanner
	log   string
	gone  chan struct{}
	err   error
}

// launch starts a program. Its standard output is for lines, the rest goes to a log.
func (b *bench) launch(name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, log: filepath.Join(b.dir, name+".log"), gone: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the child has its own
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewScanner(out)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	b.running = append(b.running, p)
	return p, nil
}

// role starts this program in a role.
func (b *bench) role(name, role string, env []string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, append([]string{role}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	return b.launch(name, cmd)
}

// serve starts this program in a role that tells its address, and returns that.
func (b *bench) serve(name, role string, env []string, args ...string) (*process, string, error) {
	p, err := b.role(name, role, env, args...)
	if err != nil {
		return nil, "", err
	}
	late := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	line, err := p.line()
	return p, line, err
}

// finish waits for a process that ends by itself.
func (b *bench) finish(p *process) error {
	b.running = slices.DeleteFunc(b.running, func(q *process) bool { return q == p })
	if err := p.wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", p.name, err, p.tail())
	}
	return nil
}

// line is the next line that the process says.
func (p *process) line() (string, error) {
	if p.lines.Scan() {
		return p.lines.Text(), nil
	}
	return "", fmt.Errorf("%s said nothing more: %w\n%s", p.name, errors.Join(p.lines.Err(), p.wait()), p.tail())
}

func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	if len(text) > 4096 {
		text = text[len(text)-4096:]
	}
	return string(text)
}

// wait collects the process.
func (p *process) wait() error {
	select {
	case <-p.gone:
	default:
		p.err = p.cmd.Wait()
		close(p.gone)
	}
	return p.err
}

// stop ends the process in good order, and kills it if it does not end.
func (p *process) stop() {
	select {
	case <-p.gone:
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	_ = p.wait() // it was told to end
}

// end ends one process.
func (b *bench) end(p *process) {
	p.stop()
	b.running = slices.DeleteFunc(b.running, func(q *process) bool { return q == p })
}

// stop ends what runs, but for the first so many processes: the newest first, and the
// servers at last.
func (b *bench) stop(but int) {
	for i := len(b.running) - 1; i >= but; i-- {
		b.running[i].stop()
	}
	b.running = b.running[:min(but, len(b.running))]
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, s := range b.servers {
		if err := s.Remove(ctx); err != nil {
			progress("end a server: %v", err)
		}
	}
	b.servers = nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// treeCost is what a process and its children have used.
func treeCost(pid int) (time.Duration, error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, i := range []int{11, 12, 13, 14} { // utime, stime, and those of ended children
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0, err
	}
	for child := range strings.FieldsSeq(string(children)) {
		n, err := strconv.Atoi(child)
		if err != nil {
			return 0, err
		}
		// One that has just ended is counted by its parent.
		if c, err := treeCost(n); err == nil {
			sum += c
		}
	}
	return sum, nil
}

// stat reads the fields of /proc/PID/stat that follow the name.
func stat(pid int) ([]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 {
		return nil, fmt.Errorf("/proc/%d/stat cannot be read", pid)
	}
	return fields, nil
}

// resident is how much memory the process has now.
func (p *process) resident() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("%s: its memory is not told", p.name)
}
