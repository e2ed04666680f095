// This file is the scenarios, and the judgement of what they came to.
//
// A trial is one purchase under a name of its own: counted as zero before anything is
// sent, and counted again until nothing can come any more. A scenario is one trial, or
// several where the first call may not have arrived before the agent was gone.

package retrytest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// verdict is what a scenario came to.
type verdict string

const (
	passed  verdict = "PASS"
	faulty  verdict = "FAULT"
	unclear verdict = "UNCLEAR"
)

// result is one scenario's.
type result struct {
	scenario, what string
	verdict        verdict
	// why are sentences.
	why    []string
	trials []*trial
	took   time.Duration
}

// trial is one purchase.
type trial struct {
	values
	scenario string
	// calls are what the callers got in the end; answers all that any of them was answered.
	calls   []outcome
	answers []*answer
	// arrived: it is known that the first request, whose agent was gone, was taken in.
	arrived bool
	// most is the highest count that was seen, last the newest.
	most, last found
	counted    bool
	err        error
	keys       map[string]string
}

// outcome is how a caller ended: with an answer that tells it not to come back, or not.
type outcome struct {
	last *answer
	err  error
}

// tester runs the scenarios.
type tester struct {
	*plan
	run     string
	gateway remote
	sender  *sender
	effects counter
	report  *report
	// keyOf is the provider's key of an intent; nil: only the gateway knows.
	keyOf func(ctx context.Context, intent string) string

	trials int
}

// scenario is one way in which agents retry.
type scenario struct {
	name, what string
	// delays are those after which the agent is gone, of one trial each, until one has
	// shown that its request arrived; nil: nobody goes.
	delays []time.Duration
	run    func(*tester, context.Context, *trial, time.Duration) error
}

var goneAfter = []time.Duration{0, 5 * time.Millisecond, 25 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second}

var scenarios = []scenario{
	{name: "twice", what: "the same call twice", run: (*tester).twice},
	{name: "at-once", what: "the same call many times at once", run: (*tester).together},
	{name: "lost-answer", what: "a lost answer, and the call again", delays: goneAfter, run: (*tester).lost},
	{name: "killed-client", what: "a killed client, and the call again", delays: goneAfter, run: (*tester).killed},
}

// all runs them one after the other, watches what comes of them, and judges.
func (t *tester) all(ctx context.Context) error {
	var results []*result
	for _, s := range scenarios {
		began := time.Now()
		r := &result{scenario: s.name, what: s.what}
		if s.name == "at-once" {
			r.what = fmt.Sprintf("the same call %d times at once", t.atOnce)
		}
		delays := s.delays
		if delays == nil {
			delays = []time.Duration{0}
		}
		for _, delay := range delays {
			t.trials++
			one := &trial{values: newValues(t.run, t.trials), scenario: s.name}
			r.trials = append(r.trials, one)
			if one.err = t.begin(ctx, one); one.err == nil {
				one.err = s.run(t, ctx, one, delay)
			}
			t.count(ctx, one)
			if ctx.Err() != nil {
				return errors.New("interrupted before the end")
			}
			if one.err != nil || one.most.n > 1 || one.arrived || len(one.calls) > 0 && !one.good() {
				break
			}
		}
		r.took = time.Since(began)
		results = append(results, r)
	}
	if err := t.watch(ctx, results); err != nil {
		return err
	}
	for _, r := range results {
		for _, one := range r.trials {
			t.ask(ctx, one)
		}
		r.judge()
		t.report.results = append(t.report.results, *r)
	}
	return nil
}

// begin counts what is there before anything was sent.
func (t *tester) begin(ctx context.Context, one *trial) error {
	f, err := t.effects(ctx, one.values, one.scenario)
	if err != nil {
		return err
	}
	if f.n != 0 {
		return fmt.Errorf("before anything was sent for the order %s there %s already: "+
			"let effects count those of this order alone, by {{order}}, {{digits}} or {{intent}}", one.order, were(f.n))
	}
	return nil
}

// count notes how many effects there are now.
func (t *tester) count(ctx context.Context, one *trial) {
	if len(one.answers) == 0 && one.err != nil {
		return // nothing may have been sent, and it is unclear anyway
	}
	f, err := t.effects(ctx, one.values, one.scenario)
	if err != nil {
		one.err = errors.Join(one.err, err)
		return
	}
	one.counted, one.last = true, f
	if f.n > one.most.n {
		one.most = f
	}
}

