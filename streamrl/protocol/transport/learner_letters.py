"""The dead letters in Redis: a part of the learner's half of the stream, with the same fence.

The learner's ledger is the record of letters, and checkpoints store them with their errors. Redis holds a copy for
operators (`transport.operator`), which `learner.groups.reconcile` repairs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import redis

from streamrl.crashpoints import crashpoint
from streamrl.errors import ServerFull
from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.entries import to_number
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Argument
from streamrl.protocol.transport.types import Letter, PresentGroup
from streamrl.protocol.wire.ticket import Ticket, encode_ticket

_LETTERS_A_CALL = 64  # each contains its whole ticket
_IDS_A_CALL = 1000  # Lua's stack is limited to some thousands of arguments
_ERROR_CHARS = 2000


class LetterBox:
    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        ask: Callable[..., Any],
        write: Callable[..., Any],
        listed: Callable[[], list[PresentGroup]],
    ) -> None:
        """`ask`, `write` and `listed` belong to the stream that owns this."""
        self._client, self._keys = client, keys
        self._ask, self._write, self._listed = ask, write, listed

    def put(self, letters: Iterable[tuple[Ticket, Letter]], *, wait_for_room: bool = True) -> bool:
        k, what = self._keys, "put dead letters"
        keys, waiting = [k.appends, k.dead, k.retry_requests, k.purged], iter(letters)
        while chunk := list(islice(waiting, _LETTERS_A_CALL)):
            parts: list[Argument] = []
            for ticket, letter in chunk:
                parts += (ticket.number, ticket.identity, encode_ticket(ticket), letter.error[:_ERROR_CHARS], letter.at)
            args = (uuid.uuid4().hex, int(wait_for_room), *parts)
            try:
                self._write(what, scripts.PUT_LETTERS, keys, *args, wait_for_room=wait_for_room)
            except ServerFull:
                return False
            crashpoint("dead.written")
        return True

    def present(self) -> list[PresentGroup]:
        return self._listed()

    def purged(self) -> set[int]:
        found: Any = self._ask("read the purged letters", lambda: self._client.smembers(self._keys.purged))
        return {to_number(number) for number in found}

    def remove(self, entry_ids: Sequence[str], *, requests: Sequence[int] = ()) -> None:
        keys, words = [self._keys.dead, self._keys.retry_requests], [*entry_ids, *requests]
        for start in range(0, len(words), _IDS_A_CALL):
            num_ids = max(0, min(len(entry_ids) - start, _IDS_A_CALL))
            self._write(
                "remove dead letters", scripts.REMOVE_LETTERS, keys, num_ids, *words[start : start + _IDS_A_CALL]
            )
        crashpoint("letters.removed")
