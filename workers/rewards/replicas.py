"""The replicas of one service and the choice among them: a circuit breaker each, least loaded first.

    well ── FAILURES_TO_OPEN failures in a row ──► out until `retry_at` ──► one trial request ──┬─ answered ─► well
                                                     ▲   (other requests go elsewhere, or wait) │
                                                     └──── failed: a longer pause, with jitter ◄┘

The service is out only when no replica is healthy; then `acquire` waits. A replica that rate-limits (429) is healthy,
and rests for as long as it asks; if all replicas rest, `acquire` waits too. With a limit of requests per second it also
waits for its turn, and only then chooses: what another request was told meanwhile counts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from streamrl.workers.rewards.http_request import RequestRefused, TryAgain

FAILURES_TO_OPEN = 3
_LONGEST_PAUSE_S = 30.0
_SHORT_REST_S = 1.0  # not worth reporting
T = TypeVar("T")


class Replica:
    """One address and its recent history."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.num_answered = 0  # requests answered, refusals included
        self.unanswered: set[object] = set()  # calls that got no answer since it last gave one; kept by its user
        self.failures_in_row = 0
        self.on_trial = False  # out, with a trial request in flight
        self.trials_failed = 0  # since it was last healthy
        self.retry_at = 0.0  # when an out replica may be tried, on the set's clock
        self.rests_in_row = 0  # since it last answered
        self.rest_until = 0.0  # rate-limited until then, on the set's clock
        self.last_error = ""

    @property
    def well(self) -> bool:
        return self.failures_in_row < FAILURES_TO_OPEN

    @property
    def ready_at(self) -> float:
        return self.rest_until if self.well else self.retry_at


class RequestPace:
    """Limits requests to a turn at a time, at least `1 / per_s` apart.

    They are as far apart also after a late turn, so a busy loop causes no burst.
    """

    def __init__(self, per_s: float | None) -> None:
        self._every_s = 0.0 if per_s is None else 1 / per_s
        self._next = 0.0  # on the event loop's clock
        self._turn_lock = asyncio.Lock()

    async def turn(self, take: Callable[[], T | None]) -> T | None:
        """Wait for a turn and call `take`. A turn for which it returns None is left to the next caller."""
        loop = asyncio.get_running_loop()
        async with self._turn_lock:
            if (left_s := self._next - loop.time()) > 0:
                await asyncio.sleep(left_s)
            if (taken := take()) is not None:
                self._next = loop.time() + self._every_s
            return taken


class Replicas:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        per_s: float | None = None,
        first_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._pace = RequestPace(per_s)
        self._first_pause_s = first_pause_s
        self._clock = clock

    @property
    def outage(self) -> str | None:
        """Why no replica can be asked now; None if one is healthy or due for a trial."""
        if any(replica.well or self._may_try(replica) for replica in self._replicas):
            return None
        return self.last_errors

    @property
    def state(self) -> str:
        """For people: how many are healthy, and the last error of another."""
        out = [replica for replica in self._replicas if not replica.well]
        if not out:
            rest_s = min(replica.rest_until for replica in self._replicas) - self._clock()
            return "well" if rest_s < _SHORT_REST_S else f"rate-limited for {rest_s:.0f} s more: {self.last_errors}"
        return f"{self.num_well} of {len(self)} replicas well; {out[0].url}: {out[0].last_error}"

    @property
    def last_errors(self) -> str:
        return "; ".join(f"{replica.url}: {replica.last_error}" for replica in self._replicas if replica.last_error)

    @property
    def num_well(self) -> int:
        return sum(replica.well for replica in self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def choose(self, *, avoid: Replica | None = None) -> Replica | None:
        """Choose a replica, counted as in flight until `asking` ends; another than `avoid` if possible. None: wait."""
        trials = [replica for replica in self._replicas if not replica.well and self._may_try(replica)]
        well = [replica for replica in self._replicas if replica.well and self._clock() >= replica.rest_until]
        candidates = trials or [replica for replica in well if replica is not avoid] or well
        if not candidates:
            return None
        # Random tie-break: many workers that start at once must not all use the first address.
        chosen = min(candidates, key=lambda replica: (replica.in_flight, random.random()))
        chosen.in_flight += 1
        chosen.on_trial = not chosen.well
        return chosen

    def stay(self, replica: Replica) -> None:
        """Use this replica whatever its health, since it holds the state of the request; counted as by `choose`."""
        replica.in_flight += 1

    def pause_s(self) -> float:
        """Seconds until one may be tried; at least a little, for those who wait for another's trial to end."""
        now = self._clock()
        return max(min(replica.ready_at for replica in self._replicas) - now, self._first_pause_s)

    async def acquire(self, *, until: float, avoid: Replica | None = None) -> Replica | None:
        """Wait for a replica, as chosen by `choose`. None: the service stayed out until `until` (event loop's
        clock)."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            if (replica := await self._pace.turn(partial(self.choose, avoid=avoid))) is not None:
                return replica
            await asyncio.sleep(min(self.pause_s() * random.uniform(1.0, 1.2), max(0.0, until - loop.time())))
        return None

    @contextmanager
    def asking(self, replica: Replica) -> Iterator[None]:
        """Record the outcome of a request to this replica; a cancellation counts neither way."""
        try:
            yield
        except TryAgain as error:
            if error.rest_s is None:
                self._failed(replica, str(error))
            else:
                self._rests(replica, str(error), error.rest_s)
            raise
        except RequestRefused:
            _answered(replica)
            raise
        else:
            _answered(replica)
        finally:
            replica.in_flight -= 1

    def _failed(self, replica: Replica, error: str) -> None:
        replica.failures_in_row += 1
        replica.last_error = error
        if replica.well:
            return
        # Requests in flight when it went out all fail together: only a failed trial makes the pause longer.
        replica.trials_failed += replica.on_trial
        replica.on_trial = False
        pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(replica.trials_failed, 10))
        replica.retry_at = self._clock() + pause_s * random.uniform(0.5, 1.0)

    def _rests(self, replica: Replica, error: str, wanted_s: float) -> None:
        """Let it rest for as long as it asks, or longer each time if it does not say."""
        replica.last_error, replica.on_trial = error, False
        pause_s = wanted_s or min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(replica.rests_in_row, 10))
        until = self._clock() + pause_s * random.uniform(1.0, 1.1)
        # Requests in flight are all rate-limited together: only one sent after a rest makes the next rest longer.
        replica.rests_in_row += self._clock() >= replica.rest_until
        replica.rest_until = max(replica.rest_until, until)
        replica.retry_at = max(replica.retry_at, until)

    def _may_try(self, replica: Replica) -> bool:
        return replica.in_flight == 0 and self._clock() >= replica.retry_at


def _answered(replica: Replica) -> None:
    replica.num_answered += 1
    replica.failures_in_row = replica.trials_failed = replica.rests_in_row = 0
    replica.unanswered.clear()
