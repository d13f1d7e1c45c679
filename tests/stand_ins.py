"""Models of real sizes without their weights: a configuration, a tokenizer, and files whose tensors are holes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import transformers

from tests.tiny_models import make_tokenizer

_SIZES: Mapping[str, Mapping[str, int]] = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocab": 151936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocab": 152064},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "layers": 64, "heads": 40, "kv_heads": 8, "vocab": 152064},
}
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def qwen_config(size: str) -> transformers.Qwen2Config:
    """As Qwen2.5 has it."""
    found = _SIZES[size]
    return transformers.Qwen2Config(
        vocab_size=found["vocab"],
        hidden_size=found["hidden_size"],
        intermediate_size=found["intermediate_size"],
        num_hidden_layers=found["layers"],
        num_attention_heads=found["heads"],
        num_key_value_heads=found["kv_heads"],
        max_position_embeddings=32768,
        tie_word_embeddings=size == "1.5B",
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
    )


def make_stand_in(folder: Path, size: str) -> Path:
    config = qwen_config(size)
    config.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * prod(parameter.shape)
        tensors[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder
