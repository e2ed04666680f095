package tracing

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

func TestWhatTheEnvironmentAsksFor(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	for _, c := range []struct {
		env     map[string]string
		on      bool
		refused string
	}{
		{env: nil},
		{env: map[string]string{"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}},
		{env: map[string]string{endpoint: "http://c:4318"}, on: true},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, on: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, on: true},
		{env: map[string]string{endpoint: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}},
		{env: map[string]string{endpoint: "http://c:4318", "OTEL_SDK_DISABLED": "True"}},
		{env: map[string]string{endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, on: true},
		{env: map[string]string{endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, refused: "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, refused: "OTEL_TRACES_EXPORTER=zipkin"},
	} {
		on, err := asked(func(name string) string { return c.env[name] })
		if on != c.on || (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%v: on is %v, error %v", c.env, on, err)
		}
	}
}

func TestTracesReachTheCollector(t *testing.T) {
	got := make(chan *collector.ExportTraceServiceRequest, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		request := &collector.ExportTraceServiceRequest{}
		if err != nil || proto.Unmarshal(body, request) != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("a request to %s that cannot be read: %v", r.URL.Path, err)
		}
		got <- request
	}))
	defer server.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.URL)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
	p, err := FromEnv(t.Context(), logr.Discard())
	if err != nil {
		t.Fatal(err)
	}
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	_, span := p.Call(t.Context(), http.Header{"Traceparent": {parent}}, time.Now())
	if id := ID(span, nil); id != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("the trace is %q, not the caller's", id)
	}
	span.End()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	text := (<-got).String()
	for _, want := range []string{`"service.name"`, `"holdfast"`, `"deployment.environment"`, `name:"call"`} {
		if !strings.Contains(text, want) {
			t.Errorf("what the collector got has no %s: %s", want, text)
		}
	}
}

// Without tracing the path of a call makes no garbage for it.
func TestOffCostsNothing(t *testing.T) {
	var off *Provider
	h := http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		ctx, span := off.Call(ctx, h, time.Time{})
		if _, child := Child(ctx, "x"); span != nil || child != nil {
			t.Error("there is a span")
		}
		if ID(span, nil) != "" {
			t.Error("there is a trace")
		}
	}); n > 0 {
		t.Errorf("tracing that is off allocates %v times", n)
	}
	if id := ID(nil, h); id != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("the caller's own trace is %q in the log", id)
	}
	for _, bad := range []string{"", "00-zz-1-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01", strings.Repeat("0", 5000)} {
		if id := ID(nil, http.Header{"Traceparent": {bad}}); id != "" {
			t.Errorf("%.40q is the trace %q", bad, id)
		}
	}
	if err := off.Close(); err != nil {
		t.Error(err)
	}
}
