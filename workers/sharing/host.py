"""What the workers of one host and run fetch for each other: each blob once, into a folder in shared memory.

    a blob is wanted ─► its file ─┬─► the lock is free: fetch the missing pieces one by one ─┬─► read it
                                  └─► another worker holds it: wait for its pieces ──────────┘

A file is named by the blob's digest and sizes. It holds the blob, followed by one byte per piece: 1 once the piece is
there. If a fetcher dies, the kernel releases its lock, and another worker fetches what is missing. The reader of a blob
checks its digest (`fetching.fetch`); a wrong one is discarded and read from the store.

The folder holds `share_bytes` at most, for a few minutes; the oldest files are removed first, and all of them when a
mirror needs the room. If a file cannot be had, the caller goes to the store itself: sharing is optional. Blocks on the
file system, and on another worker while its fetch makes progress (`patience_s`).
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from streamrl.crashpoints import crashpoint
from streamrl.files import take_lock
from streamrl.held_folders import share_folder
from streamrl.protocol.weights.manifest import ShardRecord

_NAME = re.compile(r"[0-9a-f]{32}-\d+-\d+")
_ROOM = "room"  # the lock for creating or removing files
_MEMBER = ".worker"  # suffix of the file that a worker keeps locked while it lives
_KEPT_S = 300.0  # by then all workers have read it or moved on; shared memory is scarce
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_MAX_READ = 1 << 30  # bytes; Linux returns less than 2 GiB per read


class SharedBlob:
    """One blob's open file; must be closed."""

    def __init__(self, descriptor: int, record: ShardRecord) -> None:
        self.record = record
        self._descriptor = descriptor

    def missing(self) -> list[int]:
        record = self.record
        present = os.pread(self._descriptor, record.num_pieces, record.num_bytes)
        return [number for number, is_present in enumerate(present) if not is_present]

    def has(self, number: int) -> bool:
        return os.pread(self._descriptor, 1, self.record.num_bytes + number) == b"\1"

    def put(self, number: int, data: bytes | bytearray | memoryview) -> None:
        place = self.record.piece(number)
        assert len(data) == place.stop - place.start, f"piece {number} has {len(data)} bytes"
        _write(self._descriptor, data, place.start)
        os.pwrite(self._descriptor, b"\1", self.record.num_bytes + number)
        crashpoint("share.piece")

    def piece(self, number: int) -> bytes:
        place = self.record.piece(number)
        return os.pread(self._descriptor, place.stop - place.start, place.start)

    def read(self) -> bytes:
        size = self.record.num_bytes
        parts = [os.pread(self._descriptor, min(_MAX_READ, size - at), at) for at in range(0, size, _MAX_READ)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the fill lock; yields False if another worker holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child shares the descriptor

    def close(self) -> None:
        os.close(self._descriptor)


Fill = Callable[[SharedBlob], None]  # writes the missing pieces


class HostShare:
    """One per worker; the folder is the host's (`files.share_folder`)."""

    def __init__(self, folder: Path, *, share_bytes: int, patience_s: float = 10.0) -> None:
        self._folder, self._share_bytes, self._patience_s = folder, share_bytes, patience_s
        self._member = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_MEMBER}"
        self._membership = take_lock(self._member)

    def close(self) -> None:
        if self._membership is not None:
            self._member.unlink(missing_ok=True)
            fcntl.flock(self._membership, fcntl.LOCK_UN)
            os.close(self._membership)
            self._membership = None

    def is_alone(self) -> bool:
        """Return whether no other worker of this host would read what we fetch."""
        return not any(_is_locked(path) for path in self._folder.glob(f"*{_MEMBER}") if path != self._member)

    def get(self, record: ShardRecord, fill: Fill) -> tuple[bytes, bool] | None:
        """Return the blob, unverified, and whether this worker fetched some of it. None if it cannot be had here.

        An exception from `fill` propagates, and the next worker goes on with the blob."""
        shared = self._open(record)
        if shared is None:
            return None
        with closing(shared):
            was_us, pause_s, last_seen = False, _FIRST_PAUSE_S, (-1, 0.0)
            while missing := shared.missing():
                with shared.locked() as ours:
                    if ours and shared.missing():
                        crashpoint("share.begun")
                        fill(shared)
                        assert not shared.missing(), f"{record.blob_name} was not filled"
                        crashpoint("share.whole")
                        was_us = True
                if ours:
                    continue
                if len(missing) != last_seen[0]:
                    last_seen = len(missing), time.monotonic()
                elif time.monotonic() - last_seen[1] > self._patience_s:
                    return None
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            return shared.read(), was_us

    def there(self, record: ShardRecord) -> list[int]:
        """Return the numbers of the pieces that are here."""
        with self._to_read(record) as shared:
            return [] if shared is None else sorted({*range(record.num_pieces)} - {*shared.missing()})

    def piece(self, record: ShardRecord, number: int) -> bytes | None:
        with self._to_read(record) as shared:
            is_present = shared is not None and 0 <= number < record.num_pieces and shared.has(number)
            return shared.piece(number) if shared is not None and is_present else None

    def discard(self, record: ShardRecord) -> None:
        """Remove a blob that did not match its digest."""
        self._path(record).unlink(missing_ok=True)

    def make_room(self, num_bytes: int) -> None:
        """Free this much of the file system for a mirror, which takes precedence over these copies."""
        if _free_bytes(self._folder) >= num_bytes:
            return
        for path in self._files():
            path.unlink(missing_ok=True)
        deadline = time.monotonic() + self._patience_s / 5  # for readers that still have one open
        while _free_bytes(self._folder) < num_bytes and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE_S)

    def _path(self, record: ShardRecord) -> Path:
        return self._folder / f"{record.digest.hex()}-{record.num_bytes}-{record.piece_bytes}"

    def _files(self) -> list[Path]:
        """The blobs' files, oldest first."""
        found = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _open(self, record: ShardRecord) -> SharedBlob | None:
        path, size = self._path(record), record.num_bytes + record.num_pieces
        with self._room() as ours:
            if not ours:
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size != size:
                    if not self._has_room(path, size):
                        path.unlink()
                        os.close(descriptor)
                        return None
                    os.posix_fallocate(descriptor, 0, size)
            except BaseException:
                os.close(descriptor)
                raise
        return SharedBlob(descriptor, record)

    @contextmanager
    def _to_read(self, record: ShardRecord) -> Iterator[SharedBlob | None]:
        try:
            descriptor = os.open(self._path(record), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        with closing(SharedBlob(descriptor, record)) as shared:
            yield shared if os.fstat(descriptor).st_size == record.num_bytes + record.num_pieces else None

    @contextmanager
    def _room(self) -> Iterator[bool]:
        """Hold the lock for creating or removing files; yields False if others keep it for too long."""
        deadline = time.monotonic() + self._patience_s / 5
        while (lock := take_lock(self._folder / _ROOM)) is None and time.monotonic() < deadline:
            time.sleep(_FIRST_PAUSE_S * random.uniform(0.5, 1.0))
        try:
            yield lock is not None
        finally:
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _has_room(self, new: Path, size: int) -> bool:
        """Remove old files that nobody is filling, and newer ones if needed; return whether the file fits now. A file
        takes at most half of the free space, since mirrors live there too."""
        others = [path for path in self._files() if path != new]
        taken = sum(path.stat().st_size for path in others)

        def fits() -> bool:
            return taken + size <= self._share_bytes and 2 * size <= _free_bytes(self._folder)

        for path in others:
            found = path.stat()
            if (time.time() - found.st_mtime > _KEPT_S or not fits()) and not _is_locked(path):
                taken -= found.st_size
                path.unlink()
        return fits()


@contextmanager
def open_share(run_uid: str, share_bytes: int, *, root: Path | None = None) -> Iterator[HostShare | None]:
    """Open the host's share; None if sharing is off. `root`: where the folder lies, if not in shared memory."""
    if not share_bytes:
        yield None
        return
    with share_folder(run_uid, root=root) as folder, closing(HostShare(folder, share_bytes=share_bytes)) as host:
        yield host


def _write(descriptor: int, data: bytes | bytearray | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    finally:
        os.close(lock)


def _free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
