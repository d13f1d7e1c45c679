"""Publishing: the right bits, retries from the same base, and nothing kept longer than needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.errors import Fenced, ResourceError, TrainingError, TransportError
from streamrl.learner.process.background import BackgroundThreadDouble
from streamrl.learner.process.ranks import World as Ranks
from streamrl.learner.publishing.sweep import Sweeper
from streamrl.protocol.weights.stores import MemoryStore
from tests.publish_world import ALONE, ByHand, FakeClock, Scene, finish, publish
from tests.weights_world import RUN_UID, World, random_state


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workers_get_the_policys_bits_as_an_anchor_and_deltas(tmp_path: Path, dtype: str) -> None:
    scene = Scene(tmp_path, dtype=dtype)
    for step in range(4):
        publish(scene.publisher, step)
        scene.train()
    publish(scene.publisher, 4)
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True, False, False, False, False]
    assert scene.is_served(tmp_path / "mirror")


def test_weights_that_were_lost_go_out_whole_and_deltas_build_on_that(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in range(2):
        publish(scene.publisher, step)
        scene.train()
    latest = scene.publisher.latest
    assert latest is not None
    first, second = (manifest.version for manifest in scene.stream.manifests)
    assert latest.needs == (second, first)

    scene.stream.manifests.clear()
    scene.publisher.begin(2, whole=True)
    anchor = finish(scene.publisher)
    assert anchor is not None
    assert anchor.needs == (anchor.version,)
    scene.train()
    publish(scene.publisher, 3)
    assert [manifest.base for manifest in scene.stream.manifests] == [0, anchor.version]
    assert scene.is_served(tmp_path / "mirror")


def test_a_budget_without_room_takes_the_older_anchor_with_its_deltas() -> None:
    """Blobs that nobody needs go first, then those of the older chain, and never those of the newest."""
    world = World(MemoryStore())
    rng = np.random.default_rng(0)
    states = [random_state(rng) for _ in range(4)]
    sweeper = Sweeper(
        store=world.store,
        run_uid=RUN_UID,
        term=1,
        max_bytes=4 * 8_358 + 500,
        background=BackgroundThreadDouble(),
        clock=FakeClock(),
    )
    world.store.put(f"{RUN_UID}/000001/9-0-abc", bytes(1000))
    for state, anchor in zip(states[:3], (True, False, True), strict=True):
        sweeper.announced(world.publish(state, anchor=anchor))
    first, second, third = world.manifests.values()

    assert sweeper.make_room(8_358)
    assert f"{RUN_UID}/000001/9-0-abc" not in world.store.list()
    assert set(world.store.list()) == first.blob_names | second.blob_names | third.blob_names

    assert sweeper.make_room(3 * 8_358)
    assert set(world.store.list()) == third.blob_names
    assert not sweeper.make_room(4 * 8_358)
    assert set(world.store.list()) == third.blob_names


def test_training_goes_on_while_a_version_is_on_its_way(tmp_path: Path) -> None:
    """What is published are the weights as they were, not as they are by then."""
    hand = ByHand()
    scene = Scene(tmp_path, background=hand)
    scene.publisher.begin(0)
    before = {name: p.detach().to(torch.bfloat16).clone() for name, p in scene.policy.model.named_parameters()}
    scene.train()
    assert scene.publisher.settle() is None
    assert scene.publisher.busy
    assert not scene.stream.manifests

    hand.work()
    published = scene.publisher.settle()

    assert published is not None
    assert published.step == 0
    assert not scene.publisher.busy
    served = scene.served(tmp_path / "mirror")
    assert all(torch.equal(served[name], before[name]) for name in before)


def test_a_version_that_does_not_get_out_ends_the_run_in_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path, background=ByHand(), give_up_after_s=30.0)
    scene.publisher.begin(0)
    scene.clock.now = 29.0
    assert scene.publisher.settle() is None
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"no weights could be published for 31 s \(weights\.give_up_after_s"):
        scene.publisher.settle()


def test_a_failed_announcement_keeps_the_base_and_burns_the_number(scene: Scene, tmp_path: Path) -> None:
    first = publish(scene.publisher, 0)
    assert first is not None
    scene.train()
    scene.stream.refusal = TransportError("away")
    assert publish(scene.publisher, 1) is None
    assert scene.publisher.failing
    scene.train()
    scene.stream.refusal = None
    second = publish(scene.publisher, 2)
    assert second is not None
    assert second.version == first.version + 2
    assert scene.stream.manifests[-1].base == first.version
    assert scene.is_served(tmp_path / "mirror")
    assert not scene.publisher.failing


def test_a_store_that_fails_is_a_failed_publish(tmp_path: Path) -> None:
    class FullStore(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            raise TransportError("full")

    scene = Scene(tmp_path, store=FullStore())
    assert publish(scene.publisher, 0) is None
    assert not scene.stream.manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class WithOthers(Ranks):
    """Beside other ranks, which are done, or wait for what this one's thread has to say."""

    are_done: Iterator[bool]  # at each time of asking

    def all_agree(self, mine: bool) -> bool:
        return mine and next(self.are_done)

    def with_own_group(self, *, timeout_s: float) -> Ranks:
        return ALONE


