"""What torchrun's agent does as machines join and leave: ranks have time to save, and no restart is used up."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
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
    """In the place of torch's context of processes: a rank that has ended, or one at work."""

    def __init__(self, pid: int, *, exit_code: int | None = None) -> None:
        self._pid, self._exit_code = pid, exit_code

    def pids(self) -> dict[int, int]:
        return {0: self._pid}

    def wait(self, _timeout: float) -> RunProcsResult | None:
        if self._exit_code is None:
            return None
        failure = ProcessFailure(local_rank=0, pid=self._pid, exitcode=self._exit_code, error_file="")
        return RunProcsResult(failures={0: failure})

    def close(self, *_: Any) -> None:
        pass


class Machine(ElasticAgent):
    """Its rank ends with these codes, one at each start."""

    def __init__(self, *codes: int, may_leave: bool = True, grace_s: float = 30.0) -> None:
        meeting: Any = SimpleNamespace(get_run_id=lambda: "run", get_backend=lambda: "none")
        spec = WorkerSpec("rank", 1, meeting, entrypoint=print, max_restarts=1, monitor_interval=0.001)
        super().__init__(spec, DefaultLogsSpecs(), grace_s=grace_s, may_leave=may_leave)
        self.codes = list(codes)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        worker_group.workers[0].id, worker_group.workers[0].global_rank = -1, 0
        worker_group.state = WorkerState.HEALTHY
        self._pcontext = Rank(-1, exit_code=self.codes.pop(0))  # type: ignore[assignment]

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
