"""Where blobs lie: Redis, a shared directory, or memory. Selected by `weights.store`.

A blob is there whole or not at all. What a crash in the middle of a `put` leaves behind is never given out, but listed,
so that it is collected like any other blob that nobody needs.

Blocks on Redis (within its bounds, see `transport.connection`) or on the file system. All calls may be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streamrl.crashpoints import crashpoint
from streamrl.durable import fsync_folder
from streamrl.errors import ConfigError, TransportError, WeightsError
from streamrl.weights.format import check_blob_name
from streamrl.weights.redis_store import RedisStore

if TYPE_CHECKING:
    import redis

    from streamrl.transport.keys import Keys

_UNFINISHED = ".part"  # ends the name of what is being written


class BlobStore(Protocol):
    """Bytes by name. WeightsError: not there, not whole, or there with other bytes. TransportError: not just now."""

    def put(self, name: str, data: bytes) -> None:
        """Durable when it returns. Nothing is overwritten: the same bytes again change nothing, others are refused."""

    def get(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None:
        """What is not there is deleted already."""

    def list(self, prefix: str = "") -> list[str]:
        """Names that begin so, in order; those of unfinished writes too."""


def open_store(url: str, client: redis.Redis, keys: Keys) -> BlobStore:
    """The store that `weights.store` names. Only the file system is touched, and that not yet."""
    if url == "redis:":
        return RedisStore(client, keys)
    folder = url.removeprefix("file:").removeprefix("//")
    if url.startswith("file:") and folder:
        return FileStore(Path(folder))
    raise ConfigError(f"weights.store: {url!r} is no store; write redis: or file:/path/to/a/shared/directory")


class MemoryStore:
    """The double: as strict as the others."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        check_blob_name(name)
        if self.blobs.setdefault(name, bytes(data)) != data:
            raise WeightsError(f"blob {name} is there already, with other bytes")

    def get(self, name: str) -> bytes:
        check_blob_name(name)
        if name not in self.blobs:
            raise WeightsError(f"blob {name} is not there")
        return self.blobs[name]

    def delete(self, name: str) -> None:
        check_blob_name(name)
        self.blobs.pop(name, None)

    def list(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.blobs if name.startswith(prefix))


class FileStore:
    """A directory that all parts share: local, or a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if name.endswith(_UNFINISHED):
            raise WeightsError(f"not the name of a blob: {name}")
        with self._bounded(f"write {name}"):
            if path.exists():
                if path.read_bytes() != data:
                    raise WeightsError(f"blob {name} is there already, with other bytes")
                return
            self._make_folder(path.parent)
            self._write(path, data)

    def get(self, name: str) -> bytes:
        path = self._path(name)
        with self._bounded(f"read {name}"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                raise WeightsError(f"blob {name} is not in {self._root}") from None

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._bounded(f"delete {name}"):
            path.unlink(missing_ok=True)
        crashpoint("blob.deleted")

    def list(self, prefix: str = "") -> list[str]:
        with self._bounded("be listed"):
            files = [path for path in self._root.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(self._root).as_posix() for path in files)
        return [name for name in names if name.startswith(prefix)]

    def _path(self, name: str) -> Path:
        check_blob_name(name)
        return self._root / name

    def _make_folder(self, folder: Path) -> None:
        if not folder.exists():
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            fsync_folder(folder.parent)

    def _write(self, path: Path, data: bytes) -> None:
        # Not a random name: what a crash leaves is then found by `list` and deleted like a blob.
        aside = path.with_name(path.name + _UNFINISHED)
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            crashpoint("blob.aside")
            aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        crashpoint("blob.renamed")
        fsync_folder(path.parent)
        crashpoint("blob.stored")

    @contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransportError(f"weights.store file:{self._root} could not {what}: {error.strerror}") from error
