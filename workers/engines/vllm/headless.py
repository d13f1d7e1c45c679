"""The ranks of a further host: vLLM's executor without an engine, driven by the first host's EngineCore.

    first host: EngineCore ──zmq──► rank 0, rank 1          here: rank 2, rank 3, started by this process

vLLM's own mode (`vllm serve --headless`) watches only its own ranks: if the first host died, they would wait for the
next message forever. Here the worker learns that its first host is lost and kills the ranks; they also die with the
worker. Blocks on vLLM's start, in the thread that calls `start`, which must outlive the ranks. No GPU has run this.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from pathlib import Path
from typing import Any

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.vllm.failure import take_failure
from streamrl.workers.engines.vllm.loading.host_mirror import MIRROR_VARIABLE
from streamrl.workers.engines.vllm.ranks import message_segments, remove_shared
from streamrl.workers.engines.vllm.start import vllm_config

_RANK = "VllmWorker"  # prefix of vLLM's names for these processes
_ENDS_WITHIN_S = 10.0


class HeadlessRanks:
    """This host's ranks of one engine."""

    def __init__(self, settings: EngineSettings, meeting: Meeting, *, mirror: Path, scratch: Path) -> None:
        self._settings, self._meeting, self._scratch = settings, meeting, scratch
        self._mirror = mirror
        self._executor: Any = None
        self._shared: set[str] = set()

    def start(self) -> None:
        """Return once the ranks are ready and connected to the others."""
        os.environ[MIRROR_VARIABLE] = str(self._mirror)
        config = vllm_config(self._settings, self._scratch, self._meeting)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            self._executor = MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:  # vLLM's own errors have no common base
            raise EngineError(f"vLLM's ranks did not start: {take_failure(self._scratch, error)}") from error
        self._shared = {name for rank in self._executor.workers for name in message_segments(rank.proc.pid)}

    def wait(self) -> str:
        """Block until a rank ends; return which one, and how."""
        ranks = {rank.proc.sentinel: rank for rank in self._executor.workers}
        [first, *_] = multiprocessing.connection.wait(list(ranks))
        process = ranks[first].proc
        process.join(_ENDS_WITHIN_S)
        return f"its rank {ranks[first].rank} ended with code {process.exitcode}"

    def kill(self) -> None:
        """Kill all ranks. Also works while they start; may be called repeatedly."""
        ranks = [child for child in multiprocessing.active_children() if child.name.startswith(_RANK)]
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(_ENDS_WITHIN_S)
        remove_shared(self._shared)
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
