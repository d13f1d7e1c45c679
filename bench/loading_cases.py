"""The models of `bench loading`: two mixtures of experts of published sizes, and a small one with real weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    family: str
    settings: Mapping[str, Any]
    ranks: int
    packed: bool = False  # experts stored as four-bit numbers

    @property
    def short(self) -> Case:
        """Return the case with four layers."""
        return replace(self, settings={**self.settings, "num_hidden_layers": 4})

    @property
    def config(self) -> transformers.PretrainedConfig:
        settings = dict(self.settings)
        if self.family == "gpt_oss":
            kinds = ("sliding_attention", "full_attention")
            settings["layer_types"] = [kinds[layer % 2] for layer in range(settings["num_hidden_layers"])]
        found: transformers.PretrainedConfig = transformers.AutoConfig.for_model(self.family, **settings)
        return found


_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
_GPT_OSS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,
}

CASES: Mapping[str, Case] = {
    "Qwen3-30B-A3B, 8 ranks": Case(family="qwen3_moe", settings=_QWEN, ranks=8),
    "gpt-oss-120b, 32 ranks": Case(family="gpt_oss", settings=_GPT_OSS, ranks=32),
    "gpt-oss-120b in four bits, 32 ranks": Case(family="gpt_oss", settings=_GPT_OSS, ranks=32, packed=True),
}
_SMALL = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
}
REAL = Case(family="qwen3_moe", settings={**_QWEN, **_SMALL}, ranks=8)
