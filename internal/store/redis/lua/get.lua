-- KEYS: meta; then of each record that is asked for: itself, and its body. ARGV: prefix,
-- process. → count, time, and then of each: record, body. What goes wrong with one is
-- answered in its place.
local answer = {count, micros}
for i = 2, #KEYS, 2 do
  local record = redis.pcall('GET', KEYS[i])
  answer[i + 1] = record
  answer[i + 2] = type(record) == 'string' and redis.pcall('GET', KEYS[i + 1])
end
return answer
