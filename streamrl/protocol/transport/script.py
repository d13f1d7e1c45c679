"""How a script is run on Redis, and the fence that those of the learner pass.

A script runs by its digest, and by its text when the server does not know it (yet, or any more). It answers
[status, ...]: OK; of a script of the learner, past the fence, also FENCED: another learner is there, and who; LOST:
Redis knows of no claim of ours: it was emptied, went back in time, or the run was removed, and claiming again tells
which; GONE: another run has the name, or the tombstone is ours. Blocks as long as the client does; errors come out as
they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import redis
import redis.asyncio

from streamrl.protocol.transport.keys import Keys

Argument = str | bytes | int | float


@dataclass(frozen=True)
class Script:
    text: str

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]


def run(client: redis.Redis, call: Call) -> Any:
    script = call.script
    try:
        return client.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except redis.exceptions.NoScriptError:  # it did not run, so running it now is no repetition
        return client.eval(script.text, len(call.keys), *call.keys, *call.args)


async def run_async(client: redis.asyncio.Redis, call: Call) -> Any:
    script = call.script
    try:
        return await client.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except redis.exceptions.NoScriptError:
        return await client.eval(script.text, len(call.keys), *call.keys, *call.args)


class Fence(NamedTuple):
    """What every learner script carries: who it is, of which run, and since which term."""

    run_uid: str
    term: int
    holder: str

    def call(self, script: Script, keys: Keys, more_keys: Sequence[str], *args: Argument) -> Call:
        return Call(script, (keys.meta, keys.lease, *more_keys), (*self, *args))


def fenced(text: str) -> Script:
    return Script(_FENCE + text)


# The term tells two lives of one holder apart; the lease refuses a stalled learner from the moment that another has
# it, which is before that one's term is known here. Terms and versions stay far below 2^53, where Lua's numbers end
# to be exact. What follows the fence sees its own KEYS and ARGV only.
_FENCE = """
local meta, lease = unpack(KEYS, 1, 2)
local uid, term, holder = unpack(ARGV, 1, 3)
for _ = 1, 2 do table.remove(KEYS, 1) end
for _ = 1, 3 do table.remove(ARGV, 1) end
local function fence()
  local known = redis.call('HMGET', meta, 'uid', 'term')
  if not known[1] then return 'LOST' end
  if known[1] ~= uid then return 'GONE' end
  local ahead = tonumber(known[2] or 0) - tonumber(term)
  if ahead < 0 then return 'LOST' end  -- a lease from before our term says nothing
  local current = redis.call('GET', lease)
  if ahead > 0 or (current and current ~= holder) then return 'FENCED' end
end
local refused = fence()
if refused then return {refused, redis.call('GET', lease) or ''} end
"""
