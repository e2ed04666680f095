package retrytest

import (
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/test/provider"
)

// This program is also the client that is killed.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "retry-test" {
		os.Exit(Main(context.Background(), os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// objects are a tool and its budget; the tests change them.
const objects = `
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
metadata: {name: payments, namespace: shop}
spec: {embedded: {}}
---
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IntentBudget
metadata: {name: refunds, namespace: shop}
spec: {storeRef: {name: payments}}
---
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: AgentTool
metadata: {name: charge, namespace: shop}
spec:
  effect: Mutating
  intentBudgetRef: {name: refunds}
  upstream:
    http: {url: "UPSTREAM/charges", methods: [POST], timeout: 5s, settleAfter: 300ms}
  identity:
    intentID: ['call.header["idempotency-key"]']
    scope: ['path("order", call.body.orderId)']
    amount: {value: call.body.amount, currency: '"USD"', unit: Major}
    recipient: call.body.accountId
    volatile: [/memo]
  idempotency: {key: {header: Idempotency-Key}}
---
`

const testDocument = `
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: RetryTest
spec:
  call:
    headers: {Idempotency-Key: "{{intent}}"}
    body: {accountId: a1, orderId: "{{order}}", amount: "{{number}}.00", memo: "sent {{now}}, request {{call}}"}
  effects:
    http: {url: "LEDGER/charges?orderId={{order}}", count: body.entries}
`

// shop is a provider with something in between.
type shop struct {
	t        *testing.T
	provider *provider.Provider
	ledger   string
	// upstream is what the tool calls.
	upstream string
	// text is what is in the file.
	text string
}

// newShop puts between in front of the provider; nil: nothing.
func newShop(t *testing.T, between func(ledger string) http.HandlerFunc) *shop {
	t.Helper()
	s := &shop{t: t, provider: provider.New(provider.Options{}), text: objects + testDocument}
	var err error
	if s.ledger, err = s.provider.Start(""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.provider.Close() })
	s.upstream = s.ledger
	if between != nil {
		server := httptest.NewServer(between(s.ledger))
		t.Cleanup(server.Close)
		s.upstream = server.URL
	}
	return s
}

// change changes what is in the file.
func (s *shop) change(old, by string) *shop {
	s.t.Helper()
	if !strings.Contains(s.text, old) {
		s.t.Fatalf("the file does not have %q", old)
	}
	s.text = strings.ReplaceAll(s.text, old, by)
	return s
}

func (s *shop) file() string {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "tool.yaml")
	text := strings.NewReplacer("UPSTREAM", s.upstream, "LEDGER", s.ledger).Replace(s.text)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// test runs the command and wants this end.
func (s *shop) test(code int, args ...string) string {
	s.t.Helper()
	return run(s.t, code, append([]string{"-f", s.file()}, args...)...)
}

func run(t *testing.T, code int, args ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	got := Main(t.Context(), args, strings.NewReader(""), &stdout, &stderr)
	if got != code {
		t.Fatalf("ended with %d, want %d\n%s%s", got, code, &stdout, &stderr)
	}
	return stdout.String() + stderr.String()
}

// says wants texts in a report.
func says(t *testing.T, report string, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(report, text) {
			t.Errorf("the report does not say %q:\n%s", text, report)
		}
	}
}

// pass sends a request on, with or without its key, and gives the answer.
func pass(ledger string, r *http.Request, body []byte, key string) (int, []byte, error) {
	request, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), r.Method, ledger+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, text, err
}

// booking books a request n times, the later ones after a while, and answers the first.
func booking(n int, after time.Duration) func(ledger string) http.HandlerFunc {
	return func(ledger string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			status, text, err := pass(ledger, r, body, r.Header.Get("Idempotency-Key"))
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			for range n - 1 {
				if after > 0 {
					later := r.Clone(context.WithoutCancel(r.Context()))
					time.AfterFunc(after, func() { _, _, _ = pass(ledger, later, body, "") })
					continue
				}
				_, _, _ = pass(ledger, r, body, "")
			}
			w.WriteHeader(status)
			_, _ = w.Write(text)
		}
	}
}

