-- Before asks go out: reads buckets, and gives up what their leases are to shrink by.
--
-- ARGV[4]  for each bucket '<dd': burst and rate of the lease to keep at most
-- Answers  K, '<d' now; for each bucket '<Bdddd': leased before; level, tokens that no longer fitted, burst and rate afterwards
local refused = enter()
if refused then
  return refused
end
local buckets = load()
local answer, from = { 'K', pack('<d', now) }, 1

for i = 1, #buckets do
  local b = buckets[i]
  local burst, rho
  burst, rho, from = unpack_at('<dd', ARGV[4], from)
  local leased = (b.burst > 0 or b.rho > 0) and 1 or 0
  if burst < b.burst or rho < b.rho then
    b.burst, b.rho, b.dirty = min(b.burst, burst), min(b.rho, rho), true
  end
  local returned = b.level - min(b.cap + b.burst, LIMIT)
  if returned >= 0 then
    b.level, b.rem = b.level - returned, 0
  else
    returned = 0
  end
  answer[i + 2] = pack('<Bdddd', leased, b.level, returned, b.burst, b.rho)
end
save(buckets)
return table.concat(answer)
