// An agent, as far as the story needs one: it sends a refund, and says what it got.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// refund is what the agent wants.
type refund struct {
	AccountID string `json:"accountId"`
	OrderID   string `json:"orderId"`
	Amount    string `json:"amount"`
}

func (r refund) String() string { return "order " + r.OrderID + ", " + r.Amount + " USD" }

// answer is what the agent got.
type answer struct {
	status   int
	verdict  string
	replayed bool
	body     []byte
}

// answerLimit bounds any answer. Nothing in the story takes so long.
const answerLimit = time.Minute

// agent calls one URL.
type agent struct {
	name, url, token string
	http             *http.Client
}

func newAgent(name, url, token string) *agent {
	return &agent{name: name, url: url, token: token, http: &http.Client{
		Timeout: answerLimit,
		// Go's transport would send a request again by itself when a kept connection
		// turns out to be dead: here only the agent retries.
		Transport: &http.Transport{DisableKeepAlives: true},
	}}
}

// call sends the refund under an intent ID; "" sends none.
func (a *agent) call(ctx context.Context, intentID string, r refund) (answer, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return answer{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.url, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	if intentID != "" {
		request.Header.Set("Idempotency-Key", intentID)
	}
	if a.token != "" {
		request.Header.Set("Authorization", "Bearer "+a.token)
	}
	response, err := a.http.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	got := answer{
		status:   response.StatusCode,
		verdict:  response.Header.Get("Holdfast-Verdict"),
		replayed: response.Header.Get("Idempotent-Replayed") == "true",
	}
	if got.body, err = io.ReadAll(response.Body); err != nil {
		return got, fmt.Errorf("read the answer: %w", err)
	}
	return got, nil
}

// id is the provider's name of the refund in an answer.
func (a answer) id() string {
	var receipt struct {
		ID string `json:"id"`
	}
	if json.Unmarshal(a.body, &receipt) != nil {
		return ""
	}
	return receipt.ID
}

// problem is the part of a problem document (RFC 9457) that an agent acts on.
type problem struct {
	Title           string `json:"title"`
	Reason          string `json:"reason"`
	Detail          string `json:"detail"`
	Hold            string `json:"hold"`
	SuggestedAction string `json:"suggested_action"`
	OwnMatches      []struct {
		IntentID string `json:"intent_id"`
		State    string `json:"state"`
	} `json:"own_matches"`
}

func (a answer) problem() (problem, error) {
	var p problem
	if err := json.Unmarshal(a.body, &p); err != nil || p.Title == "" {
		return p, fmt.Errorf("the answer, %d, should be a problem document, it is: %s", a.status, a.body)
	}
	return p, nil
}

// String is the answer on one line.
func (a answer) String() string {
	text := fmt.Sprintf("%d %s", a.status, http.StatusText(a.status))
	if a.verdict != "" {
		text += ", verdict " + a.verdict
	}
	if id := a.id(); id != "" {
		text += ", refund " + id
	}
	return text
}
