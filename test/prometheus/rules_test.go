package prometheus

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

const rulesFile = "../../config/prometheus/rules.yaml"

// rules are those of the PrometheusRule, read as Prometheus reads them.
func rules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var object struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Spec       yaml.Node
	}
	if err := yaml.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	if object.APIVersion != "monitoring.coreos.com/v1" || object.Kind != "PrometheusRule" {
		t.Fatalf("%s is a %s of %s", rulesFile, object.Kind, object.APIVersion)
	}
	spec, err := yaml.Marshal(&object.Spec)
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.Parse(spec, false, model.UTF8Validation, Parser, nil)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var out []rulefmt.Rule
	for _, g := range groups.Groups {
		out = append(out, g.Rules...)
	}
	if len(out) == 0 {
		t.Fatal("there are no rules")
	}
	return out
}

const (
	// evaluation is how often rules are evaluated, and scrape how often series have a value.
	evaluation = time.Minute
	scrape     = 30 * time.Second
	// day is how long a made-up day takes.
	day = 4 * time.Hour
)

var start = time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)

// firing gives what a rule fires for, and the first time that it does, as Prometheus does
// it: what the expression yields at each evaluation for as long as the rule says.
func firing(t *testing.T, m *Memory, r rulefmt.Rule) map[string]time.Duration {
	t.Helper()
	fired, since := map[string]time.Duration{}, map[string]time.Time{}
	for at := start; !at.After(start.Add(day)); at = at.Add(evaluation) {
		yields, err := m.Instant(t.Context(), r.Expr, at)
		if err != nil {
			t.Fatalf("%s: %v", r.Alert, err)
		}
		active := map[string]bool{}
		for _, s := range yields {
			who := s.Metric.DropReserved(func(n string) bool { return n == model.MetricNameLabel }).String()
			active[who] = true
			if since[who].IsZero() {
				since[who] = at
			}
			if _, ok := fired[who]; !ok && at.Sub(since[who]) >= time.Duration(r.For) {
				fired[who] = at.Sub(start)
			}
			annotated(t, r, s.Metric)
		}
		for who := range since {
			if !active[who] {
				delete(since, who)
			}
		}
	}
	return fired
}

var label = regexp.MustCompile(`\$labels\.([a-z_]+)`)

// annotated checks that what the annotations name is there.
func annotated(t *testing.T, r rulefmt.Rule, l labels.Labels) {
	t.Helper()
	for name, text := range r.Annotations {
		for _, m := range label.FindAllStringSubmatch(text, -1) {
			if l.Get(m[1]) == "" {
				t.Errorf("%s: the annotation %s names the label %s, and it fires for %s", r.Alert, name, m[1], l)
			}
		}
	}
}

const refund = `namespace="support",tool="issue-refund"`

