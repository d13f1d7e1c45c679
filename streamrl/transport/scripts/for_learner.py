"""The learner's scripts. Each but `claim` begins with the fence and answers [status, ...].

OK; FENCED: another learner is there; LOST: Redis knows of no claim of ours: it was emptied, went back in time, or the
run was removed, and claiming again tells which; GONE: another run has the name, or the tombstone is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.transport.keys import WORKERS, Keys
from streamrl.transport.scripts.call import Argument, Call, Script
from streamrl.transport.types import Announcement, RunState
from streamrl.wire.ticket import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What every learner script carries: who it is, of which run, and since which epoch."""

    run_uid: str
    epoch: int
    holder: str


def _fenced(text: str) -> Script:
    return Script(_FENCE + text)


def _call(script: Script, keys: Keys, fence: Fence, more_keys: Sequence[str], *args: Argument) -> Call:
    carried = (fence.run_uid, fence.epoch, fence.holder)
    return Call(script, (keys.meta, keys.lease, *more_keys), (*carried, *args))


# The epoch tells two lives of one holder apart; the lease refuses a stalled learner from the moment that another has
# it, which is before that one's epoch is known here. Epochs and versions stay far below 2^53, where Lua's numbers end
# to be exact. What follows the fence sees its own KEYS and ARGV only.
_FENCE = """
local meta, lease = unpack(KEYS, 1, 2)
local uid, epoch, holder = unpack(ARGV, 1, 3)
for _ = 1, 2 do table.remove(KEYS, 1) end
for _ = 1, 3 do table.remove(ARGV, 1) end
local function fence()
  local known = redis.call('HMGET', meta, 'uid', 'epoch')
  if not known[1] then return 'LOST' end
  if known[1] ~= uid then return 'GONE' end
  local current = redis.call('GET', lease)
  if tonumber(known[2] or 0) > tonumber(epoch) or (current and current ~= holder) then return 'FENCED' end
  if tonumber(known[2] or 0) < tonumber(epoch) then return 'LOST' end
end
local refused = fence()
if refused then return {refused} end
"""

_TAKE_LEASE = Script("""
local current = redis.call('GET', KEYS[1])
if current and current ~= ARGV[1] and ARGV[3] ~= '1' then return {'HELD', current} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'OK'}
""")


def take_lease(keys: Keys, *, holder: str, lease_ms: int, takeover: bool) -> Call:
    """OK, or HELD by another holder."""
    return Call(_TAKE_LEASE, (keys.lease,), (holder, lease_ms, int(takeover)))


_CLAIM = Script("""
local meta, tombstone, lease = unpack(KEYS)
local uid, epoch, holder, lease_ms, takeover, config, fingerprint, now = unpack(ARGV)
local buried = redis.call('GET', tombstone) == uid
if buried and takeover ~= '1' then return {'GONE'} end
local known = redis.call('HMGET', meta, 'uid', 'epoch', 'state')
if known[1] and known[1] ~= uid then return {'TAKEN', known[1], known[3]} end
if tonumber(known[2] or 0) > tonumber(epoch) then return {'FENCED'} end
local current = redis.call('GET', lease)
if current and current ~= holder then return {'HELD', current} end
if buried then redis.call('DEL', tombstone) end
redis.call('SET', lease, holder, 'PX', lease_ms)
redis.call('HSET', meta, 'uid', uid, 'epoch', epoch, 'state', 'running', 'config', config, 'fingerprint', fingerprint)
redis.call('HSETNX', meta, 'created_at', now)
redis.call('HDEL', meta, 'issued')  -- another lineage's counter may be ahead of ours
return {'OK'}
""")


def claim(
    keys: Keys, fence: Fence, *, lease_ms: int, takeover: bool, config_json: str, fingerprint: str, now: float
) -> Call:
    """From here on this epoch learns the run: OK, HELD by another holder, TAKEN by another run's uid, FENCED, GONE.
    Only a takeover begins a removed run anew."""
    who = (fence.run_uid, fence.epoch, fence.holder)
    what = (lease_ms, int(takeover), config_json, fingerprint, now)
    return Call(_CLAIM, (keys.meta, keys.tombstone, keys.lease), (*who, *what))


_RENEW = _fenced("""
redis.call('SET', lease, holder, 'PX', ARGV[1])
return {'OK'}
""")


def renew(keys: Keys, fence: Fence, *, lease_ms: int) -> Call:
    """Past the fence the lease is ours, or has run out and nobody took it."""
    return _call(_RENEW, keys, fence, [], lease_ms)


_RELEASE = _fenced("""
redis.call('DEL', lease, KEYS[1])
redis.call('HSET', meta, 'state', ARGV[1])
return {'OK'}
""")


