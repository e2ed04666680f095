-- Reserve and Update: some steps, one after the other. Each is all or nothing, and what
-- goes wrong with one is nothing to the others. An Update has no probes.
--
-- KEYS: meta, due, held, sums, marks; then of each step its record, and its body.
-- ARGV: prefix, process, epoch; then of each step, in few arguments, because every one takes
-- its time: the record's key, and behind it its marks if they are replaced; header; body; and
-- packed: a byte each: what becomes of the marks (0: they are removed with the record, 1: kept,
-- 2: replaced, 3: kept, but with the common end and stamped anew), flags, how many strings are
-- asked for, how many of them have marks, which come first, how many of these come first and have
-- one mark without a tag, how many probes and meters there are; then the expected version, due,
-- the common end of the marks, the highest stamp passed over, and how long the key is; each after
-- its length: nonce, due and end as scores, and the hashes of tags that probes except; if a byte
-- is too small, and that of the strings is 255, the five numbers again; the hashes of the strings;
-- if there are probes, of each string a byte: 0 if none asks for it, 1 if one does that excepts no
-- tag, or else the place of its tag and 1, or 255 if that is more; of each probe which string it
-- asks for, of each the place of its tag, 0 for none, and of each 1 if its hits come first; of each
-- string with marks but the first ones, after its length, its value if nobody else has marks of it;
-- then, in arguments again, of each meter: hash, amount, limit or ''.
-- → the count, the time, and then of each step: its version if it was written, 0 for none;
-- an error; 'mismatch', record, body; 'blocked', watermark, and what search returned; 'full',
-- index; 'watermark', the sequence. Or the count, 'epoch', the store's.
local REMOVE, KEEP, RENEW = 0, 1, 3
-- A step has STEP arguments, and three for each meter. A record's value has three bytes for the
-- length of its marks and its meter entries.
local STEP, MOSTBYTES = 4, 16777216
-- A number that is given to a command takes much less time as format writes it.
local format, find, char = string.format, string.find, string.char

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
-- How many of strings are there; what a step is about to add comes behind them. A table that
-- each step uses again: the sorted sets of marks that it is put in, or moved in.
local stringsEnd, lies = 0, {}
-- Where the arguments of the next step begin.
local nextAt = 4
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
  for i = #strings, stringsEnd + 1, -1 do
    strings[i] = nil
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
  stringsEnd = 0
  if not ok then
    error({err = why})
  end
end

-- slow makes the functions of marks, which read what is written. What a step is about to add to
-- strings, up to there, stays; it returns also strings and where that ends then.
local function slow(last)
  local own = {}
  for i = stringsEnd + 1, last do
    own[i - stringsEnd] = strings[i]
  end
  flush()
  if #own > 0 then
    strings = own
  end
  return marking(), strings, #own
end

-- What the steps before have found out: that the user may use all commands that write a
-- record, and all that write one anew: 1, or 2 if sorted sets of marks are among what is
-- written.
local mayWrite, mayReplace = 0, 0

