-- What time it is, in microseconds since the epoch. Goes before every script; a test puts a clock of its own here.
local reading = redis.call('TIME')
local TIME = tonumber(reading[1]) * 1000000 + tonumber(reading[2])
