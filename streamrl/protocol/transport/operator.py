"""What an operator may do to a run from outside: say how it shall go on and hear who follows, or remove it.

The word lies in Redis and stays until another is said or the learner that obeyed it ends the run, so parts that join
later, or come back, follow it too. A drain or a stop is for every learner that had begun by then: those that wait for
the run end by themselves, and one that is started anew forgets it. Each part shows in its reports which word it
follows; that is the acknowledgement.

The dead letters, as an operator has them: tickets that failed too often, with the error of the last attempt.

    ls, show ── read            purge ── removed; the tickets have ended, and that stays so
    retry ── a request, which the learner answers with a new ticket; the same step takes the letter away

Each call may block for some seconds while Redis is away, then TransportError; all are safe to repeat.
"""

from __future__ import annotations

import getpass
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import redis

from streamrl.errors import WireError
from streamrl.protocol.transport import operator_scripts as scripts
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.transport.entries import to_number
from streamrl.protocol.transport.keys import LEADER, Keys
from streamrl.protocol.transport.script import Call, Script, run
from streamrl.protocol.transport.snapshot import Snapshot, snapshot
from streamrl.protocol.transport.types import Control, RunState
from streamrl.protocol.wire.ticket import PURPOSES, Ticket, decode_ticket
from streamrl.telemetry.progress import Report

_PATIENCE_S = 10.0
_TOMBSTONE_S = 86_400
_KEYS_A_CALL = 500
_LETTERS_A_CALL = 500
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


