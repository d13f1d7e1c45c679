"""The policy as it was before the run: its own base when adapters train, else a frozen copy, which nothing ever moves.

On a GPU the copy may wait in the host's memory (`model.reference: cpu`) and pass through the device layer by layer,
sharded over the ranks like the policy: the same numbers, for the price of copying the model once in each forward pass.
Blocks on the other ranks, where it is sharded.
"""

from __future__ import annotations

import torch

from learner.distributed import World
from learner.policy.gradients import Reference
from learner.policy.lora import without_adapters
from learner.policy.model import load_reference
from learner.policy.packing import MicroBatch
from learner.policy.policy import Policy, evaluating
from streamrl.config import schema


def make_reference(config: schema.Config, world: World, end_ids: tuple[int, ...], policy: Policy) -> Reference:
    on_host = config.model.reference == "cpu" and world.device.type != "cpu"
    frozen = policy if config.model.lora else load_reference(config, world, end_ids, like=policy, on_host=on_host)
    return asking(frozen)


def asking(frozen: Policy) -> Reference:
    def ask(batch: MicroBatch) -> torch.Tensor:
        with evaluating(frozen), without_adapters(frozen):
            logp: torch.Tensor = frozen(batch).logp
        return logp

    return ask
