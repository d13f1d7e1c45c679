"""Publishing: the right bits, retries from the same base, and nothing kept longer than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from learner.companion import AtOnce, Beside
from learner.distributed import World as Ranks
from learner.policy.model import Policy, load_policy
from learner.publishing.publish import Publisher
from learner.publishing.sweep import Sweeper
from streamrl.config import schema
from streamrl.errors import Fenced, ResourceError, StreamrlError, TrainingError, TransportError, WeightsError
from streamrl.transport.types import Announcement
from streamrl.weights.manifest import Manifest, decode_manifest
from streamrl.weights.mirror import Mirror
from streamrl.weights.stores import MemoryStore
from tests.learner_cases import learner_config
from tests.tiny_models import make_model
from tests.weights_world import RUN_UID, World, random_state

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


class FakeStream:
    """Keeps what was announced; refuses while told to."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.kept: list[int] = []
        self.refusal: Exception | None = None
        self.anchor_refusal: Exception | None = None

    def announce(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.manifests.append(decode_manifest(announcement.manifest))
        self.kept = list(keep)

    def lay_anchor(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        if self.anchor_refusal is not None:
            raise self.anchor_refusal
        assert announcement.version == self.manifests[-1].version
        self.manifests[-1] = decode_manifest(announcement.manifest)
        self.kept = list(keep)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A policy whose versions go to memory."""

    def __init__(
        self,
        folder: Path,
        *,
        store: MemoryStore | None = None,
        beside: Beside | AtOnce | None = None,
        epoch: int = 3,
        **weights: object,
    ) -> None:
        settings = schema.Weights(**{"dtype": "bfloat16", **weights})
        self.config = learner_config(make_model(folder / "model"), weights=settings)
        self.policy: Policy = load_policy(self.config, ALONE, (1,))
        self.store, self.stream, self.clock = store or MemoryStore(), FakeStream(), FakeClock()
        self.beside = beside or AtOnce()
        self.publisher = Publisher(
            policy=self.policy,
            config=self.config,
            world=ALONE,
            run_uid="run",
            epoch=epoch,
            store=self.store,
            announcer=self.stream,
            canary_ids=np.array([3, 4, 5, 1], dtype=np.int32),
            beside=self.beside,
            clock=self.clock,
        )

    def train(self, amount: float = 0.01) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter[..., 0] += amount

    def served(self, folder: Path) -> dict[str, torch.Tensor]:
        mirror = Mirror(folder)
        for manifest in self.stream.manifests:
            mirror.apply(manifest, self.store)
        return safetensors.torch.load_file(mirror.path)

    def is_served(self, folder: Path) -> bool:
        """What a worker has is the policy in the published dtype, bit for bit, tied head left out."""
        dtype = getattr(torch, self.config.weights.dtype)
        truth = {name: p.detach().to(dtype) for name, p in self.policy.model.named_parameters()}
        served = self.served(folder)
        return served.keys() == truth.keys() and all(torch.equal(served[name], truth[name]) for name in truth)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workers_get_the_policys_bits_as_an_anchor_and_deltas(tmp_path: Path, dtype: str) -> None:
    scene = Scene(tmp_path, dtype=dtype)
    for step in range(4):
        scene.publisher.publish(step)
        scene.train()
    scene.publisher.publish(4)
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True, False, False, False, False]
    assert scene.is_served(tmp_path / "mirror")


def has_anchor(scene: Scene) -> list[bool]:
    return [manifest.as_anchor() is not None for manifest in scene.stream.manifests]


def test_an_anchor_comes_as_often_as_set_beside_a_delta(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=3)
    for step in range(7):
        scene.publisher.publish(step)
        scene.train()
    assert has_anchor(scene) == [True, False, False, True, False, False, True]
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True] + [False] * 6


def anchor_due_at_once(folder: Path, **more: Any) -> Scene:
    """The next version is to have an anchor beside it."""
    scene = Scene(folder, anchor_every=1, **more)
    scene.publisher.begin(0)
    if isinstance(hand := scene.beside, ByHand):
        hand.work()
    assert scene.publisher.finish() is not None
    scene.train()
    return scene


def test_workers_have_the_version_before_its_anchor_is_stored(tmp_path: Path) -> None:
    """Training that waits for them goes on by then, and the next version waits for the anchor."""
    hand = ByHand()
    scene = anchor_due_at_once(tmp_path, beside=hand)
    scene.publisher.begin(1)
    hand.work(2)  # encode, ship
    published = scene.publisher.settle()
    assert published is not None
    assert published.needs == (scene.stream.manifests[1].version, scene.stream.manifests[0].version)
    assert has_anchor(scene) == [True, False]
    assert (scene.publisher.announcing, scene.publisher.busy) == (False, True)
    assert scene.is_served(tmp_path / "early")

    scene.train()  # the anchor is of the version, not of what is trained since
    hand.work()
    assert scene.publisher.settle() is None
    assert not scene.publisher.busy
    assert has_anchor(scene) == [True, True]
    anchor = scene.stream.manifests[1].as_anchor()
    assert anchor is not None
    late = Mirror(tmp_path / "late")
    late.apply(anchor, scene.store)
    assert late.path.read_bytes() == (tmp_path / "early" / "mirror.safetensors").read_bytes()


@pytest.mark.parametrize("trouble", [TransportError("away"), WeightsError("in the way")])
def test_an_anchor_that_fails_leaves_its_version_and_comes_with_the_next(
    tmp_path: Path, trouble: StreamrlError
) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.anchor_refusal = trouble
    assert scene.publisher.publish(1) is not None
    assert not scene.publisher.failing
    assert has_anchor(scene) == [True, False]
    scene.stream.anchor_refusal = None
    scene.train()
    assert scene.publisher.publish(2) is not None
    assert has_anchor(scene) == [True, False, True]
    assert [manifest.base for manifest in scene.stream.manifests[1:]] == [m.version for m in scene.stream.manifests[:2]]
    assert scene.is_served(tmp_path / "mirror")


def test_a_version_that_fails_has_no_anchor_laid_beside_it(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.refusal = TransportError("away")
    assert scene.publisher.publish(1) is None
    assert scene.publisher.failing
    assert has_anchor(scene) == [True]


def test_anchors_that_fail_for_too_long_end_the_run(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path, give_up_after_s=30.0)
    scene.stream.anchor_refusal = TransportError("away")
    for step, now in ((1, 0.0), (2, 29.0)):
        scene.clock.now = now
        assert scene.publisher.publish(step) is not None
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"no anchor of the weights could be published for 31 s"):
        scene.publisher.publish(3)


def test_a_newer_learner_ends_publishing_also_while_an_anchor_is_laid(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.anchor_refusal = Fenced("a newer epoch")
    with pytest.raises(Fenced):
        scene.publisher.publish(1)


def test_an_anchor_comes_as_soon_as_the_deltas_weigh_a_share_of_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=50, anchor_share=0.05)
    for step in range(8):
        scene.publisher.publish(step)
        scene.train()
    sizes = [manifest.num_bytes for manifest in scene.stream.manifests]
    limit = 0.05 * sizes[0]
    due = next(n for n in range(2, 8) if sum(sizes[1:n]) > limit)
    assert has_anchor(scene)[: due + 1] == [True] + [False] * (due - 1) + [True]


def test_an_anchor_comes_alone_where_deltas_are_as_large(tmp_path: Path) -> None:
    scene = Scene(tmp_path, dtype="float32")
    for step in range(6):
        scene.publisher.publish(step)
        with torch.no_grad():
            for parameter in scene.policy.parameters():
                parameter += torch.randn_like(parameter)
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True, False, True, False, True, False]
    assert not any(manifest.anchor for manifest in scene.stream.manifests)
    assert len({manifest.version for manifest in scene.stream.manifests}) == 6


def test_weights_that_were_lost_go_out_whole_and_deltas_build_on_that(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in range(2):
        scene.publisher.publish(step)
        scene.train()
    latest = scene.publisher.latest
    assert latest is not None
    first, second = (manifest.version for manifest in scene.stream.manifests)
    assert latest.needs == (second, first)

    scene.stream.manifests.clear()
    scene.publisher.begin(2, whole=True)
    anchor = scene.publisher.finish()
    assert anchor is not None
    assert anchor.needs == (anchor.version,)
    scene.train()
    scene.publisher.publish(3)
    assert [manifest.base for manifest in scene.stream.manifests] == [0, anchor.version]
    assert scene.is_served(tmp_path / "mirror")


def test_a_budget_without_room_takes_the_older_anchor_with_its_deltas() -> None:
    """Blobs that nobody needs go first, then those of the older chain, and never those of the newest."""
    world = World(MemoryStore())
    rng = np.random.default_rng(0)
    states = [random_state(rng) for _ in range(4)]
    sweeper = Sweeper(store=world.store, run_uid=RUN_UID, epoch=1, max_bytes=4 * 8_358 + 500, clock=FakeClock())
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


def test_the_anchor_beside_a_delta_is_the_same_state(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=2)
    for step in range(3):
        scene.publisher.publish(step)
        scene.train()
    anchor = scene.stream.manifests[2].as_anchor()
    assert anchor is not None
    late, close = Mirror(tmp_path / "late"), Mirror(tmp_path / "close")
    late.apply(anchor, scene.store)
    close.apply_path(scene.stream.manifests, scene.store)
    assert late.path.read_bytes() == close.path.read_bytes()


class ByHand(AtOnce):
    """A thread beside the loop that works when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, job: Callable[[], Any], /) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, job))
        return future

    def work(self, num_jobs: int | None = None) -> None:
        for future, job in self.jobs[:num_jobs]:
            future.set_result(job())
        del self.jobs[:num_jobs]


