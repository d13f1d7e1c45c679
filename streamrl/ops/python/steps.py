"""The steps of a run, as its learner records them in the run's folder: those that are there, then each that comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.ops.monitor.history import METRICS, History, to_record, whole
from streamrl.protocol.transport.keys import is_validation
from streamrl.protocol.transport.types import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    number: int
    at: float  # unix time
    metrics: Mapping[str, float]  # by the names that the dashboard has

    @property
    def reward(self) -> float | None:
        """The mean of the groups that it trained; None where it had no samples."""
        return self.metrics.get("train_rollouts/rewards")


def follow(folder: Path, *, goes_on: Callable[[], bool]) -> Iterator[Step]:
    """What a crash has undone counts as it was made again; from then on a step that is made again comes again. Asks
    before each look whether the run goes on, and so may wait there."""
    tail = _Tail(folder / METRICS)
    yield from map(to_step, History.of(tail.records()).steps.records)
    goes = True
    while goes:
        goes = goes_on()
        yield from (to_step(record) for record in tail.records() if not is_validation(record.values))


def to_step(record: Record) -> Step:
    return Step(number=record.step, at=record.at, metrics=record.values)


class _Tail:
    """Reads on where it has stopped; a line that is not whole is read the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        yield from map(to_record, whole(lines))
