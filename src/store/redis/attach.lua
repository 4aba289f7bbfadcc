-- A daemon attaches: who has this region's buckets, and are they still what they were?
--
-- KEYS[1]  the region's meta key: '<ddddB' session, generation, its start, last beat, full; 40 bytes run_id; 40 bytes
--          replication id
-- ARGV[1]  '<ddd': the daemon's session (0: none yet), and a new session and generation to use at need
-- ARGV[2]  run_id of this server, 40 bytes            ARGV[3]  its replication id, 40 bytes
-- ARGV[4]  1: a changed replication id alone is no sign of a failover
-- ARGV[5]  1: the daemon knows that data was lost     ARGV[6]  1: it has been taken over before, and yields to a live one
-- ARGV[7]  '<ddd': how recent a beat is a live daemon's, how long the meta key lives without one, and how long from now a new
--          generation begins, in microseconds
-- Answers  A (the same session goes on), R (a new session, the buckets are kept), L (a new session, nothing is kept), H (held
--          by another daemon; nothing has changed); then '<ddddB' time, session, generation, its start, full
local mine, session, generation = struct.unpack('<ddd', ARGV[1])
local recent, life, grace = struct.unpack('<ddd', ARGV[7])
local answer, start, full = 'L', TIME + grace, 0
local meta = redis.call('GET', KEYS[1])

if meta and ARGV[5] ~= '1' then
  local had, has, since, beat, was_full, from = struct.unpack('<ddddB', meta)
  local run_id, replication = string.sub(meta, from, from + 39), string.sub(meta, from + 40, from + 79)
  if run_id == ARGV[2] and (replication == ARGV[3] or ARGV[4] == '1') then
    if had == mine then
      answer, session = 'A', had
    elseif ARGV[6] == '1' and math.abs(TIME - beat) < recent then
      return 'H' .. struct.pack('<ddddB', TIME, had, has, since, was_full)
    else
      answer = 'R'
    end
    generation, start, full = has, since, was_full
  end
end
local new = struct.pack('<ddddB', session, generation, start, TIME, full) .. ARGV[2] .. ARGV[3]
redis.call('SET', KEYS[1], new, 'PX', string.format('%.0f', life / 1000))
return answer .. struct.pack('<ddddB', TIME, session, generation, start, full)
