"""The scripts of operators. What one changes, it notes in the journal in the same step; what changes nothing is silent,
so that saying something twice is saying it once."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.transport.keys import LONGEST_EVENTS, Keys
from streamrl.transport.scripts.call import Call, Script
from streamrl.transport.types import Control
from streamrl.wire.ticket import PURPOSES

_BURY = Script("""
local uid = redis.call('HGET', KEYS[1], 'uid')
redis.call('DEL', unpack(KEYS, 3))
if not uid then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], uid, 'PX', ARGV[1])
return 1
""")


def bury(keys: Keys, *, tombstone_ms: int) -> Call:
    """The tombstone takes the place of meta and streams in one step: nothing of the run is accepted after it."""
    streams = [key for purpose in PURPOSES for key in (keys.tickets(purpose), keys.groups(purpose))]
    return Call(_BURY, (keys.meta, keys.tombstone, keys.lease, keys.control, *streams), (tombstone_ms,))


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


_SET_CONTROL = Script(
    _NOTE
    + """
if (redis.call('HGET', KEYS[1], 'mode') or 'run') == ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'mode', ARGV[1])
note('control', {mode = ARGV[1]})
return 1
"""
)


def set_control(keys: Keys, mode: Control, *, by: str, now: float) -> Call:
    """1: the word has changed."""
    return Call(_SET_CONTROL, (keys.meta, keys.events, keys.control), (now, by, mode))


# A letter is taken by its entry id only if the entry is still about that ticket.
_REQUEST_RETRIES = Script(
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


def request_retries(keys: Keys, letters: Sequence[tuple[int, str]], *, by: str, now: float) -> Call:
    """Ask the learner for new tickets in the place of these dead ones, given by number and letter; how many requests
    are new."""
    flat = [part for letter in letters for part in letter]
    return Call(_REQUEST_RETRIES, (keys.meta, keys.events, keys.dead, keys.retry_requests), (now, by, *flat))


_PURGE = Script(
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


def purge(keys: Keys, letters: Sequence[tuple[int, str]], *, by: str, now: float) -> Call:
    """Throw these letters away, and the requests to repeat their tickets; how many were there."""
    flat = [part for letter in letters for part in letter]
    return Call(_PURGE, (keys.meta, keys.events, keys.dead, keys.retry_requests), (now, by, *flat))
