// What the client gets to see, as its fault has it. The money has moved by now
// or never will: nothing here changes the ledger.

package provider

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// receipt is the body of an answer to a payment.
type receipt struct {
	ID        string    `json:"id"`
	Kind      Kind      `json:"kind"`
	AccountID string    `json:"accountId"`
	OrderID   string    `json:"orderId"`
	Amount    string    `json:"amount"`
	Currency  string    `json:"currency"`
	Key       string    `json:"key"`
	Created   time.Time `json:"created,omitzero"`
	// Status is "processing" under a 202, absent otherwise.
	Status string `json:"status,omitempty"`
	// Padding makes a body as large as the fault big asks for.
	Padding string `json:"padding,omitempty"`
}

func receiptOf(e Entry) receipt {
	return receipt{
		ID: e.ID, Kind: e.Kind, AccountID: e.AccountID, OrderID: e.OrderID,
		Amount: e.Amount, Currency: e.Currency, Key: e.Key, Created: e.Created,
	}
}

func (p *Provider) answer(w http.ResponseWriter, r *http.Request, e Entry, replayed bool, fault chosen) {
	if replayed {
		w.Header().Set(HeaderReplayed, "true")
	}
	body, err := json.Marshal(receiptOf(e))
	if err != nil {
		p.fail(w, fmt.Errorf("encode the answer: %w", err))
		return
	}
	switch fault.name {
	case lostAnswer:
		p.hang(r)
		drop()
	case closeAfterCommit:
		drop()
	case resetAfterCommit:
		reset(w)
	case errorAfterCommit:
		writeError(w, http.StatusInternalServerError, "internal", "something went wrong")
	case cutBody:
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.WriteHeader(http.StatusCreated)
		p.send(w, body[:len(body)/2])
		if err := http.NewResponseController(w).Flush(); err != nil {
			p.options.Log.Debug("the client did not take half of its answer", "error", err)
		}
		drop()
	case noContent:
		w.WriteHeader(http.StatusNoContent)
	case eventStream:
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		p.send(w, fmt.Appendf(nil, "event: result\ndata: %s\n\n", body))
	case big:
		p.answerBig(w, e, fault.size)
	case delayAfter:
		if !p.delay(fault.wait) {
			drop()
		}
		p.created(w, body)
	case holdAfter:
		if !p.hold(fault.name, e, r.Context().Done()) {
			drop()
		}
		p.created(w, body)
	default:
		p.created(w, body)
	}
}

func (p *Provider) created(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	p.send(w, body)
}

// answerBig pads the receipt to size bytes. A receipt that is longer already
// stays as it is.
func (p *Provider) answerBig(w http.ResponseWriter, e Entry, size int) {
	padded := receiptOf(e)
	padded.Padding = "x"
	body, err := json.Marshal(padded)
	if err != nil {
		p.fail(w, fmt.Errorf("encode the answer: %w", err))
		return
	}
	if missing := size - len(body); missing > 0 {
		padded.Padding = strings.Repeat("x", 1+missing)
		if body, err = json.Marshal(padded); err != nil {
			p.fail(w, fmt.Errorf("encode the answer: %w", err))
			return
		}
	}
	p.created(w, body)
}

func (p *Provider) answerAccepted(w http.ResponseWriter, e Entry, replayed bool) {
	promised := receiptOf(e)
	promised.Status = "processing"
	body, err := json.Marshal(promised)
	if err != nil {
		p.fail(w, fmt.Errorf("encode the answer: %w", err))
		return
	}
	if replayed {
		w.Header().Set(HeaderReplayed, "true")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusAccepted)
	p.send(w, body)
}

// hang blocks until the client has gone, the bound or the provider's end.
func (p *Provider) hang(r *http.Request) {
	bound := time.NewTimer(p.options.MaxHang)
	defer bound.Stop()
	select {
	case <-r.Context().Done():
	case <-bound.C:
	case <-p.ending:
	}
}

// drop closes the connection in good order (FIN) without any more of an answer.
func drop() { panic(http.ErrAbortHandler) }

// reset closes the connection with a RST.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		// Over HTTP/2 this resets the stream.
		drop()
	}
	under := conn
	if secured, ok := conn.(interface{ NetConn() net.Conn }); ok {
		under = secured.NetConn()
	}
	// Linger 0 is what turns the close into a RST. Whatever fails here, the
	// connection ends without an answer.
	if tcp, ok := under.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = under.Close()
}

// send writes a body. A client that has gone does not matter: the ledger says
// what happened.
func (p *Provider) send(w http.ResponseWriter, body []byte) {
	if _, err := w.Write(body); err != nil {
		p.options.Log.Debug("the client did not take its answer", "error", err)
	}
}

// fail answers an error: a refusal as it says, anything else with a 500.
func (p *Provider) fail(w http.ResponseWriter, err error) {
	if r := (refusal{}); errors.As(err, &r) {
		writeError(w, r.status, r.code, r.message)
		return
	}
	p.options.Log.Error("a request failed", "error", err)
	writeError(w, http.StatusInternalServerError, "internal", err.Error())
}

func writeError(w http.ResponseWriter, status int, code, message string) {
	writeJSON(w, status, map[string]any{"error": map[string]string{"code": code, "message": message}})
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		http.Error(w, "encode the answer: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// A client that has gone needs no answer.
	_, _ = w.Write(append(body, '\n'))
}
