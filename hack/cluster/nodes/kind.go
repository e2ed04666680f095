// The nodes as containers of Docker, made by kind, where those exist.

package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// kindName is the name of the cluster that kind makes.
const kindName = "holdfast"

// kind makes the nodes with kind. Nodes that run pods are its workers; its control plane
// is a container of its own.
type kind struct{ *Cluster }

func (k *kind) kubeconfig() string { return filepath.Join(k.dir, "kubeconfig") }

// container is the name that kind gives a node.
func (k *kind) container(node string) string {
	if node == ControlPlane {
		return kindName + "-control-plane"
	}
	if node == "node-1" {
		return kindName + "-worker"
	}
	return kindName + "-worker" + strings.TrimPrefix(node, "node-")
}

func (k *kind) up(context.Context) error { return errors.New("not yet") }

func (k *kind) attach(ctx context.Context) error {
	return host(ctx, "kubectl", "--kubeconfig", k.kubeconfig(), "get", "namespace", "default")
}

func (k *kind) down(ctx context.Context) error {
	return host(ctx, "kind", "delete", "cluster", "--name", kindName)
}

func (k *kind) address(node string) string {
	out, err := output(exec.Command("docker", "inspect", "--format", "{{.NetworkSettings.Networks.kind.IPAddress}}", k.container(node)), "docker inspect")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(out)
}

func (k *kind) networks(node string) []string { return []string{k.address(node)} }

func (k *kind) load(ctx context.Context, node, archive string) error {
	return host(ctx, "kind", "load", "image-archive", "--name", kindName, "--nodes", k.container(node), archive)
}

func (k *kind) crash(ctx context.Context, node string) error {
	return host(ctx, "docker", "kill", "--signal=KILL", k.container(node))
}

func (k *kind) boot(ctx context.Context, node string) error {
	return host(ctx, "docker", "start", k.container(node))
}

func (k *kind) command(ctx context.Context, node string, _ bool, argv ...string) (*exec.Cmd, error) {
	return exec.CommandContext(ctx, "docker", append([]string{"exec", "-i", k.container(node)}, argv...)...), nil
}

func (k *kind) wipe(ctx context.Context, node, path string) error {
	_, err := k.run(ctx, node, false, nil, "find", path, "-mindepth", "1", "-delete")
	return err
}

var _ = os.Getenv
var _ = fmt.Sprint
