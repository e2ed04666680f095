// What must get its clear answer, and must reach no provider.

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// dial opens a connection to the gateway on which anything can be written.
func dial(ctx context.Context) net.Conn {
	GinkgoHelper()
	u, err := url.Parse(anyGateway().url())
	Expect(err).NotTo(HaveOccurred())
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", u.Host)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { _ = conn.Close() })
	return conn
}

// readReply reads one answer from a connection.
func readReply(conn net.Conn) reply {
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return reply{err: err}
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	return reply{status: answer.StatusCode, header: answer.Header, body: string(body), err: err}
}

var _ = Describe("Callers that must be refused", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	// head is the head of a call of the tool, without the end of the headers.
	head := func() string {
		return "POST /v1/namespaces/" + w.namespace + "/tools/charge HTTP/1.1\r\nHost: holdfast\r\nAuthorization: Bearer " + w.token +
			"\r\nIdempotency-Key: k1\r\nContent-Type: application/json\r\n"
	}

	It("a malformed token, one of another audience, and none", func(ctx SpecContext) {
		tokens := map[string]string{
			"malformed":        "not.a.token",
			"cut short":        w.token[:len(w.token)-8],
			"another audience": w.tokenOf(ctx, "agent", "https://kubernetes.default.svc"),
			"the API server's": w.tokenOf(ctx, "agent"),
		}
		nothingSent(ctx, func() {
			for what, token := range tokens {
				got := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), token: token}, 401, none)
				Expect(got.problem().SuggestedAction).To(Equal("authenticate"), what)
				Expect(got.header.Get("WWW-Authenticate")).To(HavePrefix("Bearer"), what)
				Expect(got.body).NotTo(ContainSubstring(token), what)
			}
			got := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), header: map[string]string{"X-Nothing": "1"}, token: " "}, 401, none)
			Expect(got.problem().SuggestedAction).To(Equal("authenticate"))
		})
	})

	It("a ServiceAccount that may not invoke", func(ctx SpecContext) {
		w.serviceAccount(ctx, "stranger")
		token := w.tokenOf(ctx, "stranger", audience)
		nothingSent(ctx, func() {
			known := w.pay(ctx, call{id: "k1", body: w.order("9", "10"), token: token}, 403, none).problem()
			Expect(known.Reason).To(Equal("forbidden"))
			Expect(known.SuggestedAction).To(Equal("ask_for_access"))
			Expect(known.Detail).To(ContainSubstring("invoke"))
			// It does not learn which tools there are.
			unknown := w.pay(ctx, call{tool: "no-such-tool", id: "k1", body: w.order("9", "10"), token: token}, 403, none).problem()
			Expect(strings.ReplaceAll(unknown.Detail, "no-such-tool", charge)).To(Equal(known.Detail))
		})
	})

	It("a body of 100 MB", func(ctx SpecContext) {
		const size = 100 << 20
		nothingSent(ctx, func() {
			for what, framing := range map[string]string{
				"announced": fmt.Sprintf("Content-Length: %d\r\n\r\n", size),
				"in chunks": fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n", size),
			} {
				conn := dial(ctx)
				_, err := io.WriteString(conn, head()+framing)
				Expect(err).NotTo(HaveOccurred())
				go func() {
					// The gateway hangs up long before the end.
					block := []byte(strings.Repeat(" ", 1<<16))
					for range size / len(block) {
						if _, err := conn.Write(block); err != nil {
							return
						}
					}
				}()
				got := readReply(conn)
				Expect(got.err).NotTo(HaveOccurred(), what)
				Expect(got.status).To(Equal(413), what)
				Expect(got.problem().Reason).To(Equal("body_too_large"), what)
			}
		})
	})

	// It is the listener's doing, whatever the store.
	if kind == bolt {
		It("slow clients are cut off, and others are served meanwhile", func(ctx SpecContext) {
			const slow = 50
			// drip sends a byte now and then until the gateway has had enough, and returns what it said.
			drip := func(conn net.Conn) reply {
				over := make(chan struct{})
				defer close(over)
				go func() {
					tick := time.NewTicker(300 * time.Millisecond)
					defer tick.Stop()
					for {
						select {
						case <-over:
							return
						case <-tick.C:
							if _, err := io.WriteString(conn, "a"); err != nil {
								return
							}
						}
					}
				}()
				return readReply(conn)
			}
			ends := make(chan reply, slow)
			var body chan reply
			nothingSent(ctx, func() {
				for range slow {
					conn := dial(ctx)
					_, err := io.WriteString(conn, head()+"X-Slow: ")
					Expect(err).NotTo(HaveOccurred())
					go func() { ends <- drip(conn) }()
				}
				conn := dial(ctx)
				_, err := io.WriteString(conn, head()+"Content-Length: 1000\r\n\r\n{")
				Expect(err).NotTo(HaveOccurred())
				body = make(chan reply, 1)
				go func() { body <- drip(conn) }()
			})
			w.pay(ctx, call{id: "meanwhile", body: w.order("8", "10")}, 201, allow)
			nothingSent(ctx, func() {
				for range slow {
					var end reply
					Eventually(ends).WithTimeout(20 * time.Second).Should(Receive(&end))
					Expect(end.status).To(BeElementOf(0, 408), end.String())
				}
				var end reply
				Eventually(body).WithTimeout(40 * time.Second).Should(Receive(&end))
				Expect(end.status).To(Equal(408), end.String())
				Expect(end.problem().Detail).To(ContainSubstring("Nothing was sent"))
			})
			Expect(w.charged(ctx, "9")).To(BeZero())
		}, NodeTimeout(2*time.Minute))
	}

	It("an upstream at an address that is nobody's upstream", func(ctx SpecContext) {
		config, err := all.RESTConfig()
		Expect(err).NotTo(HaveOccurred())
		for name, row := range map[string]struct{ url, why string }{
			"link-local":  {"http://169.254.10.10/charges", "link-local"},
			"metadata":    {"http://169.254.169.254/charges", "metadata"},
			"unspecified": {"http://0.0.0.0:80/charges", "unspecified"},
			"api-server":  {strings.Replace(config.Host, "https://", "http://", 1) + "/api", "the API server or Holdfast"},
			"gateway":     {all.GatewayURL() + "/v1", "Holdfast"},
		} {
			tool := w.paymentTool(name, "/charges")
			tool.Spec.Upstream.HTTP.URL = row.url
			w.add(ctx, tool)
			nothingSent(ctx, func() {
				// At the gateway whose own address is among them.
				p := w.pay(ctx, call{tool: name, id: "k1", body: w.order(name, "10"), at: controllers}, 502, deny).problem()
				Expect(p.Detail).To(And(ContainSubstring("Nothing was"), ContainSubstring(row.why)), name)
				Expect(p.Detail).NotTo(ContainSubstring("169.254"), name)
			})
		}
	})

	It("a tool that is not accepted", func(ctx SpecContext) {
		tool := w.paymentTool("broken", "/charges")
		tool.Spec.Identity.Recipient = `call.body.accountId +`
		create(ctx, tool)
		Eventually(func(ctx context.Context) error {
			return w.condition(ctx, "broken", v1alpha1.ConditionAccepted, metav1.ConditionFalse)
		}).WithContext(ctx).Should(Succeed())
		nothingSent(ctx, func() {
			c := call{tool: "broken", id: "k1", body: w.order("9", "10")}
			for _, c.at = range gateways() {
				// It may hear of the tool a moment after the one that says so.
				Eventually(func(ctx context.Context) string { return w.call(ctx, c).body }).WithContext(ctx).Should(ContainSubstring("is not accepted"))
			}
			p := w.pay(ctx, c, 503, deny).problem()
			Expect(p.Reason).To(Equal("policy_not_available"))
			Expect(p.Detail).To(And(ContainSubstring(`"broken" is not accepted`), ContainSubstring("recipient"), ContainSubstring("Nothing was sent")))
			Expect(p.RetryAfter).To(BeNumerically(">", 0))
		})
		// One that becomes bad is refused too, and replays nothing it could not check.
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		Eventually(func(ctx context.Context) error {
			var current v1alpha1.AgentTool
			if err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: charge}, &current); err != nil {
				return err
			}
			current.Spec.Identity.Recipient = `call.body.`
			return admin.Update(ctx, &current)
		}).WithContext(ctx).Should(Succeed())
		nothingSent(ctx, func() {
			Eventually(func(ctx context.Context) int { return w.call(ctx, call{id: "k1", body: w.order("9", "10")}).status }).
				WithContext(ctx).Should(Equal(503))
		})
	})
})
