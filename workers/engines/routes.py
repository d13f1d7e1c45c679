"""How engines tell by which experts they routed a token (`algorithm.routing_replay`).

    transformers   hooks on the model's routers see what each pass chose; rows take their own of it
    vLLM           tells it with a finished sample (`enable_return_routed_experts`), which its V2 runner does on GPUs

A token's route is that of the pass which made the next one: where weights change in mid sample, keys and values may be
computed anew under the new ones (`weights.kv_cache: clear`), and routes stay those that tokens were sampled by. Neither
way has run on a GPU.
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
    """Of a transformers model's routers: what they choose in a pass."""

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
        """Of the one pass inside, after it: [length, layers, experts a token] of each row."""
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
    """What vLLM is asked with so that it tells routes; ConfigError where it could not. No GPU has run this, and
    nothing else can: vLLM's V2 model runner captures them."""
    if not wants_routes(config):
        return {}
    refuse_without_gpus(config, 0 if on_cpu else 1)
    begin = f"{SETTING} = {config.algorithm.routing_replay}"
    for found in check_routing(config):  # also of a run that others began
        raise ConfigError(f"{begin}: {found.key} = {found.value}: {found.remedy}")
    return {"enable_return_routed_experts": True}


def shape_of_vllm(model_config: Any) -> RouteShape:
    """As vLLM's own capturer asks for it. No GPU has run this, nor what follows."""
    return RouteShape(
        model_config.get_total_num_hidden_layers(),
        model_config.get_num_experts_per_tok(),
        model_config.get_num_experts(),
    )


def routes_of_vllm(rows: npt.NDArray[Any] | None, shape: RouteShape, *, num_tokens: int) -> Routes:
    """What vLLM's output has of a sample: all but its last token, the prompt's included. vLLM's ids are a byte each up
    to 256 experts, of which ours would take the last one for a missing route."""
    if rows is None or rows.shape != (num_tokens, shape.num_layers, shape.num_chosen):
        told = "none" if rows is None else f"{rows.shape}"
        raise EngineError(f"vLLM told {told} as routes of {num_tokens} tokens, of a model that has {shape}")
    return rows.astype(dtype_for(shape.num_experts), copy=False)
