"""The groups of a recording, as `streamrl groups` shows them; for those of a live run, see `tap.LiveGroups`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamrl.errors import ConfigError, DataError
from streamrl.protocol.recording import Place, Recording
from streamrl.protocol.transport.types import START, Entry, entry_order

POLL_S = 1.0  # pause in `more`
_ID = re.compile(r"\d{1,19}-\d{1,19}")


class RecordedGroups:
    def __init__(self, folder: Path) -> None:
        self._recording = Recording.open(folder)
        self._after = START
        self.model = self._recording.origin.model

    def latest(self, count: int) -> list[Entry]:
        """Return the newest groups, oldest first; `more` continues after them."""
        places = self._recording.places
        self._after = places[-1].entry_id if places else START
        return list(self._readable(places[len(places) - min(count, len(places)) :]))

    def more(self) -> list[Entry]:
        """Return what was recorded since; a recorder may be active, and its end cannot be known."""
        time.sleep(POLL_S)
        self._recording = Recording.open(self._recording.folder)
        after = entry_order(self._after)
        return self.latest(sum(entry_order(place.entry_id) > after for place in self._recording.places))

    def _readable(self, places: Sequence[Place]) -> Iterator[Entry]:
        for place in places:
            try:
                yield next(self._recording.entries([place]))
            except DataError:  # damaged: reported and skipped, like an entry that is not a group
                yield Entry(id=place.entry_id, number=place.number, run_uid="", header=b"", body=b"")

    def find(self, wanted: str) -> Entry:
        """Find a group by entry id or ticket number. DataError if it is not here."""
        by_id = is_entry_id(wanted)
        for place in reversed(self._recording.places):
            if place.entry_id == wanted if by_id else place.number == int(wanted):
                return next(self._recording.entries([place]))
        raise DataError(f"{self._recording.folder} holds no group {wanted}; `streamrl record info` lists what it holds")


def is_entry_id(wanted: str) -> bool:
    """Return whether this is an entry id (else a ticket number). ConfigError if it is neither."""
    if _ID.fullmatch(wanted):
        return True
    if wanted.isascii() and wanted.isdigit():
        return False
    raise ConfigError(f"{wanted!r} is neither a ticket number, such as 57, nor a group id, such as 17000-0")
