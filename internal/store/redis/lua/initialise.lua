-- KEYS: meta, due, held, sums, marks. ARGV: prefix, epoch, key domain. → epoch, key domain.
local m = open(KEYS[1])
if m.epoch ~= '' then
  return {m.epoch, m.domain}
end
if call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5]) > 0 then
  damaged('there are records, and no identity')
end
call('HSET', KEYS[1], 'format', FORMAT, 'epoch', ARGV[2], 'domain', ARGV[3], 'sequence', '0')
return {ARGV[2], ARGV[3]}
