-- KEYS: meta, due, held, sums, marks. ARGV: prefix, process, epoch, key domain.
-- → count, epoch, key domain.
if epoch ~= '' then
  return {count, epoch, call('HGET', KEYS[1], 'domain')}
end
if call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5]) > 0 then
  damaged('there are records, and no identity')
end
call('HSET', KEYS[1], 'format', FORMAT, 'epoch', ARGV[3], 'domain', ARGV[4], 'sequence', '0', NAME, entry(count + 1))
return {count + 1, ARGV[3], ARGV[4]}
