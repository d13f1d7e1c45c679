"""The process that forks and watches cells, one for each run of a program: runs arrive on one pipe, a JSON line each;
how they ended leaves on another.

    a run ──► fork: a cell (`sandbox_cell`) ──► its output, up to a limit ──► it ended, or its time is up: killed
                                                                                 │
                                        {"ended", "why", "stdout", "seconds"} ◄──┘

A busy machine is not the program's fault: time spent waiting for a CPU does not count. A program that has not had its
time within `patience_s` ends in an error, which says nothing about the program.

The keeper and its cells run at idle priority (SCHED_IDLE). Each cell is one process, and dies with the keeper. The
keeper blocks on runs and on cells, and checks the cells' limits every `_LOOK_EVERY_S`.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.workers.confined import confine
from streamrl.workers.confined.function_child import take_pipes, write_answer
from streamrl.workers.confined.sandbox_cell import STARTED, Forked, Run, run_in_cell

MAX_OUTPUT_BYTES = 512 << 10
_LOOK_EVERY_S = 0.05
_READ_BYTES = 64 << 10
_NANO = 1e-9
_ENDS = ("done", "raised", "exited")  # the ways in which a program ends by itself
_MAX_REASON_CHARS = 400


@dataclass(slots=True, kw_only=True)
class _Cell:
    number: int  # the call's id
    run: Run
    patience_s: float
    pid: int
    pidfd: int
    stdout: int
    verdict: int
    began: float = field(default_factory=time.monotonic)
    output: bytearray = field(default_factory=bytearray)
    killed: str = ""  # why the keeper killed it


class Keeper:
    def __init__(self, answers: BinaryIO, waited_s: Callable[[int], float]) -> None:
        self._answers = answers
        self._waited_s = waited_s  # how long a process has waited for a CPU
        self._selector = selectors.DefaultSelector()
        self._cells: dict[int, _Cell] = {}  # by each of their descriptors

    def serve(self, calls: int) -> Forked | None:
        """Serve until the pipe of calls ends; in a cell's process, return what it is to run: whatever the keeper knows
        of other cells goes with this call."""
        os.set_blocking(calls, False)
        self._selector.register(calls, selectors.EVENT_READ)
        waiting = bytearray()
        while True:
            for key, _ in self._selector.select(_LOOK_EVERY_S if self._cells else None):
                if key.fd == calls:
                    if not (read := os.read(calls, _READ_BYTES)):
                        return None
                    waiting += read
                elif (cell := self._cells.get(key.fd)) is not None:
                    self._look_at(cell, key.fd)
            *lines, rest = waiting.split(b"\n")
            waiting = bytearray(rest)
            for line in lines:
                if (forked := self.begin(json.loads(line))) is not None:
                    return forked
            for cell in {cell.pid: cell for cell in self._cells.values()}.values():
                self._limit(cell)

    def begin(self, call: dict[str, Any]) -> Forked | None:
        run_fields, patience_s = call["arguments"]
        run = Run(**run_fields)
        stdin = _sealed_file(run.stdin.encode(errors="replace"))
        (out, out_end), (verdict, verdict_end) = os.pipe(), os.pipe()
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            return Forked(run=run, stdin=stdin, stdout=out_end, verdict=verdict_end, keeper=keeper)
        for file in (stdin, out_end, verdict_end):
            os.close(file)
        os.set_blocking(out, False)
        os.set_blocking(verdict, False)
        cell = _Cell(
            number=call["id"],
            run=run,
            patience_s=patience_s,
            pid=pid,
            pidfd=os.pidfd_open(pid),
            stdout=out,
            verdict=verdict,
        )
        for file in (cell.pidfd, cell.stdout):
            self._cells[file] = cell
            self._selector.register(file, selectors.EVENT_READ)
        return None

    def _look_at(self, cell: _Cell, file: int) -> None:
        if file == cell.pidfd:
            self._end(cell)
        elif not _read_into(cell.output, cell.stdout):
            self._forget(cell.stdout)
        elif len(cell.output) > MAX_OUTPUT_BYTES:
            _kill(cell, "output")

    def _limit(self, cell: _Cell) -> None:
        passed_s = time.monotonic() - cell.began
        if passed_s <= cell.run.time_s or cell.killed:
            return
        if passed_s - self._waited_s(cell.pid) > cell.run.time_s:
            _kill(cell, "time")
        elif passed_s > cell.patience_s:
            _kill(cell, "patience")

    def _end(self, cell: _Cell) -> None:
        _, status, used = os.wait4(cell.pid, 0)
        while cell.stdout in self._cells and len(cell.output) <= MAX_OUTPUT_BYTES:
            if not _read_into(cell.output, cell.stdout):
                self._forget(cell.stdout)
        verdict = bytearray()
        with contextlib.suppress(BlockingIOError):
            _read_into(verdict, cell.verdict)
        os.close(cell.verdict)
        for file in (cell.pidfd, cell.stdout):
            self._forget(file)
        ending = _ending(cell, status, used, bytes(verdict))
        seconds = time.monotonic() - cell.began
        if ending["ended"] in ("not begun", "patience", "lost"):
            write_answer(self._answers, {"id": cell.number, "error": ending["why"]})
            return
        stdout = base64.b64encode(cell.output[:MAX_OUTPUT_BYTES]).decode()
        write_answer(self._answers, {"id": cell.number, "value": ending | {"stdout": stdout, "seconds": seconds}})

    def _forget(self, file: int) -> None:
        if self._cells.pop(file, None) is not None:
            self._selector.unregister(file)
            os.close(file)


def _ending(cell: _Cell, status: int, used: resource.struct_rusage, verdict: bytes) -> dict[str, Any]:
    """Return how the cell ended, in one word, and why."""
    number = os.waitstatus_to_exitcode(status)
    exceeded_cpu = -number in (signal.SIGXCPU, signal.SIGKILL) and used.ru_utime + used.ru_stime > cell.run.time_s
    if cell.killed == "patience":
        waited = f"the machine was too busy: no {cell.run.time_s:g} s of CPU time for it in {cell.patience_s:g} s"
        return {"ended": "patience", "why": waited}
    if len(cell.output) > MAX_OUTPUT_BYTES:
        return {"ended": "output", "why": f"printed more than {MAX_OUTPUT_BYTES >> 10} KiB"}
    if cell.killed == "time" or exceeded_cpu:
        return {"ended": "time", "why": f"took more than {cell.run.time_s:g} s"}
    if number == -signal.SIGKILL:
        return {"ended": "lost", "why": "the cell was killed from outside: is the machine short of memory?"}
    if not verdict.startswith(STARTED):
        return {"ended": "not begun", "why": _failure_to_start(verdict) or f"the cell ended with status {number}"}
    if number < 0:
        return {"ended": "killed", "why": f"ended by {_name_of(-number)}"}
    return _by_itself(verdict.removeprefix(STARTED), number)


def _by_itself(verdict: bytes, number: int) -> dict[str, Any]:
    """Read the result line, which the program may have forged: anything unknown counts as its own exit."""
    try:
        result = json.loads(verdict)
        ended, why, status = (
            result["ended"],
            str(result.get("why", ""))[:_MAX_REASON_CHARS],
            result.get("status", number),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        ended, why, status = "exited", "", number
    if ended not in _ENDS or type(status) is not int:
        ended, status = "exited", number
    return {"ended": ended, "why": f"exited with status {status}" if ended == "exited" else why}


def _failure_to_start(verdict: bytes) -> str:
    """The cell's own reason; empty if it gave none."""
    return str(json.loads(verdict)["why"]) if verdict else ""


