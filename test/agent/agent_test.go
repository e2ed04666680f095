// The agent against a gateway that answers as it is told: what it counts, what it repeats,
// and what it takes for an end.

package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// seen is a request as it arrived.
type seen struct{ id, body, fault, token, path string }

// gateway answers the nth call of an order by answer.
type gateway struct {
	*httptest.Server
	mu    sync.Mutex
	calls []seen
}

func newGateway(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, nth int)) *gateway {
	t.Helper()
	g := &gateway{}
	g.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s := seen{r.Header.Get("Idempotency-Key"), string(body), r.Header.Get("Provider-Fault"), r.Header.Get("Authorization"), r.Method + " " + r.URL.Path}
		g.mu.Lock()
		nth := 1
		for _, c := range g.calls {
			if c.id == s.id {
				nth++
			}
		}
		g.calls = append(g.calls, s)
		g.mu.Unlock()
		answer(w, r, nth)
	}))
	t.Cleanup(g.Close)
	return g
}

func (g *gateway) seen() []seen {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]seen{}, g.calls...)
}

// options are for an agent of this gateway.
func (g *gateway) options(t *testing.T) Options {
	t.Helper()
	dir := t.TempDir()
	ca, token := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	for file, data := range map[string][]byte{
		ca:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: g.Certificate().Raw}),
		token: []byte("first\n"),
	} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Options{
		Gateway: g.URL, CAFile: ca, TokenFile: token, Namespace: "ns", Tool: "charge", Prefix: "p",
		Orders: 1, Concurrency: 1, Timeout: 10 * time.Second,
	}
}

// patience bounds every wait.
const patience = 30 * time.Second

func ran(t *testing.T, o Options) Report {
	t.Helper()
	a, err := New(o)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a.Run(ctx)
	return a.Report()
}

func says(w http.ResponseWriter, status int, verdict, body string) {
	if verdict != "" {
		w.Header().Set("Holdfast-Verdict", verdict)
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

func TestAnOrderIsCalledUntilItsAnswerIsFinal(t *testing.T) {
	for _, row := range []struct {
		name    string
		status  int
		verdict string
		end     string
	}{
		{"paid", 201, "ALLOW", Paid},
		{"replayed", 200, "REPLAY", Paid},
		{"a success that is nobody's", 200, "", Refused},
		{"held", 409, "UNKNOWN_HOLD", Held},
		{"denied", 403, "DENY", Refused},
		{"another request", 422, "CONFLICT", Refused},
		{"malformed", 400, "", Refused},
		{"in flight", 409, "IN_FLIGHT", ""},
		{"too many", 429, "DENY", ""},
		{"no store", 503, "DENY", ""},
		{"no upstream", 502, "DENY", ""},
		{"nobody knows the token yet", 401, "", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := NewWithT(t)
			gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, nth int) {
				if nth == 1 {
					says(w, row.status, row.verdict, `{"hold":"h1"}`)
					return
				}
				says(w, 201, "REPLAY", "again")
			})
			r := ran(t, gw.options(t))
			g.Expect(r.Done).To(BeTrue())
			g.Expect(r.Intents).To(HaveLen(1))
			i, calls := r.Intents[0], gw.seen()
			if row.end != "" {
				g.Expect(calls).To(HaveLen(1))
				g.Expect(i.End).To(Equal(row.end))
				g.Expect(r.Ends).To(Equal(map[string]int{row.end: 1}))
				g.Expect(i.Hold == "h1").To(Equal(row.end == Held))
				sum := sha256.Sum256([]byte(`{"hold":"h1"}`))
				g.Expect(i.BodySHA256).To(Equal(hex.EncodeToString(sum[:])))
				return
			}
			g.Expect(calls).To(HaveLen(2))
			g.Expect(calls[1]).To(Equal(calls[0]), "the same call under the same ID")
			g.Expect(i).To(And(HaveField("End", Paid), HaveField("Attempts", 2)))
			g.Expect(r.LastRefusals).To(ConsistOf(ContainSubstring(`p-1: {"hold":"h1"}`)))
			g.Expect(r.Answers).To(HaveKeyWithValue("201 REPLAY", 1))
			g.Expect(r.Answers).To(HaveLen(2))
		})
	}
}

