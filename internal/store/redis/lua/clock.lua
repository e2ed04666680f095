-- The store's time: that of the server, as {seconds, microseconds}.
local NOW = redis.call('TIME')
