// This file is how a tool's owner declares what an upstream's answers mean: rules over a
// status, or CEL over the variable `response`. A rule speaks of complete answers alone.
//
// What must hold: an attempt is sent again, or its intent closed as failed, only on a
// word that nothing moved. So a status by itself says Failed or Retryable only where it
// is a client error, or 503 with Retry-After; and a condition that cannot be evaluated,
// or is met by an answer of which that is not certain, makes the outcome Unknown, and
// never leaves it to the rules behind it.

package policy

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/types"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

const (
	maxOutcomes = 16
	// maxAnswerRead is the longest body that a condition reads. Of a longer one the outcome
	// is unknown, if a condition asks for it.
	maxAnswerRead = 4 << 20
)

// Answer is an upstream's complete answer.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
	// Cut: Body is only the start.
	Cut bool
}

// Reading is what the tool's rules say of an answer.
type Reading struct {
	Outcome guard.Outcome
	// Why says in words which rule it was. It quotes nothing of the answer.
	Why string
}

// outcomeRule is one rule, compiled: when, or statuses from first to last.
type outcomeRule struct {
	name        string
	first, last int
	when        *expression
	outcome     guard.Outcome
}

// ReadAnswer reads an answer by the tool's rules. It is false if none fits.
func (t *Tool) ReadAnswer(a Answer) (Reading, bool) {
	if len(t.outcomes) == 0 {
		return Reading{}, false
	}
	over := &response{Answer: a}
	ctx := &patience{}
	defer ctx.end()
	for i := range t.outcomes {
		rule := &t.outcomes[i]
		if rule.when == nil {
			if rule.first <= a.Status && a.Status <= rule.last {
				return rule.read(a), true
			}
			continue
		}
		v, err := rule.when.evalCEL(ctx, over)
		holds, isBool := v.(types.Bool)
		switch {
		case err != nil || !isBool:
			return Reading{guard.AttemptUnknown, rule.name + " " + unevaluated(err)}, true
		case bool(holds):
			return rule.read(a), true
		}
	}
	return Reading{}, false
}

// read is what the rule says of an answer that fits.
func (r *outcomeRule) read(a Answer) Reading {
	switch says := r.name + " says " + string(r.outcome); {
	case r.outcome == guard.AttemptRetryable && a.Status >= 500 && (a.Status != http.StatusServiceUnavailable || !asksToComeBack(a.Header)):
		return Reading{guard.AttemptUnknown, says + ", which of answers 5xx only 503 with Retry-After can be"}
	case r.movedNothing() && r.when == nil && r.first != r.last && doubtful(a.Status):
		return Reading{guard.AttemptUnknown, says + " of more than one status, which is not said of " + strconv.Itoa(a.Status)}
	default:
		return Reading{r.outcome, says}
	}
}

// movedNothing: the rule says that nothing moved.
func (r *outcomeRule) movedNothing() bool {
	return r.outcome == guard.AttemptFailed || r.outcome == guard.AttemptRetryable
}

// doubtful: with these client errors an upstream may speak of a request that is still being
// worked on, or was before. Whoever means them must name them.
func doubtful(status int) bool {
	return status == http.StatusRequestTimeout || status == http.StatusConflict || status == http.StatusTooEarly
}

// asksToComeBack: there is a Retry-After that can be read.
func asksToComeBack(h http.Header) bool {
	value := strings.TrimSpace(h.Get("Retry-After"))
	if _, err := strconv.ParseUint(value, 10, 32); err == nil {
		return true
	}
	_, err := http.ParseTime(value)
	return err == nil
}

// unevaluated says why a condition could not be evaluated, without a word of the answer.
func unevaluated(err error) string {
	costly := (*tooCostly)(nil)
	switch {
	case err == nil:
		return "yields neither true nor false"
	case errors.As(err, &costly):
		return "is too much work for this answer"
	case errors.Is(err, errUnreadable):
		return "reads the body, which is too long, encoded, or not valid"
	case isMissing(err):
		return "reads a field that this answer lacks"
	default:
		return "fails for this answer"
	}
}

// response is an answer as expressions see it.
type response struct {
	Answer
	header map[string]any
	body   any
	read   bool
	err    error
}

const responseTypeName = "holdfast.Response"

// errUnreadable is a body that an expression cannot look into.
var errUnreadable = errors.New("the body cannot be read")

var responseFields = map[string]struct {
	kind *cel.Type
	get  func(*response) (any, error)
}{
	"status": {cel.IntType, func(r *response) (any, error) { return int64(r.Status), nil }},
	"header": {cel.MapType(cel.StringType, cel.StringType), func(r *response) (any, error) { return r.headers(), nil }},
	"body":   {cel.DynType, (*response).content},
}

func responseField(field string) (*types.FieldType, bool) {
	f, ok := responseFields[field]
	if !ok {
		return nil, false
	}
	get := func(target any) (any, error) {
		r, ok := target.(*response)
		if !ok {
			return nil, errAbsent
		}
		return f.get(r)
	}
	return &types.FieldType{
		Type: f.kind,
		IsSet: func(target any) bool {
			_, err := get(target)
			// A body that cannot be read is there: whoever looks into it must fail.
			return !errors.Is(err, errAbsent)
		},
		GetFrom: get,
	}, true
}

// headers are by their names in lower case; a repeated one's values are joined by ", ".
func (r *response) headers() map[string]any {
	if r.header == nil {
		r.header = make(map[string]any, len(r.Header))
		for name, values := range r.Header {
			r.header[strings.ToLower(name)] = strings.Join(values, ", ")
		}
	}
	return r.header
}

// content is the body, decoded once and only if it is asked for.
func (r *response) content() (any, error) {
	if !r.read {
		r.read = true
		r.body, r.err = r.decode()
	}
	return r.body, r.err
}

