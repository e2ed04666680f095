// This file kills an agent at every step of a payment, with SIGKILL, and has it come back.
// The judge is the provider's ledger.

package client_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/localagent"
)

func TestMain(m *testing.M) {
	localagent.RunIfAgent()
	os.Exit(m.Run())
}

func TestKilledAtEveryStep(t *testing.T) {
	// It comes back before its lease is over, however slowly its process starts.
	r := localagent.SetUp(t, func(tool *v1alpha1.AgentTool) {
		if tool.Name == localagent.LocalTool {
			tool.Spec.Upstream.Local.Lease.Duration = 2 * time.Minute
		}
	})
	// What must come out when it comes back: paid by now or earlier, or held since nobody
	// can know; and how often it was paid.
	type end struct {
		held bool
		paid int
	}
	want := map[string]end{
		"before-outbox": {paid: 1}, "before-claim": {paid: 1}, "claim-sent": {paid: 1}, "claim-answered": {paid: 1},
		"function-begun": {held: true, paid: 0}, "payment-sent": {held: true, paid: 1}, "function-finished": {held: true, paid: 1},
		"before-settle": {paid: 1}, "settle-sent": {paid: 1}, "settle-answered": {paid: 1},
	}
	for _, step := range localagent.Steps {
		for _, looksUp := range []bool{false, true} {
			name := step
			if looksUp {
				name += ", asking the provider"
			}
			t.Run(name, func(t *testing.T) {
				want := want[step]
				if looksUp && want.paid == 1 {
					want.held = false
				}
				order := name
				o := r.Orders(filepath.Join(t.TempDir(), "outbox.db"))
				o.Intent = client.Intent{Tool: localagent.LocalTool, ID: "intent-" + name, Body: localagent.Body(order)}
				o.LooksUp = looksUp

				o.Kill = step
				if _, killed, err := localagent.Start(t.Context(), o); err != nil || !killed {
					t.Fatalf("it was not killed (%v)", err)
				}
				o.Kill = ""
				for again := range 2 {
					report, _, err := localagent.Start(t.Context(), o)
					if err != nil {
						t.Fatal(err)
					}
					if report.Held != want.held || !want.held && report.Status != 201 {
						t.Fatalf("come back the time %d: %+v", again+1, report)
					}
					if again > 0 && !want.held && !report.Replayed {
						t.Errorf("run once more: %+v", report)
					}
					if (report.Pending == 1) != want.held {
						t.Errorf("%d intents are left in the outbox", report.Pending)
					}
				}
				if paid := r.Paid(t, order); paid != want.paid {
					t.Errorf("it was paid %d times, want %d", paid, want.paid)
				}
				state := guard.Succeeded
				if want.held {
					state = guard.Held
				}
				if v := r.State(t, localagent.LocalTool, o.Intent.ID); v.State != state {
					t.Errorf("it is %s, want %s", v.State, state)
				}
			})
		}
	}
}

// The agent is killed and does not come back before its lease is over.
func TestKilledAndLongGone(t *testing.T) {
	r := localagent.SetUp(t, nil)
	for _, step := range []string{"claim-answered", "function-begun", "before-settle"} {
		t.Run(step, func(t *testing.T) {
			o := r.Orders(filepath.Join(t.TempDir(), "outbox.db"))
			o.Intent = client.Intent{Tool: localagent.LocalTool, ID: "intent-" + step, Body: localagent.Body(step)}
			o.Kill = step
			if _, killed, err := localagent.Start(t.Context(), o); err != nil || !killed {
				t.Fatalf("it was not killed (%v)", err)
			}
			sweepUntil(t, r, o.Intent.ID, guard.Held)
			o.Kill = ""
			report, _, err := localagent.Start(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			// What it knows of a payment arrives late, and is the end of the hold.
			if late := step == "before-settle"; report.Held == late || late && report.Status != 201 {
				t.Errorf("come back: %+v", report)
			}
			if paid, most := r.Paid(t, step), map[string]int{"before-settle": 1}[step]; paid != most {
				t.Errorf("it was paid %d times, want %d", paid, most)
			}
		})
	}
}

// The same for a tool that Holdfast calls: the outbox brings the same call again.
func TestKilledWhileHoldfastCalls(t *testing.T) {
	r := localagent.SetUp(t, nil)
	for _, step := range []string{"before-outbox", "before-charge", "charge-sent", "charge-answered"} {
		t.Run(step, func(t *testing.T) {
			o := r.Orders(filepath.Join(t.TempDir(), "outbox.db"))
			o.Intent = client.Intent{Tool: localagent.HTTPTool, ID: "intent-" + step, Body: localagent.Body(step)}
			o.Call, o.Kill = true, step
			if _, killed, err := localagent.Start(t.Context(), o); err != nil || !killed {
				t.Fatalf("it was not killed (%v)", err)
			}
			o.Kill = ""
			report, _, err := localagent.Start(t.Context(), o)
			if err != nil || report.Status != 201 || report.Pending != 0 {
				t.Fatalf("come back: %+v, %v", report, err)
			}
			if paid := r.Paid(t, step); paid != 1 {
				t.Errorf("it was paid %d times", paid)
			}
		})
	}
}

// sweepUntil lets time do what is due until the intent is in this state.
func sweepUntil(t *testing.T, r *localagent.Rig, id string, want guard.State) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := r.Engine.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		v := r.State(t, localagent.LocalTool, id)
		if v.State == want {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it is %s, want %s", v.State, want)
		}
	}
}
