"""Reads the newest commit of a run from its folder: terms, and the manifest of a checkpoint.

    run.json                                   run_uid
    terms/000006                              parent: the checkpoint from which this learner resumed, or null
    checkpoints/e000006-s00000120/manifest.json
        digest                                 XXH3-128 of the content, as JSON with sorted keys
        content.files                          path -> [size, digest]
        content.state.stream                   cursor, carry, journal, ledger

Followed from the highest term back to its ancestors, these records tell which checkpoints belong to the surviving
lineage; its newest complete checkpoint is the state of the run. Complete means that the manifest is intact and every
file has its size; checking the digests of gigabytes of tensors is left to the learner.

Also reads the journal of a run: which ticket ended how, and in which step.

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
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from streamrl.errors import DataError
from streamrl.files import MISSING, naming

EntryId = tuple[int, int]  # milliseconds, sequence
_CHECKPOINT = re.compile(r"e(\d{6,})-s(\d{8,})")
_SCHEMA = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The newest complete checkpoint of the surviving lineage; without one, the start of the run."""

    run_uid: str
    term: int  # the highest term
    lineage: Mapping[int, int | None]  # by term, the last step that counts; None: all
    checkpoint: str | None = None
    step: int = 0
    issued: int = 0
    resolved: tuple[tuple[int, int], ...] = ()  # from the ledger: ranges [start, end) of tickets that have ended
    outcomes: Mapping[str, int] = field(default_factory=dict)  # from the ledger: tickets by outcome
    identities: Mapping[int, str] = field(default_factory=dict)  # from the ledger: what the open tickets ask for
    cursor: EntryId = (0, 0)
    carry: frozenset[EntryId] = frozenset()
    journal: str | None = None  # the newest file
    damaged: tuple[str, ...] = ()  # newer checkpoints, with what is wrong

    def holds(self, term: int, step: int) -> bool:
        """Return whether a commit of this term at this step belongs to the surviving lineage."""
        last = self.lineage.get(term, -1)
        return last is None or step <= last


def parse_id(text: str) -> EntryId:
    milliseconds, _, sequence = text.partition("-")
    return int(milliseconds), int(sequence)


def parse_checkpoint(text: str) -> tuple[int, int] | None:
    """Parse (term, step) from a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def read_commit(folder: Path) -> Commit:
    """Read the commit. DataError if this is no run's folder, or none of its checkpoints is sound; OSError if the disk
    does not tell."""
    run_uid = str(_read_record(folder / "run.json", "run_uid")["run_uid"])
    lineage = _read_lineage(folder)
    beginning = Commit(run_uid=run_uid, term=max(lineage, default=0), lineage=lineage)
    damaged: list[str] = []
    for name in _names(folder, beginning):
        checkpoint = folder / "checkpoints" / name
        try:
            state = _read_state(checkpoint)
        except DataError as error:
            if not checkpoint.is_dir():
                return read_commit(folder)  # pruned meanwhile, so there is a newer one now
            damaged.append(str(error))
            continue
        return replace(_with_state(beginning, state), checkpoint=name, damaged=tuple(damaged))
    if damaged or len(lineage) > 1:
        raise DataError("; ".join([f"{folder}: no checkpoint of the surviving lineage can be read", *damaged]))
    return beginning


def _read_lineage(folder: Path) -> dict[int, int | None]:
    records = folder / "terms"
    numbers = [int(path.name) for path in records.iterdir() if path.name.isdecimal()] if records.is_dir() else []
    lineage: dict[int, int | None] = {}
    term, last = max(numbers, default=0), None
    while term > 0:
        lineage[term] = last
        path = records / f"{term:06d}"
        parent = _read_record(path, "parent")["parent"]
        if parent is None:
            break
        found = parse_checkpoint(str(parent))
        if found is None or found[0] >= term:
            raise DataError(f"{path}: parent {parent!r} is not a checkpoint of an earlier term")
        term, last = found
    return lineage


def _names(folder: Path, commit: Commit) -> Iterator[str]:
    """Yield the lineage's checkpoints, newest first."""
    checkpoints = folder / "checkpoints"
    paths = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = [parse_checkpoint(path.name) for path in paths if path.is_dir()]
    for term, step in sorted((place for place in found if place), reverse=True):
        if commit.holds(term, step):
            yield f"e{term:06d}-s{step:08d}"


def _read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "manifest.json"
    try:
        with naming(path):
            sealed = json.loads(path.read_bytes())
        content: dict[str, Any] = sealed["content"]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
        intact = sealed["digest"] == digest
    except (*MISSING, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: missing or truncated") from None
    if not intact:
        raise DataError(f"{path}: contents do not match their digest")
    if content["schema"] != _SCHEMA:
        raise DataError(f"{path}: schema {content['schema']}; this program reads schema {_SCHEMA}")
    for name, (size, _) in content["files"].items():
        if _size(checkpoint / name) != size:
            raise DataError(f"{checkpoint / name}: missing, or its size is not {size} bytes")
    state: dict[str, Any] = content["state"]
    return state


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except MISSING:
        return None


def _with_state(beginning: Commit, state: Mapping[str, Any]) -> Commit:
    stream, ledger = state["stream"], state["stream"]["ledger"]
    below = [(0, ledger["watermark"])] if ledger["watermark"] else []
    return replace(
        beginning,
        step=state["step"],
        issued=ledger["issued"],
        resolved=tuple((start, end) for start, end in (*below, *ledger["exceptions"])),
        outcomes=ledger["outcomes"],
        identities={int(number): identity for number, identity in ledger["asked"].items()},
        cursor=parse_id(stream["cursor"]),
        carry=frozenset(parse_id(entry_id) for entry_id in stream["carry"]),
        journal=stream["journal"],
    )


def _read_record(path: Path, key: str) -> dict[str, Any]:
    try:
        with naming(path):
            record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: give the folder of a run") from None
    except (NotADirectoryError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: not a record of streamrl: {key!r} is missing")
    return record


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


def read_chain(folder: Path, commit: Commit) -> Chain:
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


def read_waste(folder: Path, commit: Commit, chain: Chain) -> Waste:
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


def _names_outside(folder: Path, commit: Commit, chain: Set[str]) -> Iterator[str]:
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
