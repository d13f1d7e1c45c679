"""Forks vLLM's CPU engine from a server that has already imported vLLM, in parallel with the worker's own imports.

    worker ──exec──► fork server: vLLM imported, nothing created, one thread
                         │ fork, with the worker's current environment
                         ├──► EngineCore
                         └──► EngineCore        after a death: in tenths of a second

A worker that was itself forked from a process with vLLM imported forks that server too, before it does anything else,
while it still has one thread.

On CPUs vLLM itself spawns: the engine repeats all imports of the front end, after these have finished. GPU builds are
left alone, and so is any process that has not called `import_ahead`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import current_process
from pathlib import Path

from streamrl.cpu_vllm import environment_of_import, is_cpu_build
from streamrl.forked_server import forking_server
from streamrl.process import change_environment, threads_in
from streamrl.workers.engines.vllm.plugin import OWNER_VARIABLE, WORKER_EXTENSION

ENGINE = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "streamrl.workers.engines.vllm.loading.transfer",
    WORKER_EXTENSION.rpartition(".")[0],
)
_IMPORTED = "streamrl.workers.engines.vllm.preload_engine"


def import_ahead(scratch: Path) -> None:
    """Start importing vLLM for later engines; return at once. Does nothing unless vLLM is a CPU build. The server ends
    with the calling thread. `scratch` holds its socket, for the life of this process."""
    if not is_cpu_build():
        return
    current_process()._config.setdefault("tempdir", str(scratch))  # type: ignore[attr-defined] # else never removed
    multiprocessing.get_context("forkserver").set_forkserver_preload([_IMPORTED])
    look_after_server()


def look_after_server() -> None:
    """Restart the server if it died; does nothing in a process that has not called `import_ahead`."""
    if is_ahead():
        with _environment_of_server(), forking_server(ENGINE):
            multiprocessing.forkserver.ensure_running()


def is_ahead() -> bool:
    """Return whether this process has a server to fork engines from."""
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
    """Make vLLM fork engines from that server, if there is one. Only for engines that compile nothing."""
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
    """Behaves like a spawned process: takes the environment and thread count of the process that starts it."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        import torch
        from vllm import plugins

        change_environment(self._environment)
        torch.set_num_threads(threads_in(os.environ) or os.cpu_count() or 1)
        plugins.plugins_loaded = False  # else our plugin, which ties an engine to its worker, would not run again
        super().run()


class _Forking(ForkServerContext):
    Process = _Process
