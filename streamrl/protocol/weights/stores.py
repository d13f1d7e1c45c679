"""Where blobs are stored: Redis, a shared directory, an object store, or memory. `weights.store` selects.

A blob exists whole or not at all. What an interrupted `put` leaves is never returned, but listed, so that it is
collected like any unused blob.

Blocks on Redis (within its timeouts, see `transport.connection`), on the file system or on the object store. All calls
are idempotent and thread-safe.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streamrl.config.places import is_object_store
from streamrl.errors import ConfigError, ResourceError, WeightsError
from streamrl.protocol.weights.file_store import FileStore
from streamrl.protocol.weights.format import check_blob_name
from streamrl.protocol.weights.object_store import ObjectStore
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.retention import collectable

if TYPE_CHECKING:
    import redis

    from streamrl.config import schema
    from streamrl.protocol.transport.keys import Keys

REDIS_URL = "redis:"


class Blobs(Protocol):
    """Bytes by name. WeightsError: missing, incomplete, or with other bytes. TransportError: store unreachable."""

    def get(self, name: str) -> bytes: ...


class BlobStore(Blobs, Protocol):
    def put(self, name: str, data: bytes) -> None:
        """Store durably before returning. Storing the same bytes again is a no-op; other bytes are refused."""

    def part(self, name: str, place: slice) -> bytes:
        """Return the bytes from `place.start` to `place.stop`, or fewer at the blob's end."""
        ...

    def delete(self, *names: str) -> None:
        """Delete blobs, in bulk where the store can; a missing one is no error."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return names with this prefix, sorted, with their sizes; includes unfinished writes."""


def open_store(url: str, client: redis.Redis, keys: Keys) -> BlobStore:
    """Open the store that `weights.store` names, without any I/O."""
    if url == REDIS_URL:
        return RedisStore(client, keys)
    if (folder := folder_of(url)) is not None:
        return FileStore(folder)
    if is_object_store(url):
        return ObjectStore.open(url)
    raise ConfigError(
        f"weights.store: {url!r} is not a store; must be redis:, file:/path/to/a/shared/directory, or the URL of an "
        "object store such as s3://bucket/folder"
    )


def folder_of(url: str) -> Path | None:
    """Return the shared folder that `weights.store` names, if it names one."""
    folder = url.removeprefix("file:").removeprefix("//")
    return Path(folder) if url.startswith("file:") and folder else None


def delete_run(store: BlobStore, *, run_uid: str, term: int) -> int:
    """Delete the run's blobs, except those of newer terms: that learner is writing. Return the bytes freed."""
    sizes = store.list(prefix=f"{run_uid}/")
    found = collectable(sizes, keep=(), run_uid=run_uid, term=term)
    store.delete(*found)
    return sum(sizes[name] for name in found)


def budget_in_redis(settings: schema.Weights) -> int:
    """Return the bytes that blobs may take in Redis; 0: they are stored elsewhere."""
    return settings.max_store_bytes if settings.store == REDIS_URL else 0


def needed_bytes(model_bytes: int, settings: schema.Weights) -> int:
    """Return what a store must hold of this model at once.

    The newest anchor with its deltas, of which the last may be as large, and the next anchor, which must be complete
    before the old one is deleted.
    """
    return math.ceil(model_bytes * (3 + settings.anchor_share))


def refuse_too_large(model_bytes: int, settings: schema.Weights) -> None:
    """Raise ResourceError if Redis may not hold the weights of this model."""
    needed = needed_bytes(model_bytes, settings)
    if needed > settings.max_store_bytes:
        raise ResourceError(
            f"weights.max_store_bytes = {settings.max_store_bytes}: this model's weights need {needed} bytes in Redis "
            f"(three copies of {model_bytes} bytes, and deltas); raise it, or set weights.store to a shared directory "
            "or an object store"
        )


class MemoryStore:
    """The double, as strict as the real stores."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        check_blob_name(name)
        if self.blobs.setdefault(name, bytes(data)) != data:
            raise WeightsError(f"blob {name} already exists with other bytes")

    def get(self, name: str) -> bytes:
        check_blob_name(name)
        if name not in self.blobs:
            raise WeightsError(f"blob {name} is not there")
        return self.blobs[name]

    def part(self, name: str, place: slice) -> bytes:
        return self.get(name)[place]

    def delete(self, *names: str) -> None:
        for name in names:
            check_blob_name(name)
            self.blobs.pop(name, None)

    def list(self, prefix: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in sorted(self.blobs.items()) if name.startswith(prefix)}
