-- The marks of strings that many records have.
--
-- A string's value has its marks as long as they are few: of each tag the number of their
-- records, 128 more if it is not the empty one, the tag, and the ids. What else there is
-- to know of a mark is in its record. The value of a string with many marks has their
-- tags alone: 254, or 255 if some have none, how many, and the tags. The marks of a tag
-- are a sorted set then, with two members for each: 'r' and the id by the record's rank,
-- and 'e' and the id by the end, which is less than 0 to come before all ranks.

-- The marks of a string are few up to LARGE.
local LARGE = 64
-- The score of an end is that much less than its milliseconds, or NEVER.
local BELOW, NEVER = 4503599627370496, -1
-- A record's value: LAYOUT is its fixed part after the format, of FIXED bytes with it, see
-- layout.go. VALUE is the same, but neighbours whose numbers are known are written as one: flags
-- and stamp, the lengths of nonce and key, and those behind the marks. The stamp is at STAMPAT.
local LAYOUT, VALUE, FIXED, STAMPAT = '>I6I7I6BI6I6I2I2I3I2I3', '>BI6I7I6I7I6I4I3I5', 45, 22
-- Flags of a record: the last says that some of its marks have ends of their own.
local HELD, NOTSETTLED, OWNENDS = 1, 2, 4

-- scored is an end as it is scored, 0 for none.
local function scored(ends)
  return ends == 0 and NEVER or ends - BELOW
end

-- marking makes these functions, by name; few steps need them.
local function marking()
  local call, sub, byte, char, pack, unpackFrom = redis.call, string.sub, string.byte, string.char, struct.pack, struct.unpack
  local P = ARGV[1]
  local m = {}

  -- tagsOf are those of many marks.
  function m.tagsOf(value)
    local tags = byte(value, 1) == 255 and {''} or {}
    for i = 4, #value, HASH do
      tags[#tags + 1] = sub(value, i, i + HASH - 1)
    end
    return tags
  end

  -- groupsOf are the tags and ids of few marks.
  function m.groupsOf(value)
    local groups, i = {}, 1
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
  function m.group(tag, ids)
    return char(#ids / HASH + (tag == '' and 0 or 128)) .. tag .. ids
  end

  -- find is where an id begins among ids; nil if it is not there.
  function m.find(ids, id)
    local at = string.find(ids, id, 1, true)
    while at and at % HASH ~= 1 do
      at = string.find(ids, id, at + 1, true)
    end
    return at
  end

  -- eachMark calls fn with string, tag and end, nil for the common one, of a record's marks.
  function m.eachMark(marks, fn)
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
  function m.endsOf(marks)
    local own = {}
    m.eachMark(marks, function(hash, tag, ends) own[hash .. tag] = ends end)
    return own
  end

  -- fixed reads another record's value up to the end of its fixed part.
  local function fixed(id)
    local value = call('GETRANGE', P .. 'r' .. id, 0, FIXED - 1)
    if #value < FIXED then
      refuse('HOLDFASTABSENT', 'a mark of a record that is not there')
    end
    if byte(value, 1) ~= RECORD then
      refuse('HOLDFASTFORMAT', 'of a record: ' .. byte(value, 1))
    end
    return value
  end

  -- stamp is another record's.
  function m.stamp(id)
    return (unpackFrom('>I6', fixed(id), STAMPAT))
  end

  -- facts are what another record's marks say: its rank, its stamp, the end that most of
  -- them have, 0 for none, and those of the others.
  function m.facts(id)
    local version, _, _, flags, stamp, ends, nonce, key, marks = unpackFrom(LAYOUT, fixed(id), 2)
    local f = {rank = flags % OWNENDS >= NOTSETTLED and version + UNSETTLED or version, stamp = stamp, ends = ends}
    if flags >= OWNENDS then
      local from = FIXED + nonce + key
      f.own = m.endsOf(call('GETRANGE', P .. 'r' .. id, from, from + marks - 1))
    end
    return f
  end

  -- manyAmong says of each of a record's marks, in order, whether its string and tag are
  -- among these: a byte for each, or nothing if none are.
  function m.manyAmong(marks, names)
    local bytes, any = {}, false
    m.eachMark(marks, function(hash, tag)
      local is = names[hash .. tag]
      bytes[#bytes + 1], any = is and '\1' or '\0', any or is
    end)
    return any and table.concat(bytes) or ''
  end

  -- Records that are changed because a string of theirs has many marks now.
  local changed = {}
  function m.lieElsewhere(id, hash, tag)
    local r = changed[id]
    if not r then
      local value = call('GET', P .. 'r' .. id)
      local _, _, _, _, _, _, nonce, key, marks, many, entries, at = unpackFrom(LAYOUT, value, 2)
      local manyAt = at + nonce + key + marks
      r = {marks = sub(value, at + nonce + key, manyAt - 1), names = {}, before = sub(value, 1, FIXED - 5), lengths = entries,
        between = sub(value, at, manyAt - 1), after = sub(value, manyAt + many)}
      local k = 0
      m.eachMark(r.marks, function(hash, tag)
        k = k + 1
        r.names[hash .. tag] = k <= many and byte(value, manyAt + k - 1) == 1 or nil
      end)
      changed[id] = r
    end
    r.names[hash .. tag] = true
  end

  -- rewrite adds the writes of these to moves.
  function m.rewrite(moves)
    for id, r in pairs(changed) do
      local many = m.manyAmong(r.marks, r.names)
      moves[#moves + 1] = {'SET', P .. 'r' .. id, r.before .. pack('>I2I3', #many, r.lengths) .. r.between .. many .. r.after}
    end
  end

  -- ending is the end of one of a record's marks.
  function m.ending(facts, hash, tag)
    return facts.own and facts.own[hash .. tag] or facts.ends
  end

  m.score = scored

  -- over is whether an end, as it is scored, has come.
  function m.over(score, ms)
    return tonumber(score) <= ms - BELOW
  end
  return m
end
