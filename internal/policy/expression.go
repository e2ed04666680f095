// This file is about expressions: CEL over the variable `call`, compiled once.
//
// An expression is written by a tool's owner and reads what a caller sends, and
// neither may stop the gateway: so only functions that are listed here exist, each
// takes time and memory linear in what it reads, what they do is counted against
// a limit, and a clock ends what counting has missed.
//
// An evaluation ends in one of five ways: with a value; with nothing, because the
// expression says so; with a field of the call missing; with another error; or with
// too much work, which is always a refusal.

package policy

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"
	"github.com/google/cel-go/common/ast"
	celenv "github.com/google/cel-go/common/env"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"github.com/google/cel-go/ext"
	"github.com/google/cel-go/interpreter"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

const (
	// maxExpression is the longest expression, in characters.
	maxExpression = 1024
	// costLimit is how much work one evaluation may do, in CEL's units: a field
	// access, a call, or ten characters read or made, each cost about one.
	costLimit = 20_000
	// evaluationTime bounds all evaluations of one call. The cost limit ends them
	// long before, on any machine that is not overloaded.
	evaluationTime = 2 * time.Second
)

// functions are all that an expression may call. Regular expressions, replace,
// join and format are not among them: their time or their result can be far
// greater than what they read.
var functions = map[string]bool{
	operators.LogicalAnd: true, operators.LogicalOr: true, operators.LogicalNot: true, operators.Conditional: true,
	operators.Equals: true, operators.NotEquals: true, operators.In: true,
	operators.Index: true, operators.OptIndex: true, operators.OptSelect: true,
	operators.Less: true, operators.LessEquals: true, operators.Greater: true, operators.GreaterEquals: true,
	operators.Add: true, operators.Subtract: true, operators.Multiply: true, operators.Modulo: true, operators.Negate: true,
	operators.NotStrictlyFalse: true,

	"path": true, "number": true, "string": true, "int": true, "size": true,
	"contains": true, "startsWith": true, "endsWith": true, "indexOf": true, "lastIndexOf": true,
	"lowerAscii": true, "upperAscii": true, "trim": true, "split": true, "substring": true, "charAt": true,
	"optional.of": true, "optional.none": true, "optional.ofNonZeroValue": true,
	"hasValue": true, "value": true, "or": true, "orValue": true, "first": true, "last": true, "unwrap": true, "unwrapOpt": true,
}

var pathType = cel.OpaqueType("path")

// pathValue is a path. It is a type of its own, so that no text that a caller
// sends is taken for one: a "/" in it would reach into another scope.
type pathValue struct{ intent.Path }

func (p pathValue) ConvertToNative(to reflect.Type) (any, error) {
	if to == reflect.TypeFor[intent.Path]() {
		return p.Path, nil
	}
	return nil, fmt.Errorf("a path cannot be read as %v", to)
}

func (p pathValue) ConvertToType(to ref.Type) ref.Val {
	switch to.TypeName() {
	case pathType.TypeName():
		return p
	case types.StringType.TypeName():
		return types.String(p.Path)
	case types.TypeType.TypeName():
		return pathType
	}
	return types.NewErr("a path cannot be converted to %s", to.TypeName())
}

func (p pathValue) Equal(other ref.Val) ref.Val {
	o, ok := other.(pathValue)
	return types.Bool(ok && p.Path == o.Path)
}

func (p pathValue) Type() ref.Type { return pathType }

func (p pathValue) Value() any { return p.Path }

// environment is what expressions over a call are compiled in.
var environment = sync.OnceValues(func() (*cel.Env, error) {
	return newEnvironment(cel.Variable("call", cel.ObjectType(callTypeName)))
})

