// This file is how a tool that runs inside its agent gets in: the agent claims an attempt
// with the call that it is about to make, renews its lease while it runs, and settles it
// with what it came to. The verdicts are those of a call; an ALLOW is the right to run.
//
// What must hold: the times that a holder is told are counted from when it had asked, so
// that its own clock, which was read before that, is never ahead of the lease; and what it
// settles is on the record, or it is told that it is not.

package gateway

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	exactjson "sigs.k8s.io/json"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// action is what is asked of an attempt.
type action string

const (
	actClaim  action = "claim"
	actRenew  action = "renew"
	actSettle action = "settle"
)

const (
	// The length of a claim's token.
	minToken, maxToken = 16, 128
	// maxSettledReference is the longest provider reference.
	maxSettledReference = 128
)

// cutAction takes the action off the end of an intent's path.
func cutAction(escaped string) (of string, act action, is bool) {
	at := strings.LastIndexByte(escaped, '/')
	switch act = action(escaped[at+1:]); act {
	case actClaim, actRenew, actSettle:
		return escaped[:at], act, true
	}
	return escaped, "", false
}

// notCalled refuses a call of a tool that only its agent can run.
func notCalled(tool *policy.Tool) *problem {
	p := refusal(http.StatusBadRequest, "local-tool", "The tool runs inside its agent", actFixRequest,
		"Nothing was sent: this tool cannot be called here. Claim an attempt with POST /v1/namespaces/%s/tools/%s/intents/ID/claim, run the tool yourself, and settle the attempt.",
		tool.Namespace, tool.Name)
	return p
}

// claimDocument is the right to run one attempt.
type claimDocument struct {
	IntentID string        `json:"intent_id"`
	Tool     string        `json:"tool"`
	Verdict  guard.Verdict `json:"verdict"`
	Attempt  int           `json:"attempt"`
	// Fence is shown with the attempt's number when it is renewed and settled.
	Fence string `json:"fence"`
	// RunForMS is how long it may run, in milliseconds from when the caller had asked.
	RunForMS int64 `json:"run_for_ms"`
	// ProviderKey is the intent's stable key at the provider.
	ProviderKey string `json:"provider_key"`
}

// fenceDocument is what renews and, with a result, settles.
type fenceDocument struct {
	Attempt int    `json:"attempt"`
	Fence   string `json:"fence"`
}

// settleDocument is what an attempt came to.
type settleDocument struct {
	fenceDocument
	Outcome           guard.Outcome `json:"outcome"`
	Result            *localResult  `json:"result"`
	ProviderReference string        `json:"provider_reference"`
	Detail            string        `json:"detail"`
	// RetryAfter is the provider's wish, in seconds (Retryable).
	RetryAfter int64 `json:"retry_after"`
	// SentLate: it ran on although its time was over.
	SentLate bool `json:"sent_late"`
}

// localResult is what whoever repeats the call gets.
type localResult struct {
	Status      int             `json:"status"`
	ContentType string          `json:"content_type"`
	Body        json.RawMessage `json:"body"`
	BodyBase64  string          `json:"body_base64"`
}

// local does what is asked of an intent of a local tool.
func (c *call) local(tool *policy.Tool) *problem {
	c.intent = c.intentID
	if c.action == actClaim && !tool.Local {
		return refusal(http.StatusBadRequest, "not-local", "The tool is not run by its agent", actFixRequest,
			"Nothing was claimed: the tool %q is sent by Holdfast. Call it at /v1/namespaces/%s/tools/%s.", tool.Name, tool.Namespace, tool.Name)
	}
	if !tool.Mutating {
		return noSuchClaim(tool)
	}
	query, err := parseQuery(c.r.URL.RawQuery)
	if err != nil {
		return c.failure(&intent.InvalidError{Field: "query", Reason: "cannot be read: escape it again"}, tool)
	}
	defer c.move(nil)
	body, p := c.receive()
	if p != nil {
		return p
	}
	engine, err := c.g.o.Engines.Get(tool.Namespace, tool.Store)
	if err != nil {
		return c.unsettled(err, tool)
	}
	switch c.action {
	case actClaim:
		return c.claim(engine, tool, query, body)
	case actRenew:
		return c.renew(engine, tool, body)
	default:
		return c.settle(engine, tool, body)
	}
}

// claim is the way of a call up to where it would be sent.
func (c *call) claim(engine *guard.Engine, tool *policy.Tool, query url.Values, body []byte) *problem {
	token, err := claimToken(c.r.Header)
	if err != nil {
		return c.failure(err, tool)
	}
	id, err := tool.Identify(policy.CallInput{
		Method: c.r.Method, Query: query, Header: c.r.Header, Body: body, Agent: c.caller.Username, IntentID: c.intentID,
	})
	if err != nil {
		return c.misread(c.failure(err, tool), body)
	}
	c.intent = id.IntentID
	wanted := tool.CallOf(id, c.caller.Username, c.caller.UID)
	wanted.Claim = token
	if tool.Retry != nil {
		wanted.MayRetry = func() (time.Duration, bool) { return c.g.ratios.retry(tool, time.Now()) }
	}
	c.guarded = true
	a, err := c.admit(engine, wanted, tool, time.Now().Add(tool.InFlight.Timeout))
	c.waited()
	switch {
	case errors.Is(err, errGone):
		c.abandon()
	case err != nil:
		return c.failure(err, tool)
	case a.Verdict != guard.Allow || a.Ticket == nil:
		return c.tell(a, tool)
	}
	if tool.Retry != nil && !a.Ticket.Retry {
		c.g.ratios.first(tool, time.Now())
	}
	return c.give(engine, a, http.StatusCreated)
}

// claimToken reads the token that names one claim. It is needed: an answer that is lost on
// its way would otherwise leave an attempt in flight that nobody runs.
func claimToken(h http.Header) (string, error) {
	values := h.Values(headerClaim)
	if len(values) == 1 && len(values[0]) >= minToken && len(values[0]) <= maxToken && printable(values[0]) {
		return values[0], nil
	}
	return "", &intent.InvalidError{Field: headerClaim, Reason: fmt.Sprintf(
		"must name this claim by one random token of %d to %d printable characters without blanks: make a new one for each claim, and send the same one again if its answer is lost", minToken, maxToken)}
}

// printable says that a text is ASCII without blanks and control characters.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// give hands an attempt over to its holder, with its times from when it had asked.
func (c *call) give(engine *guard.Engine, a guard.Answer, status int) *problem {
	t := a.Ticket
	c.note(a)
	c.attempt, c.counted, c.key, c.state = t.Attempt, true, t.ProviderKey, guard.InFlight
	runFor := t.RunFor() + time.Since(c.came)
	fence := t.Fence()
	engine.HandOver(t)
	return c.answerJSON(status, claimDocument{
		IntentID: t.IntentID, Tool: t.Tool, Verdict: guard.Allow, Attempt: t.Attempt, Fence: fence.Nonce,
		RunForMS: max(runFor.Milliseconds(), 0), ProviderKey: t.ProviderKey,
	})
}

func (c *call) answerJSON(status int, doc any) *problem {
	body, err := json.Marshal(doc)
	if err != nil {
		return c.failure(err, nil)
	}
	c.write(status, http.Header{"Content-Type": {"application/json"}, "Cache-Control": {"no-store"}}, body, 0)
	return nil
}

// renew begins the lease of the caller's attempt anew.
func (c *call) renew(engine *guard.Engine, tool *policy.Tool, body []byte) *problem {
	var doc fenceDocument
	if err := readDocument(body, &doc); err != nil {
		return c.failure(err, tool)
	}
	a, err := engine.Renew(c.r.Context(), c.fence(tool, doc))
	switch {
	case errors.Is(err, guard.ErrNoClaim):
		return noSuchClaim(tool)
	case err != nil:
		return c.unsettled(err, tool)
	case a.Ticket == nil:
		return c.tell(a, tool)
	}
	return c.give(engine, a, http.StatusOK)
}

// settle writes what the caller's attempt came to.
func (c *call) settle(engine *guard.Engine, tool *policy.Tool, body []byte) *problem {
	var doc settleDocument
	if err := readDocument(body, &doc); err != nil {
		return c.failure(err, tool)
	}
	res, err := doc.result(tool)
	if err != nil {
		return c.failure(err, tool)
	}
	c.outcome, c.attempt, c.counted = res.Outcome, doc.Attempt, true
	a, err := engine.SettleClaim(c.r.Context(), c.fence(tool, doc.fenceDocument), res)
	if errors.Is(err, guard.ErrNoClaim) {
		c.cause = err
		return noSuchClaim(tool)
	}
	if err != nil {
		return c.unsettled(err, tool)
	}
	took := time.Duration(0)
	if n := doc.Attempt; n <= len(a.Intent.Attempts) {
		took = max(0, a.Intent.Attempts[n-1].Ended.Sub(a.Intent.Attempts[n-1].Started))
	}
	c.measured.Attempt(string(res.Outcome), took)
	if limited(tool) {
		c.g.queues.freed(nameOf(tool), took)
	}
	c.note(a)
	c.attempt = doc.Attempt
	return c.show(http.StatusOK, c.document(a), http.Header{})
}

func (c *call) fence(tool *policy.Tool, doc fenceDocument) guard.Fence {
	return guard.Fence{
		Key:       guard.Key{Namespace: tool.Namespace, Tool: tool.Name, Caller: c.caller.Username, IntentID: c.intentID},
		CallerUID: c.caller.UID, Attempt: doc.Attempt, Nonce: doc.Fence,
	}
}

// unsettled is failure for what is asked of an attempt that may have run already.
func (c *call) unsettled(err error, tool *policy.Tool) *problem {
	p := c.failure(err, tool)
	if c.action == actClaim || p.Status != http.StatusServiceUnavailable {
		return p
	}
	p.Detail = fmt.Sprintf("The IdempotencyStore %q cannot write this down now, so nothing has changed. Send the same request again, until it is answered otherwise; "+
		"do not run the tool again meanwhile.", tool.Store)
	return p
}

func noSuchClaim(tool *policy.Tool) *problem {
	return refusal(http.StatusNotFound, "no-such-claim", "There is no such claim", actStop,
		"The tool %q has no attempt of this intent with this number and fence of this caller. Nothing was changed. If the tool has run, a person must look at it.", tool.Name)
}

// decodeExactly reads a JSON text into a struct. Names count to the letter: Go's own reader
// would take "Outcome" for "outcome", and of two that differ in that alone the last. unread:
// it is no JSON text, or has a name twice, and the error says so; another error is of one
// field that is not known, or has another type.
func decodeExactly(body []byte, into any) (unread bool, err error) {
	if _, err := intent.ParseJSON(body); err != nil {
		return true, err
	}
	unknown, err := exactjson.UnmarshalStrict(body, into)
	if err == nil && len(unknown) > 0 {
		err = unknown[0]
	}
	return false, err
}

// readDocument reads a JSON object with exactly the fields that are known.
func readDocument(body []byte, into any) error {
	bad := func(why string) error { return &intent.InvalidError{Field: "body", Reason: why} }
	unread, err := decodeExactly(body, into)
	if unread {
		return err
	}
	if err != nil {
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return bad("has a field " + kind.Field + " of another type: a document with attempt and fence is needed, and to settle one with outcome, too")
		}
		return bad("has a field that is not known here: use attempt and fence, and to settle outcome, result, provider_reference, detail, retry_after and sent_late")
	}
	return nil
}

