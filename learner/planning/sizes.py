"""The sizes of a model that memory and traffic depend on; its weights may be on `meta`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import nn

from streamrl.config import schema
from streamrl.learner.packing.attention import EAGER, MASKED, VARLEN
from streamrl.learner.packing.ways import attention_of, decoder_of, ways_of
from streamrl.learner.parallel.experts import experts_of
from streamrl.learner.parallel.tensor import Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The largest layer's experts."""

    num: int
    chosen: float  # per token of those that a rank sends
    weights: int  # of all experts
    total: int  # in all layers
    trained: int  # of these
    width: int  # between an expert's two products
    has_bias: bool  # experts also clamp and scale their gates (gpt-oss), which takes more temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model."""

    trained: int  # weights
    frozen: int
    layer: int  # weights of the largest layer, experts included
    head: int  # V x H
    outermost: int  # weights outside layers
    layers: int
    width: int
    mlp: int  # width of the MLP that all tokens go through
    queries: int
    keys: int
    heads: int
    kv_heads: int
    norms_heads: bool  # norms per head of queries and keys
    attention: str  # on a GPU, by `learner.packing.ways`' name
    may_share: bool  # ranks can split rows
    shared: Shared  # what ranks can share of layers
    experts: Experts | None

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Sizes:
        config = model.config.get_text_config()
        layers = _layers(model)
        each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        total = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        heads = getattr(config, "num_attention_heads", None) or 1
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        mixtures = [module for _, module in experts_of(model)]
        return cls(
            trained=trained,
            frozen=total - trained,
            layer=max(each, default=0),
            head=config.vocab_size * config.hidden_size,
            outermost=total - sum(each),
            layers=len(each),
            width=config.hidden_size,
            mlp=_mlp(config, some_are_dense=len(mixtures) < len(layers)),
            queries=heads * head_dim,
            keys=kv_heads * head_dim,
            heads=heads,
            kv_heads=kv_heads,
            norms_heads=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
            attention=attention_of(model.config, VARLEN),
            may_share=any(way.layout == "shared" for way in ways_of(model)),
            shared=Shared.of(model),
            experts=_experts(config, mixtures) if mixtures else None,
        )

    def divided(self, ranks: int) -> Sizes:
        """The sizes on one of so many ranks that share its layers."""
        shared = {name: getattr(self, name) // ranks for name in ("mlp", "queries", "keys", "heads")}
        others = self.shared.weights // max(1, self.layers) * (ranks - 1) // ranks
        experts = self.experts and replace(self.experts, chosen=self.experts.chosen / ranks)
        kv_heads = max(1, self.kv_heads // ranks)
        return replace(self, **shared, layer=self.layer - others, kv_heads=kv_heads, experts=experts)

    def attends(self, settings: schema.Model) -> str:
        """The attention on a GPU, with these settings."""
        return self.attention if self.attention == EAGER or settings.attention != "masked" else MASKED


def _layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    found = getattr(decoder_of(model), "layers", None)
    return list(found) if found is not None else []


def _mlp(config: transformers.PretrainedConfig, *, some_are_dense: bool) -> int:
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    if num_shared := getattr(config, "n_shared_experts", None):
        shared = num_shared * config.moe_intermediate_size
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(shared, dense) if some_are_dense else shared


def _experts(config: transformers.PretrainedConfig, mixtures: Sequence[Any]) -> Experts:
    largest = max(mixtures, key=_weights)
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    down = largest.down_proj
    return Experts(
        num=len(down),
        chosen=max(per_token) if isinstance(per_token, list) else per_token,
        weights=_weights(largest),
        total=sum(_weights(module) for module in mixtures),
        trained=sum(p.numel() for module in mixtures for p in module.parameters() if p.requires_grad),
        width=down.shape[1] if largest.is_transposed else down.shape[2],
        has_bias=largest.has_bias,
    )


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
