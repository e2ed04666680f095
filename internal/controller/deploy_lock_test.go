// Two servers of a deployed store on one volume: as where a pod is deleted by force, and the next one
// begins while the first one's server still runs.

package controller

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// children are the processes that the server has forked and that still run.
func (n *node) children() []int {
	n.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", n.cmd.Process.Pid))
	must(n.T, err)
	var out []int
	for _, field := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(field)
		must(n.T, err)
		out = append(out, pid)
	}
	return out
}

// ended waits until a process runs no more, whether or not somebody has asked how it ended.
func ended(t *testing.T, pid int) {
	t.Helper()
	eventually(t, func() error {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && len(line) > 0 {
			return fmt.Errorf("process %d still runs: %q", pid, line)
		}
		return nil
	})
}

const waiting = "another server still has the volume"

// waits starts a second server, which waits for the volume.
func (n *node) waits() {
	n.Helper()
	said := strings.Count(n.log.String(), waiting)
	n.launch()
	eventually(n.T, func() error {
		if strings.Count(n.log.String(), waiting) == said {
			return fmt.Errorf("the server should say that it waits: %q", n.log.String())
		}
		return nil
	})
	n.stillWaits()
}

// stillWaits says that the server does not run, and the process that is to become it does.
func (n *node) stillWaits() {
	n.Helper()
	// What is no longer kept back serves within a few of them.
	for range 10 {
		for _, what := range []string{"alive", "ready"} {
			if n.probe(what) == nil {
				n.Fatalf("a server that should wait for the volume is %s", what)
			}
		}
	}
	select {
	case <-n.end:
		n.Fatalf("a server that should wait for the volume has ended: %q", n.log.String())
	default:
	}
}

// A second server on the volume waits until the first one has ended with all processes that it has forked, and then has
// every write that was acknowledged.
func TestSecondServerWaitsForTheVolume(t *testing.T) {
	for name, make := range map[string]func(*world) *v1alpha1.IdempotencyStore{
		"redis":    func(w *world) *v1alpha1.IdempotencyStore { return w.redisStore("payments") },
		"postgres": func(w *world) *v1alpha1.IdempotencyStore { return w.postgresStore("payments") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.permit()
			s := make(w)
			w.create(s)
			first := w.node(s)
			d := deployer(first.dial)
			w.applied(d, s, reasonStarting)
			w.claim(s, "any")
			first.mounts()
			if s.Spec.Redis != nil {
				// Its log is written anew all the time, by a process that takes minutes for it.
				first.configure("auto-aof-rewrite-percentage 1", "auto-aof-rewrite-min-size 1", "rdb-key-save-delay 60000000")
			}
			first.launch()
			eventually(t, func() error { return first.probe("ready") })
			w.kubelet(s, "one")
			w.applied(d, s, reasonRunning)
			st := first.open()
			first.use(st)
			write := func(key string) {
				t.Helper()
				wrote, err := st.Update(w.ctx, store.Write{Epoch: "e", Key: key, Nonce: key, Record: &store.Record{Header: []byte("h"), Body: []byte("b")}})
				if must(t, err); wrote.Outcome != store.Written {
					t.Fatalf("%s was not written: %+v", key, wrote)
				}
			}
			write("before")

			second := w.node(s)
			second.data = first.data
			second.mounts()
			for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
				second.waits()
				flock := second.children()
				must(t, second.cmd.Process.Signal(signal))
				// It has nothing to do before it ends, however long a server may take.
				select {
				case <-second.end:
				case <-time.After(10 * time.Second):
					t.Fatalf("%s does not end a server that waits for the volume", signal)
				}
				if code := second.cmd.ProcessState.ExitCode(); code != 143 {
					t.Errorf("ended by %s while it waits it exits with %d: %q", signal, code, second.log.String())
				}
				for _, pid := range flock {
					ended(t, pid)
				}
			}
			second.waits()
			write("while it waits")
			if said := strings.Count(second.log.String(), waiting); said != 3 {
				t.Errorf("begun three times it says %d times that it waits: %q", said, second.log.String())
			}

			// The server is killed, and a process that it has forked is not.
			var forked []int
			eventually(t, func() error {
				if forked = first.children(); len(forked) == 0 {
					return errors.New("the server has forked nothing")
				}
				return nil
			})
			left, server := forked[0], first.cmd.Process.Pid
			must(t, syscall.Kill(left, syscall.SIGSTOP))
			t.Cleanup(func() { _ = syscall.Kill(left, syscall.SIGKILL) })
			for _, pid := range []int{server, left} {
				if file, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/9", pid)); err != nil || file != filepath.Join(first.data, "holdfast.lock") {
					t.Errorf("the open file 9 of process %d is %q, and should be the lock: %v", pid, file, err)
				}
			}
			must(t, syscall.Kill(server, syscall.SIGKILL))
			ended(t, server)
			second.stillWaits()

			must(t, syscall.Kill(left, syscall.SIGKILL))
			eventually(t, func() error { return second.probe("ready") })
			after := second.open()
			is, err := after.Standing(w.ctx)
			if must(t, err); is.Epoch != "e" || is.KeyDomain != "d" {
				t.Errorf("the second server knows of %+v, and the first was told of epoch e and key domain d", is)
			}
			for _, key := range []string{"before", "while it waits"} {
				rec, _, err := after.Get(w.ctx, key)
				if must(t, err); rec == nil || string(rec.Body) != "b" {
					t.Errorf("%s: the second server has %+v of a record that the first has acknowledged", key, rec)
				}
			}
		})
	}
}
