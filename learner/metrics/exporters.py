"""Metrics for programs that people watch runs with: TensorBoard and Weights & Biases, each only where a setting asks.

Neither is a dependency: each is imported when it is asked for. One that is not installed is a mistake in the
configuration, found before the run has any effect; one that fails later is logged, and training goes on. Blocks on the
disk (TensorBoard); W&B sends from a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import structlog

from streamrl.config import schema
from streamrl.config.dump import dump_config
from streamrl.errors import ConfigError

_TENSORBOARD, _WANDB = "torch.utils.tensorboard", "wandb"

Importer = Callable[[str], Any]

log = structlog.get_logger(__name__)


class Exporter(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...


class TensorBoard:
    """Event files in the run's folder, written out at each step."""

    def __init__(self, settings: schema.Config, module: Any) -> None:
        self._writer = module.SummaryWriter(str(settings.folder / "tensorboard"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WeightsAndBiases:
    """One run there for each run here, gone on with by later processes."""

    def __init__(self, settings: schema.Config, module: Any, *, run_uid: str) -> None:
        wandb = settings.metrics.wandb
        assert wandb is not None, "asked for"
        self._run = module.init(
            project=wandb.project,
            entity=wandb.entity,
            mode=wandb.mode,
            name=settings.name,
            id=run_uid,
            resume="allow",
            dir=str(settings.folder),
            config={"config": dump_config(settings)},
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not as W&B's own step, which only goes up: after a crash steps are made again, and validations come late.
        self._run.log({**metrics, "step": step})


class Guarded:
    """An exporter whose failures stop nothing."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._exporter.step(step, metrics)
        except Exception:
            log.warning("metrics not exported", exporter=type(self._exporter).__name__, exc_info=True)


def check_exporters(settings: schema.Config, *, load: Importer = import_module) -> None:
    """ConfigError when one that is asked for is not installed."""
    for key, module in _asked(settings):
        try:
            load(module)
        except ImportError as error:
            raise ConfigError(
                f"metrics.{key}: not installed here ({error}); "
                f"pip install 'streamrl[trackers]', or take metrics.{key} out of the configuration"
            ) from error


def open_exporters(settings: schema.Config, *, run_uid: str, load: Importer = import_module) -> Sequence[Exporter]:
    """After `check_exporters`; on rank 0."""
    found: list[Exporter] = []
    for key, module in _asked(settings):
        if key == "tensorboard":
            found.append(Guarded(TensorBoard(settings, load(module))))
        else:
            found.append(Guarded(WeightsAndBiases(settings, load(module), run_uid=run_uid)))
    return found


def _asked(settings: schema.Config) -> Iterator[tuple[str, str]]:
    """(key within `metrics`, module)"""
    if settings.metrics.tensorboard:
        yield "tensorboard", _TENSORBOARD
    if settings.metrics.wandb is not None:
        yield "wandb", _WANDB
