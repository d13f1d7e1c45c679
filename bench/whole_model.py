"""Models and prompts for whole runs: random models that learn nothing useful, but cost as much as real ones.

With 64 tokens, end token included, all are about equally likely, so answers average 64 tokens; with 49,152 tokens the
end token never comes, and answers have maximum length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from bench.long_tailed import Size
from bench.worker_model import make_tokenizer

MAX_LENGTH = 1024
PROMPT_TOKENS = 16
_NUM_PROMPTS = 4000
SIZES: Mapping[str, Size] = {
    "0.7M": Size(vocabulary=64, hidden=128, intermediate=512, layers=4, heads=2, kv_heads=2),
    "25M": Size(vocabulary=64, hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=8),
    "136M": Size(vocabulary=49_152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),  # SmolLM2's shape
}


def write_model(name: str, folder: Path, prompts: Path) -> None:
    model = SIZES[name].model(max_length=MAX_LENGTH, device=torch.device("cpu"))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rng = np.random.default_rng(0)
    texts = ("".join(map(chr, rng.integers(35, 95, PROMPT_TOKENS))) for _ in range(_NUM_PROMPTS))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
