"""Where `streamrl groups` takes groups from: a live run, or a recording. Both only read.

A live run holds what was delivered and is not committed yet. Blocks on Redis, at most half a minute, or the disk.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import redis

from streamrl.errors import ConfigError, DataError
from streamrl.ops.record.read import Recording
from streamrl.ops.record.tap import Tap
from streamrl.protocol.transport.entries import to_entry
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import START, Entry, entry_order
from streamrl.protocol.wire.ticket import Purpose

_PAGE = 16  # groups may be large
_ID = re.compile(r"\d{1,19}-\d{1,19}")
_POLL_S = 1.0


class Source(Protocol):
    def latest(self, count: int) -> list[Entry]:
        """The newest ones, the oldest of them first; what follows is `more`'s."""
        ...

    def more(self) -> list[Entry] | None:
        """What came since, after about a second at most; None when nothing more can come."""
        ...

    def find(self, wanted: str) -> Entry:
        """By entry id or ticket number; DataError when it is not there."""
        ...


class LiveGroups:
    def __init__(self, client: redis.Redis, keys: Keys, *, run_uid: str, purpose: Purpose) -> None:
        self._client, self._stream = client, keys.groups(purpose)
        self._tap = Tap(client, keys, run_uid=run_uid, purpose=purpose)

    def latest(self, count: int) -> list[Entry]:
        found = list(islice(self._backwards(min(_PAGE, max(1, count))), max(1, count)))
        if found:
            self._tap.after = found[0].id
        return found[:count][::-1]

    def more(self) -> list[Entry] | None:
        state = self._tap.run_state()
        entries = self._tap.read(wait_s=_POLL_S)
        return None if not entries and state not in ("running", None) else entries

    def find(self, wanted: str) -> Entry:
        if is_entry_id(wanted):
            found = self._range(wanted, wanted, 1)
        else:
            found = list(islice((entry for entry in self._backwards(_PAGE) if entry.number == int(wanted)), 1))
        if not found:
            raise DataError(
                f"no group {wanted} is in Redis now: it was not delivered yet, or trained and let go. `streamrl "
                "groups tail` shows what is there; `streamrl record` keeps what passes"
            )
        return found[0]

    def _backwards(self, num_a_page: int) -> Iterator[Entry]:
        below = "+"
        while page := self._range(below, "-", num_a_page):
            yield from page
            below = f"({page[-1].id}"

    def _range(self, high: str, low: str, count: int) -> list[Entry]:
        found: Any = self._tap.ask("read groups", lambda: self._client.xrevrange(self._stream, high, low, count=count))
        return [to_entry(entry_id, fields) for entry_id, fields in found]


class RecordedGroups:
    def __init__(self, folder: Path) -> None:
        self._recording = Recording.open(folder)
        self._after = START

    @property
    def model(self) -> str:
        return self._recording.origin.model

    def latest(self, count: int) -> list[Entry]:
        places = self._recording.places
        self._after = places[-1].entry_id if places else START
        return list(self._recording.entries(places[len(places) - min(count, len(places)) :]))

    def more(self) -> list[Entry] | None:
        """A recorder may be at work; nobody says when it will not be any more."""
        time.sleep(_POLL_S)
        self._recording = Recording.open(self._recording.folder)
        after = entry_order(self._after)
        return self.latest(sum(entry_order(place.entry_id) > after for place in self._recording.places))

    def find(self, wanted: str) -> Entry:
        by_id = is_entry_id(wanted)
        for place in reversed(self._recording.places):
            if place.entry_id == wanted if by_id else place.number == int(wanted):
                return next(self._recording.entries([place]))
        raise DataError(f"{self._recording.folder} holds no group {wanted}; `streamrl record info` tells what it holds")


def is_entry_id(wanted: str) -> bool:
    """An id, or else a ticket's number; ConfigError when it is neither."""
    if _ID.fullmatch(wanted):
        return True
    if wanted.isascii() and wanted.isdigit():
        return False
    raise ConfigError(f"{wanted!r} is neither a ticket's number, such as 57, nor the id of a group, such as 17000-0")
