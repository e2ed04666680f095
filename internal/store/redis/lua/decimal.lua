-- Exact decimals as text: digits with at most one point. Added and compared in
-- limbs of 14 digits, whose sum and carry stay below 2^53.

-- decimals makes these functions; few steps need them.
local function decimals()
  local match, rep, format = string.match, string.rep, string.format
  local LIMB, BASE = 14, 100000000000000

  -- align gives two decimals the same number of digits, in whole limbs, and says how
  -- many of them stand behind the point.
  local function align(a, b)
    local ai, af = match(a, '^(%d+)%.?(%d*)$')
    local bi, bf = match(b, '^(%d+)%.?(%d*)$')
    if not ai or not bi then
      damaged('a meter holds ' .. a .. ' and ' .. b)
    end
    local behind = math.max(#af, #bf)
    local x, y = ai .. af .. rep('0', behind - #af), bi .. bf .. rep('0', behind - #bf)
    local n = math.ceil(math.max(#x, #y) / LIMB) * LIMB
    return rep('0', n - #x) .. x, rep('0', n - #y) .. y, behind
  end

  -- plain is the shortest form.
  local function plain(digits, behind)
    local int = match(sub(digits, 1, #digits - behind), '^0*(.*)$')
    local fraction = match(sub(digits, #digits - behind + 1), '^(.-)0*$')
    if int == '' then
      int = '0'
    end
    if fraction == '' then
      return int
    end
    return int .. '.' .. fraction
  end

  -- compare is below, at or above 0.
  local function compare(a, b)
    local x, y = align(a, b)
    for i = 1, #x, LIMB do
      local l, r = tonumber(sub(x, i, i + LIMB - 1)), tonumber(sub(y, i, i + LIMB - 1))
      if l ~= r then
        return l - r
      end
    end
    return 0
  end

  local function add(a, b)
    if a == '0' or b == '0' then
      return a == '0' and b or a
    end
    local x, y, behind = align(a, b)
    local limbs, carry = {}, 0
    for i = #x - LIMB + 1, 1, -LIMB do
      local n = tonumber(sub(x, i, i + LIMB - 1)) + tonumber(sub(y, i, i + LIMB - 1)) + carry
      carry = 0
      if n >= BASE then
        n, carry = n - BASE, 1
      end
      table.insert(limbs, 1, format('%014.0f', n))
    end
    return plain(carry .. table.concat(limbs), behind)
  end

  -- subtract is nil below 0.
  local function subtract(a, b)
    if b == '0' then
      return a
    end
    local x, y, behind = align(a, b)
    local limbs, borrow = {}, 0
    for i = #x - LIMB + 1, 1, -LIMB do
      local n = tonumber(sub(x, i, i + LIMB - 1)) - tonumber(sub(y, i, i + LIMB - 1)) - borrow
      borrow = 0
      if n < 0 then
        n, borrow = n + BASE, 1
      end
      table.insert(limbs, 1, format('%014.0f', n))
    end
    if borrow > 0 then
      return nil
    end
    return plain(table.concat(limbs), behind)
  end

  return compare, add, subtract
end
