// This file reads a call's identity. The same call must always give the same
// identity, and what cannot be read with certainty is refused: the one thing that
// may be missing is the lineage.

package policy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// MaxRecipientBytes bounds a recipient.
const MaxRecipientBytes = 253

// CallInput is a call as it came. Session and index come from the headers
// Holdfast-Session and Holdfast-Call.
type CallInput struct {
	Method string
	// Suffix is the path below the tool.
	Suffix string
	Query  url.Values
	Header http.Header
	Body   []byte
	// Agent is the caller.
	Agent string
	// IntentID is how the request's own path names the intent; empty: it does not.
	IntentID string
}

// Identity is what a call says of its intent.
type Identity struct {
	IntentID string
	Scope    intent.Scope
	// Lineage is empty if it is absent.
	Lineage intent.Path
	// Amount is nil if the tool declares none.
	Amount       *intent.Money
	Recipient    string
	Fingerprint  string
	IdentityHash string
	// AmountHash and RecipientHash are those of the parts of the identity block that
	// say how amount and recipient are read.
	AmountHash, RecipientHash string
}

// CallOf is what the guard is asked about an intent of this caller.
func (t *Tool) CallOf(id Identity, caller, uid string) guard.Call {
	return guard.Call{
		Key:       guard.Key{Namespace: t.Namespace, Tool: t.Name, Caller: caller, IntentID: id.IntentID},
		CallerUID: uid, Scope: id.Scope, Lineage: id.Lineage, Amount: id.Amount,
		Recipient: id.Recipient, Fingerprint: id.Fingerprint,
		IdentityHash: id.IdentityHash, AmountHash: id.AmountHash, RecipientHash: id.RecipientHash,
	}
}

// ErrReadOnly: a read-only tool has no intents.
var ErrReadOnly = errors.New("a ReadOnly tool has no intents")

// Identify reads the identity of a call. A call that cannot be identified is an
// *intent.InvalidError, whose text is for the caller. The other errors are ErrBusy,
// and ErrReadOnly of a tool that has no intents. With an error comes at most the
// intent ID, if it had been read.
func (t *Tool) Identify(in CallInput) (Identity, error) {
	if t.identity == nil {
		return Identity{}, fmt.Errorf("identifying a call of %s/%s: %w", t.Namespace, t.Name, ErrReadOnly)
	}
	i := t.identity
	c, err := newCall(in, i.volatile, i.keyHeaders)
	if err != nil {
		return Identity{}, err
	}
	ctx := &patience{}
	defer ctx.end()

	out := Identity{IdentityHash: i.hash, AmountHash: i.amountHash, RecipientHash: i.recipientHash}
	if out.IntentID, err = i.readIntentID(ctx, c, in.IntentID); err != nil {
		return Identity{}, err
	}
	if out.Scope, err = i.readScope(ctx, c); err != nil {
		return Identity{IntentID: out.IntentID}, err
	}
	if out.Lineage, err = i.readLineage(ctx, c); err != nil {
		return Identity{IntentID: out.IntentID}, err
	}
	if out.Amount, err = i.readAmount(ctx, c); err != nil {
		return Identity{IntentID: out.IntentID}, err
	}
	if out.Recipient, err = i.readRecipient(ctx, c); err != nil {
		return Identity{IntentID: out.IntentID}, err
	}
	volatile := i.volatile
	if c.rpc {
		volatile = i.rpcVolatile
	}
	out.Fingerprint, err = intent.Fingerprint(intent.Request{Method: in.Method, Suffix: in.Suffix, Query: in.Query, Body: c.read}, volatile)
	if err != nil {
		return Identity{IntentID: out.IntentID}, err
	}
	return out, nil
}

// readIntentID asks the sources in order; the first that yields wins. Where the path names
// the intent, none need yield; one that does must say the same.
func (i *identity) readIntentID(ctx context.Context, c *call, named string) (string, error) {
	for _, source := range i.intentID {
		v, err := source.eval(ctx, c)
		if err == nil && v == nil || isMissing(err) {
			continue
		}
		if err != nil {
			return "", source.failed("intent ID", err)
		}
		text, err := textOf(v)
		if err != nil {
			return "", source.failed("intent ID", err)
		}
		if strings.Trim(text, " \t") == "" {
			continue
		}
		id, err := intent.ParseIntentID(text)
		if err == nil && named != "" && id != named {
			return "", invalid("intent ID", "%s yields %q, and the path names %q: give the same one in both", clip(source.text), clip(id), clip(named))
		}
		return id, err
	}
	if named != "" {
		return named, nil
	}
	sources := make([]string, len(i.intentID))
	for n, source := range i.intentID {
		sources[n] = clip(source.text)
	}
	return "", invalid("intent ID", "the call names no intent: give one, and the same one on every retry, by %s", strings.Join(sources, " or "))
}

