"""`streamrl eval` of a run with a reward server of its own: it is started for the evaluation, and ends with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import UserError
from streamrl.ops.cli.main import main
from streamrl.ops.launch.reward_part import reward_server
from tests.helpers import wait_until
from tests.integration.learner_world import make_run
from tests.tiny_rewards import make_reward_model
from tests.unit.test_rewards_functions import alive


def test_the_runs_reward_server_is_started_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = schema.OwnRewardServer(
        model=str(make_reward_model(tmp_path / "judge")), port=9
    )  # as a live run may have it
    config = make_run(
        tmp_path,
        name="judged",
        num_prompts=3,
        rewards={"judge": schema.HttpReward(type="http", url="local")},
        reward_server=server,
    )
    output = tmp_path / "answers.jsonl"
    words = ["eval", config.model.path, "--config", str(config.folder / "config.yaml"), "--json"]
    words += ["validation.sampling.max_tokens=8"]
    assert main([*words, "--prompts", str(config.data.train), "--output", str(output)]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["num_answered"] == 3
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(set(answer["samples"][0]["rewards"]) == {"judge"} for answer in answers)
    assert [path.name for path in config.folder.iterdir()] == ["config.yaml"]


def test_a_server_is_ready_inside_and_gone_after(tmp_path: Path) -> None:
    said: list[str] = []
    server = schema.OwnRewardServer(model=str(make_reward_model(tmp_path / "judge")))
    with reward_server(server, notify=said.append, show=said.append) as part:
        assert part.url is not None
        assert part.url.startswith("http://127.0.0.1:")
        pid = part.supervised.process.pid
        assert alive(pid)
    wait_until(lambda: not alive(pid), description="the server is gone")
    assert any("loading the reward model" in text for text in said)


def test_a_server_that_cannot_load_its_model_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"reward/0: .*nowhere"),
        reward_server(schema.OwnRewardServer(model=str(tmp_path / "nowhere")), notify=print, show=lambda text: None),
    ):
        pass