func TestTheCallIsWhatIsSaid(t *testing.T) {
	g := NewWithT(t)
	gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, _ int) { says(w, 201, "ALLOW", "") })
	o := gw.options(t)
	o.Orders, o.Account, o.Faults = 3, "acc", []string{"", "delay:1s"}
	r := ran(t, o)
	g.Expect(r.Calls).To(Equal(3))
	for n, c := range gw.seen() {
		i := r.Intents[n]
		g.Expect(c).To(Equal(seen{
			id: i.ID, body: `{"accountId":"acc","orderId":"` + i.Order + `","amount":"` + i.Amount + `"}`,
			fault: []string{"delay:1s", "", "delay:1s"}[n], token: "Bearer first", path: "POST /v1/namespaces/ns/tools/charge",
		}))
		g.Expect(i.ID).To(Equal([]string{"p-1", "p-2", "p-3"}[n]))
	}
}

func TestTheTokenIsReadAnew(t *testing.T) {
	g := NewWithT(t)
	var o Options
	gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, nth int) {
		if nth == 1 {
			g.Expect(os.WriteFile(o.TokenFile, []byte("second"), 0o600)).To(Succeed())
			says(w, 401, "", "")
			return
		}
		says(w, 201, "ALLOW", "")
	})
	o = gw.options(t)
	ran(t, o)
	calls := gw.seen()
	g.Expect(calls).To(HaveLen(2))
	g.Expect([]string{calls[0].token, calls[1].token}).To(Equal([]string{"Bearer first", "Bearer second"}))
}

func TestTheAuthorityIsReadAnew(t *testing.T) {
	g := NewWithT(t)
	gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, _ int) { says(w, 201, "ALLOW", "") })
	o := gw.options(t)
	ours, err := os.ReadFile(o.CAFile)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.WriteFile(o.CAFile, otherAuthority(g), 0o600)).To(Succeed())
	a, err := New(o)
	g.Expect(err).NotTo(HaveOccurred())
	done := make(chan struct{})
	go func() { a.Run(t.Context()); close(done) }()
	g.Eventually(func() int { return a.Report().ConnectionErrors["other"] }).WithTimeout(patience).Should(BeNumerically(">=", 1))
	g.Expect(gw.seen()).To(BeEmpty())
	g.Expect(os.WriteFile(o.CAFile, ours, 0o600)).To(Succeed())
	g.Eventually(done).WithTimeout(patience).Should(BeClosed())
	g.Expect(a.Report().Ends).To(Equal(map[string]int{Paid: 1}))
}

// otherAuthority is one that nobody's certificate is of.
func otherAuthority(g *WithT) []byte {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	g.Expect(err).NotTo(HaveOccurred())
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	g.Expect(err).NotTo(HaveOccurred())
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestRetryAfterIsHonoured(t *testing.T) {
	g := NewWithT(t)
	gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, nth int) {
		if nth == 1 {
			w.Header().Set("Retry-After", "1")
			says(w, 503, "DENY", "")
			return
		}
		says(w, 201, "ALLOW", "")
	})
	r := ran(t, gw.options(t))
	g.Expect(r.Seconds).To(BeNumerically(">=", 1))
	g.Expect(r.LongestPause).To(BeNumerically("~", r.Seconds, 0.5))
}

// Either time is so far away that an agent that waited for it would not come to its end here.
func TestAnImpatientAgentComesBackAtTheSoonerTime(t *testing.T) {
	for _, row := range []struct {
		told       string
		impatience time.Duration
	}{{"3600", time.Second}, {"1", time.Hour}} {
		t.Run("told "+row.told, func(t *testing.T) {
			gw := newGateway(t, func(w http.ResponseWriter, _ *http.Request, nth int) {
				if nth == 1 {
					w.Header().Set("Retry-After", row.told)
					says(w, 503, "DENY", "")
					return
				}
				says(w, 201, "ALLOW", "")
			})
			o := gw.options(t)
			o.Impatience = row.impatience
			NewWithT(t).Expect(ran(t, o).Intents).To(ConsistOf(And(HaveField("End", Paid), HaveField("Attempts", 2))))
		})
	}
}

