-- What all scripts share. A script checks everything first and then writes; what
-- goes wrong in the first part is raised as an error, and nothing has been written.
-- Every key is passed to a command of its type before the first write, so that no
-- write meets a key of another type, or one that is just moving to another node.
--
-- Lua numbers are doubles. Times stay below 2^53 until the year 2255, versions
-- below 2^52 by check; decimals are computed in limbs.

local call = redis.call
local sub, byte, match, rep, format = string.sub, string.byte, string.match, string.rep, string.format
local pack, unpackFrom = struct.pack, struct.unpack

-- FORMAT is that of the whole namespace, RECORD that of one record's value.
local FORMAT, RECORD = '1', 1
-- MOST is where versions end. A settled record ranks by its version, an unsettled
-- one by its version and MOST.
local MOST = 4503599627370496
-- LIMIT is the most marks under one name that are looked through one by one.
local LIMIT = 128

local P = ARGV[1]

local function text(n)
  return format('%.0f', n)
end

local function refuse(what, detail)
  error({err = what .. ' ' .. detail})
end

local function damaged(detail)
  refuse('HOLDFASTDAMAGED', detail)
end

-- open reads who the store is. Nothing but this is read of a store of another format.
local function open(key)
  local m = call('HMGET', key, 'format', 'epoch', 'domain', 'sequence')
  if m[1] and m[1] ~= FORMAT then
    refuse('HOLDFASTFORMAT', m[1])
  end
  if not m[1] and (m[2] or m[3] or m[4]) then
    damaged('the identity has no format')
  end
  local sequence = tonumber(m[4] or '0')
  if not sequence or sequence >= MOST - 1 then
    damaged('the sequence is ' .. tostring(m[4]))
  end
  return {epoch = m[2] or '', domain = m[3] or '', sequence = sequence}
end

-- read takes a record's value apart; nil if there is none.
local function read(value)
  if not value then
    return nil
  end
  if byte(value, 1) ~= RECORD then
    refuse('HOLDFASTFORMAT', 'of a record: ' .. tostring(byte(value, 1)))
  end
  local r = {}
  local nonce, key, marks, entries, at
  r.version, r.at, r.due, r.flags, r.stamp, nonce, key, marks, entries, at =
    unpackFrom('>I8I8I8BI8I2I2I4I4', value, 2)
  r.nonce, at = sub(value, at, at + nonce - 1), at + nonce
  r.key, at = sub(value, at, at + key - 1), at + key
  r.marks, at = sub(value, at, at + marks - 1), at + marks
  r.entries = sub(value, at, at + entries - 1)
  return r
end

-- now is the store's time in microseconds.
local function now()
  local t = clock()
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
