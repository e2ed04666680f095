// Package client lets a Go program make each of its payments once: it writes down what
// it is about to do before it does it, asks Holdfast, runs, and tells what came of it.
// After a crash it comes back under the same intent ID.
//
// Do is for a tool that runs inside the program (an AgentTool with upstream.local): it
// wraps the function that moves the money. Call is for a tool that Holdfast itself calls.
//
// What must hold: the intent is in the outbox, synced, before anything is sent; that the
// function begins is in the outbox, synced, before it begins; a function that has begun
// and of which no result is in the outbox is never run again under the same attempt, and
// its outcome is unknown; and whatever is repeated is repeated under the same intent ID.
package client

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

// Options of a client. URL, Namespace, TokenFile and Outbox are needed.
type Options struct {
	// URL is Holdfast's, such as https://holdfast-gateway.holdfast-system.svc.
	URL string
	// Namespace is the tools'.
	Namespace string
	// TokenFile holds the ServiceAccount's token of the audience holdfast. It is read again
	// for each request.
	TokenFile string
	// Outbox is the file that remembers what was begun. It must be on a disk that outlives
	// the process; one process at a time can have it open. Its directory must exist.
	Outbox string
	// CAFile holds the certificates by which Holdfast's own is trusted; empty: the system's.
	CAFile string
	// Transport sends the requests; nil: one of the client's own, with CAFile. It must not
	// repeat requests by itself.
	Transport http.RoundTripper
	// SettleFor is how long a result is offered to Holdfast after the function has
	// returned, whatever became of the caller's context; 30 s. What is not settled by then
	// stays in the outbox.
	SettleFor time.Duration
	// LookUp asks the provider about an attempt that had begun in a process that is gone.
	// A nil error means that it was paid, and the Result is what it came to. Any error
	// means that nobody knows, and a person decides: that a payment is not found is no
	// proof that it is not on its way. Nil: nobody is asked.
	LookUp func(ctx context.Context, b Begun) (Result, error)
}

// Client makes payments. It may be used by several goroutines.
type Client struct {
	o      Options
	base   string
	http   *http.Client
	outbox *outbox

	mu   sync.Mutex
	busy map[string]chan struct{} // by key of the outbox; closed when the call is over
}

// Intent is one purchase. Its ID is chosen once, before the first send, and is the same on
// every retry, whatever was planned anew meanwhile.
type Intent struct {
	// Tool is the AgentTool's name.
	Tool string
	// ID names the intent.
	ID string
	// Body is the call's body, as the tool would get it: from it Holdfast reads what the
	// payment is for. ContentType is application/json if it is empty.
	Body        []byte
	ContentType string
	// Session and Call say where the intent comes from, if the tool's lineage is read from them.
	Session, Call string
	// Header and Query are more of the call, if the tool reads identity from them. Of Prefer,
	// respond-async and wait are refused: the client waits for the end in any case.
	Header http.Header
	Query  url.Values
	// Method (POST if empty) and Suffix are for Call alone.
	Method, Suffix string
}

// Result is what a payment came to, and what whoever repeats it gets.
type Result struct {
	// Status is an HTTP status: 2xx for a payment that was made. 0 is 200, or 204 without a body.
	Status      int
	ContentType string
	Body        []byte
	// ProviderReference is the provider's own name of the payment: up to 128 printable
	// characters without blanks.
	ProviderReference string
	// Replayed: it is the result of an earlier run.
	Replayed bool
	// Truncated: Body is only the start of what the tool answered, which had this Size and
	// this Digest ("sha256:" and hex).
	Truncated bool
	Size      int64
	Digest    string
}

// Begun is an intent that is in the outbox.
type Begun struct {
	Intent Intent
	// Ran: its function had begun, and what came of it is not in the outbox.
	Ran bool
	// Finished: its function has returned, and its result is not settled yet.
	Finished bool
	// Called: it was made by Call, otherwise by Do.
	Called bool
	// Attempt and ProviderKey are those of the last attempt; 0 and "" if none was claimed.
	Attempt     int
	ProviderKey string
	// Outcome, Result and Detail are what it came to (Finished): Succeeded, Failed,
	// Retryable, Pending or Unknown.
	Outcome string
	Result  Result
	Detail  string
	// Answered is what Holdfast says to that, where it will say so every time: it cannot be
	// settled, and a person must look at it. ForgetUnsettled takes it out.
	Answered string
}

