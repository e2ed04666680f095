// Every fault: what the client sees, and what the ledger says.

package provider_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func TestFaultsThatNeedNoHelp(t *testing.T) {
	type seen struct {
		status  int
		header  map[string]string
		body    types.GomegaMatcher
		sendErr error
		bodyErr error
	}
	receipt := And(ContainSubstring(`"id":"ch_`), ContainSubstring(`"amount":"49.99"`))
	for fault, c := range map[string]struct {
		sees    seen
		entries int
	}{
		"close-after-commit":       {seen{sendErr: io.EOF}, 1},
		"reset-before-commit":      {seen{sendErr: syscall.ECONNRESET}, 0},
		"reset-after-commit":       {seen{sendErr: syscall.ECONNRESET}, 1},
		"delay:1ms":                {seen{status: 201, body: receipt}, 1},
		"delay-after-commit:1ms":   {seen{status: 201, body: receipt}, 1},
		"error-500-after-commit":   {seen{status: 500, body: ContainSubstring("internal")}, 1},
		"error-503-before-commit":  {seen{status: 503, header: map[string]string{"Retry-After": "1"}, body: ContainSubstring("unavailable")}, 0},
		"decline-402":              {seen{status: 402, body: MatchJSON(`{"error":{"code":"declined","message":"the card was declined; nothing was paid"}}`)}, 0},
		"error-400":                {seen{status: 400, body: ContainSubstring("bad_request")}, 0},
		"redirect-301":             {seen{status: 301, header: map[string]string{"Location": "/charges"}}, 0},
		"redirect-302":             {seen{status: 302, header: map[string]string{"Location": "/charges"}}, 0},
		"redirect-303":             {seen{status: 303, header: map[string]string{"Location": "/charges"}}, 0},
		"redirect-307":             {seen{status: 307, header: map[string]string{"Location": "/charges"}}, 0},
		"cut-body":                 {seen{status: 201, body: HavePrefix(`{"id":"ch_`), bodyErr: io.ErrUnexpectedEOF}, 1},
		"no-content-204":           {seen{status: 204, body: BeEmpty()}, 1},
		"event-stream":             {seen{status: 200, header: map[string]string{"Content-Type": "text/event-stream"}, body: And(HavePrefix("event: result\ndata: {"), HaveSuffix("}\n\n"), receipt)}, 1},
		"big:5000000":              {seen{status: 201, body: And(HaveLen(5_000_000), receipt)}, 1},
		"big:1":                    {seen{status: 201, body: receipt}, 1},
		"accepted-202:never":       {seen{status: 202, body: And(receipt, ContainSubstring(`"status":"processing"`))}, 0},
		"accepted-202:59m":         {seen{status: 202, body: Not(ContainSubstring("created"))}, 0},
		"unheard-of":               {seen{status: 400, body: And(ContainSubstring("lost-answer"), ContainSubstring("hold-after-commit"), ContainSubstring("accepted-202"))}, 0},
		"delay":                    {seen{status: 400, body: ContainSubstring("delay:")}, 0},
		"delay:-1s":                {seen{status: 400}, 0},
		"delay:2h":                 {seen{status: 400}, 0},
		"delay:soon":               {seen{status: 400}, 0},
		"big:0":                    {seen{status: 400}, 0},
		"big:999999999":            {seen{status: 400}, 0},
		"big":                      {seen{status: 400}, 0},
		"decline-402:x":            {seen{status: 400, body: ContainSubstring("no argument")}, 0},
		"accepted-202:perhaps":     {seen{status: 400}, 0},
		"delay-after-commit:never": {seen{status: 400}, 0},
	} {
		check := func(t *testing.T, s *service, a answer) {
			if c.sees.sendErr != nil {
				// The client's transport says EOF or that the peer closed;
				// both wrap what the connection said.
				s.Expect(a.sendErr).To(MatchError(c.sees.sendErr))
			} else {
				s.Expect(a.sendErr).NotTo(HaveOccurred())
			}
			s.Expect(a.status).To(Equal(c.sees.status), string(a.body[:min(len(a.body), 500)]))
			for name, value := range c.sees.header {
				s.Expect(a.header.Get(name)).To(Equal(value))
			}
			if c.sees.body != nil {
				s.Expect(string(a.body)).To(c.sees.body)
			}
			if c.sees.bodyErr != nil {
				s.Expect(a.bodyErr).To(MatchError(c.sees.bodyErr))
			} else {
				s.Expect(a.bodyErr).NotTo(HaveOccurred())
			}
			l := s.judge()
			s.Expect(l.Count).To(Equal(c.entries))
			s.Expect(l.Requests).To(HaveKeyWithValue("POST /charges", 1))
		}
		t.Run(fault+" by header", func(t *testing.T) {
			s := start(t, provider.Options{})
			check(t, s, s.do("POST", "/charges", order("9"), provider.HeaderFault, fault))
		})
		if c.sees.status == http.StatusBadRequest && fault != "error-400" {
			t.Run(fault+" cannot be planned", func(t *testing.T) {
				s := start(t, provider.Options{})
				s.Expect(s.AddFault(provider.Fault{Fault: fault})).NotTo(Succeed())
				a := s.do("POST", "/faults", `{"fault":"`+fault+`"}`)
				s.Expect(a.status).To(Equal(http.StatusBadRequest))
				s.Expect(s.Faults()).To(BeEmpty())
			})
			continue
		}
		t.Run(fault+" by plan", func(t *testing.T) {
			s := start(t, provider.Options{})
			s.Expect(s.AddFault(provider.Fault{Fault: fault})).To(Succeed())
			check(t, s, s.do("POST", "/charges", order("9")))
			s.Expect(s.Faults()).To(BeEmpty())
			again := s.do("POST", "/charges", order("9"))
			s.Expect(again.status).To(Equal(http.StatusCreated), "a planned fault is used up")
			s.Expect(s.count()).To(Equal(c.entries + 1))
		})
	}
}

