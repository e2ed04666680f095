// What a test or a person asks and sets: look-ups, the ledger, faults,
// deduplication, visibility. In a program the methods, over HTTP the routes.

package provider

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"
)

const maxControlBody = 64 << 10

// Ledger is the truth about the money, and what arrived.
type Ledger struct {
	// Entries are in the order of their commits.
	Entries []Entry `json:"entries"`
	Count   int     `json:"count"`
	Totals  Totals  `json:"totals"`
	// Requests counts by method and path, such as "POST /charges", every
	// request that arrived since the start or the last reset, committed or
	// not. Control routes are not counted.
	Requests map[string]int `json:"requests"`
	// InFlight counts payment requests that are being worked on.
	InFlight InFlight `json:"inFlight"`
}

// InFlight counts payment requests from their arrival until their answer begins, so that
// one whose client has its answer is never counted.
type InFlight struct {
	// Now is how many there are, and Most how many there were at once since the start or
	// the last reset.
	Now  int `json:"now"`
	Most int `json:"most"`
}

// Ledger returns what is committed now. It fails only if the ledger file did.
func (p *Provider) Ledger() (Ledger, error) {
	entries, err := p.ledger.all()
	if err != nil {
		return Ledger{}, fmt.Errorf("read the ledger: %w", err)
	}
	sums, err := totals(entries)
	if err != nil {
		return Ledger{}, fmt.Errorf("sum the ledger: %w", err)
	}
	if entries == nil {
		entries = []Entry{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return Ledger{Entries: entries, Count: len(entries), Totals: sums, Requests: maps.Clone(p.requests), InFlight: p.inFlight}, nil
}

// Reset empties the ledger, the counters and what was received, and forgets
// payments that were accepted and will never be committed. Requests in
// progress go on, and count when they commit.
func (p *Provider) Reset() error {
	if err := p.ledger.reset(p.options.Now); err != nil {
		return fmt.Errorf("reset the ledger: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = map[string]int{}
	p.received = nil
	p.inFlight.Most = p.inFlight.Now
	clear(p.accepted)
	maps.DeleteFunc(p.claims, func(_ string, c *claim) bool { return c.never })
	return nil
}

// SetWindow sets how long a key deduplicates, from its commit. 0: never.
func (p *Provider) SetWindow(window time.Duration) error {
	if window < 0 {
		return errors.New("the window must not be negative; 0s turns deduplication off")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.window = window
	return nil
}

// SetVisibility sets how long after its commit a look-up shows an entry.
func (p *Provider) SetVisibility(lag time.Duration) error {
	if lag < 0 {
		return errors.New("the lag must not be negative")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.visibility = lag
	return nil
}

// lookUp answers with the visible entries of a kind, an empty list if there
// are none. key and orderId narrow them.
func (p *Provider) lookUp(kind Kind) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p.note(r, nil)
		query := r.URL.Query()
		for name := range query {
			if name != "key" && name != "orderId" {
				writeError(w, http.StatusBadRequest, "bad_query", fmt.Sprintf("unknown parameter %q; there are key and orderId", name))
				return
			}
		}
		entries, err := p.ledger.all()
		if err != nil {
			p.fail(w, err)
			return
		}
		p.mu.Lock()
		lag := p.visibility
		p.mu.Unlock()
		now := p.options.Now()
		found := []Entry{}
		for _, e := range entries {
			if e.Kind == kind &&
				(!query.Has("key") || e.Key == query.Get("key")) &&
				(!query.Has("orderId") || e.OrderID == query.Get("orderId")) &&
				!now.Before(e.Created.Add(lag)) {
				found = append(found, e)
			}
		}
		writeJSON(w, http.StatusOK, map[string]any{"entries": found, "count": len(found)})
	}
}

func (p *Provider) control() {
	p.routes.HandleFunc("GET "+pathLedger, func(w http.ResponseWriter, _ *http.Request) {
		l, err := p.Ledger()
		if err != nil {
			p.fail(w, err)
			return
		}
		writeJSON(w, http.StatusOK, l)
	})
	p.routes.HandleFunc("DELETE "+pathLedger, func(w http.ResponseWriter, _ *http.Request) {
		if err := p.Reset(); err != nil {
			p.fail(w, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})

	p.routes.HandleFunc("POST "+pathFaults, func(w http.ResponseWriter, r *http.Request) {
		var f Fault
		if err := readControl(w, r, &f); err != nil {
			writeError(w, http.StatusBadRequest, "bad_request", err.Error())
			return
		}
		if err := p.AddFault(f); err != nil {
			writeError(w, http.StatusBadRequest, "bad_fault", err.Error())
			return
		}
		p.writeFaults(w, http.StatusCreated)
	})
	p.routes.HandleFunc("GET "+pathFaults, func(w http.ResponseWriter, _ *http.Request) {
		p.writeFaults(w, http.StatusOK)
	})
	p.routes.HandleFunc("DELETE "+pathFaults, func(w http.ResponseWriter, _ *http.Request) {
		p.ClearFaults()
		w.WriteHeader(http.StatusNoContent)
	})
	p.routes.HandleFunc("POST "+pathRelease, func(w http.ResponseWriter, r *http.Request) {
		var which struct {
			Match map[string]string `json:"match"`
		}
		if err := readControl(w, r, &which); err != nil && !errors.Is(err, io.EOF) {
			writeError(w, http.StatusBadRequest, "bad_request", err.Error())
			return
		}
		writeJSON(w, http.StatusOK, map[string]int{"released": p.Release(which.Match)})
	})

	p.duration(pathDeduplication, "window", p.SetWindow, func() time.Duration { return p.window })
	p.duration(pathVisibility, "lag", p.SetVisibility, func() time.Duration { return p.visibility })
}

func (p *Provider) writeFaults(w http.ResponseWriter, status int) {
	writeJSON(w, status, map[string]any{"faults": p.Faults(), "held": p.Held()})
}

// duration serves one setting of one field. get runs under p.mu.
func (p *Provider) duration(path, field string, set func(time.Duration) error, get func() time.Duration) {
	show := func(w http.ResponseWriter) {
		p.mu.Lock()
		now := get()
		p.mu.Unlock()
		writeJSON(w, http.StatusOK, map[string]string{field: now.String()})
	}
	p.routes.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { show(w) })
	p.routes.HandleFunc("PUT "+path, func(w http.ResponseWriter, r *http.Request) {
		bad := func(err error) {
			writeError(w, http.StatusBadRequest, "bad_request", fmt.Sprintf("send {%q: \"24h\"}: %v", field, err))
		}
		var body map[string]string
		if err := readControl(w, r, &body); err != nil {
			bad(err)
			return
		}
		text, ok := body[field]
		if !ok || len(body) != 1 {
			bad(errors.New("the body has this field and no other"))
			return
		}
		value, err := time.ParseDuration(text)
		if err != nil {
			bad(err)
			return
		}
		if err := set(value); err != nil {
			bad(err)
			return
		}
		show(w)
	})
}

// readControl reads one JSON object and refuses fields that nobody would read.
func readControl(w http.ResponseWriter, r *http.Request, into any) error {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxControlBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fmt.Errorf("read the JSON body: %w", err)
	}
	if decoder.More() {
		return errors.New("read the JSON body: something follows the object")
	}
	return nil
}
