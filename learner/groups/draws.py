"""The durable log of a curriculum's draws: which prompt each place asks for, synced before its ticket goes out.

    run folder/
      curriculum/
        000006.jsonl      draws of this term's learner, one line per block; never removed

    {"schema": 1, "term": 6}
    {"first": 40, "num_visited": 61, "asked": [[0, 57], [0, 3], [1, 12]], "chances": [1.0, 0.25, 0.8]}

`asked` has a (pass, row) pair for each place from `first` on, and `chances` their admission chances; `num_visited` is
the number of candidates visited by then. A truncated line was never acted on. A replaced learner may still append to
its own file; if two terms have drawn for a place, the newer counts. Blocks on the disk only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from streamrl.files import fsync_folder

_SCHEMA = 1

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """One block of draws."""

    first: int  # place
    num_visited: int  # candidates, up to the last admitted one
    asked: tuple[tuple[int, int], ...]  # (pass, row) of each place
    chances: tuple[float, ...]


class DrawLog:
    def __init__(self, root: Path, *, term: int, since: int = 0) -> None:
        """`since`: the term of the checkpoint to resume from."""
        self._folder, self._term, self._since = root / "curriculum", term, since
        self._path = self._folder / f"{term:06d}.jsonl"

    def earlier(self, first: int) -> Draws | None:
        """The draws of earlier learners from place `first` on, up to the first gap."""
        found: dict[int, tuple[tuple[int, int], float, int]] = {}
        for term in sorted(self._terms()):
            for line in _lines(self._folder / f"{term:06d}.jsonl"):
                begin = max(first, line["first"])  # a learner of weeks has drawn for millions of places before
                skipped = begin - line["first"]
                pairs = zip(line["asked"][skipped:], line["chances"][skipped:], strict=True)
                for place, (asked, chance) in enumerate(pairs, begin):
                    found[place] = ((int(asked[0]), int(asked[1])), float(chance), int(line["num_visited"]))
        end = first
        while end in found:
            end += 1
        if end == first:
            return None
        asked, chances, visited = zip(*(found[place] for place in range(first, end)), strict=True)
        return Draws(first=first, num_visited=visited[-1], asked=asked, chances=chances)

    def write(self, draws: Draws) -> bool:
        """Write the draws durably; False if the disk is full: then nothing is drawn, and the caller retries later."""
        line = {**asdict(draws), "chances": [round(chance, 4) for chance in draws.chances]}
        try:
            if not self._path.exists() or not self._path.stat().st_size:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._append({"schema": _SCHEMA, "term": self._term})
                fsync_folder(self._folder)
                fsync_folder(self._folder.parent)
            self._append(line)
        except OSError as error:
            log.warning("no prompts drawn: cannot write the log of draws", error=str(error))
            return False
        return True

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            size = file.tell()
            try:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, size)  # or the next line would be appended to a partial one
                raise

    def _terms(self) -> Iterator[int]:
        if self._folder.is_dir():
            terms = (int(path.stem) for path in self._folder.glob("[0-9]*.jsonl"))
            yield from (term for term in terms if self._since <= term < self._term)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of the file, after its first."""
    with path.open("rb") as file:
        next(file, b"")
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                return
