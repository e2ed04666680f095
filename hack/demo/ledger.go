// The provider's ledger is the judge: what the money did is asked of it alone.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/holdfast-dev/holdfast/test/provider"
)

// paid is one entry as the story tells it.
type paid struct{ orderID, amount string }

// judge compares the ledger with the story: the entries, in their order, and how
// many requests the provider has received at all.
func judge(l provider.Ledger, want []paid) error {
	got := make([]paid, len(l.Entries))
	for i, e := range l.Entries {
		got[i] = paid{e.OrderID, e.Amount}
		if e.Kind != provider.Refund {
			return fmt.Errorf("the ledger is not what the story says: entry %d is a %s", i+1, e.Kind)
		}
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("the ledger is not what the story says: it has %s, and should have %s", list(got), list(want))
	}
	if n := l.Requests["POST /refunds"]; n != len(want) {
		return fmt.Errorf("the ledger is not what the story says: the provider received %d refunds, and should have received %d", n, len(want))
	}
	return nil
}

func list(all []paid) string {
	if len(all) == 0 {
		return "nothing"
	}
	texts := make([]string, len(all))
	for i, p := range all {
		texts[i] = "order " + p.orderID + " " + p.amount
	}
	return fmt.Sprintf("%d (%s)", len(all), strings.Join(texts, ", "))
}

// ledger asks the provider.
type ledger struct {
	url  string
	http *http.Client
}

func ledgerOf(url string) *ledger { return &ledger{url: url, http: &http.Client{Timeout: answerLimit}} }

func (l *ledger) read(ctx context.Context) (provider.Ledger, error) {
	var out provider.Ledger
	return out, l.ask(ctx, http.MethodGet, "/ledger", nil, &out)
}

// plan makes the next refund of an order meet a fault.
func (l *ledger) plan(ctx context.Context, fault, orderID string) error {
	return l.ask(ctx, http.MethodPost, "/faults", provider.Fault{Fault: fault, Match: map[string]string{"orderId": orderID}}, nil)
}

// hanging says whether a refund of the order was paid and waits with its answer.
func (l *ledger) hanging(ctx context.Context, orderID string) (bool, error) {
	var now struct {
		Held []provider.Held `json:"held"`
	}
	if err := l.ask(ctx, http.MethodGet, "/faults", nil, &now); err != nil {
		return false, err
	}
	return slices.ContainsFunc(now.Held, func(h provider.Held) bool { return h.OrderID == orderID }), nil
}

// release lets the answers go that wait.
func (l *ledger) release(ctx context.Context) error {
	return l.ask(ctx, http.MethodPost, "/faults/release", struct{}{}, nil)
}

func (l *ledger) ask(ctx context.Context, method, path string, send, into any) error {
	var body io.Reader
	if send != nil {
		text, err := json.Marshal(send)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, l.url+path, body)
	if err != nil {
		return err
	}
	response, err := l.http.Do(request)
	if err != nil {
		return fmt.Errorf("ask the provider: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("ask the provider: %w", err)
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("ask the provider: %s %s: %d: %s", method, path, response.StatusCode, text)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(text, into)
}
