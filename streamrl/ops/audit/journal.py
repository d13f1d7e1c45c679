"""Reads the journal of a run: which ticket ended how, and in which step.

    journal/e000002-s00000020.jsonl
        {"schema": 2, "run_uid": ..., "after": the file before, or null}
        {"step": 11, "outcome": "trained" | "dropped/REASON" | "dead", "tickets": [[start, end], ...],
         "asked": [what each asked for, ...], "answered": {ticket: what its group answers, if that is another}}
        {"num_tickets": ..., "digest": XXH3-128 of all lines before}

The manifest of a checkpoint names the newest file, and each file its predecessor. Files outside of this chain were
written by learners that had been replaced, or that died before they could commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

import xxhash

from streamrl.errors import DataError
from streamrl.ops.audit.commit import LastCommit, parse_checkpoint

TRAINED = "trained"
_JOURNAL_SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Tickets with the same outcome in one step."""

    term: int
    step: int
    outcome: str
    ranges: tuple[tuple[int, int], ...]  # [start, end)
    misanswered: tuple[int, ...] = ()  # those whose group answers something else than they asked

    @property
    def num_tickets(self) -> int:
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The journal of the surviving lineage."""

    files: frozenset[str]
    lines: tuple[Line, ...]
    breaks: tuple[str, ...]  # where and why it is unreadable; what ended there is not in `lines`


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    num_steps: int
    num_tickets: int
    unreadable: tuple[str, ...]


def read_chain(folder: Path, commit: LastCommit) -> Chain:
    files: set[str] = set()
    lines: list[Line] = []
    breaks: list[str] = []
    name = commit.journal
    while name is not None:
        place = parse_checkpoint(name.partition(".")[0])
        if name in files or place is None or not commit.holds(*place):
            breaks.append(f"journal {name!r}: the surviving lineage cannot continue from this file")
            break
        files.add(name)
        text = _read_text(folder, name)
        try:
            lines += _read_lines(text, name, commit.run_uid)
        except DataError as error:
            breaks.append(str(error))
        name = _file_before(text)
    return Chain(files=frozenset(files), lines=tuple(lines), breaks=tuple(breaks))


def read_waste(folder: Path, commit: LastCommit, chain: Chain) -> Waste:
    """Read the steps in files outside of the chain. A learner may have failed to commit and succeeded later: steps that
    the chain has too are not wasted. Nor are those that the newest learner may be about to commit."""
    committed = {(line.term, line.step) for line in chain.lines}
    steps: set[tuple[int, int]] = set()
    num_tickets = 0
    unreadable: list[str] = []
    for name in _names_outside(folder, commit, chain.files):
        try:
            lines = _read_lines(_read_text(folder, name), name, commit.run_uid)
        except DataError as error:
            unreadable.append(f"{error} (not part of the surviving lineage)")
            continue
        wasted = [line for line in lines if line.outcome == TRAINED and (line.term, line.step) not in committed | steps]
        num_tickets += sum(line.num_tickets for line in wasted)
        steps |= {(line.term, line.step) for line in wasted}
    return Waste(num_steps=len(steps), num_tickets=num_tickets, unreadable=tuple(unreadable))


def _names_outside(folder: Path, commit: LastCommit, chain: Set[str]) -> Iterator[str]:
    newest = parse_checkpoint(commit.checkpoint) if commit.checkpoint else None
    for path in sorted((folder / "journal").glob("e*.jsonl")):
        place = parse_checkpoint(path.stem.partition(".")[0])
        if place is None or path.stem in chain:
            continue
        if place[0] < commit.term or (newest is not None and place <= newest):
            yield path.stem


def _read_text(folder: Path, name: str) -> bytes:
    """Read a file of the journal; empty if it does not exist."""
    path = folder / "journal" / f"{name}.jsonl"
    return path.read_bytes() if path.is_file() else b""


def _file_before(text: bytes) -> str | None:
    """Return the preceding file; also from a truncated file, if its first line is complete."""
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
        expected = (header["schema"], header["run_uid"]) == (_JOURNAL_SCHEMA, run_uid)
        lines = [
            Line(
                term=place[0],
                step=r["step"],
                outcome=r["outcome"],
                ranges=tuple((a, b) for a, b in r["tickets"]),
                misanswered=tuple(map(int, r.get("answered", {}))),
            )
            for r in records
        ]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"journal {name!r}: missing or truncated") from None
    if not intact:
        raise DataError(f"journal {name!r}: contents do not match their digest")
    if not expected:
        raise DataError(f"journal {name!r}: of another run, or its schema is not {_JOURNAL_SCHEMA}")
    return lines
