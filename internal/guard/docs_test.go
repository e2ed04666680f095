// The table in docs/architecture.md lists exactly the steps of life.

package guard

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestTheDocumentedLifeIsTheOneThatIsBuilt(t *testing.T) {
	const file = "../../docs/architecture.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, after, begun := strings.Cut(string(text), "<!-- life -->\n")
	table, _, ended := strings.Cut(after, "<!-- /life -->")
	if !begun || !ended {
		t.Fatalf("%s has no table between <!-- life --> and <!-- /life -->", file)
	}
	rows := strings.Split(strings.TrimSpace(table), "\n")
	if len(rows) < 2 || !strings.HasPrefix(rows[0], "| from | event | to |") {
		t.Fatalf("the table begins with %q", rows[0])
	}
	documented := map[string]bool{}
	for _, row := range rows[2:] { // the heading and the line below it
		cells := strings.Split(strings.Trim(row, "| "), "|")
		if len(cells) < 3 {
			t.Fatalf("a row of %d cells: %s", len(cells), row)
		}
		from, on, to := names(t, cells[0]), names(t, cells[1]), names(t, cells[2])
		if len(from) != 1 || len(on) != 1 || len(to) == 0 {
			t.Fatalf("a row needs one state, one event, and where it leads: %s", row)
		}
		for _, s := range to {
			step := fmt.Sprintf("from %q on %q to %q", from[0], on[0], s)
			if documented[step] {
				t.Errorf("documented twice: %s", step)
			}
			documented[step] = true
		}
	}
	built := map[string]bool{}
	for _, s := range life {
		for _, to := range s.to {
			built[fmt.Sprintf("from %q on %q to %q", s.from, s.on, to)] = true
		}
	}
	for step := range built {
		if !documented[step] {
			t.Errorf("built and not documented: %s", step)
		}
	}
	for step := range documented {
		if !built[step] {
			t.Errorf("documented and not built: %s", step)
		}
	}
}

// The reasons that hold an intent are all in the documents, each with a heading of its
// own for the person on call.
func TestEveryReasonOfAHoldIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^### `([A-Za-z]+)`$").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, m[1])
	}
	var built []string
	for _, r := range ordered(map[Reason]bool{
		ScopeOverlap: true, LineageOverlap: true, ExactMatch: true, OutcomeUnknown: true, KeyExpired: true, IdentityChanged: true,
		Lookalike: true, BudgetExceeded: true, ApprovalRequired: true,
	}) {
		built = append(built, string(r))
	}
	for _, d := range []Decision{Release, Reject, MarkPaid, MarkFailed} {
		built = append(built, string(d))
	}
	slices.Sort(built)
	slices.Sort(documented)
	if !slices.Equal(built, documented) {
		t.Errorf("docs/operations.md has the headings %q, and should have %q", documented, built)
	}
}

var quoted = regexp.MustCompile("`([^`]+)`")

// names reads a cell: names in backquotes, or the word none.
func names(t *testing.T, cell string) []string {
	t.Helper()
	cell = strings.TrimSpace(cell)
	if cell == "none" {
		return []string{string(None)}
	}
	var out []string
	for _, m := range quoted.FindAllStringSubmatch(cell, -1) {
		out = append(out, m[1])
	}
	if rest := strings.Trim(quoted.ReplaceAllString(cell, ""), ", "); rest != "" {
		t.Fatalf("%q is not a list of names in backquotes", cell)
	}
	return out
}
