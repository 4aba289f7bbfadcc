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
  local newer = not b.seq or seq > b.seq or seq == b.seq and push > b.push
  if newer and deadline > late then
    local counted = b.seq == seq and b.granted or 0
    b.level = b.level + max(granted - counted, 0)
    b.guard = b.seq and max(b.guard, deadline) or deadline
    b.session, b.seq, b.push, b.granted = session, seq, push, max(granted, counted)
    b.burst, b.rho, b.deadline, b.dirty = burst, rho, deadline, true
    local cap = min(b.cap + burst, LIMIT)
    if b.level >= cap then
      b.level, b.rem = cap, 0
    end
  end
  answer[i + 2] = pack('<d', b.level)
end
save(buckets)
return table.concat(answer)
