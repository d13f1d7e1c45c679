"""The operators' scripts, and those of reports.

An operator's change is recorded in the journal in the same step; a call that changes nothing records nothing, so that
repeating it is harmless. The scripts of reports pass no fence: a monitor must see a zombie too.

What is written is deleted first: a full server accepts a write only after a delete in the same script, and then most of
all an operator must see the run and be obeyed. Only a retry, which asks for more, is refused.
"""

from __future__ import annotations

from streamrl.protocol.transport.keys import LONGEST_EVENTS, Keys
from streamrl.protocol.transport.script import Call, Script

# The tombstone replaces meta and streams in one step: nothing of the run is accepted after it.
BURY = Script("""
local uid = redis.call('HGET', KEYS[1], 'uid')
redis.call('DEL', unpack(KEYS, 3))
if not uid then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], uid, 'PX', ARGV[1])
return 1
""")

# KEYS begin with meta and events, ARGV with the time and the operator. The rest sees only its own.
_NOTE = f"""
local meta, events = unpack(KEYS, 1, 2)
local now, by = unpack(ARGV, 1, 2)
for _ = 1, 2 do table.remove(KEYS, 1) table.remove(ARGV, 1) end
local function note(kind, detail)
  detail.by = by
  redis.call('XADD', events, 'MAXLEN', '~', {LONGEST_EVENTS}, '*', 'kind', kind, 'detail', cjson.encode(detail),
    'term', redis.call('HGET', meta, 'term') or 0, 'at', now)
end
"""

# 1: the command has changed. A drain or stop carries the time of its last call, for learners that had begun by then. If
# the run has ended only that time is set, or the next learner would end at once.
SET_CONTROL = Script(
    _NOTE
    + """
local control, mode = KEYS[1], ARGV[1]
local function is_end(word) return word == 'drain' or word == 'stop' end
local function set(field, value)
  redis.call('HDEL', control, field)
  redis.call('HSET', control, field, value)
end
local word, state = redis.call('HGET', control, 'mode') or 'run', redis.call('HGET', meta, 'state')
if is_end(mode) then
  local time = redis.call('TIME')
  set('end_at', time[1] * 1000 + math.floor(time[2] / 1000))
  if state and state ~= 'running' then return 0 end
elseif is_end(word) then
  set('end_at', 0)  -- taken back
end
if word == mode then return 0 end
set('mode', mode)
note('control', {mode = mode})
return 1
"""
)

# Letters as number and entry id; returns the number of new requests. A letter is accepted only if its entry still holds
# that ticket.
REQUEST_RETRIES = Script(
    _NOTE
    + """
local dead, requests = unpack(KEYS)
local function is_of(id, number)
  local entry = redis.call('XRANGE', dead, id, id)[1]
  if not entry then return false end
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields.p == 'train' and fields.n == number and fields.u == redis.call('HGET', meta, 'uid')
end
local added = {}
for i = 1, #ARGV, 2 do
  local number, id = ARGV[i], ARGV[i + 1]
  if is_of(id, number) and redis.call('HSETNX', requests, number, id) == 1 then added[#added + 1] = number end
end
if #added > 0 then note('dead_retry', {tickets = table.concat(added, ' ')}) end
return #added
"""
)

# Letters as number and entry id, deleted along with their retry requests; returns how many letters existed. Their
# numbers are recorded, because the learner restores letters that Redis has lost.
PURGE = Script(
    _NOTE
    + """
local dead, requests, purged = unpack(KEYS)
local removed = {}
for i = 1, #ARGV, 2 do
  local number, id = ARGV[i], ARGV[i + 1]
  if #redis.call('XRANGE', dead, id, id) == 1 then
    redis.call('XDEL', dead, id)
    redis.call('SADD', purged, number)
    removed[#removed + 1] = number
  end
  if redis.call('HGET', requests, number) == id then redis.call('HDEL', requests, number) end
end
if #removed > 0 then note('dead_purge', {tickets = table.concat(removed, ' ')}) end
return #removed
"""
)


# Processes come and go under new names. One that was killed remains visible for half a day, so that an operator sees in
# the morning what died in the night; or for an hour if a new one has come since, which may replace it: machines that
# are lost and replaced all day must not fill the lists. Reports are deleted a batch at a time, since Lua's stack is
# limited to some thousands of arguments. The new one is written first: Redis users may lack permissions for the rest.
_REPORT = Script("""
local progress, reported = unpack(KEYS)
local part, packed = unpack(ARGV)
local many, at_once = 1000, 1000
local is_new = redis.pcall('HDEL', progress, part) == 0
redis.call('HSET', progress, part, packed)
local now = redis.call('TIME')[1]
redis.call('ZADD', reported, now, part)
local silent_s = is_new and 3600 or 43200
local silent = redis.call('ZRANGEBYSCORE', reported, '-inf', now - silent_s, 'LIMIT', 0, at_once)
if #silent > 0 then
  redis.call('HDEL', progress, unpack(silent))
  redis.call('ZREM', reported, unpack(silent))
end
if not is_new or redis.call('HLEN', progress) <= many then return end
if redis.call('HLEN', progress) > redis.call('ZCARD', reported) then
  redis.call('DEL', progress)  -- some are of no known time; the living write again within a second
  redis.call('HSET', progress, part, packed)
end
""")


def report(keys: Keys, part: str, packed: bytes) -> Call:
    return Call(_REPORT, (keys.progress, keys.reported), (part, packed))


_WITHDRAW = Script("""
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
""")


def withdraw(keys: Keys, part: str) -> Call:
    """Remove the report of a process that ended in order; one that was killed remains visible."""
    return Call(_WITHDRAW, (keys.progress, keys.reported), (part,))
