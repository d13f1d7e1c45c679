"""Writes checkpoints: all ranks together, while training continues.

    loop              begin ───── steps ───── settle ───── steps ───── settle: Redis ───── steps
                        │ a copy                ▲ │ all are durable      ▲ │
    every rank's thread └─► written, synced ────┘ │                      │ │
    that of rank 0                                └─► manifest, rename ──┘ └─► prune

The loop waits for little more than the copy. A checkpoint's stream state, sample count and schedule are those of the
moment of the copy; later training is not part of it. Until the rename the checkpoint does not exist, and after a crash
the run resumes from the previous one. Ranks communicate only in the loop, in `settle`, a collective that does not wait;
the threads never communicate.

Before its first checkpoint a learner prunes: what earlier ones have left may fill the disk.

One checkpoint is in progress at a time: the next one waits for it. If one cannot be written (a full disk), nothing is
committed, the run continues, and the next one is tried when it is due. `save` waits until everything is done, as a
run's last checkpoint must: for the disk, and for other ranks' disks. The `world` given here has a timeout that allows
for that. Torch-free, so that tests can kill processes without a model in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import structlog
import xxhash

from streamrl.crashpoints import crashpoint
from streamrl.files import naming
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.sealed import Files
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.background import Jobs

if TYPE_CHECKING:
    from streamrl.learner.process.ranks import World

_SLICE_S = 1.0  # of a wait, before the ranks compare again

log = structlog.get_logger(__name__)


class RankState(Protocol):
    """This rank's part of a checkpoint."""

    def take(self) -> None:
        """Copy the current state to memory that training does not write."""
        ...

    def write(self, folder: Path) -> Files:
        """Write the copy durably; runs beside the loop."""
        ...


class Committing(Protocol):
    """Rank 0's part of a checkpoint, as of its creation; on other ranks it does nothing."""

    def seal(self, files: Files) -> None:
        """Commit the checkpoint once all ranks' files are durable; runs beside the loop."""
        ...

    def announce(self) -> None:
        """Announce the committed checkpoint; runs in the loop."""
        ...

    def prune(self) -> None:
        """Remove older checkpoints; runs beside the loop."""
        ...


class Committer(Protocol):
    """What saving needs of the loop's conductor."""

    def begin_commit(self, name: CheckpointName, *, consumed_samples: int) -> Committing: ...


class _Outcome(IntEnum):
    """The state of all ranks' background work; the largest one counts."""

    DONE = 0
    FAILED = 1
    WAITING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    files: Files
    took_s: float


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    name: CheckpointName
    commit: Committing
    written: Future[_Written]
    sealed: Future[None] | None = None  # started once the files of all ranks are durable


