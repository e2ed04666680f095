// This file keeps, for each rule, a history that has shown its loss. To search for it again
// takes minutes, and the search would end at it, or at one before it, since the seeds are the
// same every time: so that one is looked at first. What is kept is only a hint. Where the
// history shows nothing any more, because the world or the engine has changed, all are
// searched as if it had never been kept.
//
// HOLDFAST_SIM_UPDATE=1 keeps what is found; a line that is taken out of the file is searched
// for anew.

package guard

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sort"
	"strings"
	"testing"
)

const knownFile = "testdata/known.txt"

// knownHistories are the seeds in the file, by the rule that is taken out.
func knownHistories(t *testing.T) map[string]uint64 {
	t.Helper()
	known := map[string]uint64{}
	text, err := os.ReadFile(knownFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var seed uint64
		if _, err := fmt.Sscan(line, &seed); err != nil {
			t.Fatalf("%s: %q: %v", knownFile, line, err)
		}
		_, rule, _ := strings.Cut(strings.TrimSpace(line), " ")
		known[rule] = seed
	}
	return known
}

// keepHistories writes the file.
func keepHistories(t *testing.T, known map[string]uint64) {
	t.Helper()
	var lines []string
	for rule, seed := range known {
		lines = append(lines, fmt.Sprintf("%d %s\n", seed, rule))
	}
	sort.Slice(lines, func(i, j int) bool {
		return lines[i][strings.Index(lines[i], " "):] < lines[j][strings.Index(lines[j], " "):]
	})
	if err := os.WriteFile(knownFile, []byte(strings.Join(lines, "")), 0o644); err != nil {
		t.Fatal(err)
	}
}

// shows looks at one history that has shown the loss of a rule before. It must show nothing
// with the rule in place: else what it shows is not that loss.
func shows(t *testing.T, seed uint64, rule worldRule, m mutation) (violation string) {
	t.Helper()
	dir := simDir(t)
	violation, _ = simulate(t, dir, seed, rule, m, false)
	if violation == "" {
		return ""
	}
	if v, _ := simulate(t, dir, seed, "", none, false); v != "" {
		t.Fatalf("seed %d is a violation with nothing taken out: %s", seed, v)
	}
	return violation
}
