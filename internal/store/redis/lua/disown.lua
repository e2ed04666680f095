-- KEYS: meta. ARGV: prefix, epoch, the next one. → nothing.
local m = open(KEYS[1])
if m.epoch == ARGV[2] then
  call('HSET', KEYS[1], 'epoch', ARGV[3])
end
return {}