// watch counts until nothing can come any more.
func (t *tester) watch(ctx context.Context, results []*result) error {
	end := time.Now().Add(t.settle)
	every := min(max(t.settle/20, 200*time.Millisecond), 5*time.Second)
	for {
		left := time.Until(end)
		if err := pause(ctx, max(min(every, left), 0)); err != nil {
			return errors.New("interrupted before the effects had settled")
		}
		last := time.Until(end) <= 0
		for _, r := range results {
			for _, one := range r.trials {
				if one.err == nil {
					t.count(ctx, one)
				}
			}
		}
		if last {
			return nil
		}
	}
}

// ask finds the provider's keys of the intents.
func (t *tester) ask(ctx context.Context, one *trial) {
	if t.keyOf == nil {
		return
	}
	one.keys = map[string]string{}
	for _, id := range one.intents() {
		if key := t.keyOf(ctx, id); key != "" {
			one.keys[id] = key
		}
	}
}

func (t *tester) twice(ctx context.Context, one *trial, _ time.Duration) error {
	for range 2 {
		one.calls = append(one.calls, t.agent(ctx, one))
	}
	return nil
}

func (t *tester) together(ctx context.Context, one *trial, _ time.Duration) error {
	one.calls = make([]outcome, t.atOnce)
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range one.calls {
		all.Go(func() {
			<-start
			one.calls[i] = t.agent(ctx, one)
		})
	}
	close(start)
	all.Wait()
	return nil
}

func (t *tester) lost(ctx context.Context, one *trial, after time.Duration) error {
	return t.gone(ctx, one, func(w *wire) error { return t.sender.leave(ctx, w, after) })
}

func (t *tester) killed(ctx context.Context, one *trial, after time.Duration) error {
	return t.gone(ctx, one, func(w *wire) error {
		w.CA = t.gateway.ca
		return die(ctx, w, after)
	})
}

// gone sends a request whose agent does not get the answer, and calls again.
func (t *tester) gone(ctx context.Context, one *trial, send func(*wire) error) error {
	w, err := t.next(one)
	if err != nil {
		return err
	}
	if err := send(w); err != nil {
		return err
	}
	one.calls = append(one.calls, t.agent(ctx, one))
	if len(one.answers) > 0 {
		first := one.answers[0].verdict
		// One that was let through now is the first that arrived.
		one.arrived = first == "REPLAY" || first == "IN_FLIGHT"
	}
	return nil
}

// numbers are given under this lock, and answers noted.
var noting sync.Mutex

// next is the trial's next request.
func (t *tester) next(one *trial) (*wire, error) {
	noting.Lock()
	defer noting.Unlock()
	one.call++
	w, err := t.request(one.values, t.gateway.url)
	if err != nil {
		return nil, err
	}
	w.Header.Set("Authorization", "Bearer "+t.gateway.token)
	return w, nil
}

// agent calls, and comes back while it is told to, under the same name.
func (t *tester) agent(ctx context.Context, one *trial) outcome {
	ctx, cancel := context.WithTimeout(ctx, t.patience)
	defer cancel()
	var last outcome
	for {
		w, err := t.next(one)
		if err != nil {
			return outcome{err: err}
		}
		a, err := t.sender.send(ctx, w, nil)
		wait := 500 * time.Millisecond
		switch {
		case err != nil && ctx.Err() != nil:
			if last.last != nil || last.err != nil {
				return last
			}
			return outcome{err: fmt.Errorf("no answer within %s: %w", t.patience, err)}
		case err != nil:
			last = outcome{err: err}
		default:
			a.asked = t.toolObject != nil && t.toolObject.Spec.StatusCheck != nil
			noting.Lock()
			one.answers = append(one.answers, a)
			noting.Unlock()
			last = outcome{last: a}
			if !a.again() {
				return last
			}
			if a.after > 0 {
				wait = a.after
			}
		}
		if pause(ctx, wait) != nil {
			return last
		}
	}
}

// again says that the gateway told the caller to come back.
func (a *answer) again() bool {
	switch a.verdict {
	case "IN_FLIGHT":
		return true
	case "DENY":
		// Too many holds wait for people, whom nobody awaits here.
		return a.after > 0 && a.reason != "too_many_holds" && (a.status == 429 || a.status == 502 || a.status == 503)
	case "UNKNOWN_HOLD":
		return a.asked && a.reason == "OutcomeUnknown"
	case "ALLOW": // the upstream's own answer, of which the gateway knows that nothing was moved
		return a.after > 0 && (a.status == 429 || a.status == 503)
	}
	return false
}

// success says that the tool has done it, now or before.
func (a *answer) success() bool {
	return (a.verdict == "ALLOW" || a.verdict == "REPLAY") && a.status >= 200 && a.status < 300
}

