// Command metricsdoc writes the table of all metrics into the documentation, between two
// marks. `make generate` runs it.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/holdfast-dev/holdfast/internal/metrics"
)

const begin, end = "<!-- metrics -->\n", "<!-- /metrics -->\n"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: metricsdoc FILE")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "metricsdoc:", err)
		os.Exit(1)
	}
}

func write(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begun := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !begun || !ended {
		return fmt.Errorf("%s has no place for the table: it stands between %q and %q", path, begin, end)
	}
	next := before + begin + metrics.Table() + end + after
	if next == string(text) {
		return nil
	}
	return os.WriteFile(path, []byte(next), 0o644)
}
