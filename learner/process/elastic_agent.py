"""torchrun's agent with three changes, two of them for machines that join and leave an elastic learner.

    a machine joins    torchrun ends the ranks for a restart, and kills them after 30 s, whatever `--shutdown-timeout`
                       says; here they have that time to finish their step and save, as when the agent itself ends
    a machine leaves   its ranks and all others save and end with `EXIT_ON_SIGNAL`, which torchrun counts as a failure
                       of each machine; here it takes none of the restarts of those that stay
    a rank fails       torchrun takes a restart and never gives it back, so failures that are days apart end a long run;
                       here an hour without one gives all of them back

A machine that dies is a failure for the others. Blocks for that time plus some seconds at most.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from streamrl.learner.process.ending import end_ranks
from streamrl.learner.process.job import EXIT_ON_SIGNAL

_HEALTHY_AFTER_S = 3600.0  # since the last failure


class ElasticAgent(LocalElasticAgent):
    def __init__(
        self,
        *arguments: Any,
        grace_s: float,
        may_leave: bool,
        clock: Callable[[], float] = time.monotonic,
        **named: Any,
    ) -> None:
        """`may_leave`: machines may leave the learner to others."""
        super().__init__(*arguments, **named)
        self._grace_s, self._may_leave, self._clock = grace_s, may_leave, clock
        self._failed_at = clock()  # or began

    def _stop_workers(self, *arguments: Any, **named: Any) -> None:
        own = self._pcontext.pids().values() if self._pcontext else ()
        ranks = [child for child in multiprocessing.active_children() if child.pid in own]
        end_ranks(ranks, within_s=self._grace_s)
        super()._stop_workers(*arguments, **named)

    def _monitor_workers(self, *arguments: Any, **named: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(*arguments, **named)
        codes = {failure.exitcode for failure in result.failures.values()}
        if self._may_leave and codes == {EXIT_ON_SIGNAL}:
            self._remaining_restarts += 1  # torchrun takes one next
        elif result.state is not WorkerState.HEALTHY:
            self._failed_at = self._clock()
        elif self._clock() - self._failed_at >= _HEALTHY_AFTER_S:
            self._remaining_restarts = self._worker_group.spec.max_restarts
        return result


def make_torchrun_use_it(*, grace_s: float, may_leave: bool) -> None:
    assert hasattr(api, "LocalElasticAgent"), "torch.distributed.launcher makes its agent in another way"
    api.LocalElasticAgent = partial(ElasticAgent, grace_s=grace_s, may_leave=may_leave)
