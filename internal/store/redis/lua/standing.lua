-- KEYS: meta. ARGV: prefix. → epoch, key domain, sequence, time.
local m = open(KEYS[1])
return {m.epoch, m.domain, text(m.sequence), text(now())}
