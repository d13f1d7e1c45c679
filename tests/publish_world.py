"""A policy published from one rank to memory, with a stream, a clock and a thread controlled by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.loading.load import load_policy
from streamrl.learner.model.policy import Policy
from streamrl.learner.parallel.dtensors import persistent_buffers
from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble
from streamrl.learner.process.ranks import World as Ranks
from streamrl.learner.publishing.copiers import Copier
from streamrl.learner.publishing.publish import Publisher
from streamrl.learner.publishing.shipping import Published
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from tests.learner_cases import learner_config
from tests.tiny_families import make_family
from tests.tiny_models import make_model

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


class FakeStream:
    """Keeps announcements, and refuses them on request."""

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

    def amend(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        amended = decode_manifest(announcement.manifest)
        if self.anchor_refusal is not None:
            raise self.anchor_refusal
        assert amended.version == announcement.version == self.manifests[-1].version
        self.manifests[-1] = amended
        self.kept = list(keep)


def finish(publisher: Publisher) -> Published | None:
    """Wait for a version in progress, if any."""
    published = None
    while publisher.busy:
        published = publisher.settle(wait_s=1.0) or published
    return published


def publish(publisher: Publisher, step: int) -> Published | None:
    """Publish now, and wait for it."""
    publisher.begin(step)
    return finish(publisher)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A policy whose versions are stored in memory."""

    def __init__(
        self,
        folder: Path,
        *,
        store: MemoryStore | None = None,
        background: BackgroundThread | BackgroundThreadDouble | None = None,
        sweeping: BackgroundThread | BackgroundThreadDouble | None = None,
        term: int = 3,
        lora: schema.Lora | None = None,
        copier: Copier | None = None,
        family: str | None = None,
        world: Ranks = ALONE,
        **weights: object,
    ) -> None:
        settings = schema.Weights(**{"dtype": "bfloat16", **weights})
        path = make_model(folder / "model") if family is None else make_family(folder / "model", family)
        model = schema.Model(path=str(path), dtype="float32", lora=lora)
        self.config = learner_config(path, weights=settings, model=model)
        self.policy: Policy = load_policy(self.config, ALONE, (1,))
        self.store, self.stream, self.clock = store or MemoryStore(), FakeStream(), FakeClock()
        self.background = background or BackgroundThreadDouble()
        self.publisher = Publisher(
            policy=self.policy,
            config=self.config,
            world=world,
            run_uid="run",
            term=term,
            store=self.store,
            announcer=self.stream,
            canary_ids=(3, 4, 5),
            background=self.background,
            sweeping=sweeping or BackgroundThreadDouble(),
            copier=copier,
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
        """Check that a worker has the policy in the published dtype, bit for bit, without a tied head; buffers fp32."""
        dtype = getattr(torch, self.config.weights.dtype)
        truth = {name: p.detach().to(dtype) for name, p in self.policy.model.named_parameters()}
        truth |= {name: buffer.float() for name, buffer in persistent_buffers(self.policy.model)}
        served = self.served(folder)
        return served.keys() == truth.keys() and all(torch.equal(served[name], truth[name]) for name in truth)


class ByHand(BackgroundThreadDouble):
    """A background thread that works only when told to."""

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
