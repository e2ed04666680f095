package redis

// What tests of steps that travel together need besides: how many marks are few, and a server
// that refuses a command in the middle of a script.

import (
	"errors"
	"strconv"
	"strings"

	"github.com/valkey-io/valkey-go"
)

// TestFailKey holds what the scripts of OpenFailing fail at: "read", "first" (one that writes
// after one that reads), "write", or "pack" (no command: a record is put together to be written),
// and the number of that kind, from 1.
const TestFailKey = "fail"

// failing stands in for the commands of a script. What it refuses it does not do. Sequence and
// count come last, and what they lie in was read and may be written.
const failing = `
local failsKind, failsAt = nil, 0
do
  local what = redis.call('GET', ARGV[1] .. 'fail')
  if what then
    failsKind, failsAt = string.match(what, '^(%a+) (%d+)$')
    failsAt = tonumber(failsAt)
  end
end
local writes = {ZADD = true, HSET = true, ZREM = true, HDEL = true, DEL = true, SET = true, MSET = true}
local commands, wasRead = 0, true
local function packing(...)
  if failsKind == 'pack' then
    commands = commands + 1
    if commands == failsAt then
      error('INJECTED while a step begins to wait')
    end
  end
  return struct.pack(...)
end
local function commanded(command, key, ...)
  local first = writes[command] and wasRead
  wasRead = not writes[command]
  if not (key == KEYS[1] and command == 'HSET') and (failsKind == 'read' and wasRead or failsKind == 'first' and first
    or failsKind == 'write' and writes[command]) then
    commands = commands + 1
    if commands == failsAt then
      error({err = 'INJECTED at ' .. command})
    end
  end
  return redis.call(command, key, ...)
end
`

// OpenFailing opens a store like OpenStanding, to which more marks than few are many, and whose
// steps fail as the key says.
func OpenFailing(opts Options, few int) (*Store, error) {
	marks := strings.Replace(luaMarks, "local LARGE = 64\n", "local LARGE = "+strconv.Itoa(few)+"\n", 1)
	if marks == luaMarks && few != mostFew {
		return nil, errors.New("the limit of few marks is not where it was")
	}
	all := newScripts(standing, marks)
	text := strings.Join([]string{luaPrelude, luaDecimal, marks, luaHits, luaChange, luaWrite}, "")
	waiting := strings.Replace(text, "= record, pack(VALUE, ", "= record, packing(VALUE, ", 1)
	if waiting == text {
		return nil, errors.New("a record is not put together where it was")
	}
	all.write = valkey.NewLuaScript("#!lua\n" + standing + failing + strings.ReplaceAll(waiting, "redis.call", "commanded"))
	return open(opts, all)
}
