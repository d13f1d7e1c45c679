"""Helpers for tests of several packages: bounded waits, a full disk, and small tickets and groups."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.protocol.wire.group import Group, GroupHeader
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version

_POLL_S = 0.01


def wait_until(
    predicate: Callable[[], Any], *, description: str, timeout_s: float = 120.0, poll_s: float = _POLL_S
) -> Any:
    """Return the predicate's first true value; AssertionError with the description if none comes in time."""
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {description}"
        never.wait(poll_s)
    return value


async def wait_until_async(
    predicate: Callable[[], Awaitable[Any]], *, description: str, timeout_s: float = 120.0
) -> Any:
    """`wait_until` for a coroutine."""
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while not (value := await predicate()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {description}"
        await asyncio.to_thread(never.wait, _POLL_S)
    return value


def temporary_files(folder: str | Path) -> list[str]:
    """Return what is in a folder of temporary files but torch's cache, which its import makes and the next one uses."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("torchinductor_"))


def processes_in(folder: Path) -> list[int]:
    """Return the other processes that work in this folder, which what they start inherits. Command lines do not tell:
    Redis' socket is elsewhere where its path would be too long, and vLLM gives its processes a title."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has just ended, or is another user's
            if path.readlink().is_relative_to(folder) and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def make_ticket(number: int, *, run_uid: str = "uid", **changes: Any) -> Ticket:
    fields: dict[str, Any] = {
        "number": number,
        "run_uid": run_uid,
        "purpose": "train",
        "data_epoch": 0,
        "prompt_index": number,
        "prompt": f"prompt {number}",
        "token_ids": np.arange(3, dtype=np.int32),
        "num_samples": 2,
    }
    return Ticket(**{**fields, **changes})


def make_sample(*, num_tokens: int = 4, version: int | None = None, reward: float = 1.0, **changes: Any) -> Sample:
    span = Span(version=make_version(1, 0) if version is None else version, step=0, start=0, end=num_tokens)
    fields: dict[str, Any] = {
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": np.full(num_tokens, -0.5, dtype=np.float32),
        "mask_runs": (num_tokens,),
        "spans": (span,) if num_tokens else (),
        "finish_reason": "stop",
        "rewards": {"exact": reward},
        "reward": reward,
    }
    return Sample(**{**fields, **changes})


def make_group(ticket: Ticket, *, samples: tuple[Sample, ...] | None = None, **header: Any) -> Group:
    """A group that answers the ticket; `error="..."` with `samples=()` makes it a failure."""
    made = tuple(make_sample(reward=float(i)) for i in range(ticket.num_samples)) if samples is None else samples
    fields: dict[str, Any] = {
        "ticket": ticket.number,
        "identity": ticket.identity,
        "run_uid": ticket.run_uid,
        "purpose": ticket.purpose,
        "attempt": ticket.attempt,
        "worker": "worker/test",
        "fingerprint": "model",
        "num_prompt_tokens": len(ticket.token_ids),
        # These are computed from the body when the group is encoded.
        "sample_lengths": (),
        "sample_rewards": (),
        "sample_finished": (),
        "min_version": 0,
        "max_version": 0,
    }
    return Group(header=GroupHeader(**{**fields, **header}), prompt_ids=ticket.token_ids, samples=made)


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Make writes beyond this size fail, as on a full disk: the start of the data is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_unreadable(path: Path) -> None:
    """As on a failing file system, also for root: its name is there, and reading it is an OSError (ELOOP)."""
    path.unlink()
    path.symlink_to(path.name)
