// This file measures: which cells there are, how one is measured, and what must hold
// of the money afterwards.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

const (
	layerProxy         = "proxy"
	layerFloorRedis    = "floor-redis"
	layerFloorPostgres = "floor-postgres"
)

var allLayers = append(slices.Clone(stores), layerProxy, layerFloorRedis, layerFloorPostgres)

// figures are what one round of a cell came to.
type figures struct {
	RPS, P50, P99 float64
	// charges are those of the provider's ledger.
	charges int
	// short: there were too few payments to measure with.
	short bool
	// cost is the CPU time for each call, by process.
	cost map[string]float64
}

// bench is a run.
type bench struct {
	settings
	running  []*process
	servers  []servers.Server
	upstream *process
	ledger   string // the upstream's address
}

// layer is something that calls are sent to.
type layer struct {
	name    string
	process *process
	url     string
	// server is the pid of the store's, if it is a process of its own.
	server int
	// next is the first call that was not made here.
	next int64
	// profiles is where the profiler listens.
	profiles string
}

func (b *bench) wants(name string) bool { return slices.Contains(b.layers, name) }

// all measures everything.
func (b *bench) all(ctx context.Context) (*report, error) {
	r := newReport(b.settings)
	var err error
	if b.upstream, b.ledger, err = b.serve("upstream", "upstream", nil); err != nil {
		return nil, err
	}
	if err := b.compare(ctx, r); err != nil {
		return nil, err
	}
	for _, kind := range stores {
		if b.wants(kind) && len(b.growth) > 0 {
			if err := b.grow(ctx, r, kind); err != nil {
				return nil, fmt.Errorf("growth of %s: %w", kind, err)
			}
		}
	}
	r.finish()
	return r, nil
}

// compare measures all layers beside each other.
func (b *bench) compare(ctx context.Context, r *report) error {
	defer b.stop(len(b.running)) // the upstream stays
	defer r.took("compare", time.Now())
	var rs, floor *redisServer
	var ps *postgresServer
	var err error
	if b.wants("redis") {
		if rs, err = b.startRedis(ctx, "redis-server"); err != nil {
			return err
		}
	}
	// What the floor writes would have the store's server rewrite its log in the middle of other cells.
	if b.wants(layerFloorRedis) {
		if floor, err = b.startRedis(ctx, "redis-floor"); err != nil {
			return err
		}
	}
	if b.wants("postgres") || b.wants(layerFloorPostgres) {
		if ps, err = b.startPostgres(ctx, "postgres-server"); err != nil {
			return err
		}
	}
	layers := map[string]*layer{}
	for _, name := range b.layers {
		l := &layer{name: name}
		switch name {
		case "bolt":
			err = b.openGateway(l, place{kind: "bolt", at: filepath.Join(b.dir, "bench.db")})
		case "redis":
			l.server = rs.pid
			err = b.openGateway(l, rs.place("bench"))
		case "postgres":
			l.server = ps.pid
			err = b.openGateway(l, ps.place("bench"))
		case layerProxy:
			l.process, l.url, err = b.serve("proxy", "proxy", nil, "-to", b.ledger+"/charges")
		}
		if err != nil {
			return err
		}
		layers[name] = l
	}
	cells := map[cell][]figures{}
	var order []cell
	for round := range b.rounds {
		for _, connections := range b.connections {
			// Calls and payments of all layers, then the replays of what was paid.
			for _, workload := range []string{workNew, workReplay} {
				for _, name := range b.layers {
					if workload == workReplay && !isStore(name) {
						continue
					}
					if err := ctx.Err(); err != nil {
						return err
					}
					c := cell{layer: name, workload: workload, connections: connections}
					var f figures
					switch name {
					case layerFloorRedis:
						f, err = b.floorRedis(floor, connections)
					case layerFloorPostgres:
						f, err = b.floorPostgres(ctx, ps, connections)
					default:
						f, err = b.measured(ctx, layers[name], workload, connections, 0, round == b.rounds-1 && connections == slices.Max(b.connections))
					}
					if err != nil {
						return fmt.Errorf("%s, %s, %d connections: %w", name, workload, connections, err)
					}
					progress("round %d of %d: %-14s %-16s %2d connections: %8.0f/s, p50 %.2f ms, p99 %.2f ms%s", round+1, b.rounds, name, workload, connections, f.RPS, f.P50, f.P99, costs(f.cost))
					if cells[c] == nil {
						order = append(order, c)
					}
					cells[c] = append(cells[c], f)
				}
			}
		}
	}
	for _, c := range order {
		r.Results = append(r.Results, rowOf(c, cells[c]))
	}
	for _, name := range stores {
		if l := layers[name]; l != nil {
			if r.GatewayMemory[name], err = l.process.resident(); err != nil {
				return err
			}
		}
	}
	return nil
}

