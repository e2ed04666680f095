// The tests' client, and what a test asks again and again. All tests go over
// real TCP connections.

package provider_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/test/provider"
)

const (
	soon  = 10 * time.Second
	often = 2 * time.Millisecond
)

// clock is a time that only a test moves.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// service is a started provider and a client of it.
type service struct {
	*provider.Provider
	*WithT
	t      *testing.T
	url    string
	client *http.Client
}

func start(t *testing.T, o provider.Options) *service {
	t.Helper()
	return serve(t, provider.New(o))
}

func serve(t *testing.T, p *provider.Provider) *service {
	t.Helper()
	g := NewWithT(t)
	url, err := p.Start("")
	g.Expect(err).NotTo(HaveOccurred())
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		if err := p.Close(); err != nil {
			t.Errorf("close the provider: %v", err)
		}
	})
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return &service{Provider: p, WithT: g, t: t, url: url, client: client}
}

// answer is what the client saw: a response, or an error at sending or at
// reading the body.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	sendErr error
	bodyErr error
}

func (a answer) json(t *testing.T) map[string]any {
	t.Helper()
	var out map[string]any
	if err := json.Unmarshal(a.body, &out); err != nil {
		t.Fatalf("answer %d %q is not JSON: %v", a.status, a.body, err)
	}
	return out
}

// do sends a request; headers come in pairs. The body has no GetBody, so the
// transport cannot send it a second time by itself.
func (s *service) do(method, path, body string, headers ...string) answer {
	s.t.Helper()
	request, err := http.NewRequest(method, s.url+path, io.NopCloser(strings.NewReader(body)))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	return s.send(s.client, request)
}

func (s *service) send(client *http.Client, request *http.Request) answer {
	response, err := client.Do(request)
	if err != nil {
		return answer{sendErr: err}
	}
	body, err := io.ReadAll(response.Body)
	a := answer{status: response.StatusCode, header: response.Header, body: body, bodyErr: err}
	if err := response.Body.Close(); err != nil && a.bodyErr == nil {
		a.bodyErr = err
	}
	return a
}

func order(id string) string {
	return fmt.Sprintf(`{"accountId":"a1","orderId":%q,"amount":49.99,"currency":"USD"}`, id)
}

func (s *service) judge() provider.Ledger {
	s.t.Helper()
	l, err := s.Ledger()
	s.Expect(err).NotTo(HaveOccurred())
	return l
}

func (s *service) count() int { return s.judge().Count }

func TestAPaymentIsAnsweredAndEntered(t *testing.T) {
	s := start(t, provider.Options{})
	for path, kind := range map[string]string{"/charges": "charge", "/refunds": "refund"} {
		a := s.do("POST", path, `{"accountId":"a1","orderId":9,"amount":10.10,"memo":"m","seats":[1, 2]}`, "Idempotency-Key", "k-"+kind)
		s.Expect(a.status).To(Equal(http.StatusCreated), string(a.body))
		s.Expect(a.header.Get("Content-Type")).To(Equal("application/json"))
		got := a.json(t)
		s.Expect(got).To(And(
			HaveKeyWithValue("kind", kind), HaveKeyWithValue("accountId", "a1"), HaveKeyWithValue("orderId", "9"),
			HaveKeyWithValue("amount", "10.10"), HaveKeyWithValue("currency", "USD"), HaveKeyWithValue("key", "k-"+kind),
			HaveKey("id"), HaveKey("created"), HaveLen(8),
		))

		found := s.do("GET", path+"?key=k-"+kind, "").json(t)
		s.Expect(found["count"]).To(BeEquivalentTo(1))
		s.Expect(found["entries"].([]any)[0]).To(And(
			HaveKeyWithValue("id", got["id"]), HaveKeyWithValue("memo", "m"),
			HaveKeyWithValue("extra", HaveKey("seats")),
		))
	}
	none := s.do("GET", "/charges?key=k-refund", "")
	s.Expect(none.status).To(Equal(http.StatusOK))
	s.Expect(string(none.body)).To(MatchJSON(`{"entries":[],"count":0}`))
	s.Expect(s.do("GET", "/charges?orderId=9", "").json(t)["count"]).To(BeEquivalentTo(1))
	s.Expect(s.do("GET", "/charges?order=9", "").status).To(Equal(http.StatusBadRequest))
}

