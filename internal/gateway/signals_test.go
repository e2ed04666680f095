package gateway

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/metrics/metricstest"
)

// counted is a gateway whose metrics are read by the short form of a series: its labels
// without those of the tool charge.
func counted(t *testing.T) (*rig, func(series string) float64) {
	t.Helper()
	m := metrics.New(metrics.Options{Tools: func() []metrics.Name {
		return []metrics.Name{{Namespace: namespace, Name: "charge"}, {Namespace: namespace, Name: "read"}}
	}})
	r := setUp(t, func(o *Options) { o.Metrics = m })
	return r, func(series string) float64 {
		t.Helper()
		name, labels, _ := strings.Cut(strings.TrimSuffix(series, "}"), "{")
		all := []string{`namespace="` + namespace + `"`, `tool="charge"`}
		if strings.Contains(labels, "tool=") {
			all = all[:1]
		}
		if labels != "" {
			all = append(all, strings.Split(labels, ",")...)
		}
		values := metricstest.Read(t, m)
		for s, v := range values {
			if !strings.HasPrefix(s, name+"{") || strings.Count(s, "=") != len(all) {
				continue
			}
			fits := true
			for _, l := range all {
				fits = fits && strings.Contains(s, l)
			}
			if fits {
				return v
			}
		}
		return -1 // there is none
	}
}

// A call is counted after its answer was written.
func (r *rig) becomes(value func(string) float64, series string, want float64) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("%s is %v", series, want), func() bool { return value(series) == want })
}

func TestTheThreeSignalsThatAnOperatorNeedsFirst(t *testing.T) {
	r, value := counted(t)
	first := ask{id: "k1", body: refundOf("9", "1")}
	r.pay(first, 201, guard.Allow)
	for range 3 {
		r.pay(first, 201, guard.Replay)
	}
	r.becomes(value, `holdfast_calls_total{verdict="REPLAY"}`, 3)
	r.becomes(value, `holdfast_calls_total{verdict="ALLOW"}`, 1)
	// A question is no call.
	r.poll("charge", "k1", "", "")
	r.becomes(value, `holdfast_polls_total{verdict="REPLAY"}`, 1)
	r.becomes(value, `holdfast_calls_total{verdict="REPLAY"}`, 3)

	// A call that meets its own in flight counts once, however it ends.
	slow := ask{id: "k2", body: refundOf("10", "1"), fault: "hold-after-commit"}
	answers := make(chan reply, 2)
	go func() { answers <- r.do(slow) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	go func() { answers <- r.do(slow) }()
	r.becomes(value, "holdfast_concurrent_conflicts_total", 1)
	r.becomes(value, "holdfast_key_expiry_collisions_total", 0)
	r.p.Release(nil)
	<-answers
	<-answers
	r.becomes(value, `holdfast_calls_total{verdict="REPLAY"}`, 4)
	r.becomes(value, "holdfast_concurrent_conflicts_total", 1)

	// The answer is no longer kept.
	r.clock.pass(100 * time.Hour)
	for n := range 2 {
		r.pay(first, 409, guard.UnknownHold)
		r.becomes(value, "holdfast_key_expiry_collisions_total", float64(n+1))
	}
	r.becomes(value, `holdfast_calls_total{verdict="UNKNOWN_HOLD",reason="KeyExpired"}`, 2)
	// Whoever asks about it has not collided again.
	r.poll("charge", "k1", "", "")
	r.becomes(value, `holdfast_polls_total{verdict="UNKNOWN_HOLD"}`, 1)
	r.becomes(value, "holdfast_key_expiry_collisions_total", 2)
}

func TestAttemptsAndRefusalsAreCounted(t *testing.T) {
	r, value := counted(t)
	r.tool("read", "/ledger", readOnly(time.Minute))
	r.pay(ask{id: "k1", body: refundOf("9", "1"), fault: "error-500-after-commit"}, 409, guard.UnknownHold)
	r.pay(ask{id: "k2", body: refundOf("10", "1"), fault: "decline-402"}, 402, guard.Allow)
	r.pay(ask{id: "k2", body: refundOf("10", "2")}, 422, guard.Conflict)
	r.pay(ask{body: refundOf("11", "1")}, 400, "")
	r.pay(ask{tool: "nobodys", id: "k1", body: "{}"}, 404, "")
	r.pay(ask{tool: "read", method: "GET"}, 200, guard.Allow)
	r.pay(ask{tool: "read", method: "GET"}, 200, guard.Replay)
	r.people.mu.Lock()
	r.people.forbidden["system:serviceaccount:"+namespace+":intruder"] = true
	r.people.mu.Unlock()
	r.pay(ask{caller: "intruder", id: "k1", body: "{}"}, 403, "")
	for series, want := range map[string]float64{
		`holdfast_attempts_total{outcome="Unknown"}`:                                1,
		`holdfast_attempts_total{outcome="Failed"}`:                                 1,
		`holdfast_attempts_total{outcome="Succeeded"}`:                              0,
		`holdfast_attempt_duration_seconds_count`:                                   2,
		`holdfast_guard_duration_seconds_count`:                                     3,
		`holdfast_calls_total{verdict="UNKNOWN_HOLD",reason="OutcomeUnknown"}`:      1,
		`holdfast_calls_total{verdict="CONFLICT",reason="request"}`:                 1,
		`holdfast_calls_total{verdict="none",reason="invalid_request"}`:             1,
		`holdfast_calls_total{tool="read",verdict="ALLOW"}`:                         1,
		`holdfast_calls_total{tool="read",verdict="REPLAY",reason="cache"}`:         1,
		`holdfast_guard_duration_seconds_count{tool="read"}`:                        0,
		`holdfast_calls_total{verdict="none",reason="forbidden"}`:                   -1, // charge: the intruder may not know that it exists
		`holdfast_calls_total{tool="nobodys",verdict="none",reason="no_such_tool"}`: -1,
	} {
		r.becomes(value, series, want)
	}
	for _, reason := range []string{"forbidden", "no_such_tool"} {
		eventually(t, reason+" is counted once among unknown tools", func() bool {
			return metricstest.Read(t, r.g.o.Metrics)[`holdfast_calls_total{namespace="_unknown",reason="`+reason+`",tool="_unknown",verdict="none"}`] == 1
		})
	}
}

func TestWhatTheGuardAddsIsWithoutUpstreamAndWaiting(t *testing.T) {
	r, value := counted(t)
	slow := ask{id: "k1", body: refundOf("9", "1"), fault: "hold-after-commit"}
	answers := make(chan reply, 2)
	go func() { answers <- r.do(slow) }()
	eventually(t, "the payment is under way", func() bool { return len(r.p.Held()) == 1 })
	go func() { answers <- r.do(slow) }()
	eventually(t, "the second waits", func() bool { return metricstest.Read(t, r.g.o.Metrics)["holdfast_calls_waiting"] == 1 })
	// So that both have been at it for a time that the guard never takes.
	const pause = 2 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), pause)
	defer cancel()
	<-ctx.Done()
	r.p.Release(nil)
	<-answers
	<-answers
	r.becomes(value, "holdfast_guard_duration_seconds_count", 2)
	if sum := value("holdfast_guard_duration_seconds_sum"); sum <= 0 || sum > pause.Seconds()/2 {
		t.Errorf("the guard is said to have added %v s to two calls", sum)
	}
	if sum := value("holdfast_attempt_duration_seconds_sum"); sum < pause.Seconds() {
		t.Errorf("the attempt is said to have taken %v s", sum)
	}
}

