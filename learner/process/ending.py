"""How an agent ends when it is told to, by SIGTERM, Ctrl-C or a hangup, at whatever moment of its life.

    signal ─► SIGTERM to every rank ─► they finish their step, save, release the run ─► the agent's exit code
                      └── not within the grace, or not soon after one of them has failed: SIGKILL

torchrun's own handler raises an exception wherever the agent happens to be. In the midst of logging that is printed and
forgotten, and the agent starts the next ranks. So this handler does all of it, and never returns to torchrun, which can
start nothing any more. Signals that follow the first one change nothing. Blocks for the grace and some seconds at most.
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

from streamrl.learner.process.job import EXIT_TOLD, heard
from streamrl.process import signals_to_end

_IN_ORDER = {0, EXIT_TOLD}
# Before it had joined the others; so none of them had done anything.
_HAD_NOT_BEGUN = {-signal.SIGTERM, 128 + signal.SIGTERM}
_CRIPPLED_S = 30.0  # what ranks are given once one of them has gone, as torchrun does
_KILL_S = 10.0  # only a process that hangs in the kernel takes longer to go


class Ending:
    def __init__(self, *, grace_s: float, verdict: Path, code_when_told: int) -> None:
        """`verdict`: where a rank may have said with which code to end. `code_when_told`: else, after a clean end."""
        self._grace_s, self._verdict, self._code_when_told = grace_s, verdict, code_when_told
        self._is_ending = False

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Inside, in this process; then it is ending anyway, and the interpreter would put back what kills it."""
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
        code = 1
        try:
            ranks = multiprocessing.active_children()
            if heard(self._verdict) is None:  # else it is a rank that ends us, and has said why
                _say(f"learner: told to end by {signal.Signals(number).name}{self._outlook(ranks)}")
            codes = _end_ranks(ranks, within_s=self._grace_s)
            code = self._exit_code(codes)
            if None not in codes:  # else they would wait for a rank that hangs in the kernel
                atexit._run_exitfuncs()  # which remove what is to go with the agent
        finally:
            os._exit(code)

    def _outlook(self, ranks: Sequence[BaseProcess]) -> str:
        return f"; its ranks may take {self._grace_s:g} s to finish their step and to save" if ranks else ""

    def _exit_code(self, codes: set[int | None]) -> int:
        if (code := heard(self._verdict)) is not None:
            return code
        if codes == {0}:
            return 0  # the run was over already
        is_clean = codes <= _IN_ORDER or bool(codes & _HAD_NOT_BEGUN)
        return self._code_when_told if is_clean else 1


def _end_ranks(ranks: Sequence[BaseProcess], *, within_s: float) -> set[int | None]:
    """Their exit codes."""
    for rank in ranks:
        rank.terminate()
    left, deadline = list(ranks), time.monotonic() + within_s
    while left and (remaining_s := deadline - time.monotonic()) > 0:
        connection.wait([rank.sentinel for rank in left], timeout=remaining_s)
        if any(rank.exitcode not in (None, *_IN_ORDER) for rank in left):
            deadline = min(deadline, time.monotonic() + _CRIPPLED_S)
        left = [rank for rank in left if rank.exitcode is None]
    for rank in left:
        rank.kill()
    for rank in left:
        rank.join(_KILL_S)
    return {rank.exitcode for rank in ranks}


def _say(text: str) -> None:
    """Past all buffers: this may have come in the midst of another's write."""
    os.write(2, f"{text}\n".encode())
