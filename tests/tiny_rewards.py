"""Small things to score, and tiny reward models with the tokenizer of `tiny_models`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.workers.rewards.base import ScoreItem

if TYPE_CHECKING:
    from tests.tiny_models import Architecture


def make_item(
    completion: str = "42", *, prompt: str = "6 * 7 = ", num_tokens: int | None = None, **fields: Any
) -> ScoreItem:
    count = len(completion) if num_tokens is None else num_tokens
    return ScoreItem(
        prompt=prompt,
        completion=completion,
        token_ids=np.arange(count, dtype=np.int32),
        fields=fields,
    )


def make_reward_model(
    folder: Path, *, architecture: Architecture = "qwen2", with_padding: bool = True, num_labels: int = 1
) -> Path:
    """A random sequence-classification model; `with_padding=False`: as models come that know no padding token."""
    import torch
    import transformers

    from tests.tiny_models import make_model

    make_model(folder, architecture=architecture)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels)
    if not with_padding:
        model.config.pad_token_id = None
    model.save_pretrained(folder)
    return folder
