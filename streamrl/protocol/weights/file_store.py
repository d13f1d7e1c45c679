"""Blobs in a directory that all processes share: local, or a network file system.

    put:  NAME.part ─► fsync ─► rename ─► fsync of the folder

Blocks on the file system; TransportError names the operation that failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.crashpoints import crashpoint
from streamrl.errors import TransportError, WeightsError
from streamrl.files import fsync_folder
from streamrl.protocol.weights.format import check_blob_name

_UNFINISHED = ".part"  # suffix of a file that is being written


class FileStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if name.endswith(_UNFINISHED):
            raise WeightsError(f"not the name of a blob: {name}")
        with self._bounded(f"write {name}"):
            if path.exists():
                if path.read_bytes() != data:
                    raise WeightsError(f"blob {name} already exists with other bytes")
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

    def delete(self, *names: str) -> None:
        for name in names:
            path = self._path(name)
            with self._bounded(f"delete {name}"):
                path.unlink(missing_ok=True)
            crashpoint("blob.deleted")

    def list(self, prefix: str = "") -> dict[str, int]:
        folder = self._root / prefix.rpartition("/")[0]  # other runs may have as many blobs
        with self._bounded("be listed"):
            sizes = {path.relative_to(self._root).as_posix(): _size(path) for path in folder.rglob("*")}
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
        # Not a random name: `list` finds what a crash leaves, and it is deleted like a blob.
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
    """None for a folder, and for a file deleted during the listing."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None
