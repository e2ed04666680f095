// The processes that serve agents: the manager, and on a store that several processes
// share a second gateway beside it. An agent does not know which one it meets.

package e2e

import (
	"context"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

// gatewayProcess is one of them, by the name of its process.
type gatewayProcess string

const (
	// controllers is the one that also runs the controllers.
	controllers = gatewayProcess(whole.Manager)
	second      = gatewayProcess(whole.Gateway)
	// partitioned is behind a link that can be cut, while the specs about that run.
	partitioned = gatewayProcess("partitioned")
)

// gateways are all that serve.
func gateways() []gatewayProcess {
	if kind == bolt {
		return []gatewayProcess{controllers}
	}
	return []gatewayProcess{controllers, second}
}

// one and other are two different gateways; on a store of one process they are the same.
func one() gatewayProcess   { return gateways()[0] }
func other() gatewayProcess { return gateways()[len(gateways())-1] }

// chance decides what a spec leaves open. Its seed is the one that Ginkgo prints.
var chance = sync.OnceValue(func() *dice {
	seed := uint64(GinkgoRandomSeed())
	return &dice{r: rand.New(rand.NewPCG(seed, seed))}
})

type dice struct {
	mu sync.Mutex
	r  *rand.Rand
}

func (d *dice) below(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.IntN(n)
}

func anyGateway() gatewayProcess {
	all := gateways()
	return all[chance().below(len(all))]
}

func (g gatewayProcess) url() string {
	switch g {
	case second:
		return all.SecondGatewayURL()
	case partitioned:
		return "http://" + link.inside(gatewayPort)
	}
	if url, ok := beside.Load(g); ok {
		return url.(string)
	}
	return all.GatewayURL()
}

// beside has the URLs of the gateways beside these, while a spec needs them.
var beside sync.Map

// startBeside starts one, until the end of the spec.
func (g gatewayProcess) startBeside(ctx context.Context) {
	GinkgoHelper()
	free, err := ports.Free(3)
	Expect(err).NotTo(HaveOccurred())
	at := func(i int) string { return net.JoinHostPort(loopback, strconv.Itoa(free[i])) }
	beside.Store(g, "http://"+at(0))
	DeferCleanup(func(ctx context.Context) { Expect(all.Processes().Stop(ctx, string(g))).To(Succeed()) })
	Expect(all.StartGatewayProcess(ctx, whole.GatewayProcess{Name: string(g), Address: at(0), Health: at(1), Metrics: at(2)})).To(Succeed())
}

// serves waits until it serves the world's tool.
func (g gatewayProcess) serves(ctx context.Context, w *world, tool string) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) int { return w.get(ctx, w.toolAt(g, tool)+"/intents/nobody").status }).
		WithContext(ctx).Should(Equal(http.StatusNotFound), string(g))
}

// kill ends it as a crash does.
func (g gatewayProcess) kill() {
	GinkgoHelper()
	Expect(all.Kill(string(g), syscall.SIGKILL)).To(Succeed())
	Eventually(func() bool { return all.Running(string(g)) }).Should(BeFalse())
}

// start starts it again, on what it had on the disk, and waits until it says that it is ready.
func (g gatewayProcess) start(ctx context.Context) {
	GinkgoHelper()
	if g == second {
		Expect(all.StartGateway(ctx)).To(Succeed())
		return
	}
	Expect(all.StartManager(ctx)).To(Succeed())
}

// crash kills it and starts it again.
func (g gatewayProcess) crash(ctx context.Context) {
	GinkgoHelper()
	g.kill()
	g.start(ctx)
}

// stop ends it in an orderly way, until the end of the spec at the latest.
func (g gatewayProcess) stop(ctx context.Context) {
	GinkgoHelper()
	DeferCleanup(func(ctx context.Context) { g.start(ctx) })
	Expect(all.Processes().Stop(ctx, string(g))).To(Succeed())
}

// pause stands it still, until the end of the spec at the latest; the result lets it go on.
func (g gatewayProcess) pause(ctx context.Context) (resume func()) {
	GinkgoHelper()
	Expect(all.Processes().Pause(ctx, string(g))).To(Succeed())
	once := sync.OnceFunc(func() { Expect(all.Kill(string(g), syscall.SIGCONT)).To(Succeed()) })
	DeferCleanup(once)
	return once
}
