// This file is about the admission rules of a tool: CEL over `object`, the intent as a
// PaymentIntent shows it, compiled and evaluated as the API server does it for its
// admission policies, so that a rule says here what it says there.
//
// What is refused here although the API server would take it is what could make the two
// differ, or lose money: whatever of an object only the API server knows, and numbers that
// are not exact. An expression that fails, or is too much work, denies.

package policy

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/interpreter"
	"k8s.io/apimachinery/pkg/util/version"
	apiserver "k8s.io/apiserver/pkg/cel/environment"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	maxAdmissionRules = 10
	// ruleCostLimit is how much work one rule may do, in the API server's units; there the
	// limit is ten times as high. A rule that compares a handful of fields costs tens.
	ruleCostLimit = 100_000
	// maxRuleMessage bounds a message, in bytes: the schema counts characters.
	maxRuleMessage = 4 * 512
)

// AdmissionRule is one compiled rule.
type AdmissionRule struct {
	Expression, Message string
	Hold                bool
	program             cel.Program
}

// ruleEnvironment is what the API server compiles admission policies in, at the lowest
// version that it supports together with this one, with nothing but the object.
var ruleEnvironment = sync.OnceValues(func() (*cel.Env, error) {
	set, err := apiserver.MustBaseEnvSet(apiserver.DefaultCompatibilityVersion()).Extend(apiserver.VersionedOptions{
		IntroducedVersion: version.MajorMinor(1, 0),
		EnvOptions:        []cel.EnvOption{cel.Variable(objectVariable, cel.DynType)},
	}, apiserver.StrictCostOpt)
	if err != nil {
		return nil, err
	}
	return set.NewExpressionsEnv(), nil
})

const objectVariable = "object"

// shown are the fields of an object that a rule may read: those that every way to an
// intent gives it.
var shown = map[string]map[string]bool{
	"object":              {"metadata": true, "spec": true},
	"object.metadata":     {"namespace": true},
	"object.spec":         {"toolRef": true, "caller": true, "intentID": true, "scope": true, "lineage": true, "amount": true, "recipient": true, "fingerprint": true},
	"object.spec.toolRef": {"name": true},
	"object.spec.amount":  {"value": true, "currency": true},
}

// wholes cannot be taken as they are: which fields they have depends on who asks.
var wholes = map[string]bool{"object": true, "object.metadata": true, "object.spec": true}

// inexact are functions of the API server's environment that go through a float.
var inexact = map[string]string{"double": "quantity", "asApproximateFloat": "quantity"}