func TestAGoodToolPasses(t *testing.T) {
	s := newShop(t, nil)
	junit := filepath.Join(t.TempDir(), "junit.xml")
	report := s.test(Passed, "--local", "--junit", junit)
	says(t, report, "PASS     twice ", "PASS     at-once ", "PASS     lost-answer ", "PASS     killed-client ", "20 times at once: 1 effect", "One effect in each of 4 scenarios.")
	ledger, err := s.provider.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	// Each trial is an order of its own, and no order was paid twice.
	orders := map[string]int{}
	for _, e := range ledger.Entries {
		orders[e.OrderID]++
	}
	if len(orders) < len(scenarios) || len(orders) != ledger.Count {
		t.Errorf("%d entries for %d orders", ledger.Count, len(orders))
	}
	var suites junitSuites
	text, err := os.ReadFile(junit)
	if err != nil {
		t.Fatal(err)
	}
	if err := xml.Unmarshal(text, &suites); err != nil {
		t.Fatal(err)
	}
	if suites.Tests != 4 || suites.Failures != 0 || suites.Errors != 0 || len(suites.Suites) != 1 || len(suites.Suites[0].Cases) != 4 {
		t.Errorf("the JUnit file has %+v", suites)
	}
	for _, c := range suites.Suites[0].Cases {
		if c.Failure != nil || c.Error != nil || c.Class != "retry-test.shop.charge" {
			t.Errorf("the case is %+v", c)
		}
	}
}

// What moves money twice is found, and the report says where to look.
func TestAToolThatChargesTwiceIsFound(t *testing.T) {
	// declines the first request of an order after it has booked it, with an answer that
	// says that nothing was booked.
	lying := func(ledger string) http.HandlerFunc {
		var mu sync.Mutex
		seen := map[string]bool{}
		return func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			status, text, err := pass(ledger, r, body, "")
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			mu.Lock()
			first := !seen[r.Header.Get("Idempotency-Key")]
			seen[r.Header.Get("Idempotency-Key")] = true
			mu.Unlock()
			if first {
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			w.WriteHeader(status)
			_, _ = w.Write(text)
		}
	}
	for _, c := range []struct {
		name    string
		between func(ledger string) http.HandlerFunc
		change  func(*shop)
		says    []string
	}{
		{
			name: "the upstream books twice for one request", between: booking(2, 0),
			says: []string{"FAULT    twice ", "FAULT    at-once ", "FAULT    lost-answer ", "FAULT    killed-client ", "2 effects", "the upstream itself books twice",
				", sent once, key at the provider ", `counted: {"accountId":"a1"`, "A fault in 4 of 4 scenarios."},
		},
		{
			name: "the upstream sends again by itself, later", between: booking(2, 500*time.Millisecond),
			change: func(s *shop) { s.change("settleAfter: 300ms", "settleAfter: 2s") },
			says:   []string{"the upstream itself books twice", "A fault in 4 of 4 scenarios."},
		},
		{
			name: "the upstream says that nothing was booked", between: lying,
			says: []string{"FAULT    twice ", "The gateway has sent it 2 times", "sent 2 times"},
		},
		{
			name: "intent and scope are another's with each request",
			change: func(s *shop) {
				s.change(`call.header["idempotency-key"]`, `call.header["x-request-id"]`).change(`call.body.orderId`, `call.header["x-request-id"]`)
			},
			says: []string{"FAULT    twice ", "were taken for 2 intents", "FAULT    at-once ", "20 effects", "were taken for 20 intents", "and 15 more intents", "and 15 more\n"},
		},
		{
			name:   "the intent alone is another's with each request",
			change: func(s *shop) { s.change(`call.header["idempotency-key"]`, `call.header["x-request-id"]`) },
			says:   []string{"FAULT    twice ", "were taken for 2 intents", "UNKNOWN_HOLD 409"},
		},
		{
			name:   "what differs with each request is part of the request",
			change: func(s *shop) { s.change("    volatile: [/memo]\n", "") },
			says:   []string{"FAULT    twice ", "taken for another request", "spec.identity.volatile"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newShop(t, c.between)
			if c.change != nil {
				c.change(s)
			}
			junit := filepath.Join(t.TempDir(), "junit.xml")
			says(t, s.test(Fault, "--local", "--junit", junit), c.says...)
			text, err := os.ReadFile(junit)
			if err != nil {
				t.Fatal(err)
			}
			var suites junitSuites
			if err := xml.Unmarshal(text, &suites); err != nil {
				t.Fatal(err)
			}
			if suites.Failures == 0 || suites.Suites[0].Cases[0].Failure == nil || suites.Suites[0].Cases[0].Failure.Text == "" {
				t.Errorf("the JUnit file does not have the fault: %s", text)
			}
		})
	}
}

