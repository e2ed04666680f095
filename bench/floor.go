// This file measures the stores' floors: what the server alone takes for the two
// durable writes of a call, asked by its own benchmark, without probes and scripts.

package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// floorRedis: a call is two SETs of what the claim and the settlement hold. Its
// latency is given as twice that of one.
func (b *bench) floorRedis(s *redisServer, connections int) (figures, error) {
	tool, err := compiled(nowhere)
	if err != nil {
		return figures{}, err
	}
	claim, settlement, err := newMaker(tool).settled(0)
	if err != nil {
		return figures{}, err
	}
	size := (len(claim.Record.Header) + len(claim.Record.Body) + len(settlement.Record.Header) + len(settlement.Record.Body)) / 2
	sets := func(n int) (figures, time.Duration, error) {
		start := time.Now()
		out, err := exec.Command("redis-benchmark", "-p", strconv.Itoa(s.Port()), "-a", s.Password(), "-c", strconv.Itoa(connections), "-n", strconv.Itoa(n),
			"-r", "100000000", "--precision", "3", "--csv", "SET", "floor:__rand_int__", strings.Repeat("x", size)).Output()
		if err != nil {
			return figures{}, 0, fmt.Errorf("redis-benchmark: %w", err)
		}
		rows, err := csv.NewReader(strings.NewReader(string(out))).ReadAll()
		if err != nil || len(rows) != 2 || len(rows[1]) < 8 {
			return figures{}, 0, fmt.Errorf("redis-benchmark said what cannot be read: %q", out)
		}
		var numbers [3]float64
		for i, column := range []string{"rps", "p50_latency_ms", "p99_latency_ms"} {
			at := slices.Index(rows[0], column)
			if at < 0 {
				return figures{}, 0, fmt.Errorf("redis-benchmark does not say %s: %q", column, out)
			}
			if numbers[i], err = strconv.ParseFloat(rows[1][at], 64); err != nil {
				return figures{}, 0, err
			}
		}
		return figures{RPS: numbers[0] / 2, P50: 2 * numbers[1], P99: 2 * numbers[2]}, time.Since(start), nil
	}
	// It takes a number and no time: how many are right, a short run says.
	warm, _, err := sets(100 * connections)
	if err != nil {
		return figures{}, err
	}
	f, _, err := sets(max(200*connections, int(2*warm.RPS*b.measure.Seconds())))
	return f, err
}

// floorScript is the two durable writes of a call in SQL, into the store's own tables.
// It is kept where the tables are.
const floorScript = "internal/store/postgres/testdata/floor.sql"

// floorSchema is a store of its own, into which nothing else is written.
const floorSchema = "floor"

func (b *bench) floorPostgres(ctx context.Context, s *postgresServer, connections int) (figures, error) {
	root, err := moduleRoot()
	if err != nil {
		return figures{}, err
	}
	at := s.place(floorSchema)
	st, err := at.open(false)
	if err != nil {
		return figures{}, err
	}
	_, err = st.Initialise(ctx, identity)
	if err := errors.Join(err, st.Close()); err != nil {
		return figures{}, err
	}
	program, err := postgresProgram("pgbench")
	if err != nil {
		return figures{}, err
	}
	dir, err := os.MkdirTemp(b.dir, "floor-")
	if err != nil {
		return figures{}, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// pgbench counts whole seconds. The first is the warm-up.
	seconds := max(1, int(b.measure.Round(time.Second).Seconds()))
	cmd := exec.CommandContext(ctx, program, "-n", "-M", "prepared", "-f", filepath.Join(root, floorScript),
		"-c", strconv.Itoa(connections), "-j", "2", "-T", strconv.Itoa(seconds+1), "-l", "--log-prefix="+filepath.Join(dir, "log"), at.at)
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+floorSchema)
	if out, err := cmd.CombinedOutput(); err != nil {
		return figures{}, fmt.Errorf("pgbench: %w\n%s", err, out)
	}
	return pgbenchLog(filepath.Join(dir, "log*"), time.Second, time.Duration(seconds)*time.Second)
}

// moduleRoot is where the project lies: this is run from there, or from below.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("run this from within the project: the script of PostgreSQL's floor is read from there")
		}
		dir = filepath.Dir(dir)
	}
}

// pgbenchLog reads the latencies of all transactions after the warm-up.
func pgbenchLog(pattern string, warmUp, measure time.Duration) (figures, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return figures{}, err
	}
	type transaction struct{ at, took int64 } // microseconds
	var all []transaction
	first := int64(0)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return figures{}, err
		}
		for line := range strings.Lines(string(text)) {
			// client, transaction, latency, script, seconds and microseconds of its end
			f := strings.Fields(line)
			if len(f) < 6 {
				return figures{}, fmt.Errorf("pgbench's log cannot be read: %q", line)
			}
			var n [3]int64
			for i, at := range []int{2, 4, 5} {
				if n[i], err = strconv.ParseInt(f[at], 10, 64); err != nil {
					return figures{}, fmt.Errorf("pgbench's log cannot be read: %q", line)
				}
			}
			t := transaction{at: n[1]*1_000_000 + n[2], took: n[0]}
			all = append(all, t)
			if start := t.at - t.took; first == 0 || start < first {
				first = start
			}
		}
	}
	from := first + warmUp.Microseconds()
	var took []int64
	for _, t := range all {
		if t.at-t.took >= from && t.at < from+measure.Microseconds() {
			took = append(took, t.took)
		}
	}
	if len(took) == 0 {
		return figures{}, errors.New("pgbench made no transaction")
	}
	slices.Sort(took)
	return figures{
		RPS: float64(len(took)) / measure.Seconds(),
		P50: float64(took[len(took)/2]) / 1000, P99: float64(took[len(took)*99/100]) / 1000,
	}, nil
}
