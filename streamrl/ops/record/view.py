"""Formats a group for people: the prompt, each sample with its rewards, and which weights generated which tokens. A
rollout of several turns is shown as a conversation: each turn, what was given before it, and the row it continues.

Versions are distinguished by colour; without colour, a mark shows where another version took over. Control characters
in the model's text are removed. Pure: never blocks.

Also decodes token ids, if the model's tokenizer is here. This uses only the package `tokenizers`, which every machine
with a learner or a worker has, and which needs neither torch nor transformers. Without it, or without the model's
tokenizer.json, token ids are shown.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from streamrl.errors import DataError, ResourceError
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import Group, GroupHeader
from streamrl.protocol.wire.sample import Sample
from streamrl.protocol.wire.turns import Part, heading_of, parts_of, told_of
from streamrl.terminal import printable
from streamrl.versions import show

_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")  # by version, in turn
_INDENT = "  "


def lines_of(
    entry: Entry, group: Group, decoder: TokenDecoder | None, *, width: int, colour: bool, max_lines: int | None
) -> Iterator[Text]:
    """Format a group; `max_lines` per text, None: all."""
    for text, is_heading in _parts(entry, group, decoder, colour=colour):
        if is_heading:
            text.truncate(width, overflow="ellipsis")
            yield text
        else:
            yield from wrapped(text, width, max_lines)


def _parts(entry: Entry, group: Group, decoder: TokenDecoder | None, *, colour: bool) -> Iterator[tuple[Text, bool]]:
    """Yield each text, and whether it is a heading."""
    header = group.header
    yield Text(_title(entry, header), style="bold"), True
    if header.failed:
        yield Text(printable(f"failed: {header.error}"), style="red"), False
        return
    yield Text(f"prompt, {_count(len(group.prompt_ids), 'token')}", style="dim"), True
    yield Text(plain(decoder.decode(group.prompt_ids) if decoder else _ids(group.prompt_ids))), False
    styles = _styles(group.samples)
    for at, sample in enumerate(group.samples, start=1):
        yield Text(_verdict(at, sample), style="bold"), True
        parts = parts_of(sample)
        if len(parts) < 2:
            legend = Text("versions", style="dim")
            for span in sample.spans:
                legend.append(f" {show(span.version)}", style=styles[span.version])
                legend.append(f" ({_count(span.end - span.start, 'token')})")
            yield legend, False
        records, turns = told_of(sample, decoder.decode if decoder else None), itertools.count(1)
        for part, record in zip(parts, records, strict=True):
            if len(parts) > 1:
                heading, size = heading_of(record, next(turns) if part.spans else 0), part.end - part.start
                yield Text(printable(f"{heading}, {_count(size, 'token')}"), style="dim"), True
            yield _text_of(sample, part, record.get("text"), decoder, styles, colour=colour), False


def _text_of(
    sample: Sample,
    part: Part,
    text: str | None,
    decoder: TokenDecoder | None,
    styles: Mapping[int, str],
    *,
    colour: bool,
) -> Text:
    if not part.spans:
        return Text(_ids(sample.token_ids[part.start : part.end]) if text is None else plain(text), style="dim")
    shown = Text()
    for span, piece in zip(part.spans, _pieces(sample, part, decoder), strict=True):
        if span.start > part.start and not colour:
            shown.append(f"⟨{show(span.version)}⟩")
        shown.append(piece, style=styles[span.version])
    return shown


def _title(entry: Entry, header: GroupHeader) -> str:
    title = f"ticket {header.ticket}   {entry.id}   worker {header.worker}"
    if header.attempt:
        title += f"   attempt {header.attempt + 1}"
    if header.num_failed_samples and not header.failed:
        title += f"   {header.num_failed_samples} samples failed"
    return printable(f"{title}   generated in {header.generate_s:.1f} s, scored in {header.reward_s:.1f} s")


def _verdict(at: int, sample: Sample) -> str:
    sources = ", ".join(f"{name} {value:.4g}" for name, value in sample.rewards.items())
    ended = "ended by itself" if sample.finish_reason == "stop" else "cut off"
    tokens = _count(len(sample.token_ids), "token")
    turns = f" after {len(sample.turns())} turns" if len(parts_of(sample)) > 1 else ""
    return printable(f"sample {at}   reward {sample.reward:.4g} ({sources})   {tokens}, {ended}{turns}")


def _styles(samples: Sequence[Sample]) -> dict[int, str]:
    versions = sorted({span.version for sample in samples for span in sample.spans})
    return {version: _COLOURS[at % len(_COLOURS)] for at, version in enumerate(versions)}


def _pieces(sample: Sample, part: Part, decoder: TokenDecoder | None) -> Iterator[str]:
    """Yield each span's text: what it adds to the decoded text, since a tokenizer may decode it differently alone."""
    before = decoder.decode(sample.token_ids[: part.start]) if decoder else ""
    for span in part.spans:
        if decoder is None:
            yield _ids(sample.token_ids[span.start : span.end]) + " "
            continue
        so_far, alone = decoder.decode(sample.token_ids[: span.end]), sample.token_ids[span.start : span.end]
        yield plain(so_far[len(before) :] if so_far.startswith(before) else decoder.decode(alone))
        before = so_far


def _ids(token_ids: Any) -> str:
    return " ".join(str(int(token)) for token in token_ids)


def plain(text: str) -> str:
    """Remove all control characters but line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


def wrapped(text: Text, width: int, max_lines: int | None) -> Iterator[Text]:
    lines = list(text.wrap(Console(), max(10, width - len(_INDENT))))
    for line in lines[:max_lines]:
        line.rstrip()
        yield Text(_INDENT).append_text(line)
    if max_lines is not None and len(lines) > max_lines:
        yield Text(f"{_INDENT}… {_count(len(lines) - max_lines, 'more line')}", style="dim")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_FILE = "tokenizer.json"


class TokenDecoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Any) -> str:
        """Decode with special tokens, which show where a response ended."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))


def find_decoder(model: str) -> TokenDecoder | None:
    """Find the tokenizer of a model folder, or of a hub name with files on this machine; None if there is none."""
    path = Path(model) / _FILE if Path(model).is_dir() else _in_cache(model)
    if path is None or not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    import tokenizers

    try:
        return TokenDecoder(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # noqa: BLE001 - the package raises nothing more specific
        raise DataError(f"{path} is not a tokenizer: {error}") from None


def choose_decoder(named: str | None, model: str) -> TokenDecoder | None:
    """Return the tokenizer of the model named by the user, which must exist; by default the run's, if any."""
    if named is None:
        return find_decoder(model)
    if importlib.util.find_spec("tokenizers") is None:
        raise ResourceError(
            "--tokenizer needs the package tokenizers, which is not installed: `pip install tokenizers`"
        )
    decoder = find_decoder(named)
    if decoder is None:
        raise DataError(f"--tokenizer {named}: there is no {_FILE}; give the folder of a model")
    return decoder


def _in_cache(name: str) -> Path | None:
    if name.count("/") != 1 or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _FILE)
    return Path(found) if isinstance(found, str) else None
