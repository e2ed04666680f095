// This file is how a call is refused: problem documents (RFC 9457), written so that
// a model that reads one does the right thing. They speak of the caller's own
// intents only.

package gateway

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

const problemBase = "https://holdfast.dev/problems/"

// What a caller had best do. A closed list, for programs; the detail says it in words.
const (
	actAuthenticate = "authenticate"
	actAskAccess    = "ask_for_access"
	actFixRequest   = "fix_request"
	actRetryLater   = "retry_later"
	actPoll         = "poll"
	actDoNotPay     = "do_not_pay_again"
	actEarlierID    = "use_the_earlier_intent_id"
	actNewIntent    = "use_a_new_intent_id"
	actRegister     = "register_first"
	actStop         = "stop"
)

// problem is one refusal.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`

	Verdict guard.Verdict `json:"verdict,omitempty"`
	Reason  string        `json:"reason,omitempty"`
	Intent  string        `json:"intent_id,omitempty"`
	Order   *order        `json:"order,omitempty"`
	// RetryAfter is in whole seconds.
	RetryAfter      int        `json:"retry_after,omitempty"`
	Poll            string     `json:"poll,omitempty"`
	Hold            string     `json:"hold,omitempty"`
	OwnMatches      []ownMatch `json:"own_matches,omitempty"`
	SuggestedAction string     `json:"suggested_action"`

	// close ends the connection after the answer.
	close bool
}

// order says which purchase it is about.
type order struct {
	Scope             []string `json:"scope,omitempty"`
	ProviderReference string   `json:"provider_reference,omitempty"`
}

// ownMatch is one of the caller's own intents that stands in the way.
type ownMatch struct {
	IntentID string        `json:"intent_id"`
	Tool     string        `json:"tool"`
	State    guard.State   `json:"state"`
	Relation string        `json:"relation,omitempty"`
	Amount   *intent.Money `json:"amount,omitempty"`
	At       time.Time     `json:"at"`
	Poll     string        `json:"poll"`
}

// refusal makes a problem that is not about a record. kind is the last part of its type.
func refusal(status int, kind, title, action, format string, args ...any) *problem {
	return &problem{
		Type: problemBase + kind, Title: title, Status: status,
		Reason: strings.ReplaceAll(kind, "-", "_"), SuggestedAction: action, Detail: fmt.Sprintf(format, args...),
	}
}

// deny marks a refusal as the verdict DENY, with a time to come back.
func (p *problem) deny(after time.Duration) *problem {
	p.Verdict, p.RetryAfter = guard.Deny, seconds(after)
	return p
}

// hangUp ends the connection after the answer: connections are few, and those who may
// call nothing must not keep them.
func (p *problem) hangUp() *problem {
	p.close = true
	return p
}

// seconds rounds up; no wait that was asked for becomes none.
func seconds(d time.Duration) int {
	if d <= 0 {
		return 0
	}
	return max(1, int(math.Ceil(d.Seconds())))
}

