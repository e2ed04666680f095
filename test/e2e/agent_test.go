// An agent as the gateway sees it: an HTTP client of another process, which knows
// what the answers mean and nothing else.

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// The verdicts, as an agent reads them.
const (
	allow       = "ALLOW"
	replay      = "REPLAY"
	inFlight    = "IN_FLIGHT"
	conflict    = "CONFLICT"
	deny        = "DENY"
	unknownHold = "UNKNOWN_HOLD"
	none        = ""
)

// agents is a client of many agents: it keeps enough connections, follows nothing and never retries by itself.
var agents = &http.Client{
	Transport:     &http.Transport{MaxIdleConnsPerHost: 128, DisableCompression: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       time.Minute,
}

// call is one call of a tool.
type call struct {
	// tool; "": charge.
	tool string
	// id is the client's key, session and index the place of the call; what is empty is not sent.
	id, session, index string
	body               string
	// fault is what goes wrong at the provider.
	fault string
	// at is the gateway that is called; "": any.
	at gatewayProcess
	// token; "": the agent's.
	token  string
	header map[string]string
	suffix string
}

// reply is what an agent got. err is a transport error.
type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

func (r reply) verdict() string { return r.header.Get("Holdfast-Verdict") }

func (r reply) String() string {
	body := r.body
	if len(body) > 2048 {
		body = body[:2048] + "…"
	}
	return fmt.Sprintf("status %d, verdict %q, error %v, body %s", r.status, r.verdict(), r.err, body)
}

// problem is a refusal.
type problem struct {
	Type            string       `json:"type"`
	Title           string       `json:"title"`
	Status          int          `json:"status"`
	Detail          string       `json:"detail"`
	Verdict         string       `json:"verdict"`
	Reason          string       `json:"reason"`
	IntentID        string       `json:"intent_id"`
	RetryAfter      int          `json:"retry_after"`
	Poll            string       `json:"poll"`
	Hold            string       `json:"hold"`
	OwnMatches      []matchOfOwn `json:"own_matches"`
	SuggestedAction string       `json:"suggested_action"`
	Order           struct {
		Scope             []string `json:"scope"`
		ProviderReference string   `json:"provider_reference"`
	} `json:"order"`
}

type matchOfOwn struct {
	IntentID string `json:"intent_id"`
	State    string `json:"state"`
	Poll     string `json:"poll"`
}

// problem reads a refusal, which must be one.
func (r reply) problem() problem {
	GinkgoHelper()
	Expect(r.header.Get("Content-Type")).To(Equal("application/problem+json"), r.String())
	var p problem
	Expect(json.Unmarshal([]byte(r.body), &p)).To(Succeed(), r.String())
	Expect(p.Status).To(Equal(r.status), r.String())
	Expect(p.Type).NotTo(BeEmpty(), r.String())
	Expect(p.Detail).NotTo(BeEmpty(), r.String())
	return p
}

// toolURL is a tool's at one of the gateways, whichever.
func (w *world) toolURL(tool string) string { return w.toolAt(anyGateway(), tool) }

func (w *world) toolAt(g gatewayProcess, tool string) string {
	return g.url() + "/v1/namespaces/" + w.namespace + "/tools/" + tool
}

// call calls a tool. It may be used by many agents at once.
func (w *world) call(ctx context.Context, c call) reply {
	tool := c.tool
	if tool == "" {
		tool = charge
	}
	at := c.at
	if at == "" {
		at = anyGateway()
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.toolAt(at, tool)+c.suffix, strings.NewReader(c.body))
	if err != nil {
		return reply{err: err}
	}
	request.Header.Set("Content-Type", "application/json")
	for name, value := range map[string]string{
		"Idempotency-Key": c.id, "Holdfast-Session": c.session, "Holdfast-Call": c.index, "Provider-Fault": c.fault,
	} {
		if value != "" {
			request.Header.Set(name, value)
		}
	}
	for name, value := range c.header {
		request.Header.Set(name, value)
	}
	token := c.token
	if token == "" {
		token = w.token
	}
	request.Header.Set("Authorization", "Bearer "+token)
	return do(request)
}

func do(request *http.Request) reply {
	answer, err := agents.Do(request)
	if err != nil {
		return reply{err: err}
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	return reply{status: answer.StatusCode, header: answer.Header, body: string(body), err: err}
}

// pay calls, and says what the answer must be.
func (w *world) pay(ctx context.Context, c call, status int, verdict string) reply {
	GinkgoHelper()
	got := w.call(ctx, c)
	Expect(got.err).NotTo(HaveOccurred())
	Expect(got.status).To(Equal(status), got.String())
	Expect(got.verdict()).To(Equal(verdict), got.String())
	return got
}

// start calls in the background.
func (w *world) start(ctx context.Context, c call) <-chan reply {
	done := make(chan reply, 1)
	go func() { done <- w.call(ctx, c) }()
	return done
}

// atOnce makes calls at the same instant and collects the answers, in the order of the calls.
func (w *world) atOnce(ctx context.Context, calls ...call) []reply {
	ready := make(chan struct{})
	waiting := make([]<-chan reply, len(calls))
	for i, c := range calls {
		done := make(chan reply, 1)
		waiting[i] = done
		go func() {
			<-ready
			done <- w.call(ctx, c)
		}()
	}
	close(ready)
	out := make([]reply, len(calls))
	for i, done := range waiting {
		out[i] = <-done
	}
	return out
}

// intentDocument is what the poll URL tells.
type intentDocument struct {
	IntentID          string   `json:"intent_id"`
	Tool              string   `json:"tool"`
	State             string   `json:"state"`
	Verdict           string   `json:"verdict"`
	Reason            string   `json:"reason"`
	Scope             []string `json:"scope"`
	Fingerprint       string   `json:"fingerprint"`
	ProviderReference string   `json:"provider_reference"`
	RefundOwed        *bool    `json:"refund_owed"`
	Disputed          *bool    `json:"disputed"`
	Amount            *struct {
		Value    string `json:"value"`
		Currency string `json:"currency"`
	} `json:"amount"`
	Attempts []struct {
		Number            int       `json:"number"`
		Outcome           string    `json:"outcome"`
		Started           time.Time `json:"started"`
		Ended             time.Time `json:"ended"`
		Status            int       `json:"status"`
		ProviderReference string    `json:"providerReference"`
		Resumed           bool      `json:"resumed"`
		Detail            string    `json:"detail"`
	} `json:"attempts"`
	Checks *struct {
		Made    int           `json:"made"`
		Answers []checkAnswer `json:"answers"`
	} `json:"checks"`
	Hold *struct {
		Name         string       `json:"name"`
		State        string       `json:"state"`
		Reasons      []string     `json:"reasons"`
		Cause        string       `json:"cause"`
		Effect       string       `json:"effect"`
		Decision     string       `json:"decision"`
		WaitingUntil *time.Time   `json:"waiting_until"`
		OwnMatches   []matchOfOwn `json:"own_matches"`
	} `json:"hold"`
}

// checkAnswer is what a status check came to.
type checkAnswer struct {
	Outcome string `json:"outcome"`
	Status  int    `json:"status"`
	Detail  string `json:"detail"`
}

// get asks the gateway, as the agent.
func (w *world) get(ctx context.Context, url string) reply {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return reply{err: err}
	}
	request.Header.Set("Authorization", "Bearer "+w.token)
	return do(request)
}

// poll asks what became of an intent. wait is "" or such as "30s".
func (w *world) poll(ctx context.Context, tool, id, wait string) intentDocument {
	GinkgoHelper()
	doc, err := w.tryPoll(ctx, tool, id, wait)
	Expect(err).NotTo(HaveOccurred())
	return doc
}

// tryPoll is poll for those who can bear that there is no answer.
func (w *world) tryPoll(ctx context.Context, tool, id, wait string) (intentDocument, error) {
	return w.tryPollAt(ctx, anyGateway(), tool, id, wait)
}

func (w *world) tryPollAt(ctx context.Context, g gatewayProcess, tool, id, wait string) (intentDocument, error) {
	to := w.toolAt(g, tool) + "/intents/" + url.PathEscape(id)
	if wait != "" {
		to += "?wait=" + wait
	}
	got := w.get(ctx, to)
	var doc intentDocument
	if got.err != nil || got.status != http.StatusOK {
		return doc, fmt.Errorf("GET %s: %s", to, got)
	}
	return doc, json.Unmarshal([]byte(got.body), &doc)
}

// order is the body of a payment for an order of this world's account.
func (w *world) order(order, amount string) string {
	return fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%s}`, w.namespace, order, amount)
}
