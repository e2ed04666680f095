// The table of what callers saw while things were broken.

package cluster

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// row is all of one drill on one kind of store, however often it was made.
type row struct {
	drill string
	on    storeKind
	times int
	saw   judged
}

var (
	rowsLock sync.Mutex
	rows     []*row
)

// add counts what another agent, or another time of the same drill, saw.
func (r *report) add(more report) {
	r.Seconds = max(r.Seconds, more.Seconds)
	r.Orders += more.Orders
	r.Calls += more.Calls
	r.LongestPause = max(r.LongestPause, more.LongestPause)
	r.Answers = sum(r.Answers, more.Answers)
	r.Ends = sum(r.Ends, more.Ends)
	r.ConnectionErrors = sum(r.ConnectionErrors, more.ConnectionErrors)
}

func sum(a, b map[string]int) map[string]int {
	out := map[string]int{}
	for _, of := range []map[string]int{a, b} {
		for name, n := range of {
			out[name] += n
		}
	}
	return out
}

// tell puts what a drill's callers saw on the table.
func tell(drill string, on storeKind, saw judged) {
	rowsLock.Lock()
	defer rowsLock.Unlock()
	saw.Intents = nil
	i := slices.IndexFunc(rows, func(r *row) bool { return r.drill == drill && r.on == on })
	if i < 0 {
		rows = append(rows, &row{drill: drill, on: on, times: 1, saw: saw})
		return
	}
	r := rows[i]
	r.times++
	r.saw.add(saw.report)
	r.saw.charges += saw.charges
	r.saw.held += saw.held
	r.saw.heldCharged += saw.heldCharged
	r.saw.late += saw.late
}

// table is in Markdown.
func table() string {
	rowsLock.Lock()
	defer rowsLock.Unlock()
	slices.SortStableFunc(rows, func(a, b *row) int { return strings.Compare(a.drill+string(a.on), b.drill+string(b.on)) })
	var b strings.Builder
	b.WriteString("| drill | store | times | calls | other answers | connection errors | longest pause | intents | charges | held | of these charged |\n")
	b.WriteString("| --- | --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |\n")
	for _, r := range rows {
		other := map[string]int{}
		for answer, n := range r.saw.Answers {
			if !strings.HasPrefix(answer, "2") {
				other[answer] = n
			}
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %s | %s | %.1f s | %d | %d | %d | %d |\n", r.drill, r.on, r.times, r.saw.Calls,
			counts(other), counts(r.saw.ConnectionErrors), r.saw.LongestPause, r.saw.Orders, r.saw.charges, r.saw.held, r.saw.heldCharged)
	}
	return b.String()
}

func counts(of map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if of[name] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", of[name], name))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

var _ = ReportAfterSuite("what callers saw", func(ctx SpecContext, _ Report) {
	if len(rows) == 0 {
		return
	}
	text := table()
	fmt.Println("\n" + text)
	file := os.Getenv(tableEnv)
	if file == "" {
		file = filepath.Join(root, "bin", "drills.md")
	}
	Expect(os.MkdirAll(filepath.Dir(file), 0o755)).To(Succeed())
	Expect(os.WriteFile(file, []byte(text), 0o644)).To(Succeed())
})
