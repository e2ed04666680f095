-- The store's time: that of the server, as {seconds, microseconds}.
local function clock()
  return redis.call('TIME')
end
