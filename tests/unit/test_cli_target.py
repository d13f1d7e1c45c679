"""Which run is meant: what a folder says of it, and what is told where it says nothing that can be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.ops.cli.main import main
from streamrl.ops.monitor.runs import find_target
from streamrl.protocol.transport.operator import operator
from streamrl.workers.main import main as worker


@pytest.mark.parametrize("command", ["status", "pause", "audit", "weights ls", "groups tail"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe", "it is not valid YAML"),
        (b"a: [1", "it is not valid YAML"),
        (b"- 1", "`name` or `redis.url` is missing"),
        (b"name: x", "`name` or `redis.url` is missing"),
    ],
)
def test_a_folder_whose_configuration_cannot_be_used_is_one_line(
    tmp_path: Path, command: str, content: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)

    assert main([*command.split(), str(tmp_path)]) == 2

    assert capsys.readouterr().err == f"error: {tmp_path / 'config.yaml'} is not the configuration of a run: {told}\n"


def test_a_folder_says_its_name_and_server_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: big\nredis: {url: 'redis://there:1'}\n")

    assert find_target(tmp_path, None, None).server() == "redis://there:1"
    assert find_target(tmp_path, None, None).run == "big"
    chosen = find_target(tmp_path, "redis://here:1", "other")
    assert (chosen.server(), chosen.run) == ("redis://here:1", "other")


def test_the_server_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_REDIS", "redis://there:1")

    assert find_target(None, None, "big").server() == "redis://there:1"
    assert worker.make_context("worker", ["--run", "big"]).params["redis_url"] == "redis://there:1"
    here = worker.make_context("worker", ["--run", "big", "--redis", "redis://here:1"])
    assert here.params["redis_url"] == "redis://here:1"


def test_an_operator_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as in a container that runs as any number

    assert operator().startswith(f"{os.getuid()}@")


@pytest.mark.parametrize("command", ["status", "stop", "audit", "groups tail"])
def test_a_name_that_is_nearly_a_runs_is_told_with_that(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    (tmp_path / "runs" / "toy" / "config.yaml").write_text("name: toy\nredis: {url: embedded}\n")
    for said, meant in (
        ("runs/toi", "; did you mean runs/toy?"),
        ("toy", "; did you mean runs/toy?"),
        ("runs/another", "; `streamrl runs ls` lists those in `runs`"),
    ):
        assert main([*command.split(), said]) == 2
        told = f"error: {said} is not the folder of a run: it does not exist{meant}\n"
        assert capsys.readouterr().err == told


def test_a_server_without_a_name_is_asked_for_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--redis", "redis://there:1"]) == 2
    assert "name the run in that Redis with --run NAME; `streamrl runs ls" in capsys.readouterr().err
