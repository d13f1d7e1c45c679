"""What an operator may do to a run from outside: say how it shall go on and hear who follows, or remove it.

The word lies in Redis and stays until another is said or the learner that obeyed it ends the run, so parts that join
later, or come back, follow it too; but a learner that is started anew forgets a drain or a stop, which were said to the
one before it. Each part shows in its reports which word it follows; that is the acknowledgement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import redis

from streamrl.telemetry.progress import Report
from streamrl.transport.connection import repeat
from streamrl.transport.keys import LEADER, Keys
from streamrl.transport.scripts import for_operators as scripts
from streamrl.transport.scripts.call import Call, run
from streamrl.transport.snapshot import snapshot
from streamrl.transport.types import Control, RunState
from streamrl.wire.purpose import PURPOSES

_PATIENCE_S = 10.0
_TOMBSTONE_S = 86_400
_KEYS_A_CALL = 500
_LOOK_EVERY_S = 0.2
_ALIVE_S = 15.0  # a part that has not reported for so long is not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Obedience:
    state: RunState | None  # of the run; None: it is gone
    obeying: tuple[str, ...]  # parts that follow the word
    waiting_for: Mapping[str, str]  # parts that do not yet, and what they do instead

    @property
    def complete(self) -> bool:
        return not self.waiting_for


def set_control(client: redis.Redis, keys: Keys, mode: Control, *, by: str) -> bool:
    """All parts follow: run, pause (no new tickets), drain (finish what is out, then stop) or stop. False: that was
    the word already. A change is noted in the journal."""
    call = Call(scripts.SET_CONTROL, (keys.meta, keys.events, keys.control), (time.time(), by, mode))
    return bool(repeat(client, "set the control word", partial(run, client, call), give_up_after_s=_PATIENCE_S))


def await_obedience(client: redis.Redis, keys: Keys, mode: Control, *, timeout_s: float) -> Obedience:
    """Until everybody concerned follows the word, or time is up: the learner, and of a pause and its end the workers
    that are there. A run that has ended has stopped and drained."""
    deadline = time.monotonic() + timeout_s
    while not (found := _look(client, keys, mode)).complete and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return found


def _look(client: redis.Redis, keys: Keys, mode: Control) -> Obedience:
    now = snapshot(client, keys)
    state = now.run.state if now.run else None
    if state != "running":
        return Obedience(state=state, obeying=(), waiting_for={})
    concerned = list(_concerned(now.reports, mode, at=now.at))
    waiting_for = {r.part: _activity(r) for r in concerned if r.detail.get("control") != mode}
    if not any(report.part == LEADER for report in concerned):
        waiting_for[LEADER] = "is not there"
    obeying = tuple(report.part for report in concerned if report.part not in waiting_for)
    return Obedience(state=state, obeying=obeying, waiting_for=waiting_for)


def _concerned(reports: tuple[Report, ...], mode: Control, *, at: float) -> Iterator[Report]:
    for report in reports:
        works = report.role == "worker" and mode in ("run", "pause")
        if at - report.at < _ALIVE_S and (works or report.part == LEADER):
            yield report


def _activity(report: Report) -> str:
    return f"waits for {report.doing}" if report.state == "waiting" else f"is busy: {report.doing}"


def remove_run(client: redis.Redis, keys: Keys) -> bool:
    """Remove every key of the run and leave a tombstone, so that its workers and its learner leave. False: no run was
    there; whatever lay under its name is removed all the same."""
    streams = [key for purpose in PURPOSES for key in (keys.tickets(purpose), keys.groups(purpose))]
    bury = Call(scripts.BURY, (keys.meta, keys.tombstone, keys.lease, keys.control, *streams), (1000 * _TOMBSTONE_S,))
    there = repeat(client, "remove the run", partial(run, client, bury), give_up_after_s=_PATIENCE_S)
    repeat(client, "remove the run's keys", partial(_sweep, client, keys), give_up_after_s=_PATIENCE_S)
    return bool(there)


def _sweep(client: redis.Redis, keys: Keys) -> None:
    """What the burial left: blobs, receipts and telemetry, too many for one script, and nobody reads them any more."""
    for key in client.scan_iter(match=f"{keys.prefix}*", count=_KEYS_A_CALL):
        if key != keys.tombstone.encode():
            client.unlink(key)
