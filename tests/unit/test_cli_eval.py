"""`streamrl eval`: the weights that were meant, the configured sampling and rewards, and numbers that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.ops.cli.eval import permissions
from streamrl.ops.cli.main import main
from streamrl.workers.evaluate import summarise
from streamrl.workers.rewards.base import build_rewards
from tests.helpers import make_group, make_sample, make_ticket
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """A run that has made four steps, with checkpoints of two of them and an export."""
    tmp_path = tmp_path_factory.mktemp("run")
    target = tmp_path / "rewards.py"
    target.write_text(
        "def favourite(prompt, completion, token_ids, fields):\n    return float(completion.count('a'))\n"
    )
    config = make_replay_run(
        tmp_path,
        training=schema.Training(groups_per_step=4, max_steps=4),
        checkpoint=schema.Checkpoint(every_steps=2, keep_last=5),
        rewards={"favourite": schema.FunctionReward(type="function", target=f"{target}:favourite")},
        validation=schema.Validation(every_steps=0, at_start=False, sampling=schema.ValidationSampling(max_tokens=8)),
        num_prompts=10,
    )
    run_replay(config, make_recording(tmp_path / "recording", config, make_entries(config, range(16))))
    return config


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0, capsys.readouterr().err
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_checkpoint_is_scored_with_its_own_weights(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompts", run.data.train, "validation.sampling.num_samples=2"]
    output = tmp_path / "answers.jsonl"

    newest = evaluated(capsys, str(run.folder), *prompts, "--output", str(output))

    assert (newest["step"], newest["num_prompts"], newest["num_answered"], newest["num_samples"]) == (4, 10, 10, 20)
    assert newest["reward"] == pytest.approx(newest["rewards"]["favourite"])
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == [f"say {i}:" for i in range(10)]
    rewards = [sample["reward"] for answer in answers for sample in answer["samples"]]
    assert newest["reward"] == pytest.approx(sum(rewards) / len(rewards))

    older = tmp_path / "older.jsonl"
    assert evaluated(capsys, f"{run.folder}@2", *prompts, "--output", str(older))["step"] == 2
    exported = tmp_path / "exported.jsonl"
    evaluated(capsys, str(run.folder / "export"), *prompts, "--output", str(exported), "--config", config_file(run))
    base = tmp_path / "base.jsonl"
    evaluated(capsys, run.model.path, *prompts, "--output", str(base), "--config", config_file(run))
    assert exported.read_text() == output.read_text()  # greedy: the same weights give the same answers
    assert base.read_text() != output.read_text()
    assert older.read_text() != base.read_text()


def config_file(config: schema.Config) -> str:
    return str(config.folder / "config.yaml")


def test_a_table_for_people(run: schema.Config, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(run.folder), "--prompts", run.data.train, "--max-prompts", "3"]) == 0
    shown = capsys.readouterr().out
    assert "(step 4)" in shown
    assert "prompts answered  3 of 3" in shown
    assert "  favourite" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{model}"], "belongs to no run: say with --config FILE"),
        (["{folder}"], "name a file with --prompts FILE, or set data.validation"),
        (["{folder}@7", "--prompts", "x"], "keeps no checkpoint of step 7; it has 2, 4"),
        (["{folder}", "--prompts", "nowhere.jsonl"], "no such file: nowhere.jsonl"),
    ],
)
def test_mistakes_are_told_with_their_remedy(
    run: schema.Config, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(model=run.model.path, folder=run.folder) for argument in arguments]
    assert main(["eval", *filled]) == 2
    assert told in capsys.readouterr().err


def test_rewards_that_stay_out_end_it_with_what_they_said(
    run: schema.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = "rewards.judge={type: http, url: 'http://127.0.0.1:9', outage_s: 0.1}"
    assert main(["eval", str(run.folder), "--prompts", run.data.train, judge]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: reward 'judge': no replica gave a score for 0.1 s: http://127.0.0.1:9/score: Connect"
    )


def test_a_result_counts_what_failed_and_what_was_not_answered() -> None:
    groups = [
        make_group(make_ticket(0), samples=(make_sample(reward=1.0), make_sample(reward=0.0, finish_reason="length"))),
        make_group(make_ticket(1), samples=(make_sample(reward=2.0), make_sample(reward=2.0))),
        make_group(make_ticket(2), samples=(), error="no score"),
        None,
    ]

    result = summarise(groups, duration_s=1.0)

    assert (result.num_prompts, result.num_answered, result.num_failed) == (4, 2, 1)
    assert (result.reward, result.finished, result.num_samples) == (1.25, 0.75, 4)
    assert result.reward_error == pytest.approx(0.75)  # of the means 0.5 and 2


def test_every_replica_that_the_configuration_names_may_be_asked(run: schema.Config) -> None:
    service = schema.HttpReward(type="http", url="http://a:1", replicas=("http://b:2",))

    allowed = permissions(run.model_copy(update={"rewards": {**run.rewards, "judge": service}}))

    assert allowed.hosts == ("a:1", "b:2")
    build_rewards({"judge": service}, allowed, None)  # refuses a host that is not allowed


def test_nothing_answered_is_no_number() -> None:
    result = summarise([None, None], duration_s=1.0)
    assert (result.reward, result.reward_error, result.response_length, result.rewards) == (None, None, None, {})
