"""Checkpoints, as all ranks write one together.

    rank 0: empty folder ─► every rank: its state ─► rank 0: manifest, rename = commit, tell Redis, prune

Between the arrows all ranks agree that it worked. Where it did not (a full disk), nothing was committed, the run goes
on from the older checkpoint if it has to, and the next one is tried at its time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
import torch
from safetensors import SafetensorError
from torch import nn

from learner.checkpoints.checkpoint import CheckpointRoot
from learner.checkpoints.epochs import CheckpointName
from learner.checkpoints.state import save_state
from learner.conductor import Conductor
from learner.distributed import World

log = structlog.get_logger(__name__)


class Saver:
    def __init__(
        self,
        *,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        checkpoints: CheckpointRoot,
        conductor: Conductor | None,  # on rank 0
        epoch: int,
    ) -> None:
        self._policy, self._optimizer, self._world = policy, optimizer, world
        self._checkpoints, self._conductor, self._epoch = checkpoints, conductor, epoch
        self._last: CheckpointName | None = None

    def save(self, step: int, *, version_n: int, consumed_samples: int) -> bool:
        """A collective; whether the state of this step is on disk. Where it is already, what became of tickets since
        is committed alone."""
        name, main = CheckpointName(self._epoch, step), self._conductor
        commit = None
        if main is not None:
            commit = partial(main.commit, name, version_n=version_n, consumed_samples=consumed_samples)
        written = name == self._last or self._written(name)
        if written and self._worked(commit, name):
            self._last = name
            return True
        if main is not None:
            self._checkpoints.discard(name)
        return False

    def _written(self, name: CheckpointName) -> bool:
        new_folder = partial(self._checkpoints.new_folder, name) if self._world.is_main else None
        folder = self._checkpoints.temp_folder(name)
        write = partial(save_state, folder, self._policy, self._optimizer, self._world)
        return self._worked(new_folder, name) and self._worked(write, name)

    def _worked(self, action: Callable[[], object] | None, name: CheckpointName) -> bool:
        """Do it where it is to be done; whether it worked on all ranks."""
        done = True
        try:
            if action is not None:
                action()
        except (OSError, SafetensorError) as error:
            log.error("checkpoint not written", checkpoint=str(name), error=str(error))
            done = False
        return self._world.all_agree(done)
