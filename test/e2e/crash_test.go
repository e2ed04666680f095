// Processes are killed, and stood still, for real, while payments are on their way: those
// that serve, and the store's server.

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// retryEvery is how soon an agent tries again.
const retryEvery = 50 * time.Millisecond

// payment is an intent of the load, and how it ended for its agent.
type payment struct {
	call  call
	order string
	// acked is the success that its agent was told.
	acked *reply
	// late: it was told that nobody knows, and later it was known to be paid, or never sent and then paid.
	late bool
	err  error
}

// drive is what an agent does until it has an answer: it sends the same call under
// the same ID, through refused connections, answers cut short, and 503.
func (p *payment) drive(ctx context.Context, w *world) {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		got := w.call(ctx, p.call)
		switch {
		case got.err != nil, got.status == http.StatusServiceUnavailable, got.verdict() == inFlight,
			got.status == http.StatusBadGateway && got.verdict() == deny:
			// Nothing is known yet, or nothing was sent.
		case got.status == http.StatusCreated && (got.verdict() == allow || got.verdict() == replay):
			p.acked = &got
			return
		case got.status == http.StatusConflict && got.verdict() == unknownHold:
			return
		default:
			p.err = fmt.Errorf("%s: %s", p.call.id, got)
			return
		}
		select {
		case <-ctx.Done():
			p.err = fmt.Errorf("%s: no answer in the end: %s", p.call.id, got)
			return
		case <-tick.C:
		}
	}
}

// servedAfterLoad waits until all gateways have their store again: one that has been asked by nobody since the
// store was away finds out by the first who asks.
func servedAfterLoad(ctx context.Context, w *world, payments []*payment) {
	GinkgoHelper()
	for _, p := range payments {
		if p.acked != nil {
			w.servedEverywhere(ctx, p.call)
			return
		}
	}
	Fail("nobody was told that it was paid")
}

// killsEnv is how many kills there are under load, for each store.
const killsEnv = "HOLDFAST_E2E_KILLS"

func killsAtLoad() int {
	GinkgoHelper()
	text := os.Getenv(killsEnv)
	if text == "" {
		return 20
	}
	n, err := strconv.Atoi(text)
	Expect(err).NotTo(HaveOccurred(), killsEnv)
	return n
}

