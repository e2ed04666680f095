// Command demo tells the story of Holdfast against a real API server and a payment
// provider with a ledger: a refund that is retried, one that comes back changed, a
// person who decides, and a crash in the worst moment.
//
//	go run ./hack/demo [--keep]
//
// It runs all of it in a directory of its own and on ports of its own, beside
// whatever else runs, and ends it when the story is over, however it ends. It fails
// if the ledger is ever not what the story says.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
	"github.com/holdfast-dev/holdfast/hack/dev/filelock"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

const (
	// stateDir is in the clone. It is not make up's, so neither disturbs the other.
	stateDir = ".demo"
	// endLimit bounds the tearing down, which also happens after Ctrl-C.
	endLimit = time.Minute
)

func main() {
	// The API client's library would complain, in the middle of the story, that nobody reads its logs.
	log.SetLogger(logr.Discard())
	// A second Ctrl-C ends the program at once: the next run then clears up first.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	switch err := run(ctx, os.Args[1:], os.Stdout); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	began := time.Now()
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	keep := flags.Bool("keep", false, "leave all of it running at the end")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if os.Getenv(cluster.EnvExisting) == "true" {
		return fmt.Errorf("the demo kills the manager and removes all data at its end, so it runs a control plane of its own: unset %s", cluster.EnvExisting)
	}
	root, err := assets.Root(ctx)
	if err != nil {
		return err
	}
	dir := filepath.Join(root, stateDir)
	release, err := filelock.Take(ctx, dir+"-run.lock", func() {
		_, _ = fmt.Fprintln(out, "demo: another demo is running here, waiting for it")
	})
	if err != nil {
		return err
	}
	defer release()

	progress := &indented{to: out}
	down := func() error {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
		defer cancel()
		return whole.Down(end, dir, false, progress)
	}
	// What a demo that was killed has left behind.
	if err := down(); err != nil {
		return err
	}
	d := &demo{out: out, dir: dir}
	defer func() {
		if err != nil && ctx.Err() == nil {
			d.blackBox()
		}
		if *keep {
			d.say("All of it is still running.\n  For your shell:  . %s\n  To end it:       go run ./hack/dev down --dir %s", filepath.Join(dir, "env"), dir)
			return
		}
		err = errors.Join(err, down())
	}()
	if err := d.setUp(ctx, root, progress); err != nil {
		return ended(ctx, err)
	}
	ready := time.Since(began)
	if err := d.story(ctx); err != nil {
		return ended(ctx, err)
	}
	d.summary(ready, time.Since(began))
	return nil
}

// ended tells an error from the end of somebody's patience.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return err
}

// setUp starts all of it and applies the demo's tool.
func (d *demo) setUp(ctx context.Context, root string, progress io.Writer) error {
	d.say("Setting up: a control plane, the manager, a payment provider, the samples.")
	free, err := ports.Free(2)
	if err != nil {
		return err
	}
	d.w, err = whole.Up(ctx, whole.Options{
		Root: root, Dir: d.dir, GatewayPort: free[0], ProviderPort: free[1],
		// Nobody wants this data after a crash of the machine.
		UnsafeNoFsync: true,
		// The shortest leases that the manager takes, so that the crash is over soon.
		ManagerArgs: []string{"--lease-settlement=500ms", "--lease-margin=250ms", "--lease-grace=1s"},
		Log:         progress,
	})
	if err != nil {
		return err
	}
	token, err := d.w.AgentToken(ctx)
	if err != nil {
		return err
	}
	d.provider = ledgerOf(d.w.ProviderURL())
	d.naive = newAgent("naive agent", d.w.ProviderURL()+"/refunds", "")
	d.agent = newAgent("agent", d.w.GatewayURL()+"/v1/namespaces/support/tools/refund", token)

	text, err := os.ReadFile(filepath.Join(root, "hack", "demo", "refund.yaml"))
	if err != nil {
		return err
	}
	named := "127.0.0.1:" + strconv.Itoa(whole.SamplesProviderPort)
	if !strings.Contains(string(text), named) {
		return fmt.Errorf("hack/demo/refund.yaml does not name the provider as %s", named)
	}
	here := strings.TrimPrefix(d.w.ProviderURL(), "http://")
	if err := os.WriteFile(filepath.Join(d.dir, "refund.yaml"), []byte(strings.ReplaceAll(string(text), named, here)), 0o600); err != nil {
		return err
	}
	d.say("\nWhat follows runs with KUBECONFIG=%s", filepath.Join(stateDir, "kubeconfig"))
	for _, args := range [][]string{
		{"config", "set-context", "--current", "--namespace=support"},
		{"apply", "--validate=strict", "-f", filepath.Join(stateDir, "refund.yaml")},
		{"wait", "--for=condition=Ready", "agenttool/refund", "--timeout=60s"},
		{"get", "guardrails"},
	} {
		if _, err := d.kubectl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// blackBox shows the end of what the manager wrote, before it is removed.
func (d *demo) blackBox() {
	if d.w == nil {
		return
	}
	d.say("\nThe end of the manager's log:\n%s", d.w.Processes().Tail(whole.Manager, 30))
}

// indented writes what the set-up tells, set off from the story.
type indented struct{ to io.Writer }

func (w *indented) Write(p []byte) (int, error) {
	if _, err := w.to.Write(append([]byte("  "), p...)); err != nil {
		return 0, err
	}
	return len(p), nil
}
