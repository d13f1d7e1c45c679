"""What torchrun's agent does as machines join and leave and ranks fail: they have time to save, and restarts last."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from itertools import count
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from streamrl.learner.process.elastic_agent import ElasticAgent, make_torchrun_use_it
from streamrl.learner.process.job import EXIT_ON_SIGNAL

_FORK = multiprocessing.get_context("fork")


class Rank:
    """In the place of torch's context of processes: a rank that ends with this code after so many looks, or never."""

    def __init__(self, pid: int, *, exit_code: int | None = None, num_looks: int = 0) -> None:
        self._pid, self._exit_code, self._num_looks = pid, exit_code, num_looks

    def pids(self) -> dict[int, int]:
        return {0: self._pid}

    def wait(self, _timeout: float) -> RunProcsResult | None:
        self._num_looks -= 1
        if self._exit_code is None or self._num_looks >= 0:
            return None
        failure = ProcessFailure(local_rank=0, pid=self._pid, exitcode=self._exit_code, error_file="")
        return RunProcsResult(failures={0: failure})

    def close(self, *_: Any) -> None:
        pass


class Machine(ElasticAgent):
    """Its rank ends with these codes, one at each start, after so many minutes."""

    def __init__(self, *codes: int, minutes: Sequence[int] = (), may_leave: bool = True, grace_s: float = 30.0) -> None:
        meeting: Any = SimpleNamespace(
            get_run_id=lambda: "run", get_backend=lambda: "none", num_nodes_waiting=lambda: 0
        )
        spec = WorkerSpec("rank", 1, meeting, entrypoint=print, max_restarts=1, monitor_interval=0.001)
        clock = count(step=60.0)  # read once at each look
        super().__init__(spec, DefaultLogsSpecs(), grace_s=grace_s, may_leave=may_leave, clock=lambda: next(clock))
        self.codes, self._minutes = list(codes), list(minutes)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        worker_group.workers[0].id, worker_group.workers[0].global_rank = -1, 0
        worker_group.state = WorkerState.HEALTHY
        minutes = self._minutes.pop(0) if self._minutes else 0
        self._pcontext = Rank(-1, exit_code=self.codes.pop(0), num_looks=minutes)  # type: ignore[assignment]

    def live(self) -> WorkerState:
        return self._invoke_run().state

    def make_way(self, rank: int) -> None:
        """End it for a restart."""
        self._pcontext = Rank(rank)  # type: ignore[assignment]
        self._stop_workers(self._worker_group)


def test_only_failures_use_up_restarts_and_machines_that_leave_do_not() -> None:
    leaving = [EXIT_ON_SIGNAL] * 3
    machine = Machine(*leaving, 1, *leaving, 1)
    assert machine.live() is WorkerState.FAILED
    assert machine.codes == [], "one restart was to be had"


def test_where_no_machine_may_leave_a_rank_that_was_told_to_end_has_failed() -> None:
    machine = Machine(EXIT_ON_SIGNAL, EXIT_ON_SIGNAL, may_leave=False)
    assert machine.live() is WorkerState.FAILED
    assert machine.codes == []


@pytest.mark.parametrize(("minutes", "left"), [((0, 50, 0), [1]), ((0, 70, 0), []), ((70, 10, 0), [1])])
def test_an_hour_without_a_failure_gives_all_restarts_back(minutes: Sequence[int], left: list[int]) -> None:
    machine = Machine(1, 1, 1, minutes=minutes)
    assert machine.live() is WorkerState.FAILED
    assert machine.codes == left


def _work(ready: Connection, heeds: bool) -> None:
    signal.signal(signal.SIGTERM, lambda *_: exit(EXIT_ON_SIGNAL) if heeds else None)
    ready.send_bytes(b"ready")
    while True:
        signal.pause()


@pytest.mark.parametrize(("heeds", "grace_s", "code"), [(True, 1000.0, EXIT_ON_SIGNAL), (False, 0.1, -signal.SIGKILL)])
def test_ranks_that_end_because_a_machine_joins_have_the_grace_of_the_agent(
    heeds: bool, grace_s: float, code: int
) -> None:
    told, ready = _FORK.Pipe(duplex=False)
    rank = _FORK.Process(target=_work, args=(ready, heeds))
    rank.start()
    try:
        told.recv_bytes()
        assert rank.pid is not None
        Machine(grace_s=grace_s).make_way(rank.pid)
        assert rank.exitcode == code
    finally:
        rank.kill()


@pytest.fixture
def torchs_agent() -> Iterator[None]:
    own = vars(api)["LocalElasticAgent"]
    yield
    vars(api)["LocalElasticAgent"] = own


@pytest.mark.usefixtures("torchs_agent")
def test_torchrun_makes_such_an_agent() -> None:
    make_torchrun_use_it(grace_s=300.0, may_leave=True)
    assert api.LocalElasticAgent.func is ElasticAgent  # type: ignore[attr-defined]
    assert "LocalElasticAgent" in api.launch_agent.__code__.co_names
