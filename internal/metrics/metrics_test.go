package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/metrics/metricstest"
	"github.com/holdfast-dev/holdfast/internal/store"
)

const labels = `{namespace="support",tool="refund"}`

// named are the series with this in their text.
func named(values map[string]float64, text string) (out []string) {
	for s := range values {
		if strings.Contains(s, text) {
			out = append(out, s)
		}
	}
	return out
}

func TestAToolHasItsSeriesBeforeItsFirstCall(t *testing.T) {
	m := metrics.New(metrics.Options{Tools: func() []metrics.Name { return []metrics.Name{{Namespace: "support", Name: "refund"}} }})
	got := metricstest.Read(t, m)
	for _, s := range []string{
		"holdfast_key_expiry_collisions_total" + labels, "holdfast_concurrent_conflicts_total" + labels,
		`holdfast_calls_total{namespace="support",tool="refund",verdict="REPLAY"}`,
		`holdfast_attempts_total{namespace="support",outcome="Unknown",tool="refund"}`,
		`holdfast_late_results_total{namespace="support",reason="refund_owed",tool="refund"}`,
	} {
		if v, ok := got[s]; !ok || v != 0 {
			t.Errorf("%s is %v (%v): an event that comes before the first scrape of its series is no rise", s, v, ok)
		}
	}
}

func TestWhatIsDeletedLeavesNoSeries(t *testing.T) {
	exist := []metrics.Name{{Namespace: "support", Name: "refund"}, {Namespace: "support", Name: "charge"}}
	m := metrics.New(metrics.Options{Tools: func() []metrics.Name { return exist }})
	under := m.Tool("support", "refund") // a call under way
	under.Call("UNKNOWN_HOLD", "KeyExpired")
	under.Expired()
	under.Attempt("Succeeded", time.Second)
	if got := metricstest.Read(t, m); got["holdfast_key_expiry_collisions_total"+labels] != 1 || got["holdfast_attempt_duration_seconds_count"+labels] != 1 {
		t.Fatalf("it was not counted: %v", got)
	}
	exist = exist[1:]
	for range 2 {
		if left := named(metricstest.Read(t, m), `tool="refund"`); len(left) > 0 {
			t.Errorf("the tool was deleted and leaves %v", left)
		}
		// The call ends after its tool.
		under.Call("REPLAY", "")
		under.Call("DENY", "rejected")
		under.Attempt("Failed", time.Second)
		under.Guarded(time.Second)
		under.Conflict()
	}
	if n := len(named(metricstest.Read(t, m), `tool="charge"`)); n == 0 {
		t.Error("the other tool's series are gone, too")
	}
	// It comes back.
	exist = append(exist, metrics.Name{Namespace: "support", Name: "refund"})
	if got := metricstest.Read(t, m); got["holdfast_key_expiry_collisions_total"+labels] != 0 || len(named(got, `tool="refund"`)) == 0 {
		t.Error("a tool that was made again does not begin anew")
	}
}

func TestWhatCallersMakeUpIsNoSeries(t *testing.T) {
	m := metrics.New(metrics.Options{Tools: func() []metrics.Name { return nil }})
	for range 100 {
		m.Refused("", "no_such_tool")
	}
	got := metricstest.Read(t, m)
	const one = `holdfast_calls_total{namespace="_unknown",reason="no_such_tool",tool="_unknown",verdict="none"}`
	if got[one] != 100 || len(named(got, "holdfast_calls_total")) != 1 {
		t.Errorf("calls of unknown tools are %v", named(got, "holdfast_calls_total"))
	}
}

