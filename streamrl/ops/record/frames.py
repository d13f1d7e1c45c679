"""How a recording lies on disk: numbered files of frames, each frame with its length and its digest.

    00000001.groups    magic │ frame: origin │ frame: group │ frame: group │ ...
    00000002.groups    magic │ frame: origin │ ...

    frame    length u32 │ digest u64 │ entry id: ms u64, seq u64 │ ticket number i64 │ payload    (little-endian)

The digest (xxh3_64) covers all that follows it. The payload is a message of `wire`: of the origin, which run
this is; of a group, its run's uid, header and body just as they lay in the stream. Ids and numbers stand in front, so
that a recording is looked through without reading what the groups hold. Ids grow from frame to frame.

A frame that is not whole is a tear: the writer died, or the power went. What lies before it is good, and nothing in the
file behind it is looked at. Blocks on the disk only.
"""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from streamrl.errors import DataError, WireError
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, pack, unpack

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (2 << 20)  # a body, a header, and the map around them
_MAGIC = b"streamrl recording 1\n"
_LENGTH = struct.Struct("<IQ")  # payload's bytes, digest
_PLACE = struct.Struct("<QQq")
_PREFIX = struct.Struct("<IQQQq")  # both, which stand before a frame's payload
_NAME = re.compile(r"\d{8}\.groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose groups these are."""

    run: str
    run_uid: str
    fingerprint: str  # of model and tokenizer
    model: str  # folder or hub name, as the run's configuration has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a group's frame lies."""

    path: Path
    offset: int  # of its payload
    num_bytes: int  # of its payload
    digest: int
    entry_id: str
    number: int  # of the ticket; -1: the entry named none


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is whole in a file."""

    path: Path
    origin: Origin | None  # None: the file's beginning is torn off
    places: tuple[Place, ...]  # in order
    torn_bytes: int  # from a tear to the end of the file


def file_name(number: int) -> str:
    return f"{number:08d}.groups"


def files_of(folder: Path) -> list[Path]:
    """The recording's files in order; an unreadable folder is a DataError."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:
        raise DataError(f"{folder} is not a recording: {error.strerror}") from None


def begin_file(origin: Origin) -> bytes:
    return _MAGIC + _frame("0-0", -1, pack(asdict(origin)))


def group_frame(entry: Entry) -> bytes:
    payload = pack({"run_uid": entry.run_uid, "header": entry.header, "body": entry.body})
    return _frame(entry.id, entry.number, payload)


def survey(path: Path) -> Contents:
    """What the file holds, without what the groups hold; DataError when it is something else."""
    size = path.stat().st_size
    frames: list[Place] = []
    with path.open("rb") as file:
        if not _MAGIC.startswith(file.read(len(_MAGIC))):
            raise DataError(f"{path} is not a file of a recording, or of one that a newer streamrl has made")
        end = len(_MAGIC)
        while (frame := _next(file, path, end, size)) is not None:
            frames.append(frame)
            end = frame.offset + frame.num_bytes
        while frames and not is_intact(frames[-1]):  # a last frame that only looks whole is a tear, too
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
    """DataError when the frame is not what its digest says."""
    try:
        f = unpack(_payload(file, place), max_bytes=MAX_FRAME_BYTES)
        entry = Entry(
            id=place.entry_id,
            number=place.number,
            run_uid=f.text("run_uid", max_chars=64),
            header=f.blob("header"),
            body=f.blob("body"),
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


def _frame(entry_id: str, number: int, payload: bytes) -> bytes:
    milliseconds, _, sequence = entry_id.partition("-")
    rest = _PLACE.pack(int(milliseconds), int(sequence), number) + payload
    return _LENGTH.pack(len(payload), xxhash.xxh3_64_intdigest(rest)) + rest


def _next(file: BinaryIO, path: Path, at: int, size: int) -> Place | None:
    """The frame that begins here; None when it is not whole, or when nothing is left."""
    offset = at + _PREFIX.size
    if offset > size:
        return None
    file.seek(at)
    num_bytes, digest, milliseconds, sequence, number = _PREFIX.unpack(file.read(_PREFIX.size))
    # A length of nothing is what a file system leaves behind where it lost the data.
    if not 0 < num_bytes <= MAX_FRAME_BYTES or offset + num_bytes > size:
        return None
    entry_id = f"{milliseconds}-{sequence}"
    return Place(path=path, offset=offset, num_bytes=num_bytes, digest=digest, entry_id=entry_id, number=number)


def _payload(file: BinaryIO, place: Place) -> bytes:
    file.seek(place.offset - _PLACE.size)
    rest = file.read(_PLACE.size + place.num_bytes)
    if xxhash.xxh3_64_intdigest(rest) != place.digest:
        raise WireError("its contents do not match its digest")
    return rest[_PLACE.size :]
