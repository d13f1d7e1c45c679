"""The process that runs one program, once: forked by the keeper, sealed, and gone when the program ends.

    keeper ──fork──► seal ──► program ──► its test, in the same namespace ──► one line to the keeper: how it ended

It holds nothing of value: no files but its input and its two pipes, no variables, no expected outputs, no other
programs (though a fork has what the keeper's freed memory still contains). The program can forge its result line, so
the line claims nothing that a forgery could exploit. That the program was started is reported before it runs, by
`STARTED`, and cannot be taken back. Never blocks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from streamrl.process import die_with_parent
from streamrl.workers.confined.sandbox_guard import readable_folders, seal

PROGRAM, TEST = "program.py", "test.py"
STARTED = b"."
_VERDICT = 3
_MAX_REASON_CHARS = 300
_ENVIRONMENT = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "HOME": "/nowhere", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a cell is asked to run."""

    program: str
    then: str  # code that runs after it and raises if the program is wrong; empty: none
    stdin: str
    time_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """What a cell gets from its keeper: the descriptors are the keeper's."""

    run: Run
    stdin: int
    stdout: int
    verdict: int
    keeper: int  # its process


def run_in_cell(forked: Forked) -> NoReturn:
    """Run in the child, after the fork, once no frame of the keeper's holds other programs or their outputs."""
    run = forked.run
    try:
        die_with_parent()
        if os.getppid() != forked.keeper:
            os._exit(1)
        _take_files(forked.stdin, forked.stdout, forked.verdict)
        gc.collect()
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        os.chdir("/")
        folders = readable_folders()
        sys.path[:] = [place for place in sys.path if any(place.startswith(folder) for folder in folders)]
        seal(memory_bytes=run.memory_mb << 20, cpu_s=int(run.time_s) + 2)
    except BaseException as error:  # noqa: BLE001 - whatever it is, no program may run unsealed
        _report({"ended": "not begun", "why": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os.write(_VERDICT, STARTED)
    _report(_ending(run))
    os._exit(0)


def _take_files(stdin: int, stdout: int, verdict: int) -> None:
    """Keep only these of the keeper's descriptors, moved in an order that overwrites none before it is copied."""
    null = os.open(os.devnull, os.O_WRONLY)
    high = [os.dup(file) for file in (stdin, stdout, null, verdict)]  # all above 3, which the keeper has open
    for target, file in enumerate(high):
        os.dup2(file, target)
    for file in map(int, os.listdir("/proc/self/fd")):  # a billion numbers may be allowed
        if file > _VERDICT:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(file)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _ending(run: Run) -> dict[str, Any]:
    module = types.ModuleType("program" if run.then else "__main__")  # with tests, no `if __name__ == "__main__"` runs
    sys.modules[module.__name__] = module
    sys.argv = [PROGRAM]
    try:
        exec(compile(run.program, PROGRAM, "exec", dont_inherit=True), module.__dict__)
        if run.then:
            exec(compile(run.then, TEST, "exec", dont_inherit=True), module.__dict__)
        _finish()
    except SystemExit as ended:
        with contextlib.suppress(BaseException):
            _finish()
        return {"ended": "exited", "status": ended.code if isinstance(ended.code, int) else int(ended.code is not None)}
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        return {"ended": "raised", "why": _describe(error)}
    return {"ended": "done"}


def _finish() -> None:
    """Finish as an interpreter does at exit."""
    if (threading := sys.modules.get("threading")) is not None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()


def _describe(error: BaseException) -> str:
    try:
        description = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
    except BaseException:  # noqa: BLE001 - formatting the error runs the program's own code
        description = type(error).__name__
    place, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            place = f" (line {trace.tb_lineno} of the program)"
        trace = trace.tb_next
    return description + place


def _report(ending: dict[str, Any]) -> None:
    os.write(_VERDICT, json.dumps(ending).encode())