func TestHoldsAge(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m := metrics.New(metrics.Options{Now: func() time.Time { return now }})
	hold := func(reason, state string, age time.Duration) metrics.Hold {
		return metrics.Hold{Namespace: "support", Tool: "refund", Reason: reason, State: state, Since: now.Add(-age)}
	}
	m.SetHolds([]metrics.Hold{
		hold("OutcomeUnknown", "Held", time.Hour), hold("OutcomeUnknown", "Waiting", time.Minute), hold("OutcomeUnknown", "Held", 2*time.Hour),
		hold("ScopeOverlap", "Held", time.Second),
	})
	got := metricstest.Read(t, m)
	for series, want := range map[string]float64{
		`holdfast_holds{namespace="support",reason="OutcomeUnknown",state="Held",tool="refund"}`:      2,
		`holdfast_holds{namespace="support",reason="OutcomeUnknown",state="Waiting",tool="refund"}`:   1,
		`holdfast_holds{namespace="support",reason="ScopeOverlap",state="Held",tool="refund"}`:        1,
		`holdfast_hold_oldest_age_seconds{namespace="support",reason="OutcomeUnknown",tool="refund"}`: 7200,
		`holdfast_hold_oldest_age_seconds{namespace="support",reason="ScopeOverlap",tool="refund"}`:   1,
	} {
		if got[series] != want {
			t.Errorf("%s is %v, not %v", series, got[series], want)
		}
	}
	m.SetHolds(nil)
	if left := named(metricstest.Read(t, m), "holdfast_hold"); len(left) > 0 {
		t.Errorf("nothing is held, and there is %v", left)
	}
}

func TestStoresAndBudgets(t *testing.T) {
	m := metrics.New(metrics.Options{})
	name := metrics.Name{Namespace: "support", Name: "payments"}
	m.SetStore(name, metrics.StoreState{Judged: true, Durable: true})
	m.SetStore(name, metrics.StoreState{Refused: metrics.MemoryLost})
	m.SetBudget(name, metrics.Budget{Held: 3, HeldLimit: 10, Spend: []metrics.Spend{
		{Limit: "daily", Currency: "USD", Used: 120.5, Reserved: 30, Max: 500},
		{Limit: "each", Currency: "USD", Used: 1000},
	}})
	got := metricstest.Read(t, m)
	for series, want := range map[string]float64{
		`holdfast_store_refused{namespace="support",reason="memory_lost",store="payments"}`:           1,
		`holdfast_store_refused{namespace="support",reason="unavailable",store="payments"}`:           0,
		`holdfast_store_refused{namespace="support",reason="clock_jumped",store="payments"}`:          0,
		`holdfast_store_refused{namespace="support",reason="not_durable",store="payments"}`:           0,
		`holdfast_store_durable{namespace="support",store="payments"}`:                                1,
		`holdfast_held_intents{budget="payments",namespace="support"}`:                                3,
		`holdfast_held_intents_limit{budget="payments",namespace="support"}`:                          10,
		`holdfast_spend_used{budget="payments",currency="USD",limit="daily",namespace="support"}`:     120.5,
		`holdfast_spend_reserved{budget="payments",currency="USD",limit="daily",namespace="support"}`: 30,
		`holdfast_spend_limit{budget="payments",currency="USD",limit="daily",namespace="support"}`:    500,
		`holdfast_spend_used{budget="payments",currency="USD",limit="each",namespace="support"}`:      1000,
	} {
		if v, ok := got[series]; !ok || v != want {
			t.Errorf("%s is %v (%v), not %v", series, v, ok, want)
		}
	}
	if each := named(got, `limit="each"`); len(each) != 2 {
		t.Errorf("a limit of each value is shown as one of the sum: %v", each)
	}
	m.RemoveStore(name)
	m.RemoveBudget(name)
	if left := named(metricstest.Read(t, m), "payments"); len(left) > 0 {
		t.Errorf("they were deleted and leave %v", left)
	}
}

// broken fails every question in the same way.
type broken struct{ err error }

func (b broken) Standing(context.Context) (store.Standing, error) { return store.Standing{}, b.err }
func (b broken) Initialise(_ context.Context, id store.Identity) (store.Identity, error) {
	return id, b.err
}
func (b broken) Disown(context.Context, string, string) error { return b.err }
func (b broken) Reserve(context.Context, store.Reserve) (store.Result, error) {
	return store.Result{Version: 7}, b.err
}
func (b broken) Update(context.Context, store.Write) (store.Result, error) {
	return store.Result{Version: 8}, b.err
}
func (b broken) Get(context.Context, string) (*store.Record, time.Time, error) {
	return &store.Record{Version: 9}, time.Time{}, b.err
}
func (b broken) List(context.Context, store.List) (store.Page, error) {
	return store.Page{Cursor: "next"}, b.err
}
func (b broken) Meter(context.Context, string) (string, error) { return "1.5", b.err }
func (b broken) Close() error                                  { return nil }

