// This file compiles an AgentTool and its IntentBudget. No field of a spec has a
// default in its schema: the effective values are those of the table below, and
// this is the only place where they are. Admission has checked the spec before,
// but only for objects that were written while it ran, so everything on which
// safety depends is checked again here.

package policy

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/textproto"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// The effective values of fields that are absent.
const (
	defaultOverlapWindow      = 72 * time.Hour            // IntentBudget spec.overlap.window
	defaultExactMatch         = v1alpha1.ExactMatchReplay // IntentBudget spec.overlap.exactMatch
	defaultLineage            = v1alpha1.LineageCompare   // IntentBudget spec.overlap.lineage
	defaultMaxHeld            = 100                       // IntentBudget spec.maxHeld.total
	defaultMaxHeldPerCaller   = 20                        // IntentBudget spec.maxHeld.perCaller, or total if that is less
	defaultMaxRegistered      = 1000                      // IntentBudget spec.maxRegistered.perCaller
	defaultUpstreamTimeout    = 10 * time.Second          // AgentTool spec.upstream.http.timeout
	defaultTTL                = 48 * time.Hour            // AgentTool spec.idempotency.ttl
	defaultInFlightMode       = v1alpha1.InFlightWait     // AgentTool spec.idempotency.inFlight.mode
	defaultInFlightTimeout    = 10 * time.Second          // AgentTool spec.idempotency.inFlight.timeout
	defaultInFlightRetryAfter = 2 * time.Second           // AgentTool spec.idempotency.inFlight.retryAfter
	defaultMaxBodyBytes       = 1 << 20                   // AgentTool spec.idempotency.record.maxBodyBytes
	defaultAttempts           = 5                         // AgentTool spec.retryBudget.attempts
	defaultBackoffInitial     = 200 * time.Millisecond    // AgentTool spec.retryBudget.backoff.initial
	defaultBackoffFactor      = 2                         // AgentTool spec.retryBudget.backoff.factor
	defaultBackoffMax         = 10 * time.Second          // AgentTool spec.retryBudget.backoff.max, or initial if that is more
	defaultRetryPercent       = 20                        // AgentTool spec.retryBudget.ratio.percent
	defaultRetriesPerSecond   = 3                         // AgentTool spec.retryBudget.ratio.minPerSecond
)

// defaultRequestHeaders is AgentTool spec.upstream.http.requestHeaders.
var defaultRequestHeaders = []string{"accept", "content-type"}

// The bounds of fields that have some, both ends included.
var (
	boundsWindow      = [2]time.Duration{time.Minute, 8760 * time.Hour}
	boundsLookalike   = [2]time.Duration{time.Second, 8760 * time.Hour}
	boundsHolds       = [2]time.Duration{time.Second, 8760 * time.Hour}
	boundsSpendWindow = [2]time.Duration{time.Second, 8760 * time.Hour}
	boundsTTL         = [2]time.Duration{time.Minute, 8760 * time.Hour}
	boundsTimeout     = [2]time.Duration{100 * time.Millisecond, 5 * time.Minute}
	boundsSettleAfter = [2]time.Duration{100 * time.Millisecond, 720 * time.Hour}
	boundsRetryAfter  = [2]time.Duration{time.Second, 5 * time.Minute}
	boundsCacheTTL    = [2]time.Duration{time.Second, time.Hour}
	boundsBody        = [2]int64{1 << 10, 4 << 20}
	boundsInitial     = [2]time.Duration{10 * time.Millisecond, 5 * time.Minute}
	boundsMax         = [2]time.Duration{10 * time.Millisecond, time.Hour}
	boundsAttempts    = [2]int{1, 20}
	boundsFactor      = [2]int{1, 10}
	boundsPercent     = [2]int{0, 100}
	boundsPerSecond   = [2]int{1, 1000}
)

const (
	maxHeldLimit       = 10_000
	maxRegisteredLimit = 100_000
	maxSuffixes        = 32
	maxRequestHeaders  = 32
	maxSources         = 8
	maxPointers        = 64
	maxURLBytes        = 2048
)

