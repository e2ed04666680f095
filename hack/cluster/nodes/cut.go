// Cutting the network: packets between a node or a pod and some addresses are dropped,
// in both directions, as if the cable was out. Nobody is told: no reset, no ICMP.
//
// The rules are in a table of their own in the node's network, at each place that a packet
// can pass, so that an address is met whether it is a pod's or that of a Service, which
// kube-proxy replaces on the way.

package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// ControlPlane, as an address to cut, is where the API server is.
const ControlPlane = "control-plane"

// Cut drops all packets between a node, its pods included, and these addresses: addresses,
// networks, names of other nodes (with their pods), or ControlPlane. A second cut of a node
// replaces the first.
func (c *Cluster) Cut(ctx context.Context, node string, addresses ...string) error {
	if err := c.knows(node); err != nil {
		return err
	}
	return c.drop(ctx, node, "holdfast-cut", "", addresses)
}

// Mend ends a Cut.
func (c *Cluster) Mend(ctx context.Context, node string) error {
	return c.pass(ctx, node, "holdfast-cut")
}

// CutPod is Cut for one pod, as long as the pod has the address that it has now.
func (c *Cluster) CutPod(ctx context.Context, namespace, pod string, addresses ...string) error {
	p, err := c.pod(ctx, namespace, pod)
	if err != nil {
		return err
	}
	switch {
	case p.Spec.HostNetwork:
		return fmt.Errorf("pod %s/%s has the network of its node: cut the node", namespace, pod)
	case p.Status.PodIP == "" || p.Spec.NodeName == "":
		return fmt.Errorf("pod %s/%s has no address yet", namespace, pod)
	}
	return c.drop(ctx, p.Spec.NodeName, podTable(namespace, pod), p.Status.PodIP, addresses)
}

// MendPod ends a CutPod. The pod may be gone since.
func (c *Cluster) MendPod(ctx context.Context, namespace, pod string) error {
	var errs []error
	for _, node := range c.state.Nodes {
		if c.Running(node) {
			errs = append(errs, c.pass(ctx, node, podTable(namespace, pod)))
		}
	}
	return errors.Join(errs...)
}

// Running says whether a node's box is there.
func (c *Cluster) Running(node string) bool { return c.world.running(node) }

func podTable(namespace, pod string) string { return "holdfast-cut-" + namespace + "/" + pod }

func (c *Cluster) pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	client, err := c.Client()
	if err != nil {
		return nil, err
	}
	return client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

// Client is the administrator's client.
func (c *Cluster) Client() (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("reading kubeconfig: %w", err)
	}
	return kubernetes.NewForConfig(config)
}

// drop puts a table of rules into a node's network; only says whose packets alone.
func (c *Cluster) drop(ctx context.Context, node, table, only string, addresses []string) error {
	if len(addresses) == 0 {
		return errors.New("say which addresses to cut off")
	}
	var texts []string
	for _, a := range addresses {
		switch {
		case a == node:
			return fmt.Errorf("%s cannot be cut off from itself", node)
		case c.knows(a) == nil:
			all, err := c.world.networks(ctx, a)
			if err != nil {
				return err
			}
			texts = append(texts, all...)
		case a == ControlPlane:
			texts = append(texts, c.world.address(ControlPlane))
		default:
			texts = append(texts, a)
		}
	}
	peers, err := parseNetworks(texts)
	if err != nil {
		return err
	}
	elements := make([]string, len(peers))
	for i, p := range peers {
		if !p.Addr().Is4() {
			return fmt.Errorf("%s: the cluster's network is IPv4", p)
		}
		elements[i] = p.String()
	}
	return c.nft(ctx, node, rules(table, only, elements))
}

// rules are the text for nft. The table is made first, so that deleting it cannot fail.
func rules(table, only string, peers []string) string {
	from, to, asked := "", "", ""
	if only != "" {
		from, to, asked = "ip saddr "+only+" ", "ip daddr "+only+" ", "ct original ip saddr "+only+" "
	}
	match := from + "ip daddr @peers drop; " + to + "ip saddr @peers drop; "
	// The answers to what went to a Service bear its address only where kube-proxy has put
	// it back: what a connection was opened to is known throughout.
	known := asked + "ct original ip daddr @peers drop; "
	var b strings.Builder
	fmt.Fprintf(&b, "table ip %s {}\ndelete table ip %s\ntable ip %s {\n", table, table, table)
	fmt.Fprintf(&b, "\tset peers { type ipv4_addr; flags interval; auto-merge; elements = { %s }; }\n", strings.Join(peers, ", "))
	for _, chain := range []struct {
		name, hook string
		priority   int
		match      string
	}{
		{"arriving", "prerouting", -400, match},
		{"delivered", "input", -10, match + known},
		{"passing", "forward", -10, match + known},
		{"sent", "output", -400, match},
		{"leaving", "postrouting", -10, match + known},
	} {
		fmt.Fprintf(&b, "\tchain %s { type filter hook %s priority %d; policy accept; %s}\n", chain.name, chain.hook, chain.priority, chain.match)
	}
	b.WriteString("}\n")
	return b.String()
}

// pass takes a table of rules out of a node's network; it need not be there.
func (c *Cluster) pass(ctx context.Context, node, table string) error {
	if err := c.knows(node); err != nil {
		return err
	}
	return c.nft(ctx, node, fmt.Sprintf("table ip %s {}\ndelete table ip %s\n", table, table))
}

func (c *Cluster) nft(ctx context.Context, node, text string) error {
	var in io.Reader = strings.NewReader(text)
	_, err := c.run(ctx, node, true, in, "nft", "-f", "-")
	return err
}
