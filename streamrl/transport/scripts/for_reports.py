"""The scripts of reports. They pass no fence: a monitor must see a zombie too."""

from __future__ import annotations

from streamrl.transport.keys import Keys
from streamrl.transport.scripts.call import Call, Script

_MOST_PARTS = 1000

# Parts come and go under new names. The living write again within a second, so clearing forgets only the dead.
_REPORT = Script("""
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
""")


def report(keys: Keys, part: str, packed: bytes) -> Call:
    return Call(_REPORT, (keys.progress,), (part, packed, _MOST_PARTS))


_WITHDRAW = Script("redis.call('HDEL', KEYS[1], ARGV[1])")


def withdraw(keys: Keys, part: str) -> Call:
    """The part ended in order; one that was killed stays to be seen."""
    return Call(_WITHDRAW, (keys.progress,), (part,))
