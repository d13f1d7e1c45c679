"""The journal of a run, read back: which ticket ended how and in which step.

    journal/e000002-s00000020.jsonl
        {"schema": 1, "run_uid": ..., "after": the file before, or null}
        {"step": 11, "outcome": "trained" | "dropped/REASON" | "dead", "tickets": [[start, end], ...]}
        {"num_tickets": ..., "digest": XXH3-128 of all lines before}

The manifest of a checkpoint names the newest file, each file the one before. What that chain does not reach was written
by learners that had been replaced, or that died before they could commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

import xxhash

from streamrl.audit.commit import Commit, parse_checkpoint
from streamrl.errors import DataError

TRAINED = "trained"
_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Tickets that ended alike in one step."""

    epoch: int
    step: int
    outcome: str
    ranges: tuple[tuple[int, int], ...]  # [start, end)

    @property
    def num_tickets(self) -> int:
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The journal of the surviving lineage."""

    files: frozenset[str]
    lines: tuple[Line, ...]
    breaks: tuple[str, ...]  # where and why it cannot be read; what ended there is not in `lines`


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    num_steps: int
    num_tickets: int
    unreadable: tuple[str, ...]


def read_chain(folder: Path, commit: Commit) -> Chain:
    files: set[str] = set()
    lines: list[Line] = []
    breaks: list[str] = []
    name = commit.journal
    while name is not None:
        place = parse_checkpoint(name.partition(".")[0])
        if name in files or place is None or not commit.holds(*place):
            breaks.append(f"journal {name!r}: a file of the surviving lineage cannot go on from it")
            break
        files.add(name)
        text = _read_text(folder, name)
        try:
            lines += _read_lines(text, name, commit.run_uid)
        except DataError as error:
            breaks.append(str(error))
        name = _file_before(text)
    return Chain(files=frozenset(files), lines=tuple(lines), breaks=tuple(breaks))


def read_waste(folder: Path, commit: Commit, chain: Chain) -> Waste:
    """Steps in files beside the chain. A learner may have failed to commit once and succeeded later: what the chain
    has too is not wasted. Nor is, as yet, what the newest learner has written and may be about to commit."""
    kept = {(line.epoch, line.step) for line in chain.lines}
    steps: set[tuple[int, int]] = set()
    num_tickets = 0
    unreadable: list[str] = []
    for name in _names_beside(folder, commit, chain.files):
        try:
            lines = _read_lines(_read_text(folder, name), name, commit.run_uid)
        except DataError as error:
            unreadable.append(f"{error} (it is not of the surviving lineage)")
            continue
        wasted = [line for line in lines if line.outcome == TRAINED and (line.epoch, line.step) not in kept | steps]
        num_tickets += sum(line.num_tickets for line in wasted)
        steps |= {(line.epoch, line.step) for line in wasted}
    return Waste(num_steps=len(steps), num_tickets=num_tickets, unreadable=tuple(unreadable))


def _names_beside(folder: Path, commit: Commit, chain: Set[str]) -> Iterator[str]:
    newest = parse_checkpoint(commit.checkpoint) if commit.checkpoint else None
    for path in sorted((folder / "journal").glob("e*.jsonl")):
        place = parse_checkpoint(path.stem.partition(".")[0])
        if place is None or path.stem in chain:
            continue
        if place[0] < commit.epoch or (newest is not None and place <= newest):
            yield path.stem


def _read_text(folder: Path, name: str) -> bytes:
    """Empty when it is not there."""
    path = folder / "journal" / f"{name}.jsonl"
    return path.read_bytes() if path.is_file() else b""


def _file_before(text: bytes) -> str | None:
    """From a torn file, too, as long as its first line is whole."""
    try:
        after = json.loads(text.partition(b"\n")[0])["after"]
    except (ValueError, KeyError, TypeError):
        return None
    return None if after is None else str(after)


def _read_lines(text: bytes, name: str, run_uid: str) -> list[Line]:
    place = parse_checkpoint(name.partition(".")[0])
    assert place is not None, "only files with a checkpoint's name are read"
    try:
        header, *records, seal = [json.loads(line) for line in text.splitlines()]
        body = text[: text.rstrip(b"\n").rfind(b"\n") + 1]
        intact = seal["digest"] == xxhash.xxh3_128_hexdigest(body)
        expected = (header["schema"], header["run_uid"]) == (_SCHEMA, run_uid)
        lines = [
            Line(epoch=place[0], step=r["step"], outcome=r["outcome"], ranges=tuple((a, b) for a, b in r["tickets"]))
            for r in records
        ]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"journal {name!r}: missing or cut off") from None
    if not intact:
        raise DataError(f"journal {name!r}: contents do not match their digest")
    if not expected:
        raise DataError(f"journal {name!r}: of another run, or of another schema than {_SCHEMA}")
    return lines
