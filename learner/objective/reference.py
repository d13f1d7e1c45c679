"""The reference: the policy as it was before the run. Its own base when adapters train, else a frozen copy, which
nothing ever moves.

On a GPU the copy may wait in the host's memory (`model.reference: cpu`) and pass through the device layer by layer,
sharded over the ranks like the policy: the same numbers, for the price of copying the model once in each forward pass.
Blocks on the other ranks, where it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from streamrl.config import schema
from streamrl.learner.loading.load import load_reference
from streamrl.learner.model.lora import without_adapters
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.process.ranks import World

Reference = Callable[[MicroBatch], torch.Tensor]  # [T] log-probs under the frozen policy


def make_reference(config: schema.Config, world: World, end_ids: tuple[int, ...], policy: Policy) -> Reference:
    on_host = config.model.reference == "cpu" and world.device.type != "cpu"
    frozen = policy if config.model.lora else load_reference(config, world, end_ids, like=policy, on_host=on_host)
    return asking(frozen)


def asking(frozen: Policy) -> Reference:
    def ask(batch: MicroBatch) -> torch.Tensor:
        with evaluating(frozen), without_adapters(frozen):
            logp: torch.Tensor = frozen(replace(batch, routes=None)).logp
        return logp

    return ask
