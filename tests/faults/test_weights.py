"""T19: a learner dies at each point of publishing; whatever it leaves, no worker ever serves weights that are wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from streamrl.crashpoints import VARIABLE, Point
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.published import read_manifests
from streamrl.protocol.weights.retention import collectable
from streamrl.protocol.weights.stores import BlobStore, open_store
from streamrl.versions import number_of, term_of
from tests.faults.publisher import publish, states
from tests.faults.report import Row, note
from tests.weights_world import RUN_UID, assert_holds

ROOT = Path(__file__).resolve().parents[2]
IN_REDIS: tuple[Point, ...] = ("blob.begun", "blob.chunk", "blob.stored", "announce.written", "amended.written")
IN_A_DIRECTORY: tuple[Point, ...] = ("blob.aside", "blob.renamed", "blob.stored", "announce.written")
# The first anchor, a delta, the delta with an anchor beside it, that anchor; for announcements, each version.
BLOBS, VERSIONS = (1, 4, 5, 7, 10), (1, 3, 4)
PASSINGS = {"announce.written": VERSIONS, "amended.written": (1,)}


def die_publishing(url: str, keys: Keys, store: str, *, crash_at: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.publisher", url, keys.name, store],
        cwd=ROOT,
        env={**os.environ, VARIABLE: crash_at},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def follow(mirror: Mirror, manifests: dict[int, Manifest], store: BlobStore) -> int:
    """How many versions a worker that follows each announcement serves; each is what was published as it."""
    num_served = 0
    for version, manifest in manifests.items():
        if version > mirror.version:
            mirror.apply_path(catch_up(mirror.version, manifest, manifests.get), store)
            assert mirror.version == version
            assert_holds(mirror.path, states(term_of(version))[number_of(version)])
            num_served += 1
    return num_served


def check(url: str, client: redis.Redis, keys: Keys, folder: Path, place: str, crash_at: str) -> None:
    store = open_store(place, client, keys)
    worker = Mirror(folder / "worker", run_uid=RUN_UID)
    die_publishing(url, keys, place, crash_at=crash_at)
    before = read_manifests(client, keys).by_version
    num_served = follow(worker, before, store)

    publish(client, keys, place, term=2)

    after = read_manifests(client, keys).by_version
    assert not before.keys() & after.keys(), "no number is given again"
    num_served += follow(worker, after, store)
    late = Mirror(folder / "late", run_uid=RUN_UID)
    num_served += follow(late, {max(after): after[max(after)]} | after, store)
    needed = {name for manifest in after.values() for name in manifest.blob_names}
    garbage = collectable(store.list(), keep=needed, run_uid=RUN_UID, term=2)
    assert set(store.list()) == needed | set(garbage), "what was left behind is found and collected"
    note(Row(scenario=f"T19 {crash_at}", injections=1, lost=0, twice=0, more={"served": num_served, "wrong": 0}))


@pytest.mark.parametrize("point", IN_REDIS)
def test_a_learner_killed_while_it_publishes_to_redis(
    redis_url: str, client: redis.Redis, keys: Keys, tmp_path: Path, point: Point
) -> None:
    check(redis_url, client, keys, tmp_path, "redis:", f"{point}:{1 if point == 'amended.written' else 3}")


@pytest.mark.parametrize("point", IN_A_DIRECTORY[:2])
def test_a_learner_killed_while_it_publishes_to_a_directory(
    redis_url: str, client: redis.Redis, keys: Keys, tmp_path: Path, point: Point
) -> None:
    check(redis_url, client, keys, tmp_path, f"file:{tmp_path / 'blobs'}", f"{point}:3")


@pytest.mark.long
@pytest.mark.parametrize("point", sorted({*IN_REDIS, *IN_A_DIRECTORY}))
def test_a_learner_killed_at_every_passing_of_every_point(
    redis_url: str, client: redis.Redis, tmp_path: Path, point: Point
) -> None:
    places = ["redis:"] if point in IN_REDIS else []
    places += [f"file:{tmp_path / 'blobs'}"] if point in IN_A_DIRECTORY else []
    for place in places:
        for passing in PASSINGS.get(point, BLOBS):
            keys = Keys(f"t19-{place[:4]}-{point}-{passing}")
            folder = tmp_path / keys.name
            folder.mkdir()
            own_place = place if place == "redis:" else f"{place}-{passing}"
            check(redis_url, client, keys, folder, own_place, f"{point}:{passing}")
