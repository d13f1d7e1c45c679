"""Reading a recording: which groups it holds, in their order, and any of them by its id.

Opening looks at every frame's place and at no contents, so it takes little time and, per group, some hundred bytes.
Contents are read when they are asked for, and their digests checked. A recording that is being written may be read:
it is then what it was when it was opened. Blocks on the disk only.

`RecordedGroups` is what `streamrl groups` takes from it; of a live run, see `tap.LiveGroups`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Self

from streamrl.errors import ConfigError, DataError, WireError
from streamrl.ops.record.frames import Origin, Place, files_of, read_group, survey
from streamrl.protocol.transport.types import START, Entry, entry_order
from streamrl.protocol.wire.group import Group, decode_body, decode_header

POLL_S = 1.0  # how long `more` waits for some
_ID = re.compile(r"\d{1,19}-\d{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    folder: Path
    origin: Origin
    places: tuple[Place, ...]  # in the stream's order
    tears: Mapping[Path, int]  # where a writer died in mid-group: bytes that are left out, by file

    @classmethod
    def open(cls, folder: Path) -> Self:
        """DataError when the folder holds no recording, or files of several runs."""
        files = [survey(path) for path in files_of(folder)]
        origins = [file.origin for file in files if file.origin is not None]
        if not origins:
            raise DataError(f"{folder} holds no recording; `streamrl record RUN_FOLDER --output {folder}` makes one")
        if len({origin.run_uid for origin in origins}) > 1:
            raise DataError(f"{folder} holds recordings of several runs; keep each in a folder of its own")
        places = tuple(place for file in files for place in file.places)
        orders = [entry_order(place.entry_id) for place in places]
        if any(after <= before for before, after in pairwise(orders)):
            raise DataError(f"{folder}: its files are not in order; were some of them copied from elsewhere?")
        tears = {file.path: file.torn_bytes for file in files if file.torn_bytes}
        return cls(folder=folder, origin=origins[-1], places=places, tears=tears)

    def entries(self, places: Sequence[Place] | None = None) -> Iterator[Entry]:
        """These groups, by default all; DataError at one that is damaged."""
        wanted = self.places if places is None else places
        for path, of_file in groupby(wanted, key=attrgetter("path")):
            with path.open("rb") as file:
                for place in of_file:
                    yield read_group(file, place)

    def numbers(self) -> set[int]:
        """Tickets that have an answer here."""
        return {place.number for place in self.places if place.number >= 0}


def open_group(entry: Entry) -> Group:
    """The group in an entry; WireError when it is none, or not the one that the entry promises."""
    header = decode_header(entry.header)
    if (header.ticket, header.run_uid) != (entry.number, entry.run_uid):
        raise WireError("header and entry do not agree on ticket or run")
    return decode_body(header, entry.body)


class RecordedGroups:
    def __init__(self, folder: Path) -> None:
        self._recording = Recording.open(folder)
        self._after = START
        self.model = self._recording.origin.model

    def latest(self, count: int) -> list[Entry]:
        """The newest ones, the oldest of them first; what follows is `more`'s."""
        places = self._recording.places
        self._after = places[-1].entry_id if places else START
        return list(self._recording.entries(places[len(places) - min(count, len(places)) :]))

    def more(self) -> list[Entry]:
        """What came since: a recorder may be at work, and nobody says when it will not be any more."""
        time.sleep(POLL_S)
        self._recording = Recording.open(self._recording.folder)
        after = entry_order(self._after)
        return self.latest(sum(entry_order(place.entry_id) > after for place in self._recording.places))

    def find(self, wanted: str) -> Entry:
        """By entry id or ticket number; DataError when it is not there."""
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
