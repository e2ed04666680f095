// This file names every metric. The table in docs/metrics.md is made from it, so what
// stands here is what operators read.

package metrics

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Kind is how a metric is read.
type Kind string

const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// Definition is one metric. Labels are bounded by what is declared in the cluster: no
// caller, intent or scope is ever one.
type Definition struct {
	Name   string
	Kind   Kind
	Labels []string
	Help   string
	// buckets are a histogram's upper bounds, in seconds.
	buckets []float64
}

// What the guard and a store add is below a millisecond when all is well, and seconds
// when it is not. An upstream takes longer.
var (
	quick = []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	slow  = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
)

var tool = []string{"namespace", "tool"}

// of adds labels to those of a tool.
func of(more ...string) []string { return append([]string{"namespace", "tool"}, more...) }

var (
	callsTotal = Definition{
		Name: "holdfast_calls_total", Kind: Counter, Labels: of("verdict", "reason"),
		Help: "Calls that were answered, by verdict and reason. The verdict is `none` where a call was refused before the guard was asked, or where nothing is at stake. " +
			"The reason is empty for an upstream's own answer and its replay; a hold with several reasons counts under its first. " +
			"The replay rate is the share of verdict `REPLAY`; reason `cache` is the cache of a ReadOnly tool and no replay.",
	}
	concurrentConflicts = Definition{
		Name: "holdfast_concurrent_conflicts_total", Kind: Counter, Labels: tool,
		Help: "Calls that met their own intent in flight, or the very same payment under another intent ID, whatever they were answered in the end.",
	}
	keyExpiryCollisions = Definition{
		Name: "holdfast_key_expiry_collisions_total", Kind: Counter, Labels: tool,
		Help: "Calls that came back under an intent ID whose answer is no longer kept (`KeyExpired`): without the hold each would have been a second payment.",
	}
	pollsTotal = Definition{
		Name: "holdfast_polls_total", Kind: Counter, Labels: of("verdict"),
		Help: "Questions at the poll URL that were answered, by the verdict that a call would get.",
	}
	registrationsTotal = Definition{
		Name: "holdfast_registrations_total", Kind: Counter, Labels: of("verdict"),
		Help: "Intents that were registered over HTTP, by verdict. Those of PaymentIntents are not among them.",
	}
	callsHandedOff = Definition{
		Name: "holdfast_calls_handed_off_total", Kind: Counter, Labels: tool,
		Help: "Calls whose caller preferred not to wait (`Prefer: respond-async`) and that went on without it once their attempt was reserved. What they come to is in `holdfast_calls_total`.",
	}
	attemptsTotal = Definition{
		Name: "holdfast_attempts_total", Kind: Counter, Labels: of("outcome"),
		Help: "Attempts that ended, by outcome: `Succeeded`, `Failed`, `Retryable`, `Pending` or `Unknown`. One that a crash has cut off is in no gateway's count; its intent is held.",
	}
	resumedTotal = Definition{
		Name: "holdfast_resumed_attempts_total", Kind: Counter, Labels: of("outcome"),
		Help: "Attempts that sent the same request again after an unknown outcome (`unknownOutcome: Resume`), by outcome. They are in `holdfast_attempts_total`, too.",
	}
	attemptSeconds = Definition{
		Name: "holdfast_attempt_duration_seconds", Kind: Histogram, Labels: tool, buckets: slow,
		Help: "How long an attempt took, from the connection to the end of the answer.",
	}
	guardSeconds = Definition{
		Name: "holdfast_guard_duration_seconds", Kind: Histogram, Labels: tool, buckets: quick,
		Help: "What the guard added to a call of a Mutating tool: the whole, without its attempts, without the time in which the caller sent its body, and without waiting (for another call, a slot or the next attempt).",
	}
	resultsNotWritten = Definition{
		Name: "holdfast_results_not_written_total", Kind: Counter, Labels: tool,
		Help: "Results of attempts that could not be written to their record in time. Each is in the log, under the logger `evidence`; its intent is held as unknown unless the result could still be written.",
	}
	checksTotal = Definition{
		Name: "holdfast_status_checks_total", Kind: Counter, Labels: of("outcome"),
		Help: "Status checks that were made, by what the provider's answer was read as: `Succeeded`, `Failed` (nothing moved; it counts once it was said twice), `Pending`, or `Unknown`, which is also what cannot be asked.",
	}
	lateResults = Definition{
		Name: "holdfast_late_results_total", Kind: Counter, Labels: of("reason"),
		Help: "Late results that contradict what was decided: a refund is owed (`refund_owed`), or it cannot be told whether one payment was made or two (`disputed`).",
	}
	callsInProgress = Definition{
		Name: "holdfast_calls_in_progress", Kind: Gauge,
		Help: "Calls that this gateway works on now.",
	}
	callsReading = Definition{
		Name: "holdfast_calls_reading", Kind: Gauge,
		Help: "Calls that send their bodies to this gateway now.",
	}
	callsWaiting = Definition{
		Name: "holdfast_calls_waiting", Kind: Gauge,
		Help: "Calls that wait at this gateway for another call, for their next attempt, or for a slot.",
	}
	callsQueued = Definition{
		Name: "holdfast_calls_queued", Kind: Gauge, Labels: tool,
		Help: "Calls that wait at this gateway for a slot of their tool (`concurrency`).",
	}
	callsAsync = Definition{
		Name: "holdfast_calls_async", Kind: Gauge,
		Help: "Calls that go on at this gateway without their callers (`Prefer: respond-async`). They are among those in progress or waiting.",
	}
	callsLimit = Definition{
		Name: "holdfast_calls_limit", Kind: Gauge,
		Help: "How many calls this gateway takes in each of these three places.",
	}
	certificateEnd = Definition{
		Name: "holdfast_certificate_end_timestamp_seconds", Kind: Gauge,
		Help: "When the certificate ends that this gateway shows to agents, in seconds since 1970. Without TLS there is none.",
	}
	holdsOpen = Definition{
		Name: "holdfast_holds", Kind: Gauge, Labels: of("reason", "state"),
		Help: "Holds that are open: `Held` waits for a person, `Waiting` for the provider first. A hold with several reasons counts under its first. Only from the controllers that lead.",
	}
	holdOldest = Definition{
		Name: "holdfast_hold_oldest_age_seconds", Kind: Gauge, Labels: of("reason"),
		Help: "How long the oldest open hold has been open. Only from the controllers that lead.",
	}
	heldIntents = Definition{
		Name: "holdfast_held_intents", Kind: Gauge, Labels: []string{"namespace", "budget"},
		Help: "Intents of the IntentBudget that are held and were never sent, as its `maxHeld` counts them. Only from the controllers that lead.",
	}
	heldLimit = Definition{
		Name: "holdfast_held_intents_limit", Kind: Gauge, Labels: []string{"namespace", "budget"},
		Help: "The IntentBudget's `maxHeld.total`. Only from the controllers that lead.",
	}
	spendUsed = Definition{
		Name: "holdfast_spend_used", Kind: Gauge, Labels: []string{"namespace", "budget", "limit", "currency"},
		Help: "What was settled and has not left the window of an IntentBudget's limit of spend, in major units; of a limit with `per` the sum over all its values. Only from the controllers that lead.",
	}
	spendReserved = Definition{
		Name: "holdfast_spend_reserved", Kind: Gauge, Labels: []string{"namespace", "budget", "limit", "currency"},
		Help: "What is in flight, or not known to have moved nothing, and counts against the limit together with what is used. Only from the controllers that lead.",
	}
	spendLimit = Definition{
		Name: "holdfast_spend_limit", Kind: Gauge, Labels: []string{"namespace", "budget", "limit", "currency"},
		Help: "The limit itself. Absent for one with `per`, which limits each value and not the sum. Only from the controllers that lead.",
	}
	storeSeconds = Definition{
		Name: "holdfast_store_duration_seconds", Kind: Histogram, Labels: []string{"namespace", "store", "operation"}, buckets: quick,
		Help: "Round trips to a store and how long they took, failed ones included. A call that is sent is one `reserve` and one `update`; one whose intent may be known begins with a `get`.",
	}
	storeErrors = Definition{
		Name: "holdfast_store_errors_total", Kind: Counter, Labels: []string{"namespace", "store", "operation", "reason"},
		Help: "Round trips to a store that failed: `unavailable`, `memory_lost`, `canceled` (whoever asked had gone) or `other`.",
	}
	storeRefused = Definition{
		Name: "holdfast_store_refused", Kind: Gauge, Labels: []string{"namespace", "store", "reason"},
		Help: "1 for the reason for which this process serves no calls from the store, 0 for the others: `memory_lost`, `clock_jumped`, `not_durable` or `unavailable`.",
	}
	storeDurable = Definition{
		Name: "holdfast_store_durable", Kind: Gauge, Labels: []string{"namespace", "store"},
		Help: "0 if the last look found that the store could lose an acknowledged write, also where `durabilityPolicy: Warn` accepts that; otherwise 1.",
	}
)

