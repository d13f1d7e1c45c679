"""The entries in a run's streams at this moment, page by page: in full, or numbers and identities only.

Only reads, so any call may be retried. Blocks while Redis is down, as long as the caller's `ask` retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import redis

from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.entries import to_number, to_present
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Call, run
from streamrl.protocol.transport.types import START, PresentGroup, PresentTicket
from streamrl.protocol.wire.ticket import Purpose

_TICKETS_A_PAGE = 100
# Numbers. The server copies whole entries to return them, so pages grow to this many entries only if these are small.
_MOST_A_PAGE = 1000
_BYTES_A_PAGE = 8 << 20
_GROWTH = 4  # from page to page, since the next entries may be larger


class Ask(Protocol):
    """Runs a call that may be retried."""

    def __call__(self, what: str, call: Callable[[], Any], /) -> Any: ...


class Present:
    def __init__(self, client: redis.Redis, keys: Keys, *, run_uid: str, ask: Ask) -> None:
        self._client, self._keys, self._run_uid, self._ask = client, keys, run_uid, ask

    def tickets(self, purpose: Purpose) -> list[PresentTicket]:
        stream, found, last = self._keys.tickets(purpose), list[PresentTicket](), START
        page: Callable[[str], Any] = partial(self._client.xrange, stream, count=_TICKETS_A_PAGE)
        while entries := self._ask("list tickets", partial(page, f"({last}")):
            found += [to_present(purpose, self._run_uid, *entry) for entry in entries]
            last = found[-1].entry_id
        return found

    def groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        return [
            PresentGroup(
                entry_id=entry_id.decode(),
                number=to_number(number) if ticket_entry else -1,
                identity=identity.decode(errors="replace"),
                num_bytes=num_bytes,
            )
            for entry_id, number, identity, ticket_entry, num_bytes in self._numbers(
                "list groups", self._keys.groups(purpose), after=after
            )
        ]

    def letters(self) -> list[PresentGroup]:
        return [
            PresentGroup(
                entry_id=entry_id.decode(),
                number=to_number(number),
                identity=identity.decode(errors="replace"),
                num_bytes=num_bytes,
            )
            for entry_id, number, identity, _, num_bytes in self._numbers(
                "list dead letters", self._keys.dead, after=START
            )
        ]

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        found = self._numbers("list numbers", self._keys.tickets(purpose), after=START)
        return {(to_number(number), identity.decode(errors="replace")) for _, number, identity, _, _ in found}

    def _numbers(self, what: str, stream: str, *, after: str) -> Iterator[Any]:
        last, count, largest = after, 1, 1
        while last:
            call = Call(scripts.NUMBERS, (stream,), (self._run_uid, last, count))
            reached, page = self._ask(what, partial(run, self._client, call))
            yield from page
            last = reached.decode() if reached else ""
            largest = max([largest, *(num_bytes for *_, num_bytes in page)])
            count = max(1, min(_GROWTH * count, _MOST_A_PAGE, _BYTES_A_PAGE // largest))
