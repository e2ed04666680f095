-- KEYS: meta, record, body. ARGV: prefix, process. → count, time, record, body.
return {count, micros, call('GET', KEYS[2]), call('GET', KEYS[3])}
