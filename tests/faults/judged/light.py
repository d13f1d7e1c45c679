"""The same with stand-ins: the real stream, feed, checkpoints and rollout loop without tensors or an engine, so that
dozens of faults fit into a minute."""

from __future__ import annotations

import signal
from pathlib import Path

from streamrl.config import schema
from tests.faults.harness import FaultWorld, Part
from tests.faults.judge.books import Prompts
from tests.faults.judged.kinds import RUN
from tests.faults.judged.team import Process, Team
from tests.faults.place import Place

_NUM_PROMPTS = 1000
_SEED = 1  # of `tests.feed_world.make_prompts`
_LONGEST_S = 3600


class LightTeam(Team):
    max_lag = schema.Lag().hard_limit_steps

    def prompts(self) -> Prompts:
        return Prompts(texts=[f"prompt {number}" for number in range(_NUM_PROMPTS)], seed=_SEED, shuffle=True)

    def ranks(self) -> list[int]:
        return [self.learner.pid]

    def _make_config(self) -> schema.Config:
        self._world = FaultWorld(_make_place(self.folder))
        return self._world.place.config()

    def _start_learner(self) -> Process:
        return self._noted(self._world.start_learner(url=self.roads["learner"].url))

    def _start_worker(self) -> Process:
        self._num_started += 1
        return self._noted(self._world.start_worker(name=f"w{self._num_started}", url=self.roads["worker"].url))

    def _noted(self, part: Part) -> Process:
        process = _StandIn(part)
        self._all.append(process)
        return process


def _make_place(folder: Path) -> Place:
    return Place(
        folder=folder,
        name=RUN,
        url="",  # each has its own route
        store=f"file:{folder / 'blobs'}",
        num_prompts=_NUM_PROMPTS,
        max_epochs=100_000,
        pace_s=0.05,
        failing_every=7,
        commit_every=4,
        worker_lease_s=1.0,
        reply_timeout_s=1.0,
        idle_timeout_s=10.0,
        deadline_s=_LONGEST_S,
    )


class _StandIn:
    """Adapts a part, which another module starts, to the `Process` protocol."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.pid = part.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._part.exit_code

    def kill(self) -> None:
        self._part.kill()

    def wait(self, timeout: float | None = None) -> int:
        return self._part.ended()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            self._part.send(signal.Signals(sig))
