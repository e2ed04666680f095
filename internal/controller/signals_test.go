package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/metrics/metricstest"
	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestWhyAStoreIsRefusedInAWord(t *testing.T) {
	for _, c := range []struct {
		err  error
		word string
	}{
		{nil, ""},
		{errors.Join(fmt.Errorf("%w: another epoch", store.ErrMemoryLost), store.ErrUnavailable), "memory_lost"},
		{fmt.Errorf("look: %w", guard.ErrClockJumped), "clock_jumped"},
		{fmt.Errorf("look: %w", store.ErrNotDurable), "not_durable"},
		{fmt.Errorf("%w: no route", store.ErrUnavailable), "unavailable"},
		{errors.New("a Secret is missing"), "unavailable"},
	} {
		if got := refused(c.err); got != c.word {
			t.Errorf("%v is %q, not %q", c.err, got, c.word)
		}
	}
}

func TestLateResultsThatContradictAreCounted(t *testing.T) {
	m := metrics.New(metrics.Options{})
	late := func(event string, owed, disputed bool) {
		countLate(m, guard.Change{Event: event, Intent: guard.View{
			Key: guard.Key{Namespace: "support", Tool: "refund"}, RefundOwed: owed, Disputed: disputed,
		}})
	}
	late(lateSuccess, true, false)
	late(lateEvidence, true, true)
	late(lateSuccess, false, false)
	late("settled", true, true) // was told before
	got := metricstest.Read(t, m)
	for reason, want := range map[string]float64{"refund_owed": 2, "disputed": 1} {
		if n := got[`holdfast_late_results_total{namespace="support",reason="`+reason+`",tool="refund"}`]; n != want {
			t.Errorf("%s is counted %v times, not %v", reason, n, want)
		}
	}
}

func TestEvidenceIsLoggedAndCounted(t *testing.T) {
	var lines []string
	m := metrics.New(metrics.Options{})
	tell := evidence(funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}), m)
	tell(guard.Evidence{
		Key: guard.Key{Namespace: "support", Tool: "refund", Caller: "agent", IntentID: "k1"}, Attempt: 2, ProviderKey: "hf_1",
		Outcome: guard.AttemptSucceeded, ProviderReference: "re_1", Status: 201, Cause: store.ErrUnavailable,
	})
	if n := metricstest.Read(t, m)[`holdfast_results_not_written_total{namespace="support",tool="refund"}`]; n != 1 {
		t.Errorf("it is counted %v times", n)
	}
	if len(lines) != 1 {
		t.Fatalf("%d lines", len(lines))
	}
	for _, want := range []string{`"intentID"="k1"`, `"attempt"=2`, `"outcome"="Succeeded"`, `"providerKey"="hf_1"`, `"providerReference"="re_1"`, `"status"=201`} {
		if !strings.Contains(lines[0], want) {
			t.Errorf("the line has no %s: %s", want, lines[0])
		}
	}
}

func TestAHoldIsCountedUnderItsFirstReason(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	h := openHold(guard.View{Key: guard.Key{Namespace: "support", Tool: "refund"}, Hold: &guard.HoldView{
		State: guard.HoldWaiting, Reasons: []guard.Reason{guard.OutcomeUnknown, guard.ScopeOverlap}, At: at,
	}})
	if want := (metrics.Hold{Namespace: "support", Tool: "refund", Reason: "OutcomeUnknown", State: "Waiting", Since: at}); h != want {
		t.Errorf("it is %+v, not %+v", h, want)
	}
}

func TestSpendIsShown(t *testing.T) {
	whole := v1alpha1.SpendStatus{Name: "daily", Currency: "USD", Used: "120.50", Reserved: "30", Limit: "500.00"}
	each := whole
	each.Per = "object.spec.caller"
	for _, c := range []struct {
		status v1alpha1.SpendStatus
		limit  float64
	}{{whole, 500}, {each, 0}} {
		got, err := spendShown(&c.status)
		if want := (metrics.Spend{Limit: "daily", Currency: "USD", Used: 120.5, Reserved: 30, Max: c.limit}); err != nil || got != want {
			t.Errorf("it is %+v (%v), not %+v", got, err, want)
		}
	}
	whole.Used = "much"
	if _, err := spendShown(&whole); err == nil {
		t.Error("what is no number is shown")
	}
}
