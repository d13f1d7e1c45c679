"""What a learner under torchrun leaves with W&B when it ends: a forked rank runs no `atexit`, on which W&B relies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.integration.learner_world import made_up_worker, make_run, output, running_learner
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay

PATIENCE_S, NAME = 240, "exported"
EXPORTED = schema.Metrics(wandb=schema.Wandb())
# Like wandb, which is installed nowhere here: what was logged stays in memory until the end, which takes a while.
STAND_IN = """
import atexit, json, time, types

errors = types.SimpleNamespace(UsageError=ValueError)
Settings = dict

class Run:
    def __init__(self, folder):
        self.file, self.logged = f"{folder}/wandb.json", []
        atexit.register(self.finish, 0)

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, metrics):
        self.logged.append(metrics["step"])

    def finish(self, exit_code):
        atexit.unregister(self.finish)
        time.sleep(2)  # the learner would have renewed its lease
        with open(self.file, "w") as file:
            json.dump({"steps": self.logged, "exit_code": exit_code}, file)

def init(dir, **arguments):
    return Run(dir)
"""


@pytest.fixture
def url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """The session's server, emptied again."""
    yield redis_server.url
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and in programs that are started."""
    place = tmp_path / "packages"
    place.mkdir()
    (place / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(place))
    spec = spec_from_file_location("wandb", place / "wandb.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "wandb", module)


@pytest.mark.usefixtures("stand_in")
def test_all_steps_of_a_run_arrive_and_it_counts_as_finished(url: str, tmp_path: Path) -> None:
    assert exported(url, tmp_path) == (0, {"steps": [1, 2, 3, 4, 5, 6], "exit_code": 0})
    with redis.Redis.from_url(url) as client:
        assert not client.exists(Keys(NAME).lease), "nobody renewed it meanwhile, or the next learner would wait"


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_fails_counts_as_failed(url: str, tmp_path: Path) -> None:
    absurd = schema.Training(groups_per_step=2, max_skipped_in_row=2)
    assert exported(url, tmp_path, scale=1e308, training=absurd) == (1, {"steps": [], "exit_code": 1})


@pytest.mark.usefixtures("stand_in")
def test_all_steps_of_a_replay_arrive_too(tmp_path: Path) -> None:
    config = make_replay_run(tmp_path, metrics=EXPORTED)
    assert (
        run_replay(config, make_recording(tmp_path / "recording", config, make_entries(config, range(24))))
        == "finished"
    )
    assert told(config) == {"steps": [1, 2, 3, 4, 5, 6], "exit_code": 0}


def exported(url: str, folder: Path, *, scale: float = 1.0, **sections: Any) -> tuple[int, dict[str, Any]]:
    """A whole run's exit code, and what W&B has of it."""
    config = make_run(folder, name=NAME, metrics=EXPORTED, **sections)
    with made_up_worker(config, url, scale=scale), running_learner(config, url, processes=1) as learner:
        code = learner.wait(PATIENCE_S)
    assert (config.folder / "wandb.json").exists(), output(config)
    return code, told(config)


def told(config: schema.Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.folder / "wandb.json").read_text())
    return found
