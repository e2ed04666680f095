// Package docs tests that the documents say what is there: the README's first tool is
// the sample that is tested, and links lead somewhere.
package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/internal/metrics"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTheFirstToolIsTheMinimalSample(t *testing.T) {
	_, after, begun := strings.Cut(read(t, "../README.md"), "<!-- minimal -->\n```yaml\n")
	shown, _, ended := strings.Cut(after, "```\n<!-- /minimal -->")
	if !begun || !ended {
		t.Fatal("the README shows no first tool between <!-- minimal --> and <!-- /minimal -->")
	}
	if sample := read(t, "../config/samples/minimal.yaml"); shown != sample {
		t.Errorf("the README shows\n%s\nand config/samples/minimal.yaml is\n%s", shown, sample)
	}
}

func TestTheTableOfMetricsIsTheSources(t *testing.T) {
	if !strings.Contains(read(t, "metrics.md"), "<!-- metrics -->\n"+metrics.Table()+"<!-- /metrics -->\n") {
		t.Error("docs/metrics.md does not have the table that internal/metrics makes: run make generate")
	}
}

func TestEveryAlertIsExplained(t *testing.T) {
	alerts := regexp.MustCompile(`(?m)^    - alert: (\w+)$`).FindAllStringSubmatch(read(t, "../config/prometheus/rules.yaml"), -1)
	if len(alerts) < 5 {
		t.Fatalf("only %d alerts were found", len(alerts))
	}
	for _, a := range alerts {
		if !strings.Contains(read(t, "operations.md"), "| `"+a[1]+"` |") {
			t.Errorf("operations.md does not say what to do about %s", a[1])
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile("(?m)^#+ (.+)$")
	dropped = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the names that a page's headings have, as GitHub makes them.
func anchors(t *testing.T, page string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(read(t, page), -1) {
		out[strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	return out
}

func TestLinksLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	links := 0
	for _, page := range append(pages, "../README.md", "../test/provider/README.md") {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			path, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if path != "" {
				target = filepath.Join(filepath.Dir(page), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", page, m[1])
				continue
			}
			if anchor != "" && !anchors(t, target)[anchor] {
				t.Errorf("%s: %s has no heading #%s", page, target, anchor)
			}
		}
	}
	if links < 8 {
		t.Errorf("only %d links were found: are they still read right?", links)
	}
}
