"""What `bench memory` compares: four learners, of models that are written down here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import transformers

from streamrl.config import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: str
    ranks: int
    layers: int | None = None  # None: all that this size has
    tokens: int = 16_384
    checkpointing: bool = True
    lora: bool = False
    context: int = 1  # ranks that share each sample
    reference: bool = True

    @property
    def config(self) -> schema.Config:
        lora = {"rank": 32, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
        return schema.Config.model_validate(
            {
                "model": {
                    "path": self.size,
                    "gradient_checkpointing": self.checkpointing,
                    "lora": lora if self.lora else None,
                },
                "data": {"train": "t"},
                "rewards": {"r": {"type": "function", "target": "exact_match"}},
                "algorithm": {"kl": {"placement": "reward" if self.reference else "none"}},
                "training": {"micro_batch_tokens": self.tokens},
                "learner": {"processes": self.ranks, "layout": {"context": self.context}},
            }
        )


CASES: dict[str, Case] = {
    "1.5B full, 1 GPU": Case(size="1.5B", ranks=1),
    "1.5B full, 1 GPU, no checkpointing, 4k": Case(size="1.5B", ranks=1, checkpointing=False, tokens=4096),
    "7B full, 4 GPUs": Case(size="7B", ranks=4),
    "32B full, 16 GPUs": Case(size="32B", ranks=16),
    "7B LoRA, 1 GPU": Case(size="7B", ranks=1, lora=True),
    "8B at 128k, 8 GPUs, context over 8": Case(size="8B", ranks=8, tokens=131_072, context=8),
    "32B at 32k, 32 GPUs, context over 2": Case(size="32B", ranks=32, tokens=32_768, context=2),
    # FSDP alone; what the reference would take beside it, no rank has.
    "30B-A3B full, 8 GPUs": Case(size="30B-A3B", ranks=8, tokens=8192, reference=False),
}
CASES = {**CASES, **{f"{name}, short": replace(case, layers=4) for name, case in CASES.items()}}
# hidden, intermediate, layers, heads, heads of keys and values, vocabulary
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
}


def model_config(size: str, layers: int | None = None) -> transformers.PretrainedConfig:
    """As Qwen2.5 has it, and of 8B as Llama 3 has; the smallest ties its head to its embeddings."""
    if size == "30B-A3B":
        return _mixture(layers)
    hidden, intermediate, all_layers, heads, kv_heads, vocabulary = _SHAPES[size]
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=size == "1.5B",
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
    )


def _mixture(layers: int | None) -> transformers.Qwen3MoeConfig:
    """Qwen3-30B-A3B."""
    return transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=layers or 48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # type: ignore[call-arg]  # it takes whatever a configuration may hold
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
    )
