"""When this job began: `training.max_time` bounds a job in a queue, and the next one goes on with the run.

A job is what one torchrun runs, ranks that it starts again included. Its agent notes the time in the environment, which
they have from it. The clock is the machine's: all its processes share it, and nobody sets it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping

JOB_BEGAN = "STREAMRL_JOB_BEGAN"


def note_job_began(environment: MutableMapping[str, str]) -> None:
    """Now, whatever the job before has left there."""
    environment[JOB_BEGAN] = repr(time.monotonic())


def job_began(environment: Mapping[str, str]) -> float:
    """On the clock of `time.monotonic`; without an agent, now."""
    return float(environment.get(JOB_BEGAN, time.monotonic()))