// What cannot be counted, or was not tested, is no pass.
func TestWhatCannotBeToldIsNoPass(t *testing.T) {
	const http_ = `    http: {url: "LEDGER/charges?orderId={{order}}", count: body.entries}`
	for _, c := range []struct {
		name    string
		between func(ledger string) http.HandlerFunc
		old, by string
		args    []string
		says    string
	}{
		{name: "a command that fails", args: []string{"--effects-command", "echo no ledger >&2; exit 3"}, says: "no ledger"},
		{name: "a command that prints no number", args: []string{"--effects-command", "echo one"}, says: `printed "one"`},
		{name: "a command that prints nothing", args: []string{"--effects-command", "true"}, says: `printed ""`},
		{name: "a command that prints less than nothing", args: []string{"--effects-command", "echo -1"}, says: "no count"},
		{name: "a command that always counts one", args: []string{"--effects-command", "echo 1"}, says: "Before anything was sent"},
		{name: "a command that never counts one", args: []string{"--effects-command", "echo 0"}, says: "no effect was counted"},
		{name: "a program that is not there", old: http_, by: `    command: [/no/such/program, "{{order}}"]`, says: "/no/such/program"},
		{name: "a count of all orders", old: "?orderId={{order}}", by: "", says: "there was 1 effect already"},
		{name: "a query that is not answered", old: "LEDGER/charges?", by: "http://127.0.0.1:1/charges?", says: "connection refused"},
		{name: "a query that is refused", old: "LEDGER/charges?", by: "LEDGER/nothing?", says: "answered 404"},
		{name: "an answer without the field", old: "count: body.entries", by: "count: body.items", says: "no such key: items"},
		{name: "a count that is no number", old: "count: body.entries", by: "count: string(body.count)", says: "must be a whole number"},
		{name: "a count that is no whole number", old: "count: body.entries", by: "count: body.count + 0.5", says: "must be a whole number"},
		{name: "calls that are refused", old: `orderId: "{{order}}", `, by: "", says: "400 invalid_request"},
		{name: "calls without a name", old: `headers: {Idempotency-Key: "{{intent}}"}`, by: "headers: {}", says: "names no intent"},
		{name: "purchases that overlap", old: `'path("order", call.body.orderId)'`, by: `'path("account", call.body.accountId)'`, says: "does the scope have {{order}}"},
		{
			name: "a tool that declines", says: "ALLOW 402",
			between: func(string) http.HandlerFunc {
				return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPaymentRequired) }
			},
		},
		{
			name: "a tool whose outcome is unknown", says: "UNKNOWN_HOLD 409",
			between: func(string) http.HandlerFunc {
				return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newShop(t, c.between)
			if c.old != "" {
				s.change(c.old, c.by)
			}
			report := s.test(CannotTell, append([]string{"--local"}, c.args...)...)
			says(t, report, "UNCLEAR", "It cannot be told", c.says)
		})
	}
}

// A command and an expression that yields a number count as well as a list.
func TestTheWaysToCount(t *testing.T) {
	t.Run("a command", func(t *testing.T) {
		s := newShop(t, booking(2, 0))
		report := s.test(Fault, "--local", "--effects-command", fmt.Sprintf(`grep -o '"id"' <<EOF | wc -l
$(bash -c 'exec 3<>/dev/tcp/%s; printf "GET /charges?orderId=$HOLDFAST_RETRY_ORDER HTTP/1.0\r\n\r\n" >&3; cat <&3')
EOF`, strings.Replace(strings.TrimPrefix(s.ledger, "http://"), ":", "/", 1)))
		says(t, report, "FAULT    twice ", "2 effects")
	})
	t.Run("a number", func(t *testing.T) {
		newShop(t, nil).change("count: body.entries", "count: body.count").test(Passed, "--local")
	})
	t.Run("an expression that picks", func(t *testing.T) {
		s := newShop(t, nil).change("/charges?orderId={{order}}", "/charges").change("count: body.entries", "count: 'body.entries.filter(e, e.orderId == order)'")
		s.test(Passed, "--local")
	})
	t.Run("a program that prints a list", func(t *testing.T) {
		count := command([]string{"printf", `[{"order":"%s"},1]`, "{{order}}"})
		f, err := count(t.Context(), newValues("run", 1), "twice")
		if err != nil || f.n != 2 || len(f.items) != 2 || f.items[0] != `{"order":"rt-run-1"}` {
			t.Errorf("got %+v, %v", f, err)
		}
	})
}

// A tool whose answers say nothing is asked what became of it, as by any gateway.
func TestAToolIsAskedWhatBecameOfIt(t *testing.T) {
	s := newShop(t, func(ledger string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			status, text, err := pass(ledger, r, body, r.Header.Get("Idempotency-Key"))
			if err != nil || r.Method == http.MethodPost {
				// So long that the next call meets it in flight.
				timer := time.NewTimer(300 * time.Millisecond)
				defer timer.Stop()
				<-timer.C
				status, text = http.StatusInternalServerError, nil
			}
			w.WriteHeader(status)
			_, _ = w.Write(text)
		}
	})
	s.change("  idempotency: {key: {header: Idempotency-Key}}\n", `  idempotency: {key: {header: Idempotency-Key}, inFlight: {mode: Reject}}
  unknownOutcome: StatusCheck
  statusCheck: {path: 'path("charges", intent.key)', outcome: 'response.status == 200 ? "Succeeded" : "Unknown"', finality: SettleAfter}
`)
	says(t, s.test(Passed, "--local"), "One effect in each of 4 scenarios.")
}
