"""Writes a recording: appends, starts a new file when one is full, and deletes the oldest when there is too much.

One writer per folder, guarded by a lock that the kernel releases with the process. A later writer, also after a crash,
continues after the last complete group in a new file: a torn one is left as it is. `sync` makes what was appended
durable. Blocks on the disk only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from streamrl.errors import DataError, ResourceError
from streamrl.files import fsync_folder, locked
from streamrl.protocol.recording import MAX_FRAME_BYTES, Origin, begin_file, file_name, files_of, group_frame, survey
from streamrl.protocol.transport.types import START, Entry, entry_order

LOCK = "recording.lock"


@dataclass(slots=True, kw_only=True)
class Written:
    """Statistics of this writer."""

    num_groups: int = 0
    num_bytes: int = 0
    num_too_large: int = 0  # entries larger than any group may be
    num_dropped: int = 0  # groups deleted with old files


@dataclass(slots=True, kw_only=True)
class _RecordingFile:
    path: Path
    num_bytes: int
    num_groups: int


class RecordingWriter:
    def __init__(self, folder: Path, origin: Origin, *, file_bytes: int, max_bytes: int) -> None:
        """`max_bytes` limits the whole folder, `file_bytes` a file, give or take a group."""
        assert file_bytes * 2 <= max_bytes, "the newest file is never deleted, so there must be room for two"
        self._folder, self._origin = folder, origin
        self._file_bytes, self._max_bytes = file_bytes, max_bytes
        self.written = Written()
        self.last_id = START  # of the last recorded group, also by earlier writers
        folder.mkdir(parents=True, exist_ok=True)
        taken = f"another process records into {folder}; stop it, or choose another folder"
        with ExitStack() as stack:
            stack.enter_context(locked(folder / LOCK, taken=taken))
            self._files = self._survey()
            self._lock = stack.pop_all()
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_file()
        self._lock.close()

    @property
    def num_files(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Size of the whole folder."""
        return sum(file.num_bytes for file in self._files)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append in stream order. ResourceError if the disk is full: what was appended before stays valid."""
        for entry in entries:
            assert entry_order(entry.id) > entry_order(self.last_id), "a recording holds each entry once, in order"
            self.last_id = entry.id
            frame = group_frame(entry)
            if len(frame) > MAX_FRAME_BYTES:
                self.written.num_too_large += 1
                continue
            self._put(frame)
            self._files[-1].num_groups += 1
            self.written.num_groups += 1
            self.written.num_bytes += len(frame)

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def _put(self, frame: bytes) -> None:
        if self._descriptor is not None and self._files[-1].num_bytes + len(frame) > self._file_bytes:
            self._finish_file()
        if self._descriptor is None:
            self._begin_file()
        self._make_room(len(frame))
        self._write(frame)

    def _begin_file(self) -> None:
        number = max((int(file.path.stem) for file in self._files), default=0) + 1
        path = self._folder / file_name(number)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._files.append(_RecordingFile(path=path, num_bytes=0, num_groups=0))
        self._write(begin_file(self._origin))
        fsync_folder(self._folder)

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None, "a file is open"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise ResourceError(
                f"{self._files[-1].path} cannot be written: {error.strerror}; free space (or lower --max-bytes), "
                "and start the recording again: it continues where it stopped"
            ) from None
        self._files[-1].num_bytes += len(data)

    def _finish_file(self) -> None:
        if self._descriptor is not None:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = None

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self._max_bytes and len(self._files) > 1:
            oldest = self._files.pop(0)
            oldest.path.unlink(missing_ok=True)
            self.written.num_dropped += oldest.num_groups

    def _survey(self) -> list[_RecordingFile]:
        """Index the existing files; sets `last_id`."""
        files: list[_RecordingFile] = []
        for path in files_of(self._folder):
            found = survey(path)
            if found.origin is not None and found.origin.run_uid != self._origin.run_uid:
                raise DataError(
                    f"{self._folder} holds a recording of another run ({found.origin.run}, uid {found.origin.run_uid})"
                    "; record this run into its own folder"
                )
            if found.places:
                self.last_id = found.places[-1].entry_id
            files.append(_RecordingFile(path=path, num_bytes=path.stat().st_size, num_groups=len(found.places)))
        return files
