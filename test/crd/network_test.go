// What the NetworkPolicies mean, as Kubernetes defines it: who reaches whom. Not every network enforces them, and none is
// needed to know what they say.

package crd

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	gateways "github.com/holdfast-dev/holdfast/internal/gateway"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// end is one end of a connection: a pod, or an address outside of the cluster.
type end struct {
	namespace string
	labels    labels.Set
	address   string
}

// network evaluates NetworkPolicies.
type network struct {
	t        *testing.T
	policies []networkingv1.NetworkPolicy
}

func (n network) matches(selector *metav1.LabelSelector, set labels.Set) bool {
	n.t.Helper()
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		n.t.Fatal(err)
	}
	return s.Matches(set)
}

// peers says whether one of the peers is this end. None at all is everybody.
func (n network) peers(of []networkingv1.NetworkPolicyPeer, home string, e end) bool {
	return len(of) == 0 || slices.ContainsFunc(of, func(p networkingv1.NetworkPolicyPeer) bool {
		if p.IPBlock != nil {
			// Pods are not named by addresses: networks differ in what they make of that.
			if e.address == "" {
				return false
			}
			in := func(cidr string) bool {
				prefix, err := netip.ParsePrefix(cidr)
				if err != nil {
					n.t.Fatal(err)
				}
				return prefix.Contains(netip.MustParseAddr(e.address))
			}
			return in(p.IPBlock.CIDR) && !slices.ContainsFunc(p.IPBlock.Except, in)
		}
		if e.address != "" {
			return false
		}
		if p.NamespaceSelector == nil {
			if e.namespace != home {
				return false
			}
		} else if !n.matches(p.NamespaceSelector, labels.Set{corev1.LabelMetadataName: e.namespace}) {
			return false
		}
		return p.PodSelector == nil || n.matches(p.PodSelector, e.labels)
	})
}

func (n network) ports(of []networkingv1.NetworkPolicyPort, protocol corev1.Protocol, port int32) bool {
	return len(of) == 0 || slices.ContainsFunc(of, func(p networkingv1.NetworkPolicyPort) bool {
		if p.Port != nil && p.Port.Type != intstr.Int || p.EndPort != nil {
			n.t.Fatal("ports by name and ranges are not known here")
		}
		return (p.Protocol == nil && protocol == corev1.ProtocolTCP || p.Protocol != nil && *p.Protocol == protocol) && (p.Port == nil || p.Port.IntVal == port)
	})
}

// half says whether one end's own policies allow a direction; without any they do.
func (n network) half(direction networkingv1.PolicyType, at, other end, protocol corev1.Protocol, port int32) bool {
	if at.address != "" {
		return true
	}
	fenced := false
	for _, p := range n.policies {
		if p.Namespace != at.namespace || !slices.Contains(p.Spec.PolicyTypes, direction) || !n.matches(&p.Spec.PodSelector, at.labels) {
			continue
		}
		fenced = true
		if direction == networkingv1.PolicyTypeIngress {
			for _, r := range p.Spec.Ingress {
				if n.peers(r.From, p.Namespace, other) && n.ports(r.Ports, protocol, port) {
					return true
				}
			}
			continue
		}
		for _, r := range p.Spec.Egress {
			if n.peers(r.To, p.Namespace, other) && n.ports(r.Ports, protocol, port) {
				return true
			}
		}
	}
	return !fenced
}

func (n network) allows(from, to end, protocol corev1.Protocol, port int32) bool {
	return n.half(networkingv1.PolicyTypeEgress, from, to, protocol, port) && n.half(networkingv1.PolicyTypeIngress, to, from, protocol, port)
}

