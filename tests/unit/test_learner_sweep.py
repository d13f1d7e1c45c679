"""Old blobs are deleted beside publishing: no version waits for it, and none loses a blob to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble
from streamrl.learner.publishing.sweep import Sweeper
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.stores import MemoryStore
from tests.helpers import wait_until
from tests.publish_world import ByHand, FakeClock, Scene, finish
from tests.weights_world import RUN_UID, World, nudged, random_state

_GRACE_S = 61.0  # and a second


class WatchedStore(MemoryStore):
    """Notes each deletion, which takes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.deletions: list[tuple[str, ...]] = []
        self.reached, self.let_go = threading.Event(), threading.Event()

    def delete(self, *names: str) -> None:
        if names:
            self.deletions.append(names)
            self.reached.set()
            assert self.let_go.wait(60)
        super().delete(*names)


@pytest.mark.timeout(120)
def test_versions_and_anchors_get_out_while_a_slow_store_deletes(tmp_path: Path) -> None:
    store, publishing, sweeping = WatchedStore(), BackgroundThread("publisher"), BackgroundThread("sweeper")
    store.put("run/000002/7-0-abc", b"of a dead term")
    scene = Scene(tmp_path, store=store, background=publishing, sweeping=sweeping, anchor_every=1)

    def publishes() -> None:
        scene.train()
        scene.clock.now += _GRACE_S
        scene.publisher.begin(0)
        assert scene.publisher.settle(wait_s=20.0) is not None
        finish(scene.publisher)
        assert scene.stream.manifests[-1].as_anchor() is not None

    def deletes() -> bool:
        publishes()
        return store.reached.is_set()

    with scene.publisher.working():
        try:
            wait_until(deletes, description="the dead term's blob is being deleted")
            publishes()
            publishes()
        finally:
            store.let_go.set()
        wait_until(lambda: "run/000002/7-0-abc" not in store.list(), description="it is deleted in the end")


class Sweeping:
    """A sweeper, and ranks that publish into its store."""

    def __init__(self, *, background: BackgroundThreadDouble | None = None) -> None:
        store = WatchedStore()
        store.let_go.set()
        self.world, self.clock, self._rng = World(store, term=2), FakeClock(), np.random.default_rng(0)
        self._state = random_state(self._rng)
        self.sweeper = Sweeper(
            store=store, run_uid=RUN_UID, term=2, background=background or BackgroundThreadDouble(), clock=self.clock
        )

    def store(self, *, anchor: bool = False) -> Manifest:
        self._state = nudged(self._rng, self._state)
        return self.world.publish(self._state, anchor=anchor)

    def announce(self, manifest: Manifest) -> None:
        self.clock.now += _GRACE_S
        self.sweeper.announced(manifest)

    def announce_the_newest(self) -> None:
        self.announce(list(self.world.manifests.values())[-1])


def test_a_version_on_its_way_to_the_store_loses_no_blob_however_long_that_takes() -> None:
    sweeping = Sweeping()
    first = sweeping.store()
    sweeping.store()  # not announced yet
    sweeping.world.lay_anchor()
    on_its_way = sweeping.world.store.list()
    for _ in range(3):
        sweeping.announce(first)
    assert sweeping.world.store.list() == on_its_way


def test_an_anchor_on_its_way_to_the_store_loses_no_blob_either() -> None:
    sweeping = Sweeping()
    sweeping.store()
    newest = sweeping.store()
    anchor = sweeping.world.lay_anchor()
    for _ in range(3):
        sweeping.announce(newest)
    assert anchor.blob_names <= set(sweeping.world.store.list())


def test_what_a_failed_attempt_left_goes_once_a_later_version_is_out() -> None:
    sweeping, failed = Sweeping(), f"{RUN_UID}/000002/1-0-abc"
    sweeping.store()
    sweeping.world.store.put(failed, b"of rank 0; another rank's failed")
    for _ in range(2):
        sweeping.announce_the_newest()
    assert failed in sweeping.world.store.list()
    for _ in range(2):
        sweeping.store()
        sweeping.announce_the_newest()
    sweeping.announce_the_newest()
    assert failed not in sweeping.world.store.list()


def test_the_blobs_of_earlier_terms_are_deleted_with_one_call() -> None:
    sweeping = Sweeping()
    old = tuple(f"{RUN_UID}/000001/{n}-0-abc" for n in range(20))
    for name in old:
        sweeping.world.store.put(name, b"old")
    sweeping.store()
    for _ in range(2):
        sweeping.announce_the_newest()
    [deletion] = sweeping.world.store.deletions
    assert sorted(deletion) == sorted(old)


def test_one_sweep_runs_at_a_time() -> None:
    hand = ByHand()
    sweeping = Sweeping(background=hand)
    sweeping.store()
    for _ in range(3):
        sweeping.announce_the_newest()
    assert len(hand.jobs) == 1
    hand.work()
    sweeping.announce_the_newest()
    assert len(hand.jobs) == 1


def test_a_sweep_that_comes_late_deletes_nothing_that_is_newer_than_it() -> None:
    """It is told what is needed when it is begun."""
    hand = ByHand()
    sweeping = Sweeping(background=hand)
    for _ in range(3):
        sweeping.store(anchor=True)
        sweeping.announce_the_newest()
    first, second, third = (manifest.blob_names for manifest in sweeping.world.manifests.values())
    hand.work()  # as of the first version
    sweeping.announce_the_newest()
    hand.work()
    assert set(sweeping.world.store.list()) == first | second | third, "the first is noted just now"
    sweeping.announce_the_newest()
    hand.work()
    assert set(sweeping.world.store.list()) == second | third
