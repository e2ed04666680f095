-- changing makes the function that puts a record's marks of a string in all cases. m are
-- the functions of marks; then come the record's id, and what it becomes: rank, flags,
-- marks, and the end of most of them. set and gone take what becomes of values, moves
-- what is written elsewhere, and lie the strings and tags of which marks lie there.
local function changing(m, id, rank, flags, marks, ends, set, gone, moves, lie)
  local call, sub, P = redis.call, string.sub, ARGV[1]
  local own = flags >= OWNENDS and m.endsOf(marks) or {}
  local function endOf(hash, tag)
    return m.score(own[hash .. tag] or ends)
  end

  -- change writes to the sorted set of a string and tag, which has been read, and so is
  -- one, and returns how many marks it had. One that must have some must be here.
  local function change(command, some, name, ...)
    local n = call('ZCARD', P .. 'm' .. name) / 2
    if some and n == 0 then
      refuse('HOLDFASTABSENT', 'a sorted set of marks is not there')
    end
    moves[#moves + 1] = {command, P .. 'm' .. name, ...}
    return n
  end

  -- put keeps the string's next value.
  local function put(hash, value, next)
    if next == value then
      return
    end
    if next == '' then
      gone[#gone + 1] = hash
    else
      set[#set + 1], set[#set + 2] = hash, next
    end
  end

  -- many keeps that a string has many marks, with these tags.
  local function many(hash, value, tags)
    local named, first = {}, 254
    for tag, is in pairs(tags) do
      if is and tag == '' then
        first = 255
      elseif is then
        named[#named + 1] = tag
      end
    end
    if #named > 65535 then
      refuse('HOLDFASTSIZE', 'of the tags of a mark')
    end
    local empty = first == 254 and #named == 0
    put(hash, value, empty and '' or string.char(first) .. struct.pack('>I2', #named) .. table.concat(named))
  end

  local function changeMany(hash, value, will, had)
    local tags, wants, changed = {}, {}, false
    for _, tag in ipairs(m.tagsOf(value)) do
      tags[tag] = true
    end
    for _, w in ipairs(will) do
      wants[w.tag], lie[hash .. w.tag] = true, true
      change('ZADD', tags[w.tag], hash .. w.tag, rank, 'r' .. id, endOf(hash, w.tag), 'e' .. id)
      tags[w.tag], changed = true, changed or not tags[w.tag]
    end
    for _, tag in ipairs(had) do
      if not wants[tag] and change('ZREM', true, hash .. tag, 'r' .. id, 'e' .. id) <= 1 then
        tags[tag], changed = nil, true
      end
    end
    if changed then
      many(hash, value, tags)
    end
  end

  local function changeFew(hash, value, will, had)
    local groups, n = m.groupsOf(value), 0
    local byTag, wants = {}, {}
    for _, g in ipairs(groups) do
      byTag[g.tag] = g
      n = n + #g.ids / HASH
    end
    for _, w in ipairs(will) do
      wants[w.tag] = true
      local g = byTag[w.tag]
      if not g then
        groups[#groups + 1], n = w, n + 1
      elseif not m.find(g.ids, id) then
        g.ids, n = g.ids .. id, n + 1
      end
    end
    for _, tag in ipairs(had) do
      local g = byTag[tag]
      local at = g and not wants[tag] and m.find(g.ids, id)
      if at then
        g.ids, n = sub(g.ids, 1, at - 1) .. sub(g.ids, at + HASH), n - 1
      end
    end
    if n > LARGE then
      local tags = {}
      for _, g in ipairs(groups) do
        local members = {}
        for at = 1, #g.ids, HASH do
          local of = sub(g.ids, at, at + HASH - 1)
          local its, ends = rank, nil
          if of == id then
            ends, lie[hash .. g.tag] = endOf(hash, g.tag), true
          else
            local f = m.facts(of)
            its, ends = f.rank, m.score(m.ending(f, hash, g.tag))
            m.lieElsewhere(of, hash, g.tag)
          end
          local k = #members
          members[k + 1], members[k + 2], members[k + 3], members[k + 4] = its, 'r' .. of, ends, 'e' .. of
        end
        if #members > 0 then
          change('ZADD', false, hash .. g.tag, unpack(members))
          tags[g.tag] = true
        end
      end
      many(hash, value, tags)
      return
    end
    local parts = {}
    for i, g in ipairs(groups) do
      parts[i] = g.ids ~= '' and m.group(g.tag, g.ids) or ''
    end
    put(hash, value, table.concat(parts))
  end

  -- The record is to have the marks of will, and had those of the tags in had.
  return function(hash, value, will, had)
    if not value or string.byte(value, 1) < 254 then
      changeFew(hash, value or '', will, had)
    else
      changeMany(hash, value, will, had)
    end
  end
end
