-- KEYS: meta, sums. ARGV: prefix, meter. → sum.
open(KEYS[1])
return {call('HGET', KEYS[2], ARGV[2]) or '0'}
