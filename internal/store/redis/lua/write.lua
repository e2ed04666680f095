-- Reserve and Update: one step. An Update has no probes.
--
-- KEYS: meta, record, body, due, held, sums.
-- ARGV: prefix, epoch, expected version, nonce, what becomes of the marks
-- ("replace", "keep", or "remove": of the whole record), the record's id, due,
-- flags, its entry among the held, key, header, body, marks, the highest stamp
-- passed over; the number of meters and of each: hash, amount, limit or ''; the
-- number of probes and of each: hash, hash of the excepted tag or '', 1 for first.
-- → 'written', time, version; 'mismatch', time, record, body; 'blocked', time,
-- watermark, and what search returned; 'full', time, index; 'epoch', the store's.
local id, mode = ARGV[6], ARGV[5]
local HELD, UNSETTLED = 1, 2

local m = open(KEYS[1])
if m.epoch ~= ARGV[2] then
  return {'epoch', m.epoch}
end
local covered = tonumber(ARGV[14])
if covered > m.sequence then
  return {'watermark', text(m.sequence)}
end
local micros = now()

-- The version.
local value = call('GET', KEYS[2])
local have = read(value)
if have then
  if have.key ~= ARGV[10] then
    damaged('two keys have one hash')
  end
  if have.version > m.sequence or have.stamp > have.version then
    damaged('a record is newer than the sequence')
  end
  if have.nonce == ARGV[4] then
    return {'written', text(micros), text(have.version)}
  end
end
if (have and text(have.version) or '0') ~= ARGV[3] then
  return {'mismatch', text(micros), value, have and call('GET', KEYS[3]) or false}
end

-- Probes.
local at = 15
local meters = {}
for i = 1, tonumber(ARGV[at]) do
  meters[i] = {hash = ARGV[at + 1], amount = ARGV[at + 2], limit = ARGV[at + 3]}
  at = at + 3
end
at = at + 1
local probes = {}
for i = 1, tonumber(ARGV[at]) do
  probes[i] = {hash = ARGV[at + 1], except = ARGV[at + 2], first = ARGV[at + 3] == '1'}
  at = at + 3
end
if #probes > 0 then
  local hit = search(probes, id, covered, math.floor(micros / 1000))
  if hit then
    return {'blocked', text(micros), text(m.sequence), unpack(hit)}
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
if mode == 'remove' then
  for i, hash in ipairs(order) do
    meters[i] = {hash = hash, amount = '0', limit = ''}
  end
