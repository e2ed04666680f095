// Package guard decides what may happen to a payment: it keeps the life of every
// record, gives the verdicts, and is the only writer of the store.
//
// The invariants that live here:
//
//   - a record is InFlight and durable before its attempt may send, and every step
//     into InFlight is one atomic Reserve that probes for whatever stands in its way;
//   - an attempt whose outcome is not known is never run again without a person's word, but
//     for the same request under the same key of a provider that deduplicates;
//   - a success that is on the record is never forgotten or overwritten;
//   - a resolution is taken once, by the hold for which it was written.
package guard

import (
	"errors"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// Verdict is what the guard says to a call.
type Verdict string

const (
	Allow       Verdict = "ALLOW"
	Replay      Verdict = "REPLAY"
	InFlightNow Verdict = "IN_FLIGHT"
	Conflict    Verdict = "CONFLICT"
	Deny        Verdict = "DENY"
	UnknownHold Verdict = "UNKNOWN_HOLD"
)

// Reason says in one word why a verdict is not ALLOW.
type Reason string

// The reasons of holds are a closed enum.
const (
	ScopeOverlap    Reason = "ScopeOverlap"
	LineageOverlap  Reason = "LineageOverlap"
	ExactMatch      Reason = "ExactMatch"
	OutcomeUnknown  Reason = "OutcomeUnknown"
	KeyExpired      Reason = "KeyExpired"
	IdentityChanged Reason = "IdentityChanged"
	Lookalike       Reason = "Lookalike"
	BudgetExceeded  Reason = "BudgetExceeded"
	// ApprovalRequired: a rule of the tool says that a person decides.
	ApprovalRequired Reason = "ApprovalRequired"
)

// The reasons of other verdicts.
const (
	// ReasonRequest: the same intent ID with a different request (CONFLICT).
	ReasonRequest Reason = "request"
	// ReasonCaller: the same ServiceAccount name under another UID (CONFLICT).
	ReasonCaller Reason = "caller"
	// ReasonRejected: a person rejected the intent (DENY).
	ReasonRejected Reason = "rejected"
	// ReasonHoldExpired: nobody decided in time, so the intent was rejected (DENY).
	ReasonHoldExpired Reason = "hold_expired"
	// ReasonMarkedPaid: a person said that it was paid, and whose the answer is cannot be told (DENY).
	ReasonMarkedPaid Reason = "marked_paid"
	// ReasonMarkedFailed: a person said that nothing moved; a new payment needs a new intent (DENY).
	ReasonMarkedFailed Reason = "marked_failed"
	// ReasonTooManyHolds: the budget's maxHeld is reached (DENY).
	ReasonTooManyHolds Reason = "too_many_holds"
	// ReasonTooManyRegistered: the budget's maxRegistered is reached (DENY).
	ReasonTooManyRegistered Reason = "too_many_registered"
	// ReasonTooManyInFlight: all slots of the tool are taken (DENY).
	ReasonTooManyInFlight Reason = "too_many_in_flight"
	// ReasonScopeInFlight: all slots of a path of the scope are taken (DENY).
	ReasonScopeInFlight Reason = "scope_in_flight"
	// ReasonRateLimited: calls come more often than the tool allows (DENY).
	ReasonRateLimited Reason = "rate_limited"
	// ReasonSpendExceeded: the payment would exceed a limit of the budget (DENY).
	ReasonSpendExceeded Reason = "spend_exceeded"
	// ReasonDeniedByRule: an admission rule of the tool denies it (DENY).
	ReasonDeniedByRule Reason = "denied_by_rule"
	// ReasonInFlight: an attempt holds the lease (IN_FLIGHT).
	ReasonInFlight Reason = "in_flight"
	// ReasonPending: the upstream accepted the payment, and its end is not known yet (IN_FLIGHT).
	ReasonPending Reason = "pending"
	// ReasonBackoff: the next attempt must wait (IN_FLIGHT).
	ReasonBackoff Reason = "backoff"
	// ReasonExpired: a retryable intent was not tried again in time (REPLAY), or a registered
	// one can no longer be sent (DENY).
	ReasonExpired Reason = "expired"
	// ReasonRetryRatio: the tool has had as many retries as its calls allow for now (DENY).
	ReasonRetryRatio Reason = "retry_ratio"
	// ReasonNotRegistered: the tool takes only intents that were registered (DENY).
	ReasonNotRegistered Reason = "not_registered"
	// ReasonClaimUsed: the token of a claim names an earlier attempt (DENY).
	ReasonClaimUsed Reason = "claim_used"
	// ReasonLeaseOver: the attempt no longer holds the lease, so it cannot be renewed (DENY).
	ReasonLeaseOver Reason = "lease_over"
	// ReasonRenewedEnough: the attempt has run for as long as its tool allows (DENY).
	ReasonRenewedEnough Reason = "renewed_enough"
	// ReasonUnreachable: nothing could be sent (DENY, or REPLAY once attempts are spent).
	ReasonUnreachable Reason = "upstream_unreachable"
)

var (
	// ErrInvariant is a bug: the step would break a rule of the record's life. Nothing was written.
	ErrInvariant = errors.New("guard invariant broken")
	// ErrCorrupt: a stored record cannot be read. It is left alone and calls to it are refused.
	ErrCorrupt = errors.New("stored record is unreadable")
	// ErrRefused: calls are refused for now. What was let in can be settled.
	ErrRefused = errors.New("calls are refused")
	// ErrContended: too many others changed the record meanwhile; try again.
	ErrContended = errors.New("record is contended")
)

// Key names a record.
type Key struct {
	Namespace string
	Tool      string
	Caller    string
	IntentID  string
}

// Call is one call of a mutating tool, its identity already extracted.
type Call struct {
	Key
	// CallerUID is the ServiceAccount's UID.
	CallerUID   string
	Scope       intent.Scope
	Lineage     intent.Path
	Amount      *intent.Money
	Recipient   string
	Fingerprint string
	// IdentityHash is that of the tool's identity block, AmountHash and RecipientHash
	// of how it reads amount and recipient.
	IdentityHash, AmountHash, RecipientHash string
	// MayRetry is asked before the call becomes another attempt of an intent of which
	// nothing moved; if it may not, it comes with a time to come back. Nil: it may.
	MayRetry func() (wait time.Duration, allowed bool)
	// Behind: others of this process wait for a slot already. The call is told all else
	// that it would be told, and takes no slot.
	Behind bool
	// Claim is the caller's own token of the claim of a local tool: under the same one it
	// gets the same attempt again. Empty: the attempt is this process's.
	Claim string
	// Passed: the call was counted by the rate limits before, and waited for a slot since.
	Passed bool
	// Keep seals the request, bound to these bytes, so that gateways alone can read it and
	// send it again (Policy.Resume). Nil: it cannot be kept, and NotKept says why.
	Keep    func(bound []byte) (sealed []byte, err error)
	NotKept string
}

// Policy is what the tool and its budget say. An attempt keeps the policy that it began with.
type Policy struct {
	Budget string
	// Window is how far back settled intents are compared.
	Window time.Duration
	// HoldExactMatch holds an exact match instead of replaying it.
	HoldExactMatch bool
	// IgnoreLineage leaves lineages out of the comparison.
	IgnoreLineage bool
	// Lookalike is how far back settled intents are compared by recipient and amount alone; 0: not at all.
	Lookalike time.Duration
	// TTL is how long a settled answer is replayed.
	TTL time.Duration
	// Timeout is the upstream's.
	Timeout time.Duration
	// RenewFor is how long after its beginning an attempt's lease may be renewed; 0: never.
	RenewFor time.Duration
	// SettleAfter is the longest time from the send's deadline until a payment is
	// visible in the provider's ledger or never will be.
	SettleAfter time.Duration
	// MaxHeld and MaxHeldPerCaller limit holds of intents that were never sent; 0: no limit.
	MaxHeld          int
	MaxHeldPerCaller int
	// MaxRegisteredPerCaller limits the intents of one caller that are registered and were never
	// sent; 0: no limit.
	MaxRegisteredPerCaller int
	// Retry says how often an intent is tried; nil: as the engine's options do.
	Retry *RetryBudget
	// MaxInFlight limits the intents of the tool that are in flight, and
	// MaxInFlightPerScope those of each path of their scopes; 0: no limit.
	MaxInFlight         int
	MaxInFlightPerScope int
	// Rate limits the calls of the tool, and RatePerCaller those of each caller.
	Rate          Rate
	RatePerCaller Rate
	// RegisteredOnly refuses calls of intents that were not registered.
	RegisteredOnly bool
	// Check says how the provider is asked about an unknown outcome; nil: a person decides.
	Check *CheckPolicy
	// Resume says when the same request is sent again after an unknown outcome; nil: never.
	Resume *ResumePolicy

	// HoldFor is how long a hold of an intent of which nothing may have moved waits for a
	// person before the intent is rejected; 0: for as long as it takes.
	HoldFor time.Duration

	// spend is what the budget lets move: see WithSpend. A record keeps its charges instead.
	spend []SpendLimit
	// rules are the tool's: see WithRules. No record keeps them.
	rules func(*Call) (Ruling, error)
}

// Outcome is how one attempt ended.
type Outcome string

const (
	// AttemptOpen: no result is known yet. It counts as unknown.
	AttemptOpen Outcome = ""
	// AttemptSucceeded: the upstream said that it was done.
	AttemptSucceeded Outcome = "Succeeded"
	// AttemptFailed: the upstream said that nothing moved, for good.
	AttemptFailed Outcome = "Failed"
	// AttemptRetryable: nothing moved; another attempt may.
	AttemptRetryable Outcome = "Retryable"
	// AttemptPending: accepted but not final. It counts as unknown.
	AttemptPending Outcome = "Pending"
	// AttemptUnknown: it may have moved.
	AttemptUnknown Outcome = "Unknown"
)

// movedNothing says that the attempt is known to have moved nothing.
func (o Outcome) movedNothing() bool { return o == AttemptFailed || o == AttemptRetryable }

// Response is an upstream's answer as it is stored and replayed.
type Response struct {
	Status int
	Header map[string][]string
	Body   []byte
	// Size and Digest (sha256:…) are those of the whole body; Truncated: Body is only its start.
	Size      int64
	Digest    string
	Truncated bool
}

// Result is what the gateway learnt of an attempt.
type Result struct {
	Outcome  Outcome
	Response *Response
	// ProviderReference is the provider's own name of the payment, where it is known.
	ProviderReference string
	// RetryAfter is the upstream's wish (Retryable).
	RetryAfter time.Duration
	// LateSend: a byte was written although the deadline was over when it was looked at again.
	LateSend bool
	// Detail says in words what happened: for people, never with secrets or bodies.
	Detail string
}

// Evidence is a result that could not be written to its record. The intent will be held
// as unknown, and this is what is known of it all the same.
type Evidence struct {
	Key               Key
	Attempt           int
	ProviderKey       string
	Outcome           Outcome
	ProviderReference string
	// Status is the upstream's answer's, 0: there was none.
	Status int
	Detail string
	// Cause is why it could not be written.
	Cause error
}

// Match is a record that stands in a call's way.
type Match struct {
	Caller string
	// CallerUID tells a ServiceAccount from an earlier one of the same name.
	CallerUID string
	Tool      string
	IntentID  string
	Relation  string
	Amount    *intent.Money
	State     State
	At        time.Time
}

// MaxMatches is how many matches a hold keeps.
const MaxMatches = 32

// Answer is what the guard says to a call, a poll or a settlement.
type Answer struct {
	Verdict Verdict
	// Reason explains the verdict; Reasons are all of a hold's.
	Reason  Reason
	Reasons []Reason
	// Intent is the record that the answer is about: for an exact match another than the call's.
	Intent View
	// RetryAfter is when it makes sense to ask again (IN_FLIGHT, and limits).
	RetryAfter time.Duration
	// Hold is the name of the PaymentHold (UNKNOWN_HOLD).
	Hold string
	// Matches are what stands in the way, MatchCount how many (UNKNOWN_HOLD). They
	// may belong to other callers: a caller is told only of its own.
	Matches    []Match
	MatchCount int
	// Cause says why the intent is held, where that is more than its reasons.
	Cause string
	// Spend is the limit that refused the call (DENY, spend_exceeded).
	Spend *SpendExceeded
	// Rule is what the rule says that refused the call (DENY, denied_by_rule).
	Rule string
	// Response is what to replay (REPLAY), or what the settlement stored. Nil where nothing was ever answered.
	Response *Response
	// Ticket is the right to send once (ALLOW from Admit).
	Ticket *Ticket
	// Again: the attempt that was just settled moved nothing, as every one before it, and
	// there may be another one after RetryAfter (from Settle).
	Again bool
}

// Decision is what a person says of a hold.
type Decision string

const (
	Release    Decision = "Release"
	Reject     Decision = "Reject"
	MarkPaid   Decision = "MarkPaid"
	MarkFailed Decision = "MarkFailed"
)

// MaxResultBytes is the longest result that MarkPaid may carry.
const MaxResultBytes = 8 << 10

// HoldID names one hold of a record: its number, under the epoch and the nonce of the write that made it.
type HoldID struct {
	Key    Key
	Number int
	Epoch  string
	Nonce  string
}

// Resolution is a person's decision on one hold.
type Resolution struct {
	HoldID
	Decision          Decision
	Reason            string
	By                string
	ProviderReference string
	// Result is JSON that agents get as a replay (MarkPaid).
	Result []byte
	// ToolGone: the AgentTool does not exist; nothing can be released.
	ToolGone bool
	// Now gives what the tool and its budget say now of the intent, which a release must
	// pass, or why the tool cannot be called as it is. Nil: a release is not asked that.
	Now func(*Call) (Policy, string)
}

// View is what may be shown of a record.
type View struct {
	Key
	// CallerUID tells whether a caller that asks is the one that it was.
	CallerUID   string
	Exists      bool
	State       State
	Scope       intent.Scope
	Lineage     intent.Path
	Amount      *intent.Money
	Recipient   string
	Fingerprint string
	// ProviderKey is the key that the provider gets.
	ProviderKey       string
	ProviderReference string
	RefundOwed        bool
	Disputed          bool
	// SettledAs is what a tombstone was before.
	SettledAs State
	Created   time.Time
	Changed   time.Time
	Attempts  []AttemptView
	// Hold is the current hold, or the last one.
	Hold *HoldView
	// HoldCount is the number of the newest hold.
	HoldCount int
	// Checks are what status checks have come to; nil: there were none.
	Checks *ChecksView
	// Resumes say whether an unknown outcome is sent again; nil: nobody thinks of it.
	Resumes *ResumesView
	// Refund is what is known of the one that is owed; nil: none is.
	Refund *Refund
	// Registration is what was said of it before it was sent; nil: nothing. Nobody changes it.
	Registration *Registration
	// Expires is when it can no longer be sent (Registered).
	Expires time.Time
}

// Refund is money that was paid although it counted as not paid, or paid twice.
type Refund struct {
	Amount *intent.Money
	// References are the provider's own names of the payments, the first one first.
	References []string
}

// String says it in words.
func (f *Refund) String() string {
	what := "the amount of the intent"
	if f.Amount != nil {
		what = f.Amount.Display() + " " + f.Amount.Currency
	}
	switch len(f.References) {
	case 0:
		return what + "; the provider's references are not known"
	case 1:
		return what + "; provider reference " + f.References[0]
	}
	return what + "; provider references " + strings.Join(f.References, ", ")
}

// AttemptView is one attempt as it is shown.
type AttemptView struct {
	Number            int       `json:"number"`
	Outcome           Outcome   `json:"outcome"`
	Started           time.Time `json:"started"`
	Ended             time.Time `json:"ended,omitzero"`
	Status            int       `json:"status,omitempty"`
	ProviderReference string    `json:"providerReference,omitempty"`
	Late              bool      `json:"late,omitempty"`
	SentLate          bool      `json:"sentLate,omitempty"`
	// Lost: the memory of it was lost, so it is not known whether it was made at all.
	Lost bool `json:"lost,omitempty"`
	// Resumed: it sent again what an earlier attempt had sent, whose outcome is unknown.
	Resumed bool   `json:"resumed,omitempty"`
	Detail  string `json:"detail,omitempty"`
}

// HoldState is the state of one hold.
type HoldState string

const (
	// HoldHeld: a person may resolve it.
	HoldHeld HoldState = "Held"
	// HoldWaiting: the payment could not be visible yet; only Reject and MarkPaid act.
	HoldWaiting HoldState = "Waiting"
	// HoldResolved: a resolution was taken.
	HoldResolved HoldState = "Resolved"
	// HoldVoid: overtaken, by a result or by a newer hold.
	HoldVoid HoldState = "Void"
)

// HoldView is one hold as it is shown.
type HoldView struct {
	HoldID
	Name         string
	State        HoldState
	Reasons      []Reason
	Matches      []Match
	MatchCount   int
	WaitingUntil time.Time
	// Until is when nobody is waited for any more, and Overdue says that it is over and the
	// hold still stands (see Undecided; from Hold alone). Zero: a person is waited for.
	Until   time.Time
	Overdue bool
	// Cause says why the hold stands anew, where it does, or which limit it would exceed.
	Cause string
	// Effect says what came of it, in a sentence.
	Effect   string
	Decision Decision
	By       string
	At       time.Time
	// Refund is what is known of the one that is owed, on the newest hold; nil: none is.
	Refund *Refund
	// Sent are the attempts of the intent, each with the key under which the provider got it,
	// and Next is the name of the newest hold that came after this one; "": none did. From
	// Hold, Resolve and Undecided alone.
	Sent []SentView
	Next string
}

// SentView is an attempt, and the key that the provider got with it.
type SentView struct {
	AttemptView
	Key string
}
