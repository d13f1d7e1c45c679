"""`streamrl audit` finds the server and the folder of a run by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
import redis.asyncio

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.learner.metrics.keepsakes import note_state
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run
from tests.redis.run_world import RunWorld


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    world = RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)
    world.learner.plan()
    return world


def audited(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()  # what the learner has logged
    assert main(["audit", *arguments, "--json"]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def test_by_the_name_of_the_run(world: RunWorld, capsys: pytest.CaptureFixture[str]) -> None:
    told = audited(capsys, "--redis", world.url, "--run", world.keys.name)
    assert (told["folder"], told["waiting"]) == (str(world.config.folder), 6)


def test_by_its_folder_and_a_server(world: RunWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert audited(capsys, str(world.config.folder), "--redis", world.url)["waiting"] == 6


def test_by_its_folder_alone_with_the_server_of_its_configuration(
    world: RunWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config.model_copy(update={"redis": schema.Redis(url=world.url)})
    (config.folder / "config.yaml").write_text(dump_config(config))
    assert audited(capsys, str(config.folder))["waiting"] == 6


def test_an_ended_run_that_its_server_no_longer_holds_is_audited_from_its_folder(
    world: RunWorld, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = world.config.folder
    config = world.config.model_copy(update={"redis": schema.Redis(url=world.url)})
    (folder / "config.yaml").write_text(dump_config(config))
    note_state(folder, "running", term=1)
    remove_run(client, world.keys)
    assert main(["audit", str(folder)]) == 2
    assert "it was removed; --folder-only audits without it" in capsys.readouterr().err
    note_state(folder, "finished", term=1)
    told = audited(capsys, str(folder))
    assert told["redis"] is None
    assert told["unchecked"]


def test_by_its_folder_alone_with_an_embedded_server_while_that_runs(
    tmp_path: Path, async_client: redis.asyncio.Redis, redis_settings: schema.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "embedded"
    with EmbeddedRedis.start(folder / "redis") as server, connect(server.url, redis_settings) as client:
        world = RunWorld(tmp_path, client=client, async_client=async_client, keys=Keys("embedded"), url=server.url)
        world.learner.plan()
        (folder / "config.yaml").write_text(dump_config(world.config))
        assert audited(capsys, str(folder))["redis"] == server.url
    assert audited(capsys, str(folder))["redis"] is None


def test_a_folder_that_cannot_be_seen_from_here_must_be_given(
    world: RunWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.config.folder / "run.json").unlink()
    assert main(["audit", "--redis", world.url, "--run", world.keys.name]) == 2
    assert "give it as RUN_FOLDER" in capsys.readouterr().err