func TestFormsAndKeys(t *testing.T) {
	s := start(t, provider.Options{})
	a := s.do("POST", "/charges", "accountId=a+1&orderId=9&amount=0.30&currency=EUR&idempotencyKey=k1", "Content-Type", "application/x-www-form-urlencoded")
	s.Expect(a.status).To(Equal(http.StatusCreated), string(a.body))
	s.Expect(a.json(t)).To(And(HaveKeyWithValue("accountId", "a 1"), HaveKeyWithValue("amount", "0.30"), HaveKeyWithValue("key", "k1")))

	a = s.do("POST", "/charges", `{"accountId":"a","amount":"1","idempotencyKey":"k2"}`)
	s.Expect(a.json(t)).To(HaveKeyWithValue("key", "k2"))
	a = s.do("POST", "/charges", `{"accountId":"a","amount":"1","idempotencyKey":"k3"}`, "Idempotency-Key", "k3")
	s.Expect(a.json(t)).To(HaveKeyWithValue("key", "k3"))
	a = s.do("POST", "/charges", `{"accountId":"a","amount":"1","idempotencyKey":"k3"}`, "Idempotency-Key", "k4")
	s.Expect(a.status).To(Equal(http.StatusBadRequest))
	// Quotes are a part of the key.
	a = s.do("POST", "/charges", `{"accountId":"a","amount":"1"}`, "Idempotency-Key", `"k5"`)
	s.Expect(a.json(t)).To(HaveKeyWithValue("key", `"k5"`))
	s.Expect(s.count()).To(Equal(4))
}

func TestWhatIsNotAPaymentIsRefused(t *testing.T) {
	s := start(t, provider.Options{MaxBodyBytes: 1000})
	form := "application/x-www-form-urlencoded"
	for name, c := range map[string]struct {
		body, contentType string
		status            int
		says              string
	}{
		"no account":          {`{"amount":1}`, "", 400, "accountId"},
		"no amount":           {`{"accountId":"a"}`, "", 400, "amount is missing"},
		"not a number":        {`{"accountId":"a","amount":"NaN"}`, "", 400, "not a decimal"},
		"infinite":            {`{"accountId":"a","amount":"Infinity"}`, "", 400, "not a decimal"},
		"negative":            {`{"accountId":"a","amount":-1}`, "", 400, "negative"},
		"endless":             {`{"accountId":"a","amount":1e99999}`, "", 400, "not a decimal"},
		"amount is an object": {`{"accountId":"a","amount":{}}`, "", 400, "a string or a number"},
		"amount is null":      {`{"accountId":"a","amount":null}`, "", 400, "a string or a number"},
		"odd currency":        {`{"accountId":"a","amount":1,"currency":"U$"}`, "", 400, "currency"},
		"argument twice":      {`{"accountId":"a","amount":1,"amount":999}`, "", 400, "twice"},
		"form argument twice": {"accountId=a&amount=1&amount=999", form, 400, "twice"},
		"not an object":       {`[1]`, "", 400, "one JSON object"},
		"not JSON":            {`{"accountId":`, "", 400, "one JSON object"},
		"two objects":         {`{"accountId":"a","amount":1}{}`, "", 400, "follows"},
		"empty":               {``, "", 400, "one JSON object"},
		"text":                {`pay`, "text/plain", 415, "application/json"},
		"long key":            {`{"accountId":"a","amount":1,"idempotencyKey":"` + strings.Repeat("k", 300) + `"}`, "", 400, "longer"},
		"too large":           {`{"accountId":"a","amount":1,"memo":"` + strings.Repeat("m", 1000) + `"}`, "", 413, "1000 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			headers := []string{}
			if c.contentType != "" {
				headers = append(headers, "Content-Type", c.contentType)
			}
			a := s.do("POST", "/charges", c.body, headers...)
			g.Expect(a.status).To(Equal(c.status), string(a.body))
			g.Expect(a.json(t)["error"]).To(HaveKeyWithValue("message", ContainSubstring(c.says)))
		})
	}
	s.Expect(s.do("PUT", "/charges", order("9")).status).To(Equal(http.StatusMethodNotAllowed))
	s.Expect(s.count()).To(BeZero())
}

