"""Prompt files: JSON Lines, optionally in `.gz`, one prompt per line, as text or as chat messages.

    {"text": "What is 2 + 3?", "answer": "5"}
    {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}

`prompt` is a synonym for `text`. All other fields are passed to the rewards unchanged, and so are the `messages` of a
chat, with calls and `tools` in the form of chat templates (`data.messages`). For files with other columns, and for
datasets of a hub or a library, the configuration maps the columns (`Dataset`). A malformed line is an error with file
and line, or is skipped and counted if the configuration says so; empty lines are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from streamrl.data.dataset import MADE, Dataset, named_in, no_column, written
from streamrl.data.hub import hub_lines
from streamrl.data.lines import UNREADABLE, Malformed, parse_line, read_lines, why_not_lines
from streamrl.data.made import made_file
from streamrl.data.messages import for_templates, read_tools
from streamrl.errors import DataError, WireError
from streamrl.protocol.wire.codec import MAX_TEXT_CHARS
from streamrl.protocol.wire.ticket import encode_row

OnBadRow = Literal["error", "skip"]
_MAX_LINE_BYTES = MAX_TEXT_CHARS  # so that its text fits into a ticket
# Its other fields surely fit up to here: re-encoded JSON is at most five times as long (1e15: 1000000000000000.0).
_SURE_LINE_BYTES = MAX_TEXT_CHARS // 5
_TABLES = {".csv", ".tsv", ".parquet"}
_SPREADSHEETS = {".xlsx", ".xls", ".ods"}
_KINDS = ("text", "prompt", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    line: int  # counts from 1
    text: str | None  # exactly one of text and messages is set
    messages: tuple[Mapping[str, Any], ...] | None
    fields: Mapping[str, Any]  # for the rewards: the other fields, and `messages` if the prompt is a chat

    @property
    def plain(self) -> str:
        """Its text, without a chat template."""
        return self.text or "\n".join(message["content"] for message in self.messages or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    place: str  # its name in errors
    rows: tuple[PromptRow, ...]
    num_skipped: int  # malformed lines


def read_prompts(source: Dataset | str | Path, *, malformed: OnBadRow, key: str = "data.train") -> PromptFile:
    """Read all prompts of the dataset or file; `key` is the setting that names it, for errors."""
    dataset = source if isinstance(source, Dataset) else Dataset(path=str(source))
    rows: list[PromptRow] = []
    num_skipped = 0
    lines = hub_lines(dataset, key) if dataset.source == "hub" else _lines(_file_of(dataset, key), key)
    for line, data in lines:
        try:
            rows.append(_parse(line, data, dataset))
        except Malformed as error:
            if malformed == "error":
                raise DataError(f"{dataset.place}:{line}: {error}") from None
            num_skipped += 1
    if not rows:
        skipped = f"; {num_skipped} malformed lines were skipped" if num_skipped else ""
        raise DataError(f"{key}: {dataset.place} holds no prompts{skipped}")
    return PromptFile(place=dataset.place, rows=tuple(rows), num_skipped=num_skipped)


def _file_of(dataset: Dataset, key: str) -> Path:
    if dataset.source in MADE:
        return made_file(dataset, key)
    path = Path(dataset.place)
    suffix = path.suffix.lower() if path.is_file() else ""
    if suffix in _TABLES:
        raise DataError(
            f"{key}: {path} is not a JSON Lines file; {{hub: FOLDER, prompt: COLUMN}} reads a folder of such files"
        )
    if suffix in _SPREADSHEETS:
        raise DataError(
            f"{key}: {path} is a spreadsheet; save it as CSV in a folder, which {{hub: FOLDER, prompt: COLUMN}} reads"
        )
    return path


def _lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the file. DataError, also where malformed lines are skipped, if it is no file of lines."""
    try:
        for number, data in read_lines(path):
            if number == 1 and (why := why_not_lines(data)) is not None:
                raise DataError(f"{path}:1: {why}")
            yield number, data
    except FileNotFoundError:
        remedy = "give the path of a JSONL file of prompts"
        if str(path).startswith("~"):
            remedy = "~ is taken literally: write the path out"
        raise DataError(f"{key}: no such file: {path}; {remedy}") from None
    except IsADirectoryError:
        raise DataError(f"{key}: {path} is a folder; name a file in it, or {{hub: {path}}} as a dataset") from None
    except UNREADABLE as error:
        raise DataError(f"{key}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parse(line: int, data: bytes, dataset: Dataset) -> PromptRow:
    row = _object(data)
    kind, value = _prompt(row, dataset)
    if dataset.fields is None:
        fields = {name: column for name, column in row.items() if name != kind}
    else:
        fields = {name: _column(row, of) for name, of in dataset.fields.items()}
    if dataset.chat and isinstance(value, str) and value:
        value = [{"role": "user", "content": value}]
    is_chat = kind == "messages" or isinstance(value, list)
    # This field says that the prompt is a chat: a column of that name beside a text must not.
    fields.pop("messages", None)
    messages = _read_messages(value) if is_chat else None
    if messages is not None:
        fields["messages"] = list(messages)
        if (tools := read_tools(fields.get("tools"))) is not None:
            fields["tools"] = tools
    _check_fields(fields, line_bytes=len(data))
    if messages is not None:
        return PromptRow(line=line, text=None, messages=messages, fields=fields)
    if not isinstance(value, str) or not value:
        raise Malformed(f"{kind!r} must be non-empty text")
    return PromptRow(line=line, text=value, messages=None, fields=fields)


def _prompt(row: Mapping[str, Any], dataset: Dataset) -> tuple[str, Any]:
    """Return (its column, or a text with columns in it; a text or messages)."""
    if dataset.prompt is not None:
        for name in named_in(dataset.prompt):
            if _column(row, name, prompt=dataset.prompt) is None:
                raise Malformed(f"column {name!r} is empty")
        return dataset.prompt, written(dataset.prompt, row)
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        found = " and ".join(repr(kind) for kind in kinds) or f"none in {', '.join(row) or 'an empty object'}"
        remedy = "; {path: FILE, prompt: COLUMN} selects another" if row else ""
        raise Malformed(f"expected exactly one of 'text', 'prompt' and 'messages', found {found}{remedy}")
    return kinds[0], row[kinds[0]]


def _column(row: Mapping[str, Any], name: str, *, prompt: str | None = None) -> Any:
    if name not in row:
        raise Malformed(no_column(name, row, prompt=prompt))
    return row[name]


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_LINE_BYTES:
        raise Malformed(f"line of {len(data)} bytes; at most {_MAX_LINE_BYTES} are allowed")
    row = parse_line(data, parse_constant=_refuse_constant, parse_float=_finite)
    if not isinstance(row, dict):
        raise Malformed(f'expected an object such as {{"text": "..."}}, got {type(row).__name__}')
    return row


def _check_fields(row: Mapping[str, Any], *, line_bytes: int) -> None:
    if line_bytes <= _SURE_LINE_BYTES:
        return
    try:
        encode_row(row)
    except WireError as error:
        raise Malformed(str(error)) from None


def _read_messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise Malformed("'messages' must be a list with at least one message")
    messages = tuple(for_templates(message) if isinstance(message, dict) else message for message in value)
    for message in messages:
        texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise Malformed("each message must be an object with the texts 'role' and 'content'")
    if messages[-1]["role"] == "assistant":
        raise Malformed(
            "'messages' ends with an assistant's message, so the model would be asked to go on after an answer; leave "
            "it out, or give it to the rewards in a field of its own"
        )
    return messages


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