end
for i, e in ipairs(meters) do
  local before = entries[e.hash] or '0'
  e.had = call('HGET', KEYS[6], e.hash)
  local rest = subtract(e.had or '0', before)
  if not rest then
    damaged('a meter is less than what is in it')
  end
  e.sum = add(rest, e.amount)
  if e.limit ~= '' and compare(e.amount, before) > 0 and compare(e.sum, e.limit) > 0 then
    return {'full', text(micros), text(i - 1)}
  end
  if not entries[e.hash] then
    order[#order + 1] = e.hash
  end
  entries[e.hash] = e.amount
end

-- Marks: names, with the millisecond at which each is over.
local function ends(marks)
  local of, names = {}, {}
  if marks == '' then
    return of, names
  end
  local common, i = unpackFrom('>I6', marks)
  while i <= #marks do
    local kind, n = byte(marks, i), 16
    if kind % 2 == 1 then
      n = 32
    end
    local name = sub(marks, i + 1, i + n)
    i = i + n + 1
    of[name] = common
    if kind >= 2 then
      of[name], i = unpackFrom('>I6', marks, i)
    end
    names[#names + 1] = name
  end
  return of, names
end
local had, hadNames = ends(have and have.marks or '')
local will, willNames, marks = {}, {}, ''
if mode == 'replace' then
  marks = ARGV[13]
  will, willNames = ends(marks)
elseif mode == 'keep' then
  marks = have and have.marks or ''
  will, willNames = had, hadNames
end
local names = {}
for _, name in ipairs(hadNames) do
  names[#names + 1] = name
end
for _, name in ipairs(willNames) do
  if not had[name] then
    names[#names + 1] = name
  end
end

-- All keys that are written below are touched by a command of their type, and the
-- user may use all commands that write.
local count = {}
for _, name in ipairs(names) do
  count[name] = call('ZCARD', P .. 'm' .. name)
  if count[name] >= LIMIT then
    call('ZCARD', P .. 'e' .. name)
  end
  if #name > 16 then
    call('SCARD', P .. 't' .. sub(name, 1, 16))
  end
end
local hadBody = call('STRLEN', KEYS[3]) > 0
call('ZCARD', KEYS[4])
call('ZCARD', KEYS[5])
call('HLEN', KEYS[6])
for _, c in ipairs({
  {'HINCRBY', KEYS[1], 'sequence', '1'}, {'SET', KEYS[2], ''}, {'DEL', KEYS[2]}, {'ZADD', KEYS[4], '0', id},
  {'ZREM', KEYS[4], id}, {'HSET', KEYS[6], id, '0'}, {'HDEL', KEYS[6], id}, {'SADD', P .. 't', id}, {'SREM', P .. 't', id},
}) do
  if redis.acl_check_cmd and not redis.acl_check_cmd(unpack(c)) then
    refuse('NOPERM', 'the user may not use ' .. c[1])
  end
end

-- From here on everything is written, and nothing can fail.
local version = m.sequence + 1
call('HINCRBY', KEYS[1], 'sequence', 1)

local flags = tonumber(ARGV[8])
local rank = text(version + (flags >= UNSETTLED and MOST or 0))
for _, name in ipairs(names) do
  local key, n, was, is = P .. 'm' .. name, count[name], had[name], will[name]
  if was and was ~= is then
    call('ZREM', key, id .. pack('>I6', was))
  end
  if is then
    call('ZADD', key, rank, id .. pack('>I6', is))
  end
  local after = n + (is and 1 or 0) - (was and 1 or 0)
  local byEnd = P .. 'e' .. name
  if n > LIMIT and after > LIMIT then
    if not is then
      call('ZREM', byEnd, id)
    elseif is ~= was then
      call('ZADD', byEnd, is == 0 and 'inf' or is, id)
    end
  elseif n > LIMIT then
    call('DEL', byEnd)
  elseif after > LIMIT then
    local all = {}
    for i, mark in ipairs(call('ZRANGE', key, 0, -1)) do
      local e = unpackFrom('>I6', mark, 17)
      all[2 * i - 1], all[2 * i] = e == 0 and 'inf' or text(e), sub(mark, 1, 16)
    end
    call('ZADD', byEnd, unpack(all))
  end
  if #name > 16 then
    if after == 0 then
      call('SREM', P .. 't' .. sub(name, 1, 16), sub(name, 17))
    elseif n == 0 then
      call('SADD', P .. 't' .. sub(name, 1, 16), sub(name, 17))
    end
  end
end

for _, e in ipairs(meters) do
  if e.sum ~= '0' then
    call('HSET', KEYS[6], e.hash, e.sum)
  elseif e.had then
    call('HDEL', KEYS[6], e.hash)
  end
end

local due, held = tonumber(ARGV[7]), flags % 2 == HELD
local wasDue, wasHeld = have and have.due or 0, have and have.flags % 2 == HELD or false
if due ~= wasDue then
  if due == 0 then
    call('ZREM', KEYS[4], id)
  else
    call('ZADD', KEYS[4], text(due), id)
  end
end
if held ~= wasHeld then
  if held then
    call('ZADD', KEYS[5], 0, ARGV[9])
  else
    call('ZREM', KEYS[5], ARGV[9])
  end
end

if mode == 'remove' then
  call('DEL', KEYS[2], KEYS[3])
  return {'written', text(micros), '0'}
end
local kept = {}
for _, hash in ipairs(order) do
  if entries[hash] ~= '0' then
    kept[#kept + 1] = hash .. string.char(#entries[hash]) .. entries[hash]
  end
end
kept = table.concat(kept)
local stamp = mode == 'keep' and have and have.stamp or version
call('SET', KEYS[2], pack('>BI8I8I8BI8I2I2I4I4', RECORD, version, micros, due, flags, stamp,
  #ARGV[4], #ARGV[10], #marks, #kept) .. ARGV[4] .. ARGV[10] .. marks .. kept .. ARGV[11])
if ARGV[12] ~= '' then
  call('SET', KEYS[3], ARGV[12])
elseif hadBody then
  call('DEL', KEYS[3])
end
return {'written', text(micros), text(version)}
