package policy

import (
	"errors"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

func d(t time.Duration) *metav1.Duration { return &metav1.Duration{Duration: t} }

func p[T any](v T) *T { return &v }

func TestEffectiveValues(t *testing.T) {
	refunds, _ := url.Parse("http://crm.support.svc:8080/refunds")
	charges, _ := url.Parse("https://crm.example.com/charges")
	for name, c := range map[string]struct {
		tool   *v1alpha1.AgentTool
		budget *v1alpha1.IntentBudget
		want   Tool
	}{
		"nothing set": {
			tool: refundTool(), budget: refundBudget(),
			want: Tool{
				Namespace: "support", Name: "issue-refund", Generation: 3, Mutating: true, Store: "payments",
				Upstream: Upstream{
					URL: refunds, Methods: []string{"POST"}, Timeout: 10 * time.Second,
					RequestHeaders: []string{"accept", "content-type"}, Forwards: []string{"Accept", "Content-Type"},
				},
				Key:          KeyPlacement{Header: "Idempotency-Key"},
				InFlight:     InFlight{Wait: true, Timeout: 10 * time.Second, RetryAfter: 2 * time.Second},
				MaxBodyBytes: 1 << 20,
				Guard: guard.Policy{
					Budget: "refunds", Window: 72 * time.Hour, TTL: 48 * time.Hour, Timeout: 10 * time.Second,
					SettleAfter: time.Minute, MaxHeld: 100, MaxHeldPerCaller: 20, MaxRegisteredPerCaller: 1000,
				},
			},
		},
		"everything set": {
			tool: refundTool(func(o *v1alpha1.AgentTool) {
				o.Spec.Upstream.HTTP = &v1alpha1.HTTPUpstream{
					URL: "http://crm.support.svc:8080/refunds", Methods: []v1alpha1.HTTPMethod{"PUT", "POST"}, Suffixes: []v1alpha1.PathSuffix{"/orders/*"},
					Timeout: d(3 * time.Second), SettleAfter: d(time.Hour), RequestHeaders: []v1alpha1.RequestHeader{"x-region"},
					CredentialsFrom: &v1alpha1.UpstreamCredentials{SecretRef: v1alpha1.SecretKeyReference{Name: "crm", Key: "token"}, Header: "Authorization", Prefix: "Bearer "},
				}
				o.Spec.Idempotency = &v1alpha1.IdempotencySpec{
					TTL: d(time.Hour), Key: v1alpha1.ProviderKey{Argument: "/meta/key"},
					InFlight: &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject, RetryAfter: d(time.Second)},
					Record:   &v1alpha1.RecordSpec{MaxBodyBytes: p(resource.MustParse("2Ki"))},
				}
				o.Spec.Concurrency = &v1alpha1.ConcurrencySpec{
					MaxInFlight: p[int32](10), PerScope: p[int32](1), Queue: &v1alpha1.QueueSpec{Max: p[int32](0), Timeout: d(time.Second)},
				}
				o.Spec.RateLimit = &v1alpha1.RateLimitSpec{
					Requests: p[int32](7), Per: d(time.Second), Burst: p[int32](5),
					PerCaller: &v1alpha1.CallerRateSpec{Requests: 100, Per: *d(time.Minute), Burst: p[int32](3)},
				}
			}),
			budget: refundBudget(func(b *v1alpha1.IntentBudget) {
				b.Spec.Overlap = &v1alpha1.OverlapSpec{
					Window: d(time.Hour), ExactMatch: v1alpha1.ExactMatchHold, Lineage: v1alpha1.LineageIgnore,
					Lookalike: &v1alpha1.LookalikeSpec{Window: *d(2 * time.Minute)},
				}
				b.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: p[int32](7), PerCaller: p[int32](3)}
				b.Spec.MaxRegistered = &v1alpha1.MaxRegisteredSpec{PerCaller: p[int32](5)}
			}),
			want: Tool{
				Namespace: "support", Name: "issue-refund", Generation: 3, Mutating: true, Store: "payments",
				Upstream: Upstream{
					URL: refunds, Methods: []string{"PUT", "POST"}, Suffixes: []string{"/orders/*"}, Timeout: 3 * time.Second,
					RequestHeaders: []string{"x-region"}, Forwards: []string{"X-Region"},
					Credentials: &Credentials{SecretName: "crm", SecretKey: "token", Header: "Authorization", Prefix: "Bearer "},
				},
				Key:          KeyPlacement{Argument: "/meta/key"},
				InFlight:     InFlight{RetryAfter: time.Second},
				Queue:        Queue{Timeout: time.Second},
				MaxBodyBytes: 2 << 10,
				Guard: guard.Policy{
					Budget: "refunds", Window: time.Hour, HoldExactMatch: true, IgnoreLineage: true, Lookalike: 2 * time.Minute, TTL: time.Hour, Timeout: 3 * time.Second,
					SettleAfter: time.Hour, MaxHeld: 7, MaxHeldPerCaller: 3, MaxRegisteredPerCaller: 5,
					MaxInFlight: 10, MaxInFlightPerScope: 1,
					Rate:          guard.Rate{Every: 142857143, Burst: 5}, // never more often than 7 in a second
					RatePerCaller: guard.Rate{Every: 600 * time.Millisecond, Burst: 3},
				},
			},
		},
		"limits with the least": {
			tool: refundTool(func(o *v1alpha1.AgentTool) {
				o.Spec.Concurrency = &v1alpha1.ConcurrencySpec{PerScope: p[int32](2)}
				o.Spec.RateLimit = &v1alpha1.RateLimitSpec{PerCaller: &v1alpha1.CallerRateSpec{Requests: 1, Per: *d(time.Second)}}
			}),
			budget: refundBudget(),
			want: Tool{
				Namespace: "support", Name: "issue-refund", Generation: 3, Mutating: true, Store: "payments",
				Upstream: Upstream{
					URL: refunds, Methods: []string{"POST"}, Timeout: 10 * time.Second,
					RequestHeaders: []string{"accept", "content-type"}, Forwards: []string{"Accept", "Content-Type"},
				},
				Key:          KeyPlacement{Header: "Idempotency-Key"},
				InFlight:     InFlight{Wait: true, Timeout: 10 * time.Second, RetryAfter: 2 * time.Second},
				Queue:        Queue{Max: 100, Timeout: 5 * time.Second},
				MaxBodyBytes: 1 << 20,
				Guard: guard.Policy{
					Budget: "refunds", Window: 72 * time.Hour, TTL: 48 * time.Hour, Timeout: 10 * time.Second,
					SettleAfter: time.Minute, MaxHeld: 100, MaxHeldPerCaller: 20, MaxRegisteredPerCaller: 1000,
					MaxInFlightPerScope: 2, RatePerCaller: guard.Rate{Every: time.Second, Burst: 1},
				},
			},
		},
		"no key": {
			tool: refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key = v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}} }),
			budget: refundBudget(func(b *v1alpha1.IntentBudget) {
				b.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: p[int32](7)}
			}),
			want: Tool{
				Namespace: "support", Name: "issue-refund", Generation: 3, Mutating: true, Store: "payments",
				Upstream: Upstream{
					URL: refunds, Methods: []string{"POST"}, Timeout: 10 * time.Second,
					RequestHeaders: []string{"accept", "content-type"}, Forwards: []string{"Accept", "Content-Type"},
				},
				InFlight:     InFlight{Wait: true, Timeout: 10 * time.Second, RetryAfter: 2 * time.Second},
				MaxBodyBytes: 1 << 20,
				Guard: guard.Policy{
					Budget: "refunds", Window: 72 * time.Hour, TTL: 48 * time.Hour, Timeout: 10 * time.Second,
					SettleAfter: time.Minute, MaxHeld: 7, MaxHeldPerCaller: 7, MaxRegisteredPerCaller: 1000,
				},
			},
		},
		"read-only": {
			tool: readTool(),
			want: Tool{
				Namespace: "support", Name: "list-charges", Generation: 1,
				Upstream: Upstream{
					URL: charges, Methods: []string{"GET"}, Timeout: 10 * time.Second,
					RequestHeaders: []string{"accept", "content-type"}, Forwards: []string{"Accept", "Content-Type"},
				},
				CacheTTL: 2 * time.Minute,
			},
		},
		"read-only, nothing kept": {
			tool: readTool(func(o *v1alpha1.AgentTool) { o.Spec.Cache = nil }),
			want: Tool{
				Namespace: "support", Name: "list-charges", Generation: 1,
				Upstream: Upstream{
					URL: charges, Methods: []string{"GET"}, Timeout: 10 * time.Second,
					RequestHeaders: []string{"accept", "content-type"}, Forwards: []string{"Accept", "Content-Type"},
				},
			},
		},
	} {
		before := c.tool.DeepCopy()
		got, err := Compile(c.tool, c.budget)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if (got.identity != nil) != got.Mutating {
			t.Errorf("%s: has an identity: %v", name, got.identity != nil)
		}
		got.identity = nil
		if !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", name, *got, c.want)
		}
		if !reflect.DeepEqual(before, c.tool) {
			t.Errorf("%s: Compile changed the object", name)
		}
	}
}