// The line of a call says what came of it, and those that somebody may have to look into
// go where nothing is left out.
func TestTheLineOfACall(t *testing.T) {
	var evidence []string
	r := setUp(t, func(o *Options) {
		ordinary := o.Log
		o.Evidence = funcr.New(func(prefix, args string) {
			evidence = append(evidence, args)
			ordinary.Info("evidence", "line", args)
		}, funcr.Options{})
	})
	r.pay(ask{id: "k1", body: refundOf("9", "1")}, 201, guard.Allow)
	eventually(t, "the line", func() bool { return strings.Contains(r.logged(), `"intentID"="k1"`) })
	v, err := r.engine.Poll(t.Context(), guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`"tool"="support/charge"`, `"caller"="system:serviceaccount:support:agent"`, `"verdict"="ALLOW"`, `"reason"=""`, `"attempt"=1`, `"outcome"="Succeeded"`, `"status"=201`, `"key"="` + v.Intent.ProviderKey[:keyShown] + `"`,
	} {
		if !strings.Contains(r.logged(), want) {
			t.Errorf("the line has no %s: %s", want, r.logged())
		}
	}
	if strings.Contains(r.logged(), v.Intent.ProviderKey) {
		t.Error("the whole key of the provider is logged")
	}
	if regexp.MustCompile(`"took"="0s"|"upstream"="0s"`).MatchString(r.logged()) || !regexp.MustCompile(`"took"="[0-9.]+[mµ]?s" .*"upstream"="[0-9.]+[mµ]?s"`).MatchString(r.logged()) {
		t.Errorf("how long it took: %s", r.logged())
	}
	if strings.Contains(r.logged(), "evidence") {
		t.Errorf("a plain success is evidence: %s", r.logged())
	}
	r.pay(ask{id: "k2", body: refundOf("10", "1"), fault: "error-500-after-commit"}, 409, guard.UnknownHold)
	r.pay(ask{id: "k3", body: refundOf("11", "1"), fault: "decline-402"}, 402, guard.Allow)
	r.pay(ask{id: "k1", body: refundOf("9", "2")}, 422, guard.Conflict)
	eventually(t, "the lines", func() bool { return strings.Count(r.logged(), "evidence") == 3 })
	for _, want := range []string{`\"reasons\"=\"OutcomeUnknown\"`, `\"outcome\"=\"Failed\"`, `\"verdict\"=\"CONFLICT\" \"reason\"=\"request\"`} {
		if !strings.Contains(r.logged(), want) {
			t.Errorf("no line has %s: %s", want, r.logged())
		}
	}
}

func TestCallsThatWaitForASlotAreShown(t *testing.T) {
	r, value := counted(t)
	r.tool("charge", "/charges", slotsOf(1, 1, time.Minute))
	first := r.start(ask{id: "k0", body: refundOf("0", "1"), fault: "hold"})
	r.holds(1)
	second := r.start(ask{id: "k1", body: refundOf("1", "1")})
	r.becomes(value, "holdfast_calls_queued", 1)
	r.pay(ask{id: "k2", body: refundOf("2", "1")}, 429, guard.Deny)
	r.becomes(value, `holdfast_calls_total{verdict="DENY",reason="`+string(guard.ReasonTooManyInFlight)+`"}`, 1)
	r.p.Release(nil)
	<-first
	<-second
	r.becomes(value, "holdfast_calls_queued", -1)
	r.becomes(value, `holdfast_attempts_total{outcome="Succeeded"}`, 2)
}
