"""What becomes of an error that no restart can fix, on whichever rank it is raised.

    the rank that has it ──► a word in the ranks' store ──► ranks that fail because it has left: the same error
            │                                                                │
            └──► error file; verdict and signal to the host's agent ◄────────┘

Without the word, agents of other hosts would restart their ranks and wait for a host that does not come back. Rank 0
holds the store, so its own word ends with it; then agents end once they lose the host where they meet, or give up
waiting for it.

Only a rank whose Python runs on can hear. On GPUs one may be waiting inside CUDA for a collective that never ends: its
agent kills it half a minute after the first rank has ended (`ending`), and on other hosts NCCL or the watchdog ends it.
If that is rank 0, the reason is in the error file and in what the agent printed, but the run still counts as running in
Redis and in `state.json`. No GPU has run this.

Blocks on the store, for some seconds at most: its host may be gone.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch.distributed as dist

from streamrl.errors import Ended, Refused, Replaced, RunGone, StreamrlError, TrainingError, UserError
from streamrl.files import create_exclusively, write_durably
from streamrl.learner.process.background import BackgroundThread

_KEY = "streamrl/no restart helps"
_ASK_S = 10.0
_REPORTED = (UserError, TrainingError, RunGone)
_PERMANENT = (*_REPORTED, Replaced, Refused, Ended)

T = TypeVar("T")

log = structlog.get_logger(__name__)


def is_permanent(error: Exception, *, standby: bool) -> bool:
    """Whether a restart would only fail again; one of a `standby` that was replaced waits for its turn."""
    return isinstance(error, _PERMANENT) and not (standby and isinstance(error, Replaced))


def write_error(file: Path, error: StreamrlError, *, rank: int) -> None:
    """Write the error for the launcher, rank 0's in place of any other's.

    After the other errors another learner has the run, and is healthy.
    """
    if not isinstance(error, _REPORTED):
        return
    text = json.dumps({"error": str(error), "exit_code": error.exit_code}).encode()
    try:
        if rank == 0:
            write_durably(file, text)
        else:
            create_exclusively(file, text)
    except OSError as problem:  # the agent must end all the same
        log.warning("error file not written", path=str(file), error=str(problem))


@contextmanager
def sharing_failures(*, rank: int, standby: bool) -> Iterator[None]:
    """Tell the other ranks of a permanent error inside the block, and fail with theirs."""
    try:
        with heeding_peers():
            yield
    except StreamrlError as error:
        if is_permanent(error, standby=standby):
            name = next(kind.__name__ for kind in _PERMANENT if isinstance(error, kind))
            place = f"rank {rank} on {socket.gethostname()}: " if rank else ""
            word = {"kind": name, "error": f"{place}{error}"}
            _ask(lambda store: store.compare_set(_KEY, "", json.dumps(word)))  # the first word stays
        raise


@contextmanager
def heeding_peers() -> Iterator[None]:
    """If the block fails because another rank has left with a permanent error, raise that error instead."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _PERMANENT):
            raise
        word = _ask(lambda store: store.get(_KEY) if store.check([_KEY]) else None)
        if not word:
            raise
        told = json.loads(word)
        raise {kind.__name__: kind for kind in _PERMANENT}[told["kind"]](told["error"]) from error


def _ask(question: Callable[[Any], T]) -> T | None:
    """Return the answer of the store by which the ranks have met; None if there is none, or it does not answer."""
    if not dist.is_initialized():
        return None
    asking = BackgroundThread("peers")
    store = dist.distributed_c10d._get_default_store()
    with asking.working(join_s=0):
        try:
            return asking.submit(partial(question, store)).result(_ASK_S)
        except (RuntimeError, TimeoutError):  # of torch's errors, when the store's host is gone
            return None
