"""Terms: which learner is the newest, and which checkpoints its history consists of.

A starting learner claims the next number durably, by creating `terms/000006` in the run's folder, before it has any
effect. The record names the checkpoint it goes on from, so that the records form a tree, and the way from the highest
term to the root is the surviving lineage:

    term 1 ──s10──s20──s30            s30 was written by a learner that had been replaced: not in the lineage of 3
                    └─ term 2 ──s30──s40
                                  └─ term 3 ──s40

The lease on the run in Redis must be held before claiming: a record, even of a learner that never got to work, cuts
off what its predecessor writes afterwards. One that slept meanwhile, and was replaced, must not record a higher term
than who replaced it; so it asks again after it has looked for the number, and if the other records a term after that,
the number is taken. Touches the disk only; nothing here waits.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.crashpoints import crashpoint
from streamrl.errors import DataError, ResourceError
from streamrl.files import create_exclusively, fsync_folder

_CLAIM_ATTEMPTS = 100
_NAME = re.compile(r"e(\d{6,})-s(\d{8,})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """`e000006-s00000120`: the term that wrote it and the optimizer steps made."""

    term: int
    step: int

    def __str__(self) -> str:
        return f"e{self.term:06d}-s{self.step:08d}"

    @staticmethod
    def parse(text: str) -> CheckpointName | None:
        match = _NAME.fullmatch(text)
        return CheckpointName(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    number: int
    parent: CheckpointName | None  # the checkpoint it goes on from; None: from the start
    run_uid: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """The checkpoints of one line of descent: of each term in it, those up to the step where the next one left."""

    last_steps: Mapping[int, int | None]  # by term; None: whatever it writes

    def holds(self, name: CheckpointName) -> bool:
        if name.term not in self.last_steps:
            return False
        last = self.last_steps[name.term]
        return last is None or name.step <= last

    @property
    def has_parent(self) -> bool:
        """A checkpoint was there when the newest term began."""
        return len(self.last_steps) > 1


def claim_run(root: Path) -> str:
    """The run's uid, made up by whoever comes first and the same for ever after."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / "run.json"
    record = {"run_uid": uuid.uuid4().hex, **_whoami()}
    create_exclusively(path, json.dumps(record).encode())
    crashpoint("run.recorded")
    return str(_read_record(path, "run_uid")["run_uid"])


def claim_term(
    root: Path,
    *,
    run_uid: str,
    newest: Callable[[Lineage], CheckpointName | None],
    confirm: Callable[[], object] = lambda: None,
    known: int = 0,
) -> Term:
    """Claim the next term; `newest` finds the newest complete checkpoint of a lineage, which may take long, and
    `confirm` raises when the lease is not ours any more. `known`: a term that others have seen, which a folder that
    was put back from a copy does not hold; it is passed over, with all before it."""
    folder = root / "terms"
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(root)
    before = highest_term(root)
    number = max(before, known) + 1
    for _ in range(_CLAIM_ATTEMPTS):
        lineage = _lineage_of(root, before)
        parent = newest(lineage)
        confirm()
        record = {"parent": str(parent) if parent else None, "run_uid": run_uid, **_whoami()}
        if not create_exclusively(folder / f"{number:06d}", json.dumps(record).encode()):
            before = highest_term(root)  # another learner was faster: go on from what it went on from
            number = max(before, known) + 1
        elif parent is None or (root / "checkpoints" / str(parent)).is_dir():
            crashpoint("term.recorded")
            return Term(number=number, parent=parent, run_uid=run_uid)
        else:
            number += 1  # a predecessor that still runs has just pruned it: choose again in the same lineage
    raise ResourceError(f"{folder}: no term could be claimed in {_CLAIM_ATTEMPTS} attempts; do other learners start?")


def ancestry(root: Path) -> Lineage:
    """The lineage of the highest term; empty before the first."""
    return _lineage_of(root, highest_term(root))


def highest_term(root: Path) -> int:
    return max(_numbers(root), default=0)


def parents_named_after(root: Path, term: int) -> set[CheckpointName]:
    """The checkpoints that younger terms than this one go on from."""
    parents = (_parent_of(root, number) for number in _numbers(root) if number > term)
    return {parent for parent in parents if parent is not None}


def _lineage_of(root: Path, term: int) -> Lineage:
    last_steps: dict[int, int | None] = {}
    last: int | None = None
    while term > 0:
        last_steps[term] = last
        parent = _parent_of(root, term)
        if parent is None:
            break
        if parent.term >= term:
            raise DataError(f"{root / 'terms' / f'{term:06d}'}: parent {parent} is not of an earlier term")
        term, last = parent.term, parent.step
    return Lineage(last_steps)


def _parent_of(root: Path, term: int) -> CheckpointName | None:
    path = root / "terms" / f"{term:06d}"
    text = _read_record(path, "parent")["parent"]
    if text is None:
        return None
    name = CheckpointName.parse(str(text))
    if name is None:
        raise DataError(f"{path}: {text!r} is no name of a checkpoint")
    return name


def _numbers(root: Path) -> Iterator[int]:
    folder = root / "terms"
    if folder.is_dir():
        yield from (int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _read_record(path: Path, key: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{path}: not a record of streamrl: {key!r} is missing")
    return record


def _whoami() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
