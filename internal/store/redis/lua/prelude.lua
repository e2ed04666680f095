-- What all scripts share. A script checks everything first and then writes; what
-- goes wrong in the first part is raised as an error, and nothing has been written.
-- Every key is passed to a command of its type before the first write, so that no
-- write meets a key of another type, or one that is just moving to another node. So no
-- write can fail once one was made (see write.lua).
--
-- Lua numbers are doubles. Times stay below 2^53 until the year 2255, versions
-- below 2^46 by check; decimals are computed in limbs.
--
-- The server runs all of this for each question, and makes every function and every
-- string anew: so what each question needs stands here as it is done, and a function
-- that few need takes from outside no more than it must, and makes others only when it
-- is called.

local call = redis.call
local sub, byte = string.sub, string.byte
local pack, unpackFrom = struct.pack, struct.unpack

-- FORMAT is that of the whole namespace, RECORD that of one record's value.
local FORMAT, RECORD = '1', 1
-- MOST is where versions end. A settled record ranks by its version, an unsettled
-- one by its version and UNSETTLED.
local MOST, UNSETTLED = 70368744177664, 140737488355328
-- HASH is the length of an id, of a mark's, a tag's and a meter's hash.
local HASH = 12
local DAY = 86400000000

local function refuse(what, detail)
  error({err = what .. ' ' .. detail})
end

local function damaged(detail)
  refuse('HOLDFASTDAMAGED', detail)
end

-- The process that asks (see process.go): its name, the count of its writes that it
-- was told of, the ticket of this question, and up to which one they are void; and then,
-- each after its length, the epochs that it has written under.
local P, NAME = ARGV[1], sub(ARGV[2], 1, 26)
local KNOWN, TICKET, VOID = unpackFrom('>I6I6I6', ARGV[2], 27)

-- The store's time in microseconds.
local micros = NOW[1] * 1000000 + NOW[2]

-- Who the store is: the epoch, '' for none, and the sequence of writes. What it has of
-- the process that asks: how many writes it has made, the day on which that was last
-- noted, and up to which of its tickets they are void. Nothing but this is read of a
-- store of another format.
local epoch, sequence, count, day, void = '', 0, 0, 0, 0
do
  local m = call('HMGET', KEYS[1], 'format', 'epoch', 'sequence', NAME)
  if m[1] and m[1] ~= FORMAT then
    refuse('HOLDFASTFORMAT', m[1])
  end
  if not m[1] and (m[2] or m[3]) then
    damaged('the identity has no format')
  end
  epoch, sequence = m[2] or '', tonumber(m[3] or '0')
  if not sequence or sequence >= MOST - 1 then
    damaged('the sequence is ' .. tostring(m[3]))
  end
  if m[4] then
    count, day, void = unpackFrom('>I6I3I6', m[4])
  end
  if TICKET <= void then
    refuse('HOLDFASTLATE', string.format('%.0f', TICKET))
  end
  if count < KNOWN then
    -- If this is a memory that the process has written in, it was set back, and all must
    -- be told. Else that was found before: another epoch is there.
    local at, under = 45, nil
    while at <= #ARGV[2] do
      under, at = unpackFrom('>I4c0', ARGV[2], at)
      if under == epoch then
        call('HSET', KEYS[1], 'epoch', NAME)
      end
    end
    refuse('HOLDFASTLOST', string.format('%.0f of %.0f', count, KNOWN))
  end
end

-- entry is what is kept of the process with that many writes.
local function entry(count)
  return pack('>I6I3I6', count, math.floor(micros / DAY), void)
end

if VOID > void then
  void = VOID
  call('HSET', KEYS[1], NAME, entry(count))
end
