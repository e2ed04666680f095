-- Which records a Reserve's probes hit.
--
-- Marks of the same string and tag are a group, and lie in it in the order in which
-- their records are told. A small group is looked through. A large one has its
-- records by the end of their marks as well: that counts those not yet over, and
-- tells whether a record is among them. So the most telling are read from the top
-- of the one, and counted by the other, and only where large groups overlap, or a
-- watermark covers a part, are marks counted one by one, in pages.

local MAXHITS, PAGE = 64, 256

-- search returns nil, or what was hit: count, whether each probe was hit, and the
-- most telling records with their probes. probes are {hash, except, first}; own is
-- the record that is not hit; covered is the highest stamp passed over.
local function search(probes, own, covered, ms)
  -- Mostly there is nothing at all under what is probed for.
  local keys, seen = {}, {}
  for _, p in ipairs(probes) do
    if not seen[p.hash] then
      seen[p.hash] = true
      keys[#keys + 1] = P .. 'm' .. p.hash
      keys[#keys + 1] = P .. 't' .. p.hash
    end
  end
  local found = 0
  for i = 1, #keys, 500 do
    found = found + call('EXISTS', unpack(keys, i, math.min(i + 499, #keys)))
  end
  if found == 0 then
    return nil
  end

  local groups, byName = {}, {}
  for _, p in ipairs(probes) do
    p.groups = {}
    local names = {p.hash}
    for _, tag in ipairs(call('SMEMBERS', P .. 't' .. p.hash)) do
      if tag ~= p.except then
        names[#names + 1] = p.hash .. tag
      end
    end
    for _, name in ipairs(names) do
      local g = byName[name]
      if g == nil then
        g = {marks = P .. 'm' .. name, ends = P .. 'e' .. name}
        g.n = call('ZCARD', g.marks)
        if g.n == 0 then
          g = false
        else
          groups[#groups + 1] = g
        end
        byName[name] = g
      end
      if g then
        g.first = g.first or p.first
        p.groups[#p.groups + 1] = g
      end
    end
  end

  -- A record's stamp is one for all its marks, and not above its version.
  local stamps = {}
  local function passedOver(id, rank)
    if covered == 0 then
      return false
    end
    local version = rank
    if version >= MOST then
      version = version - MOST
    end
    if version <= covered then
      return true
    end
    if not stamps[id] then
      local value = call('GETRANGE', P .. 'r' .. id, 26, 33)
      if #value ~= 8 then
        damaged('a mark of a record that is not there')
      end
      stamps[id] = unpackFrom('>I8', value)
    end
    return stamps[id] <= covered
  end

  -- standing picks, out of marks with their ranks, those that are hit.
  local function standing(flat, into)
    for i = 1, #flat, 2 do
      local id, ends = sub(flat[i], 1, 16), unpackFrom('>I6', flat[i], 17)
      local rank = tonumber(flat[i + 1])
      if id ~= own and (ends == 0 or ms < ends) and not passedOver(id, rank) then
        into[#into + 1] = {id = id, rank = rank}
      end
    end
  end

  local small, large = {}, {}
  for _, g in ipairs(groups) do
    if g.n > LIMIT then
      large[#large + 1] = g
      g.over = call('ZCOUNT', g.ends, '-inf', text(ms))
      g.live = g.n - g.over
      local mine = call('ZSCORE', g.ends, own)
      if mine and (mine == 'inf' or tonumber(mine) > ms) then
        g.live = g.live - 1
      end
    else
      small[#small + 1] = g
      g.top, g.has = {}, {}
      standing(call('ZREVRANGE', g.marks, 0, -1, 'WITHSCORES'), g.top)
      for _, c in ipairs(g.top) do
        g.has[c.id] = true
      end
      g.any = #g.top > 0
    end
  end
  table.sort(large, function(a, b) return a.live < b.live end)

  -- among says of each id whether the large group has a mark of it that is not over.
  local function among(g, ids)
    local is = {}
    for i = 1, #ids, PAGE do
      local ends = call('ZMSCORE', g.ends, unpack(ids, i, math.min(i + PAGE - 1, #ids)))
      for j, e in ipairs(ends) do
        is[ids[i + j - 1]] = e and (e == 'inf' or tonumber(e) > ms) or false
      end
    end
    return is
  end

  -- ranges of a large group's marks that may be above the watermark: by rank, the
  -- settled ones and the unsettled ones.
  local function ranges(g)
    if covered == 0 then
      return {{0, g.n - 1}}
    end
    return {
      {call('ZCOUNT', g.marks, '-inf', text(covered)), call('ZCOUNT', g.marks, '-inf', '(' .. text(MOST)) - 1},
      {call('ZCOUNT', g.marks, '-inf', text(MOST + covered)), g.n - 1},
    }
  end

  -- pages calls fn with the ids of the records that are hit in a large group.
  local function pages(g, fn)
    if covered == 0 then
      for from = g.over, g.n - 1, PAGE do
        local ids = {}
        for _, id in ipairs(call('ZRANGE', g.ends, from, from + PAGE - 1)) do
          if id ~= own then
            ids[#ids + 1] = id
          end
        end
        fn(ids)
      end
      return
    end
    for _, r in ipairs(ranges(g)) do
      for from = r[1], r[2], PAGE do
        local hit, ids = {}, {}
        standing(call('ZRANGE', g.marks, from, math.min(from + PAGE - 1, r[2]), 'WITHSCORES'), hit)
        for i, c in ipairs(hit) do
          ids[i] = c.id
        end
        fn(ids)
        stamps = {}
      end
    end
  end

  -- top reads the most telling records of a large group.
  local function top(g)
    local best = {}
    if covered == 0 and g.live <= PAGE then
      local flat = call('ZRANGE', g.ends, g.over, -1, 'WITHSCORES')
      local marks = {}
      for i = 1, #flat, 2 do
        marks[#marks + 1] = flat[i] .. pack('>I6', flat[i + 1] == 'inf' and 0 or tonumber(flat[i + 1]))
      end
      if #marks > 0 then
        local ranks = call('ZMSCORE', g.marks, unpack(marks))
        local both = {}
        for i, m in ipairs(marks) do
          if not ranks[i] then
            damaged('a mark that is counted is not there')
          end
          both[#both + 1], both[#both + 2] = m, ranks[i]
        end
        standing(both, best)
      end
      return best
    end
    local rs = ranges(g)
    for i = #rs, 1, -1 do
      local to = rs[i][2]
      while to >= rs[i][1] do
        local from = math.max(rs[i][1], to - PAGE / 2 + 1)
        standing(call('ZREVRANGE', g.marks, g.n - 1 - to, g.n - 1 - from, 'WITHSCORES'), best)
        if #best >= MAXHITS then
          return best
        end
        to = from - 1
      end
    end
    return best
  end

  -- A record counts once: in the largest of the large groups that have it, or else
  -- for the small ones together.
  local count = 0
  local ids, listed = {}, {}
  for _, g in ipairs(small) do
    for _, c in ipairs(g.top) do
      if not listed[c.id] then
        listed[c.id] = true
        ids[#ids + 1] = c.id
      end
    end
  end
  local function countOutside(ids, from)
    local elsewhere = {}
    for i = from, #large do
      elsewhere[i] = among(large[i], ids)
    end
    for _, id in ipairs(ids) do
      local counted = false
      for i = from, #large do
        counted = counted or elsewhere[i][id]
      end
      if not counted then
        count = count + 1
      end
    end
  end
  countOutside(ids, 1)
  for i, g in ipairs(large) do
    if covered == 0 then
      g.any = g.live > 0
      if i == #large then
        count = count + g.live
      elseif g.any then
        pages(g, function(page) countOutside(page, i + 1) end)
      end
    else
      pages(g, function(page)
        g.any = g.any or #page > 0
        countOutside(page, i + 1)
      end)
    end
    g.top = g.any and top(g) or {}
  end
  if count == 0 then
    return nil
  end

  local best, known = {}, {}
  for _, g in ipairs(groups) do
    for _, c in ipairs(g.top) do
      if not known[c.id] then
        known[c.id] = c
        best[#best + 1] = c
      end
      known[c.id].first = known[c.id].first or g.first
    end
  end
  table.sort(best, function(a, b)
    if (a.first or false) ~= (b.first or false) then
      return a.first
    end
    return a.rank > b.rank
  end)
  ids = {}
  for i = 1, math.min(#best, MAXHITS) do
    ids[i] = best[i].id
  end
  for _, g in ipairs(large) do
    g.has = g.any and among(g, ids) or {}
  end

  local reply = {text(count), ''}
  local hit = {}
  for i, p in ipairs(probes) do
    hit[i] = '0'
    for _, g in ipairs(p.groups) do
      if g.any then
        hit[i] = '1'
      end
    end
  end
  reply[2] = table.concat(hit)
  for _, id in ipairs(ids) do
    local by = {}
    for i, p in ipairs(probes) do
      for _, g in ipairs(p.groups) do
        if g.has[id] then
          by[#by + 1] = i - 1
          break
        end
      end
    end
    local record = call('GET', P .. 'r' .. id)
    if not record then
      damaged('a mark of a record that is not there')
    end
    reply[#reply + 1] = record
    reply[#reply + 1] = table.concat(by, ' ')
  end
  return reply
end
