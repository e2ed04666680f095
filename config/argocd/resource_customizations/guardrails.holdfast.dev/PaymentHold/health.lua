-- A hold that waits for a person is suspended, never degraded: nothing is broken. One that is over is healthy.
local hs = {status = "Progressing", message = "Waiting for the operator"}
local status = obj.status
if status == nil or status.state == nil then
  return hs
end
if status.observedGeneration ~= obj.metadata.generation then
  hs.message = "Waiting for the operator to take the resolution"
  return hs
end
if status.state == "Held" or status.state == "Waiting" then
  hs.status = "Suspended"
  hs.message = "Waits for a person"
  if status.summary ~= nil and status.summary.reasons ~= nil then
    hs.message = "Waits for a person: " .. status.summary.reasons
  end
  return hs
end
hs.status = "Healthy"
hs.message = status.state
if status.effect ~= nil then
  hs.message = status.state .. ": " .. status.effect
end
return hs
