"""A recording: its format on disk, and access to its groups in order or by id.

Numbered files of frames, each frame with its length and digest:

    00000001.groups    magic │ frame: origin │ frame: group │ frame: group │ ...
    00000002.groups    magic │ frame: origin │ ...

    frame    length u32 │ digest u64 │ entry id: ms u64, seq u64 │ ticket: number i64, identity 16 B │ payload
                                                                                                    (little-endian)

The digest (xxh3_64) covers everything after it. The payload is a message of `wire`: for the origin, which run this is;
for a group, its run's uid, header and body exactly as in the stream, and the id of the ticket entry that it replaced.
Ids, numbers and identities come first, so that a recording can be indexed without reading the groups. Ids increase from
frame to frame.

An incomplete frame is a tear: the writer died, or the power failed. Frames before it are valid, and the rest of the
file is ignored.

Opening a recording reads every frame's position but no contents, so it takes little time and some hundred bytes per
group. Contents are read on demand, and their digests checked. A recording may be read while it is written: the reader
sees its state at opening. Blocks on the disk only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from streamrl.errors import DataError, WireError
from streamrl.protocol.transport.types import Entry, entry_order
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from streamrl.protocol.wire.group import Group, decode_body, decode_header
from streamrl.protocol.wire.ticket import IDENTITY_CHARS

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (2 << 20)  # a body, a header, and the map around them
_MAGIC = b"streamrl recording 2\n"
_LENGTH = struct.Struct("<IQ")  # payload's bytes, digest
_PLACE = struct.Struct(f"<QQq{IDENTITY_CHARS}s")
_PREFIX = struct.Struct(f"<IQQQq{IDENTITY_CHARS}s")  # both; precedes a frame's payload
_NAME = re.compile(r"\d{8}\.groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run whose groups these are."""

    run: str
    run_uid: str
    fingerprint: str  # of model and tokenizer
    model: str  # folder or hub name, from the run's configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a group's frame."""

    path: Path
    offset: int  # of the payload
    num_bytes: int  # of the payload
    digest: int
    entry_id: str
    number: int  # of the ticket; -1: the entry has none
    identity: str  # of the ticket; empty: the entry has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The valid contents of a file."""

    path: Path
    origin: Origin | None  # None: even the start of the file is incomplete
    places: tuple[Place, ...]  # in order
    torn_bytes: int  # from the tear to the end of the file


def file_name(number: int) -> str:
    return f"{number:08d}.groups"


