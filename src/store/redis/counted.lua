-- Limits that count what they admit; the arithmetic of quota/counted.rs, number for number. Goes after core.lua.
--
-- Amounts are whole tokens, up to 2^32. What is stored, by kind:
--   1 counters  a string '<ddd': when the present window began, what the one before and this one have counted
--   2 log       a sorted set: one member for each time at which something was admitted, by that time; '>dd' the running sum before
--               and after
--   3 permits   a sorted set: one member for each permit in use, by when it ends; 16 bytes lease, '<I4' which of its permits;
--               and where more are lent to the region, its slice: a bucket of no rate and no level, whose lease is all that matters
-- Every key lives until nothing in it counts any more.

local COUNTERS, LOG, PERMITS = 1, 2, 3
local PARTS = 1048576
local UNITS_MAX = 4294967296
local UNIT = 1000000
local NEW_PART = 4
local LENT_LEASE_MAX = 656900000

local call = redis.call

local function text(x)
  return string.format('%.0f', x)
end

-- x / den, of numbers that are not negative: rounded down, and up.
local function div(x, den)
  return (x - x % den) / den
end

local function div_up(x, den)
  return div(x + den - 1, den)
end

-- Counters. The unit of time in which a window is weighed, and how many of them it has.
local function units(span)
  local unit = max(div_up(span, UNITS_MAX), 1)
  return unit, max(div(span, unit), 1)
end

local function carried(c)
  local left = c.span - max(now - c.start, 0)
  local unit, all = units(c.span)
  local parts = min(div_up(div_up(left, unit) * PARTS, all), PARTS)
  return div_up(c.previous * parts, PARTS)
end

-- The most that may be left of a window so that what the one before has counted weighs at most `room`.
local function left_for(counted, room, span)
  if counted <= room then
    return span
  end
  local unit, all = units(span)
  local parts = div(room * PARTS, counted)
  return min(div(parts * all, PARTS) * unit, span)
end

local function counters_at_most(c, room)
  local turn, current = c.start + c.span, c.stored + c.fresh - c.mine
  local at
  if current <= room then
    at = turn - left_for(c.previous, room - current, c.span)
  else
    at = turn + c.span - left_for(current, room, c.span)
  end
  return max(at - now, 0)
end

-- A log. What is in the set is `stored` from `base` on, less what has been given back; what this call adds is `fresh`.
local function entry(key, rank)
  local found = call('ZRANGE', key, rank, rank, 'WITHSCORES')
  if not found[1] then
    return nil
  end
  local before, after = unpack_at('>dd', found[1])
  return before, after, tonumber(found[2]), found[1]
end

-- When what the running sum had reached `sum` with was admitted.
local function reached(c, sum)
  local low = call('ZCOUNT', c.key, '-inf', text(now - c.span))
  local high = call('ZCARD', c.key) - 1
  while low < high do
    local middle = div(low + high, 2)
    local _, after = entry(c.key, middle)
    if after >= sum then
      high = middle
    else
      low = middle + 1
    end
  end
  local _, _, at = entry(c.key, low)
  return at
end

-- When the newest of it was admitted; nil: there is nothing.
local function newest(c)
  local at = c.newest
  if c.stored == 0 then
    at = nil
  elseif c.stored < c.all then
    at = reached(c, c.base + c.stored)
  end
  if c.fresh > 0 then
    at = max(late, at or 0)
  end
  return at
end

local function log_gone(c, need)
  if need <= 0 then
    return 0
  end
  if need <= c.stored then
    return reached(c, c.base + need) + c.span - now
  end
  return newest(c) + c.span - now
end

local function permits_gone(c, need)
  if need <= 0 then
    return 0
  end
  local rank = call('ZCOUNT', c.key, '-inf', text(now)) + need - 1
  local found = call('ZRANGE', c.key, rank, rank, 'WITHSCORES')
  return found[2] and tonumber(found[2]) - now or 0
end

