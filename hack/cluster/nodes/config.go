// What the programs of a node are told. All paths are the box's.

package nodes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/holdfast-dev/holdfast/hack/cluster/box/spec"
	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
)

// cniPlugins is where Debian has the programs that plug in a pod.
const cniPlugins = "/usr/lib/cni"

// containerdConfig leaves out what a box has no use for or may not do: profiles of
// AppArmor, and a lower score for the kernel's choice of whom to end for want of memory.
const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
`

// configure writes what the node's programs are told, and says how they are started.
func (m *machine) configure(node string, files cluster.NodeFiles) ([]spec.Program, error) {
	const etc = spec.Home + "/etc/"
	i := m.number(node)
	kubelet := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true},
			"x509": map[string]any{"clientCAFile": etc + "ca.crt"},
		},
		"authorization": map[string]any{"mode": "Webhook"},
		"tlsCertFile":   etc + "kubelet.crt", "tlsPrivateKeyFile": etc + "kubelet.key",
		"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
		"cgroupDriver":             "cgroupfs",
		"failCgroupV1":             false,
		"clusterDomain":            "cluster.local", "clusterDNS": []string{dnsAddress.String()},
		// No names but the cluster's own.
		"resolvConf":                etc + "resolv.conf",
		"volumePluginDir":           "/var/lib/kubelet/volume-plugins",
		"nodeStatusUpdateFrequency": "2s",
		"nodeLeaseDurationSeconds":  int(silence.Seconds()),
		// How soon pods see a Secret that has changed; a minute, where nobody waits for it.
		"syncFrequency": "10s",
		// What a drill kills for the tenth time is there again as soon as after the first.
		"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "10s"},
		// These want more than a box may do, or than it has.
		"makeIPTablesUtilChains": false,
		"oomScoreAdj":            0,
		"maxOpenFiles":           20000,
		"failSwapOn":             false,
		// Images are loaded, nobody could pull them again.
		"imageGCHighThresholdPercent": 100,
		"evictionHard":                map[string]string{"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
		"shutdownGracePeriod":         "0s",
	}
	proxy := map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode":             "nftables",
		"clientConnection": map[string]any{"kubeconfig": etc + "kube-proxy.kubeconfig"},
		"clusterCIDR":      pods.String(),
		// Limits of connection tracking are the whole machine's.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	}
	// Each pod has a cable of its own to its node, so all of its packets pass the node's
	// rules, those to a pod of the same node too.
	cni := map[string]any{
		"cniVersion": "0.4.0", "name": "pods", "type": "ptp",
		"ipam": map[string]any{
			"type": "host-local", "dataDir": "/run/cni",
			"ranges": [][]map[string]string{{{"subnet": podNetwork(i).String()}}},
			"routes": []map[string]string{{"dst": "0.0.0.0/0"}},
		},
	}
	write := map[string][]byte{
		"containerd.toml": fmt.Appendf(nil, containerdConfig, imageReference(pauseImage), cniPlugins, etc+"cni"),
		"resolv.conf":     nil,
	}
	for name, object := range map[string]any{"kubelet.json": kubelet, "kube-proxy.json": proxy, "cni/pods.conf": cni} {
		data, err := json.MarshalIndent(object, "", "  ")
		if err != nil {
			return nil, err
		}
		write[name] = append(data, '\n')
	}
	for name, from := range map[string]string{
		"ca.crt": files.Authority, "kubelet.crt": files.ServingCertificate, "kubelet.key": files.ServingKey,
		"kubelet.kubeconfig": files.Kubelet, "kube-proxy.kubeconfig": files.Proxy,
	} {
		data, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		write[name] = data
	}
	for name, data := range write {
		if err := os.WriteFile(m.inBox(node, filepath.Join("etc", name)), data, 0o600); err != nil {
			return nil, err
		}
	}
	return []spec.Program{
		{Name: "containerd", Argv: []string{"/usr/bin/env", "containerd", "--config", etc + "containerd.toml"}},
		{Name: "kubelet", Argv: []string{
			spec.Home + "/bin/kubelet", "--config=" + etc + "kubelet.json", "--kubeconfig=" + etc + "kubelet.kubeconfig",
			"--hostname-override=" + node, "--node-ip=" + nodeAddress(i).String(), "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki",
			"--node-labels=topology.kubernetes.io/zone=zone-" + strconv.Itoa(i),
		}},
		{Name: "kube-proxy", Argv: []string{spec.Home + "/bin/kube-proxy", "--config=" + etc + "kube-proxy.json", "--hostname-override=" + node}},
	}, nil
}
