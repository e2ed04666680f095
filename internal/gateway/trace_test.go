package gateway

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/tracing"
)

const (
	callersTrace  = "0af7651916cd43dd8448eb211c80319c"
	callersParent = "00-" + callersTrace + "-b7ad6b7169203331-01"
)

// listening is a rig whose tools are at an upstream that notes what it was sent.
func listening(t *testing.T, settings ...setting) (r *rig, sent func() http.Header) {
	t.Helper()
	var mu sync.Mutex
	var last http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		last = req.Header
		w.WriteHeader(http.StatusCreated)
	}))
	t.Cleanup(upstream.Close)
	r = setUp(t, settings...)
	m := metrics.New(metrics.Options{})
	r.store.Store = m.Store(r.store.Store, metrics.Name{Namespace: namespace, Name: "payments"})
	at := func(tool *v1alpha1.AgentTool) { tool.Spec.Upstream.HTTP.URL = upstream.URL }
	r.tool("charge", "", at)
	r.tool("read", "", func(tool *v1alpha1.AgentTool) { readOnly(0)(tool); at(tool) })
	return r, func() http.Header {
		mu.Lock()
		defer mu.Unlock()
		return last
	}
}

func TestATraceOfACall(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	r, sent := listening(t, func(o *Options) { o.Traces = tracing.New(sdktrace.WithSpanProcessor(spans)) })
	header := map[string]string{"Traceparent": callersParent, "Tracestate": "vendor=secret"}
	// The guard's first question to a store is another one.
	r.pay(ask{id: "k0", body: refundOf("8", "1")}, 201, guard.Allow)
	eventually(t, "the first call's span ends", func() bool { n := len(spans.Ended()); return n > 0 && spans.Ended()[n-1].Name() == "call" })
	spans.Reset()
	r.pay(ask{id: "k1", body: refundOf("9", "1"), header: header}, 201, guard.Allow)
	var names []string
	eventually(t, "the span of the call ends", func() bool {
		names = nil
		for _, s := range spans.Ended() {
			names = append(names, s.Name())
		}
		return strings.Join(names, ", ") == "store reserve, attempt, store update, call"
	})
	ended := spans.Ended()
	call, attempt := ended[3], ended[1]
	for _, s := range ended {
		if id := s.SpanContext().TraceID().String(); id != callersTrace {
			t.Errorf("the span %s is of the trace %s, not the caller's", s.Name(), id)
		}
		if s != call && s.Parent().SpanID() != call.SpanContext().SpanID() {
			t.Errorf("the span %s is not below the call's", s.Name())
		}
	}
	if id := call.Parent().SpanID().String(); id != "b7ad6b7169203331" {
		t.Errorf("the call's parent is %s, not the caller's span", id)
	}
	if got, want := sent().Get("Traceparent"), "00-"+callersTrace+"-"+attempt.SpanContext().SpanID().String()+"-01"; got != want {
		t.Errorf("upstream got the parent %q, not the attempt's %q", got, want)
	}
	if got := sent().Get("Tracestate"); got != "" {
		t.Errorf("upstream got the header tracestate %q, which the tool does not let through", got)
	}
	is := map[string]string{}
	for _, kv := range call.Attributes() {
		is[string(kv.Key)] = kv.Value.String()
	}
	for k, want := range map[string]string{
		"holdfast.tool": "charge", "holdfast.intent_id": "k1", "holdfast.verdict": "ALLOW", "http.response.status_code": "201",
	} {
		if is[k] != want {
			t.Errorf("the call's %s is %q, not %q", k, is[k], want)
		}
	}
	if !strings.Contains(r.logged(), `"traceID"="`+callersTrace+`"`) {
		t.Errorf("the line of the call does not name its trace: %s", r.logged())
	}

	// A read is traced, too; whoever is not known has nothing traced.
	r.pay(ask{tool: "read", method: "GET", header: header}, 201, guard.Allow)
	eventually(t, "the span of the read ends", func() bool { return len(spans.Ended()) == 6 })
	if !strings.HasPrefix(sent().Get("Traceparent"), "00-"+callersTrace+"-") {
		t.Errorf("upstream of the read got the parent %q", sent().Get("Traceparent"))
	}
	r.people.mu.Lock()
	r.people.forbidden["system:serviceaccount:"+namespace+":intruder"] = true
	r.people.mu.Unlock()
	r.pay(ask{caller: "intruder", id: "k9", body: "{}", header: header}, 403, "")
	r.pay(ask{id: "k1", body: refundOf("9", "1"), header: header}, 201, guard.Replay)
	eventually(t, "the replay's spans end", func() bool { return len(spans.Ended()) == 8 })
}

// Without tracing the caller's header goes upstream as any other: if the tool lets it through.
func TestWithoutTracingTheToolDecides(t *testing.T) {
	r, sent := listening(t)
	header := map[string]string{"Traceparent": callersParent}
	r.pay(ask{id: "k1", body: refundOf("9", "1"), header: header}, 201, guard.Allow)
	if got := sent().Get("Traceparent"); got != "" {
		t.Errorf("upstream got %q, which the tool does not let through", got)
	}
	eventually(t, "the line of the call names the caller's trace", func() bool {
		return strings.Contains(r.logged(), `"traceID"="`+callersTrace+`"`)
	})
	tool, err := r.tools.Load().Tool(namespace, "charge")
	if err != nil {
		t.Fatal(err)
	}
	at := tool.Upstream.URL.String()
	r.tool("charge", "", func(t *v1alpha1.AgentTool) {
		t.Spec.Upstream.HTTP.URL = at
		t.Spec.Upstream.HTTP.RequestHeaders = append(t.Spec.Upstream.HTTP.RequestHeaders, "traceparent")
	})
	r.pay(ask{id: "k2", body: refundOf("10", "1"), header: header}, 201, guard.Allow)
	if got := sent().Get("Traceparent"); got != callersParent {
		t.Errorf("upstream got %q, which the tool lets through", got)
	}
}
