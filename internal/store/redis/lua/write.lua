-- Reserve and Update: one step. An Update has no probes.
--
-- KEYS: meta, record, body, due, held, sums, marks.
-- ARGV: prefix, process, epoch, expected version, nonce, what becomes of the marks
-- ("replace", "keep", or "remove": of the whole record), the record's id, due,
-- flags, its entry among the held, key, header, body, marks, the highest stamp
-- passed over; the number of meters and of each: hash, amount, limit or ''; the
-- number of probes and of each: hash, hash of the excepted tag or '', 1 for first.
-- → the count, and then: 'written', time, version; 'mismatch', time, record, body;
-- 'blocked', time, watermark, and what search returned; 'full', time, index;
-- 'epoch', the store's.
local id, mode = ARGV[7], ARGV[6]
local HELD, NOTSETTLED = 1, 2
-- A record's value has three bytes for the length of its marks and its meter entries.
local MOSTBYTES = 16777216

local m = open(KEYS[1])
local count = text(m.count)
if m.epoch ~= ARGV[3] then
  return {count, 'epoch', m.epoch}
end
local covered = tonumber(ARGV[15])
if covered > m.sequence then
  return {count, 'watermark', text(m.sequence)}
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
    return {count, 'written', text(micros), text(have.version)}
  end
end
if (have and text(have.version) or '0') ~= ARGV[4] then
  return {count, 'mismatch', text(micros), value, have and call('GET', KEYS[3]) or false}
end

