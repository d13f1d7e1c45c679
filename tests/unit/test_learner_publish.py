"""Publishing: the right bits, retries from the same base, and nothing kept longer than needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from learner.distributed import World
from learner.model import Policy, load_policy
from learner.publish import Publisher
from learner.sweep import Sweeper
from streamrl.config import schema
from streamrl.errors import Fenced, TrainingError, TransportError
from streamrl.transport.types import Announcement
from streamrl.weights.manifest import Manifest, decode_manifest
from streamrl.weights.mirror import Mirror
from streamrl.weights.stores import MemoryStore
from tests.learner_cases import learner_config
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class FakeStream:
    """Keeps what was announced; refuses while told to."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.kept: list[int] = []
        self.refusal: Exception | None = None

    def announce(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.manifests.append(decode_manifest(announcement.manifest))
        self.kept = list(keep)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A policy whose versions go to memory."""

    def __init__(self, folder: Path, **weights: object) -> None:
        settings = schema.Weights(**{"dtype": "bfloat16", **weights})
        self.config = learner_config(make_model(folder / "model"), weights=settings)
        self.policy: Policy = load_policy(self.config, ALONE, (1,))
        self.store, self.stream, self.clock = MemoryStore(), FakeStream(), FakeClock()
        self.publisher = Publisher(
            policy=self.policy,
            config=self.config,
            world=ALONE,
            run_uid="run",
            epoch=3,
            store=self.store,
            announcer=self.stream,
            canary_ids=np.array([3, 4, 5, 1], dtype=np.int32),
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


def test_an_anchor_comes_as_often_as_set(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=3)
    for step in range(7):
        scene.publisher.publish(step)
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True, False, False, True, False, False, True]


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


def test_a_store_that_fails_is_a_failed_publish(scene: Scene) -> None:
    class FullStore(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            raise TransportError("full")

    scene.publisher._store = FullStore()
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
    needed = {shard.blob_name for m in scene.stream.manifests if m.version in kept for shard in m.shards}
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


def test_the_canary_is_in_fp32_and_plain(scene: Scene) -> None:
    scene.publisher.publish(0)
    canary = scene.stream.manifests[0].canary
    assert canary is not None
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        logp = scene.policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    assert canary.logprobs == pytest.approx(logp.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-5)
