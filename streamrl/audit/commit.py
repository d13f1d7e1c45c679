"""The newest commit of a run, read from its folder: epochs, and the manifest of a checkpoint.

    run.json                                   run_uid
    epochs/000006                              parent: the checkpoint that this learner goes on from, or null
    checkpoints/e000006-s00000120/manifest.json
        digest                                 XXH3-128 of the content, as JSON with sorted keys
        content.files                          path -> [size, digest]
        content.state.stream                   cursor, carry, journal, ledger

From the highest epoch back over the parents, these records say which checkpoints are of the surviving lineage; the
newest complete one of them is what the run amounts to. Complete means here: the manifest is intact and every file has
its size; to read gigabytes of tensors for their digests is the learner's business.
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

EntryId = tuple[int, int]  # milliseconds, sequence
_CHECKPOINT = re.compile(r"e(\d{6,})-s(\d{8,})")
_SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The newest complete checkpoint of the surviving lineage; without one, the beginning of the run."""

    run_uid: str
    epoch: int  # the highest
    lineage: Mapping[int, int | None]  # by epoch, the last step that counts; None: all do
    checkpoint: str | None = None
    step: int = 0
    issued: int = 0
    resolved: tuple[tuple[int, int], ...] = ()  # ranges [start, end) of tickets that have ended, the ledger says
    outcomes: Mapping[str, int] = field(default_factory=dict)  # tickets by how they ended, the ledger says
    cursor: EntryId = (0, 0)
    carry: frozenset[EntryId] = frozenset()
    journal: str | None = None  # its newest file
    damaged: tuple[str, ...] = ()  # newer checkpoints, and what is wrong with them

    def holds(self, epoch: int, step: int) -> bool:
        """Whether a commit of this epoch at this step is of the surviving lineage."""
        last = self.lineage.get(epoch, -1)
        return last is None or step <= last


def parse_id(text: str) -> EntryId:
    milliseconds, _, sequence = text.partition("-")
    return int(milliseconds), int(sequence)


def parse_checkpoint(text: str) -> tuple[int, int] | None:
    """(epoch, step) of a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def read_commit(folder: Path) -> Commit:
    """DataError when this is not a run's folder, or no checkpoint of those that were made can be read."""
    run_uid = str(_read_record(folder / "run.json", "run_uid")["run_uid"])
    lineage = _read_lineage(folder)
    beginning = Commit(run_uid=run_uid, epoch=max(lineage, default=0), lineage=lineage)
    damaged: list[str] = []
    for name in _names(folder, beginning):
        checkpoint = folder / "checkpoints" / name
        try:
            state = _read_state(checkpoint)
        except DataError as error:
            if not checkpoint.is_dir():
                return read_commit(folder)  # pruned while we looked, so that a newer one is there by now
            damaged.append(str(error))
            continue
        return replace(_with_state(beginning, state), checkpoint=name, damaged=tuple(damaged))
    if damaged or len(lineage) > 1:
        raise DataError("; ".join([f"{folder}: no checkpoint of the surviving lineage can be read", *damaged]))
    return beginning


def _read_lineage(folder: Path) -> dict[int, int | None]:
    records = folder / "epochs"
    numbers = [int(path.name) for path in records.iterdir() if path.name.isdecimal()] if records.is_dir() else []
    lineage: dict[int, int | None] = {}
    epoch, last = max(numbers, default=0), None
    while epoch > 0:
        lineage[epoch] = last
        path = records / f"{epoch:06d}"
        parent = _read_record(path, "parent")["parent"]
        if parent is None:
            break
        found = parse_checkpoint(str(parent))
        if found is None or found[0] >= epoch:
            raise DataError(f"{path}: parent {parent!r} is no checkpoint of an earlier epoch")
        epoch, last = found
    return lineage


def _names(folder: Path, commit: Commit) -> Iterator[str]:
    """Checkpoints of the lineage, the newest first."""
    checkpoints = folder / "checkpoints"
    paths = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = [parse_checkpoint(path.name) for path in paths if path.is_dir()]
    for epoch, step in sorted((place for place in found if place), reverse=True):
        if commit.holds(epoch, step):
            yield f"e{epoch:06d}-s{step:08d}"


def _read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "manifest.json"
    try:
        sealed = json.loads(path.read_bytes())
        content: dict[str, Any] = sealed["content"]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
        intact = sealed["digest"] == digest
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: missing or cut off") from None
    if not intact:
        raise DataError(f"{path}: contents do not match their digest")
    if content["schema"] != _SCHEMA:
        raise DataError(f"{path}: schema {content['schema']}; this program reads schema {_SCHEMA}")
    for name, (size, _) in content["files"].items():
        if _size(checkpoint / name) != size:
            raise DataError(f"{checkpoint / name}: missing, or not of {size} bytes")
    state: dict[str, Any] = content["state"]
    return state


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
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
        cursor=parse_id(stream["cursor"]),
        carry=frozenset(parse_id(entry_id) for entry_id in stream["carry"]),
        journal=stream["journal"],
    )


def _read_record(path: Path, key: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is not there: give the folder of a run") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: not a record of streamrl: {key!r} is missing")
    return record