def operator() -> str:
    """Who speaks, for the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def set_control(client: redis.Redis, keys: Keys, mode: Control, *, by: str) -> bool:
    """All parts follow: run, pause (no new tickets), drain (finish what is out, then stop) or stop. False: that was
    the word already. A change is noted in the journal."""
    call = Call(scripts.SET_CONTROL, (keys.meta, keys.events, keys.control), (time.time(), by, mode))
    return bool(_ask(client, "set the control word", partial(run, client, call)))


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
    concerned = list(_concerned(now, mode))
    waiting_for = {r.part: _activity(r) for r in concerned if r.detail.get("control") != mode}
    if not any(report.part == LEADER for report in concerned):
        waiting_for[LEADER] = "is not there"
    obeying = tuple(report.part for report in concerned if report.part not in waiting_for)
    return Obedience(state=state, obeying=obeying, waiting_for=waiting_for)


def _concerned(now: Snapshot, mode: Control) -> Iterator[Report]:
    for report in now.reports:
        works = report.role == "worker" and mode in ("run", "pause")
        if now.age_s(report) < _ALIVE_S and (works or report.part == LEADER):
            yield report


def _activity(report: Report) -> str:
    return f"waits for {report.doing}" if report.state == "waiting" else f"is busy: {report.doing}"


def remove_run(client: redis.Redis, keys: Keys) -> bool:
    """Remove every key of the run and leave a tombstone, so that its workers and its learner leave. False: no run was
    there; whatever lay under its name is removed all the same."""
    streams = [key for purpose in PURPOSES for key in (keys.tickets(purpose), keys.groups(purpose))]
    bury = Call(scripts.BURY, (keys.meta, keys.tombstone, keys.lease, keys.control, *streams), (1000 * _TOMBSTONE_S,))
    there = _ask(client, "remove the run", partial(run, client, bury))
    _ask(client, "remove the run's keys", partial(_sweep, client, keys))
    return bool(there)


def _sweep(client: redis.Redis, keys: Keys) -> None:
    """What the burial left: blobs, receipts and telemetry, too many for one script, and nobody reads them any more."""
    for key in client.scan_iter(match=f"{keys.prefix}*", count=_KEYS_A_CALL):
        if key != keys.tombstone.encode():
            client.unlink(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    entry_id: str
    number: int  # of the ticket; -1 where the entry has none
    run_uid: str  # by the entry
    purpose: str
    ticket: Ticket | None  # None: it cannot be read
    error: str
    at: float  # when it was given up (unix time)
    retry_requested: bool


def read_letters(client: redis.Redis, keys: Keys) -> Iterator[DeadLetter]:
    """All of them, the oldest first, page by page: there may be more than fit into memory."""
    requested = _requests(client, keys)
    return (_to_letter(entry_id, fields, requested) for entry_id, fields in _entries(client, keys))


def read_requests(client: redis.Redis, keys: Keys) -> set[int]:
    """Numbers of the dead tickets that the learner has yet to issue anew."""
    return {to_number(number) for number in _requests(client, keys)}


def read_retried(client: redis.Redis, keys: Keys) -> dict[int, list[int]]:
    """By the number of a dead ticket, those that were issued in its place."""
    found: dict[int, list[int]] = {}
    for number, dead in _ask(client, "read the retries", lambda: client.hgetall(keys.retried)).items():
        found.setdefault(to_number(dead), []).append(to_number(number))
    return found


def request_retries(client: redis.Redis, keys: Keys, letters: Iterable[DeadLetter], *, by: str) -> int:
    """Ask for a new ticket in the place of each; how many had not been asked for yet."""
    return _for_each(client, keys, "ask for retries", scripts.REQUEST_RETRIES, letters, by)


def purge(client: redis.Redis, keys: Keys, letters: Iterable[DeadLetter], *, by: str) -> int:
    """Throw them away; how many were there."""
    return _for_each(client, keys, "purge dead letters", scripts.PURGE, letters, by)


def _for_each(
    client: redis.Redis, keys: Keys, what: str, script: Script, letters: Iterable[DeadLetter], by: str
) -> int:
    touched, changed = (keys.meta, keys.events, keys.dead, keys.retry_requests, keys.purged), 0
    waiting = iter(letters)
    while chunk := list(islice(waiting, _LETTERS_A_CALL)):
        parts = [part for letter in chunk for part in (letter.number, letter.entry_id)]
        call = Call(script, touched, (time.time(), by, *parts))
        changed += int(_ask(client, what, partial(run, client, call)))
    return changed


def _requests(client: redis.Redis, keys: Keys) -> Mapping[bytes, bytes]:
    found: Mapping[bytes, bytes] = _ask(client, "read the requests", lambda: client.hgetall(keys.retry_requests))
    return found


def _entries(client: redis.Redis, keys: Keys) -> Iterator[tuple[bytes, Mapping[bytes, bytes]]]:
    first = "-"
    while first:
        call = partial(client.xrange, keys.dead, min=first, count=_LETTERS_A_CALL)
        page: Any = _ask(client, "read the letters", call)
        yield from page
        first = f"({page[-1][0].decode()}" if page else ""


def _to_letter(entry_id: bytes, fields: Mapping[bytes, bytes], requested: Mapping[bytes, bytes]) -> DeadLetter:
    number = fields.get(b"n", b"")
    try:
        ticket = decode_ticket(fields.get(b"b", b""))
    except WireError:
        ticket = None
    return DeadLetter(
        entry_id=entry_id.decode(),
        number=to_number(number),
        run_uid=fields.get(b"u", b"").decode(errors="replace"),
        purpose=fields.get(b"p", b"").decode(errors="replace"),
        ticket=ticket,
        error=fields.get(b"error", b"").decode(errors="replace"),
        at=_to_time(fields.get(b"at", b"")),
        retry_requested=requested.get(number) == entry_id,
    )


def _to_time(text: bytes) -> float:
    """0 where it is none: whoever has the rights may have written it."""
    try:
        at = float(text)
    except ValueError:
        return 0.0
    return at if math.isfinite(at) else 0.0


def _ask(client: redis.Redis, what: str, call: Callable[[], Any]) -> Any:
    return repeat(client, what, call, give_up_after_s=_PATIENCE_S)
