-- KEYS: meta, sums. ARGV: prefix, process, meter. → count, sum.
return {count, call('HGET', KEYS[2], ARGV[3]) or '0'}
