"""The run's prompts, tokenised once, and the data's order: which prompt each place stands for.

Place p is place `p % n` of pass `p // n` over the data, whose n places follow from the seed, the datasets and their
weights alone (`mixture`); which place a ticket's number stands for: `groups.numbering`. So any ticket can be reissued
at any time. The fingerprint identifies the order; a checkpoint stores it, and a run whose fingerprint has changed must
not resume.

The tokenizer is passed in as `transformers` loaded it, so nothing here imports torch. Blocks on reading and tokenising
the files, at the start only.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from streamrl.chat_templates import TEMPLATE_ERRORS, render, renders_tools
from streamrl.config import schema
from streamrl.data.messages import read_tools
from streamrl.data.prompts import PromptRow, read_prompts
from streamrl.encoding import encode, encode_prompts
from streamrl.errors import DataError
from streamrl.learner.groups.mixture import MixedDataset, Mixture
from streamrl.protocol.wire.codec import MAX_TEXT_CHARS

log = structlog.get_logger(__name__)

_BATCH = 1024  # texts per tokenizer call


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: list[str], /, *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], /) -> str | list[str]: ...

    def apply_chat_template(self, conversation: list[Any], **how: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    line: int  # line in the file, counting from 1
    text: str  # as the model reads it, chat template applied
    token_ids: npt.NDArray[np.int32]  # [P]
    fields: Mapping[str, Any]
    dataset: str = ""  # its name in `data.train`; empty if there is only one


class PromptSet:
    """All usable prompts in the order of their files, and the data's order over them."""

    def __init__(
        self,
        rows: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        parts: Sequence[MixedDataset] | None = None,  # the datasets of the rows, in order; None: one dataset
    ) -> None:
        assert rows, "a prompt set holds at least one prompt"
        self.rows = tuple(rows)
        self._seed = seed
        self._shuffle = shuffle
        self._mixture = Mixture(parts or [MixedDataset(num_rows=len(rows))], seed=seed, shuffle=shuffle)

    @classmethod
    def load(cls, *, tokenizer: Tokenizer, data: schema.Data, seed: int, limit: ReadLimit | None = None) -> PromptSet:
        """Load the datasets that `data.train` names."""
        sets = data.train_sets()
        found = [tokenise(named, tokenizer, data, limit=limit) for named in sets]
        parts = [
            MixedDataset(num_rows=len(rows), weight=named.dataset.weight)
            for named, rows in zip(sets, found, strict=True)
        ]
        for named, part in zip(sets, parts, strict=True):
            log.info("dataset", name=named.name, rows=part.num_rows, weight=part.weight, in_each_pass=part.num_places)
        return cls([row for rows in found for row in rows], seed=seed, shuffle=data.shuffle, parts=parts)

    def fingerprint(self) -> str:
        """A digest of what places mean: the rows, their mixture, and the seed of their order."""
        digest = xxhash.xxh3_128(f"{self._seed} {self._shuffle}".encode())
        if self._mixture.num_places != len(self.rows) or len(self._mixture.parts) > 1:
            digest.update("".join(f" {part.num_places}/{part.num_rows}" for part in self._mixture.parts).encode())
        for row in self.rows:
            fields = json.dumps(dict(row.fields), sort_keys=True).encode()
            digest.update(f"\n{len(row.token_ids)} {len(fields)} ".encode())
            digest.update(row.token_ids.astype("<i4").tobytes())
            digest.update(fields)
        return digest.hexdigest()

    def num_places(self, max_epochs: int) -> int:
        return self._mixture.num_places * max_epochs

    def locate(self, place: int) -> tuple[int, int]:
        """(passes over the data before it, index of its row)"""
        return self._mixture.locate(place)

    def candidates(self, data_epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The rows of a pass in order, and for each a random number in [0, 1) (`groups.curriculum`)."""
        return self._mixture.rows_of_pass(data_epoch), self._mixture.uniforms_of_pass(data_epoch)


@dataclass(slots=True, kw_only=True)
class ReadLimit:
    """How long to tokenise each dataset, and how far that went."""

    at_most_s: float
    num_rows: int = 0  # of all datasets
    num_read: int = 0  # of these


def tokenise(
    named: schema.NamedDataset, tokenizer: Tokenizer, data: schema.Data, *, limit: ReadLimit | None = None
) -> Sequence[Prompt]:
    """Read and tokenise one dataset, or as much of it as the limit allows, but at least one batch."""
    key = named.key
    with _uncollected():
        file = read_prompts(named.dataset, malformed=data.malformed, key=key)
        reader = _Reader(file.place, tokenizer, data, named.name)
        stop_at = math.inf if limit is None else time.monotonic() + limit.at_most_s
        rows = list(reader.read(file.rows, stop_at=stop_at))
    if limit is not None:
        limit.num_rows += len(file.rows)
        limit.num_read += reader.num_read
    num_malformed = file.num_skipped + reader.num_malformed
    if not rows:
        raise DataError(
            f"{key}: no prompt of {file.place} can be used: {num_malformed} are malformed and {reader.num_overlong} "
            f"longer than data.max_prompt_tokens={data.max_prompt_tokens}"
        )
    if num_malformed or reader.num_overlong or reader.num_truncated:
        log.warning(
            "prompts skipped or truncated",
            key=key,
            used=len(rows),
            malformed=num_malformed,
            overlong=reader.num_overlong,
            truncated=reader.num_truncated,
        )
    return rows


def read_held_out(config: schema.Config, tokenizer: Tokenizer, *, notice: Callable[[str], None]) -> Sequence[Prompt]:
    """Read the first `validation.max_prompts` of each held-out dataset; `notice` is told which have more."""
    found: list[Prompt] = []
    limit = config.validation.max_prompts
    for named in config.data.validation_sets():
        rows = tokenise(named, tokenizer, config.data)
        if len(rows) > limit:
            which = f"the first {limit:,} of {len(rows):,} prompts are used (validation.max_prompts)"
            notice(f"{named.dataset.place}: {which}")
        found += rows[:limit]
    return found


def num_shared(held_out: Sequence[Prompt], trained: Sequence[Prompt]) -> int:
    """Count the held-out prompts that are trained on, too: same tokens and same fields."""
    known = {_identity(row) for row in trained}
    return sum(_identity(row) in known for row in held_out)


def _identity(row: Prompt) -> bytes:
    return xxhash.xxh3_128_digest(row.token_ids.tobytes() + json.dumps(dict(row.fields), sort_keys=True).encode())


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn garbage collection off while prompts are read.

    It would scan all rows after every few hundred: half the time of reading 100,000 prompts, at each restart of a run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Reader:
    """Turns rows into prompts, and counts the rows it leaves out."""

    def __init__(self, place: str, tokenizer: Tokenizer, data: schema.Data, dataset: str) -> None:
        self._place, self._tokenizer, self._data, self._dataset = place, tokenizer, data, dataset
        self.num_read = 0
        self.num_malformed = 0
        self.num_overlong = 0
        self.num_truncated = 0

    def read(self, rows: Sequence[PromptRow], *, stop_at: float) -> Iterator[Prompt]:
        """Read all rows, or until `time.monotonic` passes `stop_at`, but at least one batch."""
        for start in range(0, len(rows), _BATCH):
            if start and time.monotonic() > stop_at:
                return
            read = rows[start : start + _BATCH]
            self.num_read += len(read)
            batch = [(row, text) for row in read if (text := self._text(row)) is not None]
            plain = iter(encode_prompts(self._tokenizer, [text for row, text in batch if row.messages is None]))
            # The chat template has already added special tokens.
            chats = iter(encode(self._tokenizer, [text for row, text in batch if row.messages is not None]))
            for row, text in batch:
                token_ids = next(plain if row.messages is None else chats)
                if len(token_ids) > self._data.max_prompt_tokens and self._data.overlong == "truncate":
                    self.num_truncated += 1
                    token_ids = token_ids[-self._data.max_prompt_tokens :]
                    text = str(self._tokenizer.decode(token_ids))
                if self._fits(row, text, token_ids):
                    ids = np.asarray(token_ids, dtype=np.int32)
                    yield Prompt(line=row.line, text=text, token_ids=ids, fields=row.fields, dataset=self._dataset)

    def _text(self, row: PromptRow) -> str | None:
        if row.text is not None:
            return row.text
        assert row.messages is not None, "a row has a text or messages"
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self._place}:{row.line}: 'messages' need a chat template, and the model's tokenizer has none; "
                "use 'text'"
            )
        tools = read_tools(row.fields.get("tools"))
        if tools and not renders_tools(self._tokenizer):
            remedy = "describe them in a message, or leave them out of the dataset's `fields`"
            self._malformed(row, f"the tokenizer's chat template does not render 'tools': {remedy}")
            return None
        try:
            return render(self._tokenizer, row.messages, date=self._data.date, tools=tools)
        except TEMPLATE_ERRORS as error:
            self._malformed(row, f"the tokenizer's chat template refuses the messages: {error}")
            return None

    def _fits(self, row: PromptRow, text: str, token_ids: Sequence[int]) -> bool:
        limit = self._data.max_prompt_tokens
        if len(text) > MAX_TEXT_CHARS:  # after the chat template
            self._malformed(row, f"the prompt is {len(text)} characters; a ticket carries {MAX_TEXT_CHARS}")
            return False
        if not token_ids:
            self._malformed(row, "the prompt has no tokens")
            return False
        if len(token_ids) <= limit:
            return True
        if self._data.overlong == "error":
            raise DataError(
                f"{self._place}:{row.line}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is {limit}; "
                f"raise it, or set data.overlong=skip or truncate"
            )
        self.num_overlong += 1
        return False

    def _malformed(self, row: PromptRow, reason: str) -> None:
        if self._data.malformed == "error":
            raise DataError(f"{self._place}:{row.line}: {reason}")
        self.num_malformed += 1
