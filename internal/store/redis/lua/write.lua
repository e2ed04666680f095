-- Reserve and Update: some steps, one after the other. Each is all or nothing, and what
-- goes wrong with one is nothing to the others. An Update has no probes.
--
-- KEYS: meta, due, held, sums, marks; then of each step its record, and its body.
-- ARGV: prefix, process, epoch; then of each step: nonce; the record's key; header, body,
-- marks; in one argument, because every one takes its time, packed: the expected version, due,
-- the common end of the marks, the highest stamp passed over, what becomes of the marks (0:
-- they are removed with the record, 1: kept, 2: replaced), flags, how many probes, strings
-- with marks that no probe asks for, strings with marks, those of them that come first and
-- have one mark without a tag, and meters there are; the hashes of
-- the strings of the probes and of those with marks that no probe asks for; of each probe the
-- hash of the excepted tag or zeros; of each 1 if its hits come first; of each string with
-- marks which one of the former it is, and then of each but the first ones, after its length,
-- its value if nobody else has marks of it; then, in arguments again, of each meter: hash,
-- amount, limit or ''.
-- → the count, the time, and then of each step: its version if it was written, 0 for none;
-- an error; 'mismatch', record, body; 'blocked', watermark, and what search returned; 'full',
-- index; 'watermark', the sequence. Or the count, 'epoch', the store's.
local REMOVE, KEEP = 0, 1
local NOTAG = '\0\0\0\0\0\0\0\0\0\0\0\0'
-- A step has STEP arguments, and three for each meter. How many meters there are is said at
-- COUNTED of what is packed, where the NUMBERS end. A record's value has three bytes for the
-- length of its marks and its meter entries.
local STEP, COUNTED, NUMBERS, MOSTBYTES = 6, 43, 46, 16777216
-- A number that is given to a command takes much less time as format writes it.
local format, find, char = string.format, string.find, string.char
local never = format('%d', NEVER)

-- split takes n values, each packed so, out of a string. How so many of them are packed is put
-- together once.
local HASHES, PLACES, TEXTS = 'c' .. HASH, '>I3', '>I4c0'
local formats = {[HASHES] = {}, [PLACES] = {}, [TEXTS] = {}}
local function split(as, n, packed, at)
  if n <= 100 then
    local format = formats[as][n]
    if not format then
      format = string.rep(as, n)
      formats[as][n] = format
    end
    local part = {unpackFrom(format, packed, at)}
    part[n + 1] = nil
    return part
  end
  local values = {}
  for i = 1, n, 100 do
    local k = math.min(100, n - i + 1)
    local part = {unpackFrom(string.rep(as, k), packed, at)}
    at = part[k + 1]
    for j = 1, k do
      values[i + j - 1] = part[j]
    end
  end
  return values
end

-- fetch reads the values of some of these strings; false if absent.
local function fetch(of, first, last)
  if last < first then
    return {}
  end
  if last - first < 500 then
    return call('HMGET', KEYS[5], unpack(of, first, last))
  end
  local values = {}
  for i = first, last, 500 do
    for j, v in ipairs(call('HMGET', KEYS[5], unpack(of, i, math.min(i + 499, last)))) do
      values[i - first + j] = v
    end
  end
  return values
end

