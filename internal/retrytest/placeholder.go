// This file fills in what differs from one call to the next. A placeholder that is not
// known is an error, also where nobody meant one: what is sent is what was described.

package retrytest

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// values are what the placeholders of one call stand for.
type values struct {
	// intent and order are the same in all calls of a trial, and in no other; digits is
	// such an order for who takes only numbers.
	intent, order, digits string
	// number is the trial's, from 1.
	number int
	// call is the number of the request within its trial, from 1; 0: there is no call.
	call int
}

// runName tells the orders of one run from those of all others.
func runName() string { return strings.ToLower(rand.Text()[:12]) }

// newValues are those of a trial.
func newValues(run string, number int) values {
	return values{
		intent: fmt.Sprintf("retry-%s-%d", run, number), order: fmt.Sprintf("rt-%s-%d", run, number),
		// Below 2^53, so that nobody rounds it.
		digits: fmt.Sprintf("%d%02d", time.Now().UnixMilli(), number), number: number,
	}
}

// placeholders are what a text may hold, for error texts.
const placeholders = "{{intent}}, {{order}}, {{digits}}, {{number}}, {{call}}, {{now}} and, in headers and effects, {{env.NAME}}"

var placeholder = regexp.MustCompile(`\{\{[^{}]*\}\}`)

// where says what a text may hold.
type where struct {
	field string
	// calls: a call is described, which has a number and a time.
	calls bool
	// env: it may come from the environment, and is not kept.
	env bool
}

// fill replaces the placeholders of a text.
func (v values) fill(at where, text string) (string, error) {
	var failed error
	out := placeholder.ReplaceAllStringFunc(text, func(p string) string {
		name := strings.TrimSpace(p[2 : len(p)-2])
		variable, env := strings.CutPrefix(name, "env.")
		switch {
		case name == "intent":
			return v.intent
		case name == "order":
			return v.order
		case name == "digits":
			return v.digits
		case name == "number":
			return strconv.Itoa(v.number)
		case name == "call" && at.calls:
			return strconv.Itoa(v.call)
		case name == "now" && at.calls:
			return time.Now().UTC().Format(time.RFC3339Nano)
		case env && at.env:
			if value, ok := os.LookupEnv(variable); ok {
				return value
			}
			failed = fmt.Errorf("%s: %s is not in the environment", at.field, variable)
		default:
			failed = fmt.Errorf("%s: %s is no placeholder that is known here: there are %s", at.field, p, placeholders)
		}
		return ""
	})
	return out, failed
}

// fillJSON replaces those of all texts within a JSON value.
func (v values) fillJSON(at where, value any) (any, error) {
	var err error
	switch value := value.(type) {
	case string:
		return v.fill(at, value)
	case []any:
		out := make([]any, len(value))
		for i := range value {
			if out[i], err = v.fillJSON(at, value[i]); err != nil {
				return nil, err
			}
		}
		return out, nil
	case map[string]any:
		out := make(map[string]any, len(value))
		for name, member := range value {
			if out[name], err = v.fillJSON(at, member); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	return value, nil
}

// decodeJSON keeps numbers as they were written.
func decodeJSON(text []byte) (any, error) {
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	var out any
	if err := d.Decode(&out); err != nil {
		return nil, err
	}
	if d.More() {
		return nil, fmt.Errorf("something follows the value")
	}
	return out, nil
}
