-- Puts records of the pool into buckets; one that has ended, or is no newer than the last, changes nothing.
--
-- ARGV[4]  for each bucket '<dddddd': seq, push, tokens granted under seq so far, burst, rate, deadline
-- Answers  K, '<d' now; for each bucket '<d': its level afterwards
local refused = enter()
if refused then
  return refused
end
local buckets = load()
local answer, from = { 'K', pack('<d', now) }, 1

for i = 1, #buckets do
  local b = buckets[i]
  local seq, push, granted, burst, rho, deadline
  seq, push, granted, burst, rho, deadline, from = unpack_at('<dddddd', ARGV[4], from)
  install(b, seq, push, granted, burst, rho, deadline)
  answer[i + 2] = pack('<d', b.level)
end
save(buckets)
return table.concat(answer)
