// This file runs the simulator: the engine as it is must never pay twice, lose an
// acknowledgement or leave an intent undecided; with a rule taken out it must be
// caught. The same seeds are run every time, so that a failure is of the change at
// hand; HOLDFAST_SIM_FIRST and HOLDFAST_SIM_HISTORIES choose others and more, and
// HOLDFAST_SIM_SEED=n runs one history and prints it.

package guard

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// simulate runs one history; a violation comes with its trace.
func simulate(t *testing.T, dir string, seed uint64, rule worldRule, m mutation, tracing bool) (string, []string) {
	t.Helper()
	w, err := newWorld(seed, rule, m, dir, tracing)
	if err != nil {
		t.Fatal(err)
	}
	w.aim()
	w.history()
	_ = os.Remove(w.path())
	return w.violation, w.trace
}

// find looks for a violation over many seeds, on all cores. 0: none was found.
func find(t *testing.T, first uint64, histories int, rule worldRule, m mutation) (seed uint64, tried int64) {
	t.Helper()
	dir := simDir(t)
	// Many short lives on a small heap: as it is set, a fifth of the time would go into collecting.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	var next, done atomic.Int64
	var found atomic.Uint64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for found.Load() == 0 {
				i := next.Add(1) - 1
				if i >= int64(histories) {
					return
				}
				if v, _ := simulate(t, dir, first+uint64(i), rule, m, false); v != "" {
					found.CompareAndSwap(0, first+uint64(i))
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	return found.Load(), done.Load()
}

// simDir is memory where there is some: the simulator does not test the disk.
func simDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "holdfast-sim")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

func explain(t *testing.T, seed uint64, rule worldRule, m mutation) {
	t.Helper()
	v, trace := simulate(t, simDir(t), seed, rule, m, true)
	t.Fatalf("seed %d: %s\n%s", seed, v, strings.Join(trace, "\n"))
}

func TestSimulator(t *testing.T) {
	if s := os.Getenv("HOLDFAST_SIM_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		v, trace := simulate(t, simDir(t), seed, worldRule(os.Getenv("HOLDFAST_SIM_RULE")), mutation(os.Getenv("HOLDFAST_SIM_MUTATION")), true)
		fmt.Println(strings.Join(trace, "\n"))
		if v != "" {
			t.Fatal(v)
		}
		return
	}
	first := uint64(number("HOLDFAST_SIM_FIRST", 1))
	histories := number("HOLDFAST_SIM_HISTORIES", 10_000)
	if testing.Short() {
		histories = min(histories, 300)
	}
	t.Logf("seeds %d to %d", first, first+uint64(histories)-1)
	began := time.Now()
	seed, tried := find(t, first, histories, "", none)
	if seed != 0 {
		explain(t, seed, "", none)
	}
	t.Logf("%d histories in %s", tried, time.Since(began).Round(time.Millisecond))
}

func TestSimulatorFindsWhatIsTakenOut(t *testing.T) {
	type bug struct {
		rule worldRule
		m    mutation
	}
	bugs := []bug{
		{rule: claimAfterSend}, {rule: kernelDelivers}, {rule: pauseBeforeWrite}, {rule: clockStands},
		{rule: slowProvider}, {rule: ackBeforeDurable}, {rule: anyNonceIsOwn}, {rule: noCompareAndSet},
		{rule: marksKeepStamps}, {rule: probeThenWrite}, {rule: freezeLate}, {rule: lookEarly},
		{rule: releasesAccepted}, {rule: resolutionIgnored}, {rule: retriesUnknown}, {rule: retryUnreserved},
		{m: noDeadline}, {m: noGrace}, {m: noWatch}, {m: noWaiting}, {m: earlyMarkFailed}, {m: noHoldNumber},
		{m: noFence}, {m: noJoin}, {m: sweepRetries}, {m: sweepForgets}, {m: coversEverything}, {m: everyHoldFreezes},
		{m: noLaterProbes}, {m: unknownIsFree}, {m: rejectedIsFree}, {m: jumpIgnored}, {m: lostIsNew}, {m: importForgets}, {m: noBudget}, {m: slotsStay},
		{rule: anyCredential}, {m: resumeAnyAge}, {m: resumeAgeOfLast}, {m: resumeNewKey}, {m: resumeDecides}, {m: resumeReleased}, {m: releaseAnyAge},
		{m: oneCheckIsEnough}, {m: checksAtOnce}, {m: absenceCounts},
		{m: renewsOver}, {m: renewsUnwritten},
		{m: rulesIgnored}, {m: ruleReleasedOnce}, {m: unknownExpires},
		{m: spendUnlimited}, {m: spendUnknownFree}, {m: spendAgesEarly},
		{m: registeredPass}, {m: unregisteredPass}, {m: expiredPass}, {m: expiryKeeps},
	}
	if testing.Short() {
		bugs = []bug{{rule: claimAfterSend}, {m: coversEverything}, {m: noLaterProbes}}
	}
	known, found := knownHistories(t), map[string]uint64{}
	for _, b := range bugs {
		name := string(b.rule) + string(b.m)
		t.Run(name, func(t *testing.T) {
			histories := number("HOLDFAST_SIM_BUG_HISTORIES", 60_000)
			if seed := known[name]; 0 < seed && seed <= uint64(histories) {
				if v := shows(t, seed, b.rule, b.m); v != "" {
					t.Logf("seed %d, as before: %s", seed, v)
					found[name] = seed
					return
				}
				t.Logf("seed %d shows nothing any more: all are searched", seed)
			}
			seed, tried := find(t, 1, histories, b.rule, b.m)
			if seed == 0 {
				t.Fatalf("not found in %d histories", tried)
			}
			t.Logf("found in %d histories (seed %d): %s", tried, seed, shows(t, seed, b.rule, b.m))
			found[name] = seed
		})
	}
	if number("HOLDFAST_SIM_UPDATE", 0) == 1 && !testing.Short() && !t.Failed() {
		keepHistories(t, found)
	}
}
