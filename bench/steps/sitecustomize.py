"""Records which modules a ticket visits on its way to a gradient, from inside the run's own processes.

Python imports a module of this name at start, in every process whose PYTHONPATH begins with this folder (`bench.house`
starts such a run). Traced are a learner's main thread, from the first issued ticket to the end of the first update; a
worker's event loop during its work on tickets, inherited by its tasks; and a reward function's whole process. A module
is visited when one of its functions is called with the ticket or something derived from it (its group, the batch,
tensors), or returns such; code that merely runs meanwhile does not count. Each function is recorded once, at its first
call, since these processes may end in any way.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType

FIRST_OF_LEARNER, LAST_OF_LEARNER = "Dispatch.top_up", ("optimizer.py", "update")
FIRST_OF_WORKER = "Rollout._work"
WHOLE_PROCESS = "function_child.py"
# Names of the classes that carry a ticket's work; after a rename the count drops.
CARRIERS = {
    *("Ticket", "Leased", "Delivery", "Entry", "Group", "GroupHeader", "Sample", "Span", "bytes"),
    *("Prompt", "SampleRequest", "Generated", "ScoreItem", "Scores", "RequestOutput"),
    *("Plan", "PlanEntry", "ReadyGroup", "Fetched", "Selection", "GroupAdvantages"),
    *("Batch", "TokenBatch", "Piece", "MicroBatch", "Tensor", "ndarray"),
}

_OUT, _ROOT = os.environ.get("STREAMRL_STEPS_TO", ""), os.environ.get("STREAMRL_STEPS_OF", "")
_ROOMS = tuple(f"{_ROOT}/{room}/" for room in ("streamrl", "learner", "workers"))
_at_work: ContextVar[bool] = ContextVar("at_work", default=False)
_seen: set[CodeType] = set()


def _listen(frame: FrameType, event: str, value: object) -> None:
    code = frame.f_code
    if event == "return" and (code.co_filename.rpartition("/")[2], code.co_name) == LAST_OF_LEARNER:
        sys.setprofile(None)
    if event not in ("call", "return") or code in _seen or not code.co_filename.startswith(_ROOMS):
        return
    if code.co_qualname in (FIRST_OF_LEARNER, FIRST_OF_WORKER) or code.co_filename.endswith(WHOLE_PROCESS):
        _at_work.set(True)
    if not _at_work.get() or code.co_name == "<module>":
        return
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    if any(map(_carries, given if event == "call" else [value])):
        _seen.add(code)
        with Path(_OUT, f"{os.getpid()}.txt").open("a") as out:
            out.write(f"{code.co_filename}:{code.co_qualname}\n")


def _carries(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and any(map(_carries, value[:2]))
    if isinstance(value, dict):
        return any(map(_carries, list(value.values())[:2]))
    return type(value).__name__ in CARRIERS


if _OUT:
    sys.setprofile(_listen)
