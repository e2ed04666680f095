// This file is how a tool's owner declares how the provider is asked what became of a
// payment: where, by CEL over the variable `intent`, and what its answer means, by CEL
// over `intent` and `response`.
//
// What must hold: the question goes to the host to which the attempt went, and is about
// this payment. What cannot be built is not asked, and what cannot be read is Unknown.
// "Nothing moved" is never read from an answer by which the provider says that it did not
// answer the question, such as 401, 429 or 500.

package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/types"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	maxCheckParameters = 16
	// maxReference is the longest reference of a provider, as of an attempt's answer.
	maxReference = 128

	defaultCheckTimeout  = 5 * time.Second // AgentTool spec.statusCheck.timeout
	defaultCheckInitial  = time.Second     // AgentTool spec.statusCheck.backoff.initial
	defaultCheckFactor   = 2               // AgentTool spec.statusCheck.backoff.factor
	defaultCheckMax      = time.Minute     // AgentTool spec.statusCheck.backoff.max, or initial if that is more
	defaultCheckDeadline = 24 * time.Hour  // AgentTool spec.statusCheck.deadline
)

var (
	boundsCheckTimeout  = [2]time.Duration{100 * time.Millisecond, time.Minute}
	boundsCheckInitial  = [2]time.Duration{100 * time.Millisecond, time.Hour}
	boundsCheckFactor   = [2]int{1, 10}
	boundsCheckMax      = [2]time.Duration{100 * time.Millisecond, 24 * time.Hour}
	boundsCheckDeadline = [2]time.Duration{time.Second, 720 * time.Hour}

	parameterPattern = regexp.MustCompile(`^[A-Za-z0-9_.\[\]-]{1,64}$`)
)

// StatusCheck is how the provider of a tool is asked. It never changes.
type StatusCheck struct {
	// Upstream names to whom attempts go, and what they carry that the check asks by.
	Upstream string
	// By names what is asked, and how the answer is read.
	By string

	base      *url.URL
	keySent   bool
	path      *expression
	query     []parameter
	outcome   *expression
	reference *expression
}

type parameter struct {
	name  string
	value *expression
}

// CheckReading is what an answer of the provider means.
type CheckReading struct {
	Outcome guard.Outcome
	// Reference is the provider's own name of the payment; Named: the tool says how it is read.
	Reference string
	Named     bool
	// Why says in words how that is known. It quotes nothing of the answer.
	Why string
}

// URL is where to ask about an intent.
func (s *StatusCheck) URL(c *guard.Check) (*url.URL, error) {
	over := &question{check: c, keySent: s.keySent}
	ctx := &patience{}
	defer ctx.end()
	u := &url.URL{Scheme: s.base.Scheme, Host: s.base.Host, Path: s.base.Path, RawPath: s.base.RawPath}
	if s.path != nil {
		v, err := s.path.evalCEL(ctx, over)
		p, ok := v.(pathValue)
		if err != nil || !ok {
			return nil, fmt.Errorf("%s %s", s.path.name, unevaluated(err))
		}
		u.Path, u.RawPath = "", ""
		for _, segment := range p.Segments() {
			if segment == "." || segment == ".." {
				return nil, fmt.Errorf(`%s yields "." or ".." as a segment`, s.path.name)
			}
			u.Path += "/" + segment
			u.RawPath += "/" + url.PathEscape(segment)
		}
	}
	query := make(url.Values, len(s.query))
	for _, q := range s.query {
		v, err := q.value.evalCEL(ctx, over)
		if err != nil || v == nil {
			return nil, fmt.Errorf("%s %s", q.value.name, unevaluated(err))
		}
		text, err := plainText(v)
		if err != nil {
			return nil, fmt.Errorf("%s %w", q.value.name, err)
		}
		query.Set(q.name, text)
	}
	u.RawQuery = query.Encode()
	return u, nil
}

var checkOutcomes = map[string]guard.Outcome{
	"Succeeded": guard.AttemptSucceeded,
	"Failed":    guard.AttemptFailed,
	"Pending":   guard.AttemptPending,
	"Unknown":   guard.AttemptUnknown,
}

// Read reads the provider's answer.
func (s *StatusCheck) Read(c *guard.Check, a Answer) CheckReading {
	over := &question{check: c, keySent: s.keySent, response: &response{Answer: a}}
	ctx := &patience{}
	defer ctx.end()
	unknown := func(why string) CheckReading {
		return CheckReading{Outcome: guard.AttemptUnknown, Why: s.outcome.name + " " + why}
	}
	v, err := s.outcome.evalCEL(ctx, over)
	word, ok := v.(types.String)
	if err != nil || !ok {
		return unknown(unevaluated(err))
	}
	out := CheckReading{Why: s.outcome.name + " says " + string(word)}
	if out.Outcome, ok = checkOutcomes[string(word)]; !ok {
		return unknown("yields none of Succeeded, Failed, Pending and Unknown")
	}
	answered := a.Status >= 200 && a.Status < 300
	switch out.Outcome {
	case guard.AttemptSucceeded:
		if !answered {
			return unknown("says Succeeded of an answer that is not 2xx")
		}
	case guard.AttemptFailed:
		if !answered && a.Status != http.StatusNotFound && a.Status != http.StatusGone {
			return unknown("says Failed of an answer that is not 2xx, 404 or 410")
		}
	}
	if s.reference == nil {
		return out
	}
	out.Named = true
	if v, err := s.reference.evalCEL(ctx, over); err == nil && v != nil {
		if text, err := plainText(v); err == nil && printable(text) {
			out.Reference = text
		}
	}
	return out
}

