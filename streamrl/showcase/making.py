"""What a demonstration needs is made here: files, and programs that run side by side, each with a log. Blocks until all
have ended.

The last line that each has written about its steps is shown while they work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import PartError
from streamrl.launch.processes import Command, Process, end_all

_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2
_LOOKED_AT = 200  # lines of its log


def program(name: str, words: Sequence[str], options: Mapping[str, object], *, logs: Path) -> Command:
    """Python, run with these words and with each option as `--option=value`."""
    arguments = [*words, *(f"{option}={value}" for option, value in options.items())]
    log = logs / f"{name.replace(' ', '-')}.log"
    return Command(name=name, arguments=(sys.executable, *arguments), log=log)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """As JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_overrides(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def run_all(commands: Sequence[Command], say: Callable[[str], None]) -> None:
    """PartError when one of them fails. None is left running."""
    processes: list[Process] = []
    try:
        processes.extend(map(Process.start, commands))
        _wait(processes, say)
    finally:
        end_all(processes, within_s=0.0)


def _wait(processes: list[Process], say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        codes = [process.poll() for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code not in (None, 0):
                tail = "\n".join(f"  {line}" for line in process.last_words())
                raise PartError(f"{process.command.name} ended with exit code {code}:\n{tail}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise PartError(f"the preparation took more than {_TIMEOUT_S:g} s; see {processes[0].command.log.parent}")
        say("   ".join(f"{process.command.name}: {_step(process)}" for process in processes))
        time.sleep(_LOOK_EVERY_S)


def _step(process: Process) -> str:
    """What it has said last of its steps; others in it may say more, such as a progress bar."""
    if process.poll() == 0:
        return "done"
    steps = [line for line in process.last_words(num_lines=_LOOKED_AT) if line.startswith("step")]
    return steps[-1].partition(": ")[0] if steps else "starting"
