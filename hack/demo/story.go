// The story, step by step. Each step says what must be in the ledger after it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

const (
	// patience is how long an agent's HTTP client waits for an answer, at the least.
	patience = 800 * time.Millisecond
	// hang is the fault of the story: the provider pays, and its answer does not come.
	hang = "hold-after-commit"
	// stepLimit bounds each thing that is waited for.
	stepLimit = time.Minute
	pollEvery = 50 * time.Millisecond
)

// The verdicts that the story knows.
const (
	allow       = "ALLOW"
	replay      = "REPLAY"
	unknownHold = "UNKNOWN_HOLD"
	deny        = "DENY"
)

func (d *demo) story(ctx context.Context) error {
	for _, s := range []struct {
		title, short string
		tell         func(context.Context) error
		then         []paid // new in the ledger
	}{
		{
			"A naive agent calls the provider itself. The answer hangs, and its client tries again.",
			"naive agent, answer lost, retried: paid twice",
			d.naiveRetry, []paid{{"1001", "49.99"}, {"1001", "49.99"}},
		},
		{
			"The same through Holdfast.",
			"the same through Holdfast: paid once, the retry gets the answer",
			d.guardedRetry, []paid{{"1002", "49.99"}},
		},
		{
			"The agent plans anew: its intent ID is lost, and the amount is a little different.",
			"agent plans anew, other ID and amount: held, nothing sent",
			d.newPlan, nil,
		},
		{
			"A person decides: one hold is released, another is rejected.",
			"one hold released: paid once; one rejected: never paid",
			d.decide, []paid{{"1002", "49.90"}},
		},
		{
			"The manager is killed between the payment and its answer.",
			"killed between payment and answer: paid once, held, marked as paid",
			d.killed, []paid{{"1003", "20.00"}},
		},
	} {
		began := time.Now()
		d.say("\nStep %d. %s", len(d.rows)+1, s.title)
		if err := s.tell(ctx); err != nil {
			return fmt.Errorf("step %d: %w", len(d.rows)+1, err)
		}
		d.want = append(d.want, s.then...)
		if err := d.judge(ctx); err != nil {
			return fmt.Errorf("step %d: %w", len(d.rows)+1, err)
		}
		took := time.Since(began)
		d.rows = append(d.rows, row{what: s.short, entries: len(s.then), total: len(d.want), took: took})
		d.say("  (%.1f s)", took.Seconds())
	}
	return nil
}

// naiveRetry is what happens without Holdfast.
func (d *demo) naiveRetry(ctx context.Context) error {
	r := refund{AccountID: "a1", OrderID: "1001", Amount: "49.99"}
	if _, err := d.impatient(ctx, d.naive, "", r); err != nil {
		return err
	}
	got, err := d.send(ctx, d.naive, "", r)
	if err != nil {
		return err
	}
	if got.status != 201 {
		return fmt.Errorf("the provider should have paid, it answers %s", got)
	}
	return d.provider.release(ctx)
}

// guardedRetry is the same, through the gateway.
func (d *demo) guardedRetry(ctx context.Context) error {
	r := refund{AccountID: "a1", OrderID: "1002", Amount: "49.99"}
	const id = "plan-1/call-4"
	first, err := d.impatient(ctx, d.agent, id, r)
	if err != nil {
		return err
	}
	d.tell("provider", "answers at last, while the retry waits in the gateway")
	if err := d.provider.release(ctx); err != nil {
		return err
	}
	again, err := d.send(ctx, d.agent, id, r)
	if err != nil {
		return err
	}
	if again.status != 201 || again.verdict != replay || !again.replayed || again.id() != first {
		return fmt.Errorf("the retry should get the answer of the first call, refund %s, it gets %s", first, again)
	}
	return nil
}

// newPlan comes back for the same order under another ID.
func (d *demo) newPlan(ctx context.Context) error {
	d.second = held{id: "plan-2/call-1", refund: refund{AccountID: "a1", OrderID: "1002", Amount: "49.90"}}
	if err := d.meetHold(ctx, &d.second, "ScopeOverlap", v1alpha1.HoldHeld); err != nil {
		return err
	}
	_, err := d.kubectl(ctx, "get", "holds")
	return err
}