def test_training_goes_on_while_a_version_is_on_its_way(tmp_path: Path) -> None:
    """What is published are the weights as they were, not as they are by then."""
    hand = ByHand()
    scene = Scene(tmp_path, beside=hand)
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
    scene = Scene(tmp_path, beside=ByHand(), give_up_after_s=30.0)
    scene.publisher.begin(0)
    scene.clock.now = 29.0
    assert scene.publisher.settle() is None
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"no weights could be published for 31 s \(weights\.give_up_after_s"):
        scene.publisher.settle()


def test_a_failed_announcement_keeps_the_base_and_burns_the_number(scene: Scene, tmp_path: Path) -> None:
    first = scene.publisher.publish(0)
    assert first is not None
    scene.train()
    scene.stream.refusal = TransportError("away")
    assert scene.publisher.publish(1) is None
    assert scene.publisher.failing
    scene.train()
    scene.stream.refusal = None
    second = scene.publisher.publish(2)
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
    assert scene.publisher.publish(0) is None
    assert not scene.stream.manifests


def test_publishing_that_fails_for_too_long_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, give_up_after_s=30.0)
    scene.stream.refusal = TransportError("away")
    scene.publisher.publish(0)
    scene.clock.now = 29.0
    scene.publisher.publish(0)
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"weights\.give_up_after_s"):
        scene.publisher.publish(0)