// A mistake in a spec is told with its field and what to do.
func TestSpecErrors(t *testing.T) {
	http := func(change func(*v1alpha1.HTTPUpstream)) *v1alpha1.AgentTool {
		return refundTool(func(o *v1alpha1.AgentTool) { change(o.Spec.Upstream.HTTP) })
	}
	headers := func(names ...v1alpha1.RequestHeader) *v1alpha1.AgentTool {
		return http(func(h *v1alpha1.HTTPUpstream) { h.RequestHeaders = names })
	}
	slots := func(c v1alpha1.ConcurrencySpec) *v1alpha1.AgentTool {
		return refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Concurrency = &c })
	}
	rates := func(l v1alpha1.RateLimitSpec) *v1alpha1.AgentTool {
		return refundTool(func(o *v1alpha1.AgentTool) { o.Spec.RateLimit = &l })
	}
	idem := func(change func(*v1alpha1.IdempotencySpec)) *v1alpha1.AgentTool {
		return refundTool(func(o *v1alpha1.AgentTool) { change(o.Spec.Idempotency) })
	}
	key := func(header string) *v1alpha1.AgentTool {
		return idem(func(i *v1alpha1.IdempotencySpec) { i.Key = v1alpha1.ProviderKey{Header: header} })
	}
	id := func(change func(*v1alpha1.ToolIdentity)) *v1alpha1.AgentTool { return refundTool(withIdentity(change)) }
	source := func(e v1alpha1.Expression) *v1alpha1.AgentTool {
		return id(func(i *v1alpha1.ToolIdentity) { i.IntentID = []v1alpha1.Expression{`"x"`, e} })
	}
	scope := func(e v1alpha1.Expression) *v1alpha1.AgentTool {
		return id(func(i *v1alpha1.ToolIdentity) { i.Scope = []v1alpha1.Expression{e} })
	}
	credential := func(header string) *v1alpha1.AgentTool {
		return http(func(h *v1alpha1.HTTPUpstream) {
			h.CredentialsFrom = &v1alpha1.UpstreamCredentials{SecretRef: v1alpha1.SecretKeyReference{Name: "s", Key: "k"}, Header: header}
		})
	}
	const up, key1, expr = "spec.upstream.http", "spec.idempotency.key", "spec.identity.intentID[1]"
	for _, c := range []struct {
		tool           *v1alpha1.AgentTool
		field, message string
	}{
		{refundTool(func(o *v1alpha1.AgentTool) { o.Name = strings.Repeat("x", 64) }), "metadata.name", "63"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Effect = "" }), "spec.effect", "not known"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP = nil }), "spec.upstream", "set http"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.IntentBudgetRef = nil }), "spec.intentBudgetRef", "is missing"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Identity = nil }), "spec.identity", "is missing"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Idempotency = nil }), "spec.idempotency", "is missing"},
		{refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Cache = &v1alpha1.ResponseCache{} }), "spec.cache", "ReadOnly"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.Identity = refundTool().Spec.Identity }), "spec.identity", "no intents"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.Idempotency = refundTool().Spec.Idempotency }), "spec.idempotency", "no intents"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.IntentBudgetRef = refundTool().Spec.IntentBudgetRef }), "spec.intentBudgetRef", "no intents"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP.SettleAfter = d(time.Minute) }), up + ".settleAfter", "could settle"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.Cache.TTL.Duration = 2 * time.Hour }), "spec.cache.ttl", "between 1s and 1h"},

		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "ftp://crm/x" }), up + ".url", "http://"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http://user:hunter2@crm/x" }), up + ".url", "credentialsFrom"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http://crm/x?a=b" }), up + ".url", "query"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http://crm/x#" }), up + ".url", "fragment"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http:///x" }), up + ".url", "no host"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http://crm/a/../b" }), up + ".url", `".."`},
		{http(func(h *v1alpha1.HTTPUpstream) { h.URL = "http://crm:hunter2" }), up + ".url", "is not a URL"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Methods = nil }), up + ".methods", "empty"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Methods = []v1alpha1.HTTPMethod{"TRACE"} }), up + ".methods[0]", "TRACE"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Methods = []v1alpha1.HTTPMethod{"POST", "POST"} }), up + ".methods[1]", "twice"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Suffixes = []v1alpha1.PathSuffix{"/ok", "/../x"} }), up + ".suffixes[1]", "not a path"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Suffixes = []v1alpha1.PathSuffix{"/a%2fb"} }), up + ".suffixes[0]", "not a path"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Timeout = d(0) }), up + ".timeout", "between 100ms and 5m"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.Timeout = d(-time.Second) }), up + ".timeout", "between 100ms and 5m"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.SettleAfter = nil }), up + ".settleAfter", "is missing"},
		{http(func(h *v1alpha1.HTTPUpstream) { h.SettleAfter = d(0) }), up + ".settleAfter", "between 100ms and 720h"},

		{headers("authorization"), up + ".requestHeaders[0]", "credentialsFrom"},
		{headers("accept", "proxy-authorization"), up + ".requestHeaders[1]", "never goes upstream"},
		{headers("cookie"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("impersonate-user"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("host"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("connection"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("transfer-encoding"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("content-length"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("upgrade"), up + ".requestHeaders[0]", "never goes upstream"},
		{headers("holdfast-session"), up + ".requestHeaders[0]", "between the caller and the gateway"},
		{headers("idempotency-key"), up + ".requestHeaders[0]", "idempotency.key"},
		{headers("x-idempotency-key"), up + ".requestHeaders[0]", "idempotency.key"},
		{headers("Accept"), up + ".requestHeaders[0]", "lower case"},
		{headers("x y"), up + ".requestHeaders[0]", "not the name"},
		{refundTool(func(o *v1alpha1.AgentTool) {
			o.Spec.Upstream.HTTP.RequestHeaders = []v1alpha1.RequestHeader{"x-order"}
			o.Spec.Identity.IntentID = []v1alpha1.Expression{`call.header["x-order"]`}
		}), up + ".requestHeaders", "the agent's own name for the intent"},
		{refundTool(func(o *v1alpha1.AgentTool) {
			o.Spec.Upstream.HTTP.RequestHeaders = []v1alpha1.RequestHeader{"xorder"}
			o.Spec.Identity.IntentID = []v1alpha1.Expression{`call.header.?xorder`}
		}), up + ".requestHeaders", "the agent's own name for the intent"},
		{refundTool(func(o *v1alpha1.AgentTool) {
			o.Spec.Upstream.HTTP.RequestHeaders = []v1alpha1.RequestHeader{"x-key"}
			o.Spec.Idempotency.Key.Header = "X-Key"
		}), key1 + ".header", "written by the gateway"},
		{refundTool(func(o *v1alpha1.AgentTool) {
			*o = *credential("X-Token")
			o.Spec.Upstream.HTTP.RequestHeaders = []v1alpha1.RequestHeader{"x-token"}
		}), up + ".requestHeaders[0]", "carries the credential"},
		{refundTool(func(o *v1alpha1.AgentTool) {
			*o = *credential("X-Token")
			o.Spec.Idempotency.Key.Header = "x-token"
		}), key1 + ".header", "carries the credential"},
		{credential("Host"), up + ".credentialsFrom.header", "must not be Host"},
		{credential("Content-Type"), up + ".credentialsFrom.header", "must not be Content-Type"},
		{credential("Holdfast-Key"), up + ".credentialsFrom.header", "Holdfast-"},
		{credential("a:b"), up + ".credentialsFrom.header", "not the name"},
		{http(func(h *v1alpha1.HTTPUpstream) {
			h.CredentialsFrom = &v1alpha1.UpstreamCredentials{Header: "Authorization"}
		}), up + ".credentialsFrom.secretRef", "needs the name"},
		{http(func(h *v1alpha1.HTTPUpstream) {
			*h = *credential("X-T").Spec.Upstream.HTTP
			h.CredentialsFrom.Prefix = "a\r\nb"
		}), up + ".credentialsFrom.prefix", "printable"},

		{key("Authorization"), key1 + ".header", "must not be Authorization"},
		{key("Content-Length"), key1 + ".header", "must not be Content-Length"},
		{key("a b"), key1 + ".header", "not the name"},
		{key(""), key1, "exactly one"},
		{idem(func(i *v1alpha1.IdempotencySpec) { i.Key.None = &v1alpha1.NoKey{} }), key1, "exactly one"},
		{idem(func(i *v1alpha1.IdempotencySpec) { i.Key = v1alpha1.ProviderKey{Argument: "key"} }), key1 + ".argument", "JSON pointer"},
		{idem(func(i *v1alpha1.IdempotencySpec) { i.TTL = d(time.Second) }), "spec.idempotency.ttl", "between 1m"},
		{idem(func(i *v1alpha1.IdempotencySpec) { i.InFlight = &v1alpha1.InFlightSpec{Mode: "Maybe"} }), "spec.idempotency.inFlight.mode", "not known"},
		{idem(func(i *v1alpha1.IdempotencySpec) {
			i.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject, Timeout: d(time.Second)}
		}), "spec.idempotency.inFlight.timeout", "mode Wait"},
		{idem(func(i *v1alpha1.IdempotencySpec) { i.InFlight = &v1alpha1.InFlightSpec{RetryAfter: d(time.Hour)} }), "spec.idempotency.inFlight.retryAfter", "between 1s and 5m"},
		{idem(func(i *v1alpha1.IdempotencySpec) {
			i.Record = &v1alpha1.RecordSpec{MaxBodyBytes: p(resource.MustParse("5Mi"))}
		}), "spec.idempotency.record.maxBodyBytes", "between 1Ki and 4Mi"},
		{idem(func(i *v1alpha1.IdempotencySpec) {
			i.Record = &v1alpha1.RecordSpec{MaxBodyBytes: p(resource.MustParse("2000.5"))}
		}), "spec.idempotency.record.maxBodyBytes", "between 1Ki and 4Mi"},

		{slots(v1alpha1.ConcurrencySpec{}), "spec.concurrency", "limits nothing"},
		{slots(v1alpha1.ConcurrencySpec{MaxInFlight: p[int32](0)}), "spec.concurrency.maxInFlight", "between 1 and 10000"},
		{slots(v1alpha1.ConcurrencySpec{PerScope: p[int32](10_001)}), "spec.concurrency.perScope", "between 1 and 10000"},
		{slots(v1alpha1.ConcurrencySpec{PerScope: p[int32](1), Queue: &v1alpha1.QueueSpec{Max: p[int32](1001)}}), "spec.concurrency.queue.max", "between 0 and 1000"},
		{slots(v1alpha1.ConcurrencySpec{PerScope: p[int32](1), Queue: &v1alpha1.QueueSpec{Timeout: d(time.Hour)}}), "spec.concurrency.queue.timeout", "between 100ms and 5m"},
		{rates(v1alpha1.RateLimitSpec{}), "spec.rateLimit", "limits nothing"},
		{rates(v1alpha1.RateLimitSpec{Requests: p[int32](1)}), "spec.rateLimit", "come together"},
		{rates(v1alpha1.RateLimitSpec{Burst: p[int32](1), PerCaller: &v1alpha1.CallerRateSpec{Requests: 1, Per: *d(time.Second)}}), "spec.rateLimit.burst", "belongs to"},
		{rates(v1alpha1.RateLimitSpec{Requests: p[int32](0), Per: d(time.Second)}), "spec.rateLimit.requests", "between 1 and 1000000"},
		{rates(v1alpha1.RateLimitSpec{Requests: p[int32](1), Per: d(25 * time.Hour)}), "spec.rateLimit.per", "between 1s and 24h"},
		{rates(v1alpha1.RateLimitSpec{Requests: p[int32](1), Per: d(time.Hour), Burst: p[int32](10_001)}), "spec.rateLimit.burst", "between 1 and 10000"},
		{rates(v1alpha1.RateLimitSpec{PerCaller: &v1alpha1.CallerRateSpec{Requests: 1}}), "spec.rateLimit.perCaller.per", "between 1s and 24h"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.Concurrency = &v1alpha1.ConcurrencySpec{} }), "spec.concurrency", "ReadOnly"},
		{readTool(func(o *v1alpha1.AgentTool) { o.Spec.RateLimit = &v1alpha1.RateLimitSpec{} }), "spec.rateLimit", "ReadOnly"},

		// Expressions: where and what.
		{source(`call.body.`), expr, "line 1, column 11: Syntax error"},
		{source("call.body.a +\n  call.bodi"), expr, "line 2, column 7: undefined field 'bodi'"},
		{source(`cal.body`), expr, "line 1, column 1: undeclared reference to 'cal'"},
		{source(` `), expr, "is empty"},
		{source(`call.body.a == 1`), expr, "yields a value of type bool, but must yield a string, a number or a path"},
		{source(`[call.body.a]`), expr, "but must yield a string"},
		{source(`call`), expr, "but must yield a string"},
		{source(`null`), expr, "but must yield a string"},
		{source(`call.body.a * 1.5`), expr, "line 1, column 15: a floating-point number is not exact"},
		{source(`string(double(call.body.a))`), expr, "line 1, column 14: the function double is not available"},
		{source(`call.body.a / 100`), expr, "line 1, column 13: the function / is not available"},
		{source(`call.body.a.matches("x") ? "a" : "b"`), expr, "the function matches is not available"},
		{source(`call.body.a.replace("x", "y")`), expr, "the function replace is not available"},
		{source(`call.body.a.join()`), expr, "the function join is not available"},
		{source(`"%s".format([call.body.a])`), expr, "the function format is not available"},
		{source(`string(timestamp(call.body.a))`), expr, "the function timestamp is not available"},
		{source(`google.protobuf.StringValue{value: "x"}`), expr, "undeclared reference"},
		{source(`string(has(holdfast.Call{}.session))`), expr, "messages cannot be made"},
		{source(`call.header["Idempotency-Key"]`), expr, `line 1, column 12: header names are in lower case here: write "idempotency-key"`},
		{source(`call.header.Key`), expr, `write "key"`},
		{source(`call.header["authorization"]`), expr, "never part of an identity"},
		{source(`call.header.cookie`), expr, "never part of an identity"},
		{source(`call.header[?"traceparent"]`), expr, "never part of an identity"},
		{source(`call.header["mcp-session-id"]`), expr, "never part of an identity"},
		{source(v1alpha1.Expression(strings.Repeat("a", 1025))), expr, "expression code point size exceeds limit"},
		{source(`path()`), expr, "no matching overload for 'path'"},
		{source(`path(1,2,3,4,5,6,7,8,9)`), expr, "no matching overload for 'path'"},
		{source(v1alpha1.Expression(`string([` + strings.Repeat("1,", 25) + `1].map(a, ` + `[` + strings.Repeat("1,", 25) + `1].map(b, [` + strings.Repeat("1,", 25) + `1].map(c, [a,b,c])))` + `.size())`)), expr, "only 20000 is allowed"},

		{scope(`"customer/" + call.body.id`), "spec.identity.scope[0]", "must yield a path or a list of paths"},
		{scope(`call.body.scope`), "spec.identity.scope[0]", "yields what the caller sends, but must yield a path"},
		{scope(`[call.body.scope]`), "spec.identity.scope[0]", "but must yield a path"},
		{scope(`path(path("a"), 1)[0]`), "spec.identity.scope[0]", "line 1"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Scope = nil }), "spec.identity.scope", "1 to 16"},
		{id(func(i *v1alpha1.ToolIdentity) { i.IntentID = nil }), "spec.identity.intentID", "1 to 8"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Lineage = `call.session` }), "spec.identity.lineage", "must yield a path"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Lineage = `call.body.lineage` }), "spec.identity.lineage", "must yield a path"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Amount.Value = `path("1")` }), "spec.identity.amount.value", "must yield a string or a number"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Amount.Currency = `840` }), "spec.identity.amount.currency", "must yield a string"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Amount.Currency = `` }), "spec.identity.amount.currency", "is empty"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Amount.Unit = `` }), "spec.identity.amount.unit", "not known"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Recipient = `true` }), "spec.identity.recipient", "must yield"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Volatile = []v1alpha1.JSONPointer{"/a", "b"} }), "spec.identity.volatile[1]", "JSON pointer"},
		{id(func(i *v1alpha1.ToolIdentity) { i.Addresses = []v1alpha1.JSONPointer{"/a~2"} }), "spec.identity.addresses[0]", "JSON pointer"},
	} {
		got, err := Compile(c.tool, refundBudget())
		var bad *SpecError
		switch {
		case got != nil || err == nil:
			t.Errorf("%s: accepted, but must be refused with %q", c.field, c.message)
		case !errors.As(err, &bad):
			t.Errorf("%s: %v is no SpecError", c.field, err)
		case bad.Field != c.field || !strings.Contains(bad.Message, c.message):
			t.Errorf("got  %s: %s\nwant %s: …%s…", bad.Field, bad.Message, c.field, c.message)
		case strings.Contains(err.Error(), "hunter2"):
			t.Errorf("%v shows a password", err)
		}
	}
}

