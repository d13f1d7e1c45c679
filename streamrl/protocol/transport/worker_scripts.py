"""The worker's scripts; the methods of `WorkerStream` document each. Each replies [status, ...].

OK; LOST: Redis knows no run here; GONE: the run was removed, or another took its name.

A lease is a pending entry of the consumer group `workers` whose idle time stays below `lease_ms`. A ticket handed back
is pending under a name that no worker has. The delivery count is the number of workers that got the ticket and did not
hand it back.
"""

from __future__ import annotations

from streamrl.protocol.transport.script import Script

# The text after the guard sees only its own KEYS and ARGV.
_GUARD = """
local meta, tombstone = unpack(KEYS, 1, 2)
local uid = table.remove(ARGV, 1)
for _ = 1, 2 do table.remove(KEYS, 1) end
local known = redis.call('HGET', meta, 'uid')
if known ~= uid then
  if known or redis.call('GET', tombstone) == uid then return {'GONE'} end
  return {'LOST'}
end
"""


def guarded(text: str) -> Script:
    return Script(_GUARD + text)


# The secret with which hosts of this run authenticate to each other; the first caller creates it.
SECRET = guarded("""
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return {'OK', redis.call('GET', KEYS[1])}
""")


# Leases up to `most` tickets without waiting: per stream first those whose lease expired, then new ones. With `recover`
# also all tickets that this worker already holds, some of which it may not know of because a reply was lost. Returns
# the tickets as [key of the stream, id, number, run, identity, body], and how many of them had expired.
TAKE = guarded("""
local group, worker, lease_ms, most, recover = unpack(ARGV)
most = tonumber(most)
local taken, num_reclaimed = {}, 0
local function put(key, entries)
  for _, entry in ipairs(entries or {}) do
    local id, fields = entry[1], entry[2]
    if not fields then
      redis.call('XACK', key, group, id)
    else
      local by_name = {}
      for i = 1, #fields, 2 do by_name[fields[i]] = fields[i + 1] end
      taken[#taken + 1] = {key, id, by_name.n or '', by_name.u or '', by_name.d or '', by_name.b or ''}
    end
  end
end
local function take_new(key)
  local reply = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', most - #taken, 'STREAMS', key, '>')
  put(key, reply and reply[1][2])
end
local function recall(key)
  for _, lease in ipairs(redis.call('XPENDING', key, group, '-', '+', 1000, worker)) do
    local entries = redis.call('XRANGE', key, lease[1], lease[1])
    if #entries == 0 then
      redis.call('XACK', key, group, lease[1])
    else
      redis.call('XCLAIM', key, group, worker, 0, lease[1], 'IDLE', 0, 'JUSTID')
      put(key, entries)
    end
  end
end
local function reclaim(key)
  for _, lease in ipairs(redis.call('XPENDING', key, group, 'IDLE', lease_ms, '-', '+', most - #taken)) do
    local entries = redis.call('XCLAIM', key, group, worker, lease_ms, lease[1])
    if entries[1] and entries[1][2] then
      put(key, entries)
      num_reclaimed = num_reclaimed + 1
    else
      redis.call('XACK', key, group, lease[1])  -- 6.2 keeps deleted entries pending for ever
    end
  end
end
for _, key in ipairs(KEYS) do
  if not redis.pcall('XPENDING', key, group).err then
    if recover == '1' then recall(key) end
    if #taken < most then reclaim(key) end
    if #taken < most then take_new(key) end
  end
end
return {'OK', taken, num_reclaimed}
""")

# Restarts the leases without raising delivery counts; returns the [stream, id] no longer ours. Only entries pending
# under our name are touched, so a worker that claimed one meanwhile keeps it.
RENEW = guarded("""
local group, worker = unpack(ARGV, 1, 2)
local lost = {}
for i = 3, #ARGV, 2 do
  local stream, id = tonumber(ARGV[i]), ARGV[i + 1]
  local key = KEYS[stream]
  local pending = redis.pcall('XPENDING', key, group, id, id, 1, worker)
  if pending.err or #pending == 0 then
    lost[#lost + 1] = {stream, id}
  else
    redis.call('XCLAIM', key, group, worker, 0, id, 'IDLE', 0, 'JUSTID')
  end
end
return {'OK', lost}
""")

# This worker's delivery does not count.
_HAND_BACK = """
local group, worker, nobody, idle_ms = unpack(ARGV, 1, 4)
local function hand_back(key, lease)
  local count = math.max(0, lease[4] - 1)
  redis.call('XCLAIM', key, group, nobody, 0, lease[1], 'IDLE', idle_ms, 'RETRYCOUNT', count, 'JUSTID')
end
"""