// healthy are the series of two gateways and the controllers on a good day: some retries,
// a few races, holds that are decided within the hour, a store that is asked all the time.
// 480 steps are the day.
var healthy = []string{
	`holdfast_calls_total{` + refund + `,verdict="ALLOW",reason="",instance="a"} 0+30x480`,
	`holdfast_calls_total{` + refund + `,verdict="ALLOW",reason="",instance="b"} 0+28x480`,
	`holdfast_calls_total{` + refund + `,verdict="REPLAY",reason="",instance="a"} 0+1x480`,
	`holdfast_calls_total{` + refund + `,verdict="REPLAY",reason="",instance="b"} 0+1x480`,
	`holdfast_calls_total{` + refund + `,verdict="CONFLICT",reason="request",instance="a"} 0x480`,
	`holdfast_calls_total{` + refund + `,verdict="UNKNOWN_HOLD",reason="ScopeOverlap",instance="a"} 0x100 1x380`,
	`holdfast_calls_total{namespace="_unknown",tool="_unknown",verdict="none",reason="unauthenticated",instance="a"} 0+9x480`,
	`holdfast_calls_total{namespace="support",tool="lookup",verdict="ALLOW",reason="",instance="a"} 0+5x480`,
	`holdfast_calls_total{namespace="support",tool="lookup",verdict="REPLAY",reason="cache",instance="a"} 0+50x480`,
	`holdfast_calls_total{namespace="support",tool="rare",verdict="ALLOW",reason="",instance="a"} 0x200 1x280`,
	`holdfast_calls_total{namespace="support",tool="rare",verdict="REPLAY",reason="",instance="a"} 0x202 1x278`,
	`holdfast_concurrent_conflicts_total{` + refund + `,instance="a"} 0x40 1x100 2x100 3x237`,
	`holdfast_key_expiry_collisions_total{` + refund + `,instance="a"} 0x480`,
	// It ends 30 days after the start.
	`holdfast_certificate_end_timestamp_seconds{instance="a"} 1769904000x480`,
	`holdfast_certificate_end_timestamp_seconds{instance="b"} 1769904000x480`,
	`holdfast_hold_oldest_age_seconds{` + refund + `,reason="ScopeOverlap"} _x100 30+30x100 _x10 0+30x100`,
	`holdfast_held_intents{namespace="support",budget="refunds"} 1x480`,
	`holdfast_held_intents_limit{namespace="support",budget="refunds"} 100x480`,
	`holdfast_spend_used{namespace="support",budget="refunds",limit="daily",currency="USD"} 10+1x300 10x180`,
	`holdfast_spend_reserved{namespace="support",budget="refunds",limit="daily",currency="USD"} 20x480`,
	`holdfast_spend_limit{namespace="support",budget="refunds",limit="daily",currency="USD"} 500x480`,
	`holdfast_spend_used{namespace="support",budget="refunds",limit="each",currency="USD"} 5000x480`,
	`holdfast_spend_reserved{namespace="support",budget="refunds",limit="each",currency="USD"} 0x480`,
	`holdfast_calls_total{` + refund + `,verdict="DENY",reason="spend_exceeded",instance="a"} 0x480`,
	`holdfast_calls_total{` + refund + `,verdict="UNKNOWN_HOLD",reason="BudgetExceeded",instance="a"} 0x480`,
	`holdfast_late_results_total{` + refund + `,reason="refund_owed",instance="a"} 0x480`,
	`holdfast_late_results_total{` + refund + `,reason="disputed",instance="a"} 0x480`,
	`holdfast_results_not_written_total{` + refund + `,instance="a"} 0x480`,
	`holdfast_store_refused{namespace="support",store="payments",reason="memory_lost",instance="a"} 0x480`,
	`holdfast_store_refused{namespace="support",store="payments",reason="unavailable",instance="a"} 0x200 1x2 0x278`,
	`holdfast_store_refused{namespace="support",store="payments",reason="not_durable",instance="a"} 0x480`,
	`holdfast_store_refused{namespace="support",store="payments",reason="clock_jumped",instance="a"} 0x480`,
	`holdfast_store_durable{namespace="support",store="payments",instance="a"} 1x480`,
	`holdfast_store_errors_total{namespace="support",store="payments",operation="get",reason="unavailable",instance="a"} 0x200 3x280`,
}

