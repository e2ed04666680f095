// Command bench measures what the guard costs: one run, one machine, real parts.
//
// It starts the test provider as upstream, a plain reverse proxy, Redis, PostgreSQL
// and a gateway for each store, each as a process of its own, and lets a load
// generator, another process, call them. What the money did is asked of the
// provider's ledger after every cell: if its charges are not exactly the calls that
// were answered as paid, the run fails. All cells are measured in several rounds, one
// after another and then again, so that a busy moment of the machine meets all layers;
// each figure is the median of the rounds.
//
// This file is the flags and the order of things.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// settings of a run.
type settings struct {
	quick       bool
	out         string
	dir         string
	layers      []string
	connections []int
	rounds      int
	warmUp      time.Duration
	measure     time.Duration
	growth      []int
	profiles    string
	profiled    string
}

func main() {
	// As in the manager: nothing is noted of what is allocated, unless it is asked for.
	if !slices.Contains(os.Args, profiledAllocs) {
		runtime.MemProfileRate = 0
	}
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		role, ok := roles[os.Args[1]]
		if !ok {
			fmt.Fprintf(os.Stderr, "bench: there is no role %q\n", os.Args[1])
			os.Exit(2)
		}
		if err := role(os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "bench %s: %v\n", os.Args[1], err)
			os.Exit(1)
		}
		return
	}
	if err := run(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// profiledAllocs is the -profiled of a gateway that is asked what it allocates.
const profiledAllocs = "allocs"

// roles are the processes that this program can be.
var roles = map[string]func([]string) error{
	"upstream": upstreamRole,
	"proxy":    proxyRole,
	"gateway":  gatewayRole,
	"load":     loadRole,
	"fill":     fillRole,
}

func run(arguments []string) error {
	s := settings{
		connections: []int{1, 16, 64}, rounds: 3, warmUp: 500 * time.Millisecond, measure: 2 * time.Second,
		growth: []int{1_000, 100_000, 1_000_000},
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.BoolVar(&s.quick, "quick", false, "one short round with few records: shows that all works, and nothing of speed")
	flags.StringVar(&s.out, "out", "bench/results.json", "where the results are written; \"\": nowhere")
	flags.StringVar(&s.profiles, "profiles", "", "a directory for profiles of the gateways at the most connections; none are taken without it")
	flags.StringVar(&s.profiled, "profiled", "cpu", "what is profiled: cpu, allocs, block or mutex")
	docs := flags.String("docs", "", "a page in which the report takes the place of an earlier one; \"\": none")
	from := flags.String("from", "", "nothing is measured: report what was written there")
	layers := flags.String("layers", strings.Join(allLayers, ","), "which layers are measured")
	measure := flags.Duration("measure", s.measure, "how long one round of a cell is measured")
	flags.IntVar(&s.rounds, "rounds", s.rounds, "how many rounds there are")
	records := flags.Int("records", 1_000_000, "the most settled records that are loaded to measure with; 0: none are")
	most := flags.Int("connections", 0, "measure with this many connections alone; 0: with 1, 16 and 64")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if !slices.Contains([]string{"cpu", profiledAllocs, "block", "mutex"}, s.profiled) {
		return fmt.Errorf("-profiled %q: use cpu, allocs, block or mutex", s.profiled)
	}
	if *from != "" {
		r, err := readReport(*from)
		if err != nil {
			return err
		}
		return r.tell(*docs)
	}
	s.measure = *measure
	for layer := range strings.SplitSeq(*layers, ",") {
		if !slices.Contains(allLayers, layer) {
			return fmt.Errorf("there is no layer %q: use %s", layer, strings.Join(allLayers, ", "))
		}
		s.layers = append(s.layers, layer)
	}
	if s.quick {
		s.connections, s.rounds, s.warmUp, s.measure = []int{1, 16}, 1, 100*time.Millisecond, time.Second
		s.growth = []int{100, 1_000}
	}
	if *most > 0 {
		s.connections = []int{*most}
	}
	s.growth = slices.DeleteFunc(s.growth, func(n int) bool { return n > *records })
	if s.rounds < 1 || s.measure < 100*time.Millisecond {
		return errors.New("at least one round of 100ms is needed")
	}

	var err error
	// Beside the stores' data in life: not in memory, where a sync costs nothing.
	if s.dir, err = os.MkdirTemp("/var/tmp", "holdfast-bench-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(s.dir) }()
	// Whom the servers run as must reach their data.
	if err := os.Chmod(s.dir, 0o711); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{settings: s}
	defer b.stop(0)
	report, err := b.all(ctx)
	if err != nil {
		return err
	}
	if s.out != "" {
		if err := report.save(s.out); err != nil {
			return err
		}
		progress("written to %s", s.out)
	}
	return report.tell(*docs)
}

// tell prints the report, and writes it into a page, if there is one.
func (r *report) tell(page string) error {
	r.print(os.Stdout)
	if page == "" {
		return nil
	}
	return r.document(page)
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
}
