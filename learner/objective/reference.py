"""The reference policy, frozen as it was before the run: the base model if adapters train, else a frozen copy.

On a GPU the copy may be kept in host memory (`model.reference: cpu`) and pass through the device layer by layer,
sharded over the ranks like the policy: the same numbers, at the cost of copying the model once per forward pass. If
sharded, a call blocks on the other ranks.
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
    return frozen_logprobs(frozen)


def frozen_logprobs(frozen: Policy) -> Reference:
    def logprobs_of(batch: MicroBatch) -> torch.Tensor:
        with evaluating(frozen), without_adapters(frozen):
            logp: torch.Tensor = frozen(replace(batch, routes=None)).logp
        return logp

    return logprobs_of
