"""Metrics for other programs: asked for, missing, and failing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import ConfigError, Replaced, TrainingError
from streamrl.learner.metrics.exporters import ExporterDouble, Guarded, check_exporters, open_exporters
from streamrl.learner.metrics.record import Recorder
from tests.conductor_world import FakeStream, FakeTokenizer
from tests.feed_world import Clock
from tests.helpers import wait_until
from tests.learner_cases import learner_config


class UsageError(Exception):
    """As wandb calls what its user must mend."""


class FakeLibrary:
    """Both libraries, as far as they are used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[Mapping[str, float]] = []
        self.defined: list[tuple[str, str | None]] = []  # metrics, and what their curves are drawn against
        self.folder, self.flushed, self.begun = "", 0, {}
        self.purged_from: int | None = None
        self.ended: list[str | int] = []
        self.trouble: Exception | None = None  # of whoever begins
        self.num_begun = 0
        self.errors = SimpleNamespace(UsageError=UsageError)

    def Settings(self, *, init_timeout: float) -> Mapping[str, float]:
        return {"init_timeout": init_timeout}

    def _begin(self) -> None:
        self.num_begun += 1
        if self.trouble is not None:
            raise self.trouble

    def SummaryWriter(self, folder: str, *, purge_step: int) -> FakeLibrary:
        self._begin()
        self.folder, self.purged_from = folder, purge_step
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def init(self, **arguments: Any) -> FakeLibrary:
        self._begin()
        self.begun = arguments
        return self

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.append(metrics)

    def close(self) -> None:
        self.ended.append("closed")

    def finish(self, *, exit_code: int) -> None:
        self.ended.append(exit_code)


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
    assert library.purged_from == 3, "steps that an earlier learner made and lost are drawn once"
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


def test_wandb_draws_all_curves_against_the_step_and_not_the_number_of_reports(tmp_path: Path) -> None:
    library = FakeLibrary()
    open_exporters(config_with(tmp_path, wandb=schema.Wandb()), run_uid="uid", load=lambda _: library)
    assert library.defined == [("step", None), ("*", "step")]


@pytest.mark.parametrize(("key", "settings"), [("tensorboard", True), ("wandb", schema.Wandb())])
def test_what_is_not_installed_is_a_mistake_with_a_remedy(tmp_path: Path, key: str, settings: Any) -> None:
    config = config_with(tmp_path, **{key: settings})
    with pytest.raises(ConfigError, match=rf"metrics\.{key}: not installed .*\[trackers\]"):
        check_exporters(config, load=missing)


def test_nothing_is_imported_that_nobody_asked_for(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    check_exporters(config, load=missing)
    assert open_exporters(config, run_uid="uid", load=missing) == []


class Failing(ExporterDouble):
    """Takes one step, and fails from then on, as TensorBoard's writer does once its disk was full."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.steps:
            raise OSError("no space left on device")
        super().step(step, metrics)


def keeping(begun: list[Failing]) -> Callable[[], Failing]:
    def begin() -> Failing:
        begun.append(Failing())
        return begun[-1]

    return begin


def test_an_exporter_that_fails_stops_nothing_and_a_new_one_takes_its_place_after_a_pause() -> None:
    exporters, clock = list[Failing](), Clock()
    exporter = Guarded("tensorboard", keeping(exporters), clock=clock)
    for step in range(10):
        exporter.step(step, {})
        clock.advance(10.0)
    assert [list(each.steps) for each in exporters] == [[0]], "none begins before the pause is over"
    wait_until(lambda: exporters[0].ends == [True], description="the failed exporter is closed")

    clock.advance(300.0)
    exporter.step(10, {})
    assert [list(each.steps) for each in exporters] == [[0], [10]]
    exporter.close(failed=False)
    assert exporters[1].ends == [False]


def test_one_that_fails_again_and_again_is_begun_ever_more_rarely() -> None:
    begun, clock = list[Failing](), Clock()
    exporter = Guarded("tensorboard", keeping(begun), clock=clock)
    for step in range(1000):
        clock.advance(10.0)
        exporter.step(step, {})
    assert 5 <= len(begun) <= 10


def test_one_that_fails_to_close_stops_nothing() -> None:
    class NotClosing(ExporterDouble):
        def close(self, *, failed: bool) -> None:
            raise OSError("no space left on device")

    with capture_logs() as logs:
        Guarded("tensorboard", NotClosing).close(failed=False)
    assert [line["event"] for line in logs] == ["exporter not closed"]


def test_one_that_does_not_close_is_left_to_itself() -> None:
    class Hanging(ExporterDouble):
        def close(self, *, failed: bool) -> None:
            released.wait()

    released = threading.Event()
    with capture_logs() as logs:
        Guarded("wandb", Hanging, close_timeout_s=0.01).close(failed=False)
    released.set()
    assert [line["event"] for line in logs] == ["exporter not closed in time: its last steps may be missing there"]


def test_one_that_never_began_has_nothing_to_close(tmp_path: Path) -> None:
    library = FakeLibrary()
    library.trouble = OSError("the service is away")
    config = config_with(tmp_path, wandb=schema.Wandb())
    [exporter] = open_exporters(config, run_uid="uid", load=lambda _: library)
    exporter.close(failed=False)
    assert library.ended == []


@pytest.mark.parametrize(("failed", "exit_code"), [(False, 0), (True, 1)])
def test_both_are_told_of_the_end(tmp_path: Path, failed: bool, exit_code: int) -> None:
    library = FakeLibrary()
    config = config_with(tmp_path, tensorboard=True, wandb=schema.Wandb())
    for exporter in open_exporters(config, run_uid="uid", load=lambda _: library):
        exporter.step(1, {"train_optim/loss": 0.5})
        exporter.close(failed=failed)
    assert library.ended == ["closed", exit_code]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (None, [False]),
        (TrainingError("absurd steps"), [True]),
        (KeyError("a mistake of ours"), [True]),
        (Replaced("the newer learner goes on with the same run of W&B"), []),
    ],
)
def test_exporters_close_when_the_learner_ends_unless_another_has_the_run(
    tmp_path: Path, error: Exception | None, ends: list[bool]
) -> None:
    exporter = ExporterDouble()
    recorder = Recorder(folder=tmp_path, journal=FakeStream(), decoder=FakeTokenizer(), term=1, exporters=[exporter])
    with nullcontext() if error is None else pytest.raises(type(error)), recorder.exporting():
        recorder.step(1, {"train_optim/loss": 0.5})
        assert exporter.ends == []
        if error is not None:
            raise error
    assert (exporter.steps, exporter.ends) == ({1: {"train_optim/loss": 0.5}}, ends)


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
