-- changing makes the function that puts a record's marks of a string in all cases: they
-- are in its value, elsewhere, or new. m are the functions of marks; then come the
-- record's id, and what it becomes: version, flags, marks, and the end of most of them.
-- set and gone take what becomes of values, and moves what is written elsewhere.
local function changing(m, id, version, flags, marks, ends, set, gone, moves)
  local call, sub, char, pack, P = redis.call, string.sub, string.char, struct.pack, ARGV[1]
  local groupsOf, tagsOf, group, find, facts, score = m.groupsOf, m.tagsOf, m.group, m.find, m.facts, m.score

  local rank = flags % OWNENDS >= NOTSETTLED and version + UNSETTLED or version
  local own = flags >= OWNENDS and m.endsOf(marks) or {}
  local function endOf(hash, tag)
    return own[hash .. tag] or ends
  end
  -- touch reads a group of many marks, and so has seen both of its keys.
  local function touch(name)
    call('ZCARD', P .. 'e' .. name)
    return call('ZCARD', P .. 'm' .. name)
  end

  -- The marks that the value has begin there; the record is to have those of will, and
  -- had those of the tags in had.
  return function(hash, value, from, will, had)
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
        local its, ends = rank, nil
        if of == id then
          ends = endOf(hash, g.tag)
        else
          local f = facts(of)
          its, ends = f.rank, m.ending(f, hash, g.tag)
        end
        ranks[2 * k + 1], ranks[2 * k + 2] = its, of
        byEnd[2 * k + 1], byEnd[2 * k + 2] = score(ends), of
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
    if next == '' then
      gone[#gone + 1] = hash
    elseif next ~= value then
      set[#set + 1], set[#set + 2] = hash, next
    end
  end
end
