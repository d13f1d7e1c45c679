"""A rollout as a conversation: the model's turns, the text given to it, the row of each, and the versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from streamrl.protocol.wire.sample import Sample, Span
from streamrl.versions import show

# The form in which most chat templates with tools write a call; calls in other forms appear as text only.
_CALL = re.compile(r'<tool_call>\s*\{.{0,200}?"name"\s*:\s*"([^"]{1,100})"', re.DOTALL)
_NUM_TOKENS_BEFORE = 32  # decoded with a part: far more than a cut character or a dropped space needs


class Part(NamedTuple):
    """A turn, or the tokens given before one: tokens [start, end) of the sample, all in one row."""

    start: int
    end: int
    row: int
    behind: tuple[int, int] | None  # (row, number of its tokens) that a branch continues, on its first part
    spans: tuple[Span, ...]  # of a turn; empty for given tokens

    @property
    def versions(self) -> list[str]:
        return list(dict.fromkeys(show(span.version) for span in self.spans))


def parts_of(sample: Sample) -> list[Part]:
    turns = sample.turns()
    starts = {branch.start: at for at, branch in enumerate(sample.branches, start=1)}
    cuts = {0, len(sample.token_ids), *starts, *(place for turn in turns for place in turn)}
    bounds = sorted(cuts)
    found: list[Part] = []
    row = 0
    for start, end in pairwise(bounds):
        row = starts.get(start, row)
        branch = sample.branches[row - 1] if start in starts else None
        spans = tuple(span for span in sample.spans if start <= span.start < end)
        behind = (branch.row, branch.keep) if branch else None
        found.append(Part(start=start, end=end, row=row, behind=behind, spans=spans))
    return found


def told_of(
    sample: Sample, decode: Callable[[Any], str] | None, *, most_parts: int | None = None
) -> list[dict[str, Any]]:
    """Return the parts for JSON output, the first `most_parts` or all, with texts if there is a tokenizer."""
    records: list[dict[str, Any]] = []
    earned = iter(sample.turn_rewards)
    for part in parts_of(sample)[:most_parts]:
        record: dict[str, Any] = {"by": "model" if part.spans else "given", "start": part.start, "end": part.end}
        record |= {"row": part.row, "versions": part.versions}
        if part.spans and sample.turn_rewards:
            record["reward"] = next(earned)
        if part.behind:
            record["behind"] = {"row": part.behind[0], "tokens": part.behind[1]}
        if decode is not None:
            record["text"] = _text_of(sample, part, decode)
            record["tool_calls"] = _CALL.findall(record["text"]) if part.spans else []
        records.append(record)
    return records


def _text_of(sample: Sample, part: Part, decode: Callable[[Any], str]) -> str:
    """Return what the part adds to the text before it: a tokenizer may decode a piece differently than the whole.

    A few tokens stand for all before it: with all of them, the cost would grow with the square of the turns.
    """
    begin = max(0, part.start - _NUM_TOKENS_BEFORE)
    before = decode(sample.token_ids[begin : part.start]) if part.start else ""
    so_far = decode(sample.token_ids[begin : part.end])
    return so_far[len(before) :] if so_far.startswith(before) else decode(sample.token_ids[part.start : part.end])


def heading_of(record: dict[str, Any], number: int) -> str:
    """Format the heading of a part: the turn of this number, or the tokens given before it."""
    heading = f"turn {number} by {' then '.join(record['versions'])}" if record["by"] == "model" else "given"
    if calls := record.get("tool_calls"):
        heading += f", calls {', '.join(calls)}"
    if "reward" in record:
        heading += f", reward {record['reward']:.4g}"
    if behind := record.get("behind"):
        heading += f"   row {record['row']}: continues after {behind['tokens']} tokens of row {behind['row']}"
    return heading