// printable says whether a text can be a reference: printable ASCII without spaces.
func printable(text string) bool {
	return len(text) <= maxReference && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' })
}

// question is an intent, and once there is one the answer, as expressions see them.
type question struct {
	check    *guard.Check
	keySent  bool
	response *response
}

const intentTypeName = "holdfast.Intent"

var intentFields = map[string]struct {
	kind *cel.Type
	// get gives the value; nil: this intent has none.
	get func(*question) any
}{
	"id":  {cel.StringType, func(q *question) any { return q.check.IntentID }},
	"key": {cel.StringType, func(q *question) any { return textOr(q.keySent, q.check.ProviderKey) }},
	"providerReference": {cel.StringType, func(q *question) any {
		return textOr(q.check.ProviderReference != "", q.check.ProviderReference)
	}},
	"scope": {cel.ListType(cel.StringType), func(q *question) any {
		out := make([]any, len(q.check.Scope))
		for i, p := range q.check.Scope {
			out[i] = string(p)
		}
		return out
	}},
	"lineage":   {cel.StringType, func(q *question) any { return textOr(q.check.Lineage != "", string(q.check.Lineage)) }},
	"recipient": {cel.StringType, func(q *question) any { return textOr(q.check.Recipient != "", q.check.Recipient) }},
	"amount": {cel.MapType(cel.StringType, cel.StringType), func(q *question) any {
		if q.check.Amount == nil {
			return nil
		}
		return map[string]any{"value": q.check.Amount.Value, "currency": q.check.Amount.Currency}
	}},
}

func textOr(have bool, s string) any {
	if !have {
		return nil
	}
	return s
}

func intentField(field string) (*types.FieldType, bool) {
	f, ok := intentFields[field]
	if !ok {
		return nil, false
	}
	get := func(target any) any {
		if q, ok := target.(*question); ok {
			return f.get(q)
		}
		return nil
	}
	return &types.FieldType{
		Type:  f.kind,
		IsSet: func(target any) bool { return get(target) != nil },
		GetFrom: func(target any) (any, error) {
			if v := get(target); v != nil {
				return v, nil
			}
			return nil, errAbsent
		},
	}, true
}

// ResolveName and Parent make a question what expressions are evaluated over.
func (q *question) ResolveName(name string) (any, bool) {
	switch {
	case name == "intent":
		return q, true
	case name == "response" && q.response != nil:
		return q.response, true
	}
	return nil, false
}

func (q *question) Parent() cel.Activation { return nil }

// What the expressions of a status check are compiled in: those that ask, and those that read.
var (
	askEnvironment = sync.OnceValues(func() (*cel.Env, error) {
		return newEnvironment(cel.Variable("intent", cel.ObjectType(intentTypeName)))
	})
	readEnvironment = sync.OnceValues(func() (*cel.Env, error) {
		return newEnvironment(cel.Variable("intent", cel.ObjectType(intentTypeName)), cel.Variable("response", cel.ObjectType(responseTypeName)))
	})
)

// compileUnknown comes after all that says where attempts go and what they carry.
func (t *Tool) compileUnknown(spec *v1alpha1.AgentToolSpec) error {
	const field = "spec.statusCheck"
	if err := t.compileResume(spec); err != nil {
		return err
	}
	switch spec.UnknownOutcome {
	case "", v1alpha1.UnknownHold:
		if spec.StatusCheck != nil {
			return specError(field, "is for unknownOutcome StatusCheck or Resume: remove it, or set unknownOutcome")
		}
		return nil
	case v1alpha1.UnknownResume:
		if spec.StatusCheck == nil {
			return nil
		}
	case v1alpha1.UnknownStatusCheck:
	default:
		return specError("spec.unknownOutcome", "%q is not known: use %s, %s or %s", spec.UnknownOutcome, v1alpha1.UnknownHold, v1alpha1.UnknownStatusCheck, v1alpha1.UnknownResume)
	}
	s := spec.StatusCheck
	if s == nil {
		return specError(field, "is missing: say how the provider is asked, or set unknownOutcome to %s", v1alpha1.UnknownHold)
	}
	p := guard.CheckPolicy{}
	switch s.Finality {
	case v1alpha1.FinalitySettleAfter:
	case v1alpha1.FinalityUnbounded:
		p.Unbounded = true
	default:
		return specError(field+".finality", "%q is not known: use %s or %s", s.Finality, v1alpha1.FinalitySettleAfter, v1alpha1.FinalityUnbounded)
	}
	if err := checkTimes(field, s, &p); err != nil {
		return err
	}
	out, err := t.compileCheck(field, s)
	if err != nil {
		return err
	}
	p.Upstream = out.Upstream
	t.Check, t.Guard.Check = out, &p
	return nil
}

