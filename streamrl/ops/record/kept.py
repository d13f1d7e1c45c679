"""Groups that the learner has kept as text in a run's folder, rollouts.jsonl: one per step, over the whole run.

They remain when the stream has dropped them or is gone. Reads the disk only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from streamrl.errors import DataError
from streamrl.ops.record.view import plain, wrapped
from streamrl.protocol.wire.turns import heading_of
from streamrl.terminal import printable

_FILE = "rollouts.jsonl"


class KeptGroups:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / _FILE

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Return the last ones, in order; repeated steps come in the order in which they were made."""
        records = list(self._records())
        return records[max(0, len(records) - count) :]

    def find(self, wanted: str) -> dict[str, Any]:
        """Find a group by ticket number or id. DataError if it was not kept."""
        found = [record for record in self._records() if wanted in (record["id"], str(record["ticket"]))]
        if found:
            return found[-1]
        raise DataError(f"group {wanted} was not kept: at most one group per step is; `groups tail` lists them")

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the records; a crash may have truncated the last line."""
        if not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def lines_of_record(record: Mapping[str, Any], *, width: int, max_lines: int | None) -> Iterator[Text]:
    """Format like `view.lines_of`; `max_lines` per text."""
    heading = f"ticket {record['ticket']}   step {record['step']}   worker {record['worker']}"
    yield _heading(heading, width)
    yield _heading("prompt", width, style="dim")
    yield from wrapped(Text(plain(record["prompt"])), width, max_lines)
    for at, sample in enumerate(record["samples"], start=1):
        sources = ", ".join(f"{name} {value:.4g}" for name, value in sample["rewards"].items())
        ended = "ended by itself" if sample["finish_reason"] == "stop" else "cut off"
        versions = " then ".join(dict.fromkeys(span["version"] for span in sample["spans"]))
        yield _heading(f"sample {at}   reward {sample['reward']:.4g} ({sources})   {ended}, by {versions}", width)
        parts = sample.get("turns", ())  # missing in records of older versions
        if len(parts) < 2:
            yield from wrapped(Text(plain(sample["text"])), width, max_lines)
            continue
        turns = itertools.count(1)
        for part in parts:
            yield _heading(heading_of(part, next(turns) if part["by"] == "model" else 0), width, style="dim")
            yield from wrapped(Text(plain(part["text"])), width, max_lines)


def _heading(text: str, width: int, *, style: str = "bold") -> Text:
    heading = Text(printable(text), style=style)
    heading.truncate(width, overflow="ellipsis")
    return heading
