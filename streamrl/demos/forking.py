"""Programs that are forked from a process which has imported what they all need: once, while their data are written.

    launcher ──exec──► a process that imports ──fork──► streamrl sft
             ──programs──►       │            ──fork──► streamrl reward train
             ◄──who has ended─── │

Each import of torch and transformers takes a core for seconds. Whoever is forked has a log of its own, and is otherwise
as if it had been started. All of them end with the process that they were forked from, and that one with the launcher.

Here is the launcher's side; `fork_server` is that process. Blocks nowhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from streamrl.ops.launch.processes import Command, Process
from streamrl.process import dying_with_us

_SERVER = "streamrl.demos.fork_server"


class Forking:
    """Inside the context modules are imported for programs to come: from one call of `start`."""

    def __init__(self, modules: Sequence[str], *, log: Path) -> None:
        self._modules, self._log = modules, log
        self._said = b""  # a line for each program that has ended

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                dying_with_us([sys.executable, "-m", _SERVER, *self._modules], by=signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
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

    def start(self, commands: Sequence[Command]) -> list[Process]:
        """All at once, as soon as the modules are imported."""
        programs = [{"arguments": command.arguments[1:], "log": str(command.log)} for command in commands]
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as its exit code will tell
            self._server.stdin.write(json.dumps(programs).encode())
            self._server.stdin.close()
        return [Process(command, begin=_Forked(self, number).begin) for number, command in enumerate(commands)]

    @property
    def server(self) -> subprocess.Popen[bytes]:
        return self._server

    def exit_code(self, number: int) -> int | None:
        """Of a program, by its place among those that were started; None while it runs."""
        is_over = self._server.poll()  # before what it said last is read
        assert self._server.stdout is not None
        self._said += self._server.stdout.read() or b""
        ended = dict(line.split() for line in self._said.decode().splitlines(keepends=True) if line.endswith("\n"))
        return int(ended[str(number)]) if str(number) in ended else is_over


class _Forked:
    """As `subprocess.Popen`, of one of several programs, which end together if they are made to."""

    def __init__(self, forking: Forking, number: int) -> None:
        self._forking, self._number = forking, number
        self.pid = forking.server.pid
        self.terminate, self.kill, self.wait = forking.server.terminate, forking.server.kill, forking.server.wait

    def begin(self, _: Command) -> _Forked:
        return self

    def poll(self) -> int | None:
        return self._forking.exit_code(self._number)
