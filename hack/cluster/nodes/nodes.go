// Package nodes runs a real Kubernetes cluster on one Linux machine: the control plane of
// package hack/dev/cluster, and nodes that each have a containerd, a kubelet and a
// kube-proxy of their own.
//
// A node is a box: processes with their own mounts, network, process table, host name and
// cgroups. Ending the box's first process ends everything in it at once, which is what a
// pulled plug does; its disk is a directory, which the next boot finds as it was left.
//
// Like the control plane the nodes outlive whoever started them. What is needed to find
// them again is in the state directory, which belongs to this package.
package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
)

// EnvKind, when "kind", says to make the nodes with kind and Docker instead.
const EnvKind = "CLUSTER"

const (
	// readyLimit is how long a node may take until it is ready, and the cluster's own pods.
	readyLimit = 3 * time.Minute
	// silence is how long a node may say nothing before the control plane takes it for lost.
	silence = 12 * time.Second
	// poll is how often what is awaited is looked at.
	poll = 200 * time.Millisecond
)

// Options say what to start.
type Options struct {
	// Dir is the state directory; "" for .dev/cluster in the clone.
	Dir string
	// Nodes is how many nodes; 0 for two.
	Nodes int
	// Log is told what happens; nil for nobody.
	Log io.Writer
}

// Cluster is a running cluster.
type Cluster struct {
	dir   string
	state state
	log   io.Writer
	world world
}

// state is what a later command must know.
type state struct {
	// Kind says that the nodes were made with kind.
	Kind bool `json:"kind,omitempty"`
	// Nodes are their names.
	Nodes []string `json:"nodes"`
	// Cgroups and Hierarchies are what the boxes were told. See package spec.
	Cgroups     []string `json:"cgroups,omitempty"`
	Hierarchies []string `json:"hierarchies,omitempty"`
	// The programs that the boxes run.
	Kubelet   string `json:"kubelet,omitempty"`
	KubeProxy string `json:"kubeProxy,omitempty"`
}

// world is who makes the nodes: this package, or kind.
type world interface {
	// up starts the control plane and all nodes, and waits until they are ready.
	up(ctx context.Context) error
	// attach makes sure that a cluster of an earlier command is up.
	attach(ctx context.Context) error
	// down ends and removes all of it, whatever is left of it.
	down(ctx context.Context) error
	kubeconfig() string
	address(node string) string
	// networks are a node's own address and that of its pods.
	networks(ctx context.Context, node string) ([]string, error)
	load(ctx context.Context, node, archive string) error
	crash(ctx context.Context, node string) error
	boot(ctx context.Context, node string) error
	running(node string) bool
	// command is argv as it must be run to run in the node; network says that the node's
	// network is enough, and all else may be the machine's.
	command(ctx context.Context, node string, network bool, argv ...string) (*exec.Cmd, error)
	wipe(ctx context.Context, node, path string) error
	// kubectl runs kubectl as the administrator.
	kubectl(ctx context.Context, args ...string) error
	// names are the names of so many nodes.
	names(n int) []string
}