func TestRoundTripsAreCounted(t *testing.T) {
	name := metrics.Name{Namespace: "support", Name: "payments"}
	for _, c := range []struct {
		err    error
		reason string
	}{
		{nil, ""},
		{fmt.Errorf("%w: no route", store.ErrUnavailable), "unavailable"},
		{fmt.Errorf("%w: another epoch", store.ErrMemoryLost), "memory_lost"},
		{fmt.Errorf("%w: %w", store.ErrUnavailable, context.Canceled), "canceled"},
		{errors.New("something else"), "other"},
	} {
		m := metrics.New(metrics.Options{})
		st, second := m.Store(broken{c.err}, name), m.Store(broken{}, name)
		ctx := t.Context()
		ask := map[string]func() error{
			"standing": func() error { _, err := st.Standing(ctx); return err },
			"initialise": func() error {
				id, err := st.Initialise(ctx, store.Identity{Epoch: "e"})
				if id.Epoch != "e" {
					t.Error("the identity is not what the store said")
				}
				return err
			},
			"disown": func() error { return st.Disown(ctx, "a", "b") },
			"reserve": func() error {
				r, err := st.Reserve(ctx, store.Reserve{})
				if r.Version != 7 {
					t.Error("the result is not what the store said")
				}
				return err
			},
			"update": func() error {
				r, err := st.Update(ctx, store.Write{})
				if r.Version != 8 {
					t.Error("the result is not what the store said")
				}
				return err
			},
			"get": func() error {
				r, _, err := st.Get(ctx, "k")
				if r.Version != 9 {
					t.Error("the record is not what the store said")
				}
				return err
			},
			"list": func() error {
				p, err := st.List(ctx, store.List{})
				if p.Cursor != "next" {
					t.Error("the page is not what the store said")
				}
				return err
			},
			"meter": func() error {
				s, err := st.Meter(ctx, "m")
				if s != "1.5" {
					t.Error("the sum is not what the store said")
				}
				return err
			},
		}
		for op, do := range ask {
			if err := do(); !errors.Is(err, c.err) {
				t.Errorf("%s said %v, not %v", op, err, c.err)
			}
		}
		got := metricstest.Read(t, m)
		for op := range ask {
			if n := got[`holdfast_store_duration_seconds_count{namespace="support",operation="`+op+`",store="payments"}`]; n != 1 {
				t.Errorf("%s is counted %v times", op, n)
			}
			for _, reason := range []string{"unavailable", "memory_lost", "canceled", "other"} {
				want := 0.0
				if reason == c.reason {
					want = 1
				}
				if n := got[`holdfast_store_errors_total{namespace="support",operation="`+op+`",reason="`+reason+`",store="payments"}`]; n != want {
					t.Errorf("%s with %v: %s is counted %v times", op, c.err, reason, n)
				}
			}
		}
		if err := errors.Join(second.Close(), second.Close()); err != nil {
			t.Fatal(err)
		}
		if len(named(metricstest.Read(t, m), "payments")) == 0 {
			t.Error("the store is still open, and its series are gone")
		}
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
		_, _ = st.Standing(ctx) // its error was seen above
		if left := named(metricstest.Read(t, m), "payments"); len(left) > 0 {
			t.Errorf("the store was closed and leaves %v", left)
		}
	}
}

func TestTheTableNamesWhatIsServed(t *testing.T) {
	table := metrics.Table()
	m := metrics.New(metrics.Options{Tools: func() []metrics.Name { return []metrics.Name{{Namespace: "n", Name: "t"}} }})
	for s := range metricstest.Read(t, m) {
		name, _, _ := strings.Cut(s, "{")
		name = strings.TrimSuffix(strings.TrimSuffix(name, "_count"), "_sum")
		if !strings.Contains(table, "| `"+name+"` |") {
			t.Errorf("%s is not in the table", name)
		}
	}
}

// A call's counting makes no garbage.
func TestCountingAllocatesNothing(t *testing.T) {
	m := metrics.New(metrics.Options{})
	m.Tool("support", "refund").Call("DENY", "rejected")
	if n := testing.AllocsPerRun(100, func() {
		tool := m.Tool("support", "refund")
		tool.Call("ALLOW", "")
		tool.Call("DENY", "rejected")
		tool.Attempt("Succeeded", time.Millisecond)
		tool.Guarded(time.Millisecond)
	}); n > 0 {
		t.Errorf("counting a call allocates %v times", n)
	}
}
