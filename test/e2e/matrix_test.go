// Every fault of the provider, by what is done about an unknown outcome, and by whether the
// provider knows a key again: what an agent is told, how the intent ends without a person,
// what comes of its return, and how often the money moved. Each cell is an intent of its
// own; all run at once, and each is a spec that names itself.
//
// What a cell must come to was thought out from the rules and is written down as a table.

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/test/provider"
)

// The times of the tools of the matrix.
const (
	matrixTimeout = 3 * time.Second
	matrixSettles = 2 * time.Second
	// The provider is asked for so long after that: enough for two answers on a busy machine.
	matrixAsked = 10 * time.Second
	// cellTime is how long a cell may take on a busy machine.
	cellTime = 90 * time.Second
	// cellsAtOnce have their agents at work at the same time.
	cellsAtOnce = 32
)

// column is what a tool does about an unknown outcome.
type column struct {
	name   string
	policy setting
	// only: of the two providers it can have this one alone.
	only string
}

var columns = []column{
	{name: "hold", policy: func(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		tool.Spec.UnknownOutcome = v1alpha1.UnknownHold
	}},
	{name: "check", policy: func(budget *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
		asks(v1alpha1.FinalitySettleAfter)(budget, tool)
		tool.Spec.StatusCheck.Deadline = &metav1.Duration{Duration: matrixAsked}
	}},
	// Only with a provider that knows keys may the same be sent again.
	{name: "resume", only: knows, policy: resumes(24 * time.Hour)},
}

// The providers: one takes each request for a new one, the other knows a key again.
const (
	forgets = "forgets"
	knows   = "knows"
)

var judges = []string{forgets, knows}

// told is an answer to an agent. A status of 0 is any.
type told struct {
	status          int
	verdict, reason string
}

var (
	paid     = told{http.StatusCreated, allow, ""}
	unknown  = told{http.StatusConflict, unknownHold, "OutcomeUnknown"}
	pending  = told{http.StatusConflict, inFlight, "pending"}
	declined = told{http.StatusPaymentRequired, allow, ""}
)

// The states in which an intent ends without a person, its lease, the sweep and the checks
// being over.
const (
	succeeded = "Succeeded"
	failed    = "Failed"
	held      = "Held"
	// retryable: nothing moved, so that the agent's return pays.
	retryable = "Retryable"
)

// end is how a cell must end.
type end struct {
	// first is what the agent is told.
	first told
	state string
	// sends is how many requests the provider has got after the agent came back.
	sends int
	// charges is what it made of them: if it forgets keys, and if it knows them.
	charges [2]int
}

// matrixRow is a fault, and its end in each column.
type matrixRow struct {
	fault  string
	hold   end
	check  end
	resume end
}

// never stands for the charges at a provider that a column does not have.
const never = -1

