-- KEYS: meta. ARGV: prefix, process, epoch, the next one. → count.
if epoch ~= ARGV[3] then
  return {count}
end
call('HSET', KEYS[1], 'epoch', ARGV[4], NAME, entry(count + 1))
return {count + 1}
