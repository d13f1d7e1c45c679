"""Turns demonstrations into tokens and marks those with a loss: the ones that the model should generate.

    {"prompt": "2+2=", "completion": "4"}                2+2=[4<eos>]
    {"messages": [user, assistant, user, assistant]}     <user>Hi<assistant>[Hello.<end>]<user>...<assistant>[...<end>]

Texts are tokenised like a run's prompts, with the end token appended to the answer. Messages, and the row's `tools`, go
through the chat template, each answer after what a run would prompt it with; all answers of a dialogue have a loss,
including their end tokens. Where a template writes earlier turns anew, as those that drop thoughts do, or without the
model's end token, the next turn becomes a piece of its own, since a run would ask it so. Pieces longer than
`max_tokens` are left out and counted. Blocks on the disk.
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

from streamrl.chat_templates import TEMPLATE_ERRORS, render, renders_tools
from streamrl.data.messages import for_templates, read_tools
from streamrl.data.texts import read_texts
from streamrl.encoding import Continuations, encode, encode_prompts
from streamrl.errors import DataError
from streamrl.learner.packing.micro_batches import Piece

_EXPECTED = '{"prompt": text, "completion": text}, or {"messages": [{"role": ..., "content": text}, ...]}'
_BATCH = 1024  # rows per tokenizer call; one by one they take twice as long
_MARK = "streamrl-answer"  # text that no template contains
Messages = list[dict[str, Any]]
_Tokens = tuple[list[int], list[bool]]  # ids, and which of them have a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    pieces: tuple[Piece, ...]
    row_of: tuple[int, ...]  # of each piece the number of its row, among those that have one
    num_overlong: int


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    *,
    max_tokens: int,
    date: str,  # what the chat template takes for today
    chat: bool = False,
) -> Rows:
    """Read all rows. `chat`: put prompt and completion into the chat template as user and assistant messages."""
    reader = _Reader(tokenizer, tuple(end_ids), date=date)
    pieces: list[Piece] = []
    row_of: list[int] = []
    num_overlong = 0
    rows = read_texts(path, what="demonstrations", expected=_EXPECTED)
    while batch := list(islice(rows, _BATCH)):
        for found in reader.tokens(batch, chat=chat):
            number = row_of[-1] + 1 if row_of else 0
            for ids, trained in found:
                if len(ids) > max_tokens:
                    num_overlong += 1
                    continue
                pieces.append(_piece(len(pieces), ids, trained))
                row_of.append(number)
    if not pieces:
        why = f": all {num_overlong} are longer than --max-tokens {max_tokens}" if num_overlong else ""
        raise DataError(f"{path} holds no demonstrations to learn from{why}")
    return Rows(pieces=tuple(pieces), row_of=tuple(row_of), num_overlong=num_overlong)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialogue:
    messages: Messages
    tools: Sequence[Any] | None


class _Reader:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], *, date: str) -> None:
        self._tokenizer, self._end_ids, self._date = tokenizer, end_ids, date
        own = tokenizer.eos_token_id
        self._end = own if own is not None else end_ids[0]
        self._behind = Continuations(tokenizer)

    def tokens(self, rows: Sequence[tuple[str, dict[str, Any]]], *, chat: bool) -> Iterator[list[_Tokens]]:
        """The pieces of each row: ids, and which of them have a loss. Rows come with their places."""
        parsed = [_parse(place, row, chat=chat) for place, row in rows]
        texts = [row for row in parsed if isinstance(row, tuple)]
        prompts = encode_prompts(self._tokenizer, [prompt for prompt, _ in texts])
        completions = self._behind.encode([completion for _, completion in texts])
        encoded = zip(prompts, completions, strict=True)
        for (place, _), row in zip(rows, parsed, strict=True):
            yield [self._text(place, *next(encoded))] if isinstance(row, tuple) else self._dialogue(place, row)

    def _text(self, place: str, prompt: list[int], completion: list[int]) -> _Tokens:
        if not prompt:
            raise DataError(f"{place}: the prompt has no tokens")
        answered = [*completion, self._end]
        return prompt + answered, [False] * len(prompt) + [True] * len(answered)

    def _dialogue(self, place: str, dialogue: _Dialogue) -> list[_Tokens]:
        pieces: list[_Tokens] = []
        so_far = ""
        for before, after in self._turns(place, dialogue):
            if so_far and before.startswith(so_far):
                [given] = self._behind.encode([before[len(so_far) :]])
            else:
                [given] = encode(self._tokenizer, [before])
                pieces.append(([], []))
            [continuation] = self._behind.encode([after])
            answer, tail = self._cut(continuation)
            ids, trained = pieces[-1]
            ids += given + answer + tail
            trained += [False] * len(given) + [True] * len(answer) + [False] * len(tail)
            # A run would not ask the next turn behind an end token that the template does not write.
            so_far = before + after if answer + tail == continuation else ""
        if any(trained[0] for _, trained in pieces):
            raise DataError(f"{place}: the chat template yields no prompt")
        return pieces

    def _turns(self, place: str, dialogue: _Dialogue) -> Iterator[tuple[str, str]]:
        """(prompt of an answer, what stands behind it) for each answer"""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{place}: messages need a chat template, and the model's tokenizer has none; use prompt and completion"
            )
        if dialogue.tools and not renders_tools(self._tokenizer):
            raise DataError(
                f"{place}: the tokenizer's chat template does not render 'tools': describe them in a message"
            )
        for at, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                try:
                    before = self._render(dialogue, dialogue.messages[:at], generation_prompt=True)
                    yield before, self._answer(place, dialogue, before, dialogue.messages[: at + 1])
                except TEMPLATE_ERRORS as error:
                    raise DataError(f"{place}: the tokenizer's chat template refuses the messages: {error}") from None

    def _answer(self, place: str, dialogue: _Dialogue, before: str, messages: Messages) -> str:
        """Return what stands behind an answer's prompt: the answer, and what the template writes after it.

        Some templates write a prompt otherwise than they write it with its answer: they begin the answer with <think>,
        and leave thoughts out of one that is given. Then it is the answer's own text, as a run would sample it.
        """
        whole = self._render(dialogue, messages)
        if whole.startswith(before):
            return whole[len(before) :]
        *earlier, answer = messages
        head, mark, end = self._render(dialogue, [*earlier, {**answer, "content": _MARK}]).rpartition(_MARK)
        if not mark or answer.get("tool_calls"):
            raise DataError(
                f"{place}: the chat template writes this answer's prompt otherwise than the same messages with the "
                "answer, so it cannot be located; write prompt and completion as text"
            )
        begun = before[len(head) :].strip() if before.startswith(head) else ""
        content = str(answer["content"])
        has_begun = begun and content.lstrip().startswith(begun)
        return (content.lstrip().removeprefix(begun).lstrip() if has_begun else content) + end

    def _render(self, dialogue: _Dialogue, messages: Messages, *, generation_prompt: bool = False) -> str:
        return render(
            self._tokenizer, messages, date=self._date, tools=dialogue.tools, generation_prompt=generation_prompt
        )

    def _cut(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """(up to the answer's end token, what the template writes after it)"""
        ends = [at for at, token in enumerate(ids) if token in self._end_ids]
        return (ids[: ends[-1] + 1], ids[ends[-1] + 1 :]) if ends else ([*ids, self._end], [])


def _parse(place: str, row: dict[str, Any], *, chat: bool) -> tuple[str, str] | _Dialogue:
    """A prompt and its completion, or a dialogue."""
    prompt, completion = row.get("prompt"), row.get("completion")
    is_text = isinstance(prompt, str) and isinstance(completion, str)
    if is_text and not chat:
        return str(prompt), str(completion)
    messages: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if not is_text:
        messages = _read_messages(row.get("messages"))
    if not _is_dialogue(messages):
        got = json.dumps(row, ensure_ascii=False)
        raise DataError(f"{place}: expected {_EXPECTED}, with an assistant's message among them, got {got:.80}")
    tools = read_tools(row.get("tools"))
    if tools is None and row.get("tools"):
        raise DataError(f"{place}: 'tools' must be a list of functions, in the form of OpenAI's API")
    return _Dialogue(messages=messages, tools=tools)


def _read_messages(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [for_templates(one) if isinstance(one, dict) else one for one in value]


def _is_dialogue(value: object) -> TypeGuard[Messages]:
    return (
        isinstance(value, list)
        and all(
            isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("role", "content")) for one in value
        )
        and any(one["role"] == "assistant" for one in value)
    )
