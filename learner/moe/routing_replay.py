"""Routing replay: routes tokens to the experts that the engine, or the policy's own first pass, chose.

    rows of a micro-batch ── routes [rows, length, layers, k] ─┐
                                                               ▼
    router ─► logits, its own choice ─► how often it differs; the replayed choice ─► weights, of the learner's logits

Only the choice is replayed: weights are a softmax of the current logits, computed as each model family does, and carry
their gradient. So replaying a router's own choice changes no bit. A token without a route (the last of a turn that
another row continues, padding) goes where the learner routes it.

Rollout Routing Replay (R3: arXiv 2510.11370) replays the engine's choice in all passes. Routing Replay (R2: arXiv
2507.18071) replays that of the learner's first pass over a batch in the later ones.

Recomputing a checkpointed layer in the backward pass calls the same routers: the replayed routes stay set until the
next forward pass, and recomputation is not counted. Ranks of a context group replay and count the routes of their own
cells. The reference and a teacher route by themselves. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from streamrl.config import schema
from streamrl.config.routers import ROUTERS, find_routers
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.packing.micro_batches import NO_TOKEN, MicroBatch
from streamrl.learner.parallel.context import ContextSplit
from streamrl.protocol.wire.routes import RouteShape


class RoutingReplay:
    """Hooks on a model's routers; UserError if it has no known ones."""

    def __init__(
        self, model: transformers.PreTrainedModel, config: schema.Config, *, split: ContextSplit | None = None
    ) -> None:
        """`split`: of rows over ranks; None: rows are whole."""
        routers = find_routers(model, config)
        self._split = split
        self.shape: RouteShape = routers.shape
        self.mode = config.algorithm.routing_replay
        self._is_token = torch.zeros(0, dtype=torch.bool)  # [rows, length] in the current pass
        self._routes: torch.Tensor | None = None  # [cells, layers, k]
        self._chosen: dict[int, torch.Tensor] = {}  # layer -> [cells, k], in this pass
        self._counts: list[torch.Tensor] = []  # [3] of each layer
        self._in_forward = False
        for layer, router in routers.by_layer.items():
            router.register_forward_hook(self._hook(layer))

    @property
    def wanted(self) -> RouteShape | None:
        """The shape of the routes that groups must carry, or None."""
        return self.shape if self.mode in ("compare", "rollout") else None

    @contextmanager
    def passing(self, batch: MicroBatch) -> Iterator[None]:
        """Around a forward pass over this rank's cells; its routes stay set until the next one."""
        self._is_token = batch.is_token
        self._routes = None if batch.routes is None else batch.routes.flatten(0, 1).to(batch.input_ids.device)
        self._chosen, self._counts, self._in_forward = {}, [], True
        try:
            yield
        finally:
            self._in_forward = False

    def passed(self, batch: MicroBatch, tally: Tally, *, first: bool) -> MicroBatch:
        """Count after a forward pass; return the micro-batch for the next pass over it."""
        if self._counts and first == (self.mode != "first_pass"):  # later passes have different weights
            tally.add_routes(torch.stack(self._counts).sum(0))
        if first and self.mode == "first_pass":
            batch = replace(batch, routes=self._as_chosen())
        self._chosen, self._counts = {}, []
        return batch

    def _as_chosen(self) -> torch.Tensor:  # [rows, whole length, layers, k]
        first, *_ = self._chosen.values()
        found = first.new_zeros((self._is_token.numel(), *self.shape[:2]), dtype=torch.int16)
        for layer, chosen in self._chosen.items():
            found[:, layer] = chosen.to(torch.int16)
        found[~self._is_token.flatten()] = NO_TOKEN
        found = found.view(*self._is_token.shape, *self.shape[:2]).cpu()
        return found if self._split is None else self._split.spread(found)

    def _hook(self, layer: int) -> Any:
        def replay(router: nn.Module, _args: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            logits, weights, own = out
            if self._in_forward and self.mode == "first_pass":
                self._chosen[layer] = own.detach()
            if self._routes is None:
                return None
            given = self._routes[:, layer].to(own.dtype)
            if self._in_forward:
                self._counts.append(_count(own, given))
            if self.mode == "compare":
                return None
            chosen = torch.where(given < 0, own, given)
            return logits, weigh(router, logits, chosen).to(weights.dtype), chosen

        return replay


@torch.no_grad()
def _count(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # [cells, k] each
    """[3] tokens; those with a route; of these, those the learner would route to another set of experts."""
    is_token, has_route = given[:, 0] != NO_TOKEN, given[:, 0] >= 0
    differs = (own.sort(dim=-1).values != given.sort(dim=-1).values).any(dim=-1)
    return torch.stack([is_token.sum(), has_route.sum(), (differs & has_route).sum()])


def weigh(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:  # [cells, E], [cells, k] -> same
    """The weights that this family's router computes from its logits for these experts, operation by operation."""
    if ROUTERS[type(router).__name__] == "over chosen":
        return logits.gather(-1, chosen).softmax(dim=-1, dtype=logits.dtype)
    weights = logits.softmax(dim=-1, dtype=torch.float).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights
