"""Tiny mixtures of experts, and router arithmetic without rounding to another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from streamrl.learner.moe import routing_replay
from tests.tiny_families import make_family

NUM_EXPERTS = 8
MIXTURES = ("qwen3_moe", "gpt_oss", "mixtral")


def make_mixture(folder: Path, family: str, **changes: Any) -> Path:
    """Make one with as many experts as tests have ranks at most."""
    name = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    return make_family(folder, family, **{name: NUM_EXPERTS, **changes})


def never_round_routers(model: nn.Module) -> None:
    """Replace the routers' forward, which would compute probabilities in fp32."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter") and "GptOss" not in type(module).__name__:
            module.forward = partial(_route, module)


def _route(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), module.weight)
    weights, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


@contextmanager
def replay_never_rounding() -> Iterator[None]:
    """Inside, given routes are weighed in the logits' dtype, as Qwen3-MoE weighs them."""
    own = routing_replay.weigh
    routing_replay.weigh = lambda _router, logits, chosen: F.normalize(
        logits.softmax(-1).gather(-1, chosen), p=1, dim=-1
    )
    try:
        yield
    finally:
        routing_replay.weigh = own
