// The nodes as containers of Docker, made by kind, where those exist.

package nodes

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kindName is the name of the cluster that kind makes.
const kindName = "holdfast"

// kind makes the nodes with kind. Those that run pods are its workers; the control plane
// is a container of its own.
type kind struct{ *Cluster }

func (k *kind) names(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = kindName + "-worker"
		if i > 0 {
			names[i] += strconv.Itoa(i + 1)
		}
	}
	return names
}

func (k *kind) kubeconfig() string { return filepath.Join(k.dir, "kubeconfig") }

func (k *kind) kubectl(ctx context.Context, args ...string) error {
	return host(ctx, append([]string{"kubectl", "--kubeconfig=" + k.kubeconfig()}, args...)...)
}

func (k *kind) up(ctx context.Context) error {
	for _, name := range []string{"docker", "kind", "kubectl"} {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("CLUSTER=kind needs %s in PATH: %w", name, err)
		}
	}
	config := "kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n- role: control-plane\n" + strings.Repeat("- role: worker\n", len(k.state.Nodes))
	create := exec.CommandContext(ctx, "kind", "create", "cluster", "--name="+kindName, "--config=-", "--kubeconfig="+k.kubeconfig(), "--wait="+readyLimit.String())
	create.Stdin = strings.NewReader(config)
	if _, err := output(create, "kind create cluster"); err != nil {
		return err
	}
	for _, node := range k.state.Nodes {
		argv := []string{"mkdir", "--parents", "--mode=777"}
		for i := range volumes {
			argv = append(argv, volumePath(i))
		}
		if _, err := k.Exec(ctx, node, argv...); err != nil {
			return err
		}
		if err := k.ready(ctx, node, time.Time{}); err != nil {
			return err
		}
	}
	return k.applyVolumes(ctx)
}

func (k *kind) attach(ctx context.Context) error {
	client, err := k.Client()
	if err != nil {
		return err
	}
	if _, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("the API server of kind's cluster %s does not answer: %w", kindName, err)
	}
	return nil
}

func (k *kind) down(ctx context.Context) error {
	return host(ctx, "kind", "delete", "cluster", "--name="+kindName, "--kubeconfig="+k.kubeconfig())
}

func (k *kind) address(node string) string {
	if node == ControlPlane {
		node = kindName + "-control-plane"
	}
	out, err := output(exec.Command("docker", "inspect", "--format={{.NetworkSettings.Networks.kind.IPAddress}}", node), "docker inspect")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(out)
}

func (k *kind) networks(ctx context.Context, node string) ([]string, error) {
	client, err := k.Client()
	if err != nil {
		return nil, err
	}
	n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return []string{k.address(node), n.Spec.PodCIDR}, nil
}

func (k *kind) load(ctx context.Context, node, archive string) error {
	return host(ctx, "kind", "load", "image-archive", "--name="+kindName, "--nodes="+node, archive)
}

func (k *kind) crash(ctx context.Context, node string) error {
	return host(ctx, "docker", "kill", "--signal=KILL", node)
}

func (k *kind) boot(ctx context.Context, node string) error {
	start := time.Now()
	if err := host(ctx, "docker", "start", node); err != nil {
		return err
	}
	return k.ready(ctx, node, start)
}

func (k *kind) running(node string) bool {
	out, err := output(exec.Command("docker", "inspect", "--format={{.State.Running}}", node), "docker inspect")
	return err == nil && strings.TrimSpace(out) == "true"
}

func (k *kind) command(ctx context.Context, node string, _ bool, argv ...string) (*exec.Cmd, error) {
	return exec.CommandContext(ctx, "docker", append([]string{"exec", "--interactive", node}, argv...)...), nil
}

// wipe starts a container of the node's own volume, since the node may be down.
func (k *kind) wipe(ctx context.Context, node, path string) error {
	find := []string{"find", path, "-mindepth", "1", "-delete"}
	if k.running(node) {
		_, err := k.Exec(ctx, node, find...)
		return err
	}
	image, err := output(exec.CommandContext(ctx, "docker", "inspect", "--format={{.Config.Image}}", node), "docker inspect")
	if err != nil {
		return err
	}
	return host(ctx, append([]string{"docker", "run", "--rm", "--volumes-from=" + node, "--entrypoint=" + find[0], strings.TrimSpace(image)}, find[1:]...)...)
}
