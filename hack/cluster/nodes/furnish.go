// What the cluster itself runs and has: the names' server, and volumes on the nodes' own
// disks, which are there from the start as nobody makes new ones.

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

//go:embed furnish.yaml
var furnishText string

// furnish applies furnish.yaml and waits for the names' server.
func (m *machine) furnish(ctx context.Context) error {
	t, err := template.New("furnish.yaml").Parse(furnishText)
	if err != nil {
		return err
	}
	type volume struct{ Name, Node, Path string }
	var all []volume
	for _, node := range m.state.Nodes {
		for i := range volumes {
			all = append(all, volume{fmt.Sprintf("%s-%d", node, i+1), node, volumePath(i)})
		}
	}
	var text bytes.Buffer
	if err := t.Execute(&text, map[string]any{
		"DNSImage": imageReference(dnsImage), "DNSAddress": dnsAddress.String(), "DNSReplicas": min(2, len(m.state.Nodes)),
		"StorageClass": StorageClass, "Volumes": all,
	}); err != nil {
		return err
	}
	path := filepath.Join(m.dir, "furnish.yaml")
	if err := os.WriteFile(path, text.Bytes(), 0o600); err != nil {
		return err
	}
	if err := m.kubectl(ctx, "apply", "-f", path); err != nil {
		return err
	}
	return m.kubectl(ctx, "--namespace=kube-system", "rollout", "status", "deployment/coredns", "--timeout="+readyLimit.String())
}
