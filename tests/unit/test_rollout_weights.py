"""The worker follows the announcements: patches its mirror ahead, loads the newest, survives what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import EngineError, LoadRejected, TransportError, WeightsError
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.versions import show, term_of
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.weights.roles import AnnouncementsDouble
from tests.follow_world import PATIENCE, Follower
from tests.helpers import wait_until_async
from tests.weights_world import assert_holds
from tests.worker_world import WorkerWorld, a_sample_request


class SlowStore(MemoryStore):
    """Gives nothing out before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.num_asked = 0

    def get(self, name: str) -> bytes:
        self.num_asked += 1
        assert self.open.wait(10), "the store was never opened"
        return super().get(name)


class AwayStore(MemoryStore):
    """Does not answer for so many calls."""

    num_refusals = 0

    def get(self, name: str) -> bytes:
        if self.num_refusals:
            self.num_refusals -= 1
            raise TransportError("no route to the store")
        return super().get(name)


class Unheard(AnnouncementsDouble):
    """Announcements that wake nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    async def await_newer(self, version: int, *, within_s: float) -> bool:
        self.num_waits += 1
        await asyncio.sleep(0)
        return False


@pytest.fixture
async def follower(tmp_path: Path) -> AsyncIterator[Follower]:
    made = Follower(tmp_path)
    yield made
    made.weights.close()


async def test_the_engine_gets_each_version_with_its_step_from_the_mirror(follower: Follower) -> None:
    async with follower.following():
        first = follower.publish()
        await follower.serves(first)
        second = follower.publish()
        await follower.serves(second)

    assert follower.engine.loads == [
        (follower.mirror.path, first.version, 0),
        (follower.mirror.path, second.version, 1),
    ]
    assert_holds(follower.mirror.path, follower.world.states[second.version])


async def test_an_engine_is_told_what_changed_since_the_version_that_it_serves(follower: Follower) -> None:
    async with follower.following():
        manifests = [follower.publish() for _ in range(2)]
        await follower.serves(manifests[-1])
        for anchor in (False, True, False):
            manifests.append(follower.publish(anchor=anchor))
            await follower.serves(manifests[-1])

    told = [None if changed is None else changed.since for changed in follower.engine.changes]
    assert told == [None, manifests[1].version, None, manifests[3].version]


async def test_an_engine_in_the_place_of_a_dead_one_is_not_told_what_changed_for_that(follower: Follower) -> None:
    async with follower.following() as task:
        await follower.serves(follower.publish())
        follower.engine.die()
        second = follower.publish()
        with pytest.raises(EngineError):
            await asyncio.wait_for(task, 10)

    replacement = EngineDouble()
    async with follower.following(replacement):
        await follower.serves(second)
        await follower.serves(follower.publish())
    assert [changed is None for changed in replacement.changes] == [True, False]


async def test_versions_announced_while_another_was_on_its_way_are_passed_over(tmp_path: Path) -> None:
    store = SlowStore()
    follower = Follower(tmp_path, store)
    async with follower.following():
        first = follower.publish()

        async def asked() -> bool:
            return store.num_asked > 0

        await wait_until_async(asked, description="the first version is being fetched")
        passed_over, newest = follower.publish(), follower.publish()
        store.open.set()
        await follower.serves(newest)

    versions = [version for _, version, _ in follower.engine.loads]
    assert versions == [first.version, newest.version]
    assert passed_over.version not in versions
    assert_holds(follower.mirror.path, follower.world.states[newest.version])
    follower.weights.close()


async def test_a_version_whose_announcement_was_not_heard_is_found_at_a_look(tmp_path: Path) -> None:
    announcements = Unheard()
    follower = Follower(tmp_path, announcements=announcements)
    async with follower.following():
        for _ in range(2):
            num_waits = announcements.num_waits

            async def waited(since: int = num_waits) -> bool:
                return announcements.num_waits > since

            await wait_until_async(waited, description="the worker waits for an announcement")
            await follower.serves(follower.publish())
    follower.weights.close()


async def test_a_worker_that_comes_late_starts_from_the_nearest_anchor(follower: Follower) -> None:
    for _ in range(3):
        follower.publish()
    follower.publish(anchor=True)
    newest = follower.publish()
    async with follower.following():
        await follower.serves(newest)

    assert_holds(follower.mirror.path, follower.world.states[newest.version])


async def test_a_version_that_cannot_be_had_is_replaced_by_a_newer_one(follower: Follower) -> None:
    async with follower.following():
        first = follower.publish()
        await follower.serves(first)
        lost = follower.publish()
        for shard in lost.shards:
            follower.store.delete(shard.blob_name)
        anchor = follower.publish(anchor=True)
        await follower.serves(anchor)

    assert lost.version not in [version for _, version, _ in follower.engine.loads]
    assert_holds(follower.mirror.path, follower.world.states[anchor.version])


async def test_a_worker_whose_way_has_a_hole_takes_the_anchor_that_was_laid_since(follower: Follower) -> None:
    """It read the manifest before, and no newer version comes."""
    follower.publish()
    newest = follower.publish()
    for shard in (*follower.world.manifests.values(),)[0].shards:
        follower.store.delete(shard.blob_name)
    anchored = follower.world.lay_anchor()
    follower.announcements.manifests[newest.version] = encode_manifest(anchored)
    async with follower.following():
        await follower.serves(newest)
    assert_holds(follower.mirror.path, follower.world.states[newest.version])


async def test_a_store_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    store = AwayStore()
    follower = Follower(tmp_path, store)
    async with follower.following():
        await follower.serves(follower.publish())
        store.num_refusals = 2
        newest = follower.publish()
        await follower.serves(newest)

    assert store.num_refusals == 0
    assert_holds(follower.mirror.path, follower.world.states[newest.version])
    follower.weights.close()


async def test_a_fetch_that_fails_after_longer_than_the_patience_is_tried_again(tmp_path: Path) -> None:
    """Such as a download of some minutes whose last blob was swept meanwhile."""
    store = SlowStore()
    follower = Follower(tmp_path, store, patience=replace(PATIENCE, give_up_after_s=0.05))
    lost = follower.publish()
    for shard in lost.shards:
        store.delete(shard.blob_name)
    async with follower.following() as task:

        async def asked() -> bool:
            return store.num_asked > 0

        await wait_until_async(asked, description="the fetch is under way")
        assert not (await asyncio.wait([task], timeout=0.1))[0], "longer than its patience"
        newest = follower.publish(anchor=True)
        store.open.set()
        await follower.serves(newest)
    follower.weights.close()


async def test_a_version_that_stays_out_of_reach_ends_the_worker(follower: Follower) -> None:
    lost = follower.publish()
    for shard in lost.shards:
        follower.store.delete(shard.blob_name)
    async with follower.following() as task:
        with pytest.raises(WeightsError, match="is not there"):
            await asyncio.wait_for(task, 10)
    assert not follower.engine.loads


async def test_a_store_that_stays_away_ends_the_worker_which_hands_back_its_tickets(tmp_path: Path) -> None:
    """Redis is not away, so nobody has to wait until the leases end."""
    store = AwayStore()
    follower = Follower(tmp_path, store)
    follower.publish()
    world = WorkerWorld(engine=EngineDouble(hold=True), weights=follower.weights)
    for number in range(3):
        world.put(number)
    task = world.start()
    await world.until(lambda: len(world.engine.requests) == 6, "all samples are in flight")

    store.num_refusals = 1 << 30
    follower.publish()
    with pytest.raises(WeightsError, match="no route to the store"):
        await asyncio.wait_for(task, 10)
    assert sorted(world.tickets.handed_back) == [0, 1, 2]
    follower.weights.close()


async def test_a_learner_that_announces_nothing_ends_the_worker(follower: Follower) -> None:
    async with follower.following() as task:
        with pytest.raises(WeightsError, match="announced no weights"):
            await asyncio.wait_for(task, 10)


async def test_what_a_former_learner_announced_is_not_of_this_term(follower: Follower) -> None:
    newest = follower.publish()
    await follower.weights.announced_in(term_of(newest.version))
    with pytest.raises(WeightsError, match="announced no weights"):
        await asyncio.wait_for(follower.weights.announced_in(term_of(newest.version) + 1), 10)


async def test_an_engine_that_replaces_a_dead_one_gets_the_weights_that_are_there(follower: Follower) -> None:
    async with follower.following() as task:
        first = follower.publish()
        await follower.serves(first)
        follower.engine.die()
        second = follower.publish()
        with pytest.raises(EngineError):
            await asyncio.wait_for(task, 10)

    replacement = EngineDouble()
    async with follower.following(replacement):
        await follower.serves(second)
    assert [version for _, version, _ in replacement.loads] == [second.version]


async def test_every_engine_takes_in_a_decoy_once_and_every_version_is_checked(follower: Follower) -> None:
    async with follower.following():
        await follower.serves(follower.publish())
        await follower.serves(second := follower.publish())
        async with asyncio.timeout(10):
            await follower.weights.proved(second.version)
    replacement = EngineDouble()
    async with follower.following(replacement):
        async with asyncio.timeout(10):
            await follower.weights.proved(second.version)

    assert (follower.engine.num_decoys, replacement.num_decoys) == (1, 1)
    assert (len(follower.engine.read_parts), len(replacement.read_parts)) == (2, 1)
    assert follower.weights.num_proved == 3


async def test_a_version_is_proved_only_after_it_is_served(follower: Follower) -> None:
    follower.engine.may_be_read.clear()
    async with follower.following():
        first = follower.publish()
        await follower.serves(first)
        proved = asyncio.create_task(follower.weights.proved(first.version))
        assert not (await asyncio.wait([proved], timeout=0.05))[0]
        follower.engine.may_be_read.set()
        await asyncio.wait_for(proved, 10)


async def test_a_refused_version_ends_following_and_shows_in_the_report(follower: Follower) -> None:
    async with follower.following() as task:
        refused = follower.publish()
        follower.engine.wrong = ("model.norm.weight",)
        with pytest.raises(LoadRejected):
            await asyncio.wait_for(task, 10)
    assert follower.weights.attempted == refused.version
    detail = follower.progress.report().detail
    assert "model.norm.weight" in str(detail["rejected"])
    assert detail["rejected_version"] == show(refused.version)


async def test_a_version_that_is_proved_takes_the_rejection_back(follower: Follower) -> None:
    refused = follower.publish()
    follower.engine.wrong = ("model.norm.weight",)
    async with follower.following() as task:
        with pytest.raises(LoadRejected):
            await asyncio.wait_for(task, 10)
    follower.engine.wrong = ()
    async with follower.following(), asyncio.timeout(10):
        await follower.weights.proved(refused.version)
        detail = follower.progress.report().detail
    assert (detail["rejected"], detail["rejected_version"]) == ("", "")


async def test_a_mirror_that_is_not_trusted_is_fetched_anew_from_an_anchor(follower: Follower) -> None:
    async with follower.following():
        await follower.serves(follower.publish())
        await follower.serves(newest := follower.publish())
    follower.mirror.path.write_bytes(b"spoilt in memory")
    follower.weights.distrust_mirror()
    async with follower.following():
        await follower.serves(newest)
        async with asyncio.timeout(10):
            await follower.weights.proved(newest.version)
    assert_holds(follower.mirror.path, follower.world.states[newest.version])


async def test_loads_with_samples_in_flight_are_counted(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.engine = EngineDouble(hold=True)
    async with follower.following():
        await follower.serves(follower.publish())
        sample = asyncio.create_task(follower.engine.generate(a_sample_request()))

        async def in_flight() -> bool:
            return follower.engine.stats().in_flight == 1

        await wait_until_async(in_flight, description="a sample is in flight")
        await follower.serves(follower.publish())
        follower.engine.release()
        await sample

    detail = follower.progress.report().detail
    assert (detail["loads"], detail["loads_in_flight"]) == (2, 1)
    assert detail["step"] == 1
    follower.weights.close()
