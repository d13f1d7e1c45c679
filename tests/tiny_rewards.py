"""Small items to score, and tiny reward models with the tokenizer of `tiny_models`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.functions import FunctionReward, build_function_reward

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


def beginning(file: Path) -> Callable[..., AbstractAsyncContextManager[FunctionReward]]:
    """Return a context manager that starts a function of this file, or another target, with any settings."""

    @asynccontextmanager
    async def begin(function: str, **settings: Any) -> AsyncIterator[FunctionReward]:
        target = f"{file}:{function}" if function.isidentifier() else function
        source = schema.FunctionReward(type="function", target=target, **settings)
        reward = build_function_reward("mine", source, Permissions(reward_code=(target,)))
        try:
            await reward.start()
            yield reward
        finally:
            await reward.close()

    return begin


def make_reward_model(
    folder: Path, *, architecture: Architecture = "qwen2", with_padding: bool = True, num_labels: int = 1
) -> Path:
    """A random sequence-classification model; `with_padding=False`: without a padding token, like some models."""
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
