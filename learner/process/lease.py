"""Renews the run's lease while rank 0 works, in its own thread: a step may take longer than a lease.

It only renews and keeps the error; the loop calls `check` every round. Safety does not depend on it: every write is
fenced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import structlog

from streamrl.errors import Fenced, RunGone, StreamrlError, TransportError
from streamrl.learner.process.background import background_loop

_RENEWALS_PER_LEASE = 4

log = structlog.get_logger(__name__)


class LeaseKeeper:
    def __init__(self, renew: Callable[[], object], *, lease_s: float) -> None:
        self._renew = renew
        self._every_s = lease_s / _RENEWALS_PER_LEASE
        self._error: StreamrlError | OSError | None = None
        self._stopped = threading.Event()

    def renew_with(self, renew: Callable[[], object]) -> None:
        """Replace the renewal: once the term is claimed, renewals are fenced."""
        self._renew = renew

    def check(self) -> None:
        """Raise the error that ended the renewals: Fenced, or Redis was away for too long, or the disk failed."""
        if self._error is not None:
            raise self._error

    def keeping(self) -> AbstractContextManager[None]:
        return background_loop(self._keep, name="lease", stopped=self._stopped)

    def _keep(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._renew()
            except (StreamrlError, OSError) as error:  # before the claim, a renewal reads the run's folder
                self._error = error
                return


@contextmanager
def redis_may_be_away(skipped: str) -> Iterator[None]:
    """Log what was `skipped` if Redis is away; the keeper decides when it has been away for too long."""
    try:
        yield
    except (Fenced, RunGone):
        raise
    except TransportError as error:
        log.warning(f"{skipped}: Redis is away", error=str(error))
