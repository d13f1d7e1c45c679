"""Turns demonstrations into tokens and marks those with a loss: the ones that the model should generate.

    {"prompt": "2+2=", "completion": "4"}                2+2=[4<eos>]
    {"messages": [user, assistant, user, assistant]}     <user>Hi<assistant>[Hello.<end>]<user>...<assistant>[...<end>]

Texts are tokenised like a run's prompts, with the end token appended to the answer. Messages go through the chat
template, each answer after what a run would prompt it with; all answers of a dialogue have a loss, including their end
tokens. Rows longer than `max_tokens` are left out and counted. Blocks on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from transformers import PreTrainedTokenizerBase

from streamrl.chat_templates import TEMPLATE_ERRORS
from streamrl.data.texts import read_texts
from streamrl.errors import DataError
from streamrl.learner.packing.micro_batches import Piece

_EXPECTED = '{"prompt": text, "completion": text}, or {"messages": [{"role": ..., "content": text}, ...]}'
_BEFORE = "\n"  # never merges into a token with the text after it
_BATCH = 1024  # rows per tokenizer call; one by one they take twice as long
Messages = list[dict[str, str]]
_Tokens = tuple[list[int], list[bool]]  # ids, and which of them have a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    pieces: tuple[Piece, ...]
    num_overlong: int


def read_rows(
    path: Path, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], *, max_tokens: int, chat: bool = False
) -> Rows:
    """Read all rows. `chat`: put prompt and completion into the chat template as user and assistant messages."""
    reader = _Reader(tokenizer, tuple(end_ids))
    pieces: list[Piece] = []
    num_overlong = 0
    rows = read_texts(path, what="demonstrations", expected=_EXPECTED)
    while batch := list(islice(rows, _BATCH)):
        for ids, trained in reader.tokens(batch, chat=chat):
            if len(ids) > max_tokens:
                num_overlong += 1
                continue
            pieces.append(_piece(len(pieces), ids, trained))
    if not pieces:
        why = f": all {num_overlong} are longer than --max-tokens {max_tokens}" if num_overlong else ""
        raise DataError(f"{path} holds no demonstrations to learn from{why}")
    return Rows(pieces=tuple(pieces), num_overlong=num_overlong)


def _piece(number: int, ids: Sequence[int], trained: Sequence[bool]) -> Piece:
    begin = trained.index(True)
    mask = np.array(trained[begin:], dtype=np.bool_)
    end = int(np.flatnonzero(mask)[-1]) + 1  # tokens after the last trained one teach nothing
    return Piece(
        sample=number,
        group=number,
        prompt_ids=np.array(ids[:begin], dtype=np.int32),
        token_ids=np.array(ids[begin : begin + end], dtype=np.int32),
        behaviour_logprobs=np.zeros(end, dtype=np.float32),
        mask=mask[:end],
    )


class _Reader:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids
        own = tokenizer.eos_token_id
        self._end = own if own is not None else end_ids[0]
        self._begins_with_space = self._within(["a"]) != self._encode(["a"])

    def tokens(self, rows: Sequence[tuple[str, dict[str, Any]]], *, chat: bool) -> Iterator[_Tokens]:
        """(ids, which of them have a loss) of each row; rows come with their places."""
        parsed = [_parse(place, row, chat=chat) for place, row in rows]
        texts = [row for row in parsed if isinstance(row, tuple)]
        prompts = self._encode([prompt for prompt, _ in texts], add_special_tokens=True)
        completions = self._encode_behind([completion for _, completion in texts])
        encoded = zip(prompts, completions, strict=True)
        for (place, _), row in zip(rows, parsed, strict=True):
            yield self._text(place, *next(encoded)) if isinstance(row, tuple) else self._dialogue(place, row)

    def _text(self, place: str, prompt: list[int], completion: list[int]) -> _Tokens:
        if not prompt:
            raise DataError(f"{place}: the prompt has no tokens")
        answered = [*completion, self._end]
        return prompt + answered, [False] * len(prompt) + [True] * len(answered)

    def _dialogue(self, place: str, messages: Messages) -> _Tokens:
        ids: list[int] = []
        trained: list[bool] = []
        so_far = ""
        for before, after in self._turns(place, messages):
            if not before.startswith(so_far) or not after.startswith(before):
                raise DataError(
                    f"{place}: the chat template rewrites earlier turns, so answers cannot be located in it; "
                    "make a row of each turn, whose last message is its answer"
                )
            [given] = self._encode_behind([before[len(so_far) :]]) if so_far else self._encode([before])
            [continuation] = self._encode_behind([after[len(before) :]])
            answer, tail = self._cut(continuation)
            ids += given + answer + tail
            trained += [False] * len(given) + [True] * len(answer) + [False] * len(tail)
            so_far = after
        if not any(trained) or trained[0]:
            raise DataError(f"{place}: the chat template yields no prompt, or no answer")
        return ids, trained

    def _turns(self, place: str, messages: Messages) -> Iterator[tuple[str, str]]:
        """(prompt of an answer, the same with the answer) for each answer"""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{place}: messages need a chat template, and the model's tokenizer has none; use prompt and completion"
            )
        write = self._tokenizer.apply_chat_template
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                try:
                    before = write(messages[:at], tokenize=False, add_generation_prompt=True)
                    yield str(before), str(write(messages[: at + 1], tokenize=False))
                except TEMPLATE_ERRORS as error:
                    raise DataError(f"{place}: the tokenizer's chat template refuses the messages: {error}") from None

    def _cut(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """(up to the answer's end token, what the template writes after it)"""
        ends = [at for at, token in enumerate(ids) if token in self._end_ids]
        return (ids[: ends[-1] + 1], ids[ends[-1] + 1 :]) if ends else ([*ids, self._end], [])

    def _encode_behind(self, texts: list[str]) -> list[list[int]]:
        """Encode texts as continuations, without the space that sentencepiece tokenizers put before any input."""
        return self._within(texts) if self._begins_with_space else self._encode(texts)

    def _within(self, texts: list[str]) -> list[list[int]]:
        [before] = self._encode([_BEFORE])
        behind = self._encode([_BEFORE + text for text in texts])
        return [
            ids[len(before) :] if ids[: len(before)] == before else self._encode([text])[0]
            for text, ids in zip(texts, behind, strict=True)
        ]

    def _encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]) if texts else []


def _parse(place: str, row: dict[str, Any], *, chat: bool) -> tuple[str, str] | Messages:
    """A prompt and its completion, or a dialogue."""
    prompt, completion = row.get("prompt"), row.get("completion")
    is_text = isinstance(prompt, str) and isinstance(completion, str)
    if is_text and not chat:
        return str(prompt), str(completion)
    as_messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    messages: Any = as_messages if is_text else row.get("messages")
    if not _is_dialogue(messages):
        got = json.dumps(row, ensure_ascii=False)
        raise DataError(f"{place}: expected {_EXPECTED}, with an assistant's message among them, got {got:.80}")
    return messages


def _is_dialogue(value: object) -> TypeGuard[Messages]:
    return (
        isinstance(value, list)
        and all(
            isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("role", "content")) for one in value
        )
        and any(one["role"] == "assistant" for one in value)
    )
