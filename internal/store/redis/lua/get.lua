-- KEYS: meta, record, body. ARGV: prefix, process. → count, time, record, body.
local m = open(KEYS[1])
return {m.count, now(), call('GET', KEYS[2]), call('GET', KEYS[3])}