func checkTimes(field string, s *v1alpha1.StatusCheck, p *guard.CheckPolicy) error {
	var err error
	if p.Timeout, err = duration(field+".timeout", s.Timeout, defaultCheckTimeout, boundsCheckTimeout); err != nil {
		return err
	}
	if p.Deadline, err = duration(field+".deadline", s.Deadline, defaultCheckDeadline, boundsCheckDeadline); err != nil {
		return err
	}
	backoff := v1alpha1.CheckBackoff{}
	if s.Backoff != nil {
		backoff = *s.Backoff
	}
	p.Initial, p.Max, p.Factor, err = checkBackoff.read(field+".backoff", backoff.Initial, backoff.Max, backoff.Factor)
	return err
}

func (t *Tool) compileCheck(field string, s *v1alpha1.StatusCheck) (*StatusCheck, error) {
	ask, err := askEnvironment()
	if err != nil {
		return nil, fmt.Errorf("making the environment of expressions: %w", err)
	}
	read, err := readEnvironment()
	if err != nil {
		return nil, fmt.Errorf("making the environment of expressions: %w", err)
	}
	out := &StatusCheck{base: t.Upstream.URL, keySent: t.Key != KeyPlacement{}}
	about := false
	compile := func(env *cel.Env, field, source string, want yields, of *bool) (*expression, error) {
		e, tree, err := compileIn(env, field, source, want, lowerHeader)
		if err != nil {
			return nil, err
		}
		fields := intentFieldsOf(tree)
		if of != nil {
			*of = *of || len(fields) > 0
		}
		if slices.Contains(fields, "key") && !out.keySent {
			return nil, specError(field, "reads intent.key, but the upstream takes no key (idempotency.key.none): ask by something that it knows")
		}
		return e, nil
	}
	if s.Path != "" {
		if out.path, err = compile(ask, field+".path", string(s.Path), yieldsPath, &about); err != nil {
			return nil, err
		}
	}
	if len(s.Query) > maxCheckParameters {
		return nil, specError(field+".query", "has more than %d entries", maxCheckParameters)
	}
	for i, q := range s.Query {
		at := fmt.Sprintf("%s.query[%d]", field, i)
		if !parameterPattern.MatchString(q.Name) || slices.ContainsFunc(out.query, func(p parameter) bool { return p.name == q.Name }) {
			return nil, specError(at+".name", "%q is not the name of a parameter, or comes twice", clip(q.Name))
		}
		e, err := compile(ask, at+".value", string(q.Value), yieldsAmount, &about)
		if err != nil {
			return nil, err
		}
		out.query = append(out.query, parameter{q.Name, e})
	}
	if out.outcome, err = compile(read, field+".outcome", string(s.Outcome), yieldsText, &about); err != nil {
		return nil, err
	}
	if !about {
		return nil, specError(field, "asks nothing of this intent: read intent in path, query or outcome, such as intent.key")
	}
	if s.ProviderReference != "" {
		if out.reference, err = compile(read, field+".providerReference", string(s.ProviderReference), yieldsAmount, nil); err != nil {
			return nil, err
		}
	}
	out.Upstream = t.sendsTo()
	by := []string{out.Upstream, string(s.Path), string(s.Outcome)}
	for _, q := range s.Query {
		by = append(by, q.Name, string(q.Value))
	}
	out.By = digest(by...)
	return out, nil
}

// sendsTo names where attempts go and what they carry: the upstream, how it receives the
// key, and which credential it is given.
func (t *Tool) sendsTo() string {
	to := []string{t.Upstream.URL.String(), t.Key.Header, t.Key.Argument}
	if c := t.Upstream.Credentials; c != nil {
		to = append(to, c.SecretName, c.SecretKey, c.Header, c.Prefix)
	}
	return digest(to...)
}

// digest names a list of texts.
func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = h.Write([]byte(strconv.Itoa(len(p)) + ":" + p)) // a hash takes all
	}
	return hex.EncodeToString(h.Sum(nil))
}

// intentFieldsOf are the fields of intent that an expression reads.
func intentFieldsOf(tree *ast.AST) (fields []string) {
	ast.PreOrderVisit(tree.Expr(), ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.SelectKind:
			s := x.AsSelect()
			if o := s.Operand(); o.Kind() == ast.IdentKind && o.AsIdent() == "intent" {
				fields = append(fields, s.FieldName())
			}
		case ast.CallKind: // intent.?key
			if args := x.AsCall().Args(); len(args) == 2 && args[0].Kind() == ast.IdentKind && args[0].AsIdent() == "intent" {
				if name, ok := args[1].AsLiteral().(types.String); ok {
					fields = append(fields, string(name))
				}
			}
		}
	}))
	return fields
}