-- withoutEnds are a record's marks, and none has an end of its own.
local function withoutEnds(marks)
  local parts = {}
  marking().eachMark(marks, function(hash, tag)
    parts[#parts + 1] = (tag == '' and '\0' or '\1') .. hash .. tag
  end)
  return table.concat(parts)
end

-- allowed finds out whether the user may write this record, anew or not, and the sorted set of
-- that name if there is one. What was granted for all records of this script is not asked again.
local granted, everyRecord = {}, nil
local function allowed(record, id, anew, name)
  local may = redis.acl_check_cmd
  if may and everyRecord == nil then
    local records = {}
    for i = 6, #KEYS, 2 do
      records[i - 5], records[i - 4] = KEYS[i], ''
    end
    everyRecord = may('MSET', unpack(records))
  end
  local need, ranked = name and 2 or 1, name or KEYS[2]
  if may and not ((everyRecord or may('MSET', record, ''))
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
  granted[(anew and 2 or 0) + need] = everyRecord or not may
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

-- metered are the sums of meters as they become, and the entries of a record that has these, and
-- gets those that so many meters have from an argument on. An entry is its meter's hash and its
-- amount, 0 for none. The third result is a meter that is full.
local function metered(kept, mode, first, meters)
  local compare, add, subtract = decimals()
  local sums, entries, order, i = {}, {}, {}, 1
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
    local at = first + 3 * (i - 1)
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
        return nil, nil, i - 1
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
  return sums, table.concat(parts)
end

-- step is one of them: where its arguments begin, its record, its body, and the place of its answer.
local function step(first, record, body, place)
  local ARGV, KEYS = ARGV, KEYS
  local names, packed = ARGV[first], ARGV[first + 3]
  local expected, due, ends, covered, keySize, nonce, dueScore, endScore, tags, at =
    unpackFrom('>I6I6I6I6I2I2c0Bc0Bc0I4c0', packed, 8)
  local mode, flags, asks, n, plain, probes, meters = byte(packed, 1, 7)
  if asks == 255 then
    asks, n, plain, probes, meters, at = unpackFrom('>I4I4I4I4I4', packed, at)
  end
  nextAt = first + STEP + 3 * meters

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
  -- Where its key is, and where its marks begin and end. What only has to be compared is not cut
  -- out of the value.
  local keyAt, marksAt, marksTo = 1, 1, 0
  if value then
    if byte(value, 1) ~= RECORD then
      refuse('HOLDFASTFORMAT', 'of a record: ' .. tostring(byte(value, 1)))
    end
    local _, nonces, keys, size, manys, entries, at
    version, _, wasDue, oldFlags, stamp, oldEnds, nonces, keys, size, manys, entries, at = unpackFrom(LAYOUT, value, 2)
    keyAt = at + nonces
    marksAt = keyAt + keys
    marksTo = marksAt + size - 1
    local entriesAt = marksTo + 1 + manys
    if keys ~= keySize or find(value, keySize == #names and names or sub(names, 1, keySize), keyAt, true) ~= keyAt then
      damaged('two keys have one hash')
    end
    if version > sequence or stamp > version then
      damaged('a record is newer than the sequence')
    end
    if nonces == #nonce and find(value, nonce, at, true) == at then
      return version
    end
    many, kept = sub(value, marksTo + 1, entriesAt - 1), entries > 0 and sub(value, entriesAt, entriesAt + entries - 1) or ''
  end
  if version ~= expected then
    return {'mismatch', value, value and call('GET', body)}
  end

  -- What becomes of the marks, and those that are kept. The end of one lies in its record, so
  -- that for the same marks again nothing changes but the rank and the end of those that lie in
  -- sorted sets.
  local keptMarks = (mode == KEEP or mode == RENEW) and value and sub(value, marksAt, marksTo) or ''
  if mode == KEEP then
    ends = oldEnds
    if oldFlags >= OWNENDS then
      flags = flags + OWNENDS
    end
  elseif mode == RENEW and oldFlags >= OWNENDS then
    keptMarks = withoutEnds(keptMarks)
  end
  local marksSize = #names - keySize + #keptMarks
  local known = flags < OWNENDS and marksTo - marksAt + 1 == marksSize
    and (marksSize == #keptMarks or find(value, names, keyAt, true) == keyAt)
  if known then
    n = 0
  end

  -- The strings that have marks, or are only probed for, and their values. Probes: mostly there
  -- is nothing under what is probed for, or nothing but what the probe excepts and what the
  -- record itself has left.
  local asked, have
  local found, kindsAt = false, at + asks * HASH
  local probesAt = probes > 0 and kindsAt + asks or kindsAt
  if n + probes > 0 then
    asked = split(HASHES, asks, packed, at)
    have = fetch(asked, 1, asks)
    local told, single = told, 1 + HASH
    for i = 1, asks do
      local v = told[asked[i]]
      if v then
        have[i] = v
      else
        v = have[i]
      end
      if v and probes > 0 then
        local kind = byte(packed, kindsAt + i - 1)
        if kind == 1 then
          found = found or #v ~= single or sub(v, 2) ~= id
        elseif kind == 255 then
          found = true
        elseif kind > 1 then
          local except, k = #tags == HASH and tags or sub(tags, (kind - 2) * HASH + 1, (kind - 1) * HASH), byte(v, 1)
          if k < 254 then
            found = found or k < 128 or #v ~= single + (k - 128) * HASH or sub(v, 2, single) ~= except
          else
            found = found or v ~= '\254\0\1' .. except
          end
        end
      end
    end
  end
  -- What marking makes, once it is needed.
  local m
  if found then
    m = slow(0)
    local its, had, excepts, firstsAt = {}, {}, {}, probesAt + 6 * probes
    local which, tagAt = split(PLACES, probes, packed, probesAt), split(PLACES, probes, packed, probesAt + 3 * probes)
    for i, k in ipairs(which) do
      its[i], had[i], excepts[i] = asked[k], have[k], tagAt[i] > 0 and sub(tags, (tagAt[i] - 1) * HASH + 1, tagAt[i] * HASH) or ''
    end
    local hit = search(m, its, had, excepts, sub(packed, firstsAt, firstsAt + probes - 1), id, covered, math.floor(micros / 1000))
    if hit then
      return {'blocked', sequence, unpack(hit)}
    end
  end

  -- Meters.
  local sums
  if meters > 0 or mode == REMOVE and kept ~= '' then
    local full
    sums, kept, full = metered(kept, mode, first + STEP, meters)
    if full then
      return {'full', full}
    end
  end

  local newVersion = sequence + 1
  local rank = flags % OWNENDS >= NOTSETTLED and newVersion + UNSETTLED or newVersion
  -- The sorted sets with marks that it keeps. The k-th of its marks begins at an offset.
  local liesEnd = 0
  local i = known and find(many, '\1', 1, true)
  if i then
    local k, at, single = 1, marksAt, 1 + HASH
    while i do
      while k < i do
        -- Up to the next byte that is 1, be it of a hash, no mark has a tag.
        local gap = find(value, '\1', at, true) - at
        if gap == 0 then
          k, at = k + 1, at + single + HASH
        else
          local untagged = math.min((gap + HASH - (gap + HASH) % single) / single, i - k)
          k, at = k + untagged, at + untagged * single
        end
      end
      liesEnd = liesEnd + 1
      lies[liesEnd] = P .. 'm' .. sub(value, at + 1, at + (byte(value, at) == 1 and 2 * HASH or HASH))
      isHere(lies[liesEnd])
      i = find(many, '\1', i + 1, true)
    end
  elseif not known then
    many = ''
  end

  -- What each string is to have if nobody else has marks of it, but for the first ones, which are
  -- to have this record's without a tag.
  local mine, alone, had = n > 0 and '\1' .. id, nil, nil
  if n > plain then
    alone = split(TEXTS, n - plain, packed, probesAt + 7 * probes)
  end
  local all = n
  if marksAt <= marksTo and not known then
    -- Marks that it had: strings of which it has none now come after the others.
    m, had = m or slow(0), {}
    local at, of, its, others = {}, {}, {}, alone
    alone = {}
    for i = 1, n do
      of[i], its[i], at[asked[i]], alone[i] = asked[i], have[i], i, i <= plain and mine or others[i - plain]
    end
    plain = 0
    m.eachMark(sub(value, marksAt, marksTo), function(hash, tag)
      local i = at[hash]
      if not i then
        all = all + 1
        i = all
        at[hash], of[i], alone[i] = i, hash, ''
      end
      if keptMarks ~= '' then
        alone[i] = alone[i] .. m.group(tag, id)
      end
      had[i] = had[i] or {}
      had[i][#had[i] + 1] = tag
    end)
    for i, v in ipairs(fetch(of, n + 1, all)) do
      its[n + i] = v
    end
    asked, have = of, its
  end

  -- What becomes of the values of strings: mostly they are new, or get one mark more; or the
  -- mark is put in a sorted set. All else is for change.
  local last, set, gone, moves, lie, change = stringsEnd, nil, nil, nil, nil, nil
  do
    local HASH, LARGE, strings, byte, sub = HASH, LARGE, strings, byte, sub
    for i = 1, all do
      local hash, v = asked[i], have[i]
      -- one is where the record's id would end what comes before it, if it has a single mark; to is
      -- the value then, or false if the mark is put in a sorted set.
      local a, one, to = mine, 1, nil
      if i > plain then
        a = alone[i - plain]
        one = not (had and had[i]) and (#a == 1 + HASH and 1 or #a == 1 + HASH + HASH and 1 + HASH)
      end
      if not v then
        to = one and a or nil
      elseif one then
        local k = byte(v, 1)
        if k < 254 then
          if k % 128 < LARGE and #v == one + k % 128 * HASH and (one == 1 or sub(v, 2, one) == sub(a, 2, one)) then
            -- All have its tag, or none.
            to = char(k + 1) .. sub(v, 2) .. id
          end
        elseif not change and flags < OWNENDS and v == (one == 1 and '\255\0\0' or '\254\0\1' .. sub(a, 2, one)) then
          liesEnd = liesEnd + 1
          many = many .. string.rep('\0', i - 1 - #many) .. '\1'
          lies[liesEnd] = P .. 'm' .. hash .. sub(a, 2, one)
          isHere(lies[liesEnd])
          to = false
        end
      end
      if to then
        strings[last + 1], strings[last + 2] = hash, to
        last = last + 2
      elseif to == nil then
        if not change then
          if not m then
            m, strings, last = slow(last)
          end
          set, gone, moves, lie = {}, {}, {}, {}
          for k = 1, liesEnd do
            lie[sub(lies[k], #P + 2)] = true
          end
          change = changing(m, id, rank, flags, keptMarks .. sub(names, keySize + 1), ends, set, gone, moves, lie)
        end
        change(hash, v, m.groupsOf(a), had and had[i] or {})
      end
    end
  end
  -- Which marks lie in sorted sets: as long as each string has a single one, there are as many of
  -- the one as of the other.
  if change then
    many = m.manyAmong(keptMarks .. sub(names, keySize + 1), lie)
    m.rewrite(moves)
  elseif many ~= '' then
    many = many .. string.rep('\0', n - #many)
  end

  if marksSize >= MOSTBYTES or #kept >= MOSTBYTES or #many > 65535 then
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
  local ranked = liesEnd > 0 and lies[1] or moves and moves[1] and moves[1][2]
  if not granted[(value and 2 or 0) + (ranked and 2 or 1)] then
    allowed(record, id, value and true, ranked)
  end

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
      dues[k + 1], dues[k + 2] = dueScore, id
    end
  end
  if liesEnd > 0 then
    local itsRank, byRank, byEnd = format('%d', rank), 'r' .. id, 'e' .. id
    if mode == KEEP then
      endScore = format('%d', scored(ends))
    end
    for i = 1, liesEnd do
      local list = ranks[lies[i]]
      if not list then
        list = {}
        ranks[lies[i]] = list
      end
      local k = #list
      list[k + 1], list[k + 2], list[k + 3], list[k + 4] = itsRank, byRank, endScore, byEnd
    end
  end
  local told, strings = told, strings
  for k = stringsEnd + 1, last, 2 do
    told[strings[k]] = strings[k + 1]
  end
  stringsEnd = last
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
    local member = string.gsub(sub(names, 1, keySize), '%z', '\0\255') .. '\0\1' .. id
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
    values[k + 1], values[k + 2] = record, pack(VALUE, RECORD, newVersion, micros, due, flags * 281474976710656 + stamp,
      ends, #nonce * 65536 + keySize, marksSize, #many * 16777216 + #kept) .. nonce .. names .. keptMarks .. many .. kept .. ARGV[first + 1]
    if ARGV[first + 2] ~= '' then
      values[k + 3], values[k + 4] = body, ARGV[first + 2]
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
for i = 6, #KEYS, 2 do
  local place, ok, result = i / 2, not half, half
  if ok then
    ok, result = pcall(step, nextAt, KEYS[i], KEYS[i + 1], place)
  end
  if not ok and waits[#waits] == place then
    -- Of this step only a part waits, which nobody could tell from the others'.
    pcall(flush, said(result))
  end
  answer[place] = ok and result or {err = said(result)}
end
pcall(flush)
if wrote then
  -- Should there be half a step after all, nothing is asked of this memory any more: a
  -- sequence that is no number says so.
  call('HSET', KEYS[1], 'sequence', half or format('%d', sequence), NAME, entry(count))
  answer[1] = count
end
return answer
