"""A checkpoint's manifest: its content with a digest, and size and digest of each file it names. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from streamrl.errors import DataError
from streamrl.files import MISSING, naming

MANIFEST = "manifest.json"
Files = Mapping[str, tuple[int, str]]  # path within the checkpoint's folder -> (size, digest)
_SCHEMA = 4
_CHUNK_BYTES = 1 << 22


def seal(*, files: Files, state: Mapping[str, Any]) -> bytes:
    content = {"schema": _SCHEMA, "files": files, "state": state}
    return json.dumps({"content": content, "digest": _content_digest(content)}, allow_nan=False).encode()


def unseal(path: Path) -> dict[str, Any]:
    try:
        with naming(path):
            sealed = json.loads(path.read_bytes())
        content: dict[str, Any] = sealed["content"]
        intact = sealed["digest"] == _content_digest(content)
    except (*MISSING, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: missing or truncated") from None
    if not intact:
        raise DataError(f"{path}: contents do not match their digest")
    if content["schema"] != _SCHEMA:
        raise DataError(f"{path}: schema {content['schema']}; this program reads schema {_SCHEMA}")
    return content


def _content_digest(content: Mapping[str, Any]) -> str:
    # Round-trip through JSON, so that it is the same before writing and after reading (tuples, integer keys).
    plain = json.loads(json.dumps(content))
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def describe(path: Path) -> tuple[int, str]:
    """Size and digest of the file; reads all of it."""
    return path.stat().st_size, digest_of(path)


def size_of(path: Path) -> int | None:
    """None: there is no such file. (`is_file` of newer Pythons says so too of one that cannot be read now.)"""
    try:
        return path.stat().st_size
    except MISSING:
        return None


def digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with naming(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