-- Probes. Mostly there is nothing at all under what is probed for.
local meters, firstProbe = tonumber(ARGV[16]), 18 + 3 * ARGV[16]
local probes = tonumber(ARGV[firstProbe - 1])
if probes > 0 then
  local values, found = {}, false
  for from = 0, probes - 1, 500 do
    local asked = {}
    for i = from, math.min(from + 499, probes - 1) do
      asked[#asked + 1] = ARGV[firstProbe + 3 * i]
    end
    for i, value in ipairs(call('HMGET', KEYS[7], unpack(asked))) do
      values[asked[i]] = value
      found = found or value
    end
  end
  local hit = found and search(firstProbe, probes, values, id, covered, math.floor(micros / 1000))
  if hit then
    return {count, 'blocked', text(micros), text(m.sequence), unpack(hit)}
  end
end

-- Meters. An entry is its meter's hash and its amount, 0 for none.
local entries, order = {}, {}
if have then
  local e, i = have.entries, 1
  while i <= #e do
    local n = byte(e, i + 16)
    local hash = sub(e, i, i + 15)
    entries[hash], order[#order + 1] = sub(e, i + 17, i + 16 + n), hash
    i = i + 17 + n
  end
end
local sums = {}
if mode == 'remove' then
  for i, hash in ipairs(order) do
    sums[i] = {hash = hash, amount = '0', limit = ''}
  end
end
for i = 1, meters do
  sums[i] = {hash = ARGV[14 + 3 * i], amount = ARGV[15 + 3 * i], limit = ARGV[16 + 3 * i]}
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
      return {count, 'full', text(micros), text(i - 1)}
    end
  end
  if not entries[e.hash] then
    order[#order + 1] = e.hash
  end
  entries[e.hash] = e.amount
end

-- Marks: for each string with a mark of the record, before or after, what becomes of it.
local plans, byString, strings = {}, {}, {}
local function plan(hash)
  local p = byString[hash]
  if not p then
    p = {hash = hash, had = {}, will = {}}
    plans[#plans + 1], strings[#strings + 1], byString[hash] = p, hash, p
  end
  return p
end
local function note(marks, which)
  if marks == '' then
    return
  end
  local common, i = unpackFrom('>I6', marks)
  while i <= #marks do
    local kind, hash, tag, ends = byte(marks, i), sub(marks, i + 1, i + 12), '', common
    i = i + 13
    if kind % 2 == 1 then
      tag, i = sub(marks, i, i + 15), i + 16
    end
    if kind >= 2 then
      ends, i = unpackFrom('>I6', marks, i)
    end
    local of = plan(hash)[which]
    of[#of + 1] = {tag = tag, ends = ends}
  end
end
local oldMarks, marks = have and have.marks or '', ''
if mode == 'replace' then
  marks = ARGV[14]
elseif mode == 'keep' then
  marks = oldMarks
end
note(oldMarks, 'had')
note(marks, 'will')

local version, flags = m.sequence + 1, tonumber(ARGV[9])
local rank = version + (flags >= NOTSETTLED and UNSETTLED or 0)
-- touch reads a group of many marks, and so has seen both of its keys.
local function touch(name)
  call('ZCARD', P .. 'e' .. name)
  return call('ZCARD', P .. 'm' .. name)
end
for i, value in ipairs(fetch(KEYS[7], strings)) do
  local p = plans[i]
  p.value = value
  if value and large(value) then
    p.n = {}
    for _, tag in ipairs(tagsOf(value)) do
      p.n[tag] = touch(p.hash .. tag)
    end
    for _, w in ipairs(p.will) do
      p.n[w.tag] = p.n[w.tag] or touch(p.hash .. w.tag)
    end
  else
    local rest, n = {}, #p.will
    if value then
      each(value, function(of, _, _, _, from, to)
        if of ~= id then
          rest[#rest + 1], n = sub(value, from, to), n + 1
        end
      end)
    end
    for _, w in ipairs(p.will) do
      rest[#rest + 1] = packed(id, w.ends, rank, w.tag)
    end
    p.now = table.concat(rest)
    if n > LARGE then
      p.grows = {}
      each(p.now, function(of, ends, rank, tag)
        local g = p.grows[tag]
        if not g then
          touch(p.hash .. tag)
          g = {ranks = {}, ends = {}}
          p.grows[tag] = g
        end
        local at = #g.ranks
        g.ranks[at + 1], g.ranks[at + 2] = text(rank), of
        g.ends[at + 1], g.ends[at + 2] = score(ends), of
      end)
    end
  end
end

local kept = {}
for _, hash in ipairs(order) do
  if entries[hash] ~= '0' then
    kept[#kept + 1] = hash .. string.char(#entries[hash]) .. entries[hash]
  end
end
kept = table.concat(kept)
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
count = text(m.count + 1)
call('HSET', KEYS[1], 'sequence', text(version), NAME, entry(m.count + 1, micros, m.void))

-- Few marks: the value. Many: both orders of their group.
local set, gone = {}, {}
local function keep(hash, value)
  if value == '' then
    gone[#gone + 1] = hash
  else
    set[#set + 1], set[#set + 2] = hash, value
  end
end
for _, p in ipairs(plans) do
  if p.grows then
    local value = '*'
    for tag, g in pairs(p.grows) do
      value = value .. tag
      call('ZADD', P .. 'm' .. p.hash .. tag, unpack(g.ranks))
      call('ZADD', P .. 'e' .. p.hash .. tag, unpack(g.ends))
    end
    keep(p.hash, value)
  elseif not p.n then
    if p.value or p.now ~= '' then
      keep(p.hash, p.now)
    end
  else
    local stays, was = {}, {}
    for tag, n in pairs(p.n) do
      was[tag] = n
    end
    for _, w in ipairs(p.will) do
      stays[w.tag] = true
      p.n[w.tag] = p.n[w.tag] + call('ZADD', P .. 'm' .. p.hash .. w.tag, text(rank), id)
      call('ZADD', P .. 'e' .. p.hash .. w.tag, score(w.ends), id)
    end
    for _, h in ipairs(p.had) do
      if not stays[h.tag] then
        p.n[h.tag] = p.n[h.tag] - call('ZREM', P .. 'm' .. p.hash .. h.tag, id)
        call('ZREM', P .. 'e' .. p.hash .. h.tag, id)
      end
    end
    local value, total, changed = '*', 0, false
    for tag, n in pairs(p.n) do
      total = total + n
      changed = changed or (n > 0) ~= (was[tag] > 0)
      if n > 0 then
        value = value .. tag
      end
    end
    if total <= SMALL then
      value = ''
      for tag, n in pairs(p.n) do
        local key, byEnd = P .. 'm' .. p.hash .. tag, P .. 'e' .. p.hash .. tag
        local flat = call('ZRANGE', key, 0, -1, 'WITHSCORES')
        for i = 1, #flat, 2 do
          local e = call('ZSCORE', byEnd, flat[i])
          value = value .. packed(flat[i], (not e or e == 'inf') and 0 or tonumber(e), tonumber(flat[i + 1]), tag)
        end
        call('DEL', key, byEnd)
      end
      keep(p.hash, value)
    elseif changed then
      keep(p.hash, value)
    end
  end
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
    call('ZADD', KEYS[4], text(due), id)
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
  return {count, 'written', text(micros), '0'}
end
local stamp = mode == 'keep' and have and have.stamp or version
call('SET', KEYS[2], pack('>BI6I7I6BI6I2I2I3I3', RECORD, version, micros, due, flags, stamp,
  #ARGV[5], #ARGV[11], #marks, #kept) .. ARGV[5] .. ARGV[11] .. marks .. kept .. ARGV[12])
if ARGV[13] ~= '' then
  call('SET', KEYS[3], ARGV[13])
elseif hadBody then
  call('DEL', KEYS[3])
end
return {count, 'written', text(micros), text(version)}
