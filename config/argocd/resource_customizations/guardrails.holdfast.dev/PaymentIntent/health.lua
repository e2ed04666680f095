-- An intent that waits for a person is suspended, never degraded: nothing is broken. One that was written down
-- or paid is healthy. One that is refused for good is degraded.
local hs = {status = "Progressing", message = "Waiting for the operator"}
local status = obj.status
if status == nil or status.conditions == nil then
  return hs
end
if status.observedGeneration ~= obj.metadata.generation then
  hs.message = "Waiting for the operator to look at this generation"
  return hs
end
local stalled, ready
for _, c in ipairs(status.conditions) do
  if c.type == "Stalled" and c.status == "True" then
    stalled = c
  elseif c.type == "Ready" then
    ready = c
  end
end
if ready ~= nil then
  hs.message = ready.reason .. ": " .. ready.message
end
if status.verdict == "UNKNOWN_HOLD" then
  hs.status = "Suspended"
elseif stalled ~= nil then
  hs.status = "Degraded"
  hs.message = stalled.reason .. ": " .. stalled.message
elseif ready ~= nil and ready.status == "True" then
  hs.status = "Healthy"
end
return hs
