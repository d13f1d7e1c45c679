"""Checkpoints, as all ranks write one together.

    rank 0: empty folder ─► every rank: its state, synced; its digest ─► rank 0: manifest, rename = commit, Redis, prune

Between the arrows all ranks agree that it worked. Where it did not (a full disk), nothing was committed, the run goes
on from the older checkpoint if it has to, and the next one is tried at its time. Blocks on the disk, and on other ranks
for as long as theirs take: the world given here has patience for that.

A checkpoint's heavy half: weights, optimizer and random state, one file a rank.

`train-00001-of-00002.safetensors` holds what rank 1 held: of each trained tensor its run of the flat fp32 master and of
AdamW's two moments, with the run's start in the file's metadata. Whoever restores opens all files and takes what falls
into its own runs, so the number of ranks may change, nothing is gathered, and nothing is a pickle. What does not
train (the base under LoRA) comes from `model.path` again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import structlog
import torch
from safetensors import SafetensorError
from torch import nn

from streamrl.errors import DataError
from streamrl.files import fsync_file
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, Files, describe
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.model.tensors import LocalRows, held
from streamrl.learner.process.ranks import World

log = structlog.get_logger(__name__)


class Committer(Protocol):
    """What saving needs of the loop's conductor."""

    def commit(self, name: CheckpointName, *, consumed_samples: int, files: Files) -> None:
        """All ranks have written: make it the newest checkpoint."""
        ...


class Saver:
    def __init__(
        self,
        *,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        checkpoints: CheckpointRoot,
        conductor: Committer,
        term: int,
    ) -> None:
        self._policy, self._optimizer, self._world = policy, optimizer, world
        self._checkpoints, self._conductor, self._term = checkpoints, conductor, term
        self._last: CheckpointName | None = None

    def save(self, step: int, *, consumed_samples: int) -> bool:
        """A collective; whether the state of this step is on disk. Where it is already, what became of tickets since
        is committed alone."""
        name = CheckpointName(self._term, step)
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


_PATTERN = "train-*-of-*.safetensors"
_RNG = "rng"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Path:
    """This rank's file; the folder becomes a checkpoint only when rank 0 commits it."""
    tensors: dict[str, torch.Tensor] = {_RNG: torch.get_rng_state()}
    starts: dict[str, int] = {}
    steps: dict[str, float] = {}
    for name, parameter in _trained(policy):
        state = optimizer.state.get(parameter, {})
        steps[name] = float(state["step"]) if state else 0.0
        for kind, tensor in [("master", parameter), *((moment, state[moment]) for moment in _MOMENTS if state)]:
            run = held(tensor, shape=parameter.shape)
            starts[name] = run.start
            tensors[f"{kind}/{name}"] = run.values.cpu()
    if world.device.type == "cuda":
        tensors[f"{_RNG}/cuda"] = torch.cuda.get_rng_state()
    metadata = {"starts": json.dumps(starts), "steps": json.dumps(steps)}
    path = folder / f"train-{world.rank:05d}-of-{world.size:05d}.safetensors"
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def load_state(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """The inverse, at any number of ranks."""
    with ExitStack() as stack:
        paths = sorted(folder.glob(_PATTERN))
        shards = [_Shard.open(stack.enter_context(safetensors.safe_open(path, framework="pt"))) for path in paths]
        for name, parameter in _trained(policy):
            _fill(held(parameter, shape=parameter.shape), shards, f"master/{name}", name)
            steps = max((shard.steps.get(name, 0.0) for shard in shards), default=0.0)
            if steps > 0:
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(steps)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    _fill(held(state[moment], shape=parameter.shape), shards, f"{moment}/{name}", name)
        if world.rank < len(shards):
            _restore_rng(shards[world.rank].file, world)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    file: Any  # an open safetensors file
    names: frozenset[str]
    starts: dict[str, int]
    steps: dict[str, float]

    @classmethod
    def open(cls, file: Any) -> _Shard:
        metadata = file.metadata()
        starts, steps = json.loads(metadata["starts"]), json.loads(metadata["steps"])
        return cls(file=file, names=frozenset(file.keys()), starts=starts, steps=steps)


def _fill(run: LocalRows, shards: list[_Shard], key: str, name: str) -> None:
    """Copy into the run whatever the files hold of it; all of it must be there."""
    begin, end = run.start, run.start + len(run.values)
    filled = 0
    for shard in shards:
        if key not in shard.names:
            continue
        piece = shard.file.get_slice(key)
        start = shard.starts[name]
        low, high = max(begin, start), min(end, start + piece.get_shape()[0])
        if low < high:
            run.values[low - begin : high - begin].copy_(piece[low - start : high - start])
            filled += high - low
    if filled != len(run.values):
        raise DataError(f"the checkpoint does not hold all of {key}: is `model` the one that it was made with?")


def _restore_rng(file: Any, world: World) -> None:
    torch.set_rng_state(file.get_tensor(_RNG))
    if world.device.type == "cuda" and f"{_RNG}/cuda" in file.keys():  # noqa: SIM118 - not a dict
        torch.cuda.set_rng_state(file.get_tensor(f"{_RNG}/cuda"))


def _trained(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in policy.named_parameters() if p.requires_grad)
