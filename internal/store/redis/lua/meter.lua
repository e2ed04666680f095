-- KEYS: meta, sums. ARGV: prefix, process, meter. → count, sum.
local m = open(KEYS[1])
return {m.count, call('HGET', KEYS[2], ARGV[3]) or '0'}
