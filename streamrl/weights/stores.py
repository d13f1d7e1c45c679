"""Where blobs lie: Redis, a shared directory, an object store, or memory. Selected by `weights.store`.

A blob is there whole or not at all. What a crash in the middle of a `put` leaves behind is never given out, but listed,
so that it is collected like any other blob that nobody needs.

Blocks on Redis (within its bounds, see `transport.connection`), on the file system or on the object store. All calls
may be repeated, and made from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streamrl.config.places import is_object_store
from streamrl.crashpoints import crashpoint
from streamrl.durable import fsync_folder
from streamrl.errors import ConfigError, TransportError, WeightsError
from streamrl.weights.format import check_blob_name
from streamrl.weights.object_store import ObjectStore
from streamrl.weights.redis_store import RedisStore

if TYPE_CHECKING:
    import redis

    from streamrl.config import schema
    from streamrl.transport.keys import Keys

REDIS_URL = "redis:"
_UNFINISHED = ".part"  # ends the name of what is being written


class BlobStore(Protocol):
    """Bytes by name. WeightsError: not there, not whole, or there with other bytes. TransportError: not just now."""

    def put(self, name: str, data: bytes) -> None:
        """Durable when it returns. Nothing is overwritten: the same bytes again change nothing, others are refused."""

    def get(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None:
        """What is not there is deleted already."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Names that begin so, in order, with their bytes; those of unfinished writes too."""


def open_store(url: str, client: redis.Redis, keys: Keys) -> BlobStore:
    """The store that `weights.store` names. Only the file system is touched, and that not yet."""
    if url == REDIS_URL:
        return RedisStore(client, keys)
    if url.startswith("file:"):
        folder = url.removeprefix("file:").removeprefix("//")
        if folder:
            return FileStore(Path(folder))
    elif is_object_store(url):
        return ObjectStore.open(url)
    raise ConfigError(
        f"weights.store: {url!r} is no store; write redis:, file:/path/to/a/shared/directory, or the URL of an object "
        "store such as s3://bucket/folder"
    )


def budget_in_redis(settings: schema.Weights) -> int:
    """Bytes that blobs may take there; 0: they lie elsewhere."""
    return settings.max_store_bytes if settings.store == REDIS_URL else 0


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

    def list(self, prefix: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in sorted(self.blobs.items()) if name.startswith(prefix)}


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

    def list(self, prefix: str = "") -> dict[str, int]:
        with self._bounded("be listed"):
            sizes = {path.relative_to(self._root).as_posix(): _size(path) for path in self._root.rglob("*")}
        return {name: size for name, size in sorted(sizes.items()) if size is not None and name.startswith(prefix)}

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


def _size(path: Path) -> int | None:
    """None for a folder, and for what was deleted while it was listed."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None
