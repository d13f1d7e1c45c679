"""The steps of a run, as its learner records them in the run's folder: existing ones, then new ones as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.ops.monitor.history import METRICS, History, parse_lines, to_record
from streamrl.protocol.transport.keys import is_validation
from streamrl.protocol.transport.types import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    number: int
    at: float  # unix time
    metrics: Mapping[str, float]  # by name, as in the dashboard

    @property
    def reward(self) -> float | None:
        """Mean reward of the trained groups; None if there were no samples."""
        return self.metrics.get("train_rollouts/rewards")


def follow(folder: Path, *, is_running: Callable[[], bool]) -> Iterator[Step]:
    """Yield steps. Existing ones count as repeated after a crash; later on a repeated step is yielded again. Calls
    `is_running` before each look, which may therefore wait."""
    tail = _Tail(folder / METRICS)
    yield from map(to_step, History.of(tail.records()).steps.records)
    running = True
    while running:
        running = is_running()
        yield from (to_step(record) for record in tail.records() if not is_validation(record.values))


def to_step(record: Record) -> Step:
    return Step(number=record.step, at=record.at, metrics=record.values)


class _Tail:
    """Reads on from where it stopped; an incomplete line is read next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        yield from map(to_record, parse_lines(lines))
