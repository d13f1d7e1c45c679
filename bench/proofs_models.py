"""Small models of many families, as deep as real ones, with weights on the scale of a trained model.

Standard deviations and means are SmolLM2-135M-Instruct's by kind of tensor, medians over its 30 layers; matrices are
scaled up with the square root of the ratio of widths, so that a layer's contribution to the residual stream keeps its
size. Tensors that SmolLM2 lacks (biases, query and key norms) take the scale of the most similar kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from streamrl.demos.quickstart import write_base_model

VOCABULARY = 512
WIDTH = 128
DEPTHS = (2, 12, 30, 64)
DTYPES = ("float32", "bfloat16", "fp8_per_channel")  # of the engine; FP8 is made from bfloat16
_REAL_WIDTH = 576
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# By transformers' names of their configurations. Families that vLLM runs through its transformers backend are left out:
# vLLM patches these classes, which breaks the plain model when it shares a process with the engine, as in this bench.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, **_HEADS, "tie_word_embeddings": True},
    "mistral": {**_COMMON, **_HEADS, "sliding_window": None, "head_dim": 32},
    "qwen2": {**_COMMON, **_HEADS, "tie_word_embeddings": True},
    "qwen3": {**_COMMON, **_HEADS, "head_dim": 32},
    "gemma": {**_COMMON, **_HEADS, "head_dim": 32},
    "gemma2": {**_COMMON, **_HEADS, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "gemma3_text": {**_COMMON, **_HEADS, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "phi3": {**_COMMON, **_HEADS},
    "granite": {**_COMMON, **_HEADS, "tie_word_embeddings": True},
    "stablelm": {**_COMMON, **_HEADS},
    "cohere": {**_COMMON, **_HEADS},
    "gpt2": {**_COMMON, "num_attention_heads": 4},
    "opt": {**_COMMON, "num_attention_heads": 4, "ffn_dim": 3 * WIDTH, "word_embed_proj_dim": WIDTH},
    "smollm3": {**_COMMON, **_HEADS},
    "glm4": {**_COMMON, **_HEADS, "head_dim": 32},
}

# (mean, standard deviation) in SmolLM2-135M-Instruct, by suffix of the tensor's name.
_SCALES: Mapping[str, tuple[float, float]] = {
    "embed": (0.0, 0.136),
    "q_proj": (0.0, 0.197),
    "k_proj": (0.0, 0.201),
    "v_proj": (0.0, 0.174),
    "o_proj": (0.0, 0.169),
    "gate_proj": (0.0, 0.187),
    "up_proj": (0.0, 0.199),
    "down_proj": (0.0, 0.191),
    "norm": (0.27, 0.065),
    "last norm": (1.80, 0.295),
    "bias": (0.0, 0.05),
}


def write_model(family: str, depth: int, dtype: str, folder: Path) -> Path:
    """Write a folder that transformers and vLLM can load, with the quickstart's tokenizer."""
    write_base_model(folder, seed=0)  # for its tokenizer
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], "num_hidden_layers": depth})
    torch.manual_seed(depth)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(name, parameter, less=1.0 if family.startswith("gemma") else 0.0))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "mirror.safetensors")
    return folder


def _drawn(name: str, parameter: torch.Tensor, *, less: float) -> torch.Tensor:
    """Return random values. `less`: the offset that the family's norms add to their weights."""
    kind = _kind(name, parameter)
    mean, std = _SCALES[kind]
    if parameter.ndim >= 2:
        std *= math.sqrt(_REAL_WIDTH / WIDTH)
    return mean - (less if "norm" in kind else 0.0) + std * torch.randn_like(parameter)


def _kind(name: str, parameter: torch.Tensor) -> str:
    if name.endswith("bias"):
        return "bias"
    if parameter.ndim < 2 or "norm" in name:
        return "norm" if ".layers." in name else "last norm"
    found = next((kind for kind in _SCALES if kind in name), None)
    if found is not None:
        return found
    if "lm_head" in name or "wte" in name or "wpe" in name:
        return "embed"
    return "up_proj" if "mlp" in name else "o_proj"
