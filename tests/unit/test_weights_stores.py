"""Stores in memory and in a directory; which one a setting means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any, ClassVar
from unittest.mock import sentinel

import pytest

from streamrl.errors import ConfigError, TransportError, WeightsError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.file_store import FileStore
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.stores import BlobStore, MemoryStore, open_store
from tests.store_cases import check_names, check_store

MAKERS: list[Callable[[Path], BlobStore]] = [lambda folder: MemoryStore(), lambda folder: FileStore(folder / "blobs")]


@pytest.mark.parametrize("make", MAKERS)
def test_blobs_come_back_are_never_overwritten_and_go(tmp_path: Path, make):
    check_store(make(tmp_path))


@pytest.mark.parametrize("make", MAKERS)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, make):
    check_names(make(tmp_path))


def test_what_a_crash_left_half_written_is_never_given_out_but_listed_and_collected(tmp_path: Path):
    store = FileStore(tmp_path)
    store.put("u/000001/0-0-aa", b"whole")
    (tmp_path / "u/000001/1-0-bb.part").write_bytes(b"hal")

    with pytest.raises(WeightsError, match="is not in"):
        store.get("u/000001/1-0-bb")
    assert list(store.list()) == ["u/000001/0-0-aa", "u/000001/1-0-bb.part"]
    store.delete("u/000001/1-0-bb.part")
    assert list(store.list()) == ["u/000001/0-0-aa"]


class Watched(PosixPath):
    """Notes which folders are listed."""

    listed: ClassVar[list[str]] = []

    def rglob(self, pattern: str, **options: Any) -> Any:
        self.listed.append(self.as_posix())
        return super().rglob(pattern, **options)


def test_only_the_folder_of_what_is_asked_for_is_listed(tmp_path: Path):
    store = FileStore(Watched(tmp_path))
    for name in ("u/000001/0-0-aa", "v/000001/0-0-bb"):
        store.put(name, b"x")
    assert list(store.list("u/")) == ["u/000001/0-0-aa"]
    assert list(store.list("w/")) == []
    assert Watched.listed == [f"{tmp_path}/u", f"{tmp_path}/w"]


def test_a_blob_may_not_be_named_like_an_unfinished_one(tmp_path: Path):
    with pytest.raises(WeightsError, match="not the name of a blob"):
        FileStore(tmp_path).put("u/000001/0-0-aa.part", b"")


def test_writing_leaves_nothing_beside_the_blob(tmp_path: Path):
    FileStore(tmp_path).put("u/000001/0-0-aa", b"x")

    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0-0-aa"]


def test_a_directory_that_cannot_be_used_is_worth_another_try(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    store = FileStore(tmp_path / "file")

    with pytest.raises(TransportError, match=r"could not write u/1: Not a directory"):
        store.put("u/1", b"x")
    with pytest.raises(TransportError, match="could not read u/1"):
        store.get("u/1")


def test_the_setting_chooses_the_store(tmp_path: Path):
    keys = Keys("run")

    assert isinstance(open_store("redis:", sentinel.client, keys), RedisStore)
    for url in (f"file:{tmp_path}", f"file://{tmp_path}"):
        open_store(url, sentinel.client, keys).put("a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["", "redis", "redis:x", "redis://host", "file:", "file://", "s3:bucket", "/tmp"])
def test_an_unknown_store_is_an_error_that_names_the_setting(url):
    with pytest.raises(ConfigError, match=r"weights.store: .* is not a store; must be redis:, file:"):
        open_store(url, sentinel.client, Keys("run"))
