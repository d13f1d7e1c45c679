"""Blobs in an object store: any that fsspec reaches, such as `s3://bucket/folder` or `gs://bucket/folder`.

The scheme's library finds credentials and endpoints: in the environment of each process of the run (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, FSSPEC_S3_ANON, ...), never in the configuration, which anyone may read.

A put is one call. Object stores show an object whole or not at all, even when the writer dies. Another kind of file
system may keep part of it; that is never accepted, since what a reader fetches must match the manifest's digest, and it
is deleted like any unused blob.

Blocks on the store: each call is tried NUM_TRIES times, besides the library's own retries, then raises TransportError.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from streamrl.errors import ConfigError, ResourceError, TransportError, WeightsError
from streamrl.extras import install
from streamrl.protocol.weights.format import check_blob_name

T = TypeVar("T")

NUM_TRIES = 4
_FIRST_PAUSE_S = 0.2
_OPTIONS = {"local": {"auto_mkdir": True}}  # by scheme; makedirs would work for all, but also creates buckets
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # by scheme: the extra that installs its library


class ObjectStore:
    def __init__(self, url: str, *, file_system: Any, root: str, pause_s: float = _FIRST_PAUSE_S) -> None:
        self._url, self._files, self._root, self._pause_s = url, file_system, root.rstrip("/"), pause_s

    @classmethod
    def open(cls, url: str) -> ObjectStore:
        """Open the store without a request to it."""
        scheme = url.partition("://")[0]
        extra = _EXTRAS.get(scheme, "objectstore")
        try:
            from fsspec.core import url_to_fs

            # Other processes write too: no cached listings.
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
                    raise WeightsError(f"blob {name} already exists with other bytes")
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

    def delete(self, *names: str) -> None:
        first, others = names[:1], names[1:]
        for name in first:  # alone, since s3fs does not tell of what S3 refuses to delete in bulk
            self._delete(name)
        paths = [self._path(name) for name in others]
        try:
            if paths:
                self._repeat("delete blobs", lambda: self._files.rm(paths))
        except (FileNotFoundError, TransportError):  # one is missing, or the store does not delete in bulk
            for name in others:
                self._delete(name)

    def _delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            self._repeat(f"delete {name}", lambda: self._files.rm_file(path))

    def list(self, prefix: str = "") -> dict[str, int]:
        folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")  # other runs may have as many blobs
        try:
            found = self._repeat("be listed", lambda: self._files.find(folder, detail=True))
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
