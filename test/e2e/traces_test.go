// Traces, as a collector gets them: the trace that a caller names, or that a gateway
// begins, is the one of the log's line and the one that the upstream is named.

package e2e

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// serve has a handler answer at a port of its own, until the end of the spec.
func serve(h http.Handler) (url string) {
	GinkgoHelper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	server := &http.Server{Handler: h}
	go func() { _ = server.Serve(l) }() // it ends by being closed
	DeferCleanup(server.Close)
	return "http://" + l.Addr().String()
}

// spans are what a collector got.
type spans struct {
	mu  sync.Mutex
	all []*trace.Span
}

// ServeHTTP takes what OTLP sends over HTTP.
func (s *spans) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var got collector.ExportTraceServiceRequest
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &got) != nil {
		http.Error(w, "not traces", http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range got.ResourceSpans {
		for _, in := range of.ScopeSpans {
			s.all = append(s.all, in.Spans...)
		}
	}
}

// names are the spans of a trace, in the order of the alphabet.
func (s *spans) names(id string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, one := range s.all {
		if hex.EncodeToString(one.TraceId) == id {
			names = append(names, one.Name)
		}
	}
	slices.Sort(names)
	return names
}

// span is the identity of the one with this name; "": there is none.
func (s *spans) span(id, name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		if hex.EncodeToString(one.TraceId) == id && one.Name == name {
			return hex.EncodeToString(one.SpanId)
		}
	}
	return ""
}

// traceOf is the trace in the line of a call of this world.
func (w *world) traceOf(g gatewayProcess, id string) string {
	for _, line := range strings.Split(all.Processes().Tail(string(g), 400), "\n") {
		var got struct {
			Msg      string `json:"msg"`
			Tool     string `json:"tool"`
			IntentID string `json:"intentID"`
			Poll     bool   `json:"poll"`
			TraceID  string `json:"traceID"`
		}
		if json.Unmarshal([]byte(line), &got) == nil && got.Msg == "call" && got.Tool == w.namespace+"/"+charge && got.IntentID == id && !got.Poll {
			return got.TraceID
		}
	}
	return ""
}

var _ = Describe("Traces", func() {
	It("the trace in a call's line is that of its spans and the one that the upstream is named", func(ctx SpecContext) {
		got := &spans{}
		for name, value := range map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": serve(got), "OTEL_BSP_SCHEDULE_DELAY": "100"} {
			Expect(os.Setenv(name, value)).To(Succeed())
			DeferCleanup(os.Unsetenv, name)
		}
		g := other()
		g.crash(ctx)
		// Last in, first out: the variables are gone when it starts again.
		DeferCleanup(func(ctx context.Context) {
			for _, name := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY"} {
				Expect(os.Unsetenv(name)).To(Succeed())
			}
			g.crash(ctx)
		})

		var mu sync.Mutex
		parents := map[string]string{} // by order
		upstream := serve(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			var body struct {
				OrderID string `json:"orderId"`
			}
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				rw.WriteHeader(http.StatusBadRequest)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			parents[body.OrderID] = r.Header.Get("Traceparent")
			rw.WriteHeader(http.StatusCreated)
		}))
		w := newWorld(ctx, limited(func(tool *v1alpha1.AgentTool) { tool.Spec.Upstream.HTTP.URL = upstream }))

		const callers = "0af7651916cd43dd8448eb211c80319c"
		for id, header := range map[string]map[string]string{
			"named": {"Traceparent": "00-" + callers + "-b7ad6b7169203331-01"},
			"begun": nil,
			"async": rather(),
		} {
			got1 := w.call(ctx, call{id: id, body: w.order(id, "10"), header: header, at: g})
			Expect(got1.verdict()).To(Equal(allow), got1.String())
			var logged string
			Eventually(func() string { logged = w.traceOf(g, id); return logged }).WithContext(ctx).ShouldNot(BeEmpty(), id)
			if id == "named" {
				Expect(logged).To(Equal(callers))
			}
			Eventually(func() []string { return got.names(logged) }).WithContext(ctx).
				Should(ContainElements("attempt", "call", "store reserve", "store update"), id)
			mu.Lock()
			sent := parents[id]
			mu.Unlock()
			Expect(sent).To(Equal("00-"+logged+"-"+got.span(logged, "attempt")+"-01"), id)
		}
	})
})
