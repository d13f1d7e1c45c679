"""The scripts of becoming, staying and ceasing to be the learner; what they answer stands in `scripts.fence`.

The first two come before there is anything to be fenced by. A lease is deleted before it is set: a full server takes
the next write only after one like this, and to keep the learner is the way to have it free memory.
"""

from __future__ import annotations

from streamrl.protocol.transport.script import Script, fenced

# OK, or HELD by another holder.
TAKE_LEASE = Script("""
local current = redis.call('GET', KEYS[1])
if current and current ~= ARGV[1] and ARGV[3] ~= '1' then return {'HELD', current} end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'OK'}
""")

# From here on this term learns the run: OK, HELD by another holder, TAKEN by another run's uid, FENCED, GONE. Only a
# takeover begins a removed run anew.
#
# A term is durable before it is claimed here, and cuts off what older ones still write. So it wins over an older one
# that Redis knows, whoever holds the lease: after a fail-over that may be a learner which was replaced.
CLAIM = Script("""
local meta, tombstone, lease = unpack(KEYS)
local uid, term, holder, lease_ms, takeover, config, fingerprint, now = unpack(ARGV)
local buried = redis.call('GET', tombstone) == uid
if buried and takeover ~= '1' then return {'GONE'} end
local known = redis.call('HMGET', meta, 'uid', 'term', 'state')
if known[1] and known[1] ~= uid then return {'TAKEN', known[1], known[3]} end
if tonumber(known[2] or 0) > tonumber(term) then return {'FENCED'} end
local current = redis.call('GET', lease)
local is_newer = known[2] and tonumber(known[2]) < tonumber(term)
if current and current ~= holder and not is_newer then return {'HELD', current} end
if buried then redis.call('DEL', tombstone) end
redis.call('DEL', lease)
redis.call('SET', lease, holder, 'PX', lease_ms)
redis.call('HSET', meta, 'uid', uid, 'term', term, 'state', 'running', 'config', config, 'fingerprint', fingerprint)
redis.call('HSETNX', meta, 'created_at', now)
return {'OK'}
""")

# Past the fence the lease is ours, or has run out and nobody took it.
RENEW = fenced("""
redis.call('DEL', lease)
redis.call('SET', lease, holder, 'PX', ARGV[1])
return {'OK'}
""")

# A word that ends a run is not for the learner that begins after it; a pause is for whoever comes.
FORGET_END = fenced("""
local word = redis.call('HGET', KEYS[1], 'mode')
if word == 'drain' or word == 'stop' then redis.call('DEL', KEYS[1]) end
return {'OK'}
""")

# The operator's word ends with the learner that obeyed it: a stopped run can be resumed.
RELEASE = fenced("""
redis.call('DEL', lease, KEYS[1])
redis.call('HSET', meta, 'state', ARGV[1])
return {'OK'}
""")