def release(keys: Keys, fence: Fence, *, state: RunState) -> Call:
    """The operator's word ends with the learner that obeyed it: a stopped run can be resumed."""
    return _call(_RELEASE, keys, fence, [keys.control], state)


_RESTORE = _fenced("""
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
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
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
    return _call(_RESTORE, keys, fence, [*streams, keys.retried], WORKERS, cursor, eval_cursor, *pairs)


_ISSUE = _fenced("""
local tickets, appends, counters, dead, requests, retried = unpack(KEYS)
local group, token, purpose = unpack(ARGV, 1, 3)
if redis.call('HGET', appends, tickets) == token then return {'OK'} end
if redis.pcall('XPENDING', tickets, group).err then
  redis.call('XGROUP', 'CREATE', tickets, group, '0', 'MKSTREAM')
end
local issued = tonumber(redis.call('HGET', meta, 'issued') or 0)
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
  issued = math.max(issued, ARGV[i] + 1)
  if purpose == 'train' then note_retry(ARGV[i], ARGV[i + 2]) end
end
if purpose == 'train' then redis.call('HSET', meta, 'issued', issued) end
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
    """
    touched = [keys.tickets(purpose), keys.appends, keys.counters, keys.dead, keys.retry_requests, keys.retried]
    parts = [part for number, body, dead in tickets for part in (number, body, "" if dead is None else dead)]
    return _call(_ISSUE, keys, fence, touched, WORKERS, token, purpose, *parts)


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


_COMMIT = _fenced("""
local step, cursor, trim_below = unpack(ARGV, 1, 3)
redis.call('XTRIM', KEYS[1], 'MINID', '=', trim_below)
for i = 4, #ARGV do redis.call('XDEL', KEYS[1], ARGV[i]) end
redis.call('HSET', meta, 'step', step, 'cursor', cursor)
return {'OK'}
""")


def commit(keys: Keys, fence: Fence, *, step: int, cursor: str, trim_below: str, ended: Sequence[str]) -> Call:
    """A copy of what the checkpoint already says, and the end of the groups it no longer needs: those before
    `trim_below`, and the `ended` ones among those after it."""
    return _call(_COMMIT, keys, fence, [keys.groups("train")], step, cursor, trim_below, *ended)


_TRIM = _fenced("""
redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1])
return {'OK'}
""")


def trim_eval(keys: Keys, fence: Fence, *, below: str) -> Call:
    return _call(_TRIM, keys, fence, [keys.groups("eval")], below)


_DELETE_TICKETS = _fenced("""
redis.pcall('XACK', KEYS[1], unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
return {'OK'}
""")


def delete_tickets(keys: Keys, fence: Fence, purpose: Purpose, entry_ids: Sequence[str]) -> Call:
    """Acknowledged too: a deleted entry that is still pending would come back as nothing, for ever."""
    return _call(_DELETE_TICKETS, keys, fence, [keys.tickets(purpose)], WORKERS, *entry_ids)


_APPEND = _fenced("""
local stream, appends = unpack(KEYS)
local slot, token, longest = unpack(ARGV, 1, 3)
if redis.call('HGET', appends, slot) == token then return {'OK'} end
if longest == '0' then
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
    return _call(_APPEND, keys, fence, [stream, keys.appends], *once, longest, *flat)


_ANNOUNCE = _fenced("""
local manifests, weights = unpack(KEYS)
local version, base, step, now, manifest = unpack(ARGV, 1, 5)
local latest = redis.call('HGET', weights, 'latest') or '0'
if latest == version and redis.call('HGET', manifests, version) == manifest then return {'OK'} end
if tonumber(version) <= tonumber(latest) then return {'STALE', latest} end
local keep = {[version] = true}
for i = 6, #ARGV do keep[ARGV[i]] = true end
for _, known in ipairs(redis.call('HKEYS', manifests)) do
  if not keep[known] then redis.call('HDEL', manifests, known) end
end
redis.call('HDEL', manifests, version)  -- not there; but a full server takes the next write only after one like this
redis.call('HSET', manifests, version, manifest)
redis.call('HSET', weights, 'latest', version, 'base', base, 'step', step, 'at', now)
return {'OK'}
""")


def announce(keys: Keys, fence: Fence, announcement: Announcement, *, keep: Sequence[int], now: float) -> Call:
    """STALE unless the version grows. The same version and manifest again is the same call repeated."""
    a = announcement
    return _call(
        _ANNOUNCE, keys, fence, [keys.manifests, keys.weights], a.version, a.base, a.step, now, a.manifest, *keep
    )
