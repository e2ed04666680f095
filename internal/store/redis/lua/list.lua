-- KEYS: meta, the list. ARGV: prefix, process, page size, "due" and the last millisecond, or
-- "held" and nothing; where the last page ended: the entry, and its millisecond.
-- → count, time, whether there is more, entries and their records.
local list, size, what, last = KEYS[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local after, afterDue = ARGV[6], ARGV[7]

-- before compares bytes; Lua's own comparison goes by the server's locale.
local function before(a, b)
  for i = 1, HASH do
    local x, y = byte(a, i), byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return false
end

local entries
if what == 'held' then
  local from = after == '' and '-' or '(' .. after
  entries = call('ZRANGEBYLEX', list, from, '+', 'LIMIT', 0, size + 1)
else
  -- Entries of one millisecond lie in the order of their bytes. The first one past
  -- the end of the last page is found by halving, whether that end is still there or not.
  local from = 0
  if after ~= '' then
    from = call('ZCOUNT', list, '-inf', '(' .. afterDue)
    local to = call('ZCOUNT', list, '-inf', afterDue)
    while from < to do
      local middle = math.floor((from + to) / 2)
      if before(after, call('ZRANGE', list, middle, middle)[1]) then
        to = middle
      else
        from = middle + 1
      end
    end
  end
  local stop = math.min(from + size, call('ZCOUNT', list, '-inf', last) - 1)
  entries = stop < from and {} or call('ZRANGE', list, from, stop)
end

local page = {count, micros, #entries > size and '1' or '0'}
for i = 1, math.min(#entries, size) do
  local record = call('GET', P .. 'r' .. sub(entries[i], -HASH))
  if not record then
    refuse('HOLDFASTABSENT', 'a record is listed as ' .. what .. ' and is not there')
  end
  page[#page + 1] = entries[i]
  page[#page + 1] = record
end
return page
