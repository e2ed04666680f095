// Package agent is an agent to judge by: it orders through a gateway as a good agent does,
// and keeps account of all that it sees.
//
// What must hold: an order has its intent ID before its first call and keeps it through all
// that follow; it is called again until its answer is final; no call is made that is not
// counted, and none is counted twice. What the money did is for the provider's ledger to say.
package agent

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// again is when a call is made again where the answer does not say.
	again = 250 * time.Millisecond
	// maxBody bounds an answer; a longer one counts as a connection error.
	maxBody = 4 << 20
	// kept is how many texts of connection errors a report has, and of refusals.
	kept = 10
	// refusalText is how much of a refusal it has.
	refusalText = 600
)

// Options say what an agent is to do.
type Options struct {
	// Gateway is its URL, and CAFile the certificates by which its own is trusted; "": the system's. The file
	// is read anew for each connection: an authority can be replaced.
	Gateway, CAFile string
	// TokenFile holds the ServiceAccount's token. It is read anew for each call: tokens rotate.
	TokenFile string
	// Namespace and Tool are what is called, and Account for whom: the body's accountId; "": Namespace.
	Namespace, Tool, Account string
	// Prefix is what the names of all orders begin with. It must be this agent's alone.
	Prefix string
	// Orders is how many to make; 0: until stopped.
	Orders int
	// Concurrency is how many calls are in flight at once.
	Concurrency int
	// Duration is after which no order more is begun; 0: no such time.
	Duration time.Duration
	// Timeout is of one call.
	Timeout time.Duration
	// Impatience is after how long a call is made again at the latest, also where the answer names a later
	// time; 0: when the answer says.
	Impatience time.Duration
	// Faults are the values of the header Provider-Fault, in turn; "": the header is left out.
	Faults []string
}

func (o Options) check() error {
	u, err := url.Parse(o.Gateway)
	switch {
	case err != nil:
		return fmt.Errorf("--gateway: %w", err)
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return fmt.Errorf("--gateway is %q: it must be a URL such as https://holdfast-gateway.holdfast-system.svc", o.Gateway)
	case o.TokenFile == "":
		return errors.New("--token-file is empty: name the file of the projected token")
	case o.Namespace == "" || o.Tool == "":
		return errors.New("--namespace and --tool are needed: what is to be called")
	case o.Prefix == "":
		return errors.New("--prefix is empty: an intent ID must be this agent's alone")
	case o.Orders < 0 || o.Concurrency < 1:
		return errors.New("--orders must not be negative, and --concurrency at least 1")
	case o.Duration < 0 || o.Impatience < 0 || o.Timeout <= 0:
		return errors.New("--duration and --impatience must not be negative, and --timeout more than 0s")
	}
	return nil
}

// Ends of an intent, as its agent sees them. An order that has none is still open.
const (
	Paid    = "paid"
	Held    = "held"
	Refused = "refused"
)

// Intent is an order and what became of it.
type Intent struct {
	ID     string `json:"id"`
	Order  string `json:"order"`
	Amount string `json:"amount"`
	// Attempts is how often the gateway was called.
	Attempts int `json:"attempts"`
	// End is Paid, Held or Refused; "" while it is open.
	End string `json:"end"`
	// Status, Verdict and Hold are of the last answer, and BodySHA256 of its body, in hexadecimal.
	Status     int    `json:"status"`
	Verdict    string `json:"verdict"`
	Hold       string `json:"hold,omitempty"`
	BodySHA256 string `json:"body_sha256"`
}

// Report is what an agent saw until now.
type Report struct {
	// Done says that no order more will be begun and none is open.
	Done    bool    `json:"done"`
	Seconds float64 `json:"seconds"`
	// Orders have been begun, and Open have no end yet.
	Orders int `json:"orders"`
	Open   int `json:"open"`
	// Calls were made, the same order's again included. Each is among the Answers or the ConnectionErrors,
	// or under way.
	Calls int `json:"calls"`
	// Answers counts them by status and verdict, such as "201 ALLOW".
	Answers map[string]int `json:"answers"`
	// ConnectionErrors counts calls without an answer, by what happened: refused, reset, eof, timeout, other.
	ConnectionErrors map[string]int `json:"connection_errors"`
	LastErrors       []string       `json:"last_errors"`
	// LastRefusals are the newest answers after which a call was made again: what they said.
	LastRefusals []string `json:"last_refusals"`
	// Ends counts the intents by their end.
	Ends map[string]int `json:"ends"`
	// LongestPause is the longest time between two successes, whichever the orders; while the agent works
	// also the time since the last one.
	LongestPause float64 `json:"longest_pause_seconds"`
	// Intents are all of them, in the order in which they were begun. GET /progress leaves them out.
	Intents []Intent `json:"intents,omitempty"`
}

