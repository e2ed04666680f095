// A gateway in a network of its own, whose link is cut and mended: what waits in its
// kernel when the link comes back must be nothing. It takes root to make such a network.

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

// gatewayPort is in the network of the gateway, where all ports are free.
const gatewayPort, healthPort, metricsPort = 8443, 8081, 8080

// network is a network namespace and the link to it. Here it has two addresses.
type network struct {
	name, near, far string
	// subnet is the first three numbers of the addresses.
	subnet string
}

// link is the one of these specs.
var link *network

func (n *network) here() string  { return n.subnet + ".1" }
func (n *network) here2() string { return n.subnet + ".2" }

// inside is an address in the namespace.
func (n *network) inside(port int) string {
	return net.JoinHostPort(n.subnet+".3", strconv.Itoa(port))
}

// twoAddresses is a host with both addresses, known in the namespace alone.
const twoAddresses = "two-addresses.test"

func ip(ctx context.Context, args ...string) {
	GinkgoHelper()
	out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "ip %s: %s (is the package iproute2 installed?)", strings.Join(args, " "), out)
}

var networks int

func newNetwork(ctx context.Context) *network {
	GinkgoHelper()
	// A name of its own each time: the kernel takes an old link away some time after its namespace. The
	// processes that share the specs have numbers next to each other.
	networks++
	id := (os.Getpid()*8 + networks) % 50000
	n := &network{
		name: fmt.Sprint("holdfast-", id), near: fmt.Sprint("hf", id, "a"), far: fmt.Sprint("hf", id, "b"),
		subnet: fmt.Sprintf("10.%d.%d", 200+id/256%50, id%256),
	}
	ip(ctx, "netns", "add", n.name)
	DeferCleanup(func(ctx context.Context) { ip(ctx, "netns", "del", n.name) })
	ip(ctx, "link", "add", n.near, "type", "veth", "peer", "name", n.far, "netns", n.name)
	ip(ctx, "addr", "add", n.here()+"/29", "dev", n.near)
	ip(ctx, "addr", "add", n.here2()+"/29", "dev", n.near)
	ip(ctx, "link", "set", n.near, "up")
	in := []string{"-n", n.name}
	ip(ctx, append(in, "addr", "add", n.subnet+".3/29", "dev", n.far)...)
	ip(ctx, append(in, "link", "set", "lo", "up")...)
	ip(ctx, append(in, "link", "set", n.far, "up")...)
	hosts := filepath.Join("/etc/netns", n.name)
	Expect(os.MkdirAll(hosts, 0o755)).To(Succeed())
	DeferCleanup(os.RemoveAll, hosts)
	Expect(os.WriteFile(filepath.Join(hosts, "hosts"), fmt.Appendf(nil, "127.0.0.1 localhost\n%s %s\n%s %s\n", n.here(), twoAddresses, n.here2(), twoAddresses), 0o644)).To(Succeed())
	return n
}

// cut takes the link down: packets are dropped, and nobody is told. mend brings it back.
func (n *network) cut(ctx context.Context) { GinkgoHelper(); ip(ctx, "link", "set", n.near, "down") }
func (n *network) mend(ctx context.Context) {
	GinkgoHelper()
	ip(ctx, "link", "set", n.near, "up")
}

// lead makes a proxy at this end of the link.
func (n *network) lead(to string) *servers.Proxy {
	GinkgoHelper()
	p, err := servers.NewProxy(n.here()+":0", to)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(p.Close)
	return p
}

// kubeconfig is the gateway's, by a proxy to the API server.
func (n *network) kubeconfig(ctx context.Context) string {
	GinkgoHelper()
	path, err := all.GatewayKubeconfig(ctx)
	Expect(err).NotTo(HaveOccurred())
	config, err := clientcmd.LoadFromFile(path)
	Expect(err).NotTo(HaveOccurred())
	for _, c := range config.Clusters {
		host := strings.TrimPrefix(c.Server, "https://")
		c.Server = "https://" + n.lead(host).Address()
		// What the certificate is for.
		c.TLSServerName, _, err = net.SplitHostPort(host)
		Expect(err).NotTo(HaveOccurred())
	}
	out := filepath.Join(all.Dir(), string(partitioned)+".kubeconfig")
	Expect(clientcmd.WriteToFile(*config, out)).To(Succeed())
	return out
}

