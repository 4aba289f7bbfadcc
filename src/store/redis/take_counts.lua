-- Requests as for take.lua, some of which have charges on counted limits, too. (Those that have none go to take.lua, which is
-- shorter.)
--
-- KEYS[2]  and further: first buckets, then slices of counts, then counts
-- ARGV[4]  for each request: as for take.lua; then 'B' how many charges on counts; for each of them '<HBBd': number of the count
--          (from 1), 1 if all depends on it, act (0 count, 1 acquire, 2 renew, 3 release), the cost; with an act also 16
--          bytes lease
-- ARGV[5]  for each count: see load_counts
-- ARGV[6]  '<HH' how many of the keys are buckets, and slices
-- Answers  as take.lua; after the charges of a request, for each charge on a count '<Bdddd': fits; left afterwards; how
--          long until it fits (-1: never); how long until nothing counts any more; how long permits last that it took or renewed
local refused = enter()
if refused then
  return refused
end
local split, slices = unpack_at('<HH', ARGV[6])
local buckets = load(split + slices + 1)
local counts = load_counts(split + slices + 2, buckets, split)
local answer, requests, from = { 'K', pack('<d', now) }, ARGV[4], 1
local size, all = 2, #requests

while from <= all do
  local n, m
  local allowed = 1
  local charges, claims = {}, {}
  n, from = unpack_at('B', requests, from)
  for i = 1, n do
    local number, enforce, cost
    number, enforce, cost, from = unpack_at('<HBd', requests, from)
    local b = buckets[number]
    local charge = { b = b, cost = cost, level = b.level, rem = b.rem, fits = 0 }
    charges[i] = charge
    if cost <= b.level then
      charge.fits = 1
      b.level = b.level - cost
      local cap = min(b.cap + b.burst, LIMIT)
      if b.level >= cap then
        b.level, b.rem = cap, 0
      end
    elseif enforce == 1 then
      allowed = 0
    end
  end
  m, from = unpack_at('B', requests, from)
  for i = 1, m do
    local number, enforce, claim = nil, nil, {}
    number, enforce, claim.act, claim.cost, from = unpack_at('<HBBd', requests, from)
    if claim.act > 0 then
      claim.lease, from = unpack_at('c16', requests, from)
    end
    local c = counts[number]
    claim.c, claim.stored, claim.fresh, claim.touched = c, c.stored, c.fresh, c.touched
    claims[i] = claim
    claim.fits, claim.wait = check_count(c, claim.act, claim.cost, claim.lease)
    if claim.fits == 0 and enforce == 1 then
      allowed = 0
    end
  end

  for i = n, 1, -1 do
    local charge = charges[i]
    local b = charge.b
    if allowed == 0 then
      b.level, b.rem = charge.level, charge.rem
    elseif charge.fits == 1 and charge.cost ~= 0 then
      b.dirty = true
    end
  end
  for i = m, 1, -1 do
    local claim = claims[i]
    local c = claim.c
    c.mine = 0
    if allowed == 0 then
      c.stored, c.fresh, c.touched = claim.stored, claim.fresh, claim.touched
    else
      c.dirty = c.dirty or c.touched
    end
  end
  for i = 1, m do
    local claim = claims[i]
    local c = claim.c
    if allowed == 1 and claim.fits == 1 and claim.act > 0 and c.kind == PERMITS then
      claim.lasts = change_permits(c, claim.act, claim.cost, claim.lease)
    end
  end

  size = size + 1
  answer[size] = pack('B', allowed)
  for i = 1, n do
    local charge = charges[i]
    local b = charge.b
    size = size + 1
    answer[size] = pack('<Bddd', charge.fits, b.level, flow(b), min(b.cap + b.burst, LIMIT))
  end
  for i = 1, m do
    local claim = claims[i]
    local c = claim.c
    local left = max(own(c) + c.lent - c.carried - c.stored - c.fresh, 0)
    size = size + 1
    answer[size] = pack('<Bdddd', claim.fits, left, claim.wait, max(over(c) - now, 0), claim.lasts or 0)
  end
end
save(buckets)
save_counts(counts)
return table.concat(answer)
