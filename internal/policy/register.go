// This file reads what is said of an intent before it is called. A registration that the
// tool's calls could never agree with is refused at once.

package policy

import (
	"fmt"
	"regexp"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// Stated is an intent as whoever registers it writes it down.
type Stated struct {
	IntentID  string
	Scope     []string
	Lineage   string
	Amount    *StatedAmount
	Recipient string
	// Fingerprint is empty where the first call says it.
	Fingerprint string
}

// StatedAmount is an amount in the currency itself.
type StatedAmount struct{ Value, Currency string }

var fingerprintForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// IdentifyStated reads the identity of an intent that is registered. What cannot be
// registered is an *intent.InvalidError, whose text is for whoever registers.
func (t *Tool) IdentifyStated(in Stated) (Identity, error) {
	if t.identity == nil {
		return Identity{}, fmt.Errorf("identifying an intent of %s/%s: %w", t.Namespace, t.Name, ErrReadOnly)
	}
	i := t.identity
	out := Identity{IdentityHash: i.hash, AmountHash: i.amountHash, RecipientHash: i.recipientHash, Fingerprint: in.Fingerprint, Recipient: in.Recipient}
	var err error
	if out.IntentID, err = intent.ParseIntentID(in.IntentID); err != nil {
		return Identity{}, err
	}
	paths := make([]intent.Path, len(in.Scope))
	for n, p := range in.Scope {
		paths[n] = intent.Path(p) // NewScope looks at it
	}
	if out.Scope, err = intent.NewScope(paths...); err != nil {
		return Identity{}, err
	}
	switch {
	case in.Lineage == "":
	case i.lineage == nil:
		return Identity{}, invalid("lineage", "is given, but no call of this tool has one, since its identity does not read it: leave it out")
	default:
		if out.Lineage, err = intent.ParsePath(in.Lineage); err != nil {
			return Identity{}, err
		}
	}
	switch {
	case in.Amount == nil && i.amount != nil:
		return Identity{}, invalid("amount", "is missing: say how much is to be moved, and in which currency")
	case in.Amount != nil && i.amount == nil:
		return Identity{}, invalid("amount", "is given, but no call of this tool has one, since its identity does not read it: leave it out")
	case in.Amount != nil:
		money, err := intent.NewMoney(in.Amount.Value, in.Amount.Currency, intent.UnitMajor)
		if err != nil {
			return Identity{}, err
		}
		out.Amount = &money
	}
	if in.Recipient != "" && i.recipient == nil {
		return Identity{}, invalid("recipient", "is given, but no call of this tool has one, since its identity does not read it: leave it out")
	}
	if err := checkRecipient(in.Recipient); err != nil {
		return Identity{}, err
	}
	if in.Fingerprint != "" && !fingerprintForm.MatchString(in.Fingerprint) {
		return Identity{}, invalid("fingerprint", "is not one: write it like sha256: and 64 hexadecimal digits in lower case, or leave it out")
	}
	return out, nil
}