var _ = Describe("A process that dies", long, func() {
	It("SIGKILLs at random moments under load", Label("drill"), func(ctx SpecContext) {
		const agentsAtWork = 8
		kills := killsAtLoad()
		var deduplication map[string]string
		Expect(ask(ctx, http.MethodGet, "/deduplication", nil, &deduplication)).To(Succeed())
		Expect(deduplication).To(HaveKeyWithValue("window", "0s"))
		w := newWorldOn(ctx, shared)
		on := memory{}
		if kind != bolt {
			on = startServer(ctx, servers.Options{})
			w = newWorldOn(ctx, on)
		}

		// Half of the payments take their time before the money moves, half after it; some end badly by themselves.
		faults := []string{"delay:150ms", "delay-after-commit:150ms", "", "delay:50ms", "close-after-commit", "delay-after-commit:50ms"}
		var (
			next     atomic.Int64
			stop     = make(chan struct{})
			end      = sync.OnceFunc(func() { close(stop) })
			mu       sync.Mutex
			payments []*payment
			working  sync.WaitGroup
		)
		// Also where the spec fails before its end.
		defer working.Wait()
		defer end()
		for range agentsAtWork {
			working.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					n := int(next.Add(1))
					order := fmt.Sprint("order-", n)
					p := &payment{order: order, call: call{id: fmt.Sprint("intent-", n), body: w.order(order, fmt.Sprint(n)), fault: faults[n%len(faults)]}}
					p.drive(ctx, w)
					mu.Lock()
					payments = append(payments, p)
					mu.Unlock()
				}
			})
		}
		killed := map[string]int{}
		for n := range kills {
			// Some payments later.
			moment := sent(ctx) + 1 + chance().below(2*agentsAtWork)
			Eventually(func() int { return sent(ctx) }).WithContext(ctx).WithPolling(5*time.Millisecond).Should(BeNumerically(">=", moment), "kill %d", n)
			targets := len(gateways())
			if kind != bolt {
				// The store's server is killed as often as both gateways together.
				targets *= 2
			}
			if t := chance().below(targets); t < len(gateways()) {
				g := gateways()[t]
				killed[string(g)]++
				g.crash(ctx)
			} else {
				killed["store"]++
				Expect(on.Kill(ctx)).To(Succeed())
				Expect(on.Start(ctx)).To(Succeed())
			}
		}
		end()
		working.Wait()

		servedAfterLoad(ctx, w, payments)
		// Everybody comes back once more.
		acked, held := 0, 0
		for _, p := range payments {
			Expect(p.err).NotTo(HaveOccurred())
			if p.acked != nil {
				acked++
				Expect(w.pay(ctx, p.call, http.StatusCreated, replay).body).To(Equal(p.acked.body), p.order)
				continue
			}
			now := w.call(ctx, p.call)
			if now.status == http.StatusCreated && now.verdict() == replay {
				// The gateway had the provider's answer all the while, and the store took it late.
				p.late = true
				continue
			}
			if now.status == http.StatusCreated && now.verdict() == allow {
				// The gateway had sent nothing, as its time for sending was over, and the store took that late.
				attempts := w.poll(ctx, charge, p.call.id, "").Attempts
				Expect(len(attempts)).To(BeNumerically(">", 1), now.String())
				Expect(attempts[:len(attempts)-1]).To(HaveEach(HaveField("Outcome", "Retryable")), now.String())
				p.late = true
				continue
			}
			held++
			Expect([]any{now.status, now.verdict()}).To(Equal([]any{http.StatusConflict, unknownHold}), now.String())
			Expect(now.problem().Reason).To(Equal("OutcomeUnknown"), p.order)
			doc := w.poll(ctx, charge, p.call.id, "")
			Expect(doc.State).To(Equal("Held"), p.order)
			Expect(doc.Hold.Reasons).To(Equal([]string{"OutcomeUnknown"}), p.order)
			Eventually(func(ctx context.Context) error { _, err := w.hold(ctx, doc.Hold.Name); return err }).WithContext(ctx).Should(Succeed())
			// Nor does another ID get it through, until too many wait already.
			again := w.call(ctx, call{id: "again-" + p.call.id, body: p.call.body})
			Expect(again.verdict()).To(BeElementOf(unknownHold, deny), again.String())
			Expect(again.status).To(BeElementOf(409, 429), again.String())
		}
		charges := map[string]int{}
		for _, e := range w.entries(ctx) {
			charges[e.OrderID]++
		}
		for _, p := range payments {
			Expect(charges[p.order]).To(BeNumerically("<=", 1), "%s was charged twice", p.order)
			if p.acked != nil || p.late {
				Expect(charges[p.order]).To(Equal(1), "%s was told that it was paid", p.order)
			}
		}
		// Every entry of the ledger belongs to a payment that somebody asked for.
		Expect(charges).NotTo(HaveKey(""))
		Expect(len(charges)).To(BeNumerically("<=", len(payments)))
		ofKills := 0
		for _, p := range payments {
			if p.acked == nil && !p.late && p.call.fault != "close-after-commit" {
				ofKills++
			}
		}
		AddReportEntry("kills", fmt.Sprintf("%v; %d payments: %d told as paid, %d held, %d of them by a kill; %d charges",
			killed, len(payments), acked, held, ofKills, len(charges)))
		Expect(ofKills).To(BeNumerically(">=", kills/4), "the kills did not meet calls in the middle")
		Expect(acked).To(BeNumerically(">=", kills))
	}, NodeTimeout(20*time.Minute))

	It("R03: killed in the middle of a call, the intent is held as unknown and not run again", func(ctx SpecContext) {
		w := newWorld(ctx)
		g := anyGateway()
		c := call{id: "k1", body: w.order("9", "10"), fault: "hold-after-commit"}
		first := c
		first.at = g
		cut := w.start(ctx, first)
		w.underWay(ctx, 1)
		g.kill()
		Expect((<-cut).err).To(HaveOccurred())
		g.start(ctx)
		nothingSent(ctx, func() {
			Eventually(func(ctx context.Context) (string, error) {
				doc, err := w.tryPoll(ctx, charge, "k1", "5s")
				return doc.State, err
			}).WithContext(ctx).WithTimeout(lease + grace + 5*time.Second).Should(Equal("Held"))
			p := w.pay(ctx, c, 409, unknownHold).problem()
			Expect(p.Reason).To(Equal("OutcomeUnknown"))
			w.holdIs(ctx, p.Hold, v1alpha1.HoldHeld)
			w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, 409, unknownHold)
			w.resolve(ctx, p.Hold, resolution{Decision: "MarkPaid", ProviderReference: "ch_9", Result: `{"paid":true}`})
			Expect(w.pay(ctx, c, 200, replay).body).To(Equal(`{"paid":true}`))
		})
		w.letGo(ctx)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("a hold that was made in the last moment is shown by the next process", func(ctx SpecContext) {
		w := newWorld(ctx)
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		hold := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem().Hold
		for _, g := range gateways() {
			g.kill()
		}
		for _, g := range gateways() {
			g.start(ctx)
		}
		w.holdIs(ctx, hold, v1alpha1.HoldHeld)
	})

	if kind != bolt {
		It("R04, R05 and R22: a holder that outlives its lease comes back while the next attempt is in flight", func(ctx SpecContext) {
			w := newWorld(ctx, func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
				// Long enough to look at the second attempt.
				tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: 6 * time.Second}
			})
			g := other()
			c := call{id: "k1", body: w.order("9", "10")}
			theFirst := c
			theFirst.at, theFirst.fault = g, "hold-after-commit"
			first := w.start(ctx, theFirst)
			w.underWay(ctx, 1)
			resume := g.pause(ctx)
			// The provider's answer is there in time, and nobody reads it.
			w.letGo(ctx)
			Eventually(func(ctx context.Context) (string, error) {
				doc, err := w.tryPollAt(ctx, one(), charge, c.id, "")
				return doc.State, err
			}).WithContext(ctx).WithTimeout(lease + grace + 20*time.Second).Should(Equal("Held"))
			doc, err := w.tryPollAt(ctx, one(), charge, c.id, "")
			Expect(err).NotTo(HaveOccurred())
			w.resolve(ctx, doc.Hold.Name, release)
			again := c
			again.at, again.fault = one(), "hold"
			second := w.start(ctx, again)
			w.underWay(ctx, 1)

			resume()
			late := <-first
			Expect(late.err).NotTo(HaveOccurred())
			// It tells of the second attempt, or what it got itself; it frees nobody's lease.
			Expect(late.verdict()).To(BeElementOf(inFlight, unknownHold, replay, allow), late.String())
			doc, err = w.tryPollAt(ctx, one(), charge, c.id, "")
			Expect(err).NotTo(HaveOccurred())
			Expect(doc.State).To(Equal("InFlight"))
			Expect(doc.Attempts).To(HaveLen(2))
			w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold)
			w.letGo(ctx)
			Expect((<-second).status).To(Equal(201))
			w.pay(ctx, c, 201, replay)
			// A person said that the first one had moved nothing. It had, and that is on the record if it was heard of.
			Expect(w.charged(ctx, "9")).To(Equal(2))
			doc = w.poll(ctx, charge, c.id, "")
			Expect(doc.State).To(Equal("Succeeded"))
			Expect(doc.RefundOwed).To(HaveValue(Equal(doc.Attempts[0].Outcome == "Succeeded")))
		})
	}

	It("R19: stopped right after its Reserve, and going on when its lease is over, it sends nothing", func(ctx SpecContext) {
		w := newWorld(ctx)
		upstream := openStalled(ctx)
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Upstream.HTTP.URL = "http://" + upstream.address + "/charges"
		})

		g := other()
		c := call{id: "k1", body: w.order("9", "10")}
		theFirst := c
		theFirst.at = g
		first := w.start(ctx, theFirst)
		// The Reserve is durable; the connection cannot be made yet, so that nothing is sent.
		Eventually(func(ctx context.Context) (string, error) {
			doc, err := w.tryPoll(ctx, charge, "k1", "")
			return doc.State, err
		}).WithContext(ctx).WithPolling(5 * time.Millisecond).Should(Equal("InFlight"))
		Eventually(upstream.knocking).WithContext(ctx).WithPolling(5 * time.Millisecond).Should(BeTrue())
		resume := g.pause(ctx)
		stopped := time.Now()
		// The kernel makes the connection for the process that stands still.
		upstream.drain()
		Eventually(upstream.connections).WithContext(ctx).Should(BeNumerically(">=", 1))
		Expect(upstream.bytes()).To(BeZero())
		paid := &payment{call: c, order: "9"}
		paid.call.at = one()
		if one() == g {
			Eventually(func() time.Duration { return time.Since(stopped) }).Should(BeNumerically(">", lease+grace))
		} else {
			// Another one sees that its lease is over, a person releases the hold, and it pays there.
			w.payAfterLease(ctx, paid)
			Expect(w.charged(ctx, "9")).To(Equal(1))
		}
		resume()

		var got reply
		Eventually(func() bool {
			Expect(upstream.bytes()).To(BeZero(), "it sent after its lease")
			select {
			case got = <-first:
				return true
			default:
				return false
			}
		}).Should(BeTrue())
		Expect(got.err).NotTo(HaveOccurred())
		Expect(got.verdict()).To(BeElementOf(deny, unknownHold, inFlight, replay), got.String())
		Eventually(upstream.ending).WithContext(ctx).Should(Equal(1))
		Expect(upstream.bytes()).To(BeZero(), "it sent after its lease")

		if one() == g {
			// The payment is still made, once: by itself, or after a person's word.
			w.payAfterLease(ctx, paid)
		}
		Expect(w.pay(ctx, c, 201, replay).body).To(Equal(paid.acked.body))
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(upstream.bytes()).To(BeZero())
	})
})