-- How long until at most `room` counts, beside what this request has added.
local function until_at_most(c, room)
  if c.kind == COUNTERS then
    return counters_at_most(c, room)
  end
  local need = c.stored + c.fresh - c.mine - room
  if c.kind == LOG then
    return log_gone(c, need)
  end
  return permits_gone(c, need)
end

-- What may be used now, without what is lent.
local function own(c)
  return now < c.til and min(c.limit, c.held) or c.limit
end

-- What new permits may be given out against, of what is lent.
local function lent_for_new(c)
  return c.lent_til - late >= div(c.span, NEW_PART) and c.lent or 0
end

-- How long until `cost` more fits; -1: never.
local function wait(c, cost)
  local wanted, lent = c.mine + cost, lent_for_new(c)
  local function under(limit)
    limit = limit + lent
    return wanted <= limit and until_at_most(c, limit - wanted) or -1
  end
  if now >= c.til then
    return under(c.limit)
  end
  local hold = c.til - now
  local sooner = under(min(c.limit, c.held))
  if sooner >= 0 and sooner < hold then
    return sooner
  end
  local later = under(c.limit)
  return later >= 0 and max(later, hold) or -1
end

-- When nothing counts any more.
local function over(c)
  if c.kind == COUNTERS then
    if c.stored + c.fresh > 0 then
      return c.start + 2 * c.span
    end
    return c.previous > 0 and c.start + c.span or 0
  end
  if c.kind == LOG then
    local at = newest(c)
    return at and at + c.span or 0
  end
  local last = call('ZRANGE', c.key, -1, -1, 'WITHSCORES')
  return last[2] and tonumber(last[2]) or 0
end

-- Reads the counts of KEYS[first..], as ARGV[5] describes them: '<BdddddB' kind, limit, span; until when no more than how much
-- may be used; for how long what was lost may count; 1 if more may be lent. What is, is in the buckets after the first `skip` ones,
-- in the same order.
local function load_counts(first, slices, skip)
  local counts, from = {}, 1
  for i = first, #KEYS do
    local c = { key = KEYS[i], carried = 0, stored = 0, fresh = 0, mine = 0, lent = 0, lent_til = 0 }
    local life, may_be_lent
    c.kind, c.limit, c.span, c.til, c.held, life, may_be_lent, from = unpack_at('<BdddddB', ARGV[5], from)
    if may_be_lent == 1 then
      skip = skip + 1
      local slice = slices[skip]
      if slice.seq and slice.deadline > late then
        c.lent, c.lent_til = floor(slice.burst / UNIT), slice.deadline
      end
    end
    local known = generation_start + max(c.span, life)
    if not generation_full and now < known then
      c.held, c.til = 0, max(c.til, known)
    end
    if c.kind == COUNTERS then
      local s = call('GET', c.key)
      c.start, c.previous = 0, 0
      if s then
        c.start, c.previous, c.stored = unpack_at('<ddd', s)
      end
      local start = now - now % c.span
      if start > c.start then
        c.previous = start == c.start + c.span and c.stored or 0
        c.stored, c.start = 0, start
      end
      c.carried = carried(c)
    elseif c.kind == LOG then
      local _, after, at = entry(c.key, -1)
      if at and at > now - c.span then
        local oldest = call('ZRANGEBYSCORE', c.key, text(now - c.span + 1), '+inf', 'LIMIT', 0, 1)
        c.base, c.newest = unpack_at('>d', oldest[1]), at
        c.stored = after - c.base
      end
      c.all = c.stored
    else
      c.stored = call('ZCOUNT', c.key, text(now + 1), '+inf')
    end
    counts[i - first + 1] = c
  end
  return counts
end

-- Permits of a lease, each by its member.
local function members(lease, cost)
  local i = 0
  return function()
    i = i + 1
    if i <= cost then
      return lease .. pack('<I4', i)
    end
  end
end

-- How long a lease lasts that is there with so many permits; nil: it is not.
local function lasts(c, lease, cost)
  local ends
  for member in members(lease, cost) do
    ends = call('ZSCORE', c.key, member)
    if not ends then
      return nil
    end
  end
  if not ends or call('ZSCORE', c.key, lease .. pack('<I4', cost + 1)) then
    return nil
  end
  ends = tonumber(ends)
  return ends > now and ends - now or nil
