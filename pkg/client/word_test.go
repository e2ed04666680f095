// This file is what a client makes of Holdfast's word: which state is an end, what is no
// word of Holdfast's at all, and a result that Holdfast will never take.

package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/localagent"
)

// A tool's rules may read any status in any way: the client goes by what they make of it.
func TestCallGoesByTheState(t *testing.T) {
	r := localagent.SetUp(t, func(tool *v1alpha1.AgentTool) {
		if tool.Name == localagent.HTTPTool {
			tool.Spec.Outcomes = []v1alpha1.OutcomeRule{
				{Status: "402", Outcome: v1alpha1.OutcomeSucceeded},
				{When: `has(response.body.id)`, Outcome: v1alpha1.OutcomeFailed},
			}
		}
	})
	b := open(t, r, nil)
	for n := range 2 { // live, and as a replay
		in := client.Intent{Tool: localagent.HTTPTool, ID: "c2", Body: localagent.Body("c2"), Header: http.Header{"Provider-Fault": {"decline-402"}}}
		res, err := b.Call(within(t, time.Minute), in)
		if v := r.State(t, localagent.HTTPTool, "c2"); err != nil || res.Status != 402 || v.State != guard.Succeeded || res.Replayed != (n > 0) {
			t.Errorf("402 is read as paid: %+v, %v; %s", res, err, v.State)
		}
		in = client.Intent{Tool: localagent.HTTPTool, ID: "c6", Body: localagent.Body("c6")}
		_, err = b.Call(within(t, time.Minute), in)
		var failed *client.FailedError
		if v := r.State(t, localagent.HTTPTool, "c6"); !errors.As(err, &failed) || failed.Result.Status != 201 || v.State != guard.Failed {
			t.Errorf("201 is read as a failure: %v; %s", err, v.State)
		}
	}
	for _, h := range []http.Header{{"Prefer": {"respond-async"}}, {"prefer": {"return=minimal, Wait = 5"}}, {"Prefer": {"x", "RESPOND-ASYNC;a=b"}}} {
		in := client.Intent{Tool: localagent.HTTPTool, ID: "c7", Body: localagent.Body("c7"), Header: h}
		if _, err := b.Call(within(t, time.Minute), in); err == nil || !strings.Contains(err.Error(), "Prefer") {
			t.Errorf("%v: %v", h, err)
		}
	}
	in := client.Intent{Tool: localagent.HTTPTool, ID: "c8", Body: localagent.Body("c8"), Header: http.Header{"Prefer": {"return=representation"}, "Provider-Fault": {"decline-402"}}}
	if _, err := b.Call(within(t, time.Minute), in); err != nil {
		t.Error(err)
	}
	b.pending(t, 0)
}

// said is one answer of a Holdfast that is made up.
type said struct {
	status  int
	verdict string
	state   string
	body    string
}

const problemType = "application/problem+json"

// madeUp is a Holdfast that says to each action what is next, and in the end the last again.
// The action is claim, renew or settle, and otherwise the tool's name.
type madeUp struct {
	*client.Client
	mu    sync.Mutex
	next  map[string][]said
	asked map[string]int
	// settling is called for each settlement, claimed for the next claim, before it is answered.
	settling, claimed func()
	// brought is the last settlement.
	brought string
}

// offersBriefly has a result offered for a moment only, since it is not taken.
func offersBriefly(o *client.Options) { o.SettleFor = 300 * time.Millisecond }

func (m *madeUp) count(what string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked[what]
}

func (m *madeUp) left(t *testing.T, want int) {
	t.Helper()
	if got, err := m.Pending(); err != nil || len(got) != want {
		t.Fatalf("pending: %+v, %v; want %d", got, err, want)
	}
}