func (r *response) decode() (any, error) {
	coding := strings.TrimSpace(r.Header.Get("Content-Encoding"))
	if r.Cut || len(r.Body) > maxAnswerRead || coding != "" && !strings.EqualFold(coding, "identity") {
		return nil, errUnreadable
	}
	kind, err := single(r.Header, "Content-Type")
	if err != nil {
		return nil, errUnreadable
	}
	body, err := intent.ReadBody(kind, r.Body, intent.Volatile{})
	switch {
	case err != nil:
		return nil, errUnreadable
	case body.Value() == nil:
		return nil, errAbsent
	}
	return body.Value(), nil
}

// ResolveName and Parent make a response what expressions are evaluated over.
func (r *response) ResolveName(name string) (any, bool) {
	if name == "response" {
		return r, true
	}
	return nil, false
}

func (r *response) Parent() cel.Activation { return nil }

// responseEnvironment is what expressions over a response are compiled in.
var responseEnvironment = sync.OnceValues(func() (*cel.Env, error) {
	return newEnvironment(cel.Variable("response", cel.ObjectType(responseTypeName)))
})

var yieldsTruth = yields{[]*cel.Type{cel.BoolType}, true, "true or false"}

var outcomesByName = map[v1alpha1.AttemptOutcome]guard.Outcome{
	v1alpha1.OutcomeSucceeded: guard.AttemptSucceeded,
	v1alpha1.OutcomeFailed:    guard.AttemptFailed,
	v1alpha1.OutcomeRetryable: guard.AttemptRetryable,
	v1alpha1.OutcomePending:   guard.AttemptPending,
	v1alpha1.OutcomeUnknown:   guard.AttemptUnknown,
}

func (t *Tool) compileOutcomes(spec []v1alpha1.OutcomeRule) error {
	const field = "spec.outcomes"
	if len(spec) > maxOutcomes {
		return specError(field, "has more than %d entries", maxOutcomes)
	}
	for i, s := range spec {
		rule, err := compileOutcome(fmt.Sprintf("%s[%d]", field, i), s)
		if err != nil {
			return err
		}
		t.outcomes = append(t.outcomes, rule)
	}
	return nil
}

func compileOutcome(field string, spec v1alpha1.OutcomeRule) (outcomeRule, error) {
	rule := outcomeRule{name: strings.TrimPrefix(field, "spec.")}
	var known bool
	if rule.outcome, known = outcomesByName[spec.Outcome]; !known {
		return rule, specError(field+".outcome", "%q is not known: use Succeeded, Failed, Retryable, Pending or Unknown", clip(string(spec.Outcome)))
	}
	if (spec.Status == "") == (spec.When == "") {
		return rule, specError(field, "exactly one of status and when must be set")
	}
	if spec.Status != "" {
		return rule, rule.compileStatus(field+".status", spec.Status)
	}
	return rule, rule.compileCondition(field+".when", string(spec.When))
}

var statusPattern = regexp.MustCompile(`^([2-5])(xx|[0-9]{2}(-[2-5][0-9]{2})?)$`)

func (r *outcomeRule) compileStatus(field, text string) error {
	if !statusPattern.MatchString(text) {
		return specError(field, "%q is not a status: write one such as 402, a class such as 5xx, or a range within one class such as 500-503", clip(text))
	}
	class := int(text[0]-'0') * 100
	switch first, last, isRange := strings.Cut(text, "-"); {
	case strings.HasSuffix(text, "xx"):
		r.first, r.last = class, class+99
	case isRange:
		r.first, r.last = class+twoDigits(first), int(last[0]-'0')*100+twoDigits(last)
	default:
		r.first, r.last = class+twoDigits(text), class+twoDigits(text)
	}
	if r.last < r.first || r.last >= class+100 {
		return specError(field, "%q must go up, and stay within one class", text)
	}
	clientError, unavailable := class == 400, r.first == http.StatusServiceUnavailable && r.last == r.first
	switch {
	case r.outcome == guard.AttemptFailed && !clientError:
		return specError(field, "%s alone does not say that nothing moved: write a condition on response.body or response.header in when", text)
	case r.outcome == guard.AttemptRetryable && !clientError && !unavailable:
		return specError(field, "%s alone does not say that nothing moved: only 4xx, and 503 with Retry-After, can be Retryable by their status", text)
	}
	return nil
}

// twoDigits are those behind the class.
func twoDigits(status string) int { return int(status[1]-'0')*10 + int(status[2]-'0') }

func (r *outcomeRule) compileCondition(field, source string) error {
	env, err := responseEnvironment()
	if err != nil {
		return fmt.Errorf("making the environment of expressions: %w", err)
	}
	e, tree, err := compileIn(env, field, source, yieldsTruth, lowerHeader)
	if err != nil {
		return err
	}
	if r.movedNothing() && !readsMore(tree) {
		return specError(field, "reads the status alone, which does not say that nothing moved: read response.body or response.header too, or write the status in status")
	}
	r.when = e
	return nil
}

// lowerHeader refuses a name that no answer's header has here.
func lowerHeader(_ *expression, at ast.Expr, name string, refuse refusal) {
	if lower := strings.ToLower(name); lower != name {
		refuse(at, "header names are in lower case here: write %q", lower)
	}
}

// readsMore says whether an expression reads more of the response than its status.
func readsMore(tree *ast.AST) (more bool) {
	ast.PreOrderVisit(tree.Expr(), ast.NewExprVisitor(func(x ast.Expr) {
		if x.Kind() != ast.SelectKind {
			return
		}
		s := x.AsSelect()
		if o := s.Operand(); o.Kind() == ast.IdentKind && o.AsIdent() == "response" && s.FieldName() != "status" {
			more = true
		}
	}))
	return more
}
