// This file is the load generator's process: so many connections, each with one call
// at a time, for so long. It knows what every answer must be.

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	workNew    = "new"
	workReplay = "replay"
	// workElsewhere is a payment's first retry at a gateway that has not seen it.
	workElsewhere = "replay-elsewhere"
)

// loaded is what the load generator says at its end.
type loaded struct {
	RPS   float64 `json:"rps"`
	P50   float64 `json:"p50_ms"`
	P99   float64 `json:"p99_ms"`
	Calls int     `json:"calls"` // in the time that was measured
	// Paid and Replayed are of the whole time.
	Paid     int            `json:"paid"`
	Replayed int            `json:"replayed"`
	Other    map[string]int `json:"other,omitempty"`
	// Next is the first call that was not made (new).
	Next int64 `json:"next"`
	// Short says that there were too few payments to ask for each of them once only, so
	// that nothing was measured (replay-elsewhere).
	Short bool `json:"short,omitempty"`
}

func loadRole(args []string) error { return load(args, os.Stdout) }

func load(args []string, say io.Writer) error {
	flags := flag.NewFlagSet("load", flag.ContinueOnError)
	to := flags.String("to", "", "gateway or proxy")
	workload := flags.String("workload", workNew, "new, replay or replay-elsewhere")
	connections := flags.Int("connections", 1, "how many calls at once")
	warmUp := flags.Duration("warm-up", time.Second, "how long is not measured")
	measure := flags.Duration("measure", time.Second, "how long is measured")
	from := flags.Int64("from", 0, "the first call (new)")
	known := flags.Int64("known", 0, "how many calls were paid: those before this one (replay, replay-elsewhere)")
	sample := flags.Int64("sample", 0, "replay so many of them, spread evenly, each once before the warm-up; 0: all, and none before (replay)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *workload != workNew && *known < 1 {
		return errors.New("there is nothing to replay")
	}
	g := &generator{
		url: *to + toolPath, short: make(chan struct{}),
		client: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
			MaxIdleConns: *connections, MaxIdleConnsPerHost: *connections, MaxConnsPerHost: *connections, DisableCompression: true,
		}},
	}
	for n := range int64(callers) {
		g.tokens = append(g.tokens, token(n))
	}
	workers := make([]worker, *connections)
	for i := range workers {
		workers[i].other = map[string]int{}
	}
	switch {
	case *workload == workNew:
		g.next.Store(*from)
		g.pick = func() (int64, bool) { return g.next.Add(1) - 1, true }
	case *workload == workElsewhere:
		g.pick = each(rand.Perm(int(*known)))
	case *sample == 0:
		g.pick = func() (int64, bool) { return rand.Int64N(*known), true }
	default:
		calls := sampleOf(*known, *sample)
		g.once(workers, calls)
		g.pick = func() (int64, bool) { return int64(calls[rand.IntN(len(calls))]), true }
	}

	start := time.Now()
	g.begin = start.Add(*warmUp)
	g.end = g.begin.Add(*measure)
	var group sync.WaitGroup
	for i := range workers {
		group.Go(func() { g.work(&workers[i]) })
	}
	// Whoever started this takes the processes' costs at these two lines.
	g.sleep(g.begin)
	_, _ = fmt.Fprintln(say, "begin")
	g.sleep(g.end)
	_, _ = fmt.Fprintln(say, "end")
	group.Wait()

	out := loaded{Other: map[string]int{}, Next: g.next.Load(), Short: g.isShort()}
	var took []time.Duration
	for _, w := range workers {
		took = append(took, w.took...)
		out.Paid += w.paid
		out.Replayed += w.replayed
		for k, n := range w.other {
			out.Other[k] += n
		}
	}
	if len(took) == 0 && !out.Short {
		return fmt.Errorf("no call was answered in %s: %v", *measure, out.Other)
	}
	if !out.Short {
		slices.Sort(took)
		out.Calls, out.RPS = len(took), float64(len(took))/measure.Seconds()
		out.P50, out.P99 = ms(took[len(took)/2]), ms(took[len(took)*99/100])
	}
	return json.NewEncoder(say).Encode(out)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

type generator struct {
	url string
	// pick says which call is next; false: there is none.
	pick       func() (int64, bool)
	next       atomic.Int64
	begin, end time.Time
	client     *http.Client
	tokens     []string
	// short is closed once there was no call left.
	short   chan struct{}
	shorten sync.Once
}

// sampleOf are so many of the calls before known, or all of them, spread evenly.
func sampleOf(known, n int64) []int {
	n = min(n, known)
	calls := make([]int, n)
	for i := range n {
		calls[i] = int(i * known / n)
	}
	return calls
}

// each picks each of the calls once.
func each(calls []int) func() (int64, bool) {
	var next atomic.Int64
	return func() (int64, bool) {
		i := next.Add(1) - 1
		if i >= int64(len(calls)) {
			return 0, false
		}
		return int64(calls[i]), true
	}
}

// once makes each of the calls once; it measures nothing.
func (g *generator) once(workers []worker, calls []int) {
	pick := each(calls)
	var group sync.WaitGroup
	for i := range workers {
		group.Go(func() {
			for call, there := pick(); there; call, there = pick() {
				workers[i].count(g.ask(call))
			}
		})
	}
	group.Wait()
}

func (g *generator) isShort() bool {
	select {
	case <-g.short:
		return true
	default:
		return false
	}
}

// sleep waits until then, or until there is no call left.
func (g *generator) sleep(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-g.short:
	}
}

type worker struct {
	took           []time.Duration
	paid, replayed int
	other          map[string]int
}

func (w *worker) count(status string, err error) {
	switch {
	case err != nil:
		w.other[err.Error()]++
	case status == paid:
		w.paid++
	case status == replayed:
		w.replayed++
	default:
		w.other[status]++
	}
}

func (g *generator) work(w *worker) {
	for {
		start := time.Now()
		if !start.Before(g.end) {
			return
		}
		i, there := g.pick()
		if !there {
			g.shorten.Do(func() { close(g.short) })
			return
		}
		status, err := g.ask(i)
		now := time.Now()
		w.count(status, err)
		if !start.Before(g.begin) && now.Before(g.end) {
			w.took = append(w.took, now.Sub(start))
		}
	}
}

const (
	paid     = "paid"
	replayed = "replayed"
)

// ask makes a call and says what it was answered with.
func (g *generator) ask(i int64) (string, error) {
	c := callOf(i)
	req, err := http.NewRequest(http.MethodPost, g.url, bytes.NewReader(c.body))
	if err != nil {
		return "", err
	}
	req.Header = c.header(g.tokens[i%callers])
	resp, err := g.client.Do(req)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close() // it was read to its end
	if err != nil {
		return "", err
	}
	verdict := resp.Header.Get("Holdfast-Verdict")
	switch {
	case resp.StatusCode == http.StatusCreated && (verdict == "ALLOW" || verdict == ""):
		return paid, nil
	case resp.StatusCode == http.StatusCreated && verdict == "REPLAY" && resp.Header.Get("Idempotent-Replayed") == "true":
		return replayed, nil
	}
	return fmt.Sprintf("%d %s %.300s", resp.StatusCode, verdict, body), nil
}