// openGateway starts the gateway of a store.
func (b *bench) openGateway(l *layer, at place) error {
	args := append(at.args(), "-upstream", b.ledger)
	if b.profiles != "" {
		free, err := ports.Free(1)
		if err != nil {
			return err
		}
		l.profiles = host + ":" + strconv.Itoa(free[0])
		args = append(args, "-profiles", l.profiles, "-profiled", b.profiled)
	}
	var err error
	l.process, l.url, err = b.serve("gateway-"+l.name+"-"+at.name, "gateway", at.env(), args...)
	return err
}

// retried are the payments that are retried where many were loaded: as many of any number
// of them, so that their retries differ in nothing else.
const retried = 1_000

// measured measures one round of a cell and looks after the money. Where records were
// loaded, it is these that are replayed; otherwise what was paid here.
func (b *bench) measured(ctx context.Context, l *layer, workload string, connections int, records int64, profiled bool) (figures, error) {
	if err := b.resetLedger(); err != nil {
		return figures{}, err
	}
	known, sample := l.next, int64(0)
	if records > 0 {
		known, sample = records, retried
	}
	p, err := b.role("load", "load", nil, "-to", l.url, "-workload", workload, "-connections", strconv.Itoa(connections),
		"-warm-up", b.warmUp.String(), "-measure", b.measure.String(),
		"-from", strconv.FormatInt(l.next, 10), "-known", strconv.FormatInt(known, 10), "-sample", strconv.FormatInt(sample, 10))
	if err != nil {
		return figures{}, err
	}
	defer b.end(p)
	processes := map[string]int{"load": p.pid(), "upstream": b.upstream.pid(), "gateway": l.process.pid()}
	if l.name == layerProxy {
		processes = map[string]int{"load": p.pid(), "upstream": b.upstream.pid(), "proxy": l.process.pid()}
	}
	if l.server != 0 {
		processes["store"] = l.server
	}
	var before, after map[string]time.Duration
	if _, err := p.line(); err != nil {
		return figures{}, err
	}
	if before, err = costOf(processes); err != nil {
		return figures{}, err
	}
	var profiling chan error
	if profiled && l.profiles != "" {
		profiling = make(chan error, 1)
		go func() { profiling <- b.profile(ctx, l, workload) }()
	}
	if _, err := p.line(); err != nil {
		return figures{}, err
	}
	if after, err = costOf(processes); err != nil {
		return figures{}, err
	}
	line, err := p.line()
	if err != nil {
		return figures{}, err
	}
	if profiling != nil {
		if err := <-profiling; err != nil {
			return figures{}, err
		}
	}
	var out loaded
	if err := json.Unmarshal([]byte(line), &out); err != nil {
		return figures{}, fmt.Errorf("what the load generator says: %w", err)
	}
	if err := p.wait(); err != nil {
		return figures{}, err
	}
	if workload == workNew {
		l.next = out.Next
	}
	charges, err := b.charges()
	if err != nil {
		return figures{}, err
	}
	switch {
	case len(out.Other) > 0:
		return figures{}, fmt.Errorf("some calls were answered otherwise: %v; the end of the log of %s:\n%s", out.Other, l.process.name, l.process.tail())
	case workload == workNew && out.Replayed > 0, workload != workNew && out.Paid > 0:
		return figures{}, fmt.Errorf("%d calls were answered as paid and %d as replayed", out.Paid, out.Replayed)
	case charges != out.Paid:
		return figures{}, fmt.Errorf("the ledger has %d charges, but %d calls were answered as paid", charges, out.Paid)
	}
	f := figures{RPS: out.RPS, P50: out.P50, P99: out.P99, charges: charges, short: out.Short, cost: map[string]float64{}}
	for name := range processes {
		f.cost[name] = float64((after[name] - before[name]).Microseconds()) / float64(max(out.Calls, 1))
	}
	return f, nil
}

func costOf(processes map[string]int) (map[string]time.Duration, error) {
	out := map[string]time.Duration{}
	for name, pid := range processes {
		var err error
		if out[name], err = treeCost(pid); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// profile keeps what the gateway's profiler says of a cell.
func (b *bench) profile(ctx context.Context, l *layer, workload string) error {
	if err := os.MkdirAll(b.profiles, 0o755); err != nil {
		return err
	}
	path := map[string]string{"cpu": "profile", "allocs": "allocs", "block": "block", "mutex": "mutex"}[b.profiled]
	text, err := b.get(ctx, fmt.Sprintf("http://%s/debug/pprof/%s?seconds=%d", l.profiles, path, max(1, int(b.measure.Seconds()))))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.profiles, l.name+"-"+workload+"."+b.profiled), text, 0o644)
}

func (b *bench) get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %s", url, resp.StatusCode, text)
	}
	return text, err
}