// payAfterLease makes a payment whose attempt was given up before anything was sent: once
// its lease is over the intent is held or free again, and a person releases it.
func (w *world) payAfterLease(ctx context.Context, p *payment) {
	GinkgoHelper()
	var doc intentDocument
	Eventually(func(ctx context.Context) (string, error) {
		var err error
		doc, err = w.tryPollAt(ctx, one(), charge, p.call.id, "")
		return doc.State, err
	}).WithContext(ctx).WithTimeout(lease + grace + 20*time.Second).ShouldNot(Equal("InFlight"))
	if doc.State == "Held" {
		w.resolve(ctx, doc.Hold.Name, release)
	}
	p.drive(ctx, w)
	Expect(p.err).NotTo(HaveOccurred())
	Expect(p.acked).NotTo(BeNil())
}

// stalled is an upstream whose queue of connections is full, so that a new connection
// is neither made nor refused, until drain lets them in. It counts what is sent on the
// first one, and leads the later ones to the provider.
type stalled struct {
	address  string
	target   string
	listener net.Listener
	fillers  []net.Conn

	mu                    sync.Mutex
	accepted, ended, sent int
}

func openStalled(ctx context.Context) *stalled {
	GinkgoHelper()
	// net.Listen has no way to ask for the shortest queue.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	Expect(err).NotTo(HaveOccurred())
	file := os.NewFile(uintptr(fd), "stalled")
	syscall.CloseOnExec(fd)
	Expect(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})).To(Succeed())
	Expect(syscall.Listen(fd, 0)).To(Succeed())
	listener, err := net.FileListener(file)
	Expect(err).NotTo(HaveOccurred())
	Expect(file.Close()).To(Succeed())
	s := &stalled{address: listener.Addr().String(), target: strings.TrimPrefix(all.ProviderURL(), "http://"), listener: listener}
	DeferCleanup(func() {
		_ = listener.Close()
		for _, c := range s.fillers {
			_ = c.Close()
		}
	})
	// Full is when one is left waiting, and is so for lack of room and not of a processor.
	dialer := net.Dialer{Timeout: 500 * time.Millisecond}
	for left := 0; left < 2; {
		conn, err := dialer.DialContext(ctx, "tcp", s.address)
		if err != nil {
			left++
			continue
		}
		left = 0
		s.fillers = append(s.fillers, conn)
		Expect(len(s.fillers)).To(BeNumerically("<", 64), "the queue does not become full")
	}
	return s
}

