-- KEYS: meta. ARGV: prefix, process, epoch, the next one. → count.
local m = open(KEYS[1])
if m.epoch ~= ARGV[3] then
  return {m.count}
end
call('HSET', KEYS[1], 'epoch', ARGV[4], NAME, entry(m.count + 1, now(), m.void))
return {m.count + 1}