def test_a_newer_learner_ends_publishing_at_once(scene: Scene) -> None:
    scene.stream.refusal = Fenced("a newer epoch")
    with pytest.raises(Fenced):
        scene.publisher.publish(0)


def test_the_last_two_anchors_are_kept_and_the_rest_goes_after_a_grace(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=2)
    scene.store.put("run/000002/7-0-abc", b"of a dead epoch")
    scene.store.put("other/000001/1-0-abc", b"of another run")
    for step in range(9):
        scene.publisher.publish(step)
        scene.train()
        scene.clock.now += 100.0
    kept = {manifest.version for manifest in scene.stream.manifests[-3:]}
    assert set(scene.stream.kept) == kept
    needed = {name for m in scene.stream.manifests if m.version in kept for name in m.blob_names}
    assert needed <= set(scene.store.list())
    assert "run/000002/7-0-abc" not in scene.store.list()
    assert "other/000001/1-0-abc" in scene.store.list()


def test_what_is_not_needed_stays_for_the_grace(scene: Scene) -> None:
    sweeper = Sweeper(store=scene.store, run_uid="run", epoch=3, clock=scene.clock)
    scene.store.put("run/000002/7-0-abc", b"of a dead epoch")
    scene.publisher.publish(0)
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
        assert scene.publisher.publish(step) is not None
        most = max(most, sum(scene.store.list().values()))
        scene.train()
    assert 2.5 * model_bytes < most <= 3.2 * model_bytes
    newest = scene.stream.manifests[-1].as_anchor()
    assert newest is not None
    assert newest.blob_names <= set(scene.store.list()), "what workers need is still there"


def test_a_model_that_does_not_fit_the_budget_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"weights\.max_store_bytes = 300000: .* need 472384 bytes in Redis"):
        Scene(tmp_path, max_store_bytes=300_000)


def test_the_canary_is_in_fp32_and_plain(scene: Scene) -> None:
    scene.publisher.publish(0)
    canary = scene.stream.manifests[0].canary
    assert canary is not None
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        logp = scene.policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    assert canary.logprobs == pytest.approx(logp.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-5)


def test_a_learner_that_resumes_twenty_steps_back_gives_no_number_again(tmp_path: Path) -> None:
    """Also what the abandoned steps published stays what it was, until it is collected."""
    before = Scene(tmp_path, anchor_every=8)
    for step in range(25):
        before.publisher.publish(step)
        before.train()
    after = Scene(tmp_path, store=before.store, epoch=4)
    blobs = dict(before.store.blobs)
    for step in range(5, 30):
        after.publisher.publish(step)
        after.train(0.02)

    old, new = ([manifest.version for manifest in scene.stream.manifests] for scene in (before, after))
    assert len(set(old + new)) == 50
    assert max(old) < min(new)
    assert after.stream.manifests[0].base == 0, "a worker of the abandoned steps finds a way"
    assert all(after.store.blobs[name] == data for name, data in blobs.items() if name in after.store.blobs)
