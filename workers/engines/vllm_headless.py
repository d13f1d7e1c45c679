"""The ranks of a further host: vLLM's executor without an engine, which the first host's EngineCore tells what to do.

    first host: EngineCore ──zmq──► rank 0, rank 1          here: rank 2, rank 3, started by this process

vLLM's own way (`vllm serve --headless`) watches nobody but its own ranks: of a first host that died a rank would live
on, in wait for the next message. Here the worker hears that its first host is lost, and kills them; they die with it,
too. Blocks on vLLM's start, in the thread of whoever calls `start`, which must live as long as they. No GPU has run
this.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from pathlib import Path
from typing import Any

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.host_mirror import MIRROR_VARIABLE
from streamrl.workers.engines.vllm_ranks import remove_shared, talked_through
from streamrl.workers.engines.vllm_start import vllm_config

_RANK = "VllmWorker"  # how vLLM's names of these processes begin
_ENDS_WITHIN_S = 10.0


class HeadlessRanks:
    """Of one engine."""

    def __init__(self, settings: EngineSettings, meeting: Meeting, *, mirror: Path, scratch: Path) -> None:
        self._settings, self._meeting, self._scratch = settings, meeting, scratch
        self._mirror = mirror
        self._executor: Any = None
        self._shared: set[str] = set()

    def start(self) -> None:
        """Returns when its ranks stand, and have met the others."""
        os.environ[MIRROR_VARIABLE] = str(self._mirror)
        config = vllm_config(self._settings, self._scratch, self._meeting)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            self._executor = MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:  # vLLM's own errors share no base
            raise EngineError(f"vLLM's ranks did not start: {error}") from error
        self._shared = {name for rank in self._executor.workers for name in talked_through(rank.proc.pid)}

    def wait(self) -> str:
        """Until one of them ends: which, and how."""
        ranks = {rank.proc.sentinel: rank for rank in self._executor.workers}
        [first, *_] = multiprocessing.connection.wait(list(ranks))
        process = ranks[first].proc
        process.join(_ENDS_WITHIN_S)
        return f"its rank {ranks[first].rank} ended with code {process.exitcode}"

    def kill(self) -> None:
        """Also while they start; may be called again and again."""
        ranks = [child for child in multiprocessing.active_children() if child.name.startswith(_RANK)]
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(_ENDS_WITHIN_S)
        remove_shared(self._shared)
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
