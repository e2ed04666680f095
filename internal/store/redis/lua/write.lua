-- Reserve and Update: one step. An Update has no probes.
--
-- KEYS: meta, record, body, due, held, sums, marks.
-- ARGV: prefix, process, epoch, expected version, nonce, what becomes of the marks
-- ("replace", "keep", or "remove": of the whole record), the record's id, due,
-- flags, its entry among the held, key, header, body, marks, their common end, the
-- highest stamp passed over, of each probe 1 if its hits come first; how many meters,
-- probes, and strings with marks there are; in one argument each, because every one
-- takes its time: the hashes of the probes and of the strings; of each probe the hash of
-- the excepted tag or zeros; of each string, after its length, its value if nobody else
-- has marks of it; then of each meter: hash, amount, limit or ''.
-- → the count, and then: 'written', time, version; 'mismatch', time, record, body;
-- 'blocked', time, watermark, and what search returned; 'full', time, index;
-- 'epoch', the store's.
local id, mode = ARGV[7], ARGV[6]
-- A record's value has three bytes for the length of its marks and its meter entries.
local MOSTBYTES = 16777216

local m = open(KEYS[1])
if m.epoch ~= ARGV[3] then
  return {m.count, 'epoch', m.epoch}
end
local covered = tonumber(ARGV[16])
if covered > m.sequence then
  return {m.count, 'watermark', m.sequence}
end
local micros = now()

-- The version.
local value = call('GET', KEYS[2])
local have = read(value)
if have then
  if have.key ~= ARGV[11] then
    damaged('two keys have one hash')
  end
  if have.version > m.sequence or have.stamp > have.version then
    damaged('a record is newer than the sequence')
  end
  if have.nonce == ARGV[5] then
    return {m.count, 'written', micros, have.version}
  end
end
-- A number that is too large to be exact is no version.
if (have and have.version or 0) ~= tonumber(ARGV[4]) then
  return {m.count, 'mismatch', micros, value, have and call('GET', KEYS[3]) or false}
end

local meters, probes, n = tonumber(ARGV[18]), tonumber(ARGV[19]), tonumber(ARGV[20])
local METERS = 24
local asked = split('c' .. HASH, probes + n, ARGV[21])
local values = fetch(KEYS[7], asked, 1, probes + n)
local function excepted(i)
  local tag = sub(ARGV[22], (i - 1) * HASH + 1, i * HASH)
  return tag ~= NOTAG and tag or ''
end

-- Probes. Mostly there is nothing under what is probed for, or nothing but what the
-- probe excepts and what the record itself has left.
local found = false
for i = 1, probes do
  local v = values[i]
  if v then
    local except = excepted(i)
    if except == '' then
      found = found or #v ~= 1 + HASH or sub(v, 2) ~= id
    else
      local at = 1
      if byte(v, 1) == 254 and sub(v, 2, 3 + HASH) == '\0\1' .. except then
        at = 4 + HASH
      end
      found = found or at <= #v and (byte(v, at) < 128 or byte(v, at) >= 254 or sub(v, at + 1, at + HASH) ~= except
        or #v ~= at + HASH + (byte(v, at) - 128) * HASH)
    end
  end
end
if found then
  local hit = search(asked, probes, values, excepted, ARGV[17], id, covered, math.floor(micros / 1000))
  if hit then
    return {m.count, 'blocked', micros, m.sequence, unpack(hit)}
  end
end

-- Meters. An entry is its meter's hash and its amount, 0 for none.
local kept, sums = '', {}
if have then
  kept = have.entries