func TestEveryFaultNameIsTested(t *testing.T) {
	g := NewWithT(t)
	g.Expect(provider.FaultNames()).To(ConsistOf(
		"lost-answer", "close-after-commit", "reset-before-commit", "reset-after-commit",
		"delay:<duration>", "delay-after-commit:<duration>", "error-500-after-commit",
		"error-503-before-commit", "decline-402", "error-400", "redirect-301", "redirect-302",
		"redirect-303", "redirect-307", "cut-body", "accepted-202[:<duration>|:never]",
		"no-content-204", "event-stream", "big:<bytes>", "hold", "hold-after-commit",
	))
}

// leave sends a request in the background; the returned function makes its
// client go away and waits until it has.
func (s *service) leave(body, fault string, headers ...string) (goAway func() error) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s.t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, "POST", s.url+"/charges", io.NopCloser(strings.NewReader(body)))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set(provider.HeaderFault, fault)
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	done := make(chan answer, 1)
	go func() { done <- s.send(s.client, request) }()
	return func() error {
		cancel()
		a := <-done
		return errors.Join(a.sendErr, a.bodyErr)
	}
}

func TestLostAnswerHangsUntilTheClientGoes(t *testing.T) {
	s := start(t, provider.Options{})
	ended := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		s.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	s.url = server.URL
	goAway := s.leave(order("9"), "lost-answer")
	s.Eventually(s.count, soon, often).Should(Equal(1))
	s.Consistently(ended, 50*time.Millisecond, often).ShouldNot(BeClosed())
	s.Expect(goAway()).To(MatchError(context.Canceled))
	s.Eventually(ended, soon, often).Should(BeClosed())
	s.Expect(s.count()).To(Equal(1))
}

func TestTheReadTimeoutDoesNotEndAHang(t *testing.T) {
	s := start(t, provider.Options{ReadTimeout: time.Second})
	goAway := s.leave(order("9"), "hold-after-commit")
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Consistently(s.Held, 1500*time.Millisecond, often).Should(HaveLen(1))
	s.Expect(goAway()).To(MatchError(context.Canceled))
}

