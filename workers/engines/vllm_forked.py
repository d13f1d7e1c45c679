"""vLLM's engine on CPUs, forked from a server that has imported vLLM: ahead, beside what its worker imports itself.

    worker ──exec──► fork server: vLLM imported, nothing made, one thread
                         │ fork, with the worker's environment of that moment
                         ├──► EngineCore
                         └──► EngineCore        after a death: in tenths of a second instead of many

A worker that was itself forked, from a process that has imported vLLM, forks that server too: of one thread still, and
so before anything else that it does.

On CPUs vLLM itself spawns: a second import of all that its front end has imported, and the one begins when the other
has ended. Builds for GPUs are left as they are, and so is whoever has not called `import_ahead`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import current_process
from pathlib import Path

from streamrl.cpu_vllm import environment_of_import, is_cpu_build
from streamrl.forked_server import forking_server, has_one_thread
from streamrl.workers.engines.vllm_plugin import OWNER_VARIABLE, WORKER_EXTENSION

ENGINE = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "streamrl.workers.engines.vllm_weights",
    WORKER_EXTENSION.rpartition(".")[0],
)
_IMPORTED = "streamrl.workers.engines.vllm_imported"


def import_ahead(scratch: Path) -> None:
    """Have vLLM imported for engines to come; returns at once. Where it is not built for CPUs, nothing happens. The
    server ends with the thread that calls this. `scratch`: for its socket, as long as this process lives."""
    if not is_cpu_build():
        return
    current_process()._config.setdefault("tempdir", str(scratch))  # type: ignore[attr-defined] # else one nobody removes
    multiprocessing.get_context("forkserver").set_forkserver_preload([_IMPORTED])
    look_after_server()


def look_after_server() -> None:
    """Start it again if it has died; nothing where nobody imports ahead."""
    if is_ahead():
        is_imported = all(module in sys.modules for module in ENGINE)
        as_it_begins = forking_server() if is_imported and has_one_thread() else nullcontext()
        with _environment_of_server(), as_it_begins:
            multiprocessing.forkserver.ensure_running()


def is_ahead() -> bool:
    """Whether this process has a server to fork engines from."""
    return _IMPORTED in multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]


@contextmanager
def _environment_of_server() -> Iterator[None]:
    before = dict(os.environ)
    wanted = {OWNER_VARIABLE: str(os.getpid()), **environment_of_import(before)}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name)
        os.environ.update(before)


@contextmanager
def forking_engines() -> Iterator[None]:
    """Inside the context vLLM forks its engine from that server, if there is one. For engines that compile nothing."""
    if not is_ahead():
        yield
        return
    from vllm.v1.engine import utils

    theirs = utils.get_mp_context  # type: ignore[attr-defined]
    utils.get_mp_context = _Forking  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.get_mp_context = theirs  # type: ignore[attr-defined]


class _Process(ForkServerProcess):
    """Begins as one that was spawned: in the environment of whoever starts it, with its number of threads."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        import torch
        from vllm import plugins

        # Only what differs: who moves the whole environment loses the place of the process' title, "VLLM::EngineCore".
        for name in set(os.environ) - set(self._environment):
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        plugins.plugins_loaded = False  # ours is what ties an engine to its worker
        super().run()


class _Forking(ForkServerContext):
    Process = _Process
