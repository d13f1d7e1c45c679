"""Tasks of reasoning-gym, the package itself: as datasets, as a reward, and a run on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.demos.quickstart import write_base_model
from tests.own_packages import call, python_with, two_steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TASKS = ("chain_sum", "gcd", "word_sorting", "countdown", "decimal_arithmetic", "rearc")
# Wrong and right completions by the library's own extraction and judgement, and by our reward on our rows: once as an
# item of the library's, once as a row that has been through JSON.
COMPARED = """
import json, random, sys
import reasoning_gym
from reasoning_gym.utils import extract_answer
from streamrl.data.dataset import BETWEEN_SEEDS, Dataset
from streamrl.data.prompts import read_prompts
from streamrl.recipe.rewards import REWARDS

found = {}
for task in sys.argv[1:]:
    rows = read_prompts(Dataset(reasoning_gym=task, size=8, seed=3), malformed="error", key="data.train").rows
    theirs = reasoning_gym.create_dataset(task, size=8, seed=3 * BETWEEN_SEEDS)
    luck = random.Random(task)
    scores = []
    for row, item in zip(rows, theirs, strict=True):
        assert row.messages[-1]["content"] == item["question"]
        answer = item["answer"]
        for said in (
            f"It is <answer>{answer}</answer>.", f"<answer>1</answer> or rather <answer> {answer}\\n</answer>", answer,
            f"<answer>{answer} I think</answer>", f"<answer>{''.join(luck.sample(answer, len(answer)))}</answer>",
            "<answer></answer>", "<answer>[[1, 2]]</answer>", "",
        ):
            try:
                right = theirs.score_answer(extract_answer(said, "answer"), item)
            except Exception:
                right = 0.0
            scores.append((REWARDS["reasoning_gym"]("", said, [], row.fields), right))
    found[task] = scores
print(json.dumps(found))
"""
LENGTH = """
import sys
from streamrl.data.dataset import Dataset
from streamrl.data.prompts import read_prompts

dataset = Dataset(reasoning_gym="chain_sum", size=50, level=int(sys.argv[1]))
print(sum(len(row.fields["question"]) for row in read_prompts(dataset, malformed="error").rows))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("reasoning-gym==0.1.25")


def test_rewards_are_those_of_the_library_also_for_wrong_answers(python: Path, tmp_path: Path) -> None:
    compared = call(python, tmp_path, "-c", COMPARED, *TASKS)

    assert compared.returncode == 0, compared.stderr
    found = json.loads(compared.stdout)
    for task in TASKS:
        assert [ours for ours, _ in found[task]] == [theirs for _, theirs in found[task]], task
        assert max(theirs for _, theirs in found[task]) == 1.0
        assert min(theirs for _, theirs in found[task]) < 0.1, f"{task}: answers of both kinds"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("{reasoning_gym: chain_sm}", ("no such task", "'chain_sum'")),
        ("{reasoning_gym: gcd, level: 40}", ("level 40", "which is 3")),
        ("{reasoning_gym: gcd, options: {min_number: 2}}", ("no option 'min_number'", "min_numbers")),
        ("{reasoning_gym: gcd, options: {min_numbers: 9, max_numbers: 2}}", ("max_numbers",)),
        ("{reasoning_gym: acre, level: 1}", ("no curriculum",)),
    ],
)
def test_what_the_library_has_not_is_an_error_before_anything_starts(
    python: Path, tmp_path: Path, asked: str, words: tuple[str, ...]
) -> None:
    written = tmp_path / "tried.yaml"
    written.write_text(f"{{model: {{path: m}}, data: {{train: {asked}}}, environment: {{target: textarena}}}}")
    options = ("--data", str(written), "--completion", "a")
    tried = call(python, tmp_path, "-m", "streamrl.ops.cli.main", "reward", "try", "reasoning_gym", *options)

    assert tried.returncode == 2
    (line,) = tried.stderr.splitlines()
    assert all(word in line for word in words), line


def test_a_higher_level_of_the_curriculum_is_harder(python: Path, tmp_path: Path) -> None:
    easy, hard = (int(call(python, tmp_path, "-c", LENGTH, level).stdout) for level in ("0", "3"))

    assert hard > easy


def test_a_run_trains_on_it_and_loses_nothing(python: Path, tmp_path: Path) -> None:
    write_base_model(tmp_path / "base", seed=1, num_positions=512)
    written = """
data:
  train:
    sums: {reasoning_gym: chain_sum, size: 64, seed: 1, prompt: "{question}", options: {max_terms: 2}}
    divisors: {reasoning_gym: gcd, size: 32, level: 0, prompt: "{question}"}
  validation: {reasoning_gym: chain_sum, size: 4, seed: 2, prompt: question}
  max_prompt_tokens: 400
sampling: {num_samples: 2, max_tokens: 8}
rewards: {right: {type: function, target: reasoning_gym}}
training: {groups_per_step: 4}
validation: {max_prompts: 4, sampling: {max_tokens: 8}}
"""

    assert list(two_steps(python, tmp_path, written)["held_out"]) == ["right"]
