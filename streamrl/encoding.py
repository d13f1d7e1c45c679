"""Texts as tokens, alike for the learner, workers and `streamrl sft`: prompts, and what goes on behind them.

    "<s> 2 + 2 ="  ── the model's tokens ──  "4"

Needs a tokenizer of transformers, and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from streamrl.errors import DataError

# How transformers reads a tokenizer (`AutoTokenizer.from_pretrained`): from the files of the hub's form, whatever else
# is in the folder. Beside vLLM, which installs mistral-common, a folder with tekken.json would become another tokenizer
# than in a learner without vLLM: with another vocabulary, and without the folder's chat template.
FROM_FILES = {"mistral_format": False}
_BEFORE = "\n"  # never merges into a token with the text after it


class Encodes(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def __call__(self, text: list[str], /, *, add_special_tokens: bool) -> Mapping[str, Any]: ...


def refuse_lone_tekken(tokenizer: object, path: str) -> None:
    """DataError if transformers had nothing but tekken.json: it makes a tokenizer of that without beginning and end."""
    if str(getattr(tokenizer, "vocab_file", "")).endswith("tekken.json"):
        raise DataError(
            f"model {path!r} has its tokenizer only as tekken.json; write tokenizer.json beside it, in its folder and "
            'where mistral-common is installed: python -c "from transformers.integrations.mistral import '
            "convert_tekken_tokenizer as read; read('tekken.json').save_pretrained('.')\""
        )


def encode(tokenizer: Encodes, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    return list(tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]) if texts else []


def encode_prompts(tokenizer: Encodes, texts: list[str]) -> list[list[int]]:
    """Encode texts that a model continues: with the tokenizer's special tokens in front of a text, and without those
    behind it. A tokenizer saved with `add_eos_token` ends each text, which would leave nothing to continue."""
    encoded, num_behind = encode(tokenizer, texts, add_special_tokens=True), _num_behind(tokenizer)
    return [ids[: len(ids) - num_behind] for ids in encoded] if num_behind else encoded


def _num_behind(tokenizer: Encodes) -> int:
    """Return how many special tokens the tokenizer puts behind a text."""
    [bare], [whole] = encode(tokenizer, ["a"]), encode(tokenizer, ["a"], add_special_tokens=True)
    if not bare:  # its vocabulary has no "a"
        return 0
    ends = (at + len(bare) for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return len(whole) - next(ends, len(whole))


class Continuations:
    """Encodes texts that stand behind others, without the space that sentencepiece tokenizers put before any input."""

    def __init__(self, tokenizer: Encodes) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._within(texts) if self._begins_with_space else encode(self._tokenizer, texts)

    @cached_property
    def _begins_with_space(self) -> bool:
        return self._within(["a"]) != encode(self._tokenizer, ["a"])

    def _within(self, texts: list[str]) -> list[list[int]]:
        [before] = encode(self._tokenizer, [_BEFORE])
        behind = encode(self._tokenizer, [_BEFORE + text for text in texts])
        return [
            ids[len(before) :] if ids[: len(before)] == before else encode(self._tokenizer, [text])[0]
            for text, ids in zip(texts, behind, strict=True)
        ]
