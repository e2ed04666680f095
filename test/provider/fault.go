// What can go wrong with a request, by name. Each fault says whether the money
// moved and what the client gets to see; the two are independent, which is the
// point of them.

package provider

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// HeaderFault chooses a fault for one request. It wins over the planned ones
// and uses none of them up.
const HeaderFault = "Provider-Fault"

const (
	maxDelay = time.Hour
	maxBig   = 64 << 20
	maxPlans = 10_000
	maxTimes = 1_000_000
)

// argument says what may follow a fault's name after a colon.
type argument int

const (
	noArgument argument = iota
	duration
	size
	durationOrNever // may be left out
)

// definition is a row of the table of faults.
type definition struct {
	name     string
	argument argument
	// refuse answers without a commit. It runs before deduplication, as a
	// provider's front door does. Nil: the request goes on to its commit.
	refuse func(w http.ResponseWriter, r *http.Request)
}

const (
	lostAnswer       = "lost-answer"
	closeAfterCommit = "close-after-commit"
	resetAfterCommit = "reset-after-commit"
	delayBefore      = "delay"
	delayAfter       = "delay-after-commit"
	errorAfterCommit = "error-500-after-commit"
	cutBody          = "cut-body"
	accepted         = "accepted-202"
	noContent        = "no-content-204"
	eventStream      = "event-stream"
	big              = "big"
	holdBefore       = "hold"
	holdAfter        = "hold-after-commit"
)

var definitions = []definition{
	{name: lostAnswer},
	{name: closeAfterCommit},
	{name: "reset-before-commit", refuse: func(w http.ResponseWriter, _ *http.Request) { reset(w) }},
	{name: resetAfterCommit},
	{name: delayBefore, argument: duration},
	{name: delayAfter, argument: duration},
	{name: errorAfterCommit},
	{name: "error-503-before-commit", refuse: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "unavailable", "nothing was paid; come back after Retry-After")
	}},
	{name: "decline-402", refuse: func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusPaymentRequired, "declined", "the card was declined; nothing was paid")
	}},
	{name: "error-400", refuse: func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusBadRequest, "bad_request", "the provider does not take this request; nothing was paid")
	}},
	redirect(http.StatusMovedPermanently),
	redirect(http.StatusFound),
	redirect(http.StatusSeeOther),
	redirect(http.StatusTemporaryRedirect),
	{name: cutBody},
	{name: accepted, argument: durationOrNever},
	{name: noContent},
	{name: eventStream},
	{name: big, argument: size},
	{name: holdBefore},
	{name: holdAfter},
}

// redirect sends the client to the very path that it called.
func redirect(status int) definition {
	return definition{
		name: "redirect-" + strconv.Itoa(status),
		refuse: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", r.URL.Path)
			w.WriteHeader(status)
		},
	}
}

// usage is how a fault is written.
func (d definition) usage() string {
	switch d.argument {
	case duration:
		return d.name + ":<duration>"
	case size:
		return d.name + ":<bytes>"
	case durationOrNever:
		return d.name + "[:<duration>|:never]"
	default:
		return d.name
	}
}

// FaultNames lists all faults as they are written.
func FaultNames() []string {
	names := make([]string, len(definitions))
	for i, d := range definitions {
		names[i] = d.usage()
	}
	return names
}

// chosen is a fault with its argument read. The zero value is no fault.
type chosen struct {
	definition
	wait  time.Duration
	never bool
	size  int
}

// parseFault reads a fault. acceptedDelay is what accepted-202 waits for when
// it names no duration.
func parseFault(text string, acceptedDelay time.Duration) (chosen, error) {
	name, argument, given := strings.Cut(text, ":")
	i := slices.IndexFunc(definitions, func(d definition) bool { return d.name == name })
	if i < 0 {
		return chosen{}, fmt.Errorf("unknown fault %q; the faults are: %s", text, strings.Join(FaultNames(), ", "))
	}
	f := chosen{definition: definitions[i]}
	wrong := func(why string) (chosen, error) {
		return chosen{}, fmt.Errorf("fault %q: %s; it is written %s", text, why, f.usage())
	}
	switch {
	case f.argument == noArgument && given:
		return wrong("it takes no argument")
	case f.argument == durationOrNever && !given:
		f.wait = acceptedDelay
	case f.argument == durationOrNever && argument == "never":
		f.never = true
	case f.argument == duration || f.argument == durationOrNever:
		wait, err := time.ParseDuration(argument)
		if err != nil || wait < 0 || wait > maxDelay {
			return wrong(fmt.Sprintf("needs a duration such as 200ms, from 0 to %s", maxDelay))
		}
		f.wait = wait
	case f.argument == size:
		n, err := strconv.Atoi(argument)
		if err != nil || n < 1 || n > maxBig {
			return wrong(fmt.Sprintf("needs a number of bytes from 1 to %d", maxBig))
		}
		f.size = n
	}
	return f, nil
}

