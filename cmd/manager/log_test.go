package main

import (
	"bytes"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

func TestABurstLosesNoEvidence(t *testing.T) {
	var out bytes.Buffer
	sampled, whole := loggers(zap.Options{DestWriter: &out})
	const burst = 1000
	for range burst {
		sampled.Info("a call")
		whole.WithName("evidence").Info("an answer that nobody kept", "attempt", 1)
		whole.Error(nil, "a result that was not written")
	}
	text := out.String()
	if n := strings.Count(text, "an answer that nobody kept"); n != burst {
		t.Errorf("of %d lines of evidence %d were written", burst, n)
	}
	if n := strings.Count(text, "a result that was not written"); n != burst {
		t.Errorf("of %d errors %d were written", burst, n)
	}
	if n := strings.Count(text, "a call"); n < 100 || n > burst/2 {
		t.Errorf("of %d ordinary lines %d were written: they are to be sampled", burst, n)
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "{") || !strings.HasSuffix(line, "}\n") {
			t.Fatalf("not a line of JSON: %q", line)
		}
	}
}
