"""What is said to have changed in a mirror holds all that did, and nobody is told where nobody knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import WeightsError
from streamrl.protocol.weights.changes import Changed, ChangeLog
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from tests.weights_world import RUN_UID, State, World, nudged, random_state

FEW = 0.005


class Scene:
    def __init__(self, folder: Path) -> None:
        self.rng = np.random.default_rng(0)
        self.world = World(MemoryStore(), num_ranks=2)
        self.mirror = Mirror(folder, run_uid=RUN_UID)
        self.state: State = random_state(self.rng)
        self.newest = self.publish(0.0)
        self.mirror.apply(self.newest, self.world.store)

    def publish(self, share: float, *, anchor: bool = False) -> Manifest:
        self.state = nudged(self.rng, self.state, share=share)
        self.newest = self.world.publish(self.state, anchor=anchor)
        return self.newest

    def follow(self, *manifests: Manifest) -> None:
        self.mirror.apply_path(manifests, self.world.store)


def written(before: State, changed: Changed, now: State) -> State:
    """What an engine that has `before` makes of it."""
    held = {name: bits.copy() for name, bits in before.items()}
    for name, elements in changed.elements.items():
        held[name][elements.positions] = elements.bits
    return {**held, **{name: now[name] for name in changed.whole}}


def equal(one: State, other: State) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_nothing_is_known_before_somebody_has_a_version(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    scene.follow(scene.publish(FEW))

    assert scene.mirror.changed(since=scene.newest.version) is None
    assert scene.mirror.changed(since=0) is None


def test_an_engine_that_writes_what_changed_has_the_next_version(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for _ in range(5):
        before, since = scene.state, scene.mirror.version
        scene.mirror.loaded()
        scene.follow(scene.publish(FEW))

        changed = scene.mirror.changed(since=since)

        assert changed is not None
        assert changed.elements
        assert equal(written(before, changed, scene.state), scene.state)


def test_versions_that_were_passed_over_count_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before, since = scene.state, scene.mirror.version
    scene.mirror.loaded()
    scene.follow(scene.publish(FEW), scene.publish(FEW))
    scene.follow(scene.publish(FEW))

    changed = scene.mirror.changed(since=since)

    assert changed is not None
    assert equal(written(before, changed, scene.state), scene.state)


def test_a_tensor_much_of_which_changed_is_named_as_a_whole(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before, since = scene.state, scene.mirror.version
    scene.mirror.loaded()
    scene.follow(scene.publish(0.3))

    changed = scene.mirror.changed(since=since)

    assert changed is not None
    assert "model.proj" in changed.whole
    assert not changed.elements.keys() & set(changed.whole)
    assert equal(written(before, changed, scene.state), scene.state)


@pytest.mark.parametrize("how", ["anchor", "another version", "closed"])
def test_nobody_is_told_where_nobody_knows(tmp_path: Path, how: str) -> None:
    scene = Scene(tmp_path)
    since = scene.mirror.version
    scene.mirror.loaded()
    scene.follow(scene.publish(FEW, anchor=how == "anchor"))
    if how == "closed":
        scene.mirror.close()

    assert scene.mirror.changed(since=since + (how == "another version")) is None


def test_a_delta_that_fails_leaves_nothing_known(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    since = scene.mirror.version
    scene.mirror.loaded()
    manifest = scene.publish(FEW)
    scene.world.store.blobs[manifest.shards[0].blob_name] = b"something else"
    with pytest.raises(WeightsError):
        scene.follow(manifest)

    scene.follow(scene.publish(FEW, anchor=True))

    assert scene.mirror.changed(since=since) is None


def test_bits_that_were_read_are_read_again_once_the_mirror_was_patched_further() -> None:
    """Also where the next delta is cut elsewhere, so that it notes the same elements under another stretch."""
    log, elements = ChangeLog(), np.arange(100, dtype=np.uint16)
    log.begin(1)
    log.note("one", np.array([3, 50]), start=0, num_elements=1000)
    log.read("one", 0, elements)
    log.going_on()
    log.note("one", np.array([50, 60]), start=40, num_elements=1000)
    elements[[50, 60]] = 7
    log.read("one", 40, elements)

    changed = log.changed({"one": elements}, since=1)

    assert changed is not None
    assert np.array_equal(changed.elements["one"].bits, elements[changed.elements["one"].positions])


def test_a_log_keeps_no_more_positions_than_would_be_written_one_by_one() -> None:
    log = ChangeLog()
    log.begin(1)
    for _ in range(100):
        log.note("one", np.arange(10), start=0, num_elements=1000)

    changed = log.changed({"one": np.zeros(1000, dtype=np.uint16)}, since=1)

    assert changed is not None
    assert (changed.elements, changed.whole) == ({}, ("one",))