// Fault is one planned fault: it meets the next Times requests that fit it.
// The plan is first in, first out: a request meets the oldest fault that fits.
type Fault struct {
	// Fault is written as FaultNames lists it.
	Fault string `json:"fault"`
	// Times is how many requests it still meets. 0 in a new one means 1.
	Times int `json:"times"`
	// Path is /charges or /refunds. Empty: both.
	Path string `json:"path,omitempty"`
	// Match compares arguments of the request by name, and its key as "key".
	Match map[string]string `json:"match,omitempty"`
}

// AddFault plans a fault.
func (p *Provider) AddFault(f Fault) error {
	if _, err := parseFault(f.Fault, p.options.AcceptedDelay); err != nil {
		return err
	}
	if f.Times == 0 {
		f.Times = 1
	}
	if f.Times < 0 || f.Times > maxTimes {
		return fmt.Errorf("times must be from 1 to %d", maxTimes)
	}
	if f.Path != "" && f.Path != pathCharges && f.Path != pathRefunds {
		return fmt.Errorf("path must be %s or %s, or absent for both", pathCharges, pathRefunds)
	}
	f.Match = maps.Clone(f.Match)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.plan) >= maxPlans {
		return fmt.Errorf("there are %d faults planned already; DELETE /faults clears them", maxPlans)
	}
	p.plan = append(p.plan, f)
	return nil
}

// Faults lists what is planned and not yet used up.
func (p *Provider) Faults() []Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Fault, len(p.plan))
	for i, f := range p.plan {
		f.Match = maps.Clone(f.Match)
		out[i] = f
	}
	return out
}

// ClearFaults forgets what is planned. Requests that are on hold stay so.
func (p *Provider) ClearFaults() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plan = nil
}

// choose finds the fault that a request meets, and uses it up.
func (p *Provider) choose(r *http.Request, e Entry) (chosen, error) {
	if text := r.Header.Get(HeaderFault); text != "" {
		return parseFault(text, p.options.AcceptedDelay)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.plan {
		f := &p.plan[i]
		if f.Path != "" && f.Path != r.URL.Path || !e.matches(f.Match) {
			continue
		}
		text := f.Fault
		if f.Times--; f.Times == 0 {
			p.plan = slices.Delete(p.plan, i, i+1)
		}
		return parseFault(text, p.options.AcceptedDelay)
	}
	return chosen{}, nil
}

// matches compares by argument name; an argument that is absent matches only
// the empty string.
func (e Entry) matches(match map[string]string) bool {
	for name, want := range match {
		var got string
		switch name {
		case "kind":
			got = string(e.Kind)
		case "accountId":
			got = e.AccountID
		case "orderId":
			got = e.OrderID
		case "amount":
			got = e.Amount
		case "currency":
			got = e.Currency
		case "memo":
			got = e.Memo
		case "key":
			got = e.Key
		default:
			raw, ok := e.Extra[name]
			if !ok {
				break
			}
			text, err := scalar(raw)
			if err != nil {
				return false
			}
			got = text
		}
		if got != want {
			return false
		}
	}
	return true
}

// Held is a request that waits for its release.
type Held struct {
	// Fault is hold (nothing is committed yet) or hold-after-commit.
	Fault     string `json:"fault"`
	Kind      Kind   `json:"kind"`
	AccountID string `json:"accountId"`
	OrderID   string `json:"orderId"`
	Amount    string `json:"amount"`
	Key       string `json:"key"`
}

type waiting struct {
	fault   string
	entry   Entry
	release chan struct{}
}

// Held lists the requests that wait for their release, oldest first.
func (p *Provider) Held() []Held {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Held, len(p.held))
	for i, w := range p.held {
		out[i] = Held{
			Fault: w.fault, Kind: w.entry.Kind, AccountID: w.entry.AccountID,
			OrderID: w.entry.OrderID, Amount: w.entry.Amount, Key: w.entry.Key,
		}
	}
	return out
}

// Release lets go the requests that are on hold now and match, all if match is
// empty, and says how many they were.
func (p *Provider) Release(match map[string]string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.held)
	p.held = slices.DeleteFunc(p.held, func(w *waiting) bool {
		if !w.entry.matches(match) {
			return false
		}
		close(w.release)
		return true
	})
	return before - len(p.held)
}

// hold blocks until the request is released. It reports false if gone, the
// bound or the provider's end came first. A nil gone is a client that may
// leave without ending it: a provider does not stop paying because of that.
func (p *Provider) hold(fault string, e Entry, gone <-chan struct{}) bool {
	w := &waiting{fault: fault, entry: e, release: make(chan struct{})}
	p.mu.Lock()
	p.held = append(p.held, w)
	p.mu.Unlock()

	bound := time.NewTimer(p.options.MaxHang)
	defer bound.Stop()
	select {
	case <-w.release:
		return true
	case <-gone:
	case <-bound.C:
	case <-p.ending:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.held, w)
	if i < 0 {
		// Released in the same moment: whoever released it counted it.
		return true
	}
	p.held = slices.Delete(p.held, i, i+1)
	return false
}
