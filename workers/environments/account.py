"""Statistics of a worker's multi-turn rollouts: failures, and the time spent in the model and in the environment."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from streamrl.errors import SampleError
from streamrl.workers.sessions.trace import Played

_MIN_WEIGHT = 0.05  # the least weight of the newest rollout in an average
_MAX_ERROR_CHARS = 200

Facts = dict[str, int | float | str]


class Account:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[object, float] = {}  # start times of running rollouts
        self._num_played = self._num_failed = 0
        self._model_s = self._environment_s = 0.0  # per rollout, moving averages
        self._error = ""  # of the last failed rollout

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        rollout = object()
        self._began[rollout] = self._clock()
        try:
            yield
        except SampleError as error:
            self._num_failed += 1
            self._error = str(error)[:_MAX_ERROR_CHARS]
            raise
        finally:
            del self._began[rollout]

    def played(self, played: Played) -> None:
        self._num_played += 1
        share = max(_MIN_WEIGHT, 1 / self._num_played)
        self._model_s += share * (played.model_s - self._model_s)
        self._environment_s += share * (played.environment_s - self._environment_s)

    def facts(self) -> Facts:
        """`scored`, `failed` and `latency_s` have the names that reward sources use."""
        return {
            "scored": self._num_played,
            "failed": self._num_failed,
            "latency_s": round(self._environment_s, 4),
            "model_s": round(self._model_s, 4),
            "under_way": len(self._began),
            "oldest_s": round(self._clock() - min(self._began.values(), default=math.inf), 1) if self._began else 0.0,
            "error": self._error,
        }
