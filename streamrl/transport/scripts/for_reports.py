"""The scripts of reports. They pass no fence: a monitor must see a zombie too."""

from __future__ import annotations

from streamrl.transport.keys import Keys
from streamrl.transport.scripts.call import Call, Script

_MANY_PARTS = 1000
_SILENT_S = 3600
_FORGOTTEN_A_CALL = 1000  # Lua's stack ends at some thousands of arguments

# Parts come and go under new names, and one that was killed stays to be seen. Where there are many, a new one clears
# away those that have long been silent. The report comes first: users of Redis may not be allowed the rest yet.
_REPORT = Script("""
local progress, reported = unpack(KEYS)
local part, packed, many, silent_s, at_once = unpack(ARGV)
local is_new = redis.call('HSET', progress, part, packed) == 1
local now = redis.call('TIME')[1]
redis.call('ZADD', reported, now, part)
if not is_new or redis.call('HLEN', progress) <= tonumber(many) then return end
local silent = redis.call('ZRANGEBYSCORE', reported, '-inf', now - silent_s, 'LIMIT', 0, at_once)
if #silent > 0 then
  redis.call('HDEL', progress, unpack(silent))
  redis.call('ZREM', reported, unpack(silent))
end
if redis.call('HLEN', progress) > redis.call('ZCARD', reported) then
  redis.call('DEL', progress)  -- some are of no known time; the living write again within a second
  redis.call('HSET', progress, part, packed)
end
""")


def report(keys: Keys, part: str, packed: bytes) -> Call:
    return Call(_REPORT, (keys.progress, keys.reported), (part, packed, _MANY_PARTS, _SILENT_S, _FORGOTTEN_A_CALL))


_WITHDRAW = Script("""
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
""")


def withdraw(keys: Keys, part: str) -> Call:
    """The part ended in order; one that was killed stays to be seen."""
    return Call(_WITHDRAW, (keys.progress, keys.reported), (part,))