def files_of(folder: Path) -> list[Path]:
    """Return the recording's files in order. DataError if the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:
        raise DataError(f"{folder} is not a recording: {error.strerror}") from None


def begin_file(origin: Origin) -> bytes:
    return _MAGIC + _frame("0-0", -1, "", pack(asdict(origin)))


def group_frame(entry: Entry) -> bytes:
    fields = {"run_uid": entry.run_uid, "ticket_entry": entry.ticket_entry, "header": entry.header, "body": entry.body}
    return _frame(entry.id, entry.number, entry.identity, pack(fields))


def survey(path: Path) -> Contents:
    """Index a file without reading its groups. DataError if it is no file of a recording."""
    size = path.stat().st_size
    frames: list[Place] = []
    with path.open("rb") as file:
        if not _MAGIC.startswith(file.read(len(_MAGIC))):
            raise DataError(f"{path} is not a file of a recording, or was made by a newer streamrl")
        end = len(_MAGIC)
        while (frame := _next(file, path, end, size)) is not None:
            frames.append(frame)
            end = frame.offset + frame.num_bytes
        while frames and not is_intact(frames[-1]):  # a last frame that is damaged is a tear, too
            end = frames.pop().offset - _PREFIX.size
        origin = _to_origin(_payload(file, frames[0])) if frames else None
    torn_bytes = size - end if frames else size
    return Contents(path=path, origin=origin, places=tuple(frames[1:]), torn_bytes=torn_bytes)


def _to_origin(payload: bytes) -> Origin:
    f = unpack(payload)
    origin = Origin(
        run=f.text("run", max_chars=64),
        run_uid=f.text("run_uid", max_chars=64),
        fingerprint=f.text("fingerprint", max_chars=64),
        model=f.text("model", max_chars=4096),
    )
    f.done()
    return origin


def read_group(file: BinaryIO, place: Place) -> Entry:
    """Read a group. DataError if it does not match its digest."""
    try:
        f = unpack(_payload(file, place), max_bytes=MAX_FRAME_BYTES)
        entry = Entry(
            id=place.entry_id,
            number=place.number,
            run_uid=f.text("run_uid", max_chars=64),
            header=f.blob("header"),
            body=f.blob("body"),
            identity=place.identity,
            ticket_entry=f.text("ticket_entry", max_chars=64),
        )
        f.done()
    except WireError as error:
        raise DataError(f"{place.path}: group {place.entry_id} at byte {place.offset} is damaged: {error}") from None
    return entry


def is_intact(place: Place) -> bool:
    with place.path.open("rb") as file:
        try:
            _payload(file, place)
        except WireError:
            return False
    return True


def _frame(entry_id: str, number: int, identity: str, payload: bytes) -> bytes:
    milliseconds, _, sequence = entry_id.partition("-")
    rest = _PLACE.pack(int(milliseconds), int(sequence), number, identity.encode()) + payload
    return _LENGTH.pack(len(payload), xxhash.xxh3_64_intdigest(rest)) + rest


def _next(file: BinaryIO, path: Path, at: int, size: int) -> Place | None:
    """Return the frame that starts here; None if it is incomplete or the file ends."""
    offset = at + _PREFIX.size
    if offset > size:
        return None
    file.seek(at)
    num_bytes, digest, milliseconds, sequence, number, identity = _PREFIX.unpack(file.read(_PREFIX.size))
    # A zero length is what a file system leaves behind where it lost data.
    if not 0 < num_bytes <= MAX_FRAME_BYTES or offset + num_bytes > size:
        return None
    return Place(
        path=path,
        offset=offset,
        num_bytes=num_bytes,
        digest=digest,
        entry_id=f"{milliseconds}-{sequence}",
        number=number,
        identity=identity.rstrip(b"\0").decode(errors="replace"),
    )


def _payload(file: BinaryIO, place: Place) -> bytes:
    file.seek(place.offset - _PLACE.size)
    rest = file.read(_PLACE.size + place.num_bytes)
    if xxhash.xxh3_64_intdigest(rest) != place.digest:
        raise WireError("its contents do not match its digest")
    return rest[_PLACE.size :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    folder: Path
    origin: Origin
    places: tuple[Place, ...]  # in stream order
    tears: Mapping[Path, int]  # bytes ignored after a tear, by file

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a recording. DataError if the folder holds none, or files of several runs."""
        files = [survey(path) for path in files_of(folder)]
        origins = [file.origin for file in files if file.origin is not None]
        if not origins:
            raise DataError(f"{folder} holds no recording; `streamrl record RUN_FOLDER --output {folder}` makes one")
        if len({origin.run_uid for origin in origins}) > 1:
            raise DataError(f"{folder} holds recordings of several runs; record each into its own folder")
        places = tuple(place for file in files for place in file.places)
        orders = [entry_order(place.entry_id) for place in places]
        if any(after <= before for before, after in pairwise(orders)):
            raise DataError(f"{folder}: its files are out of order; were some copied from another recording?")
        tears = {file.path: file.torn_bytes for file in files if file.torn_bytes}
        return cls(folder=folder, origin=origins[-1], places=places, tears=tears)

    def entries(self, places: Sequence[Place] | None = None) -> Iterator[Entry]:
        """Yield these groups, by default all. DataError at a damaged one."""
        wanted = self.places if places is None else places
        for path, of_file in groupby(wanted, key=attrgetter("path")):
            with path.open("rb") as file:
                for place in of_file:
                    yield read_group(file, place)

    def numbers(self) -> set[int]:
        """The tickets answered in this recording."""
        return {place.number for place in self.places if place.number >= 0}


def open_group(entry: Entry) -> Group:
    """Open the group in an entry. WireError if it is malformed, or does not match the entry."""
    header = decode_header(entry.header)
    if (header.ticket, header.run_uid) != (entry.number, entry.run_uid):
        raise WireError("header and entry name different tickets or runs")
    return decode_body(header, entry.body)
