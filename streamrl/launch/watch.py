"""What can be seen of a run from outside, gathered over time: snapshots and the records of its steps.

The display, and in the end the summary, show what is in here and nothing else; it comes from Redis, so that it is the
same for whoever looks. Reading blocks for some seconds at most while Redis is away, and then tells so.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis

from streamrl.monitor.history import History
from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import Snapshot, snapshot

_RATE_STEPS = 20  # the time left is told from the pace of so many steps
_PATIENCE_S = 2.0

VALIDATION = "val_rollouts/rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Weight versions that workers took up, all lives of all workers together."""

    loaded: int = 0
    in_flight: int = 0  # of them with samples being generated


class Watch:
    def __init__(self, client: redis.Redis, keys: Keys, *, max_steps: int | None) -> None:
        self._client, self._keys = client, keys
        self.max_steps = max_steps
        self.now: Snapshot | None = None  # the last time that Redis answered
        self.history = History()
        self._has_begun = False
        self._loads: dict[tuple[str, int], Loads] = {}  # by part and process

    def look(self) -> None:
        """Raises TransportError when Redis is away."""
        self.now = snapshot(self._client, self._keys, give_up_after_s=_PATIENCE_S)
        self._has_begun |= self._is_running
        self.history.refresh(self._client, self._keys)
        for report in self.now.reports:
            counts = [report.detail.get(name, 0) for name in ("loads", "loads_in_flight")]
            if report.role == "worker" and all(isinstance(count, int) for count in counts):
                self._loads[report.part, report.pid] = Loads(loaded=int(counts[0]), in_flight=int(counts[1]))

    @property
    def is_over(self) -> bool:
        """The run was seen running, and is no more. What ended before we looked may be taken up any moment."""
        return self._has_begun and not self._is_running

    @property
    def _is_running(self) -> bool:
        return self.now is not None and self.now.run is not None and self.now.run.state == "running"

    @property
    def step(self) -> int:
        records = self.history.steps.records
        return max(self.now.step if self.now else 0, records[-1].step if records else 0)

    @property
    def loads(self) -> Loads:
        lives = self._loads.values()
        return Loads(loaded=sum(life.loaded for life in lives), in_flight=sum(life.in_flight for life in lives))

    def curve(self, metric: str) -> list[float]:
        """Its value at each training step that has it, in order."""
        return self.history.steps.values(metric)[1]

    def held_out(self) -> list[tuple[str, list[float]]]:
        """By reward source, its mean at each validation so far; the weighted sum, `reward`, where there are several."""
        validations = self.history.validations
        names = sorted({name for record in validations.records for name in record.values})
        sources = [name for name in names if name.startswith(f"{VALIDATION}/")]
        shown = sources if len(sources) == 1 else [*sources, VALIDATION]
        curves = ((name, validations.values(name)[1]) for name in shown)
        return [(name.rpartition("/")[2], values) for name, values in curves if values]

    def latest(self, metric: str) -> float | None:
        return next((r.values[metric] for r in reversed(self.history.steps.records) if metric in r.values), None)

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None where the end is not known by steps."""
        recent = self.history.steps.records[-_RATE_STEPS:]
        if self.max_steps is None or len(recent) < 2:
            return None
        pace_s = (recent[-1].at - recent[0].at) / (recent[-1].step - recent[0].step)
        return max(0.0, pace_s * (self.max_steps - self.step))
