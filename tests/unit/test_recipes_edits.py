"""The recipes of `docs/recipes.md` that edit the project, each followed in a copy of it; and that of a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.config.places import granted
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.build import build_rewards
from tests.recipes_page import PAGE, blocks, edits, followed, run, steps, write

COMMANDS = "from streamrl.ops.cli.main import main as streamrl\n"
PLAIN = """
model: {path: model}
data: {train: prompts.jsonl}
"""


def test_a_reward_of_ones_own_scores_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = [edit for edit in edits("Add a reward") if "/" not in edit.file]
    assert [edit.file for edit in own] == ["my_rewards.py"]
    write(own[0], tmp_path)
    (step,) = steps("Add a reward")
    assert "assert" in step
    run(tmp_path, "-c", step)
    (block,) = blocks("Add a reward", "yaml")
    Path("run.yaml").write_text(PLAIN + block)
    config = load_config("run.yaml").config

    with pytest.raises(ConfigError) as refused:
        build_rewards(config.rewards, Permissions(), None)
    told = str(refused.value).rpartition("with ")[2]
    assert told.startswith("--allow-reward-code ")
    assert f"`{told}`" in PAGE.read_text()
    assert granted(config) == Permissions(reward_code=(told.split()[1],))
    assert build_rewards(config.rewards, granted(config), None)


SCORED = """
import asyncio
from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.rewards.functions import build_function_reward
from tests.tiny_rewards import make_item

async def score():
    reward = build_function_reward("x", schema.FunctionReward(type="function", target="{target}"), Permissions({code}))
    await reward.start()
    try:
        return await reward.score(make_item({completion!r}, answer="4"))
    finally:
        await reward.close()

print(asyncio.run(score()))
"""


def test_a_reward_of_ones_own_runs_in_its_process(tmp_path: Path) -> None:
    write(edits("Add a reward")[0], tmp_path)
    target = "my_rewards.py:near"
    told = run(tmp_path, "-c", SCORED.format(target=target, code=f"reward_code=({target!r},)", completion="5"))
    assert told == "0.9\n"


def test_a_built_in_reward_needs_nobodys_word(tmp_path: Path) -> None:
    root = followed("Add a reward", tmp_path)
    assert run(root, "-c", SCORED.format(target="contains", code="", completion="it is 4")) == "1.0\n"


ANSWERED = """
import asyncio
from pathlib import Path
import numpy as np
from streamrl.config.load import load_config
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.eval_result import Answers, EvalPrompt
from streamrl.workers.evaluate import evaluate
from streamrl.permissions import Permissions
from streamrl.workers.rewards.build import build_rewards

class Letters:
    chat_template = None

    def decode(self, token_ids, skip_special_tokens):
        return "".join("abc."[i] for i in token_ids)

config = load_config("run.yaml", ["rewards.model=null"]).config
facts = dict(path="", tokenizer=Letters(), stop_ids=(3,), vocab_size=4, max_positions=None, fingerprint="")
prompts = [EvalPrompt(text="a", token_ids=np.array([0], dtype=np.int32), fields={"answer": "b"}) for _ in range(8)]
model = ModelFacts(**facts, trust_remote_code=False)
answers = Answers(prompts, config=config, model=model)
asyncio.run(
    evaluate(
        answers,
        config=config,
        model=model,
        weights=Path("none"),
        step=3,
        rewards=build_rewards(config.rewards, Permissions(), None),
        permissions=Permissions(),
    )
)
result = answers.result()
assert result.num_answered == 8, result
for sample in (sample for group in result.groups for sample in group.samples):
    assert 1 <= len(sample.token_ids) <= 12
    assert np.allclose(sample.logprobs, np.log(1 / 4))
    assert [(span.step, span.start, span.end) for span in sample.spans] == [(3, 0, len(sample.token_ids))]
    assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == 3)
assert streamrl(["config", "show", "run.yaml"]) == 0
assert streamrl(["config", "show", "run.yaml", "worker.engine=x"]) == 2
assert streamrl(["eval", "--help"]) == 0
"""


def test_an_engine_is_one_line_and_one_file_and_answers(tmp_path: Path) -> None:
    root = followed("Add an engine", tmp_path)
    assert steps("Add an engine") == []
    (block,) = blocks("Add an engine", "yaml")
    (root / "run.yaml").write_text(f"extends: conf/quickstart.yaml\n{block}")
    told = run(root, "-c", COMMANDS + ANSWERED)
    assert "engine: uniform" in told
    assert "must be 'vllm' or 'transformers' or 'uniform'" in told
    assert "[transformers|uniform|vllm]" in told


RECORDED = """
from pathlib import Path
from streamrl.learner.metrics.record import Recorder
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.process.ranks import World
import torch
from tests.learner_cases import random_groups

class Journal:
    def record(self, step, metrics):
        pass

tally = Tally(sources=(), step=5, is_dead=lambda version, step: False)
for group in random_groups(3):
    tally.add_group(group, np.zeros(len(group.samples)), np.zeros(len(group.samples)))
metrics = tally.metrics(World(rank=0, size=1, device=torch.device("cpu")))
Recorder(folder=Path("."), journal=Journal(), decoder=None, term=1).step(6, metrics)
samples = [sample for group in random_groups(3) for sample in group.samples]
print(np.mean([len(set(sample.token_ids.tolist())) / len(sample.token_ids) for sample in samples]))
assert streamrl(["export", "grafana"]) == 0
"""


def test_a_metric_comes_out_in_the_runs_folder_and_its_chart_in_grafana(tmp_path: Path) -> None:
    root = followed("Add a metric", tmp_path)
    (step,) = steps("Add a metric")
    mean, _, dashboard = run(root, "-c", COMMANDS + step + RECORDED).partition("\n")
    recorded = json.loads((root / "metrics.jsonl").read_text())
    assert recorded["train_rollouts/variety"] == pytest.approx(float(mean))
    assert 0 < float(mean) < 1
    assert "train_rollouts/variety" in dashboard


def called(root: Path, *words: str, expect: int = 0) -> str:
    return run(root, "-m", "streamrl.ops.cli.main", *words, expect=expect)


def test_a_command_is_listed_and_runs(tmp_path: Path) -> None:
    root = followed("Add a command", tmp_path)
    lines = [{"step": step, "term": 1, "at": 0.0, "train_rollouts/rewards": step / 10} for step in range(1, 6)]
    folder = root / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [phrase for phrase in PAGE.read_text().split("`") if phrase.startswith("streamrl tail ")]
    assert len(shown) == 1
    words = shown[0].split()[1:]
    assert called(root, *words).split() == ["3", "0.3", "4", "0.4", "5", "0.5"]
    assert json.loads(called(root, *words, "--json")) == {"3": 0.3, "4": 0.4, "5": 0.5}
    assert "error: runs/mine: no step has recorded" in called(root, "tail", "runs/mine", "x", expect=2)
    assert "The last values of a metric." in called(root, "--help")
