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
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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
class LastCommit:
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


def read_commit(folder: Path) -> LastCommit:
    """Read the commit. DataError if this is no run's folder, or none of its checkpoints is sound; OSError if the disk
    does not tell."""
    run_uid = str(_read_record(folder / "run.json", "run_uid")["run_uid"])
    lineage = _read_lineage(folder)
    beginning = LastCommit(run_uid=run_uid, term=max(lineage, default=0), lineage=lineage)
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


def _names(folder: Path, commit: LastCommit) -> Iterator[str]:
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


def _with_state(beginning: LastCommit, state: Mapping[str, Any]) -> LastCommit:
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
