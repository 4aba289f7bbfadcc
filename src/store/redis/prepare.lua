-- Before asks go out: reads buckets, and gives up what their leases are to shrink by.
--
-- ARGV[4]  for each bucket '<ddddd': the number of the ask that follows (records with smaller ones have no effect from now on);
--          burst and rate of the lease to keep at most; how much of the reserve's rate is lent from now on, and for how long (0:
--          nothing is lent by this)
-- Answers  K, '<d' now; for each bucket '<Bddddd': leased before; level, tokens that no longer fitted, burst and rate afterwards,
--          and what is lent
local refused = enter()
if refused then
  return refused
end
local buckets = load()
local answer, from = { 'K', pack('<d', now) }, 1

for i = 1, #buckets do
  local b = buckets[i]
  local seq, burst, rho, lend, length
  seq, burst, rho, lend, length, from = unpack_at('<ddddd', ARGV[4], from)
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
  fence(b, seq, now + LEASE_MAX)
  if length > 0 then
    b.lent, b.lent_til = max(b.lent or 0, lend), max(b.lent and b.lent_til or 0, late + length)
  end
  answer[i + 2] = pack('<Bddddd', leased, b.level, returned, b.burst, b.rho, b.lent or 0)
end
save(buckets)
return table.concat(answer)
