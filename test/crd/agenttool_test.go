package crd

import (
	"maps"
	"testing"
)

// rulesOf has n admission rules, with these fields and without those.
func rulesOf(n int, with map[string]any, without ...string) []change {
	rules := make([]any, n)
	for i := range rules {
		rule := map[string]any{"expression": "true", "message": "all pass", "action": "Deny"}
		maps.Copy(rule, with)
		for _, field := range without {
			delete(rule, field)
		}
		rules[i] = rule
	}
	return []change{set("spec.admission", rules)}
}

func TestMutatingAgentTool(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: AgentTool
spec:
  description: Refund a customer's charge
  effect: Mutating
  intentBudgetRef: {name: refunds}
  upstream:
    http:
      url: http://crm.support.svc:8080/refunds
      methods: [POST]
      suffixes: [/now]
      timeout: 5s
      settleAfter: 1m
      requestHeaders: [content-type]
      credentialsFrom:
        secretRef: {name: provider, key: token}
        header: Authorization
        prefix: "Bearer "
  identity:
    intentID: ['call.header["idempotency-key"]', 'path(call.session, call.index)']
    scope: ['path("account", call.body.accountId, "order", call.body.orderId)']
    lineage: path(call.session, call.index)
    amount: {value: call.body.amount, currency: '"USD"', unit: Major}
    recipient: call.body.accountId
    volatile: [/timestamp, /memo]
    addresses: [/to]
  idempotency:
    ttl: 48h
    key: {header: Idempotency-Key}
    inFlight: {mode: Wait, timeout: 10s, retryAfter: 2s}
    record: {maxBodyBytes: 1Mi}
  outcomes:
  - {status: "402", outcome: Failed}
  - {when: 'response.body.status == "processing"', outcome: Pending}
  retryBudget:
    attempts: 5
    backoff: {initial: 200ms, factor: 2, max: 10s}
    perAttemptTimeout: 2s
    ratio: {percent: 20, minPerSecond: 3}
  concurrency: {maxInFlight: 10, perScope: 1, queue: {max: 100, timeout: 5s}}
  rateLimit: {requests: 100, per: 1m, burst: 20, perCaller: {requests: 10, per: 1m, burst: 2}}
  unknownOutcome: StatusCheck
  statusCheck:
    path: path("refunds", intent.key)
    query: [{name: order, value: 'intent.scope[0]'}]
    outcome: 'response.status == 404 ? "Failed" : "Succeeded"'
    providerReference: response.body.id
    finality: SettleAfter
    timeout: 5s
    backoff: {initial: 1s, factor: 2, max: 1m}
    deadline: 24h
  admission:
  - {expression: 'object.spec.amount.currency in ["USD", "EUR"]', message: only USD and EUR, action: Deny}
  - {expression: 'quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0', message: above 500 a person decides, action: Hold}
`)
	const (
		http     = "spec.upstream.http."
		identity = "spec.identity."
		idem     = "spec.idempotency."
		slots    = "spec.concurrency."
		rates    = "spec.rateLimit."
		check    = "spec.statusCheck."
	)
	url := func(value string) []change { return []change{set(http+"url", value)} }
	onlyKey := func(path string, value any) []change {
		return []change{remove(idem + "key.header"), set(idem+"key."+path, value)}
	}
	outcome := func(rule ...string) []change {
		r := map[string]any{}
		for i := 0; i < len(rule); i += 2 {
			r[rule[i]] = rule[i+1]
		}
		return []change{set("spec.outcomes", []any{r})}
	}
	status := func(status, outcomeOf string) []change { return outcome("status", status, "outcome", outcomeOf) }
	const badStatus, failed, retryable = "should match", "a status alone says Failed only where it is 4xx", "a status says Retryable only where it is 4xx, or 503"
	creating(t, strict(), valid, []tableCase{
		{"only what is required", []change{
			remove("spec.outcomes"), remove("spec.retryBudget"), remove("spec.unknownOutcome"), remove("spec.statusCheck"),
			remove("spec.description"), remove(http + "suffixes"), remove(http + "timeout"), remove(http + "requestHeaders"), remove(http + "credentialsFrom"),
			remove(identity + "lineage"), remove(identity + "amount"), remove(identity + "recipient"), remove(identity + "volatile"), remove(identity + "addresses"),
			remove(idem + "ttl"), remove(idem + "inFlight"), remove(idem + "record"),
			remove("spec.concurrency"), remove("spec.rateLimit")}, ""},
		{"a class", status("5xx", "Pending"), ""},
		{"a range", status("500-503", "Unknown"), ""},
		{"a client error that may be tried again", status("4xx", "Retryable"), ""},
		{"503 that may be tried again", status("503", "Retryable"), ""},
		{"any other server error that may", status("500", "Retryable"), retryable},
		{"a class of them", status("5xx", "Retryable"), retryable},
		{"a range with 503", status("503-504", "Retryable"), retryable},
		{"a redirect that may", status("307", "Retryable"), retryable},
		{"a server error that failed", status("500", "Failed"), failed},
		{"503 that failed", status("503", "Failed"), failed},
		{"a success that failed", status("2xx", "Failed"), failed},
		{"a condition for that", outcome("when", `response.body.code == "declined"`, "outcome", "Failed"), ""},
		{"an outcome that does not exist", status("402", "Maybe"), `Unsupported value: "Maybe"`},
		{"no outcome", outcome("status", "402"), "outcome: Required value"},
		{"neither status nor condition", outcome("outcome", "Failed"), "exactly one of status and when must be set"},
		{"both", outcome("status", "402", "when", "true", "outcome", "Failed"), "exactly one of status and when must be set"},
		{"a status that is not final", status("100", "Unknown"), badStatus},
		{"a status of four digits", status("4022", "Unknown"), badStatus},
		{"a range over two classes", status("400-599", "Unknown"), badStatus},
		{"no rules", []change{set("spec.outcomes", []any{})}, ""},
		{"an empty retry budget", []change{set("spec.retryBudget", map[string]any{})}, ""},
		{"one attempt", []change{set("spec.retryBudget.attempts", int64(1))}, ""},
		{"no attempt", []change{set("spec.retryBudget.attempts", int64(0))}, "greater than or equal to 1"},
		{"too many attempts", []change{set("spec.retryBudget.attempts", int64(21))}, "less than or equal to 20"},
		{"initial too short", []change{set("spec.retryBudget.backoff.initial", "9ms")}, "initial must be between 10ms and 5m"},
		{"max too long", []change{set("spec.retryBudget.backoff.max", "2h")}, "max must be between 10ms and 1h"},
		{"max less than initial", []change{set("spec.retryBudget.backoff.max", "100ms")}, "backoff.max must not be less than backoff.initial"},
		{"factor 0", []change{set("spec.retryBudget.backoff.factor", int64(0))}, "greater than or equal to 1"},
		{"an attempt's timeout too short", []change{set("spec.retryBudget.perAttemptTimeout", "1ms")}, "perAttemptTimeout must be between 100ms and 5m"},
		{"percent 0", []change{set("spec.retryBudget.ratio.percent", int64(0))}, ""},
		{"percent 101", []change{set("spec.retryBudget.ratio.percent", int64(101))}, "less than or equal to 100"},
		{"no least", []change{set("spec.retryBudget.ratio.minPerSecond", int64(0))}, "greater than or equal to 1"},
		{"a person decides", []change{set("spec.unknownOutcome", "Hold"), remove("spec.statusCheck")}, ""},
		{"a status check that nobody makes", []change{remove("spec.unknownOutcome")}, "come together"},
		{"no status check", []change{remove("spec.statusCheck")}, "come together"},
		{"an outcome that nobody knows what to do about", []change{set("spec.unknownOutcome", "Guess")}, `Unsupported value: "Guess"`},
		{"Resume", []change{set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "24h"), remove("spec.statusCheck")}, ""},
		{"Resume, then a status check", []change{set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "24h")}, ""},
		{"Resume with a key in the body", append(onlyKey("argument", "/key"), set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "24h"), remove("spec.statusCheck")), ""},
		{"Resume with a provider that does not deduplicate", []change{set("spec.unknownOutcome", "Resume"), remove("spec.statusCheck")}, "come together: only a provider that deduplicates"},
		{"Resume without a key", append(onlyKey("none", map[string]any{}), set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "24h"), remove("spec.statusCheck")), "needs a key by which the provider deduplicates"},
		{"a provider that deduplicates, and nobody resumes", []change{set(idem+"providerDeduplicates.window", "24h")}, "come together: only a provider that deduplicates"},
		{"no window", []change{set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates", map[string]any{})}, "window: Required value"},
		{"a window too short", []change{set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "9s")}, "window must be between 10s and 720h"},
		{"a window too long", []change{set("spec.unknownOutcome", "Resume"), set(idem+"providerDeduplicates.window", "721h")}, "window must be between 10s and 720h"},
		{"only what a status check needs", []change{
			remove(check + "path"), remove(check + "query"), remove(check + "providerReference"), remove(check + "timeout"), remove(check + "backoff"), remove(check + "deadline")}, ""},
		{"no outcome of a status check", []change{remove(check + "outcome")}, "outcome: Required value"},
		{"no finality", []change{remove(check + "finality")}, "finality: Required value"},
		{"a finality that does not exist", []change{set(check+"finality", "Never")}, `Unsupported value: "Never"`},
		{"a parameter twice", []change{set(check+"query", []any{map[string]any{"name": "a", "value": "intent.key"}, map[string]any{"name": "a", "value": "intent.id"}})}, "Duplicate value"},
		{"a parameter's name with a blank", []change{set(check+"query", []any{map[string]any{"name": "a b", "value": "intent.key"}})}, "should match"},
		{"a check too long", []change{set(check+"timeout", "2m")}, "timeout must be between 100ms and 1m"},
		{"a deadline too short", []change{set(check+"deadline", "10ms")}, "deadline must be between 1s and 720h"},
		{"max less than initial of a check", []change{set(check+"backoff.max", "100ms")}, "max must not be less than initial"},
		{"name of 63 characters", []change{set("metadata.name", letters(63))}, ""},
		{"name of 64 characters", []change{set("metadata.name", letters(64))}, "the name of an AgentTool has at most 63 characters"},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"a misspelt field", []change{set("spec.idempotence", map[string]any{})}, `unknown field "spec.idempotence"`},
		{"description too long", []change{set("spec.description", letters(1025))}, "may not be more than 1024"},

		{"no effect", []change{remove("spec.effect")}, "spec.effect: Required value"},
		{"effect that does not exist", []change{set("spec.effect", "Destructive")}, `Unsupported value: "Destructive"`},
		{"no budget", []change{remove("spec.intentBudgetRef")}, "a Mutating tool needs intentBudgetRef"},
		{"no identity", []change{remove("spec.identity")}, "a Mutating tool needs identity"},
		{"no idempotency", []change{remove("spec.idempotency")}, "a Mutating tool needs idempotency"},
		{"no settleAfter", []change{remove(http + "settleAfter")}, "a Mutating tool needs upstream.http.settleAfter"},
		{"a cache", []change{set("spec.cache.ttl", "1m")}, "cache is for ReadOnly tools"},
		{"name of the budget too long", []change{set("spec.intentBudgetRef.name", letters(64))}, "may not be more than 63"},
		{"a budget in another namespace", []change{set("spec.intentBudgetRef.namespace", "default")}, `unknown field "spec.intentBudgetRef.namespace"`},

		{"no upstream", []change{remove("spec.upstream")}, "spec.upstream: Required value"},
		{"no kind of upstream", []change{remove("spec.upstream.http")}, "exactly one kind of upstream must be set"},
		{"no url", []change{remove(http + "url")}, "spec.upstream.http.url: Required value"},
		{"url with https, port and path", url("https://api.example.com:8443/v1/refunds"), ""},
		{"url of an IPv6 address", url("http://[::1]:8080/x"), ""},
		{"url without path", url("http://crm"), ""},
		{"url with another scheme", url("ftp://crm/refunds"), "spec.upstream.http.url in body should match"},
		{"url without scheme", url("crm.support.svc/refunds"), "spec.upstream.http.url in body should match"},
		{"url with user information", url("http://user:pw@crm/refunds"), "spec.upstream.http.url in body should match"},
		{"url with a query", url("http://crm/refunds?x=1"), "spec.upstream.http.url in body should match"},
		{"url with a fragment", url("http://crm/refunds#x"), "spec.upstream.http.url in body should match"},
		{"url with a backslash", url(`http://crm\@evil/`), "spec.upstream.http.url in body should match"},
		{"url with a blank", url("http://crm/re funds"), "spec.upstream.http.url in body should match"},
		{"url with a line's end", url("http://crm/refunds\n"), "spec.upstream.http.url in body should match"},
		{"url with an expression", url("http://${call.body.host}/refunds"), "spec.upstream.http.url in body should match"},
		{"url with an expression in its path", url("http://crm/{call.body.id}"), "spec.upstream.http.url in body should match"},
		{"url too long", url("http://crm/" + letters(2048)), "may not be more than 2048"},
		{"no methods", []change{remove(http + "methods")}, "spec.upstream.http.methods: Required value"},
		{"empty methods", []change{set(http+"methods", []any{})}, "should have at least 1 items"},
		{"method that does not exist", []change{set(http+"methods", []any{"CONNECT"})}, `Unsupported value: "CONNECT"`},
		{"method in lower case", []change{set(http+"methods", []any{"post"})}, `Unsupported value: "post"`},
		{"method given twice", []change{set(http+"methods", []any{"POST", "POST"})}, "Duplicate value"},
		{"too many methods", []change{set(http+"methods", []any{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "GET"})}, "must have at most 6 items"},
		{"suffix with a segment for anything", []change{set(http+"suffixes", []any{"/*/capture", "/v1/a.b"})}, ""},
		{"suffix without slash", []change{set(http+"suffixes", []any{"now"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"suffix that ends with a slash", []change{set(http+"suffixes", []any{"/now/"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"suffix that climbs up", []change{set(http+"suffixes", []any{"/../admin"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"suffix with an escape", []change{set(http+"suffixes", []any{"/%2e%2e/admin"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"suffix with a query", []change{set(http+"suffixes", []any{"/now?x=1"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"suffix with a part for anything", []change{set(http+"suffixes", []any{"/a*"})}, "spec.upstream.http.suffixes[0] in body should match"},
		{"too many suffixes", []change{set(http+"suffixes", repeat(33, "/s%d"))}, "must have at most 32 items"},
		{"timeout of 100ms", []change{set(http+"timeout", "100ms")}, ""},
		{"timeout too short", []change{set(http+"timeout", "99ms")}, "timeout must be between 100ms and 5m"},
		{"timeout too long", []change{set(http+"timeout", "301s")}, "timeout must be between 100ms and 5m"},
		{"timeout that is a number", []change{set(http+"timeout", int64(5))}, "spec.upstream.http.timeout in body must be of type string"},
		{"settleAfter too short", []change{set(http+"settleAfter", "0s")}, "settleAfter must be between 100ms and 720h"},
		{"settleAfter too long", []change{set(http+"settleAfter", "721h")}, "settleAfter must be between 100ms and 720h"},
		{"the caller's Authorization", []change{set(http+"requestHeaders", []any{"authorization"})}, "requestHeaders must not name the caller's credentials"},
		{"the caller's cookie", []change{set(http+"requestHeaders", []any{"accept", "cookie"})}, "requestHeaders must not name the caller's credentials"},
		{"a header of Holdfast's", []change{set(http+"requestHeaders", []any{"holdfast-session"})}, "requestHeaders must not name the caller's credentials"},
		{"a header in upper case", []change{set(http+"requestHeaders", []any{"Content-Type"})}, "spec.upstream.http.requestHeaders[0] in body should match"},
		{"the key's header from the caller", []change{set(http+"requestHeaders", []any{"idempotency-key"})}, "the header of idempotency.key is written by the gateway"},
		{"the credential's header from the caller", []change{set(http+"requestHeaders", []any{"x-api-key"}), set(http+"credentialsFrom.header", "X-API-Key")}, "the header of credentialsFrom is written by the gateway"},
		{"key and credential in one header", []change{set(http+"credentialsFrom.header", "idempotency-key")}, "idempotency.key and credentialsFrom must not use the same header"},
		{"too many headers", []change{set(http+"requestHeaders", repeat(33, "x-%d"))}, "must have at most 32 items"},
		{"credential without Secret", []change{remove(http + "credentialsFrom.secretRef")}, "secretRef: Required value"},
		{"credential without the Secret's key", []change{remove(http + "credentialsFrom.secretRef.key")}, "secretRef.key: Required value"},
		{"credential without header", []change{remove(http + "credentialsFrom.header")}, "credentialsFrom.header: Required value"},
		{"credential in HTTP's own header", []change{set(http+"credentialsFrom.header", "Host")}, "header must not be one that HTTP itself needs"},
		{"credential of another namespace", []change{set(http+"credentialsFrom.secretRef.namespace", "default")}, `unknown field "spec.upstream.http.credentialsFrom.secretRef.namespace"`},
		{"prefix with a line's end", []change{set(http+"credentialsFrom.prefix", "Bearer\r\n")}, "credentialsFrom.prefix in body should match"},

		{"no source of the intent ID", []change{remove(identity + "intentID")}, "spec.identity.intentID: Required value"},
		{"empty sources of the intent ID", []change{set(identity+"intentID", []any{})}, "should have at least 1 items"},
		{"an empty source of the intent ID", []change{set(identity+"intentID", []any{""})}, "should be at least 1 chars long"},
		{"too many sources of the intent ID", []change{set(identity+"intentID", repeat(9, "call.header.h%d"))}, "must have at most 8 items"},
		{"no scope", []change{remove(identity + "scope")}, "spec.identity.scope: Required value"},
		{"empty scope", []change{set(identity+"scope", []any{})}, "should have at least 1 items"},
		{"too many scopes", []change{set(identity+"scope", repeat(17, "path(%d)"))}, "must have at most 16 items"},
		{"an expression too long", []change{set(identity+"scope", []any{letters(1025)})}, "may not be more than 1024"},
		{"amount without currency", []change{remove(identity + "amount.currency")}, "spec.identity.amount.currency: Required value"},
		{"amount without value", []change{remove(identity + "amount.value")}, "spec.identity.amount.value: Required value"},
		{"amount without unit", []change{remove(identity + "amount.unit")}, "spec.identity.amount.unit: Required value"},
		{"unit that does not exist", []change{set(identity+"amount.unit", "Cents")}, `Unsupported value: "Cents"`},
		{"minor units", []change{set(identity+"amount.unit", "Minor")}, ""},
		{"a volatile field with escapes", []change{set(identity+"volatile", []any{"/a~1b/c~0d/0"})}, ""},
		{"the whole body volatile", []change{set(identity+"volatile", []any{""})}, "should be at least 1 chars long"},
		{"a volatile field without slash", []change{set(identity+"volatile", []any{"timestamp"})}, "spec.identity.volatile[0] in body should match"},
		{"a volatile field with a bad escape", []change{set(identity+"volatile", []any{"/a~2"})}, "spec.identity.volatile[0] in body should match"},
		{"a volatile field given twice", []change{set(identity+"volatile", []any{"/a", "/a"})}, "Duplicate value"},
		{"too many volatile fields", []change{set(identity+"volatile", repeat(65, "/f%d"))}, "must have at most 64 items"},
		{"too many addresses", []change{set(identity+"addresses", repeat(65, "/f%d"))}, "must have at most 64 items"},

		{"ttl too short", []change{set(idem+"ttl", "1s")}, "ttl must be between 1m and 8760h"},
		{"ttl too long", []change{set(idem+"ttl", "9000h")}, "ttl must be between 1m and 8760h"},
		{"no key", []change{remove(idem + "key")}, "spec.idempotency.key: Required value"},
		{"an empty key", []change{remove(idem + "key.header")}, "exactly one of header, argument and none must be set"},
		{"the key as an argument", onlyKey("argument", "/idempotencyKey"), ""},
		{"the key nowhere", onlyKey("none", map[string]any{}), ""},
		{"the key in two places", []change{set(idem+"key.argument", "/key")}, "exactly one of header, argument and none must be set"},
		{"the key somewhere and nowhere", []change{set(idem+"key.none", map[string]any{})}, "exactly one of header, argument and none must be set"},
		{"the key in a header that is taken", []change{set(idem+"key.header", "Content-Type")}, "header must be one that is free to carry a key"},
		{"the key in no header's name", []change{set(idem+"key.header", "Idempotency Key")}, "spec.idempotency.key.header in body should match"},
		{"the key as no pointer", onlyKey("argument", "key"), "spec.idempotency.key.argument in body should match"},
		{"only slots of the tool", []change{remove(slots + "perScope"), remove(slots + "queue")}, ""},
		{"only slots of a scope", []change{remove(slots + "maxInFlight")}, ""},
		{"no slots", []change{remove(slots + "maxInFlight"), remove(slots + "perScope")}, "maxInFlight or perScope must be set"},
		{"no slot", []change{set(slots+"maxInFlight", int64(0))}, "should be greater than or equal to 1"},
		{"too many slots of a scope", []change{set(slots+"perScope", int64(10001))}, "should be less than or equal to 10000"},
		{"no queue", []change{set(slots+"queue.max", int64(0))}, ""},
		{"too long a queue", []change{set(slots+"queue.max", int64(1001))}, "should be less than or equal to 1000"},
		{"too long in the queue", []change{set(slots+"queue.timeout", "6m")}, "timeout must be between 100ms and 5m"},
		{"a rate of the tool alone", []change{remove(rates + "perCaller"), remove(rates + "burst")}, ""},
		{"a rate of the callers alone", []change{remove(rates + "requests"), remove(rates + "per"), remove(rates + "burst"), remove(rates + "perCaller.burst")}, ""},
		{"no rate", []change{remove(rates + "requests"), remove(rates + "per"), remove(rates + "burst"), remove(rates + "perCaller")}, "requests and per, or perCaller, must be set"},
		{"a rate in no time", []change{remove(rates + "per")}, "requests and per come together"},
		{"a burst of nothing", []change{remove(rates + "requests"), remove(rates + "per")}, "burst belongs to requests and per"},
		{"a rate of 0", []change{set(rates+"requests", int64(0))}, "should be greater than or equal to 1"},
		{"a rate in too short a time", []change{set(rates+"per", "999ms")}, "per must be between 1s and 24h"},
		{"a rate of a caller in too long a time", []change{set(rates+"perCaller.per", "25h")}, "per must be between 1s and 24h"},
		{"a rate of a caller without a time", []change{remove(rates + "perCaller.per")}, "spec.rateLimit.perCaller.per: Required value"},
		{"too much at once", []change{set(rates+"burst", int64(10001))}, "should be less than or equal to 10000"},
		{"no rules", []change{remove("spec.admission")}, ""},
		{"10 rules", rulesOf(10, nil), ""},
		{"11 rules", rulesOf(11, nil), "must have at most 10 items"},
		{"a rule without an expression", rulesOf(1, nil, "expression"), "spec.admission[0].expression: Required value"},
		{"a rule with an empty expression", rulesOf(1, map[string]any{"expression": ""}), "spec.admission[0].expression"},
		{"a rule that is too long", rulesOf(1, map[string]any{"expression": letters(1025)}), "may not be more than 1024"},
		{"a rule without a message", rulesOf(1, nil, "message"), "spec.admission[0].message: Required value"},
		{"a rule with a blank message", rulesOf(1, map[string]any{"message": " "}), "spec.admission[0].message in body should match"},
		{"a rule with two lines of message", rulesOf(1, map[string]any{"message": "a\nb"}), "spec.admission[0].message in body should match"},
		{"a rule with a message in other letters", rulesOf(1, map[string]any{"message": "日本 only"}), ""},
		{"a rule with a message that is too long", rulesOf(1, map[string]any{"message": letters(513)}), "may not be more than 512"},
		{"a rule without an action", rulesOf(1, nil, "action"), "spec.admission[0].action: Required value"},
		{"a rule with another action", rulesOf(1, map[string]any{"action": "Warn"}), `Unsupported value: "Warn"`},
		{"a rule with a misspelt field", rulesOf(1, map[string]any{"messages": "a"}), `unknown field "spec.admission[0].messages"`},
		{"to reject what is in flight", []change{set(idem+"inFlight.mode", "Reject"), remove(idem + "inFlight.timeout")}, ""},
		{"to reject, and to wait", []change{set(idem+"inFlight.mode", "Reject")}, "timeout is for mode Wait"},
		{"mode that does not exist", []change{set(idem+"inFlight.mode", "Queue")}, `Unsupported value: "Queue"`},
		{"wait too long", []change{set(idem+"inFlight.timeout", "6m")}, "timeout must be between 100ms and 5m"},
		{"retryAfter too short", []change{set(idem+"inFlight.retryAfter", "500ms")}, "retryAfter must be between 1s and 5m"},
		{"retryAfter too long", []change{set(idem+"inFlight.retryAfter", "6m")}, "retryAfter must be between 1s and 5m"},
		{"maxBodyBytes as a number", []change{set(idem+"record.maxBodyBytes", int64(65536))}, ""},
		{"maxBodyBytes too small", []change{set(idem+"record.maxBodyBytes", int64(1023))}, "maxBodyBytes must be between 1Ki and 4Mi"},
		{"maxBodyBytes too great", []change{set(idem+"record.maxBodyBytes", "5Mi")}, "maxBodyBytes must be between 1Ki and 4Mi"},
		{"maxBodyBytes with a fraction", []change{set(idem+"record.maxBodyBytes", "1500.5")}, "maxBodyBytes must be a whole number of bytes"},
		{"maxBodyBytes that is no number", []change{set(idem+"record.maxBodyBytes", "much")}, "spec.idempotency.record.maxBodyBytes"},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"another timeout", []change{set(http+"timeout", "10s")}, ""},
		{"optional fields removed", []change{remove("spec.description"), remove(http + "timeout"), remove(identity + "amount"), remove(idem + "ttl")}, ""},
		{"another effect", []change{set("spec.effect", "ReadOnly")}, "effect is immutable"},
		{"another effect, with all that it needs", []change{set("spec.effect", "ReadOnly"), remove("spec.intentBudgetRef"), remove("spec.identity"), remove("spec.idempotency"), remove(http + "settleAfter")}, "effect is immutable"},
		{"another budget", []change{set("spec.intentBudgetRef.name", "other")}, "intentBudgetRef is immutable"},
		{"the budget removed", []change{remove("spec.intentBudgetRef")}, "intentBudgetRef is immutable"},
		{"the settling time removed", []change{remove(http + "settleAfter")}, "a Mutating tool needs upstream.http.settleAfter"},
		{"the identity removed", []change{remove("spec.identity")}, "a Mutating tool needs identity"},
	})
}

func TestReadOnlyAgentTool(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: AgentTool
spec:
  effect: ReadOnly
  upstream:
    http:
      url: http://crm.support.svc:8080/charges
      methods: [GET, HEAD]
  cache: {ttl: 2m}
`)
	creating(t, strict(), valid, []tableCase{
		{"no cache", []change{remove("spec.cache")}, ""},
		{"cache without ttl", []change{remove("spec.cache.ttl")}, "spec.cache.ttl: Required value"},
		{"ttl too short", []change{set("spec.cache.ttl", "10ms")}, "ttl must be between 1s and 1h"},
		{"ttl too long", []change{set("spec.cache.ttl", "2h")}, "ttl must be between 1s and 1h"},
		{"a budget", []change{set("spec.intentBudgetRef.name", "refunds")}, "a ReadOnly tool has no intents"},
		{"an identity", []change{set("spec.identity", map[string]any{"intentID": []any{"call.session"}, "scope": []any{"path(1)"}})}, "a ReadOnly tool has no intents"},
		{"rules", rulesOf(1, nil), "a ReadOnly tool has no intents"},
		{"outcomes", []change{set("spec.outcomes", []any{map[string]any{"status": "402", "outcome": "Failed"}})}, "a ReadOnly tool has no intents"},
		{"a retry budget", []change{set("spec.retryBudget", map[string]any{})}, "a ReadOnly tool has no intents"},
		{"an unknown outcome", []change{set("spec.unknownOutcome", "Hold")}, "a ReadOnly tool has no intents"},
		{"idempotency", []change{set("spec.idempotency.key.header", "Idempotency-Key")}, "a ReadOnly tool has no intents"},
		{"slots", []change{set("spec.concurrency.maxInFlight", int64(1))}, "a ReadOnly tool has none"},
		{"a rate", []change{set("spec.rateLimit.perCaller", map[string]any{"requests": int64(1), "per": "1s"})}, "a ReadOnly tool has none"},
		{"settleAfter", []change{set("spec.upstream.http.settleAfter", "1m")}, "a ReadOnly tool moves nothing that could settle"},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"the cache removed", []change{remove("spec.cache")}, ""},
		{"another effect", []change{set("spec.effect", "Mutating")}, "effect is immutable"},
		{"a budget added", []change{set("spec.intentBudgetRef.name", "refunds")}, "a ReadOnly tool has no intents"},
	})
}