// Open makes a client and opens its outbox.
func Open(o Options) (*Client, error) {
	switch {
	case o.URL == "" || o.Namespace == "" || o.TokenFile == "" || o.Outbox == "":
		return nil, errors.New("a client needs URL, Namespace, TokenFile and Outbox")
	case o.Transport != nil && o.CAFile != "":
		return nil, errors.New("both a Transport and a CAFile are given: let the Transport trust it")
	}
	base, err := url.Parse(o.URL)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, errors.New("the URL must be like https://holdfast.example.com: http or https, and a host")
	}
	if o.SettleFor == 0 {
		o.SettleFor = 30 * time.Second
	}
	if o.Transport == nil {
		if o.Transport, err = transport(o.CAFile); err != nil {
			return nil, err
		}
	}
	c := &Client{
		o: o, base: strings.TrimRight(o.URL, "/") + "/v1/namespaces/" + url.PathEscape(o.Namespace) + "/tools/",
		http: &http.Client{
			Transport: o.Transport,
			// What redirects is not Holdfast.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		busy: map[string]chan struct{}{},
	}
	if c.outbox, err = openOutbox(o.Outbox); err != nil {
		return nil, err
	}
	return c, nil
}

func transport(caFile string) (http.RoundTripper, error) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	if caFile == "" {
		return t, nil
	}
	text, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("read CAFile: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("CAFile %s has no certificate", caFile)
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}
	return t, nil
}

// Close closes the outbox. No call may be in progress.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return c.outbox.close()
}

// Pending lists what was begun and has not come to its end, the oldest first.
func (c *Client) Pending() ([]Begun, error) {
	entries, err := c.outbox.list()
	if err != nil {
		return nil, err
	}
	out := make([]Begun, len(entries))
	for i, e := range entries {
		out[i] = e.begun()
	}
	return out, nil
}

const (
	// turnMost is how long Recover waits for one intent, turnLeast the shortest time that
	// it has where the context's is short for all.
	turnMost, turnLeast = 30 * time.Second, time.Second
)

// errTurn: the intent has had its part of the time.
var errTurn = errors.New("it has not come to its end in its part of the time, and stays in the outbox")

// Recover goes on with all that is pending, one after another, as after a crash. First what
// had begun is settled: with its result, or without one as unknown (but see LookUp). Then
// what had not begun is run, by the function that it is given, which finds the intent in
// its Attempt. None keeps back another: for each it waits half a minute at most, or the
// context's time by the number of those that are left. A function that runs has the
// context's. It returns the errors of those that have not come to their end.
func (c *Client) Recover(ctx context.Context, run Func) error {
	entries, err := c.outbox.list()
	if err != nil {
		return err
	}
	failed := make([]error, len(entries))
	each := func(do func(context.Context, turn, *entry) error, which func(int) bool) {
		left := 0
		for i := range entries {
			if which(i) {
				left++
			}
		}
		for i := range entries {
			if which(i) {
				failed[i] = c.recover(ctx, entries[i].key, left, do)
				left--
			}
		}
	}
	ran := func(i int) bool { return entries[i].Step != stepWritten }
	each(func(ctx context.Context, t turn, e *entry) error {
		_, _, err := c.bring(ctx, t, e)
		return err
	}, ran)
	// What could not be settled now is not tried twice.
	late := make([]bool, len(entries))
	for i := range entries {
		late[i] = failed[i] != nil
	}
	each(func(ctx context.Context, t turn, e *entry) error {
		t.settle = c.o.SettleFor // of what runs now
		if e.Called {
			_, err = c.call(ctx, t, e)
		} else if run == nil {
			return errors.New("there is no function to run")
		} else {
			_, err = c.do(ctx, t, e, run)
		}
		return err
	}, func(i int) bool { return !late[i] })
	for i, err := range failed {
		if err != nil {
			in := &entries[i].Intent
			failed[i] = fmt.Errorf("intent %s of %s: %w", in.ID, in.Tool, err)
		}
	}
	return errors.Join(failed...)
}

// recover gives one entry its turn, as one of those that are left. The outbox is read again:
// what has left it meanwhile is not written anew.
func (c *Client) recover(ctx context.Context, key string, left int, do func(context.Context, turn, *entry) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	most := turnMost
	if end, ok := ctx.Deadline(); ok {
		most = min(most, max(time.Until(end)/time.Duration(left), turnLeast))
	}
	waits, cancel := context.WithTimeoutCause(ctx, most, errTurn)
	defer cancel()
	end, err := c.enter(waits, key)
	if err != nil {
		return err
	}
	defer end()
	e, err := c.outbox.get(key)
	if err != nil || e == nil {
		return err
	}
	return do(ctx, turn{waits: waits, request: most, settle: min(most, c.o.SettleFor)}, e)
}

