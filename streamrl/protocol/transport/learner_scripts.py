"""The learner's scripts: tickets, groups, weights, and the lease.

The methods of `LearnerStream` document each. All pass the fence and reply as `script` describes, except NUMBERS, which
only reads, and TAKE_LEASE, FREE_LEASE and CLAIM, which run before there is a claim to fence.

A lease is deleted before it is set: a full server accepts a write only after a delete in the same script, and only a
learner that keeps its lease can free memory.
"""

from __future__ import annotations

from streamrl.protocol.transport.script import Script, fenced

# Creates all streams, removes consumers of workers that left long ago, and makes every future group's id larger than
# the cursor. Otherwise, after a failover to a server with a slower clock or to an empty one, new groups would not be
# read.
RESTORE = fenced("""
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
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
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

# Tickets as number, identity, body, and the number of the dead ticket that it retries, or empty. Once per token:
# neither number nor identity shows whether a ticket was issued already, since a failed one is issued again under its
# own.
#
# A retry deletes the request for it and the dead ticket's letter in the same step: so one ticket fulfills a request,
# and after a crash the ticket's presence implies the record of what it retries.
#
# It also advances the counter that COUNT_ISSUED has written.
ISSUE = fenced("""
local tickets, appends, counters, dead, requests, retried = unpack(KEYS)
local group, token, purpose = unpack(ARGV, 1, 3)
if redis.call('HGET', appends, tickets) == token then return {'OK'} end
if redis.pcall('XPENDING', tickets, group).err then
  redis.call('XGROUP', 'CREATE', tickets, group, '0', 'MKSTREAM')
end
local issued = tonumber(redis.call('HGET', meta, 'issued'))
local function note_retry(number, repeats)
  local letter = redis.call('HGET', requests, repeats)
  if letter then
    redis.call('XDEL', dead, letter)
    redis.call('HDEL', requests, repeats)
  end
  redis.call('HSET', retried, number, repeats)
end
local plain = {}
for i = 4, #ARGV, 4 do
  local number, identity, body, repeats = unpack(ARGV, i, i + 3)
  redis.call('XADD', tickets, '*', 'n', number, 'u', uid, 'd', identity, 'b', body)
  issued = issued and math.max(issued, number + 1)
  if repeats == '' then plain[#plain + 1] = number elseif purpose == 'train' then note_retry(number, repeats) end
end
-- Another lineage's number may have been a retry.
if purpose == 'train' and #plain > 0 then redis.call('HDEL', retried, unpack(plain)) end
if issued and purpose == 'train' then redis.call('HSET', meta, 'issued', issued) end
redis.call('HSET', appends, tickets, token)
redis.call('HINCRBY', counters, 'issued', (#ARGV - 3) / 4)
return {'OK'}
""")

COUNT_ISSUED = fenced("""
if redis.call('HGET', meta, 'issued') == ARGV[1] then return {'OK'} end
redis.call('HDEL', meta, 'issued')  -- a full server takes the next write only after one like this
redis.call('HSET', meta, 'issued', ARGV[1])
return {'OK'}
""")

# One page of tickets, groups or dead letters without their bodies: [id of its last entry, [[id, ticket number,
# identity, id of the ticket's entry, bytes], ...]]. The number is empty if the entry is not of this run.
NUMBERS = Script("""
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
local found = {}
for _, entry in ipairs(entries) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local is_ours = fields.u == ARGV[1] and (fields.p or 'train') == 'train'
  local number = is_ours and fields.n or ''
  found[#found + 1] = {entry[1], number, fields.d or '', fields.t or '', #(fields.h or '') + #(fields.b or '')}
end
return {#entries > 0 and entries[#entries][1], found}
""")

# Letters as number, identity, body, error and time, once per token. A retry request from before the letter was lost and
# written again now refers to the new letter. The first argument after the token lets a full server accept them.
PUT_LETTERS = fenced("""
local appends, dead, requests, purged = unpack(KEYS)
local token, takes_room = unpack(ARGV, 1, 2)
if redis.call('HGET', appends, dead) == token then return {'OK'} end
if takes_room == '1' then redis.call('XDEL', dead, '0-1') end  -- a full server takes the next write only after this
for i = 3, #ARGV, 5 do
  local number, identity, body, error, at = unpack(ARGV, i, i + 4)
  local id = redis.call('XADD', dead, '*', 'p', 'train', 'n', number, 'u', uid, 'd', identity, 'b', body,
    'error', error, 'at', at)
  if redis.call('HGET', requests, number) then redis.call('HSET', requests, number, id) end
  redis.call('SREM', purged, number)
end
redis.call('HSET', appends, dead, token)
return {'OK'}
""")

# The number of entry ids, the ids, and then the tickets whose retry requests are obsolete.
REMOVE_LETTERS = fenced("""
local dead, requests = unpack(KEYS)
local num_ids = tonumber(table.remove(ARGV, 1))
for i, word in ipairs(ARGV) do
  if i <= num_ids then redis.call('XDEL', dead, word) else redis.call('HDEL', requests, word) end
end
return {'OK'}
""")

# Copies what the checkpoint records, and deletes the groups that it no longer needs.
COMMIT = fenced("""
local step, cursor, trim_below = unpack(ARGV, 1, 3)
redis.call('XTRIM', KEYS[1], 'MINID', '=', trim_below)
for i = 4, #ARGV do redis.call('XDEL', KEYS[1], ARGV[i]) end
redis.call('HSET', meta, 'step', step, 'cursor', cursor)
return {'OK'}
""")

TRIM = fenced("""
redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1])
return {'OK'}
""")

# Acknowledged too: a deleted entry that is still pending would be returned as nil for ever.
DELETE_TICKETS = fenced("""
redis.pcall('XACK', KEYS[1], unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
return {'OK'}
""")

# Appends one entry to each stream, trimmed to about its given length, once per token and slot.
APPEND = fenced("""
local appends = table.remove(KEYS, 1)
local slot = table.remove(ARGV, 1)
local token = table.remove(ARGV, 1)
if redis.call('HGET', appends, slot) == token then return {'OK'} end
redis.call('HDEL', appends, slot)  -- a full server takes the next writes only after one like this
for i, stream in ipairs(KEYS) do
  redis.call('XADD', stream, 'MAXLEN', '~', ARGV[i], '*', unpack(ARGV, #KEYS + 1))
end
redis.call('HSET', appends, slot, token)
return {'OK'}
""")

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

# STALE unless the version increases. The same version and manifest again is a retried call. Workers that wait for a
# version beyond an older one wake when all of it is written, because the server serves no one before a script ends.
ANNOUNCE = fenced(
    _WRITE_MANIFEST
    + """
local manifests, weights, announced = unpack(KEYS)
local version, base, step, now, manifest = unpack(ARGV, 1, 5)
local latest = redis.call('HGET', weights, 'latest') or '0'
if latest == version and redis.call('HGET', manifests, version) == manifest then return {'OK'} end
if tonumber(version) <= tonumber(latest) then return {'STALE', latest} end
write_manifest(manifests, version, manifest, 6)
redis.call('XADD', announced, 'MAXLEN', 1, version .. '-0', 'u', uid)
local published = tonumber(redis.call('HGET', weights, 'published') or '0') + 1
redis.call('HSET', weights, 'latest', version, 'base', base, 'step', step, 'at', now, 'published', published)
return {'OK'}
"""
)

# Replaces the manifest of an announced version; UNKNOWN when Redis has lost it.
AMEND = fenced(
    _WRITE_MANIFEST
    + """
local version, manifest = unpack(ARGV, 1, 2)
if not redis.call('HGET', KEYS[1], version) then return {'UNKNOWN'} end
write_manifest(KEYS[1], version, manifest, 3)
return {'OK'}
"""
)

# A drain or stop carries its time by the server's clock. It applies to every learner that had begun by then: the
# learner passes its age, so no other clock matters. Once obeyed, the time is kept beside the run's state.
_ORDERS = """
local function is_end(word) return word == 'drain' or word == 'stop' end
local function ended_since(meta, control, age_ms)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + time[2] / 1000
  local function at(key)
    local order = tonumber(redis.call('HGET', key, 'end_at') or 0) or 0
    return order <= now and order or 0 -- one of the future is older than a clock that was set back
  end
  return math.max(at(meta), at(control)) > now - age_ms
end
local function take_word_away(meta, control)
  local at = redis.call('HGET', control, 'end_at')
  redis.call('DEL', control)
  if at then redis.call('HSET', meta, 'end_at', at) end
end
"""

# OK, TAKEN by another run's uid, HELD by another holder, or ENDED: learners of this age were told to end. The learner
# that holds the run obeys in order; if none is left to obey, the next learner that comes obeys in its place.
TAKE_LEASE = Script(
    _ORDERS
    + """
local lease, meta, control = unpack(KEYS)
local uid, holder, lease_ms, takeover, age_ms = unpack(ARGV)
local known = redis.call('HMGET', meta, 'uid', 'state')
if known[1] and known[1] ~= uid then return {'TAKEN', known[1], known[2] or ''} end
local current = redis.call('GET', lease)
local is_obeyed = current or not is_end(redis.call('HGET', control, 'mode'))
if current ~= holder and is_obeyed and ended_since(meta, control, age_ms) then return {'ENDED'} end
if current and current ~= holder and takeover ~= '1' then return {'HELD', current} end
redis.call('DEL', lease)
redis.call('SET', lease, holder, 'PX', lease_ms)
return {'OK'}
"""
)

# Gives back the lease of a learner that was not admitted.
FREE_LEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
""")

# Makes this term the run's learner: OK, HELD by another holder, TAKEN by another run's uid, FENCED, GONE. Only a
# takeover starts a removed run again.
#
# A term is durable before it is claimed here, and cuts off what older ones still write. So it wins over an older one in
# Redis, whoever holds the lease: after a failover that may be a learner that was replaced.
CLAIM = Script("""
local meta, tombstone, lease = unpack(KEYS)
local uid, term, holder, lease_ms, takeover, config, fingerprint, schema, now = unpack(ARGV)
local buried = redis.call('GET', tombstone) == uid
if buried and takeover ~= '1' then return {'GONE'} end
local known = redis.call('HMGET', meta, 'uid', 'term', 'state')
if known[1] and known[1] ~= uid then return {'TAKEN', known[1], known[3] or ''} end
if tonumber(known[2] or 0) > tonumber(term) then return {'FENCED'} end
local current = redis.call('GET', lease)
local is_newer = known[2] and tonumber(known[2]) < tonumber(term)
if current and current ~= holder and not is_newer then return {'HELD', current} end
if buried then redis.call('DEL', tombstone) end
redis.call('DEL', lease)
redis.call('SET', lease, holder, 'PX', lease_ms)
redis.call('HSET', meta, 'uid', uid, 'term', term, 'state', 'running', 'config', config, 'fingerprint', fingerprint,
  'schema', schema)
redis.call('HSETNX', meta, 'created_at', now)
return {'OK'}
""")

# Past the fence the lease is ours, or has expired and nobody took it; or we have released it, and a renewal that was
# under way must not take it again.
RENEW = fenced("""
if redis.call('HGET', meta, 'state') ~= 'running' then return {'OK'} end
redis.call('DEL', lease)
redis.call('SET', lease, holder, 'PX', ARGV[1])
return {'OK'}
""")

# Clears a drain or stop that predates this learner; a pause applies to any learner. Returns the cleared command, if
# any.
FORGET_END = fenced(
    _ORDERS
    + """
local control, age_ms = KEYS[1], ARGV[1]
local word = redis.call('HGET', control, 'mode')
if not is_end(word) or ended_since(meta, control, age_ms) then return {'OK'} end
take_word_away(meta, control)
return {'OK', word}
"""
)

# Clears a drain or stop once obeyed, so that a stopped run can be resumed; a pause applies to any learner.
RELEASE = fenced(
    _ORDERS
    + """
redis.call('DEL', lease)
if is_end(redis.call('HGET', KEYS[1], 'mode')) then take_word_away(meta, KEYS[1]) end
redis.call('HSET', meta, 'state', ARGV[1])
return {'OK'}
"""
)
