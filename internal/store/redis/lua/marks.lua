-- The marks of strings that many records have.
--
-- The latest marks of a string lie in its value: of each tag the number of their
-- records, 128 more if it is not the empty one, the tag, and the ids. What else there
-- is to know of a mark is in its record. If there are more marks, the value begins
-- with the tags of those: 254, or 255 if some have none, how many, and the tags.

-- A string has at most LARGE marks in its value; when there are more, all but SMALL
-- are moved to where there can be many.
local LARGE, SMALL = 96, 48
-- Flags of a record: the last says that some of its marks have ends of their own.
local HELD, NOTSETTLED, OWNENDS = 1, 2, 4

-- marking makes these functions, by name; few steps need them.
local function marking()
  local call, sub, byte, char, unpackFrom = redis.call, string.sub, string.byte, string.char, struct.unpack
  local P = ARGV[1]
  local m = {}

  -- few is where the marks begin that lie in the value.
  function m.few(value)
    if byte(value, 1) < 254 then
      return 1
    end
    return 4 + HASH * unpackFrom('>I2', value, 2)
  end

  -- tagsOf are those of the other marks.
  function m.tagsOf(value)
    local tags = byte(value, 1) == 255 and {''} or {}
    for i = 4, m.few(value) - 1, HASH do
      tags[#tags + 1] = sub(value, i, i + HASH - 1)
    end
    return tags
  end

  -- groupsOf are the tags and ids of the marks in the value, which begin there.
  function m.groupsOf(value, i)
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

  -- facts reads of another record what its marks say: its rank, its stamp, the end that
  -- most of them have, 0 for none, and those of the others.
  function m.facts(id)
    local value = call('GETRANGE', P .. 'r' .. id, 0, 42)
    if #value < 43 then
      damaged('a mark of a record that is not there')
    end
    if byte(value, 1) ~= RECORD then
      refuse('HOLDFASTFORMAT', 'of a record: ' .. byte(value, 1))
    end
    local version, _, _, flags, stamp, ends, nonce, key, marks = unpackFrom('>I6I7I6BI6I6I2I2I3', value, 2)
    local f = {rank = flags % OWNENDS >= NOTSETTLED and version + UNSETTLED or version, stamp = stamp, ends = ends}
    if flags >= OWNENDS then
      local from = 43 + nonce + key
      f.own = m.endsOf(call('GETRANGE', P .. 'r' .. id, from, from + marks - 1))
    end
    return f
  end

  -- ending is the end of one of a record's marks.
  function m.ending(facts, hash, tag)
    return facts.own and facts.own[hash .. tag] or facts.ends
  end

  -- over is whether an end, as it is scored, has come.
  function m.over(score, ms)
    return score ~= 'inf' and tonumber(score) <= ms
  end

  function m.score(ends)
    return ends == 0 and 'inf' or ends
  end
  return m
end
