-- What the scripts about leases share.

-- No record of an ask before this one has an effect from now on; the bucket is kept until `til` at least.
local function fence(b, seq, til)
  if not b.seq then
    b.session, b.seq, b.push, b.granted, b.burst, b.rho, b.deadline, b.guard = session, 0, 0, 0, 0, 0, now, now
  end
  if seq > b.seq then
    b.seq, b.push = max(seq - 1, 0), PUSH_MAX
  end
  b.guard, b.dirty = max(b.guard, til), true
end

-- Puts a record of the pool into a bucket; one that has ended, or is no newer than the last, changes nothing.
local function install(b, seq, push, granted, burst, rho, deadline)
  local newer = not b.seq or seq > b.seq or seq == b.seq and push > b.push
  if not newer or deadline <= late then
    return
  end
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
