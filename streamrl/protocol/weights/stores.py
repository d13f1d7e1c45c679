"""Where blobs lie: Redis, a shared directory, an object store, or memory. Selected by `weights.store`.

A blob is there whole or not at all. What a crash in the middle of a `put` leaves behind is never given out, but listed,
so that it is collected like any other blob that nobody needs.

Blocks on Redis (within its bounds, see `transport.connection`), on the file system or on the object store. All calls
may be repeated, and made from several threads.

An object store is whatever fsspec reaches: `s3://bucket/folder`, `gs://bucket/folder`, and the like. Where credentials
and endpoints come from is for the library of that scheme: the environment of each part of the run (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, FSSPEC_S3_ANON, ...), never the configuration, which everybody may read.

A put is one call. Object stores show an object whole or not at all, also when the writer dies. Another kind of file
system may keep a part of it; that is never given out, since what a reader fetches must agree with the manifest's
digest, and it is deleted like any blob that nobody needs.

Blocks on the store: each call is tried NUM_TRIES times, besides what the library does by itself, then TransportError.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from streamrl.config.places import is_object_store
from streamrl.crashpoints import crashpoint
from streamrl.errors import ConfigError, ResourceError, TransportError, WeightsError
from streamrl.extras import install
from streamrl.files import fsync_folder
from streamrl.protocol.weights.format import check_blob_name
from streamrl.protocol.weights.redis_store import RedisStore

if TYPE_CHECKING:
    import redis

    from streamrl.config import schema
    from streamrl.protocol.transport.keys import Keys

REDIS_URL = "redis:"
_UNFINISHED = ".part"  # ends the name of what is being written


class Blobs(Protocol):
    """Bytes by name. WeightsError: not there, not whole, or there with other bytes. TransportError: not just now."""

    def get(self, name: str) -> bytes: ...


class BlobStore(Blobs, Protocol):
    def put(self, name: str, data: bytes) -> None:
        """Durable when it returns. Nothing is overwritten: the same bytes again change nothing, others are refused."""

    def part(self, name: str, place: slice) -> bytes:
        """From `place.start` to `place.stop`, or fewer bytes where the blob has no more."""
        ...

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


def refuse_too_large(model_bytes: int, settings: schema.Weights) -> None:
    """The newest anchor with its deltas, of which the last may be as large, and the next one, which must be there
    before the other may go."""
    needed = math.ceil(model_bytes * (3 + settings.anchor_share))
    if needed > settings.max_store_bytes:
        raise ResourceError(
            f"weights.max_store_bytes = {settings.max_store_bytes}: this model's weights need {needed} bytes in Redis "
            f"(three copies of {model_bytes} bytes, and deltas); raise it, or set weights.store to a shared directory "
            "or an object store"
        )


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

    def part(self, name: str, place: slice) -> bytes:
        return self.get(name)[place]

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

    def part(self, name: str, place: slice) -> bytes:
        path = self._path(name)
        with self._bounded(f"read {name}"):
            try:
                with path.open("rb") as file:
                    file.seek(place.start)
                    return file.read(place.stop - place.start)
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


T = TypeVar("T")

NUM_TRIES = 4
_FIRST_PAUSE_S = 0.2
_OPTIONS = {"local": {"auto_mkdir": True}}  # by scheme; makedirs would do for all, but makes buckets too
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # by scheme, the extra that brings its library


class ObjectStore:
    def __init__(self, url: str, *, file_system: Any, root: str, pause_s: float = _FIRST_PAUSE_S) -> None:
        self._url, self._files, self._root, self._pause_s = url, file_system, root.rstrip("/"), pause_s

    @classmethod
    def open(cls, url: str) -> ObjectStore:
        """Nothing is asked of the store yet."""
        scheme = url.partition("://")[0]
        extra = _EXTRAS.get(scheme, "objectstore")
        try:
            from fsspec.core import url_to_fs

            # What others wrote must be seen: no listings out of a cache.
            file_system, root = url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **_OPTIONS.get(scheme, {})
            )
        except ImportError as error:
            raise ResourceError(
                f"weights.store = {url!r} needs a package that is not installed, on the learner's machines and on the "
                f"workers': `{install(extra)}` ({error})"
            ) from None
        except ValueError as error:
            raise ConfigError(f"weights.store = {url!r}: {error}") from None
        return cls(url, file_system=file_system, root=root)

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def put_once() -> None:
            if self._files.exists(path):
                if self._files.cat_file(path) != data:
                    raise WeightsError(f"blob {name} is there already, with other bytes")
                return
            self._files.pipe_file(path, data)

        try:
            self._repeat(f"write {name}", put_once)
        except FileNotFoundError as error:
            raise TransportError(f"weights.store {self._url} could not write {name}: {error}") from None

    def get(self, name: str) -> bytes:
        return self._read(name)

    def part(self, name: str, place: slice) -> bytes:
        return self._read(name, start=place.start, end=place.stop)

    def _read(self, name: str, **place: int) -> bytes:
        path = self._path(name)
        try:
            data: bytes = self._repeat(f"read {name}", lambda: self._files.cat_file(path, **place))
        except FileNotFoundError:
            raise WeightsError(f"blob {name} is not in {self._url}") from None
        return data

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            self._repeat(f"delete {name}", lambda: self._files.rm_file(path))

    def list(self, prefix: str = "") -> dict[str, int]:
        try:
            found = self._repeat("be listed", lambda: self._files.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {str(path)[len(self._root) :].lstrip("/"): int(info["size"] or 0) for path, info in found.items()}
        return {name: size for name, size in sorted(sizes.items()) if name.startswith(prefix)}

    def _path(self, name: str) -> str:
        check_blob_name(name)
        return f"{self._root}/{name}"

    def _repeat(self, what: str, call: Callable[[], T]) -> T:
        pause_s = self._pause_s
        for attempt in range(1, NUM_TRIES + 1):
            try:
                return call()
            except (WeightsError, FileNotFoundError):
                raise
            except Exception as error:
                if attempt == NUM_TRIES or isinstance(error, PermissionError):
                    reason = str(error) or type(error).__name__
                    raise TransportError(f"weights.store {self._url} could not {what}: {reason}") from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s *= 2
        raise AssertionError("the last try returned or raised")
