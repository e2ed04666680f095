// Package policy knows what an AgentTool and its IntentBudget say: expressions
// compiled, limits checked, every absent field given its effective value, all of
// it in one immutable snapshot that is swapped atomically.
//
// Nothing here is ever half valid. A tool whose spec cannot be used as a whole is
// not served, and says why; what a call's identity cannot be read from with
// certainty is refused, never guessed.
package policy

import (
	"fmt"
	"net/url"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// Tool is an AgentTool ready to be called, with the effective value of every
// field. It is never changed after Compile made it.
type Tool struct {
	Namespace  string
	Name       string
	Generation int64
	// Mutating: every call is an intent. Otherwise calls are passed through.
	Mutating bool
	// Store is the name of the IdempotencyStore of the tool's budget (Mutating).
	Store string
	// Local: the agent runs it itself, between a claim and a settlement. Of Upstream it has
	// only the Timeout, which is the lease.
	Local    bool
	Upstream Upstream
	// CacheTTL is how long an answer may be served again (read-only); 0: not at all.
	CacheTTL time.Duration
	// Key says where the provider's key goes.
	Key KeyPlacement
	// InFlight says what a call gets while another one of its intent is in flight.
	InFlight InFlight
	// Queue says how a call waits for a slot, where Guard limits how many are in flight.
	Queue Queue
	// MaxBodyBytes is how much of an answer's body the record keeps.
	MaxBodyBytes int64
	// Guard is what the guard is told, but for the limits of the budget: see GuardFor.
	Guard guard.Policy

	// Check is how the provider is asked about an unknown outcome; nil: it is not.
	Check *StatusCheck
	// Resume says that an unknown outcome is sent again under the same key; nil: it is not.
	Resume *Resume
	// Retry is nil if the gateway tries once a call.
	Retry *Retry

	// spend are the limits of the tool's budget.
	spend []spendLimit
	// identity is nil if the tool is read-only.
	identity *identity
	// outcomes are asked in their order; the first that fits wins.
	outcomes []outcomeRule
}

// Upstream is where calls are sent.
type Upstream struct {
	URL *url.URL
	// Methods are those that a caller may use.
	Methods []string
	// Suffixes are the paths that a caller may append; a segment "*" stands for exactly one segment.
	Suffixes []string
	Timeout  time.Duration
	// RequestHeaders, in lower case, go upstream as the caller sent them; no others do.
	RequestHeaders []string
	// Forwards are the same, in canonical form.
	Forwards []string
	// Credentials is nil if none are sent.
	Credentials *Credentials
}

// Credentials says which key of which Secret, in the tool's namespace, goes
// upstream in which header, with what before it.
type Credentials struct {
	SecretName string
	SecretKey  string
	Header     string
	Prefix     string
}

// KeyPlacement says how the upstream receives the provider's key: in a header,
// or at a JSON pointer into the body. Both are empty if it takes none.
type KeyPlacement struct {
	Header   string
	Argument string
}

// InFlight says what a call gets while another one of its intent is in flight.
type InFlight struct {
	// Wait for the answer, for Timeout at most.
	Wait       bool
	Timeout    time.Duration
	RetryAfter time.Duration
}

// Retry says what the gateway does about attempts that moved nothing. How often and when
// an intent may be tried is in the guard's policy.
type Retry struct {
	// Patience is how long after a call's beginning an attempt of it may still begin.
	Patience time.Duration
	// Percent of the intents that were sent for the first time may be retried, and
	// MinPerSecond however few those are.
	Percent, MinPerSecond int
}

// Resume says when the same request is sent again after an unknown outcome.
type Resume struct {
	// Upstream names to whom attempts go, and what they carry.
	Upstream string
	// Window is how long the provider knows a key.
	Window time.Duration
}

// Queue says how calls wait for a slot.
type Queue struct {
	// Max is how many may wait in this process, each for Timeout at most.
	Max     int
	Timeout time.Duration
}

// SpecError is a spec that cannot be used. Only a change of the spec helps.
type SpecError struct {
	// Field is the field's path: spec.identity.scope[0].
	Field string
	// Message says what is wrong and what to do; of an expression with the position.
	Message string
}

func (e *SpecError) Error() string { return e.Field + ": " + e.Message }

func specError(field, format string, args ...any) *SpecError {
	return &SpecError{Field: field, Message: fmt.Sprintf(format, args...)}
}

// identity is the compiled identity block of a tool.
type identity struct {
	intentID  []*expression
	scope     []*expression
	lineage   *expression
	amount    *expression
	currency  *expression
	unit      intent.Unit
	recipient *expression
	volatile  intent.Volatile
	// rpcVolatile is volatile for bodies that are JSON-RPC requests.
	rpcVolatile intent.Volatile
	// keyHeaders are the headers that carry the agent's own key, by their canonical names.
	keyHeaders                []string
	hash                      string
	amountHash, recipientHash string
}