// CompileAdmission compiles the rules of a tool. What is wrong with one is a *SpecError.
func CompileAdmission(spec []v1alpha1.AdmissionRule) ([]AdmissionRule, error) {
	if len(spec) > maxAdmissionRules {
		return nil, specError("spec.admission", "has more than %d rules", maxAdmissionRules)
	}
	var out []AdmissionRule
	for i, s := range spec {
		field := fmt.Sprintf("spec.admission[%d]", i)
		r := AdmissionRule{Expression: string(s.Expression), Message: strings.TrimSpace(s.Message)}
		if r.Message == "" || len(r.Message) > maxRuleMessage || strings.ContainsAny(r.Message, "\n\r") {
			return nil, specError(field+".message", "must be one line of 1 to 512 characters that says what the rule is for")
		}
		switch s.Action {
		case v1alpha1.AdmissionDeny:
		case v1alpha1.AdmissionHold:
			r.Hold = true
		default:
			return nil, specError(field+".action", "%q is not known: use %s or %s", s.Action, v1alpha1.AdmissionDeny, v1alpha1.AdmissionHold)
		}
		var err error
		if r.program, err = compileRule(field+".expression", r.Expression); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func compileRule(field, source string) (cel.Program, error) {
	env, err := ruleEnvironment()
	if err != nil {
		return nil, fmt.Errorf("making the environment of admission rules: %w", err)
	}
	if strings.TrimSpace(source) == "" {
		return nil, specError(field, "is empty: write an expression that is true for what may pass")
	}
	if len([]rune(source)) > maxExpression {
		return nil, specError(field, "has more than %d characters", maxExpression)
	}
	parsed, issues := env.Parse(source)
	if issues.Err() != nil {
		return nil, located(field, issues)
	}
	if err := refuseHidden(field, parsed.NativeRep()); err != nil {
		return nil, err
	}
	checked, issues := env.Check(parsed)
	if issues.Err() != nil {
		return nil, located(field, issues)
	}
	// A value of a type that only the object tells is refused by the API server, too.
	if !checked.OutputType().IsExactType(cel.BoolType) {
		return nil, specError(field, "yields %s, but must yield true or false", typeName(checked.OutputType()))
	}
	program, err := env.Program(checked, cel.CostLimit(ruleCostLimit), cel.InterruptCheckFrequency(16))
	if err != nil {
		return nil, specError(field, "cannot be planned: %v", err)
	}
	return program, nil
}

// refuseHidden refuses what only the API server knows of an object, and floats.
func refuseHidden(field string, tree *ast.AST) error {
	// Whose field is read is seen before what it is read of.
	read := map[int64]bool{}
	return visit(field, tree, func(x ast.Expr, refuse refusal) {
		if path := pathOf(x); path != "" && wholes[path] && !read[x.ID()] {
			refuse(x, "%s can only be read field by field: write %s", path, example(path))
			return
		}
		operand, name := selected(x)
		if operand != nil {
			read[operand.ID()] = true
			of := pathOf(operand)
			if fields := shown[of]; fields != nil && !fields[name] {
				refuse(x, "%s has no field %q that every intent shows", of, name)
			}
			return
		}
		switch x.Kind() {
		case ast.LiteralKind:
			if _, double := x.AsLiteral().(types.Double); double {
				refuse(x, `a floating-point number is not exact: write quantity("…"), with the number as a string`)
			}
		case ast.StructKind:
			refuse(x, "messages cannot be made here")
		case ast.CallKind:
			if use := inexact[x.AsCall().FunctionName()]; use != "" {
				refuse(x, "the function %s is not exact: use %s and its comparisons", x.AsCall().FunctionName(), use)
			}
		}
	})
}

// selected gives what a field is read of, and its name: x.name, has(x.name) and x.?name.
func selected(x ast.Expr) (ast.Expr, string) {
	switch x.Kind() {
	case ast.SelectKind:
		return x.AsSelect().Operand(), x.AsSelect().FieldName()
	case ast.CallKind:
		c := x.AsCall()
		if c.FunctionName() == operators.OptSelect && len(c.Args()) == 2 {
			if name, ok := c.Args()[1].AsLiteral().(types.String); ok {
				return c.Args()[0], string(name)
			}
		}
	}
	return nil, ""
}

// pathOf writes a chain of fields from the object on; "": it is none.
func pathOf(x ast.Expr) string {
	if x.Kind() == ast.IdentKind && x.AsIdent() == objectVariable {
		return objectVariable
	}
	operand, name := selected(x)
	if operand == nil {
		return ""
	}
	if of := pathOf(operand); of != "" {
		return of + "." + name
	}
	return ""
}

func example(path string) string {
	switch path {
	case "object.metadata":
		return "object.metadata.namespace"
	default:
		return "object.spec.recipient"
	}
}

// shownAs is the object in the form of the API server's: a field that is absent is not there.
func (o *Object) shownAs() map[string]any {
	scope := make([]any, len(o.Spec.Scope))
	for i, p := range o.Spec.Scope {
		scope[i] = p
	}
	spec := map[string]any{
		"toolRef": map[string]any{"name": o.Spec.ToolRef.Name}, "caller": o.Spec.Caller, "intentID": o.Spec.IntentID, "scope": scope,
	}
	for name, value := range map[string]string{"lineage": o.Spec.Lineage, "recipient": o.Spec.Recipient, "fingerprint": o.Spec.Fingerprint} {
		if value != "" {
			spec[name] = value
		}
	}
	if a := o.Spec.Amount; a.Value != "" {
		spec["amount"] = map[string]any{"value": a.Value, "currency": a.Currency}
	}
	return map[string]any{"metadata": map[string]any{"namespace": o.Metadata.Namespace}, "spec": spec}
}

// Ruling asks the rules about a call.
func Ruling(rules []AdmissionRule, c *guard.Call) (guard.Ruling, error) {
	ctx := &patience{}
	defer ctx.end()
	over := map[string]any{objectVariable: objectOf(c).shownAs()}
	var out guard.Ruling
	var holds []string
	// Those that deny come first, as if there were no others: so the API server sees them.
	for _, hold := range []bool{false, true} {
		for i := range rules {
			r := &rules[i]
			if r.Hold != hold {
				continue
			}
			passes, why, err := r.asked(ctx, over)
			switch {
			case err != nil:
				return guard.Ruling{}, err
			case passes:
			case why != "":
				// Nobody can tell whether it would pass.
				return guard.Ruling{Deny: why}, nil
			case !hold:
				return guard.Ruling{Deny: r.Message}, nil
			default:
				holds = append(holds, r.Message)
			}
		}
	}
	out.Hold = strings.Join(holds, "; ")
	return out, nil
}

// asked evaluates one rule. why says that it fails for this object.
func (r *AdmissionRule) asked(ctx *patience, over map[string]any) (passes bool, why string, err error) {
	v, _, err := r.program.ContextEval(ctx, over)
	if err != nil {
		var cancelled interpreter.EvalCancelledError
		byCost := errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded
		if !byCost && (errors.As(err, &cancelled) || errors.Is(err, interpreter.InterruptError{})) {
			return false, "", ErrBusy
		}
		return false, fmt.Sprintf("expression '%s' resulted in error: %v", r.Expression, err), nil
	}
	return v == types.True, "", nil
}
