"""What a rank tells its agent when no restart would help: end, and with which exit code.

torchrun knows no such word, and an agent that is ended by a signal ends with 1 whatever its ranks know. So the code
lies in a file of the agent's own, whose path its ranks have from it, and the signal comes after.

When this job began: `training.max_time` bounds a job in a queue, and the next one goes on with the run.

A job is what one torchrun runs, ranks that it starts again included. Its agent notes the time in the environment, which
they have from it. The clock is the machine's: all its processes share it, and nobody sets it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_VARIABLE = "STREAMRL_AGENT_VERDICT"


def listen(folder: Path, environment: MutableMapping[str, str]) -> Path:
    """By an agent, before it starts its ranks: where the word will be."""
    file = folder / "verdict"
    environment[_VARIABLE] = str(file)
    return file


def heard(file: Path) -> int | None:
    """The code that a rank has told; None: none has."""
    return int(file.read_text()) if file.exists() else None


def tell(exit_code: int, environment: Mapping[str, str]) -> None:
    """By a rank; whoever runs ranks under another agent than ours does without."""
    if _VARIABLE in environment:
        Path(environment[_VARIABLE]).write_text(str(exit_code))


JOB_BEGAN = "STREAMRL_JOB_BEGAN"


def note_job_began(environment: MutableMapping[str, str]) -> None:
    """Now, whatever the job before has left there."""
    environment[JOB_BEGAN] = repr(time.monotonic())


def job_began(environment: Mapping[str, str]) -> float:
    """On the clock of `time.monotonic`; without an agent, now."""
    return float(environment.get(JOB_BEGAN, time.monotonic()))