func TestLostAnswerIsBounded(t *testing.T) {
	s := start(t, provider.Options{MaxHang: 10 * time.Millisecond})
	a := s.do("POST", "/charges", order("9"), provider.HeaderFault, "lost-answer")
	s.Expect(a.sendErr).To(MatchError(io.EOF))
	s.Expect(s.count()).To(Equal(1))
}

func TestDelayCommitsAlsoForAClientThatWent(t *testing.T) {
	s := start(t, provider.Options{})
	goAway := s.leave(order("9"), "delay:3s")
	s.Eventually(s.Received, soon, often).Should(HaveLen(1))
	s.Expect(s.count()).To(BeZero(), "the delay is before the commit")
	s.Expect(goAway()).To(MatchError(context.Canceled))
	s.Eventually(s.count, soon, often).Should(Equal(1))
}

func TestDelayAfterCommit(t *testing.T) {
	s := start(t, provider.Options{})
	goAway := s.leave(order("9"), "delay-after-commit:1h")
	s.Eventually(s.count, soon, often).Should(Equal(1))
	s.Expect(goAway()).To(MatchError(context.Canceled), "the answer was still to come")
}

func TestAcceptedCommitsLater(t *testing.T) {
	s := start(t, provider.Options{AcceptedDelay: 3 * time.Second})
	a := s.do("POST", "/charges", order("9"), provider.HeaderFault, "accepted-202")
	s.Expect(a.status).To(Equal(http.StatusAccepted))
	s.Expect(s.count()).To(BeZero())
	s.Eventually(s.count, soon, often).Should(Equal(1))
	s.Expect(s.judge().Entries[0].ID).To(Equal(a.json(t)["id"]))
}

func TestHoldCommitsOnRelease(t *testing.T) {
	s := start(t, provider.Options{})
	results := make(chan answer, 2)
	for _, id := range []string{"8", "9"} {
		go func() { results <- s.do("POST", "/charges", order(id), provider.HeaderFault, "hold") }()
	}
	s.Eventually(s.Held, soon, often).Should(HaveLen(2))
	s.Expect(s.count()).To(BeZero())
	shown := s.do("GET", "/faults", "").json(t)["held"].([]any)
	s.Expect(shown[0]).To(And(HaveKeyWithValue("fault", "hold"), HaveKeyWithValue("accountId", "a1")))

	s.Expect(string(s.do("POST", "/faults/release", `{"match":{"orderId":"7"}}`).body)).To(MatchJSON(`{"released":0}`))
	s.Expect(string(s.do("POST", "/faults/release", `{"match":{"orderId":"9"}}`).body)).To(MatchJSON(`{"released":1}`))
	s.Expect((<-results).json(t)).To(HaveKeyWithValue("orderId", "9"))
	s.Expect(s.count()).To(Equal(1))
	s.Expect(string(s.do("POST", "/faults/release", "").body)).To(MatchJSON(`{"released":1}`))
	s.Expect((<-results).status).To(Equal(http.StatusCreated))
	s.Expect(s.count()).To(Equal(2))
	s.Expect(s.do("POST", "/faults/release", `{"orderId":"9"}`).status).To(Equal(http.StatusBadRequest))
}

func TestHoldCommitsAlsoForAClientThatWent(t *testing.T) {
	s := start(t, provider.Options{})
	goAway := s.leave(order("9"), "hold")
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Expect(goAway()).To(MatchError(context.Canceled))
	s.Consistently(s.Held, 100*time.Millisecond, often).Should(HaveLen(1))
	s.Expect(s.Release(nil)).To(Equal(1))
	s.Eventually(s.count, soon, often).Should(Equal(1))
}

func TestHoldEndsUncommittedAtItsBoundOrTheEnd(t *testing.T) {
	s := start(t, provider.Options{MaxHang: 10 * time.Millisecond})
	a := s.do("POST", "/charges", order("9"), provider.HeaderFault, "hold")
	s.Expect(a.sendErr).To(MatchError(io.EOF))
	s.Expect(s.count()).To(BeZero())
	s.Expect(s.Held()).To(BeEmpty())

	s = start(t, provider.Options{})
	goAway := s.leave(order("9"), "hold")
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Expect(s.Shutdown(t.Context())).To(Succeed())
	s.Expect(goAway()).To(HaveOccurred())
	s.Expect(s.count()).To(BeZero())
}

