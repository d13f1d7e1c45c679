"""Records which experts an engine routed each token to (`algorithm.routing_replay`).

    transformers   hooks on the model's routers record the choices of each pass; rows take their own share
    vLLM           returns them with a finished sample (`enable_return_routed_experts`); only its V2 runner on GPUs does

A token's route comes from the forward pass that produced the next token. If weights change mid-sample, the KV cache may
be recomputed under the new weights (`weights.kv_cache: clear`), but routes stay those the tokens were sampled with.
No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from streamrl.config import schema
from streamrl.config.routers import SETTING, check_routing, find_routers, refuse_without_gpus, wants_routes
from streamrl.errors import ConfigError, EngineError
from streamrl.protocol.wire.routes import Routes, RouteShape, dtype_for


class Watch:
    """Records what a transformers model's routers choose during a forward pass."""

    def __init__(self, model: nn.Module, config: schema.Config) -> None:
        routers = find_routers(model, config)
        self._shape = routers.shape
        self._seen: dict[int, torch.Tensor] | None = None
        for layer, router in routers.by_layer.items():
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def see(_module: nn.Module, _args: Any, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            if self._seen is not None:
                self._seen[layer] = out[2]

        return see

    @contextmanager
    def watching(self, num_rows: int) -> Iterator[list[Routes]]:
        """Record the one pass inside. Afterwards the list holds [length, layers, experts per token] for each row."""
        found: list[Routes] = []
        self._seen = {}
        try:
            yield found
            found += self._rows(self._seen, num_rows)
        finally:
            self._seen = None

    def _rows(self, seen: Mapping[int, torch.Tensor], num_rows: int) -> list[Routes]:
        layers, chosen, experts = self._shape
        num_tokens = len(next(iter(seen.values())))
        found = np.zeros((num_tokens, layers, chosen), dtype_for(experts))
        found[:, list(seen)] = torch.stack(list(seen.values()), dim=1).cpu().numpy()
        return list(found.reshape(num_rows, -1, layers, chosen))


def vllm_args(config: schema.Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that make vLLM return routes; ConfigError if it cannot. No GPU has run this, and CPUs
    cannot: only vLLM's V2 model runner captures routes."""
    if not wants_routes(config):
        return {}
    refuse_without_gpus(config, 0 if on_cpu else 1)
    prefix = f"{SETTING} = {config.algorithm.routing_replay}"
    for found in check_routing(config):  # again here: another process started the run
        raise ConfigError(f"{prefix}: {found.key} = {found.value}: {found.remedy}")
    return {"enable_return_routed_experts": True}


def shape_of_vllm(model_config: Any) -> RouteShape:
    """Return the shape that vLLM's own capturer uses. No GPU has run this, nor `routes_of_vllm`."""
    return RouteShape(
        model_config.get_total_num_hidden_layers(),
        model_config.get_num_experts_per_tok(),
        model_config.get_num_experts(),
    )


def routes_of_vllm(rows: npt.NDArray[Any] | None, shape: RouteShape, *, num_tokens: int) -> Routes:
    """Return a sample's routes from vLLM's output: of all tokens but the last, prompt included. Up to 256 experts vLLM
    uses one byte per id; in our format the last such id marks a missing route, hence the conversion."""
    if rows is None or rows.shape != (num_tokens, shape.num_layers, shape.num_chosen):
        shape_found = "none" if rows is None else f"{rows.shape}"
        raise EngineError(
            f"vLLM returned routes of shape {shape_found} for {num_tokens} tokens of a model with {shape}"
        )
    return rows.astype(dtype_for(shape.num_experts), copy=False)