func (m *madeUp) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	what := filepath.Base(r.URL.Path)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	m.asked[what]++
	if what == "settle" {
		m.brought = string(body)
	}
	if what == "settle" && m.settling != nil {
		m.settling()
	}
	if what == "claim" && m.claimed != nil {
		m.claimed()
		m.claimed = nil
	}
	// An answer for one intent alone comes first.
	list := filepath.Base(filepath.Dir(r.URL.Path)) + "/" + what
	if m.next[list] == nil {
		list = what
	}
	s := m.next[list][0]
	if len(m.next[list]) > 1 {
		m.next[list] = m.next[list][1:]
	}
	m.mu.Unlock()
	h := w.Header()
	for name, value := range map[string]string{"Holdfast-Verdict": s.verdict, "Holdfast-State": s.state} {
		if value != "" {
			h.Set(name, value)
		}
	}
	if h.Set("Content-Type", "application/json"); strings.Contains(s.body, `"reason"`) {
		h.Set("Content-Type", problemType)
	}
	w.WriteHeader(s.status)
	_, _ = io.WriteString(w, s.body)
}

var mayRun = said{201, "ALLOW", "InFlight", `{"attempt":1,"fence":"f","run_for_ms":30000,"provider_key":"k"}`}

func makeUp(t *testing.T, next map[string][]said, change ...func(*client.Options)) *madeUp {
	t.Helper()
	m := &madeUp{next: next, asked: map[string]int{}}
	s := httptest.NewServer(m)
	t.Cleanup(s.Close)
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := client.Options{URL: s.URL, Namespace: "ns", TokenFile: token, Outbox: filepath.Join(dir, "outbox")}
	for _, change := range change {
		change(&o)
	}
	var err error
	if m.Client, err = client.Open(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

func TestWhatIsNoEnd(t *testing.T) {
	in := client.Intent{Tool: "tool", ID: "a"}
	t.Run("a call that goes on without its caller", func(t *testing.T) {
		m := makeUp(t, map[string][]said{"tool": {{202, "ALLOW", "InFlight", "{}"}, {409, "IN_FLIGHT", "", "{}"}, {201, "REPLAY", "Succeeded", "paid"}}})
		if res, err := m.Call(within(t, time.Minute), in); err != nil || string(res.Body) != "paid" {
			t.Fatalf("%+v, %v", res, err)
		}
		m.left(t, 0)
	})
	t.Run("and does not come to its end", func(t *testing.T) {
		m := makeUp(t, map[string][]said{"tool": {{202, "ALLOW", "InFlight", "{}"}}})
		if res, err := m.Call(within(t, 300*time.Millisecond), in); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%+v, %v", res, err)
		}
		m.left(t, 1)
	})
	t.Run("an answer that does not say", func(t *testing.T) {
		for _, s := range []said{{201, "ALLOW", "", "{}"}, {402, "REPLAY", "", "{}"}} {
			m := makeUp(t, map[string][]said{"tool": {s}, "claim": {s}})
			res, err := m.Call(within(t, time.Minute), in)
			var failed *client.FailedError
			if err == nil || errors.As(err, &failed) || !strings.Contains(err.Error(), "Holdfast-State") {
				t.Fatalf("%+v, %v", res, err)
			}
			m.left(t, 1)
		}
	})
	t.Run("a replay of a claim", func(t *testing.T) {
		m := makeUp(t, map[string][]said{"claim": {{402, "REPLAY", "Succeeded", "paid"}}})
		if res, err := m.Do(within(t, time.Minute), in, pay(new(atomic.Int32))); err != nil || string(res.Body) != "paid" {
			t.Fatalf("%+v, %v", res, err)
		}
	})
	t.Run("a 200 that is not Holdfast's", func(t *testing.T) {
		paid := new(atomic.Int32)
		m := makeUp(t, map[string][]said{"claim": {mayRun}, "settle": {{200, "", "", `{"state":"Succeeded"}`}, {200, "ALLOW", "Succeeded", `{}`}, {200, "ALLOW", "Succeeded", `{"state":"Succeeded"}`}}})
		if _, err := m.Do(within(t, time.Minute), in, pay(paid)); err != nil || m.count("settle") != 3 || paid.Load() != 1 {
			t.Fatalf("%v after %d settlements", err, m.count("settle"))
		}
		m = makeUp(t, map[string][]said{"claim": {mayRun}, "settle": {{200, "", "", `{"state":"Succeeded"}`}}}, offersBriefly)
		var unsettled *client.UnsettledError
		if _, err := m.Do(within(t, time.Minute), in, pay(paid)); !errors.As(err, &unsettled) || !unsettled.Paid || unsettled.Answered != "" {
			t.Fatal(err)
		}
		m.left(t, 1)
	})
	t.Run("what was paid is not denied", func(t *testing.T) {
		m := makeUp(t, map[string][]said{"claim": {{403, "DENY", "", `{"title":"The payment was made","reason":"marked_paid"}`}}})
		if _, err := m.Do(within(t, time.Minute), in, pay(new(atomic.Int32))); !errors.Is(err, client.ErrPaid) || errors.Is(err, client.ErrDenied) {
			t.Fatal(err)
		}
	})
}

func TestTheStartOfAnAnswerIsNoWholeOne(t *testing.T) {
	r := localagent.SetUp(t, func(tool *v1alpha1.AgentTool) {
		tool.Spec.Idempotency.Record = &v1alpha1.RecordSpec{MaxBodyBytes: resource.NewQuantity(1<<10, resource.BinarySI)}
	})
	b := open(t, r, nil)
	for n := range 2 {
		res, err := b.Do(within(t, time.Minute), intentFor("long"), func(context.Context, *client.Attempt) (client.Result, error) {
			return client.Result{Body: []byte(strings.Repeat("x", 3<<10))}, nil
		})
		if n == 0 {
			continue
		}
		if err != nil || !res.Truncated || res.Size != 3<<10 || len(res.Body) != 1<<10 || !strings.HasPrefix(res.Digest, "sha256:") {
			t.Fatalf("%d bytes, %v %d %q, %v", len(res.Body), res.Truncated, res.Size, res.Digest, err)
		}
	}
}

// A claim that Holdfast does not know any more can never be settled: it stays until a person
// has looked at it, and is not run again.
func TestAResultThatIsNeverTaken(t *testing.T) {
	r := localagent.SetUp(t, nil)
	paid := new(atomic.Int32)
	b := open(t, r, nil)
	token := func(name string) {
		if err := os.WriteFile(r.TokenFile, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	payAs := func(name string) client.Func {
		return func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			token(name) // whoever claimed is gone
			return pay(paid)(ctx, a)
		}
	}
	fate := func(id string) *client.UnsettledError {
		t.Helper()
		_, err := b.Do(within(t, time.Minute), intentFor(id), payAs("another"))
		var unsettled *client.UnsettledError
		if !errors.As(err, &unsettled) || !unsettled.Paid || !strings.Contains(unsettled.Answered, "no_such_claim") || !strings.Contains(err.Error(), "ForgetUnsettled") {
			t.Fatal(err)
		}
		return unsettled
	}
	words := fate("gone").Answered
	got := b.pending(t, 1)[0]
	if got.Answered != words || got.Outcome != "Succeeded" || string(got.Result.Body) != "paid 1" || got.Result.ProviderReference != "pay_1" {
		t.Fatalf("pending: %+v", got)
	}
	if err := b.Recover(within(t, time.Minute), pay(paid)); err == nil || paid.Load() != 1 {
		t.Fatalf("%v after %d runs", err, paid.Load())
	}
	for name, forget := range map[string]func() error{
		"by the way":             func() error { return b.Forget(t.Context(), localagent.LocalTool, "gone") },
		"without having read it": func() error { return b.ForgetUnsettled(t.Context(), localagent.LocalTool, "gone", "") },
		"another one":            func() error { return b.ForgetUnsettled(t.Context(), localagent.LocalTool, "other", words) },
	} {
		if forget() == nil {
			t.Fatalf("forgotten %s", name)
		}
	}
	b.pending(t, 1)
	if err := b.ForgetUnsettled(t.Context(), localagent.LocalTool, "gone", words); err != nil {
		t.Fatal(err)
	}
	b.pending(t, 0)
	if _, err := b.Do(within(t, time.Minute), intentFor("gone"), pay(paid)); !errors.Is(err, client.ErrForgotten) || paid.Load() != 1 {
		t.Fatalf("%v after %d runs", err, paid.Load())
	}
	// What was answered so may be taken after all.
	token("agent")
	if fate("back").Answered == "" {
		t.Fatal("not answered")
	}
	token("agent")
	if err := b.Recover(within(t, time.Minute), pay(paid)); err != nil || paid.Load() != 2 {
		t.Fatalf("%v after %d runs", err, paid.Load())
	}
	b.pending(t, 0)
	// An answer that is not Holdfast's is none for ever.
	m := makeUp(t, map[string][]said{"claim": {mayRun}, "settle": {{404, "", "", "no route"}}})
	var unsettled *client.UnsettledError
	if _, err := m.Do(within(t, time.Minute), client.Intent{Tool: "tool", ID: "a"}, pay(paid)); !errors.As(err, &unsettled) || unsettled.Answered != "" {
		t.Fatal(err)
	}
}

func TestALongReasonKeepsNoResult(t *testing.T) {
	r := localagent.SetUp(t, nil)
	b := open(t, r, nil)
	_, err := b.Do(within(t, time.Minute), intentFor("wordy"), func(context.Context, *client.Attempt) (client.Result, error) {
		return client.Result{}, &client.NothingMoved{Reason: strings.Repeat("ü", 1<<20)}
	})
	var failed *client.FailedError
	if !errors.As(err, &failed) {
		t.Fatalf("%.300v", err)
	}
	b.pending(t, 0)
}

func TestTheOutboxCannotBeWritten(t *testing.T) {
	r := localagent.SetUp(t, nil)
	b := open(t, r, offersBriefly)
	b.wire.set(nil, only("settle"))
	_, err := b.Do(within(t, time.Minute), intentFor("unwritten"), func(context.Context, *client.Attempt) (client.Result, error) {
		return client.Result{Body: []byte("paid")}, b.Close() // as a disk that is gone
	})
	var unsettled *client.UnsettledError
	if !errors.As(err, &unsettled) || unsettled.NotWritten == nil || string(unsettled.Result.Body) != "paid" || strings.Contains(err.Error(), "is in the outbox") {
		t.Fatal(err)
	}
}

// One intent that is not at its end keeps Recover from none of the others.
func TestRecoverKeepsNobodyBack(t *testing.T) {
	m := makeUp(t, map[string][]said{
		"a/claim":  {{409, "IN_FLIGHT", "", `{}`}},
		"claim":    {mayRun},
		"b/settle": {{404, "", "", ""}, {200, "ALLOW", "Succeeded", `{"state":"Succeeded"}`}},
		"settle":   {{200, "ALLOW", "Succeeded", `{"state":"Succeeded"}`}},
		"c/claim":  {{503, "DENY", "", `{}`}, mayRun},
	})
	paid := new(atomic.Int32)
	do := func(id string, d time.Duration) error {
		_, err := m.Do(within(t, d), client.Intent{Tool: "tool", ID: id}, pay(paid))
		return err
	}
	if err := do("a", 300*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	var unsettled *client.UnsettledError
	if err := do("b", time.Minute); !errors.As(err, &unsettled) || !unsettled.Paid {
		t.Fatal(err)
	}
	// The caller leaves with the answer that it may not run now.
	ctx, leave := context.WithCancel(t.Context())
	m.mu.Lock()
	m.claimed = leave
	m.mu.Unlock()
	if _, err := m.Do(ctx, client.Intent{Tool: "tool", ID: "c"}, pay(paid)); err == nil {
		t.Fatal("c was paid at once")
	}
	began, claims := time.Now(), m.count("claim")
	m.mu.Lock()
	m.settling = func() {
		// What has run is told before anything is claimed.
		if got := m.asked["claim"]; paid.Load() == 1 && got != claims {
			t.Errorf("%d claims came first", got-claims)
		}
	}
	m.mu.Unlock()
	err := m.Recover(within(t, 5*time.Second), pay(paid))
	if err == nil || !strings.Contains(err.Error(), "intent a of tool") || strings.Contains(err.Error(), "intent b") || strings.Contains(err.Error(), "intent c") {
		t.Errorf("after %s: %v", time.Since(began), err)
	}
	m.left(t, 1)
	if paid.Load() != 2 {
		t.Errorf("run %d times", paid.Load())
	}
}

// Of a settlement that is refused the gateway may read the beginning alone: the reference is there, however long the result.
func TestTheReferenceComesBeforeTheResult(t *testing.T) {
	m := makeUp(t, map[string][]said{"claim": {mayRun}, "settle": {{200, "ALLOW", "Succeeded", `{"state":"Succeeded"}`}}})
	_, err := m.Do(within(t, time.Minute), client.Intent{Tool: "tool", ID: "a"}, func(context.Context, *client.Attempt) (client.Result, error) {
		return client.Result{Body: []byte(strings.Repeat("x", 1<<17)), ProviderReference: "pay_1"}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	reference, result := strings.Index(m.brought, `"provider_reference":"pay_1"`), strings.Index(m.brought, `"result":`)
	if reference < 0 || result < reference || len(m.brought) < 1<<17 {
		t.Errorf("of %d bytes the reference is at %d, and the result at %d", len(m.brought), reference, result)
	}
}

// What has left the outbox while Recover was at it is not begun anew.
func TestRecoverDoesNotBeginAnew(t *testing.T) {
	m := makeUp(t, map[string][]said{
		"claim":  {{503, "DENY", "", `{}`}, {503, "DENY", "", `{}`}, mayRun},
		"settle": {{200, "ALLOW", "Succeeded", `{"state":"Succeeded"}`}},
	})
	for _, id := range []string{"a", "b"} {
		if _, err := m.Do(within(t, 50*time.Millisecond), client.Intent{Tool: "tool", ID: id}, pay(new(atomic.Int32))); err == nil {
			t.Fatal("it was paid at once")
		}
	}
	var ran []string
	err := m.Recover(within(t, time.Minute), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
		ran = append(ran, a.Intent.ID)
		return client.Result{}, m.Forget(ctx, "tool", "b")
	})
	if err != nil || fmt.Sprint(ran) != "[a]" {
		t.Fatalf("%v were run, %v", ran, err)
	}
	m.left(t, 0)
}

// Whoever had no time to look up what became of a payment does not say that nobody knows.
func TestALookUpThatIsCutShort(t *testing.T) {
	r := localagent.SetUp(t, nil)
	looks := 0
	o := r.Orders(filepath.Join(t.TempDir(), "outbox.db"))
	o.Intent, o.Kill = intentFor("cut-short"), "payment-sent"
	if _, killed, err := localagent.Start(t.Context(), o); err != nil || !killed {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	options := r.Options(o.Outbox)
	options.LookUp = func(ctx context.Context, _ client.Begun) (client.Result, error) {
		if looks++; looks == 1 {
			leave()
			<-ctx.Done()
			return client.Result{}, ctx.Err()
		}
		return client.Result{Body: []byte("found")}, nil
	}
	c, err := client.Open(options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := c.Recover(ctx, nil); err == nil || looks != 1 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	if got, err := c.Pending(); err != nil || len(got) != 1 || !got[0].Ran {
		t.Fatalf("pending: %+v, %v", got, err)
	}
	if err := c.Recover(within(t, time.Minute), nil); err != nil || r.State(t, localagent.LocalTool, "cut-short").State != guard.Succeeded {
		t.Fatalf("%v after %d looks", err, looks)
	}
}