// bad are what each rule is for: series that take the place of healthy ones with the same
// labels, who it must fire for, and from when on at the earliest and latest.
var bad = map[string][]struct {
	why           string
	series        []string
	who           []string
	after, before time.Duration
}{
	"HoldfastReplayRateHigh": {{
		why:    "one gateway's agents begin to loop after an hour: 8 % of all calls",
		series: []string{`holdfast_calls_total{` + refund + `,verdict="REPLAY",reason="",instance="b"} 0+1x120 120+4x360`},
		who:    []string{`{` + refund + `}`}, after: time.Hour, before: 80 * time.Minute,
	}, {
		why: "a slow agent: every call twice",
		series: []string{
			`holdfast_calls_total{namespace="support",tool="slow",verdict="ALLOW",reason="",instance="a"} 0+1x480`,
			`holdfast_calls_total{namespace="support",tool="slow",verdict="REPLAY",reason="",instance="a"} 0+1x480`,
		},
		who: []string{`{namespace="support",tool="slow"}`}, before: 30 * time.Minute,
	}},
	"HoldfastConcurrentConflicts": {{
		why:    "two replicas take the same tasks",
		series: []string{`holdfast_concurrent_conflicts_total{` + refund + `,instance="a"} 0x240 0+1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 10*time.Minute,
	}},
	"HoldfastIntentConflict": {{
		why:    "one ID for two requests, once",
		series: []string{`holdfast_calls_total{` + refund + `,verdict="CONFLICT",reason="request",instance="a"} 0x240 1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastKeyExpiryCollision": {{
		why:    "one collision",
		series: []string{`holdfast_key_expiry_collisions_total{` + refund + `,instance="a"} 0x240 1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastHoldOld": {{
		why:    "nobody looks",
		series: []string{`holdfast_hold_oldest_age_seconds{` + refund + `,reason="ScopeOverlap"} _x120 0+30x360`},
		who:    []string{`{namespace="support",reason="ScopeOverlap",tool="issue-refund"}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastHoldsNearLimit": {{
		why:    "an agent that loops fills the worklist",
		series: []string{`holdfast_held_intents{namespace="support",budget="refunds"} 0+1x90 90x390`},
		who:    []string{`{budget="refunds",namespace="support"}`}, after: 40 * time.Minute, before: 50 * time.Minute,
	}},
	"HoldfastBudgetNearlySpent": {{
		why:    "450 of 500, of which 20 are in flight",
		series: []string{`holdfast_spend_used{namespace="support",budget="refunds",limit="daily",currency="USD"} 10x240 430x240`},
		who:    []string{`{budget="refunds",currency="USD",limit="daily",namespace="support"}`}, after: 2 * time.Hour, before: 2*time.Hour + 2*time.Minute,
	}, {
		why:    "nearly all of it is not known to have moved nothing",
		series: []string{`holdfast_spend_reserved{namespace="support",budget="refunds",limit="daily",currency="USD"} 20x240 420x240`},
		who:    []string{`{budget="refunds",currency="USD",limit="daily",namespace="support"}`}, after: 2 * time.Hour, before: 2*time.Hour + 2*time.Minute,
	}},
	"HoldfastBudgetSpent": {{
		why:    "one payment is denied",
		series: []string{`holdfast_calls_total{` + refund + `,verdict="DENY",reason="spend_exceeded",instance="a"} 0x240 1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}, {
		why:    "one payment is held",
		series: []string{`holdfast_calls_total{` + refund + `,verdict="UNKNOWN_HOLD",reason="BudgetExceeded",instance="a"} 0x240 1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastRefundOwed": {{
		why:    "a success after a rejection",
		series: []string{`holdfast_late_results_total{` + refund + `,reason="refund_owed",instance="a"} 0x240 1x240`},
		who:    []string{`{namespace="support",reason="refund_owed",tool="issue-refund"}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastCertificateEnds": {{
		why:    "one gateway's ends 7 days and an hour after the start",
		series: []string{`holdfast_certificate_end_timestamp_seconds{instance="b"} 1767920400x480`},
		who:    []string{`{}`}, after: time.Hour + 10*time.Minute, before: time.Hour + 13*time.Minute,
	}},
	"HoldfastMemoryLost": {{
		why:    "one of the processes refuses",
		series: []string{`holdfast_store_refused{namespace="support",store="payments",reason="memory_lost",instance="a"} 0x240 1x240`},
		who:    []string{`{namespace="support",store="payments"}`}, after: 2 * time.Hour, before: 2*time.Hour + 2*time.Minute,
	}, {
		why: "the driver has noticed, and nobody has looked yet",
		series: []string{
			`holdfast_store_errors_total{namespace="support",store="payments",operation="reserve",reason="memory_lost",instance="a"} 0x240 1x240`,
		},
		who: []string{`{namespace="support",store="payments"}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
	"HoldfastStoreRefused": {{
		why:    "the store stays away",
		series: []string{`holdfast_store_refused{namespace="support",store="payments",reason="unavailable",instance="a"} 0x240 1x240`},
		who:    []string{`{namespace="support",reason="unavailable",store="payments"}`}, after: 2*time.Hour + time.Minute, before: 2*time.Hour + 4*time.Minute,
	}, {
		why:    "its clock has jumped",
		series: []string{`holdfast_store_refused{namespace="support",store="payments",reason="clock_jumped",instance="a"} 0x240 1x240`},
		who:    []string{`{namespace="support",reason="clock_jumped",store="payments"}`}, after: 2*time.Hour + time.Minute, before: 2*time.Hour + 4*time.Minute,
	}},
	"HoldfastStoreNotDurable": {{
		why:    "somebody turned fsync off, and Warn accepts it",
		series: []string{`holdfast_store_durable{namespace="support",store="payments",instance="a"} 1x240 0x240`},
		who:    []string{`{namespace="support",store="payments"}`}, after: 2*time.Hour + 4*time.Minute, before: 2*time.Hour + 7*time.Minute,
	}},
	"HoldfastResultsNotWritten": {{
		why:    "the store was away when an attempt ended",
		series: []string{`holdfast_results_not_written_total{` + refund + `,instance="a"} 0x240 1x240`},
		who:    []string{`{` + refund + `}`}, after: 2 * time.Hour, before: 2*time.Hour + 3*time.Minute,
	}},
}

// loaded has the healthy series, and these in place of those with the same labels.
func loaded(t *testing.T, instead ...string) *Memory {
	t.Helper()
	name := func(text string) string {
		l, _, err := Parser.ParseSeriesDesc(text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return l.String()
	}
	m := &Memory{}
	replaced := map[string]bool{}
	for _, s := range instead {
		replaced[name(s)] = true
	}
	for _, s := range append(slices.DeleteFunc(slices.Clone(healthy), func(s string) bool { return replaced[name(s)] }), instead...) {
		if err := m.Load(s, start, scrape); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func TestNothingFiresOnAHealthyDay(t *testing.T) {
	m := loaded(t)
	for _, r := range rules(t) {
		if fired := firing(t, m, r); len(fired) > 0 {
			t.Errorf("%s fires: %v", r.Alert, fired)
		}
	}
}

func TestEachRuleFires(t *testing.T) {
	all := map[string]bool{}
	for _, r := range rules(t) {
		all[r.Alert] = true
		if len(bad[r.Alert]) == 0 {
			t.Errorf("nothing shows that %s fires", r.Alert)
		}
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s has no severity, summary or description", r.Alert)
		}
		for _, c := range bad[r.Alert] {
			t.Run(r.Alert+"/"+c.why, func(t *testing.T) {
				fired := firing(t, loaded(t, c.series...), r)
				if len(fired) != len(c.who) {
					t.Fatalf("it fires for %v, not %v", fired, c.who)
				}
				for _, who := range c.who {
					who = strings.ReplaceAll(who, `",`, `", `)
					at, ok := fired[who]
					if !ok || at < c.after || at > c.before {
						t.Errorf("it fires for %v: for %s it should between %s and %s", fired, who, c.after, c.before)
					}
				}
			})
		}
	}
	for name := range bad {
		if !all[name] {
			t.Errorf("there is no rule %s", name)
		}
	}
}

// Rules ask only for metrics that exist, with labels that they have.
func TestRulesAskForWhatThereIs(t *testing.T) {
	for _, r := range rules(t) {
		asksForWhatThereIs(t, r.Alert, r.Expr)
	}
}

var row = regexp.MustCompile("(?m)^\\| `(holdfast_[a-z_]+)` \\| (counter|gauge|histogram) \\| (.*?) \\|")

// metrics are the labels of each metric, by the table that is made from the source.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		var has []string
		for l := range strings.SplitSeq(m[3], ", ") {
			has = append(has, strings.Trim(l, "`"))
		}
		if m[2] == "histogram" {
			out[m[1]+"_bucket"], out[m[1]+"_count"], out[m[1]+"_sum"] = append(slices.Clone(has), "le"), has, has
			continue
		}
		out[m[1]] = has
	}
	if len(out) < 20 {
		t.Fatalf("only %d metrics were found in the table", len(out))
	}
	return out
}

func asksForWhatThereIs(t *testing.T, where, expr string) {
	t.Helper()
	parsed, err := Parser.ParseExpr(expr)
	if err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	have, asked := metrics(t), 0
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok {
			asked++
			for _, m := range s.LabelMatchers {
				if m.Name == model.MetricNameLabel {
					if have[m.Value] == nil {
						t.Errorf("%s asks for %s, which is no metric", where, m.Value)
					}
				} else if !slices.Contains(have[s.Name], m.Name) {
					t.Errorf("%s asks %s for the label %s", where, s.Name, m.Name)
				}
			}
		}
		if a, ok := n.(*parser.AggregateExpr); ok {
			for _, by := range a.Grouping {
				parser.Inspect(a.Expr, func(n parser.Node, _ []parser.Node) error {
					if s, ok := n.(*parser.VectorSelector); ok && !slices.Contains(have[s.Name], by) {
						t.Errorf("%s groups %s by %s", where, s.Name, by)
					}
					return nil
				})
			}
		}
		return nil
	})
	if asked == 0 {
		t.Errorf("%s asks for nothing", where)
	}
}
