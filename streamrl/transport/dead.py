"""The dead letters, as an operator has them: tickets that failed too often, with the error of the last attempt.

    ls, show ── read            purge ── removed; the tickets have ended, and that stays so
    retry ── a request, which the learner answers with a new ticket; the same step takes the letter away

Each call may block for some seconds while Redis is away, then TransportError; all are safe to repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis

from streamrl.errors import WireError
from streamrl.transport.connection import repeat
from streamrl.transport.keys import Keys
from streamrl.transport.scripts import for_operators as scripts
from streamrl.transport.scripts.call import Call, Script, run
from streamrl.transport.types import to_number
from streamrl.wire.ticket import Ticket, decode_ticket

T = TypeVar("T")

_PATIENCE_S = 10.0
_LETTERS_A_PAGE = 500
_LETTERS_A_CALL = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    entry_id: str
    number: int  # of the ticket; -1 where the entry has none
    purpose: str
    ticket: Ticket | None  # None: it cannot be read
    error: str
    at: float  # when it was given up (unix time)
    retry_requested: bool


def read_letters(client: redis.Redis, keys: Keys) -> list[DeadLetter]:
    """All of them, the oldest first."""
    requested = _requests(client, keys)
    return [_to_letter(entry_id, fields, requested) for entry_id, fields in _entries(client, keys)]


def read_requests(client: redis.Redis, keys: Keys) -> set[int]:
    """Numbers of the dead tickets that the learner has yet to issue anew."""
    return {to_number(number) for number in _requests(client, keys)}


def read_retried(client: redis.Redis, keys: Keys) -> dict[int, list[int]]:
    """By the number of a dead ticket, those that were issued in its place."""
    found: dict[int, list[int]] = {}
    for number, dead in _ask(client, "read the retries", lambda: client.hgetall(keys.retried)).items():
        found.setdefault(to_number(dead), []).append(to_number(number))
    return found


def request_retries(client: redis.Redis, keys: Keys, letters: Sequence[DeadLetter], *, by: str) -> int:
    """Ask for a new ticket in the place of each; how many had not been asked for yet."""
    return _for_each(client, keys, "ask for retries", scripts.REQUEST_RETRIES, letters, by)


def purge(client: redis.Redis, keys: Keys, letters: Sequence[DeadLetter], *, by: str) -> int:
    """Throw them away; how many were there."""
    return _for_each(client, keys, "purge dead letters", scripts.PURGE, letters, by)


def _for_each(
    client: redis.Redis, keys: Keys, what: str, script: Script, letters: Sequence[DeadLetter], by: str
) -> int:
    touched, changed = (keys.meta, keys.events, keys.dead, keys.retry_requests), 0
    for start in range(0, len(letters), _LETTERS_A_CALL):
        chunk = letters[start : start + _LETTERS_A_CALL]
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
        call = partial(client.xrange, keys.dead, min=first, count=_LETTERS_A_PAGE)
        page: Any = _ask(client, "read the letters", call)
        yield from page
        first = f"({page[-1][0].decode()}" if page else ""


def _to_letter(entry_id: bytes, fields: Mapping[bytes, bytes], requested: Mapping[bytes, bytes]) -> DeadLetter:
    number = fields.get(b"n", b"")
    at = fields.get(b"at", b"")
    try:
        ticket = decode_ticket(fields.get(b"b", b""))
    except WireError:
        ticket = None
    return DeadLetter(
        entry_id=entry_id.decode(),
        number=to_number(number),
        purpose=fields.get(b"p", b"").decode(errors="replace"),
        ticket=ticket,
        error=fields.get(b"error", b"").decode(errors="replace"),
        at=float(at) if at.replace(b".", b"").isdigit() else 0.0,
        retry_requested=requested.get(number) == entry_id,
    )


def _ask(client: redis.Redis, what: str, call: Callable[[], T]) -> Any:
    return repeat(client, what, call, give_up_after_s=_PATIENCE_S)
