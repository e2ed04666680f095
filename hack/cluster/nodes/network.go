// The network: a switch in this machine's own network, and a cable from it to each box.
// Pods of one node reach those of another by routes, nothing is wrapped or translated,
// so that the address that arrives is the one that was sent.

package nodes

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
)

// maxNodes is how many nodes the network has room for.
const maxNodes = 9

// switchName is the network device that the nodes' cables go to.
const switchName = "holdfast0"

var (
	// hostAddress is this machine's on the switch: the API server's.
	hostAddress = netip.MustParseAddr("192.168.77.1")
	nodeNetwork = netip.PrefixFrom(hostAddress, 24)
	// pods is the network that each node has a part of.
	pods     = netip.MustParsePrefix("10.244.0.0/16")
	services = netip.MustParsePrefix("10.96.0.0/16")
	// dnsAddress is that of the Service which serves names.
	dnsAddress = netip.MustParseAddr("10.96.0.10")
)

func nodeAddress(number int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, 168, 77, byte(10 + number)})
}

func podNetwork(number int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(number), 0}), 24)
}

// cable is the end of a node's cable that is in the switch.
func cable(number int) string { return "holdfast" + strconv.Itoa(number) }

func (m *machine) address(node string) string {
	if node == ControlPlane {
		return hostAddress.String()
	}
	return nodeAddress(m.number(node)).String()
}

func (m *machine) networks(_ context.Context, node string) ([]string, error) {
	return []string{m.address(node), podNetwork(m.number(node)).String()}, nil
}

// plugSwitch makes the switch. One that is there already belongs to another state
// directory, whose cluster may be running.
func (m *machine) plugSwitch(ctx context.Context) error {
	if _, err := net.InterfaceByName(switchName); err == nil {
		owner, err := switchOwner(ctx)
		if err != nil {
			return err
		}
		return fmt.Errorf("the network device %s is there: another cluster runs in %s; end it with `go run ./hack/cluster down --dir %s`, or if that directory is gone: ip link del %s",
			switchName, owner, owner, switchName)
	}
	for _, p := range []netip.Prefix{nodeNetwork.Masked(), pods, services} {
		used, err := output(exec.CommandContext(ctx, "ip", "-4", "route", "show", "root", p.String()), "ip route show")
		if err != nil {
			return err
		}
		if used = strings.TrimSpace(used); used != "" {
			return fmt.Errorf("this machine has a network in %s, which the cluster uses: %s", p, used)
		}
	}
	for _, argv := range [][]string{
		{"ip", "link", "add", switchName, "type", "bridge"},
		{"ip", "link", "set", switchName, "alias", m.dir},
		{"ip", "addr", "add", nodeNetwork.String(), "dev", switchName},
		{"ip", "link", "set", switchName, "up"},
	} {
		if err := host(ctx, argv...); err != nil {
			return err
		}
	}
	return nil
}

// switchOwner is the state directory that the switch belongs to.
func switchOwner(ctx context.Context) (string, error) {
	text, err := output(exec.CommandContext(ctx, "ip", "-d", "link", "show", switchName), "ip link show")
	if err != nil {
		return "", err
	}
	_, alias, _ := strings.Cut(text, "\n    alias ")
	return strings.TrimSpace(alias), nil
}

// ownsSwitch says whether the switch is there and is this state directory's.
func (m *machine) ownsSwitch(ctx context.Context) (bool, error) {
	if _, err := net.InterfaceByName(switchName); err != nil {
		return false, nil
	}
	owner, err := switchOwner(ctx)
	return owner == m.dir, err
}

// unplugSwitch removes the switch, if it is this state directory's.
func (m *machine) unplugSwitch(ctx context.Context) error {
	if ours, err := m.ownsSwitch(ctx); err != nil || !ours {
		return err
	}
	return host(ctx, "ip", "link", "del", switchName)
}

// plug gives a box its network: a cable to the switch, and the routes to the other nodes'
// pods. This machine gets the way to the node's pods, for the API server's calls to them.
func (m *machine) plug(ctx context.Context, node string) error {
	pid, err := m.pid(node)
	if err != nil {
		return err
	}
	i := m.number(node)
	if err := host(ctx, "ip", "link", "add", cable(i), "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(pid)); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"ip", "link", "set", cable(i), "master", switchName},
		{"ip", "link", "set", cable(i), "up"},
	} {
		if err := host(ctx, argv...); err != nil {
			return err
		}
	}
	inside := [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "addr", "add", netip.PrefixFrom(nodeAddress(i), nodeNetwork.Bits()).String(), "dev", "eth0"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "route", "add", "default", "via", hostAddress.String()},
	}
	for other := range m.state.Nodes {
		if other+1 != i {
			inside = append(inside, []string{"ip", "route", "add", podNetwork(other + 1).String(), "via", nodeAddress(other + 1).String()})
		}
	}
	for _, argv := range inside {
		if _, err := m.run(ctx, node, true, nil, argv...); err != nil {
			return err
		}
	}
	return host(ctx, "ip", "route", "replace", podNetwork(i).String(), "via", nodeAddress(i).String())
}

// unplug removes a node's cable, if there is one in this state directory's switch. The
// kernel does too, a while after the box has ended.
func (m *machine) unplug(ctx context.Context, node string) error {
	if ours, err := m.ownsSwitch(ctx); err != nil || !ours {
		return err
	}
	name := cable(m.number(node))
	if _, err := net.InterfaceByName(name); err != nil {
		return nil
	}
	err := host(ctx, "ip", "link", "del", name)
	if _, gone := net.InterfaceByName(name); gone != nil {
		return nil
	}
	return err
}