// definitions are all of them, in the order of the documentation.
var definitions = []*Definition{
	&callsTotal, &concurrentConflicts, &keyExpiryCollisions, &pollsTotal, &registrationsTotal,
	&callsHandedOff, &attemptsTotal, &resumedTotal, &attemptSeconds, &guardSeconds, &resultsNotWritten, &checksTotal, &lateResults,
	&callsInProgress, &callsReading, &callsWaiting, &callsAsync, &callsQueued, &callsLimit, &certificateEnd,
	&holdsOpen, &holdOldest, &heldIntents, &heldLimit, &spendUsed, &spendReserved, &spendLimit,
	&storeSeconds, &storeErrors, &storeRefused, &storeDurable,
}

// Table is all metrics as a table in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, d := range definitions {
		labels := ""
		if len(d.Labels) > 0 {
			labels = "`" + strings.Join(d.Labels, "`, `") + "`"
		}
		_, _ = fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", d.Name, d.Kind, labels, d.Help) // a Builder takes all
	}
	return b.String()
}

func (d *Definition) desc() *prometheus.Desc {
	return prometheus.NewDesc(d.Name, d.Help, d.Labels, nil)
}

func (d *Definition) counter() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: d.Name, Help: d.Help}, d.Labels)
}

func (d *Definition) histogram() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: d.Name, Help: d.Help, Buckets: d.buckets}, d.Labels)
}
