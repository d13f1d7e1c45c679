"""Records a run for people: metrics of each step, and validations with a few answers to read.

    metrics.jsonl      a line per step, and a line per validation
    validation.jsonl   a line per validation: its numbers and some prompts with their completions, long ones cut
    rollouts.jsonl     some trained rollouts to read (keepsakes)
    Redis              the same metrics, for the monitor
    exporters          the same metrics, for TensorBoard and W&B if configured

After a crash, steps since the last checkpoint are repeated and appear twice; the later line, of the higher term,
counts. Only rank 0 records. A disk or a Redis that fails here never stops training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from streamrl.errors import Fenced
from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.metrics.exporters import Exporter
from streamrl.learner.metrics.keepsakes import Decoder, RolloutKeeper, append_line, cut, cut_fields
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample
from streamrl.telemetry.metrics import is_metric

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    step: int  # of the requested version
    version: int
    complete: bool  # every prompt was answered; else some were given up or timed out
    ranks: bool = True  # it may decide which checkpoint is the best: its figures compare with those of others
    metrics: Mapping[str, float]
    shown: tuple[tuple[Prompt, Sample], ...] = ()  # a few answers for people to read


class MetricsSink(Protocol):
    """What recording needs of rank 0's stream."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Recorder:
    def __init__(
        self, *, folder: Path, journal: MetricsSink, decoder: Decoder, term: int, exporters: Sequence[Exporter] = ()
    ) -> None:
        self._folder, self._journal, self._decoder, self._term = folder, journal, decoder, term
        self._exporters = exporters
        self._rollouts = RolloutKeeper(folder, decoder, term=term)

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Close the exporters at the end of the block, within seconds; nothing may be recorded after it."""
        try:
            yield
        except Fenced:
            raise  # the newer learner exports under the same name by now: closing would end its W&B run
        except BaseException:
            self._close_exporters(failed=True)
            raise
        self._close_exporters(failed=False)

    def _close_exporters(self, *, failed: bool) -> None:
        for exporter in self._exporters:
            exporter.close(failed=failed)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        unknown = [name for name in metrics if not is_metric(name)]
        assert not unknown, f"not in streamrl.telemetry.metrics: {unknown}"
        self._journal.record(step, metrics)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for exporter in self._exporters:
            exporter.step(step, finite)
        self._append("metrics.jsonl", {"step": step, "term": self._term, "at": time.time(), **finite})

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some of what this rank has trained in this step."""
        self._rollouts.keep(step, groups)

    def validation(self, result: ValidationResult) -> None:
        self.step(result.step, result.metrics)
        samples = [
            {
                "prompt": cut(prompt.text),
                "completion": cut(str(self._decoder.decode(sample.token_ids, skip_special_tokens=True))),
                "reward": sample.reward,
                "fields": cut_fields(prompt.fields),
            }
            for prompt, sample in result.shown
        ]
        record = {"step": result.step, "version": result.version, "metrics": result.metrics, "samples": samples}
        self._append("validation.jsonl", {"term": self._term, "at": time.time(), **record})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            append_line(self._folder / name, record)
        except OSError as error:
            log.warning("record not written", file=name, error=str(error))


class Timers:
    """Seconds by name since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return {f"timers/{name}": seconds for name, seconds in taken.items()}
