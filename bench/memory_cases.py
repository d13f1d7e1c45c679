"""The cases of `bench memory`: learners of models whose shapes are listed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import transformers

from bench import loading_cases
from streamrl.config import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: str
    ranks: int
    layers: int | None = None  # None: all layers of this size
    tokens: int = 16_384
    checkpointing: bool = True
    lora: bool = False
    context: int = 1  # ranks that share each sample
    experts: int = 1  # ranks that share each layer's experts
    tensor: int = 1  # ranks that share each layer
    longest: int | None = None  # longest sample in tokens; None: as long as a micro-batch
    reference: bool = True

    @property
    def length(self) -> int:
        """Return the tokens of a row."""
        return self.longest or self.tokens

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
                "data": {"train": "t", "max_prompt_tokens": self.length // 4},
                "sampling": {"max_tokens": self.length - self.length // 4},
                "rewards": {"r": {"type": "function", "target": "exact_match"}},
                "algorithm": {"kl": {"placement": "reward" if self.reference else "none"}},
                "training": {"micro_batch_tokens": self.tokens},
                "learner": {
                    "processes": self.ranks,
                    "layout": {"context": self.context, "experts": self.experts, "tensor": self.tensor},
                },
            }
        )


CASES: dict[str, Case] = {
    "1.5B full, 1 GPU": Case(size="1.5B", ranks=1),
    "1.5B full, 1 GPU, no checkpointing, 4k": Case(size="1.5B", ranks=1, checkpointing=False, tokens=4096),
    "7B full, 4 GPUs": Case(size="7B", ranks=4),
    "32B full, 16 GPUs": Case(size="32B", ranks=16),
    "7B LoRA, 1 GPU": Case(size="7B", ranks=1, lora=True),
    "8B at 128k, 8 GPUs, context over 8": Case(size="8B", ranks=8, tokens=131_072, context=8),
    "8B at 128k, 8 GPUs, context over 2": Case(size="8B", ranks=8, tokens=131_072, context=2),
    "32B at 16k, 16 GPUs, tensor over 8": Case(size="32B", ranks=16, tensor=8),
    "32B at 32k, 32 GPUs": Case(size="32B", ranks=32, tokens=32_768),
    "32B at 32k, 32 GPUs, context over 2": Case(size="32B", ranks=32, tokens=32_768, context=2),
    # FSDP alone; a reference would not fit beside it on any rank.
    "30B-A3B full, 8 GPUs": Case(size="30B-A3B", ranks=8, tokens=8192, reference=False),
    "30B-A3B full, 8 GPUs, experts over 8": Case(size="30B-A3B", ranks=8, tokens=8192, reference=False, experts=8),
    # Uses its own eager attention, whose memory is quadratic in the sample's length.
    "gpt-oss-120b at 8k, 32 GPUs, experts over 32, context over 8": Case(
        size="gpt-oss-120b", ranks=32, tokens=8192, reference=False, experts=32, context=8
    ),
}
CASES = {**CASES, **{f"{name}, short": replace(case, layers=4) for name, case in CASES.items()}}
_MIXTURES: Mapping[str, str] = {"30B-A3B": "Qwen3-30B-A3B, 8 ranks", "gpt-oss-120b": "gpt-oss-120b, 32 ranks"}
# hidden, intermediate, layers, heads, KV heads, vocabulary
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
    "405B": (16_384, 53_248, 126, 128, 8, 128_256),
}


def model_config(size: str, layers: int | None = None) -> transformers.PretrainedConfig:
    """Return Qwen2.5's configuration; for 8B and 405B, Llama 3's. The smallest ties head and embeddings."""
    if size in _MIXTURES:
        case = loading_cases.CASES[_MIXTURES[size]]
        fewer = {} if layers is None else {"num_hidden_layers": layers}
        return replace(case, settings={**case.settings, **fewer}).config
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
