package redis

// What tests need from inside. The clock that stands still is not in any script of
// the store: tests put other scripts together.

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// TestClockKey holds seconds and microseconds, for OpenStanding.
const TestClockKey = "clock"

const standing = `
local NOW = {string.match(redis.call('GET', ARGV[1] .. 'clock'), '^(%d+) (%d+)$')}
`

// OpenStanding opens a store whose time is what the key says, and to which three marks of
// a string are many.
func OpenStanding(opts Options) (*Store, error) {
	marks := strings.Replace(luaMarks, "local LARGE = 64\n", "local LARGE = 2\n", 1)
	if marks == luaMarks {
		return nil, errors.New("the limit of few marks is not where it was")
	}
	return open(opts, newScripts(standing, marks))
}

// NoProcess is one that has written nothing, and its first question.
var NoProcess = strings.Repeat("-", nameSize) + string(append48(append48(append48(nil, 0), 1), 0))

// SetClock is this machine's clock, as the store sees it.
func (s *Store) SetClock(now func() time.Time) { s.processes.now = now }

// Prefix is what all keys of the store begin with.
func (s *Store) Prefix() string { return s.prefix }

// Hash is a record's id.
func Hash(key string) string { return hash(key) }

// DecimalScript runs the store's arithmetic on two decimals.
func DecimalScript() string {
	return strings.Join([]string{"#!lua flags=no-writes\n", luaClock, luaPrelude, luaDecimal, `
local compare, add, subtract = decimals()
local c, d = compare(ARGV[3], ARGV[4]), subtract(ARGV[3], ARGV[4])
return {add(ARGV[3], ARGV[4]), d or '', c < 0 and '-1' or c > 0 and '1' or '0'}
`}, "")
}

// Goes says whether steps that wait are sent while there are so many questions, some of which
// have taken their steps.
func Goes(questions, taken, waiting int) bool {
	n := lane{under: questions, taken: taken, waiting: make([]*step, waiting)}
	return n.goes()
}

// UpdateTogether asks for these by one script, in this order.
func (s *Store) UpdateTogether(writes ...store.Write) (results []store.Result, errs []error) {
	reserves := make([]store.Reserve, len(writes))
	for i, w := range writes {
		reserves[i].Write = w
	}
	return s.ReserveTogether(reserves...)
}

// ReserveTogether is the same with probes, and with what they pass over.
func (s *Store) ReserveTogether(reserves ...store.Reserve) (results []store.Result, errs []error) {
	steps := make([]*step, len(reserves))
	highest := make([]uint64, len(reserves))
	errs = make([]error, len(reserves))
	for i, r := range reserves {
		st := &step{id: hash(r.Write.Key), epoch: r.Write.Epoch, done: make(chan struct{}, 1)}
		var err error
		highest[i], errs[i] = covered(r.PassedOver)
		st.args, err = arguments(st.id, r.Write, r.Probes, highest[i])
		errs[i] = cmp.Or(errs[i], err)
		steps[i] = st
	}
	s.link().writes.deliver(slices.Clone(steps))
	for i, st := range steps {
		var r store.Result
		if errs[i] = cmp.Or(errs[i], st.outcome.err); errs[i] == nil {
			r, errs[i] = s.result("update", st.outcome, reserves[i].Write, reserves[i].Probes, highest[i])
		}
		results = append(results, r)
	}
	return results, errs
}
