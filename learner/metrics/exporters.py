"""Metrics for programs that people watch runs with: TensorBoard and Weights & Biases, each only where a setting asks.

Neither is a dependency: each is imported when it is asked for. One that is not installed is a mistake in the
configuration, found before the run has any effect; a W&B that nobody has logged in to is one, too. One that fails
otherwise, to begin or later, is logged, and training goes on. Blocks on the disk (TensorBoard), and half a minute on a
W&B that is away, now and then; otherwise W&B sends from a process of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import structlog

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.errors import ConfigError
from streamrl.extras import install

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # by key within `metrics`
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 300.0, 3600.0
_INIT_TIMEOUT_S = 20.0  # all ranks wait meanwhile

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
        try:
            self._run = module.init(
                project=wandb.project,
                entity=wandb.entity,
                mode=wandb.mode,
                name=settings.name,
                id=run_uid,
                resume="allow",
                dir=str(settings.folder),
                config={"config": dump_config(settings)},
                settings=module.Settings(init_timeout=_INIT_TIMEOUT_S),
            )
        except module.errors.UsageError as error:
            raise ConfigError(
                f"metrics.wandb: {error} The key may be in the environment too, as WANDB_API_KEY; "
                "metrics.wandb.mode=offline needs none"
            ) from error

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not as W&B's own step, which only goes up: after a crash steps are made again, and validations come late.
        self._run.log({**metrics, "step": step})


class Guarded:
    """An exporter whose failures stop nothing. One that cannot begin is tried again, ever more rarely; a ConfigError at
    the first time is for the user."""

    def __init__(self, key: str, begin: Callable[[], Exporter], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._begin, self._clock = key, begin, clock
        self._pause_s = _FIRST_PAUSE_S
        self._exporter: Exporter | None = None
        self._again_at = clock()
        self._try_to_begin()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._try_to_begin()
            if self._exporter is not None:
                self._exporter.step(step, metrics)
        except Exception:
            log.warning("metrics not exported", exporter=self._key, exc_info=True)

    def _try_to_begin(self) -> None:
        if self._exporter is not None or self._clock() < self._again_at:
            return
        self._again_at = self._clock() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            self._exporter = self._begin()
        except ConfigError:
            raise
        except Exception:
            log.warning("metrics are not exported for now", exporter=self._key, exc_info=True)


def check_exporters(settings: schema.Config, *, load: Importer = import_module) -> None:
    """ConfigError when one that is asked for is not installed."""
    for key, module in _asked(settings):
        try:
            load(module)
        except ImportError as error:
            raise ConfigError(
                f"metrics.{key}: not installed here ({error}); "
                f"`{install('trackers')}`, or take metrics.{key} out of the configuration"
            ) from error


def open_exporters(
    settings: schema.Config,
    *,
    run_uid: str,
    load: Importer = import_module,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[Exporter]:
    """After `check_exporters`; on rank 0."""
    kinds: dict[str, Callable[..., Exporter]] = {
        "tensorboard": TensorBoard,
        "wandb": partial(WeightsAndBiases, run_uid=run_uid),
    }
    asked = [(key, load(module)) for key, module in _asked(settings)]
    return [Guarded(key, partial(kinds[key], settings, module), clock=clock) for key, module in asked]


def _asked(settings: schema.Config) -> list[tuple[str, str]]:
    return [(key, module) for key, module in _MODULES.items() if getattr(settings.metrics, key)]
