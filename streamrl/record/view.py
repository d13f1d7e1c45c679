"""A group as people read it: the prompt, each sample with its rewards, and which weights made which tokens.

Versions are told apart by colour along the text; where there is no colour, a mark stands where another version took
over. What the model wrote reaches the terminal without control characters. Pure: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from streamrl.record.words import Words
from streamrl.terminal import printable
from streamrl.transport.types import Entry
from streamrl.versions import show
from streamrl.wire.group import Group, GroupHeader, Sample, Span

_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")  # one after the other, version by version
_INDENT = "  "


def lines_of(
    entry: Entry, group: Group, words: Words | None, *, width: int, colour: bool, max_lines: int | None
) -> Iterator[Text]:
    """`max_lines` of each text; None: all of them."""
    header = group.header
    yield _fit(Text(_title(entry, header), style="bold"), width)
    if header.failed:
        yield from _wrapped(Text(printable(f"failed: {header.error}"), style="red"), width, max_lines)
        return
    yield Text(f"prompt, {_count(len(group.prompt_ids), 'token')}", style="dim")
    yield from _wrapped(_prompt(group, words), width, max_lines)
    styles = _styles(group.samples)
    for at, sample in enumerate(group.samples, start=1):
        yield from _sample_lines(at, sample, words, styles, width=width, colour=colour, max_lines=max_lines)


def _sample_lines(
    at: int,
    sample: Sample,
    words: Words | None,
    styles: dict[int, str],
    *,
    width: int,
    colour: bool,
    max_lines: int | None,
) -> Iterator[Text]:
    yield _fit(Text(_verdict(at, sample), style="bold"), width)
    legend = Text(_INDENT + "versions", style="dim")
    for span in sample.spans:
        legend.append(f" {show(span.version)}", style=styles[span.version])
        legend.append(f" ({_count(span.end - span.start, 'token')})")
    yield from _wrapped(legend, width, max_lines, indent="")
    response = Text()
    for span, piece in zip(sample.spans, _pieces(sample, words), strict=True):
        if span.start and not colour:
            response.append(f"⟨{show(span.version)}⟩")
        response.append(piece, style=styles[span.version])
    yield from _wrapped(response, width, max_lines)


def _title(entry: Entry, header: GroupHeader) -> str:
    title = f"ticket {header.ticket}   {entry.id}   {header.worker}"
    if header.attempt:
        title += f"   attempt {header.attempt + 1}"
    if header.num_failed_samples and not header.failed:
        title += f"   {header.num_failed_samples} samples failed"
    return printable(f"{title}   generated in {header.generate_s:.1f} s, scored in {header.reward_s:.1f} s")


def _verdict(at: int, sample: Sample) -> str:
    sources = ", ".join(f"{name} {value:.4g}" for name, value in sample.rewards.items())
    ended = "ended by itself" if sample.finish_reason == "stop" else "cut off"
    tokens = _count(len(sample.token_ids), "token")
    return printable(f"sample {at}   reward {sample.reward:.4g} ({sources})   {tokens}, {ended}")


def _styles(samples: Sequence[Sample]) -> dict[int, str]:
    versions = sorted({span.version for sample in samples for span in sample.spans})
    return {version: _COLOURS[at % len(_COLOURS)] for at, version in enumerate(versions)}


def _prompt(group: Group, words: Words | None) -> Text:
    return Text(_plain(words.decode(group.prompt_ids) if words else _ids(group.prompt_ids)))


def _pieces(sample: Sample, words: Words | None) -> Iterator[str]:
    """The text of each span. A tokenizer may decode a piece otherwise than the whole, so each is what it adds."""
    before = ""
    for span in sample.spans:
        if words is None:
            yield _ids(sample.token_ids[span.start : span.end]) + " "
            continue
        so_far = words.decode(sample.token_ids[: span.end])
        whole = so_far.startswith(before)
        yield _plain(so_far[len(before) :] if whole else _alone(sample, span, words))
        before = so_far


def _alone(sample: Sample, span: Span, words: Words) -> str:
    return words.decode(sample.token_ids[span.start : span.end])


def _ids(token_ids: Any) -> str:
    return " ".join(str(int(token)) for token in token_ids)


def _plain(text: str) -> str:
    """Lines stay lines; every other control character goes."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _wrapped(text: Text, width: int, max_lines: int | None, *, indent: str = _INDENT) -> Iterator[Text]:
    room = max(10, width - len(indent))
    lines = [piece for line in text.split("\n", allow_blank=True) for piece in _cut(line, room)]
    shown = lines if max_lines is None else lines[:max_lines]
    for line in shown:
        line.rstrip()
        yield Text(indent).append_text(line)
    if len(lines) > len(shown):
        yield Text(f"{indent}… {_count(len(lines) - len(shown), 'more line')}", style="dim")


def _cut(line: Text, room: int) -> Iterator[Text]:
    """At spaces where there are some, as people's eyes want it; by cells, since some letters take two."""
    while line.cell_len > room:
        head = line.copy()
        head.truncate(room)
        at = head.plain.rfind(" ")
        at = at + 1 if at > room // 2 else max(1, len(head.plain))
        yield line[:at]
        line = line[at:]
    yield line


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
