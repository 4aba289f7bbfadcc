-- Before asks about permits go out: reads what is in use, and gives up what slices are to shrink by, but nothing that holders have.
-- As quota/counted/lent.rs has it.
--
-- KEYS[2]  and further: first slices, then their permits
-- ARGV[4]  for each '<dd': the number of the ask that follows (records with smaller ones have no effect from now on); burst of
--          the lease to keep at most
-- ARGV[5]  for each: see load_counts
-- Answers  K, '<d' now; for each '<Bddd': leased before; what could still be given out; what is to be said to be held
local refused = enter()
if refused then
  return refused
end
local n = (#KEYS - 1) / 2
local slices = load(n + 1)
local counts = load_counts(n + 2, slices, 0)
local answer, from = { 'K', pack('<d', now) }, 1

for i = 1, n do
  local b, c = slices[i], counts[i]
  local seq, burst
  seq, burst, from = unpack_at('<dd', ARGV[4], from)
  local leased = (b.burst > 0 or b.rho > 0) and 1 or 0
  local reserve = own(c)
  local above = max(c.stored - reserve, 0)
  burst = max(above, floor(burst / UNIT)) * UNIT
  if burst < b.burst or b.rho > 0 then
    b.burst, b.rho, b.dirty = min(b.burst, burst), 0, true
  end
  fence(b, seq, now + LENT_LEASE_MAX)
  local slice = floor(b.burst / UNIT)
  answer[i + 2] = pack('<Bdd', leased, max(reserve + slice - c.stored, 0) * UNIT, max(slice, above) * UNIT)
end
save(slices)
return table.concat(answer)
