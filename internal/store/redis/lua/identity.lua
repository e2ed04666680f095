-- KEYS: meta. ARGV: prefix. → epoch, key domain.
local m = open(KEYS[1])
return {m.epoch, m.domain}