func TestHoldAfterCommit(t *testing.T) {
	s := start(t, provider.Options{})
	result := make(chan answer, 1)
	go func() {
		result <- s.do("POST", "/charges", order("9"), provider.HeaderFault, "hold-after-commit")
	}()
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Expect(s.count()).To(Equal(1))
	s.Expect(result).NotTo(Receive())
	s.Expect(s.Release(nil)).To(Equal(1))
	s.Expect((<-result).status).To(Equal(http.StatusCreated))

	goAway := s.leave(order("10"), "hold-after-commit")
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Expect(goAway()).To(MatchError(context.Canceled))
	s.Eventually(s.Held, soon, often).Should(BeEmpty(), "nobody is left to answer")
}

func TestPlannedFaultsAreFirstInFirstOutAndCounted(t *testing.T) {
	s := start(t, provider.Options{})
	for _, plan := range []string{
		`{"fault":"decline-402","path":"/refunds"}`,
		`{"fault":"error-400","match":{"orderId":"9","key":"k"}}`,
		`{"fault":"error-503-before-commit","times":2}`,
		`{"fault":"redirect-307","match":{"seat":"12"}}`,
	} {
		a := s.do("POST", "/faults", plan)
		s.Expect(a.status).To(Equal(http.StatusCreated), string(a.body))
	}
	status := func(path, body string, headers ...string) int { return s.do("POST", path, body, headers...).status }

	s.Expect(status("/charges", order("9"))).To(Equal(503), "another key")
	s.Expect(status("/charges", "nonsense")).To(Equal(400), "uses nothing up")
	s.Expect(s.Faults()).To(HaveLen(4))
	s.Expect(s.Faults()[2].Times).To(Equal(1))
	s.Expect(status("/charges", order("9"), provider.HeaderFault, "decline-402")).To(Equal(402), "uses nothing up")
	s.Expect(status("/charges", order("9"), "Idempotency-Key", "k")).To(Equal(400))
	s.Expect(status("/refunds", order("9"))).To(Equal(402))
	s.Expect(status("/refunds", order("9"))).To(Equal(503))
	s.Expect(status("/refunds", order("9"))).To(Equal(201))
	s.Expect(status("/refunds", `{"accountId":"a","amount":1,"seat":12}`)).To(Equal(307))
	s.Expect(s.Faults()).To(BeEmpty())
	s.Expect(s.count()).To(Equal(1))

	s.Expect(s.AddFault(provider.Fault{Fault: "error-400", Times: 3})).To(Succeed())
	s.Expect(string(s.do("GET", "/faults", "").body)).To(MatchJSON(`{"faults":[{"fault":"error-400","times":3}],"held":[]}`))
	s.Expect(s.do("DELETE", "/faults", "").status).To(Equal(http.StatusNoContent))
	s.Expect(status("/charges", order("9"))).To(Equal(201))

	for _, bad := range []string{
		`{"fault":"error-400","times":-1}`, `{"fault":"error-400","path":"/ledger"}`, `{"fault":"error-400","time":2}`,
		`{"fault":"error-400"}{}`, `{}`, `x`,
	} {
		s.Expect(s.do("POST", "/faults", bad).status).To(Equal(http.StatusBadRequest), bad)
	}
}

func TestAFollowedRedirectIsSeen(t *testing.T) {
	s := start(t, provider.Options{})
	s.Expect(s.AddFault(provider.Fault{Fault: "redirect-307"})).To(Succeed())
	response, err := http.Post(s.url+"/charges", "application/json", strings.NewReader(order("9")))
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(response.Body.Close()).To(Succeed())
	s.Expect(response.StatusCode).To(Equal(http.StatusCreated))
	s.Expect(s.judge().Requests).To(HaveKeyWithValue("POST /charges", 2))
}