def _name_of(number: int) -> str:
    """The signal's name; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def waited_s(pid: int) -> float:
    """Seconds waited for a CPU, the longest of its threads. 0 without kernel accounting: all time is the program's."""
    waited = 0
    with contextlib.suppress(OSError, ValueError, IndexError):  # it ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited = max(waited, int((thread / "schedstat").read_text().split()[1]))
    return waited * _NANO


def _kill(cell: _Cell, why: str) -> None:
    cell.killed = cell.killed or why
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(cell.pidfd, signal.SIGKILL)


def _read_into(buffer: bytearray, file: int) -> bool:
    """Read what is there; False at the end."""
    read = os.read(file, _READ_BYTES)
    buffer += read
    return bool(read)


def _sealed_file(content: bytes) -> int:
    """Create a file in memory that nobody can change any more."""
    import fcntl

    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def step_back() -> None:
    """Give every other process priority, for CPU and memory."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # With autogroup scheduling, SCHED_IDLE orders only the processes within a session, and all sessions get equal
    # shares; so this session gets the lowest share.
    for file, word in {"autogroup": "19", "oom_score_adj": "1000"}.items():
        with contextlib.suppress(OSError):
            Path("/proc/self", file).write_text(word)


def main(step_back: Callable[[], None] = step_back, waited_s: Callable[[int], float] = waited_s) -> None:
    calls, answers = take_pipes()
    pipe = os.dup(calls.fileno())
    json.loads(_first_line(pipe))
    step_back()
    with contextlib.suppress(OSError):  # a cell's own calls are refused anyway
        confine.keep_apart()
    write_answer(answers, {"concurrent": True})
    gc.freeze()  # a cell's collection is of what came since
    forked = Keeper(answers, waited_s).serve(pipe)
    if forked is not None:
        run_in_cell(forked)


def _first_line(file: int) -> bytes:
    """Read one line and nothing beyond it."""
    line = bytearray()
    while not line.endswith(b"\n") and (read := os.read(file, 1)):
        line += read
    return bytes(line)


if __name__ == "__main__":
    main()
    sys.exit(0)
