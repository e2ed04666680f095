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
	Hold              *holdDocument       `json:"hold,omitempty"`
	RetryAfter        int                 `json:"retry_after,omitempty"`
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
		p := refusal(http.StatusBadRequest, "invalid-request", "The method is not declared", actFixRequest, "An intent is asked for with GET. Nothing was sent.")
		p.Reason = "method_not_declared"
		return p
	}
	unknown := refusal(http.StatusNotFound, "no-such-intent", "There is no such intent", actFixRequest,
		"The tool %q has no intent with this ID of this caller. Nothing was sent under it.", c.tool)
	if !tool.Mutating {
		return unknown
	}
	wait, err := pollWait(c.r.URL.RawQuery)
	if err != nil {
		return c.failure(err, tool)
	}
	engine, err := c.g.o.Engines.Get(tool.Namespace, tool.Store)
	if err != nil {
		return c.failure(err, tool)
	}
	key := guard.Key{Namespace: c.namespace, Tool: c.tool, Caller: c.caller.Username, IntentID: c.intentID}
	until := time.Now().Add(wait)
	pause := waitFirst
	var first guard.State
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
			first = a.Intent.State
		}
		left := time.Until(until)
		if a.Intent.State != first || !undecided(first) || left <= 0 {
			c.note(a)
			return c.show(a)
		}
		timer := time.NewTimer(min(pause, left))
		select {
		case <-timer.C:
		case <-c.g.draining:
			timer.Stop()
			c.note(a)
			return c.show(a)
		case <-c.r.Context().Done():
			timer.Stop()
			c.abandon()
		}
		pause = min(pause*2, waitMost)
	}
}

// undecided says whether somebody waits for the next state.
func undecided(s guard.State) bool {
	return s == guard.InFlight || s == guard.Pending || s == guard.Held
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

func (c *call) show(a guard.Answer) *problem {
	v := a.Intent
	doc := intentDocument{
		IntentID: v.IntentID, Tool: v.Tool, State: v.State, Verdict: a.Verdict, Reason: string(a.Reason),
		Scope: scopeTexts(v.Scope), Lineage: string(v.Lineage), Amount: v.Amount, Recipient: v.Recipient, Fingerprint: v.Fingerprint,
		ProviderReference: v.ProviderReference, RefundOwed: v.RefundOwed, Disputed: v.Disputed, SettledAs: v.SettledAs,
		Created: v.Created, Changed: v.Changed, Attempts: v.Attempts, Checks: v.Checks, RetryAfter: seconds(a.RetryAfter),
	}
	if doc.Attempts == nil {
		doc.Attempts = []guard.AttemptView{}
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
	body, err := json.Marshal(doc)
	if err != nil {
		return c.failure(err, nil)
	}
	header := http.Header{"Content-Type": {"application/json"}, "Cache-Control": {"no-store"}}
	if doc.RetryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(doc.RetryAfter))
	}
	c.write(http.StatusOK, header, body, 0)
	return nil
}
