"""Forks programs from a process that has imported what they need, once, while the run is still checked or prepared.

    launcher ──exec──► a process that imports ──fork──► streamrl sft
             ──programs──►       │            ──fork──► streamrl reward train
             ◄──exit codes────── │            ──fork──► later, reward server and learner

Each import of torch and transformers takes a core for seconds, and of vLLM some more. A forked program has a log, an
environment and a session of its own, and otherwise behaves as if it had been started. All of them end with the process
that forked them, and that one with the launcher.

This module is the launcher's side; `fork_server` is that process. Blocks in waiting for a program's end, up to the
caller's timeout.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from streamrl.config.schema import Config
from streamrl.cpu_vllm import environment_of_import, is_cpu_build
from streamrl.ops.launch.processes import Command, Process
from streamrl.process import dying_with_us, read_by_torch

_SERVER = "streamrl.ops.launch.fork_server"
_ROOM = " " * 4096  # Linux shows no longer command line of a fork than its server's arguments and environment
_NO_LOG = Path(os.devnull)
_WORKERS = "worker/"  # prefix of these processes' names
_OF_LEARNER = ("streamrl.learner.main", "torch.distributed.run")
_OF_WORKERS = ("streamrl.workers.engines.vllm.preload_worker", "streamrl.ops.cli.main", "streamrl.workers.main")


class Forking:
    """A fork server that imports modules and forks programs, within its context.

    `environment` is the server's, in addition to the launcher's own.
    """

    def __init__(
        self, modules: Sequence[str], *, log: Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._modules, self._log, self._environment = modules, log, environment
        self._incomplete = b""  # an incomplete line of its output
        self._num_programs = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                dying_with_us([sys.executable, "-m", _SERVER, *self._modules, _ROOM], by=signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.kill()
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    @property
    def is_over(self) -> bool:
        """Whether the server has ended, so that it starts no more programs."""
        return self._server.poll() is not None

    @property
    def server(self) -> subprocess.Popen[bytes]:
        return self._server

    def import_also(self, modules: Sequence[str]) -> None:
        """Import modules for the programs started from now on."""
        self._send({"modules": modules})

    def start(self, command: Command) -> Process:
        """Start a program as soon as the modules are imported."""
        return Process(command, start=self._begin)

    def _begin(self, command: Command) -> _Forked:
        number, self._num_programs = self._num_programs, self._num_programs + 1
        program = {
            "number": number,
            "name": command.name,
            "arguments": command.arguments[1:],
            "log": str(command.log),
            "environment": {**os.environ, **command.environment},
        }
        self._send(program)
        return _Forked(self, number)

    def _send(self, what: Mapping[str, object]) -> None:
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its exit code will show
            self._server.stdin.write(json.dumps(what).encode() + b"\n")
            self._server.stdin.flush()

    def exit_code(self, number: int) -> int | None:
        """Return a program's exit code by its number in starting order; None while it runs."""
        is_over = self._server.poll()  # polled before its last output is read
        self._read_output()
        return self._codes.get(number, is_over)

    def pid(self, number: int) -> int | None:
        """Return a program's pid once it has begun."""
        self._read_output()
        return self._pids.get(number)

    def wait_for_news(self, timeout_s: float) -> None:
        assert self._server.stdout is not None
        select.select([self._server.stdout], [], [], timeout_s)

    def _read_output(self) -> None:
        assert self._server.stdout is not None
        *lines, self._incomplete = (self._incomplete + (self._server.stdout.read() or b"")).split(b"\n")
        for what, number, found in map(bytes.split, lines):
            (self._pids if what == b"began" else self._codes)[int(number)] = int(found)


class PartsAhead:
    """The processes of a run, forked from servers that import their modules while the run is checked or its model made.

    Workers of engines other than vLLM's CPU build start normally, as does any process whose server has died. A GPU's
    learner has been forked so: nothing imported here may touch a GPU, since a CUDA context does not survive a fork.
    """

    def __init__(self, stack: ExitStack) -> None:
        """The servers end with the stack."""
        self._stack = stack
        self._workers: Forking | None = None
        self._others: Forking | None = None

    def importing(self, modules: Sequence[str], *, log: Path) -> Forking:
        """Import modules for the programs that make the model, and later for learner and reward server."""
        environment = {**read_by_torch(os.environ), **os.environ}
        self._others = self._stack.enter_context(Forking(modules, log=log, environment=environment))
        return self._others

    def begin(self, config: Config) -> None:
        """Start importing for learner and workers; call it when a core is free.

        What an import prints is not kept: the program that needs it fails in the same way, and says so.
        """
        if self._others is not None:
            self._others.import_also(_OF_LEARNER)
        else:
            self.importing(_OF_LEARNER, log=_NO_LOG)
        if config.worker.engine == "vllm" and config.worker.count and is_cpu_build():
            forking = Forking(_OF_WORKERS, log=_NO_LOG, environment=environment_of_import())
            self._workers = self._stack.enter_context(forking)

    def start(self, command: Command) -> Process:
        forking = self._workers if command.name.startswith(_WORKERS) else self._others
        return Process(command) if forking is None or forking.is_over else forking.start(command)


class _Forked:
    """A forked program, with the interface of `subprocess.Popen`."""

    def __init__(self, forking: Forking, number: int) -> None:
        self._forking, self._number = forking, number

    @property
    def pid(self) -> int:
        """The program's pid; before it has begun, its server's."""
        return self._forking.pid(self._number) or self._forking.server.pid

    def poll(self) -> int | None:
        return self._forking.exit_code(self._number)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(f"program {self._number}", timeout)
            self._forking.wait_for_news(left_s)
        return code
