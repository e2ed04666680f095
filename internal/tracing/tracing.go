// Package tracing makes OpenTelemetry traces of calls, if the process is told to, by the
// environment variables that OpenTelemetry defines. It is off unless one of them names
// where traces go.
//
// What must hold: without it a call pays nothing for it; and a trace carries no body, no
// header and no error's text, which could hold a secret.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

const (
	// scope names what makes these spans.
	scope = "github.com/holdfast-dev/holdfast"
	// lastExport bounds the sending of what is left at the end of the process.
	lastExport = 5 * time.Second

	headerParent = "Traceparent"
)

// Provider sends traces until it is closed. Its nil value is tracing that is off.
type Provider struct{ sdk *sdktrace.TracerProvider }

// FromEnv makes the provider that the environment asks for; nil: it asks for none.
// OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT turn it on,
// OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none turn it off.
func FromEnv(ctx context.Context, log logr.Logger) (*Provider, error) {
	on, err := asked(os.Getenv)
	if err != nil || !on {
		return nil, err
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("export traces: %w", err)
	}
	// The later one wins: the environment's name of the service.
	is, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "holdfast")),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err), exporter.Shutdown(ctx))
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Error(err, "traces could not be exported") }))
	return New(sdktrace.WithBatcher(exporter), sdktrace.WithResource(is)), nil
}

// New makes a provider of these parts.
func New(parts ...sdktrace.TracerProviderOption) *Provider {
	return &Provider{sdk: sdktrace.NewTracerProvider(parts...)}
}

// asked says whether the environment asks for traces.
func asked(env func(string) string) (bool, error) {
	first := func(names ...string) (string, string) {
		for _, n := range names {
			if v := strings.TrimSpace(env(n)); v != "" {
				return n, v
			}
		}
		return names[0], ""
	}
	_, disabled := first("OTEL_SDK_DISABLED")
	name, exporter := first("OTEL_TRACES_EXPORTER")
	_, endpoint := first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	if strings.EqualFold(disabled, "true") || exporter == "none" || exporter == "" && endpoint == "" {
		return false, nil
	}
	if exporter != "" && exporter != "otlp" {
		return false, fmt.Errorf("%s=%s is not supported: use otlp, or none", name, exporter)
	}
	name, protocol := first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
	if protocol != "" && protocol != "http/protobuf" {
		return false, fmt.Errorf("%s=%s is not supported: use http/protobuf", name, protocol)
	}
	return true, nil
}

// Close sends what is left.
func (p *Provider) Close() error {
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastExport)
	defer cancel()
	if err := p.sdk.Shutdown(ctx); err != nil {
		return fmt.Errorf("export the last traces: %w", err)
	}
	return nil
}

// Call begins the span of a call that came at this time, in the trace that its caller
// names, if it names one. A nil Provider gives none.
func (p *Provider) Call(ctx context.Context, h http.Header, came time.Time) (context.Context, trace.Span) {
	if p == nil {
		return ctx, nil
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
	return p.sdk.Tracer(scope).Start(ctx, "call", trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(came))
}

// Child begins a span below the one that is recorded in ctx; if none is, it costs
// nothing and there is none.
func Child(ctx context.Context, name string) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	return parent.TracerProvider().Tracer(scope).Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
}

// Inject names the span of ctx to whoever is called with these headers. Only the parent
// is named: what the caller's own tools put into tracestate is the caller's affair.
func Inject(ctx context.Context, h http.Header) {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	if parent := carrier.Get("traceparent"); parent != "" {
		h.Set(headerParent, parent)
	}
}

// ID is the trace of a call's span, if it has one, or else the one that its caller's headers
// name; "": none.
func ID(span trace.Span, h http.Header) string {
	var is trace.SpanContext
	if span != nil {
		is = span.SpanContext()
	}
	if !is.IsValid() && len(h[headerParent]) > 0 {
		is = trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), propagation.HeaderCarrier(h)))
	}
	if !is.HasTraceID() {
		return ""
	}
	return is.TraceID().String()
}

// Fail marks a span as failed, with a word of the code's own.
func Fail(span trace.Span, word string) { span.SetStatus(codes.Error, word) }