// brook is an upstream before the provider with a small mouth: of the first connection
// nothing is read until it is let in, so that most of a request waits in the sender's kernel.
type brook struct {
	net.Listener
	letIn chan struct{}

	mu       sync.Mutex
	accepted int
	read     int
}

func openBrook(ctx context.Context, at string) *brook {
	GinkgoHelper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var errSet error
		err := c.Control(func(fd uintptr) { errSet = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
		if err != nil {
			return err
		}
		return errSet
	}}
	l, err := config.Listen(ctx, "tcp", net.JoinHostPort(at, "0"))
	Expect(err).NotTo(HaveOccurred())
	b := &brook{Listener: l, letIn: make(chan struct{})}
	DeferCleanup(func() { _ = l.Close() })
	target := strings.TrimPrefix(all.ProviderURL(), "http://")
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.accepted++
			n := b.accepted
			b.mu.Unlock()
			if n == 1 {
				go b.trickle(conn, target)
			} else {
				go splice(conn, target)
			}
		}
	}()
	return b
}

// trickle passes on what came on the first connection, once it is let in.
func (b *brook) trickle(conn net.Conn, target string) {
	defer func() { _ = conn.Close() }()
	<-b.letIn
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	_, _ = io.Copy(server, &counted{conn, b})
}

// counted counts what is read of the first connection.
type counted struct {
	io.Reader
	b *brook
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.b.mu.Lock()
	c.b.read += n
	c.b.mu.Unlock()
	return n, err
}

func (b *brook) connections() int { b.mu.Lock(); defer b.mu.Unlock(); return b.accepted }
func (b *brook) bytes() int       { b.mu.Lock(); defer b.mu.Unlock(); return b.read }

// queued are the sockets of a process's network that are connected to a port, in any
// state: what the kernel would still send is in one of these.
func queued(pid int, port int) []string {
	GinkgoHelper()
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
	Expect(err).NotTo(HaveOccurred())
	var out []string
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && strings.HasSuffix(fields[2], fmt.Sprintf(":%04X", port)) {
			out = append(out, fields[2]+" state "+fields[3]+" queue "+fields[4])
		}
	}
	return out
}

