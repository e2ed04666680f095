-- What all scripts share. A script checks everything first and then writes; what
-- goes wrong in the first part is raised as an error, and nothing has been written.
-- Every key is passed to a command of its type before the first write, so that no
-- write meets a key of another type, or one that is just moving to another node.
--
-- Lua numbers are doubles. Times stay below 2^53 until the year 2255, versions
-- below 2^46 by check; decimals are computed in limbs.

local call = redis.call
local sub, byte, match, rep, format = string.sub, string.byte, string.match, string.rep, string.format
local pack, unpackFrom = struct.pack, struct.unpack

-- FORMAT is that of the whole namespace, RECORD that of one record's value.
local FORMAT, RECORD = '1', 1
-- MOST is where versions end. A settled record ranks by its version, an unsettled
-- one by its version and UNSETTLED.
local MOST, UNSETTLED = 70368744177664, 140737488355328
-- A string has at most LARGE marks in one value; when only SMALL are left they
-- come back there.
local LARGE, SMALL = 32, 16

-- The process that asks (see process.go): its name, the count of its writes that it
-- was told of, the ticket of this question, and up to which one they are void.
local P, NAME = ARGV[1], sub(ARGV[2], 1, 26)
local KNOWN, TICKET, VOID = unpackFrom('>I6I6I6', ARGV[2], 27)
local DAY = 86400000000

local function text(n)
  return format('%.0f', n)
end

local function refuse(what, detail)
  error({err = what .. ' ' .. detail})
end

local function damaged(detail)
  refuse('HOLDFASTDAMAGED', detail)
end

-- now is the store's time in microseconds.
local function now()
  local t = clock()
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- entry is what is kept of a process: how many writes it has made, the day on which
-- that was last noted, and up to which of its tickets they are void.
local function entry(count, micros, void)
  return pack('>I6I3I6', count, math.floor(micros / DAY), void)
end

-- open reads who the store is, and what it has of the process that asks. Nothing but
-- this is read of a store of another format.
local function open(key)
  local m = call('HMGET', key, 'format', 'epoch', 'domain', 'sequence', NAME)
  if m[1] and m[1] ~= FORMAT then
    refuse('HOLDFASTFORMAT', m[1])
  end
  if not m[1] and (m[2] or m[3] or m[4]) then
    damaged('the identity has no format')
  end
  local sequence = tonumber(m[4] or '0')
  if not sequence or sequence >= MOST - 1 then
    damaged('the sequence is ' .. tostring(m[4]))
  end
  local count, day, void = 0, 0, 0
  if m[5] then
    count, day, void = unpackFrom('>I6I3I6', m[5])
  end
  if TICKET <= void then
    refuse('HOLDFASTLATE', text(TICKET))
  end
  if count < KNOWN then
    -- Whoever has found this and asks again, because the answer was lost, finds its
    -- own name, which is as random as any epoch.
    if m[2] and m[2] ~= NAME then
      call('HSET', key, 'epoch', NAME)
    end
    refuse('HOLDFASTLOST', text(count) .. ' of ' .. text(KNOWN))
  end
  if VOID > void then
    void = VOID
    call('HSET', key, NAME, entry(count, now(), void))
  end
  return {epoch = m[2] or '', domain = m[3] or '', sequence = sequence, count = count, day = day, void = void}
end

-- read takes a record's value apart; nil if there is none.
local function read(value)
  if not value then
    return nil
  end
  if byte(value, 1) ~= RECORD then
    refuse('HOLDFASTFORMAT', 'of a record: ' .. tostring(byte(value, 1)))
  end
  local r = {}
  local nonce, key, marks, entries, at
  r.version, r.at, r.due, r.flags, r.stamp, nonce, key, marks, entries, at =
    unpackFrom('>I6I7I6BI6I2I2I3I3', value, 2)
  r.nonce, at = sub(value, at, at + nonce - 1), at + nonce
  r.key, at = sub(value, at, at + key - 1), at + key
  r.marks, at = sub(value, at, at + marks - 1), at + marks
  r.entries = sub(value, at, at + entries - 1)
  return r
end

-- The marks of a string lie in one value while they are few: of each the record's
-- id, the millisecond of its end or 0, its rank (higher by MOST if there is a tag),
-- and the tag. That makes its length divisible by 4. Of many marks the value is an
-- asterisk and the tags that there are, the empty one apart.
local function large(value)
  return #value % 4 == 1
end

-- packed writes a mark into a value.
local function packed(id, ends, rank, tag)
  if tag == '' then
    return id .. pack('>I6I6', ends, rank)
  end
  return id .. pack('>I6I6', ends, rank + MOST) .. tag
end

-- each calls fn with id, end, rank and tag of the marks in a value, and with where
-- each begins and ends there.
local function each(value, fn)
  local i = 1
  while i <= #value do
    local ends, rank = unpackFrom('>I6I6', value, i + 16)
    local tag, after = '', i + 28
    if rank % UNSETTLED >= MOST then
      rank, tag, after = rank - MOST, sub(value, i + 28, i + 43), i + 44
    end
    fn(sub(value, i, i + 15), ends, rank, tag, i, after - 1)
    i = after
  end
end

-- tagsOf are those of a value of many marks, the empty one first.
local function tagsOf(value)
  local tags = {''}
  for i = 2, #value, 16 do
    tags[#tags + 1] = sub(value, i, i + 15)
  end
  return tags
end

-- fetch reads fields of a hash, however many; false if absent.
local function fetch(key, fields)
  local values = {}
  for i = 1, #fields, 500 do
    for j, v in ipairs(call('HMGET', key, unpack(fields, i, math.min(i + 499, #fields)))) do
      values[i + j - 1] = v
    end
  end
  return values
end

-- over is whether an end, as it is scored, has come.
local function over(score, ms)
  return score ~= 'inf' and tonumber(score) <= ms
end

local function score(ends)
  return ends == 0 and 'inf' or text(ends)
end
