"""Attention over packed sequences: under a mask (`masked`), or with sequence boundaries (`varlen`).

    masked    PyTorch's attention with the rows' own mask; samples share their prompt; costs the square of a row
    varlen    concatenated sequences; samples share their prompt too (`prefixes`), unless the model has windows; costs
              the sum of the squares of their lengths
                  bf16 on a GPU    PyTorch's variable-length flash attention
                  elsewhere        one call of PyTorch's attention per sequence: the double of the former

A model loaded with VARLEN calls `attend` in each layer. Sliding windows are supported. A model that modifies its scores
(soft caps, sinks) uses its own attention: eager.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention.varlen import varlen_attn

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.packing.prefixes import Flash, Prefixes, attend_twice, each_with_its_prompt

VARLEN = "streamrl_varlen"  # registered in transformers under this name
MASKED = "sdpa"
EAGER = "eager"

_HALF = (torch.float16, torch.bfloat16)
_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def choose(settings: schema.Model, device: torch.device) -> str:
    """The transformers name of the configured attention on this device; `auto` takes the fastest one."""
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
    cu_seq_lens_q: torch.Tensor | None = None,  # None: each row is one sequence
    max_length_q: int | None = None,
    prefixes: Prefixes | None = None,  # None: each sequence begins with its prompt
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # attention sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None, "sequences are marked by their starts, not by a mask"
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"model.attention: {type(module).__name__} modifies its attention in a way that only `masked` may support"
        )
    rows, heads, length, head_dim = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings leave queries and keys in a wider dtype than autocast's.
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    on_flash = query.is_cuda and query.dtype in _HALF
    if prefixes is None:
        kernel = _flash if on_flash else each_by_itself
        attended = kernel(q, k, v, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window)
    else:
        assert sliding_window is None, "prompts are not shared under a window"
        if on_flash:
            attended = attend_twice(q, k, v, cu_seq_lens_q, max_length_q, prefixes, scale=scaling, kernel=Flash())
        else:
            attended = each_with_its_prompt(q, k, v, cu_seq_lens_q, prefixes, scale=scaling)
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
    assert isinstance(attended, torch.Tensor), "no other outputs were requested"
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