end
if meters > 0 or mode == 'remove' and kept ~= '' then
  local compare, add, subtract = decimals()
  local entries, order, i = {}, {}, 1
  while i <= #kept do
    local size = byte(kept, i + HASH)
    local hash = sub(kept, i, i + HASH - 1)
    entries[hash], order[#order + 1] = sub(kept, i + HASH + 1, i + HASH + size), hash
    i = i + HASH + 1 + size
  end
  if mode == 'remove' then
    for i, hash in ipairs(order) do
      sums[i] = {hash = hash, amount = '0', limit = ''}
    end
  end
  for i = 1, meters do
    local at = METERS + 3 * (i - 1)
    sums[i] = {hash = ARGV[at], amount = ARGV[at + 1], limit = ARGV[at + 2]}
  end
  for i, e in ipairs(sums) do
    local before = entries[e.hash] or '0'
    e.had = call('HGET', KEYS[6], e.hash)
    e.sum = e.had or '0'
    if before ~= e.amount then
      local rest = subtract(e.sum, before)
      if not rest then
        damaged('a meter is less than what is in it')
      end
      e.sum = add(rest, e.amount)
      if e.limit ~= '' and compare(e.amount, before) > 0 and compare(e.sum, e.limit) > 0 then
        return {m.count, 'full', micros, i - 1}
      end
    end
    if not entries[e.hash] then
      order[#order + 1] = e.hash
    end
    entries[e.hash] = e.amount
  end
  local parts = {}
  for _, hash in ipairs(order) do
    if entries[hash] ~= '0' then
      parts[#parts + 1] = hash .. char(#entries[hash]) .. entries[hash]
    end
  end
  kept = table.concat(parts)
end

-- Marks: the strings of which the record has some, before or after, the value of
-- each, what it would be without others, '' if the record leaves it, and the tags that
-- the record had there.
local strings, current, alone, had = {}, {}, split('>I4c0', n, ARGV[23]), {}
local marks, ends, flags = ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[9])
local oldMarks = have and have.marks or ''
for i = 1, n do
  strings[i], current[i] = asked[probes + i], values[probes + i]
end
if mode == 'keep' then
  marks, ends = oldMarks, have and have.ends or 0
  if have and have.flags >= OWNENDS then
    flags = flags + OWNENDS
  end
end
-- The same marks again: few ones stay as they are.
local same = oldMarks == marks
if oldMarks ~= '' and (mode ~= 'replace' or not same) then
  local at = {}
  for i = 1, n do
    at[strings[i]] = i
  end
  eachMark(oldMarks, function(hash, tag)
    local i = at[hash]
    if not i then
      i = #strings + 1
      at[hash], strings[i], alone[i] = i, hash, ''
    end
    if mode == 'keep' then
      alone[i] = alone[i] .. group(tag, id)
    else
      had[i] = had[i] or {}
      had[i][#had[i] + 1] = tag
    end
  end)
  for i, v in ipairs(fetch(KEYS[7], strings, n + 1, #strings)) do
    current[n + i] = v
  end
end

local version = m.sequence + 1
local rank = flags % OWNENDS >= NOTSETTLED and version + UNSETTLED or version
local own
local function endOf(hash, tag)
  if flags < OWNENDS then
    return ends
  end
  own = own or endsOf(marks)
  return own[hash .. tag] or ends
end
-- touch reads a group of many marks, and so has seen both of its keys.
local function touch(name)
  call('ZCARD', P .. 'e' .. name)
  return call('ZCARD', P .. 'm' .. name)
end

-- set and gone are what becomes of the values; moves, of the marks that do not lie there.
local set, gone, moves = {}, {}, {}
local function keep(hash, value)
  if value == '' then
    gone[#gone + 1] = hash
  else
    set[#set + 1], set[#set + 2] = hash, value
  end
end

-- change puts the record's marks of a string, all of whose cases are here: they are in
-- its value, elsewhere, or new.
local function change(hash, value, from, will, had)
  local groups, n = groupsOf(value, from), 0
  local byTag, wants = {}, {}
  for _, g in ipairs(groups) do
    byTag[g.tag] = g
    n = n + #g.ids / HASH
  end
  -- How many there are elsewhere, of the tags that are touched.
  local counts = {}
  local function elsewhere(tag, call, ...)
    counts[tag] = counts[tag] or touch(hash .. tag)
    moves[#moves + 1] = {name = hash .. tag, call = call, ...}
  end
  for _, w in ipairs(will) do
    wants[w.tag] = true
  end
  local known = {}
  for _, tag in ipairs(had) do
    known[tag] = true
    local g = byTag[tag]
    local at = g and find(g.ids, id)
    if at then
      if not wants[tag] then
        g.ids, n = sub(g.ids, 1, at - 1) .. sub(g.ids, at + HASH), n - 1
      end
    elseif wants[tag] then
      elsewhere(tag, 'ZADD', {rank, id}, {score(endOf(hash, tag)), id})
    else
      elsewhere(tag, 'ZREM', {id}, {id})
      counts[tag] = counts[tag] - 1
    end
  end
  for _, w in ipairs(will) do
    if not known[w.tag] then
      local g = byTag[w.tag]
      n = n + 1
      if g then
        g.ids = g.ids .. id
      else
        groups[#groups + 1] = w
      end
    end
  end
  -- The oldest are moved elsewhere.
  local rest = n > LARGE and n - SMALL or 0
  for _, g in ipairs(groups) do
    local ranks, byEnd, k = {}, {}, 0
    while rest > 0 and k < #g.ids / HASH do
      local of = sub(g.ids, k * HASH + 1, k * HASH + HASH)
      local f = of ~= id and facts(of)
      ranks[2 * k + 1], ranks[2 * k + 2] = f and f.rank or rank, of
      byEnd[2 * k + 1] = score(f and f.ends(hash, g.tag) or not f and endOf(hash, g.tag))
      byEnd[2 * k + 2] = of
      k, rest = k + 1, rest - 1
    end
    if k > 0 then
      elsewhere(g.tag, 'ZADD', ranks, byEnd)
      counts[g.tag], g.ids = counts[g.tag] + k, sub(g.ids, k * HASH + 1)
    end
  end
  local parts, tags, first = {}, {}, 254
  local function tell(tag)
    if counts[tag] and counts[tag] < 1 then
      return
    end
    if tag == '' then
      first = 255
    else
      tags[#tags + 1] = tag
    end
  end
  for _, tag in ipairs(from > 1 and tagsOf(value) or {}) do
    tell(tag)
    counts[tag] = 0
  end
  for tag in pairs(counts) do
    tell(tag)
  end
  if first == 255 or #tags > 0 then
    if #tags > 65535 then
      refuse('HOLDFASTSIZE', 'of the tags of a mark')
    end
    parts[1] = char(first) .. pack('>I2', #tags) .. table.concat(tags)
  end
  for _, g in ipairs(groups) do
    if g.ids ~= '' then
      parts[#parts + 1] = group(g.tag, g.ids)
    end
  end
  local next = table.concat(parts)
  if next ~= value then
    keep(hash, next)
  end
end

for i, hash in ipairs(strings) do
  local v, a = current[i], alone[i]
  if not v then
    if a ~= '' then
      keep(hash, a)
    end
  else
    local from = few(v)
    local one = #a == 1 + HASH and 1 or #a == 1 + HASH + HASH and 1 + HASH
    if same and (from == 1 or one and string.find(v, id, from, true)) then
      -- It lies in the value, where nothing changes.
    elseif not same and one and not had[i] and from > #v then
      keep(hash, v .. a)
    elseif not same and one and not had[i] and byte(v, from) % 128 < LARGE
      and #v == from - 1 + one + byte(v, from) % 128 * HASH and sub(v, from + 1, from + one - 1) == sub(a, 2, one) then
      -- All have its tag, or none.
      keep(hash, sub(v, 1, from - 1) .. char(byte(v, from) + 1) .. sub(v, from + 1) .. id)
    else
      local will = groupsOf(a, 1)
      local before = had[i] or {}
      if same then
        for k, w in ipairs(will) do
          before[k] = w.tag
        end
      end
      change(hash, v, from, will, before)
    end
  end
end

if #marks >= MOSTBYTES or #kept >= MOSTBYTES then
  refuse('HOLDFASTSIZE', 'of marks or meters')
end

-- All keys that are written below have been, or are here, passed to a command of
-- their type, and the user may use all commands that write.
local hadBody = call('STRLEN', KEYS[3]) > 0
local due, held = tonumber(ARGV[8]), flags % 2 == HELD
local wasDue, wasHeld = have and have.due or 0, have and have.flags % 2 == HELD or false
if due ~= wasDue then
  call('ZCARD', KEYS[4])
end
if held ~= wasHeld then
  call('ZCARD', KEYS[5])
end
local may = redis.acl_check_cmd
if may and not (may('HSET', KEYS[1], 'sequence', '0') and may('SET', KEYS[2], '') and may('ZADD', KEYS[4], '0', id)
  and (not have or may('DEL', KEYS[2]) and may('ZREM', KEYS[4], id) and may('HDEL', KEYS[7], id))) then
  refuse('NOPERM', 'the user may not use all of HSET, SET, ZADD, DEL, ZREM and HDEL')
end

-- From here on everything is written, and nothing can fail.
local count = m.count + 1
call('HSET', KEYS[1], 'sequence', version, NAME, entry(count, micros, m.void))

for _, move in ipairs(moves) do
  call(move.call, P .. 'm' .. move.name, unpack(move[1]))
  call(move.call, P .. 'e' .. move.name, unpack(move[2]))
end
for i = 1, #set, 500 do
  call('HSET', KEYS[7], unpack(set, i, math.min(i + 499, #set)))
end
for i = 1, #gone, 500 do
  call('HDEL', KEYS[7], unpack(gone, i, math.min(i + 499, #gone)))
end

for _, e in ipairs(sums) do
  if e.sum ~= '0' then
    call('HSET', KEYS[6], e.hash, e.sum)
  elseif e.had then
    call('HDEL', KEYS[6], e.hash)
  end
end

if due ~= wasDue then
  if due == 0 then
    call('ZREM', KEYS[4], id)
  else
    call('ZADD', KEYS[4], due, id)
  end
end
if held ~= wasHeld then
  if held then
    call('ZADD', KEYS[5], 0, ARGV[10])
  else
    call('ZREM', KEYS[5], ARGV[10])
  end
end

if mode == 'remove' then
  call('DEL', KEYS[2], KEYS[3])
  return {count, 'written', micros, 0}
end
local stamp = mode == 'keep' and have and have.stamp or version
call('SET', KEYS[2], pack('>BI6I7I6BI6I6I2I2I3I3', RECORD, version, micros, due, flags, stamp, ends,
  #ARGV[5], #ARGV[11], #marks, #kept) .. ARGV[5] .. ARGV[11] .. marks .. kept .. ARGV[12])
if ARGV[13] ~= '' then
  call('SET', KEYS[3], ARGV[13])
elseif hadBody then
  call('DEL', KEYS[3])
end
return {count, 'written', micros, version}
