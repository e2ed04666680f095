// What needs no cluster. The demo itself is run by CI.
package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func ledgerWith(requests int, entries ...provider.Entry) provider.Ledger {
	for i := range entries {
		if entries[i].Kind == "" {
			entries[i].Kind = provider.Refund
		}
	}
	return provider.Ledger{Entries: entries, Count: len(entries), Requests: map[string]int{"POST /refunds": requests}}
}

func TestTheLedgerIsJudged(t *testing.T) {
	one, two := provider.Entry{OrderID: "1", Amount: "49.99"}, provider.Entry{OrderID: "2", Amount: "5"}
	want := []paid{{"1", "49.99"}, {"2", "5"}}
	if err := judge(ledgerWith(2, one, two), want); err != nil {
		t.Errorf("the right ledger is refused: %v", err)
	}
	if err := judge(ledgerWith(0), nil); err != nil {
		t.Errorf("the right empty ledger is refused: %v", err)
	}
	for name, l := range map[string]provider.Ledger{
		"one is missing":             ledgerWith(1, one),
		"one came twice":             ledgerWith(3, one, two, two),
		"another amount":             ledgerWith(2, one, provider.Entry{OrderID: "2", Amount: "5.00"}),
		"another order":              ledgerWith(2, one, provider.Entry{OrderID: "3", Amount: "5"}),
		"the other way round":        ledgerWith(2, two, one),
		"a charge":                   ledgerWith(2, one, provider.Entry{OrderID: "2", Amount: "5", Kind: provider.Charge}),
		"one more request was sent":  ledgerWith(3, one, two),
		"nobody asked, and it paid?": ledgerWith(0, one, two),
	} {
		err := judge(l, want)
		if err == nil || !strings.Contains(err.Error(), "not what the story says") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheToolNamesTheProviderOfTheSamples(t *testing.T) {
	text, err := os.ReadFile("refund.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "http://127.0.0.1:18080/refunds"); n != 1 {
		t.Errorf("refund.yaml names the provider %d times: the demo replaces its port", n)
	}
}

func TestCommandsCanBePasted(t *testing.T) {
	for _, word := range []string{"", "get", "--for=condition=Ready", `{"reason":"it's \"here\""}`, "--for=jsonpath={.status.state}=Held", "a!=b", "$(x)"} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf %s "+shellWord(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q is shown as %s, which a shell reads as %q (%v)", word, shellWord(word), out, err)
		}
	}
}

func TestTextsAreWrapped(t *testing.T) {
	got := wrap("one two  three\nfour a-very-long-word five", 9, "  ")
	if want := "one two\n  three\n  four\n  a-very-long-word\n  five"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestTheTableHasEveryStep(t *testing.T) {
	var out bytes.Buffer
	d := &demo{out: &out, rows: []row{{what: "first", entries: 2, total: 2, took: 1500 * time.Millisecond}, {what: "second", total: 2}}}
	d.summary(20*time.Second, 25*time.Second)
	for _, want := range []string{"1     first          2            2              1.5 s", "2     second         0            2              0.0 s", "set up", "25.0 s in all"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
}

func TestNothingIsStartedForAWrongCall(t *testing.T) {
	if err := run(t.Context(), []string{"--no-such-flag"}, &bytes.Buffer{}); err == nil {
		t.Error("an unknown flag is accepted")
	}
	t.Setenv("USE_EXISTING_CLUSTER", "true")
	if err := run(t.Context(), nil, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "USE_EXISTING_CLUSTER") {
		t.Errorf("the demo would remove somebody else's data: %v", err)
	}
}
