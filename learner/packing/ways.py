"""The ways to call a model for the log-probs of many sequences; a trial at start picks the fastest correct one.

    shared    rows of prompts with all their responses, under our masks or with their lengths (varlen)
    packed    rows of whole sequences; position ids, or their lengths (varlen), mark where each begins
    rows      a row for each sequence, padded at its end: correct for every causal model
    rows, own logits     likewise, with logits from the model, not from our head

The fastest comes first. The model's configuration rules on what a few tokens cannot show: convolutions, recurrences and
chunks ignore masks that mark where sequences begin; only the model's own kernel has its sinks and soft caps.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import transformers
from torch import nn

from streamrl.errors import DataError
from streamrl.learner.packing.attention import EAGER, MASKED, VARLEN

Layout = Literal["shared", "packed", "rows"]

# Settings that, when set, make a token's context depend on more than a mask and position ids.
_LOCAL = re.compile(
    r"window|chunk|local|conv|mamba|ssm|state_size|block_size|block_type|index_topk|compress|ngram|alibi|mem_len|linear_"
)
_HARMLESS = re.compile(
    r"sliding_window_pattern|max_window_layers|chunk_size_feed_forward|chunk_size_lm_head|num_local_experts"
)
_WINDOW = re.compile(r"(use_)?sliding_window")  # supported by masks, ours as well as transformers'
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    layout: Layout
    attention: str  # transformers' name
    own_logits: bool = False

    def __str__(self) -> str:
        varlen = " (varlen)" if self.attention == VARLEN and self.layout != "rows" else ""
        return self.layout + varlen + (", own logits" if self.own_logits else "")


def attention_of(config: transformers.PretrainedConfig, wished: str) -> str:
    """The wanted attention, or what the model supports instead; ValueError if it is not a causal language model."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise ValueError(f"transformers knows no causal language model of type {config.model_type!r}")
    model_class = known[type(config)]
    assert isinstance(model_class, type), "only tasks with two models have a pair of classes"
    # PyTorch's attention has no soft cap, and transformers omits it silently.
    if not model_class._supports_sdpa or getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return EAGER
    if wished == VARLEN and not (model_class._supports_attention_backend and not unpackable(config)):
        return MASKED
    return wished


def unpackable(config: transformers.PretrainedConfig) -> list[str]:
    """The settings, or kinds of layers, that forbid packing."""
    config = config.get_text_config()
    found = [
        name
        for name, value in config.to_dict().items()
        if value and _LOCAL.search(name) and not _HARMLESS.search(name) and not _WINDOW.fullmatch(name)
    ]
    return found + sorted(set(layer_types(config)) - _PACKABLE_LAYERS)


def decoder_of(model: transformers.PreTrainedModel) -> nn.Module:
    """The module that computes hidden states; the model itself if it does not name one."""
    decoder: nn.Module = model.get_decoder()
    return getattr(model, "model", model) if decoder is model else decoder


def has_window(config: transformers.PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "sliding_window", None)) or "sliding_attention" in layer_types(config)


def layer_types(config: transformers.PretrainedConfig) -> Sequence[str]:
    return getattr(config.get_text_config(), "layer_types", None) or ()


def ways_of(model: transformers.PreTrainedModel) -> Sequence[Way]:
    """The ways that the model's configuration allows, the fastest first."""
    attention = model.config._attn_implementation
    plain = MASKED if attention == VARLEN else attention
    known = inspect.signature(decoder_of(model).forward).parameters
    layouts: list[Layout] = ["rows"]
    if "position_ids" in known and not unpackable(model.config):
        layouts.insert(0, "packed")
        if "attention_mask" in known:
            layouts.insert(0, "shared")
    ways = [Way(layout=layout, attention=plain) for layout in layouts]
    flat: list[Layout] = [] if attention != VARLEN else ["packed"] if has_window(model.config) else ["shared", "packed"]
    varlen = [Way(layout=layout, attention=VARLEN) for layout in flat]
    eager = [Way(layout="rows", attention=EAGER)] if plain != EAGER else []
    own = [replace(way, own_logits=True) for way in (ways[-1], *eager)]
    return [*varlen, *ways, *eager, *own]


def refuse_long(model: transformers.PreTrainedModel, longest: int) -> None:
    """DataError if sequences may exceed the model's positions, or the length beyond which its RoPE scaling changes."""
    config = model.config.get_text_config()
    limit, what = _positions(model, config)
    if limit is not None and longest > limit:
        raise DataError(
            f"model.path {model.name_or_path!r}: {what} {limit} tokens, but a row may have {longest}: reduce "
            "data.max_prompt_tokens + sampling.max_tokens (of `streamrl sft`: --max-tokens)"
        )


def _positions(model: transformers.PreTrainedModel, config: transformers.PretrainedConfig) -> tuple[int | None, str]:
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for turns in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if turns.get("rope_type") in ("dynamic", "longrope"):
            first = turns.get("original_max_position_embeddings") or most
            return first, "its rope_parameters change all sequences of a batch if one is longer than"
    tables = [m for m in decoder_of(model).modules() if isinstance(m, nn.Embedding)]
    learned = [m for m in tables if m is not model.get_input_embeddings() and most and 0 <= m.num_embeddings - most < 8]
    return (most, "it has learned positions for") if learned else (None, "")
