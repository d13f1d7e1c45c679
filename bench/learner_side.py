"""A learner of one rank with a real model: training steps, and publishing versions."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.measure import seconds
from bench.publishing import RUN_UID
from bench.training import train_once
from streamrl.config import schema
from streamrl.learner.loading.load import load_policy
from streamrl.learner.model.lora import merged_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble
from streamrl.learner.process.ranks import World
from streamrl.learner.publishing.host_copy import CastDigests, cast_digests
from streamrl.learner.publishing.publish import Publisher
from streamrl.learner.publishing.shipping import Announcer, Published
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.format import DType
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.stores import BlobStore

_LR = 1e-6
_CANARY_TOKENS = 16


class Announced:
    """Collects announcements for a mirror in the same process."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []

    def announce(self, announcement: Announcement, *, keep: list[int]) -> None:
        self.manifests.append(decode_manifest(announcement.manifest))

    def amend(self, announcement: Announcement, *, keep: list[int]) -> None:
        """Do nothing: there are no late joiners."""


class LearnerSide:
    def __init__(
        self,
        config: schema.Config,
        *,
        store: BlobStore,
        announcer: Announcer,
        background: BackgroundThread | BackgroundThreadDouble,
        num_tokens: int,
        lr: float = _LR,
    ) -> None:
        world = World(rank=0, size=1, device=torch.device("cpu"))
        self._policy: Policy = load_policy(config, world, (1,))
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
        self._num_tokens = num_tokens
        self._step = 0
        self.publisher = Publisher(
            policy=self._policy,
            config=config,
            world=world,
            run_uid=RUN_UID,
            term=1,
            store=store,
            announcer=announcer,
            canary_ids=tuple(range(3, 3 + _CANARY_TOKENS)),
            background=background,
            sweeping=BackgroundThreadDouble(),
        )

    def train(self) -> None:
        """Run one real step."""
        train_once(self._policy.model, self._optimizer, num_tokens=self._num_tokens)
        self._step += 1

    def measure_step(self, *, rows: int, length: int) -> float:
        """Time one step on this many sequences in bf16, including gradients and optimizer."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return seconds(lambda: train_once(self._policy.model, self._optimizer, num_tokens=length, num_rows=rows))

    def cast_digests(self, dtype: DType) -> CastDigests:
        """Compute the digests that a publish needs from the loop for its proof."""
        return cast_digests(self._policy.model, dtype)

    def served(self) -> dict[str, torch.Tensor]:
        """Return the tensors workers should serve; adapters are merged."""
        named = merged_parameters(self._policy.model, torch.bfloat16)
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in named}

    def begin(self) -> None:
        """Start publishing the current weights."""
        self.publisher.begin(self._step)

    def finish(self) -> Published:
        published = None
        while self.publisher.busy:
            published = self.publisher.settle(wait_s=1.0) or published
        assert published is not None, "a store on this machine takes every version"
        return published

    def publish(self) -> Published:
        """Start and finish publishing."""
        self.begin()
        return self.finish()

    def save(self, path: Path) -> int:
        """Write all weights to a file, as a trainer without versions would; return its size. No fsync."""
        named = self._policy.model.named_parameters()
        save_file({name: p.detach().to(torch.bfloat16).contiguous() for name, p in named}, path)
        return path.stat().st_size