// newEnvironment knows the functions of all expressions, and these variables.
func newEnvironment(variables ...cel.EnvOption) (*cel.Env, error) {
	registry, err := types.NewRegistry()
	if err != nil {
		return nil, err
	}
	standard := celenv.NewLibrarySubset()
	for _, name := range redefined {
		standard.AddExcludedFunctions(celenv.NewFunction(name))
	}
	pathOverloads := []cel.FunctionOpt{cel.SingletonFunctionBinding(makePath)}
	for n := 1; n <= intent.MaxSegments; n++ {
		segments := make([]*cel.Type, n)
		for i := range segments {
			segments[i] = cel.DynType
		}
		pathOverloads = append(pathOverloads, cel.Overload(fmt.Sprintf("path_%d", n), segments, pathType))
	}
	options := []cel.EnvOption{
		cel.CustomTypeProvider(celTypes{registry}),
		cel.CustomTypeAdapter(celTypes{registry}),
		cel.StdLib(cel.StdLibSubset(standard)),
		cel.OptionalTypes(),
		ext.Strings(ext.StringsVersion(4)),
		cel.EagerlyValidateDeclarations(true),
		cel.ParserExpressionSizeLimit(maxExpression),
		cel.Function("path", pathOverloads...),
	}
	return cel.NewCustomEnv(slices.Concat(options, variables, numberFunctions())...)
}

// missingType is the type of the error by which CEL says that a key or an index is
// missing. It has no name outside of its package, so it is taken from a sample.
var missingType = sync.OnceValues(func() (reflect.Type, error) {
	env, err := environment()
	if err != nil {
		return nil, err
	}
	checked, issues := env.Compile(`call.query["missing"]`)
	if issues.Err() != nil {
		return nil, issues.Err()
	}
	program, err := env.Program(checked)
	if err != nil {
		return nil, err
	}
	_, _, err = program.Eval(&call{query: map[string]any{}})
	for next := errors.Unwrap(err); next != nil; next = errors.Unwrap(err) {
		err = next
	}
	if err == nil {
		return nil, errors.New("a missing key is no error")
	}
	return reflect.TypeOf(err), nil
})

func isMissing(err error) bool {
	missing, typeErr := missingType()
	if typeErr != nil {
		return false
	}
	for ; err != nil; err = errors.Unwrap(err) {
		if errors.Is(err, errAbsent) || reflect.TypeOf(err) == missing {
			return true
		}
	}
	return false
}

// makePath is path(a, b, …).
func makePath(args ...ref.Val) ref.Val {
	segments := make([]string, len(args))
	for i, arg := range args {
		if o, ok := arg.(*types.Optional); ok {
			if !o.HasValue() {
				return types.WrapErr(errAbsent)
			}
			arg = o.GetValue()
		}
		segment, err := plainText(arg)
		if err != nil {
			return types.WrapErr(invalid("path", "segment %d %v", i+1, err))
		}
		segments[i] = segment
	}
	p, err := intent.NewPath(segments...)
	if err != nil {
		return types.WrapErr(err)
	}
	return pathValue{p}
}

// plainText gives the text of a string or a number.
func plainText(v ref.Val) (string, error) {
	switch v := v.(type) {
	case types.String:
		return string(v), nil
	case types.Int:
		return intent.SegmentText(int64(v))
	case types.Uint:
		return intent.SegmentText(uint64(v))
	case number:
		return intent.SegmentText(v.Number)
	case types.Null:
		return "", errors.New("is null: give a string or a number")
	case types.Double:
		return "", errors.New("is a floating-point number, which is not exact: give an integer, a decimal or a string")
	}
	return "", fmt.Errorf("is a %s: give a string or a number", v.Type().TypeName())
}

// expression is one expression of a spec.
type expression struct {
	// name is how it is called in errors: "identity.scope[0]".
	name    string
	text    string
	program cel.Program
	// direct gives the same without CEL where it can; nil: it never can.
	direct direct
	// headers are those that it names.
	headers []string
}

// yields is what an expression may yield.
type yields struct {
	types []*cel.Type
	// fromCall: also what the call holds, whose type only the call tells. No call
	// holds a path.
	fromCall bool
	words    string
}