// The rules, in short: what was written in part or whole and has no final answer of the
// provider is unknown, whatever the provider did; so are 5xx, 3xx and a cut body; a 202 is
// pending where somebody asks, and unknown where nobody does. A person decides what is
// unknown, or the check does: "paid" ends it; "nothing moved" lets the agent pay. Or the same is sent again under its
// key: the provider's answer to that ends it, whether it pays now or has paid before. What was accepted is not sent again.
var matrix = []matrixRow{
	// fault                      Hold: told, ends, sends, charges; StatusCheck; Resume
	{"", end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{never, 1}}},
	{"lost-answer", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"close-after-commit", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"reset-before-commit", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"reset-after-commit", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"delay:100ms", end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{never, 1}}},
	// The money moves after the gateway has given up, and within settleAfter.
	{"delay:4s", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"delay-after-commit:100ms", end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{never, 1}}},
	{"delay-after-commit:4s", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"error-500-after-commit", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"error-503-before-commit", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"decline-402", end{declined, failed, 1, [2]int{0, 0}}, end{declined, failed, 1, [2]int{0, 0}}, end{declined, failed, 1, [2]int{never, 0}}},
	{"error-400", end{told{http.StatusBadRequest, allow, ""}, failed, 1, [2]int{0, 0}}, end{told{http.StatusBadRequest, allow, ""}, failed, 1, [2]int{0, 0}}, end{told{http.StatusBadRequest, allow, ""}, failed, 1, [2]int{never, 0}}},
	{"redirect-301", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"redirect-302", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"redirect-303", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"redirect-307", end{unknown, held, 1, [2]int{0, 0}}, end{unknown, retryable, 2, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"cut-body", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"accepted-202:500ms", end{unknown, held, 1, [2]int{1, 1}}, end{pending, succeeded, 1, [2]int{1, 1}}, end{unknown, held, 1, [2]int{never, 1}}},
	// The provider says that it works on it until nobody asks any more: then a person decides.
	{"accepted-202:never", end{unknown, held, 1, [2]int{0, 0}}, end{pending, held, 1, [2]int{0, 0}}, end{unknown, held, 1, [2]int{never, 0}}},
	{"no-content-204", end{told{http.StatusNoContent, allow, ""}, succeeded, 1, [2]int{1, 1}}, end{told{http.StatusNoContent, allow, ""}, succeeded, 1, [2]int{1, 1}}, end{told{http.StatusNoContent, allow, ""}, succeeded, 1, [2]int{never, 1}}},
	{"event-stream", end{told{http.StatusOK, allow, ""}, succeeded, 1, [2]int{1, 1}}, end{told{http.StatusOK, allow, ""}, succeeded, 1, [2]int{1, 1}}, end{told{http.StatusOK, allow, ""}, succeeded, 1, [2]int{never, 1}}},
	{"big:2097152", end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{1, 1}}, end{paid, succeeded, 1, [2]int{never, 1}}},
	// Both are let go once the gateway has given up.
	{"hold", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
	{"hold-after-commit", end{unknown, held, 1, [2]int{1, 1}}, end{unknown, succeeded, 1, [2]int{1, 1}}, end{unknown, succeeded, 2, [2]int{never, 1}}},
}

func (r matrixRow) in(column string) end {
	return map[string]end{"hold": r.hold, "check": r.check, "resume": r.resume}[column]
}

// judge is a provider that counts what it gets for each order.
type judge struct {
	*provider.Provider
	url string

	mu  sync.Mutex
	got map[string]int
}

// newJudge starts one, until the end of the container.
func newJudge(name string) *judge {
	GinkgoHelper()
	j := &judge{Provider: provider.New(provider.Options{}), got: map[string]int{}}
	if name == knows {
		j.Provider = provider.New(provider.Options{Window: 24 * time.Hour})
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			body, err := io.ReadAll(r.Body)
			var payment struct{ OrderID string }
			if err != nil || json.Unmarshal(body, &payment) != nil {
				http.Error(w, "the body is not whole", http.StatusBadRequest)
				return
			}
			j.mu.Lock()
			j.got[payment.OrderID]++
			j.mu.Unlock()
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		j.ServeHTTP(w, r)
	}))
	j.url = server.URL
	DeferCleanup(func() {
		// What hangs there lets go first.
		Expect(j.Close()).To(Succeed())
		server.CloseClientConnections()
		server.Close()
	})
	return j
}

// gets is how many requests for an order have come, and charges what was made of them.
func (j *judge) gets(order string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.got[order]
}

func (j *judge) charges(order string) (int, error) {
	l, err := j.Ledger()
	n := 0
	for _, e := range l.Entries {
		if e.OrderID == order {
			n++
		}
	}
	return n, err
}

// cell is one intent, and how it came out.
type cell struct {
	w                  *world
	judge              *judge
	order, tool, fault string
	asked              bool // about an unknown outcome the provider is asked
	want               end
	charges            int

	done chan struct{}
	err  error
}

// id is its intent ID, which the order is no part of.
func (c *cell) id() string { return "id" + c.order[strings.IndexByte(c.order, '-'):] }

func (c *cell) call() call {
	return call{tool: c.tool, id: c.id(), body: c.w.order(c.order, "10")}
}

// plan has the first request of the cell meet its fault.
func (c *cell) plan() error {
	if c.fault == "" {
		return nil
	}
	return c.judge.AddFault(provider.Fault{Fault: c.fault, Match: map[string]string{"orderId": c.order}})
}

// start runs the cell. Its end is for whoever waits.
func (c *cell) start(ctx context.Context, run func(context.Context) error) {
	c.done = make(chan struct{})
	go func() {
		defer close(c.done)
		ctx, cancel := context.WithTimeout(ctx, cellTime)
		defer cancel()
		c.err = run(ctx)
	}()
}

