"""What an agent and its ranks say to each other, beside torchrun's own words.

To its agent a rank says one thing, when no restart would help: end, and with which exit code. torchrun knows no such
word. So the code lies in a file of the agent's own, whose path its ranks have from it, and a signal comes after.

From its agent a rank has the time when this job began: `training.max_time` bounds a job in a queue, and the next one
goes on with the run. A job is what one torchrun runs, ranks that it starts again included. The clock is the machine's:
all its processes share it, and nobody sets it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# Of the environment that ranks have from their agent.
_VERDICT, JOB_BEGAN = "STREAMRL_AGENT_VERDICT", "STREAMRL_JOB_BEGAN"
# Of a rank that a signal has told to end. With 0 torchrun would take it for done, and not come to the next rendezvous;
# and a forked rank with nothing to complain of waits for its agent to hear so, which one that is ending never does.
EXIT_TOLD = 76


def listen(folder: Path, environment: MutableMapping[str, str]) -> Path:
    """By an agent, before it starts its ranks: where the word will be."""
    file = folder / "verdict"
    environment[_VERDICT] = str(file)
    return file


def heard(file: Path) -> int | None:
    """The code that a rank has told; None: none has."""
    return int(file.read_text()) if file.exists() else None


def tell(exit_code: int, environment: Mapping[str, str]) -> None:
    """By a rank; whoever runs ranks under another agent than ours does without."""
    if _VERDICT in environment:
        Path(environment[_VERDICT]).write_text(str(exit_code))


def have_nothing_to_finish() -> None:
    """By a rank that is about to end with 0. It will wait until its agent has heard so, and one that is ending never
    does: so a signal ends it at once from here on."""
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def note_job_began(environment: MutableMapping[str, str]) -> None:
    """Now, whatever the job before has left there."""
    environment[JOB_BEGAN] = repr(time.monotonic())


def job_began(environment: Mapping[str, str]) -> float:
    """On the clock of `time.monotonic`; without an agent, when this is asked."""
    return float(environment.get(JOB_BEGAN, time.monotonic()))