var (
	yieldsID        = yields{[]*cel.Type{cel.StringType, cel.IntType, numberType, pathType}, true, "a string, a number or a path"}
	yieldsAmount    = yields{[]*cel.Type{cel.StringType, cel.IntType, numberType}, true, "a string or a number"}
	yieldsText      = yields{[]*cel.Type{cel.StringType}, true, "a string"}
	yieldsPath      = yields{[]*cel.Type{pathType}, false, `a path: write path("…", …)`}
	yieldsPathOrSet = yields{[]*cel.Type{pathType, cel.ListType(pathType)}, false, `a path or a list of paths: write path("…", …)`}
)

// compileExpression compiles what stands at a field of the spec, over a call.
func compileExpression(field, source string, want yields) (*expression, error) {
	env, err := environment()
	if err != nil {
		return nil, fmt.Errorf("making the environment of expressions: %w", err)
	}
	e, tree, err := compileIn(env, field, source, want, (*expression).header)
	if err != nil {
		return nil, err
	}
	e.direct = directOf(tree.Expr())
	return e, nil
}

// compileIn compiles an expression in an environment. seeHeader is asked about each header that it names.
func compileIn(env *cel.Env, field, source string, want yields, seeHeader headerRule) (*expression, *ast.AST, error) {
	if strings.TrimSpace(source) == "" {
		return nil, nil, specError(field, "is empty: write an expression, or leave the field out where it is optional")
	}
	parsed, issues := env.Parse(source)
	if issues.Err() != nil {
		return nil, nil, located(field, issues)
	}
	// Before types are checked: no operator takes a double, so the type checker
	// would refuse it in other words.
	if err := refuseDoubles(field, parsed.NativeRep()); err != nil {
		return nil, nil, err
	}
	checked, issues := env.Check(parsed)
	if issues.Err() != nil {
		return nil, nil, located(field, issues)
	}
	e := &expression{name: strings.TrimPrefix(field, "spec."), text: source}
	if err := e.inspect(field, checked.NativeRep(), seeHeader); err != nil {
		return nil, nil, err
	}
	if !want.allow(checked.OutputType()) {
		return nil, nil, specError(field, "yields %s, but must yield %s", typeName(checked.OutputType()), want.words)
	}
	estimate, err := env.EstimateCost(checked, estimator{})
	if err != nil {
		return nil, nil, specError(field, "its cost cannot be estimated: %v", err)
	}
	if estimate.Min > costLimit {
		return nil, nil, specError(field, "costs at least %d, but only %d is allowed: make it simpler", estimate.Min, costLimit)
	}
	e.program, err = env.Program(checked,
		cel.EvalOptions(cel.OptOptimize),
		cel.CostTracking(costs{}),
		cel.CostLimit(costLimit),
		cel.InterruptCheckFrequency(16))
	if err != nil {
		return nil, nil, specError(field, "cannot be planned: %v", err)
	}
	return e, checked.NativeRep(), nil
}

// allow says whether a value of a type, or of an optional of it, may be wanted.
func (y yields) allow(t *cel.Type) bool {
	if t.TypeName() == types.OptionalType.TypeName() && len(t.Parameters()) == 1 {
		t = t.Parameters()[0]
	}
	if t.Kind() == types.DynKind || t.Kind() == types.TypeParamKind {
		return y.fromCall
	}
	for _, w := range y.types {
		if w.IsExactType(t) {
			return true
		}
	}
	return false
}

func typeName(t *cel.Type) string {
	if t.Kind() == types.DynKind {
		return "what the caller sends"
	}
	return "a value of type " + cel.FormatCELType(t)
}

// located is the first of the compiler's errors.
func located(field string, issues *cel.Issues) error {
	first := issues.Errors()[0]
	return specError(field, "line %d, column %d: %s", first.Location.Line(), first.Location.Column()+1, first.Message)
}

