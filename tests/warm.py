"""Starts programs with torch, transformers and the learner already imported: in milliseconds, where a new interpreter
spends five CPU seconds on imports.

    test ── module, words, files, by a socket ──► tests.warm_server, one per pytest process
                                                     └─ fork ──► the module, as `python -m` runs it

For tests of what a program does, not of how it starts: those start a new interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
# Read when torch and transformers are imported.
_AT_IMPORT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Forked:
    """A program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, told: int) -> None:
        self._told = os.fdopen(told, "rb", buffering=0)
        self._words = b""
        self.returncode: int | None = None
        self.pid = int(self._line(None) or 0)
        assert self.pid, "the server that forks programs has ended"

    def _line(self, timeout_s: float | None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._words:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._told], [], [], left_s)[0]:
                return None
            more = self._told.read(64)
            if not more:  # the server has died, and the program with it
                return str(-signal.SIGKILL).encode()
            self._words += more
        line, _, self._words = self._words.partition(b"\n")
        return line

    def poll(self) -> int | None:
        if self.returncode is None and (line := self._line(0.0)) is not None:
            self.returncode = int(line)
            self._told.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and (line := self._line(timeout)) is not None:
            self.returncode = int(line)
            self._told.close()
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since, and the server has yet to report it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    module: str,
    *words: str,
    out: IO[str] | IO[bytes],
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> Forked:
    """Start a program; `environment` adds to this process's own."""
    told, tells = os.pipe()
    program = {
        "module": module,
        "words": words,
        "environment": {**os.environ, **_AT_IMPORT, **(environment or {})},
        "folder": str(folder),
    }
    socket.send_fds(_server(), [json.dumps(program).encode()], [out.fileno(), tells])
    os.close(tells)
    return Forked(told)


@functools.cache
def _server() -> socket.socket:
    """Start the server, and return our end of its socket."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm_server", str(its.fileno())],
        cwd=ROOT,
        env={**os.environ, **_AT_IMPORT},
        pass_fds=(its.fileno(),),
        stdin=subprocess.DEVNULL,
    )
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def run_ranks(module: str, *words: str, size: int, out: Path, timeout_s: float) -> None:
    """As many ranks as torchrun would start on this machine, to the end of all; `out`: the folder for what they say."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    out.mkdir(exist_ok=True)
    team, told = list[Forked](), list[Path]()
    for rank in range(size):
        told.append(out / f"{module.rpartition('.')[2]}-{size}-{rank}.out")
        with told[-1].open("wb") as file:
            team.append(start(module, *words, out=file, environment=_variables(rank, size, store.port)))
    deadline = time.monotonic() + timeout_s
    try:
        waiting = list(team)
        while waiting and all(one.returncode in (None, 0) for one in team):
            assert time.monotonic() < deadline, f"ranks are at work for more than {timeout_s:g} s\n{_said(told)}"
            waiting = [one for one in waiting if _not_ended(one)]
        assert not any(one.poll() for one in team), _said(told)
    finally:
        for one in team:
            one.kill()
            one.wait()


def _not_ended(rank: Forked) -> bool:
    try:
        return rank.wait(0.05) is None
    except subprocess.TimeoutExpired:
        return True


def _said(told: Sequence[Path]) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in told)


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Those of torchrun by which ranks find each other."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
