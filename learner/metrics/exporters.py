"""Exports metrics to TensorBoard and Weights & Biases, each only if configured.

Neither is a dependency; each is imported on demand. A missing package is a configuration error, found before the run
has any effect, and so is a W&B without a login. Any other failure, at the start or later, is logged, and training
continues. Blocks on the disk (TensorBoard), and now and then for half a minute on an unreachable W&B, which otherwise
sends from its own process. `close` waits some seconds at most. Ranks end without the handlers that W&B would need to
do it by itself (`atexit` does not run in a forked rank): without `close` its last steps are lost.
"""

from __future__ import annotations

import random
import threading
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
_CLOSE_TIMEOUT_S = 10.0  # for each; within the time that an ending agent gives its ranks

Importer = Callable[[str], Any]

log = structlog.get_logger(__name__)


class Exporter(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None:
        """Send what is left, and say how this learner ended; the last call."""
        ...


class ExporterDouble:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}
        self.ends: list[bool] = []  # whether the learner failed

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = metrics

    def close(self, *, failed: bool) -> None:
        self.ends.append(failed)


class TensorBoard:
    """Event files in the run's folder, flushed at each step.

    After a crash steps are made again: TensorBoard drops what the files before have of the first one and later.
    """

    def __init__(self, settings: schema.Config, module: Any) -> None:
        self._begin = partial(module.SummaryWriter, str(settings.folder / "tensorboard"))
        self._writer: Any = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._begin(purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One W&B run per run, resumed by later processes."""

    def __init__(self, settings: schema.Config, module: Any, *, run_uid: str) -> None:
        wandb = settings.metrics.wandb
        assert wandb is not None, "only built if configured"
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
                f"metrics.wandb: {error} The API key may also be in the environment, as WANDB_API_KEY; "
                "metrics.wandb.mode=offline needs none"
            ) from error
        # Not W&B's own step, which only goes up: after a crash steps are repeated, and validations come late.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, *, failed: bool) -> None:
        # A later process of the run, after a restart for example, makes it "running" again.
        self._run.finish(exit_code=int(failed))


class Guarded:
    """An exporter whose failures never stop training.

    One that fails, to start or later, is started again at growing intervals; only a ConfigError on the first try
    reaches the user. One that does not close in time is left to itself.
    """

    def __init__(
        self,
        key: str,
        begin: Callable[[], Exporter],
        *,
        clock: Callable[[], float] = time.monotonic,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._key, self._begin, self._clock, self._close_timeout_s = key, begin, clock, close_timeout_s
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
            log.warning("metrics not exported, starting again later", exporter=self._key, exc_info=True)
            # TensorBoard's writer, for one, only raises an error again that it has once had.
            self._close_beside(failed=True)
            self._exporter = None
            self._postpone()

    def close(self, *, failed: bool) -> None:
        thread = self._close_beside(failed=failed)
        if thread is None:
            return
        thread.join(self._close_timeout_s)
        if thread.is_alive():
            log.warning(
                "exporter not closed in time: its last steps may be missing there",
                exporter=self._key,
                timeout_s=self._close_timeout_s,
            )

    def _close_beside(self, *, failed: bool) -> threading.Thread | None:
        if self._exporter is None:
            return None
        close = partial(self._close, self._exporter, failed=failed)
        thread = threading.Thread(target=close, name=f"close {self._key}", daemon=True)
        thread.start()
        return thread

    def _close(self, exporter: Exporter, *, failed: bool) -> None:
        try:
            exporter.close(failed=failed)
        except Exception:
            log.warning("exporter not closed", exporter=self._key, exc_info=True)

    def _try_to_begin(self) -> None:
        if self._exporter is not None or self._clock() < self._again_at:
            return
        try:
            self._exporter = self._begin()
        except ConfigError:
            raise
        except Exception:
            log.warning("exporter not started, retrying later", exporter=self._key, exc_info=True)
            self._postpone()

    def _postpone(self) -> None:
        self._again_at = self._clock() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def check_exporters(settings: schema.Config, *, load: Importer = import_module) -> None:
    """Raise ConfigError if a configured exporter is not installed."""
    for key, module in _configured(settings):
        try:
            load(module)
        except ImportError as error:
            raise ConfigError(
                f"metrics.{key}: not installed here ({error}); "
                f"`{install('trackers')}`, or remove metrics.{key} from the configuration"
            ) from error


def open_exporters(
    settings: schema.Config,
    *,
    run_uid: str,
    load: Importer = import_module,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[Exporter]:
    """Open the configured exporters, on rank 0, after `check_exporters`."""
    kinds: dict[str, Callable[..., Exporter]] = {
        "tensorboard": TensorBoard,
        "wandb": partial(WeightsAndBiases, run_uid=run_uid),
    }
    modules = [(key, load(module)) for key, module in _configured(settings)]
    return [Guarded(key, partial(kinds[key], settings, module), clock=clock) for key, module in modules]


def _configured(settings: schema.Config) -> list[tuple[str, str]]:
    return [(key, module) for key, module in _MODULES.items() if getattr(settings.metrics, key)]
