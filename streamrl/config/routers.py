"""Routers of mixtures of experts whose choices streamrl can read and replay, by the names of their transformers
classes.

Both sides find them in their own models: the transformers engine to report the choices, the learner to repeat them.
Each returns (logits, weights of the chosen experts, the chosen experts), [tokens, ...] each.

Some routers choose by their logits and a bias that balances the load. No gradient reaches it, and bfloat16 is too
coarse for it, so both sides keep it as a buffer, in float32 (`keep_biases`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.config import schema
from streamrl.config.explain import Problem
from streamrl.errors import ConfigError, DataError
from streamrl.protocol.wire.routes import MAX_ROUTE_BYTES, REMEDY, RouteShape

# Weights are a softmax over all experts, restricted to the chosen ones and, in most families, normalised to a sum of
# 1 | over the chosen ones alone.
Softmax = Literal["over all", "over chosen"]
ROUTERS: Mapping[str, Softmax] = {
    "GptOssTopKRouter": "over chosen",
    "MiniMaxTopKRouter": "over all",
    "MixtralTopKRouter": "over all",
    "OlmoeTopKRouter": "over all",
    "Qwen2MoeTopKRouter": "over all",
    "Qwen3MoeTopKRouter": "over all",
    "Qwen3NextTopKRouter": "over all",
}
# Names of such a bias in transformers' families, whether the router has it or a module around or inside it.
SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")
SETTING = "algorithm.routing_replay"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_OTHERS = re.compile(r"(Router|Gate|Gating)$")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Settings that split vLLM's model so that no process sees all routes of a token.
_SPREADS = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")


def wants_routes(config: schema.Config) -> bool:
    """Return whether workers must report routes."""
    return config.algorithm.routing_replay in ("compare", "rollout")


def check_routing(config: schema.Config) -> Iterator[Problem]:
    """Check what is visible without the model."""
    settings, worker = config.algorithm, config.worker
    if settings.routing_replay == "first_pass" and settings.reinforce_epochs == 1:
        remedy = "algorithm.reinforce_epochs = 1 makes one pass only, so nothing would be replayed; set rollout or none"
        yield Problem(key=SETTING, remedy=remedy)
    if not wants_routes(config) or worker.engine != "vllm":
        return
    for name in _SPREADS:
        if (size := worker.engine_args.get(name, 1)) not in (None, 1):
            remedy = "no vLLM process would see all routes of a token; remove it (tensor_parallel_size may stay)"
            yield Problem(key=f"worker.engine_args.{name}", value=size, remedy=f"{remedy}, or set {SETTING}=none")
    if worker.engine_args.get("enable_prefix_caching") is False:
        remedy = "vLLM stores routes with its prefix cache, which this turns off; remove it"
        key = "worker.engine_args.enable_prefix_caching"
        yield Problem(key=key, value=False, remedy=f"{remedy}, or set {SETTING}=none")


def refuse_without_gpus(config: schema.Config, num_gpus: int) -> None:
    """ConfigError if workers run here and could not report routes."""
    if wants_routes(config) and config.worker.engine == "vllm" and not num_gpus:
        raise ConfigError(
            f"{SETTING} = {config.algorithm.routing_replay}: vLLM reports routes on GPUs only, and this machine has "
            "none; set worker.engine=transformers, or this to none"
        )


def keep_biases(model: Any) -> None:
    """Make buffers of the biases that the model has as parameters; most families have them as buffers already."""
    for module in model.modules():
        for name in SELECTION_BIASES:
            if name in module._parameters:
                module.register_buffer(name, module._parameters.pop(name).detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRouters:
    by_layer: Mapping[int, Any]  # modules; layers without experts are missing
    shape: RouteShape


def find_routers(model: Any, config: schema.Config) -> FoundRouters:
    """Find a transformers model's routers. DataError if it has none, or unknown ones; ConfigError if a group's routes
    might not fit into its message."""
    subject = (
        f"{SETTING} = {config.algorithm.routing_replay}: model.path {config.model.path!r} is a {type(model).__name__}"
    )
    settings = model.config.get_text_config()
    found: dict[int, Any] = {}
    unknown: set[str] = set()
    for name, module in model.named_modules():
        kind, layer = type(module).__name__, _LAYER.search(name)
        if kind in ROUTERS and layer is not None:
            found[int(layer[1])] = module
        elif _OTHERS.search(kind):
            unknown.add(kind)
    if unknown or (not found and any(getattr(settings, name, None) for name in _EXPERTS)):
        kinds = ", ".join(sorted(unknown)) or "no router module of their own"
        raise DataError(
            f"{subject}, whose experts are chosen by {kinds}; supported: {', '.join(ROUTERS)}: set it to none"
        )
    if not found:
        raise DataError(f"{subject}, which has no experts: set it to none")
    shapes = {(router.top_k, router.num_experts) for router in found.values()}
    if len(shapes) != 1:
        raise DataError(f"{subject}, whose layers differ in their experts, {sorted(shapes)}: set it to none")
    [(num_chosen, num_experts)] = shapes
    shape = RouteShape(settings.num_hidden_layers, num_chosen, num_experts)
    if wants_routes(config):
        refuse_large(config, shape)
    return FoundRouters(by_layer=found, shape=shape)


def refuse_large(config: schema.Config, shape: RouteShape) -> None:
    """ConfigError if a group's routes might be too large; known before any ticket is issued."""
    num_tokens = config.data.max_prompt_tokens + config.sampling.num_samples * config.max_response_tokens
    if (size := shape.plain_bytes(num_tokens)) > MAX_ROUTE_BYTES:
        raise ConfigError(
            f"{SETTING} = {config.algorithm.routing_replay}: a group of {num_tokens} tokens may have {size} bytes of "
            f"routes ({shape.num_layers} layers, {shape.num_chosen} experts a token); the limit is {MAX_ROUTE_BYTES}: "
            f"{REMEDY}"
        )