func (p *problem) write(w http.ResponseWriter) {
	body, err := json.Marshal(p)
	if err != nil { // only texts, numbers and times of our own making
		body = []byte(`{"type":"about:blank","title":"internal error","status":503}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	if p.RetryAfter > 0 {
		h.Set("Retry-After", fmt.Sprint(p.RetryAfter))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="holdfast"`)
	}
	if p.close {
		h.Set("Connection", "close")
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // the caller may be gone
}

// fromGuard puts an answer that is not the upstream's into words.
func fromGuard(a guard.Answer, who access.Caller) *problem {
	p := &problem{Verdict: a.Verdict, Reason: string(a.Reason), RetryAfter: seconds(a.RetryAfter)}
	v := a.Intent
	if v.Caller == who.Username && (v.CallerUID == "" || v.CallerUID == who.UID) {
		p.Intent = v.IntentID
		if v.Exists {
			p.Poll = pollPath(v.Namespace, v.Tool, v.IntentID)
			p.Order = &order{Scope: scopeTexts(v.Scope), ProviderReference: v.ProviderReference}
		}
	}
	set := func(status int, kind, title, action, detail string) *problem {
		p.Status, p.Type, p.Title, p.SuggestedAction, p.Detail = status, problemBase+kind, title, action, detail
		return p
	}
	ask := ""
	if p.Poll != "" {
		ask = " Ask what became of it with GET " + p.Poll + "."
	}
	switch a.Verdict {
	case guard.Conflict:
		if a.Reason == guard.ReasonCaller {
			p.Poll, p.Order = "", nil
			return set(http.StatusUnprocessableEntity, "conflict", "The intent is another caller's", actNewIntent,
				"Nothing was sent. An earlier ServiceAccount of the same name has made this payment, or another one under this intent ID. "+
					"If it is another payment, use another intent ID and the scope that it is for.")
		}
		if p.Intent != "" && v.Registration != nil && len(v.Attempts) == 0 {
			return set(http.StatusUnprocessableEntity, "conflict", "The intent was registered for another request", actFixRequest,
				"Nothing was sent. This intent ID was registered "+registeredFor(v)+", and this request has another scope, amount, recipient or fingerprint. "+
					"Send what was registered. If it is another purchase, or was registered wrongly, use a new intent ID."+ask)
		}
		return set(http.StatusUnprocessableEntity, "conflict", "The intent ID belongs to another request", actFixRequest,
			"Nothing was sent. This intent ID was used before for a request with other arguments. If this is a retry, send exactly what was sent first. "+
				"If it is another purchase, use a new intent ID."+ask)
	case guard.InFlightNow:
		if a.Reason == guard.ReasonBackoff {
			return set(http.StatusConflict, "in-flight", "The next attempt must wait", actRetryLater, fmt.Sprintf(
				"The last attempt moved nothing. Send the same request with the same intent ID again after %d seconds; do not use a new intent ID.", max(p.RetryAfter, 1)))
		}
		if a.Reason == guard.ReasonPending {
			return set(http.StatusConflict, "in-flight", "The payment is being processed", actPoll,
				"The payment was accepted and is not final: the provider is asked how it ends. Do not pay it again, not under another intent ID and not in another way, "+
					"and do not report it as done or as failed."+ask)
		}
		return set(http.StatusConflict, "in-flight", "The payment is in progress", actPoll,
			"This payment is being made right now by an earlier call. Do not pay it in another way and do not use a new intent ID: "+
				"wait, then send the same request again to get its answer."+ask)
	case guard.UnknownHold:
		p.Hold, p.OwnMatches, p.RetryAfter = a.Hold, ownMatches(a, who), 0
		return set(http.StatusConflict, "unknown-hold", "A person must decide", holdAction(a, p), holdDetail(a, p, ask))
	case guard.Deny:
		switch a.Reason {
		case guard.ReasonRejected:
			return set(http.StatusForbidden, "rejected", "The payment was rejected", actStop,
				"A person has rejected this payment. Do not send it again, also not under another intent ID."+ask)
		case guard.ReasonExpired:
			return set(http.StatusForbidden, "expired", "The intent's time is over", actNewIntent,
				notSent(v)+". The intent was registered, and was not paid in the time for which that was valid, so it will not be sent any more. "+
					"If the payment is still wanted, register it as a new one, with a new intent ID."+ask)
		case guard.ReasonNotRegistered:
			return set(http.StatusForbidden, "not-registered", "The intent was not registered", actRegister,
				notSent(v)+": this tool takes only payments that were registered before. Register this one first, under the same intent ID: "+
					"PUT its scope, amount and recipient to the tool's path with /intents/ and the ID. Then send the same request again.")
		case guard.ReasonHoldExpired:
			return set(http.StatusForbidden, "hold-expired", "Nobody decided in time", actNewIntent,
				"This payment waited for a person, and nobody decided in time, so this intent is closed. Nothing was paid. "+
					"If the payment is still wanted, make it as a new one, with a new intent ID."+ask)
		case guard.ReasonDeniedByRule:
			return set(http.StatusForbidden, "denied-by-rule", "A rule of the tool denies it", actStop,
				notSent(v)+". An admission rule of the tool denies this payment: "+strings.TrimSuffix(a.Rule, ".")+
					". Do not split or change the payment only to pass the rule, and do not make it in another way.")
		case guard.ReasonMarkedPaid:
			return set(http.StatusForbidden, "marked-paid", "The payment was made", actStop,
				"It is known that this was paid. Whose the answer is can no longer be told, since the store has lost its memory. Do not pay it again."+ask)
		case guard.ReasonMarkedFailed:
			return set(http.StatusForbidden, "marked-failed", "The payment was marked as failed", actNewIntent,
				"A person has confirmed that nothing was paid, and closed this intent. If the payment is still wanted, make it as a new one, with a new intent ID."+ask)
		case guard.ReasonSpendExceeded:
			sent := "Nothing was sent. "
			if len(v.Attempts) > 0 {
				sent = "It was not sent again. "
			}
			return set(http.StatusForbidden, "spend-exceeded", "The budget is spent", actStop, sent+spendDetail(a.Spend))
		case guard.ReasonTooManyHolds:
			p.OwnMatches = ownMatches(a, who)
			return set(http.StatusTooManyRequests, "too-many-holds", "Too many payments wait for a person", actRetryLater,
				"Nothing was sent. This payment would have to wait for a person, but too many already do. Come back after some of them were decided.")
		case guard.ReasonTooManyRegistered:
			return set(http.StatusTooManyRequests, "too-many-registered", "Too many payments are registered", actRetryLater,
				"Nothing was registered. As many payments of this caller as the budget allows are registered and were not made. Make those that are wanted, or let their time be over: "+
					"then register this one with the same intent ID. Register a payment right before it is made, and give it a valid_until.")
		case guard.ReasonRetryRatio:
			return set(http.StatusTooManyRequests, "retry-ratio", "Too many retries of this tool", actRetryLater,
				nothingPaid(v)+", and this call sent nothing more. So many calls of this tool are retries now that no more are sent for a moment. "+
					"Send the same request with the same intent ID again after Retry-After; do not use a new intent ID."+ask)
		case guard.ReasonTooManyInFlight:
			return set(http.StatusTooManyRequests, "too-many-in-flight", "Too many calls of this tool at once", actRetryLater,
				notSent(v)+": as many payments of this tool are in progress as it allows. Send the same request with the same intent ID again later.")
		case guard.ReasonScopeInFlight:
			return set(http.StatusTooManyRequests, "scope-in-flight", "Too many calls for this at once", actRetryLater,
				notSent(v)+": as many payments for the same thing are in progress as the tool allows. Send the same request with the same intent ID again later.")
		case guard.ReasonRateLimited:
			return set(http.StatusTooManyRequests, "rate-limited", "The tool is called too often", actRetryLater, fmt.Sprintf(
				"%s: the tool is called more often than it allows. Send the same request with the same intent ID again after %d seconds.", notSent(v), max(p.RetryAfter, 1)))
		case guard.ReasonClaimUsed:
			return set(http.StatusConflict, "claim-used", "The claim's token was used", actFixRequest,
				"This token names an earlier claim of the intent, which has ended. Nothing was claimed. Claim again with the same intent ID and a new token in "+headerClaim+"."+ask)
		case guard.ReasonLeaseOver:
			return set(http.StatusConflict, "lease-over", "The attempt's lease is over", actStop,
				"This attempt no longer holds the lease: it was settled, or its time was over. Stop what it does, send nothing more under it, and settle it with what is known."+ask)
		case guard.ReasonRenewedEnough:
			return set(http.StatusConflict, "renewed-enough", "The lease is not renewed any more", actStop,
				"The attempt has run for as long as the tool allows (upstream.local.renewFor). Its lease ends when it would have: stop by then, and settle the attempt with what is known."+ask)
		case guard.ReasonUnreachable:
			return set(http.StatusBadGateway, "upstream-unreachable", "The upstream could not be reached", actRetryLater,
				nothingPaid(v)+": "+lastDetail(v)+". Send the same request with the same intent ID again later.")
		}
	case guard.Replay:
		if a.Reason == guard.ReasonExpired {
			status, kind := http.StatusBadGateway, "upstream-unreachable"
			if reached(v) {
				status, kind = http.StatusConflict, "expired"
			}
			return set(status, kind, "The intent's time is over", actNewIntent,
				nothingPaid(v)+": "+lastDetail(v)+". It was not sent again in time, so this intent is closed and will not be sent any more. "+
					"If the payment is still wanted, make it as a new one, with a new intent ID."+ask)
		}
		kind, title := "upstream-unreachable", "The upstream could not be reached"
		if v.Checks != nil {
			kind, title = "not-paid", "Nothing was paid"
		}
		return set(http.StatusBadGateway, kind, title, actNewIntent,
			nothingPaid(v)+": "+lastDetail(v)+". All attempts of this intent are used up. If the payment is still wanted, use a new intent ID."+ask)
	}
	return set(http.StatusForbidden, "denied", "The call is denied", actStop, "Nothing was sent.")
}

// registeredFor says what an intent was registered for.
func registeredFor(v guard.View) string {
	text := "for " + strings.Join(scopeTexts(v.Scope), ", ")
	if v.Amount != nil {
		text += fmt.Sprintf(", to move %s %s", v.Amount.Display(), v.Amount.Currency)
	}
	if v.Recipient != "" {
		text += " to " + v.Recipient
	}
	return text
}

// shownAmount is an amount with all digits that its currency has, as kubectl shows it.
func shownAmount(m *intent.Money) *intent.Money {
	if m == nil {
		return nil
	}
	return &intent.Money{Value: m.Display(), Currency: m.Currency}
}

// reached says that the upstream had a request of the intent, or may have had one.
func reached(v guard.View) bool {
	return slices.ContainsFunc(v.Attempts, func(a guard.AttemptView) bool { return a.Outcome != guard.AttemptRetryable || a.Status != 0 })
}

// nothingPaid begins to tell of an intent whose last attempt has moved nothing.
func nothingPaid(v guard.View) string {
	if slices.ContainsFunc(v.Attempts, func(a guard.AttemptView) bool {
		return a.Outcome != guard.AttemptRetryable && a.Outcome != guard.AttemptFailed
	}) {
		return "How an earlier attempt ended is not known, and a person has counted it as not paid. The last one paid nothing"
	}
	return "Nothing was paid"
}

// notSent begins to tell of a call that a limit has refused, whatever was tried before.
func notSent(v guard.View) string {
	if len(v.Attempts) == 0 {
		return "Nothing was sent"
	}
	return nothingPaid(v) + ", and nothing more was sent"
}

func lastDetail(v guard.View) string {
	if n := len(v.Attempts); n > 0 && v.Attempts[n-1].Detail != "" {
		return v.Attempts[n-1].Detail
	}
	return "nothing could be sent"
}

func holdAction(a guard.Answer, p *problem) string {
	switch {
	case a.Reason == guard.OutcomeUnknown:
		return actDoNotPay
	case len(p.OwnMatches) > 0:
		return actEarlierID
	default:
		return actPoll
	}
}

// holdDetail tells a model what the hold means for it.
func holdDetail(a guard.Answer, p *problem, ask string) string {
	hold := " A person decides"
	if a.Hold != "" {
		hold += " in the PaymentHold " + a.Hold
	}
	hold += ". "
	earlier := ""
	if len(p.OwnMatches) > 0 {
		earlier = "If this is the same purchase as one in own_matches, come back under that intent ID to get its answer. "
	}
	var why string
	switch a.Reason {
	case guard.OutcomeUnknown:
		return "The payment may have happened, and nobody knows how it ended. Do not pay it again, not under another intent ID and not in another way, " +
			"and do not report it as failed." + beingAsked(a.Intent) + hold + "Until then the same request gets this answer." + ask
	case guard.ExactMatch:
		why = "The very same payment was made before under another intent ID."
	case guard.KeyExpired:
		why = "This intent ID was settled so long ago that its answer is no longer kept."
	case guard.IdentityChanged:
		why = "A payment with the same recipient and amount was made before this tool's identity rules changed, and nobody can tell whether it is the same one."
	case guard.Lookalike:
		why = "A payment of the same amount to the same recipient was made a short time ago, or may have been."
	case guard.BudgetExceeded:
		return "This payment would exceed what may be spent, and was not sent. Do not repeat it under new intent IDs, and do not split it." + hold +
			"After a release, the same request with the same intent ID is sent once." + ask
	case guard.ApprovalRequired:
		return "A rule of the tool wants a person to decide about this payment, and it was not sent: " + strings.TrimSuffix(a.Cause, ".") +
			". Do not repeat it under new intent IDs, and do not split it." + hold + "After a release, the same request with the same intent ID is sent once." + ask
	case guard.LineageOverlap:
		why = "The same step of the same session has paid already, or may have."
	default:
		why = "What it is for has been paid already, or may have been."
	}
	if n := a.MatchCount; n > 0 {
		why += fmt.Sprintf(" It overlaps with %d other payment(s) of the same budget (%s).", n, reasonTexts(a.Reasons))
	}
	return why + " This payment was not sent. Do not repeat it under new intent IDs. " + earlier +
		"If it is for something else, name it by a narrower scope that was not paid yet." + hold +
		"After a release, the same request with the same intent ID is sent once." + ask
}

// beingAsked says that the provider may decide before a person does.
func beingAsked(v guard.View) string {
	if v.Resumes != nil && !v.Resumes.Next.IsZero() {
		return " The gateway sends it again under the same key, by which the provider recognises it: the answer may decide before a person does."
	}
	if v.Checks == nil || v.Checks.Next.IsZero() {
		return ""
	}
	return " The provider is being asked how it ended: its answer may decide before a person does."
}

// spendDetail says which limit it is, and what is left of it where that tells of nobody else.
func spendDetail(x *guard.SpendExceeded) string {
	if x == nil {
		return "This payment would exceed what may be spent."
	}
	l := &x.Limit
	if x.Uncounted != "" {
		return fmt.Sprintf("This payment cannot be counted in the limit %q of the budget: %s. The owner of the tool must mend that; sending it again does not help.", l.Name, x.Uncounted)
	}
	text := fmt.Sprintf("This payment would exceed the limit %q of the budget: %s %s within %s.", l.Name, l.Amount.Display(), l.Amount.Currency, l.Span())
	if x.Left != "" {
		text += fmt.Sprintf(" You have %s %s left.", intent.Money{Value: x.Left, Currency: l.Amount.Currency}.Display(), l.Amount.Currency)
	}
	return text + fmt.Sprintf(" There is room again when earlier payments are longer ago than %s; what is not settled yet counts until it is. "+
		"Do not split the payment, and do not make it in another way. When there is room, send the same request with the same intent ID.", l.Span())
}

func reasonTexts(reasons []guard.Reason) string {
	out := make([]string, len(reasons))
	for i, r := range reasons {
		out[i] = string(r)
	}
	return strings.Join(out, ", ")
}

// ownMatches are those of the matches that are this caller's.
func ownMatches(a guard.Answer, who access.Caller) []ownMatch {
	var out []ownMatch
	for _, m := range a.Matches {
		if m.Caller == who.Username && m.CallerUID == who.UID {
			out = append(out, ownMatch{
				IntentID: m.IntentID, Tool: m.Tool, State: m.State, Relation: m.Relation, Amount: shownAmount(m.Amount), At: m.At,
				Poll: pollPath(a.Intent.Namespace, m.Tool, m.IntentID),
			})
		}
	}
	return out
}

func scopeTexts(s intent.Scope) []string {
	out := make([]string, len(s))
	for i, p := range s {
		out[i] = string(p)
	}
	return out
}
