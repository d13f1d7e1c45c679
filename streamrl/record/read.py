"""Reading a recording: which groups it holds, in their order, and any of them by its id.

Opening looks at every frame's place and at no contents, so it takes little time and, per group, some hundred bytes.
Contents are read when they are asked for, and their digests checked. A recording that is being written may be read:
it is then what it was when it was opened. Blocks on the disk only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from streamrl.errors import DataError, WireError
from streamrl.record.frames import PREFIX_BYTES, Origin, Place, Tear, files_of, is_intact, read_group, read_origin, scan
from streamrl.transport.types import Entry, entry_order
from streamrl.wire.group import Group, decode_body, decode_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    folder: Path
    origin: Origin
    places: tuple[Place, ...]  # in the stream's order
    tears: tuple[Tear, ...]  # where a writer died in mid-group

    @classmethod
    def open(cls, folder: Path) -> Self:
        """DataError when the folder holds no recording, or files of several runs."""
        origins: list[Origin] = []
        places: list[Place] = []
        tears: list[Tear] = []
        for _, path in files_of(folder):
            origin = read_origin(path)
            if origin is not None:
                origins.append(origin)
            for found in _whole(path):
                if isinstance(found, Tear):
                    tears.append(found)
                else:
                    places.append(found)
        if not origins:
            raise DataError(f"{folder} holds no recording; `streamrl record RUN_FOLDER --output {folder}` makes one")
        if len({origin.run_uid for origin in origins}) > 1:
            raise DataError(f"{folder} holds recordings of several runs; keep each in a folder of its own")
        orders = [entry_order(place.entry_id) for place in places]
        if any(after <= before for before, after in pairwise(orders)):
            raise DataError(f"{folder}: its files are not in order; were some of them copied from elsewhere?")
        return cls(folder=folder, origin=origins[-1], places=tuple(places), tears=tuple(tears))

    def entries(self, places: Sequence[Place] | None = None) -> Iterator[Entry]:
        """These groups, by default all; DataError at one that is damaged."""
        wanted = self.places if places is None else places
        at = 0
        while at < len(wanted):
            path = wanted[at].path
            with path.open("rb") as file:
                while at < len(wanted) and wanted[at].path == path:
                    yield read_group(file, wanted[at])
                    at += 1

    def numbers(self) -> set[int]:
        """Tickets that have an answer here."""
        return {place.number for place in self.places if place.number >= 0}


def open_group(entry: Entry) -> Group:
    """The group in an entry; WireError when it is none, or not the one that the entry promises."""
    header = decode_header(entry.header)
    if (header.ticket, header.run_uid) != (entry.number, entry.run_uid):
        raise WireError("header and entry do not agree on ticket or run")
    return decode_body(header, entry.body)


def _whole(path: Path) -> Iterator[Place | Tear]:
    """As `scan`, and a last frame that only looks whole is a tear too."""
    found = list(scan(path))
    tear = found.pop() if found and isinstance(found[-1], Tear) else None
    places = [place for place in found if isinstance(place, Place)]
    num_torn = tear.num_bytes if tear else 0
    while places and not is_intact(places[-1]):
        last = places.pop()
        num_torn = path.stat().st_size - last.offset + PREFIX_BYTES
    yield from places
    if num_torn:
        yield Tear(path=path, num_bytes=num_torn)
