"""The learner's scripts on the streams: tickets out, groups in, weights announced. All but `numbers`, which only reads,
pass the fence and answer as `scripts.fence` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamrl.transport.keys import WORKERS, Keys
from streamrl.transport.scripts.call import Argument, Call, Script
from streamrl.transport.scripts.fence import Fence, call, fenced
from streamrl.transport.types import Announcement
from streamrl.wire.ticket import Purpose

_RESTORE = fenced("""
local group = ARGV[1]
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function last_id(stream)
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end
for i = 1, 2 do
  if redis.pcall('XPENDING', KEYS[i], group).err then
    redis.call('XGROUP', 'CREATE', KEYS[i], group, '0', 'MKSTREAM')
  end
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], group)) do
    local name, pending, idle_ms = consumer[2], consumer[4], consumer[6]
    if pending == 0 and idle_ms > 3600000 then redis.call('XGROUP', 'DELCONSUMER', KEYS[i], group, name) end
  end
end
for i = 4, #ARGV, 2 do
  redis.call('HDEL', KEYS[5], ARGV[i])  -- a full server takes the next write only after one like this
  redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1])
end
for i = 3, 4 do
  local stream, cursor = KEYS[i], ARGV[i - 1]
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, 'maker', '0', 'MKSTREAM')
    redis.call('XGROUP', 'DESTROY', stream, 'maker')
  end
  local ms, seq = parts(last_id(stream))
  local cursor_ms, cursor_seq = parts(cursor)
  if ms < cursor_ms or (ms == cursor_ms and seq < cursor_seq) then redis.call('XSETID', stream, cursor) end
end
return {'OK'}
""")


def restore(keys: Keys, fence: Fence, *, cursor: str, eval_cursor: str, retried: Mapping[int, int]) -> Call:
    """All streams are there, without the names of workers that left long ago, and every group still to come gets an
    id beyond the cursor: after a failover to a server with a slower clock, or to an empty one, it would not, and nobody
    would read it."""
    streams = [keys.tickets("train"), keys.tickets("eval"), keys.groups("train"), keys.groups("eval")]
    pairs = [number for pair in retried.items() for number in pair]
    return call(_RESTORE, keys, fence, [*streams, keys.retried], WORKERS, cursor, eval_cursor, *pairs)


_ISSUE = fenced("""
local tickets, appends, counters, dead, requests, retried = unpack(KEYS)
local group, token, purpose = unpack(ARGV, 1, 3)
if redis.call('HGET', appends, tickets) == token then return {'OK'} end
if redis.pcall('XPENDING', tickets, group).err then
  redis.call('XGROUP', 'CREATE', tickets, group, '0', 'MKSTREAM')
end
local issued = tonumber(redis.call('HGET', meta, 'issued'))
local function note_retry(number, repeats)
  if repeats == '' then return redis.call('HDEL', retried, number) end  -- another lineage's number may have been one
  local letter = redis.call('HGET', requests, repeats)
  if letter then
    redis.call('XDEL', dead, letter)
    redis.call('HDEL', requests, repeats)
  end
  redis.call('HSET', retried, number, repeats)
end
for i = 4, #ARGV, 3 do
  redis.call('XADD', tickets, '*', 'n', ARGV[i], 'u', uid, 'b', ARGV[i + 1])
  issued = issued and math.max(issued, ARGV[i] + 1)
  if purpose == 'train' then note_retry(ARGV[i], ARGV[i + 2]) end
