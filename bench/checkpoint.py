"""A checkpoint of a 136M-parameter model during real steps: what the loop waits for, against one bare copy.

    bare copy      weights and moments into allocated memory                                ─┐
    checkpoint     begin ─► step ─► settle ─► step ─► settle ...: begin and settles alone   ─┼─ interleaved
    all at once    begin, and wait until it is on disk and older ones are pruned            ─┘

On one rank, with all disk work of a run: shard, digest, journal, manifest, rename, prune. No Redis, no other ranks. The
loop and its background thread have two cores, if the machine has two.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from bench.training import make_model, train_once
from streamrl.held_folders import scratch_folder
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.save import Saver
from streamrl.learner.checkpoints.sealed import Files
from streamrl.learner.checkpoints.shard import Shard
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.process.ranks import World

_NUM_TOKENS = 64  # per step


class _Commit:
    def __init__(self, root: CheckpointRoot, name: CheckpointName) -> None:
        self._root, self._name = root, name
        self._state = CheckpointState(run_uid="bench", step=name.step, stream=FeedState(), data_fingerprint="")

    def seal(self, files: Files) -> None:
        self._root.commit(self._name, self._state, files=files)

    def announce(self) -> None:
        """Do nothing: there are no subscribers."""

    def prune(self) -> None:
        self._root.prune(ancestry(self._root.root), term=self._name.term, keep_last=1, keep_best=0)


class _Committer:
    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root

    def begin_commit(self, name: CheckpointName, *, consumed_samples: int) -> _Commit:
        return _Commit(self._root, name)


class _Learner:
    def __init__(self, folder: Path, *, background: BackgroundThread, quick: bool) -> None:
        self._model = make_model(quick=quick)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        self.train()  # AdamW allocates its moments in the first step
        root = CheckpointRoot(folder)
        self._timers, self._step = Timers(), 0
        world = World(rank=0, size=1, device=torch.device("cpu"))
        self._saver = Saver(
            state=Shard(self._model, self._optimizer, world),
            world=world,
            checkpoints=root,
            conductor=_Committer(root),
            term=root.claim_term("bench").number,
            background=background,
            timers=self._timers,
        )
        moments = [state[name] for state in self._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        self._state = [*(p.detach() for p in self._model.parameters()), *moments]
        self._room = [torch.zeros_like(tensor) for tensor in self._state]
        self.num_bytes = sum(tensor.nbytes for tensor in self._state)
        self.written_s: list[float] = []
        self.busy_step_s: list[float] = []  # step times while a checkpoint is being written

    def train(self) -> float:
        return seconds(lambda: train_once(self._model, self._optimizer, num_tokens=_NUM_TOKENS))

    def copy(self) -> float:
        return seconds(self._copy)

    def checkpoint(self) -> float:
        """Save a checkpoint; return how long the loop waits for it."""
        waited_s = self._begin()
        while self._saver.busy:
            self.busy_step_s.append(self.train())
            waited_s += seconds(self._saver.settle)
        self.written_s.append(self._timers.take()["timers/checkpoint_write"])
        return waited_s

    def at_once(self) -> float:
        self._step += 1
        return seconds(lambda: self._saver.save(self._step, consumed_samples=0))

    def _begin(self) -> float:
        self._step += 1
        return seconds(lambda: self._saver.begin(self._step, consumed_samples=0))

    def _copy(self) -> None:
        for tensor, room in zip(self._state, self._room, strict=True):
            room.copy_(tensor)


def bench(*, quick: bool, say: Say) -> list[Line]:
    background = BackgroundThread("checkpoints")
    with scratch_folder() as folder, background.working(join_s=60):
        learner = _Learner(folder, background=background, quick=quick)
        say(f"a state of {learner.num_bytes / 1e9:.2f} GB")
        ways = {"bare copy": learner.copy, "checkpoint": learner.checkpoint, "step": learner.train}
        if not quick:
            ways["all at once"] = learner.at_once
        rounds = Rounds(ways, num_rounds=3 if quick else 5, say=say)
    at_once = []
    if not quick:
        ratio = rounds.ratio("all at once", to="bare copy")
        at_once.append(Fact(name="all at once / a bare copy", value=ratio, unit="x"))
    return [
        Bar(
            name="checkpoint: the loop waits / a bare copy",
            value=rounds.ratio("checkpoint", to="bare copy"),
            unit="x",
            goal=1.5,
            better="lower",
        ),
        *at_once,
        Fact(name="a bare copy of weights and moments", value=rounds.median("bare copy"), unit="s"),
        Fact(name="weights and moments", value=learner.num_bytes / 1e6, unit="MB"),
        Fact(name="written beside the steps in", value=median(learner.written_s), unit="s"),
        Fact(name="a step beside it / alone", value=median(learner.busy_step_s) / rounds.median("step"), unit="x"),
    ]
