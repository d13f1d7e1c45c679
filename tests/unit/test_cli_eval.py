"""`streamrl eval`: the weights that were meant, the configured sampling and rewards, and numbers that add up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.load import as_overrides, dump_config
from streamrl.config.places import granted
from streamrl.errors import DataError
from streamrl.ops.cli.main import main
from streamrl.ops.cli.models.subject import Subject
from streamrl.workers.engines.model import read_model
from streamrl.workers.rewards.build import build_rewards
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """A run that has made four steps, with checkpoints of two of them and an export."""
    return make_trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """The same with adapters, whose alpha makes them felt."""
    tmp_path = tmp_path_factory.mktemp("adapted")
    lora = schema.Lora(rank=4, alpha=4000.0)
    return make_trained(tmp_path, model=schema.Model(path=str(tmp_path / "model"), dtype="float32", lora=lora))


def make_trained(tmp_path: Path, **sections: Any) -> schema.Config:
    target = tmp_path / "rewards.py"
    target.write_text(
        "def favourite(prompt, completion, token_ids, fields):\n    return float(completion.count('a'))\n"
    )
    fields: dict[str, Any] = {
        "training": schema.Training(groups_per_step=4, max_steps=4),
        "checkpoint": schema.Checkpoint(every_steps=2, keep_last=5),
        "rewards": {"favourite": schema.FunctionReward(type="function", target=f"{target}:favourite")},
        "validation": schema.Validation(
            every_steps=0, at_start=False, sampling=schema.ValidationSampling(max_tokens=8)
        ),
    }
    config = make_replay_run(tmp_path, num_prompts=10, **{**fields, **sections})
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
    prompts = ["--prompts", run.data.train]
    output = tmp_path / "answers.jsonl"

    newest = evaluated(capsys, str(run.folder), *prompts, "--output", str(output))

    assert (newest["step"], newest["num_prompts"], newest["num_answered"], newest["num_samples"]) == (4, 10, 10, 10)
    assert newest["reward"] == pytest.approx(newest["rewards"]["favourite"])
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == [f"say {i}:" for i in range(10)]
    samples = [sample for answer in answers for sample in answer["samples"]]
    assert newest["reward"] == pytest.approx(sum(sample["reward"] for sample in samples) / len(samples))
    for sample in samples:
        assert sample["rewards"] == {"favourite": sample["reward"]} == {"favourite": sample["completion"].count("a")}
        assert sample["finish_reason"] in ("stop", "length")
        assert 1 <= len(sample["token_ids"]) <= 8
    tokenizer = read_model(run.model.path, trust_remote_code=False).tokenizer
    assert tokenizer(answers[3]["prompt"])["input_ids"] == answers[3]["prompt_token_ids"]

    older = tmp_path / "older.jsonl"
    assert evaluated(capsys, f"{run.folder}@2", *prompts, "--output", str(older))["step"] == 2
    exported = tmp_path / "exported.jsonl"
    evaluated(capsys, str(run.folder / "export"), *prompts, "--output", str(exported), "--config", config_file(run))
    base = tmp_path / "base.jsonl"
    evaluated(capsys, run.model.path, *prompts, "--output", str(base), "--config", config_file(run))
    assert exported.read_text() == output.read_text()  # greedy: the same weights give the same answers
    assert base.read_text() != output.read_text()
    assert older.read_text() != base.read_text()


def answers_of(capsys: pytest.CaptureFixture[str], output: Path, *words: str) -> list[list[dict[str, Any]]]:
    """Evaluate; return the samples of each prompt."""
    evaluated(capsys, *words, "--output", str(output))
    return [json.loads(line)["samples"] for line in output.read_text().splitlines()]


def test_checkpoints_keep_their_own_models_whatever_the_configuration_says_of_another(
    run: schema.Config, adapted: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    make_model(other, hidden=32, seed=7)
    lora = schema.Lora(rank=4, alpha=1.0)
    file = tmp_path / "other.yaml"
    another = {"model": schema.Model(path=str(other), dtype="float32", lora=lora)}
    file.write_text(dump_config(adapted.model_copy(update=another)))
    output, prompts = tmp_path / "answers.jsonl", ["--prompts", run.data.train]
    subjects = [str(run.folder), str(adapted.folder), str(other)]
    alone = [answers_of(capsys, output, subject, *prompts) for subject in subjects[:2]]

    together = answers_of(capsys, output, *subjects, *prompts, "--config", str(file))

    assert [together[:10], together[10:20]] == alone
    assert alone[0] != alone[1] != together[20:]
    explicit = answers_of(capsys, output, subjects[1], *prompts, "--config", str(file), "model.lora.alpha=1.0")
    assert explicit != alone[1]


def test_a_checkpoint_that_another_version_made_is_of_its_runs_model(
    run: schema.Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_be_read(subject: Subject) -> schema.Config:
        raise DataError("it was made by another version")

    monkeypatch.setattr("streamrl.ops.cli.models.eval_subjects.settings_of", cannot_be_read)
    words = [str(run.folder), "--prompts", run.data.train, "--max-prompts", "1", "--config", config_file(run)]
    assert evaluated(capsys, *words)["num_answered"] == 1


def test_runs_that_are_scored_otherwise_are_not_compared(
    run: schema.Config, adapted: schema.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run.folder), str(adapted.folder), "--prompts", run.data.train]) == 2
    told = capsys.readouterr().err
    assert "cannot be compared: their runs differ in rewards.favourite.target; " in told
    assert "--config FILE" in told


def test_settings_of_the_run_that_no_evaluation_uses_do_not_stand_in_its_way(
    run: schema.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    unused = {
        "checkpoint.best_by": "val_rollouts/pass_at_by_dataset/sums/8",  # of a validation on other prompts
        "worker": {"hosts": 2, "gpus": 4, "engine_args": {"tensor_parallel_size": 8}},
        "learner": {"processes": 8, "gpus": 8, "layout": {"tensor": 8}},
        "teacher.path": "gone",
        "sampling.max_tokens": 5000,  # more than the model's positions
        "metrics.wandb": {},
    }
    told = evaluated(capsys, str(run.folder), "--prompts", run.data.train, "--max-prompts", "1", *as_overrides(unused))
    assert told["num_answered"] == 1


def config_file(config: schema.Config) -> str:
    return str(config.folder / "config.yaml")


def test_a_table_for_people(run: schema.Config, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(run.folder), "--prompts", run.data.train, "--max-prompts", "3"]) == 0
    shown, notices = capsys.readouterr()
    assert "(step 4)" in shown
    assert "prompts answered  3 of 3" in shown
    assert f"{run.data.train}: the first 3 of 10 prompts are used (validation.max_prompts)" in notices
    assert "  favourite" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{model}"], "belongs to no run: name a configuration"),
        (
            ["{model}", "--config", "{folder}/config.yaml", "model.path=other"],
            "model.path=other: does not apply to {model}, which is a whole model; leave it out",
        ),
        (["{folder}"], "name a file with --prompts FILE, or set data.validation"),
        (["{folder}@7", "--prompts", "x"], "has no checkpoint of step 7; it has 2, 4"),
        (["{folder}", "--prompts", "nowhere.jsonl"], "no such file: nowhere.jsonl"),
        (["{folder}", "--prompts", "{data}", "validation.sampling.min_tokens=9"], "must not exceed"),
        (["{folder}", "--prompts", "{data}", "rewards.favourite.target=gone.py:f"], "'gone.py': there is no such file"),
        (["{folder}", "--prompts", "{data}", "rewards.favourite.target=exact"], "did you mean 'exact_match'"),
        (["{folder}", "--prompts", "{data}", "rewards.favourite.options={{x: 1}}"], "unexpected keyword argument 'x'"),
    ],
)
def test_mistakes_are_told_with_their_remedy(
    run: schema.Config, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(model=run.model.path, folder=run.folder, data=run.data.train) for argument in arguments]
    assert main(["eval", *filled]) == 2
    assert told.format(model=run.model.path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mistake", "exit_code"),
    [
        ("rewards.favourite.options={x: 1}", 2),
        ("rewards.judge={type: http, url: 'http://127.0.0.1:9', outage_s: 0.1}", 1),
    ],
)
def test_what_is_wrong_is_found_before_anything_heavy_is_imported(
    run: schema.Config, mistake: str, exit_code: int
) -> None:
    words = ["eval", str(run.folder), "--prompts", run.data.train, mistake]
    told = subprocess.run(
        [sys.executable, "-c", f"{COUNTED}\nprint(main({words!r}), *HEAVY & set(sys.modules))"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert told.stdout.split() == [str(exit_code)], told.stdout + told.stderr


COUNTED = """
import sys
from streamrl.ops.cli.main import main
HEAVY = {"torch", "transformers", "vllm"}
"""


def test_data_of_training_need_not_be_there(
    run: schema.Config, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    moved = tmp_path / "prompts.jsonl"
    moved.write_text(Path(run.data.train).read_text())
    told = evaluated(capsys, str(run.folder), "--prompts", str(moved), "data.train=gone.jsonl", "--max-prompts", "2")
    assert told["num_answered"] == 2


def test_rewards_that_stay_out_end_it_with_what_they_said(
    run: schema.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = "rewards.judge={type: http, url: 'http://127.0.0.1:9', outage_s: 0.1}"
    assert main(["eval", str(run.folder), "--prompts", run.data.train, judge]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: reward 'judge': no replica answered for 0.1 s: http://127.0.0.1:9/score: Connect")


def test_a_reward_that_nobody_can_reach_is_told_at_once_however_long_a_run_would_wait(
    run: schema.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = "rewards.judge={type: http, url: 'http://127.0.0.1:9'}"
    assert main(["eval", str(run.folder), "--prompts", run.data.train, judge, "--patience-s", "1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: reward 'judge': http://127.0.0.1:9/score: Connect")
    assert error.endswith("; no score for 1 s (--patience-s)")


def test_what_failed_is_told_with_its_first_reason(run: schema.Config, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run.folder), "--prompts", run.data.train, "--max-prompts", "3"]
    assert main([*words, "rewards.right={type: function, target: exact_match}"]) == 1
    shown = capsys.readouterr().out
    assert "failed            3 prompts had no sample with a score; the first error: 1 of 1 samples failed: " in shown
    assert "reward 'right': the function failed: ValueError: the prompt's row has no field 'answer'" in shown


def test_every_replica_that_the_configuration_names_may_be_asked(run: schema.Config) -> None:
    service = schema.HttpReward(type="http", url="http://a:1", replicas=("http://b:2",))

    allowed = granted(run.model_copy(update={"rewards": {**run.rewards, "judge": service}}))

    assert allowed.hosts == ("a:1", "b:2")
    build_rewards({"judge": service}, allowed, None)  # refuses a host that is not allowed


def test_several_checkpoints_are_a_table_and_a_plot(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"few": {"path": str(run.data.train)}, "again": {"path": str(run.data.train)}}
    words = [f"{run.folder}@all", f"data.validation={json.dumps(sets)}", "validation.max_prompts=4"]
    words += ["validation.pass_by=favourite", "validation.pass_score=1", "validation.answer=a+"]
    words += ["validation.sampling.num_samples=2", "validation.sampling.greedy=false"]
    output, plot = tmp_path / "answers.jsonl", tmp_path / "steps.png"

    told = evaluated(capsys, *words, "--output", str(output), "--plot", str(plot))

    first, second = told["checkpoints"]
    assert ([first["step"], second["step"]], told["prompts"]) == ([2, 4], [run.data.train] * 2)
    for one in (first, second):
        assert list(one["datasets"]) == ["few", "again"]
        assert (one["num_prompts"], one["datasets"]["few"]["num_prompts"]) == (8, 4)
        share = one["pass_at"]["1"]
        assert share["low"] <= share["share"] <= share["high"]
        assert share["share"] <= one["pass_at"]["2"]["share"]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["dataset"] for line in lines[:8]] == ["few"] * 4 + ["again"] * 4
    assert {line["checkpoint"] for line in lines} == {f"{run.folder}@{step} (step {step})" for step in (2, 4)}
    assert plot.read_bytes().startswith(b"\x89PNG")

    assert main(["eval", *words]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()[1:]
    assert heads.split()[:4] == ["checkpoint", "reward", "pass@1", "pass@2"]
    assert [row.split()[0] for row in rows] == [f"{run.folder}@2", f"{run.folder}@4"]


def test_what_no_plot_can_be_made_for_is_told_before_the_work(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "answers.jsonl"
    words = ["eval", str(run.folder), "--prompts", run.data.train, "--output", str(output)]
    assert main([*words, "--plot", str(tmp_path / "steps.gif")]) == 2
    assert "must end in .png" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    assert main([*words, "--plot", str(tmp_path / "steps.png")]) == 2
    assert "error: a plot needs matplotlib" in capsys.readouterr().err
    assert not output.exists()


def test_a_plot_that_cannot_be_written_costs_no_results(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, output = tmp_path / "steps.png", tmp_path / "answers.jsonl"
    plot.symlink_to(tmp_path / "gone" / "steps.png")
    words = [str(run.folder), "--prompts", run.data.train, "--output", str(output), "--plot", str(plot)]
    with pytest.raises(FileNotFoundError):
        main(["eval", *words])
    assert "prompts answered  10 of 10" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == 10


def test_one_that_cannot_be_read_costs_the_others_nothing(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, output = tmp_path / "broken", tmp_path / "answers.jsonl"
    shutil.copytree(run.folder / "export", broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    words = [f"{run.folder}@2", str(broken), "--config", config_file(run), "--max-prompts", "2"]
    words += ["--prompts", run.data.train]
    capsys.readouterr()

    assert main(["eval", *words, "--output", str(output), "--json"]) != 0

    said = capsys.readouterr()
    [only] = json.loads(said.out)["checkpoints"]
    assert (only["step"], only["num_answered"]) == (2, 2)
    assert len(output.read_text().splitlines()) == 2
    assert f"error: model.path '{broken}' cannot be loaded as a causal language model" in said.err