// result is what the guard takes of a settlement. Whatever does not say clearly what the
// attempt came to is refused: its holder must say it again.
func (d *settleDocument) result(tool *policy.Tool) (guard.Result, error) {
	bad := func(field, why string, args ...any) (guard.Result, error) {
		return guard.Result{}, &intent.InvalidError{Field: field, Reason: fmt.Sprintf(why, args...)}
	}
	res := guard.Result{
		Outcome: d.Outcome, ProviderReference: d.ProviderReference, LateSend: d.SentLate,
		Detail: "the agent says " + string(d.Outcome),
	}
	if d.Detail != "" {
		res.Detail += ": " + strings.Join(strings.Fields(strings.ToValidUTF8(d.Detail, "?")), " ")
	}
	if len(d.ProviderReference) > maxSettledReference || !printable(d.ProviderReference) {
		return bad("provider_reference", "must have at most %d printable characters without blanks", maxSettledReference)
	}
	if d.RetryAfter < 0 || d.RetryAfter > int64(maxRetryAfter/time.Second) || d.RetryAfter > 0 && d.Outcome != guard.AttemptRetryable {
		return bad("retry_after", "is a number of seconds up to %d, and only for the outcome Retryable", int64(maxRetryAfter/time.Second))
	}
	res.RetryAfter = time.Duration(d.RetryAfter) * time.Second
	least, most := 0, 0
	switch d.Outcome {
	case guard.AttemptSucceeded:
		least, most = 200, 299
	case guard.AttemptFailed, guard.AttemptRetryable:
		least, most = 400, 599
	case guard.AttemptPending, guard.AttemptUnknown:
		if d.Result != nil {
			return bad("result", "is for an outcome that is known: leave it out")
		}
		return res, nil
	default:
		return bad("outcome", "must be Succeeded, Failed, Retryable, Pending or Unknown")
	}
	r := d.Result
	if r == nil {
		r = d.plain()
	}
	if r.Status < least || r.Status > most {
		return bad("result.status", "must be from %d to %d where the outcome is %s", least, most, d.Outcome)
	}
	body, err := r.bytes()
	if err != nil {
		return guard.Result{}, err
	}
	header := map[string][]string{}
	if r.ContentType != "" {
		if !httpguts.ValidHeaderFieldValue(r.ContentType) || len(r.ContentType) > 256 {
			return bad("result.content_type", "cannot be a header's value")
		}
		header["Content-Type"] = []string{r.ContentType}
	}
	if r.Status == http.StatusNoContent && len(body) > 0 {
		return bad("result.status", "204 has no body: leave it out, or use another status")
	}
	digest := sha256.Sum256(body)
	size := int64(len(body))
	if size > tool.MaxBodyBytes {
		body = body[:tool.MaxBodyBytes]
	}
	res.Response = &guard.Response{
		Status: r.Status, Header: header, Body: body,
		Size: size, Digest: intent.DigestText(digest), Truncated: int64(len(body)) < size,
	}
	return res, nil
}

// plain is the result of an attempt of which only the outcome was told.
func (d *settleDocument) plain() *localResult {
	r := &localResult{Status: http.StatusNoContent}
	if d.Outcome == guard.AttemptSucceeded {
		return r
	}
	r.Status, r.ContentType = http.StatusUnprocessableEntity, "application/json"
	if d.Outcome == guard.AttemptRetryable {
		r.Status = http.StatusServiceUnavailable
	}
	// Only texts: it cannot fail.
	r.Body, _ = json.Marshal(map[string]string{"outcome": string(d.Outcome), "detail": d.Detail})
	return r
}

// bytes is the result's body: JSON as it came, or whatever base64 stands for.
func (r *localResult) bytes() ([]byte, error) {
	if r.BodyBase64 == "" {
		return r.Body, nil
	}
	if r.Body != nil {
		return nil, &intent.InvalidError{Field: "result", Reason: "has both body and body_base64: leave one out"}
	}
	b, err := base64.StdEncoding.DecodeString(r.BodyBase64)
	if err != nil {
		return nil, &intent.InvalidError{Field: "result.body_base64", Reason: "is not base64 (RFC 4648, section 4, with padding)"}
	}
	return b, nil
}