func TestWhoReachesWhom(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(configDir, "samples", "network-policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	sample, err := decode(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	n := network{t: t, policies: all[networkingv1.NetworkPolicy](t, "NetworkPolicy")}
	for _, o := range sample {
		if o.GetKind() != "NetworkPolicy" {
			continue
		}
		var p networkingv1.NetworkPolicy
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &p, true); err != nil {
			t.Fatal(err)
		}
		n.policies = append(n.policies, p)
	}
	templates := pods(t)
	pod := func(namespace, of string) end { return end{namespace: namespace, labels: templates[of].Labels} }
	for _, o := range stores(t) {
		n.policies = append(n.policies, converted[networkingv1.NetworkPolicy](t, o.NetworkPolicy))
	}
	if len(n.policies) != 7 {
		t.Fatalf("found %d NetworkPolicies, want 7", len(n.policies))
	}

	var (
		gateway, controllers = pod("holdfast-system", "holdfast-gateway"), pod("holdfast-system", "holdfast-controllers")
		redis, postgres      = pod("shop", "redis"), pod("shop", "postgres")
		agent                = end{namespace: "sample-agents", labels: labels.Set{"app": "agent"}}
		provider             = end{namespace: "sample-provider", labels: labels.Set{"app": "provider"}}
		dns                  = end{namespace: "kube-system", labels: labels.Set{"k8s-app": "kube-dns"}}
		prometheus           = end{namespace: "monitoring", labels: labels.Set{"app.kubernetes.io/name": "prometheus"}}
		// Pods that want to be taken for another one.
		impostor = end{namespace: "sample-agents", labels: gateway.labels}
		stranger = end{namespace: "holdfast-system", labels: labels.Set{"app": "debug"}}
		neighbor = end{namespace: "shop", labels: labels.Set{"app": "web"}}
		outside  = end{address: "203.0.113.10"}
		outside6 = end{address: "2001:db8::10"}
		metadata = end{address: "169.254.169.254"}
		link6    = end{address: "fe80::1"}
		api      = end{address: "10.0.0.5"}
		nodeDNS  = end{address: "169.254.20.10"}
	)
	const tcp, udp = corev1.ProtocolTCP, corev1.ProtocolUDP
	for _, tc := range []struct {
		what     string
		from, to end
		protocol corev1.Protocol
		port     int32
		allowed  bool
	}{
		{"an agent calls the gateway", agent, gateway, tcp, 8443, true},
		{"an agent looks up a name", agent, dns, udp, 53, true},
		{"an agent calls the provider", agent, provider, tcp, 8080, false},
		{"an agent calls a provider outside", agent, outside, tcp, 443, false},
		{"an agent calls the API server", agent, api, tcp, 6443, false},
		{"an agent asks another DNS", agent, outside, udp, 53, false},
		{"an agent scrapes the gateway", agent, gateway, tcp, 8080, false},
		{"an agent calls the controllers", agent, controllers, tcp, 8443, false},
		{"an agent calls a Redis", agent, redis, tcp, 6379, false},
		{"an agent calls a PostgreSQL", agent, postgres, tcp, 5432, false},
		{"an agent calls another agent", agent, agent, tcp, 8080, false},
		{"an agent calls what looks like a gateway, in its own namespace", agent, impostor, tcp, 8443, false},
		{"a pod of any namespace calls the gateway", neighbor, gateway, tcp, 8443, true},
		{"somebody outside calls the gateway", outside, gateway, tcp, 8443, true},
		{"somebody outside asks the gateway's probes", outside, gateway, tcp, 8081, false},
		{"somebody outside scrapes the gateway", outside, gateway, tcp, 8080, false},
		{"Prometheus scrapes the gateway", prometheus, gateway, tcp, 8080, true},
		{"Prometheus scrapes the controllers", prometheus, controllers, tcp, 8080, true},
		{"Prometheus asks the gateway's probes", prometheus, gateway, tcp, 8081, false},

		{"the gateway calls the provider", gateway, provider, tcp, 8080, true},
		{"the gateway calls a provider outside", gateway, outside, tcp, 443, true},
		{"the gateway calls a provider outside at another port", gateway, outside6, tcp, 8443, true},
		{"the gateway looks up a name", gateway, dns, udp, 53, true},
		{"the gateway looks up a name at its node", gateway, nodeDNS, udp, 53, true},
		{"the gateway calls the API server", gateway, api, tcp, 6443, true},
		{"the gateway calls an API server outside", gateway, outside6, tcp, 443, true},
		{"the gateway asks a metadata service", gateway, metadata, tcp, 80, false},
		{"the gateway asks a neighbor of its node", gateway, link6, tcp, 80, false},
		{"the gateway calls its Redis", gateway, redis, tcp, 6379, true},
		{"the gateway calls its PostgreSQL", gateway, postgres, tcp, 5432, true},
		{"the gateway calls another port of a store's pod", gateway, redis, tcp, 22, false},
		{"the gateway calls the controllers", gateway, controllers, tcp, 8443, false},

		{"the controllers call a Redis", controllers, redis, tcp, 6379, true},
		{"the controllers call a PostgreSQL", controllers, postgres, tcp, 5432, true},
		{"the controllers call a PostgreSQL outside", controllers, outside, tcp, 5432, true},
		{"the controllers look up a name at their node", controllers, nodeDNS, udp, 53, true},
		{"the controllers call the API server", controllers, api, tcp, 6443, true},
		{"the controllers call an API server outside", controllers, outside, tcp, 443, true},
		{"the controllers call an API server outside, by IPv6", controllers, outside6, tcp, 443, true},
		{"the controllers ask a neighbor of their node", controllers, link6, tcp, 443, false},
		{"the controllers call a provider", controllers, provider, tcp, 8080, false},
		{"the controllers ask a metadata service", controllers, metadata, tcp, 80, false},

		{"a neighbor calls a Redis", neighbor, redis, tcp, 6379, false},
		{"a neighbor calls a PostgreSQL", neighbor, postgres, tcp, 5432, false},
		{"a store calls another one", redis, postgres, tcp, 5432, false},
		{"a store calls outside", postgres, outside, tcp, 443, false},
		{"a store looks up a name", redis, dns, udp, 53, false},
		{"what has the gateway's labels elsewhere calls a store", impostor, redis, tcp, 6379, false},
		{"what has the gateway's labels elsewhere calls the provider", impostor, provider, tcp, 8080, false},
		{"another pod of the operator's namespace calls a store", stranger, redis, tcp, 6379, false},
		{"another pod of the operator's namespace calls the provider", stranger, provider, tcp, 8080, false},
		{"another pod of the operator's namespace calls outside", stranger, outside, tcp, 443, false},
		{"another pod of the operator's namespace is called", neighbor, stranger, tcp, 80, false},
		{"a neighbor calls the provider", neighbor, provider, tcp, 8080, false},
		{"the controllers call the provider's PostgreSQL", controllers, provider, tcp, 5432, false},
	} {
		if got := n.allows(tc.from, tc.to, tc.protocol, tc.port); got != tc.allowed {
			t.Errorf("%s: allowed is %t", tc.what, got)
		}
	}
	// Metadata services, whatever they listen at: a DNS, or an API server, is at two ports that none of them has.
	services := gateways.MetadataServices()
	if len(services) < 5 {
		t.Errorf("only %d metadata services are known", len(services))
	}
	for _, address := range services {
		for _, port := range []int32{80, 443, 988, 8080, 8443, 32526} {
			if n.allows(gateway, end{address: address.String()}, tcp, port) {
				t.Errorf("the gateway reaches the metadata service %s at port %d", address, port)
			}
			if n.allows(controllers, end{address: address.String()}, tcp, port) {
				t.Errorf("the controllers reach the metadata service %s at port %d", address, port)
			}
		}
	}
	if workload.RedisPort != 6379 || workload.PostgresPort != 5432 {
		t.Error("the controllers' NetworkPolicy names other ports than deployed stores have")
	}
}
