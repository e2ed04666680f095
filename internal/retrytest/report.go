// This file is the report: for people, and for what shows the tests of a CI.

package retrytest

import (
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

type report struct {
	tool, through string
	began         time.Time
	took          time.Duration
	notes         []string
	results       []result
}

// of are the scenarios that came to a verdict.
func (r *report) of(v verdict) int {
	n := 0
	for _, x := range r.results {
		if x.verdict == v {
			n++
		}
	}
	return n
}

// code is what the process ends with. A fault is more than what cannot be told.
func (r *report) code() int {
	switch {
	case r.of(faulty) > 0:
		return Fault
	case r.of(unclear) > 0 || len(r.results) == 0:
		return CannotTell
	}
	return Passed
}

func (r *report) text() string {
	var b strings.Builder
	b.WriteString("retry-test")
	if r.tool != "" {
		b.WriteString(" of " + r.tool)
	}
	if r.through != "" {
		b.WriteString(", through " + r.through)
	}
	b.WriteString("\n")
	for _, note := range r.notes {
		b.WriteString("note: " + note + "\n")
	}
	b.WriteString("\n")
	for _, x := range r.results {
		fmt.Fprintf(&b, "%-8s %-14s %s\n", x.verdict, x.scenario, x.head())
		for _, line := range x.lines() {
			b.WriteString("         " + line + "\n")
		}
	}
	b.WriteString("\n" + r.end() + "\n")
	return b.String()
}

// end is the last line.
func (r *report) end() string {
	all := len(r.results)
	switch r.code() {
	case Passed:
		return fmt.Sprintf("One effect in each of %d scenarios.", all)
	case Fault:
		return fmt.Sprintf("A fault in %d of %d scenarios.", r.of(faulty), all)
	}
	return fmt.Sprintf("It cannot be told: %d of %d scenarios passed.", r.of(passed), all)
}

// head is the scenario and what was counted.
func (x *result) head() string {
	most, counted := 0, false
	for _, one := range x.trials {
		if one.counted {
			most, counted = max(most, one.most.n), true
		}
	}
	switch {
	case !counted:
		return x.what
	case most == 1:
		return x.what + ": 1 effect"
	}
	return fmt.Sprintf("%s: %d effects", x.what, most)
}

// lines are why, and of what did not pass also what was seen.
func (x *result) lines() []string {
	out := slices.Clone(x.why)
	if x.verdict == passed {
		return out
	}
	for _, one := range x.trials {
		if v, _ := one.judge(); v == passed || len(one.answers) == 0 {
			continue
		}
		out = append(out, "order "+one.order+", answers: "+one.summary())
		intents := one.intents()
		for i, id := range intents {
			if i == shownItems {
				out = append(out, fmt.Sprintf("and %d more intents", len(intents)-i))
				break
			}
			line := fmt.Sprintf("intent %s, %s", id, sentTimes(one.attempts(id)))
			if key := one.keys[id]; key != "" {
				line += ", key at the provider " + key
			}
			out = append(out, line)
		}
		for _, item := range one.most.items {
			out = append(out, "counted: "+item)
		}
		if more := one.most.n - len(one.most.items); more > 0 && len(one.most.items) > 0 {
			out = append(out, fmt.Sprintf("and %d more", more))
		}
	}
	return out
}

func sentTimes(n int) string {
	switch n {
	case 0:
		return "not sent"
	case 1:
		return "sent once"
	}
	return fmt.Sprintf("sent %d times", n)
}

// summary counts the answers by verdict and status.
func (one *trial) summary() string {
	var kinds []string
	count := map[string]int{}
	for _, a := range one.answers {
		if count[a.short()]++; count[a.short()] == 1 {
			kinds = append(kinds, a.short())
		}
	}
	for i, k := range kinds {
		kinds[i] = strconv.Itoa(count[k]) + " " + k
	}
	return strings.Join(kinds, ", ")
}

// The form that CI servers read as JUnit's.
type (
	junitSuites struct {
		XMLName  xml.Name     `xml:"testsuites"`
		Name     string       `xml:"name,attr"`
		Tests    int          `xml:"tests,attr"`
		Failures int          `xml:"failures,attr"`
		Errors   int          `xml:"errors,attr"`
		Time     string       `xml:"time,attr"`
		Suites   []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name      string      `xml:"name,attr"`
		Tests     int         `xml:"tests,attr"`
		Failures  int         `xml:"failures,attr"`
		Errors    int         `xml:"errors,attr"`
		Skipped   int         `xml:"skipped,attr"`
		Time      string      `xml:"time,attr"`
		Timestamp string      `xml:"timestamp,attr"`
		Cases     []junitCase `xml:"testcase"`
		Out       string      `xml:"system-out,omitempty"`
	}
	junitCase struct {
		Class   string        `xml:"classname,attr"`
		Name    string        `xml:"name,attr"`
		Time    string        `xml:"time,attr"`
		Failure *junitProblem `xml:"failure"`
		Error   *junitProblem `xml:"error"`
	}
	junitProblem struct {
		Type    string `xml:"type,attr"`
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 3, 64) }

// writeJUnit replaces the file as a whole.
func (r *report) writeJUnit(path string) error {
	name := "retry-test"
	if r.tool != "" {
		name += " " + r.tool
	}
	suite := junitSuite{
		Name: name, Tests: len(r.results), Failures: r.of(faulty), Errors: r.of(unclear),
		Time: seconds(r.took), Timestamp: r.began.UTC().Format("2006-01-02T15:04:05"),
		Out: strings.Join(append([]string{"through " + or(r.through, "nothing yet")}, r.notes...), "\n"),
	}
	for _, x := range r.results {
		c := junitCase{Class: "retry-test." + strings.ReplaceAll(or(r.tool, "unknown"), "/", "."), Name: x.scenario, Time: seconds(x.took)}
		p := &junitProblem{Type: string(x.verdict), Message: x.head(), Text: strings.Join(x.lines(), "\n")}
		if len(x.why) > 0 {
			p.Message = x.why[0]
		}
		switch x.verdict {
		case faulty:
			c.Failure = p
		case unclear:
			c.Error = p
		}
		suite.Cases = append(suite.Cases, c)
	}
	text, err := xml.MarshalIndent(junitSuites{
		Name: name, Tests: suite.Tests, Failures: suite.Failures, Errors: suite.Errors, Time: suite.Time, Suites: []junitSuite{suite},
	}, "", "  ")
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".junit-")
	if err != nil {
		return err
	}
	_, err = file.WriteString(xml.Header + string(text) + "\n")
	if err == nil {
		err = file.Chmod(0o644)
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		_ = os.Remove(file.Name())
	}
	return err
}
