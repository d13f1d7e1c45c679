"""What an operator may do to a run from outside: say how it shall go on, or remove it."""

from __future__ import annotations

import redis

from streamrl.transport.connection import Attempts, repeat
from streamrl.transport.keys import Keys
from streamrl.transport.scripts import for_operators as scripts
from streamrl.transport.scripts.call import run
from streamrl.transport.types import Control

_PATIENCE_S = 10.0
_TOMBSTONE_S = 86_400
_KEYS_A_CALL = 500


def set_control(client: redis.Redis, keys: Keys, mode: Control) -> None:
    """All parts follow: run, pause (no new tickets), drain (finish what is out, then stop) or stop."""
    attempts = Attempts(client, "set the control word", give_up_after_s=_PATIENCE_S)
    repeat(lambda: client.hset(keys.control, "mode", mode), attempts=attempts)


def remove_run(client: redis.Redis, keys: Keys) -> bool:
    """Remove every key of the run and leave a tombstone, so that its workers and its learner leave. False: no run was
    there; whatever lay under its name is removed all the same."""
    bury = scripts.bury(keys, tombstone_ms=1000 * _TOMBSTONE_S)
    there = repeat(lambda: run(client, bury), attempts=Attempts(client, "remove the run", give_up_after_s=_PATIENCE_S))
    repeat(
        lambda: _sweep(client, keys), attempts=Attempts(client, "remove the run's keys", give_up_after_s=_PATIENCE_S)
    )
    return bool(there)


def _sweep(client: redis.Redis, keys: Keys) -> None:
    """What the burial left: blobs, receipts and telemetry, too many for one script, and nobody reads them any more."""
    for key in client.scan_iter(match=f"{keys.prefix}*", count=_KEYS_A_CALL):
        if key != keys.tombstone.encode():
            client.unlink(key)