// Up starts a cluster and waits until its nodes are ready and its names are served. One
// that is up already as it should be is left as it is; what is left of a broken one is
// removed first.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if o.Log == nil {
		o.Log = io.Discard
	}
	if o.Nodes == 0 {
		o.Nodes = 2
	}
	if o.Nodes < 1 || o.Nodes > maxNodes {
		return nil, fmt.Errorf("%d nodes: there can be 1 to %d", o.Nodes, maxNodes)
	}
	c, err := open(ctx, o.Dir, o.Log)
	if err != nil {
		return nil, err
	}
	if err := c.attach(ctx); err == nil && len(c.state.Nodes) == o.Nodes && c.state.Kind == wantKind() {
		c.say("the cluster in %s is up already", c.dir)
		return c, nil
	} else if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err := c.Down(ctx); err != nil {
		return nil, fmt.Errorf("removing what is left of an earlier cluster: %w", err)
	}
	c.state = state{Kind: wantKind()}
	c.choose()
	c.state.Nodes = c.world.names(o.Nodes)
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	// Written before anything is made, so that Down finds all of it.
	if err := c.save(); err != nil {
		return nil, err
	}
	if err := c.world.up(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Attach returns a cluster that an earlier command left running in a state directory; ""
// for .dev/cluster in the clone.
func Attach(ctx context.Context, dir string) (*Cluster, error) {
	c, err := open(ctx, dir, io.Discard)
	if err != nil {
		return nil, err
	}
	return c, c.attach(ctx)
}

func wantKind() bool { return os.Getenv(EnvKind) == "kind" }

func open(ctx context.Context, dir string, log io.Writer) (*Cluster, error) {
	if dir == "" {
		root, err := assets.Root(ctx)
		if err != nil {
			return nil, err
		}
		dir = filepath.Join(root, ".dev", "cluster")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	c := &Cluster{dir: dir, log: log}
	data, err := os.ReadFile(c.stateFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(data, &c.state); err != nil {
			return nil, fmt.Errorf("reading %s: %w", c.stateFile(), err)
		}
	}
	c.choose()
	return c, nil
}

func (c *Cluster) choose() {
	if c.state.Kind {
		c.world = &kind{c}
		return
	}
	c.world = &machine{Cluster: c, control: cluster.Open(c.dir)}
}

func (c *Cluster) attach(ctx context.Context) error {
	if len(c.state.Nodes) == 0 {
		return fmt.Errorf("there is no cluster in %s: start one with `go run ./hack/cluster up`", c.dir)
	}
	return c.world.attach(ctx)
}

func (c *Cluster) stateFile() string { return filepath.Join(c.dir, "nodes.json") }

func (c *Cluster) save() error {
	data, err := json.MarshalIndent(c.state, "", "  ")
	if err != nil {
		return err
	}
	tmp := c.stateFile() + ".partial"
	if err := os.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, c.stateFile())
}

// Dir is the state directory.
func (c *Cluster) Dir() string { return c.dir }

// Kubeconfig is the path of the administrator's kubeconfig.
func (c *Cluster) Kubeconfig() string { return c.world.kubeconfig() }

// Names are the names of the nodes: node-1, node-2 and so on, or as kind calls them.
func (c *Cluster) Names() []string { return append([]string(nil), c.state.Nodes...) }

// Address is a node's address. This machine reaches the NodePorts there.
func (c *Cluster) Address(node string) string { return c.world.address(node) }

// Load brings a docker-archive into every node. All must run.
func (c *Cluster) Load(ctx context.Context, archive string) error {
	if err := c.each(func(node string) error { return c.world.load(ctx, node, archive) }); err != nil {
		return fmt.Errorf("loading %s: %w", archive, err)
	}
	return nil
}

// each does the same for all nodes at once.
func (c *Cluster) each(do func(node string) error) error {
	errs := make([]error, len(c.state.Nodes))
	var all sync.WaitGroup
	for i, node := range c.state.Nodes {
		all.Go(func() {
			if err := do(node); err != nil {
				errs[i] = fmt.Errorf("%s: %w", node, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Crash ends a node as a pulled plug does: nothing in it is told. What it had written is
// on its disk, also what it had not synced, since the machine below lives on.
func (c *Cluster) Crash(ctx context.Context, node string) error {
	if err := c.knows(node); err != nil {
		return err
	}
	return c.world.crash(ctx, node)
}

// Boot starts a node on the disk that it had, and waits until it is ready. A cut of its
// network is gone.
func (c *Cluster) Boot(ctx context.Context, node string) error {
	if err := c.knows(node); err != nil {
		return err
	}
	return c.world.boot(ctx, node)
}

// Wipe removes all that is in a directory of a node, which may be down. The directory
// itself stays. It must be on the node's own disk, below /var.
func (c *Cluster) Wipe(ctx context.Context, node, path string) error {
	if err := c.knows(node); err != nil {
		return err
	}
	clean := filepath.Clean(path)
	if !strings.HasPrefix(clean, "/var/") {
		return fmt.Errorf("wipe %s of %s: only what is below /var is the node's own", path, node)
	}
	return c.world.wipe(ctx, node, clean)
}

// Exec runs a command in a node's box and returns what it wrote to standard output; what
// it wrote to standard error is in the error.
func (c *Cluster) Exec(ctx context.Context, node string, argv ...string) (string, error) {
	return c.run(ctx, node, false, nil, argv...)
}

// run is Exec, with standard input.
func (c *Cluster) run(ctx context.Context, node string, network bool, stdin io.Reader, argv ...string) (string, error) {
	if err := c.knows(node); err != nil {
		return "", err
	}
	if len(argv) == 0 {
		return "", errors.New("no command")
	}
	cmd, err := c.world.command(ctx, node, network, argv...)
	if err != nil {
		return "", err
	}
	cmd.Stdin = stdin
	return output(cmd, node+": "+strings.Join(argv, " "))
}

// Down ends and removes the cluster, whatever is left of it. It may be called again.
func (c *Cluster) Down(ctx context.Context) error {
	if err := c.world.down(ctx); err != nil {
		return err
	}
	return os.RemoveAll(c.dir)
}

// Down ends and removes the cluster of a state directory, whatever is left of it.
func Down(ctx context.Context, dir string) error {
	c, err := open(ctx, dir, io.Discard)
	if err != nil {
		return err
	}
	return c.Down(ctx)
}

func (c *Cluster) knows(node string) error {
	for _, name := range c.state.Nodes {
		if name == node {
			return nil
		}
	}
	return fmt.Errorf("there is no node %q, there are %s", node, strings.Join(c.state.Nodes, ", "))
}

func (c *Cluster) say(format string, args ...any) {
	_, _ = fmt.Fprintf(c.log, "cluster: "+format+"\n", args...)
}

// ready waits until a node's kubelet, one that was started after the given moment, says
// that the node is ready.
func (c *Cluster) ready(ctx context.Context, node string, after time.Time) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	return await(ctx, readyLimit, node+" to be ready", func(ctx context.Context) error {
		n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range n.Status.Conditions {
			if condition.Type != corev1.NodeReady {
				continue
			}
			if condition.Status != corev1.ConditionTrue {
				return fmt.Errorf("not ready: %s", condition.Message)
			}
			// What a kubelet said before its end is no answer. The times are in whole seconds,
			// so the first one that is surely later counts.
			if condition.LastHeartbeatTime.Time.Before(after) {
				return errors.New("it has said nothing since its start")
			}
			return nil
		}
		return errors.New("it has no condition Ready yet")
	})
}

// host runs a command on this machine.
func host(ctx context.Context, argv ...string) error {
	_, err := output(exec.CommandContext(ctx, argv[0], argv[1:]...), strings.Join(argv, " "))
	return err
}

// output runs a command and says what it wrote to standard error only if it fails.
func output(cmd *exec.Cmd, what string) (string, error) {
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", what, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// await polls done until it says nil, or gives up after limit with the last answer.
func await(ctx context.Context, limit time.Duration, what string, done func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := done(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w; last: %w", what, ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// parseNetworks reads addresses and networks.
func parseNetworks(texts []string) ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%q is neither an address nor a network nor a node nor %s", text, ControlPlane)
		}
		all = append(all, p.Masked())
	}
	return all, nil
}