# Returns those that are still pending under our name.
HAND_BACK = guarded(
    _HAND_BACK
    + """
for i = 5, #ARGV, 2 do
  local key, id = KEYS[tonumber(ARGV[i])], ARGV[i + 1]
  local pending = redis.pcall('XPENDING', key, group, id, id, 1, worker)
  if not pending.err and #pending > 0 then hand_back(key, pending[1]) end
end
return {'OK'}
"""
)

# Counts what the run's workers have spent of something; returns the total.
SPEND = guarded("return {'OK', redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])}")

# Hands back everything pending under this name, known to the worker or not, and deletes the consumer.
LEAVE = guarded(
    _HAND_BACK
    + """
for _, key in ipairs(KEYS) do
  local pending = redis.pcall('XPENDING', key, group, '-', '+', 10000, worker)
  if not pending.err then
    for _, lease in ipairs(pending) do hand_back(key, lease) end
    if #pending < 10000 then redis.call('XGROUP', 'DELCONSUMER', key, group, worker) end
  end
end
return {'OK'}
"""
)

# Replaces each ticket by its group, passed as header and body, if the ticket is still there and leased by this worker:
# the same entry, number, run and identity, pending under the worker's name. A server that lost its latest writes may
# assign an entry id again, so the id alone proves nothing. A worker whose lease expired and went to another is refused,
# since only the holder of a lease ends its ticket. The group's entry names the ticket's: so the learner sees that this
# script wrote it. Returns a string with a 1 or a 0 for each.
#
# The receipt makes the call safe to retry: when the reply was lost, the second call with this token finds the tickets
# gone and its own receipt instead. So a lane must not begin its next call while it may retry this one.
#
# If anything is delivered, XACK is the first write: so the script succeeds even at maxmemory.
DELIVER = guarded("""
local receipt, counters = unpack(KEYS, 1, 2)
local group, worker, token, receipt_ms = unpack(ARGV, 1, 4)
local known = redis.call('GET', receipt)
if known and string.sub(known, 1, #token) == token then return {'OK', string.sub(known, #token + 1)} end
local taken = {}
local function outcome_of(tickets, id, number, identity)
  local entry = redis.call('XRANGE', tickets, id, id)[1]
  if not entry or taken[tickets .. id] then return 'duplicates' end
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if fields.n ~= number or fields.u ~= uid or fields.d ~= identity then return 'duplicates' end
  local pending = redis.pcall('XPENDING', tickets, group, id, id, 1, worker)
  if pending.err or #pending == 0 then return 'refused' end
  taken[tickets .. id] = true
  return 'delivered'
end
local outcomes, counts, ended = {}, {}, {}
for i = 5, #ARGV, 6 do
  local purpose, id, number, identity = unpack(ARGV, i, i + 3)
  local tickets = KEYS[purpose == 'eval' and 3 or 5]
  local outcome = outcome_of(tickets, id, number, identity)
  if outcome == 'delivered' then
    ended[tickets] = ended[tickets] or {}
    table.insert(ended[tickets], id)
  end
  outcomes[#outcomes + 1] = outcome == 'delivered' and '1' or '0'
  local counted = outcome .. ':' .. purpose
  counts[counted] = (counts[counted] or 0) + 1
end
for tickets, ids in pairs(ended) do
  redis.call('XACK', tickets, group, unpack(ids))
  redis.call('XDEL', tickets, unpack(ids))
end
for at, outcome in ipairs(outcomes) do
  if outcome == '1' then
    local purpose, id, number, identity, header, body = unpack(ARGV, 6 * at - 1, 6 * at + 4)
    local groups = KEYS[purpose == 'eval' and 4 or 6]
    redis.call('XADD', groups, '*', 'n', number, 'u', uid, 'd', identity, 't', id, 'h', header, 'b', body)
  end
end
for counted, count in pairs(counts) do redis.pcall('HINCRBY', counters, counted, count) end
local all = table.concat(outcomes)
-- Where nothing was delivered, repeating the call finds nothing to deliver either.
if string.find(all, '1', 1, true) then redis.call('SET', receipt, token .. all, 'PX', receipt_ms) end
return {'OK', all}
""")

# The newest announcement; of a version already known only its number, for manifests may be large.
LATEST = guarded("""
local weights, manifests = unpack(KEYS)
local version, base, step = unpack(redis.call('HMGET', weights, 'latest', 'base', 'step'))
if not version then return {'OK'} end
if version == ARGV[1] then return {'OK', version} end
local manifest = redis.call('HGET', manifests, version)
if not manifest then return {'OK'} end
return {'OK', version, base, step, manifest}
""")
