-- Which records a Reserve's probes hit.
--
-- Marks of the same string and tag are a group. Of a small one each record is looked at.
-- Those of a large one are in the order in which their records are told, and also by the
-- end of the marks: that counts those not yet over, and tells whether a record is among
-- them. So the most telling are read from the top of the one, and counted by the other,
-- and only where large groups overlap, or a watermark covers a part, are marks counted one
-- by one, in pages.

-- search returns nil, or what was hit: count, whether each probe was hit, and the
-- most telling records with their probes. m are the functions of marks. Of the probes
-- come their strings, with the values of these, their excepted tags, '' for none, and
-- firsts; own is the record that is not hit; covered is the highest stamp passed over.
local function search(m, strings, values, tags, firsts, own, covered, ms)
  -- KEPT bounds of how many records of large groups something is kept.
  local MAXHITS, PAGE, KEPT = 64, 256, 50000
  local call, sub, P = redis.call, string.sub, ARGV[1]
  local tagsOf, groupsOf, facts, ending, score, over = m.tagsOf, m.groupsOf, m.facts, m.ending, m.score, m.over
  local probes, byString = {}, {}
  for i, hash in ipairs(strings) do
    local p = {except = tags[i], first = sub(firsts, i, i) == '1', groups = {}}
    probes[i] = p
    local of = byString[hash]
    if not of then
      of = {value = values[i], probes = {}}
      byString[hash] = of
    end
    of.probes[#of.probes + 1] = p
  end

  -- Records may lie in several groups: of those of the small ones all is kept, of the
  -- others their stamps.
  local known, stamps, looked = {}, {}, 0
  local function factsOf(id)
    local f = known[id]
    if not f then
      f = facts(id)
      known[id], stamps[id] = f, f.stamp
    end
    return f
  end
  local function stampOf(id)
    local stamp = stamps[id]
    if not stamp then
      stamp = m.stamp(id)
      if looked < KEPT then
        stamps[id], looked = stamp, looked + 1
      end
    end
    return stamp
  end
  -- A record's stamp is one for all its marks, and not above its version.
  local function passedOver(id, rank)
    return covered > 0 and (rank % UNSETTLED <= covered or stampOf(id) <= covered)
  end

  local all, small, big = {}, {}, {}
  for hash, of in pairs(byString) do
    -- probed gives a group to the probes that ask for it. One whose tag all except is
    -- not looked at.
    local function probed(tag)
      local g
      for _, p in ipairs(of.probes) do
        if tag == '' or tag ~= p.except then
          g = g or {}
          g.first = g.first or p.first
          p.groups[#p.groups + 1] = g
        end
      end
      return g
    end
    if of.value and string.byte(of.value, 1) >= 254 then
      for _, tag in ipairs(tagsOf(of.value)) do
        local g = probed(tag)
        if g then
          g.marks = P .. 'm' .. hash .. tag
          g.n = call('ZCARD', g.marks) / 2
          if g.n == 0 then
            refuse('HOLDFASTABSENT', 'a sorted set of marks is not there')
          end
          g.over = call('ZCOUNT', g.marks, '-inf', score(ms))
          g.live = g.n - g.over
          local mine = call('ZSCORE', g.marks, 'e' .. own)
          if mine and not over(mine, ms) then
            g.live = g.live - 1
          end
          big[#big + 1], all[#all + 1] = g, g
        end
      end
    elseif of.value then
      for _, part in ipairs(groupsOf(of.value)) do
        local g = probed(part.tag)
        if g then
          g.top, g.has = {}, {}
          small[#small + 1], all[#all + 1] = g, g
          for i = 1, #part.ids, HASH do
            local id = sub(part.ids, i, i + HASH - 1)
            if id ~= own then
              local f = factsOf(id)
              local ends = ending(f, hash, part.tag)
              if (ends == 0 or ms < ends) and not passedOver(id, f.rank) then
                g.any = true
                g.top[#g.top + 1], g.has[id] = {id = id, rank = f.rank}, true
              end
            end
          end
        end
      end
    end
  end
  table.sort(big, function(a, b) return a.live < b.live end)

  -- among says of each id whether the large group has a mark of it that is not over.
  local function among(g, ids)
    local is = {}
    for i = 1, #ids, PAGE do
      local members = {}
      for k = i, math.min(i + PAGE - 1, #ids) do
        members[#members + 1] = 'e' .. ids[k]
      end
      for k, e in ipairs(call('ZMSCORE', g.marks, unpack(members))) do
        is[ids[i + k - 1]] = e and not over(e, ms) or false
      end
    end
    return is
  end

  -- standing picks, out of members with ranks of a large group, those that are hit.
  local function standing(g, flat, into)
    local ids, ranks = {}, {}
    for i = 1, #flat, 2 do
      local id = sub(flat[i], 2)
      ids[#ids + 1] = id
      ranks[id] = tonumber(flat[i + 1])
    end
    local is = among(g, ids)
    for _, id in ipairs(ids) do
      if is[id] and id ~= own and not passedOver(id, ranks[id]) then
        into[#into + 1] = {id = id, rank = ranks[id]}
      end
    end
  end

  -- ranges of a large group's marks that may be above the watermark: by rank, the
  -- settled ones and the unsettled ones.
  local function ranges(g)
    if covered == 0 then
      return {{0, g.n - 1}}
    end
    return {
      {call('ZCOUNT', g.marks, 0, covered), call('ZCOUNT', g.marks, 0, '(' .. string.format('%.0f', UNSETTLED)) - 1},
      {call('ZCOUNT', g.marks, 0, UNSETTLED + covered), g.n - 1},
    }
  end

  -- pages calls fn with the ids of the records that are hit in a large group.
  local function pages(g, fn)
    if covered == 0 then
      for from = g.over, g.n - 1, PAGE do
        local ids = {}
        for _, member in ipairs(call('ZRANGE', g.marks, from, math.min(from + PAGE, g.n) - 1)) do
          local id = sub(member, 2)
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
        local to = math.min(from + PAGE - 1, r[2])
        standing(g, call('ZRANGE', g.marks, g.n + from, g.n + to, 'WITHSCORES'), hit)
        for i, c in ipairs(hit) do
          ids[i] = c.id
        end
        fn(ids)
      end
    end
  end

  -- top reads the most telling records of a large group.
  local function top(g)
    local best = {}
    if covered == 0 and g.live <= PAGE then
      local ids = {}
      for i, member in ipairs(g.over < g.n and call('ZRANGE', g.marks, g.over, g.n - 1) or {}) do
        ids[i] = 'r' .. sub(member, 2)
      end
      if #ids > 0 then
        for i, rank in ipairs(call('ZMSCORE', g.marks, unpack(ids))) do
          if not rank then
            damaged('a mark that is counted is not there')
          end
          local id = sub(ids[i], 2)
          if id ~= own then
            best[#best + 1] = {id = id, rank = tonumber(rank)}
          end
        end
      end
      return best
    end
    local rs = ranges(g)
    for i = #rs, 1, -1 do
      local to = rs[i][2]
      while to >= rs[i][1] do
        local from = math.max(rs[i][1], to - PAGE / 2 + 1)
        standing(g, call('ZREVRANGE', g.marks, g.n - 1 - to, g.n - 1 - from, 'WITHSCORES'), best)
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
    -- Most that are elsewhere at all are in the largest one, and are not asked for again.
    for i = #big, from, -1 do
      if #ids == 0 then
        return
      end
      local is, rest = among(big[i], ids), {}
      for _, id in ipairs(ids) do
        if not is[id] then
          rest[#rest + 1] = id
        end
      end
      ids = rest
    end
    count = count + #ids
  end
  countOutside(ids, 1)
  for i, g in ipairs(big) do
    if covered == 0 then
      g.any = g.live > 0
      if i == #big then
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

  local best, told = {}, {}
  for _, g in ipairs(all) do
    for _, c in ipairs(g.top) do
      if not told[c.id] then
        told[c.id] = c
        best[#best + 1] = c
      end
      told[c.id].first = told[c.id].first or g.first
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
  for _, g in ipairs(big) do
    g.has = g.any and among(g, ids) or {}
  end

  local reply = {count, ''}
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
      refuse('HOLDFASTABSENT', 'a mark of a record that is not there')
    end
    reply[#reply + 1] = record
    reply[#reply + 1] = table.concat(by, ' ')
  end
  return reply
end