func TestASlowBodyIsCutOff(t *testing.T) {
	s := start(t, provider.Options{ReadTimeout: 20 * time.Millisecond})
	slow, end := io.Pipe()
	defer func() { _ = end.Close() }()
	go func() { _, _ = end.Write([]byte(`{"accountId":`)) }()
	request, err := http.NewRequest("POST", s.url+"/charges", slow)
	s.Expect(err).NotTo(HaveOccurred())
	a := s.send(s.client, request)
	s.Expect(a.sendErr != nil || a.status == http.StatusBadRequest).To(BeTrue(), "%d %s", a.status, a.body)
	s.Expect(s.count()).To(BeZero())
}

func TestTheLedgerCountsExactlyAndCountsRequests(t *testing.T) {
	s := start(t, provider.Options{})
	for _, amount := range []string{"0.1", "0.2", "9007199254740993", `"1000000000000000000.000000000000000001"`, "1e1"} {
		a := s.do("POST", "/charges", `{"accountId":"a","amount":`+amount+`}`)
		s.Expect(a.json(t)["amount"]).To(Equal(strings.Trim(amount, `"`)))
	}
	s.do("POST", "/charges", `{"accountId":"a","amount":"5e3","currency":"JPY"}`)
	s.do("POST", "/refunds", `{"accountId":"a","amount":"1.50"}`)
	s.do("POST", "/refunds", `{"accountId":"a","amount":"1e-18","currency":"ETH"}`)
	s.do("POST", "/refunds", `not a payment`)
	s.do("GET", "/refunds?key=x", "")
	s.do("GET", "/elsewhere", "")

	var got struct {
		Entries  []any                        `json:"entries"`
		Count    int                          `json:"count"`
		Totals   map[string]map[string]string `json:"totals"`
		Requests map[string]int               `json:"requests"`
	}
	s.Expect(json.Unmarshal(s.do("GET", "/ledger", "").body, &got)).To(Succeed())
	s.Expect(got.Entries).To(HaveLen(8))
	s.Expect(got.Count).To(Equal(8))
	s.Expect(got.Totals).To(Equal(map[string]map[string]string{
		"charge": {"USD": "1009007199254741003.300000000000000001", "JPY": "5000"},
		"refund": {"USD": "1.50", "ETH": "0.000000000000000001"},
	}))
	s.Expect(got.Requests).To(Equal(map[string]int{
		"POST /charges": 6, "POST /refunds": 3, "GET /refunds": 1, "GET /elsewhere": 1,
	}))

	s.Expect(s.do("DELETE", "/ledger", "").status).To(Equal(http.StatusNoContent))
	s.Expect(string(s.do("GET", "/ledger", "").body)).To(MatchJSON(`{"entries":[],"count":0,"totals":{},"requests":{},"inFlight":{"now":0,"most":0}}`))
	s.Expect(s.Received()).To(BeEmpty())
}

func TestReceivedShowsWhatArrived(t *testing.T) {
	s := start(t, provider.Options{})
	s.do("POST", "/charges", order("9"), "Authorization", "Bearer t", "Idempotency-Key", "k")
	s.do("POST", "/charges", "nonsense")
	got := s.Received()
	s.Expect(got).To(HaveLen(2))
	s.Expect(got[0].Header.Get("Authorization")).To(Equal("Bearer t"))
	s.Expect(got[0].Path).To(Equal("/charges"))
	s.Expect(string(got[0].Body)).To(Equal(order("9")))
	s.Expect(string(got[1].Body)).To(Equal("nonsense"))
	s.Expect(got[1].Remote).To(Equal(got[0].Remote), "a kept-alive connection")
}

