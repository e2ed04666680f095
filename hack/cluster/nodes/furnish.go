// What the cluster itself runs and has: the names' server, and volumes on the nodes' own
// disks.

package nodes

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"text/template"

	_ "embed"
)

// StorageClass is that of the volumes on the nodes' disks. It is the default one.
const StorageClass = "local"

// volumes is how many each node has.
const volumes = 10

// volumePath is where the i-th volume is, on a node's disk.
func volumePath(i int) string { return fmt.Sprintf("/var/local/volumes/%d", i+1) }

var (
	//go:embed dns.yaml
	dnsText string
	//go:embed volumes.yaml
	volumesText string
)

// furnish applies the names' server and the volumes, and waits for the first.
func (m *machine) furnish(ctx context.Context) error {
	if err := m.apply(ctx, "dns.yaml", dnsText, map[string]any{
		"Image": imageReference(dnsImage), "Address": dnsAddress.String(), "Replicas": min(2, len(m.state.Nodes)),
	}); err != nil {
		return err
	}
	if err := m.applyVolumes(ctx); err != nil {
		return err
	}
	return m.world.kubectl(ctx, "--namespace=kube-system", "rollout", "status", "deployment/coredns", "--timeout="+readyLimit.String())
}

func (c *Cluster) applyVolumes(ctx context.Context) error {
	type volume struct{ Name, Node, Path string }
	var all []volume
	for _, node := range c.state.Nodes {
		for i := range volumes {
			all = append(all, volume{fmt.Sprintf("%s-%d", node, i+1), node, volumePath(i)})
		}
	}
	return c.apply(ctx, "volumes.yaml", volumesText, map[string]any{"Class": StorageClass, "Volumes": all})
}

// apply fills in a template and applies what it says.
func (c *Cluster) apply(ctx context.Context, name, text string, values any) error {
	t, err := template.New(name).Parse(text)
	if err != nil {
		return err
	}
	var filled bytes.Buffer
	if err := t.Execute(&filled, values); err != nil {
		return err
	}
	path := filepath.Join(c.dir, name)
	if err := os.WriteFile(path, filled.Bytes(), 0o600); err != nil {
		return err
	}
	return c.world.kubectl(ctx, "apply", "-f", path)
}
