"""Metrics for other programs: asked for, missing, and failing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.metrics.exporters import Guarded, check_exporters, open_exporters
from tests.feed_world import Clock
from tests.learner_cases import learner_config


class UsageError(Exception):
    """As wandb calls what its user must mend."""


class FakeLibrary:
    """Both libraries, as far as they are used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[Mapping[str, float]] = []
        self.folder, self.flushed, self.begun = "", 0, {}
        self.trouble: Exception | None = None  # of whoever begins
        self.num_begun = 0
        self.errors = SimpleNamespace(UsageError=UsageError)

    def Settings(self, *, init_timeout: float) -> Mapping[str, float]:
        return {"init_timeout": init_timeout}

    def _begin(self) -> None:
        self.num_begun += 1
        if self.trouble is not None:
            raise self.trouble

    def SummaryWriter(self, folder: str) -> FakeLibrary:
        self._begin()
        self.folder = folder
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def init(self, **arguments: Any) -> FakeLibrary:
        self._begin()
        self.begun = arguments
        return self

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.append(metrics)


def config_with(tmp_path: Path, **settings: Any) -> schema.Config:
    return learner_config(tmp_path, dir=tmp_path, name="run", metrics=schema.Metrics(**settings))


def missing(name: str) -> Any:
    raise ImportError(f"No module named {name!r}")


def test_tensorboard_gets_each_metric_at_its_step_and_writes_it_out(tmp_path: Path) -> None:
    library = FakeLibrary()
    config = config_with(tmp_path, tensorboard=True)
    [exporter] = open_exporters(config, run_uid="uid", load=lambda _: library)
    exporter.step(3, {"train_optim/loss": 0.5})
    assert library.folder == str(config.folder / "tensorboard")
    assert library.scalars == [("train_optim/loss", 0.5, 3)]
    assert library.flushed == 1


def test_wandb_goes_on_with_the_run_of_this_uid(tmp_path: Path) -> None:
    library = FakeLibrary()
    config = config_with(tmp_path, wandb=schema.Wandb(project="mine", mode="offline"))
    [exporter] = open_exporters(config, run_uid="uid", load=lambda _: library)
    exporter.step(3, {"train_optim/loss": 0.5})
    expected = {"project": "mine", "mode": "offline", "id": "uid", "resume": "allow", "name": "run"}
    assert expected.items() <= library.begun.items()
    assert library.logged == [{"train_optim/loss": 0.5, "step": 3}]


@pytest.mark.parametrize(("key", "settings"), [("tensorboard", True), ("wandb", schema.Wandb())])
def test_what_is_not_installed_is_a_mistake_with_a_remedy(tmp_path: Path, key: str, settings: Any) -> None:
    config = config_with(tmp_path, **{key: settings})
    with pytest.raises(ConfigError, match=rf"metrics\.{key}: not installed .*\[trackers\]"):
        check_exporters(config, load=missing)


def test_nothing_is_imported_that_nobody_asked_for(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    check_exporters(config, load=missing)
    assert open_exporters(config, run_uid="uid", load=missing) == []


def test_an_exporter_that_fails_stops_nothing() -> None:
    class Failing:
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("no space left on device")

    Guarded("tensorboard", Failing).step(1, {})


@pytest.mark.parametrize(("key", "settings"), [("tensorboard", True), ("wandb", schema.Wandb())])
def test_one_that_cannot_begin_stops_nothing_and_is_tried_again_ever_more_rarely(
    tmp_path: Path, key: str, settings: Any
) -> None:
    library, clock = FakeLibrary(), Clock()
    library.trouble = OSError("the service is away")
    config = config_with(tmp_path, **{key: settings})
    [exporter] = open_exporters(config, run_uid="uid", load=lambda _: library, clock=clock)
    for step in range(1000):
        clock.advance(10.0)
        exporter.step(step, {"train_optim/loss": 0.5})
    assert 5 <= library.num_begun <= 10
    library.trouble = None
    clock.advance(3600.0)
    exporter.step(1000, {"train_optim/loss": 0.25})
    assert library.scalars == [("train_optim/loss", 0.25, 1000)] or library.logged[0]["train_optim/loss"] == 0.25


def test_what_the_user_of_wandb_must_mend_is_a_mistake_with_a_remedy(tmp_path: Path) -> None:
    library = FakeLibrary()
    library.trouble = UsageError("No API key configured. Use `wandb login` to log in.")
    config = config_with(tmp_path, wandb=schema.Wandb())
    with pytest.raises(ConfigError, match=r"metrics\.wandb: No API key configured.*WANDB_API_KEY.*mode=offline"):
        open_exporters(config, run_uid="uid", load=lambda _: library)


def test_a_mistake_that_shows_only_later_stops_nothing(tmp_path: Path) -> None:
    library, clock = FakeLibrary(), Clock()
    library.trouble = OSError("the service is away")
    [exporter] = open_exporters(
        config_with(tmp_path, wandb=schema.Wandb()), run_uid="uid", load=lambda _: library, clock=clock
    )
    library.trouble = UsageError("No API key configured")
    clock.advance(3600.0)
    exporter.step(1, {"train_optim/loss": 0.5})
    assert library.num_begun == 2