end
if issued and purpose == 'train' then redis.call('HSET', meta, 'issued', issued) end
redis.call('HSET', appends, tickets, token)
redis.call('HINCRBY', counters, 'issued', (#ARGV - 3) / 3)
return {'OK'}
""")


def issue(
    keys: Keys, fence: Fence, purpose: Purpose, *, token: str, tickets: Sequence[tuple[int, bytes, int | None]]
) -> Call:
    """Tickets as (number, body, the dead one that it repeats). Once per token: the number of a ticket cannot say
    whether it was issued already, for a failed one comes again under its own number.

    With a retry goes the request for it, and the letter of the dead ticket: so a request is answered by one ticket,
    and whoever learns after a crash that the ticket is there learns what it repeats.

    The counter that `count_issued` has written goes along with them.
    """
    touched = [keys.tickets(purpose), keys.appends, keys.counters, keys.dead, keys.retry_requests, keys.retried]
    parts = [part for number, body, dead in tickets for part in (number, body, "" if dead is None else dead)]
    return call(_ISSUE, keys, fence, touched, WORKERS, token, purpose, *parts)


_COUNT_ISSUED = fenced("""
if redis.call('HGET', meta, 'issued') == ARGV[1] then return {'OK'} end
redis.call('HDEL', meta, 'issued')  -- a full server takes the next write only after one like this
redis.call('HSET', meta, 'issued', ARGV[1])
return {'OK'}
""")


def count_issued(keys: Keys, fence: Fence, *, issued: int) -> Call:
    """Tell the audit the number of the next training ticket."""
    return call(_COUNT_ISSUED, keys, fence, [], issued)


_NUMBERS = Script("""
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
local found = {}
for _, entry in ipairs(entries) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local number = fields.u == ARGV[1] and fields.n or ''
  found[#found + 1] = {entry[1], number, #(fields.h or '') + #(fields.b or '')}
end
return {#entries > 0 and entries[#entries][1], found}
""")


def numbers(stream: str, run_uid: str, *, after: str, count: int) -> Call:
    """One page of the groups without their bodies: [id of its last entry, [[id, ticket number, bytes], ...]]. The
    number is empty where the entry is not of this run."""
    return Call(_NUMBERS, (stream,), (run_uid, after, count))


_COMMIT = fenced("""
local step, cursor, trim_below = unpack(ARGV, 1, 3)
redis.call('XTRIM', KEYS[1], 'MINID', '=', trim_below)
for i = 4, #ARGV do redis.call('XDEL', KEYS[1], ARGV[i]) end
redis.call('HSET', meta, 'step', step, 'cursor', cursor)
return {'OK'}
""")


def commit(keys: Keys, fence: Fence, *, step: int, cursor: str, trim_below: str, ended: Sequence[str]) -> Call:
    """A copy of what the checkpoint already says, and the end of the groups it no longer needs: those before
    `trim_below`, and the `ended` ones among those after it."""
    return call(_COMMIT, keys, fence, [keys.groups("train")], step, cursor, trim_below, *ended)


_TRIM = fenced("""
redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1])
return {'OK'}
""")


def trim_eval(keys: Keys, fence: Fence, *, below: str) -> Call:
    return call(_TRIM, keys, fence, [keys.groups("eval")], below)


_DELETE_TICKETS = fenced("""
redis.pcall('XACK', KEYS[1], unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
return {'OK'}
""")


def delete_tickets(keys: Keys, fence: Fence, purpose: Purpose, entry_ids: Sequence[str]) -> Call:
    """Acknowledged too: a deleted entry that is still pending would come back as nothing, for ever."""
    return call(_DELETE_TICKETS, keys, fence, [keys.tickets(purpose)], WORKERS, *entry_ids)


_APPEND = fenced("""
local stream, appends = unpack(KEYS)
local slot, token, longest = unpack(ARGV, 1, 3)
if redis.call('HGET', appends, slot) == token then return {'OK'} end
if longest == '0' then
  redis.call('XDEL', stream, '0-1')  -- which is not there: a full server takes the next write only after one like this
  redis.call('XADD', stream, '*', unpack(ARGV, 4))
else
  redis.call('XADD', stream, 'MAXLEN', '~', longest, '*', unpack(ARGV, 4))
end
redis.call('HSET', appends, slot, token)
return {'OK'}
""")


def append(
    keys: Keys,
    fence: Fence,
    stream: str,
    *,
    once: tuple[str, str],
    longest: int,
    fields: Sequence[tuple[str, Argument]],
) -> Call:
    """One entry, unless its slot holds its token already; `longest` bounds the stream about (0: keep all)."""
    flat = [part for pair in fields for part in pair]
    return call(_APPEND, keys, fence, [stream, keys.appends], *once, longest, *flat)


_RECORD = fenced("""
local appends = table.remove(KEYS, 1)
local token = table.remove(ARGV, 1)
if redis.call('HGET', appends, KEYS[1]) == token then return {'OK'} end
for i, stream in ipairs(KEYS) do
  redis.call('XADD', stream, 'MAXLEN', '~', ARGV[i], '*', unpack(ARGV, #KEYS + 1))
end
redis.call('HSET', appends, KEYS[1], token)
return {'OK'}
""")


def record(
    keys: Keys, fence: Fence, streams: Mapping[str, int], *, token: str, fields: Sequence[tuple[str, Argument]]
) -> Call:
    """The same entry at the end of each stream, each bounded to about as many as it says."""
    flat = [part for pair in fields for part in pair]
    return call(_RECORD, keys, fence, [keys.appends, *streams], token, *streams.values(), *flat)


_WRITE_MANIFEST = """
local function write_manifest(manifests, version, manifest, first_kept)
  local keep = {[version] = true}
  for i = first_kept, #ARGV do keep[ARGV[i]] = true end
  for _, known in ipairs(redis.call('HKEYS', manifests)) do
    if not keep[known] then redis.call('HDEL', manifests, known) end
  end
  redis.call('HDEL', manifests, version)  -- a full server takes the next write only after one like this
  redis.call('HSET', manifests, version, manifest)
end
"""

_ANNOUNCE = fenced(
    _WRITE_MANIFEST
    + """
local manifests, weights, announced = unpack(KEYS)
local version, base, step, now, manifest = unpack(ARGV, 1, 5)
local latest = redis.call('HGET', weights, 'latest') or '0'
if latest == version and redis.call('HGET', manifests, version) == manifest then return {'OK'} end
if tonumber(version) <= tonumber(latest) then return {'STALE', latest} end
write_manifest(manifests, version, manifest, 6)
redis.call('XADD', announced, 'MAXLEN', 1, version .. '-0', 'u', uid)
redis.call('HSET', weights, 'latest', version, 'base', base, 'step', step, 'at', now)
return {'OK'}
"""
)


def announce(keys: Keys, fence: Fence, announcement: Announcement, *, keep: Sequence[int], now: float) -> Call:
    """STALE unless the version grows. The same version and manifest again is the same call repeated. Workers that wait
    for a version beyond an older one wake when all of it is written, as the server serves nobody before a script's end.
    """
    a = announcement
    touched = [keys.manifests, keys.weights, keys.announced]
    return call(_ANNOUNCE, keys, fence, touched, a.version, a.base, a.step, now, a.manifest, *keep)


_AMEND = fenced(
    _WRITE_MANIFEST
    + """
local version, manifest = unpack(ARGV, 1, 2)
if not redis.call('HGET', KEYS[1], version) then return {'UNKNOWN'} end
write_manifest(KEYS[1], version, manifest, 3)
return {'OK'}
"""
)


def amend(keys: Keys, fence: Fence, announcement: Announcement, *, keep: Sequence[int]) -> Call:
    """The manifest of a version that was announced, now with more in it; UNKNOWN when Redis has lost it."""
    a = announcement
    return call(_AMEND, keys, fence, [keys.manifests], a.version, a.manifest, *keep)
