-- KEYS: meta, record, body. ARGV: prefix. → time, record, body.
open(KEYS[1])
return {text(now()), call('GET', KEYS[2]), call('GET', KEYS[3])}
