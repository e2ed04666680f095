// This file answers whoever asks what became of an intent.

package gateway

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// maxPollWait bounds ?wait.
const maxPollWait = 60 * time.Second

// intentDocument is an intent as its caller sees it.
type intentDocument struct {
	IntentID          string              `json:"intent_id"`
	Tool              string              `json:"tool"`
	State             guard.State         `json:"state"`
	Verdict           guard.Verdict       `json:"verdict"`
	Reason            string              `json:"reason,omitempty"`
	Scope             []string            `json:"scope"`
	Lineage           string              `json:"lineage,omitempty"`
	Amount            *intent.Money       `json:"amount,omitempty"`
	Recipient         string              `json:"recipient,omitempty"`
	Fingerprint       string              `json:"fingerprint"`
	ProviderReference string              `json:"provider_reference,omitempty"`
	RefundOwed        bool                `json:"refund_owed"`
	Disputed          bool                `json:"disputed"`
	SettledAs         guard.State         `json:"settled_as,omitempty"`
	Created           time.Time           `json:"created"`
	Changed           time.Time           `json:"changed"`
	Attempts          []guard.AttemptView `json:"attempts"`
	Checks            *guard.ChecksView   `json:"checks,omitempty"`
	Resumes           *guard.ResumesView  `json:"resumes,omitempty"`
	Hold              *holdDocument       `json:"hold,omitempty"`
	RetryAfter        int                 `json:"retry_after,omitempty"`
	// Registered is when it was written down, Expires when it can no longer be sent.
	Registered *time.Time `json:"registered,omitempty"`
	Expires    *time.Time `json:"expires,omitempty"`
	Quote      string     `json:"quote,omitempty"`
	ValidUntil *time.Time `json:"valid_until,omitempty"`
	// Result is the stored answer, once there is one.
	Result *resultDocument `json:"result,omitempty"`
	Poll   string          `json:"poll"`
	// SuggestedAction and Detail are for a caller that was handed off.
	SuggestedAction string `json:"suggested_action,omitempty"`
	Detail          string `json:"detail,omitempty"`
}

// resultDocument is what a repeated call would be answered with.
type resultDocument struct {
	Status      int    `json:"status"`
	ContentType string `json:"content_type,omitempty"`
	// Body is the answer's if that is JSON, Bytes (in base64) if it is something else.
	Body  json.RawMessage `json:"body,omitempty"`
	Bytes []byte          `json:"bytes,omitempty"`
	// Truncated: it is only the start of a body of this size and digest.
	Truncated bool   `json:"truncated,omitempty"`
	Size      int64  `json:"size,omitempty"`
	Digest    string `json:"digest,omitempty"`
	// From says where it comes from, if not from the upstream's answer to the call.
	From string `json:"from,omitempty"`
}

func resultOf(r *guard.Response) *resultDocument {
	if r == nil {
		return nil
	}
	header := http.Header(r.Header)
	doc := &resultDocument{Status: r.Status, ContentType: header.Get("Content-Type"), From: header.Get(headerAnswerFrom)}
	if r.Truncated {
		doc.Truncated, doc.Size, doc.Digest = true, r.Size, r.Digest
	}
	if json.Valid(r.Body) {
		doc.Body = r.Body
	} else {
		doc.Bytes = r.Body
	}
	return doc
}

type holdDocument struct {
	Name         string          `json:"name"`
	State        guard.HoldState `json:"state"`
	Reasons      []guard.Reason  `json:"reasons"`
	WaitingUntil *time.Time      `json:"waiting_until,omitempty"`
	Cause        string          `json:"cause,omitempty"`
	Effect       string          `json:"effect,omitempty"`
	Decision     guard.Decision  `json:"decision,omitempty"`
	OwnMatches   []ownMatch      `json:"own_matches,omitempty"`
}

