// Command picture draws the dashboard of config/prometheus without a Grafana: it scrapes
// running processes for a while, evaluates the panels' own queries over what it got with
// Prometheus' engine, and draws each panel into one SVG.
//
//	go run -C test/prometheus ./picture -for 5m -out ../../docs/dashboard.svg http://127.0.0.1:8080/metrics
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"

	dashboard "github.com/holdfast-dev/holdfast/test/prometheus"
)

func main() {
	var (
		lasts  = flag.Duration("for", 5*time.Minute, "how long to scrape; an interrupt ends it sooner")
		every  = flag.Duration("every", 2*time.Second, "how often to scrape")
		over   = flag.Duration("over", 20*time.Second, "what rates are taken over")
		out    = flag.String("out", "", "the SVG to write")
		panels = flag.Int("panels", 0, "how many of the dashboard's panels to draw; 0: all")
	)
	flag.Parse()
	if *out == "" || flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: picture [flags] -out FILE URL...")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *lasts, *every, *over, *panels, *out, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, lasts, every, over time.Duration, panels int, out string, urls []string) error {
	d, err := dashboard.ReadDashboard(dashboard.DashboardFile)
	if err != nil {
		return err
	}
	if panels > 0 {
		d.Panels = d.Panels[:min(panels, len(d.Panels))]
	}
	m := &dashboard.Memory{}
	began := time.Now()
	if err := record(ctx, m, urls, lasts, every); err != nil {
		return err
	}
	svg, err := draw(context.WithoutCancel(ctx), m, d, began.Add(over), time.Now(), every, over)
	if err != nil {
		return err
	}
	return os.WriteFile(out, svg, 0o644)
}

// record scrapes until the time is over.
func record(ctx context.Context, m *dashboard.Memory, urls []string, lasts, every time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		for _, url := range urls {
			// Between two of these a process may be down, as in any run.
			if err := scrape(ctx, m, url); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "picture:", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// scrape adds the process's own series, as they are now.
func scrape(ctx context.Context, m *dashboard.Memory, url string) (err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, answer.Status)
	}
	now := time.Now()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		line := lines.Text()
		if !strings.HasPrefix(line, "holdfast_") {
			continue
		}
		text, number, _ := strings.Cut(line, "} ")
		if strings.Contains(line, "{") {
			text += "}"
		} else {
			text, number, _ = strings.Cut(line, " ")
		}
		l, err := dashboard.Parser.ParseMetric(text)
		if err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		v, err := strconv.ParseFloat(number, 64)
		if err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
		m.Add(labels.NewBuilder(l).Set("instance", url).Labels(), dashboard.Sample{At: now, Value: v})
	}
	return lines.Err()
}
