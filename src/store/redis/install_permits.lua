-- Puts records of the pool into slices of permits; one that has ended, or is no newer than the last, changes nothing.
--
-- KEYS[2]  and further: first slices, then their permits
-- ARGV[4]  for each '<ddddd': seq, push, burst, rate, deadline
-- ARGV[5]  for each: see load_counts
-- Answers  K, '<d' now; for each '<d': what could be given out afterwards
local refused = enter()
if refused then
  return refused
end
local n = (#KEYS - 1) / 2
local slices = load(n + 1)
local answer, from = { 'K', pack('<d', now) }, 1

for i = 1, n do
  local seq, push, burst, rho, deadline
  seq, push, burst, rho, deadline, from = unpack_at('<ddddd', ARGV[4], from)
  install(slices[i], seq, push, 0, burst, rho, deadline)
end
local counts = load_counts(n + 2, slices, 0)
for i = 1, n do
  local c = counts[i]
  answer[i + 2] = pack('<d', max(own(c) + c.lent - c.stored, 0) * UNIT)
end
save(slices)
return table.concat(answer)