class Saver:
    def __init__(
        self,
        *,
        state: RankState,
        world: World,
        checkpoints: CheckpointRoot,
        conductor: Committer,
        term: int,
        background: Jobs,
        timers: Timers,
    ) -> None:
        self._state, self._world, self._checkpoints = state, world, checkpoints
        self._conductor, self._term, self._background, self._timers = conductor, term, background, timers
        self._under_way: _UnderWay | None = None
        self._pruned: Future[None] | None = None
        self._last: CheckpointName | None = None
        self.num_refused = 0  # checkpoints in a row that a disk did not take

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is in progress; then `settle` must be called now and then."""
        return self._under_way is not None

    def begin(self, step: int, *, consumed_samples: int) -> None:
        """Copy the state of this step, to be written while the loop continues. A collective.

        If this step is on disk already, only the tickets' outcomes since then are committed.
        """
        if self.busy:
            with self._timers.measure("checkpoint_wait"):
                self._finish()
        name = CheckpointName(self._term, step)
        commit = self._conductor.begin_commit(name, consumed_samples=consumed_samples)
        if self._pruned is None:  # a killed learner may have left parts, or fewer checkpoints are to be kept by now
            self._pruned = self._background.submit(commit.prune)
        if name == self._last:
            self._under_way = _UnderWay(name=name, commit=commit, written=_nothing())
        elif self._make_folder(name):
            self._state.take()
            crashpoint("checkpoint.copied")
            written = self._background.submit(partial(self._write, self._checkpoints.temp_folder(name)))
            self._under_way = _UnderWay(name=name, commit=commit, written=written)
        else:
            self.num_refused += 1

    def settle(self, *, wait_s: float = 0.0) -> bool | None:
        """Return whether the checkpoint in progress is committed; None: not known yet. A collective."""
        under_way = self._under_way
        assert under_way is not None, "only called while busy"
        outcome = self._outcome(under_way.name, under_way.sealed or under_way.written, wait_s=wait_s)
        if outcome is _Outcome.WAITING:
            return None
        if outcome is _Outcome.FAILED:
            self._under_way = None
            self.num_refused += 1
            if self._world.is_main:
                self._checkpoints.discard(under_way.name)
            return False
        if under_way.sealed is None:
            under_way.sealed = self._background.submit(
                partial(under_way.commit.seal, self._all_files(under_way.written))
            )
            return None
        self._under_way, self._last, self.num_refused = None, under_way.name, 0
        self._after_pruning()  # immediate: the thread pruned before it wrote
        under_way.commit.announce()
        self._pruned = self._background.submit(under_way.commit.prune)
        return True

    def save(self, step: int, *, consumed_samples: int) -> bool:
        """Write a checkpoint and wait for it; return whether this step is on disk. A collective."""
        self.begin(step, consumed_samples=consumed_samples)
        return self._finish()

    def _finish(self) -> bool:
        committed = None
        while self.busy:
            committed = self.settle(wait_s=_SLICE_S)
        self._after_pruning()
        return bool(committed)

    def _after_pruning(self) -> None:
        if self._pruned is not None:
            self._pruned.result()

    def _outcome(self, name: CheckpointName, future: Future[Any], *, wait_s: float) -> _Outcome:
        """The outcome over all ranks; raises errors that are not the disk's."""
        wait([future], timeout=wait_s)
        outcome = _Outcome.DONE if future.done() else _Outcome.WAITING
        if future.done() and (error := future.exception()) is not None:
            _raise_unless_of_the_disk(error, name)
            outcome = _Outcome.FAILED
        return _Outcome(int(self._world.largest(np.array([float(outcome)]))[0]))

    def _all_files(self, future: Future[_Written]) -> Files:
        """The files of all ranks, as each reports its own."""
        written = future.result()
        own_report = json.dumps([written.took_s, written.files]).encode()
        reports = [json.loads(part) for part in self._world.gather_bytes(own_report)]
        if written.files:
            self._timers.add("checkpoint_write", max(took_s for took_s, _ in reports))
        return {path: (size, digest) for _, files in reports for path, (size, digest) in files.items()}

    def _write(self, folder: Path) -> _Written:
        began = time.perf_counter()
        files = self._state.write(folder)
        return _Written(files=files, took_s=time.perf_counter() - began)

    def _make_folder(self, name: CheckpointName) -> bool:
        """Make the folder, and return whether it exists for all ranks."""
        done = True
        try:
            if self._world.is_main:
                self._checkpoints.new_folder(name)
        except OSError as error:
            _raise_unless_of_the_disk(error, name)
            done = False
        return self._world.all_agree(done)


class RankStateDouble:
    """Some bytes in several parts, instead of weights."""

    def __init__(self) -> None:
        self.now = b"weights"
        self._copy = b""

    def take(self) -> None:
        self._copy = self.now

    def write(self, folder: Path) -> Files:
        path = folder / "weights"
        return {path.name: write_parts(path, (memoryview(self._copy[at : at + 1]) for at in range(len(self._copy))))}


def write_parts(path: Path, parts: Iterable[memoryview]) -> tuple[int, str]:
    """Write a rank's file durably; return its size and digest."""
    num_bytes, digest = 0, xxhash.xxh3_128()
    with naming(path), path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            num_bytes += part.nbytes
            crashpoint("shard.part")
        file.flush()
        crashpoint("shard.written")
        os.fsync(file.fileno())
    crashpoint("shard.synced")
    return num_bytes, digest.hexdigest()


def _nothing() -> Future[_Written]:
    done: Future[_Written] = Future()
    done.set_result(_Written(files={}, took_s=0.0))
    return done


def _raise_unless_of_the_disk(error: BaseException, name: CheckpointName) -> None:
    if not isinstance(error, OSError):
        raise error
    log.error("checkpoint not written", checkpoint=str(name), error=str(error))