// decide releases one hold and rejects another.
func (d *demo) decide(ctx context.Context) error {
	if err := d.resolve(ctx, d.second, resolution{Decision: v1alpha1.DecisionRelease, Reason: "a second item was broken, confirmed with the customer"}); err != nil {
		return err
	}
	d.tell("agent", "sends the same again")
	first, err := d.send(ctx, d.agent, d.second.id, d.second.refund)
	if err != nil {
		return err
	}
	if first.status != 201 || first.verdict != allow {
		return fmt.Errorf("the released refund should be paid, the agent gets %s", first)
	}
	d.tell("agent", "and once more, to be sure")
	again, err := d.send(ctx, d.agent, d.second.id, d.second.refund)
	if err != nil {
		return err
	}
	if again.verdict != replay || again.id() != first.id() {
		return fmt.Errorf("a release is for one send: the agent should get the answer again, it gets %s", again)
	}

	d.tell("agent", "plans anew once more")
	third := held{id: "plan-3/call-1", refund: refund{AccountID: "a1", OrderID: "1002", Amount: "49.50"}}
	if err := d.meetHold(ctx, &third, "ScopeOverlap", v1alpha1.HoldHeld); err != nil {
		return err
	}
	if err := d.resolve(ctx, third, resolution{Decision: v1alpha1.DecisionReject, Reason: "this order has been refunded"}); err != nil {
		return err
	}
	got, err := d.send(ctx, d.agent, third.id, third.refund)
	if err != nil {
		return err
	}
	if got.status != 403 || got.verdict != deny {
		return fmt.Errorf("a rejected refund should be denied, the agent gets %s", got)
	}
	_, err = d.kubectl(ctx, "get", "holds")
	return err
}

