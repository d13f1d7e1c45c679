"""What an agent runs when its shutdown is tested: a rank that learns nothing, and a torchrun that runs only this rank.

Both stop at the moment named in the environment until they are told to end, and write their progress to a file. A rank
that is told to end finishes its step, like a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

from streamrl.learner.process.job import EXIT_ON_SIGNAL, end_at_once_on_sigterm
from streamrl.learner.process.stop_flag import StopFlag

FOLDER, HOLD_AT = "STAND_IN_FOLDER", "STAND_IN_HOLD_AT"
OF_A_RANK = ("joining", "step", "save", "publish", "drain", "done")  # in this order
OF_TORCHRUN = ("rendezvous", "first failure", "restart", "end")
_HOLD_S = 60.0
_STEP_S = 0.1


def note(moment: str) -> None:
    with (Path(os.environ[FOLDER]) / "reached").open("a") as file:
        file.write(f"{moment}\n")


def pass_by(moment: str, *, stop_flag: threading.Event | None = None) -> None:
    note(moment)
    if os.environ[HOLD_AT] == moment:
        (stop_flag or threading.Event()).wait(_HOLD_S)


def rank(*, restarts: int) -> int:
    """Return its exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if restarts:
        pass_by("restart")
    elif os.environ[HOLD_AT] in ("first failure", "restart"):
        note(f"failed {os.getpid()}")
        return 1
    pass_by("joining")
    stop_flag = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stop_flag.set())
    for moment in OF_A_RANK[1:-1]:
        if not stop_flag.is_set():
            pass_by(moment, stop_flag=stop_flag)
    time.sleep(_STEP_S)  # the step in progress
    if not stop_flag.is_set():
        end_at_once_on_sigterm()
    note("finished")
    if stop_flag.is_set():
        return EXIT_ON_SIGNAL
    pass_by("done")  # torchrun makes a rank wait here until it has heard from all
    return 0


def torchrun(_words: Sequence[str]) -> None:
    """Restart its rank when it fails, and swallow exceptions while logging that."""
    pass_by("rendezvous")
    for restarts in range(2):
        context = multiprocessing.get_context("forkserver")
        is_known = context.Event()
        process = context.Process(target=_live, args=(restarts, is_known))
        process.start()
        is_known.set()
        process.join()
        if process.exitcode == 0:
            return pass_by("end")
        try:
            pass_by("first failure")
        except Exception as error:  # noqa: BLE001 - as `logging` does
            print("--- Logging error ---", error, file=sys.stderr)
    raise SystemExit(1)


def _live(restarts: int, is_known: Event) -> None:
    """Wait until the agent knows this rank: being faster than a real one, it could start a step before."""
    is_known.wait(_HOLD_S)
    sys.exit(rank(restarts=restarts))


if __name__ == "__main__":  # under the real torchrun
    sys.exit(rank(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"])))