func TestAToolWaitsForItsBudget(t *testing.T) {
	for name, c := range map[string]struct {
		budget         *v1alpha1.IntentBudget
		reason, saying string
	}{
		"none":             {nil, ReasonBudgetNotFound, `the IntentBudget "refunds" does not exist`},
		"another one":      {refundBudget(func(b *v1alpha1.IntentBudget) { b.Name = "x" }), ReasonBudgetNotFound, "does not exist"},
		"of another place": {refundBudget(func(b *v1alpha1.IntentBudget) { b.Namespace = "x" }), ReasonBudgetNotFound, "does not exist"},
		"no store":         {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.StoreRef.Name = "" }), ReasonBudgetInvalid, "spec.storeRef.name"},
		"window":           {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.Overlap = &v1alpha1.OverlapSpec{Window: d(0)} }), ReasonBudgetInvalid, "spec.overlap.window"},
		"exactMatch":       {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.Overlap = &v1alpha1.OverlapSpec{ExactMatch: "x"} }), ReasonBudgetInvalid, "spec.overlap.exactMatch"},
		"lineage":          {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.Overlap = &v1alpha1.OverlapSpec{Lineage: "x"} }), ReasonBudgetInvalid, "spec.overlap.lineage"},
		"total":            {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: p[int32](0)} }), ReasonBudgetInvalid, "spec.maxHeld.total"},
		"maxRegistered": {refundBudget(func(b *v1alpha1.IntentBudget) {
			b.Spec.MaxRegistered = &v1alpha1.MaxRegisteredSpec{PerCaller: p[int32](100_001)}
		}), ReasonBudgetInvalid, "spec.maxRegistered.perCaller"},
		"perCaller": {refundBudget(func(b *v1alpha1.IntentBudget) { b.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{PerCaller: p[int32](10001)} }), ReasonBudgetInvalid, "spec.maxHeld.perCaller"},
		"perCaller and total": {refundBudget(func(b *v1alpha1.IntentBudget) {
			b.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: p[int32](2), PerCaller: p[int32](3)}
		}), ReasonBudgetInvalid, "spec.maxHeld.perCaller"},
	} {
		got, err := Compile(refundTool(), c.budget)
		var waiting *NotServedError
		if got != nil || !errors.As(err, &waiting) || waiting.Reason != c.reason || !strings.Contains(waiting.Message, c.saying) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if waiting.Namespace != "support" || waiting.Tool != "issue-refund" {
			t.Errorf("%s: names the tool %s/%s", name, waiting.Namespace, waiting.Tool)
		}
	}
	// A mistake in the tool itself is told first: it does not go away with the budget.
	var bad *SpecError
	if _, err := Compile(refundTool(func(o *v1alpha1.AgentTool) { o.Spec.Identity.Scope[0] = "x(" }), nil); !errors.As(err, &bad) {
		t.Errorf("got %v", err)
	}
}

