"""What an agent and its ranks exchange beyond torchrun: an exit code, that the agent ends, and the job's start time.

A rank tells its agent only one thing: to end, with this exit code, because no restart would help. torchrun has no such
message, so the code is written to a file of the agent's, whose path is in the ranks' environment; a signal follows.

An agent that ends says so in a file beside that one, before it ends its ranks: torchrun also ends them for a restart.

An agent passes its ranks the job's start time: `training.max_time` bounds a job in a queue, and the next job continues
the run. A job is one torchrun, including the ranks it restarts. The clock is the machine's monotonic one, shared by all
its processes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from streamrl.files import create_exclusively

# Environment variables that the agent sets for its ranks.
_VERDICT, JOB_BEGAN = "STREAMRL_AGENT_VERDICT", "STREAMRL_JOB_BEGAN"
_ENDS = "ends"
# Exit code of a rank that a signal ended. With 0 torchrun would consider it finished and not join the next rendezvous;
# and a forked rank that exits with 0 waits for its agent to acknowledge, which an ending agent never does.
EXIT_ON_SIGNAL = 76


def prepare_verdict(folder: Path, environment: MutableMapping[str, str]) -> Path:
    """Called by an agent before it starts its ranks; returns the file for a rank's exit code."""
    file = folder / "verdict"
    environment[_VERDICT] = str(file)
    return file


def read_verdict(file: Path) -> int | None:
    """The exit code that a rank has set, or None."""
    return int(file.read_text()) if file.exists() else None


def write_verdict(exit_code: int, environment: Mapping[str, str]) -> bool:
    """Called by a rank to set the exit code; True for the first one of its agent, which speaks for all.

    Under another agent than ours nothing is set, and the first is that of the lowest rank. So it is where nothing can
    be written: a full disk may be the very error that is to be told.
    """
    if _VERDICT in environment:
        with suppress(OSError):
            return create_exclusively(Path(environment[_VERDICT]), str(exit_code).encode())
    return environment["LOCAL_RANK"] == "0"


def note_agent_ends(verdict: Path) -> None:
    """Called by an agent that was told to end, before it ends its ranks."""
    with suppress(OSError):  # they must be ended all the same
        verdict.with_name(_ENDS).touch()


def agent_ends(environment: Mapping[str, str]) -> bool:
    """Whether this rank's agent was told to end; False under another agent than ours."""
    return _VERDICT in environment and Path(environment[_VERDICT]).with_name(_ENDS).exists()


def end_at_once_on_sigterm() -> None:
    """Called by a rank about to exit with 0: from here on SIGTERM ends it at once.

    It waits for its agent to acknowledge, which an ending agent never does.
    """
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def note_job_began(environment: MutableMapping[str, str]) -> None:
    """Set the job's start to now, replacing any previous job's."""
    environment[JOB_BEGAN] = repr(time.monotonic())


def job_began(environment: Mapping[str, str]) -> float:
    """The job's start on the clock of `time.monotonic`; without an agent, now."""
    return float(environment.get(JOB_BEGAN, time.monotonic()))
