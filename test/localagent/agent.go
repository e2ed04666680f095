// Package localagent is an agent with a tool of its own, to be killed: a process that
// makes one payment with pkg/client, and is killed by itself, with SIGKILL, at a step that
// it is told. What the money did is asked of the provider's ledger.
//
// A test runs its own binary again as such an agent; see Start.
package localagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/pkg/client"
)

// env has an agent's orders, as JSON.
const env = "HOLDFAST_TEST_LOCAL_AGENT"

// Orders are what an agent is to do.
type Orders struct {
	URL, Namespace, TokenFile, Outbox string

	Intent   client.Intent
	Provider string
	// Fault is the provider's.
	Fault string
	// Kill is the step at which it is killed; see Steps. Empty: it lives.
	Kill string
	// LooksUp: it asks the provider about what an earlier process may have paid.
	LooksUp bool
	// Call: Holdfast calls the tool, and not the agent itself.
	Call bool
	// Within bounds the whole.
	Within time.Duration
}

// Steps at which an agent can be killed, in their order. What is answered has reached the
// gateway and come back to the process, but not to the client's code.
var Steps = []string{
	"before-outbox", "before-claim", "claim-sent", "claim-answered",
	"function-begun", "payment-sent", "function-finished",
	"before-settle", "settle-sent", "settle-answered",
}

// Report is what became of it.
type Report struct {
	Status   int
	Body     string
	Replayed bool
	// Held, Failed and Error say that there was no result.
	Held, Failed bool
	Error        string
	// Pending is how many intents are left in the outbox.
	Pending int
}

// RunIfAgent makes this process an agent, if it was started as one; then it does not return.
func RunIfAgent() {
	text := os.Getenv(env)
	if text == "" {
		return
	}
	var o Orders
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		var r Report
		if r, err = o.run(); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(r)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Start runs an agent to its end. killed: it was killed by SIGKILL, as it was told.
func Start(ctx context.Context, o Orders) (r Report, killed bool, err error) {
	text, err := json.Marshal(o)
	if err != nil {
		return r, false, err
	}
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), env+"="+string(text))
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signaled() && s.Signal() == syscall.SIGKILL {
			return r, true, nil
		}
	}
	if err != nil {
		return r, false, fmt.Errorf("the agent: %w: %s", err, stderr.String())
	}
	return r, false, json.Unmarshal(out, &r)
}

// at kills the process if this is its step.
func (o *Orders) at(step string) {
	if o.Kill == step {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

func (o *Orders) run() (r Report, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), o.Within)
	defer cancel()
	options := client.Options{
		URL: o.URL, Namespace: o.Namespace, TokenFile: o.TokenFile, Outbox: o.Outbox,
		Transport: &transport{o: o, to: http.DefaultTransport.(*http.Transport).Clone()},
	}
	if o.LooksUp {
		options.LookUp = o.lookUp
	}
	c, err := client.Open(options)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	o.at("before-outbox")
	var res client.Result
	if o.Call {
		res, err = c.Call(ctx, o.Intent)
	} else {
		res, err = c.Do(ctx, o.Intent, o.pay)
	}
	r.Status, r.Body, r.Replayed = res.Status, string(res.Body), res.Replayed
	if err != nil {
		var failed *client.FailedError
		r.Held, r.Failed, r.Error = errors.Is(err, client.ErrHeld), errors.As(err, &failed), err.Error()
	}
	pending, err := c.Pending()
	r.Pending = len(pending)
	return r, err
}

// pay is the tool.
func (o *Orders) pay(ctx context.Context, a *client.Attempt) (client.Result, error) {
	o.at("function-begun")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.Provider+"/charges", strings.NewReader(string(a.Intent.Body)))
	if err != nil {
		return client.Result{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if o.Fault != "" {
		req.Header.Set("Provider-Fault", o.Fault)
	}
	req.Header.Set("Idempotency-Key", a.ProviderKey)
	if !a.InTime() {
		return client.Result{}, &client.NothingMoved{Reason: "its time was over", Again: true}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return client.Result{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	o.at("payment-sent")
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return client.Result{}, err
	}
	var receipt struct{ ID string }
	switch resp.StatusCode {
	case http.StatusCreated:
		if err := json.Unmarshal(body, &receipt); err != nil {
			return client.Result{}, err
		}
	case http.StatusPaymentRequired:
		return client.Result{}, &client.NothingMoved{Reason: "declined", Result: &client.Result{Status: 402, ContentType: "application/json", Body: body}}
	case http.StatusServiceUnavailable:
		return client.Result{}, &client.NothingMoved{Reason: "the provider is away", Again: true, After: time.Second}
	default:
		return client.Result{}, fmt.Errorf("the provider answered %d", resp.StatusCode)
	}
	o.at("function-finished")
	return client.Result{Status: 201, ContentType: "application/json", Body: body, ProviderReference: receipt.ID}, nil
}

// lookUp asks the provider what it has under the intent's key.
func (o *Orders) lookUp(ctx context.Context, b client.Begun) (client.Result, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.Provider+"/charges/"+url.PathEscape(b.ProviderKey), nil)
	if err != nil {
		return client.Result{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return client.Result{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return client.Result{}, err
	}
	var receipt struct{ ID, Status string }
	if err := json.Unmarshal(body, &receipt); err != nil || resp.StatusCode != http.StatusOK || receipt.Status == "processing" {
		return client.Result{}, errors.New("it is not known")
	}
	return client.Result{Status: 201, ContentType: "application/json", Body: body, ProviderReference: receipt.ID}, nil
}

// transport is where requests to the gateway pass, and where the process is killed.
type transport struct {
	o  *Orders
	to http.RoundTripper
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	what := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	t.o.at("before-" + what)
	ctx := httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		WroteRequest: func(httptrace.WroteRequestInfo) { t.o.at(what + "-sent") },
	})
	resp, err := t.to.RoundTrip(r.WithContext(ctx))
	if err == nil {
		t.o.at(what + "-answered")
	}
	return resp, err
}