def beside_others(*are_done: bool) -> WithOthers:
    return WithOthers(rank=0, size=1, device=torch.device("cpu"), are_done=iter(are_done))


def test_a_defect_in_a_ranks_thread_ends_the_rank_while_the_others_wait_for_its_words(tmp_path: Path) -> None:
    """They are not done before all of them give up, with an error that says nothing of it."""
    scene = Scene(tmp_path, world=beside_others(False))
    scene.stream.refusal = ValueError("a defect")
    scene.publisher.begin(0)
    with pytest.raises(ValueError, match="a defect"):
        scene.publisher.settle()


def test_a_defect_beside_an_anchor_ends_the_rank_likewise(tmp_path: Path) -> None:
    scene = Scene(tmp_path, world=beside_others(True, True, False), anchor_every=1)
    assert publish(scene.publisher, 0) is not None
    scene.train()
    scene.stream.anchor_refusal = ValueError("a defect")
    scene.publisher.begin(1)
    with pytest.raises(ValueError, match="a defect"):
        scene.publisher.settle()


def test_publishing_that_fails_for_too_long_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, give_up_after_s=30.0)
    scene.stream.refusal = TransportError("away")
    publish(scene.publisher, 0)
    scene.clock.now = 29.0
    publish(scene.publisher, 0)
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"weights\.give_up_after_s"):
        publish(scene.publisher, 0)


def test_a_newer_learner_ends_publishing_at_once(scene: Scene) -> None:
    scene.stream.refusal = Fenced("a newer term")
    with pytest.raises(Fenced):
        publish(scene.publisher, 0)


def test_the_last_two_anchors_are_kept_and_the_rest_goes_after_a_grace(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=2)
    scene.store.put("run/000002/7-0-abc", b"of a dead term")
    scene.store.put("other/000001/1-0-abc", b"of another run")
    for step in range(9):
        publish(scene.publisher, step)
        scene.train()
        scene.clock.now += 100.0
    kept = {manifest.version for manifest in scene.stream.manifests[-3:]}
    assert set(scene.stream.kept) == kept
    needed = {name for m in scene.stream.manifests if m.version in kept for name in m.blob_names}
    assert needed <= set(scene.store.list())
    assert "run/000002/7-0-abc" not in scene.store.list()
    assert "other/000001/1-0-abc" in scene.store.list()


def test_what_is_not_needed_stays_for_the_grace(scene: Scene) -> None:
    sweeper = Sweeper(store=scene.store, run_uid="run", term=3, background=BackgroundThreadDouble(), clock=scene.clock)
    scene.store.put("run/000002/7-0-abc", b"of a dead term")
    publish(scene.publisher, 0)
    sweeper.announced(scene.stream.manifests[0])
    scene.clock.now += 30.0
    sweeper.announced(scene.stream.manifests[0])
    assert "run/000002/7-0-abc" in scene.store.list()
    scene.clock.now += 31.0
    sweeper.announced(scene.stream.manifests[0])
    assert "run/000002/7-0-abc" not in scene.store.list()


def test_a_budget_makes_room_for_the_next_version_before_the_grace_is_over(tmp_path: Path) -> None:
    model_bytes = 154_880
    scene = Scene(tmp_path, anchor_every=2, max_store_bytes=int(3.2 * model_bytes))
    most = 0
    for step in range(9):
        assert publish(scene.publisher, step) is not None
        most = max(most, sum(scene.store.list().values()))
        scene.train()
    assert 2.5 * model_bytes < most <= 3.2 * model_bytes
    newest = scene.stream.manifests[-1].as_anchor()
    assert newest is not None
    assert newest.blob_names <= set(scene.store.list()), "what workers need is still there"


def test_a_model_that_does_not_fit_the_budget_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"weights\.max_store_bytes = 300000: .* need 472384 bytes in Redis"):
        Scene(tmp_path, max_store_bytes=300_000)


def test_a_version_says_what_workers_may_try_their_engine_on(scene: Scene) -> None:
    publish(scene.publisher, 0)
    assert scene.stream.manifests[0].canary_ids == (3, 4, 5)


def test_a_learner_that_resumes_twenty_steps_back_gives_no_number_again(tmp_path: Path) -> None:
    """Also what the abandoned steps published stays what it was, until it is collected."""
    before = Scene(tmp_path, anchor_every=8)
    for step in range(25):
        publish(before.publisher, step)
        before.train()
    after = Scene(tmp_path, store=before.store, term=4)
    blobs = dict(before.store.blobs)
    for step in range(5, 30):
        publish(after.publisher, step)
        after.train(0.02)

    old, new = ([manifest.version for manifest in scene.stream.manifests] for scene in (before, after))
    assert len(set(old + new)) == 50
    assert max(old) < min(new)
    assert after.stream.manifests[0].base == 0, "a worker of the abandoned steps finds a way"
    assert all(after.store.blobs[name] == data for name, data in blobs.items() if name in after.store.blobs)