func (i *identity) readScope(ctx context.Context, c *call) (intent.Scope, error) {
	var paths []intent.Path
	for _, e := range i.scope {
		v, err := e.eval(ctx, c)
		if err != nil || v == nil {
			return nil, e.failed("scope", err)
		}
		more, err := pathsOf(v)
		if err != nil || len(more) == 0 {
			return nil, e.failed("scope", err)
		}
		paths = append(paths, more...)
	}
	return intent.NewScope(paths...)
}

// readLineage gives no lineage where it is missing or in error. Too much work is
// refused all the same: else a caller could rid itself of its lineage by the size
// of its call.
func (i *identity) readLineage(ctx context.Context, c *call) (intent.Path, error) {
	if i.lineage == nil {
		return "", nil
	}
	v, err := i.lineage.eval(ctx, c)
	if costly := (*tooCostly)(nil); errors.As(err, &costly) {
		return "", i.lineage.failed("lineage", err)
	}
	if p, ok := v.(pathValue); ok && err == nil {
		return p.Path, nil
	}
	return "", nil
}

func (i *identity) readAmount(ctx context.Context, c *call) (*intent.Money, error) {
	if i.amount == nil {
		return nil, nil
	}
	v, err := i.amount.eval(ctx, c)
	if err != nil || v == nil {
		return nil, i.amount.failed("amount", err)
	}
	if _, isPath := v.(pathValue); isPath {
		return nil, i.amount.failed("amount", errors.New("is a path: give a string or a number"))
	}
	value, err := textOf(v)
	if err != nil {
		return nil, i.amount.failed("amount", err)
	}
	v, err = i.currency.eval(ctx, c)
	if err != nil || v == nil {
		return nil, i.currency.failed("currency", err)
	}
	currency, ok := v.(types.String)
	if !ok {
		return nil, i.currency.failed("currency", fmt.Errorf("is a %s: give a string", v.Type().TypeName()))
	}
	money, err := intent.NewMoney(value, string(currency), i.unit)
	if err != nil {
		return nil, err
	}
	return &money, nil
}

// readRecipient gives none only where the expression says so, with an empty string
// or an empty optional: a field that is missing is an error.
func (i *identity) readRecipient(ctx context.Context, c *call) (string, error) {
	if i.recipient == nil {
		return "", nil
	}
	v, err := i.recipient.eval(ctx, c)
	if err == nil && v == nil {
		return "", nil
	}
	if err != nil {
		return "", i.recipient.failed("recipient", err)
	}
	text, err := textOf(v)
	if err != nil {
		return "", i.recipient.failed("recipient", err)
	}
	if err := checkRecipient(text); err != nil {
		return "", err
	}
	return text, nil
}

func checkRecipient(text string) error {
	switch {
	case len(text) > MaxRecipientBytes:
		return invalid("recipient", "has more than %d bytes: use a shorter one", MaxRecipientBytes)
	case !utf8.ValidString(text):
		return invalid("recipient", "is not valid UTF-8: send UTF-8")
	case strings.ContainsFunc(text, unicode.IsControl):
		return invalid("recipient", "holds a control character: remove it")
	}
	return nil
}

// textOf gives the text of a string, a number or a path.
func textOf(v ref.Val) (string, error) {
	if p, ok := v.(pathValue); ok {
		return string(p.Path), nil
	}
	return plainText(v)
}

// pathsOf gives a path, or those of a list.
func pathsOf(v ref.Val) ([]intent.Path, error) {
	if p, ok := v.(pathValue); ok {
		return []intent.Path{p.Path}, nil
	}
	list, ok := v.(traits.Lister)
	if !ok {
		return nil, notPath(v)
	}
	var out []intent.Path
	for it := list.Iterator(); it.HasNext() == types.True; {
		next := it.Next()
		p, ok := next.(pathValue)
		if !ok {
			return nil, notPath(next)
		}
		out = append(out, p.Path)
	}
	return out, nil
}

func notPath(v ref.Val) error {
	return fmt.Errorf("a %s is no path: only path() makes one", v.Type().TypeName())
}
