package retrytest

import (
	"encoding/xml"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What is wrong with a file is said before anything is sent, as the API server says it.
func TestWhatIsWrongWithAFileIsSaid(t *testing.T) {
	for _, c := range []struct {
		name     string
		old, by  string
		text     string // instead of the whole file
		args     []string
		want     string
		wantToo  string
		atGlance bool // without --local
	}{
		{name: "no YAML", text: "a: [", want: "document 1", wantToo: "is not YAML"},
		{name: "a key that comes twice", old: "effect: Mutating", by: "effect: Mutating\n  effect: ReadOnly", want: `key "effect" already set`},
		{name: "no object", text: "just text", want: "document 1: is no object"},
		{name: "another version", old: "v1alpha1\nkind: AgentTool", by: "v1\nkind: AgentTool", want: "this version knows guardrails.holdfast.dev/v1alpha1"},
		{name: "no test", text: objects, want: "no document of kind RetryTest"},
		{name: "two tests", text: objects + testDocument + "---" + testDocument, want: "second RetryTest"},
		{name: "a field of the test that is not there", old: "  effects:\n", by: "  efects: {}\n  effects:\n", want: `unknown field "efects"`},
		{name: "a field of the tool that is not there", old: "effect: Mutating", by: "effect: Mutating\n  retries: 3", want: "AgentTool charge is not valid: spec.retries: there is no such field"},
		{name: "a value that the schema refuses", old: "methods: [POST]", by: "methods: [post]", want: `Unsupported value: "post"`},
		{name: "a rule that the schema has", old: "settleAfter: 300ms", by: "settleAfter: 1ms", want: "settleAfter must be between 100ms and 720h"},
		{name: "a field that a rule asks for", old: ", settleAfter: 300ms", by: "", want: "a Mutating tool needs upstream.http.settleAfter"},
		{name: "a budget that the schema refuses", old: "spec: {storeRef: {name: payments}}", by: "spec: {storeRef: {name: payments}, maxHeld: {total: 0}}", want: "IntentBudget refunds is not valid: spec.maxHeld.total"},
		{name: "a store that the schema refuses", old: "spec: {embedded: {}}", by: "spec: {}", want: "IdempotencyStore payments is not valid"},
		{name: "a name that is none", old: "{name: charge, ", by: "{name: Charge_, ", want: "metadata.name"},
		{name: "an expression that is none", old: "'path(\"order\", call.body.orderId)'", by: "'path(\"order\", call.body.'", want: "spec.identity.scope[0]"},
		{name: "no budget", old: "name: refunds, namespace: shop", by: "name: others, namespace: shop", want: `IntentBudget "refunds" does not exist`},
		{name: "no tool", text: testDocument, want: "spec.toolRef is missing"},
		{name: "no such tool", old: "kind: RetryTest\nspec:\n", by: "kind: RetryTest\nspec:\n  toolRef: {name: refund}\n", want: `spec.toolRef names "refund"`, wantToo: "they have charge"},
		{name: "two namespaces", args: []string{"--namespace", "other"}, want: "in namespace other and in shop"},
		{name: "no placeholder", old: "{{order}}", by: "{{ordre}}", want: "{{ordre}} is no placeholder"},
		{name: "a placeholder that is not for bodies", old: "accountId: a1", by: `accountId: "{{env.HOME}}"`, want: "{{env.HOME}} is no placeholder"},
		{name: "a variable that is not there", old: "headers: {", by: `headers: {X-A: "{{env.HOLDFAST_TEST_ABSENT}}", `, want: "HOLDFAST_TEST_ABSENT is not in the environment"},
		{name: "an Authorization", old: "headers: {", by: `headers: {authorization: x, `, want: "must not have Authorization"},
		{name: "a method that is none", old: "  call:\n", by: "  call:\n    method: post\n", want: "spec.call.method"},
		{name: "no way to count", old: "    http: {url: \"LEDGER/charges?orderId={{order}}\", count: body.entries}", by: "    {}", want: "exactly one of http and command"},
		{name: "two ways to count", old: "  effects:\n", by: "  effects:\n    command: [x]\n", want: "exactly one of http and command"},
		{name: "a count that does not compile", old: "count: body.entries", by: "count: 'bodi.entries'", want: "undeclared reference to 'bodi'"},
		{name: "no count", old: ", count: body.entries", by: ", count: ''", want: "spec.effects.http.count: is missing"},
		{name: "too many at once", old: "  call:\n", by: "  atOnce: 51\n  call:\n", want: "spec.atOnce must be between 2 and 50"},
		{name: "no patience", old: "  call:\n", by: "  patience: 1ms\n  call:\n", want: "spec.patience must be between"},
		{name: "a tool that settles in days", old: "settleAfter: 300ms", by: "settleAfter: 72h", want: "say how long this test is to watch"},
		{name: "no credential", old: "timeout: 5s", by: "timeout: 5s, credentialsFrom: {header: Authorization, secretRef: {name: provider, key: token}}", want: "--secret-from-env provider/token=VARIABLE"},
		{name: "an upstream that is none", args: []string{"--upstream", "ftp://x"}, want: "spec.upstream.http.url"},
		{name: "no gateway", atGlance: true, want: "which gateway?"},
		{name: "no token", atGlance: true, args: []string{"--url", "http://127.0.0.1:1"}, want: "who calls?"},
		{name: "a gateway that is no URL", atGlance: true, args: []string{"--url", "127.0.0.1:1"}, want: "must be like https://"},
		{name: "local and not", args: []string{"--url", "http://127.0.0.1:1"}, want: "--local needs no cluster"},
		{name: "an argument too many", args: []string{"tool.yaml"}, want: `unknown argument "tool.yaml"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(envURL, "")
			t.Setenv(envToken, "")
			s := newShop(t, nil)
			if c.old != "" {
				s.change(c.old, c.by)
			}
			if c.text != "" {
				s.text = c.text
			}
			args := c.args
			if !c.atGlance {
				args = append([]string{"--local"}, args...)
			}
			junit := filepath.Join(t.TempDir(), "junit.xml")
			report := s.test(CannotTell, append([]string{"--junit", junit}, args...)...)
			says(t, strings.ToLower(report), strings.ToLower(c.want), strings.ToLower(c.wantToo))
			if ledger, err := s.provider.Ledger(); err != nil || len(ledger.Requests) > 0 {
				t.Errorf("something was sent: %v, %v", ledger.Requests, err)
			}
			var suites junitSuites
			if text, err := os.ReadFile(junit); err != nil || xml.Unmarshal(text, &suites) != nil || suites.Errors != 1 {
				t.Errorf("the JUnit file does not have the error: %s, %v", text, err)
			}
		})
	}
}

func TestNoFile(t *testing.T) {
	says(t, run(t, CannotTell, "--local"), "name a file with -f")
	says(t, run(t, CannotTell, "--local", "-f", filepath.Join(t.TempDir(), "none.yaml")), "none.yaml: no such file")
	says(t, run(t, CannotTell, "--no-such-flag"), "flag provided but not defined")
	says(t, run(t, Passed, "-h"), "Usage: manager retry-test")
}

// A file that a team applies to a cluster is tested as it is, its credential included.
func TestTheSamples(t *testing.T) {
	const secret = "sandbox-token"
	seen := make(chan string, 1000)
	s := newShop(t, func(ledger string) http.HandlerFunc {
		book := booking(1, 0)(ledger)
		return func(w http.ResponseWriter, r *http.Request) {
			seen <- r.Header.Get("Authorization")
			book(w, r)
		}
	})
	t.Setenv("SANDBOX", secret)
	path := filepath.Join(t.TempDir(), "test.yaml")
	test := strings.NewReplacer("LEDGER", s.ledger, "kind: RetryTest\nspec:\n", "kind: RetryTest\nspec:\n  toolRef: {name: charge-card}\n",
		"amount:", "currency: USD, amount:", "body.entries}", "body.entries}\n    settleWithin: 200ms").Replace(testDocument)
	if err := os.WriteFile(path, []byte(test), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--local", "-f", "../../config/samples/support.yaml", "-f", path, "--upstream", s.upstream + "/charges"}
	run(t, Passed, args...)
	if got := <-seen; got != "Bearer local-test-provider" {
		t.Errorf("the upstream got the credential %q, want the one of the file", got)
	}
	for len(seen) > 0 {
		<-seen
	}
	report := run(t, Passed, append(args, "--secret-from-env", "provider/token=SANDBOX")...)
	if got := <-seen; got != "Bearer "+secret {
		t.Errorf("the upstream got the credential %q, want the one of the environment", got)
	}
	says(t, report, "the upstream is "+s.upstream)
	if strings.Contains(report, secret) {
		t.Errorf("the report shows the credential: %s", report)
	}
}

// The sample for the README's first tool works, and the page shows it.
func TestTheSampleOfThePage(t *testing.T) {
	const sample = "../../config/samples/retry-test/refund.yaml"
	s := newShop(t, nil)
	t.Setenv("PROVIDER_URL", s.ledger)
	run(t, Passed, "--local", "-f", "../../config/samples/minimal.yaml", "-f", sample, "--upstream", s.ledger+"/refunds")
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/retry-test.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "```yaml\n"+string(text)+"```\n") {
		t.Errorf("docs/retry-test.md does not show %s as it is", sample)
	}
}

// A gateway that runs is called with the token that it is given, by flag or environment.
func TestAGatewayThatRuns(t *testing.T) {
	s := newShop(t, nil)
	docs, err := read([]string{s.file()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := docs.plan(options{})
	if err != nil {
		t.Fatal(err)
	}
	gw, err := startLocal(t.Context(), options{}, docs, p, nil, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gw.stop(); err != nil {
			t.Error(err)
		}
	})
	t.Setenv(envURL, gw.url+"/")
	t.Setenv(envToken, gw.token)
	says(t, s.test(Passed), "through the gateway "+gw.url, "it was not compared with the files")

	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(gw.token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(envURL, "")
	t.Setenv(envToken, "wrong")
	s.test(Passed, "--url", gw.url, "--token-file", token)
	says(t, s.test(CannotTell, "--url", gw.url), "401 unauthenticated")
	// The test alone says enough for a tool that is in the cluster.
	s.text = strings.Replace(testDocument, "spec:\n  call:\n", "metadata: {namespace: shop}\nspec:\n  toolRef: {name: charge}\n  call:\n    method: POST\n", 1)
	says(t, s.test(CannotTell, "--url", gw.url, "--token-file", token), "settleWithin is missing")
	s.change("    http: {", "    settleWithin: 100ms\n    http: {")
	s.test(Passed, "--url", gw.url, "--token-file", token)
}

// The agent is gone while the upstream works: its request is in flight, and is not made again.
func TestTheAgentIsGoneInTheMiddle(t *testing.T) {
	s := newShop(t, func(ledger string) http.HandlerFunc {
		book := booking(1, 0)(ledger)
		return func(w http.ResponseWriter, r *http.Request) {
			timer := time.NewTimer(300 * time.Millisecond)
			defer timer.Stop()
			<-timer.C
			book(w, r)
		}
	})
	s.change("idempotency: {key: {header: Idempotency-Key}}", "idempotency: {key: {header: Idempotency-Key}, inFlight: {mode: Reject, retryAfter: 1s}}")
	rep := &report{}
	if err := test(t.Context(), options{files: list{s.file()}, local: true}, rep, nil, os.Stderr); err != nil {
		t.Fatal(err)
	}
	for _, x := range rep.results {
		if x.verdict != passed {
			t.Errorf("%s: %s: %v", x.scenario, x.verdict, x.lines())
		}
		if x.scenario != "lost-answer" && x.scenario != "killed-client" {
			continue
		}
		last := x.trials[len(x.trials)-1]
		if !last.arrived || last.answers[0].verdict != "IN_FLIGHT" || last.calls[0].last.verdict != "REPLAY" {
			t.Errorf("%s: the agent was not gone in the middle: %s", x.scenario, last.summary())
		}
	}
}

// A gateway that loses what it was doing when its caller leaves would not be noticed by
// calls that never arrive: that is no pass.
func TestARequestThatNeverArrivesShowsNothing(t *testing.T) {
	r := &result{scenario: "killed-client"}
	ok := &answer{status: 201, verdict: "ALLOW", intent: "i", attempt: 1}
	for range goneAfter {
		r.trials = append(r.trials, &trial{answers: []*answer{ok}, calls: []outcome{{last: ok}}, counted: true, most: found{n: 1}, last: found{n: 1}})
	}
	if r.judge(); r.verdict != unclear {
		t.Errorf("the verdict is %s, want %s", r.verdict, unclear)
	}
	r.trials[len(r.trials)-1].arrived = true
	if r.judge(); r.verdict != passed {
		t.Errorf("the verdict is %s, want %s", r.verdict, passed)
	}
}

func TestPlaceholders(t *testing.T) {
	t.Setenv("HOLDFAST_TEST_VALUE", "from outside")
	v := newValues("run", 3)
	v.call = 2
	got, err := v.fill(where{calls: true, env: true}, "{{intent}} {{ order }} {{number}} {{call}} {{env.HOLDFAST_TEST_VALUE}} {\"a\":{\"b\":1}}")
	if want := `retry-run-3 rt-run-3 3 2 from outside {"a":{"b":1}}`; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	p := &plan{namespace: "n", tool: "t", call: CallSpec{Method: "POST", Body: []byte(`{"a":["{{order}}",{"b":9007199254740993}],"c":"\"{{intent}}\""}`)}}
	w, err := p.request(v, "http://g")
	if want := `{"a":["rt-run-3",{"b":9007199254740993}],"c":"\"retry-run-3\""}`; err != nil || string(w.Body) != want || w.Header.Get("Content-Type") != "application/json" {
		t.Errorf("got %s, %v, %v, want %s", w.Body, w.Header, err, want)
	}
	p.call.Body = []byte(`"order={{digits}}&n={{number}}"`)
	w, err = p.request(v, "http://g")
	if want := "order=" + v.digits + "&n=3"; err != nil || string(w.Body) != want || w.Header.Get("Content-Type") != "" {
		t.Errorf("got %s, %v, %v, want %s", w.Body, w.Header, err, want)
	}
	if a, b := newValues("run", 1), newValues("run", 2); a.order == b.order || a.intent == b.intent || a.digits == b.digits {
		t.Errorf("two trials have one name: %+v, %+v", a, b)
	}
}