// wait is what a spec does.
func (c *cell) wait(ctx context.Context) {
	GinkgoHelper()
	select {
	case <-c.done:
		Expect(c.err).NotTo(HaveOccurred())
	case <-ctx.Done():
		Fail("the cell has not ended")
	}
}

func (t told) check(got reply) error {
	switch {
	case got.err != nil:
		return got.err
	case t.status != 0 && got.status != t.status, got.verdict() != t.verdict,
		t.reason != "" && !strings.Contains(got.body, fmt.Sprintf(`"reason":%q`, t.reason)):
		return fmt.Errorf("want %+v, got %s", t, got)
	}
	return nil
}

// matrix is the life of a cell.
func (c *cell) matrix(ctx context.Context) error {
	if err := c.plan(); err != nil {
		return err
	}
	first := c.w.call(ctx, c.call())
	if err := c.want.first.check(first); err != nil {
		return fmt.Errorf("the first call: %w", err)
	}
	c.judge.Release(map[string]string{"orderId": c.order})
	// The agent tries again at once: nothing is sent, whatever it is told.
	if again := c.w.call(ctx, c.call()); again.err != nil || again.verdict() == allow {
		return fmt.Errorf("again, at once: %s", again)
	}
	if n := c.judge.gets(c.order); n != 1 {
		return fmt.Errorf("the call, and again: the provider got %d requests", n)
	}
	if err := c.settles(ctx, c.want.state); err != nil {
		return err
	}
	// The agent comes back.
	back := told{http.StatusConflict, unknownHold, "OutcomeUnknown"}
	switch c.want.state {
	case succeeded, failed:
		back = told{first.status, replay, ""}
		switch {
		case first.verdict() == allow:
		case c.asked:
			back.status = http.StatusOK // what the check has found
		default:
			back.status = http.StatusCreated // what the provider has answered to the same
		}
	case retryable:
		back = paid
	}
	if err := back.check(c.comesBack(ctx)); err != nil {
		return fmt.Errorf("the agent comes back: %w", err)
	}
	if c.want.state == retryable {
		if err := back.replayed().check(c.w.call(ctx, c.call())); err != nil {
			return fmt.Errorf("and again: %w", err)
		}
	}
	return c.money(ctx, c.want.state)
}

// agentRetries is how soon an agent of a cell tries again.
const agentRetries = 400 * time.Millisecond

// comesBack is the agent's next call, which heeds a backoff.
func (c *cell) comesBack(ctx context.Context) reply {
	tick := time.NewTicker(agentRetries)
	defer tick.Stop()
	for {
		got := c.w.call(ctx, c.call())
		if got.err != nil || got.verdict() != inFlight {
			return got
		}
		select {
		case <-ctx.Done():
			return got
		case <-tick.C:
		}
	}
}

func (t told) replayed() told { return told{t.status, replay, ""} }

// settles waits until the intent has come to its state, and nothing will change it any more but
// a call or a person: a hold can be resolved.
func (c *cell) settles(ctx context.Context, state string) error {
	var doc intentDocument
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		d, err := c.w.tryPoll(ctx, c.tool, c.id(), "")
		if err == nil {
			doc = d
			if doc.State == state && (state != held || doc.Hold != nil && doc.Hold.State == held && c.judge.gets(c.order) >= c.want.sends) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("it should become %s; last it was %s", state, inWords(doc)), err)
		case <-tick.C:
		}
	}
}

func inWords(doc intentDocument) string {
	text, err := json.Marshal(doc)
	return string(text) + fmt.Sprint(err)
}

// money asks what was paid, and whether another ID is let in: only where it is known that
// nothing was paid, and the agent was told so for good.
func (c *cell) money(ctx context.Context, state string) error {
	if sends := c.judge.gets(c.order); sends != c.want.sends {
		return fmt.Errorf("the provider got %d requests, want %d", sends, c.want.sends)
	}
	charges, err := c.judge.charges(c.order)
	if err != nil || charges != c.charges {
		return errors.Join(fmt.Errorf("%d charges, want %d", charges, c.charges), err)
	}
	another, after := unknown, charges
	another.reason = "ScopeOverlap"
	if state == failed {
		another, after = paid, charges+1
	}
	other := c.call()
	other.id = "another-" + c.order
	if err := another.check(c.w.call(ctx, other)); err != nil {
		return fmt.Errorf("another ID: %w", err)
	}
	if charges, err = c.judge.charges(c.order); err != nil || charges != after || charges > 1 {
		return errors.Join(fmt.Errorf("%d charges in the end, want %d", charges, after), err)
	}
	return nil
}