-- What a step writes waits until the script ends, and is written together with what the other
-- steps write: what a command costs besides what it does is most of what it costs, here and in
-- the log. A step that takes something away is written at once, with those that wait; so what
-- waits only adds and replaces. And whatever reads what may wait has it written first, but for
-- the values of strings, which are told.
--
-- No write can fail once one was made. A server refuses a write for the user's rights, for the
-- type of the key, and because a cluster is just moving its slot: a key that is not here may be
-- on the other node then. All of KEYS are where they must be when the script begins, and what
-- a step writes besides, or what a step before it may have taken away, is asked for before
-- the step's writes wait.
local answer = {count, micros}
-- The steps that wait, by their places in the answer and by their records; and sequence and
-- count as they were before those.
local waiting, waits, wasSequence, wasCount = {}, {}, 0, 0
-- What waits: scores and members of what is due, and of sorted sets of marks by their names;
-- strings of marks, each before its value, and the same by string; commands that few steps
-- need; keys of records and bodies, each before its value.
local dues, ranks, strings, told, rare, values = {}, {}, {}, {}, {}, {}
-- Tables that each step uses again: strings and values as it is about to add them; the sorted
-- sets of marks that it is put in, or moved in; and for each string whether it is in one.
local own, lies, lieAt = {}, {}, {}
-- Which sorted sets of marks are such, and are here; and whether what is due is. Which bodies
-- steps before have taken away. Whether any has written; whether some of what is just being
-- written is; and what is said if that stayed so.
local sorted, dueIsHere, removed, wrote, begun, half = {}, false, {}, false, false, nil