// Forget takes an intent out of the outbox without going on with it. One whose function
// may have run is not forgotten: it must be settled first (but see ForgetUnsettled).
func (c *Client) Forget(ctx context.Context, tool, id string) error {
	e, end, err := c.written(ctx, tool, id)
	defer end()
	switch {
	case err != nil || e == nil:
		return err
	case e.Answered != "":
		return fmt.Errorf("intent %s of %s has run, and cannot be settled (%s): find out at the provider what came of it, then call ForgetUnsettled", id, tool, e.Answered)
	case e.Step != stepWritten:
		return fmt.Errorf("intent %s of %s has run, and what came of it is not settled: call Do or Recover first", id, tool)
	}
	return c.outbox.remove(outboxKey(c.o.Namespace, tool, id))
}

// ForgetUnsettled takes an intent out of the outbox whose function has run, and whose
// result Holdfast will never take: answered is what it says, in the words of Begun.Answered
// or of UnsettledError.Answered. It is for whoever has found out at the provider what came
// of it. What is known stays in the file as evidence, and the same ID is not run again by
// this outbox (ErrForgotten).
func (c *Client) ForgetUnsettled(ctx context.Context, tool, id, answered string) error {
	e, end, err := c.written(ctx, tool, id)
	defer end()
	switch {
	case err != nil:
		return err
	case e == nil:
		return fmt.Errorf("intent %s of %s is not in the outbox", id, tool)
	case e.Step != stepFinished || e.Answered == "":
		return fmt.Errorf("intent %s of %s may be settled yet: call Do or Recover first", id, tool)
	case e.Answered != answered:
		return fmt.Errorf("what Holdfast says of intent %s of %s is %q, and not what was given here", id, tool, e.Answered)
	}
	return c.outbox.forget(e)
}

// written is what the outbox has of an intent, of which no other call is in progress until end
// is called; nil: nothing.
func (c *Client) written(ctx context.Context, tool, id string) (e *entry, end func(), err error) {
	key := outboxKey(c.o.Namespace, tool, id)
	if end, err = c.enter(ctx, key); err != nil {
		return nil, func() {}, err
	}
	e, err = c.outbox.get(key)
	return e, end, err
}

// enter waits until no other call of this intent is in progress here.
func (c *Client) enter(ctx context.Context, key string) (end func(), err error) {
	for {
		c.mu.Lock()
		other := c.busy[key]
		if other == nil {
			mine := make(chan struct{})
			c.busy[key] = mine
			c.mu.Unlock()
			return func() {
				c.mu.Lock()
				delete(c.busy, key)
				c.mu.Unlock()
				close(mine)
			}, nil
		}
		c.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// begin puts the intent into the outbox, or finds it there.
func (c *Client) begin(in Intent, called bool) (*entry, error) {
	switch {
	case in.Tool == "" || in.ID == "":
		return nil, errors.New("an intent needs the name of its tool and an ID")
	case !called && (in.Method != "" || in.Suffix != ""):
		return nil, errors.New("method and suffix are for Call: what is run here has none")
	}
	key := outboxKey(c.o.Namespace, in.Tool, in.ID)
	e, err := c.outbox.get(key)
	if err != nil {
		return nil, err
	}
	if e != nil {
		if e.Called != called || !e.Intent.same(in) {
			return nil, fmt.Errorf("%w: the outbox has another request under the intent ID %q of %s; a retry must be what was begun, another purchase needs another ID", ErrConflict, in.ID, in.Tool)
		}
		return e, nil
	}
	if name := takenByHoldfast(in.Header); name != "" {
		return nil, fmt.Errorf("the header Prefer with %s is not for this client, which waits for the end: leave it out", name)
	}
	forgotten, err := c.outbox.forgotten(key)
	if err != nil {
		return nil, err
	}
	if forgotten {
		return nil, fmt.Errorf("%w: intent %s of %s", ErrForgotten, in.ID, in.Tool)
	}
	e = &entry{key: key, Intent: in, Called: called, Step: stepWritten, Token: newToken(), Written: time.Now().UTC()}
	return e, c.outbox.put(e)
}

func newToken() string { return rand.Text() }
