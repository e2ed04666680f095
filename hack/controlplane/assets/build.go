// Building the programs from their Go modules.
//
// Invariants: one build at a time in a cache directory (a lock on a file in it);
// a program appears under its name only once it is whole and synced.
package assets

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/filelock"
)

// progressEvery is how often a running step says how far it is.
const progressEvery = 15 * time.Second

func packageOf(name string) string {
	switch name {
	case etcd:
		return "go.etcd.io/etcd/server/v3"
	case coreDNS:
		return "./coredns"
	default:
		return "k8s.io/kubernetes/cmd/" + name
	}
}

func build(ctx context.Context, log io.Writer, v Versions, dir string, names ...string) error {
	mod, err := buildModule(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	unlock, err := lock(ctx, log, filepath.Join(dir, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	// Another process may have built them while this one waited for the lock.
	names = lacking(dir, names...)
	if len(names) == 0 {
		return nil
	}
	say(log, "building %s into %s; with cold caches and two cores all of it takes about ten minutes, once",
		strings.Join(names, ", "), dir)
	for i, name := range names {
		label := fmt.Sprintf("%s (%d of %d)", name, i+1, len(names))
		err := install(dir, name, func(tmp string) error { return compile(ctx, log, mod, v, name, label, tmp) })
		if err != nil {
			return fmt.Errorf("building %s: %w", name, err)
		}
	}
	return nil
}

// install lets write make a file under another name, and gives it its own name
// in dir only when it is whole.
func install(dir, name string, write func(tmp string) error) error {
	// The lock is held: what is left of an earlier try belongs to nobody.
	tmp := filepath.Join(dir, "."+name+".partial")
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := write(tmp); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := syncFile(tmp); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, name))
}

// syncFile makes one file's content durable, so that a rename cannot outlive it.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// compile builds one program. First it asks how many packages are not in the
// build cache (which fetches the modules), so that it can say how far it is.
func compile(ctx context.Context, log io.Writer, mod string, v Versions, name, label, out string) error {
	pkg := packageOf(name)
	common := []string{"-mod=readonly", "-trimpath", "-buildvcs=false"}

	start := time.Now()
	list := append([]string{"list"}, common...)
	list = append(list, "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}", pkg)
	stale, err := runGo(ctx, mod, list, watch(log, func(n int) string {
		return fmt.Sprintf("%s: fetching modules, %d so far, %s", label, n, since(start))
	}))
	if err != nil {
		return err
	}
	total := len(strings.Fields(stale))

	start = time.Now()
	say(log, "%s: compiling %d packages", label, total)
	args := append([]string{"build", "-v"}, common...)
	args = append(args, "-ldflags", ldflags(name, v), "-o", out, pkg)
	if _, err := runGo(ctx, mod, args, watch(log, func(n int) string {
		if n >= total {
			return fmt.Sprintf("%s: linking, %s", label, since(start))
		}
		return fmt.Sprintf("%s: %d of %d packages, %s", label, n, total, since(start))
	})); err != nil {
		return err
	}
	say(log, "%s: done, %s", label, since(start))
	return nil
}

// ldflags stamps the version: without it kube-apiserver takes itself for v0.0.0
// and its version-gated features are off.
func ldflags(name string, v Versions) string {
	flags := []string{"-s", "-w"}
	if name == etcd || name == coreDNS {
		return strings.Join(flags, " ")
	}
	major, minor, _ := strings.Cut(v.minor(), ".")
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, kv := range [][2]string{
			{"gitVersion", v.Kubernetes},
			{"gitMajor", major},
			{"gitMinor", minor},
			{"gitCommit", v.Kubernetes},
			{"gitTreeState", "clean"},
			{"buildDate", "1970-01-01T00:00:00Z"},
		} {
			flags = append(flags, "-X", pkg+"."+kv[0]+"="+kv[1])
		}
	}
	return strings.Join(flags, " ")
}

// runGo runs the go command in the build module and returns its standard output.
// Each line of its standard error counts as progress; the last ones are in the
// error if it fails.
func runGo(ctx context.Context, mod string, args []string, w *watcher) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = mod
	// Static programs for this machine, whatever the caller's shell is set to.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=", "GOOS=", "GOARCH=")
	if os.Getenv("GOGC") == "" {
		// The compiler then collects less often: a fifth less CPU for these packages.
		cmd.Env = append(cmd.Env, "GOGC=400")
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	defer w.stop()
	last := w.follow(stderr)
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", fmt.Errorf("go %s: %w\n%s", args[0], err, strings.Join(last, "\n"))
	}
	return stdout.String(), nil
}

// watcher counts the lines of a command and says every so often how many.
type watcher struct {
	mu    sync.Mutex
	lines int
	ended chan struct{}
}

func watch(log io.Writer, describe func(lines int) string) *watcher {
	w := &watcher{ended: make(chan struct{})}
	go func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-w.ended:
				return
			case <-tick.C:
				w.mu.Lock()
				n := w.lines
				w.mu.Unlock()
				say(log, "%s", describe(n))
			}
		}
	}()
	return w
}

func (w *watcher) stop() { close(w.ended) }

// follow reads to the end and returns the last lines.
func (w *watcher) follow(r io.Reader) []string {
	const keep = 30
	var last []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		w.mu.Lock()
		w.lines++
		w.mu.Unlock()
		last = append(last, lines.Text())
		if len(last) > keep {
			last = last[1:]
		}
	}
	return last
}

func since(start time.Time) time.Duration { return time.Since(start).Round(time.Second) }

// lock takes the lock of a file and says so if it has to wait for it.
func lock(ctx context.Context, log io.Writer, path string) (release func(), err error) {
	return filelock.Take(ctx, path, func() {
		say(log, "another process is at it already, waiting for it")
	})
}
