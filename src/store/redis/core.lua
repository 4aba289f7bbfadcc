-- The arithmetic of quota/bucket.rs, number for number, and what all scripts on buckets share.
--
-- KEYS[1]  the region's meta key
-- KEYS[2]  and further: bucket keys
-- ARGV[1]  16 bytes: session and generation, as the meta key begins
-- ARGV[2]  '<dd': the window of store time in which this call may run
-- ARGV[3]  for each bucket key '<dddd': rate and cap of its reserve; level (below 0: full) and time of a bucket that
--          is not stored. A rate below 0: the bucket is one of a quota's window; then its cap, and when the window ends
--          (below 0: nobody knows) and began (0: too long ago to be full)
--
-- Answers begin with a letter: F (fenced: another session, or the data is gone), C (the clock is outside the window), or
-- K and what the script says of itself. After F and C nothing has changed. All numbers are integers below 2^53, which
-- doubles hold exactly; they travel packed, never as text. All reading comes before the first write: a script
-- that fails has changed nothing.
--
-- A stored bucket, little endian: level, time, rate, cap as doubles and the remainder as 4 bytes; then, if a lease is on
-- record: session, seq, push, granted, burst, rate, deadline, guard as doubles; then, if its reserve does not refill yet: from
-- when on it does, as a double; then, if some of its reserve's rate is lent: so much, and until when, as doubles.

local LIMIT = 9007199254740991
local TOLERANCE = 250000
local KEEP_MAX = 100 * 365 * 86400 * 1000000
local KEEP_MARGIN = 5000000
local SHORT = 36
local LEASED = 100
local LEASE_MAX = 60000000
local LOAN = 30000000
local PUSH_MAX = 4294967295

local floor, min, max = math.floor, math.min, math.max
local pack, unpack_at = struct.pack, struct.unpack

-- Set by `enter`: refill counts up to `now`, leases end by `late`.
local now, late, session, generation_start, generation_full, generation_refills

-- Checks fence and clock; returns the answer if there is nothing more to do.
local function enter()
  local meta = redis.call('GET', KEYS[1])
  if not meta or string.sub(meta, 1, 16) ~= ARGV[1] then
    return 'F'
  end
  local lo, hi = unpack_at('<dd', ARGV[2])
  if TIME < lo - TOLERANCE or TIME > hi + TOLERANCE then
    return 'C'
  end
  now = min(max(TIME, lo), hi)
  late = max(TIME, now)
  local full, _
  session, _, generation_start, _, full = unpack_at('<ddddB', meta)
  generation_full = full == 1
  generation_refills = full == 2 and generation_start or generation_start + LOAN
end

-- Lets `rate` flow in for `time`, up to `cap`. `rate * time` would leave the exact range; its parts either do not, or are far
-- above any cap.
local function accrue(b, rate, time, cap)
  if rate > 0 and time > 0 then
    local us = time % 1000000
    local rate_low = rate % 1000000
    local low = rate_low * us + b.rem
    local rem = low % 1000000
    b.level = b.level + rate * ((time - us) / 1000000) + (rate - rate_low) / 1000000 * us + (low - rem) / 1000000
    b.rem = rem
  end
  if b.level >= cap then
    b.level = cap
    b.rem = 0
  end
end

-- The reserve, less what of it is lent, and what is borrowed flow in until then.
local function refill(b, reserve, borrowed, til, cap)
  if b.lent then
    local last = min(til, b.lent_til)
    accrue(b, min(max(reserve - b.lent, 0) + borrowed, LIMIT), last - b.at, cap)
    b.at = max(b.at, last)
  end
  accrue(b, min(reserve + borrowed, LIMIT), til - b.at, cap)
  b.at = max(b.at, til)
end

-- Its refill rate now.
local function flow(b)
  return min((b.lent and max(b.rate - b.lent, 0) or b.rate) + b.rho, LIMIT)
end