var _ = onServersAsRoot("A gateway whose link is cut", func() {
	var (
		w  *world
		on memory
	)
	const timeout = 3 * time.Second
	BeforeEach(func(ctx SpecContext) {
		link = newNetwork(ctx)
		on = startServer(ctx, servers.Options{})
		on.host, on.port = link.here(), link.lead(address(on)).Port()
		Expect(all.StartGatewayProcess(ctx, whole.GatewayProcess{
			Name: string(partitioned), Address: link.inside(gatewayPort), Health: link.inside(healthPort), Metrics: link.inside(metricsPort),
			Kubeconfig: link.kubeconfig(ctx), Within: []string{"ip", "netns", "exec", link.name},
		})).To(Succeed())
		DeferCleanup(func(ctx context.Context) { Expect(all.Processes().Stop(ctx, string(partitioned))).To(Succeed()) })
		w = newWorldOn(ctx, on, func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: timeout}
		})
	})

	It("R29: the partition heals after the lease is over and the hold was released, and nothing of the first attempt is delivered", func(ctx SpecContext) {
		upstream := openBrook(ctx, link.here())
		_, text, _ := net.SplitHostPort(upstream.Addr().String())
		port, err := strconv.Atoi(text)
		Expect(err).NotTo(HaveOccurred())
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.URL = "http://" + upstream.Addr().String() + "/charges"
		})
		pid, err := all.Processes().PID(string(partitioned))
		Expect(err).NotTo(HaveOccurred())
		const size = 256 << 10
		c := call{id: "k1", body: fmt.Sprintf(`{"accountId":%q,"orderId":"9","amount":10,"memo":%q}`, w.namespace, strings.Repeat("m", size))}
		cut := c
		cut.at = partitioned
		first := w.start(ctx, cut)
		// The connection is made, and the kernel has what the upstream does not take.
		Eventually(func() []string { return queued(pid, port) }).WithContext(ctx).WithPolling(5 * time.Millisecond).
			Should(ContainElement(And(ContainSubstring("state 01"), Not(ContainSubstring("queue 00000000:")))))
		Eventually(upstream.connections).WithContext(ctx).Should(Equal(1))
		link.cut(ctx)
		mended := sync.OnceFunc(func() { link.mend(ctx) })
		DeferCleanup(mended)

		var doc intentDocument
		Eventually(func(ctx context.Context) (string, error) {
			var err error
			doc, err = w.tryPollAt(ctx, one(), charge, "k1", "")
			return doc.State, err
		}).WithContext(ctx).Should(Equal("Held"))
		w.resolve(ctx, doc.Hold.Name, release)
		c.at = one()
		paid := w.pay(ctx, c, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(queued(pid, port)).To(BeEmpty(), "the kernel still has something of the first attempt")

		mended()
		close(upstream.letIn)
		got := <-first
		if got.err == nil {
			Expect(got.verdict()).To(BeElementOf(replay, unknownHold, inFlight, deny), got.String())
		}
		w.servedEverywhere(ctx, call{id: c.id, body: c.body})
		Eventually(func(ctx context.Context) string { return w.call(ctx, cut).verdict() }).WithContext(ctx).Should(Equal(replay))
		Expect(w.pay(ctx, cut, 201, replay).body).To(Equal(paid.body))
		Expect(upstream.bytes()).To(BeNumerically("<", size), "the kernel delivered the first attempt")
		Expect(queued(pid, port)).To(BeEmpty())
		Expect(w.charged(ctx, "9")).To(Equal(1))
	}, NodeTimeout(2*time.Minute))

	It("R13: two upstream addresses, and the first one times out after it committed", func(ctx SpecContext) {
		provider := strings.TrimPrefix(all.ProviderURL(), "http://")
		one, err := net.Listen("tcp", net.JoinHostPort(link.here(), "0"))
		Expect(err).NotTo(HaveOccurred())
		port := strconv.Itoa(one.Addr().(*net.TCPAddr).Port)
		two, err := net.Listen("tcp", net.JoinHostPort(link.here2(), port))
		Expect(err).NotTo(HaveOccurred())
		var mu sync.Mutex
		connections := 0
		for _, l := range []net.Listener{one, two} {
			DeferCleanup(func() { _ = l.Close() })
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					mu.Lock()
					connections++
					mu.Unlock()
					go splice(conn, provider)
				}
			}()
		}
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.URL = "http://" + net.JoinHostPort(twoAddresses, port) + "/charges"
		})
		w.pay(ctx, call{id: "k0", body: w.order("8", "10"), at: partitioned}, 201, allow)
		before := sent(ctx)
		c := call{id: "k1", body: w.order("9", "10"), fault: "lost-answer", at: partitioned}
		Expect(w.pay(ctx, c, http.StatusConflict, unknownHold).problem().Reason).To(Equal("OutcomeUnknown"))
		w.pay(ctx, c, http.StatusConflict, unknownHold)
		Expect(sent(ctx) - before).To(Equal(1))
		Expect(w.charged(ctx, "9")).To(Equal(1))
		mu.Lock()
		defer mu.Unlock()
		Expect(connections).To(BeNumerically("<=", 2), "one for each call at the most: the second address is not tried after the first")
	}, NodeTimeout(2*time.Minute))
})
