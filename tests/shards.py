"""Writes a rank's trained state without a training loop."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from streamrl.learner.checkpoints.shard import Shard
from streamrl.learner.process.ranks import World


def write_shard(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    shard = Shard(policy, optimizer, world)
    shard.take()
    shard.write(folder)