// visit calls see for every part of an expression, and gives the first refusal.
func visit(field string, tree *ast.AST, see func(x ast.Expr, refuse refusal)) error {
	var found error
	refuse := func(at ast.Expr, format string, args ...any) {
		if found == nil {
			position := tree.SourceInfo().GetStartLocation(at.ID())
			found = specError(field, "line %d, column %d: %s", position.Line(), position.Column()+1, fmt.Sprintf(format, args...))
		}
	}
	ast.PreOrderVisit(tree.Expr(), ast.NewExprVisitor(func(x ast.Expr) { see(x, refuse) }))
	return found
}

type refusal func(at ast.Expr, format string, args ...any)

func refuseDoubles(field string, tree *ast.AST) error {
	return visit(field, tree, func(x ast.Expr, refuse refusal) {
		if _, double := x.AsLiteral().(types.Double); double && x.Kind() == ast.LiteralKind {
			refuse(x, `a floating-point number is not exact: write number("…"), with the number as a string`)
		}
	})
}

// headerRule is asked about a header that an expression names.
type headerRule func(e *expression, at ast.Expr, name string, refuse refusal)

// inspect refuses what the type checker lets pass.
func (e *expression) inspect(field string, tree *ast.AST, seeHeader headerRule) error {
	return visit(field, tree, func(x ast.Expr, refuse refusal) {
		switch x.Kind() {
		case ast.StructKind:
			refuse(x, "messages cannot be made here")
		case ast.CallKind:
			c := x.AsCall()
			if !functions[c.FunctionName()] {
				refuse(x, "the function %s is not available here", displayName(c.FunctionName()))
				return
			}
			if len(c.Args()) != 2 || c.FunctionName() != operators.Index && c.FunctionName() != operators.OptIndex && c.FunctionName() != operators.OptSelect {
				return
			}
			if name, ok := c.Args()[1].AsLiteral().(types.String); ok && isHeaders(c.Args()[0]) {
				seeHeader(e, x, string(name), refuse)
			}
		case ast.SelectKind:
			if s := x.AsSelect(); isHeaders(s.Operand()) {
				seeHeader(e, x, s.FieldName(), refuse)
			}
		}
	})
}

func displayName(function string) string {
	if name, ok := operators.FindReverse(function); ok && name != "" {
		return name
	}
	return function
}

func isHeaders(x ast.Expr) bool {
	if x.Kind() != ast.SelectKind || x.AsSelect().FieldName() != "header" {
		return false
	}
	operand := x.AsSelect().Operand()
	return operand.Kind() == ast.IdentKind && (operand.AsIdent() == "call" || operand.AsIdent() == "response")
}

func (e *expression) header(at ast.Expr, name string, refuse refusal) {
	switch lower := strings.ToLower(name); {
	case lower != name:
		refuse(at, "header names are in lower case here: write %q", lower)
	case hiddenHeader(name):
		refuse(at, "the header %s is never part of an identity: it names who calls or how, not what for", name)
	default:
		e.headers = append(e.headers, name)
	}
}

// ErrBusy: the evaluation was ended by the clock. That says something of the
// machine and not of the call, so the caller may try again.
var ErrBusy = errors.New("reading the call took too long: try again later")

// tooCostly is an evaluation that did not end within its limits. It is never taken
// for an expression that does not yield.
type tooCostly struct {
	// byClock: not by the cost limit, which would end it the same way each time.
	byClock bool
}

func (e *tooCostly) Error() string {
	if e.byClock {
		return ErrBusy.Error()
	}
	return "too much work"
}

// patience bounds all evaluations of one call by CEL, from the first one on: most calls
// have none.
type patience struct {
	of     context.Context
	cancel context.CancelFunc
}

func (p *patience) begin() context.Context {
	if p.of == nil {
		p.of, p.cancel = context.WithTimeout(context.Background(), evaluationTime)
	}
	return p.of
}

func (p *patience) end() {
	if p.cancel != nil {
		p.cancel()
	}
}

