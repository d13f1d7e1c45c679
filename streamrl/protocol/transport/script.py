"""How a script runs on Redis, and the fence that the learner's scripts pass.

A script runs by its digest, or by its text when the server does not have it cached. It replies [status, ...]. OK, and
for the learner's scripts also FENCED: another learner holds the run, and which; LOST: Redis has no claim of ours,
because it was emptied, went back in time, or the run was removed, which claiming again shows; GONE: another run has the
name, or our run has a tombstone. Blocks as long as the client does; errors propagate.
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
    except redis.exceptions.NoScriptError:  # it did not run, so this is not a repetition
        return client.eval(script.text, len(call.keys), *call.keys, *call.args)


async def run_async(client: redis.asyncio.Redis, call: Call) -> Any:
    script = call.script
    try:
        return await client.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except redis.exceptions.NoScriptError:
        return await client.eval(script.text, len(call.keys), *call.keys, *call.args)


class Fence(NamedTuple):
    """The first arguments of every learner script: run, term and holder."""

    run_uid: str
    term: int
    holder: str

    def call(self, script: Script, keys: Keys, more_keys: Sequence[str], *args: Argument) -> Call:
        return Call(script, (keys.meta, keys.lease, *more_keys), (*self, *args))


def fenced(text: str) -> Script:
    return Script(_FENCE + text)


# The term distinguishes two lives of one holder; the lease refuses a stalled learner as soon as another holds it, which
# is before that one's term is known here. Terms and versions stay far below 2^53, the limit of exact Lua numbers. The
# text after the fence sees only its own KEYS and ARGV.
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