// knocking says whether somebody waits for a connection: the kernel's table of sockets
// (proc(5), /proc/net/tcp) shows one to this address in the state SYN_SENT.
func (s *stalled) knocking() (bool, error) {
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return false, err
	}
	const synSent = "02"
	port := fmt.Sprintf(":%04X", s.listener.Addr().(*net.TCPAddr).Port)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[2], port) && f[3] == synSent {
			return true, nil
		}
	}
	return false, nil
}

// drain lets waiting connections in. Those of the test itself are not counted.
func (s *stalled) drain() {
	own := map[string]bool{}
	for _, c := range s.fillers {
		own[c.LocalAddr().String()] = true
	}
	go func() {
		for {
			conn, err := s.listener.Accept()
			if err != nil {
				return
			}
			if own[conn.RemoteAddr().String()] {
				_ = conn.Close()
				continue
			}
			s.mu.Lock()
			s.accepted++
			isFirst := s.accepted == 1
			s.mu.Unlock()
			if isFirst {
				go s.count(conn)
			} else {
				go splice(conn, s.target)
			}
		}
	}()
}

// splice leads a connection to a target, as it is.
func splice(conn net.Conn, target string) {
	defer func() { _ = conn.Close() }()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	go func() { _, _ = io.Copy(server, conn) }()
	_, _ = io.Copy(conn, server)
}

func (s *stalled) count(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	buffer := make([]byte, 4096)
	for {
		n, err := conn.Read(buffer)
		s.mu.Lock()
		s.sent += n
		if err != nil {
			s.ended++
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (s *stalled) connections() int { s.mu.Lock(); defer s.mu.Unlock(); return s.accepted }
func (s *stalled) ending() int      { s.mu.Lock(); defer s.mu.Unlock(); return s.ended }
func (s *stalled) bytes() int       { s.mu.Lock(); defer s.mu.Unlock(); return s.sent }
