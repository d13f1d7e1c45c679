"""How a model may be asked for the log-probs of many sequences at once; which ways are right is tried at start.

    shared    rows of prompts with all their responses, under masks of ours
    packed    rows of whole sequences; position ids, or their lengths (varlen), say where each begins
    rows      a row for each sequence, padded at its end: right for whatever is causal
    rows, own logits     likewise, and logits come from the model, not from our head

The fastest comes first. What a few tokens cannot show is ruled by the model's configuration: no mask tells a
convolution, a recurrence or a chunk where sequences begin; sinks and soft caps are in no kernel but the model's own.

Tokens of packed sequences attend under a mask (`masked`), or are told where sequences begin (`varlen`):

    masked    PyTorch's attention with the rows' own mask; samples share their prompt; costs the square of a row
    varlen    sequences end to end, each with its prompt; costs the sum of the squares of their lengths
                  bf16 on a GPU    flash attention for many lengths, as PyTorch has it
                  elsewhere        one call of PyTorch's attention for each sequence: the double of the former

The model calls `attend` in each layer when it was loaded with VARLEN. Sliding windows are kept. A model that bends its
scores (soft caps, sinks) attends by itself: eager.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError

VARLEN = "streamrl_varlen"  # as transformers knows it
MASKED = "sdpa"
EAGER = "eager"

_HALF = (torch.float16, torch.bfloat16)
_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

Layout = Literal["shared", "packed", "rows"]

# Settings that, when they are set, say that a token's sight depends on more than a mask and position ids.
_LOCAL = re.compile(
    r"window|chunk|local|conv|mamba|ssm|state_size|block_size|block_type|index_topk|compress|ngram|alibi|mem_len|linear_"
)
_HARMLESS = re.compile(
    r"sliding_window_pattern|max_window_layers|chunk_size_feed_forward|chunk_size_lm_head|num_local_experts"
)
_WINDOW = re.compile(r"(use_)?sliding_window")  # which masks keep, ours as well as transformers'
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    layout: Layout
    attention: str  # as transformers calls it
    own_logits: bool = False

    def __str__(self) -> str:
        varlen = " (varlen)" if self.attention == VARLEN and self.layout == "packed" else ""
        return self.layout + varlen + (", own logits" if self.own_logits else "")


def attention_of(config: transformers.PretrainedConfig, wished: str) -> str:
    """What the model can have of it: some know nothing but their own plain attention. ValueError: it is no model."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise ValueError(f"transformers knows no causal language model of type {config.model_type!r}")
    model_class = known[type(config)]
    assert isinstance(model_class, type), "transformers promises a pair, which only tasks with two models have"
    # PyTorch's attention has no soft cap, and transformers leaves it out without a word.
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
    """What makes hidden states; the model itself where it does not say."""
    decoder: nn.Module = model.get_decoder()
    return getattr(model, "model", model) if decoder is model else decoder


def has_window(config: transformers.PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "sliding_window", None)) or "sliding_attention" in layer_types(config)


def layer_types(config: transformers.PretrainedConfig) -> Sequence[str]:
    return getattr(config.get_text_config(), "layer_types", None) or ()


def ways_of(model: transformers.PreTrainedModel) -> Sequence[Way]:
    """Those that nothing known of the model speaks against, the fastest first."""
    attention = model.config._attn_implementation
    plain = MASKED if attention == VARLEN else attention
    known = inspect.signature(decoder_of(model).forward).parameters
    layouts: list[Layout] = ["rows"]
    if "position_ids" in known and not unpackable(model.config):
        layouts.insert(0, "packed")
        if "attention_mask" in known:
            layouts.insert(0, "shared")
    ways = [Way(layout=layout, attention=plain) for layout in layouts]
    varlen = [Way(layout="packed", attention=VARLEN)] if attention == VARLEN else []
    eager = [Way(layout="rows", attention=EAGER)] if plain != EAGER else []
    own = [replace(way, own_logits=True) for way in (ways[-1], *eager)]
    return [*varlen, *ways, *eager, *own]


def refuse_long(model: transformers.PreTrainedModel, longest: int) -> None:
    """DataError when sequences may be longer than the model has positions, or than it turns them all alike."""
    config = model.config.get_text_config()
    limit, what = _positions(model, config)
    if limit is not None and longest > limit:
        raise DataError(
            f"model.path {model.name_or_path!r}: {what} {limit} tokens; data.max_prompt_tokens + sampling.max_tokens "
            f"is {longest}: make them smaller"
        )


def _positions(model: transformers.PreTrainedModel, config: transformers.PretrainedConfig) -> tuple[int | None, str]:
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for turns in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if turns.get("rope_type") in ("dynamic", "longrope"):
            first = turns.get("original_max_position_embeddings") or most
            return first, "by its rope_parameters all sequences of a batch change with one that is longer than"
    tables = [m for m in decoder_of(model).modules() if isinstance(m, nn.Embedding)]
    learned = [m for m in tables if m is not model.get_input_embeddings() and most and 0 <= m.num_embeddings - most < 8]
    return (most, "it has learned positions for") if learned else (None, "")


def choose(settings: schema.Model, device: torch.device) -> str:
    """transformers' name for what the setting means on this device; `auto` takes what is fastest there."""
    half_on_gpu = device.type == "cuda" and settings.dtype == "bfloat16"
    if settings.attention == "masked" or (settings.attention == "auto" and not half_on_gpu):
        return MASKED
    transformers.AttentionInterface.register(VARLEN, attend)
    return VARLEN


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [rows, heads, length, head_dim]
    key: torch.Tensor,  # [rows, kv heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv heads, length, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,  # without it each row is a sequence
    max_length_q: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # attention sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None, "sequences are told apart by where they begin"
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"model.attention: {type(module).__name__} bends its attention in a way that only `masked` may support"
        )
    rows, heads, length, head_dim = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    if torch.is_autocast_enabled(query.device.type):
        # Rotations leave queries and keys wider than autocast means them to be.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    kernel = _flash if query.is_cuda and query.dtype in _HALF else each_by_itself
    attended = kernel(q, k, v, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window)
    return attended.view(rows, length, heads, head_dim), None


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:  # [tokens, heads, head_dim]
    groups = query.shape[1] // key.shape[1]
    extra: dict[str, Any] = {"enable_gqa": groups > 1} if _KNOWS_GROUPS else {}
    if groups > 1 and not extra:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    left = -1 if window is None else window - 1
    attended = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=(left, 0), **extra
    )
    assert isinstance(attended, torch.Tensor), "nothing else was asked for"
    return attended


def each_by_itself(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:  # [tokens, heads, head_dim]
    lengths = starts.diff().tolist()
    seen = None
    if window is not None and window < longest:
        ones = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
        seen = ones.tril() & ~ones.tril(-window)
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value)), strict=True)
    attended = [
        F.scaled_dot_product_attention(
            q, k, v, None if seen is None else seen[:n, :n], is_causal=seen is None, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
        for n, (q, k, v) in zip(lengths, parts, strict=True)
    ]
    return torch.cat(attended)
