"""What can be seen of a run from outside, gathered over time: snapshots and the records of its steps.

The display, and in the end the summary, show what is in here and nothing else; it comes from Redis, so that it is the
same for whoever looks. Reading blocks for some seconds at most while Redis is away, and then tells so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import Record, Snapshot, read_records, snapshot
from streamrl.transport.types import START

_RECORDS_A_LOOK = 500
_RATE_STEPS = 20  # the time left is told from the pace of so many steps
_PATIENCE_S = 2.0

VALIDATION = "val_rollouts/rewards"
STEP = "train_optim/optim_step"


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
        self._last_id = START
        self._records: dict[int, Record] = {}  # of training, by step; the newest epoch's counts
        self._validations: dict[int, Record] = {}
        self._loads: dict[tuple[str, int], Loads] = {}  # by part and process

    def look(self) -> None:
        """Raises TransportError when Redis is away."""
        self.now = snapshot(self._client, self._keys, give_up_after_s=_PATIENCE_S)
        for record in read_records(self._client, self._keys, after=self._last_id, count=_RECORDS_A_LOOK):
            self._last_id = record.id
            self.take(record)
        for report in self.now.reports:
            counts = [report.detail.get(name, 0) for name in ("loads", "loads_in_flight")]
            if report.role == "worker" and all(isinstance(count, int) for count in counts):
                self._loads[report.part, report.pid] = Loads(loaded=int(counts[0]), in_flight=int(counts[1]))

    def take(self, record: Record) -> None:
        if VALIDATION in record.values:
            self._validations[record.step] = record
        if STEP in record.values:
            self._records[record.step] = record

    @property
    def step(self) -> int:
        committed = self.now.step if self.now else 0
        return max(committed, max(self._records, default=0))

    @property
    def loads(self) -> Loads:
        lives = self._loads.values()
        return Loads(loaded=sum(life.loaded for life in lives), in_flight=sum(life.in_flight for life in lives))

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of each training step that has it, in order."""
        return _curve(self._records, metric)

    def held_out(self) -> list[tuple[str, list[float]]]:
        """By reward source, its mean at each validation so far; the weighted sum, `reward`, where there are several."""
        names = sorted({name for record in self._validations.values() for name in record.values})
        sources = [name for name in names if name.startswith(f"{VALIDATION}/")]
        shown = sources if len(sources) == 1 else [*sources, VALIDATION]
        curves = ((name, _curve(self._validations, name)) for name in shown)
        return [(name.rpartition("/")[2], [value for _, value in curve]) for name, curve in curves if curve]

    def latest(self, metric: str) -> float | None:
        values = self.curve(metric)
        return values[-1][1] if values else None

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None where the end is not known by steps."""
        recent = [self._records[step] for step in sorted(self._records)[-_RATE_STEPS:]]
        if self.max_steps is None or len(recent) < 2:
            return None
        pace_s = (recent[-1].at - recent[0].at) / (recent[-1].step - recent[0].step)
        return max(0.0, pace_s * (self.max_steps - self.step))


def _curve(records: dict[int, Record], metric: str) -> list[tuple[int, float]]:
    return [(step, records[step].values[metric]) for step in sorted(records) if metric in records[step].values]


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve one line high: each mark is the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for mark in range(width):
        part = values[mark * len(values) // width : (mark + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low, span = min(means), max(means) - min(means)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / span * top) if span else 0] for mean in means)
