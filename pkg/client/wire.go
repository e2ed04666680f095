// This file is the conversation with Holdfast over HTTP.

package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	verdictAllow    = "ALLOW"
	verdictReplay   = "REPLAY"
	verdictInFlight = "IN_FLIGHT"
	verdictConflict = "CONFLICT"
	verdictDeny     = "DENY"
	verdictHold     = "UNKNOWN_HOLD"
)

const (
	headerVerdict   = "Holdfast-Verdict"
	headerState     = "Holdfast-State"
	headerTruncated = "Holdfast-Truncated"
	headerSize      = "Holdfast-Body-Size"
	headerDigest    = "Holdfast-Body-Digest"
	headerReplayed  = "Idempotent-Replayed"
	headerClaim     = "Holdfast-Claim"
	headerSession   = "Holdfast-Session"
	headerCall      = "Holdfast-Call"
	headerID        = "Idempotency-Key"
	headerPrefer    = "Prefer"
)

// The states of a record at its end, and the one that may be tried again.
const (
	stateSucceeded = "Succeeded"
	stateFailed    = "Failed"
	stateRetryable = "Retryable"
)

const (
	// maxAnswer bounds what is read of an answer.
	maxAnswer = 64 << 20
	// How long one request may take: a claim and a call wait for others.
	callTimeout, actionTimeout = 10 * time.Minute, 15 * time.Second
	// How long to wait before a request is sent again, where nothing better is known.
	pauseFirst, pauseMost = 100 * time.Millisecond, 5 * time.Second
	// unauthenticatedMost is how often a token that is not accepted is tried: it may just be being renewed.
	unauthenticatedMost = 3
)

// answer is one that was read to its end.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a *answer) verdict() string { return a.header.Get(headerVerdict) }

// state is the record's, if the answer says it.
func (a *answer) state() string { return a.header.Get(headerState) }

// retryAfter is what the answer asks for.
func (a *answer) retryAfter() time.Duration {
	seconds, err := strconv.ParseUint(a.header.Get("Retry-After"), 10, 31)
	if err != nil {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// result is an answer that is the tool's own.
func (a *answer) result() Result {
	res := Result{
		Status: a.status, ContentType: a.header.Get("Content-Type"), Body: a.body,
		Replayed: a.header.Get(headerReplayed) == "true",
	}
	if a.header.Get(headerTruncated) == "true" {
		res.Truncated, res.Digest = true, a.header.Get(headerDigest)
		res.Size, _ = strconv.ParseInt(a.header.Get(headerSize), 10, 64) // 0: it is not known
	}
	return res
}

// refusal reads a problem document.
func (a *answer) refusal() *Refusal {
	var p struct {
		Title, Detail, Reason, Hold, Poll string
		SuggestedAction                   string `json:"suggested_action"`
	}
	r := &Refusal{Status: a.status, Verdict: a.verdict(), RetryAfter: a.retryAfter()}
	if strings.HasPrefix(a.header.Get("Content-Type"), "application/problem+json") && json.Unmarshal(a.body, &p) == nil {
		r.Title, r.Detail, r.Reason, r.Hold, r.Poll, r.SuggestedAction = p.Title, p.Detail, p.Reason, p.Hold, p.Poll, p.SuggestedAction
		r.problem = true
	} else {
		r.Title = "an answer that is not Holdfast's"
	}
	return r
}

// never says that Holdfast itself has answered a settlement, and will answer it so again.
func (r *Refusal) never() bool {
	if !r.problem {
		return false
	}
	switch r.Reason {
	case "no_such_claim", "no_such_tool", "invalid_request", "body_too_large":
		return true
	}
	return false
}

// takenByHoldfast is a preference of these headers that Holdfast takes for itself, if there is one.
func takenByHoldfast(h http.Header) string {
	for name, lines := range h {
		if http.CanonicalHeaderKey(name) != headerPrefer {
			continue
		}
		for one := range strings.SplitSeq(strings.Join(lines, ","), ",") {
			one, _, _ = strings.Cut(one, ";")
			one, _, _ = strings.Cut(one, "=")
			switch one = strings.ToLower(strings.TrimSpace(one)); one {
			case "respond-async", "wait":
				return one
			}
		}
	}
	return ""
}

// intentURL is where an intent is claimed, renewed and settled.
func (c *Client) intentURL(in *Intent, action string) string {
	u := c.base + url.PathEscape(in.Tool) + "/intents/" + url.PathEscape(in.ID) + "/" + action
	if action == actClaim && len(in.Query) > 0 {
		u += "?" + in.Query.Encode()
	}
	return u
}

const (
	actClaim  = "claim"
	actRenew  = "renew"
	actSettle = "settle"
)

// headers are those of a call.
func (in *Intent) headers() http.Header {
	h := in.Header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set(headerID, in.ID)
	if h.Set("Content-Type", in.ContentType); in.ContentType == "" {
		h.Set("Content-Type", "application/json")
	}
	if in.Session != "" {
		h.Set(headerSession, in.Session)
	}
	if in.Call != "" {
		h.Set(headerCall, in.Call)
	}
	return h
}

// send makes one request and reads its answer.
func (c *Client) send(ctx context.Context, timeout time.Duration, method, to string, h http.Header, body []byte) (*answer, error) {
	token, err := os.ReadFile(c.o.TokenFile)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, to, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = h
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1)); err != nil {
		return nil, err
	}
	if len(a.body) > maxAnswer {
		return nil, fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	}
	return a, nil
}

// act asks something of an attempt that was claimed.
func (c *Client) act(ctx context.Context, e *entry, action string, timeout time.Duration, doc any) (*answer, error) {
	body, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	return c.send(ctx, timeout, http.MethodPost, c.intentURL(&e.Intent, action), http.Header{"Content-Type": {"application/json"}}, body)
}

// pauses are the waits between requests that are repeated.
type pauses struct {
	wait            time.Duration
	unauthenticated int
	last            error
}

// again waits before the next request, at least for as long as was asked for.
func (p *pauses) again(ctx context.Context, asked time.Duration, cause error) error {
	p.last = cause
	p.wait = min(max(2*p.wait, pauseFirst), pauseMost)
	timer := time.NewTimer(max(p.wait, asked))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.last)
	}
}

// passing says whether an answer may be another one later, and is no answer to the intent.
func (p *pauses) passing(a *answer) bool {
	switch {
	case a.status == http.StatusUnauthorized:
		p.unauthenticated++
		return p.unauthenticated < unauthenticatedMost
	case a.verdict() == verdictReplay, a.verdict() == verdictHold, a.verdict() == verdictConflict:
		return false
	case a.verdict() == verdictInFlight:
		return true
	case a.verdict() == verdictDeny:
		return a.status == http.StatusTooManyRequests || a.status == http.StatusServiceUnavailable || a.status == http.StatusBadGateway
	}
	return a.status == http.StatusRequestTimeout || a.status == http.StatusTooManyRequests || a.status >= 500
}