// killed loses the process in the worst moment.
func (d *demo) killed(ctx context.Context) error {
	h := held{id: "plan-4/call-2", refund: refund{AccountID: "a1", OrderID: "1003", Amount: "20.00"}}
	if err := d.provider.plan(ctx, hang, h.refund.OrderID); err != nil {
		return err
	}
	sent := time.Now()
	call := d.begin(ctx, d.agent, h.id, h.refund)
	if err := d.untilHanging(ctx, h.refund.OrderID); err != nil {
		return err
	}
	d.tell("provider", "has paid it, and has not answered yet")
	pid, err := d.w.Processes().PID(whole.Manager)
	if err != nil {
		return err
	}
	d.run("kill -KILL %d", pid)
	if err := d.w.Kill(whole.Manager, syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case lost := <-call:
		if lost.err == nil {
			return fmt.Errorf("the manager was killed, but the agent gets %s", lost.answer)
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	d.tell("agent", "its connection breaks after %.1f s: it does not know whether the refund was paid", time.Since(sent).Seconds())
	if err := d.until(ctx, "the manager is gone", func() (bool, error) { return !d.w.Running(whole.Manager), nil }); err != nil {
		return err
	}
	if err := d.provider.release(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := d.w.StartManager(ctx); err != nil {
		return err
	}
	d.tell("manager", "is back after %.1f s, with its memory", time.Since(began).Seconds())

	d.tell("agent", "sends the same again; it waits until the lost attempt's lease is over")
	if err := d.meetHold(ctx, &h, "OutcomeUnknown", v1alpha1.HoldWaiting); err != nil {
		return err
	}
	if _, err := d.kubectl(ctx, "get", "holds", "--field-selector", "status.state!=Resolved"); err != nil {
		return err
	}
	d.tell("alice", "is in a hurry")
	if err := d.refused(ctx, "may still become visible", d.patch(h, resolution{Decision: v1alpha1.DecisionRelease, Reason: "pay it again"})...); err != nil {
		return err
	}
	if _, err := d.kubectl(ctx, "wait", "hold", h.name, "--for=jsonpath={.status.state}=Held", "--timeout=60s"); err != nil {
		return err
	}
	ledger, err := d.provider.read(ctx)
	if err != nil {
		return err
	}
	if len(ledger.Entries) == 0 {
		return errors.New("the ledger is empty")
	}
	receipt := ledger.Entries[len(ledger.Entries)-1]
	d.tell("alice", "finds refund %s of order %s in the provider's ledger", receipt.ID, receipt.OrderID)
	result, err := json.Marshal(map[string]string{"id": receipt.ID, "status": "refunded"})
	if err != nil {
		return err
	}
	err = d.resolve(ctx, h, resolution{
		Decision: v1alpha1.DecisionMarkPaid, Reason: "it is in the provider's ledger",
		ProviderReference: receipt.ID, Result: string(result),
	})
	if err != nil {
		return err
	}
	got, err := d.send(ctx, d.agent, h.id, h.refund)
	if err != nil {
		return err
	}
	if got.status != 200 || got.verdict != replay || string(got.body) != string(result) {
		return fmt.Errorf("the agent should get what alice gave as the result, it gets %s: %s", got, got.body)
	}
	return nil
}

// held is an intent that met a hold.
type held struct {
	id     string
	refund refund
	name   string
}

// meetHold sends what must be held, and waits for the object of the hold.
func (d *demo) meetHold(ctx context.Context, h *held, reason string, state v1alpha1.HoldState) error {
	got, err := d.send(ctx, d.agent, h.id, h.refund)
	if err != nil {
		return err
	}
	if got.status != 409 || got.verdict != unknownHold {
		return fmt.Errorf("it should be held, the agent gets %s: %s", got, got.body)
	}
	p, err := got.problem()
	if err != nil {
		return err
	}
	if p.Reason != reason {
		return fmt.Errorf("it should be held as %s, it is held as %s", reason, p.Reason)
	}
	d.tell("", "reason:  %s", p.Reason)
	d.tell("", "detail:  %s", wrap(p.Detail, 90, strings.Repeat(" ", nameWidth+11)))
	d.tell("", "action:  %s", p.SuggestedAction)
	for _, m := range p.OwnMatches {
		d.tell("", "match:   %s, %s", m.IntentID, m.State)
	}
	admin, err := d.w.Admin()
	if err != nil {
		return err
	}
	h.name = p.Hold
	key := client.ObjectKey{Namespace: "support", Name: h.name}
	return d.until(ctx, fmt.Sprintf("PaymentHold %s is %s", h.name, state), func() (bool, error) {
		var obj v1alpha1.PaymentHold
		if err := admin.Get(ctx, key, &obj); client.IgnoreNotFound(err) != nil {
			return false, err
		}
		if obj.Status.State != "" && obj.Status.State != state {
			return false, fmt.Errorf("PaymentHold %s should be %s, it is %s", h.name, state, obj.Status.State)
		}
		return obj.Status.State == state, nil
	})
}

// resolution is what alice patches into a hold.
type resolution struct {
	Decision          v1alpha1.HoldDecision `json:"decision"`
	Reason            string                `json:"reason"`
	ProviderReference string                `json:"providerReference,omitempty"`
	Result            string                `json:"result,omitempty"`
}

// patch is the one command with which a person clears a hold.
func (d *demo) patch(h held, r resolution) []string {
	// Three levels of strings and texts always marshal.
	text, _ := json.Marshal(map[string]any{"spec": map[string]any{"resolution": r}})
	return []string{"--as", "alice", "patch", "hold", h.name, "--type", "merge", "-p", string(text)}
}

// resolve lets alice decide, and waits until the record has taken it.
func (d *demo) resolve(ctx context.Context, h held, r resolution) error {
	if _, err := d.kubectl(ctx, d.patch(h, r)...); err != nil {
		return err
	}
	_, err := d.kubectl(ctx, "wait", "hold", h.name, "--for=jsonpath={.status.state}=Resolved", "--timeout=30s")
	return err
}

// called is how a call ended.
type called struct {
	answer answer
	err    error
}

// begin sends, and does not wait.
func (d *demo) begin(ctx context.Context, a *agent, id string, r refund) <-chan called {
	under := ""
	if id != "" {
		under = ", intent ID " + id
	}
	d.tell(a.name, "refunds %s%s", r, under)
	done := make(chan called, 1)
	go func() {
		got, err := a.call(ctx, id, r)
		done <- called{got, err}
	}()
	return done
}

// send sends and takes the answer.
func (d *demo) send(ctx context.Context, a *agent, id string, r refund) (answer, error) {
	done := <-d.begin(ctx, a, id, r)
	if done.err != nil {
		return answer{}, fmt.Errorf("the %s gets no answer: %w", a.name, done.err)
	}
	d.tell(a.name, "gets %s", done.answer)
	return done.answer, nil
}

// impatient sends what the provider pays and does not answer, and gives up. It
// returns the provider's name of what was paid.
func (d *demo) impatient(ctx context.Context, a *agent, id string, r refund) (string, error) {
	if err := d.provider.plan(ctx, hang, r.OrderID); err != nil {
		return "", err
	}
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	done := d.begin(call, a, id, r)
	if err := d.untilHanging(ctx, r.OrderID); err != nil {
		return "", err
	}
	d.tell("provider", "has paid it, and its answer hangs")
	select {
	case <-time.After(time.Until(began.Add(patience))):
	case got := <-done:
		return "", fmt.Errorf("the %s should get no answer yet, it gets %s (%w)", a.name, got.answer, got.err)
	}
	cancel()
	if got := <-done; got.err == nil {
		return "", fmt.Errorf("the %s should get no answer, it gets %s", a.name, got.answer)
	}
	d.tell(a.name, "has no answer after %.1f s: its client gives up, and sends it again", time.Since(began).Seconds())
	l, err := d.provider.read(ctx)
	if err != nil {
		return "", err
	}
	if len(l.Entries) == 0 {
		return "", errors.New("the ledger is empty")
	}
	return l.Entries[len(l.Entries)-1].ID, nil
}

func (d *demo) untilHanging(ctx context.Context, orderID string) error {
	return d.until(ctx, "the provider has paid order "+orderID, func() (bool, error) { return d.provider.hanging(ctx, orderID) })
}

// until polls.
func (d *demo) until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}
