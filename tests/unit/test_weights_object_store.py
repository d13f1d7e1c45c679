"""Stores through fsspec: its own memory and local file systems, and a local S3 server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import sentinel

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.object_store import NUM_TRIES, ObjectStore
from streamrl.protocol.weights.stores import open_store
from tests.s3_server import BUCKET, ENVIRONMENT, s3_server
from tests.store_cases import check_names, check_store
from tests.weights_world import World, assert_holds, nudged, random_state


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as endpoint:
        yield endpoint


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    url = {
        "memory": f"memory://{tmp_path.name}",
        "local": f"local://{tmp_path}/blobs",
        "s3": f"s3://{BUCKET}/{tmp_path.name}",
    }
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("endpoint"))
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
    return ObjectStore.open(url[request.param])


def test_blobs_come_back_are_never_overwritten_and_go(store: ObjectStore):
    check_store(store)


def test_names_that_lead_elsewhere_are_refused(store: ObjectStore):
    check_names(store)


def test_a_worker_follows_a_learner_through_it(store: ObjectStore, tmp_path: Path):
    rng = np.random.default_rng(0)
    world = World(store, num_ranks=2)
    state = random_state(rng)
    manifests = [world.publish(state)]
    for _ in range(5):
        state = nudged(rng, state)
        manifests.append(world.publish(state))
    mirror = Mirror(tmp_path / "mirror")

    mirror.apply_path(manifests, store)

    assert_holds(mirror.path, state)


class TroubledFiles(MemoryFileSystem):
    """Fails so many times before it works."""

    num_failures = 0
    error: Exception = OSError("no route")
    cachable = False

    def cat_file(self, path, start=None, end=None, **kwargs):
        if self.num_failures:
            self.num_failures -= 1
            raise self.error
        return super().cat_file(path, start, end, **kwargs)


class CountingFiles(MemoryFileSystem):
    """Notes what is listed and deleted, and refuses some of it."""

    cachable = False
    deletes_in_bulk = True

    def __init__(self):
        super().__init__()
        self.listed, self.deleted, self.deleted_in_bulk = [], [], []
        self.refusal: Exception | None = None

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        self.listed.append(path)
        return super().find(path, maxdepth, withdirs, detail, **kwargs)

    def rm_file(self, path):
        self.deleted.append(path)
        if self.refusal is not None:
            raise self.refusal
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self.deleted_in_bulk.append(path)
        if not self.deletes_in_bulk:
            raise OSError("NotImplemented: a header you provided implies functionality that is not implemented")
        for each in path if self.refusal is None else ():  # like s3fs, which does not tell of a refusal
            super().rm_file(each)


NAMES = [f"u/000001/{n}-0-aa" for n in range(5)]


@pytest.fixture
def files() -> CountingFiles:
    return CountingFiles()


@pytest.fixture
def counted(files: CountingFiles, tmp_path: Path) -> ObjectStore:
    """A store with blobs of two runs."""
    store = ObjectStore("s3://bucket", file_system=files, root=f"/{tmp_path.name}", pause_s=0.001)
    for name in (*NAMES, "v/000001/0-0-aa"):
        store.put(name, b"x")
    return store


def test_many_blobs_are_deleted_with_two_requests(counted: ObjectStore, files: CountingFiles):
    counted.delete(*NAMES)
    assert (len(files.deleted), len(files.deleted_in_bulk)) == (1, 1)
    assert list(counted.list()) == ["v/000001/0-0-aa"]


def test_a_refusal_to_delete_is_told_though_bulk_requests_hide_it(counted: ObjectStore, files: CountingFiles):
    files.refusal = PermissionError("Access Denied")
    with pytest.raises(TransportError, match=r"could not delete u/000001/0-0-aa: Access Denied"):
        counted.delete(*NAMES)


def test_a_store_without_bulk_requests_deletes_one_by_one(counted: ObjectStore, files: CountingFiles):
    files.deletes_in_bulk = False
    counted.delete(*NAMES)
    assert list(counted.list()) == ["v/000001/0-0-aa"]


def test_only_the_folder_of_what_is_asked_for_is_listed(counted: ObjectStore, files: CountingFiles, tmp_path: Path):
    assert list(counted.list("u/")) == NAMES
    assert files.listed == [f"/{tmp_path.name}/u"]


def troubled(num_failures: int, error: Exception) -> ObjectStore:
    files = TroubledFiles()
    store = ObjectStore("s3://bucket", file_system=files, root="/troubled", pause_s=0.001)
    store.put("u/1", b"x")
    files.num_failures, files.error = num_failures, error
    return store


def test_trouble_that_passes_is_waited_out_and_trouble_that_stays_is_one_error_with_the_setting():
    assert troubled(NUM_TRIES - 1, OSError("no route")).get("u/1") == b"x"
    with pytest.raises(TransportError, match=r"weights\.store s3://bucket could not read u/1: no route"):
        troubled(NUM_TRIES, OSError("no route")).get("u/1")


def test_a_refusal_is_not_tried_again():
    store = troubled(1, PermissionError("Access Denied"))
    with pytest.raises(TransportError, match="Access Denied"):
        store.get("u/1")
    assert store.get("u/1") == b"x"


def test_a_bucket_that_is_not_there_is_a_clear_error(endpoint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore.open("s3://nobody-made-this/folder")

    with pytest.raises(
        TransportError, match=r"weights\.store s3://nobody-made-this/folder could not write u/1: .*bucket"
    ):
        store.put("u/1", b"x")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ResourceError, match=r"weights\.store = 's3://b/f' needs .*pip install .*\[s3\]"):
        ObjectStore.open("s3://b/f")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ResourceError, match=r"pip install .*\[objectstore\]"):
        ObjectStore.open("memory://f")


def test_a_scheme_that_nobody_knows_is_an_error_that_names_the_setting():
    with pytest.raises(ConfigError, match=r"weights\.store = 'nosuch://x'"):
        open_store("nosuch://x", sentinel.client, Keys("run"))


def test_the_setting_chooses_it():
    assert isinstance(open_store("memory://x", sentinel.client, Keys("run")), ObjectStore)