end

-- Checks one charge against what those before it leave. Returns whether it fits, and how long until it does.
local function check_count(c, act, cost, lease)
  local force = own(c)
  local used = c.carried + c.stored + c.fresh
  if c.kind == PERMITS and act >= 2 then
    local left = lasts(c, lease, cost)
    if not left then
      return 0, -1
    end
    if act == 2 then
      if used > force + c.lent then
        return 0, left
      end
      return 1, -1
    end
    c.stored = max(c.stored - cost, 0)
    return 1, -1
  end
  if cost > 0 and used + cost > force + lent_for_new(c) then
    return 0, wait(c, cost)
  end
  if cost ~= 0 and not (c.kind == PERMITS and act == 0) then
    c.touched = true
    if cost > 0 then
      c.mine, c.fresh = c.mine + cost, c.fresh + cost
    else
      local back = min(-cost, c.fresh)
      c.mine, c.fresh = max(c.mine + cost, 0), c.fresh - back
      c.stored = max(c.stored - (-cost - back), 0)
    end
  end
  return 1, -1
end

-- When permits end that are taken or renewed now: rule 2 of quota/counted/lent.rs.
local function end_of(c, act, cost, lease)
  local til = late + c.span
  if c.lent <= 0 then
    return til
  end
  local before = act == 2 and tonumber(call('ZSCORE', c.key, lease .. pack('<I4', 1)) or 0) or 0
  local later = call('ZCOUNT', c.key, text(c.lent_til + 1), '+inf')
  if before > c.lent_til then
    later = later - cost
  end
  if later + cost <= own(c) then
    return til
  end
  return max(min(til, c.lent_til), before)
end

-- Does what was decided about permits. Returns how long they last.
local function change_permits(c, act, cost, lease)
  call('ZREMRANGEBYSCORE', c.key, '-inf', text(now))
  local ends = act == 3 and late or end_of(c, act, cost, lease)
  for member in members(lease, cost) do
    if act == 3 then
      call('ZREM', c.key, member)
    else
      call('ZADD', c.key, text(ends), member)
    end
  end
  c.stored, c.fresh = call('ZCOUNT', c.key, text(now + 1), '+inf'), 0
  local til = over(c)
  if til > 0 then
    call('PEXPIRE', c.key, text(floor((til - now + KEEP_MARGIN) / 1000) + 1))
  end
  return max(ends - late, 0)
end

local function save_counters(c)
  local til = over(c)
  if til == 0 then
    call('DEL', c.key)
    return
  end
  local s = pack('<ddd', c.start, c.previous, c.stored + c.fresh)
  call('SET', c.key, s, 'PX', text(floor((til - now + KEEP_MARGIN) / 1000) + 1))
end

local function save_log(c)
  local key = c.key
  call('ZREMRANGEBYSCORE', key, '-inf', text(now - c.span))
  local sum = (c.base or 0) + c.stored
  local before, after, at, member = entry(key, -1)
  while before and after > sum do
    call('ZREM', key, member)
    if before < sum then
      call('ZADD', key, text(at), pack('>dd', before, sum))
    end
    before, after, at, member = entry(key, -1)
  end
  if c.fresh > 0 then
    local from, till = sum, sum + c.fresh
    if not at then
      at, from, till = late, 0, c.fresh
    elseif at >= late then
      call('ZREM', key, member)
      from = before
    else
      at = late
    end
    call('ZADD', key, text(at), pack('>dd', from, till))
  end
  -- A set that was empty for a moment has lost its expiry.
  if at then
    call('PEXPIRE', key, text(floor((at + c.span - now + KEEP_MARGIN) / 1000) + 1))
  end
end

-- Writes back what has changed.
local function save_counts(counts)
  for i = 1, #counts do
    local c = counts[i]
    if c.dirty then
      if c.kind == COUNTERS then
        save_counters(c)
      elseif c.kind == LOG then
        save_log(c)
      end
    end
  end
end
