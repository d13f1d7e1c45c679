"""Shuts an agent down on SIGTERM, Ctrl-C or a hangup, at any moment of its life.

    signal ─► SIGTERM to every rank ─► they finish their step, save, release the run ─► the agent's exit code
                      └── not within the grace period, or not soon after one of them failed: SIGKILL

torchrun's own handler raises an exception wherever the agent happens to be. Inside logging, that exception is printed
and swallowed, and the agent starts the next ranks. So this handler does everything itself and never returns to
torchrun, which cannot start anything any more. Further signals are ignored. Blocks for the grace period plus some
seconds at most.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from streamrl.learner.process.job import EXIT_ON_SIGNAL, note_agent_ends, read_verdict
from streamrl.process import signals_to_end

_CLEAN_EXITS = {0, EXIT_ON_SIGNAL}
# Ended before it joined the others, so no rank had done anything.
_ENDED_BEFORE_JOINING = {-signal.SIGTERM, 128 + signal.SIGTERM}
_AFTER_FAILURE_S = 30.0  # time for the other ranks once one has failed, as in torchrun
_KILL_S = 10.0  # only a process that hangs in the kernel takes longer


class Ending:
    def __init__(self, *, grace_s: float, verdict: Path, clean_exit_code: int) -> None:
        """Prepare for an end.

        `verdict`: file in which a rank may set the exit code. `clean_exit_code`: the code after a clean end without a
        verdict.
        """
        self._grace_s, self._verdict, self._clean_exit_code = grace_s, verdict, clean_exit_code
        self._is_ending = False

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle signals inside the block, and ignore them afterwards.

        The process is ending by then, and the interpreter would restore the default handlers, which kill it.
        """
        numbers = signals_to_end()
        for number in numbers:
            signal.signal(number, self._end)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        note_agent_ends(self._verdict)
        code = 1
        try:
            ranks = multiprocessing.active_children()
            if read_verdict(self._verdict) is None:  # otherwise a rank ends the agent, and has reported why
                _write_to_stderr(f"learner: ending on {signal.Signals(number).name}{self._outlook(ranks)}")
            codes = end_ranks(ranks, within_s=self._grace_s)
            code = self._exit_code(codes)
            if None not in codes:  # they would block on a rank that hangs in the kernel
                atexit._run_exitfuncs()  # removes the agent's temporary files
        finally:
            os._exit(code)

    def _outlook(self, ranks: Sequence[BaseProcess]) -> str:
        return f"; its ranks may take {self._grace_s:g} s to finish their step and save" if ranks else ""

    def _exit_code(self, codes: set[int | None]) -> int:
        if (code := read_verdict(self._verdict)) is not None:
            return code
        if codes == {0}:
            return 0  # the run had already finished
        is_clean = codes <= _CLEAN_EXITS or bool(codes & _ENDED_BEFORE_JOINING)
        return self._clean_exit_code if is_clean else 1


def end_ranks(ranks: Sequence[BaseProcess], *, within_s: float) -> set[int | None]:
    """End the ranks and return their exit codes."""
    for rank in ranks:
        rank.terminate()
    left, deadline = list(ranks), time.monotonic() + within_s
    while left and (remaining_s := deadline - time.monotonic()) > 0:
        connection.wait([rank.sentinel for rank in left], timeout=remaining_s)
        if any(rank.exitcode not in (None, *_CLEAN_EXITS) for rank in left):
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
        left = [rank for rank in left if rank.exitcode is None]
    for rank in left:
        rank.kill()
    for rank in left:
        rank.join(_KILL_S)
    return {rank.exitcode for rank in ranks}


def _write_to_stderr(text: str) -> None:
    """Write to stderr unbuffered: the signal may have interrupted another write."""
    os.write(2, f"{text}\n".encode())