func (p *patience) Deadline() (time.Time, bool) { return p.begin().Deadline() }
func (p *patience) Done() <-chan struct{}       { return p.begin().Done() }
func (p *patience) Err() error                  { return p.begin().Err() }
func (p *patience) Value(key any) any           { return p.begin().Value(key) }

// eval gives a value; nil and no error if that is null, an empty string or an empty
// optional; or an error, of which isMissing tells whether the call lacks a field.
func (e *expression) eval(ctx context.Context, c *call) (ref.Val, error) {
	if e.direct != nil {
		if v, ok := e.direct(c); ok {
			if v == types.String("") {
				return nil, nil
			}
			return v, nil
		}
	}
	return e.evalCEL(ctx, c)
}

func (e *expression) evalCEL(ctx context.Context, over cel.Activation) (ref.Val, error) {
	v, _, err := e.program.ContextEval(ctx, over)
	if err != nil {
		var cancelled interpreter.EvalCancelledError
		switch {
		case errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded:
			return nil, &tooCostly{}
		case errors.As(err, &cancelled) || errors.Is(err, interpreter.InterruptError{}):
			return nil, &tooCostly{byClock: true}
		}
		return nil, err
	}
	if o, ok := v.(*types.Optional); ok {
		if !o.HasValue() {
			return nil, nil
		}
		v = o.GetValue()
	}
	if v == types.NullValue || v == types.String("") {
		return nil, nil
	}
	return v, nil
}

// failed says why an expression in error, or one that does not yield, is refused.
func (e *expression) failed(field string, err error) error {
	if costly := (*tooCostly)(nil); errors.As(err, &costly) {
		if costly.byClock {
			return fmt.Errorf("%s: %w", e.name, ErrBusy)
		}
		return invalid(field, "%s, %s, is too much work for this call: send less, or ask the owner of the tool to make the expression simpler", e.name, clip(e.text))
	}
	if err == nil || isMissing(err) {
		return invalid(field, "%s, %s, yields nothing for this call: send every field that it reads", e.name, clip(e.text))
	}
	if bad := (*intent.InvalidError)(nil); errors.As(err, &bad) {
		return invalid(field, "%s, %s: %s: %s", e.name, clip(e.text), bad.Field, bad.Reason)
	}
	return invalid(field, "%s, %s, fails for this call: %s", e.name, clip(e.text), clip(err.Error()))
}

// estimator knows no sizes: what an expression costs at least is what it costs
// over an empty call.
type estimator struct{}

func (estimator) EstimateSize(checker.AstNode) *checker.SizeEstimate { return nil }

func (estimator) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}

// costs counts a call by what it reads and makes.
type costs struct{}

func (costs) CallCost(function, _ string, args []ref.Val, result ref.Val) *uint64 {
	deep := function == operators.Equals || function == operators.NotEquals || function == operators.In
	read := weight(result, deep)
	for _, arg := range args {
		read += weight(arg, deep)
	}
	total := uint64(1 + read/10)
	return &total
}

// weight is about how many bytes a value has; of a list or a map, what lies in it
// only counts if it is read.
func weight(v ref.Val, deep bool) int {
	switch v := v.(type) {
	case types.String:
		return len(v)
	case pathValue:
		return len(v.Path)
	case *types.Optional:
		if v.HasValue() {
			return weight(v.GetValue(), deep)
		}
	case traits.Lister:
		size, _ := v.Size().(types.Int)
		if !deep {
			return 1
		}
		total := 10 * int(size)
		for it := v.Iterator(); it.HasNext() == types.True; {
			total += weight(it.Next(), deep)
		}
		return total
	case traits.Mapper:
		size, _ := v.Size().(types.Int)
		if !deep {
			return 1
		}
		total := 10 * int(size)
		for it := v.Iterator(); it.HasNext() == types.True; {
			key := it.Next()
			total += weight(key, deep)
			if value, found := v.Find(key); found {
				total += weight(value, deep)
			}
		}
		return total
	}
	return 1
}
