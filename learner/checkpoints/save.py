"""Checkpoints, as all ranks write one together.

    rank 0: empty folder ─► every rank: its state, synced; its digest ─► rank 0: manifest, rename = commit, Redis, prune

Between the arrows all ranks agree that it worked. Where it did not (a full disk), nothing was committed, the run goes
on from the older checkpoint if it has to, and the next one is tried at its time. Blocks on the disk, and on other ranks
for as long as theirs take: the world given here has patience for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import structlog
import torch
from safetensors import SafetensorError
from torch import nn

from learner.checkpoints.checkpoint import CheckpointRoot, Files, describe
from learner.checkpoints.epochs import CheckpointName
from learner.checkpoints.state import save_state
from learner.distributed import World
from learner.following import Conducting
from streamrl.durable import fsync_file

log = structlog.get_logger(__name__)


class Saver:
    def __init__(
        self,
        *,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        checkpoints: CheckpointRoot,
        conductor: Conducting,
        epoch: int,
    ) -> None:
        self._policy, self._optimizer, self._world = policy, optimizer, world
        self._checkpoints, self._conductor, self._epoch = checkpoints, conductor, epoch
        self._last: CheckpointName | None = None

    def save(self, step: int, *, consumed_samples: int) -> bool:
        """A collective; whether the state of this step is on disk. Where it is already, what became of tickets since
        is committed alone."""
        name = CheckpointName(self._epoch, step)
        files = {} if name == self._last else self._write(name)
        if files is not None:
            commit = partial(self._conductor.commit, name, consumed_samples=consumed_samples, files=files)
            if self._worked(commit, name):
                self._last = name
                return True
        if self._world.is_main:
            self._checkpoints.discard(name)
        return False

    def _write(self, name: CheckpointName) -> Files | None:
        """The files of all ranks, as each tells of its own; None where one could not write."""
        mine: dict[str, tuple[int, str]] = {}

        def write() -> None:
            path = save_state(self._checkpoints.temp_folder(name), self._policy, self._optimizer, self._world)
            fsync_file(path)
            mine[path.name] = describe(path)

        def begin() -> None:
            if self._world.is_main:
                self._checkpoints.new_folder(name)

        if not (self._worked(begin, name) and self._worked(write, name)):
            return None
        told = [json.loads(part) for part in self._world.gather_bytes(json.dumps(mine).encode())]
        return {path: (size, digest) for files in told for path, (size, digest) in files.items()}

    def _worked(self, action: Callable[[], None], name: CheckpointName) -> bool:
        """Do it; whether it worked on all ranks."""
        done = True
        try:
            action()
        except (OSError, SafetensorError) as error:
            log.error("checkpoint not written", checkpoint=str(name), error=str(error))
            done = False
        return self._world.all_agree(done)