func TestTheIdentityHashChangesOnlyWithTheIdentity(t *testing.T) {
	hash := func(changes ...func(*v1alpha1.AgentTool)) string { return mustCompile(t, changes...).identity.hash }
	base := hash()
	// Records have them: a version that makes others holds whatever is paid for a window long.
	i := mustCompile(t).identity
	for what, hashes := range map[string][2]string{
		"identity":  {base, "sha256:a23693a1293a870bfa8820266328e65cd1403cf7bd2f08e2d24648c804c4aafb"},
		"amount":    {i.amountHash, "sha256:4424cfcabb4e1c367e58e5173053fe2e45f939f52ce52a86a9375643e7d2b0b1"},
		"recipient": {i.recipientHash, "sha256:128ed4b8868ede2b5d72dea5ca209ce418733bd2a88565bc8d879b7cdb4bd42e"},
	} {
		if hashes[0] != hashes[1] {
			t.Errorf("the hash of the %s is %s, it was %s", what, hashes[0], hashes[1])
		}
	}
	for name, change := range map[string]func(*v1alpha1.AgentTool){
		"name":              func(o *v1alpha1.AgentTool) { o.Name, o.Generation = "other", 9 },
		"description":       func(o *v1alpha1.AgentTool) { o.Spec.Description = "x" },
		"upstream":          func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP.URL = "https://other.example.com/" },
		"idempotency":       func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key = v1alpha1.ProviderKey{Argument: "/key"} },
		"order of volatile": withIdentity(func(i *v1alpha1.ToolIdentity) { slices.Reverse(i.Volatile) }),
	} {
		if hash(change) != base {
			t.Errorf("%s: changed the identity hash", name)
		}
	}
	seen := map[string]string{base: "nothing"}
	for name, change := range map[string]func(*v1alpha1.ToolIdentity){
		"intentID":        func(i *v1alpha1.ToolIdentity) { i.IntentID[0] = `call.header["x"]` },
		"order of IDs":    func(i *v1alpha1.ToolIdentity) { slices.Reverse(i.IntentID) },
		"fewer IDs":       func(i *v1alpha1.ToolIdentity) { i.IntentID = i.IntentID[:1] },
		"scope":           func(i *v1alpha1.ToolIdentity) { i.Scope[0] = `path("x")` },
		"more scope":      func(i *v1alpha1.ToolIdentity) { i.Scope = append(i.Scope, `path("x")`) },
		"lineage":         func(i *v1alpha1.ToolIdentity) { i.Lineage = `path("x")` },
		"no lineage":      func(i *v1alpha1.ToolIdentity) { i.Lineage = "" },
		"amount":          func(i *v1alpha1.ToolIdentity) { i.Amount.Value = `1` },
		"currency":        func(i *v1alpha1.ToolIdentity) { i.Amount.Currency = `"EUR"` },
		"unit":            func(i *v1alpha1.ToolIdentity) { i.Amount.Unit = v1alpha1.UnitMinor },
		"no amount":       func(i *v1alpha1.ToolIdentity) { i.Amount = nil },
		"recipient":       func(i *v1alpha1.ToolIdentity) { i.Recipient = `"x"` },
		"other recipient": func(i *v1alpha1.ToolIdentity) { i.Recipient = `"y"` },
		"volatile":        func(i *v1alpha1.ToolIdentity) { i.Volatile = append(i.Volatile, "/x") },
		"addresses":       func(i *v1alpha1.ToolIdentity) { i.Addresses = []v1alpha1.JSONPointer{"/x"} },
	} {
		h := hash(withIdentity(change))
		if other, twice := seen[h]; twice {
			t.Errorf("%s and %s have one identity hash", name, other)
		}
		seen[h] = name
	}
	if hash() != base {
		t.Error("one identity has two hashes")
	}
}