// charges asks the provider's ledger.
func (b *bench) charges() (int, error) {
	text, err := b.get(context.Background(), b.ledger+"/ledger")
	if err != nil {
		return 0, err
	}
	var l struct {
		Count int `json:"count"`
	}
	return l.Count, json.Unmarshal(text, &l)
}

func (b *bench) resetLedger() error {
	req, err := http.NewRequest(http.MethodDelete, b.ledger+"/ledger", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode >= 300 {
		return fmt.Errorf("reset the ledger: status %d", resp.StatusCode)
	}
	return nil
}

// mostEmbedded is the most records that are loaded into the embedded store: a file of
// one process, which takes some ten kilobytes for each of them, and as long to load a
// million as all else takes together.
const mostEmbedded = 100_000

// grow measures a store that holds many settled records.
func (b *bench) grow(ctx context.Context, r *report, kind string) error {
	defer b.stop(len(b.running))
	defer r.took("growth of "+kind, time.Now())
	var (
		server int
		sync   = func(bool) error { return nil }
		size   func(name string) (int64, error)
		at     func(name string) place
	)
	switch kind {
	case "bolt":
		file := func(name string) string { return filepath.Join(b.dir, name+".db") }
		at = func(name string) place { return place{kind: "bolt", at: file(name), name: name} }
		size = func(name string) (int64, error) {
			info, err := os.Stat(file(name))
			if errors.Is(err, os.ErrNotExist) {
				return 0, nil
			}
			if err != nil {
				return 0, err
			}
			return info.Size(), nil
		}
	case "redis":
		s, err := b.startRedis(ctx, "redis-growth")
		if err != nil {
			return err
		}
		server, at = s.pid, s.place
		sync = func(on bool) error { return s.sync(ctx, on) }
		size = func(string) (int64, error) { return s.size(ctx) }
	case "postgres":
		s, err := b.startPostgres(ctx, "postgres-growth")
		if err != nil {
			return err
		}
		server, at = s.pid, s.place
		sync = func(on bool) error { return s.sync(ctx, on) }
		size = func(name string) (int64, error) { return s.size(ctx, name) }
	}
	if err := sync(false); err != nil {
		return err
	}
	sizes := b.growth
	if kind == "bolt" {
		sizes = slices.DeleteFunc(slices.Clone(sizes), func(n int) bool { return n > mostEmbedded })
	}
	layers, loading := make([]*layer, len(sizes)), time.Now()
	for i, records := range sizes {
		p := at("growth_" + strconv.Itoa(records))
		was, err := size(p.name)
		if err != nil {
			return err
		}
		started := time.Now()
		f, err := b.role("fill", "fill", p.env(), append(p.args(), "-count", strconv.Itoa(records))...)
		if err != nil {
			return err
		}
		if err := b.finish(f); err != nil {
			return err
		}
		is, err := size(p.name)
		if err != nil {
			return err
		}
		bytes := float64(is-was) / float64(records)
		progress("%s: %d settled records loaded in %s, %.0f bytes each", kind, records, time.Since(started).Round(time.Millisecond), bytes)
		r.RecordBytes[kind] = bytes // of the most records, where what a store takes once does not count
		layers[i] = &layer{name: kind, server: server, next: int64(records)}
	}
	if err := sync(true); err != nil {
		return err
	}
	r.took("load "+kind, loading)
	connections := slices.Max(b.connections)
	cells := map[cell][]figures{}
	var order []cell
	short := map[cell]bool{}
	for round := range b.rounds {
		// To a gateway that has just begun every payment is one that it has not seen.
		for i, records := range sizes {
			if round > 0 {
				b.end(layers[i].process)
			}
			if err := b.openGateway(layers[i], at("growth_"+strconv.Itoa(records))); err != nil {
				return err
			}
		}
		for _, workload := range []string{workElsewhere, workReplay, workNew} {
			for i, records := range sizes {
				c := cell{layer: kind, workload: workload, connections: connections, records: records}
				if short[c] {
					continue
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				// The first replays show that what was loaded is what a gateway reads.
				f, err := b.measured(ctx, layers[i], workload, connections, int64(records), false)
				if err != nil {
					return fmt.Errorf("%d records, %s: %w", records, workload, err)
				}
				if short[c] = f.short; f.short {
					progress("round %d of %d: %-14s %-16s %7d records: too few to ask for each once only", round+1, b.rounds, kind, workload, records)
					continue
				}
				progress("round %d of %d: %-14s %-16s %7d records: %8.0f/s, p50 %.2f ms, p99 %.2f ms%s", round+1, b.rounds, kind, workload, records, f.RPS, f.P50, f.P99, costs(f.cost))
				if cells[c] == nil {
					order = append(order, c)
				}
				cells[c] = append(cells[c], f)
			}
		}
	}
	for _, c := range order {
		if !short[c] {
			r.Growth = append(r.Growth, rowOf(c, cells[c]))
		}
	}
	return nil
}
