"""What the agent's fork server is before it forks ranks (`learner.process.agent`): how that server itself behaves.

Imported by that server alone, and for its effects: the standard library gives a fork server no other way to set itself
up. What the server has imported no rank has to import again, so the agent has it import `learner.main` before this;
nothing there may touch a GPU, since a context does not survive a fork. The server dies with the agent, and its ranks
with it, each by the kernel's word. SIGTERM, which some send to every process of a job, is the agent's to pass on: the
server ignores it, so that the ranks may finish their step.
"""

from __future__ import annotations

import gc
import os
import signal

import torch.distributed.run  # noqa: F401 - what the agent sends to a rank refers to it

from streamrl.learner.process.ranks import die_with_parent

_SERVER = os.getpid()


def _ignore(number: int, _frame: object) -> None:
    """Also the handler of a rank that has just been forked and has none of its own yet: that one ends."""
    if os.getpid() != _SERVER:
        os._exit(128 + number)


die_with_parent(os.getppid())
signal.signal(signal.SIGTERM, _ignore)
gc.collect()
gc.freeze()  # or the first collection in a rank would copy every page that they share
