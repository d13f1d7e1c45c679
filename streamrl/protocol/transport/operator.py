"""Operators' access to a run from outside: control it and watch who follows, handle dead letters, or remove the run.

The control command stays in Redis until another replaces it or the learner that obeyed it ends the run, so processes
that join later, or return, follow it too. A drain or a stop applies to every learner that had begun by then: learners
that wait for the run end by themselves, and one that starts later clears it. Each process's report shows the command it
follows, as acknowledgement.

Dead letters are tickets that failed too often, with the last attempt's error:

    ls, show ── read            purge ── deletes them; the tickets remain ended
    retry ── a request, which the learner fulfills with a new ticket; the same step deletes the letter

Each call may block for some seconds while Redis is down, then raises TransportError; all are safe to repeat.
"""

from __future__ import annotations

import getpass
import math
import os
import re
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
_GLOB = re.compile(r"[*?\[\]\\]")  # what has a meaning in the patterns of SCAN
_ALIVE_S = 15.0  # processes without a report for this long are not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Obedience:
    state: RunState | None  # of the run; None: it was removed
    obeying: tuple[str, ...]  # processes that follow the command
    waiting_for: Mapping[str, str]  # processes that do not follow it yet, and what they do

    @property
    def complete(self) -> bool:
        return not self.waiting_for


def operator() -> str:
    """The operator's name, for the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a uid without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def set_control(client: redis.Redis, keys: Keys, mode: Control, *, by: str) -> bool:
    """Set the control command: run, pause (no new tickets), drain (finish issued tickets, then stop) or stop.

    False if it was set already. A change is recorded in the journal.
    """
    call = Call(scripts.SET_CONTROL, (keys.meta, keys.events, keys.control), (time.time(), by, mode))
    return bool(_ask(client, "set the control word", partial(run, client, call)))


def await_obedience(client: redis.Redis, keys: Keys, mode: Control, *, timeout_s: float) -> Obedience:
    """Wait until the learner follows the command, for run and pause also the live workers, or until the timeout.

    A run that has ended counts as stopped and drained.
    """
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
    """Remove every key of the run and leave a tombstone, so that its workers and learner exit.

    False if there was no run; any keys under its name are removed all the same.
    """
    streams = [key for purpose in PURPOSES for key in (keys.tickets(purpose), keys.groups(purpose))]
    bury = Call(scripts.BURY, (keys.meta, keys.tombstone, keys.lease, keys.control, *streams), (1000 * _TOMBSTONE_S,))
    existed = _ask(client, "remove the run", partial(run, client, bury))
    _ask(client, "remove the run's keys", partial(_sweep, client, keys))
    return bool(existed)


def _sweep(client: redis.Redis, keys: Keys) -> None:
    """Delete the remaining keys: blobs, receipts and telemetry, too many for one script and no longer read."""
    prefix = _GLOB.sub(r"\\\g<0>", keys.prefix)
    for key in client.scan_iter(match=f"{prefix}*", count=_KEYS_A_CALL):
        if key != keys.tombstone.encode():
            client.unlink(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    entry_id: str
    number: int  # of the ticket; -1 if the entry has none
    run_uid: str  # by the entry
    purpose: str
    ticket: Ticket | None  # None: unreadable
    error: str
    at: float  # when it was given up (unix time)
    retry_requested: bool


def read_letters(client: redis.Redis, keys: Keys) -> Iterator[DeadLetter]:
    """Yield all letters, oldest first, page by page: there may be more than fit into memory."""
    requested = _requests(client, keys)
    return (_to_letter(entry_id, fields, requested) for entry_id, fields in _entries(client, keys))


def read_requests(client: redis.Redis, keys: Keys) -> set[int]:
    """Return the numbers of dead tickets whose retry is requested and not issued yet."""
    return {to_number(number) for number in _requests(client, keys)}


def read_retried(client: redis.Redis, keys: Keys) -> dict[int, list[int]]:
    """Map the number of each dead ticket to those issued as its retries."""
    found: dict[int, list[int]] = {}
    for number, dead in _ask(client, "read the retries", lambda: client.hgetall(keys.retried)).items():
        found.setdefault(to_number(dead), []).append(to_number(number))
    return found


def request_retries(client: redis.Redis, keys: Keys, letters: Iterable[DeadLetter], *, by: str) -> int:
    """Request a retry of each; return how many requests are new."""
    return _for_each(client, keys, "request retries", scripts.REQUEST_RETRIES, letters, by)


def purge(client: redis.Redis, keys: Keys, letters: Iterable[DeadLetter], *, by: str) -> int:
    """Delete them; return how many existed."""
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
    """Parse a time; 0 if invalid, since any client may have written it."""
    try:
        at = float(text)
    except ValueError:
        return 0.0
    return at if math.isfinite(at) else 0.0


def _ask(client: redis.Redis, what: str, call: Callable[[], Any]) -> Any:
    return repeat(client, what, call, give_up_after_s=_PATIENCE_S)
