package main

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/localagent"
)

// The example pays once, is run again, and is killed in the middle.
func TestTheExample(t *testing.T) {
	r := localagent.SetUp(t, nil)
	args := func(more ...string) []string {
		return append([]string{
			"-holdfast", r.URL, "-token-file", r.TokenFile, "-namespace", localagent.Namespace, "-tool", localagent.LocalTool,
			"-provider", r.ProviderURL, "-patience", "1m",
		}, more...)
	}
	outbox := filepath.Join(t.TempDir(), "outbox.db")
	for _, want := range []string{"order 9 is paid: ", "order 9 is paid (it was paid before): "} {
		var out bytes.Buffer
		if err := run(t.Context(), args("-outbox", outbox, "-order", "9"), &out); err != nil || !strings.HasPrefix(out.String(), want) {
			t.Fatalf("%q, %v", out.String(), err)
		}
	}
	if paid := r.Paid(t, "9"); paid != 1 {
		t.Errorf("paid %d times", paid)
	}
	var out bytes.Buffer
	err := run(t.Context(), args("-outbox", outbox, "-order", "10", "-provider-fault", "decline-402"), &out)
	var failed *client.FailedError
	if !errors.As(err, &failed) || failed.Result.Status != 402 {
		t.Fatal(err)
	}
	if err := run(t.Context(), args("-outbox", outbox, "-order", "11", "-provider-fault", "error-500-after-commit"), &out); !errors.Is(err, client.ErrHeld) {
		t.Fatal(err)
	}

	// Killed after the provider has paid, and before it had its answer.
	bin := filepath.Join(t.TempDir(), "local-tool")
	if text, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	outbox = filepath.Join(t.TempDir(), "outbox.db")
	process := exec.CommandContext(t.Context(), bin, args("-outbox", outbox, "-order", "12", "-provider-fault", "hold-after-commit")...)
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	paid(t, r, "12")
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = process.Wait() // it was killed
	r.Provider.Release(nil)
	out.Reset()
	if err := run(t.Context(), args("-outbox", outbox, "-order", "12"), &out); err != nil || !strings.HasPrefix(out.String(), "order 12 is paid (it was paid before): ") {
		t.Fatalf("%q, %v", out.String(), err)
	}
	if paid := r.Paid(t, "12"); paid != 1 {
		t.Errorf("paid %d times", paid)
	}
}

func paid(t *testing.T, r *localagent.Rig, order string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for r.Paid(t, order) == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("order %s was not paid", order)
		}
	}
}