func (c *call) answerPoll(tool *policy.Tool) *problem {
	c.intent = c.intentID
	if c.r.Method != http.MethodGet && c.r.Method != http.MethodHead {
		p := refusal(http.StatusBadRequest, "invalid-request", "The method is not declared", actFixRequest, "An intent is registered with PUT, and asked for with GET. Nothing was sent.")
		p.Reason = "method_not_declared"
		return p
	}
	unknown := refusal(http.StatusNotFound, "no-such-intent", "There is no such intent", actFixRequest,
		"The tool %q has no intent with this ID of this caller. Nothing was sent under it by this caller. "+
			"Each caller has intents of its own: one is shown to nobody but the caller that made it, by that caller's own token.", c.tool)
	if !tool.Mutating {
		return unknown
	}
	wait, err := pollWait(c.r.URL.RawQuery)
	if err != nil {
		return c.failure(err, tool)
	}
	if c.r.URL.RawQuery == "" {
		c.preferred, _ = prefers(c.r.Header[headerPrefer])
		wait = min(c.preferred.wait, maxPollWait)
	}
	engine, err := c.g.o.Engines.Get(tool.Namespace, tool.Store)
	if err != nil {
		return c.failure(err, tool)
	}
	key := guard.Key{Namespace: c.namespace, Tool: c.tool, Caller: c.caller.Username, IntentID: c.intentID}
	until := time.Now().Add(wait)
	pause := waitFirst
	var first guard.Answer
	for again := false; ; again = true {
		a, err := engine.Poll(c.r.Context(), key)
		if err != nil && c.r.Context().Err() != nil {
			c.abandon()
		}
		if err != nil {
			return c.failure(err, tool)
		}
		if !c.owns(a) {
			return unknown
		}
		if !again {
			first = a
		}
		left := time.Until(until)
		if left <= 0 || !undecided(first) || a.Intent.State != first.Intent.State || undecided(a) != undecided(first) {
			return c.answerWith(a, wait)
		}
		timer := time.NewTimer(min(pause, left))
		select {
		case <-timer.C:
		case <-c.g.draining:
			timer.Stop()
			return c.answerWith(a, wait)
		case <-c.r.Context().Done():
			timer.Stop()
			c.abandon()
		}
		pause = min(pause*2, waitMost)
	}
}

// undecided says whether somebody waits for the next state.
func undecided(a guard.Answer) bool {
	switch a.Intent.State {
	case guard.InFlight, guard.Pending, guard.Held:
		return true
	}
	return backsOff(a)
}

// pollWait reads ?wait=30s or ?wait=30.
func pollWait(raw string) (time.Duration, error) {
	bad := &intent.InvalidError{Field: "wait", Reason: "is not a duration: write it like 30s, at most 60s; it is the only parameter"}
	query, err := url.ParseQuery(raw)
	if err != nil {
		return 0, bad
	}
	for name := range query {
		if name != "wait" {
			return 0, bad
		}
	}
	text := query.Get("wait")
	if text == "" {
		return 0, nil
	}
	if strings.Trim(text, "0123456789") == "" {
		text += "s"
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, bad
	}
	return min(d, maxPollWait), nil
}

// answerWith answers a poll that has waited for as long as this at most.
func (c *call) answerWith(a guard.Answer, wait time.Duration) *problem {
	c.note(a)
	header := http.Header{}
	if c.preferred.waits {
		header.Set(headerApplied, preferWait+"="+strconv.Itoa(int(wait/time.Second)))
	}
	return c.show(http.StatusOK, c.document(a), header)
}

// document is the intent as its caller sees it.
func (c *call) document(a guard.Answer) *intentDocument {
	v := a.Intent
	doc := &intentDocument{
		IntentID: v.IntentID, Tool: v.Tool, State: v.State, Verdict: a.Verdict, Reason: string(a.Reason),
		Scope: scopeTexts(v.Scope), Lineage: string(v.Lineage), Amount: shownAmount(v.Amount), Recipient: v.Recipient, Fingerprint: v.Fingerprint,
		ProviderReference: v.ProviderReference, RefundOwed: v.RefundOwed, Disputed: v.Disputed, SettledAs: v.SettledAs,
		Created: v.Created, Changed: v.Changed, Attempts: v.Attempts, Checks: v.Checks, Resumes: v.Resumes, RetryAfter: seconds(a.RetryAfter),
		Result: resultOf(a.Response), Poll: pollPath(v.Namespace, v.Tool, v.IntentID),
	}
	if doc.Attempts == nil {
		doc.Attempts = []guard.AttemptView{}
	}
	if g := v.Registration; g != nil {
		doc.Registered, doc.Quote = &g.At, g.Quote
		if !g.ValidUntil.IsZero() {
			doc.ValidUntil = &g.ValidUntil
		}
		if !v.Expires.IsZero() {
			doc.Expires = &v.Expires
		}
	}
	if h := v.Hold; h != nil {
		doc.Hold = &holdDocument{
			Name: h.Name, State: h.State, Reasons: h.Reasons, Cause: h.Cause, Effect: h.Effect, Decision: h.Decision,
			OwnMatches: ownMatches(guard.Answer{Intent: v, Matches: h.Matches}, c.caller),
		}
		if !h.WaitingUntil.IsZero() {
			doc.Hold.WaitingUntil = &h.WaitingUntil
		}
	}
	return doc
}

// show writes an intent.
func (c *call) show(status int, doc *intentDocument, header http.Header) *problem {
	body, err := json.Marshal(doc)
	if err != nil {
		return c.failure(err, nil)
	}
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	if doc.RetryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(doc.RetryAfter))
	}
	c.write(status, header, body, 0)
	return nil
}