// A connection that ends on a request is seen and counted, also where it had served others:
// the client sends nothing again by itself.
func TestEachConnectionErrorIsCounted(t *testing.T) {
	g := NewWithT(t)
	gw := newGateway(t, func(w http.ResponseWriter, r *http.Request, nth int) {
		if r.Header.Get("Idempotency-Key") == "p-2" && nth <= 2 {
			panic(http.ErrAbortHandler)
		}
		says(w, 201, "ALLOW", "")
	})
	o := gw.options(t)
	o.Orders = 2
	r := ran(t, o)
	g.Expect(gw.seen()).To(HaveLen(4))
	g.Expect(r.Calls).To(Equal(4))
	g.Expect(r.ConnectionErrors).To(Equal(map[string]int{"eof": 2}))
	g.Expect(r.LastErrors).To(HaveLen(2))
	g.Expect(r.Answers).To(Equal(map[string]int{"201 ALLOW": 2}))

	gw.Close()
	a, err := New(o)
	g.Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go a.Run(ctx)
	g.Eventually(func() int { return a.Report().ConnectionErrors["refused"] }).WithTimeout(patience).Should(BeNumerically(">=", 2))
	g.Expect(a.Report().Open).To(Equal(1))
}

func TestItStopsWhenItIsTold(t *testing.T) {
	g := NewWithT(t)
	goOn := make(chan struct{})
	gw := newGateway(t, func(w http.ResponseWriter, r *http.Request, _ int) {
		if r.Header.Get("Idempotency-Key") == "p-4" {
			<-goOn
		}
		says(w, 201, "ALLOW", "")
	})
	o := gw.options(t)
	o.Orders, o.Concurrency = 0, 1
	a, err := New(o)
	g.Expect(err).NotTo(HaveOccurred())
	control := httptest.NewServer(a.Handler())
	defer control.Close()
	done := make(chan struct{})
	go func() { a.Run(t.Context()); close(done) }()
	ask := func(path string) (r Report) {
		answer, err := http.Get(control.URL + path)
		g.Expect(err).NotTo(HaveOccurred())
		defer func() { _ = answer.Body.Close() }()
		g.Expect(json.NewDecoder(answer.Body).Decode(&r)).To(Succeed())
		return r
	}
	g.Eventually(func() int { return ask("/progress").Orders }).WithTimeout(patience).Should(Equal(4))
	answer, err := http.Post(control.URL+"/stop", "", nil)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(answer.Body.Close()).To(Succeed())
	g.Expect(ask("/progress")).To(And(HaveField("Done", false), HaveField("Open", 1), HaveField("Intents", BeEmpty())))
	close(goOn)
	g.Eventually(done).WithTimeout(patience).Should(BeClosed())
	g.Expect(ask("/report")).To(And(HaveField("Done", true), HaveField("Open", 0), HaveField("Orders", 4), HaveField("Intents", HaveLen(4))))
}

func TestWrongOptions(t *testing.T) {
	gw := newGateway(t, func(http.ResponseWriter, *http.Request, int) {})
	for name, change := range map[string]func(*Options){
		"no gateway": func(o *Options) { o.Gateway = "gateway" }, "no token": func(o *Options) { o.TokenFile = "" },
		"no tool": func(o *Options) { o.Tool = "" }, "no prefix": func(o *Options) { o.Prefix = "" },
		"nobody works": func(o *Options) { o.Concurrency = 0 }, "no time": func(o *Options) { o.Timeout = 0 },
		"too impatient": func(o *Options) { o.Impatience = -1 },
		"no authority":  func(o *Options) { o.CAFile = o.TokenFile },
	} {
		o := gw.options(t)
		change(&o)
		_, err := New(o)
		NewWithT(t).Expect(err).To(HaveOccurred(), name)
	}
}
