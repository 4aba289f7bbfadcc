-- The attached daemon's heartbeat: is the session still its own, and what time is it?
--
-- KEYS[1]  the region's meta key (see attach.lua)
-- ARGV[1]  16 bytes: session and generation
-- ARGV[2]  '<d': how long the meta key lives from now on, in microseconds; 0: only look
-- ARGV[3]  1: this generation began with nothing spent: buckets that were never seen are full; 2: buckets whose reserve was lent
--          before it began are stored, and the others were not lent
-- Answers  F (it is not), or K and '<dB': time, and which of the two has been said of this generation (0: neither)
local meta = redis.call('GET', KEYS[1])
if not meta or string.sub(meta, 1, 16) ~= ARGV[1] then
  return 'F'
end
local life = struct.unpack('<d', ARGV[2])
local session, generation, start, _, full, from = struct.unpack('<ddddB', meta)
if ARGV[3] == '1' then
  full = 1
elseif ARGV[3] == '2' and full == 0 then
  full = 2
end
if life > 0 then
  local new = struct.pack('<ddddB', session, generation, start, TIME, full) .. string.sub(meta, from)
  redis.call('SET', KEYS[1], new, 'PX', string.format('%.0f', life / 1000))
end
return 'K' .. struct.pack('<dB', TIME, full)