// Agent orders. Its methods may be called from several goroutines; Run once.
type Agent struct {
	o      Options
	target string
	client *http.Client
	next   atomic.Int64
	// stopped closes when no order more is to be begun.
	stopped chan struct{}
	stop    sync.Once

	// mu guards all below.
	mu           sync.Mutex
	began, ended time.Time
	lastSuccess  time.Time
	longest      time.Duration
	calls        int
	answers      map[string]int
	failures     map[string]int
	texts        []string
	refusals     []string
	intents      []*Intent
}

// New makes an agent.
func New(o Options) (*Agent, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.Account = cmp.Or(o.Account, o.Namespace)
	if _, err := o.trusted(); err != nil {
		return nil, err
	}
	return &Agent{
		o:      o,
		target: strings.TrimSuffix(o.Gateway, "/") + "/v1/namespaces/" + url.PathEscape(o.Namespace) + "/tools/" + url.PathEscape(o.Tool),
		client: &http.Client{
			// It lives as long as an agent's does: connections are used again.
			Transport: &http.Transport{
				DialContext: dialer.DialContext, DialTLSContext: o.dialTLS, MaxIdleConnsPerHost: o.Concurrency, DisableCompression: true,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Timeout:       o.Timeout,
		},
		stopped: make(chan struct{}), answers: map[string]int{}, failures: map[string]int{},
	}, nil
}

var dialer = net.Dialer{Timeout: 10 * time.Second}

// dialTLS opens a connection to whoever is trusted at this moment.
func (o Options) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	roots, err := o.trusted()
	if err != nil {
		return nil, err
	}
	d := tls.Dialer{NetDialer: &dialer, Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	return d.DialContext(ctx, network, address)
}

// trusted are the authorities of CAFile; nil: the system's.
func (o Options) trusted() (*x509.CertPool, error) {
	if o.CAFile == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(o.CAFile)
	if err != nil {
		return nil, fmt.Errorf("--ca-file: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--ca-file: %s has no certificate in PEM", o.CAFile)
	}
	return roots, nil
}

// Stop has no order more begun. Those that are open go on until they have an end.
func (a *Agent) Stop() { a.stop.Do(func() { close(a.stopped) }) }

// Run orders until there is no more to order, or Stop, and each order has its end; or until
// ctx ends, which leaves orders open.
func (a *Agent) Run(ctx context.Context) {
	a.mu.Lock()
	a.began = time.Now()
	a.lastSuccess = a.began
	a.mu.Unlock()
	if a.o.Duration > 0 {
		defer time.AfterFunc(a.o.Duration, a.Stop).Stop()
	}
	var working sync.WaitGroup
	for range a.o.Concurrency {
		working.Go(func() {
			for ctx.Err() == nil {
				select {
				case <-a.stopped:
					return
				default:
				}
				n := int(a.next.Add(1))
				if a.o.Orders > 0 && n > a.o.Orders {
					return
				}
				a.order(ctx, n)
			}
		})
	}
	working.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = time.Now()
}

// order makes one, until it has its end.
func (a *Agent) order(ctx context.Context, n int) {
	name := a.o.Prefix + "-" + strconv.Itoa(n)
	i := &Intent{ID: name, Order: name, Amount: fmt.Sprintf("%d.%02d", 1+n%90, n%100)}
	body := fmt.Appendf(nil, `{"accountId":%s,"orderId":%s,"amount":%q}`, quoted(a.o.Account), quoted(name), i.Amount)
	fault := ""
	if len(a.o.Faults) > 0 {
		fault = a.o.Faults[n%len(a.o.Faults)]
	}
	a.mu.Lock()
	a.intents = append(a.intents, i)
	a.mu.Unlock()
	for {
		wait := a.call(ctx, i, body, fault)
		if wait == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func quoted(s string) []byte {
	text, _ := json.Marshal(s) // no string fails
	return text
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// call makes one call, and says after which time there must be another; 0: the order has its end.
func (a *Agent) call(ctx context.Context, i *Intent, body []byte, fault string) time.Duration {
	a.mu.Lock()
	a.calls++
	i.Attempts++
	a.mu.Unlock()
	got, err := a.send(ctx, i.ID, body, fault)
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.failures[kindOf(err)]++
		a.texts = newest(a.texts, now, i.ID, err.Error())
		return again
	}
	sum := sha256.Sum256(got.body)
	i.Status, i.Verdict, i.BodySHA256 = got.status, got.header.Get("Holdfast-Verdict"), hex.EncodeToString(sum[:])
	a.answers[strings.TrimSpace(strconv.Itoa(got.status)+" "+i.Verdict)]++
	i.End = endOf(got)
	switch i.End {
	case Paid:
		a.longest = max(a.longest, now.Sub(a.lastSuccess))
		a.lastSuccess = now
	case Held:
		var problem struct {
			Hold string `json:"hold"`
		}
		// Without a name the judge finds no hold.
		if json.Unmarshal(got.body, &problem) == nil {
			i.Hold = problem.Hold
		}
	case "":
		a.refusals = newest(a.refusals, now, i.ID, string(got.body[:min(len(got.body), refusalText)]))
		if seconds, err := strconv.Atoi(got.header.Get("Retry-After")); err == nil && seconds > 0 {
			wait := time.Duration(seconds) * time.Second
			if a.o.Impatience > 0 {
				wait = min(wait, a.o.Impatience)
			}
			return wait
		}
		return again
	}
	return 0
}

// newest adds a text to those that are kept.
func newest(texts []string, at time.Time, id, text string) []string {
	texts = append(texts, at.UTC().Format(time.TimeOnly)+" "+id+": "+text)
	return texts[max(0, len(texts)-kept):]
}

// endOf says whether an answer is final; "": the same call is to be made again.
func endOf(got answer) string {
	verdict := got.header.Get("Holdfast-Verdict")
	switch {
	case got.status >= 200 && got.status < 300:
		if verdict == "ALLOW" || verdict == "REPLAY" {
			return Paid
		}
		// Not by the guard: nobody has promised anything.
		return Refused
	case verdict == "UNKNOWN_HOLD":
		return Held
	case got.status == http.StatusUnauthorized, got.status == http.StatusRequestTimeout, got.status == http.StatusConflict,
		got.status == http.StatusTooEarly, got.status == http.StatusTooManyRequests, got.status >= 500:
		return ""
	default:
		return Refused
	}
}

// send makes one request, and never by itself another.
func (a *Agent) send(ctx context.Context, id string, body []byte, fault string) (answer, error) {
	token, err := os.ReadFile(a.o.TokenFile)
	if err != nil {
		return answer{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.target, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	// With it the client would send a request with an Idempotency-Key again on a connection that died, and
	// nobody would count it.
	request.GetBody = nil
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", id)
	if fault != "" {
		request.Header.Set("Provider-Fault", fault)
	}
	response, err := a.client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	got, err := io.ReadAll(io.LimitReader(response.Body, maxBody+1))
	if err == nil && len(got) > maxBody {
		err = fmt.Errorf("the answer has more than %d bytes", maxBody)
	}
	return answer{status: response.StatusCode, header: response.Header, body: got}, err
}

// kindOf names what happened to a connection.
func kindOf(err error) string {
	var network net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "reset"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "eof"
	case errors.As(err, &network) && network.Timeout():
		return "timeout"
	default:
		return "other"
	}
}

// Report is what it saw until now.
func (a *Agent) Report() Report {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := Report{
		Done: !a.ended.IsZero(), Orders: len(a.intents), Calls: a.calls,
		Answers: map[string]int{}, ConnectionErrors: map[string]int{}, LastErrors: append([]string{}, a.texts...),
		LastRefusals: append([]string{}, a.refusals...), Ends: map[string]int{},
		Intents: make([]Intent, 0, len(a.intents)),
	}
	longest, until := a.longest, a.ended
	if !r.Done && !a.began.IsZero() {
		until = time.Now()
		longest = max(longest, until.Sub(a.lastSuccess))
	}
	r.Seconds, r.LongestPause = until.Sub(a.began).Seconds(), longest.Seconds()
	for name, n := range a.answers {
		r.Answers[name] = n
	}
	for name, n := range a.failures {
		r.ConnectionErrors[name] = n
	}
	for _, i := range a.intents {
		if i.End == "" {
			r.Open++
		} else {
			r.Ends[i.End]++
		}
		r.Intents = append(r.Intents, *i)
	}
	return r
}

// Handler serves the report, and takes the order to stop: GET /report, GET /progress (the
// report without its intents), POST /stop, GET /healthz.
func (a *Agent) Handler() http.Handler {
	routes := http.NewServeMux()
	tell := func(w http.ResponseWriter, r Report) {
		w.Header().Set("Content-Type", "application/json")
		// Who hung up does not want it.
		_ = json.NewEncoder(w).Encode(r)
	}
	routes.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) { tell(w, a.Report()) })
	routes.HandleFunc("GET /progress", func(w http.ResponseWriter, _ *http.Request) {
		r := a.Report()
		r.Intents = nil
		tell(w, r)
	})
	routes.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		a.Stop()
		w.WriteHeader(http.StatusNoContent)
	})
	routes.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	return routes
}
