"""The fence that every script of the learner passes, and what a script answers: [status, ...].

OK; FENCED: another learner is there; LOST: Redis knows of no claim of ours: it was emptied, went back in time, or the
run was removed, and claiming again tells which; GONE: another run has the name, or the tombstone is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamrl.transport.keys import Keys
from streamrl.transport.scripts.call import Argument, Call, Script


class Fence(NamedTuple):
    """What every learner script carries: who it is, of which run, and since which epoch."""

    run_uid: str
    epoch: int
    holder: str

    def call(self, script: Script, keys: Keys, more_keys: Sequence[str], *args: Argument) -> Call:
        return Call(script, (keys.meta, keys.lease, *more_keys), (*self, *args))


def fenced(text: str) -> Script:
    return Script(_FENCE + text)


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
  local ahead = tonumber(known[2] or 0) - tonumber(epoch)
  if ahead < 0 then return 'LOST' end  -- a lease from before our epoch says nothing
  local current = redis.call('GET', lease)
  if ahead > 0 or (current and current ~= holder) then return 'FENCED' end
end
local refused = fence()
if refused then return {refused} end
"""
