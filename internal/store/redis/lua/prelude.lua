-- What all scripts share. A script checks everything first and then writes; what
-- goes wrong in the first part is raised as an error, and nothing has been written.
-- Every key is passed to a command of its type before the first write, so that no
-- write meets a key of another type, or one that is just moving to another node.
--
-- Lua numbers are doubles. Times stay below 2^53 until the year 2255, versions
-- below 2^46 by check; decimals are computed in limbs.

local call = redis.call
local sub, byte, char, match, rep, format = string.sub, string.byte, string.char, string.match, string.rep, string.format
local pack, unpackFrom = struct.pack, struct.unpack

-- FORMAT is that of the whole namespace, RECORD that of one record's value.
local FORMAT, RECORD = '1', 1
-- MOST is where versions end. A settled record ranks by its version, an unsettled
-- one by its version and UNSETTLED.
local MOST, UNSETTLED = 70368744177664, 140737488355328
-- A string has at most LARGE marks in its value; when there are more, all but SMALL
-- are moved to where there can be many.
local LARGE, SMALL = 96, 48
-- Flags of a record: the last says that some of its marks have ends of their own.
local HELD, NOTSETTLED, OWNENDS = 1, 2, 4
-- HASH is the length of an id, of a mark's, a tag's and a meter's hash.
local HASH = 12
local NOTAG = rep('\0', HASH)

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
  local m = call('HMGET', key, 'format', 'epoch', 'sequence', NAME)
  if m[1] and m[1] ~= FORMAT then
    refuse('HOLDFASTFORMAT', m[1])
  end
  if not m[1] and (m[2] or m[3]) then
    damaged('the identity has no format')
  end
  local sequence = tonumber(m[3] or '0')
  if not sequence or sequence >= MOST - 1 then
    damaged('the sequence is ' .. tostring(m[3]))
  end
  local count, day, void = 0, 0, 0
  if m[4] then
    count, day, void = unpackFrom('>I6I3I6', m[4])
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
  return {epoch = m[2] or '', sequence = sequence, count = count, day = day, void = void}
end

-- read takes a record's value apart; nil if there is none.
local function read(value)
  if not value then
    return nil
  end
  if byte(value, 1) ~= RECORD then
    refuse('HOLDFASTFORMAT', 'of a record: ' .. tostring(byte(value, 1)))
  end
  local version, at, due, flags, stamp, ends, nonce, key, marks, entries, i =
    unpackFrom('>I6I7I6BI6I6I2I2I3I3', value, 2)
  local n = i + nonce
  local k = n + key
  local e = k + marks
  return {
    version = version, due = due, flags = flags, stamp = stamp, ends = ends, nonce = sub(value, i, n - 1),
    key = sub(value, n, k - 1), marks = sub(value, k, e - 1), entries = sub(value, e, e + entries - 1),
  }
end

-- eachMark calls fn with string, tag and end, nil for the common one, of a record's marks.
local function eachMark(marks, fn)
  local i = 1
  while i <= #marks do
    local kind, hash, tag, ends = byte(marks, i), sub(marks, i + 1, i + HASH), '', nil
    i = i + 1 + HASH
    if kind % 2 == 1 then
      tag, i = sub(marks, i, i + HASH - 1), i + HASH
    end
    if kind >= 2 then
      ends, i = unpackFrom('>I6', marks, i)
    end
    fn(hash, tag, ends)
  end
end

-- endsOf are the ends of a record's marks that have their own, by string and tag.
local function endsOf(marks)
  local own = {}
  eachMark(marks, function(hash, tag, ends) own[hash .. tag] = ends end)
  return own
end

-- facts reads of another record what its marks say: its rank, its stamp, and a
-- function that gives the end of one of them, 0 for none.
local function facts(id)
  local value = call('GETRANGE', P .. 'r' .. id, 0, 32)
  if #value < 33 then
    damaged('a mark of a record that is not there')
  end
  if byte(value, 1) ~= RECORD then
    refuse('HOLDFASTFORMAT', 'of a record: ' .. byte(value, 1))
  end
  local version, _, _, flags, stamp, ends = unpackFrom('>I6I7I6BI6I6', value, 2)
  local own = flags >= OWNENDS and endsOf(read(call('GET', P .. 'r' .. id)).marks)
  return {
    rank = flags % OWNENDS >= NOTSETTLED and version + UNSETTLED or version, stamp = stamp,
    ends = function(hash, tag) return own and own[hash .. tag] or ends end,
  }
end

-- The latest marks of a string lie in its value: of each tag the number of their
-- records, 128 more if it is not the empty one, the tag, and the ids. What else there
-- is to know of a mark is in its record. If there are more marks, the value begins
-- with the tags of those: 254, or 255 if some have none, how many, and the tags.

-- few is where the marks begin that lie in the value.
local function few(value)
  if byte(value, 1) < 254 then
    return 1
  end
  return 4 + HASH * unpackFrom('>I2', value, 2)
end

-- tagsOf are those of the other marks.
local function tagsOf(value)
  local tags = byte(value, 1) == 255 and {''} or {}
  for i = 4, few(value) - 1, HASH do
    tags[#tags + 1] = sub(value, i, i + HASH - 1)
  end
  return tags
end

-- groupsOf are the tags and ids of the marks in the value, which begin there.
local function groupsOf(value, i)
  local groups = {}
  while i <= #value do
    local n, tag = byte(value, i), ''
    i = i + 1
    if n >= 128 then
      n, tag, i = n - 128, sub(value, i, i + HASH - 1), i + HASH
    end
    groups[#groups + 1] = {tag = tag, ids = sub(value, i, i + n * HASH - 1)}
    i = i + n * HASH
  end
  return groups
end

-- group is a part of such a value.
local function group(tag, ids)
  return char(#ids / HASH + (tag == '' and 0 or 128)) .. tag .. ids
end

-- find is where an id begins among ids; nil if it is not there.
local function find(ids, id)
  for i = 1, #ids, HASH do
    if sub(ids, i, i + HASH - 1) == id then
      return i
    end
  end
end

-- split takes n values, each packed so, out of a string.
local function split(as, n, packed)
  if n == 0 then
    return {}
  end
  local values, at = {}, 1
  for i = 1, n, 100 do
    local k = math.min(100, n - i + 1)
    local part = {unpackFrom(rep(as, k), packed, at)}
    at, part[k + 1] = part[k + 1], nil
    if k == n then
      return part
    end
    for j = 1, k do
      values[i + j - 1] = part[j]
    end
  end
  return values
end

-- fetch reads fields of a hash, which are some of these strings; false if absent.
local function fetch(key, of, first, last)
  if last < first then
    return {}
  end
  if last - first < 500 then
    return call('HMGET', key, unpack(of, first, last))
  end
  local values = {}
  for i = first, last, 500 do
    for j, v in ipairs(call('HMGET', key, unpack(of, i, math.min(i + 499, last)))) do
      values[i - first + j] = v
    end
  end
  return values
end

-- over is whether an end, as it is scored, has come.
local function over(score, ms)
  return score ~= 'inf' and tonumber(score) <= ms
end

local function score(ends)
  return ends == 0 and 'inf' or ends
end
