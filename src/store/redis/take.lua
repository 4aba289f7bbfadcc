-- Requests, one after the other: each checks all of its charges, then takes all or none.
--
-- ARGV[4]  for each request: 'B' how many charges; for each of them '<HBd': number of the bucket (from 1), 1 if all depends
--          on it, the cost (0 asks, less gives back)
-- Answers  K, '<d' now; for each request: 'B' allowed; for each charge '<Bddd': fits; level, rate and cap afterwards
local refused = enter()
if refused then
  return refused
end
local buckets = load()
local answer, requests, from = { 'K', pack('<d', now) }, ARGV[4], 1
local size, all = 2, #requests
local charged, costs, fits, level, rem = {}, {}, {}, {}, {}

while from <= all do
  local n
  n, from = unpack_at('B', requests, from)
  local allowed = 1
  for i = 1, n do
    local number, enforce, cost
    number, enforce, cost, from = unpack_at('<HBd', requests, from)
    local b = buckets[number]
    charged[i], costs[i], level[i], rem[i] = b, cost, b.level, b.rem
    if cost <= b.level then
      fits[i] = 1
      b.level = b.level - cost
      local cap = min(b.cap + b.burst, LIMIT)
      if b.level >= cap then
        b.level, b.rem = cap, 0
      end
    else
      fits[i] = 0
      if enforce == 1 then
        allowed = 0
      end
    end
  end
  for i = n, 1, -1 do
    local b = charged[i]
    if allowed == 0 then
      b.level, b.rem = level[i], rem[i]
    elseif fits[i] == 1 and costs[i] ~= 0 then
      b.dirty = true
    end
  end
  size = size + 1
  answer[size] = pack('B', allowed)
  for i = 1, n do
    local b = charged[i]
    size = size + 1
    answer[size] = pack('<Bddd', fits[i], b.level, flow(b), min(b.cap + b.burst, LIMIT))
  end
end
save(buckets)
return table.concat(answer)
