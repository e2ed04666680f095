// A gateway is killed at each step of a payment, chosen by what is seen at its store, at
// its upstream and at its agent, and never by the time. The agent goes on at the others
// until it has an answer that is final, or a person has to say more.

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// far is how far a payment has come when its gateway dies, which is all that decides
// about what is right afterwards.
type far int

const (
	// unrecorded: the store knows nothing of it.
	unrecorded far = iota
	// reserved: nothing has been sent or ever will be.
	reserved
	// requested: the provider has the request, or will have it, and the store no word of that.
	requested
	// settled: the store has the outcome of the attempt.
	settled
)

// killed is a fault, and what must come out for an agent that persists, in each column. A
// fault meets the first request that the provider gets.
type killed struct {
	far    far
	fault  string
	hold   end
	check  end
	resume end
}

var kills = []killed{
	// The next call is the first.
	{unrecorded, "", end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{never, 1}}},
	{unrecorded, "close-after-commit", end{state: held, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{unrecorded, "reset-before-commit", end{state: held, sends: 1}, end{state: succeeded, sends: 2, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{unrecorded, "decline-402", end{state: failed, sends: 1}, end{state: failed, sends: 1}, end{state: failed, sends: 1, charges: [2]int{never, 0}}},
	// Nobody knows that nothing was sent: a person decides. The check finds nothing, so that the next call is
	// the first that the provider gets. What is sent again is it, too; but refused it is never a failure.
	{reserved, "", end{state: held}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{never, 1}}},
	{reserved, "close-after-commit", end{state: held}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{reserved, "reset-before-commit", end{state: held}, end{state: succeeded, sends: 2, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{reserved, "decline-402", end{state: held}, end{state: failed, sends: 1}, end{state: held, sends: 1, charges: [2]int{never, 0}}},
	// Whatever the provider answered, nobody has heard it.
	{requested, "", end{state: held, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{requested, "close-after-commit", end{state: held, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{requested, "reset-before-commit", end{state: held, sends: 1}, end{state: succeeded, sends: 2, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{requested, "decline-402", end{state: held, sends: 1}, end{state: succeeded, sends: 2, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	// As if nobody had died.
	{settled, "", end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{never, 1}}},
	{settled, "close-after-commit", end{state: held, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 1, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{settled, "reset-before-commit", end{state: held, sends: 1}, end{state: succeeded, sends: 2, charges: [2]int{1, 1}}, end{state: succeeded, sends: 2, charges: [2]int{never, 1}}},
	{settled, "decline-402", end{state: failed, sends: 1}, end{state: failed, sends: 1}, end{state: failed, sends: 1, charges: [2]int{never, 0}}},
}

func (k killed) in(column string) end {
	return map[string]end{"hold": k.hold, "check": k.check, "resume": k.resume}[column]
}

// killSteps are the moments, in the order of a payment's life.
var killSteps = []struct {
	name string
	far  far
	// stop has the calls of the cells made at the gateway, waits until each has come to the step, and
	// returns what happens once the gateway is dead.
	stop func(ctx context.Context, k *killing) (afterwards func())
}{
	{"the Reserve is on its way, and is lost", unrecorded, func(ctx context.Context, k *killing) func() {
		rules := k.rules(k.store, (*cell).inBody, servers.HoldRequest)
		k.begin(ctx)
		k.met(ctx, rules)
		return func() { drop(rules) }
	}},
	{"the Reserve is written", reserved, func(ctx context.Context, k *killing) func() {
		rules := k.rules(k.store, (*cell).inBody, servers.HoldReply)
		k.begin(ctx)
		k.met(ctx, rules)
		k.written(ctx, rules, (*cell).inBody, Equal("InFlight"))
		return func() { drop(rules) }
	}},
	{"the request is on its way to the upstream, and is lost", reserved, func(ctx context.Context, k *killing) func() {
		rules := k.upstreamRules(servers.HoldRequest)
		k.begin(ctx)
		k.met(ctx, rules)
		return func() { drop(rules) }
	}},
	{"the request is on its way to the upstream, and arrives", requested, func(ctx context.Context, k *killing) func() {
		rules := k.upstreamRules(servers.HoldRequest)
		k.begin(ctx)
		k.met(ctx, rules)
		return func() {
			for _, r := range rules {
				r.Release()
			}
			k.provided(ctx)
		}
	}},
	{"the provider has done its part", requested, func(ctx context.Context, k *killing) func() {
		rules := k.upstreamRules(servers.HoldReply)
		k.begin(ctx)
		k.provided(ctx)
		return func() { drop(rules) }
	}},
	{"the answer is there, and the settlement is lost on its way", requested, func(ctx context.Context, k *killing) func() {
		rules := k.settling(ctx, servers.HoldRequest)
		return func() { drop(rules) }
	}},
	{"the settlement is written", settled, func(ctx context.Context, k *killing) func() {
		rules := k.settling(ctx, servers.HoldReply)
		k.written(ctx, rules, (*cell).inSettlement, Not(Equal("InFlight")))
		return func() { drop(rules) }
	}},
	{"the agent's answer is on its way, and is lost", settled, func(ctx context.Context, k *killing) func() {
		front, err := servers.NewProxy(loopback+":0", strings.TrimPrefix(k.dies.url(), "http://"))
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(front.Close)
		rules := k.rules(front, (*cell).inBody, servers.HoldReply)
		k.through = k.dies + "-front"
		beside.Store(k.through, "http://"+front.Address())
		k.begin(ctx)
		k.written(ctx, nil, nil, Not(Equal("InFlight")))
		return func() { drop(rules) }
	}},
}

// killTimeout is enough to come to a step on a busy machine.
const killTimeout = 6 * time.Second

// killing is a gateway that is to die at a step, and the cells whose calls it has.
type killing struct {
	dies, through gatewayProcess
	cells         []*cell
	store         *servers.Proxy
	upstream      map[*judge]*servers.Proxy
	answers       []<-chan reply
}

// inBody is in a claim and in a request to the upstream.
func (c *cell) inBody() string { return c.order }

// inSettlement is in a settlement: Redis may be told of it in short.
func (c *cell) inSettlement() string {
	if kind == redis {
		return c.id()
	}
	return c.order
}

// repeats is how often a write may be repeated while its reply is held, on whichever connection. On
// Redis there is one, so that what follows waits behind the first.
func repeats() int {
	if kind == redis {
		return 1
	}
	return 1000
}

func (k *killing) rules(at *servers.Proxy, marker func(*cell) string, do servers.Action) (rules []*servers.Rule) {
	for _, c := range k.cells {
		rules = append(rules, at.On(marker(c), repeats(), do))
	}
	return rules
}

func (k *killing) upstreamRules(do servers.Action) (rules []*servers.Rule) {
	for _, c := range k.cells {
		rules = append(rules, k.upstream[c.judge].On(c.order, 1, do))
	}
	return rules
}

func drop(rules []*servers.Rule) {
	for _, r := range rules {
		r.Drop()
	}
}

// begin makes the calls.
func (k *killing) begin(ctx context.Context) {
	GinkgoHelper()
	at := k.dies
	if k.through != "" {
		at = k.through
	}
	for _, c := range k.cells {
		Expect(c.plan()).To(Succeed())
		call := c.call()
		call.at = at
		k.answers = append(k.answers, c.w.start(ctx, call))
	}
}

// met waits until each rule has met its request.
func (k *killing) met(ctx context.Context, rules []*servers.Rule) {
	GinkgoHelper()
	for i, r := range rules {
		Eventually(r.Met).WithContext(ctx).WithPolling(5*time.Millisecond).Should(BeNumerically(">=", 1), k.cells[i].tool+" "+k.cells[i].fault)
	}
}

// written waits until the record of each is in a state, as another gateway sees it. A store may
// be asked more than once for one write: where the reply that is held was not the last one's, it
// is let go, and the next one's is held.
func (k *killing) written(ctx context.Context, rules []*servers.Rule, marker func(*cell) string, state OmegaMatcher) {
	GinkgoHelper()
	for i, c := range k.cells {
		looked := 0
		Eventually(func(g Gomega, ctx context.Context) {
			answered := rules != nil && rules[i].Answered()
			doc, err := c.w.tryPollAt(ctx, one(), c.tool, c.id(), "")
			g.Expect(err).NotTo(HaveOccurred())
			for _, a := range doc.Attempts {
				Expect(a.Detail).NotTo(ContainSubstring("the lease ended"), "%s %s: the step was not come to in time, after %d looks", c.tool, c.fault, looked)
			}
			there, err := state.Match(doc.State)
			g.Expect(err).NotTo(HaveOccurred())
			// On a connection that calls share, the reply may be to another's request.
			if answered && !there {
				looked++
			}
			if looked >= 10 {
				looked = 0
				last := rules[i]
				GinkgoWriter.Printf("%s %s: the reply was not the last one's; met %d\n", c.tool, c.fault, last.Met())
				rules[i] = k.store.On(marker(c), repeats(), servers.HoldReply)
				last.Release()
				// Not by a poll.
				Eventually(rules[i].Met).WithContext(ctx).WithPolling(5*time.Millisecond).Should(BeNumerically(">=", 1), c.tool+" "+c.fault)
			}
			g.Expect(there).To(BeTrue(), doc.State)
		}).WithContext(ctx).WithPolling(20*time.Millisecond).Should(Succeed(), c.tool+" "+c.fault)
	}
}

// provided waits until the provider has each request, and has made its charge, if it makes one.
func (k *killing) provided(ctx context.Context) {
	GinkgoHelper()
	for _, c := range k.cells {
		charges := 0
		if c.fault == "" || strings.HasSuffix(c.fault, "-after-commit") {
			charges = 1
		}
		Eventually(func(g Gomega) {
			g.Expect(c.judge.gets(c.order)).To(Equal(1))
			g.Expect(c.judge.charges(c.order)).To(Equal(charges))
		}).WithContext(ctx).WithPolling(5*time.Millisecond).Should(Succeed(), c.tool+" "+c.fault)
	}
}

// settling has the provider's answers held until the settlements will be met at the store, and
// waits until they are.
func (k *killing) settling(ctx context.Context, do servers.Action) []*servers.Rule {
	GinkgoHelper()
	answers := k.upstreamRules(servers.HoldReply)
	k.begin(ctx)
	k.provided(ctx)
	rules := k.rules(k.store, (*cell).inSettlement, do)
	for _, r := range answers {
		r.Release()
	}
	k.met(ctx, rules)
	return rules
}

// persists is an agent that goes on with a call until its answer is final.
func (c *cell) persists(ctx context.Context) error {
	tick := time.NewTicker(agentRetries)
	defer tick.Stop()
	for {
		got := c.w.call(ctx, c.call())
		final := false
		switch {
		case got.err != nil:
			return got.err
		case got.verdict() == inFlight, got.status == http.StatusServiceUnavailable:
		case got.verdict() == allow, got.verdict() == replay:
			final = true
		case unknown.check(got) == nil:
			final = c.want.state == held
		default:
			return errors.New(got.String())
		}
		if final {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it should become %s; the last answer was: %s", c.want.state, got)
		case <-tick.C:
		}
	}
	if c.want.state == held {
		// Until a person may decide, which is after lease, grace and settleAfter.
		if err := c.settles(ctx, held); err != nil {
			return err
		}
	}
	if doc, err := c.w.tryPoll(ctx, c.tool, c.id(), ""); err != nil || doc.State != c.want.state {
		return errors.Join(fmt.Errorf("want %s, got %s", c.want.state, inWords(doc)), err)
	}
	return c.money(ctx, c.want.state)
}

// killedAt is the provider that a column has here.
func killedAt(c column) string {
	if c.only != "" {
		return c.only
	}
	return forgets
}

func killName(step, fault, column string) string {
	if fault == "" {
		fault = "no fault"
	}
	return fmt.Sprintf("%s: %s, unknown outcomes: %s", step, fault, column)
}

var _ = onServers("A gateway is killed while", func() {
	cells := map[string]*cell{}
	all := func() (out []*cell) {
		for _, c := range cells {
			out = append(out, c)
		}
		return out
	}
	Describe("in each of its steps", Ordered, ContinueOnFailure, func() {
		BeforeAll(func(ctx SpecContext) {
			clear(cells)
			on, store := newMemory(ctx, servers.Options{})
			w := newWorldOn(ctx, on, roomy)
			at, upstream := map[string]*judge{}, map[*judge]*servers.Proxy{}
			for _, column := range columns {
				name := killedAt(column)
				if at[name] == nil {
					j := newJudge(name)
					proxy, err := servers.NewProxy(net.JoinHostPort(loopback, "0"), strings.TrimPrefix(j.url, "http://"))
					Expect(err).NotTo(HaveOccurred())
					DeferCleanup(proxy.Close)
					at[name], upstream[j] = j, proxy
				}
				tool := w.columnTool(column, name, "http://"+upstream[at[name]].Address())
				tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: killTimeout}
				create(ctx, tool)
			}
			for _, column := range columns {
				w.ready(ctx, toolOf(column, killedAt(column)))
			}
			going := background(all)
			for i, step := range killSteps {
				k := &killing{dies: gatewayProcess(fmt.Sprint("killed-", i)), store: store, upstream: upstream}
				for j, row := range kills {
					if row.far != step.far {
						continue
					}
					for n, column := range columns {
						name, want := killedAt(column), row.in(column.name)
						c := &cell{
							w: w, judge: at[name], order: fmt.Sprintf("kill-%02d-%02d-%d-end", i, j, n), tool: toolOf(column, name),
							fault: row.fault, want: want, charges: want.charges[slices.Index(judges, name)],
						}
						cells[killName(step.name, row.fault, column.name)] = c
						k.cells = append(k.cells, c)
					}
				}
				k.dies.startBeside(ctx)
				for _, c := range k.cells {
					k.dies.serves(ctx, w, c.tool)
				}
				By(step.name)
				afterwards := step.stop(ctx, k)
				k.dies.kill()
				afterwards()
				for n, c := range k.cells {
					Expect((<-k.answers[n]).err).To(HaveOccurred(), "%s, %s: the gateway died after its answer", step.name, c.tool)
					c.start(going, c.persists)
				}
			}
		}, NodeTimeout(5*time.Minute))

		for _, step := range killSteps {
			for _, row := range kills {
				if row.far != step.far {
					continue
				}
				for _, column := range columns {
					It(killName(step.name, row.fault, column.name), func(ctx SpecContext) {
						cells[killName(step.name, row.fault, column.name)].wait(ctx)
					}, NodeTimeout(2*time.Minute))
				}
			}
		}
	})
})
