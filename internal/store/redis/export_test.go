package redis

// What tests need from inside. The clock that stands still is not in any script of
// the store: tests put other scripts together.

import "strings"

// TestClockKey holds seconds and microseconds, for OpenStanding.
const TestClockKey = "clock"

const standing = `
local function clock()
  local seconds, microseconds = string.match(redis.call('GET', ARGV[1] .. 'clock'), '^(%d+) (%d+)$')
  return {seconds, microseconds}
end
`

// OpenStanding opens a store whose time is what the key says.
func OpenStanding(opts Options) (*Store, error) {
	return open(opts, newScripts(standing))
}

// Prefix is what all keys of the store begin with.
func (s *Store) Prefix() string { return s.prefix }

// Hash is a record's id.
func Hash(key string) string { return hash(key) }

// DecimalScript runs the store's arithmetic on two decimals.
func DecimalScript() string {
	return strings.Join([]string{"#!lua flags=no-writes\n", luaClock, luaPrelude, luaDecimal, `
local c, d = compare(ARGV[2], ARGV[3]), subtract(ARGV[2], ARGV[3])
return {add(ARGV[2], ARGV[3]), d or '', c < 0 and '-1' or c > 0 and '1' or '0'}
`}, "")
}