-- Brings a bucket to now, under this reserve.
local function settle(b, rate, cap)
  if rate < 0 and b.rate < 0 and cap ~= b.cap then
    b.level, b.cap, b.dirty = b.level + (cap - b.cap), cap, true
  end
  local r, c = min(b.rate, rate), min(b.cap, cap)
  if b.seq and b.session ~= session then
    b.seq, b.burst, b.rho = nil, 0, 0
  end
  if b.seq then
    local til = min(now, b.deadline)
    local held = min(til, b.hold)
    accrue(b, b.rho, held - b.at, min(c + b.burst, LIMIT))
    b.at = max(b.at, held)
    refill(b, r, b.rho, til, min(c + b.burst, LIMIT))
    if b.deadline <= late then
      b.burst, b.rho = 0, 0
    end
    if b.guard <= late then
      b.seq, b.burst, b.rho = nil, 0, 0
    end
  end
  b.at = max(b.at, min(b.hold, now))
  refill(b, r, 0, now, min(c + b.burst, LIMIT))
  if b.lent and b.lent_til <= now then
    b.lent = nil
  end
  if b.rate ~= rate or b.cap ~= cap then
    b.rate, b.cap, b.dirty = rate, cap, true
  end
end

-- A bucket that is not stored.
local function unseen(rate, cap, level, at)
  local b = { level = cap, rem = 0, at = now, hold = now, rate = rate, cap = cap, burst = 0, rho = 0 }
  if rate < 0 then
    if at <= 0 or not generation_full and at <= generation_start then
      b.level = 0
    end
    return b
  end
  if generation_full then
    if level >= 0 then
      b.level, b.hold = min(level, cap), at
    end
  elseif level >= 0 and at > generation_refills then
    local refilled = { level = 0, rem = 0 }
    accrue(refilled, rate, min(at, now) - generation_refills, LIMIT)
    b.level, b.hold = min(level, refilled.level, cap), at
  else
    b.level, b.hold = 0, generation_refills
  end
  b.at = min(b.hold, now)
  return b
end

-- Reads and settles the buckets of KEYS[2..last] (all keys, where `last` is not given) as ARGV[3] describes them; a key that
-- comes twice is one bucket.
local function load(last)
  local stored = (last or #KEYS) > 1 and redis.call('MGET', unpack(KEYS, 2, last)) or {}
  local buckets, known, from = {}, {}, 1
  for i = 1, #stored do
    local rate, cap, level, at
    rate, cap, level, at, from = unpack_at('<dddd', ARGV[3], from)
    local key, s = KEYS[i + 1], stored[i]
    local b = known[key]
    if not b then
      if not s then
        b = unseen(rate, cap, level, at)
      else
        b = { key = key, burst = 0, rho = 0, hold = 0 }
        b.level, b.at, b.rate, b.cap, b.rem = unpack_at('<ddddI4', s)
        local size = #s
        local rest = size % 64 - SHORT -- a lease takes 64 bytes
        if rest >= 16 then
          size = size - 16
          b.lent, b.lent_til = unpack_at('<dd', s, size + 1)
        end
        if rest % 16 == 8 then
          size = size - 8
          b.hold = unpack_at('<d', s, size + 1)
        end
        if size == LEASED then
          b.session, b.seq, b.push, b.granted, b.burst, b.rho, b.deadline, b.guard = unpack_at('<dddddddd', s, SHORT + 1)
        end
      end
      b.key = key
      if rate < 0 and level >= 0 then
        b.ends = level
      end
      known[key] = b
      settle(b, rate, cap)
    end
    buckets[i] = b
  end
  return buckets
end

-- Writes back what has changed. A key lives until its bucket is no different from one that was never stored: full (or its
-- window is over), and past every record that could be installed a second time.
local function save(buckets)
  for i = 1, #buckets do
    local b = buckets[i]
    if b.dirty then
      b.dirty = nil
      local fill = 0
      if b.level < b.cap then
        fill = b.rate > 0 and min((b.cap - b.level) / b.rate * 1000000, KEEP_MAX) or KEEP_MAX
      end
      local til = b.ends and max(b.ends, now) or max(b.at, b.hold, b.lent and b.lent_til or 0) + fill
      local s = pack('<ddddI4', b.level, b.at, b.rate, b.cap, b.rem)
      if b.seq then
        til = max(til, b.guard)
        s = s .. pack('<dddddddd', b.session, b.seq, b.push, b.granted, b.burst, b.rho, b.deadline, b.guard)
      end
      if b.hold > now then
        s = s .. pack('<d', b.hold)
      end
      if b.lent then
        s = s .. pack('<dd', b.lent, b.lent_til)
      end
      local px = floor((til - now + KEEP_MARGIN) / 1000) + 1
      redis.call('SET', b.key, s, 'PX', string.format('%.0f', px))
    end
  end
end
