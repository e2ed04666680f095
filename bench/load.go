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
}

func loadRole(args []string) error {
	flags := flag.NewFlagSet("load", flag.ContinueOnError)
	to := flags.String("to", "", "gateway or proxy")
	workload := flags.String("workload", workNew, "new or replay")
	connections := flags.Int("connections", 1, "how many calls at once")
	warmUp := flags.Duration("warm-up", time.Second, "how long is not measured")
	measure := flags.Duration("measure", time.Second, "how long is measured")
	from := flags.Int64("from", 0, "the first call (new), or the first that was paid (replay)")
	known := flags.Int64("known", 0, "the first call that was not paid (replay)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *workload == workReplay && *known <= *from {
		return errors.New("there is nothing to replay")
	}
	g := &generator{
		url: *to + toolPath, replay: *workload == workReplay, from: *from, known: *known,
		client: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
			MaxIdleConns: *connections, MaxIdleConnsPerHost: *connections, MaxConnsPerHost: *connections, DisableCompression: true,
		}},
	}
	for n := range int64(callers) {
		g.tokens = append(g.tokens, token(n))
	}
	g.next.Store(*from)

	start := time.Now()
	g.begin = start.Add(*warmUp)
	g.end = g.begin.Add(*measure)
	workers := make([]worker, *connections)
	var group sync.WaitGroup
	for i := range workers {
		workers[i].other = map[string]int{}
		group.Go(func() { g.work(&workers[i]) })
	}
	// Whoever started this takes the processes' costs at these two lines.
	time.Sleep(time.Until(g.begin))
	fmt.Println("begin")
	time.Sleep(time.Until(g.end))
	fmt.Println("end")
	group.Wait()

	out := loaded{Other: map[string]int{}, Next: g.next.Load()}
	var took []time.Duration
	for _, w := range workers {
		took = append(took, w.took...)
		out.Paid += w.paid
		out.Replayed += w.replayed
		for k, n := range w.other {
			out.Other[k] += n
		}
	}
	if len(took) == 0 {
		return fmt.Errorf("no call was answered in %s: %v", *measure, out.Other)
	}
	slices.Sort(took)
	out.Calls, out.RPS = len(took), float64(len(took))/measure.Seconds()
	out.P50, out.P99 = ms(took[len(took)/2]), ms(took[len(took)*99/100])
	return json.NewEncoder(os.Stdout).Encode(out)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

type generator struct {
	url         string
	replay      bool
	from, known int64
	next        atomic.Int64
	begin, end  time.Time
	client      *http.Client
	tokens      []string
}

type worker struct {
	took           []time.Duration
	paid, replayed int
	other          map[string]int
}

func (g *generator) work(w *worker) {
	random := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		start := time.Now()
		if !start.Before(g.end) {
			return
		}
		i := int64(0)
		if g.replay {
			i = g.from + random.Int64N(g.known-g.from)
		} else {
			i = g.next.Add(1) - 1
		}
		status, err := g.once(i)
		now := time.Now()
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
		if !start.Before(g.begin) && now.Before(g.end) {
			w.took = append(w.took, now.Sub(start))
		}
	}
}

const (
	paid     = "paid"
	replayed = "replayed"
)

// once makes a call and says what it was answered with.
func (g *generator) once(i int64) (string, error) {
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
