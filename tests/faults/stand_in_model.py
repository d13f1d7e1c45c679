"""A model's name, tokenizer and template without libraries that are slow to import: one token per byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from streamrl.workers.engines.model import ModelFacts

_FIRST = 1  # token of byte 0; token 0 ends an answer


class _Bytes:
    chat_template = "role:content"

    def __call__(self, text: list[str], **how: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[_FIRST + byte for byte in one.encode()] for one in text]}

    def decode(self, token_ids: Sequence[int], **how: Any) -> str:
        return bytes(i - _FIRST for i in token_ids if _FIRST <= i <= 256).decode(errors="replace") or "<end>"

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **_: Any
    ) -> str:
        said = "".join(f"{message['role']}:{message['content']}<end>" for message in messages)
        return f"{said}assistant:" if add_generation_prompt else said


def stand_in_model() -> ModelFacts:
    return ModelFacts(
        path="stand-in",
        tokenizer=cast("Any", _Bytes()),
        stop_ids=(0,),
        vocab_size=1 << 20,
        max_positions=None,
        fingerprint="stand-in",
        trust_remote_code=False,
    )
