-- Ready is healthy. Stalled needs a person, and is degraded. Everything else is on its way, a
-- dependency that is not there yet among it.
local hs = {status = "Progressing", message = "Waiting for the operator"}
local status = obj.status
if status == nil or status.conditions == nil then
  return hs
end
if status.observedGeneration ~= obj.metadata.generation then
  hs.message = "Waiting for the operator to look at this generation"
  return hs
end
for _, c in ipairs(status.conditions) do
  if c.type == "Stalled" and c.status == "True" then
    return {status = "Degraded", message = c.reason .. ": " .. c.message}
  end
end
for _, c in ipairs(status.conditions) do
  if c.type == "Ready" then
    if c.status == "True" then
      return {status = "Healthy", message = "The tool can be called"}
    end
    hs.message = c.reason .. ": " .. c.message
  end
end
return hs
