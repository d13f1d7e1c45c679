"""An engine over several hosts loads a version when every host holds it, and each host holds the one it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import LoadRejected, WeightsError
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.workers.engines.vllm.loading.host_mirror import tag_of
from streamrl.workers.hosts.copy import Copy
from tests.follow_world import PATIENCE, Follower
from tests.helpers import wait_until_async
from tests.weights_world import RUN_UID, World, assert_holds, nudged, random_state


class SpoiltStore(MemoryStore):
    spoilt = False

    def get(self, name: str) -> bytes:
        blob = super().get(name)
        return bytes(len(blob)) if self.spoilt else blob


class CopyWorld:
    """A further host's copy, and the learner that publishes."""

    def __init__(self, folder: Path) -> None:
        self.store = SpoiltStore()
        self.world = World(self.store)
        self.gone: set[int] = set()
        self.on_look_up: Callable[[], None] = lambda: None
        self.mirror = Mirror(folder, run_uid=RUN_UID)
        self.copy = Copy(look_up=self._look_up, mirror=self.mirror, reading=lambda path: self.store, num_read=lambda: 0)
        rng = np.random.default_rng(0)
        states = [random_state(rng)]
        for _ in range(3):
            states.append(nudged(rng, states[-1]))
        self.states = states
        self.versions = [self.world.publish(state).version for state in states]

    async def _look_up(self, version: int) -> bytes | None:
        self.on_look_up()
        return None if version in self.gone else encode_manifest(self.world.manifests[version])

    def held(self) -> int:
        tag = tag_of(self.mirror.path)
        return int(tag.read_text()) if tag.exists() else 0


async def test_a_copy_is_brought_to_the_version_that_is_asked_for_and_says_which_it_is(tmp_path: Path) -> None:
    world = CopyWorld(tmp_path)
    for number in (1, 2, 2, 1, 3):  # also back: the first host's worker began anew with what is newest to it
        await world.copy.bring(world.versions[number], refetch=False)
        assert world.held() == world.mirror.version == world.versions[number]
        assert_holds(world.mirror.path, world.states[number])
    world.copy.close()
    assert not list(tmp_path.iterdir())


async def test_a_copy_that_cannot_be_brought_names_no_version_until_one_is_whole(tmp_path: Path) -> None:
    world = CopyWorld(tmp_path)
    await world.copy.bring(world.versions[0], refetch=False)
    world.gone.add(world.versions[3])
    with pytest.raises(WeightsError, match="a newer version has replaced it"):
        await world.copy.bring(world.versions[3], refetch=False)
    world.store.spoilt = True
    with pytest.raises(WeightsError):
        await world.copy.bring(world.versions[1], refetch=False)
    assert world.held() == 0
    world.store.spoilt = False
    await world.copy.bring(world.versions[1], refetch=False)
    assert world.held() == world.versions[1]


async def test_a_copy_that_could_not_write_which_version_it_is_does_so_when_asked_again(tmp_path: Path) -> None:
    world = CopyWorld(tmp_path)
    tag = tag_of(world.mirror.path)
    world.on_look_up = tag.mkdir  # as the disk that is full after the patch, nothing can have its name
    with pytest.raises(OSError, match="version"):
        await world.copy.bring(world.versions[0], refetch=False)
    tag.rmdir()
    world.on_look_up = lambda: None
    await world.copy.bring(world.versions[0], refetch=False)
    assert world.held() == world.mirror.version == world.versions[0]
    assert_holds(world.mirror.path, world.states[0])


async def test_a_copy_that_is_distrusted_is_fetched_anew(tmp_path: Path) -> None:
    world = CopyWorld(tmp_path)
    await world.copy.bring(world.versions[1], refetch=False)
    with world.mirror.path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")  # a bit that fell over after it was proved
    await world.copy.bring(world.versions[1], refetch=False)
    with pytest.raises(AssertionError):
        assert_holds(world.mirror.path, world.states[1])
    await world.copy.bring(world.versions[1], refetch=True)
    assert_holds(world.mirror.path, world.states[1])


class FurtherDouble:
    def __init__(self) -> None:
        self.brought: list[tuple[int, bool]] = []
        self.errors: list[Exception] = []
        self.num_arrivals, self.arrives_every_s = 0, 0.0
        self.hangs = False

    async def bring(
        self, version: int, *, refetch: bool = False, bytes_arrived: Callable[[], None] = lambda: None
    ) -> None:
        self.brought.append((version, refetch))
        for _ in range(self.num_arrivals):
            await asyncio.sleep(self.arrives_every_s)
            bytes_arrived()
        if self.errors:
            raise self.errors.pop(0)
        if self.hangs:
            await asyncio.Event().wait()


async def test_nothing_is_loaded_before_all_hosts_hold_it(tmp_path: Path) -> None:
    further = FurtherDouble()
    follower = Follower(tmp_path, further=further)
    first = follower.publish()
    async with follower.following():
        await follower.serves(first)
        further.errors = [WeightsError("gpu-2 does not have it")] * 2
        second = follower.publish()
        await follower.serves(second)
    assert further.brought == [(first.version, False), *[(second.version, False)] * 3]


async def test_hosts_that_never_hold_a_version_are_given_up_on_and_named(tmp_path: Path) -> None:
    further = FurtherDouble()
    follower = Follower(tmp_path, further=further)
    further.errors = [WeightsError("gpu-2 does not have it")] * 100
    follower.publish()
    with pytest.raises(WeightsError, match="gpu-2 does not have it"):
        await follower.weights.follow(follower.engine)


async def test_hosts_where_data_arrives_are_waited_for_however_long_it_takes(tmp_path: Path) -> None:
    further = FurtherDouble()
    further.num_arrivals, further.arrives_every_s = 20, 0.1
    follower = Follower(tmp_path, patience=replace(PATIENCE, give_up_after_s=1.0), further=further)
    first = follower.publish()
    async with follower.following():
        await follower.serves(first)
    assert further.brought == [(first.version, False)]


async def test_hosts_where_nothing_more_arrives_are_given_up_on(tmp_path: Path) -> None:
    further = FurtherDouble()
    further.num_arrivals, further.hangs = 3, True
    follower = Follower(tmp_path, patience=replace(PATIENCE, give_up_after_s=0.1), further=further)
    follower.publish()
    with pytest.raises(WeightsError, match=r"none of it arrived there within weights\.give_up_after_s=0\.1"):
        await asyncio.wait_for(follower.weights.follow(follower.engine), 10)


async def test_another_engine_finds_the_version_on_all_hosts_though_this_one_holds_it(tmp_path: Path) -> None:
    further = FurtherDouble()
    follower = Follower(tmp_path, further=further)
    first = follower.publish()
    for _ in range(2):
        async with follower.following():
            await follower.serves(first)
    assert further.brought == [(first.version, False)] * 2


async def test_after_a_rejected_load_all_hosts_fetch_the_weights_anew(tmp_path: Path) -> None:
    further = FurtherDouble()
    follower = Follower(tmp_path, further=further)
    first = follower.publish()
    engine = follower.engine
    engine.wrong = ("model.norm of rank 1, host 2 of 2 (gpu-2 on b)",)
    with pytest.raises(LoadRejected, match="host 2 of 2"):
        await follower.weights.follow(engine)
    engine.wrong = ()
    follower.weights.distrust_mirror()
    async with follower.following():
        await follower.serves(first)

        async def both() -> bool:
            return further.brought == [(first.version, False), (first.version, True)]

        await wait_until_async(both, description="the further hosts were told to fetch it anew")
