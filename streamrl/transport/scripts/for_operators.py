"""The scripts of operators. What one changes, it notes in the journal in the same step; what changes nothing is silent,
so that saying something twice is saying it once."""

from __future__ import annotations

from streamrl.transport.keys import LONGEST_EVENTS
from streamrl.transport.scripts.call import Script

# The tombstone takes the place of meta and streams in one step: nothing of the run is accepted after it.
BURY = Script("""
local uid = redis.call('HGET', KEYS[1], 'uid')
redis.call('DEL', unpack(KEYS, 3))
if not uid then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], uid, 'PX', ARGV[1])
return 1
""")

# KEYS begin with meta and events, ARGV with the time and the name of who speaks. What follows sees its own only.
_NOTE = f"""
local meta, events = unpack(KEYS, 1, 2)
local now, by = unpack(ARGV, 1, 2)
for _ = 1, 2 do table.remove(KEYS, 1) table.remove(ARGV, 1) end
local function note(kind, detail)
  detail.by = by
  redis.call('XADD', events, 'MAXLEN', '~', {LONGEST_EVENTS}, '*', 'kind', kind, 'detail', cjson.encode(detail),
    'epoch', redis.call('HGET', meta, 'epoch') or 0, 'at', now)
end
"""

# 1: the word has changed.
SET_CONTROL = Script(
    _NOTE
    + """
if (redis.call('HGET', KEYS[1], 'mode') or 'run') == ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'mode', ARGV[1])
note('control', {mode = ARGV[1]})
return 1
"""
)

# Letters as number and entry id; how many requests are new. A letter is taken by its entry id only if the entry is
# still about that ticket.
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

# Letters as number and entry id, and the requests to repeat their tickets; how many letters were there.
PURGE = Script(
    _NOTE
    + """
local dead, requests = unpack(KEYS)
local removed = {}
for i = 1, #ARGV, 2 do
  local number, id = ARGV[i], ARGV[i + 1]
  if redis.call('XDEL', dead, id) == 1 then removed[#removed + 1] = number end
  if redis.call('HGET', requests, number) == id then redis.call('HDEL', requests, number) end
end
if #removed > 0 then note('dead_purge', {tickets = table.concat(removed, ' ')}) end
return #removed
"""
)
