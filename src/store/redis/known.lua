-- Which of these buckets does the region hold? Changes nothing.
--
-- Answers  K, '<d' how many keys Redis holds (0 where it does not say); for each bucket 'B': 1 if it is stored
local refused = enter()
if refused then
  return refused
end
local size = redis.pcall('DBSIZE')
local answer = { 'K', pack('<d', type(size) == 'number' and size or 0) }
for i = 2, #KEYS do
  answer[i + 1] = pack('B', redis.call('EXISTS', KEYS[i]))
end
return table.concat(answer)