-- put writes a list by a command with that key, or with keys of the list's own.
local function put(list, command, key)
  for i = 1, #list, 500 do
    local last = math.min(i + 499, #list)
    if key then
      call(command, key, unpack(list, i, last))
    else
      call(command, unpack(list, i, last))
    end
    begun = true
  end
end

-- What is set comes before what is removed, so that no key becomes empty, and goes, before
-- it is written again.
local function writeAll()
  put(dues, 'ZADD', KEYS[2])
  for name, list in pairs(ranks) do
    put(list, 'ZADD', name)
  end
  put(strings, 'HSET', KEYS[5])
  for _, command in ipairs(rare) do
    call(unpack(command))
    begun = true
    if command[1] == 'ZREM' then
      sorted[command[2]] = nil
    end
  end
  put(values, 'MSET')
end

-- said is the text of an error.
local function said(err)
  return type(err) == 'table' and err.err or tostring(err)
end

-- flush writes all that waits; or takes it back, if it is told why not to write it.
local function flush(whyNot)
  if #waits == 0 then
    return
  end
  begun = false
  local ok, why = not whyNot, whyNot
  if ok then
    ok, why = pcall(writeAll)
  end
  if not ok then
    why = said(why)
    if begun then
      -- Half a step must not be taken for a whole one by whoever asks again.
      half = 'HOLDFASTDAMAGED a step was written by half at ' .. format('%d', sequence) .. ': ' .. why
      why = half
    else
      sequence, count = wasSequence, wasCount
    end
    for _, place in ipairs(waits) do
      answer[place] = {err = why}
    end
  end
  wrote = wrote or begun
  waiting, waits, dues, ranks, strings, told, rare, values = {}, {}, {}, {}, {}, {}, {}, {}
  if not ok then
    error({err = why})
  end
end

-- slow makes the functions of marks, which read what is written. What was told of the strings
-- that are asked for is put among what they have.
local function slow(asked, have)
  for i, hash in ipairs(asked or {}) do
    have[i] = told[hash] or have[i]
  end
  flush()
  return marking()
end

-- What the steps before have found out: that the user may use all commands that write a
-- record, and all that write one anew: 1, or 2 if sorted sets of marks are among what is
-- written.
local mayWrite, mayReplace = 0, 0

-- allowed finds out whether the user may write this record, anew or not, and the sorted set of
-- that name if there is one.
local function allowed(record, id, anew, name)
  local may = redis.acl_check_cmd
  local need, ranked = name and 2 or 1, name or KEYS[2]
  if may and not (may('MSET', record, '')
    and (mayWrite >= need or may('SET', record, '') and may('HSET', KEYS[1], 'sequence', '0') and may('ZADD', ranked, '0', id))
    and (not anew or mayReplace >= need or may('DEL', record) and may('ZREM', ranked, id) and may('HDEL', KEYS[5], id))) then
    refuse('NOPERM', 'the user may not use all of HSET, SET, MSET, ZADD, DEL, ZREM and HDEL')
  end
  if mayWrite < need then
    mayWrite = need
  end
  if anew and mayReplace < need then
    mayReplace = need
  end
end

-- isHere sees to it that a sorted set of marks is one, and is here.
local function isHere(name)
  if not sorted[name] then
    if call('ZCARD', name) == 0 then
      refuse('HOLDFASTABSENT', 'a sorted set of marks is not there')
    end
    sorted[name] = true
  end
end

-- step is one of them: where its arguments begin, its record, its body, and the place of its answer.
local function step(first, record, body, place)
  local nonce, key, marks, packed = ARGV[first], ARGV[first + 1], ARGV[first + 4], ARGV[first + 5]
  local expected, due, ends, covered, mode, flags, probes, fresh, n, plain, meters = unpackFrom('>I6I6I6I6BBI4I4I4I4I4', packed)

  if covered > sequence then
    return {'watermark', sequence}
  end
  if sequence >= MOST - 1 then
    damaged('the sequence is at its end')
  end
  local id = sub(record, -HASH)

  -- The record as it is, and its version; zeros if there is none.
  if waiting[record] then
    flush()
  end
  local value = call('GET', record)
  local version, wasDue, oldFlags, stamp, oldEnds, many, kept = 0, 0, 0, 0, 0, '', ''
  -- Where its marks begin and end. What only has to be compared is not cut out of the value.
  local marksAt, marksTo = 1, 0
  if value then
    if byte(value, 1) ~= RECORD then
      refuse('HOLDFASTFORMAT', 'of a record: ' .. tostring(byte(value, 1)))
    end
    local _, nonces, keys, size, manys, entries, at
    version, _, wasDue, oldFlags, stamp, oldEnds, nonces, keys, size, manys, entries, at = unpackFrom(LAYOUT, value, 2)
    local keyAt = at + nonces
    marksAt = keyAt + keys
    marksTo = marksAt + size - 1
    local entriesAt = marksTo + 1 + manys
    if keys ~= #key or find(value, key, keyAt, true) ~= keyAt then
      damaged('two keys have one hash')
    end
    if version > sequence or stamp > version then
      damaged('a record is newer than the sequence')
    end
    if nonces == #nonce and find(value, nonce, at, true) == at then
      return version
    end
    many, kept = sub(value, marksTo + 1, entriesAt - 1), sub(value, entriesAt, entriesAt + entries - 1)
  end
  if version ~= expected then
    return {'mismatch', value, value and call('GET', body)}
  end

  -- What becomes of the marks. The end of one lies in its record, so that for the same marks
  -- again nothing changes but the rank and the end of those that lie in sorted sets.
  if mode == KEEP then
    marks, ends = value and sub(value, marksAt, marksTo) or '', oldEnds
    if oldFlags >= OWNENDS then
      flags = flags + OWNENDS
    end
  end
  local known = flags < OWNENDS and marksTo - marksAt + 1 == #marks
    and (mode == KEEP or marks == '' or find(value, marks, marksAt, true) == marksAt)
  -- Where what is packed begins, less one: the tags that probes except, which hits come first,
  -- and which strings have marks.
  local exceptAt = NUMBERS + (probes + fresh) * HASH
  local firstAt = exceptAt + probes * HASH
  local whichAt = firstAt + probes
  local aloneAt = whichAt + 3 * n
  if known then
    fresh, n = 0, 0
  end

  -- The strings that are probed for, and then the others with marks, and their values.
  local asked, have
  if probes + fresh > 0 then
    asked = split(HASHES, probes + fresh, packed, NUMBERS + 1)
    have = fetch(asked, 1, probes + fresh)
  end
  -- What marking makes, once it is needed.
  local m

  -- Probes. Mostly there is nothing under what is probed for, or nothing but what the
  -- probe excepts and what the record itself has left.
  local found = false
  for i = 1, probes do
    local v = told[asked[i]] or have[i]
    if v then
      local except = sub(packed, exceptAt + (i - 1) * HASH + 1, exceptAt + i * HASH)
      if except == NOTAG then
        found = found or #v ~= 1 + HASH or sub(v, 2) ~= id
      else
        local k = byte(v, 1)
        if k < 254 then
          found = found or k < 128 or sub(v, 2, 1 + HASH) ~= except or #v ~= 1 + HASH + (k - 128) * HASH
        else
          found = found or v ~= '\254\0\1' .. except
        end
      end
    end
  end
  if found then
    m = slow(asked, have)
    local function excepted(i)
      local tag = sub(packed, exceptAt + (i - 1) * HASH + 1, exceptAt + i * HASH)
      return tag ~= NOTAG and tag or ''
    end
    local hit = search(m, asked, probes, have, excepted, sub(packed, firstAt + 1, whichAt), id, covered, math.floor(micros / 1000))
    if hit then
      return {'blocked', sequence, unpack(hit)}
    end
  end

  -- Meters. An entry is its meter's hash and its amount, 0 for none.
  local sums
  if meters > 0 or mode == REMOVE and kept ~= '' then
    local compare, add, subtract = decimals()
    local entries, order, i = {}, {}, 1
    sums = {}
    while i <= #kept do
      local size = byte(kept, i + HASH)
      local hash = sub(kept, i, i + HASH - 1)
      entries[hash], order[#order + 1] = sub(kept, i + HASH + 1, i + HASH + size), hash
      i = i + HASH + 1 + size
    end
    if mode == REMOVE then
      for i, hash in ipairs(order) do
        sums[i] = {hash = hash, amount = '0', limit = ''}
      end
    end
    for i = 1, meters do
      local at = first + STEP + 3 * (i - 1)
      sums[i] = {hash = ARGV[at], amount = ARGV[at + 1], limit = ARGV[at + 2]}
    end
    for i, e in ipairs(sums) do
      local before = entries[e.hash] or '0'
      e.had = call('HGET', KEYS[4], e.hash)
      e.sum = e.had or '0'
      if before ~= e.amount then
        local rest = subtract(e.sum, before)
        if not rest then
          damaged('a meter is less than what is in it')
        end
        e.sum = add(rest, e.amount)
        if e.limit ~= '' and compare(e.amount, before) > 0 and compare(e.sum, e.limit) > 0 then
          return {'full', i - 1}
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
        parts[#parts + 1] = hash .. string.char(#entries[hash]) .. entries[hash]
      end
    end
    kept = table.concat(parts)
  end

  local newVersion = sequence + 1
  local rank = flags % OWNENDS >= NOTSETTLED and newVersion + UNSETTLED or newVersion
  -- The sorted sets with marks that it keeps. The k-th of its marks begins at an offset; of
  -- those that come first none has a tag.
  local liesEnd = 0
  local i = known and find(many, '\1', 1, true)
  if i then
    local k = math.min(i, plain + 1)
    local at = 1 + (k - 1) * (1 + HASH)
    while i do
      while k < i do
        k, at = k + 1, at + (byte(marks, at) % 2 == 1 and 1 + 2 * HASH or 1 + HASH)
      end
      liesEnd = liesEnd + 1
      lies[liesEnd] = P .. 'm' .. sub(marks, at + 1, at + (byte(marks, at) % 2 == 1 and 2 * HASH or HASH))
      isHere(lies[liesEnd])
      i = find(many, '\1', i + 1, true)
    end
  end

  -- The strings with marks; and what each is to have if nobody else has marks of it, but for the
  -- first ones, which are to have this record's without a tag.
  local which, alone, all, had
  local mine = '\1' .. id
  if n > 0 then
    which = split(PLACES, n, packed, whichAt + 1)
    if n > plain then
      alone = split(TEXTS, n - plain, packed, aloneAt + 1)
    end
  end
  all = n
  if marksAt <= marksTo and not known then
    -- Marks that it had: strings of which it has none now come after the others.
    m, which, alone, had = m or slow(asked, have), which or {}, alone or {}, {}
    asked, have = asked or {}, have or {}
    local at, before, others = {}, #asked, alone
    alone = {}
    for i = 1, n do
      at[asked[which[i]]], alone[i] = i, i <= plain and mine or others[i - plain]
    end
    plain = 0
    m.eachMark(sub(value, marksAt, marksTo), function(hash, tag)
      local i = at[hash]
      if not i then
        all = all + 1
        i, asked[#asked + 1] = all, hash
        at[hash], which[i], alone[i] = i, #asked, ''
      end
      if mode == KEEP then
        alone[i] = alone[i] .. m.group(tag, id)
      end
      had[i] = had[i] or {}
      had[i][#had[i] + 1] = tag
    end)
    for i, v in ipairs(fetch(asked, before + 1, #asked)) do
      have[before + i] = v
    end
  end

  -- What becomes of the values of strings: mostly they are new, or get one mark more; or the
  -- mark is put in a sorted set. All else is for change.
  local last, lying, set, gone, moves, lie, change = 0, false, nil, nil, nil, nil, nil
  for i = 1, all do
    local at = which[i]
    local hash, v = asked[at], told[asked[at]] or have[at]
    lieAt[i] = '\0'
    if not v and i <= plain then
      own[last + 1], own[last + 2] = hash, mine
      last = last + 2
    else
      local a, n = i <= plain and mine or alone[i - plain], v and byte(v, 1)
      -- one is where the record's id would end what comes before it, if it has a single mark.
      local one = not (had and had[i]) and (#a == 1 + HASH and 1 or #a == 1 + HASH + HASH and 1 + HASH)
      if one and not v then
        own[last + 1], own[last + 2] = hash, a
        last = last + 2
      elseif one and n < 254 and n % 128 < LARGE and #v == one + n % 128 * HASH and sub(v, 2, one) == sub(a, 2, one) then
        -- All have its tag, or none.
        own[last + 1], own[last + 2] = hash, char(n + 1) .. sub(v, 2) .. id
        last = last + 2
      elseif one and not change and flags < OWNENDS and v == (one == 1 and '\255\0\0' or '\254\0\1' .. sub(a, 2, one)) then
        liesEnd, lieAt[i], lying = liesEnd + 1, '\1', true
        lies[liesEnd] = P .. 'm' .. hash .. sub(a, 2, one)
        isHere(lies[liesEnd])
      else
        if not change then
          m, set, gone, moves, lie = m or slow(asked, have), {}, {}, {}, {}
          for k = 1, liesEnd do
            lie[sub(lies[k], #P + 2)] = true
          end
          change = changing(m, id, rank, flags, marks, ends, set, gone, moves, lie)
        end
        change(hash, v, m.groupsOf(a), had and had[i] or {})
      end
    end
  end
  -- Which marks lie in sorted sets: as long as each string has a single one, there are as many of
  -- the one as of the other.
  if change then
    many = m.manyAmong(marks, lie)
    m.rewrite(moves)
  elseif lying then
    many = table.concat(lieAt, '', 1, n)
  elseif not known then
    many = ''
  end

  if #marks >= MOSTBYTES or #kept >= MOSTBYTES or #many > 65535 then
    refuse('HOLDFASTSIZE', 'of marks or meters')
  end

  -- All keys that are written have been passed to a command of their type, or are here; and
  -- the user may use all commands that write. That a body is here which may be nowhere, the
  -- server says only of several keys at once.
  local held, wasHeld = flags % 2 == HELD, oldFlags % 2 == HELD
  if due ~= wasDue and not dueIsHere then
    call('ZCARD', KEYS[2])
    dueIsHere = true
  end
  if held ~= wasHeld then
    call('ZCARD', KEYS[3])
  end
  if removed[body] then
    call('EXISTS', KEYS[1], body)
  end
  allowed(record, id, value and true, liesEnd > 0 and lies[1] or moves and moves[1] and moves[1][2])

  -- From here on nothing can fail. Sequence and count are written behind all else.
  if #waits == 0 then
    wasSequence, wasCount = sequence, count
  end
  sequence, count = newVersion, count + 1
  waits[#waits + 1], waiting[record] = place, true

  if due ~= wasDue then
    if due == 0 then
      rare[#rare + 1] = {'ZREM', KEYS[2], id}
      dueIsHere = false
    else
      local k = #dues
      dues[k + 1], dues[k + 2] = format('%d', due), id
    end
  end
  if liesEnd > 0 then
    local itsRank, byRank, byEnd = format('%d', rank), 'r' .. id, 'e' .. id
    local itsEnd = ends == 0 and never or format('%d', ends - BELOW)
    for i = 1, liesEnd do
      local list = ranks[lies[i]]
      if not list then
        list = {}
        ranks[lies[i]] = list
      end
      local k = #list
      list[k + 1], list[k + 2], list[k + 3], list[k + 4] = itsRank, byRank, itsEnd, byEnd
    end
  end
  local behind = #strings
  for k = 1, last, 2 do
    local hash, v = own[k], own[k + 1]
    strings[behind + k], strings[behind + k + 1], told[hash] = hash, v, v
  end
  if change then
    for _, move in ipairs(moves) do
      rare[#rare + 1] = move
    end
    for k = 1, #set, 500 do
      rare[#rare + 1] = {'HSET', KEYS[5], unpack(set, k, math.min(k + 499, #set))}
    end
    for k = 1, #gone, 500 do
      rare[#rare + 1] = {'HDEL', KEYS[5], unpack(gone, k, math.min(k + 499, #gone))}
    end
  end

  if sums then
    for _, e in ipairs(sums) do
      if e.sum ~= '0' then
        rare[#rare + 1] = {'HSET', KEYS[4], e.hash, e.sum}
      end
    end
    for _, e in ipairs(sums) do
      if e.sum == '0' and e.had then
        rare[#rare + 1] = {'HDEL', KEYS[4], e.hash}
      end
    end
  end

  if held ~= wasHeld then
    -- The held sort by key, byte for byte, and end with the id: a zero byte of the key is
    -- followed by 255, and the key ends with 0, 1.
    local member = string.gsub(key, '%z', '\0\255') .. '\0\1' .. id
    rare[#rare + 1] = held and {'ZADD', KEYS[3], 0, member} or {'ZREM', KEYS[3], member}
  end

  if mode == REMOVE then
    rare[#rare + 1] = {'DEL', record, body}
    removed[body], newVersion = true, 0
  else
    if mode ~= KEEP or not value then
      stamp = newVersion
    end
    local k = #values
    values[k + 1], values[k + 2] = record, pack(VALUE, RECORD, newVersion, micros, due, flags, stamp, ends,
      #nonce, #key, #marks, #many, #kept) .. nonce .. key .. marks .. many .. kept .. ARGV[first + 2]
    if ARGV[first + 3] ~= '' then
      values[k + 3], values[k + 4] = body, ARGV[first + 3]
    elseif value then
      rare[#rare + 1] = {'DEL', body}
      removed[body] = true
    end
  end
  if #rare > 0 then
    flush()
  end
  return newVersion
end

if epoch ~= ARGV[3] then
  return {count, 'epoch', epoch}
end
local first = 4
for i = 6, #KEYS, 2 do
  local place, ok, result = i / 2, not half, half
  if ok then
    ok, result = pcall(step, first, KEYS[i], KEYS[i + 1], place)
  end
  if not ok and waits[#waits] == place then
    -- Of this step only a part waits, which nobody could tell from the others'.
    pcall(flush, said(result))
  end
  answer[place] = ok and result or {err = said(result)}
  first = first + STEP + 3 * unpackFrom('>I4', ARGV[first + 5], COUNTED)
end
pcall(flush)
if wrote then
  -- Should there be half a step after all, nothing is asked of this memory any more: a
  -- sequence that is no number says so.
  call('HSET', KEYS[1], 'sequence', half or format('%d', sequence), NAME, entry(count))
  answer[1] = count
end
return answer
