// What the reader sees: who does what, the commands as they are run, the ledger
// after each step, and the table at the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

// nameWidth is that of the column that says who does something.
const nameWidth = 11

// demo is one telling of the story.
type demo struct {
	out      io.Writer
	dir      string
	w        *whole.Whole
	provider *ledger
	naive    *agent
	agent    *agent

	want   []paid
	second held
	rows   []row
}

// row is one step in the table.
type row struct {
	what           string
	entries, total int
	took           time.Duration
}

func (d *demo) say(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format+"\n", args...) }

// tell says who does something.
func (d *demo) tell(who, format string, args ...any) {
	d.say("  %-*s  %s", nameWidth, who, fmt.Sprintf(format, args...))
}

// run shows a command.
func (d *demo) run(format string, args ...any) { d.say("  $ "+format, args...) }

// kubectl shows a command, runs it, and shows what it says.
func (d *demo) kubectl(ctx context.Context, args ...string) (string, error) {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = shellWord(a)
	}
	d.run("kubectl %s", strings.Join(words, " "))
	cmd := exec.CommandContext(ctx, d.w.Kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+d.w.Kubeconfig)
	cmd.Dir = filepath.Dir(d.dir) // the clone: what is shown names its files from there
	text, err := cmd.CombinedOutput()
	for line := range strings.Lines(strings.TrimSpace(string(text))) {
		if line = strings.TrimSpace(line); line != "" {
			d.say("    %s", line)
		}
	}
	if err != nil {
		return string(text), fmt.Errorf("kubectl %s: %w", args[0], err)
	}
	return string(text), nil
}

// refused runs a command that the API server must refuse, with these words.
func (d *demo) refused(ctx context.Context, words string, args ...string) error {
	text, err := d.kubectl(ctx, args...)
	var ended *exec.ExitError
	switch {
	case err == nil:
		return errors.New("the API server should have refused that")
	case !errors.As(err, &ended):
		return err
	case !strings.Contains(text, words):
		return fmt.Errorf("the API server should have refused that with %q", words)
	}
	return nil
}

// judge shows the ledger, and compares it with the story.
func (d *demo) judge(ctx context.Context) error {
	l, err := d.provider.read(ctx)
	if err != nil {
		return err
	}
	d.tell("ledger", "%d %s", len(l.Entries), map[bool]string{true: "entry", false: "entries"}[len(l.Entries) == 1])
	for i, e := range l.Entries {
		d.tell("", "%d  %s  %s  order %s  %s %s", i+1, e.ID, e.Kind, e.OrderID, e.Amount, e.Currency)
	}
	return judge(l, d.want)
}

// summary is the table at the end.
func (d *demo) summary(ready, all time.Duration) {
	d.say("")
	t := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	line := func(cells ...any) { _, _ = fmt.Fprintf(t, "%v\t%v\t%v\t%v\t%v\n", cells...) }
	line("STEP", "WHAT HAPPENED", "NEW ENTRIES", "IN THE LEDGER", "TIME")
	line("-", "set up", 0, 0, seconds(ready))
	for i, r := range d.rows {
		line(i+1, r.what, r.entries, r.total, seconds(r.took))
	}
	_ = t.Flush()
	d.say("\nThe ledger is what the story says. %s in all.", seconds(all))
}

func seconds(t time.Duration) string { return fmt.Sprintf("%.1f s", t.Seconds()) }

// wrap breaks a text into lines of a width, all but the first behind an indent.
func wrap(text string, width int, indent string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case column+1+len(word) > width:
			b.WriteString("\n" + indent)
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// shellWord quotes an argument so that the line can be pasted into a shell.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:=,@%+", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
