// This file writes an intent down before it is sent: PUT at the intent's own URL. Nothing
// is sent, and the same PUT again is told what became of it.

package gateway

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// maxQuote bounds the name of an offer, as a PaymentIntent does.
const maxQuote = 1024

// registration is what a caller says of an intent.
type registration struct {
	Scope       []string      `json:"scope"`
	Lineage     string        `json:"lineage"`
	Amount      *intent.Money `json:"amount"`
	Recipient   string        `json:"recipient"`
	Fingerprint string        `json:"fingerprint"`
	Quote       string        `json:"quote"`
	ValidUntil  *time.Time    `json:"valid_until"`
}

// readRegistration takes what is known, and refuses what is not: a field that is misspelt
// would be one that does not count.
func readRegistration(body []byte) (registration, error) {
	var out registration
	bad := func(reason string) (registration, error) {
		return registration{}, &intent.InvalidError{Field: "registration", Reason: reason}
	}
	unread, err := decodeExactly(body, &out)
	if unread {
		return registration{}, err
	}
	if err != nil {
		var kind *json.UnmarshalTypeError
		switch {
		case errors.As(err, &kind) && kind.Field == "":
			return bad("is no JSON object: send one with scope, and with amount and recipient where the tool has them")
		case errors.As(err, &kind):
			return bad("has a field " + kind.Field + " that is not as it should be: scope is a list of paths, amount an object of two strings, value and currency")
		}
		return bad("cannot be read: send a JSON object of scope, lineage, amount, recipient, fingerprint, quote and valid_until (RFC 3339), and no others")
	}
	if len(out.Quote) > maxQuote {
		return bad("has a quote that is too long: use its name")
	}
	return out, nil
}

// register writes the intent down, and says what a call of it would be told.
func (c *call) register(tool *policy.Tool) *problem {
	c.intent = c.intentID
	if !tool.Mutating {
		p := refusal(http.StatusBadRequest, "invalid-request", "The tool has no intents", actFixRequest, "The tool %q is ReadOnly: its calls need no registration.", c.tool)
		p.Reason = "read_only"
		return p
	}
	defer c.move(nil)
	body, p := c.receive()
	if p != nil {
		return p
	}
	in, err := readRegistration(body)
	if err != nil {
		return c.failure(err, tool)
	}
	said := policy.Stated{
		IntentID: c.intentID, Scope: in.Scope, Lineage: in.Lineage, Recipient: in.Recipient, Fingerprint: in.Fingerprint,
	}
	if m := in.Amount; m != nil {
		said.Amount = &policy.StatedAmount{Value: m.Value, Currency: m.Currency}
	}
	id, err := tool.IdentifyStated(said)
	if err != nil {
		return c.failure(err, tool)
	}
	engine, err := c.g.o.Engines.Get(tool.Namespace, tool.Store)
	if err != nil {
		return c.failure(err, tool)
	}
	wanted := tool.CallOf(id, c.caller.Username, c.caller.UID)
	g := guard.Registration{Quote: in.Quote}
	if in.ValidUntil != nil {
		g.ValidUntil = *in.ValidUntil
	}
	a, err := engine.Register(c.r.Context(), wanted, g, "", tool.GuardFor(&wanted))
	if err != nil && c.r.Context().Err() != nil {
		c.abandon() // what was written is told when it comes back
	}
	if err != nil {
		return c.failure(err, tool)
	}
	if (a.Verdict == guard.Allow || a.Verdict == guard.Replay) && c.owns(a) {
		c.note(a)
		return c.show(http.StatusOK, c.document(a), http.Header{})
	}
	return c.tell(a, tool)
}