// roomy is a budget in which many can be held.
func roomy(budget *v1alpha1.IntentBudget, _ *v1alpha1.AgentTool) {
	total, each := int32(10_000), int32(10_000)
	budget.Spec.MaxHeld = &v1alpha1.MaxHeldSpec{Total: &total, PerCaller: &each}
}

// columnTool is a tool that pays at a judge, or at a proxy before it.
func (w *world) columnTool(c column, at, url string) *v1alpha1.AgentTool {
	tool := w.paymentTool(toolOf(c, at), "/charges")
	tool.Spec.Upstream.HTTP.URL = url + "/charges"
	tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: matrixTimeout}
	tool.Spec.Upstream.HTTP.SettleAfter = &metav1.Duration{Duration: matrixSettles}
	tool.Spec.Idempotency.InFlight = &v1alpha1.InFlightSpec{Mode: v1alpha1.InFlightReject, RetryAfter: &metav1.Duration{Duration: time.Second}}
	c.policy(&v1alpha1.IntentBudget{}, tool)
	return tool
}

func toolOf(c column, judge string) string { return c.name + "-" + judge }

// background is a context for work that goes on between specs; it ends with the container.
func background(cells func() []*cell) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	DeferCleanup(func() {
		cancel()
		for _, c := range cells() {
			if c.done != nil {
				<-c.done
			}
		}
	})
	return ctx
}

var _ = onServers("The matrix of faults", func() {
	cells := map[string]*cell{}
	all := func() (out []*cell) {
		for _, c := range cells {
			out = append(out, c)
		}
		return out
	}
	Describe("in every cell", Ordered, ContinueOnFailure, func() {
		BeforeAll(func(ctx SpecContext) {
			clear(cells)
			w := newWorld(ctx, roomy)
			at := map[string]*judge{}
			for _, name := range judges {
				at[name] = newJudge(name)
			}
			for _, column := range columns {
				for _, name := range judges {
					if column.only == "" || column.only == name {
						create(ctx, w.columnTool(column, name, at[name].url))
					}
				}
			}
			for _, column := range columns {
				for _, name := range judges {
					if column.only == "" || column.only == name {
						w.ready(ctx, toolOf(column, name))
					}
				}
			}
			places := make(chan struct{}, cellsAtOnce)
			going := background(all)
			for i, row := range matrix {
				for j, column := range columns {
					for k, name := range judges {
						if column.only != "" && column.only != name {
							continue
						}
						want := row.in(column.name)
						c := &cell{
							w: w, judge: at[name], order: fmt.Sprintf("m-%02d-%d-%d-end", i, j, k), tool: toolOf(column, name),
							fault: row.fault, asked: column.name == "check", want: want, charges: want.charges[k],
						}
						cells[cellName(row.fault, column.name, name)] = c
						c.start(going, func(ctx context.Context) error {
							places <- struct{}{}
							defer func() { <-places }()
							return c.matrix(ctx)
						})
					}
				}
			}
		}, NodeTimeout(3*time.Minute))

		It("has a row for each fault of the provider", func() {
			for _, usage := range provider.FaultNames() {
				name, _, _ := strings.Cut(strings.TrimSuffix(usage, "]"), ":")
				name, _, _ = strings.Cut(name, "[")
				Expect(slices.ContainsFunc(matrix, func(r matrixRow) bool { return r.fault == name || strings.HasPrefix(r.fault, name+":") })).To(BeTrue(), name)
			}
		})

		for _, row := range matrix {
			for _, column := range columns {
				for _, name := range judges {
					if column.only != "" && column.only != name {
						continue
					}
					It(cellName(row.fault, column.name, name), func(ctx SpecContext) { cells[cellName(row.fault, column.name, name)].wait(ctx) }, NodeTimeout(2*time.Minute))
				}
			}
		}
	})
})

func cellName(fault, column, judge string) string {
	if fault == "" {
		fault = "no fault"
	}
	return fmt.Sprintf("%s, unknown outcomes: %s, the provider %s keys", fault, column, judge)
}
