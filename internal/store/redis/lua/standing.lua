-- KEYS: meta. ARGV: prefix, process. → count, epoch, key domain, sequence, time.
--
-- Once a day this notes that the process lives, and takes away what is known of those
-- that were not seen for KEPT days. After a gap of more than MISSED days in which
-- nobody has looked, or one that the clock has made, all are given that time anew.
local KEPT, MISSED = 30, 7
local today = math.floor(micros / DAY)
if count > 0 and day ~= today then
  call('HSET', KEYS[1], NAME, entry(count))
end
local swept = epoch ~= '' and tonumber(call('HGET', KEYS[1], 'swept') or '0') or today
if swept ~= today then
  local amnesty = today < swept or today > swept + MISSED
  local all = call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if #all[i] == #NAME and all[i] ~= NAME then
      local itsCount, itsDay, itsVoid = unpackFrom('>I6I3I6', all[i + 1])
      if amnesty then
        call('HSET', KEYS[1], all[i], pack('>I6I3I6', itsCount, today, itsVoid))
      elseif itsDay < today - KEPT then
        call('HDEL', KEYS[1], all[i])
      end
    end
  end
  call('HSET', KEYS[1], 'swept', today)
end
return {count, epoch, call('HGET', KEYS[1], 'domain') or '', sequence, micros}