func TestALookUpLagsBehindTheLedger(t *testing.T) {
	at := newClock()
	s := start(t, provider.Options{Now: at.Now, Visibility: time.Minute})
	s.do("POST", "/charges", order("9"), "Idempotency-Key", "k")
	shown := func() any { return s.do("GET", "/charges?key=k", "").json(t)["count"] }

	s.Expect(s.count()).To(Equal(1))
	s.Expect(shown()).To(BeEquivalentTo(0))
	at.step(time.Minute - 1)
	s.Expect(shown()).To(BeEquivalentTo(0))
	at.step(1)
	s.Expect(shown()).To(BeEquivalentTo(1))

	s.Expect(string(s.do("PUT", "/visibility", `{"lag":"1h"}`).body)).To(MatchJSON(`{"lag":"1h0m0s"}`))
	s.Expect(shown()).To(BeEquivalentTo(0))
	s.Expect(string(s.do("GET", "/visibility", "").body)).To(MatchJSON(`{"lag":"1h0m0s"}`))
	for _, bad := range []string{`{}`, `{"lag":"-1s"}`, `{"lag":"soon"}`, `{"lag":"1s","window":"1s"}`, `{"lag":5}`, `x`} {
		s.Expect(s.do("PUT", "/visibility", bad).status).To(Equal(http.StatusBadRequest), bad)
	}
}

func TestManyAtOnce(t *testing.T) {
	s := start(t, provider.Options{})
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			if a := s.do("POST", "/charges", order(fmt.Sprint(i)), "Idempotency-Key", "same"); a.status != http.StatusCreated {
				t.Errorf("request %d: %d %s %v", i, a.status, a.body, a.sendErr)
			}
		})
	}
	all.Wait()
	l := s.judge()
	s.Expect(l.Count).To(Equal(50), "without deduplication a key means nothing")
	s.Expect(l.Totals[provider.Charge]).To(HaveKeyWithValue("USD", "2499.50"))
	s.Expect(l.Requests).To(HaveKeyWithValue("POST /charges", 50))
}

func TestWhatIsInFlightIsCounted(t *testing.T) {
	s := start(t, provider.Options{})
	now := func() provider.InFlight { return s.judge().InFlight }
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() { s.do("POST", "/charges", order(fmt.Sprint(i)), provider.HeaderFault, "hold") })
	}
	s.Eventually(now, soon, often).Should(Equal(provider.InFlight{Now: 3, Most: 3}))
	s.Release(nil)
	all.Wait()
	// Whoever has an answer is not counted, and neither is one that was dropped.
	s.Expect(now()).To(Equal(provider.InFlight{Now: 0, Most: 3}))
	for range 20 {
		s.do("POST", "/charges", order("x"))
		s.Expect(now().Now).To(BeZero())
	}
	s.do("POST", "/charges", order("y"), provider.HeaderFault, "reset-after-commit")
	s.do("POST", "/charges", "no payment")
	s.Eventually(now, soon, often).Should(Equal(provider.InFlight{Now: 0, Most: 3}))
	s.Expect(s.Reset()).To(Succeed())
	s.Expect(now()).To(Equal(provider.InFlight{}))
}

// The naive comparison: Go's own transport sends a request that has an
// Idempotency-Key again when a kept-alive connection dies under it.
func TestANaiveTransportPaysTwice(t *testing.T) {
	s := start(t, provider.Options{})
	s.do("POST", "/charges", order("8"))
	s.Expect(s.do("POST", "/faults", `{"fault":"close-after-commit"}`).status).To(Equal(http.StatusCreated))

	request, err := http.NewRequest("POST", s.url+"/charges", bytes.NewReader([]byte(order("9"))))
	s.Expect(err).NotTo(HaveOccurred())
	request.Header.Set("Idempotency-Key", "k")
	a := s.send(s.client, request)
	s.Expect(a.status).To(Equal(http.StatusCreated))
	s.Expect(s.do("GET", "/charges?key=k", "").json(t)["count"]).To(BeEquivalentTo(2))
}
