"""The scripts of operators."""

from __future__ import annotations

from streamrl.transport.keys import Keys
from streamrl.transport.scripts.call import Call, Script
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
