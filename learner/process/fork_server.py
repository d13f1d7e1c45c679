"""Sets up the agent's fork server, before it forks ranks (`learner.process.agent`).

Imported by that server only, for its side effects: the standard library offers no other hook. Ranks need not import
what the server has, so the agent has it import `learner.main` first. Nothing there may touch a GPU, since a CUDA
context does not survive a fork. The server dies with the agent, and its ranks with the server, through the kernel's
parent-death signal. SIGTERM, which is sometimes sent to every process of a job, is the agent's to forward: the server
ignores it, so that the ranks can finish their step.
"""

from __future__ import annotations

import gc
import os
import signal

import torch.distributed.run  # noqa: F401 - pickled objects from the agent refer to it

from streamrl.learner.process.ranks import die_with_parent

_SERVER = os.getpid()


def _ignore(number: int, _frame: object) -> None:
    """Ignore SIGTERM in the server; a rank just forked, without a handler of its own, exits."""
    if os.getpid() != _SERVER:
        os._exit(128 + number)


die_with_parent(os.getppid())
signal.signal(signal.SIGTERM, _ignore)
gc.collect()
gc.freeze()  # or a rank's first garbage collection would copy every shared page
