"""Crash points: named places between two effects that others can see, where a test makes a process die or stop.

    folder.rename(final)
    crashpoint("checkpoint.renamed")      # the new name is there, and nobody has been told
    fsync_folder(self._folder)

What must survive a crash is decided between two effects: a file renamed but not announced, a script that ran but
whose caller died. A kill from outside rarely falls there, so the place has a name, which says what has just been done.
Every name stands in `Point`, so that a type checker refuses a wrong one, and tests hold that each is in the code and
that the run survives a death at each.

Armed from outside, for a process as it is in operation, which then dies as by kill -9 or stops as by SIGSTOP:

    STREAMRL_CRASH_AT=checkpoint.renamed      at the first passing
    STREAMRL_CRASH_AT=issue.written:3:stop    at the third, until somebody sends SIGCONT

Armed from inside, for this thread or task alone, by any action: `with armed(CrashAt("claim.written")): ...` raises
SimulatedCrash there. An exception unwinds, so `finally` still runs, which a death does not: prefer the process where
what is left on disk matters. Not armed, a crash point costs two lookups, 0.05 microseconds; blocks never.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, get_args

from streamrl.errors import ConfigError

VARIABLE: Final = "STREAMRL_CRASH_AT"

Point = Literal[
    # Becoming the learner
    "lease.taken",  # others are kept out; the run's history does not know us yet
    "run.recorded",  # the run has its uid
    "term.recorded",  # the durable term is ours; Redis has the one before
    "claim.written",  # Redis has the term; nothing is restored
    # Reconciling
    "restore.written",  # the streams are there; what is missing in them has not been asked for
    "reconcile.deleted",  # superfluous tickets are gone; missing ones are not issued again
    "reconcile.counted",  # whoever audits knows how many tickets there are; the feed has yet to go on
    # Issuing
    "draws.written",  # which prompts the next places ask for is durable; no ticket says so
    "issue.counted",  # the ledger counts the tickets; none is written
    "issue.written",  # a chunk of tickets is in the stream
    "dead.written",  # some dead letters are there; no checkpoint says that their tickets are dead
    "letters.removed",  # of tickets that are not dead, or dead no more
    "retry.counted",  # the ledger has the tickets that repeat dead ones; Redis has the requests
    # A worker's ticket
    "ticket.leased",  # the server counts it as ours; nobody here works at it
    "ticket.renewed",  # the lease begins anew
    "group.ready",  # generated and encoded; not delivered
    "group.delivered",  # in the stream; the worker does not know
    "ticket.handed_back",  # others may have it; the worker still stands in the group
    "worker.left",  # its name is forgotten; the process is still there
    # Consuming
    "group.read",  # the cursor is beyond it, in memory alone
    "group.settled",  # the ledger says how it ended, in memory alone
    # Files that are whole or not there (streamrl.files)
    "file.aside",  # all bytes are on the disk under another name
    "file.linked",  # the name is there, and the other one too
    "file.renamed",  # the name is there, and may not survive a power cut
    # A checkpoint
    "checkpoint.copied",  # each rank has its state in a second place in memory; nothing of it is on the disk
    "shard.part",  # a rank's file is there in part
    "shard.written",  # it is there, and may not survive a power cut
    "shard.synced",  # it would; nobody knows, and others may not be so far
    "checkpoint.written",  # every rank's files are in the temporary folder; their names may not survive a power cut
    "checkpoint.synced",  # they would; journal and manifest are not written
    "journal.written",  # a file of the journal that no checkpoint names
    "checkpoint.sealed",  # the manifest is there; the folder has its temporary name
    "checkpoint.renamed",  # the commit point is passed; the name may not survive a power cut
    "checkpoint.committed",  # it would; Redis does not know
    "commit.written",  # the stream is trimmed; older checkpoints are there
    "prune.aside",  # an old checkpoint is renamed; whether a younger term needs it has not been looked at
    "prune.removed",  # one is gone; others are to go
    # Weights
    "blob.begun",  # the index has the blob; chunks are missing (Redis)
    "blob.chunk",  # a chunk is there; others may be missing (Redis)
    "blob.aside",  # all bytes are there under another name (directory)
    "blob.renamed",  # the blob has its name, and may not survive a power cut (directory)
    "blob.stored",  # durable and whole; not announced
    "announce.written",  # workers see the version; the learner does not know that they do
    "amended.written",  # workers see its anchor; the learner does not know that they do
    "blob.unlinked",  # chunks are gone; the index has the blob (Redis)
    "blob.deleted",  # one is gone; others are to go
    # Weights that workers hand on to each other
    "share.begun",  # the blob's file is there and locked; no piece is in it
    "share.piece",  # a piece is in it; others may be missing
    "share.told",  # other hosts may know what is here, and wait for what we have taken on
    "share.whole",  # all pieces are there, and the lock is still ours
    # The end
    "release.written",  # the run has ended in Redis; the learner is still there
]
POINTS: Final[frozenset[Point]] = frozenset(get_args(Point))

Action = Callable[[Point], object]
_ENDS: Final = {"": signal.SIGKILL, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class SimulatedCrash(BaseException):
    """What would have been the death of the process. No `except Exception` may take it for an error and go on."""


def crashpoint(point: Point) -> None:
    """Do here what this thread, task or process is armed with; mostly nothing."""
    action = _armed.get() or _from_environment()
    if action is not None:
        action(point)


@contextmanager
def armed(action: Action) -> Iterator[None]:
    """Until the block ends, every crash point passed by this thread, its tasks, and its jobs for others does this."""
    token = _armed.set(action)
    try:
        yield
    finally:
        _armed.reset(token)


class CrashAt:
    """Crash at the nth passing of a point: by SimulatedCrash, or by a signal to this process."""

    def __init__(self, point: Point, *, nth: int = 1, by: signal.Signals | None = None) -> None:
        assert point in POINTS, f"no crash point: {point}"
        assert nth >= 1, f"the first passing is 1, not {nth}"
        self._point, self._nth, self._by = point, nth, by
        self._passings = itertools.count(1)  # its increment is atomic, so threads may pass together

    def __call__(self, point: Point) -> None:
        if point == self._point and next(self._passings) == self._nth:
            if self._by is None:
                raise SimulatedCrash(point)
            os.kill(os.getpid(), self._by)


_armed: Final[ContextVar[Action | None]] = ContextVar("armed crash point", default=None)


@functools.cache
def _from_environment() -> CrashAt | None:
    """What the process was started with; read once, since a process dies at most once."""
    word = os.environ.get(VARIABLE, "")
    return parse(word) if word else None


def parse(word: str) -> CrashAt:
    """`point`, `point:nth` or `point:nth:stop`."""
    name, _, rest = word.partition(":")
    nth, _, end = rest.partition(":")
    point = next((point for point in POINTS if point == name), None)
    if point is None:
        near = difflib.get_close_matches(name, POINTS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{VARIABLE}={word}: no crash point is called {name!r}; do you mean {near}?")
    if not (nth or "1").isdecimal() or int(nth or 1) < 1 or end not in _ENDS:
        raise ConfigError(f"{VARIABLE}={word}: write POINT, POINT:N or POINT:N:stop, with N from 1 on")
    return CrashAt(point, nth=int(nth or 1), by=_ENDS[end])
