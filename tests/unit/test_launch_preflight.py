"""What is checked before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from streamrl.errors import ResourceError
from streamrl.extras import need
from streamrl.files import only_one
from streamrl.ops.cli.main import main

CONFIG = """
name: checked
dir: {dir}
model: {{path: {dir}/model}}
data: {{train: {dir}/train.jsonl}}
validation: {{every_steps: 0}}
worker: {{engine: transformers}}
rewards:
  exact: {{type: function, target: exact_match}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose files look right."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(dir=tmp_path))
    return file


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that `streamrl up` says; it must have ended with 2."""
    assert main(["up", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("redis.url=redis://127.0.0.1:1/0", "Redis at 127.0.0.1:1/0"),
        ("redis.url=unix:///nowhere/redis.sock", "unix:///nowhere/redis.sock"),
        ("data.train=missing.jsonl", "missing.jsonl"),
        ("model.path=./no-model", "no-model"),
        ("sampling.num_samples=1", "sampling.num_samples"),
        ("sampling.temprature=1", "did you mean 'sampling.temperature'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(
    config: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    line = mistake(capsys, str(config), override, "redis.connect_timeout_s=0.2")

    assert line.startswith("error: ")
    assert said in line
    assert not (config.parent / "checked").exists()


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in mistake(capsys, "nowhere.yaml")


def test_a_taken_port_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with config.open("a") as file:
            file.write(
                f"  rm: {{type: http, url: local}}\nreward_server: {{model: {config.parent}/model, port: {port}}}"
            )

        line = mistake(capsys, str(config))

    assert f"reward_server.port = {port}" in line
    assert "Address already in use; choose another one, or 0" in line


def test_a_missing_package_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(ResourceError, match=r"worker.engine needs no_such_thing, not.*streamrl\[worker-cpu\]"):
        need("worker.engine", "json", "no_such_thing", extra="worker-cpu")


def test_a_folder_is_run_by_one_launcher_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    with (
        only_one(folder, "mine"),
        pytest.raises(ResourceError, match=rf"the run 'mine' is live: .*pid {os.getpid()}"),
        only_one(folder, "mine"),
    ):
        pass

    with only_one(folder, "mine"):
        assert (folder / "up.lock").read_text() == str(os.getpid())