var (
	methods       = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
	headerPattern = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_]{0,62}[A-Za-z0-9])?$`)
	suffixPattern = regexp.MustCompile(`^(/(\*|[A-Za-z0-9_~!$&'()+,;=:@-][A-Za-z0-9._~!$&'()+,;=:@-]*))+$`)

	// connectionHeaders belong to one connection or to how a body is framed. Nobody
	// but the gateway's HTTP client writes them.
	connectionHeaders = []string{
		"host", "connection", "proxy-connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "content-length",
		"http2-settings", "proxy-authenticate",
	}
	// callerHeaders are the caller's own: its credentials, and its names for the
	// intent. The upstream gets the tool's credential and the provider's key.
	callerHeaders = []string{"authorization", "proxy-authorization", "cookie", "idempotency-key", "x-idempotency-key"}
	// bodyHeaders say how a body is to be read.
	bodyHeaders = []string{"content-type", "content-encoding", "accept"}
)

// Compile makes a tool of its object and its budget's. The budget of a read-only
// tool is nil. A spec that cannot be used is a *SpecError; a budget that is nil, or
// is another one than the tool refers to, a *NotServedError, which can pass without
// a change of the tool. Neither object is kept or changed.
func Compile(tool *v1alpha1.AgentTool, budget *v1alpha1.IntentBudget) (*Tool, error) {
	out := &Tool{Namespace: tool.Namespace, Name: tool.Name, Generation: tool.Generation}
	if len(tool.Name) > 63 {
		return nil, specError("metadata.name", "has more than 63 characters: use a shorter name")
	}
	switch tool.Spec.Effect {
	case v1alpha1.EffectMutating:
		out.Mutating = true
	case v1alpha1.EffectReadOnly:
	default:
		return nil, specError("spec.effect", "%q is not known: use %s or %s", tool.Spec.Effect, v1alpha1.EffectMutating, v1alpha1.EffectReadOnly)
	}
	upstream := func() error { return out.compileUpstream(tool.Spec.Upstream.HTTP) }
	if tool.Spec.Upstream.Local != nil {
		upstream = func() error { return out.compileLocal(&tool.Spec) }
	}
	if err := upstream(); err != nil {
		return nil, err
	}
	if !out.Mutating {
		if err := out.compileReadOnly(&tool.Spec); err != nil {
			return nil, err
		}
		return out, nil
	}
	if err := out.compileMutating(&tool.Spec); err != nil {
		return nil, err
	}
	// The tool's own spec is checked first, so that its mistakes are told also
	// while the budget is missing.
	if err := out.compileBudget(tool, budget); err != nil {
		return nil, err
	}
	return out, nil
}

const upstreamField = "spec.upstream.http"

func (t *Tool) compileUpstream(spec *v1alpha1.HTTPUpstream) error {
	if spec == nil {
		return specError("spec.upstream", "names no upstream: set http or local")
	}
	var err error
	if t.Upstream.URL, err = parseURL(spec.URL); err != nil {
		return err
	}
	if len(spec.Methods) == 0 {
		return specError(upstreamField+".methods", "is empty: name the methods that a caller may use, such as POST")
	}
	for i, m := range spec.Methods {
		if !slices.Contains(methods, string(m)) || slices.Contains(spec.Methods[:i], m) {
			return specError(fmt.Sprintf("%s.methods[%d]", upstreamField, i), "%q is not one of %s, or comes twice", m, strings.Join(methods, ", "))
		}
		t.Upstream.Methods = append(t.Upstream.Methods, string(m))
	}
	if len(spec.Suffixes) > maxSuffixes {
		return specError(upstreamField+".suffixes", "has more than %d entries", maxSuffixes)
	}
	for i, s := range spec.Suffixes {
		if len(s) > 253 || !suffixPattern.MatchString(string(s)) {
			return specError(fmt.Sprintf("%s.suffixes[%d]", upstreamField, i), "%q is not a path such as /orders or /orders/*, without dots at the start of a segment", clip(string(s)))
		}
		t.Upstream.Suffixes = append(t.Upstream.Suffixes, string(s))
	}
	if t.Upstream.Timeout, err = duration(upstreamField+".timeout", spec.Timeout, defaultUpstreamTimeout, boundsTimeout); err != nil {
		return err
	}
	if c := spec.CredentialsFrom; c != nil {
		field := upstreamField + ".credentialsFrom"
		if c.SecretRef.Name == "" || c.SecretRef.Key == "" {
			return specError(field+".secretRef", "needs the name of a Secret and a key of it")
		}
		// The credential may be what the caller's own is not: Authorization, Cookie.
		if err := checkWrittenHeader(field+".header", c.Header, connectionHeaders, bodyHeaders); err != nil {
			return err
		}
		if strings.ContainsFunc(c.Prefix, func(r rune) bool { return r < ' ' || r > '~' }) {
			return specError(field+".prefix", "must be printable ASCII")
		}
		t.Upstream.Credentials = &Credentials{SecretName: c.SecretRef.Name, SecretKey: c.SecretRef.Key, Header: c.Header, Prefix: c.Prefix}
	}
	return t.compileRequestHeaders(spec.RequestHeaders)
}

func parseURL(text string) (*url.URL, error) {
	const field = upstreamField + ".url"
	if len(text) > maxURLBytes {
		return nil, specError(field, "has more than %d bytes", maxURLBytes)
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		// The error would quote what may be a password.
		return nil, specError(field, "is not a URL: write it like http://name.namespace.svc:8080/path")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, specError(field, "must begin with http:// or https://")
	case u.Hostname() == "":
		return nil, specError(field, "names no host")
	case u.User != nil:
		return nil, specError(field, "must not hold a user or a password: use credentialsFrom")
	case u.RawQuery != "" || u.ForceQuery || strings.Contains(text, "#"):
		return nil, specError(field, "must not have a query or a fragment")
	case u.Opaque != "" || !strings.HasPrefix(u.Path, "/") && u.Path != "":
		return nil, specError(field, "must be a URL with a path")
	}
	for segment := range strings.SplitSeq(u.Path, "/") {
		if segment == "." || segment == ".." {
			return nil, specError(field, `must not have "." or ".." as a segment`)
		}
	}
	return u, nil
}

// checkWrittenHeader checks the name of a header that the gateway writes.
func checkWrittenHeader(field, name string, forbidden ...[]string) error {
	if !headerPattern.MatchString(name) {
		return specError(field, "%q is not the name of a header", clip(name))
	}
	lower := strings.ToLower(name)
	for _, list := range forbidden {
		if slices.Contains(list, lower) {
			return specError(field, "must not be %s: HTTP itself, or the call, needs it", name)
		}
	}
	if strings.HasPrefix(lower, "holdfast-") {
		return specError(field, "must not begin with Holdfast-: those headers are between the caller and the gateway")
	}
	return nil
}

// compileRequestHeaders makes the allowlist. A header on it goes upstream as the
// caller sent it, so nothing may be on it that names the caller, the connection,
// or the caller's own key: the provider would take that for another payment's.
func (t *Tool) compileRequestHeaders(spec []v1alpha1.RequestHeader) error {
	const field = upstreamField + ".requestHeaders"
	allow := func(name string) {
		t.Upstream.RequestHeaders = append(t.Upstream.RequestHeaders, name)
		t.Upstream.Forwards = append(t.Upstream.Forwards, textproto.CanonicalMIMEHeaderKey(name))
	}
	if spec == nil {
		for _, name := range defaultRequestHeaders {
			allow(name)
		}
		return nil
	}
	if len(spec) > maxRequestHeaders {
		return specError(field, "has more than %d entries", maxRequestHeaders)
	}
	for i, h := range spec {
		name, at := string(h), fmt.Sprintf("%s[%d]", field, i)
		switch {
		case !headerPattern.MatchString(name) || strings.ToLower(name) != name:
			return specError(at, "%q is not the name of a header in lower case", clip(name))
		case slices.Contains(callerHeaders, name) || strings.HasPrefix(name, "impersonate-"):
			return specError(at, "%s is the caller's own and never goes upstream: remove it; use credentialsFrom for a credential, and idempotency.key for a key", name)
		case slices.Contains(connectionHeaders, name):
			return specError(at, "%s belongs to the connection and never goes upstream: remove it", name)
		case strings.HasPrefix(name, "holdfast-"):
			return specError(at, "%s is between the caller and the gateway: remove it", name)
		case t.Upstream.Credentials != nil && strings.EqualFold(name, t.Upstream.Credentials.Header):
			return specError(at, "%s carries the credential of credentialsFrom: remove it here", name)
		}
		if !slices.Contains(t.Upstream.RequestHeaders, name) {
			allow(name)
		}
	}
	return nil
}

func (t *Tool) compileReadOnly(spec *v1alpha1.AgentToolSpec) error {
	switch {
	case spec.IntentBudgetRef != nil:
		return specError("spec.intentBudgetRef", "a ReadOnly tool has no intents: remove it")
	case spec.Identity != nil:
		return specError("spec.identity", "a ReadOnly tool has no intents: remove it")
	case spec.Idempotency != nil:
		return specError("spec.idempotency", "a ReadOnly tool has no intents: remove it")
	case spec.Outcomes != nil:
		return specError("spec.outcomes", "a ReadOnly tool has no intents: remove it")
	case spec.UnknownOutcome != "" || spec.StatusCheck != nil:
		return specError("spec.unknownOutcome", "a ReadOnly tool has no intents: remove it, and statusCheck")
	case spec.RetryBudget != nil:
		return specError("spec.retryBudget", "a ReadOnly tool has no intents: remove it")
	case spec.Concurrency != nil:
		return specError("spec.concurrency", "is kept in the budget's store, and a ReadOnly tool has none: remove it")
	case spec.Admission != nil:
		return specError("spec.admission", "a ReadOnly tool has no intents: remove it")
	case spec.RateLimit != nil:
		return specError("spec.rateLimit", "is kept in the budget's store, and a ReadOnly tool has none: remove it")
	case spec.Upstream.HTTP.SettleAfter != nil:
		return specError(upstreamField+".settleAfter", "a ReadOnly tool moves nothing that could settle: remove it")
	case spec.Cache == nil:
		return nil
	}
	var err error
	t.CacheTTL, err = duration("spec.cache.ttl", &spec.Cache.TTL, 0, boundsCacheTTL)
	return err
}

func (t *Tool) compileMutating(spec *v1alpha1.AgentToolSpec) error {
	switch {
	case spec.IntentBudgetRef == nil || spec.IntentBudgetRef.Name == "":
		return specError("spec.intentBudgetRef", "is missing: name the IntentBudget in which the tool's intents are compared")
	case spec.Identity == nil:
		return specError("spec.identity", "is missing: say what makes two calls the same payment")
	case spec.Idempotency == nil:
		return specError("spec.idempotency", "is missing: say at least how the upstream receives the key")
	case spec.Cache != nil:
		return specError("spec.cache", "is for ReadOnly tools: remove it")
	case !t.Local && spec.Upstream.HTTP.SettleAfter == nil:
		return specError(upstreamField+".settleAfter", "is missing: say how long after a send a payment can still become visible at the provider")
	}
	t.Guard.Budget = spec.IntentBudgetRef.Name
	t.Guard.Timeout = t.Upstream.Timeout
	if !t.Local {
		var err error
		if t.Guard.SettleAfter, err = duration(upstreamField+".settleAfter", spec.Upstream.HTTP.SettleAfter, 0, boundsSettleAfter); err != nil {
			return err
		}
	}
	if err := t.compileIdempotency(spec.Idempotency); err != nil {
		return err
	}
	if err := t.compileOutcomes(spec.Outcomes); err != nil {
		return err
	}
	if err := t.compileRetryBudget(spec.RetryBudget); err != nil {
		return err
	}
	if err := t.compileConcurrency(spec.Concurrency); err != nil {
		return err
	}
	if err := t.compileRateLimit(spec.RateLimit); err != nil {
		return err
	}
	if err := t.compileUnknown(spec); err != nil {
		return err
	}
	rules, err := CompileAdmission(spec.Admission)
	if err != nil {
		return err
	}
	if len(rules) > 0 {
		t.Guard = t.Guard.WithRules(func(c *guard.Call) (guard.Ruling, error) { return Ruling(rules, c) })
	}
	return t.compileIdentity(spec.Identity)
}

func (t *Tool) compileIdempotency(spec *v1alpha1.IdempotencySpec) error {
	const field = "spec.idempotency"
	var err error
	if t.Guard.TTL, err = duration(field+".ttl", spec.TTL, defaultTTL, boundsTTL); err != nil {
		return err
	}

	set := 0
	if spec.Key.Header != "" {
		set++
		if err := checkWrittenHeader(field+".key.header", spec.Key.Header, connectionHeaders, bodyHeaders, []string{"authorization", "proxy-authorization", "cookie"}); err != nil {
			return err
		}
		if c := t.Upstream.Credentials; c != nil && strings.EqualFold(c.Header, spec.Key.Header) {
			return specError(field+".key.header", "%s carries the credential of credentialsFrom: use another one", spec.Key.Header)
		}
		if slices.Contains(t.Upstream.RequestHeaders, strings.ToLower(spec.Key.Header)) {
			return specError(field+".key.header", "%s is written by the gateway: remove it from upstream.http.requestHeaders", spec.Key.Header)
		}
		t.Key.Header = spec.Key.Header
	}
	if spec.Key.Argument != "" {
		set++
		t.Key.Argument = string(spec.Key.Argument)
		if err := (intent.Volatile{Ignore: []string{t.Key.Argument}}).Check(); err != nil {
			return specError(field+".key.argument", "%v", err)
		}
	}
	if spec.Key.None != nil {
		set++
	}
	if set != 1 {
		return specError(field+".key", "exactly one of header, argument and none must be set")
	}

	inFlight := v1alpha1.InFlightSpec{}
	if spec.InFlight != nil {
		inFlight = *spec.InFlight
	}
	switch mode := or(inFlight.Mode, defaultInFlightMode); mode {
	case v1alpha1.InFlightWait:
		t.InFlight.Wait = true
		if t.InFlight.Timeout, err = duration(field+".inFlight.timeout", inFlight.Timeout, defaultInFlightTimeout, boundsTimeout); err != nil {
			return err
		}
	case v1alpha1.InFlightReject:
		if inFlight.Timeout != nil {
			return specError(field+".inFlight.timeout", "is for mode Wait: remove it, or set mode to Wait")
		}
	default:
		return specError(field+".inFlight.mode", "%q is not known: use %s or %s", mode, v1alpha1.InFlightWait, v1alpha1.InFlightReject)
	}
	if t.InFlight.RetryAfter, err = duration(field+".inFlight.retryAfter", inFlight.RetryAfter, defaultInFlightRetryAfter, boundsRetryAfter); err != nil {
		return err
	}

	t.MaxBodyBytes = defaultMaxBodyBytes
	if spec.Record != nil && spec.Record.MaxBodyBytes != nil {
		size, exact := spec.Record.MaxBodyBytes.AsInt64()
		if !exact || size < boundsBody[0] || size > boundsBody[1] {
			return specError(field+".record.maxBodyBytes", "must be between 1Ki and 4Mi")
		}
		t.MaxBodyBytes = size
	}
	return nil
}

func (t *Tool) compileIdentity(spec *v1alpha1.ToolIdentity) error {
	const field = "spec.identity"
	out := &identity{}
	var err error
	if len(spec.IntentID) == 0 || len(spec.IntentID) > maxSources {
		return specError(field+".intentID", "must have 1 to %d sources", maxSources)
	}
	for i, source := range spec.IntentID {
		e, err := compileExpression(fmt.Sprintf("%s.intentID[%d]", field, i), string(source), yieldsID)
		if err != nil {
			return err
		}
		out.intentID = append(out.intentID, e)
		for _, name := range e.headers {
			if slices.Contains(t.Upstream.RequestHeaders, name) {
				return specError(upstreamField+".requestHeaders", "%s carries the agent's own name for the intent, which never goes upstream: remove it here, and use idempotency.key", name)
			}
			out.keyHeaders = append(out.keyHeaders, textproto.CanonicalMIMEHeaderKey(name))
		}
	}
	if len(spec.Scope) == 0 || len(spec.Scope) > intent.MaxScopePaths {
		return specError(field+".scope", "must have 1 to %d expressions", intent.MaxScopePaths)
	}
	for i, source := range spec.Scope {
		e, err := compileExpression(fmt.Sprintf("%s.scope[%d]", field, i), string(source), yieldsPathOrSet)
		if err != nil {
			return err
		}
		out.scope = append(out.scope, e)
	}
	if spec.Lineage != "" {
		if out.lineage, err = compileExpression(field+".lineage", string(spec.Lineage), yieldsPath); err != nil {
			return err
		}
	}
	if spec.Amount != nil {
		if out.amount, err = compileExpression(field+".amount.value", string(spec.Amount.Value), yieldsAmount); err != nil {
			return err
		}
		if out.currency, err = compileExpression(field+".amount.currency", string(spec.Amount.Currency), yieldsText); err != nil {
			return err
		}
		switch spec.Amount.Unit {
		case v1alpha1.UnitMajor:
			out.unit = intent.UnitMajor
		case v1alpha1.UnitMinor:
			out.unit = intent.UnitMinor
		default:
			return specError(field+".amount.unit", "%q is not known: use %s, the currency itself, or %s, its smallest unit", spec.Amount.Unit, v1alpha1.UnitMajor, v1alpha1.UnitMinor)
		}
	}
	if spec.Recipient != "" {
		if out.recipient, err = compileExpression(field+".recipient", string(spec.Recipient), yieldsID); err != nil {
			return err
		}
	}
	switch spec.Registration {
	case "", v1alpha1.RegistrationOptional:
	case v1alpha1.RegistrationRequired:
		t.Guard.RegisteredOnly = true
	default:
		return specError(field+".registration", "%q is not known: use %s or %s", spec.Registration, v1alpha1.RegistrationOptional, v1alpha1.RegistrationRequired)
	}
	if out.volatile.Ignore, err = pointers(field+".volatile", spec.Volatile); err != nil {
		return err
	}
	if out.volatile.Addresses, err = pointers(field+".addresses", spec.Addresses); err != nil {
		return err
	}
	// What the gateway writes over says nothing of the call.
	if t.Key.Argument != "" {
		out.volatile.Ignore = append(out.volatile.Ignore, t.Key.Argument)
	}
	out.rpcVolatile = intent.Volatile{
		Ignore:    append(slices.Clone(out.volatile.Ignore), "/id", "/params/_meta"),
		Addresses: out.volatile.Addresses,
	}
	for _, v := range []*intent.Volatile{&out.volatile, &out.rpcVolatile} {
		if *v, err = v.Ready(); err != nil {
			return specError(field+".volatile", "%v", err)
		}
	}
	if out.hash, err = hashIdentity(spec); err != nil {
		return err
	}
	// How amount and recipient are read: another way gives values that cannot be compared.
	if out.amountHash, err = hashIdentity(&v1alpha1.ToolIdentity{Amount: spec.Amount}); err != nil {
		return err
	}
	if out.recipientHash, err = hashIdentity(&v1alpha1.ToolIdentity{Recipient: spec.Recipient, Addresses: spec.Addresses}); err != nil {
		return err
	}
	t.identity = out
	return nil
}

func pointers(field string, spec []v1alpha1.JSONPointer) ([]string, error) {
	if len(spec) > maxPointers {
		return nil, specError(field, "has more than %d entries", maxPointers)
	}
	out := make([]string, len(spec))
	for i, p := range spec {
		out[i] = string(p)
		if err := (intent.Volatile{Ignore: out[i : i+1]}).Check(); err != nil {
			return nil, specError(fmt.Sprintf("%s[%d]", field, i), "%v", err)
		}
	}
	return out, nil
}

// hashIdentity is the SHA-256 of the canonical form of an identity block. The order
// of the pointers means nothing; that of everything else may.
func hashIdentity(spec *v1alpha1.ToolIdentity) (string, error) {
	sorted := spec.DeepCopy()
	sorted.Registration = "" // it says nothing of how a call is read
	slices.Sort(sorted.Volatile)
	slices.Sort(sorted.Addresses)
	text, err := json.Marshal(sorted)
	if err != nil {
		return "", specError("spec.identity", "cannot be written as JSON: %v", err)
	}
	decoded, err := intent.ParseJSON(text)
	if err != nil {
		return "", specError("spec.identity", "cannot be read: %v", err)
	}
	sum := sha256.Sum256(append([]byte("holdfast.dev/identity/v1\n"), intent.Canonical(decoded)...))
	return intent.DigestText(sum), nil
}

func (t *Tool) compileBudget(tool *v1alpha1.AgentTool, budget *v1alpha1.IntentBudget) error {
	wanted := tool.Spec.IntentBudgetRef.Name
	if budget == nil || budget.Namespace != tool.Namespace || budget.Name != wanted {
		return &NotServedError{
			Namespace: tool.Namespace, Tool: tool.Name, Reason: ReasonBudgetNotFound,
			Message: fmt.Sprintf("the IntentBudget %q does not exist in namespace %q: make it", wanted, tool.Namespace),
		}
	}
	notServed := func(err error) error {
		return &NotServedError{
			Namespace: tool.Namespace, Tool: tool.Name, Reason: ReasonBudgetInvalid,
			Message: fmt.Sprintf("the IntentBudget %q cannot be used: %v", wanted, err),
		}
	}
	if err := CheckBudget(budget); err != nil {
		return notServed(err)
	}
	t.Store = budget.Spec.StoreRef.Name
	t.Guard = effectiveBudget(budget, t.Guard)
	var err error
	if t.spend, err = compileSpend(budget.Spec.Spend); err != nil {
		return notServed(err)
	}
	if len(t.spend) > 0 {
		// Whoever does not ask for a call is told that nothing can be counted.
		limits := make([]guard.SpendLimit, len(t.spend))
		for i := range t.spend {
			limits[i] = t.spend[i].SpendLimit
		}
		t.Guard = t.Guard.WithSpend(limits)
	}
	return nil
}

// CheckBudget says what is wrong with a budget's spec, as a *SpecError.
func CheckBudget(budget *v1alpha1.IntentBudget) error {
	if budget.Spec.StoreRef.Name == "" {
		return specError("spec.storeRef.name", "is empty: name an IdempotencyStore")
	}
	if o := budget.Spec.Overlap; o != nil {
		if _, err := duration("spec.overlap.window", o.Window, defaultOverlapWindow, boundsWindow); err != nil {
			return err
		}
		if m := or(o.ExactMatch, defaultExactMatch); m != v1alpha1.ExactMatchReplay && m != v1alpha1.ExactMatchHold {
			return specError("spec.overlap.exactMatch", "%q is not known: use %s or %s", m, v1alpha1.ExactMatchReplay, v1alpha1.ExactMatchHold)
		}
		if l := or(o.Lineage, defaultLineage); l != v1alpha1.LineageCompare && l != v1alpha1.LineageIgnore {
			return specError("spec.overlap.lineage", "%q is not known: use %s or %s", l, v1alpha1.LineageCompare, v1alpha1.LineageIgnore)
		}
		if l := o.Lookalike; l != nil {
			if _, err := duration("spec.overlap.lookalike.window", &l.Window, 0, boundsLookalike); err != nil {
				return err
			}
		}
	}
	if m := budget.Spec.MaxHeld; m != nil {
		for field, value := range map[string]*int32{"total": m.Total, "perCaller": m.PerCaller} {
			if value != nil && (*value < 1 || *value > maxHeldLimit) {
				return specError("spec.maxHeld."+field, "must be between 1 and %d", maxHeldLimit)
			}
		}
		if m.Total != nil && m.PerCaller != nil && *m.PerCaller > *m.Total {
			return specError("spec.maxHeld.perCaller", "must not be greater than total")
		}
	}
	if m := budget.Spec.MaxRegistered; m != nil && m.PerCaller != nil && (*m.PerCaller < 1 || *m.PerCaller > maxRegisteredLimit) {
		return specError("spec.maxRegistered.perCaller", "must be between 1 and %d", maxRegisteredLimit)
	}
	if h := budget.Spec.Holds; h != nil {
		if _, err := duration("spec.holds.expireAfter", &h.ExpireAfter, 0, boundsHolds); err != nil {
			return err
		}
	}
	_, err := compileSpend(budget.Spec.Spend)
	return err
}

// MaxHeld is the effective value of a budget's maxHeld.total.
func MaxHeld(budget *v1alpha1.IntentBudget) int {
	return effectiveBudget(budget, guard.Policy{}).MaxHeld
}

// effectiveBudget fills in what a checked budget says.
func effectiveBudget(budget *v1alpha1.IntentBudget, p guard.Policy) guard.Policy {
	overlap := v1alpha1.OverlapSpec{}
	if budget.Spec.Overlap != nil {
		overlap = *budget.Spec.Overlap
	}
	p.Window = defaultOverlapWindow
	if overlap.Window != nil {
		p.Window = overlap.Window.Duration
	}
	p.HoldExactMatch = or(overlap.ExactMatch, defaultExactMatch) == v1alpha1.ExactMatchHold
	if overlap.Lookalike != nil {
		p.Lookalike = overlap.Lookalike.Window.Duration
	}
	p.IgnoreLineage = or(overlap.Lineage, defaultLineage) == v1alpha1.LineageIgnore

	if budget.Spec.Holds != nil {
		p.HoldFor = budget.Spec.Holds.ExpireAfter.Duration
	}
	held := v1alpha1.MaxHeldSpec{}
	if budget.Spec.MaxHeld != nil {
		held = *budget.Spec.MaxHeld
	}
	p.MaxHeld = orPointer(held.Total, defaultMaxHeld)
	p.MaxHeldPerCaller = orPointer(held.PerCaller, min(defaultMaxHeldPerCaller, p.MaxHeld))
	registered := v1alpha1.MaxRegisteredSpec{}
	if budget.Spec.MaxRegistered != nil {
		registered = *budget.Spec.MaxRegistered
	}
	p.MaxRegisteredPerCaller = orPointer(registered.PerCaller, defaultMaxRegistered)
	return p
}

// duration gives the effective value of a duration.
func duration(field string, spec *metav1.Duration, effective time.Duration, bounds [2]time.Duration) (time.Duration, error) {
	if spec == nil {
		return effective, nil
	}
	if d := spec.Duration; d < bounds[0] || d > bounds[1] {
		return 0, specError(field, "is %v, but must be between %v and %v", d, bounds[0], bounds[1])
	}
	return spec.Duration, nil
}

func or[T ~string](value, effective T) T {
	if value == "" {
		return effective
	}
	return value
}

func orPointer(value *int32, effective int) int {
	if value == nil {
		return effective
	}
	return int(*value)
}
