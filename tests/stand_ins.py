"""Models of real sizes without their weights: configuration, tokenizer, and sparse files for the tensors."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import torch
import transformers

from bench.memory_cases import model_config
from tests.tiny_models import make_tokenizer

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_stand_in(folder: Path, size: str) -> Path:
    config = model_config(size)
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
