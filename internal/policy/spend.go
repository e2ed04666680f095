// This file is about the limits of a budget: for which value of `per` a call counts.
//
// `per` is CEL over `object`, the intent as a PaymentIntent would show it. It is compiled
// and bounded as the expressions of an identity are. Where it does not yield for a call,
// the call cannot be counted, and the guard refuses it.

package policy

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	celenv "github.com/google/cel-go/common/env"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/ext"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

const (
	maxSpendLimits = 8
	// maxPerBytes bounds a value of per.
	maxPerBytes = 1024
)

// Object is the intent as expressions over `object` see it.
type Object struct {
	Metadata ObjectMetadata `cel:"metadata"`
	Spec     ObjectSpec     `cel:"spec"`
}

// ObjectMetadata is object.metadata.
type ObjectMetadata struct {
	Namespace string `cel:"namespace"`
}

// ObjectSpec is object.spec.
type ObjectSpec struct {
	ToolRef     ObjectTool   `cel:"toolRef"`
	Caller      string       `cel:"caller"`
	IntentID    string       `cel:"intentID"`
	Scope       []string     `cel:"scope"`
	Lineage     string       `cel:"lineage"`
	Amount      ObjectAmount `cel:"amount"`
	Recipient   string       `cel:"recipient"`
	Fingerprint string       `cel:"fingerprint"`
}

// ObjectTool is object.spec.toolRef.
type ObjectTool struct {
	Name string `cel:"name"`
}

// ObjectAmount is object.spec.amount: value is an exact decimal, as text.
type ObjectAmount struct {
	Value    string `cel:"value"`
	Currency string `cel:"currency"`
}

// objectOf shows a call.
func objectOf(c *guard.Call) *Object {
	o := &Object{
		Metadata: ObjectMetadata{Namespace: c.Namespace},
		Spec: ObjectSpec{
			ToolRef: ObjectTool{Name: c.Tool}, Caller: c.Caller, IntentID: c.IntentID, Scope: make([]string, len(c.Scope)),
			Lineage: string(c.Lineage), Recipient: c.Recipient, Fingerprint: c.Fingerprint,
		},
	}
	for i, p := range c.Scope {
		o.Spec.Scope[i] = string(p)
	}
	if c.Amount != nil {
		o.Spec.Amount = ObjectAmount{Value: c.Amount.Value, Currency: c.Amount.Currency}
	}
	return o
}

// objectEnvironment is what expressions over `object` are compiled in.
var objectEnvironment = sync.OnceValues(func() (*cel.Env, error) {
	standard := celenv.NewLibrarySubset()
	return cel.NewCustomEnv(
		cel.StdLib(cel.StdLibSubset(standard)),
		cel.OptionalTypes(),
		ext.Strings(ext.StringsVersion(4)),
		ext.NativeTypes(reflect.TypeFor[Object](), ext.ParseStructTags(true)),
		cel.EagerlyValidateDeclarations(true),
		cel.ParserExpressionSizeLimit(maxExpression),
		cel.Variable("object", cel.ObjectType("policy.Object")),
	)
})

// fields gives what the plainest expressions yield, without CEL.
var fields = map[string]func(*guard.Call) string{
	ownSpend:                   func(c *guard.Call) string { return c.Caller },
	"object.spec.recipient":    func(c *guard.Call) string { return c.Recipient },
	"object.spec.toolRef.name": func(c *guard.Call) string { return c.Tool },
}

// ownSpend is a limit in which a caller meets nobody else's spend.
const ownSpend = "object.spec.caller"

// spendLimit is a compiled limit.
type spendLimit struct {
	guard.SpendLimit
	text    string
	field   func(*guard.Call) string
	program cel.Program
}

// spendField is where a limit stands in the budget's spec.
func spendField(i int, name string) string { return fmt.Sprintf("spec.spend[%d].%s", i, name) }

// compileSpend compiles the limits of a budget.
func compileSpend(spec []v1alpha1.SpendLimit) ([]spendLimit, error) {
	if len(spec) > maxSpendLimits {
		return nil, specError("spec.spend", "has more than %d limits", maxSpendLimits)
	}
	var out []spendLimit
	for i := range spec {
		s := &spec[i]
		if s.Name == "" || slices.ContainsFunc(spec[:i], func(o v1alpha1.SpendLimit) bool { return o.Name == s.Name }) {
			return nil, specError(spendField(i, "name"), "%q is empty, or comes twice", clip(s.Name))
		}
		limit, err := intent.NewMoney(s.Limit, s.Currency, intent.UnitMajor)
		if err != nil {
			return nil, specError(spendField(i, "limit"), "%s %s: %v", clip(s.Limit), clip(s.Currency), err)
		}
		window, err := duration(spendField(i, "window"), &s.Window, 0, boundsSpendWindow)
		if err != nil {
			return nil, err
		}
		l := spendLimit{SpendLimit: guard.SpendLimit{Name: s.Name, Amount: limit, Window: window}, text: strings.TrimSpace(s.Per)}
		switch or(s.OnExceed, v1alpha1.ExceedDeny) {
		case v1alpha1.ExceedDeny:
		case v1alpha1.ExceedHold:
			l.Hold = true
		default:
			return nil, specError(spendField(i, "onExceed"), "%q is not known: use %s or %s", s.OnExceed, v1alpha1.ExceedDeny, v1alpha1.ExceedHold)
		}
		if s.Per != "" {
			// Until it was asked for a call, nothing can be counted.
			l.Own, l.Unknown, l.field = l.text == ownSpend, "for which "+l.text+" it counts was not asked", fields[l.text]
			if l.program, err = compilePer(spendField(i, "per"), s.Per); err != nil {
				return nil, err
			}
		}
		out = append(out, l)
	}
	return out, nil
}

// compilePer compiles an expression over `object` that yields a string.
func compilePer(field, source string) (cel.Program, error) {
	env, err := objectEnvironment()
	if err != nil {
		return nil, fmt.Errorf("making the environment of expressions: %w", err)
	}
	if strings.TrimSpace(source) == "" {
		return nil, specError(field, "is empty: write an expression, or leave the field out")
	}
	checked, issues := env.Compile(source)
	if issues.Err() != nil {
		return nil, located(field, issues)
	}
	if err := visit(field, checked.NativeRep(), func(x ast.Expr, refuse refusal) {
		switch x.Kind() {
		case ast.StructKind:
			refuse(x, "messages cannot be made here")
		case ast.CallKind:
			if name := x.AsCall().FunctionName(); !functions[name] {
				refuse(x, "the function %s is not available here", displayName(name))
			}
		}
	}); err != nil {
		return nil, err
	}
	if !checked.OutputType().IsExactType(cel.StringType) {
		return nil, specError(field, "yields %s, but must yield a string", typeName(checked.OutputType()))
	}
	estimate, err := env.EstimateCost(checked, estimator{})
	if err != nil {
		return nil, specError(field, "its cost cannot be estimated: %v", err)
	}
	if estimate.Min > costLimit {
		return nil, specError(field, "costs at least %d, but only %d is allowed: make it simpler", estimate.Min, costLimit)
	}
	program, err := env.Program(checked,
		cel.EvalOptions(cel.OptOptimize), cel.CostTracking(costs{}), cel.CostLimit(costLimit), cel.InterruptCheckFrequency(16))
	if err != nil {
		return nil, specError(field, "cannot be planned: %v", err)
	}
	return program, nil
}

// GuardFor is the guard's policy for one call: with the limits of its budget as they
// stand for it.
func (t *Tool) GuardFor(c *guard.Call) guard.Policy {
	if len(t.spend) == 0 {
		return t.Guard
	}
	of := *c // so that a call without limits has no other memory
	return t.Guard.WithSpend(t.spendOf(&of))
}

// spendOf are the limits as they stand for a call.
func (t *Tool) spendOf(c *guard.Call) []guard.SpendLimit {
	ctx := &patience{}
	defer ctx.end()
	var object *Object
	limits := make([]guard.SpendLimit, len(t.spend))
	for i := range t.spend {
		l := &t.spend[i]
		limits[i] = l.SpendLimit
		out := &limits[i]
		switch {
		case l.program == nil:
			continue
		case l.field != nil:
			out.Per, out.Unknown = l.field(c), ""
		default:
			if object == nil {
				object = objectOf(c)
			}
			out.Per, out.Unknown = l.valueOf(ctx, object)
		}
		if len(out.Per) > maxPerBytes {
			out.Per, out.Unknown = "", fmt.Sprintf("%s yields more than %d bytes", clip(l.text), maxPerBytes)
		}
	}
	return limits
}

// valueOf evaluates per by CEL. unknown says why it does not yield.
func (l *spendLimit) valueOf(ctx *patience, object *Object) (value, unknown string) {
	v, _, err := l.program.ContextEval(ctx, map[string]any{"object": object})
	if err != nil {
		return "", fmt.Sprintf("%s does not yield for it: %s", clip(l.text), clip(err.Error()))
	}
	s, ok := v.(types.String)
	if !ok {
		return "", fmt.Sprintf("%s yields no string for it", clip(l.text))
	}
	return string(s), ""
}