// good says that every caller got a success.
func (one *trial) good() bool {
	return !slices.ContainsFunc(one.calls, func(o outcome) bool { return o.last == nil || !o.last.success() })
}

// intents are those that the gateway took the calls for.
func (one *trial) intents() []string {
	var out []string
	for _, a := range one.answers {
		if a.intent != "" {
			out = append(out, a.intent)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// attempts is how often the gateway has sent an intent.
func (one *trial) attempts(intent string) int {
	n := 0
	for _, a := range one.answers {
		if a.intent == intent {
			n = max(n, a.attempt)
		}
	}
	return n
}

// judge says what the trials of a scenario came to: the worst of them counts.
func (r *result) judge() {
	r.verdict = passed
	for _, one := range r.trials {
		v, why := one.judge()
		switch {
		case v == faulty, v == unclear && r.verdict == passed:
			if v == faulty && r.verdict != faulty {
				r.why = nil
			}
			r.verdict = v
			r.why = append(r.why, why...)
		}
	}
	if r.verdict == passed && (r.scenario == "lost-answer" || r.scenario == "killed-client") &&
		!slices.ContainsFunc(r.trials, func(one *trial) bool { return one.arrived }) {
		r.verdict = unclear
		r.why = append(r.why, fmt.Sprintf("No request of an agent that was gone has arrived, also not after %s: the gateway did not take it in, so this shows nothing.", goneAfter[len(goneAfter)-1]))
	}
}

func (one *trial) judge() (verdict, []string) {
	intents := one.intents()
	if one.most.n > 1 {
		return faulty, []string{fmt.Sprintf("The order %s had %d effects, and may have one. %s", one.order, one.most.n, one.diagnosis(intents))}
	}
	for _, o := range one.calls {
		if o.last != nil && o.last.verdict == "CONFLICT" {
			return faulty, []string{"A retry was taken for another request: something differs from one request to the next that tells purchases apart. " +
				"Name it in spec.identity.volatile, or leave it out of amount, recipient and scope. The answer was " + o.last.text()}
		}
	}
	if len(intents) > 1 {
		return faulty, []string{fmt.Sprintf("The calls of one purchase were taken for %d intents. %s", len(intents), severalIntents)}
	}
	if one.err != nil {
		return unclear, []string{sentence(one.err.Error())}
	}
	for _, o := range one.calls {
		switch {
		case o.err != nil:
			return unclear, []string{sentence("A call had no answer: " + o.err.Error())}
		case o.last.again():
			return unclear, []string{"A call was told to come back until the patience of the test was over. The last answer was " + o.last.text()}
		case !o.last.success():
			return unclear, []string{"A call did not succeed, so its effects say nothing. The answer was " + o.last.text() + one.hint(o.last)}
		}
	}
	switch {
	case !one.counted:
		return unclear, []string{"The effects were not counted."}
	case one.last.n == 0:
		return unclear, []string{fmt.Sprintf("The calls succeeded, and no effect was counted for the order %s: is it counted where the tool writes, and by what the call says? Or does it take longer than settleWithin?", one.order)}
	}
	return passed, nil
}

// hint is what helps with an answer that speaks of another trial.
func (one *trial) hint(a *answer) string {
	if a.verdict == "UNKNOWN_HOLD" && a.reason != "OutcomeUnknown" {
		return " Each trial is a purchase of its own: does the scope have {{order}} or {{digits}} in it? And where purchases that look alike are held, or the identity was changed lately, does the recipient have it?"
	}
	return ""
}

const severalIntents = "Something that differs from one request to the next names the purchase: intentID must read what an agent keeps for its retries, " +
	"and scope what the money is for, nothing that is made anew for each request."

// diagnosis says where the second effect comes from.
func (one *trial) diagnosis(intents []string) string {
	sent := 0
	for _, id := range intents {
		sent += one.attempts(id)
	}
	switch {
	case len(intents) > 1:
		return fmt.Sprintf("The calls were taken for %d intents. %s", len(intents), severalIntents)
	case len(intents) == 1 && sent == 1:
		return "The gateway has sent it once: the upstream itself books twice for one request, or what is behind it sends it again without the key."
	case sent > 1:
		return fmt.Sprintf("The gateway has sent it %d times, because earlier attempts were read as having moved nothing: "+
			"see how the upstream answers when it has booked, what outcomes of the AgentTool make of that, and whether the upstream knows the same key again.", sent)
	}
	return "Which intents they belong to is not known: no answer named one."
}

func were(n int) string {
	if n == 1 {
		return "was 1 effect"
	}
	return fmt.Sprintf("were %d effects", n)
}

func sentence(text string) string {
	if text == "" {
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:] + "."
}
